"""VXLAN between two nodes, which learns where the other end's stations are."""

from . import Kind, tunnel

KIND = Kind(
    "VXLAN",
    tunnel("vxlan7", "type vxlan id 7 dstport 4789 local {ip} remote {peer} dev eth0", mtu=1450),
    needs="VXLAN",
    overlay=True,
    rare=True,
)
