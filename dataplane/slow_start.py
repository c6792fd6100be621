"""PURE. Slow start: a new backend gets its whole share of new connections in steps, over as long as its Service says.

A backend is new if its service port did not have it in the former table: an endpoint that became ready, whose weight
was 0, or whose ejection is over. All backends of the first table, and of a new service port, are equally old. So
nothing starts slowly after a restart of the agent.

The share grows by a tenth of the weight at a time, so that a mode changes ten times at most for each backend. It begins
with a tenth, as Envoy's `slow_start_config` does by default (`min_weight_percent` 10, `aggression` 1: linear).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, EntryKey, ServiceTable

STEPS: Final = 10

Socket = tuple[str, int]  # address and port of a backend
Parts = Mapping[Socket, int]  # of backends that start slowly: tenths of their weight
NO_PARTS: Final[Parts] = {}


class SlowStart:
    """Tracks the backends that start slowly. Times are seconds of one clock that the caller chooses."""

    def __init__(self) -> None:
        self._lengths: dict[EntryKey, float] = {}  # of the service ports that ask for it
        self._begun: dict[EntryKey, dict[Socket, float]] = {}

    def __len__(self) -> int:
        """Returns how many backends did not have their whole share at the last call of `parts`."""
        return sum(map(len, self._begun.values()))

    def follow(
        self, now: float, before: ServiceTable, after: ServiceTable, names: Iterable[str]
    ) -> Mapping[EntryKey, Parts]:
        """Apply the next table, in which these services differ; returns `parts`. A second call changes nothing."""
        for name in names:
            old, new = before.services.get(name, ()), after.services.get(name, ())
            if any(entry.slow_start for entry in (*old, *new)):
                self._follow(now, {entry.key: entry for entry in old}, {entry.key: entry for entry in new})
        return self.parts(now) if self._begun else {}

    def _follow(self, now: float, old: Mapping[EntryKey, Entry], new: Mapping[EntryKey, Entry]) -> None:
        for key in {*old, *new}:
            entry, former = new.get(key), old.get(key)
            if entry is None or not entry.slow_start:
                self._lengths.pop(key, None)
                self._begun.pop(key, None)
                continue
            self._lengths[key] = entry.slow_start
            known = self._begun.get(key, {})
            sockets, had = _in_use(entry), _in_use(entry if former is None else former)
            begun = {one: known.get(one, now) for one in sockets if one in known or one not in had}
            if begun:
                self._begun[key] = begun
            else:
                self._begun.pop(key, None)

    def begin(self, now: float, key: EntryKey, socket: Socket) -> None:
        """Start a backend that gets connections again; does nothing if no backend of that port starts slowly."""
        if key in self._lengths:
            self._begun.setdefault(key, {})[socket] = now

    def parts(self, now: float) -> dict[EntryKey, Parts]:
        """Returns the present shares of all backends that do not have their whole share, by service port."""
        found: dict[EntryKey, Parts] = {}
        for key, begun in list(self._begun.items()):
            length = self._lengths[key]
            for socket in [socket for socket, at in begun.items() if part_at(now - at, length) == STEPS]:
                del begun[socket]
            if begun:
                found[key] = {socket: part_at(now - at, length) for socket, at in begun.items()}
            else:
                del self._begun[key]
        return found


def part_at(passed: float, length: float) -> int:
    """Returns the tenths of its weight that a backend has so many seconds after its beginning."""
    return max(1, min(STEPS, 1 + int(STEPS * passed / length)))


def slowed(entry: Entry, parts: Parts) -> Entry:
    """Returns the entry with these parts of the weights of these backends, and ten tenths of all others.

    Without parts it is the very same object.
    """
    if not parts:
        return entry

    def weigh(backends: tuple[Backend, ...]) -> tuple[Backend, ...]:
        return tuple([
            Backend(b.address, b.port, b.local, b.weight * parts.get((b.address, b.port), STEPS)) for b in backends
        ])  # fmt: skip

    sets = tuple([BackendSet(weigh(one.backends), one.when_empty, one.why) for one in entry.backend_sets])
    return msgspec.structs.replace(entry, backend_sets=sets, serving=weigh(entry.serving))


def _in_use(entry: Entry) -> frozenset[Socket]:
    return frozenset([(backend.address, backend.port) for backend in entry.serving if backend.weight])
