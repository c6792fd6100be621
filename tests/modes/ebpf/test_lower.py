"""One service port to rows: golden cases of the pure translation."""

from __future__ import annotations

import msgspec
import pytest

from hybrid_proxy.dataplane.balancing import ALGORITHMS, ring_of
from hybrid_proxy.dataplane.modes.ebpf.services.ejections import Ejection
from hybrid_proxy.dataplane.modes.ebpf.services.lower import Rows, Settings, lower
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, Kind, Masquerade, WhenEmpty
from tests.modes.make import entry as port
from tests.tables import Front

A, B, C, D = (Backend(f"10.1.0.{n}", 8080, local=n < 3) for n in range(1, 5))
INSIDE, OUTSIDE, SOURCES = 1, 2, 64
DROP0, DROP1 = 1, 2
SERVING, ROUTE0, ROUTE1, EJECTED, PROBE_FAILED, HERE = 1, 2, 4, 8, 16, 32


def cluster_ip(inside: BackendSet, outside: BackendSet | None = None, address: str = "10.96.0.1") -> Front:
    return Front(Kind.CLUSTER_IP, address, 80, inside, outside or inside)


def other(kind: Kind, inside: BackendSet, outside: BackendSet) -> Front:
    return Front(kind, None if kind is Kind.NODE_PORT else "192.0.2.1", 80, inside, outside)


ALL, LOCAL, NONE = BackendSet((A, B, C)), BackendSet((A, B)), BackendSet(())
NONE_DROP = BackendSet((), WhenEmpty.DROP)


def rows(
    frontends: list[tuple[str, int, int]], members: list[Backend], flags: list[int], sets: list[list[int]],
    service_flags: int, affinity: int,
) -> Rows:  # fmt: skip
    """Rows of IPv4 and TCP; the flag of local backends is added. Only ClusterIPs reject ports without a frontend."""
    fronts = tuple(((4, address, port, 6), flag, address.startswith("10.96.")) for address, port, flag in frontends)
    of_members = bytes(flag | HERE * member.local for member, flag in zip(members, flags, strict=True))
    settings = Settings(fronts, ALGORITHMS["random"], service_flags, affinity)
    return Rows(settings, tuple(members), of_members, tuple(map(tuple, sets)))


CASES = [
    pytest.param(
        port(cluster_ip(ALL), serving=(A, B, C)),
        rows([("10.96.0.1", 80, 0)], [A, B, C], [SERVING | ROUTE0] * 3, [[0, 1, 2]], 0, 0),
        id="one-route",
    ),
    pytest.param(
        port(cluster_ip(ALL), serving=ALL.backends),
        rows([("10.96.0.1", 80, 0)], [A, B, C], [SERVING | ROUTE0] * 3, [[0, 1, 2]], 0, 0),
        id="one-route-of-all-that-serve",
    ),
    pytest.param(
        port(cluster_ip(LOCAL, ALL), serving=ALL.backends),
        rows([("10.96.0.1", 80, OUTSIDE)], [A, B, C],
             [SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE1], [[0, 1], [0, 1, 2]], 0, 0),
        id="local-inside-of-all-that-serve",
    ),
    pytest.param(
        port(cluster_ip(LOCAL, ALL), serving=(A, B, C)),
        rows([("10.96.0.1", 80, OUTSIDE)], [A, B, C],
             [SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE1], [[0, 1], [0, 1, 2]], 0, 0),
        id="local-inside",
    ),
    pytest.param(
        port(cluster_ip(ALL), cluster_ip(LOCAL, address="10.96.0.2"), serving=(A, B, C)),
        rows([("10.96.0.1", 80, 0), ("10.96.0.2", 80, INSIDE | OUTSIDE)], [A, B, C],
             [SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE0], [[0, 1, 2], [0, 1]], 0, 0),
        id="two-frontends",
    ),
    pytest.param(
        port(cluster_ip(ALL), serving=(A, D)),
        rows([("10.96.0.1", 80, 0)], [A, D, B, C], [SERVING | ROUTE0, SERVING, SERVING | ROUTE0, SERVING | ROUTE0],
             [[0, 2, 3]], 0, 0),
        id="serving-but-unused",
    ),
    pytest.param(port(cluster_ip(NONE)), rows([("10.96.0.1", 80, 0)], [], [], [[]], 0, 0), id="empty-refuses"),
    pytest.param(port(cluster_ip(NONE_DROP)), rows([("10.96.0.1", 80, 0)], [], [], [[]], DROP0, 0), id="empty-drops"),
    pytest.param(
        port(cluster_ip(ALL, NONE_DROP), serving=(A, B, C)),
        rows([("10.96.0.1", 80, OUTSIDE)], [A, B, C], [SERVING | ROUTE0] * 3, [[0, 1, 2], []], DROP1, 0),
        id="outside-drops",
    ),
    pytest.param(
        port(cluster_ip(BackendSet((C, A))), serving=(A, C)),
        rows([("10.96.0.1", 80, 0)], [A, C], [SERVING | ROUTE0] * 2, [[1, 0]], 0, 0),
        id="order-of-the-route-is-the-order-of-the-slots",
    ),
    pytest.param(
        port(cluster_ip(ALL), serving=(A, B, C), affinity_seconds=10800),
        rows([("10.96.0.1", 80, 0)], [A, B, C], [SERVING | ROUTE0] * 3, [[0, 1, 2]], 0, 10800),
        id="affinity",
    ),
    pytest.param(
        port(cluster_ip(ALL), other(Kind.NODE_PORT, ALL, LOCAL), other(Kind.LOAD_BALANCER, ALL, LOCAL),
             other(Kind.EXTERNAL_IP, LOCAL, LOCAL), serving=(A, B, C)),
        rows([("10.96.0.1", 80, 0), ("0.0.0.0", 80, OUTSIDE), ("192.0.2.1", 80, OUTSIDE),
              ("192.0.2.1", 80, INSIDE | OUTSIDE)], [A, B, C],
             [SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE0], [[0, 1, 2], [0, 1]], 0, 0),
        id="all-kinds-share-two-routes",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "wanted"), CASES)
