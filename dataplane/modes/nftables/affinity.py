"""PURE. Reads and writes session affinity: elements of the maps of clients, as values that all modes know."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from hybrid_proxy.dataplane.modes.nftables.lower import Number, number_name
from hybrid_proxy.dataplane.modes.nftables.plan import Numbers
from hybrid_proxy.dataplane.modes.nftables.tables import clients_set
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables import ruleset
from hybrid_proxy.dataplane.nftables.schema import Element, Key, Value
from hybrid_proxy.dataplane.table import Entry, Remembered

Contents = Mapping[str, Mapping[Key, tuple[Value, str]]]  # of the maps of clients


def sets_of(entries: Iterable[Entry]) -> set[str]:
    """Returns the names of the maps that hold the clients of these service ports."""
    return {clients_set(entry.affinity_seconds).name for entry in entries}


def remembered(entries: Collection[Entry], held: Contents) -> list[Remembered]:
    """Returns the clients that the maps hold for these service ports."""
    numbers = Numbers()
    ports = {numbers(number_name(entry)): entry for entry in entries}
    ends = {number: socket for entry in entries for socket, number in _numbers(entry, numbers).items()}
    return [
        Remembered(ports[port].key, str(client), *ends[backend])
        for clients in held.values()
        for (client, port), (backend, _) in clients.items()
        if port in ports and backend in ends
    ]


def additions(
    entries: Collection[Entry], clients: Collection[Remembered], held: Contents, number: Number
) -> Iterator[op.Operation]:
    """Returns elements for clients that the maps do not hold yet."""
    ports = {entry.key: (entry, _numbers(entry, number)) for entry in entries}
    made: dict[tuple[str, Key], Element] = {}
    for one in clients:
        if one.entry not in ports:
            continue
        entry, ends = ports[one.entry]
        name, key = clients_set(entry.affinity_seconds).name, (one.client, number(number_name(entry)))
        end = ends.get((one.backend, one.port))
        if end is not None and key not in held.get(name, {}):
            made.setdefault((name, key), Element(name, key, end))
    return ruleset.additions(made.values())


def _numbers(entry: Entry, number: Number) -> dict[tuple[str, int], int]:
    """The number of each backend in a set."""
    backends = {backend for chosen in entry.backend_sets for backend in chosen.backends}
    return {(backend.address, backend.port): number(number_name(entry, backend)) for backend in backends}
