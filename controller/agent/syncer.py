"""Builds service tables, and has each programmed when that is due: a state machine.

Whether this node is up to date is decided in this file and nowhere else. `TRANSITIONS` has every state and what can
happen in it. Something that is not in the table cannot happen; if it does, a KeyError shows the defect.

             LISTED                    PROGRAMMED
    LISTING --------> PENDING ----------------------> SYNCED
                      ^  |  ^                          | ^
                      |  |  '--- CHANGED, REOPENED ----' | PROGRAMMED
             REOPENED |  | FAILED                        |
                      |  v                               |
                      RETRYING --------------------------'
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from hybrid_proxy.controller.kubernetes.model import (
    EndpointSlice,
    Event,
    Problem,
    Removed,
    SourceState,
    Superseded,
    Upserted,
)
from hybrid_proxy.controller.semantics.cluster import Cluster
from hybrid_proxy.controller.semantics.entries import Settings
from hybrid_proxy.controller.semantics.history import ChangeRow, folded
from hybrid_proxy.controller.semantics.lacks import lacks
from hybrid_proxy.controller.semantics.node import NO_ROUTES, Routes
from hybrid_proxy.controller.semantics.tables import Builder
from hybrid_proxy.controller.serving.counters import Counters
from hybrid_proxy.controller.serving.health import Health
from hybrid_proxy.dataplane.errors import SyncError, Unsupported
from hybrid_proxy.dataplane.mode import SyncResult
from hybrid_proxy.dataplane.reports import several, shortened, some
from hybrid_proxy.dataplane.table import EMPTY, Entry, ServiceTable
from hybrid_proxy.dataplane.timings import START

if TYPE_CHECKING:
    from hybrid_proxy.dataplane.mode import Programmer
    from hybrid_proxy.dataplane.table import Remembered

log = logging.getLogger(__name__)

MIN_REST: Final = 0.005  # seconds after a sync: changes that come close together are programmed together
FIRST_RETRY, LONGEST_RETRY = 0.5, 30.0
CEDE_SECONDS: Final = 3.0  # seconds after which a kube-proxy has programmed a Service: its minSyncPeriod is one
LOG_SECONDS: Final = 1.0  # between two lines of the log about syncs
LATENCIES: Final = 1000  # kept for `status`
MAX_PENDING: Final = 10_000  # changes in one sync whose latency is measured


class State(Enum):
    """The node compared with the known state of the cluster."""

    LISTING = auto()  # some kind of objects was never listed, so nothing may be programmed
    PENDING = auto()  # something is known that is not programmed
    RETRYING = auto()  # the same, and the last sync failed
    SYNCED = auto()  # everything known is programmed


class Input(Enum):
    LISTED = auto()  # the last kind that was missing
    CHANGED = auto()  # something that the table is made of
    REOPENED = auto()  # a mode was opened, which has programmed nothing yet
    PROGRAMMED = auto()  # the newest table
    FAILED = auto()  # to program it


_ENDS: Final = {Input.PROGRAMMED: State.SYNCED, Input.FAILED: State.RETRYING}  # of a sync
TRANSITIONS: Final[dict[State, dict[Input, State]]] = {
    State.LISTING: {Input.LISTED: State.PENDING, Input.CHANGED: State.LISTING, Input.REOPENED: State.LISTING},
    State.PENDING: {Input.CHANGED: State.PENDING, Input.REOPENED: State.PENDING, **_ENDS},
    State.RETRYING: {Input.CHANGED: State.RETRYING, Input.REOPENED: State.PENDING, **_ENDS},
    State.SYNCED: {Input.CHANGED: State.PENDING, Input.REOPENED: State.PENDING},
}


class Syncer:
    """Takes in events, and brings the node up to date when that is due. One thread calls it.

    `clock` returns monotonic seconds, the same as `received` of events; `wall` returns seconds since 1970.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        counters: Counters,
        health: Health,
        addresses: tuple[str, ...] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.cluster = cluster
        self.builder = Builder(settings)
        self.state = State.LISTING
        self.rest = MIN_REST  # seconds between two syncs
        self.started = clock()
        self.ready_seconds: float | None = None  # from the start to the first programmed table
        self.observed = 0  # events, with those that were superseded
        self.error = ""  # why the last sync failed
        self.sync_seconds = 0.0  # how long the last one took
        self.latencies: deque[float] = deque(maxlen=LATENCIES)
        self._counters = counters
        self._health = health
        self._surroundings = addresses, NO_ROUTES
        self._clock = clock
        self._wall = wall
        self._moved: dict[str, float] = {}  # since when
        self._received: list[float] = []  # when the changes came that the next sync covers
        self._rested_at = 0.0
        self._retry = _Retry()
        self.log = _SyncLog(clock)
        health.awaited = cluster.awaited

    @property
    def waits(self) -> bool:
        """True if the next sync is only a matter of time; until then more events make no difference."""
        return self.state in (State.PENDING, State.RETRYING)

    @property
    def due(self) -> float:
        """The earliest time of the next sync, by the clock; infinity when nothing waits for one."""
        match self.state:
            case State.PENDING:
                return self._rested_at
            case State.RETRYING:
                return max(self._retry.at, self._rested_at)
        return float("inf")

    # What happens

    def observe(self, event: Event, superseded: tuple[Superseded, ...] = ()) -> None:
        """Take in an event of the source, and the changes that it superseded."""
        self.observed += 1 + len(superseded)
        if isinstance(event, Problem) and event.message:
            log.warning("%s", event.report)
        elif isinstance(event, SourceState):
            log.log(logging.INFO if event.healthy else logging.WARNING, "%s", event.message)
        changed = self.cluster.apply(event)
        self._counters.record_event(event, changed=changed, wall=self._wall(), superseded=superseded)
        if changed:
            changes: Iterable[Upserted | Removed | Superseded] = superseded
            if isinstance(event, Upserted | Removed):
                changes = (*superseded, event)
            times = [change.received for change in changes if change.received]
            self._received += times[: MAX_PENDING - len(self._received)]
            obj = event.object if isinstance(event, Upserted) else None
            self._health.queued(self._clock(), obj.family if isinstance(obj, EndpointSlice) else None)
            self._on(Input.CHANGED)
        if self.state is State.LISTING and not self.cluster.awaited:
            self._on(Input.LISTED)
            START.end("list and decode")
        self._health.awaited = self.cluster.awaited
        here = self.cluster.reported
        self._health.node(here.eligible if here else True if self.cluster.unread("Node") else None)

    def cede_moved_services(self) -> None:
        """Leave new flows of moved Services to the proxy alongside, when it has had the time to program them.

        Until then both serve them. So no client finds a moment in which nobody does.
        """
        now = self._clock()
        self._moved = {name: self._moved.get(name, now) for name in self.cluster.moved}
        if self.cluster.cede([name for name, since in self._moved.items() if now - since >= CEDE_SECONDS]):
            self._on(Input.CHANGED)

    def set_addresses(self, addresses: tuple[str, ...], routes: Routes = NO_ROUTES) -> None:
        if (addresses, routes) != self._surroundings:
            self._surroundings = addresses, routes
            self._health.queued(self._clock())
            self._on(Input.CHANGED)

    def set_settings(self, settings: Settings) -> None:
        """Build tables by these settings, the next one without a rest."""
        self.builder.update_settings(settings)
        self._rested_at = 0.0
        self._on(Input.CHANGED)

    def restart(self, settings: Settings) -> None:
        """A mode was opened that knows nothing: build and program everything again, and now."""
        self.builder = Builder(settings)
        self._rested_at = 0.0
        self._on(Input.REOPENED)

    def sync(
        self, programmer: Programmer, *, first: bool,
        clients: Callable[[ServiceTable], Iterable[Remembered]] = lambda _: (),
    ) -> SyncResult | None:  # fmt: skip
        """Build and program the newest table.

        Args:
            programmer: of the mode at work.
            first: it has programmed nothing yet.
            clients: with `first`, where the modes before send clients of a table.

        Returns:
            What was done; None: it failed, and is tried again when it is `due`.

        Raises:
            Unsupported: with `first`, this machine cannot do what the table asks of this mode.
        """
        start, before = self._clock(), self.builder.table
        if first:
            programmer.prewarm(*self.cluster.extent)
        with START.part("table"):
            table = self.builder.build(self.cluster, *self._surroundings)
        self.log.conflicts(self.builder.conflicts)
        self.log.compare(before, table)
        if first and self.state is not State.RETRYING:  # to serve matters more than to remember
            table = msgspec.structs.replace(table, clients=tuple(clients(table)))
        try:
            with START.part("first sync"):
                result = programmer.sync(table)
        except (SyncError, Unsupported) as error:
            if first and isinstance(error, Unsupported):
                raise
            self._failed(programmer.name, error)
            return None
        self._programmed(start)
        if not first:
            self.log.add(result, self.sync_seconds)
        return result

    def _on(self, happened: Input) -> None:
        self.state = TRANSITIONS[self.state][happened]

    def _failed(self, mode: str, error: Exception) -> None:
        self._on(Input.FAILED)
        self.error = str(error)
        self._counters.sync_failures[mode] += 1
        log.exception("sync failed, trying again in %.1f s", self._retry.delay, exc_info=error)
        self._retry = _Retry(self._clock() + self._retry.delay, min(2 * self._retry.delay, LONGEST_RETRY))

    def _programmed(self, start: float) -> None:
        self._on(Input.PROGRAMMED)
        now = self._clock()
        self.error, self._retry = "", _Retry()
        if self.ready_seconds is None:
            self.ready_seconds = now - self.started
        self.sync_seconds = now - start
        self._rested_at = now + self.rest
        latencies = [now - received for received in self._received]
        self._received.clear()
        self.latencies.extend(latencies)
        self._counters.record_sync(self.builder.table, self.sync_seconds, latencies, self._wall())
        self._health.updated(now)


