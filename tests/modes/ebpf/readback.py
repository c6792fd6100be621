"""What the maps say, read back without the store's knowledge, and what a table says they should."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.table import Entry, Kind, Protocol, WhenEmpty
from tests.tables import fronts_of

FLAGS = layout.abi_constants()
Key = tuple[int, str, int, int]  # family, address, port, protocol


class Port(NamedTuple):
    """A frontend as a client meets it."""

    inside: list[tuple[str, int]]  # backends in the order of slots
    outside: list[tuple[str, int]]
    drops: tuple[bool, bool]  # when empty: inside, outside
    affinity: int
    serving: frozenset[tuple[str, int]]  # established flows to these may stay


def wanted(services: Iterable[Entry], hz: int) -> tuple[dict[Key, Port], set[tuple[int, str]]]:
    """What the table says: frontends, and addresses whose other ports are refused."""
    ports: dict[Key, Port] = {}
    for entry in services:
        serving = {(b.address, b.port) for b in entry.serving}
        cluster = [frontend for frontend in fronts_of(entry) if frontend.kind is Kind.CLUSTER_IP]
        for frontend in cluster:
            serving |= {(b.address, b.port) for used in (frontend.internal, frontend.external) for b in used.backends}
        for frontend in cluster:
            assert frontend.address is not None
            sets = (frontend.internal, frontend.external)
            inside, outside = ([(b.address, b.port) for b in used.backends] for used in sets)
            drops = tuple(used.when_empty is WhenEmpty.DROP for used in sets)
            ports[entry.family, frontend.address, frontend.port, int(entry.protocol)] = Port(
                inside, outside, drops, entry.affinity_seconds * hz, frozenset(serving)
            )
    return ports, {(family, address) for family, address, _, _ in ports}


class Backends:
    """Rows of the backends map by service."""

    def __init__(self, maps: MapSet) -> None:
        self.table = maps.view("backends").copy()
        self.by_service: dict[int, list[int]] = {}
        for number in np.flatnonzero(self.table["service"]).tolist():
            self.by_service.setdefault(int(self.table["service"][number]), []).append(number)

    def socket(self, number: int) -> tuple[str, int]:
        row = self.table[number]
        kind = int(row["kind"])
        return layout.address_text(row["address"].tobytes(), kind & 0xFF), int(layout.swap16([int(row["port"])])[0])

    def flags(self, number: int) -> int:
        return int(self.table["flags"][number])


def programmed(maps: MapSet) -> tuple[dict[Key, Port], set[tuple[int, str]]]:
    """What the maps say, following the programs' way: frontend, tag, service, slice word, slots, backends."""
    ports: dict[Key, Port] = {}
    addresses: set[tuple[int, str]] = set()
    services, slots, backends = maps.view("services"), maps.view("slots")["backend"], Backends(maps)
    service_bits, backend_bits = maps.bitmap("service_addresses"), maps.bitmap("backend_sockets")
    for family in (4, 6):
        keys, values = maps.maps[f"frontends{family}"].items(layout.frontend_dtype(family), np.dtype(np.uint64))
        for key, value in zip(keys, values.tolist(), strict=True):
            address = layout.address_text(key["address"].tobytes(), family)
            words = layout.address_words([address])
            number, flags = value & 0xFFFFFFFF, value >> 32 & 0xFF
            port, protocol = int(layout.swap16([int(key["port"])])[0]), int(key["protocol"])
            again = layout.frontend_values(
                words, np.array([key["port"]]), np.array([protocol]), np.array([number]), np.array([flags]), family
            )
            assert int(again[0]) == value, "tag"
            assert is_set(service_bits, layout.service_bits(words, family)), f"prefilter of {address}"
            if flags & (FLAGS["FRONTEND_ADDRESS"] | FLAGS["FRONTEND_NODE_PORTS"]):
                assert (port, protocol, number) == (0, 0, 0)
                addresses.add((family, address))
                continue
            service = services[number]
            routes = [read_route(slots, backends, number, int(word)) for word in service["sets"]]
            chosen = (
                1 if flags & FLAGS["FRONTEND_INTERNAL_SET"] else 0,
                1 if flags & FLAGS["FRONTEND_EXTERNAL_SET"] else 0,
            )
            members = [n for n in backends.by_service.get(number, []) if backends.flags(n)]
            check_members(backends, members, routes, backend_bits, family, protocol)
            drops = FLAGS["SERVICE_DROP_SET0"], FLAGS["SERVICE_DROP_SET1"]
            ports[family, address, port, protocol] = Port(
                [backends.socket(n) for n in routes[chosen[0]]],
                [backends.socket(n) for n in routes[chosen[1]]],
                tuple(bool(int(service["flags"]) & drops[route]) for route in chosen),
                int(service["affinity"]),
                frozenset(backends.socket(n) for n in members),
            )
    return ports, addresses


