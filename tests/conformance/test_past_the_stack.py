"""What rules of the node see of flows between its pods: with `--fast-path=always` nothing, with `established` whether a
flow may begin. By default it is the former where there is no rule, and otherwise the latter.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import ask_tcp, ask_udp

from .conftest import MODES, routed_lab
from .kit import HTTP, UDP, V4, V6, Bench, counted, eventually, packets_counted, rule
from .test_node_settings import agent_with
from .world import SECOND

OPENS = f"tcp dport {HTTP} tcp flags & (syn | ack) == syn"  # the first segment of a connection, by its flags
CATCH = 9191  # a port of the second pod where datagrams are only read
IFB = "ifb"
SIZE = 50_000
SMALL = 500  # less than a sequence number grows in a connection's time: a backend in TIME_WAIT accepts the next one
FAMILIES = pytest.mark.parametrize("family", [V4, V6], ids=["v4", "v6"])

pytestmark = pytest.mark.skipif("ebpf" not in MODES, reason="mode ebpf alone has a way past the stack")


@pytest.fixture(scope="module")
def field() -> Iterator[Lab]:
    with routed_lab(2, 1, SECOND) as made:
        yield made


def seen_by_rule(bench: Bench, target: tuple[str, int], family: int, connections: int = 20, port: int = 0) -> int:
    """How many packets of these connections the rule counts; each carries some data, and ends before the next begins.
    `port`: the client's, of each of them; 0: as the kernel gives them.
    """
    size = SMALL if port else SIZE
    before = packets_counted(bench)
    for _ in range(connections):
        with bench.connect("pod1", target, family, port, timeout=20.0) as connection:
            assert ask_tcp(connection, body=bytes(size), close=True).received == size
            assert not connection.recv(1), "the server closes first: a client that did could not use its port again"
    return packets_counted(bench) - before


@pytest.mark.parametrize("path", ["always", "established"])
def test_with_always_no_rule_sees_a_flow_and_the_status_says_so(field: Lab, path: str) -> None:
    with rule(field, f"{OPENS} counter"), agent_with(field, "ebpf", f"--fast-path={path}") as (bench, services):
        for family in (V4, V6):
            bench.settle(services["near"], {"pod2"}, family)
            seen = seen_by_rule(bench, services["near"].vip(family), family)
            # The kernel's own output confirms a neighbour every sixteen seconds.
            assert (seen <= 6) if path == "always" else (seen >= 20), f"of 20 connections the rule saw {seen}"
        status = bench.agent.running_status()
        warned = any("inet wall forward" in warning for warning in status.dataplane.warnings)
        assert warned is (path == "always")
        assert path != "always" or "rules do not see" in bench.agent.tail(200)
        assert status.dataplane.ebpf is not None
        assert status.dataplane.ebpf.fast_path == path


@FAMILIES
@pytest.mark.parametrize(("path", "new", "port"), [("established", 1, 30_303), ("off", 3, 30_304)])
def test_a_port_that_comes_again_within_a_minute_is_no_new_one_to_conntrack(
    field: Lab, path: str, new: int, port: int, family: int
) -> None:
    """Conntrack has seen how the connection before began, not how it ended, unless all its packets pass the stack."""
    watching = rule(field, f"{OPENS} ct state new counter")
    with watching, agent_with(field, "ebpf", f"--fast-path={path}") as (bench, services):
        bench.settle(services["near"], {"pod2"}, family)
        seen = seen_by_rule(bench, services["near"].vip(family), family, connections=3, port=port)
        assert seen == new, f"of three connections with one port, {seen} were new ones"


def decided(bench: Bench, path: str, why: str) -> None:
    """Within a moment the agent decides that, and says why."""

    def says() -> bool:
        ebpf = bench.agent.running_status().dataplane.ebpf
        return ebpf is not None and ebpf.fast_path == path and why in ebpf.fast_path_reason

    eventually(says, 10, f"the fast path is not `{path}` because of {why}")


@FAMILIES
def test_by_default_a_rule_that_appears_counts_for_open_flows_too(field: Lab, family: int) -> None:
    with agent_with(field, "ebpf") as (bench, services):
        near = services["near"]
        bench.settle(near, {"pod2"}, family)
        decided(bench, "always", "nothing in the stack has to see them")
        with ExitStack() as stack:
            # Once every 16 seconds one begins through the stack, which may be bypassed afterwards.
            connections = [
                stack.enter_context(bench.connect("pod1", near.vip(family), family, timeout=20.0)) for _ in range(3)
            ]
            assert all(ask_tcp(one, body=bytes(SIZE)).received == SIZE for one in connections)
            with rule(field, f"tcp dport {HTTP} counter"):
                decided(bench, "established", "inet wall forward")
                assert "established (the stack has inet wall forward" in bench.agent.command("status").stdout
                before = packets_counted(bench)
                assert all(ask_tcp(one, body=bytes(SIZE)).received == SIZE for one in connections), "it takes them over"
                assert packets_counted(bench) > before
                assert seen_by_rule(bench, near.vip(family), family, 3) > 0
            decided(bench, "always", "nothing in the stack has to see them")
            assert all(ask_tcp(one, body=bytes(SIZE)).received == SIZE for one in connections)


@FAMILIES
@pytest.mark.parametrize("path", ["auto", "established"])
def test_what_a_rule_drops_stays_dropped(field: Lab, family: int, path: str) -> None:
    with agent_with(field, "ebpf", f"--fast-path={path}") as (bench, services):
        near = services["near"]
        bench.settle(near, {"pod2"}, family)
        with rule(field, f"tcp dport {HTTP} drop"):
            decided(bench, "established", "")
            with pytest.raises(TimeoutError):
                bench.connect("pod1", near.vip(family), family, timeout=1.0)


def send(bench: Bench, sender: socket.socket, catcher: socket.socket, seconds: float) -> tuple[int, int]:
    """How many datagrams were sent in that time, and how many arrived."""
    sent = arrived = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sender.send(b"log line")
        sent += 1
        time.sleep(0.02)
        while True:
            try:
                catcher.recv(100)
            except BlockingIOError:
                break
            arrived += 1
    return sent, arrived


@FAMILIES
def test_datagrams_without_an_answer_are_handed_over_as_long_as_rules_let_them_pass(field: Lab, family: int) -> None:
    with (
        agent_with(field, "ebpf", "--fast-path=established", "--conntrack-udp-timeout=12s") as (bench, _),
        field.socket("pod2", family, socket.SOCK_DGRAM) as catcher,
        field.socket("pod1", family, socket.SOCK_DGRAM) as sender,
    ):
        service = bench.service("pod2", settle=False, protocol="UDP", port=53, target=CATCH)
        catcher.bind((bench.lab["pod2"].address(family), CATCH))
        catcher.setblocking(False)
        sender.connect(service.vip(family))
        eventually(lambda: send(bench, sender, catcher, 0.1)[1], 10, "no datagram arrives")
        with rule(field, f"udp dport {CATCH} drop"):
            eventually(lambda: send(bench, sender, catcher, 0.5)[1] == 0, 10, "they pass a rule that drops them")
            before = counted(bench.agent, "fast")
            assert send(bench, sender, catcher, 1.0)[1] == 0
            assert counted(bench.agent, "fast") == before
        eventually(lambda: counted(bench.agent, "fast") > before or not send(bench, sender, catcher, 0.5), 10,
                   "none is handed over")  # fmt: skip
        sent, arrived = send(bench, sender, catcher, 4.0)
        assert abs(sent - arrived) <= 2, "on both ways, which take turns: the stack is asked again each two seconds"
        assert counted(bench.agent, "fast") - before > sent / 2


@FAMILIES
@pytest.mark.parametrize("path", ["always", "established"])
def test_datagrams_of_every_size_have_answers(field: Lab, family: int, path: str) -> None:
    with agent_with(field, "ebpf", f"--fast-path={path}") as (bench, _):
        service = bench.service("pod2", protocol="UDP", port=53, target=UDP)
        with field.socket("pod1", family, socket.SOCK_DGRAM) as client:
            client.settimeout(5)
            client.connect(service.vip(family))
            for size in (10, 1400, 5000, 20_000):
                assert ask_udp(client, text="x" * size)[0].pod == "pod2"


def bytes_shaped(lab: Lab, device: str) -> int:
    """By the token bucket of the device."""
    listed = lab.run("node", ["tc", "-s", "-j", "qdisc", "show", "dev", device]).stdout
    return sum(one["bytes"] for one in json.loads(listed) if one["kind"] == "tbf")


@contextmanager
def limit(lab: Lab, interface: str, kind: str) -> Iterator[str]:
    """A pod's bandwidth is limited as the CNI plugin `bandwidth` does it; yields the words of the status."""
    bucket = "tbf rate 1gbit burst 1mb latency 50ms"
    commands, words = {
        "to the pod": ([f"tc qdisc add dev {interface} root {bucket}"], f"qdisc tbf at {interface}"),
        "from the pod": (
            [
                f"ip link add {IFB} type ifb", f"ip link set {IFB} up", f"tc qdisc add dev {IFB} root {bucket}",
                f"tc qdisc add dev {interface} clsact",
                f"tc filter add dev {interface} ingress prio 9 u32 match u32 0 0 action mirred egress redirect dev ifb",
            ],
            f"filter u32 at {interface}",
        ),
    }[kind]  # fmt: skip
    try:
        for command in commands:
            done = lab.run("node", command.split())
            assert done.returncode == 0 or "clsact" in command, done.stderr  # the agent's own is there already
        yield words
    finally:
        lab.run("node", f"tc qdisc del dev {interface} root".split())
        lab.run("node", f"tc filter del dev {interface} ingress prio 9".split())
        lab.run("node", ["ip", "link", "del", IFB])


