"""ICMP errors about flows: outside and quotation are translated together, in both directions, checksums included."""

from __future__ import annotations

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6PacketTooBig,
    ICMPv6ParamProblem,
    ICMPv6TimeExceeded,
    IPv6,
    IPv6ExtHdrDestOpt,
)
from scapy.layers.sctp import SCTP
from scapy.packet import Packet, Raw

from hybrid_proxy.dataplane.table import Protocol

from .kit import HOST_MAC, NETS, PASS, POD_MAC, REDIRECT, Bench, Net, chunk, datagram, frame, quoted, read, service, syn

PAYLOAD = bytes(range(64))
ERRORS = {
    "unreachable": (ICMP(type=3, code=3), ICMPv6DestUnreach(code=4)),
    "too-big": (ICMP(type=3, code=4, nexthopmtu=1400), ICMPv6PacketTooBig(mtu=1400)),
    "time-exceeded": (ICMP(type=11, code=0), ICMPv6TimeExceeded()),
    "parameter-problem": (ICMP(type=12, code=0), ICMPv6ParamProblem()),
}


def quote(net: Net, src: str, dst: str, transport: Packet, cut: int | None) -> Raw:
    """The packet that an error is about; `cut`: no more than so many bytes of its transport."""
    whole = bytes((IP(src=src, dst=dst) if net.family == 4 else IPv6(src=src, dst=dst)) / transport)
    head = 20 if net.family == 4 else 40
    return Raw(whole[: head + cut] if cut is not None else whole)


def error(net: Net, name: str) -> Packet:
    return ERRORS[name][0 if net.family == 4 else 1].copy()


def transport_of(protocol: Protocol, sport: int, dport: int) -> Packet:
    if protocol is Protocol.TCP:
        return TCP(sport=sport, dport=dport, flags="A", seq=5) / Raw(PAYLOAD)
    if protocol is Protocol.UDP:
        return UDP(sport=sport, dport=dport) / Raw(PAYLOAD)
    return SCTP(sport=sport, dport=dport) / Raw(PAYLOAD)


@pytest.fixture(params=[80, 8080], ids=["same-port", "other-port"])
def target(request: pytest.FixtureRequest) -> int:
    return request.param


def open_flow(bench: Bench, net: Net, protocol: Protocol, target: int) -> str:
    """A flow from the client's port 40000 through the service; the backend."""
    backend = net.backends[0]
    bench.serve(service(net.vip, 80, [(backend, target)], protocol=protocol))
    first = {Protocol.TCP: syn(), Protocol.UDP: datagram(dport=80), Protocol.SCTP: chunk(dport=80)}[protocol]
    assert bench.ingress(frame(net, net.client, net.vip, first))[0] == PASS
    return backend


TRANSPORTS = [Protocol.TCP, Protocol.UDP, Protocol.SCTP]
CUTS = pytest.mark.parametrize("cut", [8, 12, None], ids=["8-bytes", "12-bytes", "whole"])


@CUTS
@pytest.mark.parametrize("protocol", TRANSPORTS, ids=lambda p: p.name.lower())
@pytest.mark.parametrize("name", list(ERRORS))
def test_an_error_to_the_client_quotes_what_the_client_sent(
    bench: Bench, net: Net, name: str, protocol: Protocol, target: int, cut: int | None
) -> None:
    backend = open_flow(bench, net, protocol, target)
    inner = quote(net, net.client, backend, transport_of(protocol, 40000, target), cut)
    packet = frame(net, backend, net.client, error(net, name) / inner, from_backend=True)
    read(packet)
    verdict, out = bench.egress(packet)
    assert verdict == PASS
    seen = read(out)
    assert (seen.src, seen.dst) == (net.vip, net.client)
    assert quoted(out).tuple == (net.client, 40000, net.vip, 80)
    assert seen.l4[:2] == read(packet).l4[:2]
    assert seen.l4[4:8] == read(packet).l4[4:8]
    assert len(out) == len(packet)
    assert bench.count("icmp_related") == 1


