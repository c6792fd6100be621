"""The programmer against a kernel in memory: order of steps, cost of a change, draining, restart, drift, refusals."""

from __future__ import annotations

import errno

import msgspec
import pytest

from hybrid_proxy.dataplane import netfilter
from hybrid_proxy.dataplane.errors import DataplaneError, SyncError
from hybrid_proxy.dataplane.modes.ipvs import programmer as module
from hybrid_proxy.dataplane.table import Backend, BackendSet, Kind, Masquerade, Protocol
from hybrid_proxy.dataplane.virtual_servers import Change, Element, Server, Timeouts, Verb
from tests.modes.make import entry
from tests.tables import Front, with_fronts

from .kit import NETWORK, TCP, UDP, A, B, C, Node, cluster_ip, destination, route, web


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    # Its own tests are in tests/kernel.
    monkeypatch.setattr(netfilter.conntrack, "delete_stale", lambda *_: {4: 0, 6: 0})
    return Node()


def test_a_service_is_served_before_its_address_leads_there(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(A, B)))
    done = node.journal.take()
    bound = done.index("BIND 10.96.0.1")
    for step in ("ADD HPV-4-SERVERS 1", "NEW_SERVER 10.96.0.1:80", "ADD HPV-4-PORTS 1", "ADD HPV-4-ADDRESSES 1"):
        assert done.index(step) < bound
    assert done.index("ADD HPV-4-SERVERS 1") < done.index("NEW_SERVER 10.96.0.1:80"), "made, and not known as ours"
    assert node.weights() == {A.address: 1, B.address: 1}
    assert node.device.bound == {"10.96.0.1"}


def test_a_service_that_goes_leaves_nothing_and_its_address_goes_first(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(A, B)))
    node.journal.take()
    agent.sync(node.table())
    done = node.journal.take()
    assert done[0] == "UNBIND 10.96.0.1"
    assert done[1] == "REMOVE HPV-4-ADDRESSES 1"
    assert done[-2:] == ["DELETE_SERVER 10.96.0.1:80", "REMOVE HPV-4-SERVERS 1"]
    assert not any(node.sets.held.values())


def test_flows_of_a_service_that_moved_to_another_proxy_go_on_until_it_has_no_endpoints(node: Node) -> None:
    agent, gone = node.start(), entry(serving=(A, B))
    agent.sync(node.table(web(A, B)))
    node.journal.take()
    agent.sync(node.table(gone))
    agent.sync(node.table(gone, network=msgspec.structs.replace(NETWORK, addresses=NETWORK.addresses[:1])))
    assert not {step.split()[0] for step in node.journal.take()} & {"UNBIND", "DELETE_SERVER", "DELETE_DESTINATION"}
    assert node.weights() == {A.address: 1, B.address: 1}
    agent.sync(node.table())
    assert node.weights() is None
    assert node.device.bound == set()


def test_an_address_that_the_node_gets_itself_is_served_no_more(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(A, B)))
    own = msgspec.structs.replace(NETWORK, addresses=(*NETWORK.addresses, "10.96.0.1"))
    agent.sync(node.table(entry(serving=(A, B)), network=own))
    assert node.weights() is None


def test_one_endpoint_more_is_one_message(node: Node) -> None:
    agent = node.start()
    many = {f"s{n}": (web(B, name=f"default/s{n}:http"),) for n in range(200)}
    for number, (name, (held,)) in enumerate(many.items()):
        many[name] = (with_fronts(held, cluster_ip(route(B), f"10.96.1.{number + 1}")),)
    agent.sync(node.table(**many))
    node.journal.take()
    changed = with_fronts(many["s7"][0], cluster_ip(route(B, C), "10.96.1.8"), serving=(B, C))
    result = agent.sync(node.table(**(many | {"s7": (changed,)})))
    assert node.journal.take() == [f"NEW_DESTINATION 10.96.1.8:80 {C.address} weight 1"]
    assert result.changed == 1


def test_the_number_of_rules_does_not_depend_on_services(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(A)))
    few = node.rules()
    agent.sync(node.table(web(A), more=(entry(cluster_ip(route(B), "10.96.0.9"), name="default/more:x"),)))
    assert node.rules() == few > 20


# Endpoints that leave (row 4.9)


