"""A node whose uplink is a bond of two links."""

from . import Kind, moved

_PORTS = """
link add to-bond type veth peer name eth1 netns {node}
link set to-bond master eth0
link set to-bond up
"""
_BOND = """
link add bond0 type bond mode active-backup miimon 100
link set eth0 down
link set eth0 master bond0
link set eth1 down
link set eth1 master bond0
"""
KIND = Kind(
    "an uplink that is a bond",
    {"client": _PORTS, "node": f"{_BOND}{moved('node', 'bond0')}"},
    needs="bond",
)
