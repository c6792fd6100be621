"""Geneve, as OVN and antrea use it."""

from . import Kind, tunnel

KIND = Kind(
    "Geneve", tunnel("geneve7", "type geneve id 7 remote {peer}", mtu=1450), needs="Geneve", overlay=True, rare=True
)
