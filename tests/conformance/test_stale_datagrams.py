"""2.25 and section 5: one socket, one source port, like a resolver's; its flow follows when its backend is gone."""

from __future__ import annotations

import contextlib
import itertools
import select
import signal
import socket
from contextlib import ExitStack

import pytest

from hybrid_proxy.workshop.lab.traffic import ask_udp

from .kit import UDP, V4, V6, Bench, End, Service, as_terminating, eventually, ruleset
from .test_drift import ACCIDENTS
from .test_rows import target_of

WAYS = [("pod1", "cluster"), ("node", "cluster"), ("client", "cluster"), ("client", "nodeport"), ("client", "lb"),
        ("client", "external"), ("pod1", "nodeport")]  # fmt: skip


def dns(bench: Bench, *ends: str | End, **fields: object) -> Service:
    return bench.service(*ends, **({"protocol": "UDP", "port": 53, "target": UDP, "outside": True} | fields))


def ask(client: socket.socket, target: tuple[str, int]) -> str:
    """Who answers on this very socket; a datagram that is lost is asked again by the caller."""
    return ask_udp(client, target)[0].pod


MOVES = "a datagram flow moves when its backend is gone"


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(socket.AF_INET, id="v4", marks=[pytest.mark.core, pytest.mark.row("5.3", MOVES)]),
        pytest.param(socket.AF_INET6, id="v6", marks=pytest.mark.row("5.3", f"{MOVES} (IPv6)")),
    ],
)
def test_a_flow_moves_when_its_backend_is_gone(bench: Bench, family: int) -> None:
    """Clients on all ways; each backend goes once, and takes those that it served with it."""
    service = dns(bench, "pod2", "pod3")
    with ExitStack() as stack:
        clients = [
            (way, stack.enter_context(bench.socket(way[0], family, socket.SOCK_DGRAM, timeout=0.3)),
             target_of(bench, service, way[1], family))
            for way in WAYS
        ]  # fmt: skip
        had = {way: ask(client, target) for way, client, target in clients}
        for gone, left in (("pod2", "pod3"), ("pod3", "pod2")):
            service.write(bench.lab[left])
            for way, client, target in clients:
                eventually(
                    lambda client=client, target=target, left=left: ask(client, target) == left,
                    5, f"{' to '.join(way)}, first at {had[way]}: the flow still goes to {gone}, which is gone",
                )  # fmt: skip


@pytest.mark.row("5.4", "the same endpoint at another port counts as gone")
def test_a_flow_moves_with_its_backends_port(bench: Bench, family: int) -> None:
    service = dns(bench, "pod2")
    target = service.vip(family)
    with (
        bench.lab.socket("pod2", family, socket.SOCK_DGRAM) as other,
        bench.socket("pod1", family, socket.SOCK_DGRAM, timeout=0.3) as client,
    ):
        other.bind((bench.lab["pod2"].address(family), 5454))
        other.settimeout(0.3)
        assert ask(client, target) == "pod2"
        service.write(target=5454)

        def arrives() -> bool:
            client.sendto(b"where?", target)
            return other.recv(100) == b"where?"

        eventually(arrives, 5, "datagrams still go to the old port")


@pytest.mark.core(long=True)
@pytest.mark.row("5.5", "entries from before the service was there go")
def test_a_flow_from_before_the_service_is_not_lost(bench: Bench, family: int) -> None:
    """What was sent to the address while nobody had it left an entry, which would go on swallowing datagrams."""
    service = dns(bench, "pod2")
    service.delete()
    other = dns(bench, "pod3")  # settled: the deletion is done, too
    assert other.ends
    with ExitStack() as stack:
        clients = [
            (f"{place} to {way}", stack.enter_context(bench.socket(place, family, socket.SOCK_DGRAM, timeout=0.15)),
             target_of(bench, service, way, family))
            for place, way in itertools.product(("pod1", "client"), ("cluster", "lb", "nodeport"))
        ]  # fmt: skip
        for _ in range(3):
            for _, client, target in clients:
                with contextlib.suppress(OSError):
                    client.sendto(b"who?", target)
            assert not select.select([client for _, client, _ in clients], [], [], 0.15)[0], "nobody is to answer"
        service.write()
        for name, client, target in clients:
            eventually(
                lambda client=client, target=target: ask(client, target) == "pod2",
                5, f"{name}: the socket that asked too early is never answered",
            )  # fmt: skip


