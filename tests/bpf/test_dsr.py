"""Direct server return, packet by packet: what one node wraps another one unwraps, and answers the client itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6

from hybrid_proxy.dataplane.kernel.bpf import Object
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, Kind, Masquerade, Protocol
from tests.namespaces import fresh
from tests.tables import Front, entry_of

from .kit import (
    DROP,
    HZ,
    NETS,
    PASS,
    REDIRECT,
    SMALL,
    Bench,
    Net,
    bench_with,
    datagram,
    forward_by,
    frame,
    moments,
    read,
    segment,
    syn,
)
from .test_flows import web as plain_web
from .test_origins import Node
from .test_uplinks import CLIENTS, MTU, NODE_PORT, OUTER, Uplink, routes

OTHER = {4: "192.168.7.99", 6: "fd00:7::99"}  # the primary address of the node where the backend is
HEAD = {4: 20, 6: 40}


def web(net: Net, protocol: Protocol, *, local: bool) -> Entry:
    """A node port and a load-balancer IP of one backend, as seen by its own node or by another one."""
    route = BackendSet((Backend(net.backends[0], 8080, local=local),))
    fronts = (
        Front(Kind.CLUSTER_IP, net.vip, 80, route, route, Masquerade.NODE),
        Front(Kind.NODE_PORT, None, NODE_PORT, route, route, Masquerade.ALWAYS),
        Front(Kind.LOAD_BALANCER, OUTER[net.family], 80, route, route, Masquerade.ALWAYS),
    )
    return entry_of("default/web:http", net.family, protocol, fronts, route.backends)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[tuple[Bench, Object]]]:
    """Two sets of programs and maps, with the setting; the calling thread is in a namespace with routes."""
    with fresh(), ExitStack() as stack:
        routes()
        made = []
        for _ in range(2):
            bench = stack.enter_context(bench_with(SMALL, dsr=1))
            made.append((bench, bench.hooks))
        yield made


def a_node(node: tuple[Bench, Object], net: Net, entry: Entry, primary: str) -> Uplink:
    bench, programs = node
    bench.reset()
    words = layout.address_words([primary])[0]
    bench.node(**{f"primary{net.family}": words if net.family == 6 else words[0]})
    bench.serve(entry)
    made = Uplink(bench, programs, net)
    bench.store.serve_node_ports_at((primary,))
    return made


class Pair:
    """The node that is asked, and the one where the backend is."""

    def __init__(self, asked: Uplink, server: Uplink) -> None:
        self.asked, self.server, self.net = asked, server, asked.net


@pytest.fixture(params=[Protocol.TCP, Protocol.UDP], ids=["tcp", "udp"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def pair(nodes: list[tuple[Bench, Object]], net: Net, protocol: Protocol) -> Pair:
    asked = a_node(nodes[0], net, web(net, protocol, local=False), net.primary)
    return Pair(asked, a_node(nodes[1], net, web(net, protocol, local=True), OTHER[net.family]))


def first(protocol: Protocol, port: int, sport: int = 40000) -> object:
    return syn(sport, port) if protocol is Protocol.TCP else datagram(sport, port)


def later(protocol: Protocol, port: int, sport: int = 40000, flags: str = "A") -> object:
    return segment(sport, port, flags, 1001, 2) if protocol is Protocol.TCP else datagram(sport, port)


WAYS = {"node-port": (lambda net: net.primary, NODE_PORT), "load-balancer": (lambda net: OUTER[net.family], 80)}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_request_is_wrapped_unwrapped_and_answered_directly(pair: Pair, protocol: Protocol, way: tuple) -> None:
    net, (address_of, port) = pair.net, way
    vip, client = address_of(net), pair.asked.client
    for transport in (first(protocol, port), later(protocol, port), later(protocol, port)):
        plain = frame(net, client, vip, transport)
        verdict, wrapped = pair.asked.in_(plain)
        outer = (IP if net.family == 4 else IPv6)(wrapped[14:])
        assert (verdict, outer.src, outer.dst) == (REDIRECT, net.primary, net.backends[0])
        routed = frame(net, client, vip, transport, **{"ttl" if net.family == 4 else "hlim": 63})
        assert wrapped[14 + HEAD[net.family] :] == routed[14:], "what is inside is the client's packet, a hop later"
        verdict, out = pair.server.in_(wrapped)
        assert (verdict, read(out).tuple) == (PASS, (client, 40000, net.backends[0], 8080))
    reply = segment(8080, 40000, "SA", 0, 1001) if protocol is Protocol.TCP else datagram(8080, 40000)
    answer = frame(net, net.backends[0], client, reply, from_backend=True)
    verdict, out = pair.server.out(answer)
    assert (verdict, read(out).tuple) == (PASS, (vip, port, client, 40000))
    assert pair.asked.bench.count("encap") == pair.server.bench.count("decap") == 3


def test_a_source_port_that_comes_again_begins_anew(pair: Pair, protocol: Protocol) -> None:
    net = pair.net
    for transport in (first(protocol, NODE_PORT), later(protocol, NODE_PORT), later(protocol, NODE_PORT, flags="FA"),
                      first(protocol, NODE_PORT)):  # fmt: skip
        verdict, wrapped = pair.asked.ask(net.primary, transport)
        assert verdict == REDIRECT
        assert pair.server.in_(wrapped)[0] == PASS
    flows = [*pair.asked.bench.flows(net.family), *pair.asked.bench.flows(net.family, "half_open")]
    assert len(flows) == 1, "the node that is asked knows the client's direction, and that once"


def test_what_does_not_fit_when_wrapped_is_too_big(pair: Pair, protocol: Protocol) -> None:
    net, room = pair.net, MTU - HEAD[pair.net.family]
    pair.asked.ask(net.primary, first(protocol, NODE_PORT))
    head = HEAD[net.family] + (20 if protocol is Protocol.TCP else 8)
    for size, fits in ((room, True), (room + 1, False)):
        payload = bytes(size - head)
        big = (
            segment(40000, NODE_PORT, "A", 1001, 2, payload) if protocol is Protocol.TCP
            else datagram(40000, NODE_PORT, payload)
        )  # fmt: skip
        error = read(pair.asked.ask(net.primary, big)[1], check=False)
        if fits:
            assert error.dst == net.backends[0]
        else:
            assert error.dst == pair.asked.client
            assert int.from_bytes(error.l4[6:8] if net.family == 4 else error.l4[4:8], "big") == room


def test_other_peoples_tunnels_pass(pair: Pair) -> None:
    net = pair.net
    for port in (0, 9999):
        tunnel = wrapped(net, frame(net, CLIENTS[net.family][0], net.vip, syn()), port)
        assert pair.server.in_(tunnel) == (PASS, tunnel)


def wrapped(net: Net, plain: bytes, port: int) -> bytes:
    """The frame's packet in another one, as anybody may send it."""
    size = len(plain) - 14
    outer = (IP(src="203.0.113.77", dst=net.backends[0], id=port, proto=socket.IPPROTO_IPIP, len=HEAD[4] + size)
             if net.family == 4 else
             IPv6(src="2001:db8::77", dst=net.backends[0], fl=port, nh=socket.IPPROTO_IPV6, plen=size))  # fmt: skip
    return plain[:14] + bytes(outer) + plain[14:]


