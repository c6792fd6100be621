"""Waiting for a condition, with bounds that follow the speed of the machine.

Nobody waits for a bound that is met, so bounds are generous, and they grow with how long everything takes at the
moment. All of them come from `bound`; the time that a peer has for its answer grows with `slowness`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from hybrid_proxy.workshop.lab.namespace import DEADLINES

__all__ = ["bound", "measured", "slowness", "until"]

NOMINAL: Final = 0.020  # seconds that `_work` takes where nothing else runs, on a processor of 2020
MOST: Final = 10.0


def slowness() -> float:
    """How many times as long as on an idle machine things take now: from 1 to 10.

    It is measured when it is first needed; later the load of the machine is looked up, which changes while tests run.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(1.0, _at_first(), load), MOST)


def bound(seconds: float) -> float:
    """How long to wait at most for what takes less than `seconds` on an idle machine."""
    return seconds * max(DEADLINES, 3 * slowness())


def measured() -> float:
    """How many times as long as `NOMINAL` work takes at this moment: others that work, and a slow processor."""
    began = time.monotonic()
    _work()
    return (time.monotonic() - began) / NOMINAL


_at_first = cache(measured)


def _work() -> int:
    return sum(number * number for number in range(300_000))


def until(condition: Callable[[], Any], what: str = "", seconds: float = 10.0) -> Any:
    """What the condition returns when it is true; errors of the network count as false.

    Raises:
        AssertionError: it was not true within `bound(seconds)`.
    """
    deadline = time.monotonic() + bound(seconds)
    while not (found := _tried(condition)):
        assert time.monotonic() < deadline, f"did not happen: {what or condition}"
        time.sleep(0.01)
    return found


def _tried(condition: Callable[[], Any]) -> Any:
    try:
        return condition()
    except OSError:
        return None
