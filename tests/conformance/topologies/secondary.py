"""A pod of a secondary interface, as AWS' plugin makes it: the pod's packets leave by that interface, by a policy.

The network takes from each interface its own addresses alone. So answers at node ports must leave by the first
interface, where the node's address is: connections that come in there get a mark.
"""

from __future__ import annotations

from typing import Any

from hybrid_proxy.workshop.lab.network import Lab

from ..cases import node, own
from . import Check, Kind

_STEPS = {
    "client": """
        link add eth1 type veth peer name eth1 netns {node}
        link set eth1 up
        addr add 192.168.78.1/24 dev eth1
        addr add fd78::1/64 dev eth1 nodad
        route add 10.77.1.12/32 via 192.168.78.2
        route add fd77:1::12/128 via fd78::2
        """,
    "node": """
        link set eth1 up
        addr add 192.168.78.2/24 dev eth1
        addr add fd78::2/64 dev eth1 nodad
        """,
    "node2": "route add 10.77.1.12/32 via 192.168.77.1\nroute add fd77:1::12/128 via fd77::1",
}
_ROUTES = """
    rule add to 10.77.1.0/24 lookup main pref 512
    rule add from 10.77.1.12 lookup 101 pref 1536
    route add default via 192.168.78.1 dev eth1 table 101
    -6 rule add to fd77:1::/64 lookup main pref 512
    -6 rule add from fd77:1::12 lookup 101 pref 1536
    -6 route add default via fd78::1 dev eth1 table 101
    """
_MARKS = """
    rule add fwmark 0x80/0x80 lookup main pref 1024
    -6 rule add fwmark 0x80/0x80 lookup main pref 1024
    """
_RULES = """
    table inet cloud {
        chain marks {
            type filter hook prerouting priority -150;
            iifname "eth0" fib daddr type local ct mark set ct mark or 0x80
            iifname "veth*" ct mark and 0x80 == 0x80 meta mark set meta mark or 0x80
        }
    }
    """
_WALLS = """
    table netdev first {
        chain ingress {
            type filter hook ingress device to-node priority 0;
            ip saddr { 192.168.78.2, 10.77.1.12 } drop
            ip6 saddr { fd78::2, fd77:1::12 } drop
        }
    }
    table netdev second {
        chain ingress {
            type filter hook ingress device eth1 priority 0;
            ip saddr != { 192.168.78.2, 10.77.1.12 } drop
            ip6 saddr != { fd78::2, fd77:1::12, fe80::/10 } drop
        }
    }
    """


def _program(lab: Lab, *, marked: bool) -> None:
    lines = _ROUTES + (_MARKS if marked else "")
    for place, argv in (
        *(("node", ["ip", *line.split()]) for line in lines.splitlines() if line.strip()),
        ("client", ["nft", _WALLS]),
        *([("node", ["nft", _RULES])] if marked else []),
    ):
        done = lab.run(place, argv)
        assert done.returncode == 0, f"{argv}: {done.stderr}"


def secondary(words: str, *, marked: bool, **more: Any) -> Kind:
    """With or without the plugin's marks."""
    return Kind(
        words,
        _STEPS,
        settings={
            "client": {"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding": "1"},
            "node": {"ipv4/conf/eth0/rp_filter": "2"},
        },
        finish=lambda lab: _program(lab, marked=marked),
        without={"remote1-near-cluster": "ClusterIPs are not asked from other nodes"},
        flags=("--uplink-interfaces=eth*",),  # a veth with a peer elsewhere would be a pod's
        checks=(
            Check("pod2", "far", "cluster", own("remote1"), large=True),
            Check("pod2", "far", "nodeport", node("remote1")),
            Check("pod2", "names", "cluster", own("remote1")),
        ),
        **more,
    )


KIND = secondary("a pod of a secondary interface, marks (AWS)", marked=True)
