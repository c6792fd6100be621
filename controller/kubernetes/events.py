"""Events for the cluster: what `kubectl describe node` and `kubectl events` show of this proxy.

The loop queues an event and goes on; a thread writes to the API server (events.k8s.io/v1, KEP-383). A
repeat is written when half an hour is over, or a silence of some minutes; until then the server has the one before.
What differs in its note alone is no repeat, up to a number that keeps a large cluster from flooding its server.
RBAC: create of `events` in the API group `events.k8s.io`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from hybrid_proxy.controller.errors import SourceError
from hybrid_proxy.controller.kubernetes.connection import Connection, StatusError, message_of
from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.text import printable

log = logging.getLogger(__name__)

CONTROLLER: Final = "hybrid-proxy"
QUEUE: Final = 256
SILENCE_SECONDS: Final = 360.0  # after which what comes again is no repeat (client-go: finishTime)
REPEAT_SECONDS: Final = 1800.0  # after which a repeat is written (refreshTime); servers keep an event for an hour
MOST_NOTES: Final = 8  # of one kind of event about one object in that time: thousands of nodes may report the same
RETRY_SECONDS: Final = 10.0
TRIES: Final = 12
NOTE_BYTES: Final = 1024  # the API's limit


class _Occurrence(NamedTuple):
    """One event as it was reported; without its note it is the key by which repeats are known."""

    service: str  # that it is about; empty: the node
    kind: str
    reason: str
    action: str
    note: str
    at: datetime
    once: bool = False  # every node says the same: one event of the cluster is enough

    @property
    def key(self) -> tuple[str, ...]:
        return self.service, self.kind, self.reason, self.action, self.note if self.once else ""


class _Recent(NamedTuple):
    """Events with one key that were written, and when the first was written and the last came, by the clock."""

    written: float
    last: float
    notes: frozenset[str] = frozenset()


class Recorder:
    """Writes events in a thread of its own; without an API server there is nothing to write to.

    Without a `writer` events are dropped: the log has what they say. `instance` is the name of this node. `remember`
    is called with the reason, the Service (empty: the node), note and author of each event, by whoever reports it.
    """

    def __init__(
        self,
        writer: Connection | None,
        instance: str,
        *,
        remember: Callable[[str, str, str, str], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._writer = writer
        self._instance = instance
        self._remember = remember
        self._clock = clock
        self._retry_seconds = retry_seconds
        self.queued: queue.Queue[_Occurrence | None] = queue.Queue(QUEUE)  # None: it may be the end
        self._recent: dict[tuple[str, ...], _Recent] = {}
        self._stop = threading.Event()
        self._dropping = False
        self._last_name = 0

    def start(self) -> None:
        if self._writer is not None:
            threading.Thread(target=self._run, args=(self._writer,), name="events", daemon=True).start()

    def stop(self) -> None:
        """Write no more; returns at once."""
        self._stop.set()
        with contextlib.suppress(queue.Full):  # then the thread does not wait for events
            self.queued.put_nowait(None)

    def event(
        self, kind: str, reason: str, action: str, note: str, *, of: str = "", once: bool = False, by: str = ""
    ) -> None:
        """Tell what happened to this node, or to the Service `of` that name or service port; never blocks or raises.

        `kind` is `Normal` or `Warning`. `reason` and `action` are one word each, `reason` in upper camel case.
        `once`: other nodes find the same, and the first of them writes it, under a name that all of them give it. So
        thousands of nodes make one event of it, which they do not repeat. `by` is another program that interfered.
        """
        service = of.partition(":")[0]
        self._remember(reason, service, note, by)
        note = f"{by} changed what hybrid-proxy had programmed; {note}" if by else note
        if self._writer is None:
            return
        try:
            self.queued.put_nowait(_Occurrence(service, kind, reason, action, redact(note), datetime.now(UTC), once))
        except queue.Full:
            if not self._dropping:
                log.warning("events for the cluster are dropped until the API server takes the %d before them", QUEUE)
            self._dropping = True

    def _run(self, writer: Connection) -> None:
        while not self._stop.is_set():
            if (occurrence := self.queued.get()) is None:
                continue
            try:
                self._record(writer, occurrence)
            except Exception:  # an event must not stop those behind it
                log.exception("an event could not be written")
            self._dropping = self._dropping and self.queued.full()

    def _record(self, writer: Connection, occurrence: _Occurrence) -> None:
        now = self._clock()
        self._recent = {
            key: recent
            for key, recent in self._recent.items()
            if now - recent.written < REPEAT_SECONDS and now - recent.last < SILENCE_SECONDS
        }
        recent = self._recent.get(occurrence.key, _Recent(now, now))
        repeats = occurrence.note in recent.notes or len(recent.notes) == MOST_NOTES
        if repeats or self._create(writer, occurrence):
            notes = recent.notes if repeats else recent.notes | {occurrence.note}
            self._recent[occurrence.key] = _Recent(recent.written, now, notes)

    def _create(self, writer: Connection, occurrence: _Occurrence) -> bool:
        """Writes an event. True: the server has it."""
        namespace, _, whose = (occurrence.service or f"default/{self._instance}").partition("/")
        # A node's uid is its name, as kubelet and kube-proxy have it, or `kubectl describe node` would not show it.
        about = {"namespace": namespace, "kind": "Service"} if occurrence.service else {"uid": whose, "kind": "Node"}
        self._last_name = max(time.time_ns(), self._last_name + 1)
        what = "/".join((occurrence.kind, occurrence.reason, occurrence.action, occurrence.note))
        ending = sha256(what.encode()).hexdigest()[:16] if occurrence.once else f"{self._last_name:x}"
        place = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        note = printable(occurrence.note)
        if len(encoded := note.encode()) >= NOTE_BYTES:
            note = encoded[: NOTE_BYTES - 4].decode(errors="ignore") + "…"
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{whose}.{ending}", "namespace": namespace},
            "eventTime": f"{occurrence.at:%Y-%m-%dT%H:%M:%S.%fZ}",  # RFC 3339 with microseconds, metav1.MicroTime
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "type": occurrence.kind,
            "reason": occurrence.reason,
            "action": occurrence.action,
            "note": note,
            "regarding": {"apiVersion": "v1", "name": whose, **about},
        }
        return self._write(writer, place, body)

    def _write(self, writer: Connection, path: str, body: dict[str, Any]) -> bool:
        """Whether the server took it. One that does not answer is asked again for two minutes, as client-go does."""
        for attempt in range(TRIES):
            try:
                writer.create(path, msgspec.json.encode(body))
            except StatusError as error:
                if error.code == 409:
                    return True  # another node was first
                if error.code < 500 and error.code != 429:
                    log.warning("the API server refused an event (%s): %s", path, error)
                    return False
                problem = str(error)
            except SourceError as error:  # the configuration is not read yet
                problem = str(error)
            except Exception as error:  # every library below has its own
                problem = message_of(error)
            else:
                return True
            if attempt == 0:
                log.info("an Event is sent again until the API server takes it: %s", problem)
            if self._stop.wait(self._retry_seconds):
                return False
        log.warning("an event was dropped, the API server does not take it: %s", problem)
        return False