def test_a_service_port_becomes_rows(entry: Entry, wanted: Rows) -> None:
    found = lower(entry)
    assert msgspec.structs.replace(found, sets=tuple(map(tuple, found.sets)), plain=False) == wanted
    if found.plain:
        assert [ring_of(found.settings.algorithm, found.members, 100)] == [[*ids] for ids in found.sets]


MASQUERADES = [(Masquerade.NEVER, 0), (Masquerade.POD, 8), (Masquerade.NODE, 16), (Masquerade.EXTERNAL, 32),
               (Masquerade.NODE | Masquerade.EXTERNAL, 48), (Masquerade.ALWAYS, 56)]  # fmt: skip


@pytest.mark.parametrize(("until", "flags"), [(None, EJECTED | PROBE_FAILED), (7.0, EJECTED)])
def test_an_ejected_backend_is_in_no_set_and_the_reason_is_in_its_flags(until: float | None, flags: int) -> None:
    found = lower(port(cluster_ip(ALL), serving=ALL.backends), {(B.address, B.port): Ejection(until, "no answer")})
    assert [list(members) for members in found.sets] == [[0, 2]]
    assert list(found.flags) == [SERVING | ROUTE0 | HERE, SERVING | HERE | flags, SERVING | ROUTE0]


@pytest.mark.parametrize(("masquerade", "flags"), MASQUERADES)
def test_who_is_masqueraded_is_in_the_frontends_flags(masquerade: Masquerade, flags: int) -> None:
    front = Front(Kind.EXTERNAL_IP, "192.0.2.1", 80, ALL, ALL, masquerade)
    assert lower(port(front)).settings.frontends == (((4, "192.0.2.1", 80, 6), flags, False),)


def test_source_ranges_guard_the_frontends_that_have_them() -> None:
    guarded = Front(Kind.LOAD_BALANCER, "192.0.2.1", 80, ALL, ALL, source_ranges=("203.0.113.0/24",))
    nobody = Front(Kind.LOAD_BALANCER, "192.0.2.1", 80, ALL, ALL, source_ranges=())
    settings = lower(port(cluster_ip(ALL), guarded)).settings
    assert [flags for _, flags, _ in settings.frontends] == [0, SOURCES]
    assert settings.source_ranges == ("203.0.113.0/24",)
    assert [flags for _, flags, _ in lower(port(nobody)).settings.frontends] == [SOURCES]


def test_only_a_cluster_ip_refuses_ports_without_a_frontend() -> None:
    kinds = (Kind.NODE_PORT, Kind.LOAD_BALANCER, Kind.EXTERNAL_IP)
    entry = port(*(other(kind, ALL, ALL) for kind in kinds))
    assert not any(closed for _, _, closed in lower(entry).settings.frontends)


def test_more_backend_sets_than_the_layout_has_is_an_error_that_names_the_port() -> None:
    entry = port(cluster_ip(ALL, LOCAL), cluster_ip(BackendSet((C,)), address="10.96.0.2"))
    with pytest.raises(ValueError, match="default/web:http: 3 distinct backend sets"):
        lower(entry)
