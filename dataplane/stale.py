"""PURE. Which conntrack entries of datagrams lead to where nothing serves any more.

A UDP client that keeps its port keeps its conntrack entry, and with it the backend that was chosen once; an entry
that began while a service had no rules keeps going nowhere. kube-proxy's rules (since v1.32) decide by the entry's
original destination and by the source that its answers would have:

- only UDP, and only addresses of the services that are asked about: ClusterIP, external and load-balancer IPs with
  the service's port, node ports at the node's addresses for them;
- an entry is stale when its answers would not come from an endpoint that *serves* that port: another port of the
  same pod is stale, a terminating endpoint that serves is not, nor is one that a policy or a hint leaves out;
- a service port without any serving endpoint is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from hybrid_proxy.dataplane.table import Entry, Frontend, Protocol, ServiceTable, family_of

Socket = tuple[str, int]  # address and port


class Judge:
    """The rules for some services of one table.

    Args:
        table: as it was just programmed.
        names: the services whose endpoints or addresses changed; all of them at the first sync.
        relays: asked once, and only if an entry is about to go: where a relay of ours on this node takes datagrams;
            answers from there are no sign of age.
    """

    def __init__(
        self, table: ServiceTable, names: Iterable[str], relays: Callable[[], Collection[Socket]] = tuple
    ) -> None:
        self._find_relays = relays
        self._relays: Collection[Socket] | None = None
        self._serving: dict[int, frozenset[Socket]] = {}  # by identity of the entry, made when it is first needed
        self._at: dict[Socket, Entry] = {}
        for entry in _datagram_entries(table, names):
            for frontend in entry.frontends:
                for address in _addresses(frontend, entry.family, table):
                    self._at.setdefault((address, frontend.port), entry)

    @property
    def destinations(self) -> Collection[Socket]:
        """The original destinations that entries are judged at; others are none of our business."""
        return self._at.keys()

    def stale(self, destination: Socket, answerer: Socket) -> bool:
        """Whether an entry that went to `destination`, and whose answers come from `answerer`, must go."""
        entry = self._at.get(destination)
        if entry is None:
            return False
        serving = self._serving.get(id(entry))
        if serving is None:
            serving = self._serving[id(entry)] = frozenset((b.address, b.port) for b in entry.serving)
        return answerer not in serving and not self._is_relay(answerer)

    def _is_relay(self, answerer: Socket) -> bool:
        if self._relays is None:
            self._relays = self._find_relays()
        return answerer in self._relays


class Gone(NamedTuple):
    """An endpoint that was removed from a service port whose connections to it are to be reset."""

    entry: Entry  # as it is now
    address: str
    port: int


def gone_endpoints(before: ServiceTable, after: ServiceTable, names: Iterable[str]) -> list[Gone]:
    """Those of these services between two tables. A service that is gone leaves connections alone, as it always did."""
    found = []
    for name in names if before.services else ():
        known = {entry.key: entry for entry in before.services.get(name, ())}
        for entry in after.services.get(name, ()):
            old = known.get(entry.key)
            if entry.present is None or old is None or old.present is None or old.present is entry.present:
                continue
            found += [Gone(entry, *place) for place in old.present if place not in {*entry.present}]
    return found


def _datagram_entries(table: ServiceTable, names: Iterable[str]) -> Iterator[Entry]:
    for name in names:
        for entry in table.services.get(name, ()):
            if entry.protocol is Protocol.UDP and entry.serving:
                yield entry


def _addresses(frontend: Frontend, family: int, table: ServiceTable) -> Iterator[str]:
    if frontend.address is not None:
        yield frontend.address
        return
    for address in (*table.node.node_port_addresses, *table.node.loopback):
        if family_of(address) == family:
            yield address
