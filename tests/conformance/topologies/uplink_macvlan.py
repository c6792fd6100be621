"""A node whose addresses are on a macvlan over a veth."""

from . import Kind, moved

_MACVLAN = "link add mv0 link eth0 type macvlan mode bridge\n"
KIND = Kind(
    "an uplink that is a macvlan over a veth", {"node": f"{_MACVLAN}{moved('node', 'mv0')}"}, needs="macvlan", rare=True
)
