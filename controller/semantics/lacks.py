"""PURE. Finds service ports that have no backend on this node, for all clients or for some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

from hybrid_proxy.dataplane.diff import Follower
from hybrid_proxy.dataplane.reports import PacketEvent
from hybrid_proxy.dataplane.table import BackendSet, Entry, Kind, ServiceTable, WhenEmpty

Clients = Literal["all", "outside", "inside"]


class Lack(msgspec.Struct, frozen=True, gc=False):
    """A service port that has no backend on this node.

    Attributes:
        service: `namespace/name:port`.
        family: 4 or 6.
        clients: The clients without a backend: `all`, those `outside` the cluster, or those `inside`, at the ClusterIP.
        why: A message.
        drops: Their packets are dropped, not rejected.
    """

    service: str
    family: int
    clients: Clients
    why: str
    drops: bool = False


def lacks(entries: Iterable[Entry]) -> Iterator[Lack]:
    """Returns the lacks of a service table."""
    for entry in entries:
        if all(each.backends for each in entry.backend_sets):
            continue
        for clients, those in _by_clients(entry):
            if not those.backends:
                yield Lack(entry.name, entry.family, clients, those.why, drops=those.when_empty is WhenEmpty.DROP)
                break


def _by_clients(entry: Entry) -> Iterator[tuple[Clients, BackendSet]]:
    if not any(each.backends for each in entry.backend_sets):
        yield "all", entry.backend_sets[0]
    for frontend in entry.frontends:
        inside = frontend.kind is Kind.CLUSTER_IP
        yield "inside" if inside else "outside", entry.backend_sets[frontend.internal if inside else frontend.external]


class KnownLacks(Follower):
    """The lacks of the newest table."""

    def __init__(self) -> None:
        self._lacks: dict[str, tuple[bool, str, list[Lack]]] = {}  # by service; first those that had backends before
        self._listed: list[Lack] | None = None  # None: not since the last of these changes

    def _change(self, name: str, before: tuple[Entry, ...], after: tuple[Entry, ...]) -> None:
        known = self._lacks.pop(name, None)
        if found := list(lacks(after)):
            self._lacks[name] = known[0] if known else not before, name, found
        if known or found:
            self._listed = None

    def of(self, table: ServiceTable) -> list[Lack]:
        """Returns the lacks of this table, first of services that had backends: the same object while they last."""
        self.follow(table)
        if self._listed is None:
            self._listed = [lack for *_, found in sorted(self._lacks.values()) for lack in found]
        return self._listed


def with_policy(event: PacketEvent, known: Callable[[], Iterable[Lack]]) -> PacketEvent:
    """Returns the event with its policy: programs know that one is Local, the table knows which."""
    if event.reason != "drop_empty":
        return event
    family = 6 if event.destination.startswith("[") else 4
    whys = (each.why for each in known() if (each.service, each.family) == (event.service, family))
    why = next(whys, "")
    return msgspec.structs.replace(event, message=why) if "Local" in why else event
