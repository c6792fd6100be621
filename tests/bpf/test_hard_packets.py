"""Checksums, headers and lengths that are out of the ordinary, through a service and back."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import reduce
from operator import truediv

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6EchoRequest,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
    PadN,
)
from scapy.layers.l2 import Ether
from scapy.layers.sctp import SCTP
from scapy.packet import Packet, Raw

from hybrid_proxy.dataplane.table import Protocol

from .kit import (
    HOST_MAC,
    NETS,
    PASS,
    POD_MAC,
    REDIRECT,
    Bench,
    Net,
    bench_with,
    crc32c,
    datagram,
    frame,
    read,
    service,
    syn,
)

# SCTP: the CRC covers the ports, and nothing fills it in behind us.


def association(sport: int, dport: int, data: bytes) -> Packet:
    """A packet with its CRC computed here: scapy's is slow."""
    plain = bytes(SCTP(sport=sport, dport=dport, tag=7, chksum=0)) + data
    return Raw(plain[:8] + crc32c(plain).to_bytes(4, "little") + plain[12:])


def sctp(net: Net, src: str, dst: str, body: Packet) -> bytes:
    head = IP(src=src, dst=dst, proto=132) if net.family == 4 else IPv6(src=src, dst=dst, nh=132)
    return bytes(Ether(src=POD_MAC, dst=HOST_MAC) / head / body)


@pytest.mark.parametrize("size", [0, 1, 20, 21, 255, 1400, 3001])
def test_sctp_with_another_port_keeps_a_right_checksum(bench: Bench, net: Net, size: int) -> None:
    backend = net.backends[0]
    bench.serve(service(net.vip, 38412, [(backend, 7777)], protocol=Protocol.SCTP))
    data = random.randbytes(size)
    packet = sctp(net, net.client, net.vip, association(40000, 38412, data))
    verdict, out = bench.ingress(packet)
    assert verdict == PASS
    there = read(out)  # proves the CRC
    assert there.tuple == (net.client, 40000, backend, 7777)
    assert there.l4[12:] == data
    verdict, out = bench.egress(sctp(net, backend, net.client, association(7777, 40000, data)))
    assert verdict == PASS
    assert read(out).tuple == (net.vip, 38412, net.client, 40000)


def test_a_checksum_of_sctp_that_is_to_be_filled_in_is_left_alone(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 38412, [(net.backends[0], 7777)], protocol=Protocol.SCTP))
    body = bytes(association(40000, 38412, b"data"))
    verdict, out = bench.ingress(sctp(net, net.client, net.vip, Raw(body[:8] + bytes(4) + body[12:])))
    assert verdict == PASS
    assert read(out, check=False).l4[8:12] == bytes(4)


# UDP: no checksum at all, which is a statement and not a number.


def test_udp_without_a_checksum_has_none_afterwards(bench: Bench) -> None:
    net = NETS[4]
    bench.serve(service(net.vip, 53, [(net.backends[0], 5353)], protocol=Protocol.UDP))
    verdict, out = bench.ingress(frame(net, net.client, net.vip, datagram(chksum=0)))
    assert verdict == PASS
    assert read(out).tuple == (net.client, 40000, net.backends[0], 5353)
    assert read(out).l4[6:8] == b"\0\0"
    back = frame(net, net.backends[0], net.client, datagram(5353, 40000, chksum=0), from_backend=True)
    verdict, out = bench.egress(back)
    assert read(out).tuple == (net.vip, 53, net.client, 40000)
    assert read(out).l4[6:8] == b"\0\0"


def test_a_udp_checksum_that_becomes_zero_is_written_as_ones(bench: Bench, net: Net) -> None:
    """RFC 768: 0 would say that there is none."""
    backend = net.backends[0]
    bench.serve(service(net.vip, 53, [(backend, 5353)], protocol=Protocol.UDP))
    plain = read(frame(net, net.client, backend, datagram(40000, 5353, b"\0\0"), from_backend=True))
    missing = plain.l4[6:8]  # as payload, this makes the sum behind the translation 0
    packet = frame(net, net.client, net.vip, datagram(40000, 53, missing))
    assert read(packet).l4[6:8] not in (b"\0\0", b"\xff\xff")
    verdict, out = bench.ingress(packet)
    assert verdict == PASS
    assert read(out).l4[6:8] == b"\xff\xff"


# Headers between IP and the transport.