def read_route(slots: Any, backends: Backends, service: int, word: int) -> list[int]:
    offset, count, _ = layout.split_range_word(word)
    values = slots[offset : offset + count].tolist()
    assert [value >> 32 for value in values] == [service] * count, "slots of another service"
    numbers = [value & 0xFFFFFFFF for value in values]
    assert {int(backends.table["service"][n]) for n in numbers} <= {service}, "backends of another service"
    return numbers


def check_members(
    backends: Backends, members: list[int], routes: list[list[int]], bits: Any, family: int, protocol: int
) -> None:
    """Flags say what the routes say, and every member is in the prefilter."""
    names = ("BACKEND_SET0", "BACKEND_SET1")
    for number in members:
        flags = backends.flags(number)
        assert flags & FLAGS["BACKEND_SERVING"]
        assert [bool(flags & FLAGS[name]) for name in names] == [number in route for route in routes]
        row = backends.table[number : number + 1]
        words = np.ascontiguousarray(row["address"])
        assert is_set(bits, layout.backend_bits(words, row["port"], np.array([protocol]), family))
        assert int(row["kind"][0]) == family | protocol << 8
    assert {n for route in routes for n in route} <= set(members)


def is_set(bitmap: Any, bits: Any) -> bool:
    return all(int(bitmap[bit >> 6]) >> (bit & 63) & 1 for bit in bits.tolist())


def check(store: Store, services: Mapping[str, tuple[Entry, ...]], *, settled: bool) -> None:
    """The maps are what the table says, and the store's books are what is in the maps."""
    entries = [entry for group in services.values() for entry in group]
    ports, addresses = programmed(store.maps)
    want_ports, want_addresses = wanted(entries, store.writer.hz)
    assert ports.keys() == want_ports.keys()
    for key, port in ports.items():
        assert port._asdict() == want_ports[key]._asdict(), key
    assert addresses == want_addresses
    check_books(store, len(entries), entries, settled=settled)


def check_books(store: Store, number: int, entries: list[Entry], *, settled: bool) -> None:
    """Numbers out, slots out and bits counted are those in use, when nothing waits."""
    installed = [known for group in store.plan.installed.values() for known in group]
    assert len(installed) == number
    pieces = sorted(piece for known in installed for piece in known.ranges if piece[1])
    for (start, size), (after, _) in itertools.pairwise(pieces):
        assert start + size <= after, "slices overlap"
    ids = [n for known in installed for n in known.ids]
    assert len(set(ids)) == len(ids)
    assert len({known.service for known in installed}) == len(installed)
    if not settled:
        return
    assert len(store.plan.pools) == 0
    assert store.plan.pools.slots.in_use == sum(size for _, size in pieces)
    assert store.plan.pools.services.used == len(installed)
    assert store.plan.pools.backends.used == len(ids)
    check_prefilters(store, entries)


def check_prefilters(store: Store, entries: list[Entry]) -> None:
    """Counted exactly, and no bit more in the map than is counted."""
    services, backends = np.zeros(1 << 20, dtype=np.uint16), np.zeros(1 << 20, dtype=np.uint16)
    ports, addresses = wanted(entries, store.writer.hz)
    for family, address in [*((key[0], key[1]) for key in ports), *addresses]:
        np.add.at(services, layout.service_bits(layout.address_words([address]), family), 1)
    for known in (known for group in store.plan.installed.values() for known in group):
        for number in known.ids:
            row = store.backends[number : number + 1]
            words = np.ascontiguousarray(row["address"])
            protocol = np.array([int(known.entry.protocol)])
            np.add.at(backends, layout.backend_bits(words, row["port"], protocol, known.entry.family), 1)
            if known.entry.protocol is not Protocol.TCP:  # of fragments, which have no ports
                none = np.zeros(1, np.uint16)
                np.add.at(backends, layout.backend_bits(words, none, none, known.entry.family), 1)
    for prefilter, counts in ((store.writer.service_addresses, services), (store.writer.backend_sockets, backends)):
        assert np.array_equal(prefilter.counts, counts)
        assert np.array_equal(np.unpackbits(prefilter.view.view(np.uint8), bitorder="little"), counts > 0)


def settle(store: Store) -> None:
    """A grace period and a scan that finds no flow."""
    store.graced(store.plan.pools.stamp)
    store.scanned(*store.plan.pools.candidates)
