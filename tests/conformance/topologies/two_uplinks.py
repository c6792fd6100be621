"""Each family has an uplink of its own."""

from . import Kind

_PORTS = """
link add to-eth1 type veth peer name eth1 netns {node}
link set to-eth1 master eth0
link set to-eth1 up
"""
_SIX = """
link set eth1 up
addr del fd77::2/64 dev eth0
addr del fd77::22/64 dev eth0
addr add fd77::2/64 dev eth1 nodad
route replace fd77:1:0:2::/64 via fd77::3 dev eth1
route replace default via fd77::1 dev eth1
"""
KIND = Kind("each family by an uplink of its own", {"client": _PORTS, "node": _SIX})
