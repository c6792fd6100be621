"""The pytest plugin, in a pytest of its own: which cases run, what is written down, which skips are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .machine import GUEST

CASES = """\
import pytest
from vm.features import missing

@pytest.fixture(params=["ebpf", "userspace"])
def mode(request):
    return request.param

def test_of_a_mode(mode):
    pass

def test_of_none():
    pass

def test_lacks():
    missing("dummy device", "EOPNOTSUPP")
"""
AWAY = """\
import pytest
from vm import plugin

plugin._has["of none"] = False

@pytest.mark.kernel("of none")
@pytest.mark.core(cases=("one left", "two right"))
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("number", ["one", "two"])
def test_away(number, side):
    pass
"""


def run(folder: Path, *arguments: str, cases: str = CASES, **environment: str) -> str:
    """What pytest says of `cases`."""
    (folder / "test_cases.py").write_text(cases)
    clean = {name: value for name, value in os.environ.items() if name != GUEST}
    variables = clean | {"PYTHONPATH": str(Path(__file__).parents[1])} | environment
    words = [sys.executable, "-m", "pytest", "-p", "vm.plugin", "-p", "no:cacheprovider", "-rA", *arguments, "."]
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=60).stdout


def test_one_mode_can_be_asked_for(tmp_path: Path) -> None:
    said = run(tmp_path, "--mode=userspace")
    assert "PASSED test_cases.py::test_of_a_mode[userspace]" in said
    assert "1 passed, 3 deselected" in said


def test_some_cases_of_a_test_run_on_a_slow_processor_and_the_others_are_long(tmp_path: Path) -> None:
    said = run(tmp_path, "--collect-only", "-q", "--kernel=none", "-m", "not long", cases=AWAY)
    assert {line.partition("::")[2] for line in said.splitlines() if "::" in line} == {
        "test_away[one-left]", "test_away[two-right]",
    }  # fmt: skip


def test_every_report_is_written_down(tmp_path: Path) -> None:
    run(tmp_path, "--report-to=reports")
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    calls = {each["nodeid"].partition("::")[2]: each["outcome"] for each in reports if each["when"] == "call"}
    assert calls == {
        "test_of_a_mode[ebpf]": "passed",
        "test_of_a_mode[userspace]": "passed",
        "test_of_none": "passed",
        "test_lacks": "skipped",
    }


@pytest.mark.parametrize(("guest", "outcome"), [({}, "1 skipped"), ({GUEST: "6.1"}, "1 failed")])
def test_a_guest_accepts_no_missing_feature_that_its_kernel_is_known_to_have(
    tmp_path: Path, guest: dict[str, str], outcome: str
) -> None:
    said = run(tmp_path, "-k", "lacks", **guest)
    assert outcome in said
    assert ("which Linux has since 2.6" in said) is bool(guest)
