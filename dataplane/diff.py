"""PURE. Finds what changed between two tables, at the cost of what changed."""

from __future__ import annotations

from hybrid_proxy.dataplane.shards import Shards
from hybrid_proxy.dataplane.table import EMPTY, Entry, ServiceTable


def changed_services(old: ServiceTable, new: ServiceTable) -> frozenset[str]:
    """Returns the names of services that differ between the tables or are in one of them only.

    A table that was made from `old` knows the answer. Otherwise unchanged services are recognised by identity, then by
    equality.
    """
    if new is old:
        return frozenset()
    if new.base == old.generation:
        return new.changed
    if isinstance(old.services, Shards) and isinstance(new.services, Shards):
        return old.services.differing(new.services)
    names = {
        name
        for name, entries in new.services.items()
        if (was := old.services.get(name)) is not entries and was != entries
    }
    names.update(name for name in old.services if name not in new.services)
    return frozenset(names)


class Tally:
    """Counts over a table. Whoever follows each table pays for its changes, and never for those of many at once."""

    _table: ServiceTable = EMPTY

    def follow(self, table: ServiceTable) -> None:
        """Count what distinguishes this table from the one before."""
        for name in changed_services(self._table, table):
            self._count(self._table.services.get(name, ()), -1)
            self._count(table.services.get(name, ()), 1)
        self._table = table

    def _count(self, entries: tuple[Entry, ...], sign: int) -> None:
        """Add the service ports of one service, or with a negative sign take them away."""
        raise NotImplementedError
