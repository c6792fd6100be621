"""Waiting for a condition, with a bound that a busy machine meets too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hybrid_proxy.workshop.lab.namespace import DEADLINES

__all__ = ["until"]


def until(condition: Callable[[], Any], what: str = "", seconds: float = 10.0) -> Any:
    """What the condition returns when it is true; errors of the network count as false.

    Raises:
        AssertionError: it was not true within several times as many seconds.
    """
    deadline = time.monotonic() + seconds * DEADLINES
    while not (found := _tried(condition)):
        assert time.monotonic() < deadline, f"did not happen: {what or condition}"
        time.sleep(0.02)
    return found


def _tried(condition: Callable[[], Any]) -> Any:
    try:
        return condition()
    except OSError:
        return None
