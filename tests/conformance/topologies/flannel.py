"""VXLAN with one device for all nodes (flannel): routes, neighbours and the FDB name the nodes; nothing is learnt."""

from __future__ import annotations

from hybrid_proxy.workshop.lab.network import Lab

from . import SIDES, Kind, nodes, routes, services

_LINES = [
    "link add flannel.1 address {mac} mtu 1450 type vxlan id 1 dstport 8472 local {ip} dev eth0 nolearning",
    *routes("flannel.1"),
    "neigh add {via} lladdr {peermac} dev flannel.1 nud permanent",
    "neigh add {via6} lladdr {peermac} dev flannel.1 nud permanent",
]
_STEPS = nodes("\n".join(_LINES))
_STEPS["node2"] += "\n" + "\n".join(services("flannel.1"))


def _name_the_other(lab: Lab) -> None:
    for name, side in SIDES.items():
        link = lab.netlink(name)
        link.fdb("append", ifindex=link.link_lookup(ifname="flannel.1")[0], lladdr=side["peermac"], dst=side["peer"])


KIND = Kind("VXLAN, one device for all nodes (flannel)", _STEPS, needs="VXLAN", overlay=True, finish=_name_the_other)
