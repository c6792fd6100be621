"""When the mode is maintained, and when it is only looked at for drift."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_proxy.controller.agent.maintenance import CHECK_SECONDS, MAINTAIN_SECONDS, Maintenance


class Mode:
    """A mode in which something may drift, and the times of what it was asked for."""

    unrepaired, audit_repairs = (), 0

    def __init__(self) -> None:
        self.now, self.drifts = 100.0, False
        self.asked: list[tuple[str, float]] = []
        self.programmer = self

    def may_have_drifted(self) -> bool:
        self.asked.append(("check", self.now))
        return self.drifts

    def maintain(self) -> None:
        self.asked.append(("maintain", self.now))
        self.drifts = False


def kept(mode: Mode) -> Maintenance:
    parts: Any = SimpleNamespace(drift=()), None
    return Maintenance(mode, *parts, clock=lambda: mode.now)  # type: ignore[arg-type]


def test_every_turn_looks_for_drift_once() -> None:
    mode = Mode()
    maintenance = kept(mode)
    while mode.now < 104:
        maintenance.run()
        mode.now = maintenance.due
    steps = [second - first for (_, first), (_, second) in pairwise(mode.asked)]
    assert steps == pytest.approx([CHECK_SECONDS] * len(steps))
    begun = [at for what, at in mode.asked if what == "maintain"]
    assert [second - first for first, second in pairwise(begun)] == [MAINTAIN_SECONDS] * 2


def test_drift_and_a_request_are_maintained_at_once() -> None:
    mode = Mode()
    maintenance = kept(mode)
    mode.drifts = True
    assert maintenance.run()
    mode.now += CHECK_SECONDS / 10
    assert not maintenance.run()
    maintenance.request()
    assert maintenance.due <= mode.now
    assert maintenance.run()
    assert [what for what, _ in mode.asked] == ["check", "maintain", "maintain"]
