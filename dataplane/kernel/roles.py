"""Tells the role of an interface by addresses and routes, not by its kind: pods, hosts, or neither are behind it.

The node's address may be on a bridge, a bond, a VLAN or a macvlan. The interface below transmits its packets and is no
pod's, though it may be a veth whose other end is elsewhere, as in kind and LXC. Pods may be at the same bridge, which
has learnt behind which of its ports the default gateway is.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

from hybrid_proxy.dataplane.kernel import links
from hybrid_proxy.dataplane.kernel.netlink import AF, NLM_F_DUMP, ROUTE, Message, Netlink, attributes

ON_ANOTHER: Final = frozenset({"vlan", "macvlan", "macvtap", "ipvlan", "ipvtap"})  # kinds that name the one below
GROUPS: Final = frozenset({"bond", "team"})  # kinds whose ports all lead to the same place
# Ports of a bridge that lead to a pod, to nobody, or to a machine here.
NEVER_OUT: Final = links.POD_KINDS | {"dummy", "tun"}
GET_NEIGHBOUR, NDA_DST, NDA_LLADDR = 30, 1, 2  # linux/rtnetlink.h, linux/neighbour.h
NUD_INCOMPLETE, NUD_FAILED, NUD_PERMANENT = 0x01, 0x20, 0x80
UNANSWERED: Final = (NUD_INCOMPLETE, NUD_FAILED)
_NEIGHBOUR: Final = struct.Struct("=BxxxiHBB")  # family, interface, state, flags, type

WaysOut = Callable[[int], Collection[int]]  # a bridge -> its ports behind which the default gateways are


def ports_of_gateways(bridge: int) -> frozenset[int]:
    """Returns the ports of a bridge behind which the default gateways are; none where the kernel does not know."""
    with Netlink(ROUTE) as wire:
        gateways = {
            route.known.get(links.RTA_GATEWAY) or route.known.get(links.RTA_VIA, b"")[2:]
            for family in AF.values()
            for route in links.read_routes(wire, family)
            if not route.length and int.from_bytes(route.known.get(links.RTA_OIF, b""), sys.byteorder) == bridge
        }
    return ports_towards(bridge, gateways)


def ports_towards(bridge: int, addresses: Collection[bytes]) -> frozenset[int]:
    """Returns the ports of a bridge behind which these IP addresses are; none where the kernel does not know."""
    with Netlink(ROUTE) as wire:
        learnt = {
            known[NDA_LLADDR]
            for family in AF.values()
            for index, _, known in _neighbours(wire, family)
            if index == bridge and known.get(NDA_DST) in addresses and NDA_LLADDR in known
        }
        return frozenset(
            index for index, _, known in _neighbours(wire, socket.AF_BRIDGE) if known.get(NDA_LLADDR) in learnt
        ) - {bridge}


def neighbours() -> dict[tuple[int, str], tuple[bytes, int]]:
    """Returns interface and address of each neighbour -> hardware address, empty if it is not known, and state."""
    with Netlink(ROUTE) as wire:
        return {
            (index, socket.inet_ntop(family, known[NDA_DST])): (known.get(NDA_LLADDR, b""), state)
            for family in AF.values()
            for index, state, known in _neighbours(wire, family)
        }


def _neighbours(wire: Netlink, family: int) -> Iterator[tuple[int, int, dict[int, bytes]]]:
    """Yields neighbours of a family or, of AF_BRIDGE, learnt addresses: interface or port, state, and the rest."""
    request = _NEIGHBOUR.pack(family, 0, 0, 0, 0)
    for answer in wire.dump(Message(GET_NEIGHBOUR, request, NLM_F_DUMP, "reading neighbours")):
        yield *_NEIGHBOUR.unpack_from(answer)[1:3], dict(attributes(answer, _NEIGHBOUR.size))


def carriers(interfaces: Collection[links.Interface], uplinks: Iterable[int], ways_out: WaysOut) -> set[int]:
    """Returns the indexes of the interfaces below uplinks."""
    known = {interface.index: interface for interface in interfaces}
    found: set[int] = set()
    above = list(uplinks)
    while above:
        below = _below(known[above.pop()], known, ways_out) - found
        found |= below
        above += below
    return found


def _below(upper: links.Interface, known: Mapping[int, links.Interface], ways_out: WaysOut) -> set[int]:
    if upper.kind in ON_ANOTHER and not upper.peer_elsewhere:
        return {upper.lower} & known.keys()
    ports = {index for index, each in known.items() if each.master == upper.index}
    if upper.kind != "bridge":
        return ports if upper.kind in GROUPS else set()
    ends = {index for index in ports if known[index].kind in links.POD_KINDS and known[index].peer_elsewhere}
    others = {index for index in ports if known[index].kind not in NEVER_OUT}
    if not ends or any(known[index].kind in links.DEVICE_KINDS for index in others):
        return others
    if len(ends) == 1 and not others:
        return ends
    # A bridge has the address of its first port, as long as no other's is lower.
    return others | (ends & set(ways_out(upper.index)) or {i for i in ends if known[i].mac == upper.mac})


class Roles:
    """Tells pods' interfaces and uplinks; patterns of names replace what is detected.

    An uplink stays one while its address or its route is missing, or is about to move to its bridge.
    """

    def __init__(self, pods: tuple[str, ...], uplinks: tuple[str, ...], ways_out: WaysOut = ports_of_gateways) -> None:
        self._pods, self._uplinks, self._read_ways_out = pods, uplinks, ways_out
        self._ways: dict[int, Collection[int]] = {}  # of each bridge, as they were known last
        self._led_out: dict[int, str] = {}  # index -> kind: another interface may get the index
        self.ports: list[links.Interface] = []  # of bridges that are uplinks: those that lead out
        self.uncertain = False  # a bridge has not learnt yet which of its ports leads out

    def look(
        self, interfaces: Collection[links.Interface], primary: Iterable[str]
    ) -> tuple[list[links.Interface], list[links.Interface]]:
        """Returns pods' interfaces and uplinks of a node with these primary addresses."""
        primary, self.uncertain = tuple(primary), False
        uplinks = {each.index for each in interfaces if links.is_uplink(each, self._uplinks, primary)}
        bridges = {each.index for each in interfaces if each.kind == "bridge"}
        below = carriers(interfaces, uplinks, self._ways_out)
        led_out = {each.index for each in interfaces if self._led_out.get(each.index) == each.kind}
        if not self._uplinks:
            uplinks |= led_out - below
        self.ports = [each for each in interfaces if each.index in below - uplinks and each.master in bridges & uplinks]
        self._led_out = {each.index: each.kind for each in interfaces if each.index in uplinks | below}
        return [
            each
            for each in interfaces
            if links.is_pod(each, self._pods, self._uplinks, primary)
            and (self._pods or each.index not in self._led_out)
        ], [each for each in interfaces if each.index in uplinks]

    def _ways_out(self, bridge: int) -> Collection[int]:
        if found := self._read_ways_out(bridge):
            self._ways[bridge] = found
        ways = self._ways.get(bridge, ()) or self._led_out.keys()
        self.uncertain = self.uncertain or not ways
        return ways
