"""2.25 and section 5: one socket, one source port, like a resolver's; its flow follows when its backend is gone."""

from __future__ import annotations

import contextlib
import itertools
import socket
from contextlib import ExitStack

import pytest

from hybrid_proxy.workshop.lab.traffic import ask_udp

from .kit import UDP, Bench, End, Service, as_terminating, eventually, refused
from .test_rows import target_of

WAYS = [("pod1", "cluster"), ("node", "cluster"), ("client", "cluster"), ("client", "nodeport"), ("client", "lb"),
        ("client", "external"), ("pod1", "nodeport")]  # fmt: skip


def dns(bench: Bench, *ends: str | End, **fields: object) -> Service:
    return bench.service(*ends, protocol="UDP", port=53, target=UDP, outside=True, **fields)


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
        for (_, client, target), _ in itertools.product(clients, range(3)):
            with contextlib.suppress(OSError):
                ask(client, target)
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


@pytest.mark.row("5.7", "without any serving endpoint flows go on (ebpf: the client is refused)")
def test_a_service_without_endpoints_keeps_its_flows(bench: Bench, mode: str, family: int) -> None:
    """In the eBPF datapath every datagram looks whether its backend serves: a refusal beats a wait for nobody."""
    service = dns(bench, "pod2")
    target = service.vip(family)
    with bench.socket("pod1", family, socket.SOCK_DGRAM, timeout=0.5) as client:
        client.connect(target)
        assert ask_udp(client)[0].pod == "pod2"
        service.empty()
        eventually(lambda: refused(bench, "pod1", service, family), 5, "an emptied service is not refused")
        if mode == "ebpf":
            with pytest.raises(ConnectionRefusedError):
                ask_udp(client)
        else:
            assert ask_udp(client)[0].pod == "pod2"


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
