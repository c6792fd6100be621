"""Lets the mode collect garbage and repair drift: about once a second, and at once after a sign of drift.

The kernel reports some foreign changes (`RequestMaintenance`); the mode looks for the others whenever it is maintained.
Drift that cannot be repaired makes this node unhealthy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from hybrid_proxy.controller.agent.active_mode import ActiveMode
from hybrid_proxy.controller.kubernetes.events import Recorder
from hybrid_proxy.controller.serving.health import Health
from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.reports import several, some

log = logging.getLogger(__name__)

MAINTAIN_SECONDS: Final = 0.9  # whatever another program takes away is noticed within a second


class Maintenance:
    """Maintains the open mode; the loop calls `run` at every turn."""

    def __init__(
        self, mode: ActiveMode, health: Health, events: Recorder, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._mode = mode
        self._health = health
        self._events = events
        self._clock = clock
        self.due = clock() + MAINTAIN_SECONDS  # the time of the next work for `run`, by the clock

    def request(self) -> None:
        """Have the next `run` maintain the mode."""
        self.due = 0.0

    def run(self) -> bool:
        """Do what is due, also before the first table, for adopted objects. Returns True if the mode was maintained."""
        now = self._clock()
        if now < self.due:
            return False
        self.due = now + MAINTAIN_SECONDS
        programmer, drift = self._mode.programmer, tuple[str, ...]()
        try:
            for event in programmer.maintain() or ():
                self._events.event(event.kind, event.reason, event.action, event.note, of=event.entry)
            drift = programmer.unrepaired
        except (DataplaneError, OSError) as error:
            log.warning("maintenance failed: %s", error)
            drift = (str(error),) if isinstance(error, DataplaneError) else ()
        if self._health.drift and not drift:
            log.info("everything of ours is in place again")
        self._health.drift = drift
        repairs, last = programmer.repaired.take()
        if repairs:  # the mode has logged the details
            note = f"{several(repairs, 'thing was', 'things were')} repaired in mode {self._mode.choice.effective}"
            note, by = some([note, *last], "; "), programmer.repaired.by or "unknown program"
            self._events.event("Warning", "Repaired", "RepairDataplane", note, by=by)
        return True
