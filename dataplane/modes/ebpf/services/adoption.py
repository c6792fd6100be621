"""Adopts the previous agent's maps: the first sync claims their ids per service port; unclaimed rows are deleted."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import chain, pairwise

import numpy as np

from hybrid_proxy.dataplane.addresses import canonical_address
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import InUse, Removed, size_class
from hybrid_proxy.dataplane.modes.ebpf.services.lower import Key, Rows
from hybrid_proxy.dataplane.modes.ebpf.services.plan import Adopted, Plan
from hybrid_proxy.dataplane.modes.ebpf.services.writer import MapWriter

_SERVICE = np.uint64(0xFFFFFFFF)  # the bits of a frontend's value that name its service


class Former:
    """The rows that the previous agent left in the maps, read once."""

    def __init__(self, maps: MapSet, writer: MapWriter) -> None:
        self._maps, self._writer = maps, writer
        self._frontends: dict[Key, int] = {}  # and the service of each
        for family in (4, 6):
            keys, values = maps.maps[f"frontends{family}"].items(layout.frontend_dtype(family), np.dtype(np.uint64))
            self._frontends.update(zip(layout.frontend_keys(keys, family), (values & _SERVICE).tolist(), strict=True))
        owners = writer.rows.backends["service"]
        self._backends = np.flatnonzero(owners)
        # The backends in the order of their services, as flat buffers: slices of these are cheap, numpy calls are not.
        order = self._backends[np.argsort(owners[self._backends], kind="stable")]
        owned, starts = np.unique(owners[order], return_index=True)
        self._members = dict(zip(owned.tolist(), pairwise([*starts.tolist(), len(order)]), strict=True))
        found = writer.rows.backends[order]
        self._ids = array("I", order.astype(np.uint32).tobytes())
        self._flags = found["flags"].astype(np.uint8).tobytes()
        self._addresses, self._ports = found["address"].tobytes(), array("H", layout.swap16(found["port"]).tobytes())
        services = sorted({*self._frontends.values(), *self._members} - {0})
        words = layout.split_range_word(writer.rows.services["sets"][services])
        self._sets = dict(zip(services, zip(*(column.tolist() for column in words), strict=True), strict=True))
        self._ranges = {service: _ranges_of(offsets, counts) for service, (offsets, counts, _) in self._sets.items()}
        end = max((offset + size for pieces in self._ranges.values() for offset, size in pieces), default=0)
        self._slots = array("I", writer.rows.slots["backend"][:end].astype(np.uint32).tobytes())
        self._claimed: set[int] = set()

    def in_use(self) -> InUse:
        """Returns the ids and slots that the maps name. They are not free until they are claimed or released."""
        ranges = {piece for pieces in self._ranges.values() for piece in pieces if piece[1]}
        return InUse(self._ranges.keys(), self._backends.tolist(), ranges)

    def claim(self, rows: Rows) -> Adopted | None:
        """Returns what is known of the service port with these frontends."""
        for key, _, _ in rows.settings.frontends:
            service = self._frontends.get(key, 0)
            if service and service not in self._claimed:
                self._claimed.add(service)
                return self._describe(key[0], service)
        return None

    def _describe(self, family: int, service: int) -> Adopted:
        numbers = {
            (layout.address_text(self._addresses[16 * at : 16 * at + 16], family), self._ports[at]): self._ids[at]
            for at in range(*self._members.get(service, (0, 0)))
            if self._flags[at]
        }
        offsets, counts, epochs = self._sets[service]
        rings = [self._slots[offset : offset + count] for offset, count in zip(offsets, counts, strict=True)]
        while rings and not rings[-1]:
            rings.pop()
        return Adopted(service, numbers, tuple(rings), self._ranges[service][: max(len(rings), 1)], max(epochs))

    def remove_leftovers(self, plan: Plan, node_ports_at: Collection[Key]) -> None:
        """Delete unclaimed rows: frontends first, then, after a grace period, the services and backends behind them."""
        addresses = [(family, address, 0, 0) for family, address in plan.addresses]
        wanted = {*plan.owners, *addresses, *node_ports_at}
        # The kernel's text of a few IPv6 addresses is not the canonical one.
        stale = [
            key for key in self._frontends
            if key not in wanted and (key[0], canonical_address(key[1]), *key[2:]) not in wanted
        ]  # fmt: skip
        self._writer.delete(stale)
        self._writer.source_ranges.only()
        now = list(plan.by_id.values())
        free = np.ones(len(self._writer.rows.backends), np.bool_)
        free[np.fromiter(chain.from_iterable(port.ids for port in now), np.int64)] = False
        gone = self._backends[free[self._backends]].tolist()
        self._writer.rows.write_flags([(number, 0) for number in gone])
        self._writer.backend_sockets.add(self._writer.rows.backend_bits(gone))
        services = sorted(self._ranges.keys() - plan.by_id.keys())
        claimed = {piece for port in now for piece in port.ranges}
        unclaimed = {piece for service in services for piece in self._ranges[service] if piece[1]} - claimed
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


def _ranges_of(offsets: Sequence[int], counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns the slot ranges of a service; the second has size 0 when it shares the first."""
    pieces: list[tuple[int, int]] = []
    for offset, count in zip(offsets, counts, strict=True):
        shared = bool(pieces) and pieces[0][1] and offset == pieces[0][0]
        pieces.append((offset, 0 if shared else size_class(count)))
    return tuple(pieces)