@CUTS
@pytest.mark.parametrize("protocol", TRANSPORTS, ids=lambda p: p.name.lower())
def test_an_error_from_a_router_keeps_its_source(
    bench: Bench, net: Net, protocol: Protocol, target: int, cut: int | None
) -> None:
    """Also those that this node's kernel makes: they leave by the same interface."""
    backend = open_flow(bench, net, protocol, target)
    inner = quote(net, net.client, backend, transport_of(protocol, 40000, target), cut)
    out = bench.egress(frame(net, net.stranger, net.client, error(net, "too-big") / inner))[1]
    assert (read(out).src, read(out).dst) == (net.stranger, net.client)
    assert quoted(out).tuple == (net.client, 40000, net.vip, 80)


@CUTS
@pytest.mark.parametrize("protocol", TRANSPORTS, ids=lambda p: p.name.lower())
@pytest.mark.parametrize("name", list(ERRORS))
def test_an_error_from_the_client_quotes_what_the_backend_sent(
    bench: Bench, net: Net, name: str, protocol: Protocol, target: int, cut: int | None
) -> None:
    backend = open_flow(bench, net, protocol, target)
    inner = quote(net, net.vip, net.client, transport_of(protocol, 80, 40000), cut)
    packet = frame(net, net.client, net.vip, error(net, name) / inner)
    verdict, out = bench.ingress(packet)
    assert verdict == PASS
    seen = read(out)
    assert (seen.src, seen.dst) == (net.client, backend)
    assert quoted(out).tuple == (backend, target, net.client, 40000)
    assert seen.l4[:2] == read(packet).l4[:2]


def test_a_redirect_is_not_translated(bench: Bench) -> None:
    """Whoever followed one would go past the translation."""
    net = NETS[4]
    backend = open_flow(bench, net, Protocol.TCP, 8080)
    about = quote(net, net.client, backend, transport_of(Protocol.TCP, 40000, 8080), None)
    redirect = frame(net, backend, net.client, ICMP(type=5, code=1, gw=net.stranger) / about, from_backend=True)
    assert bench.egress(redirect) == (PASS, redirect)
    about = quote(net, net.vip, net.client, transport_of(Protocol.TCP, 80, 40000), None)
    assert bench.ingress(frame(net, net.client, net.vip, ICMP(type=5, code=1, gw=net.stranger) / about))[0] == PASS
    assert bench.count("icmp_related") == 0


def test_an_error_about_a_flow_with_another_source_port(bench: Bench, net: Net) -> None:
    bench.serve(
        service(net.vip, 80, [(net.backends[0], 8080)]),
        service(net.vip2, 80, [(net.backends[0], 8080)], name="default/other:http"),
    )
    bench.open_tcp(net, net.vip)
    there = bench.open_tcp(net, net.vip2)
    assert there.sport != 40000
    inner = quote(net, net.client, there.dst, TCP(sport=there.sport, dport=8080), 8)
    out = bench.egress(frame(net, there.dst, net.client, error(net, "unreachable") / inner))[1]
    assert read(out).src == net.vip2
    assert quoted(out).tuple == (net.client, 40000, net.vip2, 80)
    inner = quote(net, net.vip2, net.client, TCP(sport=80, dport=40000), 8)
    out = bench.ingress(frame(net, net.client, net.vip2, error(net, "too-big") / inner))[1]
    assert read(out).dst == there.dst
    assert quoted(out).tuple == (there.dst, 8080, net.client, there.sport)


