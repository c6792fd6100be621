"""Two services that claim one address and port: who gets it, and the message for the other."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import itertools

import msgspec
import pytest
from make import NODE, SETTINGS, ServicePort, cluster, service

from hybrid_proxy.controller.kubernetes.model import Removed, Replaced, Service, Upserted
from hybrid_proxy.controller.semantics.tables import Builder
from hybrid_proxy.dataplane.table import Protocol, ServiceTable

OLD, NEW = "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"
IP = "5.5.5.5"


def lb(name: str, last: int, **fields) -> Service:
    return service(
        name, type="LoadBalancer", cluster_ips=(f"10.96.0.{last}",), **{"load_balancer_ips": (IP,), **fields}
    )


def np(name: str, last: int, port: int = 30080, protocol: Protocol = Protocol.TCP, **fields) -> Service:
    ports = (ServicePort("http", protocol, 80, port),)
    return service(name, type="NodePort", cluster_ips=(f"10.96.0.{last}",), ports=ports, **fields)


def owners(table: ServiceTable) -> dict[str, str]:
    """Socket -> service, of everything that is no own ClusterIP."""
    return {
        f"{f.address or '*'}:{f.port}/{e.protocol.name}/{e.family}": name
        for name, entries in table.services.items()
        for e in entries
        for f in e.frontends
        if not str(f.address).startswith("10.96.0.") and not str(f.address).startswith("fd00:")
    }


HTTP_80 = f"{IP}:80/TCP/4"
# fmt: off
CASES = [
    pytest.param([lb("a", 1, created=NEW), lb("b", 2, created=OLD)],  {HTTP_80: "default/b"}, {"default/a"}, id="the older service wins"),
    pytest.param([lb("a", 1, created=OLD), lb("b", 2, created=OLD)],  {HTTP_80: "default/a"}, {"default/b"}, id="of one age the first name wins"),
    pytest.param([lb("a", 1),              lb("b", 2, created=NEW)],  {HTTP_80: "default/b"}, {"default/a"}, id="without a time of creation it counts as the newest"),
    pytest.param([lb("a", 1), lb("b", 2), lb("c", 3, created=OLD)],   {HTTP_80: "default/c"}, {"default/a", "default/b"}, id="three claim one"),
    pytest.param([lb("a", 1), lb("b", 2, ports=(ServicePort("x", Protocol.TCP, 81),))], {HTTP_80: "default/a", f"{IP}:81/TCP/4": "default/b"}, set(), id="one address may be shared by port"),
    pytest.param([lb("a", 1), lb("b", 2, ports=(ServicePort("x", Protocol.UDP, 80),))], {HTTP_80: "default/a", f"{IP}:80/UDP/4": "default/b"}, set(), id="and by protocol"),
    pytest.param([np("a", 1), np("b", 2, created=OLD)],               {"*:30080/TCP/4": "default/b"}, {"default/a"}, id="node ports"),
    pytest.param([np("a", 1), np("b", 2, 30081)],                     {"*:30080/TCP/4": "default/a", "*:30081/TCP/4": "default/b"}, set(), id="different node ports"),
    pytest.param([np("a", 1), np("b", 2, protocol=Protocol.UDP)],     {"*:30080/TCP/4": "default/a", "*:30080/UDP/4": "default/b"}, set(), id="a node port for each protocol"),
    pytest.param([np("a", 1), msgspec.structs.replace(np("b", 2), cluster_ips=("fd00::2",))], {"*:30080/TCP/4": "default/a", "*:30080/TCP/6": "default/b"}, set(), id="a node port for each family"),
    pytest.param([np("a", 1), lb("b", 2, load_balancer_ips=("192.168.0.1",), ports=(ServicePort("x", Protocol.TCP, 30080),))], {"*:30080/TCP/4": "default/a", "192.168.0.1:30080/TCP/4": "default/b"}, set(), id="an address beats a node port without a conflict"),
]
# fmt: on


@pytest.mark.parametrize(("services", "expected", "losers"), CASES)
def test_who_wins_does_not_depend_on_the_order(services, expected, losers):
    for order in itertools.permutations(services):
        at_once = Builder(SETTINGS)
        assert owners(at_once.build(cluster(NODE, *order), ())) == expected
        assert set(at_once.conflicts) == losers

        one_by_one, state = Builder(SETTINGS), cluster(NODE)
        for one in order:
            state.apply(Upserted(one))
            table = one_by_one.build(state, ())
        assert owners(table) == expected
        assert one_by_one.conflicts == at_once.conflicts


def test_a_cluster_ip_beats_an_older_service():
    thief = service("thief", cluster_ips=("10.96.0.9",), external_ips=("10.96.0.1",), created=OLD)
    victim = service("victim", cluster_ips=("10.96.0.1",), created=NEW)
    builder = Builder(SETTINGS)
    table = builder.build(cluster(thief, victim), ())
    assert [f.address for f in table.services["default/victim"][0].frontends] == ["10.96.0.1"]
    assert [f.address for f in table.services["default/thief"][0].frontends] == ["10.96.0.9"]
    assert builder.conflicts == {
        "default/thief": {
            "externalIP 10.96.0.1:80 TCP of default/thief:http belongs to default/victim": "default/victim"
        }
    }


def test_the_loser_gets_it_back():
    state, builder = cluster(NODE, lb("a", 1, created=OLD), lb("b", 2)), Builder(SETTINGS)
    first = builder.build(state, ())
    assert owners(first) == {HTTP_80: "default/a"}

    state.apply(Removed("Service", "default/a"))
    second = builder.build(state, ())
    assert owners(second) == {HTTP_80: "default/b"}
    assert second.changed == {"default/a", "default/b"}
    assert not builder.conflicts

    state.apply(Upserted(lb("a", 1, created=OLD)))
    third = builder.build(state, ())
    assert owners(third) == {HTTP_80: "default/a"}
    assert (third.services, third.changed) == (first.services, {"default/a", "default/b"})
    assert set(builder.conflicts) == {"default/b"}


def test_a_change_of_age_alone_moves_the_address():
    state, builder = cluster(NODE, lb("a", 1), lb("b", 2, created=NEW)), Builder(SETTINGS)
    assert owners(builder.build(state, ())) == {HTTP_80: "default/b"}
    state.apply(Upserted(lb("a", 1, created=OLD)))
    assert owners(builder.build(state, ())) == {HTTP_80: "default/a"}


def test_the_address_moves_in_one_table():
    state, builder = cluster(NODE, lb("a", 1), lb("b", 2, load_balancer_ips=())), Builder(SETTINGS)
    builder.build(state, ())
    state.apply(Upserted(lb("b", 2)))
    state.apply(Upserted(lb("a", 1, load_balancer_ips=())))
    assert owners(builder.build(state, ())) == {HTTP_80: "default/b"}
    assert not builder.conflicts


def test_a_bystander_keeps_its_identity():
    state, builder = cluster(NODE, lb("a", 1, created=OLD), lb("b", 2), lb("c", 3)), Builder(SETTINGS)
    before = builder.build(state, ())
    state.apply(Removed("Service", "default/b"))
    after = builder.build(state, ())
    assert after.changed == {"default/b"}
    assert after.services["default/c"] is before.services["default/c"]
    assert set(builder.conflicts) == {"default/c"}


def test_a_service_that_lost_everything_is_not_in_the_table():
    twin = service("twin", created=NEW)
    builder = Builder(SETTINGS)
    table = builder.build(cluster(service(created=OLD), twin), ())
    assert set(table.services) == {"default/web"}
    assert set(builder.conflicts) == {"default/twin"}


def test_an_empty_list_of_services_clears_everything():
    state, builder = cluster(NODE, lb("a", 1), lb("b", 2)), Builder(SETTINGS)
    builder.build(state, ())
    state.apply(Replaced("Service", ()))
    table = builder.build(state, ())
    assert (table.services, table.changed) == ({}, {"default/a", "default/b"})
    assert not builder.conflicts
