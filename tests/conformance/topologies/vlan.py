"""A node whose addresses are in a VLAN, as its network's are."""

from . import Kind, moved

_PLACES = ("client", "node", "node2")
_STEPS = {place: f"link add eth0.5 link eth0 type vlan id 5\n{moved(place, 'eth0.5')}" for place in _PLACES}
KIND = Kind("an uplink that is a VLAN", _STEPS, needs="VLAN")
