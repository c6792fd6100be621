"""Fragments in order: the first one's ports serve the others; addresses change in all, checksums stay right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scapy.layers.inet import IP, UDP, fragment
from scapy.layers.inet6 import IPv6, IPv6ExtHdrDestOpt, IPv6ExtHdrFragment, fragment6
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from hybrid_proxy.dataplane.table import Protocol

from .kit import DROP, HOST_MAC, NETS, PASS, POD_MAC, Bench, Net, datagram, frame, ones_complement, read, service

PAYLOAD = bytes(range(256)) * 16
NUMBERS = iter(range(1, 60000))


def pieces(
    net: Net, src: str, dst: str, sport: int, dport: int, *, checksum: bool = True, option: bool = False
) -> list[bytes]:
    """A datagram of 4 KiB as frames of at most 1300 bytes."""
    udp = UDP(sport=sport, dport=dport, **({} if checksum else {"chksum": 0})) / Raw(PAYLOAD)
    if net.family == 4:
        head = IP(src=src, dst=dst, id=next(NUMBERS), **({"options": b"\x01" * 8} if option else {}))
        made = fragment(head / udp, fragsize=1280)
    else:
        whole = IPv6(bytes(IPv6(src=src, dst=dst) / udp))  # scapy sums a datagram before it cuts it only if asked
        head = IPv6(src=src, dst=dst)
        head = head / IPv6ExtHdrDestOpt() if option else head
        made = fragment6(head / IPv6ExtHdrFragment(id=next(NUMBERS)) / whole.payload, 1300)
    assert len(made) > 2
    return [bytes(Ether(src=POD_MAC, dst=HOST_MAC) / piece) for piece in made]


def joined(frames: list[bytes]) -> tuple[str, str, bytes]:
    """What a receiver makes of fragments in order: addresses and the datagram, its checksum proved."""
    seen = [read(raw) for raw in frames]
    assert len({(one.src, one.dst, one.protocol) for one in seen}) == 1
    body = b""
    for raw, one in zip(frames, seen, strict=True):
        body += one.l4 if raw[12:14] == b"\x08\x00" else one.l4[8:]  # without the fragment header
    if frames[0][12:14] == b"\x08\x00":
        addresses = frames[0][26:34]
        pseudo = addresses + b"\0\x11" + len(body).to_bytes(2, "big")
    else:
        addresses = frames[0][22:54]
        pseudo = addresses + len(body).to_bytes(4, "big") + b"\0\0\0\x11"
    if body[6:8] != b"\0\0":
        assert ones_complement(pseudo + body) == 0xFFFF, "checksum of the datagram"
    return seen[0].src, seen[0].dst, body


def through(run: object, frames: list[bytes], verdict: int = PASS) -> Iterator[bytes]:
    for raw in frames:
        got, out = run(raw)  # type: ignore[operator]
        assert got == verdict
        yield out


@pytest.mark.parametrize("option", [False, True], ids=["plain", "options"])
def test_fragments_follow_their_first(bench: Bench, net: Net, option: bool) -> None:
    backend = net.backends[0]
    bench.serve(service(net.vip, 53, [(backend, 5353)], protocol=Protocol.UDP))
    out = list(through(bench.ingress, pieces(net, net.client, net.vip, 40000, 53, option=option)))
    src, dst, body = joined(out)
    assert (src, dst) == (net.client, backend)
    assert body[:4] == (40000).to_bytes(2, "big") + (5353).to_bytes(2, "big")
    assert body[8:] == PAYLOAD
    back = list(through(bench.egress, pieces(net, backend, net.client, 5353, 40000, option=option)))
    src, dst, body = joined(back)
    assert (src, dst) == (net.vip, net.client)
    assert body[:4] == (53).to_bytes(2, "big") + (40000).to_bytes(2, "big")
    assert body[8:] == PAYLOAD
    assert sum(bench.flow_count(net.family)) == 2


def test_a_datagram_without_checksum_keeps_none(bench: Bench) -> None:
    net = NETS[4]  # UDP over IPv6 has a checksum
    bench.serve(service(net.vip, 53, [(net.backends[0], 5353)], protocol=Protocol.UDP))
    _, _, body = joined(list(through(bench.ingress, pieces(net, net.client, net.vip, 40000, 53, checksum=False))))
    assert body[6:8] == b"\0\0"


def test_two_datagrams_at_once_do_not_mix(bench: Bench, net: Net) -> None:
    bench.serve(
        service(net.vip, 53, [(net.backends[0], 5353)], protocol=Protocol.UDP),
        service(net.vip, 54, [(net.backends[1], 5353)], protocol=Protocol.UDP, name="default/other:dns"),
    )
    one, two = pieces(net, net.client, net.vip, 40000, 53), pieces(net, net.client, net.vip, 40001, 54)
    mixed = [raw for pair in zip(one, two, strict=True) for raw in pair]
    out = list(through(bench.ingress, mixed))
    assert joined(out[0::2])[1] == net.backends[0]
    assert joined(out[1::2])[1] == net.backends[1]


def test_a_number_that_is_used_again_means_another_datagram(bench: Bench, net: Net) -> None:
    bench.serve(
        service(net.vip, 53, [(net.backends[0], 5353)], protocol=Protocol.UDP),
        service(net.vip, 54, [(net.backends[1], 5353)], protocol=Protocol.UDP, name="default/other:dns"),
    )
    global NUMBERS
    number = next(NUMBERS)
    for port, backend in ((53, net.backends[0]), (54, net.backends[1])):
        NUMBERS = iter(range(number, 60000))
        out = list(through(bench.ingress, pieces(net, net.client, net.vip, 40000, port)))
        assert joined(out)[1] == backend


def test_the_rest_of_a_refused_datagram_is_dropped(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 53, [], protocol=Protocol.UDP))
    first, *rest = pieces(net, net.client, net.vip, 40000, 53)
    assert bench.ingress(first)[0] != PASS
    for raw in rest:
        assert bench.ingress(raw)[0] == DROP
    assert bench.count("drop_fragment") == len(rest)


def test_fragments_of_others_pass(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 53, [(net.backends[0], 5353)], protocol=Protocol.UDP))
    for raw in reversed(pieces(net, net.client, net.stranger, 40000, 53)):
        assert bench.ingress(raw) == (PASS, raw)
        assert bench.egress(raw) == (PASS, raw)
    assert bench.count("fragment_queued") == 0


def test_one_that_comes_early_waits(bench: Bench, net: Net) -> None:
    """At ingress; what waits comes back through the interface's queue, see the conformance tests."""
    bench.serve(service(net.vip, 53, [(net.backends[0], 5353)], protocol=Protocol.UDP))
    *_, last = pieces(net, net.client, net.vip, 40000, 53)
    assert bench.ingress(last)[0] == DROP
    assert bench.count("fragment_queued") == 1
    assert bench.egress(last) == (PASS, last)
    *_, last = pieces(net, net.backends[0], net.client, 5353, 40000)
    assert bench.ingress(last)[0] == DROP
    assert bench.count("fragment_queued") == 2


def test_an_atomic_fragment_is_a_packet(bench: Bench) -> None:
    """RFC 6946: a fragment header on a datagram in one piece."""
    net = NETS[6]
    bench.serve(service(net.vip, 53, [(net.backends[0], 5353)], protocol=Protocol.UDP))
    packet = frame(net, net.client, net.vip, IPv6ExtHdrFragment(id=7) / datagram())
    verdict, out = bench.ingress(packet)
    assert verdict == PASS
    assert IPv6(out[14:]).dst == net.backends[0]
    assert read(out).src == net.client
