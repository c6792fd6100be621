"""GRE: packets have no Ethernet header."""

from . import Kind, tunnel

KIND = Kind("GRE", tunnel("gre7", "type gre local {ip} remote {peer}", mtu=1476), needs="GRE", overlay=True, rare=True)
