"""Which conntrack entries of datagrams must go: by original destination and by who would answer."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import msgspec
import pytest

from hybrid_proxy.dataplane.stale import Judge, new_places
from hybrid_proxy.dataplane.table import EMPTY, Backend, BackendSet, Entry, Kind, NodeNetwork, Protocol, ServiceTable
from tests.tables import Front, entry_of

ALL = (Backend("10.1.0.11", 5353), Backend("10.1.0.12", 5353), Backend("10.1.0.13", 5353))
USED, UNUSED = ALL[:2], ALL[2]  # the third serves, but no route of this node takes it
NODE = NodeNetwork(node_port_addresses=("192.168.0.1", "fd01::1"))
CLUSTER_IP, EXTERNAL, BALANCER = "10.96.0.53", "198.51.100.7", "203.0.113.7"


def entry(name: str, protocol: Protocol, address: str, node_port: int, serving: tuple[Backend, ...]) -> Entry:
    route = BackendSet(serving[:2])
    places = [
        (Kind.CLUSTER_IP, address, 53), (Kind.EXTERNAL_IP, EXTERNAL, 53), (Kind.LOAD_BALANCER, BALANCER, 53), (Kind.NODE_PORT, None, node_port),
    ]  # fmt: skip
    own = places if address == CLUSTER_IP else [places[0], places[3]]
    return entry_of(name, 4, protocol, tuple(Front(kind, at, port, route, route) for kind, at, port in own), serving)


SIX = Backend("fd02::11", 5353)
TABLE = ServiceTable(
    {
        "kube-system/dns": (
            entry("kube-system/dns:dns", Protocol.UDP, CLUSTER_IP, 30053, ALL),
            entry("kube-system/dns:tcp", Protocol.TCP, "10.96.0.54", 30054, ALL),
            entry_of("kube-system/dns:dns", 6, Protocol.UDP, (
                Front(Kind.CLUSTER_IP, "fd96::53", 53, BackendSet((SIX,)), BackendSet((SIX,))),
                Front(Kind.NODE_PORT, None, 30053, BackendSet((SIX,)), BackendSet((SIX,))),
            ), (SIX,)),
        ),
        "default/empty": (entry("default/empty:dns", Protocol.UDP, "10.96.0.60", 30060, ()),),
        "default/other": (entry("default/other:dns", Protocol.UDP, "10.96.0.70", 30070, ALL[:1]),),
    },
    NODE,
)  # fmt: skip

ANSWERERS = {
    "an endpoint that is used":                                   (("10.1.0.11", 5353), False),
    "an endpoint that serves, but that no route takes":           ((UNUSED.address, UNUSED.port), False),
    "an endpoint that is gone":                                   (("10.1.0.99", 5353), True),
    "another port of an endpoint":                                (("10.1.0.11", 8080), True),
    "the address itself: the entry began before there were rules": (None, True),
}  # fmt: skip
DESTINATIONS = {
    "ClusterIP": (CLUSTER_IP, 53),
    "externalIP": (EXTERNAL, 53),
    "load-balancer IP": (BALANCER, 53),
    "node port": ("192.168.0.1", 30053),
}


@pytest.mark.parametrize("destination", DESTINATIONS.values(), ids=DESTINATIONS)
@pytest.mark.parametrize(("answerer", "stale"), ANSWERERS.values(), ids=ANSWERERS)
def test_an_entry_lives_while_its_answers_come_from_an_endpoint_that_serves(destination, answerer, stale):
    judge = Judge(EMPTY, TABLE, ["kube-system/dns"])
    assert destination in judge.destinations
    assert judge.stale(destination, answerer or destination) is stale


# fmt: off
LEFT_ALONE = [
    pytest.param((CLUSTER_IP, 54),        id="another port of the ClusterIP"),
    pytest.param(("10.96.0.54", 53),      id="a TCP port: established connections go on"),
    pytest.param(("10.96.0.70", 53),      id="a service that did not change"),
    pytest.param(("192.168.0.9", 30053),  id="the node port's number at an address that does not serve node ports"),
    pytest.param(("9.9.9.9", 53),         id="no service's address"),
    pytest.param(("10.1.0.11", 5353),     id="an endpoint that is asked directly"),
]
# fmt: on


@pytest.mark.parametrize("destination", LEFT_ALONE)
def test_left_alone(destination):
    judge = Judge(TABLE, TABLE, ["kube-system/dns", "default/empty", "default/gone"])
    assert destination not in judge.destinations
    assert not judge.stale(destination, ("10.1.0.99", 5353))


def test_families_do_not_mix():
    judge = Judge(EMPTY, TABLE, ["kube-system/dns"])
    assert not judge.stale(("fd96::53", 53), ("fd02::11", 5353))
    assert judge.stale(("fd96::53", 53), ("fd02::12", 5353))
    assert judge.stale(("fd01::1", 30053), ("fd01::1", 30053))
    assert not judge.stale(("fd01::1", 30053), ("fd02::11", 5353))


def test_entries_that_lead_to_a_relay_of_ours_are_alive():
    judge = Judge(EMPTY, TABLE, TABLE.services.keys(), relays=lambda: {("192.168.0.1", 41000)})
    assert not judge.stale((CLUSTER_IP, 53), ("192.168.0.1", 41000))
    assert judge.stale((CLUSTER_IP, 53), ("192.168.0.1", 41001))
    assert judge.stale((CLUSTER_IP, 53), ("10.1.0.99", 41000)), "a port of that number at a pod that is gone"


def test_nothing_is_judged_when_no_datagram_service_changed():
    tcp = ServiceTable({"a/b": (entry("a/b:x", Protocol.TCP, CLUSTER_IP, 30053, ALL),)}, NODE)
    assert not Judge(tcp, tcp, ["a/b"]).destinations
    assert not Judge(TABLE, TABLE, ["default/gone"]).destinations


@pytest.mark.parametrize("destination", [("10.96.0.60", 53), ("192.168.0.1", 30060)])
def test_without_a_serving_endpoint_no_entry_lives(destination):
    judge = Judge(TABLE, TABLE, ["default/empty"], relays=lambda: {("192.168.0.1", 41000)})
    assert judge.stale(destination, ("10.1.0.11", 5353))
    assert judge.stale(destination, destination)
    assert not judge.stale(destination, ("192.168.0.1", 41000))


def changed(**fields: object) -> ServiceTable:
    """The first entry of the service, with other fields."""
    dns = msgspec.structs.replace(TABLE.services["kube-system/dns"][0], **fields)
    return ServiceTable({"kube-system/dns": (dns,)}, NODE)


ALONE = changed(frontends=TABLE.services["kube-system/dns"][0].frontends[:1])
# fmt: off
GONE = [
    pytest.param(EMPTY,                                    {*DESTINATIONS}, id="the service, and the node"),
    pytest.param(ServiceTable({}, NODE),                   {*DESTINATIONS},                 id="the service"),
    pytest.param(changed(protocol=Protocol.TCP),           {*DESTINATIONS},                 id="its port for datagrams"),
    pytest.param(ALONE,                                    {*DESTINATIONS} - {"ClusterIP"}, id="all frontends but one"),
    pytest.param(ServiceTable(TABLE.services, NodeNetwork()), {"node port"},                id="the node's address"),
    pytest.param(changed(frontends=()),                    set(),                           id="nothing: another proxy serves it"),
]
# fmt: on


@pytest.mark.parametrize(("after", "gone"), GONE)
def test_at_a_frontend_that_went_no_translated_entry_lives(after, gone):
    judge = Judge(TABLE, after, ["kube-system/dns"])
    found = {name for name, destination in DESTINATIONS.items() if judge.stale(destination, ("10.1.0.11", 5353))}
    assert found == gone
    assert not any(judge.stale(DESTINATIONS[name], DESTINATIONS[name]) for name in gone), "nobody's, or another's now"


def test_what_another_service_has_taken_over_is_judged_by_its_endpoints():
    after = ServiceTable({"a/b": (entry("a/b:x", Protocol.UDP, CLUSTER_IP, 30053, ALL[:1]),)}, NODE)
    judge = Judge(TABLE, after, ["kube-system/dns", "a/b"])
    assert [judge.stale((CLUSTER_IP, 53), (b.address, b.port)) for b in ALL[:2]] == [False, True]


def test_what_a_former_process_had_and_nobody_has_now_is_gone():
    former = [(CLUSTER_IP, 53, 17), ("10.96.0.99", 53, 17), (None, 30099, 17), ("10.96.0.98", 53, 6)]
    judge = Judge(EMPTY, TABLE, TABLE.services.keys(), former=former)
    assert not judge.stale((CLUSTER_IP, 53), ("10.1.0.11", 5353))
    for destination in (("10.96.0.99", 53), ("192.168.0.1", 30099), ("fd01::1", 30099)):
        assert judge.stale(destination, ("10.1.0.11", 5353))
    assert ("10.96.0.98", 53) not in judge.destinations


def test_connections_are_judged_where_a_frontend_is_new():
    tcp = {("10.96.0.54", 53, 6), ("192.168.0.1", 30054, 6)}
    assert new_places(EMPTY, TABLE, TABLE.services.keys()) == tcp
    assert not new_places(TABLE, TABLE, TABLE.services.keys())
    assert new_places(ServiceTable(TABLE.services, NodeNetwork()), TABLE, ["kube-system/dns"]) == {
        ("192.168.0.1", 30054, 6)
    }
