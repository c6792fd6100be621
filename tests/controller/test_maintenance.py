"""When the mode is maintained: often enough for what others take away, and at once when something is reported."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hybrid_proxy.controller.agent.maintenance import MAINTAIN_SECONDS, Maintenance
from hybrid_proxy.dataplane.kernel.repairs import RepairLog


class Mode:
    """A mode, and the times at which it was maintained."""

    unrepaired: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.now = 100.0
        self.maintained: list[float] = []
        self.programmer = self
        self.repaired = RepairLog()

    def maintain(self) -> None:
        self.maintained.append(self.now)


def test_a_report_of_repairs_names_two_things() -> None:
    mode, told = Mode(), list[str]()
    events: Any = SimpleNamespace(event=lambda *words, by: told.append(words[-1]))
    mode.choice = SimpleNamespace(effective="ebpf")  # type: ignore[attr-defined]
    made = Maintenance(mode, SimpleNamespace(drift=()), events, clock=lambda: mode.now)  # type: ignore[arg-type]
    for damage in (["x" * 40] * 5, ["y" * 150]):
        mode.repaired.add(damage, len(damage))
        made.request()
        made.run()
    assert told == [
        f"5 things were repaired in mode ebpf; {'; '.join(['x' * 40] * 2)} and 3 more",
        f"1 thing was repaired in mode ebpf; {'y' * 150}",
    ]


def kept(mode: Mode) -> Maintenance:
    parts: Any = SimpleNamespace(drift=()), None
    return Maintenance(mode, *parts, clock=lambda: mode.now)  # type: ignore[arg-type]


def test_what_others_take_away_is_noticed_within_a_second() -> None:
    mode = Mode()
    maintenance = kept(mode)
    while mode.now < 104:
        maintenance.run()
        mode.now = maintenance.due
    assert len(mode.maintained) > 3
    assert all(second - first < 1 for first, second in pairwise(mode.maintained))


def test_a_request_is_maintained_at_once() -> None:
    mode = Mode()
    maintenance = kept(mode)
    mode.now += MAINTAIN_SECONDS
    assert maintenance.run()
    assert not maintenance.run()
    maintenance.request()
    assert maintenance.due <= mode.now
    assert maintenance.run()
