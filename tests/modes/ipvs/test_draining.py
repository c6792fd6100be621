"""The mode while it drains, against a kernel in memory: what it keeps, what it counts, and how it serves again."""

from __future__ import annotations

import socket

import pytest

from hybrid_proxy.dataplane import netfilter
from hybrid_proxy.dataplane.kernel import ipvs
from hybrid_proxy.dataplane.modes.ipvs.draining import READINGS, sources
from hybrid_proxy.dataplane.table import Backend, NodeNetwork, Protocol
from hybrid_proxy.dataplane.virtual_servers import Connection, Server
from tests.modes.make import entry

from .kit import NETWORK, TCP, UDP, A, B, C, Node, cluster_ip, destination, route, web

SECOND = "10.96.0.2"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(netfilter.conntrack, "delete_stale", lambda *_: {4: 0, 6: 0})
    return Node()


def flow(
    backend: Backend, address: str = "10.96.0.1", port: int = 80, protocol: int = TCP, state: str = "ESTABLISHED",
    client: str = "10.77.1.9", client_port: int = 40000,
) -> Connection:  # fmt: skip
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    ends = []
    for host, number in ((client, client_port), (address, port), (backend.address, backend.port)):
        ends += [socket.inet_pton(kind, host), number.to_bytes(2, "big")]
    return Connection._make((6 if ":" in address else 4, protocol, *ends, state))


def two_services(node: Node, *backends: Backend, second: tuple[Backend, ...] = (A,)):
    dns = entry(
        cluster_ip(route(*second), SECOND, 53), name="default/dns:udp", protocol=Protocol.UDP, serving=second
    )  # fmt: skip
    return node.table(web(*backends), dns=(dns,))


def test_no_virtual_server_takes_new_flows_and_addresses_that_flows_need_stay_without_being_bound(node: Node) -> None:
    agent = node.start()
    table = two_services(node, A, B)
    agent.sync(table)
    node.flows = [flow(A)]
    node.journal.take()
    agent.drain(table)
    assert node.journal.take() == [
        f"SET_DESTINATION 10.96.0.1:80 {A.address} weight 0", f"SET_DESTINATION 10.96.0.1:80 {B.address} weight 0",
        f"SET_DESTINATION {SECOND}:53 {A.address} weight 0",
        "HOLD 10.96.0.1", "UNBIND 10.96.0.1", f"UNBIND {SECOND}",
    ]  # fmt: skip
    assert node.held() == {"10.96.0.1": "192.168.77.2"}
    assert node.sysctls["net/ipv4/vs/expire_nodest_conn"] == "0"


def test_an_address_without_another_source_stays_bound(node: Node) -> None:
    agent = node.start()
    table = node.table(web(A), network=NodeNetwork())
    agent.sync(table)
    node.flows = [flow(A)]
    agent.drain(table)
    assert (node.device.bound, node.held()) == ({"10.96.0.1"}, {})


def test_an_address_whose_source_the_kernel_refuses_stays_bound(node: Node) -> None:
    agent = node.start()
    table = two_services(node, A)
    agent.sync(table)
    node.flows = [flow(A)]
    node.journal.fail = "HOLD"
    agent.drain(table)
    assert (node.device.bound, node.held()) == ({"10.96.0.1"}, {})


def test_addresses_of_datagrams_stay_bound_beside_a_mode_that_translates_at_sockets(node: Node) -> None:
    """An unconnected socket takes its source anew for each datagram; IPVS knows the flow by the service's address."""
    node.translates_at_sockets = True
    agent = node.start()
    table = two_services(node, A)
    agent.sync(table)
    node.flows = [flow(A), flow(A, SECOND, 53, UDP, "UDP")]
    agent.drain(table)
    assert node.held().keys() == {"10.96.0.1"}
    assert node.device.bound == {SECOND}
    node.flows.pop()
    for _ in range(READINGS):
        agent.open_flows(table)
    agent.maintain()
    assert node.device.bound == set()


