"""The update protocol: rows into maps, in an order that no packet can see half of.

A change is first planned (numbers taken, rows listed, nothing written) and then committed: backends, slots, the
slice word with one release store, frontends; removals last. What a program may still use is freed later.
The first commit after a start is compared with what the maps already hold, so that a restart adopts.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane.balancing.least_connections import shares as shares_by_load
from dataplane.balancing.maglev import SIZES
from dataplane.errors import DataplaneError
from dataplane.kernel._publish import ffi, lib
from dataplane.mode import Options, Unprogrammed
from dataplane.modes.ebpf import layout
from dataplane.modes.ebpf.edges import Sources
from dataplane.modes.ebpf.lower import (
    ANY,
    BACKEND_EJECTED,
    FRONTEND_ADDRESS,
    FRONTEND_NODE_PORTS,
    NO_EJECTIONS,
    Rows,
    Socket,
    algorithm_of,
    lower,
    rings_of,
)  # fmt: skip
from dataplane.modes.ebpf.maps import MapSet
from dataplane.modes.ebpf.outliers import Ejection
from dataplane.modes.ebpf.pools import SETTINGS, DeferredFree, FullError, IdPool, SlotAllocator, size_class
from dataplane.modes.ebpf.rows import FEW, RowWriter
from dataplane.table import Entry, Protocol, family_of

__all__ = ["EntryKey", "Installed", "Store", "Subject"]

Key = tuple[int, str, int, int]  # family, address, port, protocol; an address entry has port and protocol 0
PORT_KINDS = {int(Protocol.TCP): 0, int(Protocol.UDP): 1, int(Protocol.SCTP): 2}  # parts of the bitmap of node ports
Bits = layout.Words | list[int]
LOW_WORD = np.uint64(0xFFFFFFFF)
FIRST_FILL = 500  # services
EntryKey = tuple[str, int, int]  # name, family, protocol
Subject = tuple[EntryKey, Socket]  # a backend of a service port


def key_of(entry: Entry) -> EntryKey:
    """What names a service port of one family."""
    return entry.name, entry.family, int(entry.protocol)


def service_of(key: EntryKey) -> str:
    """The service that a service port belongs to: `namespace/service` of `namespace/service:port`."""
    return key[0].rpartition(":")[0]


class Installed:
    """A service port as it stands in the maps."""

    __slots__ = ("ejections", "entry", "epoch", "ids", "service", "slices")

    def __init__(
        self, entry: Entry, service: int, ids: array[int], slices: tuple[tuple[int, int], ...], epoch: int,
        ejections: Mapping[Socket, Ejection],
    ) -> None:  # fmt: skip
        self.entry = entry
        self.service = service
        self.ids = ids  # of lower(entry).members, in that order
        self.slices = slices  # (offset, size) of each route; size 0: none of its own
        self.epoch = epoch
        self.ejections = ejections  # of failing backends, which the routes do without where they can


@dataclass(slots=True)
class Previous:
    """What a service port had before, whether we installed it or a former process did."""

    service: int = 0
    members: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # (address, port) -> id, flags
    rings: list[list[int]] = field(default_factory=list)  # backend ids
    slices: tuple[tuple[int, int], ...] = ()
    epoch: int = 0
    frontends: dict[Key, int] = field(default_factory=dict)
    flags: int = 0
    affinity: int = 0
    sources: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    adopted: bool = False  # the rows are a former process's: inherit the numbers, write everything


@dataclass(slots=True)
class Batch:
    """Everything that one sync writes."""

    backend_ids: list[int] = field(default_factory=list)
    backend_addresses: list[str] = field(default_factory=list)
    backend_ports: list[int] = field(default_factory=list)
    backend_flags: list[int] = field(default_factory=list)
    backend_services: list[int] = field(default_factory=list)
    backend_kinds: list[int] = field(default_factory=list)  # family | protocol << 8
    flag_ids: list[int] = field(default_factory=list)  # rows that only change their flags
    flag_values: list[int] = field(default_factory=list)
    slots: list[tuple[int, int, list[int]]] = field(default_factory=list)  # offset, service, backend ids
    services: list[tuple[int, int, int]] = field(default_factory=list)  # id, flags, affinity in seconds
    words: list[tuple[int, int]] = field(default_factory=list)  # index of the word, value
    frontends: dict[Key, tuple[int, int]] = field(default_factory=dict)  # service, flags
    new_frontends: list[Key] = field(default_factory=list)  # those of them that nobody had, for the prefilter
    gone_frontends: list[tuple[Key, int]] = field(default_factory=list)  # and the service that had it
    sources: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)  # service, family, ranges
    ranges: dict[int, int] = field(default_factory=lambda: {4: 0, 6: 0})  # how many these are, by family
    gone_backends: list[int] = field(default_factory=list)
    gone_services: list[int] = field(default_factory=list)
    gone_slices: list[tuple[int, int]] = field(default_factory=list)


class Prefilter:
    """A bitmap that programs read, and how many keys stand behind each of its bits. Few bits come as a list."""

    def __init__(self, view: NDArray[Any]) -> None:
        self.view = view
        self.counts = np.zeros(len(view) * 64, dtype=np.uint16)
        self._few_words, self._few_counts = view.data, self.counts.data

    def add(self, bits: Bits) -> None:
        """Set these bits."""
        if isinstance(bits, list):
            for bit in bits:
                self._few_counts[bit] = self._few_counts[bit] + 1 & 0xFFFF
                self._few_words[bit >> 6] |= 1 << (bit & 63)
            return
        np.add.at(self.counts, bits, 1)
        np.bitwise_or.at(self.view, bits >> np.uint32(6), np.uint64(1) << (bits & np.uint32(63)).astype(np.uint64))

    def remove(self, bits: Bits) -> None:
        """Clear those of these bits behind which nothing is left."""
        if isinstance(bits, list):
            for bit in bits:
                self._few_counts[bit] = self._few_counts[bit] - 1 & 0xFFFF
                if not self._few_counts[bit]:
                    self._few_words[bit >> 6] &= ~(1 << (bit & 63))
            return
        np.subtract.at(self.counts, bits, 1)
        for bit in np.unique(bits[self.counts[bits] == 0]).tolist():
            self.view[bit >> 6] &= ~np.uint64(1 << (bit & 63))

    def only(self) -> None:
        """Clear every bit that is not counted (left by a former process)."""
        packed = np.packbits((self.counts > 0).astype(np.uint8), bitorder="little").view(np.uint64)
        self.view[:] = packed


class Store:
    """The maps' owner. Not for several threads at once.

    Args:
        maps: the open set.
        hz: jiffies per second, for affinity times.
        adopt: the maps hold what a former owner wrote: the first `apply` takes it over. None: when they were pinned.
        max_ring: slots that an algorithm may fill for one route.
        max_slots: to which the map of slots may grow: as long as it is smaller no ring is cut.
    """

    few = FEW  # rows that are written one by one

    def __init__(
        self, maps: MapSet, hz: int, *, adopt: bool | None = None, max_ring: int = Options().max_ring,
        max_slots: int = 0,
    ) -> None:  # fmt: skip
        self.maps = maps
        self.hz = hz
        self.max_ring = max_ring
        self.max_slots = max_slots
        self.installed: dict[str, dict[EntryKey, Installed]] = {}
        self.names: dict[int, str] = {}  # of the service ports in `installed`, by number
        self.misfits: dict[EntryKey, Unprogrammed] = {}
        self.unfit: dict[str, set[EntryKey]] = {}  # by service: what is in `misfits`
        self.cut: dict[EntryKey, tuple[int, int]] = {}  # slots of the largest ring, and those it should have
        self._shares: dict[EntryKey, dict[tuple[str, int], int]] = {}  # of backends that get theirs by load
        self._ejections: dict[EntryKey, dict[Socket, Ejection]] = {}
        self._gone_datagram_backends: list[int] = []
        self._open_views()
        self._published = self.services["sets"].copy()
        self._words_per_service = layout.dtype_of("service").itemsize // 8
        self._owners: dict[Key, int] = {}
        self._addresses: Counter[tuple[int, str]] = Counter()
        self._frontend_count: Counter[int] = Counter()
        self._service_bits = Prefilter(maps.view("service_addresses"))
        self._backend_bits = Prefilter(maps.view("backend_sockets"))
        self._node_port_bits = Prefilter(maps.view("node_ports"))
        self._clearing: list[tuple[int, Key]] = []  # bits of frontends whose service lives on, after grace
        self._held: dict[int, list[Key]] = {}  # bits of a gone service's frontends, as long as it has flows
        self._node_ports_at: set[tuple[int, str]] = set()
        self.sources = Sources({family: maps.maps[f"source_ranges{family}"] for family in (4, 6)})
        self._adopted = _Adopted(self) if (maps.adopted if adopt is None else adopt) else None
        used_services, used_backends, used_slices = self._adopted.used() if self._adopted else ((), (), ())
        self.service_ids = IdPool(len(self.services), "services", used_services)
        self.backend_ids = IdPool(len(self.backends), "backends", used_backends)
        self.slices = SlotAllocator(len(self.slots), "slots", used_slices)
        self.full: set[str] = set()  # maps that may grow for which something did not fit since this was emptied
        self.traffic = maps.traffic()
        if self._adopted is not None:
            self.traffic.only(used_services, used_backends)
        self.deferred = DeferredFree(self.service_ids, self.backend_ids, self.slices)
        self.exact_after = 0  # once this grace period is over, prefilter bits of a former process go
        self.stamp = 0  # number of the grace period that covers the last commit

    def _open_views(self) -> None:
        self.services: NDArray[Any] = self.maps.view("services")
        self.backends: NDArray[Any] = self.maps.view("backends")
        self.slots: NDArray[Any] = self.maps.view("slots")["backend"]
        self._endpoints: NDArray[Any] = self.maps.view("slots")["endpoint"]
        self._cells = RowWriter(self.backends, self.maps.view("slots"))
        self._words = ffi.from_buffer("uint64_t[]", self.services)

    def grown(self) -> None:
        """The maps have been replaced by larger ones with the same content: from now on those are written."""
        self._open_views()
        self._published.resize((len(self.services), self._published.shape[1]), refcheck=False)
        self.service_ids.limit, self.backend_ids.limit = len(self.services), len(self.backends)
        self.slices.limit = len(self.slots)
        self.traffic = self.maps.traffic()

    def used(self) -> dict[str, int]:
        """Entries in use, or waiting to be freed, of the maps that follow the table."""
        return {
            "services": self.service_ids.used, "backends": self.backend_ids.used, "slots": self.slices.in_use,
            "frontends4": self._frontend_count[4], "frontends6": self._frontend_count[6],
        }  # fmt: skip

    # Planning: numbers and rows, nothing written.

    def apply(self, services: dict[str, tuple[Entry, ...]]) -> tuple[int, int]:
        """Make these services what is given (an empty tuple removes one); returns ports changed and removed."""
        names = list(services)
        # The first fill goes in parts: the memory that planning one of them needs serves the next one too.
        step = max(1, len(names)) if self.installed else FIRST_FILL
        changed = removed = 0
        late: list[tuple[Batch, list[Key]]] = []
        for start in range(0, len(names), step):
            batch = Batch()
            for name in names[start : start + step]:
                more, less = self._plan_service(batch, name, services[name])
                changed, removed = changed + more, removed + less
            late.append((batch, self._commit(batch)))
            late = [(waiting, keys) for waiting, keys in late if keys]
        if self._adopted is not None:
            self._adopted.remove_leftovers(self.installed, self._owners, {*self._addresses, *self._node_ports_at})
            self._adopted = None
            self.sources.only()
        if any([self._insert(waiting, keys) for waiting, keys in late]):  # noqa: C419 - all of them are tried
            raise DataplaneError("the maps of frontends hold more than this process wrote: `hybrid-proxy cleanup`")
        return changed, removed

    def _plan_service(self, batch: Batch, name: str, entries: tuple[Entry, ...]) -> tuple[int, int]:
        """One service's ports; how many change and how many go."""
        changed = removed = 0
        before = self.installed.get(name, {})
        after: dict[EntryKey, Installed] = {}
        unfit = self.unfit.pop(name, set())
        for key in unfit:
            del self.misfits[key]
        wanted = {key_of(entry): entry for entry in entries}
        for key, installed in before.items():
            if key not in wanted:
                self._plan_removal(batch, installed)
                removed += 1
        for key, entry in wanted.items():
            known = before.get(key)
            if known is not None and known.entry is entry and key not in unfit:
                after[key] = known
                continue
            if known is not None and not _share_a_frontend(known.entry, entry):
                self._plan_removal(batch, known)  # another service by this name: flows to the former one may stay
                known = None
            try:
                after[key] = self._plan(batch, entry, known)
                changed += 1
            except FullError as error:
                self.misfits[key] = Unprogrammed(entry.name, str(error))
                if error.name in SETTINGS:
                    self.full.add(error.name)
                self.unfit.setdefault(name, set()).add(key)
                if known is not None:
                    after[key] = known
        if after:
            self.installed[name] = after
        else:
            self.installed.pop(name, None)
        return changed, removed

    def _plan(self, batch: Batch, entry: Entry, known: Installed | None) -> Installed:
        """Take every number first, so that a full map leaves nothing half planned; then list the rows."""
        ejections = self._ejections.get(key_of(entry), NO_EJECTIONS)
        rows = lower(entry, ejections)
        previous = self._previous(entry, rows, known)
        self._check_frontends(entry, rows)
        if rows.sources != previous.sources:
            self.sources.check_room(entry.family, rows.sources, batch.ranges[entry.family])
        if known is not None and known.entry.algorithm != entry.algorithm:
            self._shares.pop(key_of(entry), None)
        ids, taken = self._take_members(rows, previous)
        slices: tuple[tuple[int, int], ...] = ()
        keep_slices = False
        try:
            rings, slices, keep_slices = self._take_rings(entry, rows, previous, ids)
            service = previous.service or self.service_ids.take(1)[0]
        except FullError:
            self.backend_ids.give(taken)
            self.cut.pop(key_of(entry), None)
            if not keep_slices:
                self._give_slices(slices)
            raise
        epoch = previous.epoch if keep_slices else previous.epoch + 1
        self._list_members(batch, entry, rows, previous, service, ids)
        if not keep_slices:
            self._list_slices(batch, rings, slices, previous, service, epoch)
        known_settings = previous.service and not previous.adopted  # a number used before has its last owner's
        if not known_settings or (rows.flags, rows.affinity_seconds) != (previous.flags, previous.affinity):
            batch.services.append((service, rows.flags, rows.affinity_seconds))
        if rows.sources != previous.sources:
            batch.sources.append((service, entry.family, rows.sources))
            batch.ranges[entry.family] += len(rows.sources)
        self._plan_frontends(batch, entry, rows, previous, service)
        if algorithm_of(entry).loads:
            self._shares.setdefault(key_of(entry), {})
        else:
            self._shares.pop(key_of(entry), None)
        self.names[service] = entry.name
        return Installed(entry, service, array("I", ids), slices, epoch, ejections)

    def _check_frontends(self, entry: Entry, rows: Rows) -> None:
        name = f"frontends{entry.family}"
        limit = self.maps.maps[name].entries
        if self._frontend_count[entry.family] + 2 * len(rows.frontends) > limit:
            raise FullError(name, limit)

    def _take_members(self, rows: Rows, previous: Previous) -> tuple[list[int], list[int]]:
        """Ids of all members, and those of them that are new."""
        if not previous.members:
            taken = self.backend_ids.take(len(rows.members))
            return taken, taken
        known = [previous.members.get((member.address, member.port)) for member in rows.members]
        taken = self.backend_ids.take(known.count(None))
        numbers = iter(taken)
        return [next(numbers) if row is None else row[0] for row in known], taken

    def _take_rings(
        self, entry: Entry, rows: Rows, previous: Previous, ids: list[int]
    ) -> tuple[list[list[int]], tuple[tuple[int, int], ...], bool]:
        """Rings of backend ids, slots for them, and whether these are the ones there are.

        Where slots do not suffice, and cannot be more (`max_slots`), for what the algorithm would like, the ring is a
        smaller one, in the end that of a slot for each backend. It is tried anew when the service port changes.

        Raises:
            FullError: not even that is left.
        """
        key, limit, wanted = key_of(entry), self.max_ring, 0
        shares = self._shares.get(key) if algorithm_of(entry).loads else None
        self.cut.pop(key, None)
        while True:
            rings = [[ids[position] for position in ring] for ring in rings_of(entry, rows, limit, shares)]
            largest = max(map(len, rings), default=0)
            wanted = wanted or largest
            keep = bool(previous.service) and rings == previous.rings
            try:
                if not keep and limit:
                    self._check_reserve(rings, rows.routes)
                slices = previous.slices if keep else self._take_slices(rings)
            except FullError:
                if len(self.slots) < self.max_slots or not limit or largest == max(map(len, rows.routes)):
                    raise
                limit = max((size for size in SIZES if size < min(limit, largest)), default=0)
            else:
                break
        if largest < wanted:
            self.cut[key] = (largest, wanted)
        return rings, slices, keep

    def _check_reserve(self, rings: list[list[int]], routes: list[list[int]]) -> None:
        """A quarter of all slots is kept for rings that have one for each backend and no more."""
        if sum(map(len, rings)) == sum(map(len, routes)):  # no ring is shorter than its route
            return
        slots = sum(size_class(len(ring)) for ring in rings)
        needed = sum(size_class(len(route)) for route in routes)
        if slots > needed and self.slices.in_use + slots > self.slices.limit * 3 // 4:
            raise FullError(self.slices.name, self.slices.limit)

    def _take_slices(self, rings: list[list[int]]) -> tuple[tuple[int, int], ...]:
        """Slots for the rings; a ring that is the beginning of the first one shares its slots."""
        slices: list[tuple[int, int]] = []
        try:
            for position, ring in enumerate(rings):
                shares = position and ring == rings[0][: len(ring)]
                slices.append((slices[0][0], 0) if shares else self.slices.take(len(ring)))
        except FullError:
            self._give_slices(tuple(slices))
            raise
        return tuple(slices)

    def _give_slices(self, slices: tuple[tuple[int, int], ...]) -> None:
        for offset, size in slices:
            self.slices.give(offset, size)

    @staticmethod
    def _list_members(batch: Batch, entry: Entry, rows: Rows, previous: Previous, service: int, ids: list[int]) -> None:
        kind = entry.family | int(entry.protocol) << 8
        if not previous.members:
            batch.backend_ids += ids
            batch.backend_addresses += [member.address for member in rows.members]
            batch.backend_ports += [member.port for member in rows.members]
            batch.backend_flags += rows.member_flags
            batch.backend_services += [service] * len(ids)
            batch.backend_kinds += [kind] * len(ids)
            return
        for number, member, flags in zip(ids, rows.members, rows.member_flags, strict=True):
            known = previous.members.pop((member.address, member.port), None)
            if known is None or previous.adopted:
                batch.backend_ids.append(number)
                batch.backend_addresses.append(member.address)
                batch.backend_ports.append(member.port)
                batch.backend_flags.append(flags)
                batch.backend_services.append(service)
                batch.backend_kinds.append(kind)
            elif known[1] != flags:
                batch.flag_ids.append(number)
                batch.flag_values.append(flags)
        if not previous.adopted:
            batch.gone_backends += [number for number, _ in previous.members.values()]

    def _list_slices(
        self, batch: Batch, rings: list[list[int]], slices: tuple[tuple[int, int], ...], previous: Previous,
        service: int, epoch: int,
    ) -> None:  # fmt: skip
        first = service * self._words_per_service
        for position, (ring, (offset, size)) in enumerate(zip(rings, slices, strict=True)):
            if size:
                batch.slots.append((offset, service, ring))
            batch.words.append((first + position, layout.slice_word(offset, len(ring), epoch)))
        batch.words += [(first + position, 0) for position in range(len(rings), layout.abi_constants()["BACKEND_SETS"])]
        batch.gone_slices += [piece for piece in previous.slices if piece[1]]

    def _plan_frontends(self, batch: Batch, entry: Entry, rows: Rows, previous: Previous, service: int) -> None:
        wanted = {(entry.family, address, port, int(entry.protocol)): flags for address, port, flags in rows.frontends}
        for key, flags in wanted.items():
            if key not in previous.frontends and key[1] in rows.closed:
                self._count_address(batch, key, service, 1)
            if previous.frontends.get(key) != flags or self._owners.get(key) != service:
                batch.frontends[key] = (service, flags)
                if key not in self._owners:
                    self._frontend_count[entry.family] += 1
                    batch.new_frontends.append(key)
                self._owners[key] = service
        for key in previous.frontends:
            if key not in wanted:
                self._release_frontend(batch, key, service, previous.closed)

    def _release_frontend(self, batch: Batch, key: Key, service: int, closed: tuple[str, ...]) -> None:
        if key[1] in closed:
            self._count_address(batch, key, service, -1)
        if self._owners.get(key) == service:
            del self._owners[key]
            self._frontend_count[key[0]] -= 1
            batch.gone_frontends.append((key, service))

    def _count_address(self, batch: Batch, key: Key, service: int, step: int) -> None:
        """Keep the address entry, by which unknown ports are refused, as long as a port is served there."""
        family, address = key[:2]
        before = self._addresses[family, address]
        self._addresses[family, address] = before + step
        if before == 0:
            self._frontend_count[family] += 1
            batch.frontends[family, address, 0, 0] = (0, FRONTEND_ADDRESS)
            batch.new_frontends.append((family, address, 0, 0))
        elif before + step == 0:
            del self._addresses[family, address]
            self._frontend_count[family] -= 1
            batch.gone_frontends.append(((family, address, 0, 0), service))

    def _plan_removal(self, batch: Batch, installed: Installed) -> None:
        rows = lower(installed.entry)
        entry = installed.entry
        self._shares.pop(key_of(entry), None)
        self.cut.pop(key_of(entry), None)
        for address, port, _ in rows.frontends:
            key = (entry.family, address, port, int(entry.protocol))
            self._release_frontend(batch, key, installed.service, rows.closed)
        if rows.sources:
            batch.sources.append((installed.service, entry.family, ()))
        del self.names[installed.service]
        batch.gone_backends += installed.ids.tolist()
        batch.gone_services.append(installed.service)
        batch.gone_slices += [piece for piece in installed.slices if piece[1]]

    def _previous(self, entry: Entry, rows: Rows, known: Installed | None) -> Previous:
        if known is None:
            return self._adopted.claim(entry, rows) if self._adopted is not None else Previous()
        old = lower(known.entry, known.ejections)
        ids = known.ids
        return Previous(
            service=known.service,
            members={(m.address, m.port): (i, f) for m, i, f in zip(old.members, ids, old.member_flags, strict=True)},
            rings=self._rings_of(known.service, len(old.routes)),
            slices=known.slices,
            epoch=known.epoch,
            frontends={(entry.family, a, p, int(entry.protocol)): flags for a, p, flags in old.frontends},
            flags=old.flags,
            affinity=old.affinity_seconds,
            sources=old.sources,
            closed=old.closed,
        )

    def _rings_of(self, service: int, routes: int = 2) -> list[list[int]]:
        """The backend ids in the slots of the first so many routes."""
        rings = []
        for word in self._published[service, :routes].tolist():
            offset, count, _ = layout.split_slice_word(word)
            few = count <= self.few
            rings.append(
                self._cells.ring(offset, count) if few else (self.slots[offset : offset + count] & LOW_WORD).tolist()
            )
        return rings

    def follows_load(self) -> frozenset[int]:
        """Ids of the services whose algorithm follows the load."""
        return frozenset(self._named(key).service for key in self._shares)

    def _named(self, key: EntryKey) -> Installed:
        return self.installed[service_of(key)][key]

    def balance(self, loads: Mapping[int, int]) -> int:
        """Give the backends of these services new shares; returns how many rings changed.

        Args:
            loads: connections by backend id; those that are not there have none.
        """
        batch = Batch()
        for key, before in list(self._shares.items()):
            known = self._named(key)
            weighs = algorithm_of(known.entry).weighs
            pairs = zip(lower(known.entry).members, known.ids, strict=True)
            members = [(backend, loads.get(number, 0)) for backend, number in pairs if backend.weight]
            if len(members) < 2:
                continue
            sockets = [(backend.address, backend.port) for backend, _ in members]
            weights = [backend.weight if weighs else 1 for backend, _ in members]
            found = shares_by_load(weights, [load for _, load in members], [before.get(socket) for socket in sockets])
            self._shares[key] = dict(zip(sockets, found, strict=True))
            try:
                self.installed[service_of(key)][key] = self._plan(batch, known.entry, known)
            except FullError:
                self._shares[key] = before
        if batch.slots:
            self._commit(batch)
        return len(batch.slots)

    # Backends that fail.

    def failures(self) -> dict[Subject, int]:
        """Connections one after the other that failed, of each backend with any, as the programs counted them."""
        ids = np.flatnonzero(self.backends["failures"])
        if not len(ids):
            return {}
        rows = self.backends[ids]
        keys = {known.service: key for ports in self.installed.values() for key, known in ports.items()}
        ports, raw = layout.swap16(rows["port"]).tolist(), np.ascontiguousarray(rows["address"]).tobytes()
        found: dict[Subject, int] = {}
        for i, (service, port, count) in enumerate(zip(rows["service"].tolist(), ports, rows["failures"].tolist())):  # noqa: B905
            key = keys.get(service)
            if key is not None:
                found[key, (layout.address_text(raw[16 * i : 16 * i + 16], key[1]), port)] = count
        return found

    def numbers(self, key: EntryKey) -> dict[Socket, int]:
        """Ids of the backends of a service port, none where there is no such port."""
        known = self.installed.get(service_of(key), {}).get(key)
        if known is None:
            return {}
        return {(b.address, b.port): i for i, b in zip(known.ids, lower(known.entry).members, strict=True)}

    @property
    def has_ejections(self) -> bool:
        """Whether any backend is to be ejected, with effect or without."""
        return bool(self._ejections)

    def readmit(self, backend: int, count: int) -> None:
        """Forget failures of the backend until `count` are left."""
        self.backends["failures"][backend] = min(int(self.backends["failures"][backend]), count)

    def is_ejected(self, backend: int) -> bool:
        """Whether a route that the backend belongs to does without it."""
        return bool(int(self.backends["flags"][backend]) & BACKEND_EJECTED)

    def eject(self, ejections: Mapping[Subject, Ejection]) -> None:
        """Take these backends, and no others, out of the routes that can do without them."""
        wanted: dict[EntryKey, dict[Socket, Ejection]] = {}
        for (key, socket), ejection in ejections.items():
            wanted.setdefault(key, {})[socket] = ejection
        former, self._ejections = self._ejections, wanted
        batch = Batch()
        for key in {*former, *wanted}:
            known = self.installed.get(service_of(key), {}).get(key)
            if known is not None and known.ejections != wanted.get(key, NO_EJECTIONS):
                try:
                    self.installed[service_of(key)][key] = self._plan(batch, known.entry, known)
                except FullError:  # a smaller ring needs no more room; an old slice may still wait to be freed
                    self._ejections[key] = dict(known.ejections)
        if batch.slots or batch.words or batch.flag_ids:
            self._commit(batch)

    # Committing: the order is the protocol.

    def _commit(self, batch: Batch) -> list[Key]:
        """Write everything; returns frontends for which there is room only after what is gone was removed."""
        self._write_backends(batch)
        self._write_slots(batch)
        for service, flags, affinity in batch.services:
            self.services[service]["flags"] = flags
            self.services[service]["affinity"] = min(affinity * self.hz, 0xFFFFFFFF)
        self._publish_words(batch.words)
        for service, family, cidrs in batch.sources:
            if cidrs:
                self.sources.allow(service, family, cidrs)
        for bitmap, bits in self._bits_of_frontends(batch.new_frontends):
            bitmap.add(bits)
        waiting = self._insert(batch, list(batch.frontends))
        self._remove(batch)
        return waiting

    def _write_slots(self, batch: Batch) -> None:
        if not batch.slots:
            return
        counts = [len(ids) for _, _, ids in batch.slots]
        if sum(counts) <= self.few:
            for offset, service, ring in batch.slots:
                self._cells.put_ring(offset, service, ring)
            return
        starts = np.array([offset for offset, _, _ in batch.slots], dtype=np.int64)
        before = np.cumsum(counts) - counts
        places = np.repeat(starts - before, counts) + np.arange(sum(counts))
        services = np.repeat(np.array([service for _, service, _ in batch.slots], dtype=np.uint64), counts)
        ids = np.fromiter((i for _, _, ring in batch.slots for i in ring), dtype=np.uint64, count=sum(counts))
        rows = self.backends[ids.astype(np.int64)]
        ports = rows["port"].astype(np.uint64) << np.uint64(32)
        proof = (services & np.uint64(0xFFFF)) << np.uint64(48)
        self._endpoints[places] = rows["address"][:, 0].astype(np.uint64) | ports | proof
        self.slots[places] = ids | services << np.uint64(32)

    def _write_backends(self, batch: Batch) -> None:
        if batch.backend_ids:
            rows = (
                batch.backend_ids, batch.backend_addresses, batch.backend_ports, batch.backend_flags,
                batch.backend_services, batch.backend_kinds,
            )  # fmt: skip
            if len(batch.backend_ids) <= self.few:
                for row in zip(*rows, strict=True):
                    self._cells.put_backend(*row)
            else:
                self._write_many_backends(batch)
            self.add_backend_bits(batch.backend_ids)
        if len(batch.flag_ids) <= self.few:
            for number, flags in zip(batch.flag_ids, batch.flag_values, strict=True):
                self._cells.put_flags(number, flags)
        else:
            self.backends["flags"][np.array(batch.flag_ids, dtype=np.int64)] = batch.flag_values

    def _write_many_backends(self, batch: Batch) -> None:
        ids = np.array(batch.backend_ids, dtype=np.int64)
        self.backends["address"][ids] = layout.address_words(batch.backend_addresses)
        self.backends["port"][ids] = layout.swap16(batch.backend_ports)
        self.backends["service"][ids] = batch.backend_services
        self.backends["kind"][ids] = batch.backend_kinds
        self.backends["flags"][ids] = batch.backend_flags

    def add_backend_bits(self, ids: Sequence[int]) -> None:
        """Let programs look at packets from these backends."""
        for bits in self._bits_of_backends(ids):
            self._backend_bits.add(bits)

    def _bits_of_backends(self, numbers: Sequence[int]) -> Iterable[Bits]:
        if len(numbers) <= self.few:
            yield list(self._cells.bits(numbers))
            return
        ids = np.array(numbers, dtype=np.int64)
        kinds = self.backends["kind"][ids]
        for family in (4, 6):
            chosen = ids[(kinds & np.uint64(0xFF)) == family]
            if len(chosen):
                protocols = self.backends["kind"][chosen] >> np.uint64(8)
                words = np.ascontiguousarray(self.backends["address"][chosen])
                yield layout.backend_bits(words, self.backends["port"][chosen], protocols, family)
                words = words[protocols != Protocol.TCP]  # those whose answers may come in fragments, without a port
                yield layout.backend_bits(words, np.zeros(len(words), np.uint16), np.zeros(len(words), int), family)

    def _publish_words(self, words: list[tuple[int, int]]) -> None:
        if len(words) <= self.few:
            for index, value in words:
                self._published[divmod(index, self._words_per_service)] = value
                lib.store_release(self._words, index, value)
        else:
            places = np.array([index for index, _ in words], dtype=np.uint64)
            values = np.array([value for _, value in words], dtype=np.uint64)
            services, routes = np.divmod(places.astype(np.int64), self._words_per_service)
            self._published[services, routes] = values
            lib.store_release_many(
                self._words, ffi.from_buffer("uint64_t[]", places), ffi.from_buffer("uint64_t[]", values), len(words)
            )

    def _bits_of_frontends(self, keys: list[Key]) -> Iterable[tuple[Prefilter, layout.Words]]:
        for family in (4, 6):
            addresses = [key[1] for key in keys if key[0] == family and key[1] != ANY[family]]
            if addresses:
                yield self._service_bits, layout.service_bits(layout.address_words(addresses), family)
        ports = [PORT_KINDS[key[3]] << 16 | key[2] for key in keys if key[1] == ANY[key[0]]]
        if ports:
            yield self._node_port_bits, np.array(ports, dtype=np.uint32)

    def serve_node_ports_at(self, addresses: Collection[str]) -> None:
        """At these addresses of the node, and no others, a frontend of address `ANY` is served."""
        wanted: set[tuple[int, str]] = {(family_of(address), address) for address in addresses}
        for family in (4, 6):
            for frontends, chosen in ((wanted, True), (self._node_ports_at - wanted, False)):
                keys: list[Key] = sorted((of, address, 0, 0) for of, address in frontends if of == family)
                if not keys:
                    continue
                rows, words = self._frontend_keys(keys, family)
                if chosen:
                    flags = np.full(len(keys), FRONTEND_ADDRESS | FRONTEND_NODE_PORTS, dtype=np.uint64)
                    values = layout.frontend_values(
                        words, rows["port"], rows["protocol"], np.zeros_like(flags), flags, family
                    )
                    self.maps.maps[f"frontends{family}"].update_batch(rows, values)
                else:
                    self.maps.maps[f"frontends{family}"].delete_batch(rows)
        self._node_ports_at = wanted

    def _insert(self, batch: Batch, frontends: list[Key]) -> list[Key]:
        """Write these frontends of the batch; returns those for which the map had no room."""
        left: list[Key] = []
        for family in (4, 6):
            keys = [key for key in frontends if key[0] == family]
            if not keys:
                continue
            rows, words = self._frontend_keys(keys, family)
            targets = np.array([batch.frontends[key] for key in keys], dtype=np.uint64)
            values = layout.frontend_values(words, rows["port"], rows["protocol"], targets[:, 0], targets[:, 1], family)
            left += keys[self.maps.maps[f"frontends{family}"].update_batch(rows, values) :]
        return left

    @staticmethod
    def _frontend_keys(keys: list[Key], family: int) -> tuple[NDArray[Any], layout.Words]:
        rows = np.zeros(len(keys), dtype=layout.frontend_dtype(family))
        words = layout.address_words(key[1] for key in keys)
        rows["address"] = words if family == 6 else words[:, 0]
        rows["port"] = layout.swap16([key[2] for key in keys])
        rows["protocol"] = [key[3] for key in keys]
        return rows, words

    def _remove(self, batch: Batch) -> None:
        for family in (4, 6):
            keys = [key for key, _ in batch.gone_frontends if key[0] == family and key not in batch.frontends]
            if keys:
                self.maps.maps[f"frontends{family}"].delete_batch(self._frontend_keys(keys, family)[0])
        for service, family, cidrs in batch.sources:
            if not cidrs:
                self.sources.allow(service, family, cidrs)
        if not (batch.gone_backends or batch.gone_services or batch.gone_slices or batch.gone_frontends):
            return
        self.stamp += 1
        if batch.gone_backends:
            self._withdraw(batch.gone_backends)
        self._hold_bits(batch)
        self.deferred.put(self.stamp, batch.gone_services, batch.gone_backends, batch.gone_slices)

    def _withdraw(self, backends: list[int]) -> None:
        """These are no longer what they were; sockets are told apart from flows, which the programs look after."""
        if len(backends) <= self.few:
            for number in backends:
                self._cells.put_flags(number, 0)
            self._gone_datagram_backends += [n for n in backends if self._cells.protocol(n) == Protocol.UDP]
            return
        ids = np.array(backends, dtype=np.int64)
        self.backends["flags"][ids] = 0
        datagram = self.backends["kind"][ids] >> np.uint64(8) == int(Protocol.UDP)
        self._gone_datagram_backends += ids[datagram].tolist()

    def _hold_bits(self, batch: Batch) -> None:
        """Established connections to a service that is gone go on, as with conntrack: its packets must be looked at."""
        gone_services = set(batch.gone_services)
        for key, service in batch.gone_frontends:
            if service in gone_services:
                self._held.setdefault(service, []).append(key)
            else:
                self._clearing.append((self.stamp, key))

    def _clear_bits(self, keys: list[Key]) -> None:
        for bitmap, bits in self._bits_of_frontends(keys):
            bitmap.remove(bits)

    def addresses(self) -> dict[tuple[int, str], str]:
        """Family and address -> the name of a service that has it."""
        owners = {known.service: name for name, entries in self.installed.items() for known in entries.values()}
        return {
            (family, address): owners[number]
            for (family, address, _, _), number in self._owners.items()
            if number in owners
        }

    def take_gone_datagram_backends(self) -> list[int]:
        """UDP backends that went since the last call: sockets connected to them are of no use."""
        gone, self._gone_datagram_backends = self._gone_datagram_backends, []
        return gone

    def graced(self, stamp: int) -> None:
        """Every program that ran when `stamp` was current has ended: forget what only those could see."""
        while self._clearing and self._clearing[0][0] <= stamp:
            self._clear_bits([self._clearing.pop(0)[1]])
        if self.exact_after and self.exact_after <= stamp:
            for bitmap in (self._service_bits, self._backend_bits, self._node_port_bits):
                bitmap.only()
            self.exact_after = 0
        services, _ = self.deferred.graced(stamp)
        if services:
            self.services["sets"][services] = self._published[services] = 0

    def scanned(
        self, services: Collection[int], backends: Collection[int], named_services: Collection[int],
        named_backends: Collection[int],
    ) -> None:  # fmt: skip
        """The flows were searched for these ids and some were found: forget what is known of the others."""
        free_services, free_backends = self.deferred.scanned(services, backends, named_services, named_backends)
        for service in free_services:
            self._clear_bits(self._held.pop(service, []))
        rows = np.array(free_backends, dtype=np.int64)
        for bits in self._bits_of_backends(free_backends):
            self._backend_bits.remove(bits)
        self.traffic.give_back(free_services, rows, self.backends["service"][rows])
        self.backends["service"][rows] = self.backends["failures"][rows] = 0

    def audit(self) -> int:
        """Compare the slice words with what was published; repair and return the number of differences."""
        words = self.services["sets"]
        wrong = np.argwhere(words != self._published)
        repairs = [
            (service * self._words_per_service + route, int(self._published[service, route]))
            for service, route in wrong.tolist()
        ]
        self._publish_words(repairs)
        return len(repairs)