@pytest.mark.row("5.6", "a flow stays with an endpoint that still serves")
def test_a_flow_stays_while_its_backend_serves(bench: Bench, family: int) -> None:
    """An endpoint that ends, or that a policy leaves out, keeps what it has; new flows go elsewhere."""
    service = dns(bench, "pod2")
    target = service.vip(family)
    with bench.socket("pod1", family, socket.SOCK_DGRAM, timeout=0.5) as client:
        assert ask(client, target) == "pod2"
        service.write(as_terminating(bench.lab["pod2"]), End(bench.lab["pod3"]))
        bench.settle(service, {"pod3"}, family)
        assert [ask(client, target) for _ in range(5)] == ["pod2"] * 5


@pytest.mark.row("5.6", "a flow stays with an endpoint that a policy leaves out")
def test_a_policy_does_not_cut_flows(bench: Bench, family: int) -> None:
    service = dns(bench, "remote1")
    target = service.vip(family)
    with bench.socket("pod1", family, socket.SOCK_DGRAM, timeout=0.5) as client:
        assert ask(client, target) == "remote1"
        service.write(bench.lab["remote1"], bench.lab["pod2"], spec={"internalTrafficPolicy": "Local"})
        bench.settle(service, {"pod2"}, family)
        assert [ask(client, target) for _ in range(5)] == ["remote1"] * 5


@pytest.mark.row("5.7", "without any serving endpoint a flow ends: the client is refused")
def test_a_service_without_endpoints_refuses_its_flows(bench: Bench, family: int) -> None:
    """A refusal beats a wait for nobody, and the endpoint's address may be another pod's by now."""
    service = dns(bench, "pod2")
    with bench.socket("pod1", family, socket.SOCK_DGRAM, timeout=0.5) as client:
        client.connect(service.vip(family))
        assert ask_udp(client)[0].pod == "pod2"
        service.empty()

        def is_refused() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                ask_udp(client)
                return False
            return True

        eventually(is_refused, 5, "a client that keeps its port is not refused")


# Somebody else's rule, by which packets are tracked whatever becomes of ours.
TRACKS = "table inet tracks { chain passing { type filter hook forward priority 0; ct state new accept; }; }"
SINK = 5454  # a port of pod2 where nobody answers
ADDRESSES = ("10.96.9.9", "fd96::9:9")
# What happens to a Service, and by which ways clients sent to it until then. None: it is deleted.
WENT: dict[str, tuple[list[tuple[str, str]], dict[str, object] | None]] = {
    "scaled to zero": (WAYS, {"ends": ()}),
    "deleted": (WAYS, None),
    "its port is another": ([way for way in WAYS if way[1] != "nodeport"], {"port": 54}),
    "its ClusterIP is another": (WAYS[:3], {"spec": {"clusterIP": ADDRESSES[0], "clusterIPs": [*ADDRESSES]}}),
    "a ClusterIP alone": (WAYS[3:], {"outside": False}),
    "without external IPs": ([("client", "external")], {"spec": {"externalIPs": []}}),
    "TCP alone": (WAYS, {"protocol": "TCP"}),
    "another target port": (WAYS, {"target": UDP}),
}


