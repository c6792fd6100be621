"""PURE. Plans what to write so that the maps hold what the table says: rows and pools in, a `Batch` out.

A service port is lowered once. Then its ids and slots are allocated, so that a full map leaves nothing half planned,
and then the rows that differ are listed. What is in a batch counts as installed from then on. So the caller writes
every batch, in the order of planning, and defers what each removes: only then can ids and slots be reused.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from hybrid_proxy.dataplane.balancing import Spread, ring_of
from hybrid_proxy.dataplane.balancing.maglev import SIZES
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import (
    NONE_IN_USE,
    SETTINGS,
    FullError,
    InUse,
    Pools,
    Removed,
    size_class,
)
from hybrid_proxy.dataplane.modes.ebpf.services.ejections import Ejection
from hybrid_proxy.dataplane.modes.ebpf.services.lower import (
    BACKEND_SETS,
    FRONTEND_ADDRESS,
    NO_EJECTIONS,
    FrontendRow,
    Key,
    Rows,
    Socket,
    lower,
)
from hybrid_proxy.dataplane.reports import Unprogrammed
from hybrid_proxy.dataplane.slow_start import NO_PARTS, Parts, slowed
from hybrid_proxy.dataplane.stale import Gone, removed_endpoints
from hybrid_proxy.dataplane.table import Backend, Entry, EntryKey, service_of

Subject = tuple[EntryKey, Socket]  # a backend of a service port
Ring = tuple[int, int, Sequence[int]]  # offset of its slots, service, backend ids


class Installed(msgspec.Struct, frozen=True, gc=False):
    """A service port as the maps have it.

    `ids` are those of `rows.members`, in that order. `rings` has the backend ids in the slots of each backend set, and
    `ranges` the offset and size of these slots; size 0: the ring is a prefix of the first one, and shares its slots.
    """

    entry: Entry
    rows: Rows
    service: int
    ids: array[int]
    rings: tuple[array[int], ...]
    ranges: tuple[tuple[int, int], ...]
    epoch: int
    ejections: Mapping[Socket, Ejection] = NO_EJECTIONS
    parts: Parts = NO_PARTS  # of the weights of backends that start slowly

    @property
    def numbers(self) -> dict[Socket, int]:
        """The ids of its backends."""
        return {(b.address, b.port): number for number, b in zip(self.ids, self.rows.members, strict=True)}


class Adopted(NamedTuple):
    """The numbers of a service port that the previous agent installed; the fields are those of `Installed`."""

    service: int
    numbers: dict[Socket, int]
    rings: tuple[array[int], ...]
    ranges: tuple[tuple[int, int], ...]
    epoch: int


class Members(NamedTuple):
    """New rows for backends of one service port; `kind` is family | protocol << 8."""

    service: int
    kind: int
    ids: Sequence[int]
    backends: Sequence[Backend]
    flags: Sequence[int]


@dataclass(slots=True)
class Batch:
    """Everything that one change writes to the maps."""

    members: list[Members] = field(default_factory=list)
    flags: list[tuple[int, int]] = field(default_factory=list)  # of backends that change nothing else: id, flags
    weights: list[tuple[int, int]] = field(default_factory=list)  # of backends whose open flows are counted: id, weight
    rings: list[Ring] = field(default_factory=list)
    services: list[tuple[int, int, int]] = field(default_factory=list)  # id, flags, affinity in seconds
    words: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # service, set, offset, count, epoch
    frontends: dict[Key, tuple[int, int]] = field(default_factory=dict)  # service, flags
    new_frontends: list[Key] = field(default_factory=list)  # those of them that no service had, for the prefilter
    source_ranges: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)  # service, family, CIDRs
    gone: Removed = field(default_factory=Removed)
    published: bool = False  # memory is written; what is left are system calls
    again: bool = False  # the maps had all of it, and the prefilter has its bits
    late_frontends: list[Key] = field(default_factory=list)  # for which there was no room before others went


_ADDRESS = (0, FRONTEND_ADDRESS)  # an entry of no service, for an address


class Rings(NamedTuple):
    """Bounds of rings.

    `each` is how many slots an algorithm may fill for one backend set. `all` is the bound of the map of slots: as long
    as the map is smaller, no ring is cut.
    """

    each: int = Options().ebpf.limits.ring
    all: int = 0


RINGS: Final = Rings()


class Plan:
    """Knows the service ports in the maps and the ids and slots that they use, and plans changes of them.

    Args:
        sizes: entries of each map by name.
        used: ids and slots that the previous agent handed out.
        adopt: finds what the previous agent installed for a service port; None: there was no agent.
        stamp: number of the last grace period that was needed.
    """

    def __init__(
        self, sizes: Mapping[str, int], used: InUse = NONE_IN_USE,
        adopt: Callable[[Rows], Adopted | None] | None = None, rings: Rings = RINGS, stamp: int = 0,
    ) -> None:  # fmt: skip
        self.pools = Pools(sizes, used, stamp)
        self.adopt = adopt
        self.rings = rings
        self.installed: dict[str, tuple[Installed, ...]] = {}
        self.by_id: dict[int, Installed] = {}
        self.renumbered = True  # service ports came or went
        self.unprogrammed: dict[EntryKey, Unprogrammed] = {}
        self.unfit: dict[str, set[EntryKey]] = {}  # by service, the ports in `unprogrammed`
        self.full: set[str] = set()  # maps that may grow for which something did not fit since this was emptied
        self.cut: dict[EntryKey, tuple[int, int]] = {}  # slots of the largest ring, and those it should have
        self.counts_flows: set[int] = set()  # ids of the services whose open flows are counted by backend
        self.removed_endpoints: list[tuple[int, Gone]] = []  # whose connections are to be reset, with the service's id
        self.probes_changed: set[str] = set()  # services whose probes may be others since this was emptied
        self.ejections: dict[EntryKey, dict[Socket, Ejection]] = {}
        self.parts: Mapping[EntryKey, Parts] = {}  # of the weights of backends that start slowly
        self.owners: dict[Key, int] = {}  # the service of each frontend
        self.addresses: Counter[tuple[int, str]] = Counter()  # how many frontends close an address
        self._slowed: set[EntryKey] = set()  # installed with parts of weights
        self._recount = False  # some of `counts_flows` are new
        self._cut_rings = False  # even if the map of slots is smaller than its bound

    def retry(self, *, cut_rings: bool = False) -> None:
        """Forget which maps are full, to try again what did not fit. `cut_rings`: the map of slots cannot grow now."""
        self.full.clear()
        self._cut_rings = cut_rings

    def needs_recount(self) -> bool:
        """Returns True once after service ports whose open flows are counted were added."""
        needs, self._recount = self._recount, False
        return needs

    @property
    def adjusted(self) -> bool:
        """True if there are ejections, or backends with a part of their weight."""
        return bool(self.ejections or self._slowed)

    def find(self, key: EntryKey) -> Installed | None:
        return next((known for known in self.installed.get(service_of(key), ()) if known.entry.key == key), None)

    def rows_of(self, services: Iterable[int]) -> Batch:
        """Returns the rows that the maps have of these services; without weights and source ranges."""
        batch = Batch(again=True)
        for port in filter(None, map(self.by_id.get, services)):
            kind, settings = port.entry.family | int(port.entry.protocol) << 8, port.rows.settings
            batch.members.append(Members(port.service, kind, port.ids, port.rows.members, port.rows.flags))
            rings = zip(port.rings, port.ranges, strict=True)
            batch.rings += [(offset, port.service, ring) for ring, (offset, size) in rings if size]
            batch.services.append((port.service, settings.flags, settings.affinity_seconds))
            for key, flags, closed in settings.frontends:
                if closed:
                    batch.frontends[*key[:2], 0, 0] = _ADDRESS
                if self.owners.get(key) == port.service:
                    batch.frontends[key] = (port.service, flags)
        return batch

    # Changes

    def change(self, batch: Batch, name: str, entries: Sequence[Entry]) -> tuple[int, int]:
        """Replace the ports of one service. Returns how many change and how many are removed.

        Raises:
            ValueError: an entry cannot be lowered. Nothing was planned.
        """
        if name not in self.installed and name not in self.unfit and len(entries) == 1:
            return self._begin(batch, name, entries[0]), 0
        refused = self.unfit.get(name, ())
        known = {port.entry.key: port for port in self.installed.get(name, ())}
        wanted: dict[EntryKey, tuple[Entry, Rows | None]] = {}
        for entry in entries:
            key = entry.key
            old = known.get(key)
            same = old is not None and old.entry is entry and key not in refused
            if same:
                wanted[key] = entry, None
            elif self.parts or self.ejections:
                wanted[key] = entry, self._adjusted_rows(entry)
            else:
                wanted[key] = entry, lower(entry, former=None if old is None else (old.entry, old.rows.settings))
        for key in self.unfit.pop(name, ()):
            del self.unprogrammed[key]
        gone = [port for key, port in known.items() if key not in wanted]
        for port in gone:
            self._remove(batch, port)
        changed, after = 0, list[Installed]()
        for key, (entry, rows) in wanted.items():
            old = known.get(key)
            if rows is not None:
                moved = old is not None and old.rows.settings.frontends != rows.settings.frontends
                if old is not None and moved and not _share_a_frontend(old.rows, rows):
                    self._remove(batch, old)  # another service by this name: flows to the former one may stay
                    old = None
                try:
                    old = self._port(batch, key, entry, rows, old)
                    changed += 1
                except FullError as error:
                    self._refuse(name, key, error)
            if old is not None:
                after.append(old)
        if after:
            self.installed[name] = tuple(after)
        else:
            self.installed.pop(name, None)
        return changed, len(gone)

    def _begin(self, batch: Batch, name: str, entry: Entry) -> int:
        """Add a service with one port that is not in the maps: the short way for nearly all at a start."""
        key = entry.key
        rows = self._adjusted_rows(entry) if self.parts or self.ejections else lower(entry)
        try:
            self.installed[name] = (self._port(batch, key, entry, rows, None),)
        except FullError as error:
            self._refuse(name, key, error)
            return 0
        return 1

    def adjust(self, batch: Batch, ejections: Mapping[Subject, Ejection], parts: Mapping[EntryKey, Parts]) -> None:
        """Eject these backends, and readmit all others, as far as each backend set can do without them.

        Scale the weights of the backends in slow start; reset all others.
        """
        wanted: dict[EntryKey, dict[Socket, Ejection]] = {}
        for (key, socket), ejection in ejections.items():
            wanted.setdefault(key, {})[socket] = ejection
        former, self.ejections, self.parts = self.ejections, wanted, parts
        for key in {*former, *wanted, *self._slowed, *parts}:
            known = self.find(key)
            if known is None or (
                known.ejections == wanted.get(key, NO_EJECTIONS) and known.parts == parts.get(key, NO_PARTS)
            ):
                continue
            try:
                self._replace(known, self._port(batch, key, known.entry, self._adjusted_rows(known.entry), known))
            except FullError:  # its old slots may still wait to be freed
                self.ejections[key] = dict(known.ejections)

    def _adjusted_rows(self, entry: Entry) -> Rows:
        """Lower a service port without its ejected backends, and with the present weights of those in slow start."""
        key = entry.key
        return lower(slowed(entry, self.parts.get(key, NO_PARTS)), self.ejections.get(key, NO_EJECTIONS))

    # One service port

    def _port(self, batch: Batch, key: EntryKey, entry: Entry, rows: Rows, old: Installed | None) -> Installed:
        """Allocate every id and slot first, so that a full map leaves nothing half planned; then list the rows.

        Raises:
            FullError: a map has no room. Nothing was planned.
        """
        same_settings = old is not None and old.rows.settings == rows.settings
        if not same_settings:  # old and new ones must fit together: new ones are added before old ones go
            settings, former = rows.settings, None if old is None else old.rows.settings
            # Each frontend may need an entry for its address, too.
            frontends, ranges = 2 * len(settings.frontends), len(settings.source_ranges)
            if former is not None:
                frontends *= settings.frontends != former.frontends
                ranges *= settings.source_ranges != former.source_ranges
            self.pools.check_room(entry.family, frontends, ranges)
        # A port that a former process installed keeps its numbers. All of its rows are written again.
        before = self.adopt(rows) if old is None and self.adopt is not None else old
        port = self._numbered(key, entry, rows, before)
        _list_backends(batch, port, None if before is None else before.ranges, old)
        if not same_settings or any(self.owners.get(row[0]) != port.service for row in rows.settings.frontends):
            self._list_settings(batch, port, old)
        if self.counts_flows or rows.settings.algorithm.spread is Spread.FEWEST:
            self._count_flows(batch, port, old)
        if entry.probe is not None or (old is not None and old.entry.probe is not None):
            self.probes_changed.add(service_of(key))
        if entry.present is not None and old is not None:
            self.removed_endpoints += [(port.service, gone) for gone in removed_endpoints(old.entry, entry)]
        self.by_id[port.service] = port
        self.renumbered |= old is None
        return port

    def _numbered(self, key: EntryKey, entry: Entry, rows: Rows, before: Installed | Adopted | None) -> Installed:
        """Allocate a service port's ids and slots. It keeps its own id, and the ids of the backends that it has."""
        pools = self.pools
        if before is None:
            (service,), numbers = pools.services.take(1), [0] * len(rows.members)
        else:
            service, known = before.service, before.numbers
            numbers = [known.pop((backend.address, backend.port), 0) for backend in rows.members]
        new: Sequence[int] = ()
        try:
            new = pools.backends.take(numbers.count(0))
            if len(new) == len(numbers):
                ids = array("I", new)
            else:
                fresh = iter(new)
                ids = array("I", [number or next(fresh) for number in numbers])
            rings, ranges = self._take_slots(key, rows, ids, before)
        except FullError:
            pools.backends.give(new)
            if before is None:
                pools.services.give((service,))
            raise
        epoch = 1 if before is None else before.epoch + (ranges is not before.ranges)
        parts, ejections = self.parts.get(key, NO_PARTS), self.ejections.get(key, NO_EJECTIONS)
        (self._slowed.add if parts else self._slowed.discard)(key)
        return Installed(entry, rows, service, ids, rings, ranges, epoch, ejections, parts)

    def _count_flows(self, batch: Batch, port: Installed, old: Installed | None) -> None:
        """Count the open flows of this service port, if its algorithm asks for that, and write its weights."""
        counted = port.rows.settings.algorithm.spread is Spread.FEWEST
        if not counted:
            self.counts_flows.discard(port.service)
            return
        former: dict[int, Backend] = {}
        if old is not None and port.service in self.counts_flows:
            former = dict(zip(old.ids, old.rows.members, strict=True))
        self._recount = self._recount or not former
        self.counts_flows.add(port.service)
        batch.weights += [
            (number, backend.weight) for number, backend in zip(port.ids, port.rows.members, strict=True)
            if number not in former or former[number].weight != backend.weight
        ]  # fmt: skip

    def _take_slots(
        self, key: EntryKey, rows: Rows, ids: array[int], before: Installed | Adopted | None
    ) -> tuple[tuple[array[int], ...], tuple[tuple[int, int], ...]]:
        """Returns rings of backend ids, and slots for them: the present slots, where the rings are the same.

        If there are too few slots for the ring that the algorithm asks for, and `rings.all` is reached, the ring is
        cut, at last to one slot for each backend. The full ring is tried again when the service port changes.

        Raises:
            FullError: there is no room for that either.
        """
        self.cut.pop(key, None)
        if rows.plain:  # nearly always: there is nothing to arrange
            same = before is not None and before.rings == (ids,)
            return (ids,), before.ranges if before is not None and same else (self.pools.slots.take(len(ids)),)
        algorithm = rows.settings.algorithm
        limit, wanted, plain = self.rings.each, 0, max(map(len, rows.sets), default=0)
        while True:
            rings = []
            for members in rows.sets:
                places = ring_of(algorithm, [rows.members[member] for member in members], limit)
                rings.append(array("I", [ids[members[place]] for place in places]))
            largest = max(map(len, rings), default=0)
            wanted = wanted or largest
            if before is not None and rings == [*before.rings]:
                ranges = before.ranges
                break
            try:
                if sum(map(len, rings)) > sum(map(len, rows.sets)):
                    self._check_reserve(rings, rows.sets)
                ranges = self._allocate(rings)
                break
            except FullError:
                if largest == plain or (self.pools.slots.limit < self.rings.all and not self._cut_rings):
                    raise
                limit = max((size for size in SIZES if size < min(limit, largest)), default=0)
        if largest < wanted:
            self.cut[key] = (largest, wanted)
        return tuple([ids if ring == ids else ring for ring in rings]), ranges  # the same array is kept once

    def _check_reserve(self, rings: Sequence[Sequence[int]], sets: Sequence[Sequence[int]]) -> None:
        """Keep a quarter of all slots for rings that have one slot for each backend."""
        slots = sum(size_class(len(ring)) for ring in rings)
        needed = sum(size_class(len(backends)) for backends in sets)
        pool = self.pools.slots
        if slots > needed and pool.in_use + slots > pool.limit * 3 // 4:
            raise FullError(pool.name, pool.limit)

    def _allocate(self, rings: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
        """Allocate slots for the rings; a ring that is a prefix of the first one shares its slots."""
        ranges: list[tuple[int, int]] = []
        try:
            for position, ring in enumerate(rings):
                shares = position and ring == rings[0][: len(ring)]
                ranges.append((ranges[0][0], 0) if shares else self.pools.slots.take(len(ring)))
        except FullError:
            for offset, size in ranges:
                self.pools.slots.give(offset, size)
            raise
        return tuple(ranges)

    def _list_settings(self, batch: Batch, port: Installed, old: Installed | None) -> None:
        """Plan what differs besides backends: flags, affinity, source ranges, frontends."""
        service, family, settings = port.service, port.entry.family, port.rows.settings
        former = None if old is None else old.rows.settings
        if former is None or (settings.flags, settings.affinity_seconds) != (former.flags, former.affinity_seconds):
            batch.services.append((service, settings.flags, settings.affinity_seconds))
        ranges_before = () if former is None else former.source_ranges
        if settings.source_ranges != ranges_before:
            batch.source_ranges.append((service, family, settings.source_ranges))
            batch.gone.source_ranges[family] += len(ranges_before)
            self.pools.source_ranges[family] += len(settings.source_ranges)
        if not settings.frontends:
            batch.gone.bare.append(service)
        self._change_frontends(batch, service, () if former is None else former.frontends, settings.frontends)

    def _change_frontends(
        self, batch: Batch, service: int, old: Sequence[FrontendRow], new: Sequence[FrontendRow]
    ) -> None:
        """Plan frontends. Another service may have taken a removed one, or may lose it later in the batch."""
        before = {key: (flags, closed) for key, flags, closed in old}
        for key, flags, closed in new:
            flags_before, was_closed = before.pop(key, (None, False))
            if closed != was_closed:
                self._count_address(batch, key, service, closed - was_closed)
            if flags != flags_before or self.owners.get(key) != service:
                batch.frontends[key] = (service, flags)
                if key not in self.owners:
                    self.pools.frontends[key[0]] += 1
                    batch.new_frontends.append(key)
                self.owners[key] = service
        for key, (_, was_closed) in before.items():
            if was_closed:
                self._count_address(batch, key, service, -1)
            if self.owners.get(key) == service:
                del self.owners[key]
                self.pools.frontends[key[0]] -= 1
                batch.gone.frontends.append((key, service))

    def _count_address(self, batch: Batch, key: Key, service: int, step: int) -> None:
        """Keep the address entry, which rejects unknown ports, as long as a port is served at the address."""
        place = family, address = key[:2]
        before = self.addresses.get(place, 0)
        self.addresses[place] = before + step
        if before == 0:
            self.pools.frontends[family] += 1
            entry = (family, address, 0, 0)
            batch.frontends[entry] = _ADDRESS
            batch.new_frontends.append(entry)
        elif before + step == 0:
            del self.addresses[place]
            self.pools.frontends[family] -= 1
            batch.gone.frontends.append(((family, address, 0, 0), service))

    def _remove(self, batch: Batch, port: Installed) -> None:
        entry, settings, key = port.entry, port.rows.settings, port.entry.key
        self.counts_flows.discard(port.service)
        self._slowed.discard(key)
        self.cut.pop(key, None)
        if entry.probe is not None:
            self.probes_changed.add(service_of(key))
        self._change_frontends(batch, port.service, settings.frontends, ())
        if settings.source_ranges:
            batch.source_ranges.append((port.service, entry.family, ()))
            batch.gone.source_ranges[entry.family] += len(settings.source_ranges)
        del self.by_id[port.service]
        self.renumbered = True
        batch.gone.backends += port.ids
        batch.gone.services.append(port.service)
        batch.gone.ranges += [piece for piece in port.ranges if piece[1]]

    def _refuse(self, name: str, key: EntryKey, error: FullError) -> None:
        self.unprogrammed[key] = Unprogrammed(key[0], str(error))
        self.unfit.setdefault(name, set()).add(key)
        if error.name in SETTINGS:
            self.full.add(error.name)

    def _replace(self, old: Installed, new: Installed) -> None:
        name = service_of(old.entry.key)
        self.installed[name] = tuple(new if port is old else port for port in self.installed[name])


def _list_backends(
    batch: Batch, port: Installed, ranges: tuple[tuple[int, int], ...] | None, old: Installed | None
) -> None:
    """Plan what differs from `old` in backends, and rings that are not in the slots at `ranges`; no `old`: all rows.

    Slots are planned with the words by which the service publishes them; the words of missing backend sets are 0.
    """
    service, rows = port.service, port.rows
    if port.ranges is not ranges:
        for number, (ring, (offset, size)) in enumerate(zip(port.rings, port.ranges, strict=True)):
            if size:
                batch.rings.append((offset, service, ring))
            batch.words.append((service, number, offset, len(ring), port.epoch))
        for absent in range(len(port.rings), BACKEND_SETS):
            batch.words.append((service, absent, 0, 0, 0))
        if ranges is not None:
            batch.gone.ranges += [piece for piece in ranges if piece[1]]
    kind = port.entry.family | int(port.entry.protocol) << 8
    if old is None:
        batch.members.append(Members(service, kind, port.ids, rows.members, rows.flags))
        return
    former = dict(zip(old.ids, old.rows.flags, strict=True))
    new = [place for place, number in enumerate(port.ids) if number not in former]
    if new:
        backends, flags = [rows.members[place] for place in new], [rows.flags[place] for place in new]
        batch.members.append(Members(service, kind, [port.ids[place] for place in new], backends, flags))
    pairs = zip(port.ids, rows.flags, strict=True)
    batch.flags += [(number, flag) for number, flag in pairs if former.pop(number, flag) != flag]
    batch.gone.backends += former


def _share_a_frontend(old: Rows, new: Rows) -> bool:
    keys = {key for key, _, _ in new.settings.frontends}
    return not keys or not old.settings.frontends or any(key in keys for key, _, _ in old.settings.frontends)
