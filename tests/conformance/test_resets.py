"""Connections to endpoints that are gone, of services that ask for resets of them (reset-gone-backends)."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from hybrid_proxy.dataplane.kernel import tcp_segments
from hybrid_proxy.dataplane.kernel.tcp_segments import SYN_ACK, Segment
from hybrid_proxy.workshop.lab.traffic import ask_tcp

from .conftest import only_in
from .kit import DEADLINES, Bench, Service, as_terminating, counted, eventually, open_flows, packets_counted, rule
from .test_rows import target_of

WAYS = {"pod1": "cluster", "client": "nodeport", "node": "cluster"}
MODES = ["ebpf", "nftables", "iptables", "userspace"]  # of ipvs `status` says that it sends none
ASKS = {"reset-gone-backends": "true"}


@contextmanager
def talking(bench: Bench, service: Service, family: int, pod: str = "pod2") -> Iterator[dict[str, socket.socket]]:
    """A connection of each kind of client, that has been used."""
    clients: dict[str, socket.socket] = {}
    try:
        for place, way in WAYS.items():
            clients[place] = bench.connect(place, target_of(bench, service, way, family), family)
            assert ask_tcp(clients[place]).pod == pod
        yield clients
    finally:
        for client in clients.values():
            client.close()


def are_reset(bench: Bench, clients: dict[str, socket.socket]) -> None:
    """Each one's recv() fails, which waits and sends nothing. It takes 20 to 100 ms where nobody else works."""
    until = time.monotonic() + 5 * DEADLINES
    stay = []
    for place, client in clients.items():
        client.settimeout(max(until - time.monotonic(), 0.1))
        # The kernel says so of a socket that it aborts, as it does the node's own ones in mode ebpf.
        with suppress(ConnectionResetError, ConnectionAbortedError):
            try:
                stay.append(f"{place}, to which came {client.recv(1)!r}")
            except TimeoutError:
                stay.append(place)
    counters = bench.agent.running_status().dataplane.counters if stay else {}
    assert not stay, f"not reset: {stay}\n{counters}\n{open_flows(bench)}\n{bench.agent.tail()}"


@pytest.mark.row("4.40", "reset-gone-backends: open connections to an endpoint that is gone are reset at once")
@pytest.mark.parametrize(("gone", "left"), [("pod2", "pod3"), ("pod2", None), ("remote1", "pod3")])
@only_in(*MODES)
def test_clients_of_an_endpoint_that_is_gone_are_reset(
    bench: Bench, mode: str, gone: str, left: str | None, family: int
) -> None:
    service = bench.service(gone, outside=True, annotations=ASKS)
    before = 0
    if mode != "userspace":  # whose relay counts all its resets
        full = f"conformance/{service.name}"
        # Those that asked whether it is there may not be over yet, and would be reset, too.
        eventually(lambda: not open_flows(bench, full), 5, lambda: f"still open: {open_flows(bench, full)}")
        before = counted(bench.agent, "connections_reset")
    with talking(bench, service, family, gone) as clients:
        if left:
            service.write(bench.lab[left])
        else:
            service.empty()
        are_reset(bench, clients)
    if mode != "userspace":
        reset = before + len(clients)
        eventually(
            lambda: counted(bench.agent, "connections_reset") == reset, 5,
            lambda: f"{counted(bench.agent, 'connections_reset')} are counted, not {reset}",
        )  # fmt: skip


@pytest.mark.row("4.40", "reset-gone-backends: without it, and while an endpoint terminates, connections stay open")
@pytest.mark.parametrize("case", ["not asked for", "terminating", "terminating, not serving"])
@only_in(*MODES)
def test_connections_that_stay(bench: Bench, mode: str, case: str, family: int) -> None:
    service = bench.service("pod2", outside=True, annotations={} if case == "not asked for" else ASKS)
    other = bench.service("pod2", outside=True, annotations=ASKS)
    with talking(bench, service, family) as clients, talking(bench, other, family) as others:
        ends = [as_terminating(bench.lab["pod2"], serving="not" not in case)] if "not asked" not in case else []
        service.write(*ends, bench.lab["pod3"])
        bench.settle(service, {"pod3"}, family)
        other.write(bench.lab["pod3"])
        are_reset(bench, others)
        for client in clients.values():
            assert ask_tcp(client).pod == "pod2"


@pytest.mark.row("4.40", "reset-gone-backends: a client is reset that has just replied to a stray segment")
@only_in("nftables", "iptables")
def test_a_client_that_will_not_reply_for_a_moment(bench: Bench, mode: str, family: int) -> None:
    """Of several strays within half a second, the kernel replies to the first one alone (tcp_invalid_ratelimit)."""
    service = bench.service("pod2", outside=True, annotations=ASKS)
    with talking(bench, service, family) as clients:
        with bench.lab.inside("node"):
            assert tcp_segments.send(to_client(one) for one in clients.values()) == len(clients)
        service.write(bench.lab["pod3"])
        are_reset(bench, clients)


def to_client(client: socket.socket) -> Segment:
    """One that its kernel replies to by a challenge ACK."""
    (target, port, *_), (source, source_port, *_) = client.getsockname(), client.getpeername()
    ends = [socket.inet_pton(client.family, address) for address in (source, target)]
    ports = [number.to_bytes(2, "big") for number in (source_port, port)]
    return Segment(6 if client.family == socket.AF_INET6 else 4, ends[0], ports[0], ends[1], ports[1], flags=SYN_ACK)


@only_in("nftables", "iptables")
def test_resets_that_are_lost_are_asked_for_again(bench: Bench, mode: str) -> None:
    """A queue of the kernel may be full for a second: here two resets of each client are lost."""
    service = bench.service("pod2", outside=True, annotations=ASKS)
    with talking(bench, service, socket.AF_INET) as clients:
        lost = 2 * len(clients)  # resets of 40 bytes
        with rule(bench.lab, f"tcp flags rst quota until {40 * lost + 20} bytes counter drop", "pod3", "output"):
            service.write(bench.lab["pod3"])
            eventually(lambda: packets_counted(bench, "pod3") == lost, 10, "two resets of each client are lost")
            are_reset(bench, clients)


@only_in("nftables", "iptables")
def test_a_port_that_the_backend_does_not_reset(bench: Bench, mode: str, family: int) -> None:
    """It had a connection from there a moment ago, for example. Here it resets neither of the first two ports."""
    service = bench.service("pod2", outside=True, annotations=ASKS)
    node = f"{'ip' if family == socket.AF_INET else 'ip6'} daddr {bench.lab['node'].address(family)}"
    first = f"tcp flags rst {node} add @tried {{ tcp dport }} counter drop"
    with (
        talking(bench, service, family) as clients,
        rule(bench.lab, first, "pod3", "output", tried="type inet_service; size 2; flags dynamic;"),
    ):
        service.write(bench.lab["pod3"])
        are_reset(bench, clients)
        assert packets_counted(bench, "pod3") == 2
