"""A node whose addresses are on a bridge, with a veth as its way out: kind, LXC, and nodes in containers.

With br_netfilter, conntrack would translate at the port already, and the bridge sends nothing out where it came in.
"""

from . import Kind, moved

_BRIDGE = "link add br0 type bridge\nlink set eth0 master br0\n"
_NAMES = ("bridge/bridge-nf-call-iptables", "bridge/bridge-nf-call-ip6tables")
KIND = Kind(
    "an uplink that is a bridge over a veth",
    {"node": f"{_BRIDGE}{moved('node', 'br0')}"},
    needs="br_netfilter",
    settings={"node": dict.fromkeys(_NAMES, "0")},
)
