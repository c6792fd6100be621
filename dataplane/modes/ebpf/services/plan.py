"""PURE. Plans what to write so that the maps hold what the table says: rows and pools in, a `Batch` out.

A service port is lowered once. Then its ids and slots are allocated, so that a full map leaves nothing half planned,
and then the rows that differ are listed. What is in a batch counts as installed from then on. So the caller writes
every batch, in the order of planning, and calls `commit` after each: only then can ids and slots be reused.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from hybrid_proxy.dataplane.balancing import Spread, ring_of
from hybrid_proxy.dataplane.balancing.maglev import SIZES
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import (
    SETTINGS,
    DeferredFree,
    FullError,
    IdPool,
    SlotAllocator,
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
from hybrid_proxy.dataplane.table import Backend, Entry, EntryKey, service_of

Subject = tuple[EntryKey, Socket]  # a backend of a service port


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
    rings: list[tuple[int, int, Sequence[int]]] = field(default_factory=list)  # offset, service, backend ids
    services: list[tuple[int, int, int]] = field(default_factory=list)  # id, flags, affinity in seconds
    words: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # service, set, offset, count, epoch
    frontends: dict[Key, tuple[int, int]] = field(default_factory=dict)  # service, flags
    new_frontends: list[Key] = field(default_factory=list)  # those of them that no service had, for the prefilter
    gone_frontends: list[tuple[Key, int]] = field(default_factory=list)  # with the service that had it
    source_ranges: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)  # service, family, CIDRs
    gone_source_ranges: Counter[int] = field(default_factory=Counter)  # how many, by family
    gone_backends: list[int] = field(default_factory=list)
    gone_services: list[int] = field(default_factory=list)
    gone_ranges: list[tuple[int, int]] = field(default_factory=list)
    published: bool = False  # memory is written; what is left are system calls
    late_frontends: list[Key] = field(default_factory=list)  # for which there was no room before others went


class InUse(NamedTuple):
    """The ids and slot ranges that the previous agent's maps name. They are not free until claimed or released."""

    services: Iterable[int] = ()
    backends: Iterable[int] = ()
    ranges: Iterable[tuple[int, int]] = ()


NONE_IN_USE = InUse()
_ADDRESS = (0, FRONTEND_ADDRESS)  # an entry of no service, for an address


