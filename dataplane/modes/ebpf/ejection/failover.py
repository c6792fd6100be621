"""Ejects failing backends for a while: passes counts of failures to the detector, and its ejections to the maps."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from hybrid_proxy.dataplane.mode import Event, Options
from hybrid_proxy.dataplane.modes.ebpf.ejection.failures import failed_connections, forget_former, histories
from hybrid_proxy.dataplane.modes.ebpf.ejection.outliers import FailureShares, OutlierDetector
from hybrid_proxy.dataplane.modes.ebpf.ejection.probes import Prober, Target
from hybrid_proxy.dataplane.modes.ebpf.services.lower import Socket
from hybrid_proxy.dataplane.modes.ebpf.services.plan import Subject
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.reports import Ejection
from hybrid_proxy.dataplane.slow_start import SlowStart
from hybrid_proxy.dataplane.table import EntryKey, socket_text

log = logging.getLogger(__name__)

TIDY_SECONDS: Final = 60.0


class Failover:
    """Evaluates the backends once a second, and knows which are ejected or in slow start. Not thread-safe."""

    def __init__(self, options: Options) -> None:
        self._detector: OutlierDetector[Subject] = OutlierDetector(options.ebpf.failover.failures)
        self._shares: FailureShares[EntryKey, Subject] = FailureShares(
            options.ebpf.failover.percentage, options.ebpf.failover.connections
        )
        self._counted = -1  # failed connections, as all programs count them, at the last call
        self._failures: dict[Subject, int] = {}  # consecutive failed connections, at the last call
        self._failed: dict[int, int] = {}  # the same by backend
        self._ejected: set[Subject] = set()  # a backend set does without them
        self._failed_how: dict[Subject, str] = {}  # of those that the detector wants to eject for their connections
        self._spared_until = self._tidied = time.monotonic()
        self._sparings = 0  # that have not ended; more than one doctor may be at work
        self.prober = Prober(options)
        self._probed: dict[str, dict[Subject, Target]] = {}  # by service
        self.slow_start = SlowStart()

    def close(self) -> None:
        self.prober.stop()

    def forget(self) -> None:
        """Forget all backends: the store starts over, and will report every service."""
        self._probed.clear()
        self.prober.watch(())
        self._counted = -1

    def services_changed(self, store: Store) -> None:
        """Probe the present backends of services whose probes may have changed."""
        names, changed = {*store.plan.probes_changed}, False
        store.plan.probes_changed.clear()
        for name in names:
            before = self._probed.pop(name, {})
            after = {
                (port.entry.key, (b.address, b.port)): Target(b.address, b.port, port.entry.probe.path)
                for port in store.plan.installed.get(name, ())
                if port.entry.probe is not None
                for backend_set in port.entry.backend_sets
                for b in backend_set.backends
            }
            if after:
                self._probed[name] = after
            changed = changed or before != after
        if changed:
            self.prober.watch({target for targets in self._probed.values() for target in targets.values()})

    def _probe_failures(self) -> dict[Subject, str]:
        """Returns, for each backend whose probes fail, why they fail."""
        if not self._probed or not (down := self.prober.down()):
            return {}
        probed = (pair for targets in self._probed.values() for pair in targets.items())
        return {subject: down[target] for subject, target in probed if target in down}

    def spare(self, store: Store, seconds: float) -> None:
        """Stops counting failures for so many seconds; those before count. With 0 seconds, such a sparing ends now."""
        self._count(store)
        running = self._sparings if time.monotonic() < self._spared_until else 0
        self._sparings = running + (1 if seconds else -1)
        if seconds or self._sparings <= 0:
            self._spared_until = time.monotonic() + seconds

    def take_back(self, store: Store) -> None:
        """Take back what doctor's connections met up to now: readers of the counts would see it for up to a second."""
        if time.monotonic() < self._spared_until:
            self._count(store)

    def _count(self, store: Store, *, news: bool = True) -> None:
        """Count failures in a row, once: more may come at any time. Take back those since a sparing began."""
        spared = time.monotonic() < self._spared_until
        # No backend's count grows while the counters stand still.
        now = store.failures() if news or spared or self._failures else {}
        if spared:
            self._shares.intervals.clear()
            now = {subject: min(count, self._failures.get(subject, 0)) for subject, count in now.items()}
            known = _Numbers(store)
            for subject, count in now.items():
                store.readmit(known.of(subject), count)
        self._failures = now

    def evaluate(self, store: Store) -> list[Event]:
        """Evaluate what was counted since the last call, write the changes, and return the events."""
        if time.monotonic() - self._tidied > TIDY_SECONDS:
            self._tidied = time.monotonic()
            forget_former(store.maps.maps)  # the failures of removed backends
        news = bool(self._detector.limit) and self._has_failed(store)
        self._count(store, news=news)
        probe_failures, now = self._probe_failures(), time.monotonic()
        shares = self._failing_shares(store, now) if news or self._shares.intervals else {}
        if not (self._failures or probe_failures or shares or self._detector.records or store.plan.ejections):
            self._let_start(store, now)
            return []
        known = _Numbers(store)
        for subject in self._detector.evaluate(now, self._failures, probe_failures, known, shares):
            store.readmit(known.of(subject), self._detector.readmission_failures)
            if subject in self._ejected:
                self.slow_start.begin(now, *subject)
        self._let_start(store, now)
        self._note_how(store, known)
        return self._events(store, known)

    def _has_failed(self, store: Store) -> bool:
        """Returns whether any connection failed since the last call."""
        if not store.plan.by_id:  # nothing says yet whose counts they are
            return False
        before = self._counted
        self._counted = sum(store.maps.counted(name) for name in ("COUNT_BACKEND_REFUSED", "COUNT_BACKEND_UNANSWERED"))
        return self._counted != before

    def _failing_shares(self, store: Store, now: float) -> dict[Subject, str]:
        """Returns the backends that fail too large a share of their connections, each with a reason."""
        if not (store.traffic.counting and self._shares.percentage):
            return {}
        before, self._failed = self._failed, failed_connections(store.maps.maps)
        changed = [number for number, count in self._failed.items() if before.get(number) != count]
        ports = store.ports_of(changed) | {*self._shares.intervals}
        return self._shares.evaluate(now, store.connections(ports, self._failed))

    def _let_start(self, store: Store, now: float) -> None:
        """Write ejections, and the scaled weights of backends in slow start."""
        ejections, parts = self._detector.ejections, self.slow_start.parts(now)
        if ejections or parts or store.plan.adjusted:
            store.adjust(ejections, parts)

    def _note_how(self, store: Store, known: _Numbers) -> None:
        """Note whether the last connection to a backend was refused or unanswered."""
        ejections = self._detector.ejections
        self._failed_how = {subject: how for subject, how in self._failed_how.items() if subject in ejections}
        if ejections.keys() <= self._failed_how.keys():
            return
        kept = histories(store.maps.maps)
        for subject in ejections.keys() - self._failed_how.keys():
            history = kept.get(known.of(subject))
            self._failed_how[subject] = "" if history is None else f", the last one was {history.last_kind}"

    def _events(self, store: Store, known: _Numbers) -> list[Event]:
        """Returns an event for each ejection that changed the maps; with too many failing, none has an effect."""
        now = {subject for subject in self._detector.ejections if store.is_ejected(known.of(subject))}
        ejected = [_event(subject, self._duration(subject)) for subject in now - self._ejected]
        readmitted = [_event(subject) for subject in self._ejected - now if subject in known]
        self._ejected = now
        for notice in ejected:
            log.warning("%s", notice.note)
        for notice in readmitted:
            log.info("%s", notice.note)
        return [*ejected, *readmitted]

    def _duration(self, subject: Subject) -> str:
        """Returns for how long and why a backend is ejected, as text."""
        ejection = self._detector.ejections[subject]
        if ejection.until is None:
            return f"until its probe succeeds: {ejection.reason}"
        return f"for {max(1.0, ejection.until - time.monotonic()):.0f} s: {self._why(subject)}"

    def _why(self, subject: Subject) -> str:
        ejection = self._detector.ejections[subject]
        return ejection.reason + ("" if ejection.until is None else self._failed_how.get(subject, ""))

    def rows(self) -> list[Ejection]:
        """Returns every backend that keeps failing, ejected or not, with the reason, for `status`."""
        rows = []
        for subject, ejection in self._detector.ejections.items():
            (service, _, _), end = subject
            ejected = subject in self._ejected
            rows.append(
                Ejection(
                    service=service,
                    address=socket_text(*end),
                    ejected=ejected,
                    seconds=None if ejection.until is None else max(0.0, ejection.until - time.monotonic()),
                    state=f"ejected {self._duration(subject)}"
                    if ejected
                    else f"kept because too many fail: {self._why(subject)}",
                )
            )
        return rows


class _Numbers:
    """Ids of backends by name, looked up once for each service port; contains the backends that exist."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ports: dict[EntryKey, dict[Socket, int]] = {}

    def of(self, subject: Subject) -> int:
        """Returns the backend's id; 0 if there is no such backend."""
        key, socket = subject
        if key not in self._ports:
            self._ports[key] = self._store.numbers(key)
        return self._ports[key].get(socket, 0)

    def __contains__(self, subject: Any) -> bool:
        return self.of(subject) != 0


def _event(subject: Subject, duration: str = "") -> Event:
    (entry, _, _), (address, port) = subject
    kind = ("Warning", "BackendEjected", "Eject") if duration else ("Normal", "BackendReadmitted", "Readmit")
    gets = f"no new connections from this node {duration}" if duration else "new connections from this node again"
    return Event(entry, *kind, f"{entry}: backend {socket_text(address, port)} gets {gets}")
