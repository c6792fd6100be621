"""PURE. What must be written so that the kernel's table of one family is the service table's.

A plan remembers only what an entry does not tell by itself: which picking chains are in use, which elements several
entries share, what numbers were given. Elements of unchanged services are nowhere but in the kernel.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from dataplane.modes.nftables import lower
from dataplane.modes.nftables import operations as op
from dataplane.modes.nftables.lower import Chain, Element, Family, Key, Pick, Set
from dataplane.table import Entry, NodeNetwork

__all__ = ["Installed", "Plan", "describe"]

CHUNK: Final = 500  # services that are lowered before their elements are encoded and forgotten

ElementKey = tuple[str, Key]


class Installed(NamedTuple):
    """What the kernel has: the skeleton, and for each set key -> value and comment."""

    skeleton: op.Skeleton
    contents: Mapping[str, dict[Key, tuple[op.Value, str]]]


class Numbers:
    """A number for each name, the same in every process as long as no two names want one."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._owner: dict[int, str] = {}

    def __call__(self, name: str) -> int:
        found = self._of.get(name)
        if found is None:
            found = zlib.crc32(name.encode())
            while found == 0 or found in self._owner:
                found = (found + 1) & 0xFFFFFFFF
            self._of[name], self._owner[found] = found, name
        return found

    def keep(self, old: Iterable[str], new: Iterable[str]) -> None:
        """Give back the numbers of old names that are not among the new ones."""
        for name in set(old) - set(new):
            number = self._of.pop(name, None)
            if number is not None:
                del self._owner[number]


class Plan:
    """The table of one family, as it is wanted or written."""

    def __init__(self, family: Family, node: NodeNetwork, *, drop_invalid: bool = True) -> None:
        self.family = family
        self.structure = lower.structure(family, node, drop_invalid=drop_invalid)
        self.always = lower.node_elements(family, node)
        self.numbers = Numbers()
        self.shared: Counter[Element] = Counter()
        self.users: Counter[Pick] = Counter()
        self.picks: set[Pick] = set()  # chains that are written
        self.seconds: set[int] = set()  # affinity times that have their set

    # A change

    def change(self, before: Iterable[Entry], after: Iterable[Entry]) -> list[op.Operation]:
        """Replace these entries by those; nothing else is looked at."""
        before, after = tuple(before), tuple(after)
        old = {(e.set, e.key): e for e in self._elements(before, -1)}
        new = {(e.set, e.key): e for e in self._elements(after, 1)}
        self.numbers.keep(_names(before), _names(after))
        gone = [place for place, element in old.items() if new.get(place) != element]
        made = [element for place, element in new.items() if old.get(place) != element]
        chains, sets = self._new_picks()
        return [
            *(op.AddSet(wanted) for wanted in sets),
            *(op.AddChain(chain) for chain in chains),
            *(op.AddRules(chain.name, chain.rules) for chain in chains),
            *_deletions(gone),
            *_additions(made),
        ]

    def _elements(self, entries: Iterable[Entry], sign: int) -> Iterator[Element]:
        """The elements of entries, whose uses are counted or given back."""
        for entry in entries:
            for element in lower.elements(entry, self.numbers):
                pick = lower.chain_of(element.value) if element.value.__class__ is str else None
                if pick is not None:
                    self.users[pick] += sign
                yield element
            for element in lower.shared(entry):
                self.shared[element] += sign
                if self.shared[element] == max(0, sign):  # the first one, or none any more
                    yield element
                if not self.shared[element]:
                    del self.shared[element]

    def _new_picks(self) -> tuple[list[Chain], list[Set]]:
        """Chains and sets that elements need now and that are not there yet."""
        wanted = [pick for pick, uses in self.users.items() if uses > 0 and pick not in self.picks]
        seconds = {pick.seconds for pick in wanted if pick.seconds} - self.seconds
        self.picks.update(wanted)
        self.seconds |= seconds
        return [lower.pick_chain(self.family, pick) for pick in wanted], [lower.clients_set(s) for s in sorted(seconds)]

    def idle(self) -> list[Pick]:
        """Picking chains that nothing leads to any more."""
        return [pick for pick in self.picks if not self.users.get(pick)]

    def forget(self, picks: Iterable[Pick]) -> None:
        """These chains are removed."""
        for pick in picks:
            self.picks.discard(pick)
            self.users.pop(pick, None)

    # Everything

    def fill(self, services: Iterable[tuple[Entry, ...]], *, replace: bool) -> Iterator[op.Operation]:
        """A table made from nothing, or in place of the one that is there."""
        if replace:
            yield op.AddTable()  # deleting needs one that is there
            yield op.DeleteTable()
        yield op.AddTable()
        yield from (op.AddCounter(name) for name in lower.COUNTERS)
        yield from (op.AddSet(wanted) for wanted in lower.SETS.values())
        yield from (op.AddChain(chain) for chain in self.structure)
        yield from (op.AddRules(chain.name, chain.rules) for chain in self.structure)
        yield from _additions(self.always)
        waiting = iter(services)
        while chunk := tuple(itertools.islice(waiting, CHUNK)):
            elements = {(e.set, e.key): e for entries in chunk for e in self._elements(entries, 1)}
            chains, sets = self._new_picks()
            yield from (op.AddSet(wanted) for wanted in sets)
            yield from (op.AddChain(chain) for chain in chains)
            yield from (op.AddRules(chain.name, chain.rules) for chain in chains)
            yield from _additions(elements.values())

    def adopt(self, services: Iterable[tuple[Entry, ...]], found: Installed) -> list[op.Operation]:
        """Turn what is there into what is wanted, touching only what differs; what `found` holds is used up."""
        made, gone = [], []
        for group in itertools.chain((self.always,), map(self._of_service, services)):
            for place, element in {(e.set, e.key): e for e in group}.items():
                held = found.contents.get(element.set, {}).pop(element.key, None)
                if held == (element.value, element.comment):
                    continue
                made.append(element)
                if held is not None:
                    gone.append(place)
        gone += [(name, key) for name, left in found.contents.items() for key in left]
        skeleton = found.skeleton
        chains, sets = self._new_picks()
        chains, sets = [*self.structure, *chains], [*lower.SETS.values(), *sets]
        known = {chain.name for chain in chains}
        stale = [name for name in skeleton.chains if name not in known]
        absent = [chain for chain in chains if chain.name not in skeleton.chains]
        other = [c for c in chains if skeleton.chains.get(c.name, c.marks) != c.marks]
        wanted = {one.name for one in sets}
        return [
            *(op.AddCounter(name) for name in lower.COUNTERS if name not in skeleton.counters),
            *(op.AddSet(one) for one in sets if one.name not in skeleton.sets),
            *(op.AddChain(chain) for chain in absent),
            *(op.FlushChain(name) for name in (*(c.name for c in other), *stale)),
            *(op.AddRules(chain.name, chain.rules) for chain in (*other, *absent)),
            *_deletions(gone),
            *_additions(made),
            *(op.DeleteChain(name) for name in stale),
            *(op.DeleteSet(name) for name in skeleton.sets if name not in wanted),
        ]

    def _of_service(self, entries: tuple[Entry, ...]) -> Iterator[Element]:
        return self._elements(entries, 1)

    def mend(self, skeleton: op.Skeleton) -> list[op.Operation]:
        """Put chains, rules, sets and counters right: little to read, quick to write. Elements are not looked at."""
        picks = [lower.pick_chain(self.family, pick) for pick in self.picks]
        sets = [*lower.SETS.values(), *(lower.clients_set(seconds) for seconds in self.seconds)]
        chains = [*self.structure, *picks]
        absent = [chain for chain in chains if chain.name not in skeleton.chains]
        other = [chain for chain in chains if skeleton.chains.get(chain.name, chain.marks) != chain.marks]
        return [
            *(op.AddCounter(name) for name in lower.COUNTERS if name not in skeleton.counters),
            *(op.AddSet(one) for one in sets if one.name not in skeleton.sets),
            *(op.AddChain(chain) for chain in absent),
            *(op.FlushChain(chain.name) for chain in other),
            *(op.AddRules(chain.name, chain.rules) for chain in (*other, *absent)),
        ]

    def unlike(self, skeleton: op.Skeleton) -> str:
        """Why what is there cannot be turned into ours bit by bit: it must be replaced as a whole. Empty: it can."""
        hooks = {chain.name for chain in self.structure if chain.hook}
        for name, ours in skeleton.hooks.items():
            if name in hooks and not ours:
                return f"chain {name} hangs elsewhere"
        for name in hooks & skeleton.chains.keys() - skeleton.hooks.keys():
            return f"chain {name} hangs nowhere"
        return next((f"set {name} is of another kind" for name, held in skeleton.sets.items() if not held), "")