def test_an_endpoint_of_tcp_that_leaves_keeps_its_flows_until_the_last_ends(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(A, B)))
    node.ipvs.connections[destination(B)] = 3
    agent.sync(node.table(web(A)))
    assert node.weights() == {A.address: 1, B.address: 0}
    assert agent.status().ipvs.draining == 1
    agent.maintain()
    assert node.weights() == {A.address: 1, B.address: 0}
    node.ipvs.connections.clear()
    node.time += module.DRAIN_SECONDS
    agent.maintain()
    assert node.weights() == {A.address: 1}
    assert agent.status().ipvs.draining == 0


def test_an_endpoint_that_comes_back_is_used_again(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(A, B)))
    agent.sync(node.table(web(A)))
    agent.sync(node.table(web(A, B)))
    assert node.weights() == {A.address: 1, B.address: 1}
    agent.maintain()
    assert node.weights() == {A.address: 1, B.address: 1}


@pytest.mark.parametrize("protocol", [Protocol.UDP, Protocol.SCTP])
def test_an_endpoint_of_datagrams_goes_at_once_unless_it_still_serves(node: Node, protocol: Protocol) -> None:
    agent = node.start()
    agent.sync(node.table(web(A, B, C, protocol=protocol)))
    agent.sync(node.table(entry(cluster_ip(route(A)), serving=(A, B), protocol=protocol)))
    assert node.weights(protocol=protocol) == {A.address: 1, B.address: 0}
    agent.sync(node.table(entry(cluster_ip(route(A)), serving=(A,), protocol=protocol)))
    assert node.weights(protocol=protocol) == {A.address: 1}


def test_the_last_endpoint_is_refused_before_it_leaves(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(A)))
    node.journal.take()
    agent.sync(node.table(entry(cluster_ip(route()))))
    done = node.journal.take()
    assert done.index("ADD HPV-4-REJECT-IN 1") < done.index(f"SET_DESTINATION 10.96.0.1:80 {A.address} weight 0")
    agent.sync(node.table(web(A)))
    done = node.journal.take()
    assert done.index(f"SET_DESTINATION 10.96.0.1:80 {A.address} weight 1") < done.index("REMOVE HPV-4-REJECT-IN 1")


# Restart


def test_row_3_12_health_check_node_ports_come_and_go_and_nothing_else_is_touched(node: Node) -> None:
    agent = node.start()
    first = node.table(web(A, B))
    agent.sync(first)
    node.journal.take()
    accepted = "-p tcp -m tcp --dport 30501 -j ACCEPT"
    agent.sync(msgspec.structs.replace(first, health_ports=(30501,), generation=2, base=first.generation))
    assert accepted in node.tables.chain(4, "filter", "HPV-INPUT")
    assert accepted in node.tables.chain(6, "filter", "HPV-INPUT")
    assert agent.maintain() in (None, (), [])
    assert agent.repaired.count == 0
    agent.sync(msgspec.structs.replace(first, generation=3, base=2, changed=frozenset()))
    assert accepted not in node.tables.chain(4, "filter", "HPV-INPUT")
    assert not [done for done in node.journal.take() if "BIND" in done]


def test_a_restart_resets_weights_and_removes_what_is_not_wanted_any_more(node: Node) -> None:
    node.start().sync(node.table(web(A, B), gone=(entry(cluster_ip(route(C), "10.96.0.2"), name="default/gone:x"),)))
    node.ipvs.change([Change(Verb.SET_DESTINATION, Server(4, TCP, "10.96.0.1", 80), None, destination(A), 0)])
    agent = node.start()
    agent.sync(node.table(web(A)))
    assert node.weights() == {A.address: 1, B.address: 0}, "B drains under the new agent, too"
    assert agent.status().ipvs.draining == 1
    assert node.weights("10.96.0.2") is None
    assert node.device.bound == {"10.96.0.1"}


# Drift


def test_what_we_remove_ourselves_is_no_news(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(A)))
    agent.sync(node.table())
    assert node.woken == 0


