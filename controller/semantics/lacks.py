"""PURE. Finds service ports that have no backend on this node, for all clients or for some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

from hybrid_proxy.dataplane.diff import changed_services
from hybrid_proxy.dataplane.reports import PacketEvent
from hybrid_proxy.dataplane.table import EMPTY, Entry, Kind, ServiceTable

Clients = Literal["all", "outside", "inside"]


class Lack(msgspec.Struct, frozen=True, gc=False):
    """A service port that has no backend on this node.

    Attributes:
        service: `namespace/name:port`.
        family: 4 or 6.
        clients: The clients without a backend: `all`, those `outside` the cluster, or those `inside`, at the ClusterIP.
        why: A message.
    """

    service: str
    family: int
    clients: Clients
    why: str


def lacks(entries: Iterable[Entry]) -> Iterator[Lack]:
    """Returns the lacks of a service table."""
    for entry in entries:
        for backend_set in entry.backend_sets:
            if not backend_set.backends:
                yield from _lack(entry)
                break


class KnownLacks:
    """The lacks of the newest table, found at the cost of what changed since the table before."""

    def __init__(self) -> None:
        self._table = EMPTY
        self._lacks: dict[str, list[Lack]] = {}  # by service
        self._listed: list[Lack] = []

    def of(self, table: ServiceTable) -> list[Lack]:
        """Returns the lacks of this table, in the order of services: the same object for the same table."""
        if table is self._table:
            return self._listed
        for name in changed_services(self._table, table):
            self._lacks[name] = list(lacks(table.services.get(name, ())))
            if not self._lacks[name]:
                del self._lacks[name]
        self._table = table
        self._listed = [lack for name in sorted(self._lacks) for lack in self._lacks[name]]
        return self._listed


def _lack(entry: Entry) -> Iterator[Lack]:
    if not any(each.backends for each in entry.backend_sets):
        yield Lack(entry.name, entry.family, "all", entry.backend_sets[0].why)
        return
    for frontend in entry.frontends:
        inside = frontend.kind is Kind.CLUSTER_IP
        backend_set = entry.backend_sets[frontend.internal if inside else frontend.external]
        if not backend_set.backends:
            yield Lack(entry.name, entry.family, "inside" if inside else "outside", backend_set.why)
            return


def with_policy(event: PacketEvent, known: Callable[[], Iterable[Lack]]) -> PacketEvent:
    """Returns the event with its policy: programs know that one is Local, the table knows which."""
    if event.reason != "drop_empty":
        return event
    family = 6 if event.destination.startswith("[") else 4
    whys = (each.why for each in known() if (each.service, each.family) == (event.service, family))
    why = next(whys, "")
    return msgspec.structs.replace(event, message=why) if "Local" in why else event