class _Retry(NamedTuple):
    """When a failed sync is tried again, and how long to wait after the next failure."""

    at: float = 0.0
    delay: float = FIRST_RETRY


@dataclass(slots=True)
class _SyncLog:
    """What syncs changed, for the log: a single change at once, many of them once a second."""

    clock: Callable[[], float]
    next_at: float = 0.0
    syncs: list[tuple[SyncResult, float]] = field(default_factory=list)
    rows: list[ChangeRow] = field(default_factory=list)  # of what differs
    before: dict[str, tuple[Entry, ...]] = field(default_factory=dict)  # what differs, as the log knows it; (): is new
    table: ServiceTable = EMPTY
    lost: set[str] = field(default_factory=set)  # service ports that were logged as without a backend
    known: frozenset[tuple[str, str]] = frozenset()  # conflicts that were logged: the service that lost, and a message

    def conflicts(self, found: Mapping[str, Iterable[str]]) -> None:
        """Log each frontend that two services claim once, when that begins and when it is over."""
        claimed = frozenset((name, message) for name, several in found.items() for message in several)
        for conflict in sorted(claimed - self.known):
            log.warning("conflict: %s: %s", *conflict)
        for conflict in sorted(self.known - claimed):
            log.info("conflict is over: %s: %s", *conflict)
        self.known = claimed

    def compare(self, before: ServiceTable, table: ServiceTable) -> None:
        """Keep the former state of what differs; nothing is reported of the first table."""
        if before is not EMPTY:
            for name in table.changed:
                self.before.setdefault(name, before.services.get(name, ()))
        self.table = table

    def add(self, result: SyncResult, seconds: float) -> None:
        """Count one sync; if it changed nothing, it counts as none, and what differs in the table is not logged."""
        if result.changed or result.removed:
            self.syncs.append((result, seconds))
        elif not self.syncs:
            self.before.clear()

    def flush(self, rows: Iterable[ChangeRow] = ()) -> None:
        """Write what the log is to say of the last syncs, if it is time; `rows` are what the last one changed."""
        now = self.clock()
        if not self.syncs:
            return
        self.rows += rows
        if now < self.next_at:
            return
        times = f" by {len(self.syncs)} syncs" if len(self.syncs) > 1 else ""
        changed, removed = sum(each.changed for each, _ in self.syncs), sum(each.removed for each, _ in self.syncs)
        names = some([*map(self._described, islice(self.before, 3)), *islice(self.before, 3, None)])
        ms, services = 1000 * sum(seconds for _, seconds in self.syncs), several(len(self.before), "Service")
        log.info(
            "%s of %s changed, %d removed, in %.1f ms%s: %s",
            several(changed, "service port"), services, removed, ms, times, names,
        )  # fmt: skip
        former = _empty(self.before.values())
        empty = _empty(self.table.services.get(name) for name, entries in self.before.items() if entries)
        if lost := empty - former:
            log.warning("without a backend: %s", some(sorted(lost)))
        if over := (former - empty) & self.lost:  # what never had one says that it has one now
            log.info("no longer without a backend: %s", some(sorted(over)))
        self.lost = (self.lost - over) | lost
        self.next_at = now + LOG_SECONDS
        self.before.clear()
        self.syncs.clear()
        self.rows.clear()

    def _described(self, service: str) -> str:
        """A Service, and what is different about it."""
        text = "; ".join(row.text for row in folded(row for row in self.rows if row.service == service))
        return f"{service} ({shortened(text)})" if text else service


def _empty(services: Iterable[Iterable[Entry] | None]) -> set[str]:
    """Service ports without a backend, whoever the client is."""
    return {lack.service for entries in services for lack in lacks(entries or ()) if lack.clients == "all"}
