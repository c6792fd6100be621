"""A pod that is a router: behind it is a network that is no pods', to which the node has a route."""

from __future__ import annotations

from ..cases import node
from ..probes import REFUSED
from . import Check, Kind

_STEPS = {
    "node": """
        link del veth3
        route add 10.88.0.0/24 via 10.77.1.11
        route add fd88::/64 via fd77:1::11
        """,
    "pod1": """
        link add inner type veth peer name eth0 netns {pod3}
        link set inner up
        addr add 10.88.0.1/24 dev inner
        addr add fd88::1/64 dev inner nodad
        """,
    "pod3": """
        link set eth0 up
        addr add 10.88.0.9/24 dev eth0
        addr add fd88::9/64 dev eth0 nodad
        route add default via 10.88.0.1
        route add default via fd88::1
        """,
}
KIND = Kind(
    "a pod that is a router",
    _STEPS,
    settings={"pod1": {"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding": "1"}},
    pods=3,
    checks=(
        Check("pod3", "far", "cluster", node("remote1"), large=True),
        Check("pod3", "near", "cluster", node("pod2"), large=True),
        Check("pod3", "nobody", "cluster", REFUSED),
    ),
)
