"""Owns the maps of the service table: plans what changes, writes it, and frees what is out of use.

The first change after a start is compared with what the maps hold, so that a restart adopts them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.grace import wait_for_programs
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import InUse
from hybrid_proxy.dataplane.modes.ebpf.maps.traffic import FIELDS
from hybrid_proxy.dataplane.modes.ebpf.services import lower
from hybrid_proxy.dataplane.modes.ebpf.services.adoption import Former
from hybrid_proxy.dataplane.modes.ebpf.services.ejections import Counts, Ejection
from hybrid_proxy.dataplane.modes.ebpf.services.plan import RINGS, Batch, Plan, Rings, Subject
from hybrid_proxy.dataplane.modes.ebpf.services.writer import MapWriter
from hybrid_proxy.dataplane.slow_start import Parts
from hybrid_proxy.dataplane.table import Entry, EntryKey, family_of

FIRST_FILL = 500  # services
BEGUN = FIELDS.index("flows")  # in the figures of traffic


class ForeignEntries(DataplaneError):
    """The maps hold entries that this process did not write."""


class Store:
    """The plan and the writer of one set of maps. Not thread-safe.

    Args:
        maps: the open set. If they were adopted, the first `apply` adopts what the previous agent wrote.
        hz: jiffies per second, for affinity times.
    """

    def __init__(self, maps: MapSet, hz: int, *, rings: Rings = RINGS) -> None:
        self.maps = maps
        self._hz, self._rings = hz, rings
        self._begin(adopt=maps.adopted)

    def _begin(self, *, adopt: bool, stamp: int = 0) -> None:
        maps = self.maps
        self.writer = MapWriter(maps, self._hz)
        self._former = Former(maps, self.writer) if adopt else None
        used = self._former.in_use() if self._former else InUse()
        claim = self._former.claim if self._former else None
        self.plan = Plan(self._sizes(), used, claim, self._rings, stamp)
        self._names: dict[int, str] = {}
        self.traffic, self.first_packets = maps.traffic(), maps.first_packets()
        if self._former is not None:
            self.traffic.only(used.services, used.backends)
            self.first_packets.only(used.services)
        self.unwritten: deque[Batch] = deque()  # planned, in this order
        self.late: list[Batch] = []  # written but for frontends for which there was no room
        self.node_ports_at: dict[lower.Key, tuple[int, int]] = {}  # frontends of no service
        self.graced_stamp = 0  # number of the last grace period that is over
        self._exact_after = 0  # once this grace period is over, prefilter bits of a former process go

    def start_over(self) -> None:
        """Forgets everything: the maps hold what this process did not write, and the next `apply` adopts them.

        No program may still use what waits to be freed.
        """
        self._begin(adopt=True, stamp=self.plan.pools.stamp)

    def _sizes(self) -> dict[str, int]:
        return {name: known.entries for name, known in self.maps.maps.items()}

    @property
    def backends(self) -> NDArray[Any]:
        return self.writer.rows.backends

    @property
    def services(self) -> NDArray[Any]:
        return self.writer.rows.services

    def grown(self) -> None:
        """Write to the maps' replacements, which are larger and have the same content, from now on."""
        self.writer.grown()
        self.plan.pools.resize(self._sizes())
        self.traffic = self.maps.traffic()

    def free_slots(self) -> bool:
        """Waits for programs where slots lack, and some only wait for programs that may still read them.

        A change of most services at once takes their new slots before it gives the old ones back.
        """
        if "slots" not in self.plan.full or not self.plan.pools.has_slots:
            return False
        wait_for_programs()
        self.graced(self.plan.pools.stamp)
        return True

    # Changes

    def apply(
        self, services: Mapping[str, Sequence[Entry]], names: Collection[str] | None = None,
        parts: Mapping[EntryKey, Parts] | None = None,
    ) -> tuple[int, int]:  # fmt: skip
        """Replace services (one without entries is removed). Returns the numbers of ports changed and removed.

        Args:
            services: by name.
            names: those to replace; all of `services` by default.
            parts: of the weights of backends in slow start; None: as they are.

        Raises:
            DataplaneError, OSError, ValueError: not everything is written. What is planned stays planned: the next call
                begins with writing the rest of it. It must be given these services again.
            ForeignEntries: a map is full of foreign entries. A store that adopts removes them.
        """
        changed = removed = 0
        names = list(services if names is None else names)
        self.plan.parts = self.plan.parts if parts is None else parts
        # The first fill goes in parts: the memory that planning one of them needs serves the next one too.
        step = max(1, len(names)) if self.plan.installed else FIRST_FILL
        for start in range(0, len(names), step):
            batch = Batch()
            self.unwritten.append(batch)
            for name in names[start : start + step]:
                more, less = self.plan.change(batch, name, services.get(name, ()))
                changed, removed = changed + more, removed + less
            self._write()
        if self._former is not None:
            self._former.remove_leftovers(self.plan, self.node_ports_at)
            self._former = self.plan.adopt = None
            self._exact_after = self.plan.pools.stamp
            if not self._exact_after:  # programs can see nothing that is gone, and no grace period will be asked for
                self.writer.only()
        while self.late:
            batch = self.late.pop()
            if self.writer.insert(batch.late_frontends, batch.frontends):
                raise ForeignEntries("the maps of frontends hold more than this process wrote: `hybrid-proxy cleanup`")
        return changed, removed

    def adjust(self, ejections: Mapping[Subject, Ejection], parts: Mapping[EntryKey, Parts]) -> None:
        """Eject these backends, and readmit all others, as far as each backend set can do without them.

        Scale the weights of the backends in slow start; reset all others.
        """
        batch = Batch()
        self.plan.adjust(batch, ejections, parts)
        self.unwritten.append(batch)
        self._write()

    def _write(self) -> None:
        """Write the planned batches in order; one that failed before comes first."""
        while self.unwritten:
            batch = self.unwritten[0]
            self.writer.write(batch)
            self.plan.pools.defer(batch.gone)
            if batch.late_frontends:
                self.late.append(batch)
            self.unwritten.popleft()

    def serve_node_ports_at(self, addresses: Collection[str], loopback: Collection[str] = ()) -> None:
        """Serve frontends of address `ANY` at exactly these addresses of the node.

        At those in `loopback` they are served to the node's own sockets alone.
        """
        flags = dict.fromkeys(loopback, lower.FRONTEND_NODE_PORTS)
        flags |= dict.fromkeys(addresses, lower.FRONTEND_ADDRESS | lower.FRONTEND_NODE_PORTS)
        wanted = {(family_of(address), address, 0, 0): (0, flags[address]) for address in sorted(flags)}
        former, self.node_ports_at = self.node_ports_at, wanted
        self.writer.insert(wanted, wanted)
        self.writer.delete(former.keys() - wanted.keys())
        used = self.plan.pools.frontends  # an entry for each address
        used.update(family for family, *_ in wanted)
        used.subtract(family for family, *_ in former)

    # Freeing

    def graced(self, stamp: int) -> None:
        """Free what only programs could see that ran when `stamp` was current: all of them have ended."""
        self.graced_stamp = stamp
        freed = self.plan.pools.graced(stamp)
        self.writer.clear_frontends(freed.frontends)
        if freed.services:
            self.writer.rows.clear_services(freed.services)
        if self._exact_after and self._exact_after <= stamp:
            self.writer.only()
            self._exact_after = 0

    def scanned(self, services: Collection[int], backends: Collection[int]) -> None:
        """Free the ids that were looked for in the flows and not found."""
        freed = self.plan.pools.scanned(services, backends)
        self.writer.clear_frontends(freed.frontends)
        ids = np.array(freed.backends, dtype=np.int64)
        self.traffic.give_back(freed.services, ids, self.backends["service"][ids])
        self.first_packets.give_back(freed.services)
        self.writer.clear_backends(freed.backends)

    # What the maps say

    def names(self) -> dict[int, str]:
        """Returns the name of each service port by its id: the same object until that changes."""
        if self.plan.renumbered:
            self.plan.renumbered = False
            self._names = {number: port.entry.name for number, port in self.plan.by_id.items()}
        return self._names

    def addresses(self) -> dict[tuple[int, str], str]:
        """Returns the name of a service by each family and address that it has."""
        services = {number: name.rpartition(":")[0] for number, name in self.names().items()}
        return {
            (family, address): services[number]
            for (family, address, _, _), number in self.plan.owners.items()
            if number in services
        }

    def failures(self) -> dict[Subject, int]:
        """Returns the consecutive failed connections of each backend that has any, as the programs counted them."""
        # Once a second, of up to 1,000,000 rows: only those in use, and without a copy.
        ids = self.backends["failures"][: self.plan.pools.backends.end].nonzero()[0]
        found: dict[Subject, int] = {}
        for known in filter(None, map(self.plan.by_id.get, set(self.backends["service"][ids].tolist()))):
            # Not of a backend that was removed: the same address may have come back by another id.
            counts = self.backends["failures"][np.array(known.ids, dtype=np.int64)].tolist()
            members = zip(known.rows.members, counts, strict=True)
            found |= {(known.entry.key, (b.address, b.port)): count for b, count in members if count}
        return found

    def ports_of(self, backends: Collection[int]) -> set[EntryKey]:
        """Returns the service ports to which these backends belong."""
        services = self.backends["service"][list(backends)].tolist()
        return {known.entry.key for number in services if (known := self.plan.by_id.get(number)) is not None}

    def connections(
        self, ports: Iterable[EntryKey], failed: Mapping[int, int]
    ) -> dict[EntryKey, dict[Subject, Counts]]:
        """Returns how many connections to each backend of these service ports began, with the `failed` ones given."""
        found: dict[EntryKey, dict[Subject, Counts]] = {}
        for key in ports:
            if numbers := self.numbers(key):
                begun = self.traffic.of_backends(np.array([*numbers.values()], dtype=np.int64))[:, BEGUN].tolist()
                found[key] = {
                    (key, socket): Counts(count, failed.get(number, 0))
                    for (socket, number), count in zip(numbers.items(), begun, strict=True)
                }
        return found

    def numbers(self, key: EntryKey) -> dict[lower.Socket, int]:
        """Returns the ids of the backends of a service port; empty if there is no such port."""
        known = self.plan.find(key)
        return {} if known is None else known.numbers

    def readmit(self, backend: int, count: int) -> None:
        """Lower the backend's count of failures to `count`."""
        self.backends["failures"][backend] = min(int(self.backends["failures"][backend]), count)

    def is_ejected(self, backend: int) -> bool:
        """True if a backend set of the backend leaves it out."""
        return bool(int(self.backends["flags"][backend]) & lower.BACKEND_EJECTED)