@pytest.mark.parametrize("kind", ["to the pod", "from the pod"])
def test_a_limit_of_a_pods_bandwidth_sees_every_packet_of_open_flows_too(field: Lab, kind: str) -> None:
    interface, device = {
        "to the pod": (field["pod2"].interface, field["pod2"].interface),
        "from the pod": (field["pod1"].interface, IFB),
    }[kind]
    with agent_with(field, "ebpf") as (bench, services):
        bench.settle(services["near"], {"pod2"}, V4)
        decided(bench, "always", "nothing in the stack has to see them")
        with bench.connect("pod1", services["near"].vip(V4), V4, timeout=20.0) as connection:
            assert ask_tcp(connection, body=bytes(SIZE)).received == SIZE
            with limit(field, interface, kind) as words:
                decided(bench, "off", words)
                before = bytes_shaped(field, device)
                assert ask_tcp(connection, body=bytes(SIZE)).received == SIZE
                assert bytes_shaped(field, device) - before > SIZE
            decided(bench, "always", "nothing in the stack has to see them")
            assert ask_tcp(connection, body=bytes(SIZE)).received == SIZE


@FAMILIES
def test_a_routing_rule_by_ports_meets_packets_of_pairs_that_bypass_the_stack(field: Lab, family: int) -> None:
    ports = {"open": 9300, "closed": 9301}
    with agent_with(field, "ebpf") as (bench, _), ExitStack() as stack:
        senders, catchers = {}, {}
        for name, port in ports.items():
            catchers[name] = stack.enter_context(field.socket("pod2", family, socket.SOCK_DGRAM))
            catchers[name].bind((field["pod2"].address(family), port))
            catchers[name].setblocking(False)
            senders[name] = stack.enter_context(field.socket("pod1", family, socket.SOCK_DGRAM))
            senders[name].connect((field["pod2"].address(family), port))

        def arrived(name: str) -> bool:
            """Whether any did of those that were sent with others of the same pair, which bypass the stack."""
            found = 0
            for _ in range(40):
                for each in ("open", "closed"):
                    found += bool(send(bench, senders[each], catchers[each], 0.02)[1]) and each == name
            return bool(found)

        decided(bench, "always", "nothing in the stack has to see them")
        before = counted(bench.agent, "fast")
        assert arrived("closed")
        assert counted(bench.agent, "fast") > before
        ip = ["ip", "-6" if family == V6 else "-4"]
        rule = f"rule add pref 100 ipproto udp dport {ports['closed']} blackhole".split()
        done = field.run("node", [*ip, *rule])
        assert done.returncode == 0, done.stderr
        try:
            decided(bench, "established", "routing rule 100 by ports")
            assert not arrived("closed")
            assert arrived("open")
        finally:
            field.run("node", [*ip, "rule", "del", "pref", "100"])
        decided(bench, "always", "nothing in the stack has to see them")
        assert arrived("closed")
