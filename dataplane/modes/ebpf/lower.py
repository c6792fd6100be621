"""PURE. One service port of the table to rows: frontends, members with their flags, rings of members."""

from __future__ import annotations

from typing import NamedTuple

from dataplane.table import Backend, Entry, Frontend, Kind, Route, WhenEmpty

__all__ = ["FRONTEND_ADDRESS", "FRONTEND_INSIDE_ROUTE", "FRONTEND_OUTSIDE_ROUTE", "Rows", "lower"]

# The enumerators of bpf/abi.h that a translation needs; a test compares them with the header.
FRONTEND_INSIDE_ROUTE, FRONTEND_OUTSIDE_ROUTE, FRONTEND_ADDRESS = 1, 2, 4
SERVICE_DROP_ROUTE = (1, 2)
BACKEND_SERVING, BACKEND_ROUTE = 1, (2, 4)

SERVED = frozenset({Kind.CLUSTER_IP})


class Rows(NamedTuple):
    """What the maps hold for one service port.

    `frontends` are (address, port, flags); `members` every backend that has a row, with `member_flags`;
    `rings` are indexes into `members`, in the order of the slots.
    """

    frontends: list[tuple[str, int, int]]
    members: list[Backend]
    member_flags: list[int]
    rings: list[list[int]]
    flags: int
    affinity_seconds: int


def lower(entry: Entry) -> Rows:
    """Translate; nothing is decided here."""
    routes = _routes(entry)
    members: dict[Backend, int] = dict.fromkeys(entry.serving, BACKEND_SERVING)
    flags = 0
    for bit, (route, drops) in enumerate(zip(routes, SERVICE_DROP_ROUTE, strict=False)):
        for backend in route.backends:
            members[backend] = members.get(backend, BACKEND_SERVING) | BACKEND_ROUTE[bit]
        if route.when_empty is WhenEmpty.DROP:
            flags |= drops
    index = {backend: position for position, backend in enumerate(members)}
    return Rows(
        frontends=list(_frontends(entry, routes)),
        members=list(members),
        member_flags=list(members.values()),
        rings=[[index[backend] for backend in route.backends] for route in routes],
        flags=flags,
        affinity_seconds=entry.affinity_seconds,
    )


def _routes(entry: Entry) -> list[Route]:
    """The distinct routes of the frontends that are served."""
    routes: list[Route] = []
    for frontend in entry.frontends:
        for route in (frontend.inside, frontend.outside):
            if frontend.kind in SERVED and not any(route is known or route == known for known in routes):
                routes.append(route)
    if len(routes) > 2:
        raise ValueError(f"{entry.name}: {len(routes)} distinct routes, the layout has room for two")
    return routes


def _frontends(entry: Entry, routes: list[Route]) -> list[tuple[str, int, int]]:
    return [
        (frontend.address, frontend.port, _frontend_flags(frontend, routes))
        for frontend in entry.frontends
        if frontend.kind in SERVED and frontend.address is not None
    ]


def _frontend_flags(frontend: Frontend, routes: list[Route]) -> int:
    inside = FRONTEND_INSIDE_ROUTE if routes.index(frontend.inside) else 0
    outside = FRONTEND_OUTSIDE_ROUTE if routes.index(frontend.outside) else 0
    return inside | outside