def test_what_a_new_table_puts_right_counts_as_a_repair(node: Node) -> None:
    """The node's addresses are reported anew when a device goes; that may be programmed before anybody looks."""
    agent = node.start()
    agent.sync(node.table(web(A)))
    node.device.lose_device()
    table = node.table(web(A))
    facts = msgspec.structs.replace(table.node, addresses=(*table.node.addresses, "192.0.2.77"))
    agent.sync(msgspec.structs.replace(table, node=facts))
    assert node.device.bound == {"10.96.0.1"}
    agent.maintain()
    assert agent.repaired.count == 1


@pytest.mark.parametrize(
    ("worked", "waits"),
    [
        pytest.param(0.0, False, id="it waited"),
        pytest.param(0.5, False, id="it worked little"),
        pytest.param(60.0, True, id="it worked"),
    ],
)
def test_the_pause_after_a_comparison_of_rules_follows_what_it_worked(
    node: Node, worked: float, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy node a comparison waits long for a processor: a repair that waits for as long again helps nobody."""
    node.sync_seconds = 1e6
    agent = node.start()
    agent.sync(node.table(web(A)))
    agent.maintain()
    save, whole = node.tables.save, node.rules()

    def slow(family: int, table: str) -> str:
        node.time += 60
        node.worked += worked
        return save(family, table)

    monkeypatch.setattr(node.tables, "save", slow)
    node.tables.restore(4, "*filter\n-F HPV-FORWARD\nCOMMIT\n")
    agent.maintain()
    assert node.rules() == whole
    node.tables.restore(4, "*nat\n-F HPV-POSTROUTING\nCOMMIT\n")
    agent.maintain()
    assert (node.rules() == whole) is not waits
    node.time += 1e5
    agent.maintain()
    assert node.rules() == whole


# What fails


@pytest.mark.parametrize(
    "word", ["ADD HPV-4-SERVERS", "NEW_SERVER", "NEW_DESTINATION", "ADD HPV-4-PORTS", "BIND", "ADD HPV-4-ADDRESSES"]
)  # fmt: skip
def test_a_sync_that_the_kernel_refuses_is_made_good_by_the_next(node: Node, word: str) -> None:
    agent = node.start()
    agent.sync(node.table(other=(entry(cluster_ip(route(C), "10.96.0.2"), name="default/other:x"),)))
    node.journal.fail = word
    table = node.table(web(A, B))
    with pytest.raises(SyncError):
        agent.sync(table)
    agent.sync(table)
    assert node.weights() == {A.address: 1, B.address: 1}
    assert node.device.bound == {"10.96.0.1"}
    assert node.weights("10.96.0.2") is None


def test_a_restore_that_is_refused_is_a_sync_error(node: Node) -> None:
    agent = node.start()
    node.tables.fail_next = "resource temporarily unavailable"
    table = node.table(web(A))
    with pytest.raises(SyncError, match="temporarily"):
        agent.sync(table)
    assert node.device.bound == set(), "no address without the rules that guard it"
    agent.sync(table)
    assert node.weights() == {A.address: 1}


# Settings


def test_a_scheduler_that_the_kernel_lacks_is_replaced_with_a_warning(node: Node) -> None:
    agent = node.start(scheduler="lc")
    lacks = entry(cluster_ip(route(A), "10.96.0.2"), name="default/odd:x", algorithm="twos")
    has = entry(cluster_ip(route(A), "10.96.0.3"), name="default/hash:x", algorithm="mh")
    agent.sync(node.table(web(A), odd=(lacks,), hash=(has,)))
    schedulers = {server.address: config.scheduler for server, config in node.ipvs.known.items()}
    assert schedulers == {"10.96.0.1": "lc", "10.96.0.2": "lc", "10.96.0.3": "mh"}
    assert [s for s in agent.warnings() if "twos" in s and "default/odd:x" in s]


def weighing(backend: Backend, weight: int) -> Backend:
    return msgspec.structs.replace(backend, weight=weight)


def test_weights_are_the_kernels_and_a_changed_one_is_one_message(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(weighing(A, 3), B)))
    assert node.weights() == {A.address: 3, B.address: 1}
    node.journal.take()
    agent.sync(node.table(web(weighing(A, 2), B)))
    assert node.journal.take() == [f"SET_DESTINATION 10.96.0.1:80 {A.address} weight 2"]


def test_weight_zero_drains(node: Node) -> None:
    """It is in no route, and serves on."""
    agent = node.start()
    agent.sync(node.table(web(A, B)))
    agent.sync(node.table(entry(cluster_ip(route(B)), serving=(weighing(A, 0), B))))
    assert node.weights() == {A.address: 0, B.address: 1}
    agent.sync(node.table(web(A, B)))
    assert node.weights() == {A.address: 1, B.address: 1}


@pytest.mark.parametrize(
    ("default", "algorithm", "expected"),
    [("rr", "random", "wrr"), ("lc", "random", "wlc"), ("sh", "rr", "wrr"), ("rr", "lc", "wlc"), ("rr", "sh", "sh")],
)
def test_weights_need_a_scheduler_that_weighs(node: Node, default: str, algorithm: str, expected: str) -> None:
    """The kernel's rr and lc do not."""
    agent = node.start(scheduler=default)
    agent.sync(node.table(web(weighing(A, 3), B, algorithm=algorithm)))
    assert [config.scheduler for config in node.ipvs.known.values()] == [expected]
    agent.sync(node.table(web(weighing(A, 3), weighing(B, 3), algorithm=algorithm)))
    plain = default if algorithm == "random" else algorithm
    assert [config.scheduler for config in node.ipvs.known.values()] == [plain], "the same weight for all is none"


def test_a_new_real_server_starts_slowly(node: Node) -> None:
    """In ten steps, and nothing else is written."""
    agent = node.start()
    agent.sync(node.table(web(A, B, slow_start=30.0)))
    assert node.weights() == {A.address: 1, B.address: 1}, "those of the first table are as old as each other"
    assert [config.scheduler for config in node.ipvs.known.values()] == ["wrr"]
    agent.sync(node.table(web(A, B, C, slow_start=30.0)))
    assert node.weights() == {A.address: 10, B.address: 10, C.address: 1}
    node.journal.take()
    seen = []
    for _ in range(60):
        node.time += 0.5
        agent.maintain()
        seen.append(node.weights()[C.address])
    assert seen[:53] == [part for part in range(1, 10) for _ in range(6)][1:]
    assert node.weights() == {A.address: 1, B.address: 1, C.address: 1}
    assert len(node.journal.take()) == 8 + 3, "eight steps of one server, and at the end all have their own weights"
    agent.maintain()
    assert node.journal.take() == []


def test_a_weight_that_cannot_be_written_is_tried_again(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(A, slow_start=10.0)))
    agent.sync(node.table(web(A, B, slow_start=10.0)))
    node.time += 5
    works = node.ipvs.change
    node.ipvs.change = broken  # type: ignore[method-assign]
    with pytest.raises(DataplaneError, match="start slowly"):
        agent.maintain()
    node.ipvs.change = works  # type: ignore[method-assign]
    agent.maintain()
    assert node.weights() == {A.address: 10, B.address: 6}