def strangers(net: Net) -> dict[str, bytes]:
    """Errors that are about nothing of ours."""
    wrong = quote(net, net.client, net.stranger, TCP(sport=40000, dport=80), None)
    other_port = quote(net, net.client, net.backends[0], TCP(sport=40001, dport=8080), 8)
    cut = Raw(bytes(quote(net, net.client, net.backends[0], TCP(sport=40000, dport=8080), 3)))
    ping = ICMP() if net.family == 4 else ICMPv6DestUnreach()
    inner_icmp = quote(net, net.client, net.backends[0], ping, None)
    return {
        "another connection": frame(net, net.backends[0], net.client, error(net, "unreachable") / wrong),
        "another port": frame(net, net.backends[0], net.client, error(net, "unreachable") / other_port),
        "cut before the ports": frame(net, net.backends[0], net.client, error(net, "unreachable") / cut),
        "about icmp": frame(net, net.backends[0], net.client, error(net, "unreachable") / inner_icmp),
        "without a quotation": frame(net, net.backends[0], net.client, error(net, "unreachable")),
    }


@pytest.mark.parametrize("what", list(strangers(NETS[4])))
def test_other_errors_are_left_alone(bench: Bench, net: Net, what: str) -> None:
    open_flow(bench, net, Protocol.TCP, 8080)
    packet = strangers(net)[what]
    assert bench.egress(packet) == (PASS, packet)
    assert bench.ingress(packet) == (PASS, packet)


def test_an_error_to_a_service_about_nothing_is_not_answered(bench: Bench, net: Net) -> None:
    open_flow(bench, net, Protocol.TCP, 8080)
    inner = quote(net, net.vip, net.client, TCP(sport=81, dport=40000), 8)
    packet = frame(net, net.client, net.vip, error(net, "unreachable") / inner)
    assert bench.ingress(packet) == (PASS, packet)


def test_a_quoted_packet_with_options(bench: Bench) -> None:
    net = NETS[4]
    backend = open_flow(bench, net, Protocol.TCP, 8080)
    inner = bytes(IP(src=net.client, dst=backend, options=b"\x01" * 8) / TCP(sport=40000, dport=8080))
    out = bench.egress(frame(net, backend, net.client, error(net, "unreachable") / Raw(inner)))[1]
    assert quoted(out).tuple == (net.client, 40000, net.vip, 80)


def test_a_quoted_packet_with_extension_headers(bench: Bench) -> None:
    net = NETS[6]
    backend = open_flow(bench, net, Protocol.TCP, 8080)
    inner = bytes(IPv6(src=net.client, dst=backend) / IPv6ExtHdrDestOpt() / TCP(sport=40000, dport=8080))
    out = bench.egress(frame(net, backend, net.client, error(net, "unreachable") / Raw(inner)))[1]
    assert quoted(out).tuple == (net.client, 40000, net.vip, 80)


def test_errors_of_a_pod_that_talks_to_itself_come_back_to_it(bench: Bench, net: Net, target: int) -> None:
    """The node's address is in between; to the stack such a packet would be a martian."""
    me = net.backends[0]
    bench.serve(service(net.vip, 80, [(me, target)], protocol=Protocol.UDP))
    looped = read(bench.ingress(frame(net, me, net.vip, datagram(dport=80)))[1])
    inner = quote(net, looped.src, me, UDP(sport=looped.sport, dport=target) / Raw(PAYLOAD), None)
    verdict, out = bench.ingress(frame(net, me, looped.src, error(net, "unreachable") / inner))
    assert verdict == REDIRECT
    assert (read(out).src, read(out).dst) == (net.vip, me)
    assert (read(out).mac_dst, read(out).mac_src) == (POD_MAC, HOST_MAC)
    assert quoted(out).tuple == (me, 40000, net.vip, 80)
    assert bench.egress(out) == (PASS, out)
    inner = quote(net, net.vip, me, UDP(sport=80, dport=40000) / Raw(PAYLOAD), None)
    verdict, out = bench.ingress(frame(net, me, net.vip, error(net, "unreachable") / inner))
    assert verdict == REDIRECT
    assert (read(out).src, read(out).dst) == (net.primary, me)
    assert quoted(out).tuple == (me, target, net.primary, looped.sport)
    assert bench.egress(out) == (PASS, out)
