"""First packets to services: which are translated, to what, and which are left alone, refused or dropped."""

from __future__ import annotations

import numpy as np
import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6EchoRequest,
)
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Raw

from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.table import Protocol, WhenEmpty

from .kit import (
    DROP,
    HOST_MAC,
    NETS,
    PASS,
    POD_MAC,
    REDIRECT,
    Bench,
    Net,
    bench_with,
    chunk,
    cpus,
    datagram,
    frame,
    quoted,
    read,
    segment,
    service,
    syn,
)

TRANSPORTS = {Protocol.TCP: syn, Protocol.UDP: datagram, Protocol.SCTP: chunk}


@pytest.mark.parametrize(("protocol", "port", "target"), [
    pytest.param(Protocol.TCP,  80,    80,    id="tcp-same-port"),
    pytest.param(Protocol.TCP,  80,    8080,  id="tcp-other-port"),
    pytest.param(Protocol.UDP,  53,    53,    id="udp-same-port"),
    pytest.param(Protocol.UDP,  53,    5353,  id="udp-other-port"),
    pytest.param(Protocol.SCTP, 38412, 38412, id="sctp-same-port"),
])  # fmt: skip
def test_a_first_packet_goes_to_a_backend(bench: Bench, net: Net, protocol: Protocol, port: int, target: int) -> None:
    backend = net.backends[0]
    bench.serve(service(net.vip, port, [(backend, target)], protocol=protocol))
    packet = frame(net, net.client, net.vip, TRANSPORTS[protocol](40000, port))
    verdict, out = bench.ingress(packet)
    assert verdict == PASS
    assert read(out).tuple == (net.client, 40000, backend, target)
    assert out[:14] == packet[:14]
    back = frame(net, backend, net.client, TRANSPORTS[protocol](target, 40000) if protocol != Protocol.TCP
                 else segment(target, 40000, "SA", 0, 1001), from_backend=True)  # fmt: skip
    verdict, out = bench.egress(back)
    assert verdict == PASS
    assert read(out).tuple == (net.vip, port, net.client, 40000)
    assert bench.flow_count(net.family) == (0, 2)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 1399])
@pytest.mark.parametrize("make", [syn, datagram], ids=["tcp", "udp"])
def test_checksums_hold_for_any_payload(bench: Bench, net: Net, make: object, size: int) -> None:
    protocol = Protocol.TCP if make is syn else Protocol.UDP
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)], protocol=protocol))
    payload = bytes((7 * i) & 0xFF for i in range(size))
    transport = syn() / Raw(payload) if make is syn else datagram(40000, 80, payload)
    verdict, out = bench.ingress(frame(net, net.client, net.vip, transport))
    assert verdict == PASS
    assert read(out).tuple == (net.client, 40000, net.backends[0], 8080)
    assert out.endswith(payload)


# --- left alone


def others(net: Net) -> dict[str, bytes]:
    six = net.family == 6
    nowhere = frame(net, net.client, net.stranger, syn())
    tunnelled = Ether(src=POD_MAC, dst=HOST_MAC) / IP(src="10.1.0.5", dst="10.96.0.10", proto=41) / Raw(bytes(60))
    return {
        "other address": nowhere,
        "other udp": frame(net, net.client, net.stranger, datagram()),
        "ping": frame(net, net.client, net.stranger, ICMPv6EchoRequest() if six else ICMP()),
        "arp": bytes(Ether(dst=HOST_MAC) / ARP(pdst="10.96.0.10")),
        "unknown ethertype": bytes(Ether(type=0x88B5, dst=HOST_MAC) / Raw(bytes(64))),
        "6in4 to the service": bytes(tunnelled),
        "between pods": frame(net, net.client, net.backends[5], syn(dport=8080)),
    }


@pytest.mark.parametrize("what", list(others(NETS[4])))
def test_what_is_no_services_is_untouched(bench: Bench, net: Net, what: str) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    packet = others(net)[what]
    assert bench.ingress(packet) == (PASS, packet)
    assert bench.egress(packet) == (PASS, packet)
    assert bench.flow_count(net.family) == (0, 0)


@pytest.mark.parametrize("flags", [
    pytest.param("A",   id="ack"),
    pytest.param("PA",  id="data"),
    pytest.param("SA",  id="syn-ack"),
    pytest.param("FA",  id="fin"),
    pytest.param("R",   id="rst"),
    pytest.param("SF",  id="syn-fin"),
    pytest.param("SR",  id="syn-rst"),
    pytest.param("",    id="null"),
    pytest.param("FPU", id="christmas-tree"),
])  # fmt: skip
@pytest.mark.parametrize("port", [80, 81], ids=["served", "unknown"])
def test_tcp_that_opens_nothing_and_has_no_flow_is_somebody_elses(
    bench: Bench, net: Net, flags: str, port: int
) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    packet = frame(net, net.client, net.vip, segment(40000, port, flags))
    assert bench.ingress(packet) == (PASS, packet)
    assert bench.flow_count(net.family) == (0, 0)