def broken(changes: object) -> None:
    raise OSError(errno.EBUSY, "busy")


def test_timeouts_are_set_where_given(node: Node) -> None:
    node.start(tcp_timeout=1200).sync(node.table(web(A)))
    assert node.ipvs.set_to == Timeouts(1200, 120, 300)


@pytest.mark.parametrize(("strict", "value"), [(True, "1"), (False, None)])
def test_strict_arp_is_a_setting_of_all_interfaces(node: Node, strict: bool, value: str | None) -> None:
    node.start(strict_arp=strict).sync(node.table(web(A)))
    assert node.sysctls.get("net/ipv4/conf/all/arp_ignore") == value


def test_a_scheduler_of_a_service_may_change(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(A)))
    node.journal.take()
    agent.sync(node.table(web(A, algorithm="sh")))
    assert node.journal.take() == ["SET_SERVER 10.96.0.1:80"]


def test_what_is_in_excluded_ranges_is_not_served_with_a_warning(node: Node) -> None:
    agent = node.start(exclude_cidrs=("10.96.0.0/24",))
    agent.sync(node.table(web(A)))
    assert not node.ipvs.known
    assert [warning for warning in agent.warnings() if "exclude" in warning]


def test_without_ip6tables_services_of_ipv6_are_unprogrammed(node: Node) -> None:
    node.tables.families = (4,)
    node.tables.missing = {6: "the kernel has no IPv6"}
    six = entry(cluster_ip(BackendSet(()), "fd96::1"), family=6)
    agent = node.start()
    agent.sync(node.table(web(A), six))
    assert ["the kernel has no IPv6" in left.reason for left in agent.unprogrammed] == [True]
    assert node.weights() == {A.address: 1}


