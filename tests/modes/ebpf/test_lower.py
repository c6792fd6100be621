"""One service port to rows: golden cases of the pure translation."""

from __future__ import annotations

import pytest

from dataplane.modes.ebpf.lower import Rows, lower
from dataplane.table import Backend, BackendSet, Entry, Kind, Masquerade, WhenEmpty
from tests.modes.make import entry as port
from tests.tables import Front

A, B, C, D = (Backend(f"10.1.0.{n}", 8080, local=n < 3) for n in range(1, 5))
INSIDE, OUTSIDE, SOURCES = 1, 2, 64
DROP0, DROP1 = 1, 2
SERVING, ROUTE0, ROUTE1, HERE = 1, 2, 4, 32


def cluster_ip(inside: BackendSet, outside: BackendSet | None = None, address: str = "10.96.0.1") -> Front:
    return Front(Kind.CLUSTER_IP, address, 80, inside, outside or inside)


def other(kind: Kind, inside: BackendSet, outside: BackendSet) -> Front:
    return Front(kind, None if kind is Kind.NODE_PORT else "192.0.2.1", 80, inside, outside)


ALL, LOCAL, NONE = BackendSet((A, B, C)), BackendSet((A, B)), BackendSet(())
NONE_DROP = BackendSet((), WhenEmpty.DROP)

CASES = [
    pytest.param(
        port(cluster_ip(ALL), serving=(A, B, C)),
        Rows([("10.96.0.1", 80, 0)], [A, B, C], [SERVING | ROUTE0] * 3, [[0, 1, 2]], 0, 0),
        id="one-route",
    ),
    pytest.param(
        port(cluster_ip(LOCAL, ALL), serving=(A, B, C)),
        Rows([("10.96.0.1", 80, OUTSIDE)], [A, B, C],
             [SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE1], [[0, 1], [0, 1, 2]], 0, 0),
        id="local-inside",
    ),
    pytest.param(
        port(cluster_ip(ALL), cluster_ip(LOCAL, address="10.96.0.2"), serving=(A, B, C)),
        Rows([("10.96.0.1", 80, 0), ("10.96.0.2", 80, INSIDE | OUTSIDE)], [A, B, C],
             [SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE0], [[0, 1, 2], [0, 1]], 0, 0),
        id="two-frontends",
    ),
    pytest.param(
        port(cluster_ip(ALL), serving=(A, D)),
        Rows([("10.96.0.1", 80, 0)], [A, D, B, C], [SERVING | ROUTE0, SERVING, SERVING | ROUTE0, SERVING | ROUTE0],
             [[0, 2, 3]], 0, 0),
        id="serving-but-unused",
    ),
    pytest.param(port(cluster_ip(NONE)), Rows([("10.96.0.1", 80, 0)], [], [], [[]], 0, 0), id="empty-refuses"),
    pytest.param(port(cluster_ip(NONE_DROP)), Rows([("10.96.0.1", 80, 0)], [], [], [[]], DROP0, 0), id="empty-drops"),
    pytest.param(
        port(cluster_ip(ALL, NONE_DROP), serving=(A, B, C)),
        Rows([("10.96.0.1", 80, OUTSIDE)], [A, B, C], [SERVING | ROUTE0] * 3, [[0, 1, 2], []], DROP1, 0),
        id="outside-drops",
    ),
    pytest.param(
        port(cluster_ip(BackendSet((C, A))), serving=(A, C)),
        Rows([("10.96.0.1", 80, 0)], [A, C], [SERVING | ROUTE0] * 2, [[1, 0]], 0, 0),
        id="order-of-the-route-is-the-order-of-the-slots",
    ),
    pytest.param(
        port(cluster_ip(ALL), serving=(A, B, C), affinity_seconds=10800),
        Rows([("10.96.0.1", 80, 0)], [A, B, C], [SERVING | ROUTE0] * 3, [[0, 1, 2]], 0, 10800),
        id="affinity",
    ),
    pytest.param(
        port(cluster_ip(ALL), other(Kind.NODE_PORT, ALL, LOCAL), other(Kind.LOAD_BALANCER, ALL, LOCAL),
             other(Kind.EXTERNAL_IP, LOCAL, LOCAL), serving=(A, B, C)),
        Rows([("10.96.0.1", 80, 0), ("0.0.0.0", 80, OUTSIDE), ("192.0.2.1", 80, OUTSIDE),
              ("192.0.2.1", 80, INSIDE | OUTSIDE)], [A, B, C],
             [SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE0 | ROUTE1, SERVING | ROUTE0], [[0, 1, 2], [0, 1]], 0, 0),
        id="all-kinds-share-two-routes",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "rows"), CASES)
def test_a_service_port_becomes_rows(entry: Entry, rows: Rows) -> None:
    closed = tuple(f.address for f in entry.frontends if f.kind is Kind.CLUSTER_IP and f.address)
    flags = [flag | HERE * member.local for member, flag in zip(rows.members, rows.member_flags, strict=True)]
    assert lower(entry) == rows._replace(closed=closed, member_flags=flags)


MASQUERADES = [(Masquerade.NEVER, 0), (Masquerade.POD, 8), (Masquerade.NODE, 16), (Masquerade.EXTERNAL, 32),
               (Masquerade.NODE | Masquerade.EXTERNAL, 48), (Masquerade.ALWAYS, 56)]  # fmt: skip


@pytest.mark.parametrize(("masquerade", "flags"), MASQUERADES)
def test_who_is_masqueraded_is_in_the_frontends_flags(masquerade: Masquerade, flags: int) -> None:
    front = Front(Kind.EXTERNAL_IP, "192.0.2.1", 80, ALL, ALL, masquerade)
    assert lower(port(front)).frontends == [("192.0.2.1", 80, flags)]


def test_source_ranges_guard_the_frontends_that_have_them() -> None:
    guarded = Front(Kind.LOAD_BALANCER, "192.0.2.1", 80, ALL, ALL, source_ranges=("203.0.113.0/24",))
    nobody = Front(Kind.LOAD_BALANCER, "192.0.2.1", 80, ALL, ALL, source_ranges=())
    rows = lower(port(cluster_ip(ALL), guarded))
    assert rows.frontends == [("10.96.0.1", 80, 0), ("192.0.2.1", 80, SOURCES)]
    assert rows.sources == ("203.0.113.0/24",)
    assert lower(port(nobody)).frontends == [("192.0.2.1", 80, SOURCES)]


def test_only_a_cluster_ip_refuses_ports_without_a_frontend() -> None:
    kinds = (Kind.NODE_PORT, Kind.LOAD_BALANCER, Kind.EXTERNAL_IP)
    assert lower(port(*(other(kind, ALL, ALL) for kind in kinds))).closed == ()


def test_more_backend_sets_than_the_layout_has_is_an_error_that_names_the_port() -> None:
    entry = port(cluster_ip(ALL, LOCAL), cluster_ip(BackendSet((C,)), address="10.96.0.2"))
    with pytest.raises(ValueError, match="default/web:http: 3 distinct backend sets"):
        lower(entry)
