"""Packets from beyond the node: node ports, outer addresses, source ranges, masquerade; in a namespace with routes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute
from scapy.layers.inet import ICMP, TCP, UDP
from scapy.layers.inet6 import ICMPv6PacketTooBig, IPv6ExtHdrDestOpt, IPv6ExtHdrFragment
from scapy.packet import Raw

from hybrid_proxy.dataplane.kernel.bpf import Object, run_on_packet
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import pod_columns
from hybrid_proxy.dataplane.table import (
    Backend,
    BackendSet,
    Entry,
    Kind,
    Masquerade,
    NodeNetwork,
    PodMatch,
    Protocol,
    WhenEmpty,
)
from tests.namespaces import fresh, loopback
from tests.tables import Front, entry_of

from .kit import (
    DROP,
    NETS,
    PASS,
    REDIRECT,
    Bench,
    Net,
    chunk,
    datagram,
    frame,
    ones_complement,
    read,
    segment,
    service,
    syn,
    veth,
)

NODE_PORT = 30080
OUTER = {4: "198.18.0.9", 6: "fd98::9"}
SECOND = {4: "192.168.7.9", 6: "fd00:7::9"}
CLIENTS = {4: ("203.0.113.9", "203.0.113.10"), 6: ("2001:db8::9", "2001:db8::a")}
MTU = 1400
PORTS = range(1024, 29_696)


def routes() -> None:
    """An interface and a default route in the namespace that the calling thread is in."""
    loopback()
    for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        Path("/proc/sys/net", name).write_text("1")
    index = veth("up0", mtu=MTU)
    with IPRoute() as link:
        for net, length in ((NETS[4], 24), (NETS[6], 64)):
            link.addr("add", index=index, address=net.primary, prefixlen=length, flags=0x02)
        link.route("add", dst="default", gateway="192.168.7.2", oif=index)
        link.route("add", family=socket.AF_INET6, dst="default", gateway="fd00:7::2", oif=index)


@pytest.fixture(scope="module")
def uplink(programs: Bench) -> Iterator[Object]:
    """The uplink's programs; the calling thread is in a namespace with an interface and a default route."""
    with fresh():
        routes()
        yield programs.hooks


def outer_service(net: Net, backends: list[tuple[str, int]], *, protocol: Protocol = Protocol.TCP,
                  local: BackendSet | None = None, sources: tuple[str, ...] | None = None) -> Entry:  # fmt: skip
    """A ClusterIP that masquerades outsiders, a node port, an external IP and a load-balancer IP; port 80 at each."""
    everybody = BackendSet(tuple(Backend(a, p) for a, p in backends))
    outside, masquerade = (local, Masquerade.NODE) if local else (everybody, Masquerade.ALWAYS)
    assert outside is not None
    fronts = (
        Front(Kind.CLUSTER_IP, net.vip, 80, everybody, everybody, Masquerade.NODE | Masquerade.EXTERNAL),
        Front(Kind.NODE_PORT, None, NODE_PORT, everybody, outside, masquerade),
        Front(Kind.LOAD_BALANCER, OUTER[net.family], 80, everybody, outside, masquerade, sources),
    )
    return entry_of("default/web:http", net.family, protocol, fronts, everybody.backends)


class Uplink:
    """Both hooks of an uplink, on a node with one service."""

    def __init__(self, bench: Bench, programs: Object, net: Net) -> None:
        self.bench, self.programs, self.net = bench, programs, net
        self.client = CLIENTS[net.family][0]
        bench.store.serve_node_ports_at((net.primary,))

    def in_(self, packet: bytes, **context: int) -> tuple[int, bytes]:
        return run_on_packet(self.programs.program("uplink_ingress"), packet, **context)[:2]

    def out(self, packet: bytes) -> tuple[int, bytes]:
        return run_on_packet(self.programs.program("uplink_egress"), packet)[:2]

    def ask(self, target: str, transport: Any, client: str | None = None, **ip: Any) -> tuple[int, bytes]:
        return self.in_(frame(self.net, client or self.client, target, transport, **ip))


