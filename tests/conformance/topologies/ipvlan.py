"""Pods that are ipvlan devices on the nodes' interface."""

from . import on_the_wire

KIND = on_the_wire("ipvlan pods, and one of the node", "ipvlan mode l2", needs="ipvlan", rare=True)
