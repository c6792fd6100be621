"""PURE. Translates one service port of the table to rows: frontends, members with their flags, and backend sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from hybrid_proxy.dataplane.balancing import KNOWN, Algorithm, Spread, find
from hybrid_proxy.dataplane.balancing.ring import turns
from hybrid_proxy.dataplane.modes.ebpf.services.ejections import Ejection, ejected
from hybrid_proxy.dataplane.table import Backend, Entry, Kind, Masquerade, WhenEmpty

# The enumerators of bpf/abi.h that a translation needs; a test compares them with the header.
BACKEND_SETS = 2
FRONTEND_INTERNAL_SET, FRONTEND_EXTERNAL_SET, FRONTEND_ADDRESS = 1, 2, 4
FRONTEND_MASQUERADE = {Masquerade.POD: 8, Masquerade.NODE: 16, Masquerade.EXTERNAL: 32}
# By the number of a `Masquerade`: IntFlag's own `&` takes 2 us.
_MASQUERADE = tuple(
    sum(flag for whom, flag in FRONTEND_MASQUERADE.items() if number & int(whom))
    for number in range(Masquerade.ALWAYS + 1)
)
FRONTEND_SOURCE_RANGES, FRONTEND_NODE_PORTS = 64, 128
SERVICE_DROP_SET = (1, 2)
SERVICE_SPREAD = {Spread.RANDOM: 0, Spread.TUPLE: 16, Spread.CLIENT: 32, Spread.IN_TURN: 64, Spread.FEWEST: 128}
BACKEND_SERVING, BACKEND_SET, BACKEND_EJECTED, BACKEND_PROBE_FAILED, BACKEND_LOCAL = 1, (2, 4), 8, 16, 32
BACKEND_COUNTED = 64

ANY = {4: "0.0.0.0", 6: "::"}  # noqa: S104 - the address of node ports' frontends: every one that serves node ports

Socket = tuple[str, int]  # address and port
Key = tuple[int, str, int, int]  # family, address, port, protocol; an address entry has port and protocol 0
FrontendRow = tuple[Key, int, bool]  # its flags, and whether its address rejects all ports that have no frontend

NO_EJECTIONS: Mapping[Socket, Ejection] = {}


class Settings(msgspec.Struct, frozen=True, gc=False):
    """The settings of a service port: all that it has besides backends.

    The address of a node port's frontend is `ANY`. `flags` are those of the service's row. `source_ranges` are the
    CIDRs of the clients that the frontends with FRONTEND_SOURCE_RANGES allow.
    """

    frontends: tuple[FrontendRow, ...]
    algorithm: Algorithm
    flags: int = 0
    affinity_seconds: int = 0
    source_ranges: tuple[str, ...] = ()


class Rows(msgspec.Struct, frozen=True, gc=False):
    """The rows of one service port. They are kept for as long as the port is in the maps, so they are small.

    `members` are all backends that have a row, with a byte of `flags` each. `sets` are the backend sets, as indexes
    into `members`; `balancing.ring_of` makes rings from them. `plain`: there is one set, and its ring has each member
    once, in order.
    """

    settings: Settings
    members: tuple[Backend, ...]
    flags: bytes
    sets: tuple[Sequence[int], ...]
    plain: bool = False


def lower(
    entry: Entry, ejections: Mapping[Socket, Ejection] = NO_EJECTIONS, former: tuple[Entry, Settings] | None = None
) -> Rows:
    """Translate a service port. The only decision made here is which failing backends each backend set leaves out.

    `former` is what the maps have: settings that are the same are not translated again.

    Raises:
        ValueError: there are more backend sets than fit into a row.
    """
    sets = entry.backend_sets
    if len(sets) > BACKEND_SETS:
        raise ValueError(f"{entry.name}: {len(sets)} distinct backend sets, there is room for two")
    algorithm, serving, service_flags = _BY_ALGORITHM.get(entry.algorithm) or _DEFAULT
    plain = False
    if not ejections and len(sets) == 1 and sets[0].backends is entry.serving:
        # Nearly all service ports: every backend is in the only set, and there is nothing to look up.
        flags = serving | BACKEND_SET[0]
        members, members_of = entry.serving, _all_of(len(entry.serving))
        member_flags = bytes([flags | BACKEND_LOCAL if backend.local else flags for backend in members])
        plain = algorithm.ring is turns and len({backend.weight for backend in members}) < 2
    else:
        members, member_flags, members_of = _members(entry, ejections, serving)
    for backend_set, drop in zip(sets, SERVICE_DROP_SET, strict=False):
        if backend_set.when_empty is WhenEmpty.DROP:
            service_flags |= drop
    before, settings = former or (None, None)
    if (
        before is None or settings is None or before.frontends != entry.frontends
        or (settings.algorithm, settings.flags, settings.affinity_seconds)
        != (algorithm, service_flags, entry.affinity_seconds)
    ):  # fmt: skip
        # A Service has one `loadBalancerSourceRanges`: all frontends that are restricted have the same ranges.
        ranges = next((one.source_ranges for one in entry.frontends if one.source_ranges is not None), ())
        settings = Settings(_frontends(entry), algorithm, service_flags, entry.affinity_seconds, ranges)
    return Rows(settings, members, member_flags, members_of, plain)


def _members(
    entry: Entry, ejections: Mapping[Socket, Ejection], serving: int
) -> tuple[tuple[Backend, ...], bytes, tuple[Sequence[int], ...]]:
    """Returns members, their flags, and for each backend set the indexes of its members; `serving` are flags of all."""
    members: dict[Backend, int] = {b: serving | BACKEND_LOCAL * b.local for b in entry.serving}
    kept: list[list[Backend]] = []
    for bit, backend_set in enumerate(entry.backend_sets):
        out = ejected([(b.address, b.port) for b in backend_set.backends], ejections) if ejections else ()
        kept.append([])
        for backend in backend_set.backends:
            flag = BACKEND_SET[bit]
            if (backend.address, backend.port) in out:
                ejection = ejections[backend.address, backend.port]
                flag = BACKEND_EJECTED | (BACKEND_PROBE_FAILED if ejection.until is None else 0)
            else:
                kept[bit].append(backend)
            members[backend] = members.get(backend, serving | BACKEND_LOCAL * backend.local) | flag
    index = {backend: position for position, backend in enumerate(members)}
    return tuple(members), bytes(members.values()), tuple(tuple([index[b] for b in backends]) for backends in kept)


@lru_cache(maxsize=256)
def _all_of(count: int) -> tuple[Sequence[int], ...]:
    """Returns the only backend set of a service port with so many members; all such service ports share it."""
    return (range(count),)


def _flags_of(algorithm: Algorithm) -> tuple[Algorithm, int, int]:
    """Returns each algorithm with the flags of every backend and of the service."""
    serving = BACKEND_SERVING | BACKEND_COUNTED if algorithm.spread is Spread.FEWEST else BACKEND_SERVING
    return algorithm, serving, SERVICE_SPREAD[algorithm.spread]


_BY_ALGORITHM = {name: _flags_of(known) for name in KNOWN if (known := find(name)) is not None}
_DEFAULT = _BY_ALGORITHM["random"]  # where this mode has no equivalent of the algorithm that is asked for


def _frontends(entry: Entry) -> tuple[FrontendRow, ...]:
    family, protocol = entry.family, int(entry.protocol)
    closed = [frontend.address for frontend in entry.frontends if frontend.kind is Kind.CLUSTER_IP]
    rows = []
    for frontend in entry.frontends:
        flags = _MASQUERADE[frontend.masquerade]
        if frontend.internal:
            flags |= FRONTEND_INTERNAL_SET
        if frontend.external:
            flags |= FRONTEND_EXTERNAL_SET
        if frontend.source_ranges is not None:
            flags |= FRONTEND_SOURCE_RANGES
        address = ANY[family] if frontend.address is None else frontend.address
        rows.append(((family, address, frontend.port, protocol), flags, frontend.address in closed))
    return tuple(rows)