def test_an_unprogrammed_entry_is_forgotten_with_its_service(node: Node) -> None:
    node.tables.families = (4,)
    agent = node.start()
    six = entry(cluster_ip(BackendSet(()), "fd96::1"), family=6)
    agent.sync(node.table(web(A), six=(six,)))
    assert len(agent.unprogrammed) == 1
    agent.sync(node.table(web(A)))
    assert not agent.unprogrammed


# Sharing


def test_two_services_share_a_load_balancer_address(node: Node) -> None:
    def port(number: int) -> Front:
        return Front(Kind.LOAD_BALANCER, "203.0.113.7", number, route(A), route(A), Masquerade.ALWAYS)

    one, two = entry(port(80)), entry(port(81), name="default/two:x")
    agent = node.start()
    agent.sync(node.table(one, two=(two,)))
    agent.sync(node.table(two=(two,)))
    assert node.device.bound == {"203.0.113.7"}
    assert node.members("PORTS") == {Element("203.0.113.7", 81, TCP)}
    assert len(node.members("HAIRPIN")) == 1


def test_a_node_port_gives_way_to_a_service_with_the_nodes_address(node: Node) -> None:
    port = Front(Kind.NODE_PORT, None, 30080, route(A), route(A), Masquerade.ALWAYS)
    own = Front(Kind.EXTERNAL_IP, "192.168.77.2", 30080, route(B), route(B), Masquerade.ALWAYS)
    agent = node.start()
    agent.sync(node.table(entry(port)))
    assert node.weights("192.168.77.2", 30080) == {A.address: 1}
    agent.sync(node.table(entry(port), other=(entry(own, name="default/other:x"),)))
    assert {a for a, w in node.weights("192.168.77.2", 30080).items() if w} == {B.address}
    agent.sync(node.table(entry(port)))
    assert {a for a, w in node.weights("192.168.77.2", 30080).items() if w} == {A.address}


def test_another_masquerade_bit_moves_marks_of_the_outside(node: Node) -> None:
    frontend = Front(
        Kind.EXTERNAL_IP, "203.0.113.7", 80, route(A, B), route(A, why="local"), Masquerade.ALWAYS
    )  # fmt: skip
    agent = node.start()
    agent.sync(node.table(entry(frontend)))
    moved = msgspec.structs.replace(NETWORK, masquerade_bit=20)
    agent.sync(node.table(entry(frontend), network=moved))
    marks = {server.mark for server in node.ipvs.known if server.mark}
    assert len(marks) == 1
    assert all(mark & 1 << 20 for mark in marks)
    assert set(node.sets.held["HPV-4-MARKS"].values()) == marks


@pytest.mark.parametrize("order", [1, -1])
def test_a_service_that_takes_over_an_address_of_another_keeps_its_marks_apart(node: Node, order: int) -> None:
    def local(address: str, name: str) -> tuple[object, ...]:
        frontend = Front(Kind.EXTERNAL_IP, address, 80, route(A, B), route(A, why="local"), Masquerade.NODE)
        return (entry(frontend, name=f"default/{name}:x"),)

    names = ["a", "b", "c"][::order]
    agent = node.start()
    agent.sync(node.table(**{names[0]: local("203.0.113.1", names[0])}))  # type: ignore[arg-type]
    agent.sync(node.table(**{names[1]: local("203.0.113.1", names[1])}))  # type: ignore[arg-type]
    both = {names[1]: local("203.0.113.1", names[1]), names[2]: local("203.0.113.2", names[2])}
    agent.sync(node.table(**both))  # type: ignore[arg-type]
    marks = list(node.sets.held["HPV-4-MARKS"].values())
    assert len(set(marks)) == 2
    assert {server.mark for server in node.ipvs.known if server.mark} == set(marks)


def test_datagrams_and_streams_of_one_port_are_apart(node: Node) -> None:
    agent = node.start()
    agent.sync(node.table(web(A), entry(cluster_ip(route(B)), name="default/web:dns", protocol=Protocol.UDP)))
    assert node.weights() == {A.address: 1}
    assert node.weights(protocol=UDP) == {B.address: 1}
