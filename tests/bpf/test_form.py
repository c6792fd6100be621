"""Packets that are not what they say begin nothing and follow nothing; frames for others are the stack's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scapy.layers.inet import IPOption_LSRR, IPOption_RR
from scapy.layers.inet6 import HBHOptUnknown, IPv6ExtHdrHopByHop
from scapy.packet import Raw

from hybrid_proxy.dataplane.kernel.links import Interface, hardware_address
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import interface_flags, word
from hybrid_proxy.dataplane.table import Protocol

from .kit import DROP, PASS, Bench, Net, datagram, frame, ones_complement, segment, service, syn

OTHERS = bytes.fromhex("020000000099")
Change = Callable[[bytearray], None]


@pytest.fixture
def served(bench: Bench, net: Net) -> Bench:
    dns = service(net.vip, 53, [(net.backends[0], 53)], name="kube-system/dns:dns", protocol=Protocol.UDP)
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]), dns)
    return bench


def put(offset: int, *values: int) -> Change:
    """Other bytes there, from the IP header on; IPv4's checksum is made right again."""

    def change(raw: bytearray) -> None:
        raw[14 + offset : 14 + offset + len(values)] = bytes(values)
        if raw[12:14] == b"\x08\x00" and offset != 10:
            raw[24:26] = bytes(2)
            raw[24:26] = (0xFFFF - ones_complement(bytes(raw[14:34]))).to_bytes(2, "big")

    return change


IP4 = {"checksum": put(10, 0xDE, 0xAD), "no-length": put(2, 0, 0), "too-short": put(2, 0, 12), "too-long": put(2, 5, 0),
       "ends-in-transport": put(2, 0, 24)}  # fmt: skip
IP6 = {"no-length": put(4, 0, 0), "too-long": put(4, 5, 0), "ends-in-transport": put(4, 0, 4)}
TCP = {"words-0": put(12, 0x00), "words-4": put(12, 0x40), "words-15": put(12, 0xF0)}
UDP = {"length-0": put(4, 0, 0), "length-7": put(4, 0, 7), "length-long": put(4, 5, 0)}


def transport(change: Change, family: int) -> Change:
    """The same, from the transport's header on."""
    return lambda raw: _behind(raw, change, 20 if family == 4 else 40)


def _behind(raw: bytearray, change: Change, offset: int) -> None:
    part = bytearray(bytes(12) + b"\xff\xff" + raw[14 + offset :])
    change(part)
    raw[14 + offset :] = part[14:]


def malformed(net: Net) -> dict[str, bytes]:
    made = {}
    for name, change in (IP4 if net.family == 4 else IP6).items():
        made[name] = (syn(), change)
    for name, change in TCP.items():
        made[name] = (syn(), transport(change, net.family))
    for name, change in UDP.items():
        made[name] = (datagram(), transport(change, net.family))
    frames = {}
    for name, (content, change) in made.items():
        raw = bytearray(frame(net, net.client, net.vip, content))
        change(raw)
        frames[name] = bytes(raw)
    return frames


def test_a_malformed_packet_begins_nothing(served: Bench, net: Net) -> None:
    for name, packet in malformed(net).items():
        served.forget()
        assert served.ingress(packet)[0] == DROP, name
        assert served.counts() == {"drop_malformed": 1}, name
        assert not served.flows(net.family)


def test_it_follows_no_flow(served: Bench, net: Net) -> None:
    """It could be sent on past the stack, which would drop it."""
    served.open_tcp(net, net.vip)
    served.open_udp(net, net.vip)
    for name, packet in malformed(net).items():
        if name != "words-0":
            assert served.ingress(packet)[0] == DROP, name


def test_a_cut_header_begins_nothing(served: Bench, net: Net) -> None:
    whole = frame(net, net.client, net.vip, Raw(bytes(syn())[:12]), **({"proto": 6} if net.family == 4 else {"nh": 6}))
    assert served.ingress(whole)[0] == DROP


def test_options_that_routers_carry_out_are_not_ours(served: Bench, net: Net) -> None:
    if net.family == 4:
        options = [[IPOption_LSRR(routers=["10.1.0.9"])], [IPOption_RR(routers=["0.0.0.0"])]]
        packets = [frame(net, net.client, net.vip, syn(), options=option) for option in options]
    else:
        discard = IPv6ExtHdrHopByHop(options=[HBHOptUnknown(otype=0x41, optdata=bytes(4))])
        packets = [frame(net, net.client, net.vip, discard / syn())]
    for packet in packets:
        assert served.ingress(packet)[0] == DROP
    assert served.counts() == {"drop_malformed": len(packets)}


def test_what_is_no_services_is_the_stacks(served: Bench, net: Net) -> None:
    for name, packet in malformed(net).items():
        there = 30 if net.family == 4 else 38
        length = 4 if net.family == 4 else 16
        stranger = layout.address_bytes(net.stranger)[:length]
        other = packet[:there] + stranger + packet[there + length :]
        assert served.ingress(other) == (PASS, other), name
    assert not served.counts()


def test_a_bundle_may_be_longer_than_its_header_can_say(served: Bench, net: Net) -> None:
    served.open_tcp(net, net.vip)
    raw = bytearray(frame(net, net.client, net.vip, segment(40000, 80, "A", payload=bytes(3000))))
    put(2 if net.family == 4 else 4, 0, 0)(raw)
    assert served.ingress(bytes(raw))[0] == DROP
    assert served.ingress(bytes(raw), gso_segs=3, gso_size=1400)[0] != DROP


@pytest.mark.parametrize("target", [b"\xff" * 6, bytes.fromhex("01005e000001"), OTHERS], ids=["all", "many", "other"])
def test_a_frame_for_others_is_the_stacks(served: Bench, net: Net, target: bytes) -> None:
    """On the loopback interface, which has zeros for an address."""
    served.maps.maps["interfaces"].update(word(1), word(0))
    packet = target + frame(net, net.client, net.vip, syn())[6:]
    assert served.ingress(packet) == (PASS, packet)
    assert served.counts() == {"foreign_frame": 1}
    mine = hardware_address(0) + packet[6:]
    assert served.ingress(mine)[1] != mine


def test_a_bridge_judges_frames_itself(served: Bench, net: Net) -> None:
    bridge = Interface(7, "cni0", "bridge", True, False, False, ())
    port = Interface(1, "veth1", "veth", True, True, False, (), master=7)
    vmac = Interface(8, "vrrp0", "macvlan", True, False, False, (), lower=9)
    wire = Interface(9, "eth0", "", True, False, True, ())
    flags = interface_flags((bridge, port, vmac, wire), {}, strictly=False)
    shared = layout.abi_constants()["INTERFACE_SHARED"]
    assert {index for index, known in flags.items() if known & shared} == {1, 9}
    served.maps.maps["interfaces"].update(word(1), word(flags[1]))
    packet = OTHERS + frame(net, net.client, net.vip, syn())[6:]
    assert served.ingress(packet)[1] != packet
    assert not served.count("foreign_frame")


def test_explain_says_so(served: Bench, net: Net) -> None:
    answer = served.explain(malformed(net)["words-4"])
    assert answer.verdict == "drop"
    assert [step.step for step in answer.steps][-2:] == ["drop_malformed", "verdict"]
