"""IP in IP, as calico makes it; IPv4 alone."""

from . import V4, Kind, tunnel

KIND = Kind(
    "IPIP (calico)",
    tunnel("tunl7", "type ipip local {ip} remote {peer}", mtu=1480, families=(V4,)),
    needs="IPIP",
    families=(V4,),
    overlay=True,
)
