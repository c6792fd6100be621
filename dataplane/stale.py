"""PURE. Finds conntrack entries that lead to backends which no longer serve, or nowhere.

A UDP client that keeps its port keeps its conntrack entry, and with it the backend that was chosen once. An entry that
began while a service had no rules keeps going nowhere. The rules are those of kube-proxy's reconciler (v1.32,
kubernetes #139629 and #141371): they compare an entry's original destination, and the source of its answers.

- Judged are only entries to frontends of the given services: ClusterIP, external and load-balancer IPs
  with the service's port, node ports at the node's addresses for them.
- A UDP entry is stale when its answers would not come from an endpoint that *serves* that port: another port of the
  same pod is stale, a terminating endpoint that serves is not, nor is one that a policy or a hint leaves out. Without
  any serving endpoint all are stale.
- At a removed frontend, every translated UDP entry is stale: the backend's address may be another pod's by then. Not
  if the service has moved to another proxy: its flows stay where they began.
- A connection to a new frontend is stale while it is neither answered nor translated: its SYN arrived
  while there was no rule, and a repeated SYN would meet no rule either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from hybrid_proxy.dataplane.table import Entry, Protocol, ServiceTable, family_of

Socket = tuple[str, int]  # address and port
Place = tuple[str, int, int]  # address, port, protocol number
FrontendKey = tuple[str | None, int, int]  # address (None: a node port, at any address), port, protocol number


class Judge:
    """The rules for datagrams of some services, between two tables.

    Args:
        relays: called once, and only if an entry is about to be deleted: the places of our relay on this node that
            receive datagrams; answers from there are no sign of age.
        former: frontends that a former process had programmed.
    """

    def __init__(
        self,
        before: ServiceTable,
        after: ServiceTable,
        names: Collection[str],
        relays: Callable[[], Collection[Socket]] = tuple,
        former: Iterable[FrontendKey] = (),
    ) -> None:
        self._find_relays = relays
        self._relays: Collection[Socket] | None = None
        self._serving: dict[int, frozenset[Socket]] = {}  # by identity of the entry, made when it is first needed
        self._at: dict[Socket, Entry | None] = {  # None: a removed frontend
            place[:2]: entry for place, entry in _places(after, names) if entry.protocol is Protocol.UDP
        }
        moved = {entry.key for entry in after.entries(names) if not entry.frontends}
        gone = [place for place, entry in _places(before, names) if entry.key not in moved]
        gone += [(at, port, protocol) for key, port, protocol in former for at in _addresses(key, after)]
        for address, port, protocol in gone:
            if protocol == Protocol.UDP:
                self._at.setdefault((address, port), None)

    @property
    def destinations(self) -> Collection[Socket]:
        """The original destinations whose entries are judged; all others are ignored."""
        return self._at.keys()

    def stale(self, destination: Socket, answerer: Socket) -> bool:
        """True if an entry that went to `destination`, and whose answers come from `answerer`, must be deleted."""
        if destination not in self._at:
            return False
        entry = self._at[destination]
        if entry is None:
            return answerer != destination
        serving = self._serving.get(id(entry))
        if serving is None:
            serving = self._serving[id(entry)] = frozenset((b.address, b.port) for b in entry.serving)
        if answerer in serving:
            return False
        if self._relays is None:
            self._relays = self._find_relays()
        return answerer not in self._relays


def new_places(before: ServiceTable, after: ServiceTable, names: Collection[str]) -> set[Place]:
    """Returns the frontends at which connections and associations find these services now, and did not before."""
    return {place for place, _ in _places(after, names) if place[2] != Protocol.UDP} - {
        place for place, _ in _places(before, names)
    }


class Gone(NamedTuple):
    """An endpoint that was removed from a service port whose connections to it are to be reset."""

    entry: Entry  # as it is now
    address: str
    port: int


def gone_endpoints(before: ServiceTable, after: ServiceTable, names: Iterable[str]) -> list[Gone]:
    """Returns the removed endpoints of these services between two tables. A removed service resets nothing."""
    found = []
    for name in names if before.services else ():
        known = {entry.key: entry for entry in before.services.get(name, ())}
        for entry in after.services.get(name, ()):
            old = known.get(entry.key)
            found += [] if old is None else removed_endpoints(old, entry)
    return found


def removed_endpoints(old: Entry, entry: Entry) -> list[Gone]:
    """Returns the removed endpoints of one service port; none if it does not ask for resets."""
    if entry.present is None or old.present is None or old.present is entry.present:
        return []
    return [Gone(entry, *place) for place in old.present if place not in {*entry.present}]


def _places(table: ServiceTable, names: Iterable[str]) -> Iterator[tuple[Place, Entry]]:
    for entry in table.entries(names):
        for frontend in entry.frontends:
            for address in _addresses(frontend.address, table, entry.family):
                yield (address, frontend.port, int(entry.protocol)), entry


def _addresses(address: str | None, table: ServiceTable, family: int | None = None) -> Iterator[str]:
    """Returns the addresses of a frontend: `address`, or for node ports those of the node (family None: both)."""
    if address is not None:
        yield address
        return
    for own in (*table.node.node_port_addresses, *table.node.loopback):
        if family is None or family_of(own) == family:
            yield own
