"""Pods that are ipvlan devices on the nodes' interface.

They all have its hardware address, so what a pod sends to another network by way of the node comes in there, and not at
the node's own such device: the reverse-path check of IPv4 must be loose, as for everybody else with such pods.
"""

from . import on_the_wire

KIND = on_the_wire(
    "ipvlan pods, and one of the node",
    "ipvlan mode l2",
    needs="ipvlan",
    settings={"node": {"ipv4/conf/eth0/rp_filter": "2"}},
    rare=True,
)
