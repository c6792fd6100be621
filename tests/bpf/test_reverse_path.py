"""The way back to a source is asked for as the kernel asks: its own answer, for the same packet, is the measure."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from hybrid_proxy.dataplane.kernel.links import hardware_address, read_node, read_reverse_path_filters
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import (
    equal_paths,
    interface_flags,
    own_addresses,
    set_elements,
    word,
)
from tests.namespaces import fresh, loopback

from .kit import DROP, NETS, PASS, Bench, frame, service, syn, veth

REFUSED = {errno.EXDEV, errno.EINVAL}  # an interface that it does not come from; a source that nobody has
SOURCES = {
    4: {
        "pod": "10.1.0.5", "other-pod": "10.1.0.6", "neighbour": "192.168.7.9", "other-wire": "172.20.7.9",
        "anybody": "203.0.113.9", "both-wires": "198.51.100.9", "directly-on-both": "198.51.101.9",
        "nowhere": "192.0.2.9", "own": "192.168.7.1", "segment-broadcast": "192.168.7.255", "loopback": "127.0.0.9",
        "by-rule": "100.64.0.9", "vrf": "10.99.0.9", "this-network": "0.1.2.3", "class-e": "240.0.0.9",
    },
    6: {
        "pod": "fd00:1::5", "other-pod": "fd00:1::6", "neighbour": "fd00:7::9", "other-wire": "fd20:7::9",
        "anybody": "2001:db8::9", "both-wires": "2001:db8:51::9", "nowhere": "2001:db8:dead::9", "own": "fd00:7::1",
    },
}  # fmt: skip
INTERFACES = ("pod0", "pod1", "up0", "up1", "vrf-pod")
TARGET = {4: "10.1.0.21", 6: "fd00:1::21"}  # the backend, behind pod1


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    """Two wires and three pods' interfaces, one of them in a VRF; in a namespace of its own."""
    with fresh(), IPRoute() as ip:
        loopback()
        for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path("/proc/sys/net", name).write_text("1")
        at = {name: veth(name) for name in INTERFACES}
        with suppress(NetlinkError):  # not every kernel has it
            ip.link("add", ifname="vrf0", kind="vrf", vrf_table=77)
            vrf = ip.link_lookup(ifname="vrf0")[0]
            ip.link("set", index=vrf, state="up")
            ip.link("set", index=at["vrf-pod"], master=vrf)
        for name, four, six in (("up0", "192.168.7.1", "fd00:7::1"), ("up1", "172.20.7.1", "fd20:7::1")):
            for address, length in ((four, 24), (six, 64)):
                ip.addr("add", index=at[name], address=address, prefixlen=length, flags=0x02)
        for name, targets in (
            ("pod0", ("10.1.0.5/32", "fd00:1::5/128")),
            ("pod1", ("10.1.0.6/32", "10.1.0.21/32", "fd00:1::6/128", "fd00:1::21/128")),
        ):
            for target in targets:
                ip.route("add", dst=target, oif=at[name], **family_of(target))
        ip.route("add", dst="default", gateway="192.168.7.2", oif=at["up0"])
        ip.route("add", dst="default", gateway="fd00:7::2", oif=at["up0"], family=socket.AF_INET6)
        hops = [(at["up0"], "192.168.7.2", "fd00:7::2"), (at["up1"], "172.20.7.2", "fd20:7::2")]
        both = [{"oif": index, "gateway": gateway} for index, gateway, _ in hops]
        ip.route("add", dst="198.51.100.0/24", multipath=both)
        ip.route("add", dst="198.51.101.0/24", multipath=[{"oif": index} for index, _, _ in hops])
        both = [{"oif": index, "gateway": gateway} for index, _, gateway in hops]
        ip.route("add", dst="2001:db8:51::/48", multipath=both, family=socket.AF_INET6)
        ip.route("add", dst="192.0.2.0/24", type="unreachable")
        ip.route("add", dst="2001:db8:dead::/48", type="unreachable", oif=1, family=socket.AF_INET6)
        ip.route("add", dst="10.99.0.0/24", oif=at["vrf-pod"], table=77)
        ip.route("add", dst="10.1.0.21/32", oif=at["pod1"], table=77)
        ip.rule("add", src="10.1.0.21/32", dst="100.64.0.0/10", table=78, priority=100)
        ip.route("add", dst="100.64.0.0/10", gateway="172.20.7.2", oif=at["up1"], table=78)
        yield


def family_of(address: str) -> dict[str, int]:
    return {"family": socket.AF_INET6 if ":" in address else socket.AF_INET}


