"""PURE. The loop's counters: its own work and the size of the table, read at each scrape.

Names and meanings are kube-proxy's where it has them (pkg/proxy/metrics). One thread writes; readers see numbers that
may be a moment apart. The caller passes the time: durations in seconds, moments in seconds since 1970.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from hybrid_proxy.controller.kubernetes import model
from hybrid_proxy.dataplane.diff import Follower
from hybrid_proxy.dataplane.table import Entry, Kind, ServiceTable, WhenEmpty

FAMILIES: Final = {4: "IPv4", 6: "IPv6"}
# Rounded, because a bucket's label is the shortest text of its bound.
QUICK_BUCKETS: Final = tuple(round(0.0001 * 2**n, 4) for n in range(18))
SYNC_BUCKETS: Final = tuple(round(0.001 * 2**n, 3) for n in range(15))
NETWORK_BUCKETS: Final = (
    0.0, 0.25, 0.5, *map(float, range(1, 60)), *map(float, range(60, 120, 5)), *map(float, range(120, 301, 30)),
)  # fmt: skip
TRIGGERS: Final = 10_000  # changes of endpoints that wait for one sync; of more than that the first count


class Durations:
    """A histogram of durations, for each of some address families or for all as one.

    Args:
        name: of the metric that it becomes.
        text: what is measured.
        bounds: the longest of each range, in seconds, ascending; one more range has what is longer.
        families: 4, 6 or both; without them all is one.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], families: Sequence[int] = ()) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self.counts = {family: [0] * (len(bounds) + 1) for family in families or (0,)}
        self.sums = dict.fromkeys(self.counts, 0.0)

    def observe(self, seconds: float, family: int = 0) -> None:
        self.counts[family][bisect_left(self.bounds, seconds)] += 1
        self.sums[family] += seconds


class TableTotals(Follower):
    """Counters of a service table."""

    def __init__(self) -> None:
        self.ports = 0
        self.backends = 0
        self.no_local: Counter[tuple[int, str]] = Counter()  # family and policy -> services

    def _change(self, name: str, before: tuple[Entry, ...], after: tuple[Entry, ...]) -> None:
        self._count(before, -1)
        self._count(after, 1)

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


class Counters:
    """All counters of one agent.

    Args:
        started: seconds since 1970. Changes triggered earlier say nothing about this agent's delay.
        families: the address families that are programmed, 4 and 6.
    """

    def __init__(self, started: float = 0.0, families: Sequence[int] = (4, 6)) -> None:
        self.totals = TableTotals()
        self.sync = Durations("hybrid_proxy_sync_duration_seconds", "Time to program one table", QUICK_BUCKETS)
        self.change = Durations(
            "hybrid_proxy_change_latency_seconds", "From an event's arrival to its effect in the kernel", QUICK_BUCKETS
        )
        # One sync programs both families, so both have the same observations.
        self._sync_of_family = Durations(
            "kubeproxy_sync_proxy_rules_duration_seconds", "Time to program one table; it has both families",
            SYNC_BUCKETS, families,
        )  # fmt: skip
        self._programming = Durations(
            "kubeproxy_network_programming_duration_seconds",
            "From a change of pods or Services, as its EndpointSlice reports it, to its effect here",
            NETWORK_BUCKETS, families,
        )  # fmt: skip
        self.service_changes = self.endpoint_changes = 0
        self.services_waiting = self.endpoints_waiting = 0
        self.last_queued = self.last_synced = 0.0
        self.sync_failures: Counter[str] = Counter()  # by mode
        self.started = started
        self._families = tuple(families)
        self._triggers: list[tuple[int, float]] = []

    @property
    def durations(self) -> tuple[Durations, ...]:
        return self.sync, self.change, self._sync_of_family, self._programming

    def record_event(
        self, event: model.Event, *, changed: bool, wall: float, superseded: Collection[model.Superseded] = ()
    ) -> None:
        """Count an event; `changed`: it makes something to program."""
        kind, count = _about(event)
        count += len(superseded)
        if kind == "Service":
            self.service_changes += count
            self.services_waiting += count * changed
        elif kind == "EndpointSlice":
            self.endpoint_changes += count
            self.endpoints_waiting += count * changed
        if not changed:
            return
        self.last_queued = wall
        for older in superseded:
            self._note_trigger(older.family, older.triggered)
        if isinstance(event, model.Upserted) and isinstance(event.object, model.EndpointSlice):
            self._note_trigger(event.object.family, event.triggered)

    def _note_trigger(self, family: int, triggered: float) -> None:
        if triggered > self.started and len(self._triggers) < TRIGGERS:
            self._triggers.append((family, triggered))

    def record_sync(self, table: ServiceTable, seconds: float, latencies: Iterable[float], wall: float) -> None:
        """Note that everything that arrived is programmed."""
        self.totals.follow(table)
        self.sync.observe(seconds)
        for family in self._families:
            self._sync_of_family.observe(seconds, family)
        for latency in latencies:
            self.change.observe(latency)
        for family, trigger in self._triggers:
            # Clocks of two machines: a sum that falls would be taken for a restart.
            self._programming.observe(max(0.0, wall - trigger), family)
        self._triggers.clear()
        self.services_waiting = self.endpoints_waiting = 0
        self.last_synced = wall


def _about(event: model.Event) -> tuple[str, int]:
    """Returns the kind that an event is about and how many objects."""
    match event:
        case model.Upserted():
            return model.kind_of(event.object), 1
        case model.Removed():
            return event.kind, 1
        case model.Replaced():
            return event.kind, len(event.objects)
    return "", 0
