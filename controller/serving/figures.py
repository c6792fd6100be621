"""PURE. What the loop counts of its own work, and of the table: cheap to keep, read at each scrape.

Names and meanings are kube-proxy's where it has them (pkg/proxy/metrics). One thread writes; readers see numbers that
may be a moment apart. Times are handed in: durations in seconds, moments in seconds since 1970.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from controller.kubernetes.model import EndpointSlice, Event, Overtaken, Removed, Replaced, Service, Upserted
from dataplane.table import EMPTY, Entry, Kind, ServiceTable, WhenEmpty

__all__ = ["NETWORK_BUCKETS", "QUICK_BUCKETS", "SYNC_BUCKETS", "Figures", "Spread", "Tally"]

QUICK_BUCKETS: Final = tuple(0.0001 * 2**n for n in range(18))
SYNC_BUCKETS: Final = tuple(0.001 * 2**n for n in range(15))
NETWORK_BUCKETS: Final = (
    0.0, 0.25, 0.5, *map(float, range(1, 60)), *map(float, range(60, 120, 5)), *map(float, range(120, 301, 30)),
)  # fmt: skip
TRIGGERS: Final = 10_000  # changes of endpoints that wait for one sync; of more than that the first count


class Spread:
    """A histogram: how many observations were at most so large."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One more. A clock that went back gives no time below 0: a sum that falls is taken for a restart."""
        value = max(0.0, value)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Pairs of an upper bound, as Prometheus writes it, and how many are below; the last bound is infinite."""
        total = 0
        found = []
        for bound, count in zip((*map(_bound, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


def _bound(value: float) -> str:
    return f"{value:.12g}" if value != int(value) else f"{value:.1f}"


class Tally:
    """Figures of a service table, kept up by what changes from one to the next."""

    def __init__(self) -> None:
        self.ports = 0
        self.backends = 0
        self.no_local: Counter[tuple[int, str]] = Counter()  # family and policy -> services
        self._table: ServiceTable = EMPTY

    def follow(self, table: ServiceTable) -> None:
        """Count another table."""
        old, self._table = self._table, table
        if table is old:
            return
        names: Iterable[str] = table.changed
        if table.base != old.generation:
            names = {*old.services, *table.services}
        for name in names:
            self._count(old.services.get(name, ()), -1)
            self._count(table.services.get(name, ()), 1)

    def _count(self, entries: tuple[Entry, ...], sign: int) -> None:
        self.ports += sign * len(entries)
        lacks: set[tuple[int, str]] = set()
        for entry in entries:
            self.backends += sign * len(entry.serving)
            for frontend in entry.frontends:
                external = entry.backend_sets[frontend.external]
                if not external.backends and external.when_empty is WhenEmpty.DROP:
                    lacks.add((entry.family, "internal" if frontend.kind is Kind.CLUSTER_IP else "external"))
        for key in lacks:
            self.no_local[key] += sign


class Figures:
    """All of it, for one agent.

    Args:
        started: seconds since 1970. What changed before that says nothing of how long this agent takes.
    """

    def __init__(self, started: float = 0.0) -> None:
        self.tally = Tally()
        self._started = started
        self.sync = Spread(QUICK_BUCKETS)
        self.kube_sync = Spread(SYNC_BUCKETS)  # the same in kube-proxy's buckets
        self.change = Spread(QUICK_BUCKETS)
        self.programming: dict[int, Spread] = {}  # family -> since the trigger of a change of endpoints
        self.service_changes = self.endpoint_changes = 0
        self.services_waiting = self.endpoints_waiting = 0
        self.last_queued = self.last_synced = 0.0
        self.sync_failures: Counter[str] = Counter()  # mode -> how often
        self._triggers: list[tuple[int, float]] = []

    def saw(self, event: Event, *, changed: bool, wall: float, overtaken: Collection[Overtaken] = ()) -> None:
        """An event came, and these before it; `changed`: there is something to program for it."""
        kind, count = _about(event)
        count += len(overtaken)
        if kind == "Service":
            self.service_changes += count
            self.services_waiting += count * changed
        elif kind == "EndpointSlice":
            self.endpoint_changes += count
            self.endpoints_waiting += count * changed
        if not changed:
            return
        self.last_queued = wall
        for older in overtaken:
            self._note_trigger(older.family, older.triggered)
        if isinstance(event, Upserted) and isinstance(event.object, EndpointSlice):
            self._note_trigger(event.object.family, event.triggered)

    def _note_trigger(self, family: int, triggered: float) -> None:
        if triggered > self._started and len(self._triggers) < TRIGGERS:
            self._triggers.append((family, triggered))

    def synced(self, table: ServiceTable, seconds: float, latencies: Iterable[float], wall: float) -> None:
        """Everything that came is programmed.

        Args:
            table: what was programmed.
            seconds: how long it took.
            latencies: of each change, since it arrived here.
            wall: now.
        """
        self.tally.follow(table)
        self.sync.observe(seconds)
        self.kube_sync.observe(seconds)
        for latency in latencies:
            self.change.observe(latency)
        for family, trigger in self._triggers:
            if family not in self.programming:
                self.programming[family] = Spread(NETWORK_BUCKETS)
            self.programming[family].observe(wall - trigger)
        self._triggers.clear()
        self.services_waiting = self.endpoints_waiting = 0
        self.last_synced = wall


_KINDS: Final[Mapping[type, str]] = {Service: "Service", EndpointSlice: "EndpointSlice"}


def _about(event: Event) -> tuple[str, int]:
    """The kind that an event is about and how many objects."""
    match event:
        case Upserted():
            return _KINDS.get(type(event.object), ""), 1
        case Removed():
            return event.kind, 1
        case Replaced():
            return event.kind, len(event.objects)
    return "", 0
