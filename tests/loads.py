"""Waiting for a load of `workshop.lab.traffic` by what it did, not by the clock."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from hybrid_proxy.workshop.lab.traffic import Tally
from tests.waiting import bound

__all__ = ["goes_on"]


def goes_on(tallies: Mapping[str, Tally] | Iterable[Tally], answers: int = 10, seconds: float = 30.0) -> None:
    """Wait until every load has had so many answers more.

    Raises:
        AssertionError: one of them had not after that many seconds; the message lists all of them.
    """
    waiting = list(tallies.values() if isinstance(tallies, Mapping) else tallies)
    goals = [tally.answered + answers for tally in waiting]
    deadline = time.monotonic() + bound(seconds)
    while any(tally.answered < goal for tally, goal in zip(waiting, goals, strict=True)):
        assert time.monotonic() < deadline, [tally.report() for tally in waiting]
        time.sleep(0.01)