@pytest.fixture
def node(bench: Bench, uplink: Object, net: Net) -> Uplink:
    return Uplink(bench, uplink, net)


def ttl_of(packet: bytes) -> int:
    return packet[22] if packet[12:14] == b"\x08\x00" else packet[21]


def targets(net: Net) -> list[tuple[str, int]]:
    return [(net.primary, NODE_PORT), (OUTER[net.family], 80), (net.vip, 80)]


@pytest.mark.parametrize("way", [0, 1, 2], ids=["node-port", "load-balancer", "cluster-ip"])
@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
def test_an_outsider_is_masqueraded_and_gets_its_answer(node: Uplink, way: int, protocol: Protocol) -> None:
    net, (address, port) = node.net, targets(node.net)[way]
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)], protocol=protocol))
    tcp = protocol is Protocol.TCP
    verdict, out = node.ask(address, syn(40000, port) if tcp else datagram(40000, port))
    there = read(out)
    assert (verdict, there.src, there.dst, there.dport) == (REDIRECT, net.primary, net.backends[0], 8080)
    assert there.sport in PORTS
    assert ttl_of(out) == 63
    reply = segment(8080, there.sport, "SA", 0, 1001) if tcp else datagram(8080, there.sport)
    verdict, out = node.in_(frame(net, net.backends[0], net.primary, reply, from_backend=True))
    assert (verdict, read(out).tuple) == (REDIRECT, (address, port, node.client, 40000))
    verdict, out = node.ask(address, segment(40000, port, "A", 1001, 2) if tcp else datagram(40000, port))
    assert (verdict, read(out).tuple) == (REDIRECT, there.tuple)


def test_a_masqueraded_connection_that_ends_is_forgotten(node: Uplink) -> None:
    net, target = node.net, (node.net.primary, NODE_PORT)
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)]))
    there = read(node.ask(target[0], syn(40000, NODE_PORT))[1])

    def back(flags: str, seq: int, ack: int) -> int:
        packet = frame(net, there.dst, there.src, segment(8080, there.sport, flags, seq, ack), from_backend=True)
        return node.in_(packet)[0]

    def forth(flags: str, seq: int, ack: int) -> int:
        return node.ask(target[0], segment(40000, NODE_PORT, flags, seq, ack))[0]

    assert [back("SA", 0, 1001), forth("A", 1001, 2)] == [REDIRECT] * 2
    assert len(node.bench.flows(net.family)) == 2
    assert [forth("FA", 1001, 2), back("FA", 2, 1002), forth("A", 1002, 3)] == [REDIRECT] * 3
    assert not node.bench.flows(net.family)


def test_a_kept_source_goes_through_the_stack(node: Uplink) -> None:
    net = node.net
    here = BackendSet((Backend(net.backends[1], 8080, local=True),))
    node.bench.serve(outer_service(net, [(b, 8080) for b in net.backends[:3]], local=here))
    verdict, out = node.ask(net.primary, syn(40000, NODE_PORT))
    assert (verdict, read(out).tuple) == (PASS, (node.client, 40000, net.backends[1], 8080))
    assert ttl_of(out) == 64
    answer = frame(net, net.backends[1], node.client, segment(8080, 40000, "SA", 0, 1001), from_backend=True)
    assert node.in_(answer)[0] == PASS
    verdict, out = node.out(answer)
    assert (verdict, read(out).tuple) == (PASS, (net.primary, NODE_PORT, node.client, 40000))


def test_an_empty_local_route_is_silent(node: Uplink) -> None:
    net = node.net
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)], local=BackendSet((), WhenEmpty.DROP)))
    assert node.ask(net.primary, syn(40000, NODE_PORT))[0] == DROP
    assert node.bench.count("drop_empty") == 1


