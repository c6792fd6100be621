"""Sockets of the node itself: what a policy drops is silence and no error, and a bound socket has its own address."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hybrid_proxy.workshop.lab.network import Place
from hybrid_proxy.workshop.lab.traffic import Reply, ask_tcp, ask_udp

from .kit import PATIENCE, UDP, V4, V6, Bench, Service, eventually, silent
from .world import HOST_PORT, SECOND

LOCAL = {"internalTrafficPolicy": "Local"}
LOOPBACK = 1  # its index
IP_PKTINFO, IPV6_PKTINFO = 8, 50  # linux/in.h, linux/in6.h
PLACES, FAMILIES = ("node", "pod1"), (V4, V6)
Target = tuple[str, int]


def become_silent(bench: Bench, **fields: object) -> Service:
    """A service whose only endpoint is on another node by now, where its policy forbids to go."""
    service = bench.service("pod2", spec=LOCAL, **fields)
    service.write(bench.lab["remote1"])
    for family in FAMILIES:
        eventually(lambda family=family: silent(bench, "pod1", service, family, 1.0), 10, "the service still answers")
    return service


@pytest.mark.row("2.11", "silence ends with an endpoint: a SYN that comes again is answered")
def test_connections_wait_for_an_endpoint(bench: Bench) -> None:
    """Clients of all places and families wait at the same time."""
    service = become_silent(bench)
    with contextlib.ExitStack() as stack:
        waiting, clients = select.poll(), {}
        for place, family in itertools.product(PLACES, FAMILIES):
            client = stack.enter_context(bench.socket(place, family, socket.SOCK_STREAM, timeout=15))
            client.setblocking(False)
            assert client.connect_ex(service.vip(family)) == errno.EINPROGRESS
            clients[client.fileno()] = place, family, client
            waiting.register(client, select.POLLOUT)
        ended = {clients[number][:2]: event for number, event in waiting.poll(300 * PATIENCE)}
        assert not ended, f"without an endpoint: {ended}"
        service.write(bench.lab["pod2"])
        for place, family, client in clients.values():
            one = select.poll()
            one.register(client, select.POLLOUT)
            assert one.poll(15_000 * PATIENCE), f"{place}, {family!r}: no SYN that came again was answered"
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0, (place, family)
            client.settimeout(15 * PATIENCE)
            assert client.getpeername()[:2] == service.vip(family), place
            assert ask_tcp(client).pod == "pod2", (place, family)


@pytest.mark.row("2.11", "silence ends with an endpoint: later datagrams are answered")
def test_datagrams_wait_for_an_endpoint(bench: Bench) -> None:
    """Clients of all places and families, with a connected socket and without, wait at the same time."""
    service = become_silent(bench, protocol="UDP", port=53, target=UDP)
    with contextlib.ExitStack() as stack:
        clients = {}
        for place, family, connected in itertools.product(PLACES, FAMILIES, (False, True)):
            client = stack.enter_context(bench.socket(place, family, socket.SOCK_DGRAM, timeout=0.2))
            clients[place, family, connected] = client
            if connected:
                client.connect(service.vip(family))
        waiting = select.poll()
        for client in clients.values():
            waiting.register(client, select.POLLIN)
        for _ in range(2):
            for (_, family, connected), client in clients.items():
                with contextlib.suppress(PermissionError):  # of netfilter, to the sender of what it drops on output
                    client.sendmsg([b"who?"], [], 0, *([] if connected else [service.vip(family)]))
            assert not waiting.poll(300 * PATIENCE), "an answer or an error without an endpoint"
        service.write(bench.lab["pod2"])
        for (place, family, connected), client in clients.items():
            target = service.vip(family)

            def answered(client: socket.socket = client, target: Target = target, connected: bool = connected) -> bool:
                reply, source = ask_udp(client, None if connected else target)
                return (reply.pod, source) == ("pod2", target)

            eventually(answered, 5, f"{place}, {family!r}, {connected=}: nobody answers")


@contextmanager
def own(bench: Bench, address: str, family: int) -> Iterator[str]:
    """One more address of the node, at the loopback interface, as cloud providers give it load-balancer IPs."""
    link, length = bench.lab.netlink("node"), 32 if family == V4 else 128
    link.addr("add", index=LOOPBACK, address=address, prefixlen=length)
    try:
        eventually(lambda: is_there(bench, address, family), 5, f"{address} does not become the node's")
        yield address
    finally:
        link.addr("delete", index=LOOPBACK, address=address, prefixlen=length)


def is_there(bench: Bench, address: str, family: int) -> bool:
    """Whether a socket can have the address: of IPv6's the kernel makes sure a moment later."""
    with bench.lab.socket("node", family, socket.SOCK_STREAM) as client:
        client.bind((address, 0))
        return True


def connected_from(bench: Bench, address: str, target: tuple[str, int], family: int) -> Reply:
    with bench.lab.socket("node", family, socket.SOCK_STREAM) as client:
        client.settimeout(15 * PATIENCE)
        client.bind((address, 0))
        client.connect(target)
        assert client.getpeername()[:2] == target
        assert client.getsockname()[0] == address
        return ask_tcp(client)


