"""PURE. Finds what changed between two tables, at the cost of what changed."""

from __future__ import annotations

from abc import ABC, abstractmethod

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


class Follower(ABC):
    """Follows one table after the other, each at the cost of what changed since the one before."""

    _table: ServiceTable = EMPTY

    def follow(self, table: ServiceTable) -> None:
        """Take in what distinguishes this table from the one before."""
        for name in changed_services(self._table, table):
            self._change(name, self._table.services.get(name, ()), table.services.get(name, ()))
        self._table = table

    def keep_up(self, table: ServiceTable) -> None:
        """Follow, once somebody has asked: each change by itself, and not those of many seconds at once.

        The first table waits until somebody asks: to serve comes first.
        """
        if self._table is not EMPTY:
            self.follow(table)

    @abstractmethod
    def _change(self, name: str, before: tuple[Entry, ...], after: tuple[Entry, ...]) -> None:
        """Take in one service that differs; it has no service ports before it comes and after it goes."""
