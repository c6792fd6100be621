"""Reads the open flows of IPVS while the mode drains.

IPVS remembers a conversation of datagrams longer than conntrack does. When conntrack has forgotten it, its next
datagram begins another one in the mode that serves: it is over then.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

from hybrid_proxy.dataplane.kernel.conntrack import unpacked
from hybrid_proxy.dataplane.kernel.netlink import AF
from hybrid_proxy.dataplane.modes.ipvs.plan import Actual
from hybrid_proxy.dataplane.modes.ipvs.writer import Kernel
from hybrid_proxy.dataplane.stale import Judge
from hybrid_proxy.dataplane.table import NodeNetwork, Protocol, family_of
from hybrid_proxy.dataplane.virtual_servers import Connection, Server

READINGS: Final = 2  # in one alone the kernel may leave out a flow


class Flows:
    """The flows of our virtual servers. Safe for any thread."""

    def __init__(self, kernel: Kernel, actual: Actual) -> None:
        self._kernel, self._actual = kernel, actual
        self._addresses: deque[frozenset[str]] = deque(maxlen=READINGS)

    def read(self) -> list[Connection]:
        """Read all of them, also those that are over.

        Raises:
            OSError: the kernel does not list them.
        """
        ours = {_packed(server): server.address for server in list(self._actual.servers) if server.address}
        found, addresses = [], set()
        for each in self._kernel.connections():
            if (address := ours.get((each.family, each.protocol, each.address, each.port))) is not None:
                found.append(each)
                addresses.add(address)
        self._addresses.append(frozenset(addresses))
        return found

    @property
    def addresses(self) -> frozenset[str]:
        """The addresses that the flows of the last readings lead to."""
        return frozenset().union(*self._addresses)

    def count(self) -> Counter[str]:
        """Count the flows that are not over, by the name of their protocol.

        Raises:
            DataplaneError, OSError: they, or conntrack, cannot be read.
        """
        going_on = self._going_on() or self._going_on()
        tracked = self._kernel.entries_of(each for each in going_on if each.protocol != Protocol.TCP)
        counted = (each for each in going_on if each.protocol == Protocol.TCP or each in tracked)
        return Counter(Protocol(each.protocol).name for each in counted)

    def _going_on(self) -> list[Connection]:
        return [each for each in self.read() if not each.is_over]

    def forget(self) -> None:
        """Delete the conntrack entries of all flows: their next packets begin flows of the mode that serves.

        Raises:
            DataplaneError, OSError: some stay.
        """
        self._forget(self.read())

    def forget_stale(self, judge: Judge) -> Counter[int]:
        """Delete the conntrack entries of datagrams to backends that no longer serve. Returns how many, by family.

        Raises: as `forget`.
        """
        if not judge.destinations:
            return Counter()
        return self._forget(
            each
            for each in self.read()
            if each.protocol == Protocol.UDP
            and judge.stale(unpacked(each.address, each.port), unpacked(each.backend, each.backend_port))
        )

    def _forget(self, chosen: Iterable[Connection]) -> Counter[int]:
        entries: dict[int, list[bytes]] = {}
        for each, entry in self._kernel.entries_of(chosen).items():
            entries.setdefault(each.family, []).append(entry)
        return Counter({family: self._kernel.delete_entries(found) for family, found in entries.items()})


def sources(addresses: Iterable[str], node: NodeNetwork) -> dict[str, str]:
    """Returns, for each address, the source that a socket of this node sends from to it, if its family has one.

    That is the primary address if the node has it: a Node object may name one that is elsewhere.
    """
    candidates = [*(text for text in node.primary if text in node.addresses), *node.addresses]
    chosen = {family: next((text for text in candidates if family_of(text) == family), "") for family in AF}
    return {text: source for text in addresses if (source := chosen[family_of(text)])}


def _packed(server: Server) -> tuple[int, int, bytes, bytes]:
    """As a connection has it."""
    address = socket.inet_pton(AF[server.family], server.address)
    return server.family, server.protocol, address, server.port.to_bytes(2, "big")
