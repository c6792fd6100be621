"""How pods are joined to their node."""

from . import V6, Kind, bridged, on_the_wire

KINDS = {
    # Behind veth pairs, the other node's by a route: what calico without an overlay and kindnet make.
    "plain": Kind("routed pods", {}),
    # Netfilter sees their packets (flannel and the bridge plugin, with br_netfilter).
    "bridge": bridged("pods at a bridge, bridge-nf-call-iptables 1", filtered=True),
    # It does not: what goes from port to port has no rules.
    "bridge_unfiltered": bridged(
        "pods at a bridge, bridge-nf-call-iptables 0", filtered=False, lost=("nftables", "iptables", "ipvs")
    ),
    "macvlan": on_the_wire("macvlan pods, and one of the node", "macvlan mode bridge", needs="macvlan"),
    # They all have the interface's hardware address, so what a pod sends to another network by way of the node comes in
    # there, and not at the node's own such device: the reverse-path check of IPv4 must be loose.
    "ipvlan": on_the_wire(
        "ipvlan pods, and one of the node", "ipvlan mode l2", needs="ipvlan",
        settings={"node": {"ipv4/conf/eth0/rp_filter": "2"}}, rare=True,
    ),
    "ipv6_only": Kind(
        "IPv6 alone",
        {"node": "addr flush dev eth0 scope global\naddr add fd77::2/64 dev eth0 nodad\n"
                 "route replace fd77:1:0:2::/64 via fd77::3\nroute replace default via fd77::1"},
        families=(V6,),
    ),
}  # fmt: skip
