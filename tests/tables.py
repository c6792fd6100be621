"""Entries of the service table, written with each frontend next to the backend sets that it leads to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, Frontend, Kind, Masquerade, Protocol


class Front(msgspec.Struct, frozen=True):
    """A `Frontend` that holds its backend sets; in an entry there are their indexes."""

    kind: Kind
    address: str | None
    port: int
    internal: BackendSet
    external: BackendSet
    masquerade: Masquerade = Masquerade.NEVER
    source_ranges: tuple[str, ...] | None = None


def entry_of(
    name: str,
    family: int,
    protocol: Protocol,
    fronts: Iterable[Front],
    serving: tuple[Backend, ...] = (),
    affinity_seconds: int = 0,
    **fields: Any,
) -> Entry:
    """An entry with these frontends, which share backend sets that are equal."""
    sets: list[BackendSet] = []
    frontends = []
    for front in fronts:
        for one in (front.internal, front.external):
            if one not in sets:
                sets.append(one)
        indexes = sets.index(front.internal), sets.index(front.external)
        frontends.append(
            Frontend(front.kind, front.address, front.port, *indexes, front.masquerade, front.source_ranges)
        )
    return Entry(name, family, protocol, tuple(frontends), tuple(sets), serving, affinity_seconds, **fields)


def fronts_of(entry: Entry) -> tuple[Front, ...]:
    """The frontends of an entry, each with its backend sets."""
    sets = entry.backend_sets
    return tuple(
        Front(f.kind, f.address, f.port, sets[f.internal], sets[f.external], f.masquerade, f.source_ranges)
        for f in entry.frontends
    )


def with_fronts(entry: Entry, *fronts: Front, **fields: Any) -> Entry:
    """The entry with these frontends instead of its own."""
    made = entry_of(entry.name, entry.family, entry.protocol, fronts)
    return msgspec.structs.replace(entry, frontends=made.frontends, backend_sets=made.backend_sets, **fields)