def test_an_address_goes_with_the_last_flow_that_needs_it(node: Node) -> None:
    agent = node.start()
    table = two_services(node, A)
    agent.sync(table)
    node.flows = [flow(A), flow(A, SECOND, 53, UDP, "UDP")]
    agent.drain(table)
    assert node.held().keys() == {"10.96.0.1", SECOND}
    node.flows.pop()
    agent.open_flows(table)
    agent.maintain()
    assert SECOND in node.held(), "the kernel may have left it out of one reading"
    for _ in range(READINGS):
        agent.open_flows(table)
    agent.maintain()
    assert node.held().keys() == {"10.96.0.1"}
    assert Server(4, UDP, SECOND, 53) in node.ipvs.known, "IPVS unhooks itself with the last"


def test_flows_that_go_on_are_counted(node: Node) -> None:
    agent = node.start()
    table = two_services(node, A, B)
    agent.sync(table)
    node.flows = [
        flow(A), flow(B, state="SYN_RECV"), flow(A, state="FIN_WAIT"),
        flow(A, state="TIME_WAIT"), flow(A, state="CLOSE"),
        flow(A, SECOND, 53, UDP, "UDP"), flow(A, SECOND, 53, UDP, "UDP", client_port=1),
        flow(A, "10.96.0.77"),  # of a virtual server that is not ours
    ]  # fmt: skip
    node.forgotten = [node.flows[6], flow(A)]  # a connection needs no conntrack to go on
    agent.drain(table)
    assert agent.open_flows(table) == {"TCP": 3, "UDP": 1}
    agent.drain(node.table())
    assert agent.open_flows(table) == {"TCP": 3}, "services that are gone have connections all the same"


def test_the_last_flow_is_not_missed_because_one_reading_leaves_it_out(node: Node) -> None:
    agent = node.start()
    table = node.table(web(A))
    agent.sync(table)
    readings = iter([[flow(A)], [flow(A)], [], [flow(A)]])
    agent.kernel.connections = lambda: next(readings, [])
    agent.drain(table)
    assert agent.open_flows(table) == {"TCP": 1}
    assert agent.open_flows(table) == {}


def test_datagrams_to_an_endpoint_that_is_gone_are_handed_over(node: Node) -> None:
    agent = node.start()
    agent.sync(two_services(node, A, B, second=(A, B)))
    stays, leads_nowhere, connection = flow(A, SECOND, 53, UDP, "UDP"), flow(B, SECOND, 53, UDP, "UDP"), flow(B)
    node.flows = [stays, leads_nowhere, connection]
    agent.drain(two_services(node, A, B, second=(A, B)))
    assert node.forgotten == []
    agent.drain(two_services(node, A, second=(A, C)))
    assert node.forgotten == [leads_nowhere]
    assert agent.counters()["stale_conntrack_entries_deleted"] == 1
    agent.abandon(node.table())
    assert set(node.forgotten) == set(node.flows)


def test_only_what_flows_need_is_left_of_the_rules(node: Node) -> None:
    agent = node.start()
    table = node.table(web(A))
    agent.sync(table)
    agent.drain(table)
    for name, chains in (
        ("mangle", ("PREROUTING", "INPUT", "OUTPUT")), ("nat", ("PREROUTING", "OUTPUT", "POSTROUTING")),
    ):  # fmt: skip
        assert all(node.tables.chain(4, name, f"HPV-{chain}") == [] for chain in chains)
        assert set(node.tables.chains(4, name, "HPV")) == {f"HPV-{chain}" for chain in chains}
    assert any("HPV-POSTROUTING" in rule for rule in node.tables.chain(4, "nat", "POSTROUTING")), "conntrack translates"
    assert node.tables.chain(4, "filter", "HPV-FORWARD") == ["-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"]
    assert node.tables.chain(4, "filter", "HPV-INPUT")[-1:] == ["-g HPV-UNKNOWN"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda node: node.ipvs.real[Server(4, TCP, "10.96.0.1", 80)].update({destination(A): 1}),
        lambda node: node.routes.routes.clear(),
        lambda node: node.sysctls.update({"net/ipv4/vs/expire_nodest_conn": "1"}),
        lambda node: node.tables.restore(4, "*filter\n-F HPV-FORWARD\nCOMMIT\n"),
    ],
    ids=["weight", "route", "setting", "rule"],
)  # fmt: skip
def test_what_others_change_meanwhile_is_put_right(node: Node, damage) -> None:
    agent = node.start()
    table = node.table(web(A))
    agent.sync(table)
    node.flows = [flow(A)]
    node.ipvs.connections[destination(A)] = 1
    agent.drain(table)

    def state() -> object:
        return node.weights(), node.held(), dict(node.sysctls), node.tables.chain(4, "filter", "HPV-FORWARD")

    before = state()
    for _ in range(3):
        node.time += 1
        agent.maintain()
    assert agent.repaired.count == 0
    damage(node)
    assert state() != before
    node.time += 1
    agent.maintain()
    node.time += 1
    agent.maintain()
    assert state() == before
    assert agent.repaired.count


