"""PURE. One service port of the table to rows: frontends, members with their flags, routes and rings of members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dataplane.balancing import ALGORITHMS, Algorithm, Spread, find, ring_of
from dataplane.balancing.least_connections import FAIR
from dataplane.modes.ebpf.outliers import Ejection, ejected
from dataplane.table import Backend, BackendSet, Entry, Frontend, Kind, Masquerade, WhenEmpty

__all__ = [
    "ANY", "BACKEND_EJECTED", "FRONTEND_ADDRESS", "FRONTEND_INSIDE_ROUTE", "FRONTEND_MASQUERADE",
    "FRONTEND_NODE_PORTS", "FRONTEND_OUTSIDE_ROUTE", "FRONTEND_SOURCES", "NO_EJECTIONS", "Rows", "Socket",
    "algorithm_of", "lower", "rings_of",
]  # fmt: skip

# The enumerators of bpf/abi.h that a translation needs; a test compares them with the header.
FRONTEND_INSIDE_ROUTE, FRONTEND_OUTSIDE_ROUTE, FRONTEND_ADDRESS = 1, 2, 4
FRONTEND_MASQUERADE = {Masquerade.POD: 8, Masquerade.NODE: 16, Masquerade.EXTERNAL: 32}
_MASQUERADE = tuple((int(whom), flag) for whom, flag in FRONTEND_MASQUERADE.items())  # IntFlag's own `&` takes 2 us
FRONTEND_SOURCES, FRONTEND_NODE_PORTS = 64, 128
SERVICE_DROP_ROUTE = (1, 2)
SERVICE_SPREAD = {Spread.RANDOM: 0, Spread.TUPLE: 16, Spread.CLIENT: 32, Spread.IN_TURN: 64}
BACKEND_SERVING, BACKEND_ROUTE, BACKEND_EJECTED, BACKEND_PROBE_FAILED, BACKEND_LOCAL = 1, (2, 4), 8, 16, 32

ANY = {4: "0.0.0.0", 6: "::"}  # noqa: S104 - the address of node ports' frontends: every one that serves node ports


Socket = tuple[str, int]  # address and port


class Rows(NamedTuple):
    """What the maps hold for one service port.

    `frontends` are (address, port, flags), a node port's address being `ANY`; `members` every backend that has a
    row, with `member_flags`; `routes` are indexes into `members`, in the order of the table, of which `rings_of` makes
    slots; `sources` the CIDRs that may come to the frontends with FRONTEND_SOURCES.
    """

    frontends: list[tuple[str, int, int]]
    members: list[Backend]
    member_flags: list[int]
    routes: list[list[int]]
    flags: int
    affinity_seconds: int
    sources: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()  # addresses at which ports without a frontend are refused: ClusterIPs


NO_EJECTIONS: Mapping[Socket, Ejection] = {}


def lower(entry: Entry, ejections: Mapping[Socket, Ejection] = NO_EJECTIONS) -> Rows:
    """Translate. All that is decided here is which failing backends each route can do without."""
    routes = entry.backend_sets
    if len(routes) > 2:
        raise ValueError(f"{entry.name}: {len(routes)} distinct backend sets, the layout has room for two")
    members, member_flags, places = _members(entry, routes, ejections)
    flags = SERVICE_SPREAD[algorithm_of(entry).spread]
    for route, drop in zip(routes, SERVICE_DROP_ROUTE, strict=False):
        if route.when_empty is WhenEmpty.DROP:
            flags |= drop
    return Rows(
        frontends=_frontends(entry),
        members=members,
        member_flags=[flag | BACKEND_LOCAL if m.local else flag for m, flag in zip(members, member_flags, strict=True)],
        routes=places,
        flags=flags,
        affinity_seconds=entry.affinity_seconds,
        sources=_sources(entry),
        closed=tuple([f.address for f in entry.frontends if f.kind is Kind.CLUSTER_IP and f.address is not None]),
    )


def _members(
    entry: Entry, routes: Sequence[BackendSet], ejections: Mapping[Socket, Ejection]
) -> tuple[list[Backend], list[int], list[list[int]]]:
    """Members, their flags, and for each route the indexes of its members."""
    if not ejections and len(routes) == 1 and routes[0].backends is entry.serving:  # nearly all: nothing to look up
        count = len(entry.serving)
        return list(entry.serving), [BACKEND_SERVING | BACKEND_ROUTE[0]] * count, [list(range(count))]
    members: dict[Backend, int] = dict.fromkeys(entry.serving, BACKEND_SERVING)
    kept: list[list[Backend]] = []
    for bit, route in enumerate(routes):
        out = ejected([(b.address, b.port) for b in route.backends], ejections) if ejections else ()
        kept.append([])
        for backend in route.backends:
            flag = BACKEND_ROUTE[bit]
            if (backend.address, backend.port) in out:
                ejection = ejections[backend.address, backend.port]
                flag = BACKEND_EJECTED | (BACKEND_PROBE_FAILED if ejection.until is None else 0)
            else:
                kept[bit].append(backend)
            members[backend] = members.get(backend, BACKEND_SERVING) | flag
    index = {backend: position for position, backend in enumerate(members)}
    return list(members), list(members.values()), [[index[backend] for backend in route] for route in kept]


def algorithm_of(entry: Entry) -> Algorithm:
    """What fills the rings: the default where this mode has no equivalent of what is asked for."""
    return find(entry.algorithm) or ALGORITHMS["random"]


def rings_of(entry: Entry, rows: Rows, limit: int, shares: Mapping[Socket, int] | None = None) -> list[list[int]]:
    """Indexes into `rows.members` for each route, in the order of the slots.

    Args:
        entry: the service port.
        rows: what `lower` made of it.
        limit: slots for one ring; 0: a slot for each backend, whatever the algorithm would like.
        shares: of backends, where the algorithm follows the load; those it does not name get a fair one.
    """
    if not limit:
        return rows.routes
    algorithm = algorithm_of(entry)
    rings = []
    for route in rows.routes:
        backends = [rows.members[position] for position in route]
        parts = [shares.get((backend.address, backend.port), FAIR) for backend in backends] if shares else None
        rings.append([route[place] for place in ring_of(algorithm, backends, limit, parts)])
    return rings


def _sources(entry: Entry) -> tuple[str, ...]:
    """One list for the service port: a Service has one `loadBalancerSourceRanges`."""
    for frontend in entry.frontends:
        if frontend.source_ranges is not None:
            return frontend.source_ranges
    return ()


def _frontends(entry: Entry) -> list[tuple[str, int, int]]:
    return [
        (ANY[entry.family] if frontend.address is None else frontend.address, frontend.port, _flags(frontend))
        for frontend in entry.frontends
    ]


def _flags(frontend: Frontend) -> int:
    inside = FRONTEND_INSIDE_ROUTE if frontend.internal else 0
    outside = FRONTEND_OUTSIDE_ROUTE if frontend.external else 0
    asked = int(frontend.masquerade)
    flags = inside | outside | (FRONTEND_SOURCES if frontend.source_ranges is not None else 0)
    for whom, flag in _MASQUERADE:
        if asked & whom:
            flags |= flag
    return flags