@pytest.fixture(params=[4, 6], ids=["v4", "v6"])
def pods(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node with pods, and the setting."""
    with fresh(), bench_with(SMALL, dsr=1) as bench:
        forward_by("out0")
        made = Node(bench, NETS[request.param])
        yield made
        made.close()


def test_nothing_wrapped_gets_into_a_pods_flow(pods: Node) -> None:
    net = pods.net
    pods.establish(Protocol.TCP)
    before = pods.bench.flows(net.family)
    for port in (8080, 8081):  # its backend, and another one, which would begin the flow anew
        forged = frame(net, net.client, net.vip, segment(40000, 80, "PA", payload=b"!"))
        assert pods.at(pods.uplink, wrapped(net, forged, port))[0] == (DROP if port == 8080 else PASS)
    assert pods.bench.count("drop_foreign") == 1
    assert pods.bench.flows(net.family).keys() == before.keys()


def test_nothing_wrapped_is_of_a_pod_of_this_node(pods: Node) -> None:
    net = pods.net
    pods.bench.serve(plain_web(net))
    for source, verdict in ((net.client, DROP), (net.stranger, PASS)):
        assert pods.at(pods.uplink, wrapped(net, frame(net, source, net.vip, syn()), 8080))[0] == verdict
    assert pods.bench.count("drop_reverse_path") == 1


def test_local_backends_are_masqueraded(nodes: list[tuple[Bench, Object]], net: Net) -> None:
    node = a_node(nodes[0], net, web(net, Protocol.TCP, local=True), net.primary)
    verdict, out = node.ask(net.primary, syn(40000, NODE_PORT))
    assert (verdict, read(out).src) == (REDIRECT, net.primary)
    assert node.bench.count("encap") == 0
    assert node.bench.count("masquerade") == 1


def test_without_the_setting_nothing_is_unwrapped(bench: Bench, net: Net) -> None:
    node = Uplink(bench, bench.hooks, net)
    bench.serve(web(net, Protocol.TCP, local=True))
    tunnel = wrapped(net, frame(net, node.client, net.vip, syn()), 8080)
    assert node.in_(tunnel) == (PASS, tunnel)


@pytest.mark.parametrize("protocol", [Protocol.TCP], ids=["tcp"], indirect=True)
def test_a_repeated_syn_stays_and_is_counted(pair: Pair, protocol: Protocol) -> None:
    """Answers do not come this way: the first backend may have accepted, and its answer be lost behind us."""
    net, bench = pair.net, pair.asked.bench
    route = BackendSet(tuple(Backend(address, 8080) for address in net.backends[:8]))
    (front,) = [f for f in web(net, protocol, local=False).frontends if f.kind is Kind.NODE_PORT]
    front = Front(front.kind, front.address, front.port, route, route, front.masquerade)
    bench.serve(entry_of("default/web:http", net.family, protocol, (front,), route.backends))
    there = {pair.asked.ask(net.primary, first(protocol, NODE_PORT))[1][14:][: HEAD[net.family]]}
    for count in range(1, 4):
        assert int(bench.maps.view("backends")["failures"].sum()) == count - 1
        bench.age(net.family, started=moments(HZ))
        there |= {pair.asked.ask(net.primary, first(protocol, NODE_PORT))[1][14:][: HEAD[net.family]] for _ in range(2)}
    assert len(there) == 1, "one outer header: one backend"
    assert int(bench.maps.view("backends")["failures"].sum()) == 3
    pair.asked.ask(net.primary, later(protocol, NODE_PORT))
    assert int(bench.maps.view("backends")["failures"].sum()) == 0, "the client goes on: it was accepted"
