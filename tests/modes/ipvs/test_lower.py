"""One service to virtual servers, set elements and addresses: golden cases of the pure translation."""

from __future__ import annotations

import pytest

from hybrid_proxy.dataplane.modes.ipvs.lower import SETS, Lowered, Node, lower, node_of
from hybrid_proxy.dataplane.table import Kind, Masquerade, NodeNetwork, Protocol
from hybrid_proxy.dataplane.virtual_servers import Config, Server
from tests.modes.make import entry
from tests.tables import Front

from .kit import TCP, A, B, C, cluster_ip, destination, route, web

NODE = Node(node_ports=("192.168.77.2", "fd77::2"), own=frozenset({"192.168.77.2", "fd77::2"}))
MARK = 0x48500001


def lowered(*entries, node=NODE, taken=(), mark=MARK) -> Lowered:
    return lower(
        entries, node, lambda each: each.algorithm if each.algorithm != "random" else "rr", lambda _: mark, taken
    )


def sets_of(result: Lowered, address: str) -> set[str]:
    return {name for name, element in result.members if element.address == address and not element.second}


BOTH, LOCAL = route(A, B), route(A, drop=True, why="local")


def local_lb(inside=BOTH, outside=LOCAL, **more) -> Front:
    return Front(Kind.LOAD_BALANCER, "203.0.113.7", 80, inside, outside, Masquerade.NODE, **more)


def test_a_cluster_ip_is_one_virtual_server_and_its_classes_are_memberships() -> None:
    result = lowered(web(A, B))
    ((server, wanted),) = result.servers.items()
    assert server == Server(4, TCP, "10.96.0.1", 80)
    assert wanted.config == Config("rr")
    assert wanted.backends == {destination(A): 1, destination(B): 1}
    assert sets_of(result, "10.96.0.1") == {
        "HPV-4-SERVERS", "HPV-4-PORTS", "HPV-4-ADDRESSES", "HPV-4-MASQ-NODE", "HPV-4-MASQ-EXT",
    }  # fmt: skip
    assert result.addresses == {"10.96.0.1"}


def test_the_virtual_server_has_the_name_of_its_service_port_in_the_kernel() -> None:
    assert "default/web:http" in lowered(web(A)).members.values()


def test_backends_of_this_node_are_known_as_their_own_clients() -> None:
    pairs = {
        (element.address, element.second) for name, element in lowered(web(A, B)).members if name == "HPV-4-HAIRPIN"
    }
    assert pairs == {(A.address, A.address)}


def test_clients_outside_get_a_virtual_server_of_their_own_where_their_route_differs() -> None:
    result = lowered(entry(local_lb()))
    inside, outside = Server(4, TCP, "203.0.113.7", 80), Server(4, mark=MARK)
    assert result.servers[inside].backends.keys() == {destination(A), destination(B)}
    assert result.servers[outside].backends.keys() == {destination(A)}
    assert [v for (name, _), v in result.members.items() if name == "HPV-4-MARKS"] == [MARK]


def test_the_mark_has_the_masquerade_bit_where_the_outside_is_masqueraded() -> None:
    frontend = Front(
        Kind.EXTERNAL_IP, "203.0.113.7", 80, route(A, B), route(A, why="local"), Masquerade.ALWAYS
    )  # fmt: skip
    assert Server(4, mark=MARK | 0x4000) in lowered(entry(frontend)).servers


def test_a_policy_without_backends_outside_keeps_its_virtual_server_for_flows_that_are_left() -> None:
    result = lowered(entry(local_lb(outside=route(drop=True, why="local"))))
    assert result.servers[Server(4, mark=MARK)].backends == {}
    assert "HPV-4-DROP-OUT" in sets_of(result, "203.0.113.7")
    assert "HPV-4-DROP-IN" not in sets_of(result, "203.0.113.7")


def test_equal_backends_under_a_policy_are_still_two_virtual_servers() -> None:
    result = lowered(entry(local_lb(inside=route(A), outside=route(A, drop=True, why="local"))))
    assert len(result.servers) == 2


def test_without_marks_left_the_outside_is_served_as_the_inside() -> None:
    assert list(lowered(entry(local_lb()), mark=0).servers) == [Server(4, TCP, "203.0.113.7", 80)]


