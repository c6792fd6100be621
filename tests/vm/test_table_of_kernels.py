"""What the suite found on a kernel, as a cell of the table; a run of one combination changes its cell alone."""

from __future__ import annotations

from typing import Any

import pytest

from .cells import Cell, Kernels, count
from .features import FEATURES, excuse, skipped_for


def phases(nodeid: str, *outcomes: str, **fields: Any) -> list[dict[str, Any]]:
    """The reports of one test; fewer outcomes than three: the others passed."""
    results = [*outcomes, *["passed"] * 3][:3]
    return [
        {
            "nodeid": nodeid,
            "when": when,
            "outcome": outcome,
            "longrepr": None,
            **(fields if outcome != "passed" else {}),
        }
        for when, outcome in zip(("setup", "call", "teardown"), results, strict=True)
        if not (when == "call" and results[0] != "passed")
    ]


def test_each_test_counts_once_with_its_worst_outcome() -> None:
    reports = [
        *phases("a::passes"),
        *phases("a::fails", "passed", "failed"),
        *phases("a::cannot_start", "failed"),
        *phases("a::fails_late", "passed", "passed", "failed"),
        *phases("a::gap", "passed", "skipped", wasxfail="gap"),
        *phases("a::skips", "skipped", longrepr=("a.py", 3, "Skipped: missing feature: TCX link (EINVAL)")),
    ]
    found = count(reports)
    assert (found.passed, found.expected) == (1, 1)
    assert found.failed == ["a::fails", "a::cannot_start", "a::fails_late"]
    assert found.skipped == {"TCX link": 1}


def test_a_cell_says_what_passed_what_failed_and_why_something_was_skipped() -> None:
    skipped = {"TCX link": 3, "mode ebpf has a way of its own": 4, "mode ebpf: no": 1}
    found = Cell(core=True, passed=40, expected=2, skipped=skipped)
    assert found.text == "40 passed, 2 not yet, 3 skipped: TCX link, 5 of other modes"
    stopped = Cell(passed=1, failed=["t.py::one[ebpf-v4]", "t.py::one[ebpf-v6]"], unfinished="the guest\nstopped")
    assert stopped.text == "1 passed, **2 failed**: `one` (2), **not finished**: the guest stopped (whole suite)"


TABLE = """\
| mode | 5.10 (5.10.0-1-amd64) | 6.1 (6.1.0-1-amd64) |
|---|---|---|
| ebpf | 1 passed | 2 passed |
| ipvs |  | 7 passed |"""


@pytest.mark.parametrize(("mode", "head", "before", "after"), [
    pytest.param("ipvs", "6.1 (6.1.0-1-amd64)", "7 passed", "8 passed (whole suite)", id="its own cell alone"),
    pytest.param("ebpf", "6.1 (6.1.0-2-amd64)", "6.1 (6.1.0-1-amd64)", "6.1 (6.1.0-2-amd64)", id="a newer release"),
])  # fmt: skip
def test_a_run_changes(mode: str, head: str, before: str, after: str) -> None:
    cell = after if "passed" in after else "2 passed"
    assert Kernels.render(Kernels.joined(Kernels.read(TABLE), {(mode,): {head: cell}})) == TABLE.replace(before, after)


def test_a_kernel_outside_the_list_gets_a_column() -> None:
    heads = Kernels.columns(Kernels.joined(Kernels.read(TABLE), {("ebpf",): {"6.6 (6.6.0-1-amd64)": "1 passed"}}))
    assert heads[-1] == "6.6 (6.6.0-1-amd64)"


@pytest.mark.parametrize(
    ("release", "accepted"), [("5.10.0-46-amd64", True), ("6.1.0-56-amd64", True), ("6.12.107+deb13-amd64", False)]
)
def test_a_missing_feature_is_no_excuse_on_a_kernel_that_is_new_enough(release: str, accepted: bool) -> None:
    refused = excuse("Skipped: missing feature: TCX link (EINVAL)", release)
    assert (refused is None) is accepted
    if refused:
        assert "since 6.6" in refused


def test_other_skips_are_not_judged_and_unknown_features_are_refused() -> None:
    assert excuse("Skipped: needs root", "6.12.1") is None
    assert "not in the table" in (excuse("Skipped: missing feature: teleporter", "5.10.0") or "")


def test_every_feature_says_since_when_and_who_says_so() -> None:
    assert all(feature.first >= (2, 6) and feature.source for feature in FEATURES.values())
    assert skipped_for("Skipped: missing feature: ip_vs") == "ip_vs"