def test_pods_take_the_inside_route_unmasked(node: Uplink) -> None:
    net = node.net
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)], local=BackendSet((), WhenEmpty.DROP)))
    cidr = "10.1.0.0/16" if net.family == 4 else "fd00:1::/64"
    node.bench.node(**pod_columns(NodeNetwork(pods=PodMatch((cidr,)))))
    verdict, out = node.ask(net.primary, syn(40000, NODE_PORT), client=net.client)
    assert (verdict, read(out).tuple) == (PASS, (net.client, 40000, net.backends[0], 8080))


def test_node_ports_are_served_at_their_addresses_alone(node: Uplink) -> None:
    net = node.net
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)]))
    for address in (SECOND[net.family], net.stranger, "0.0.0.0" if net.family == 4 else "::"):
        packet = frame(net, node.client, address, syn(40000, NODE_PORT))
        assert node.in_(packet) == (PASS, packet)
    udp = frame(net, node.client, net.primary, datagram(40000, NODE_PORT))
    assert node.in_(udp) == (PASS, udp)
    ssh = frame(net, node.client, net.primary, syn(40000, 22))
    assert node.in_(ssh) == (PASS, ssh)
    node.bench.store.serve_node_ports_at((SECOND[net.family],))
    assert node.ask(SECOND[net.family], syn(40000, NODE_PORT))[0] == REDIRECT
    packet = frame(net, node.client, net.primary, syn(40001, NODE_PORT))
    assert node.in_(packet) == (PASS, packet)


@pytest.mark.parametrize("what", ["fin", "null", "other-protocol", "truncated"])
def test_what_nobody_translates_does_not_leave_for_a_service(node: Uplink, what: str) -> None:
    """A router behind the uplink may send it back to this node: it would go round until its hops are spent."""
    net = node.net
    node.bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    node.bench.allocate(net)
    field = {"proto": 99} if net.family == 4 else {"nh": 99}
    packet = {
        "fin": frame(net, net.client, net.vip, TCP(sport=40000, dport=80, flags="FA")),
        "null": frame(net, net.client, net.vip, TCP(sport=40000, dport=80, flags=0)),
        "other-protocol": frame(net, net.client, net.vip, Raw(bytes(40)), **field),
        "truncated": frame(net, net.client, net.vip, TCP(sport=40000, dport=80))[:-12],
    }[what]
    assert node.out(packet)[0] == DROP
    assert node.bench.count("drop_unallocated") == 1
    elsewhere = frame(net, net.client, net.stranger, TCP(sport=40000, dport=80, flags="FA"))
    assert node.out(elsewhere) == (PASS, elsewhere)


RANGES = {4: (("203.0.113.8/30",), ("198.51.100.0/24", "203.0.113.9/32")),
          6: (("2001:db8::8/126",), ("2001:db8:1::/48", "2001:db8::9/128"))}  # fmt: skip


def test_source_ranges_guard_load_balancer_ips(node: Uplink) -> None:
    net, (inside, other) = node.net, CLIENTS[node.net.family]
    wide, narrow = RANGES[net.family]
    outer = OUTER[net.family]
    sport = iter(range(40000, 40100))

    def verdicts() -> list[int]:
        return [node.ask(outer, syn(next(sport), 80), client=c)[0] for c in (inside, other, net.client)]

    node.bench.serve(outer_service(net, [(net.backends[0], 8080)], sources=wide))
    assert verdicts() == [REDIRECT, REDIRECT, DROP]
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)], sources=narrow))
    assert verdicts() == [REDIRECT, DROP, DROP]
    assert node.ask(net.primary, syn(next(sport), NODE_PORT), client=other)[0] == REDIRECT
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)], sources=()))
    assert verdicts() == [DROP, DROP, DROP]
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)]))
    assert verdicts() == [REDIRECT, REDIRECT, REDIRECT]
    assert node.bench.count("drop_source_ranges") == 6