@pytest.mark.row("2.31", "bound to a load-balancer IP: backends see an address that can be answered")
@pytest.mark.parametrize("backend", ["remote1", "pod2"])
def test_bound_to_a_load_balancer_ip(bench: Bench, backend: str, family: int) -> None:
    mine, other = bench.service("pod3", outside=True), bench.service(backend, outside=True)
    nodes = {bench.lab["node"].address(family), SECOND[family != V4]}
    with own(bench, mine.load_balancer_ip(family), family) as address:
        for target in (other.vip(family), (other.load_balancer_ip(family), other.port)):
            reply = connected_from(bench, address, target, family)
            assert reply.pod == backend
            # The answers of a pod of this node find any address of the node's.
            assert reply.peer[0] in nodes | ({address} if backend == "pod2" else set())


@pytest.mark.row("2.31", "datagrams from a load-balancer IP")
@pytest.mark.parametrize("how", ["bound", "with each packet"])
def test_datagrams_from_a_load_balancer_ip(bench: Bench, how: str, family: int) -> None:
    service = bench.service("remote1", protocol="UDP", port=53, target=UDP, outside=True)
    target = service.vip(family)
    nodes = {bench.lab["node"].address(family), SECOND[family != V4]}
    with (
        own(bench, service.load_balancer_ip(family), family) as address,
        bench.lab.socket("node", family, socket.SOCK_DGRAM) as client,
    ):
        client.settimeout(15 * PATIENCE)
        if how == "bound":
            client.bind((address, 0))
        for _ in range(2):
            client.sendmsg([b"who?"], [] if how == "bound" else [from_address(address)], 0, target)
            data, source = client.recvfrom(65536)
            assert source[:2] == target
            reply = json.loads(data)
            assert reply["pod"] == "remote1"
            assert reply["peer"][0] in nodes


def from_address(address: str) -> tuple[int, int, bytes]:
    """The control message that gives a datagram its source (ip(7), ipv6(7))."""
    if ":" in address:
        return socket.IPPROTO_IPV6, IPV6_PKTINFO, socket.inet_pton(socket.AF_INET6, address) + bytes(4)
    return socket.IPPROTO_IP, IP_PKTINFO, struct.pack("=I4s4x", 0, socket.inet_aton(address))


@pytest.mark.row("2.31", "each datagram's own source is looked for in the ranges")
def test_ranges_judge_each_datagrams_source(bench: Bench, family: int) -> None:
    ranges = [f"{bench.lab['node'].address(V4)}/32", f"{bench.lab['node'].address(socket.AF_INET6)}/128"]
    service = bench.service(
        "pod2", protocol="UDP", port=53, target=UDP, outside=True, spec={"loadBalancerSourceRanges": ranges}
    )
    target = service.load_balancer_ip(family), service.port
    with bench.socket("node", family, socket.SOCK_DGRAM, timeout=0.5) as client:
        eventually(lambda: ask_udp(client, target)[0].pod == "pod2", 5, "the primary address is in the ranges")
        with contextlib.suppress(PermissionError):
            client.sendmsg([b"who?"], [from_address(SECOND[family != V4])], 0, target)
        with pytest.raises(TimeoutError):
            client.recv(65536)
        assert ask_udp(client, target)[0].pod == "pod2"


@pytest.mark.row("2.31", "a bound socket reaches the node itself and others")
def test_bound_with_backends_here_and_there(bench: Bench, family: int) -> None:
    service = bench.service("node", "node2", target=HOST_PORT, settle=False)
    bench.settle(service, {"node", "node2"}, family)
    seen = {connected_from(bench, SECOND[family != V4], service.vip(family), family).pod for _ in range(24)}
    assert "node2" in seen
    assert seen <= {"node", "node2"}


@pytest.mark.row("2.31", "a free socket that connects again is judged by the primary address")
def test_the_address_that_the_kernel_chose_is_no_bound_one(bench: Bench, family: int) -> None:
    """Where pods are behind a bridge, the way to a backend has another source than the way to a service."""
    ranges = [f"{bench.lab['node'].address(V4)}/32", f"{bench.lab['node'].address(socket.AF_INET6)}/128"]
    service = bench.service(
        "pod2", protocol="UDP", port=53, target=UDP, outside=True, spec={"loadBalancerSourceRanges": ranges}
    )
    target, pod = (service.load_balancer_ip(family), service.port), bench.lab["pod2"]
    other, length = SECOND[family != V4], 32 if family == V4 else 128
    way = {"dst": f"{pod.address(family)}/{length}", "oif": interface_of(bench, pod), "family": family}
    link = bench.lab.netlink("node")
    link.route("replace", prefsrc=other, **way)
    try:
        with bench.socket("node", family, socket.SOCK_DGRAM) as client:
            for _ in range(3):
                client.connect(target)
                assert ask_udp(client)[0].pod == "pod2"
    finally:
        link.route("replace", **way, **({"scope": "link"} if family == V4 else {}))


def interface_of(bench: Bench, pod: Place) -> int:
    with bench.lab.inside("node"):
        return socket.if_nametoindex(pod.interface)
