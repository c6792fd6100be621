"""What the node's addresses are on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hybrid_proxy.dataplane.reports import XdpHooks

from ..kit import Bench, Service
from . import Kind, moved


def port(name: str) -> str:
    """Lines for the client, where the nodes' network is a bridge: another link to the node, its `eth1`."""
    return f"""
        link add to-{name} type veth peer name eth1 netns {{node}}
        link set to-{name} master eth0
        link set to-{name} up
        """


_BOND = """
link add bond0 type bond mode active-backup miimon 100
link set eth0 down
link set eth0 master bond0
link set eth1 down
link set eth1 master bond0
"""
_SIX = """
link set eth1 up
addr del fd77::2/64 dev eth0
addr del fd77::22/64 dev eth0
addr add fd77::2/64 dev eth1 nodad
route replace fd77:1:0:2::/64 via fd77::3 dev eth1
route replace default via fd77::1 dev eth1
"""
# The address of lo is for masquerading: without one, pods' VRF has none, and nftables drops what it should masquerade.
# Packets that come in by the uplink follow the VRF's table alone, and all others the main one: each has a way to both.
_VRF = """
link add blue type vrf table 100
link set blue up
link set eth0 master blue
addr flush dev eth0 scope global
addr add 192.168.77.2/24 dev eth0
addr add fd77::2/64 dev eth0 nodad
addr add 10.77.1.1/32 dev lo
addr add fd77:1::1/128 dev lo nodad
"""
for _table in ("100", "main"):
    _VRF += f"""
        route replace 192.168.77.0/24 dev eth0 table {_table}
        route replace fd77::/64 dev eth0 table {_table}
        route replace 10.77.2.0/24 via 192.168.77.3 dev eth0 onlink table {_table}
        route replace fd77:1:0:2::/64 via fd77::3 dev eth0 onlink table {_table}
        route replace default via 192.168.77.1 dev eth0 onlink table {_table}
        route replace default via fd77::1 dev eth0 onlink table {_table}
        """
for _pod in (1, 2):
    _VRF += f"""
        route add 10.77.1.1{_pod}/32 dev veth{_pod} table 100
        route add fd77:1::1{_pod}/128 dev veth{_pod} table 100
        """
_BRIDGE = "link add br0 type bridge\nlink set eth0 master br0\n"
_MACVLAN = "link add mv0 link eth0 type macvlan mode bridge\n"


def _left_to_tc(uplink: str, why: str) -> Callable[[Bench, Mapping[str, Service]], str]:
    want = XdpHooks("native", [], {uplink: why})

    def proves(bench: Bench, _: Mapping[str, Service]) -> str:
        ebpf = bench.agent.running_status().dataplane.ebpf
        return "" if ebpf is None or ebpf.xdp == want else f"not as said: {ebpf.xdp}"

    return proves


KINDS = {
    "bond": Kind(
        "an uplink that is a bond", {"client": port("bond"), "node": f"{_BOND}{moved('node', 'bond0')}"}, needs="bond"
    ),
    "two_uplinks": Kind("each family by an uplink of its own", {"client": port("eth1"), "node": _SIX}),
    # kind, LXC, and nodes in containers. With br_netfilter, conntrack would translate at the port already, and the
    # bridge sends nothing out where it came in.
    "uplink_bridge": Kind(
        "an uplink that is a bridge over a veth",
        {"node": f"{_BRIDGE}{moved('node', 'br0')}"},
        needs="br_netfilter",
        settings={"node": {f"bridge/bridge-nf-call-{name}": "0" for name in ("iptables", "ip6tables")}},
    ),
    "uplink_macvlan": Kind(
        "an uplink that is a macvlan over a veth", {"node": f"{_MACVLAN}{moved('node', 'mv0')}"}, needs="macvlan",
        rare=True,
    ),
    # The network's addresses are in it, too.
    "vlan": Kind(
        "an uplink that is a VLAN",
        {place: f"link add eth0.5 link eth0 type vlan id 5\n{moved(place, 'eth0.5')}"
         for place in ("client", "node", "node2")},
        needs="VLAN",
    ),
    # https://github.com/tigera/docs/issues/2765
    "vrf": Kind(
        "an uplink in a VRF, pods outside of it, an address at lo",
        {"node": _VRF},
        needs="VRF",
        settings={"node": dict.fromkeys((f"ipv4/{protocol}_l3mdev_accept" for protocol in ("tcp", "udp")), "1")},
        instead={
            "ipvs": {"pod1-far-nodeport": "in the pod's VRF the node's address is not local, and reaches no INPUT"},
            "userspace": dict.fromkeys(
                (f"{place}-{service}-{way}" for place, service, way in (
                    ("pod1", "far", "cluster"), ("pod1", "near", "cluster"), ("pod1", "far", "nodeport"),
                    ("pod1", "names", "cluster"), ("node", "far", "cluster"), ("client", "far", "nodeport"),
                    ("client", "near", "nodeport"), ("client", "local", "nodeport"), ("client", "names", "nodeport"),
                    ("remote1", "near", "cluster"),
                )),
                "the relay cannot listen at an address of another VRF",
            ),
        },
    ),
    # As those of virtual functions: with --xdp=native, tc serves it.
    "without_xdp": Kind(
        "an uplink without XDP, --xdp=native",
        {"node": f"link add eth1 link eth0 type macvlan mode private\n{moved('node', 'eth1')}"},
        needs="macvlan", flags=("--xdp=native",), proves=_left_to_tc("eth1", "the driver has no native XDP"), rare=True,
    ),
}  # fmt: skip
KINDS["vrf_xdp"] = replace(
    KINDS["vrf"], words="an uplink in a VRF, --xdp=native: tc serves it", flags=("--xdp=native",), rare=True,
    proves=_left_to_tc("eth0", "a port of another interface, which gets its packets"),
)  # fmt: skip