def describe(operations: Iterable[op.Operation]) -> str:
    """What a repair puts right, for a log."""
    told: list[str] = []
    for operation in operations:
        match operation:
            case op.AddTable():
                told.append("the table")
            case op.AddSet(wanted):
                told.append(f"set {wanted.name}")
            case op.AddChain(chain):
                told.append(f"chain {chain.name}")
            case op.FlushChain(name):
                told.append(f"rules of {name}")
            case op.AddElements(name, elements):
                told.append(f"{len(elements)} elements of {name}")
            case op.DeleteElements(name, keys):
                told.append(f"{len(keys)} foreign or wrong elements of {name}")
            case op.AddCounter(name):
                told.append(f"counter {name}")
            case op.DeleteSet(name):
                told.append(f"foreign set {name}")
            case _:
                pass
    return ", ".join(told[:8]) + (f" and {len(told) - 8} more" if len(told) > 8 else "")


def _names(entries: Iterable[Entry]) -> Iterator[str]:
    """All names that `lower.elements` gives numbers to."""
    for entry in entries:
        if entry.affinity_seconds:
            yield lower.number_name(entry)
            for route in entry.backend_sets:
                yield from (lower.number_name(entry, backend) for backend in route.backends)


def _additions(elements: Iterable[Element]) -> Iterator[op.Operation]:
    by_set: dict[str, list[Element]] = {}
    for element in elements:
        by_set.setdefault(element.set, []).append(element)
    return (op.AddElements(name, made) for name, made in by_set.items())


def _deletions(places: Iterable[ElementKey]) -> Iterator[op.Operation]:
    by_set: dict[str, list[Key]] = {}
    for name, key in places:
        by_set.setdefault(name, []).append(key)
    return (op.DeleteElements(name, keys) for name, keys in by_set.items())
