"""PURE. Finds what changed between two tables, at the cost of what changed."""

from __future__ import annotations

from hybrid_proxy.dataplane.shards import Shards
from hybrid_proxy.dataplane.table import ServiceTable


def changed_services(old: ServiceTable, new: ServiceTable) -> frozenset[str]:
    """Returns the names of services that differ between the tables or are in one of them only.

    A table that was made from `old` knows the answer. Else unchanged services are recognised by identity, or equality.
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
