"""Backends that fail are left out for a while: what was counted goes to the judge, sentences go to the maps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from dataplane.mode import Notice, Options
from dataplane.modes.ebpf.lower import Socket
from dataplane.modes.ebpf.outliers import Outliers
from dataplane.modes.ebpf.probes import Prober, Target
from dataplane.modes.ebpf.store import EntryKey, Store, Subject
from dataplane.table import socket_text

__all__ = ["Failover"]

log = logging.getLogger(__name__)


class Failover:
    """Looks once a second; remembers who is out. One thread calls it.

    Args:
        options: `failover_failures`, and those of `probes`.
    """

    def __init__(self, options: Options) -> None:
        self._judge: Outliers[Subject] = Outliers(options.failover_failures)
        self._out: set[Subject] = set()  # a route does without them
        self._prober = Prober(options)
        self._probed: dict[str, dict[Subject, Target]] = {}  # by service

    def close(self) -> None:
        """End the probes."""
        self._prober.stop()

    def forget(self) -> None:
        """The store begins anew, and will tell of every service that there is."""
        self._probed.clear()
        self._prober.watch(())

    def services_changed(self, store: Store, names: Iterable[str]) -> None:
        """These services are others now, or gone: probe the backends that they have."""
        changed = False
        for name in names:
            before = self._probed.pop(name, {})
            after = {
                (key, (backend.address, backend.port)): Target(backend.address, backend.port, known.entry.probe.path)
                for key, known in store.installed.get(name, {}).items()
                if known.entry.probe is not None
                for frontend in known.entry.frontends
                for backend in (*frontend.inside.backends, *frontend.outside.backends)
            }
            if after:
                self._probed[name] = after
            changed = changed or before != after
        if changed:
            self._prober.watch({target for targets in self._probed.values() for target in targets.values()})

    def _down(self) -> dict[Subject, str]:
        """What probes say of backends."""
        if not self._probed or not (said := self._prober.down()):
            return {}
        probed = (pair for targets in self._probed.values() for pair in targets.items())
        return {subject: said[target] for subject, target in probed if target in said}

    def look(self, store: Store) -> list[Notice]:
        """Judge what was counted since the last time, change the routes, and tell whom that concerns."""
        failures = store.failures() if self._judge.limit else {}
        down = self._down()
        if not failures and not down and not self._judge.busy and not store.sentenced:
            return []
        known = _Numbers(store)
        changes = self._judge.judge(time.monotonic(), failures, down, known)
        for subject in changes.back:
            store.put_on_probation(known.of(subject), self._judge.on_probation)
        store.leave_out(self._judge.sentences)
        return self._tell(store, known)

    def _tell(self, store: Store, known: _Numbers) -> list[Notice]:
        """What changed, by what is programmed: a sentence may stand without effect, where too many have one."""
        out = {subject for subject in self._judge.sentences if store.is_left_out(known.of(subject))}
        left = [_left_out(subject, self._words(subject)) for subject in out - self._out]
        back = [_back(subject) for subject in self._out - out if subject in known]
        self._out = out
        for notice in left:
            log.warning("%s", notice.note)
        for notice in back:
            log.info("%s", notice.note)
        return [*left, *back]

    def _words(self, subject: Subject) -> str:
        """For how long, and why."""
        told = self._judge.sentences[subject]
        if told.until is None:
            return f"until its probe succeeds: {told.why}"
        return f"for {max(0.0, told.until - time.monotonic()):.0f} s: {told.why}"

    def probes(self) -> dict[str, Any]:
        """For a status."""
        return self._prober.status()

    def rows(self) -> list[dict[str, Any]]:
        """For a status: every backend with a sentence, whether it is left out, and why."""
        rows = []
        for (key, (address, port)), told in self._judge.sentences.items():
            subject = (key, (address, port))
            out = subject in self._out
            rows.append(
                {
                    "service": key[0],
                    "address": socket_text(address, port),
                    "left_out": out,
                    "seconds": None if told.until is None else max(0.0, told.until - time.monotonic()),
                    "state": f"left out {self._words(subject)}" if out else f"kept for want of others: {told.why}",
                }
            )
        return rows


class _Numbers:
    """Ids of backends by name, looked up once for each service port; a container of those that there are."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ports: dict[EntryKey, dict[Socket, int]] = {}

    def of(self, subject: Subject) -> int:
        """The backend's id, 0: there is none such."""
        key, socket = subject
        if key not in self._ports:
            self._ports[key] = self._store.numbers(key)
        return self._ports[key].get(socket, 0)

    def __contains__(self, subject: Any) -> bool:
        return self.of(subject) != 0


def _left_out(subject: Subject, words: str) -> Notice:
    (entry, _, _), (address, port) = subject
    note = f"{entry}: backend {socket_text(address, port)} gets no new connections from this node {words}"
    return Notice(entry, "Warning", "BackendLeftOut", "LeaveOut", note)


def _back(subject: Subject) -> Notice:
    (entry, _, _), (address, port) = subject
    note = f"{entry}: backend {socket_text(address, port)} gets new connections from this node again"
    return Notice(entry, "Normal", "BackendBack", "TakeBack", note)