def test_clients_with_one_port_get_ports_of_their_own(node: Uplink) -> None:
    net = node.net
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)]))
    seen = {c: read(node.ask(net.primary, syn(40000, NODE_PORT), client=c)[1]) for c in CLIENTS[net.family]}
    assert len({there.sport for there in seen.values()}) == 2
    for client, there in seen.items():
        back = segment(8080, there.sport, "SA", 0, 1001)
        _, out = node.in_(frame(net, net.backends[0], net.primary, back, from_backend=True))
        assert read(out).tuple == (net.primary, NODE_PORT, client, 40000)


def test_the_sender_gets_too_big_and_time_exceeded_errors(node: Uplink) -> None:
    net = node.net
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)]))
    node.ask(net.primary, syn(40000, NODE_PORT))
    large = segment(40000, NODE_PORT, "A", 1001, 2, bytes(MTU))
    verdict, out = node.ask(net.primary, large)
    error = read(out)
    assert (verdict, error.src, error.dst) == (REDIRECT, net.primary, node.client)
    kind, mtu = (b"\x03\x04", error.l4[6:8]) if net.family == 4 else (b"\x02\x00", error.l4[4:8])
    assert error.l4[:2] == kind
    assert int.from_bytes(mtu, "big") == MTU
    last = {"ttl": 1} if net.family == 4 else {"hlim": 1}
    verdict, out = node.ask(net.primary, segment(40000, NODE_PORT, "A", 1001, 2), **last)
    assert (verdict, read(out).l4[0]) == (REDIRECT, 11 if net.family == 4 else 3)


def fragment_of(net: Net, offset: int) -> dict[str, Any]:
    """Fields and headers of a fragment, the first of its datagram or a later one."""
    if net.family == 4:
        return {"id": 7, "flags": "MF", "frag": offset, "proto": 17}
    return {"nh": 44}


@pytest.mark.parametrize("reason", ["too big", "expired"])
@pytest.mark.parametrize("kind", ["first fragment", "later fragment", "options"])
def test_errors_about_packets_with_other_headers(node: Uplink, kind: str, reason: str) -> None:
    """They quote these headers, by which a sender knows its datagram."""
    net, size = node.net, MTU if reason == "too big" else 8
    v6, offset = net.family == 6, 185 if kind == "later fragment" else 0
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)], protocol=Protocol.UDP))
    transport = UDP(sport=40000, dport=NODE_PORT, len=5000) / Raw(bytes(MTU))
    fields: dict[str, Any] = fragment_of(net, 0)
    node.ask(net.primary, IPv6ExtHdrFragment(id=7, m=1, nh=17) / transport if v6 else transport, **fields)
    body = Raw(bytes(range(16)) + bytes(size)) if offset else UDP(sport=40000, dport=NODE_PORT) / Raw(bytes(size))
    if kind == "options":
        fields = {} if v6 else {"options": b"\x01" * 8, "proto": 17}
        body = IPv6ExtHdrDestOpt() / body if v6 else body
    else:
        fields = fragment_of(net, offset)
        body = IPv6ExtHdrFragment(id=7, m=1, offset=offset, nh=17) / body if v6 else body
    if reason == "expired":
        fields["hlim" if v6 else "ttl"] = 1
    packet = frame(net, node.client, net.primary, body, **fields)
    verdict, out = node.in_(packet)
    if offset and not v6:
        assert verdict == DROP, "of IPv4 only the first fragment is answered (RFC 1122)"
        return
    error = read(out)
    assert (verdict, error.src, error.dst) == (REDIRECT, net.primary, node.client)
    wanted = {"too big": (b"\x02\0", b"\x03\x04"), "expired": (b"\x03\0", b"\x0b\0")}[reason]
    assert error.l4[:2] == wanted[not v6]
    quoted = error.l4[8:]
    assert len(quoted) == (40 + 8 + 8 if v6 else 28 + (8 if kind == "options" else 0))
    assert quoted == packet[14 : 14 + len(quoted)]


