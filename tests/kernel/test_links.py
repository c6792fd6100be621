"""What is read of the node's links, addresses and routes, in a network namespace of its own."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from hybrid_proxy.dataplane.kernel.links import (
    Hop,
    Interface,
    hardware_address,
    is_pod,
    is_uplink,
    next_hop,
    read_node,
)
from tests.waiting import until

# The library's package imports all of itself: 17 MB and 0.15 s of processor time, where the agent starts.
WITHOUT = """
import sys
import hybrid_proxy.dataplane.modes.ebpf.programmer, hybrid_proxy.controller.agent.loop
print("pyroute2" in sys.modules)
"""
MAC = "02:00:00:00:77:01"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *" ".join(arguments).split()], check=True, capture_output=True)


@pytest.fixture
def node(namespace: None) -> dict[str, Interface]:
    """A bridge with a port and a macvlan on it, routes with several hops, a tunnel without Ethernet."""
    ip("link set lo up")
    ip(f"link add br0 address {MAC} type bridge")
    ip("link add port0 type veth peer name far0")
    ip("link set port0 master br0")
    ip("link add mv0 link br0 type macvlan")
    ip("tuntap add tun0 mode tun")
    for name in ("br0", "port0", "far0"):
        ip(f"link set {name} up")
    ip("addr add 10.9.0.1/24 brd + dev br0")
    ip("addr add fd99::1/64 dev br0 nodad")
    ip("route add default via 10.9.0.254")
    ip("route add 10.50.0.0/16 nexthop via 10.9.0.5 nexthop via inet6 fd99::7")
    ip("route add fd50::/32 nexthop via fd99::5 nexthop via fd99::6")
    ip("route add 10.60.0.0/16 dev br0 table 77")
    until(lambda: "fd99::1" in read_node().local, "the kernel's local route of an address of IPv6")  # by a work queue
    return {interface.name: interface for interface in read_node().interfaces}


@pytest.mark.root
def test_every_interface_is_described(node: dict[str, Interface]) -> None:
    bridge, port = node["br0"], node["port0"]
    assert node.keys() >= {"lo", "br0", "port0", "far0", "mv0", "tun0"}
    assert (bridge.kind, bridge.mac, bridge.default_route, bridge.master) == ("bridge", MAC, True, 0)
    assert set(bridge.addresses) >= {"10.9.0.1", "fd99::1"}
    assert (port.kind, port.master, port.lower, port.peer_elsewhere) == (
        "veth", bridge.index, node["far0"].index, False,
    )  # fmt: skip
    assert (node["mv0"].lower, node["mv0"].kind, node["mv0"].up) == (bridge.index, "macvlan", False)
    assert [one.name for one in node.values() if not one.ethernet and one.name in ("lo", "br0", "tun0")] == [
        "lo", "tun0",
    ]  # fmt: skip
    assert node["tun0"].mac == "00:00:00:00:00:00"
    assert hardware_address(bridge.index) == bytes.fromhex(MAC.replace(":", ""))
    assert hardware_address(0) == hardware_address(9999) == bytes(6)


@pytest.mark.root
def test_addresses_and_routes_of_both_families_are_read(node: dict[str, Interface]) -> None:
    found, bridge = read_node(), node["br0"].index
    assert set(found.addresses) == {"10.9.0.1", "fd99::1"}
    assert found.local >= {"127.0.0.1", "10.9.0.1", "10.9.0.255", "fd99::1", "::1"}
    assert found.equal_paths == {
        ("10.50.0.0", 16, (Hop(bridge, "10.9.0.5"), Hop(bridge, "fd99::7"))),
        ("fd50::", 32, (Hop(bridge, "fd99::5"), Hop(bridge, "fd99::6"))),
    }
    hops = [next_hop(address) for address in ("10.9.0.9", "fd99::9", "192.0.2.1", "127.0.0.1")]
    assert [hop.index if hop else 0 for hop in hops] == [
        bridge, bridge, bridge, node["lo"].index,
    ]  # fmt: skip
    assert next_hop("fd01::1") is None


@pytest.mark.root
def test_addresses_that_the_kernel_sends_from_come_first(namespace: None) -> None:
    """Those of the default route, then of devices; never those of bridges, which are pods' networks."""
    for number, name in enumerate(("cni0", "up0", "tun0")):
        ip(
            f"tuntap add {name} mode tun"
            if name == "tun0"
            else f"link add {name} type {'bridge' if number == 0 else 'veth'}"
        )
        ip(f"link set {name} up")
    ip("link set lo up")
    ip("link set veth0 up")
    for device, addresses in {
        "lo": ("203.0.113.1/32",), "cni0": ("10.244.1.1/24", "fd44::1/64"), "tun0": ("10.8.0.2/24", "fd08::2/64"),
        "up0": ("198.51.100.7/32", "10.0.0.5/24", "10.0.0.6/24", "fd00::5/64", "169.254.9.9/16"),
    }.items():  # fmt: skip
        for address in addresses:
            ip(f"addr add {address} dev {device}" + " nodad" * (":" in address))
    assert read_node().sources == ("10.8.0.2", "fd08::2")
    ip("route add default via 10.0.0.1 metric 9")
    ip("route add default via fd00::1")
    ip("route add 10.50.0.0/16 via 10.0.0.9")
    ip("route add 10.50.1.1 via 10.0.0.9")
    ip("route add blackhole 10.244.7.0/26")
    found = read_node()
    assert found.sources == ("10.0.0.5", "fd00::5", "10.8.0.2", "fd08::2")
    assert set(found.networks) == {
        "10.0.0.0/24", "10.8.0.0/24", "10.244.1.0/24", "10.244.7.0/26", "10.50.0.0/16", "10.0.0.1/32", "fd00::/64",
        "fd08::/64", "fd44::/64", "fd00::1/128",
    }  # fmt: skip
    ip("route add default via 10.0.0.1 src 10.0.0.6")
    assert read_node().sources[0] == "10.0.0.6"


@pytest.mark.root
def test_loopback_with_the_address_of_a_service_is_no_uplink(namespace: None) -> None:
    ip("address add 10.96.0.10/32 dev lo")
    (lo,) = (one for one in read_node().interfaces if one.name == "lo")
    assert lo.addresses
    assert not is_uplink(lo, (), ())


@pytest.mark.root
def test_a_peer_in_another_namespace_makes_a_pod(namespace: None) -> None:
    ip("link add v0 type veth peer name w0")
    there = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; read _"], stdin=-1, stdout=-1, text=True)
    try:
        assert there.stdout is not None
        there.stdout.readline()
        ip(f"link set w0 netns {there.pid}")
        (pod,) = (one for one in read_node().interfaces if one.index == socket.if_nametoindex("v0"))
    finally:
        there.communicate("\n")
    assert pod.peer_elsewhere
    assert is_pod(pod, (), (), ())
    assert not is_uplink(pod, (), ())


def test_an_agent_in_mode_ebpf_starts_without_pyroute2() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
