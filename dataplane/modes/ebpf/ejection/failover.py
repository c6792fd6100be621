"""Failing backends are ejected for a while: counts of failures go to the detector, ejections go to the maps."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any, Final

from hybrid_proxy.dataplane.mode import Event, Options
from hybrid_proxy.dataplane.modes.ebpf.ejection.failures import failed_connections, forget_former, histories
from hybrid_proxy.dataplane.modes.ebpf.ejection.outliers import FailureShares, OutlierDetector
from hybrid_proxy.dataplane.modes.ebpf.ejection.probes import Prober, Target
from hybrid_proxy.dataplane.modes.ebpf.services.lower import Socket
from hybrid_proxy.dataplane.modes.ebpf.services.plan import Subject
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.reports import Ejection, HealthProbes
from hybrid_proxy.dataplane.slow_start import SlowStart
from hybrid_proxy.dataplane.table import EntryKey, ServiceTable, socket_text

log = logging.getLogger(__name__)

TIDY_SECONDS: Final = 60.0


class Failover:
    """Evaluates the backends once a second, and remembers which are ejected, or start slowly. One thread calls it."""

    def __init__(self, options: Options) -> None:
        self._detector: OutlierDetector[Subject] = OutlierDetector(options.failover_failures)
        self._shares: FailureShares[EntryKey, Subject] = FailureShares(
            options.failover_percentage, options.failover_connections
        )
        self._counted = 0  # failed connections, as all programs count them, at the last look
        self._failed: dict[int, int] = {}  # the same by backend
        self._ejected: set[Subject] = set()  # a backend set does without them
        self._failed_how: dict[Subject, str] = {}  # of those that the detector wants to eject for their connections
        self._tidied = time.monotonic()
        self._prober = Prober(options)
        self._probed: dict[str, dict[Subject, Target]] = {}  # by service
        self.slow_start = SlowStart()

    def close(self) -> None:
        self._prober.stop()

    def forget(self) -> None:
        """The store starts over, and will report every service that there is."""
        self._probed.clear()
        self._prober.watch(())

    def follow(self, store: Store, before: ServiceTable, after: ServiceTable, names: Collection[str]) -> None:
        """The table is about to be programmed: which of its backends start slowly."""
        now = time.monotonic()
        self.slow_start.follow(now, before, after, names)
        store.plan.parts = self.slow_start.parts(now)

    def services_changed(self, store: Store) -> None:
        """Probe the backends that services have now whose probes may have changed."""
        names, changed = store.plan.probes_changed, False
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
        names.clear()
        if changed:
            self._prober.watch({target for targets in self._probed.values() for target in targets.values()})

    def _probe_failures(self) -> dict[Subject, str]:
        """Why probes fail, of every backend whose probes do."""
        if not self._probed or not (down := self._prober.down()):
            return {}
        probed = (pair for targets in self._probed.values() for pair in targets.items())
        return {subject: down[target] for subject, target in probed if target in down}

    def look(self, store: Store) -> list[Event]:
        """Evaluate what was counted since the last time, write what follows, and return the events."""
        self._tidy(store)
        failures = store.failures() if self._detector.limit else {}
        probe_failures, now = self._probe_failures(), time.monotonic()
        shares = self._failing_shares(store, now) if self._detector.limit and self._shares.percentage else {}
        if not (failures or probe_failures or shares or self._detector.has_records or store.plan.ejections):
            self._let_start(store, now)
            return []
        known = _Numbers(store)
        changes = self._detector.evaluate(now, failures, probe_failures, known, shares)
        for subject in changes.readmitted:
            store.readmit(known.of(subject), self._detector.readmission_failures)
            if subject in self._ejected:
                self.slow_start.begin(now, *subject)
        self._let_start(store, now)
        self._note_how(store, known)
        return self._events(store, known)

    def _failing_shares(self, store: Store, now: float) -> dict[Subject, str]:
        """Which backends fail too large a share of their connections, and why that is so."""
        counted = sum(store.maps.counted(name) for name in ("COUNT_BACKEND_REFUSED", "COUNT_BACKEND_UNANSWERED"))
        if not store.traffic.counting or (counted == self._counted and not self._shares.open):
            return {}
        failed, before = failed_connections(store.maps.maps), self._failed
        self._counted, self._failed = counted, failed
        changed = [number for number, count in failed.items() if before.get(number) != count]
        ports = store.ports_of(changed) | {*self._shares.open}
        return self._shares.look(now, store.connections(ports, failed))

    def _let_start(self, store: Store, now: float) -> None:
        """Write ejections, and the parts of their weights that backends have which start slowly."""
        ejections, parts = self._detector.ejections, self.slow_start.parts(now)
        if ejections or parts or store.plan.adjusted:
            store.adjust(ejections, parts)

    def _tidy(self, store: Store) -> None:
        """Once a minute, forget the failures of backends that are gone."""
        if time.monotonic() - self._tidied > TIDY_SECONDS:
            self._tidied = time.monotonic()
            forget_former(store.maps.maps)

    def _note_how(self, store: Store, known: _Numbers) -> None:
        """Whether the last connection to a backend was refused or not answered."""
        ejections = self._detector.ejections
        self._failed_how = {subject: how for subject, how in self._failed_how.items() if subject in ejections}
        if ejections.keys() <= self._failed_how.keys():
            return
        kept = histories(store.maps.maps)
        for subject in ejections.keys() - self._failed_how.keys():
            history = kept.get(known.of(subject))
            self._failed_how[subject] = "" if history is None else f", the last one was {history.last_kind}"

    def _events(self, store: Store, known: _Numbers) -> list[Event]:
        """What changed in the maps: where too many backends fail, an ejection has no effect."""
        now = {subject for subject in self._detector.ejections if store.is_ejected(known.of(subject))}
        ejected = [_ejected(subject, self._duration(subject)) for subject in now - self._ejected]
        readmitted = [_readmitted(subject) for subject in self._ejected - now if subject in known]
        self._ejected = now
        for notice in ejected:
            log.warning("%s", notice.note)
        for notice in readmitted:
            log.info("%s", notice.note)
        return [*ejected, *readmitted]

    def _duration(self, subject: Subject) -> str:
        """For how long it is ejected, and why."""
        ejection = self._detector.ejections[subject]
        if ejection.until is None:
            return f"until its probe succeeds: {ejection.reason}"
        return f"for {max(0.0, ejection.until - time.monotonic()):.0f} s: {self._why(subject)}"

    def _why(self, subject: Subject) -> str:
        ejection = self._detector.ejections[subject]
        return ejection.reason + ("" if ejection.until is None else self._failed_how.get(subject, ""))

    def probes(self) -> HealthProbes:
        """For a status."""
        return self._prober.status()

    def rows(self) -> list[Ejection]:
        """For a status: every backend that keeps failing, whether it is ejected, and why."""
        rows = []
        for (key, (address, port)), ejection in self._detector.ejections.items():
            subject = (key, (address, port))
            ejected = subject in self._ejected
            rows.append(
                Ejection(
                    service=key[0],
                    address=socket_text(address, port),
                    ejected=ejected,
                    seconds=None if ejection.until is None else max(0.0, ejection.until - time.monotonic()),
                    state=f"ejected {self._duration(subject)}"
                    if ejected
                    else f"kept because too many fail: {self._why(subject)}",
                )
            )
        return rows


class _Numbers:
    """Ids of backends by name, looked up once for each service port; a container of those that exist."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ports: dict[EntryKey, dict[Socket, int]] = {}

    def of(self, subject: Subject) -> int:
        """The backend's id; 0 if there is no such backend."""
        key, socket = subject
        if key not in self._ports:
            self._ports[key] = self._store.numbers(key)
        return self._ports[key].get(socket, 0)

    def __contains__(self, subject: Any) -> bool:
        return self.of(subject) != 0


def _ejected(subject: Subject, duration: str) -> Event:
    (entry, _, _), (address, port) = subject
    note = f"{entry}: backend {socket_text(address, port)} gets no new connections from this node {duration}"
    return Event(entry, "Warning", "BackendEjected", "Eject", note)


def _readmitted(subject: Subject) -> Event:
    (entry, _, _), (address, port) = subject
    note = f"{entry}: backend {socket_text(address, port)} gets new connections from this node again"
    return Event(entry, "Normal", "BackendReadmitted", "Readmit", note)
