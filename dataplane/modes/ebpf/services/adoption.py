"""Adopts the previous agent's maps: the first sync claims their ids per service port; unclaimed rows are deleted."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from itertools import chain

import numpy as np

from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import InUse, Removed, size_class
from hybrid_proxy.dataplane.modes.ebpf.services.lower import Key, Rows, Settings
from hybrid_proxy.dataplane.modes.ebpf.services.plan import Installed, Plan
from hybrid_proxy.dataplane.modes.ebpf.services.writer import MapWriter, frontend_rows
from hybrid_proxy.dataplane.table import Backend, Entry


class Former:
    """The rows that the previous agent left in the maps, read once."""

    def __init__(self, maps: MapSet, writer: MapWriter) -> None:
        self._maps, self._writer = maps, writer
        self._values: dict[bytes, int] = {}
        self._sizes = {}
        for family in (4, 6):
            dtype = layout.frontend_dtype(family)
            keys, values = maps.maps[f"frontends{family}"].items(dtype, np.dtype(np.uint64))
            raw, size = keys.tobytes(), dtype.itemsize
            self._values.update((raw[i * size : (i + 1) * size], v) for i, v in enumerate(values.tolist()))
            self._sizes[family] = size
        owners = writer.rows.backends["service"]
        self._backends = np.flatnonzero(owners)
        order = self._backends[np.argsort(owners[self._backends], kind="stable")]
        services, starts = np.unique(owners[order], return_index=True)
        self._members = dict(zip(services.tolist(), np.split(order, starts[1:]) if len(starts) else [], strict=True))
        self._claimed: set[int] = set()

    def in_use(self) -> InUse:
        """Returns the ids and slots that the maps name. They are not free until they are claimed or released."""
        services = sorted({value & 0xFFFFFFFF for value in self._values.values()} | set(self._members) - {0})
        ranges = {piece for service in services for piece in self._ranges(service) if piece[1]}
        return InUse([service for service in services if service], self._backends.tolist(), sorted(ranges))

    def _ranges(self, service: int) -> list[tuple[int, int]]:
        """Returns the slot ranges of the service; the second has size 0 when it shares the first."""
        pieces: list[tuple[int, int]] = []
        for word in self._writer.rows.services[service]["sets"].tolist():
            offset, count, _ = layout.split_range_word(word)
            shared = bool(pieces) and pieces[0][1] and offset == pieces[0][0]
            pieces.append((offset, 0 if shared else size_class(count)))
        return pieces

    @staticmethod
    def _key(key: Key) -> bytes:
        return frontend_rows([key], key[0])[0].tobytes()

    def claim(self, entry: Entry, rows: Rows) -> Installed | None:
        """Returns the rows of this service port. Its settings are unknown, and its backends have no weights."""
        for key, _, _ in rows.settings.frontends:
            service = self._values.get(self._key(key), 0) & 0xFFFFFFFF
            if service and service not in self._claimed:
                self._claimed.add(service)
                return self._describe(entry, rows, service)
        return None

    def _describe(self, entry: Entry, rows: Rows, service: int) -> Installed:
        ids = self._members.get(service, np.empty(0, dtype=np.int64))
        ids = ids[self._writer.rows.backends["flags"][ids] != 0]
        found = self._writer.rows.backends[ids]
        ports, raw = layout.swap16(found["port"]).tolist(), np.ascontiguousarray(found["address"]).tobytes()
        members = [
            Backend(layout.address_text(raw[16 * i : 16 * i + 16], entry.family), port) for i, port in enumerate(ports)
        ]
        rings, epoch = [], 0
        for word in self._writer.rows.services[service]["sets"].tolist():
            offset, count, epoch_of_word = layout.split_range_word(word)
            slots = self._writer.rows.slots["backend"][offset : offset + count] & np.uint64(0xFFFFFFFF)
            rings.append(array("I", slots.tolist()))
            epoch = max(epoch, epoch_of_word)
        while rings and not rings[-1]:
            rings.pop()
        settings = Settings((), rows.settings.algorithm)
        former = Rows(settings, tuple(members), bytes(found["flags"].astype(np.uint8)), ())
        ranges = tuple(self._ranges(service))[: max(len(rings), 1)]
        return Installed(entry, former, service, array("I", ids.tolist()), tuple(rings), ranges, epoch)

    def remove_leftovers(self, plan: Plan, node_ports_at: Collection[Key]) -> None:
        """Delete unclaimed rows: frontends first, then, after a grace period, the services and backends behind them."""
        addresses = [(family, address, 0, 0) for family, address in plan.addresses]
        wanted = {self._key(key) for key in (*plan.owners, *addresses, *node_ports_at)}
        for family, size in self._sizes.items():
            stale = [key for key in self._values if len(key) == size and key not in wanted]
            if stale:
                keys = np.frombuffer(b"".join(stale), dtype=layout.frontend_dtype(family))
                self._maps.maps[f"frontends{family}"].delete_batch(keys)
        self._writer.source_ranges.only()
        now = list(plan.by_id.values())
        kept = np.fromiter(chain.from_iterable(port.ids for port in now), np.int64)
        gone = np.setdiff1d(self._backends, kept).tolist()
        self._writer.rows.write_flags([(number, 0) for number in gone])
        self._writer.backend_sockets.add(self._writer.rows.backend_bits(gone))
        services = sorted({*self.in_use().services} - plan.by_id.keys())
        claimed = {piece for port in now for piece in port.ranges}
        unclaimed = {piece for service in services for piece in self._ranges(service) if piece[1]} - claimed
        frontends = self._frontends_of_flows(services)
        self._writer.let_pass([key for key, _ in frontends])
        plan.pools.defer(Removed(services, gone, sorted(unclaimed), frontends))

    def _frontends_of_flows(self, services: Collection[int]) -> list[tuple[Key, int]]:
        """Returns the frontends of open flows to these services, which were removed or moved to another proxy.

        The prefilter must keep passing their packets to the datapath. A node port has the address that the flow used.
        """
        names, found = layout.abi_constants(), set[tuple[Key, int]]()
        for family in (4, 6):
            keys, values = flow_arrays(self._maps.maps[f"flows{family}"], family)
            clients = values["flags"] & (names["FLOW_REPLY"] | names["FLOW_OTHERS"]) == 0
            for position in np.flatnonzero(clients & np.isin(values["service"], list(services))).tolist():
                key = keys[position]
                address = layout.address_text(key["daddr"].tobytes(), family)
                port = int(layout.swap16([int(key["dport"])])[0])
                found.add(((family, address, port, int(key["protocol"])), int(values["service"][position])))
        return sorted(found)
