"""Tunnels between two nodes that the kernel makes of one line each."""

from __future__ import annotations

from . import V4, V6, Kind, tunnel


def _kind(
    words: str, name: str, device: str, *, mtu: int, rare: bool = True, families: tuple[int, ...] = (V4, V6)
) -> Kind:
    needs = words.partition(" ")[0]
    return Kind(words, tunnel(name, device, mtu=mtu, families=families), needs, families, overlay=True, rare=rare)


KINDS = {
    "geneve": _kind("Geneve", "geneve7", "type geneve id 7 remote {peer}", mtu=1450),  # OVN and antrea use it
    "gre": _kind("GRE", "gre7", "type gre local {ip} remote {peer}", mtu=1476),  # without an Ethernet header
    "ipip": _kind(
        "IPIP (calico)", "tunl7", "type ipip local {ip} remote {peer}", mtu=1480, rare=False, families=(V4,)
    ),
    # It learns where the other end's stations are.
    "vxlan": _kind(
        "VXLAN", "vxlan7", "type vxlan id 7 dstport 4789 local {ip} remote {peer} dev eth0", mtu=1450
    ),
}  # fmt: skip