EXTENSIONS: dict[str, Callable[[], Packet]] = {
    "hop-by-hop": lambda: IPv6ExtHdrHopByHop(options=[PadN(optdata=b"\0" * 4)]),
    "destination": lambda: IPv6ExtHdrDestOpt(options=[PadN(optdata=b"\0" * 4)]),
    "routing": lambda: IPv6ExtHdrRouting(addresses=["2001:db8::7"], segleft=0),
    "eight": lambda: reduce(truediv, [IPv6ExtHdrDestOpt(options=[PadN(optdata=b"\0" * 4)]) for _ in range(8)]),
    "all": lambda: (
        IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() / IPv6ExtHdrRouting(addresses=["2001:db8::7"], segleft=0)
        / IPv6ExtHdrDestOpt(options=[PadN(optdata=b"\0" * 60)])
    ),
}  # fmt: skip
TRANSPORTS = {Protocol.TCP: syn, Protocol.UDP: datagram}


@pytest.mark.parametrize("protocol", list(TRANSPORTS), ids=lambda p: p.name.lower())
@pytest.mark.parametrize("name", list(EXTENSIONS))
def test_extension_headers_are_stepped_over(bench: Bench, name: str, protocol: Protocol) -> None:
    net = NETS[6]
    backend = net.backends[0]
    bench.serve(service(net.vip, 53, [(backend, 5353)], protocol=protocol))
    transport = TRANSPORTS[protocol](sport=40000, dport=53)
    packet = frame(net, net.client, net.vip, EXTENSIONS[name]() / transport)
    verdict, out = bench.ingress(packet)
    assert verdict == PASS
    assert read(out).tuple == (net.client, 40000, backend, 5353)
    assert len(out) == len(packet)
    answer = TCP(sport=5353, dport=40000, flags="SA") if protocol is Protocol.TCP else UDP(sport=5353, dport=40000)
    verdict, out = bench.egress(frame(net, backend, net.client, EXTENSIONS[name]() / answer, from_backend=True))
    assert verdict == PASS
    assert read(out).tuple == (net.vip, 53, net.client, 40000)


@pytest.mark.parametrize("protocol", list(TRANSPORTS), ids=lambda p: p.name.lower())
@pytest.mark.parametrize("size", [4, 12, 40])
def test_options_are_stepped_over(bench: Bench, size: int, protocol: Protocol) -> None:
    net = NETS[4]
    backend = net.backends[0]
    bench.serve(service(net.vip, 53, [(backend, 5353)], protocol=protocol))
    options = b"\x01" * size
    verdict, out = bench.ingress(
        frame(net, net.client, net.vip, TRANSPORTS[protocol](sport=40000, dport=53), options=options)
    )
    assert verdict == PASS
    assert read(out).tuple == (net.client, 40000, backend, 5353)
    assert out[34 : 34 + size] == options
    answer = TCP(sport=5353, dport=40000, flags="SA") if protocol is Protocol.TCP else UDP(sport=5353, dport=40000)
    verdict, out = bench.egress(frame(net, backend, net.client, answer, from_backend=True, options=options))
    assert verdict == PASS
    assert read(out).tuple == (net.vip, 53, net.client, 40000)


# Ports.


@pytest.mark.parametrize("protocol", list(TRANSPORTS), ids=lambda p: p.name.lower())
def test_a_client_may_have_port_0(bench: Bench, net: Net, protocol: Protocol) -> None:
    """Nobody can bind it, but datagrams that want no answer may have it (RFC 768), and routers forward them."""
    backend = net.backends[0]
    bench.serve(service(net.vip, 53, [(backend, 5353)], protocol=protocol))
    for _ in range(2):
        verdict, out = bench.ingress(frame(net, net.client, net.vip, TRANSPORTS[protocol](sport=0, dport=53)))
        assert (verdict, read(out).tuple) == (PASS, (net.client, 0, backend, 5353))
    answer = TCP(sport=5353, dport=0, flags="SA", ack=1001) if protocol is Protocol.TCP else UDP(sport=5353, dport=0)
    verdict, out = bench.egress(frame(net, backend, net.client, answer, from_backend=True))
    assert (verdict, read(out).tuple) == (PASS, (net.vip, 53, net.client, 0))


# Pings.


def ping(net: Net, data: bytes = b"are you there?") -> bytes:
    return frame(net, net.client, net.vip, (ICMP(id=7) if net.family == 4 else ICMPv6EchoRequest(id=7)) / Raw(data))


def test_a_ping_is_answered_where_the_setting_says_so(net: Net) -> None:
    with bench_with(answer_ping=1) as talkative:
        talkative.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
        asked = read(ping(net))
        verdict, out = talkative.ingress(ping(net))
        assert verdict == REDIRECT
        reply = read(out)
        assert (reply.src, reply.dst) == (net.vip, net.client)
        assert (reply.mac_src, reply.mac_dst) == (HOST_MAC, POD_MAC)
        assert reply.l4[:2] == (b"\0\0" if net.family == 4 else b"\x81\0")
        assert reply.l4[4:] == asked.l4[4:]
        assert talkative.count("echo") == 1
        stranger = frame(net, net.client, net.stranger, ICMP() if net.family == 4 else ICMPv6EchoRequest())
        assert talkative.ingress(stranger) == (PASS, stranger)
