"""Compares the maps of Services with what was written, and writes again what another program removed or changed.

Slot ranges and the prefilter are compared every time, other rows by slices of service ports: if many differ, all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from hybrid_proxy.dataplane.kernel.repairs import Pins
from hybrid_proxy.dataplane.modes.ebpf.services.plan import Batch
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store

ROUND: Final = 512  # slices, one a second
LEAST: Final = 32  # service ports of a slice
MANY: Final = 4  # messages


class Audit:
    """The audit of a store, in the thread that changes it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._at = 0  # where the slice begins
        self._wrong: list[int] = []  # where slices begin that others changed

    def damage(self, pins: Pins) -> list[str]:
        """Returns a message for each service port and frontend with rows that are not as they were written."""
        if self._store.unwritten or self._store.late:
            return []
        found = self._compare([self._at])
        return found if len(found) <= MANY else self._compare(range(0, len(self._store.plan.by_id), self._step()))

    def advance(self) -> None:
        """Go on to the next slice, unless this one is still to be repaired."""
        if not self._wrong:
            self._at += self._step()
            self._at *= self._at < len(self._store.plan.by_id)

    def repair(self, pins: Pins) -> None:
        """Write again what differs."""
        for start in self._wrong:
            self._store.writer.write(self._slice(start))
        self._store.writer.restore()

    def _step(self) -> int:
        return max(LEAST, len(self._store.plan.by_id) // ROUND)

    def _slice(self, start: int) -> Batch:
        plan = self._store.plan
        batch = plan.rows_of(islice(plan.by_id, start, start + self._step()))
        batch.frontends |= self._store.node_ports_at
        return batch

    def _compare(self, starts: Iterable[int]) -> list[str]:
        found, self._wrong = dict.fromkeys(self._store.writer.lost(self._store.plan.pools.services.end)), []
        for start in starts:
            wrong = [*self._store.writer.differing(self._slice(start))]
            for name, owner in wrong:
                known = owner if isinstance(owner, str) else self._store.plan.by_id[owner].entry.name
                found[f"map {name} lacks rows of {known}"] = None
            self._wrong += [start] if wrong else []
        return list(found)
