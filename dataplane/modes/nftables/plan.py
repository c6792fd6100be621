"""PURE. What must be written so that the kernel's table of one family is the service table's.

A plan remembers only what does not follow from an entry alone: which picking chains are in use, which elements several
entries share, what numbers were given. Elements of unchanged services are nowhere but in the kernel.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
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
    """What the kernel has: the skeleton, and for each set key -> value and comment."""

    skeleton: op.Skeleton
    contents: Mapping[str, dict[Key, tuple[Value, str]]]


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

    def __init__(
        self, family: Family, node: NodeNetwork, *, drop_invalid: bool = True, offload_packets: int = 0
    ) -> None:
        self.family = family
        self.offloads = offload_packets > 0
        self.structure = tables.structure(family, node, drop_invalid=drop_invalid, offload_packets=offload_packets)
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
            *add(sets, chains),
            *deletions(gone),
            *additions(made),
        ]

    def _elements(self, entries: Iterable[Entry], sign: int) -> Iterator[Element]:
        """The elements of entries, whose uses are counted or given back."""
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
        """Chains and sets that elements need now and that are not there yet."""
        wanted = [pick for pick, uses in self.users.items() if uses > 0 and pick not in self.picks]
        seconds = {pick.seconds for pick in wanted if pick.seconds} - self.seconds
        self.picks.update(wanted)
        self.seconds |= seconds
        return [pick_chain(self.family, pick) for pick in wanted], [tables.clients_set(s) for s in sorted(seconds)]

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
        yield from self._ruleset().create(replace=replace)
        yield from additions(self.always)
        waiting = iter(services)
        while chunk := tuple(itertools.islice(waiting, CHUNK)):
            elements = {(e.set, e.key): e for entries in chunk for e in self._elements(entries, 1)}
            chains, sets = self._new_picks()
            yield from add(sets, chains)
            yield from additions(elements.values())

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
        self._new_picks()
        ruleset = self._ruleset()
        return [
            *ruleset.repair(found.skeleton),
            *deletions(gone),
            *additions(made),
            *ruleset.remove_foreign(found.skeleton),
        ]

    def _of_service(self, entries: tuple[Entry, ...]) -> Iterator[Element]:
        return self._elements(entries, 1)

    def repair(self, skeleton: op.Skeleton) -> list[op.Operation]:
        """Repair chains, rules, sets and counters: little to read, quick to write. Elements are not looked at."""
        return self._ruleset().repair(skeleton)

    def irreparable(self, skeleton: op.Skeleton) -> str:
        """Why the kernel's table must be replaced as a whole; empty: it can be turned into ours."""
        sets = tuple(wanted for name in skeleton.sets if (wanted := tables.set_named(name)))
        return self._ruleset()._replace(sets=sets).irreparable(skeleton)

    def _ruleset(self) -> Ruleset:
        """What is wanted now, with the picking chains in use and the sets of affinity."""
        sets = [*tables.SETS.values(), *map(tables.clients_set, sorted(self.seconds))]
        picks = (pick_chain(self.family, pick) for pick in self.picks)
        flowtables: tuple[str, ...] = ()
        if self.offloads:
            sets.append(tables.OFFLOAD_SET)
            flowtables = (tables.FLOWTABLE,)
        return Ruleset(self.family, tables.COUNTERS, tuple(sets), (*self.structure, *picks), flowtables)


def follow(interfaces: Mapping[int, str], at: Collection[str], listed: Collection[int]) -> list[op.Operation]:
    """Have the flowtable be at these interfaces, index -> name, instead of `at` those; `listed` are in its set."""
    names = set(interfaces.values())
    gone = [(tables.OFFLOAD_INTERFACES, (index,)) for index in listed if index not in interfaces]
    made = [Element(tables.OFFLOAD_INTERFACES, (index,)) for index in interfaces if index not in listed]
    operations: list[op.Operation] = []
    if added := names.difference(at):
        operations.append(op.AddFlowtable(tables.FLOWTABLE, tuple(sorted(added))))
    if removed := set(at) - names:
        operations.append(op.DeleteInterfaces(tables.FLOWTABLE, tuple(sorted(removed))))
    return [*operations, *deletions(gone), *additions(made)]


def _names(entries: Iterable[Entry]) -> Iterator[str]:
    """All names that `lower.elements` gives numbers to."""
    for entry in entries:
        if entry.affinity_seconds:
            yield lower.number_name(entry)
            for route in entry.backend_sets:
                yield from (lower.number_name(entry, backend) for backend in route.backends)