@pytest.mark.core(long=True)
@pytest.mark.row("5.3", "datagrams that nobody answers do not reach a former endpoint")
def test_one_way_datagrams_do_not_reach_a_former_endpoint(bench: Bench, mode: str) -> None:
    """Clients that only send, from one port each (kubernetes #139629, #141371); each datagram keeps an entry alive.

    In mode ebpf a flow goes on while its backend serves the service at another port.
    """
    went = {what: case for what, case in WENT.items() if (mode, what) != ("ebpf", "its port is another")}
    services = {what: dns(bench, "pod2", settle=False, target=SINK) for what in went}
    control = dns(bench, "pod2", settle=False, target=SINK)
    with ExitStack() as stack:
        senders = {}
        for family, (what, (ways, _)) in itertools.product((V4, V6), went.items()):
            for place, way in ways:
                made = stack.enter_context(bench.socket(place, family, socket.SOCK_DGRAM))
                target = target_of(bench, services[what], way, family)
                senders[f"{what}: {place} to {way}, family {family}"] = made, target
        sinks = [stack.enter_context(bench.socket("pod2", family, socket.SOCK_DGRAM, SINK)) for family in (V4, V6)]

        def arrived() -> set[str]:
            """Of which clients a datagram comes to pod2; what was sent before the last one is there when that is."""
            for name, (made, target) in senders.items():
                with contextlib.suppress(OSError):
                    made.sendto(name.encode(), target)
            seen = set()
            for sink, family in zip(sinks, (V4, V6), strict=True):
                with bench.socket("client", family, socket.SOCK_DGRAM) as last:
                    last.sendto(b"", control.vip(family))
                while text := sink.recv(200):
                    seen.add(text.decode())
            return seen

        eventually(lambda: arrived() == senders.keys(), 10, lambda: f"does not arrive: {senders.keys() - arrived()}")
        for what, (_, change) in went.items():
            if change is None:
                services[what].delete()
            else:
                services[what].write(**change)
        eventually(lambda: not arrived(), 10, lambda: f"still arrives: {sorted(arrived())}")


@pytest.mark.row("5.5", "a connection whose SYN came while the rules were absent is made")
def test_a_connection_that_began_without_rules_is_made(bench: Bench, mode: str) -> None:
    """Others flush the rules, and until they are back a SYN leaves an entry that would swallow the repeated ones."""
    service = bench.service("pod2", outside=True)
    absent = ACCIDENTS[mode].keys() & {"everything", "ruleset-flushed", "nat-flushed"}
    folder = bench.agent.running_status().dataplane.ebpf.pins if mode == "ebpf" else ""
    assert bench.agent.process is not None
    with ExitStack() as stack:
        bench.agent.process.send_signal(signal.SIGSTOP)
        stack.callback(bench.agent.process.send_signal, signal.SIGCONT)
        for command in ACCIDENTS[mode][absent.pop()]:
            assert bench.lab.run("node", [word.replace("{pins}", folder) for word in command]).returncode == 0
        stack.enter_context(ruleset(bench.lab, TRACKS))
        opened = {}
        for family, (place, way) in itertools.product((V4, V6), WAYS[4:6]):
            client = stack.enter_context(bench.socket(place, family, socket.SOCK_STREAM))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(target_of(bench, service, way, family))
            opened[f"{place} to {way}, family {family}"] = client
        bench.agent.process.send_signal(signal.SIGCONT)
        poll = select.poll()
        for client in opened.values():
            poll.register(client, select.POLLOUT)
        made: dict[int, int] = {}
        eventually(
            lambda: made.update(poll.poll(0)) or made.keys() >= {client.fileno() for client in opened.values()}, 20,
            lambda: f"not made: {[name for name, client in opened.items() if client.fileno() not in made]}",
        )  # fmt: skip
        errors = {name: client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for name, client in opened.items()}
        assert not any(errors.values()), errors


@pytest.mark.row("5.1", "TCP connections are never cut")
@pytest.mark.parametrize(("place", "way"), [("client", "nodeport"), ("client", "lb")])
def test_connections_outlive_their_endpoint(bench: Bench, place: str, way: str, family: int) -> None:
    service = bench.service("pod2", outside=True)
    stream = bench.stream(place, target_of(bench, service, way, family), family)
    with stream.connection:
        assert stream.ask().pod == "pod2"
        service.write(bench.lab["pod3"])
        bench.settle(service, {"pod3"}, family)
        assert [stream.ask().pod for _ in range(5)] == ["pod2"] * 5