def filter_reverse_paths(setting: int) -> None:
    for folder in Path("/proc/sys/net/ipv4/conf").iterdir():
        (folder / "rp_filter").write_text("0" if folder.name == "all" else str(setting))


def configure(bench: Bench, *, strictly: bool = False) -> None:
    """Program what the agent would configure on this node."""
    node = read_node()
    flags = interface_flags(node.interfaces, read_reverse_path_filters(), strictly=strictly)
    routes, paths = equal_paths(node.equal_paths)
    for name, wanted in (
        ("own_addresses", dict.fromkeys(own_addresses(node.local), bytes(4))),
        ("equal_routes", routes),
        ("equal_paths", paths),
        ("interfaces", {word(index): word(asked) for index, asked in flags.items()}),
    ):
        set_elements(bench.maps.maps[name], wanted)


def index_of(name: str) -> int:
    return socket.if_nametoindex(name)


def kernel_takes(source: str, interface: str) -> bool:
    """Whether its own lookup for an incoming packet to the backend succeeds."""
    with IPRoute() as ip:
        try:
            ip.route("get", dst=TARGET[4], src=source, iif=index_of(interface))
        except NetlinkError as error:
            if error.code not in REFUSED:
                raise
            return False
    return True


def programs_take(bench: Bench, family: int, source: str, interface: str) -> bool:
    net, place = NETS[family], "uplink" if interface.startswith("up") else "pod"
    index = index_of(interface)
    packet = hardware_address(index) + frame(net, source, net.vip, syn())[6:]
    verdict = bench.enter(place, packet, ifindex=index)[0]
    assert verdict in (PASS, DROP)
    counted = bench.counts()
    assert (verdict == DROP) == bool({"drop_martian", "drop_reverse_path"} & counted.keys()), counted
    return verdict == PASS


def served(bench: Bench, family: int) -> None:
    net = NETS[family]
    bench.serve(service(net.vip, 80, [(TARGET[family], 8080)]))


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("setting", [0, 1, 2], ids=["none", "strict", "loose"])
@pytest.mark.parametrize("source", SOURCES[4].values(), ids=SOURCES[4])
def test_as_the_kernel(bench: Bench, setting: int, source: str, interface: str) -> None:
    if interface == "vrf-pod" and "vrf0" not in dict(socket.if_nameindex()).values():
        pytest.skip("missing feature: VRF")
    filter_reverse_paths(setting)
    configure(bench)
    served(bench, 4)
    assert programs_take(bench, 4, source, interface) == kernel_takes(source, interface)


# Interfaces that lead back to each, of IPv6, for which the kernel has no such check.
BACK6 = {"pod": {"pod0"}, "other-pod": {"pod1"}, "neighbour": {"up0"}, "other-wire": {"up1"}, "anybody": {"up0"},
         "both-wires": {"up0", "up1"}, "nowhere": set(), "own": set()}  # fmt: skip


@pytest.mark.parametrize("interface", ["pod0", "pod1", "up0", "up1"])
@pytest.mark.parametrize("source", SOURCES[6])
def test_ipv6_is_asked_where_that_is_wanted(bench: Bench, source: str, interface: str) -> None:
    filter_reverse_paths(1)
    served(bench, 6)
    for strictly in (False, True):
        configure(bench, strictly=strictly)
        bench.forget()
        taken = interface in BACK6[source] if strictly else source != "own"
        assert programs_take(bench, 6, SOURCES[6][source], interface) == taken


def test_strictly_means_everywhere(bench: Bench) -> None:
    filter_reverse_paths(0)
    configure(bench, strictly=True)
    served(bench, 4)
    assert programs_take(bench, 4, SOURCES[4]["pod"], "pod0")
    bench.forget()
    for interface in ("pod1", "up0"):
        assert not programs_take(bench, 4, SOURCES[4]["pod"], interface)
        assert bench.counts().keys() == {"drop_reverse_path"}
        bench.forget()


def test_explain_shows_the_reverse_path(bench: Bench) -> None:
    filter_reverse_paths(1)
    configure(bench)
    served(bench, 4)
    packet = frame(NETS[4], SOURCES[4]["other-pod"], NETS[4].vip, syn())
    answer = bench.explain(packet, ifindex=index_of("pod0"))
    assert answer.verdict == "drop"
    steps = [step.step for step in answer.steps]
    assert steps[-3:] == ["path_back", "drop_reverse_path", "verdict"]
    assert "pod1" in answer.steps[-3].text