def _share_a_frontend(old: Entry, new: Entry) -> bool:
    wanted = {(frontend.address, frontend.port) for frontend in new.frontends}
    return any((frontend.address, frontend.port) in wanted for frontend in old.frontends) or not old.frontends


class _Adopted:
    """What a former process left in the maps, to be claimed by the first sync."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._values: dict[bytes, int] = {}
        self._sizes = {}
        for family in (4, 6):
            dtype = layout.frontend_dtype(family)
            keys, values = store.maps.maps[f"frontends{family}"].items(dtype, np.dtype(np.uint64))
            raw, size = keys.tobytes(), dtype.itemsize
            self._values.update((raw[i * size : (i + 1) * size], v) for i, v in enumerate(values.tolist()))
            self._sizes[family] = size
        owners = store.backends["service"]
        self._used_backends = np.flatnonzero(owners)
        order = self._used_backends[np.argsort(owners[self._used_backends], kind="stable")]
        services, starts = np.unique(owners[order], return_index=True)
        self._members = dict(zip(services.tolist(), np.split(order, starts[1:]) if len(starts) else [], strict=True))
        self._claimed: set[int] = set()

    def used(self) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """Ids and slices that the maps name: not free until claimed or given up."""
        services = sorted({v & 0xFFFFFFFF for v in self._values.values()} | set(self._members) - {0})
        slices = {piece for service in services for piece in self._slices(service) if piece[1]}
        return [s for s in services if s], self._used_backends.tolist(), sorted(slices)

    def _slices(self, service: int) -> list[tuple[int, int]]:
        """Slices by the service's words; the second has no size when it shares the first one's slots."""
        pieces: list[tuple[int, int]] = []
        for word in self.store.services[service]["sets"].tolist():
            offset, count, _ = layout.split_slice_word(word)
            shared = bool(pieces) and pieces[0][1] and offset == pieces[0][0]
            pieces.append((offset, 0 if shared else size_class(count)))
        return pieces

    def _key(self, family: int, address: str, port: int, protocol: int) -> bytes:
        return Store._frontend_keys([(family, address, port, protocol)], family)[0].tobytes()  # noqa: SLF001

    def claim(self, entry: Entry, rows: Rows) -> Previous:
        """The rows of this service port from the last life, empty when there are none."""
        for address, port, _ in rows.frontends:
            value = self._values.get(self._key(entry.family, address, port, int(entry.protocol)), 0)
            service = value & 0xFFFFFFFF
            if service and service not in self._claimed:
                self._claimed.add(service)
                return self._describe(entry, service)
        return Previous()

    def _describe(self, entry: Entry, service: int) -> Previous:
        store = self.store
        members: dict[tuple[str, int], tuple[int, int]] = {}
        rows = store.backends[self._members.get(service, np.empty(0, dtype=np.int64))]
        numbers = self._members.get(service, np.empty(0, dtype=np.int64)).tolist()
        ports = layout.swap16(rows["port"]).tolist()
        raw = np.ascontiguousarray(rows["address"]).tobytes()
        for i, (number, port, flags) in enumerate(zip(numbers, ports, rows["flags"].tolist(), strict=True)):
            if flags:
                members[layout.address_text(raw[16 * i : 16 * i + 16], entry.family), port] = (number, flags)
        rings, epoch = [], 0
        for word in store.services[service]["sets"].tolist():
            offset, count, epoch_of_word = layout.split_slice_word(word)
            rings.append((store.slots[offset : offset + count] & LOW_WORD).tolist())
            epoch = max(epoch, epoch_of_word)
        while rings and not rings[-1]:
            rings.pop()
        return Previous(
            service=service, members=members, rings=rings, slices=tuple(self._slices(service))[: max(len(rings), 1)],
            epoch=epoch, adopted=True,
        )  # fmt: skip

    def remove_leftovers(
        self, installed: dict[str, dict[EntryKey, Installed]], owners: dict[Key, int],
        addresses: Collection[tuple[int, str]],
    ) -> None:  # fmt: skip
        """What nobody claimed goes: frontends first, then, after a grace period, what they led to."""
        store = self.store
        wanted = {self._key(*key) for key in owners} | {self._key(f, a, 0, 0) for f, a in addresses}
        for family, size in self._sizes.items():
            stale = [key for key in self._values if len(key) == size and key not in wanted]
            if stale:
                keys = np.frombuffer(b"".join(stale), dtype=layout.frontend_dtype(family))
                store.maps.maps[f"frontends{family}"].delete_batch(keys)
        now = [known for entries in installed.values() for known in entries.values()]
        kept = np.concatenate([np.frombuffer(known.ids, dtype=np.uint32) for known in now]) if now else np.empty(0)
        gone = np.setdiff1d(self._used_backends, kept).astype(np.int64)
        store.backends["flags"][gone] = 0
        store.add_backend_bits(gone.tolist())
        services = sorted(set(self.used()[0]) - {known.service for known in now})
        in_use = {piece for known in now for piece in known.slices}
        slices = [piece for service in services for piece in self._slices(service) if piece[1] and piece not in in_use]
        store.stamp += 1
        store.deferred.put(store.stamp, services, gone.tolist(), slices)
        store.exact_after = store.stamp