@pytest.mark.parametrize(("drop", "word"), [(False, "REJECT"), (True, "DROP")])
def test_an_empty_route_refuses_or_is_silent_for_both_sides(drop: bool, word: str) -> None:
    result = lowered(entry(cluster_ip(route(drop=drop))))
    assert {f"HPV-4-{word}-IN", f"HPV-4-{word}-OUT"} <= sets_of(result, "10.96.0.1")


def test_a_node_port_is_served_at_each_address_of_its_family_and_binds_none() -> None:
    frontend = Front(Kind.NODE_PORT, None, 30080, route(A), route(A), Masquerade.ALWAYS)
    result = lowered(entry(frontend))
    assert list(result.servers) == [Server(4, TCP, "192.168.77.2", 30080)]
    assert result.addresses == frozenset()
    assert "HPV-4-ADDRESSES" not in sets_of(result, "192.168.77.2")


def test_an_address_of_a_service_comes_before_a_node_port() -> None:
    frontend = Front(Kind.NODE_PORT, None, 30080, route(A), route(A), Masquerade.ALWAYS)
    assert not lowered(entry(frontend), taken={("192.168.77.2", 30080, TCP)}).servers


def test_an_external_address_that_another_interface_has_is_served_and_not_bound() -> None:
    frontend = Front(Kind.EXTERNAL_IP, "192.168.77.2", 80, route(A), route(A), Masquerade.ALWAYS)
    result = lowered(entry(frontend))
    assert list(result.servers) == [Server(4, TCP, "192.168.77.2", 80)]
    assert result.addresses == frozenset()
    assert "HPV-4-ADDRESSES" not in sets_of(result, "192.168.77.2")


def test_allowed_sources_are_networks_and_everybody_is_two_halves() -> None:
    result = lowered(entry(local_lb(source_ranges=("192.0.2.0/24", "0.0.0.0/0"))))
    networks = {element.second for name, element in result.members if name == "HPV-4-ALLOWED"}
    assert networks == {"192.0.2.0/24", "0.0.0.0/1", "128.0.0.0/1"}
    assert "HPV-4-SOURCES" in sets_of(result, "203.0.113.7")


def test_a_node_port_is_served_at_the_addresses_of_its_family_only() -> None:
    node = NODE._replace(node_ports=("fd77::2", "192.168.77.2"))
    front = Front(Kind.NODE_PORT, None, 30080, BOTH, BOTH)
    assert list(lowered(entry(front), node=node).servers) == [Server(4, TCP, "192.168.77.2", 30080)]


def test_the_node_of_a_table_is_what_lowering_needs() -> None:
    network = NodeNetwork(
        addresses=("10.0.0.9",), primary=("10.0.0.1",), node_port_addresses=("10.0.0.1",), masquerade_bit=13
    )
    node = node_of(network, (4,), ("10.8.0.5/16",))
    assert (node.families, node.node_ports, node.own) == ((4,), ("10.0.0.1",), {"10.0.0.1", "10.0.0.9"})
    assert (node.masquerade, *map(str, node.excluded)) == (0x2000, "10.8.0.0/16")


def test_addresses_in_excluded_ranges_are_left_to_others() -> None:
    from ipaddress import ip_network

    assert not lowered(web(A), node=NODE._replace(excluded=(ip_network("10.96.0.0/16"),))).servers


def test_a_family_that_does_not_work_here_is_not_programmed() -> None:
    assert not lowered(web(A), node=NODE._replace(families=(6,))).servers


def test_affinity_is_persistence_and_maglev_hashes_ports_too() -> None:
    result = lowered(web(A, B, affinity_seconds=600, algorithm="mh"))
    assert result.servers[Server(4, TCP, "10.96.0.1", 80)].config == Config("mh", 600, 0x10)


def test_datagrams_do_not_linger_unless_their_backend_serves() -> None:
    wanted = lowered(entry(cluster_ip(route(A)), serving=(A, C), protocol=Protocol.UDP)).servers
    (only,) = wanted.values()
    assert not only.lingers
    assert only.serving == {destination(A), destination(C)}


def test_ipv6_has_sets_of_its_own() -> None:
    from hybrid_proxy.dataplane.table import Backend

    six = Backend("fd77:1::2", 8080, local=True)
    result = lowered(entry(cluster_ip(route(six), "fd96::1"), serving=(six,), family=6))
    assert {name.split("-")[1] for name, _ in result.members} == {"6"}


def test_names_of_sets_fit_the_kernel() -> None:
    assert all(len(f"HPV-6-{name}") < 32 for name in SETS)
