"""What no packet from outside may have as its source begins no flow, is not answered, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from scapy.layers.inet import ICMP
from scapy.layers.inet6 import ICMPv6EchoRequest
from scapy.packet import Packet

from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import own_addresses

from .kit import DROP, NETS, PASS, Bench, Net, chunk, datagram, frame, service, syn

OWN = {4: ("192.168.7.1", "192.168.7.77"), 6: ("fd00:7::1", "fd00:7::77", "fe80::77")}
MARTIANS = {
    4: ("0.0.0.0", "127.0.0.1", "127.255.0.9", "224.0.0.1", "239.1.2.3", "255.255.255.255"),
    6: ("::", "::1", "ff02::1", "ff0e::9", "::ffff:10.1.0.5"),
}
PLAIN = {
    4: ("0.1.2.3", "240.0.0.9", "203.0.113.9", "169.254.9.9"),
    6: ("2001:db8::9", "::2", "64:ff9b::a01:5", "fe80::9"),
}


def own(bench: Bench, addresses: Iterable[str]) -> None:
    for key in own_addresses(addresses):
        bench.maps.maps["own_addresses"].update(key, bytes(4))


@pytest.fixture
def node(bench: Bench, net: Net) -> Bench:
    """Two services, one of them without backends, on a node with several addresses."""
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]), service(net.vip2, 80, [], name="default/empty:http"))
    own(bench, OWN[net.family])
    return bench


def sources() -> list[tuple[int, str]]:
    nets = (4, 6)
    refused = [(family, source) for family in nets for source in (*MARTIANS[family], *OWN[family])]
    return [*refused, *((family, address) for family in nets for address in (NETS[family].vip, NETS[family].vip2))]


@pytest.mark.parametrize(("net", "source"), [(NETS[f], s) for f, s in sources()], ids=[s for _, s in sources()])
@pytest.mark.parametrize("hook", ["pod", "uplink"])
@pytest.mark.parametrize("target", ["vip", "vip2"], ids=["served", "empty"])
def test_a_martian_source_gets_nothing(node: Bench, net: Net, hook: str, source: str, target: str) -> None:
    address = getattr(net, target)
    assert node.enter(hook, frame(net, source, address, syn()))[0] == DROP
    assert node.count("drop_martian") == 1
    assert not node.flows(net.family)


@pytest.mark.parametrize("transport", [datagram(), chunk()], ids=["udp", "sctp"])
def test_so_do_ports_that_are_refused(node: Bench, net: Net, transport: Packet) -> None:
    assert node.ingress(frame(net, MARTIANS[net.family][1], net.vip, transport))[0] == DROP
    assert node.counts() == {"drop_martian": 1}


def test_so_do_pings_of_a_services_address(node: Bench, net: Net) -> None:
    ping = ICMP() if net.family == 4 else ICMPv6EchoRequest()
    assert node.ingress(frame(net, OWN[net.family][0], net.vip, ping))[0] == DROP
    assert node.counts() == {"drop_martian": 1}


def test_no_host_has_an_address_that_is_kept_for_services(node: Bench, net: Net) -> None:
    node.allocate(net)
    nobodys = "10.96.200.200" if net.family == 4 else "fd00:96::200"
    assert node.ingress(frame(net, nobodys, net.vip, syn()))[0] == DROP
    assert node.counts() == {"drop_martian": 1}


@pytest.mark.parametrize("hook", ["pod", "uplink"])
def test_what_linux_takes_for_a_plain_source_is_one(node: Bench, net: Net, hook: str) -> None:
    """Since 5.3, all of 0/8 but 0.0.0.0; 240/4, from which clusters number their pods."""
    for source in PLAIN[net.family]:
        assert node.enter(hook, frame(net, source, net.vip, syn()))[0] == PASS
    assert node.count("new_flow") == len(PLAIN[net.family])


def test_a_packet_for_no_service_is_the_stacks(node: Bench, net: Net) -> None:
    """A client asks for its address by DHCP; somebody's 127.0.0.1 is for the kernel to refuse."""
    elsewhere = ("255.255.255.255", net.stranger) if net.family == 4 else ("ff02::1:2", net.stranger)
    for target in elsewhere:
        for source in (*MARTIANS[net.family], *OWN[net.family]):
            packet = frame(net, source, target, datagram(68, 67))
            assert node.ingress(packet) == (PASS, packet)
    assert not node.counts()


def test_explain_says_so(node: Bench, net: Net) -> None:
    answer = node.explain(frame(net, OWN[net.family][1], net.vip, syn()))
    assert answer.verdict == "drop"
    assert [step.step for step in answer.steps][-2:] == ["drop_martian", "verdict"]