class Plan:
    """Knows the service ports in the maps and the ids and slots that they use, and plans changes of them.

    Args:
        sizes: entries of each map by name.
        used: ids and slots that the previous agent handed out.
        adopt: finds what the previous agent installed for a service port; None: there was no agent.
        max_ring: slots that an algorithm may fill for one backend set.
        max_slots: the bound of the map of slots: as long as the map is smaller, no ring is cut.
    """

    def __init__(
        self, sizes: Mapping[str, int], used: InUse = NONE_IN_USE,
        adopt: Callable[[Entry, Rows], Installed | None] | None = None, max_ring: int = Options().ebpf.limits.ring,
        max_slots: int = 0,
    ) -> None:  # fmt: skip
        self.sizes = sizes
        self.adopt = adopt
        self.max_ring = max_ring
        self.max_slots = max_slots
        self.installed: dict[str, tuple[Installed, ...]] = {}
        self.by_id: dict[int, Installed] = {}
        self.unprogrammed: dict[EntryKey, Unprogrammed] = {}
        self.unfit: dict[str, set[EntryKey]] = {}  # by service, the ports in `unprogrammed`
        self.full: set[str] = set()  # maps that may grow for which something did not fit since this was emptied
        self.cut: dict[EntryKey, tuple[int, int]] = {}  # slots of the largest ring, and those it should have
        self.counts_flows: set[int] = set()  # ids of the services whose open flows are counted by backend
        self.recount = False  # some of these are new since this was reset
        self.probes_changed: set[str] = set()  # services whose probes may be others since this was emptied
        self.ejections: dict[EntryKey, dict[Socket, Ejection]] = {}
        self.parts: Mapping[EntryKey, Parts] = {}  # of the weights of backends that start slowly
        self.service_ids = IdPool(sizes["services"], "services", used.services)
        self.backend_ids = IdPool(sizes["backends"], "backends", used.backends)
        self.slots = SlotAllocator(sizes["slots"], "slots", used.ranges)
        self.deferred = DeferredFree(self.service_ids, self.backend_ids, self.slots)
        self.stamp = 0  # number of the grace period that covers the last commit
        self.owners: dict[Key, int] = {}  # the service of each frontend
        self.addresses: Counter[tuple[int, str]] = Counter()  # how many frontends close an address
        self._frontend_count: Counter[int] = Counter()
        self._source_range_count: Counter[int] = Counter()
        self._slowed: set[EntryKey] = set()  # installed with parts of weights

    def grown(self, sizes: Mapping[str, int]) -> None:
        """Plan for maps of other sizes from now on."""
        self.sizes = sizes
        self.service_ids.limit, self.backend_ids.limit, self.slots.limit = (
            sizes[name] for name in ("services", "backends", "slots")
        )

    def used(self) -> dict[str, int]:
        """Returns, by map, the entries in use or waiting to be freed."""
        return {
            "services": self.service_ids.used, "backends": self.backend_ids.used, "slots": self.slots.in_use,
            "frontends4": self._frontend_count[4], "frontends6": self._frontend_count[6],
        }  # fmt: skip

    @property
    def adjusted(self) -> bool:
        """True if there are ejections, or backends with a part of their weight."""
        return bool(self.ejections or self._slowed)

    def find(self, key: EntryKey) -> Installed | None:
        return next((known for known in self.installed.get(service_of(key), ()) if known.entry.key == key), None)

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
            wanted[key] = entry, None if same else self._lower(entry)
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
        rows = self._lower(entry)
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
                self._replace(known, self._port(batch, key, known.entry, self._lower(known.entry), known))
            except FullError:  # its old slots may still wait to be freed
                self.ejections[key] = dict(known.ejections)

    def _lower(self, entry: Entry) -> Rows:
        if not self.parts and not self.ejections:
            return lower(entry)
        key = entry.key
        return lower(slowed(entry, self.parts.get(key, NO_PARTS)), self.ejections.get(key, NO_EJECTIONS))

    def release(
        self, services: list[int], backends: list[int], ranges: list[tuple[int, int]],
        frontends: Iterable[tuple[Key, int]] = (),
    ) -> None:  # fmt: skip
        """Free what the previous agent installed and nobody claimed, once no program can use it."""
        self.stamp += 1
        self.deferred.put(self.stamp, services, backends, ranges, frontends)

    def commit(self, batch: Batch) -> None:
        """Note that the batch is written. What it removed is freed once no program can use it."""
        self._source_range_count.subtract(batch.gone_source_ranges)
        if batch.gone_backends or batch.gone_services or batch.gone_ranges or batch.gone_frontends:
            self.stamp += 1
            losing = [self.by_id[service] for _, service in batch.gone_frontends if service in self.by_id]
            bare = {port.service for port in losing if not port.rows.settings.frontends}
            self.deferred.put(
                self.stamp, batch.gone_services, batch.gone_backends, batch.gone_ranges, batch.gone_frontends, bare
            )

    # One service port

    def _port(self, batch: Batch, key: EntryKey, entry: Entry, rows: Rows, old: Installed | None) -> Installed:
        """Allocate every id and slot first, so that a full map leaves nothing half planned; then list the rows.

        Raises:
            FullError: a map has no room. Nothing was planned.
        """
        same_settings = old is not None and old.rows.settings == rows.settings
        if not same_settings:
            self._check_room(entry, rows, old)
        # A port that a former process installed keeps its numbers. All of its rows are written again.
        before = self.adopt(entry, rows) if old is None and self.adopt is not None else old
        kept = _Kept() if before is None else _kept(before, rows)
        port = self._begun(key, entry, rows) if before is None else self._continued(key, entry, rows, before, kept)
        if before is None or port.ranges is not before.ranges:
            _list_rings(batch, port)
            batch.gone_ranges += [piece for piece in before.ranges if piece[1]] if before is not None else []
        if old is None:
            kind = entry.family | int(entry.protocol) << 8
            batch.members.append(Members(port.service, kind, port.ids, rows.members, rows.flags))
        else:
            _list_members(batch, port, kept)
        if not same_settings or any(self.owners.get(row[0]) != port.service for row in rows.settings.frontends):
            self._list_settings(batch, port, old)
        self._count_flows(batch, port, old)
        if entry.probe is not None or (old is not None and old.entry.probe is not None):
            self.probes_changed.add(service_of(key))
        self.by_id[port.service] = port
        return port

    def _begun(self, key: EntryKey, entry: Entry, rows: Rows) -> Installed:
        """Plan a service port that is not in the maps yet."""
        services = self.service_ids.take(1)
        new: Sequence[int] = ()
        try:
            new = self.backend_ids.take(len(rows.members))
            ids = array("I", new)
            rings, ranges = self._take_slots(key, rows, ids, None)
        except FullError:
            self.backend_ids.give(new)
            self.service_ids.give(services)
            raise
        return self._installed(key, Installed(entry, rows, services[0], ids, rings, ranges, 1))

    def _continued(self, key: EntryKey, entry: Entry, rows: Rows, before: Installed, kept: _Kept) -> Installed:
        """Plan a service port that keeps its id, and the ids of the backends that it had before."""
        new = self.backend_ids.take(kept.places.count(None))
        numbers = iter(new)
        ids = array("I", [next(numbers) if row is None else row[0] for row in kept.places])
        try:
            rings, ranges = self._take_slots(key, rows, ids, before)
        except FullError:
            self.backend_ids.give(new)
            raise
        epoch = before.epoch if ranges is before.ranges else before.epoch + 1
        return self._installed(key, Installed(entry, rows, before.service, ids, rings, ranges, epoch))

    def _installed(self, key: EntryKey, port: Installed) -> Installed:
        """Plan a service port that is in the maps, with what is known of its backends."""
        parts, ejections = self.parts.get(key, NO_PARTS), self.ejections.get(key, NO_EJECTIONS)
        (self._slowed.add if parts else self._slowed.discard)(key)
        return msgspec.structs.replace(port, ejections=ejections, parts=parts) if parts or ejections else port

    def _count_flows(self, batch: Batch, port: Installed, old: Installed | None) -> None:
        """Count the open flows of this service port, if its algorithm asks for that, and write its weights."""
        counted = port.rows.settings.algorithm.spread is Spread.FEWEST
        if not counted:
            self.counts_flows.discard(port.service)
            return
        former: dict[int, Backend] = {}
        if old is not None and port.service in self.counts_flows:
            former = dict(zip(old.ids, old.rows.members, strict=True))
        self.recount = self.recount or not former
        self.counts_flows.add(port.service)
        batch.weights += [
            (number, backend.weight) for number, backend in zip(port.ids, port.rows.members, strict=True)
            if number not in former or former[number].weight != backend.weight
        ]  # fmt: skip

    def _check_room(self, entry: Entry, rows: Rows, old: Installed | None) -> None:
        """Check that old and new frontends and source ranges fit together: new ones are added before old ones go."""
        settings, former, family = rows.settings, None if old is None else old.rows.settings, entry.family
        if former is None or settings.frontends != former.frontends:
            # Each frontend may need an entry for its address, too.
            self._see_room(f"frontends{family}", self._frontend_count[family], 2 * len(settings.frontends))
        if settings.source_ranges and (former is None or settings.source_ranges != former.source_ranges):
            self._see_room(f"source_ranges{family}", self._source_range_count[family], len(settings.source_ranges))

    def _see_room(self, name: str, count: int, more: int) -> None:
        if more and count + more > self.sizes[name]:
            raise FullError(name, self.sizes[name])

    def _take_slots(
        self, key: EntryKey, rows: Rows, ids: array[int], before: Installed | None
    ) -> tuple[tuple[array[int], ...], tuple[tuple[int, int], ...]]:
        """Returns rings of backend ids, and slots for them: the present slots, where the rings are the same.

        If there are too few slots for the ring that the algorithm asks for, and `max_slots` is reached, the ring is
        cut, at last to one slot for each backend. The full ring is tried again when the service port changes.

        Raises:
            FullError: there is no room for that either.
        """
        self.cut.pop(key, None)
        if before is None and len(ids) == 1 and len(rows.sets) == 1 and len(rows.sets[0]) == 1:
            return (ids,), (self.slots.take(1),)  # there is nothing to arrange
        algorithm = rows.settings.algorithm
        limit, wanted, plain = self.max_ring, 0, max(map(len, rows.sets), default=0)
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
                if self.slots.limit < self.max_slots or largest == plain:
                    raise
                limit = max((size for size in SIZES if size < min(limit, largest)), default=0)
        if largest < wanted:
            self.cut[key] = (largest, wanted)
        # Nearly always the one ring has each member once: then it is the list of ids, and kept once.
        return tuple([ids if ring == ids else ring for ring in rings]), ranges

    def _check_reserve(self, rings: Sequence[Sequence[int]], sets: Sequence[Sequence[int]]) -> None:
        """Keep a quarter of all slots for rings that have one slot for each backend."""
        slots = sum(size_class(len(ring)) for ring in rings)
        needed = sum(size_class(len(backends)) for backends in sets)
        if slots > needed and self.slots.in_use + slots > self.slots.limit * 3 // 4:
            raise FullError(self.slots.name, self.slots.limit)

    def _allocate(self, rings: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
        """Allocate slots for the rings; a ring that is a prefix of the first one shares its slots."""
        ranges: list[tuple[int, int]] = []
        try:
            for position, ring in enumerate(rings):
                shares = position and ring == rings[0][: len(ring)]
                ranges.append((ranges[0][0], 0) if shares else self.slots.take(len(ring)))
        except FullError:
            for offset, size in ranges:
                self.slots.give(offset, size)
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
            batch.gone_source_ranges[family] += len(ranges_before)
            self._source_range_count[family] += len(settings.source_ranges)
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
                    self._frontend_count[key[0]] += 1
                    batch.new_frontends.append(key)
                self.owners[key] = service
        for key, (_, was_closed) in before.items():
            if was_closed:
                self._count_address(batch, key, service, -1)
            if self.owners.get(key) == service:
                del self.owners[key]
                self._frontend_count[key[0]] -= 1
                batch.gone_frontends.append((key, service))

    def _count_address(self, batch: Batch, key: Key, service: int, step: int) -> None:
        """Keep the address entry, which rejects unknown ports, as long as a port is served at the address."""
        place = family, address = key[:2]
        before = self.addresses.get(place, 0)
        self.addresses[place] = before + step
        if before == 0:
            self._frontend_count[family] += 1
            entry = (family, address, 0, 0)
            batch.frontends[entry] = _ADDRESS
            batch.new_frontends.append(entry)
        elif before + step == 0:
            del self.addresses[place]
            self._frontend_count[family] -= 1
            batch.gone_frontends.append(((family, address, 0, 0), service))

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
            batch.gone_source_ranges[entry.family] += len(settings.source_ranges)
        del self.by_id[port.service]
        batch.gone_backends += port.ids
        batch.gone_services.append(port.service)
        batch.gone_ranges += [piece for piece in port.ranges if piece[1]]

    def _refuse(self, name: str, key: EntryKey, error: FullError) -> None:
        self.unprogrammed[key] = Unprogrammed(key[0], str(error))
        self.unfit.setdefault(name, set()).add(key)
        if error.name in SETTINGS:
            self.full.add(error.name)

    def _replace(self, old: Installed, new: Installed) -> None:
        name = service_of(old.entry.key)
        self.installed[name] = tuple(new if port is old else port for port in self.installed[name])


class _Kept(NamedTuple):
    """What a service port keeps: id and flags for each member (None: a new one), and the ids that are released."""

    places: Sequence[tuple[int, int] | None] = ()
    gone: Sequence[int] = ()


def _kept(before: Installed, rows: Rows) -> _Kept:
    pairs = zip(before.rows.members, before.ids, before.rows.flags, strict=True)
    former = {(backend.address, backend.port): (number, flags) for backend, number, flags in pairs}
    places = [former.pop((backend.address, backend.port), None) for backend in rows.members]
    return _Kept(places, [number for number, _ in former.values()])


def _list_rings(batch: Batch, port: Installed) -> None:
    """Plan slots, and the words by which the service publishes them; the words of missing backend sets are 0."""
    service = port.service
    for number, (ring, (offset, size)) in enumerate(zip(port.rings, port.ranges, strict=True)):
        if size:
            batch.rings.append((offset, service, ring))
        batch.words.append((service, number, offset, len(ring), port.epoch))
    batch.words += [(service, absent, 0, 0, 0) for absent in range(len(port.rings), BACKEND_SETS)]


def _list_members(batch: Batch, port: Installed, kept: _Kept) -> None:
    """Plan new rows, changed flags, and released ids."""
    entry, rows = port.entry, port.rows
    new = [place for place, row in enumerate(kept.places) if row is None]
    if new:
        kind = entry.family | int(entry.protocol) << 8
        backends, flags = [rows.members[place] for place in new], [rows.flags[place] for place in new]
        batch.members.append(Members(port.service, kind, [port.ids[place] for place in new], backends, flags))
    pairs = zip(kept.places, rows.flags, strict=True)
    batch.flags += [(row[0], flags) for row, flags in pairs if row and row[1] != flags]
    if kept.gone:
        batch.gone_backends += kept.gone


def _share_a_frontend(old: Rows, new: Rows) -> bool:
    keys = {key for key, _, _ in new.settings.frontends}
    return not keys or not old.settings.frontends or any(key in keys for key, _, _ in old.settings.frontends)