# --- headers between IP and transport


@pytest.mark.parametrize("octets", [992, 1008, 1024, 1040, 1056, 2032])
def test_an_extension_header_longer_than_the_window_is_left_alone(bench: Bench, octets: int) -> None:
    """Ports are read up to 1 KiB into the frame; behind that nothing may be taken for a port."""
    net = NETS[6]
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)], protocol=Protocol.UDP))
    pattern = (40000).to_bytes(2, "big") + (80).to_bytes(2, "big")
    header = bytes([17, octets // 8 - 1]) + (pattern * octets)[2:octets]
    packet = frame(net, net.client, net.vip, Raw(header + bytes(datagram(1, 2))), nh=60)
    assert bench.ingress(packet) == (PASS, packet)
    assert bench.flow_count(6) == (0, 0)


# --- refused and dropped


def test_an_unknown_tcp_port_is_reset(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    options = [("MSS", 1460), ("SAckOK", b""), ("Timestamp", (1, 0)), ("NOP", None), ("WScale", 7)]
    packet = frame(net, net.client, net.vip, syn(dport=81, options=options))
    verdict, out = bench.ingress(packet)
    assert verdict == REDIRECT
    seen = read(out)
    assert seen.tuple == (net.vip, 81, net.client, 40000)
    assert (seen.mac_dst, seen.mac_src) == (POD_MAC, HOST_MAC)
    tcp = TCP(seen.l4)
    assert (tcp.flags, tcp.ack, tcp.seq, tcp.window) == ("RA", 1001, 0, 0)
    assert tcp.options == TCP(read(packet).l4).options
    assert bench.flow_count(net.family) == (0, 0)
    assert bench.count("reject_no_port") == 1


@pytest.mark.parametrize("seq", [0xFFFFFFFF, 0, 0x7FFFFFFF])
def test_the_reset_acknowledges_across_the_wrap(bench: Bench, net: Net, seq: int) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    verdict, out = bench.ingress(frame(net, net.client, net.vip, TCP(sport=1, dport=81, flags="SEC", seq=seq)))
    assert verdict == REDIRECT
    assert TCP(read(out).l4).ack == (seq + 1) & 0xFFFFFFFF


def unreachable(net: Net, out: bytes) -> None:
    """An ICMP port unreachable from the service's address to the client."""
    seen = read(out)
    assert (seen.src, seen.dst) == (net.vip, net.client)
    assert (seen.mac_dst, seen.mac_src) == (POD_MAC, HOST_MAC)
    assert seen.protocol == (1 if net.family == 4 else 58)
    assert tuple(seen.l4[:2]) == ((3, 3) if net.family == 4 else (1, 4))
    assert seen.l4[4:8] == bytes(4)


@pytest.mark.parametrize("size", [0, 1, 5, 1400])
def test_an_unknown_udp_port_is_unreachable(bench: Bench, net: Net, size: int) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    packet = frame(net, net.client, net.vip, datagram(dport=81, payload=b"x" * size))
    verdict, out = bench.ingress(packet)
    assert verdict == REDIRECT
    unreachable(net, out)
    quote = quoted(out)
    assert quote.tuple == (net.client, 40000, net.vip, 81)
    head = 20 if net.family == 4 else 40
    assert quote.raw[14:] == packet[14 : 14 + head + 8]


def test_an_unknown_sctp_port_is_unreachable(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    verdict, out = bench.ingress(frame(net, net.client, net.vip, chunk(dport=81)))
    assert verdict == REDIRECT
    unreachable(net, out)
    assert quoted(out).tuple == (net.client, 40000, net.vip, 81)


def test_a_ping_to_a_service_is_unreachable(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    ping = ICMP(id=7, seq=1) if net.family == 4 else ICMPv6EchoRequest(id=7, seq=1)
    packet = frame(net, net.client, net.vip, ping / Raw(b"abcdefgh" * 4))
    verdict, out = bench.ingress(packet)
    assert verdict == REDIRECT
    unreachable(net, out)
    head = 20 if net.family == 4 else 40
    assert read(out).l4[8:] == packet[14 : 14 + head + 8]


@pytest.mark.parametrize("kind", [4, 5], ids=["source-quench", "redirect"])
def test_an_icmp_error_is_never_answered_by_one(bench: Bench, kind: int) -> None:
    """RFC 1122, 3.2.2."""
    net = NETS[4]
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    quote = IP(src=net.vip, dst=net.client) / UDP(sport=81, dport=9)
    packet = frame(net, net.client, net.vip, ICMP(type=kind) / quote)
    assert bench.ingress(packet) == (PASS, packet)


@pytest.mark.parametrize("protocol", list(TRANSPORTS), ids=lambda p: p.name.lower())
def test_a_service_without_backends_refuses(bench: Bench, net: Net, protocol: Protocol) -> None:
    bench.serve(service(net.vip, 80, [], protocol=protocol))
    verdict, out = bench.ingress(frame(net, net.client, net.vip, TRANSPORTS[protocol](40000, 80)))
    assert verdict == REDIRECT
    if protocol is Protocol.TCP:
        assert TCP(read(out).l4).flags == "RA"
    else:
        unreachable(net, out)
    assert bench.flow_count(net.family) == (0, 0)


@pytest.mark.parametrize("protocol", list(TRANSPORTS), ids=lambda p: p.name.lower())
def test_a_service_that_drops_when_empty_drops(bench: Bench, net: Net, protocol: Protocol) -> None:
    bench.serve(service(net.vip, 80, [], protocol=protocol, when_empty=WhenEmpty.DROP))
    packet = frame(net, net.client, net.vip, TRANSPORTS[protocol](40000, 80))
    assert bench.ingress(packet) == (DROP, packet)
    assert bench.count("drop_empty") == 1


def test_refusals_are_bounded_in_time(bench: Bench, net: Net) -> None:
    with bench_with(reject_burst=5, hz=1_000_000) as bounded:
        bounded.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
        # The bucket is each CPU's: at most 5 for each.
        verdicts = [bounded.ingress(frame(net, net.client, net.vip, syn(dport=81)))[0] for _ in range(100)]
        assert 1 <= verdicts.count(REDIRECT) <= 5 * cpus()
        assert verdicts.count(REDIRECT) + verdicts.count(DROP) == 100
        assert bounded.count("drop_reject_limited") == verdicts.count(DROP)


@pytest.mark.parametrize("before", [0, 3, 4, 40])
@pytest.mark.parametrize("make", [syn, datagram, lambda: segment(1, 2, "A")], ids=["syn", "udp", "ack"])
def test_unallocated_service_addresses_are_dropped(bench: Bench, net: Net, make: object, before: int) -> None:
    """However many other ranges there are."""
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    bench.allocate(net, *(f"10.{100 + i}.0.0/24" if net.family == 4 else f"fd50:{i}::/112" for i in range(before)))
    packet = frame(net, net.client, net.vip2, make())  # type: ignore[operator]
    assert bench.ingress(packet) == (DROP, packet)
    assert bench.count("drop_unallocated") == 1
    beside = "10.97.0.1" if net.family == 4 else "fd00:96:1::1"
    packet = frame(net, net.client, beside, make())  # type: ignore[operator]
    assert bench.ingress(packet) == (PASS, packet)
    assert bench.ingress(frame(net, net.client, net.vip, syn()))[0] == PASS


def test_unallocated_addresses_are_dropped_whatever_the_prefilter_says(bench: Bench, net: Net) -> None:
    """A bit of the prefilter stands for many addresses."""
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    bench.allocate(net)
    bits = bench.maps.bitmap("service_addresses")
    before = bits.copy()
    try:
        bits[:] = (1 << 64) - 1
        packet = frame(net, net.client, net.vip2, syn())
        assert bench.ingress(packet) == (DROP, packet)
        assert bench.explain(packet).verdict == "drop"
    finally:
        bits[:] = before


def test_a_frontend_whose_tag_is_not_its_keys_is_not_believed(bench: Bench, net: Net) -> None:
    """What a program sees when an element is recycled for another key under its eyes."""
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    frontends = bench.maps.maps[f"frontends{net.family}"]
    keys, values = frontends.items(layout.frontend_dtype(net.family), np.dtype("u8"))
    position = next(i for i, key in enumerate(keys) if key["port"])
    right = int(values[position])
    for wrong_bit in range(40, 64):
        frontends.update(keys[position].tobytes(), (right ^ 1 << wrong_bit).to_bytes(8, "little"))
        verdict, out = bench.ingress(frame(net, net.client, net.vip, syn()))
        assert (verdict, read(out).dst) != (PASS, net.backends[0])
    frontends.update(keys[position].tobytes(), right.to_bytes(8, "little"))
    assert read(bench.ingress(frame(net, net.client, net.vip, syn()))[1]).dst == net.backends[0]


def test_a_slot_of_another_service_is_not_believed(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    known = next(iter(bench.store.plan.installed["default/web"]))
    bench.store.writer.rows.slots["backend"][known.ranges[0][0]] ^= 1 << 32
    packet = frame(net, net.client, net.vip, syn())
    assert bench.ingress(packet) == (DROP, packet)
    assert bench.count("slot_lost") == 1
    assert bench.count("slot_retry") == 2
