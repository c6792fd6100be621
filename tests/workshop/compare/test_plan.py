"""The order of measurements: everybody takes turns."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from hybrid_proxy.workshop.compare.plan import LOADS, METRICS, Settings, Step, control_first, steps
from hybrid_proxy.workshop.compare.progress import Progress
from hybrid_proxy.workshop.compare.result import Cell

ALL = ("ebpf", "nftables", "iptables")
SETTINGS = Settings(modes=ALL, sizes=(10, 1000), backends=2, rounds=6, seconds=1, changes=3)


def test_every_mode_has_every_step_once() -> None:
    made = list(steps(SETTINGS, ALL))
    assert len(made) == len({step.key for step in made}) == 2 * 6 * 3 * 3


def test_rounds_are_interleaved() -> None:
    for kind in ("start", "traffic", "change"):
        order = [step for step in steps(SETTINGS, ALL) if step.kind == kind and step.size == 10]
        assert [step.round for step in order] == sorted(step.round for step in order)
        for number in range(6):
            assert {step.mode for step in order if step.round == number} == set(ALL)


def test_nobody_is_always_first_or_after_the_same_one() -> None:
    order = [step for step in steps(SETTINGS, ALL) if step.kind == "traffic" and step.size == 10]
    firsts = Counter(order[n * 3].mode for n in range(6))
    assert firsts == dict.fromkeys(ALL, 2)
    for mode in ALL:
        before = {order[i - 1].mode for i in range(1, len(order)) if order[i].mode == mode}
        assert len(before - {mode}) == 2


def test_a_round_has_several_turns_of_traffic() -> None:
    made = list(steps(msgspec.structs.replace(SETTINGS, turns=2, sizes=(10,)), ALL))
    kinds = [step.kind for step in made[:12]]
    assert kinds == ["start"] * 3 + ["traffic"] * 6 + ["change"] * 3
    assert len({step.key for step in made}) == len(made) == 6 * 12
    assert [step.round for step in made if step.kind == "traffic"][::3] == list(range(12))


def test_a_mode_that_does_not_work_has_no_steps() -> None:
    assert {step.mode for step in steps(SETTINGS, ("nftables",))} == {"nftables"}
    assert list(steps(SETTINGS, ())) == []


def test_the_control_is_first_in_half_of_the_cases() -> None:
    for load in LOADS:
        turns = [control_first(Step("traffic", "ebpf", 10, number), load) for number in range(6)]
        assert sum(turns) == 3


def test_a_live_service_is_measured_with_its_traffic_alone() -> None:
    live = Settings(("ebpf",), (7,), 1, 3, 1, 0, live="default/web")
    assert [step.kind for step in steps(live, ("ebpf",))] == ["live"] * 3


def test_the_time_that_is_left_is_that_of_steps_of_the_same_kind(capsys: pytest.CaptureFixture[str]) -> None:
    left = list(steps(msgspec.structs.replace(SETTINGS, rounds=1, sizes=(10,)), ("ebpf", "nftables")))
    shown = Progress(6, left, ())
    for step, took in zip(left, (60.0, 180.0, 600.0, 600.0, 0.0, 0.0), strict=True):
        shown.begins(step)
        shown.ends(Cell(step, took))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "compare  1/6  ebpf          10 services  starts, round 1"
    # Five like the first start, four like the mean of both; then a load like the first, and two like the mean of all.
    assert [line.rpartition(", ")[2] for line in lines[1:]] == [
        "about 5 min left", "about 8 min left", "about 20 min left", "about 12 min left", "about 0 min left",
    ]  # fmt: skip


def test_names_of_metrics_are_unique() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
