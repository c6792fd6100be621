"""Pods that are macvlan devices on the nodes' interface."""

from . import on_the_wire

KIND = on_the_wire("macvlan pods, and one of the node", "macvlan mode bridge", needs="macvlan")
