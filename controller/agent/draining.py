"""Drains former modes: each serves its existing flows, and accepts no new ones, until the last of them is over.

The loop's thread calls everything; a thread of its own counts flows, because conntrack may have a million entries.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from hybrid_proxy.controller.serving.protocol import DrainingMode, described
from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported
from hybrid_proxy.dataplane.mode import Programmer
from hybrid_proxy.dataplane.table import EMPTY, ServiceTable

log = logging.getLogger(__name__)

COUNT_SECONDS: Final = 1.0
COUNT_SHARE: Final = 20  # of a processor's time the counting thread takes one part in so many


@dataclass(slots=True)
class _Left:
    """A former mode, open."""

    programmer: Programmer
    since: float | None = None  # monotonic; None: it is kept in case that the next mode cannot serve
    table: ServiceTable = EMPTY  # the newest that it was to drain by
    drains: bool = False  # by that table; else it is tried again
    flows: Mapping[str, int] = field(default_factory=dict)  # by protocol, as counted last
    first: Mapping[str, int] | None = None  # as counted first
    counters: dict[str, int] = field(default_factory=dict)
    over: bool = False


class Draining:
    """Holds the former modes open, and counts their flows.

    Args:
        ended: called once with the name of a mode whose last flow is over, or whose time is; from another thread.
        report: called with reason and note of an event when a mode begins to drain, and at its end; from any thread.
    """

    def __init__(self, ended: Callable[[str], None], report: Callable[[str, str], None]) -> None:
        self.timeout = 0.0  # seconds that a mode may drain, 0: as long as it has flows
        self._ended, self._report = ended, report
        self._left: dict[str, _Left] = {}
        self._lock = threading.Lock()  # of `_left` and of counting: nothing is closed while it is counted
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _announce(self, reason: str, note: str, flows: Mapping[str, int] | None) -> None:
        # Without flows, the line about what the mode left here says enough.
        log.log(logging.INFO if flows is None or any(flows.values()) else logging.DEBUG, "%s", note)
        self._report(reason, note)

    def keep(self, programmer: Programmer) -> None:
        """Hold a mode open: it serves until the next mode does."""
        with self._lock:
            self._left[programmer.name] = _Left(programmer)

    @property
    def names(self) -> frozenset[str]:
        """The modes that are held open."""
        return frozenset(self._left)

    @property
    def programmers(self) -> list[Programmer]:
        """The programmers of the modes that are held open."""
        return [left.programmer for left in self._left.values()]

    def start(self, name: str, table: ServiceTable) -> None:
        """Let a mode that is held open accept no new flows. A failure is logged, and `maintain` tries again.

        Raises:
            Unsupported: it cannot run here.
        """
        left = self._left[name]
        left.since = left.since or time.monotonic()
        self._drain(name, left, table)
        if self._thread is None:
            self._thread = threading.Thread(target=self._count_on, name="drain", daemon=True)
            self._thread.start()

    def _drain(self, name: str, left: _Left, table: ServiceTable) -> None:
        left.table, failed = table, left.table is not EMPTY and not left.drains
        left.drains = False
        try:
            left.programmer.drain(table)
        except Unsupported:
            raise
        except (DataplaneError, OSError) as error:
            log.warning("mode %s, which was left, may still take new flows, trying again: %s", name, error)
            return
        left.drains = True
        if failed:
            log.info("mode %s takes no new flows now", name)

    def maintain(self, table: ServiceTable) -> None:
        """Maintain all modes that drain; called once a second. A failure is logged and tried again."""
        for name, left in self._left.items():
            if left.since is None:
                continue
            try:
                if left.table is not table or not left.drains:
                    self._drain(name, left, table)
                left.programmer.maintain()
                left.counters = left.programmer.counters()
            except (DataplaneError, OSError) as error:
                log.warning("maintenance of mode %s, which drains, failed: %s", name, error)

    def links_changed(self) -> None:
        for name, left in self._left.items():
            try:
                left.programmer.links_changed()
            except (DataplaneError, OSError) as error:
                log.warning("interfaces changed, and attaching mode %s, which drains, failed: %s", name, error)

    def end(self, name: str) -> None:
        """Give up the remaining flows of a drained mode, and close it. A failure is logged."""
        left = self._left[name]
        seconds = time.monotonic() - (left.since or time.monotonic())
        rest = f"; {described(left.flows, 'ends', 'end')} with it" if any(left.flows.values()) else ""
        began = f"drained for {seconds:.0f} s"
        if left.first is not None:
            first = any(left.first.values())
            began = f"{began}; it began with {described(left.first)}" if first else "is gone: it had no flows"
        self._announce("Drained", f"mode {name} {began}{rest}", left.first)
        try:
            left.programmer.abandon(left.table)
        except (DataplaneError, OSError) as error:
            log.warning("mode %s, which is about to go, still has flows: %s", name, error)
        self.release(name)

    def release(self, name: str) -> None:
        """Close a mode, if it is held open: it is about to be opened again, or removed."""
        with self._lock:
            left = self._left.pop(name, None)
        if left is not None:
            left.programmer.close()

    def rows(self) -> list[DrainingMode]:
        """Returns a row for each mode that drains."""
        now = time.monotonic()
        return [
            DrainingMode(
                name, dict(left.flows), round(now - left.since, 1), left.counters, counted=left.first is not None
            )
            for name, left in self._left.items()
            if left.since is not None
        ]

    def service_names(self) -> dict[int, str]:
        """Returns service ports by the numbers in flows of these modes."""
        return {number: name for left in self._left.values() for number, name in left.programmer.names().items()}

    def close(self) -> None:
        """Close all modes; flows continue as programmed, and the next agent drains them."""
        self._stop.set()
        for name in list(self._left):
            self.release(name)

    def _count_on(self) -> None:
        rest = 0.0
        while not self._stop.wait(rest):
            began = time.thread_time()  # a thread that waits for a busy processor costs nothing
            with self._lock:
                for name, left in self._left.items():
                    if left.since is not None and not left.over:
                        self._count(name, left)
            rest = max(COUNT_SECONDS, COUNT_SHARE * (time.thread_time() - began))

    def _count(self, name: str, left: _Left) -> None:
        assert left.since is not None
        try:
            left.programmer.reserve_ports()  # also of flows that began since the next mode's first sync
            left.flows = left.programmer.open_flows(left.table)
            if left.first is None:
                left.first = left.flows
                text = described(left.flows, "goes on until it is over", "go on until they are over")
                text = text if any(left.flows.values()) else "it has no flows"
                self._announce("Draining", f"mode {name} drains: {text}", left.flows)
            late = bool(self.timeout) and time.monotonic() - left.since >= self.timeout
        except (DataplaneError, OSError) as error:
            log.warning("flows of mode %s, which drains, cannot be counted: %s", name, error)
            return
        left.over = late or (left.drains and not any(left.flows.values()))
        if left.over:
            self._ended(name)