def test_another_address_of_the_node_becomes_the_source(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(A)))
    node.flows = [flow(A)]
    agent.drain(node.table(web(A)))
    moved = NodeNetwork(primary=("192.168.77.22",), addresses=("192.168.77.22",), pods=NETWORK.pods)
    agent.drain(node.table(web(A), network=moved))
    assert node.held() == {"10.96.0.1": "192.168.77.22"}


def test_a_new_agent_drains_what_a_former_one_left_serving_or_draining(node: Node) -> None:
    table = node.table(web(A))
    node.start().sync(table)
    node.flows = [flow(A)]
    for _ in range(2):
        agent = node.start()
        agent.drain(table)
        assert node.weights() == {A.address: 0}
        assert node.held().keys() == {"10.96.0.1"}
        assert agent.open_flows(table) == {"TCP": 1}


def test_it_serves_again(node: Node) -> None:
    table = two_services(node, A, B)
    node.start().sync(table)
    node.flows = [flow(A)]
    node.start().drain(table)
    node.start().sync(table)
    assert node.weights() == {A.address: 1, B.address: 1}
    assert (node.device.bound, node.held()) == ({"10.96.0.1", SECOND}, {})
    assert node.sysctls["net/ipv4/vs/expire_nodest_conn"] == "1"
    assert node.tables.chain(4, "nat", "HPV-POSTROUTING")


def test_sources_are_addresses_that_the_node_has() -> None:
    node = NodeNetwork(primary=("198.51.100.1", "fd77::2"), addresses=("192.168.77.2", "fd77::1", "fd77::2"))
    assert sources(["10.96.0.1", "fd96::1"], node) == {"10.96.0.1": "192.168.77.2", "fd96::1": "fd77::2"}
    assert sources(["10.96.0.1", "fd96::1"], NodeNetwork(addresses=("fd77::1",))) == {"fd96::1": "fd77::1"}


def test_the_kernels_list_is_read(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines as Linux 6.1 prints them."""
    six = "fd77:0001:0000:0000:0000:0000:0000:{:04x}"
    client, address, backend = (six.format(number) for number in (9, 1, 2))
    path = tmp_path / "ip_vs_conn"
    path.write_text(
        "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData\n"
        "TCP 0A4D0109 9C40 0A600001 0050 0A4D0102 1F90 ESTABLISHED     899\n"
        "TCP 0A4D0109 0000 0A600001 0050 0A4D0102 1F90 ASSURED        1799\n"
        "IP  0A4D0109 0000 48500001 0000 0A4D0102 0000 NONE              3\n"
        f"UDP {client} 9C40 {address} 0035 {backend} 14E9 UDP           299\n"
    )
    monkeypatch.setattr(ipvs, "CONNECTIONS", path)
    found = list(ipvs.connections())
    assert found[0] == flow(A)
    assert found[1][:2] == (6, UDP)
    assert found[1].backend == socket.inet_pton(socket.AF_INET6, backend)
    assert len(found) == 2, "what remembers a client's affinity is no flow"
    monkeypatch.setattr(ipvs, "CONNECTIONS", tmp_path / "none")
    assert list(ipvs.connections()) == []
