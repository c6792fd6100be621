"""A cluster without IPv4."""

from . import V6, Kind

KIND = Kind(
    "IPv6 alone",
    {"node": "addr flush dev eth0 scope global\naddr add fd77::2/64 dev eth0 nodad\n"
             "route replace fd77:1:0:2::/64 via fd77::3\nroute replace default via fd77::1"},
    families=(V6,),
)  # fmt: skip
