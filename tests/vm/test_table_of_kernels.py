"""What the suite found on a kernel, as a cell of the table; a run of one combination changes its cell alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .cells import BEGIN, END, Cell, count, read_cells, render, replace_table, replaced, write_cells
from .features import FEATURES, excuse, skipped_for


def cell(kernel: str = "6.1", mode: str = "ebpf", **fields: Any) -> Cell:
    return Cell(kernel, f"{kernel}.0-1-amd64", mode, "all", "2026-01-01", **fields)


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
    found = count(cell(), reports)
    assert (found.passed, found.expected) == (1, 1)
    assert found.failed == ["a::fails", "a::cannot_start", "a::fails_late"]
    assert found.skipped == {"TCX link": 1}


def test_the_table_shows_what_passed_failed_and_why_it_was_skipped() -> None:
    cells = [
        cell(passed=40, expected=2, skipped={"TCX link": 3, "mode ebpf has a way of its own": 4, "mode ebpf: no": 1}),
        cell("5.10", passed=1, failed=["t.py::one[ebpf-v4]", "t.py::one[ebpf-v6]"], unfinished="the guest stopped"),
        cell("6.1", "ipvs", passed=7),
    ]
    cells[2].subset = "core"
    assert render(cells, ["5.10", "6.1"], ["ebpf", "ipvs"]) == (
        "| mode | 5.10 (5.10.0-1-amd64) | 6.1 (6.1.0-1-amd64) |\n"
        "|---|---|---|\n"
        "| ebpf | 1 passed, **2 failed**, **not finished** | "
        "40 passed, 2 not yet, 3 skipped: TCX link, 5 of other modes |\n"
        "| ipvs | not run | 7 passed (core) |\n"
        "\n"
        "- ebpf on 5.10: `one` failed (2)\n"
        "- ebpf on 5.10: the guest stopped\n"
    )


def test_a_rerun_changes_its_own_cell_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_cells(path, [cell(passed=1), cell("5.10", passed=2)])
    write_cells(path, replaced(read_cells(path), cell(passed=3)))
    assert {(each.kernel, each.passed) for each in read_cells(path)} == {("6.1", 3), ("5.10", 2)}


def test_the_rest_of_the_document_stays() -> None:
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert (
        replace_table(document, lambda old: f"new after {old}\n") == f"before\n{BEGIN}\nnew after old\n{END}\nafter\n"
    )
    with pytest.raises(ValueError, match="no <!-- table: begin -->"):
        replace_table("no marks", str)


def test_what_another_machine_found_stays_in_the_table() -> None:
    kernels, modes = ["5.10", "6.1"], ["ebpf", "ipvs"]
    theirs = render([cell("5.10", failed=["t.py::one[ebpf]"]), cell("6.1", "ipvs", passed=7)], kernels, modes)
    both = render([cell("6.1", "ipvs", passed=8)], kernels, modes, theirs)
    assert both == theirs.replace("7 passed", "8 passed")
    assert render([], kernels, modes, both) == both


def test_a_kernel_outside_the_list_gets_a_column() -> None:
    assert render([cell("6.6", passed=1)], ["5.10"], ["ebpf"]).splitlines()[::2] == [
        "| mode | 5.10 | 6.6 (6.6.0-1-amd64) |",
        "| ebpf | not run | 1 passed |",
    ]


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
