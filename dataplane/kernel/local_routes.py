"""Makes addresses this node's own by a route, without binding them to a device.

A socket that sends to an address of a device gets that very address as its own, and loses it with the device. To one
that is local by a route it sends from the source that the route names.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Mapping
from typing import Final

from hybrid_proxy.dataplane.kernel.links import read_routes
from hybrid_proxy.dataplane.kernel.netlink import AF, NLM_F_APPEND, NLM_F_CREATE, ROUTE, Message, Netlink, attribute
from hybrid_proxy.dataplane.table import family_of

# linux/rtnetlink.h
NEW_ROUTE, DELETE_ROUTE = 24, 25
DESTINATION, DEVICE, SOURCE = 1, 4, 7
TABLE_LOCAL, SCOPE_HOST, TYPE_LOCAL = 255, 254, 2
LOOPBACK: Final = struct.pack("=I", 1)  # a device whose last address goes loses its routes; this one keeps 127.0.0.1
PROTOCOL: Final = 72  # who made a route: us; nobody has that number in iproute2's list
_HEADER: Final = struct.Struct("=BBBBBBBBI")


class LocalRoutes:
    """The routes of the network namespace that the calling thread is in now."""

    def __init__(self) -> None:
        self._netlink = Netlink(ROUTE)

    def close(self) -> None:
        """Close the socket; the routes stay."""
        self._netlink.close()

    def held(self) -> dict[str, str]:
        """Returns address -> source of each of our routes."""
        found = {}
        for family in AF.values():
            for route in read_routes(self._netlink, family):
                if (route.table, route.protocol) == (TABLE_LOCAL, PROTOCOL) and SOURCE in route.known:
                    found[route.destination] = socket.inet_ntop(family, route.known[SOURCE])
        return found

    def hold(self, wanted: Mapping[str, str]) -> int:
        """Keep exactly these, address -> source. Returns how many were changed.

        A device that has an address too decides the source of new sockets as long as it does.

        Raises:
            NetlinkFailed: the kernel refused one, for example a source that is not this node's; the others are done.
        """
        held = self.held()
        changes = [(NEW_ROUTE, text, source) for text, source in wanted.items() if held.get(text) != source]
        changes += [(DELETE_ROUTE, text, source) for text, source in held.items() if wanted.get(text) != source]
        ignored = (NEW_ROUTE, errno.EEXIST), (DELETE_ROUTE, errno.ESRCH)
        self._netlink.change([_message(*change) for change in changes], ignored)
        return len(changes)


def _message(kind: int, text: str, source: str) -> Message:
    family = AF[family_of(text)]
    packed = socket.inet_pton(family, text)
    body = _HEADER.pack(family, 8 * len(packed), 0, 0, TABLE_LOCAL, PROTOCOL, SCOPE_HOST, TYPE_LOCAL, 0)
    body += attribute(DESTINATION, packed) + attribute(DEVICE, LOOPBACK)
    body += attribute(SOURCE, socket.inet_pton(family, source))
    flags, verb = (NLM_F_CREATE | NLM_F_APPEND, "adding") if kind == NEW_ROUTE else (0, "removing")
    return Message(kind, body, flags, f"{verb} the local route to {text}")