def test_a_packet_for_many_is_as_long_as_the_longest_of_them(node: Uplink) -> None:
    net = node.net
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)]))
    node.ask(net.primary, syn(40000, NODE_PORT))
    large = frame(net, node.client, net.primary, segment(40000, NODE_PORT, "A", 1001, 2, bytes(2 * MTU)))
    fits = MTU - (40 if net.family == 4 else 60)
    verdict, out = node.in_(large, gso_segs=3, gso_size=fits)
    assert (verdict, read(out).dst) == (REDIRECT, net.backends[0])
    verdict, out = node.in_(large, gso_segs=3, gso_size=fits + 1)
    assert (verdict, read(out).dst) == (REDIRECT, node.client)
    assert node.bench.count("too_big") == 1


def test_packets_of_sctp_in_one_are_as_long_as_their_sender_made_them(node: Uplink) -> None:
    """The kernel reports no length for them (GSO_BY_FRAGS)."""
    net = node.net
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)], protocol=Protocol.SCTP))
    bundle = frame(net, node.client, net.primary, chunk(40000, NODE_PORT) / Raw(bytes(2 * MTU)))
    verdict, out = node.in_(bundle, gso_segs=3, gso_size=0xFFFF)
    assert (verdict, read(out).dst) == (REDIRECT, net.backends[0])


def test_errors_of_a_router_behind_the_node_reach_the_client(node: Uplink) -> None:
    """It says `too big` to the node, about a packet whose source the node gave."""
    net = node.net
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)]))
    sent = node.ask(net.primary, syn(40000, NODE_PORT))[1]
    router = "10.9.9.9" if net.family == 4 else "fd09::9"
    quoted = Raw(sent[14 : 14 + (28 if net.family == 4 else 60)])
    said = ICMP(type=3, code=4, nexthopmtu=1300) / quoted if net.family == 4 else ICMPv6PacketTooBig(mtu=1300) / quoted
    hops, at = ("ttl", 22) if net.family == 4 else ("hlim", 21)
    verdict, out = node.in_(frame(net, router, net.primary, said, **{hops: 7}))
    error = read(out)
    assert (verdict, error.src, error.dst) == (REDIRECT, router, node.client)
    assert out[at] == 6, "an error that is sent in circles must die, too"
    assert node.in_(frame(net, router, net.primary, said, **{hops: 1}))[0] == DROP
    assert node.bench.count("drop_expired") == 1
    inner = error.l4[8:]
    if net.family == 4:
        assert ones_complement(inner[:20]) == 0xFFFF
        assert socket.inet_ntoa(inner[12:16]) == node.client
        assert socket.inet_ntoa(inner[16:20]) == net.primary
        assert inner[20:24] == (40000).to_bytes(2, "big") + NODE_PORT.to_bytes(2, "big")
    else:
        assert socket.inet_ntop(socket.AF_INET6, inner[24:40]) == net.primary
        assert inner[40:44] == (40000).to_bytes(2, "big") + NODE_PORT.to_bytes(2, "big")


def test_what_the_node_sends_past_its_hooks_is_translated(node: Uplink) -> None:
    """A kernel client or a raw socket: the route to a ClusterIP is the default one."""
    net = node.net
    node.bench.serve(outer_service(net, [(net.backends[0], 8080)]))
    verdict, out = node.out(frame(net, net.primary, net.vip, syn(40000, 80)))
    assert (verdict, read(out).tuple) == (REDIRECT, (net.primary, 40000, net.backends[0], 8080))
    back = frame(net, net.backends[0], net.primary, segment(8080, 40000, "SA", 0, 1001), from_backend=True)
    verdict, out = node.in_(back)
    assert (verdict, read(out).tuple) == (PASS, (net.vip, 80, net.primary, 40000))
