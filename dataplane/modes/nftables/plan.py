"""PURE. Plans the operations that make the kernel's table of one family equal the service table's.

A plan remembers only what does not follow from an entry alone: which picking chains are in use, which elements several
entries share, which numbers were assigned. Elements of unchanged services are stored only in the kernel.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.modes.nftables import lower, tables
from hybrid_proxy.dataplane.modes.nftables.picks import Pick, pick_chain
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables.expressions import Family, Verdict
from hybrid_proxy.dataplane.nftables.ruleset import Ruleset, add, additions, deletions
from hybrid_proxy.dataplane.nftables.schema import Chain, Element, Key, Set, Value
from hybrid_proxy.dataplane.table import Entry, NodeNetwork

CHUNK: Final = 500  # services that are lowered before their elements are encoded and forgotten


class Installed(NamedTuple):
    """The kernel's table: the skeleton, and for each set key -> value and comment."""

    skeleton: op.Skeleton
    contents: Mapping[str, dict[Key, tuple[Value, str]]]


class Numbers:
    """Assigns a number to each name, the same in every process as long as no two names hash to one."""

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
        """Release the numbers of old names that are not among the new ones."""
        for name in set(old) - set(new):
            number = self._of.pop(name, None)
            if number is not None:
                del self._owner[number]


class Plan:
    """The table of one family, wanted and written."""

    def __init__(self, family: Family, node: NodeNetwork, *, drop_invalid: bool = True) -> None:
        self.family = family
        self.structure = tables.structure(family, node, drop_invalid=drop_invalid)
        self.always = lower.node_elements(family, node)
        self.numbers = Numbers()
        self.shared: Counter[Element] = Counter()
        self.users: Counter[Pick] = Counter()
        self.picks: set[Pick] = set()  # chains that are written
        self.seconds: set[int] = set()  # affinity times that have their set

    # A change

    def change(self, before: Iterable[Entry], after: Iterable[Entry]) -> list[op.Operation]:
        """Replace these entries by those, and compare nothing else."""
        before, after = tuple(before), tuple(after)
        old = {(e.set, e.key): e for e in self._elements(before, -1)}
        new = {(e.set, e.key): e for e in self._elements(after, 1)}
        self.numbers.keep(_names(before), _names(after))
        gone = [place for place, element in old.items() if new.get(place) != element]
        made = [element for place, element in new.items() if old.get(place) != element]
        chains, sets = self._new_picks()
        return [*add(sets, chains), *deletions(gone), *additions(made)]

    def _elements(self, entries: Iterable[Entry], sign: int) -> Iterator[Element]:
        """Returns the elements of entries, and counts their uses up or down."""
        for entry in entries:
            for element in lower.elements(entry, self.numbers):
                value = element.value
                if isinstance(value, Verdict) and isinstance(value.chain, Pick):
                    self.users[value.chain] += sign
                yield element
            for element in lower.shared(entry):
                self.shared[element] += sign
                if self.shared[element] == max(0, sign):  # the first one, or none any more
                    yield element
                if not self.shared[element]:
                    del self.shared[element]

    def _new_picks(self) -> tuple[list[Chain], list[Set]]:
        """Adds chains and sets that elements need now and that do not exist yet."""
        wanted = [pick for pick, uses in self.users.items() if uses > 0 and pick not in self.picks]
        seconds = {pick.seconds for pick in wanted if pick.seconds} - self.seconds
        self.picks.update(wanted)
        self.seconds |= seconds
        return [pick_chain(self.family, pick) for pick in wanted], [tables.clients_set(s) for s in sorted(seconds)]

    def idle(self) -> list[Pick]:
        """Returns the picking chains that nothing leads to any more."""
        return [pick for pick in self.picks if not self.users.get(pick)]

    def forget(self, picks: Iterable[Pick]) -> None:
        """Note that these chains were removed."""
        for pick in picks:
            self.picks.discard(pick)
            self.users.pop(pick, None)

    # Everything

    def fill(self, services: Iterable[tuple[Entry, ...]], *, replace: bool) -> Iterator[op.Operation]:
        """Create the table, or replace the existing one."""
        yield from self.ruleset().create(replace=replace)
        yield from additions(self.always)
        waiting = iter(services)
        while chunk := tuple(itertools.islice(waiting, CHUNK)):
            elements = {(e.set, e.key): e for entries in chunk for e in self._elements(entries, 1)}
            chains, sets = self._new_picks()
            yield from add(sets, chains)
            yield from additions(elements.values())

    def adopt(self, services: Iterable[tuple[Entry, ...]], found: Installed) -> list[op.Operation]:
        """Turn the existing table into the wanted one, changing only differences; empties `found`."""
        made, gone = [], []
        for group in itertools.chain((self.always,), (self._elements(entries, 1) for entries in services)):
            for place, element in {(e.set, e.key): e for e in group}.items():
                held = found.contents.get(element.set, {}).pop(element.key, None)
                if held == (element.value, element.comment):
                    continue
                made.append(element)
                if held is not None:
                    gone.append(place)
        gone += [(name, key) for name, left in found.contents.items() for key in left]
        self._new_picks()
        ruleset = self.ruleset()
        return [
            *ruleset.repair(found.skeleton),
            *deletions(gone),
            *additions(made),
            *ruleset.remove_foreign(found.skeleton),
        ]

    def irreparable(self, skeleton: op.Skeleton) -> str:
        """Says why the kernel's table must be replaced as a whole; empty: it can be turned into ours."""
        sets = tuple(wanted for name in skeleton.sets if (wanted := tables.set_named(name)))
        return self.ruleset()._replace(sets=sets).irreparable(skeleton)

    def ruleset(self) -> Ruleset:
        """Returns what is wanted now, with the picking chains in use and the sets of affinity."""
        sets = [*tables.SETS.values(), *map(tables.clients_set, sorted(self.seconds))]
        picks = (pick_chain(self.family, pick) for pick in self.picks)
        return Ruleset(self.family, tables.COUNTERS, tuple(sets), (*self.structure, *picks))


def _names(entries: Iterable[Entry]) -> Iterator[str]:
    """All names that `lower.elements` gives numbers to."""
    for entry in entries:
        if entry.affinity_seconds:
            yield lower.number_name(entry)
            for route in entry.backend_sets:
                yield from (lower.number_name(entry, backend) for backend in route.backends)
