"""`make demo` and `hybrid-proxy lab` are what a newcomer tries first: they must do what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workshop.lab import namespace
from workshop.lab.network import RUN

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

NAME = f"c{os.getpid()}xd"
ROOT = Path(__file__).resolve().parents[2]


def lab(*arguments: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "controller", "lab", *arguments, "--name", NAME]
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=timeout)


def traces() -> list[Path]:
    found = [*namespace.FOLDER.glob(f"hp-{NAME}-*"), namespace.cgroup2_root() / f"hp-{NAME}", RUN / NAME]
    return [path for path in found if path.exists()]


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended but whose parent has not noticed does not."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_demonstration_does_what_it_says() -> None:
    result = lab("demo", "-o", "json")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["passed"]
    assert len(summary["checks"]) >= 20
    assert all(good for good, _ in summary["checks"])
    assert not traces()


def test_a_lab_stays_up_until_it_is_taken_down() -> None:
    try:
        result = lab("up", "-o", "json")
        assert result.returncode == 0, result.stderr
        up = json.loads(result.stdout)
        pod = up["places"]["pod1"]["namespace"]
        load = [sys.executable, "-m", "workshop.lab.traffic", "load", "connections", "10.96.0.10:80", "--count", "30"]
        asked = subprocess.run(["nsenter", f"--net={pod}", *load], capture_output=True, text=True, cwd=ROOT, timeout=30)
        final = json.loads(asked.stdout.splitlines()[-1])
        assert (final["answered"], final["failed"]) == (30, 0)
        assert set(final["backends"]) == {"pod1", "pod2", "pod3"}

        again = lab("up")
        assert again.returncode != 0
        assert "stands already" in again.stderr
        assert alive(up["agent"]["pid"]), "the second `up` ended the agent of the first"
    finally:
        down = lab("down")
    assert down.returncode == 0, down.stderr
    assert not traces()
    assert not alive(up["agent"]["pid"])


def test_taking_down_what_is_not_there_says_so() -> None:
    down = lab("down")
    assert down.returncode != 0
    assert f"no lab named '{NAME}'" in down.stderr
    assert "Traceback" not in down.stderr


@pytest.mark.parametrize("arguments", [("up", "--pods", "1"), ("demo", "--pods", "999")])
def test_impossible_labs_are_refused_with_a_message(arguments: tuple[str, ...]) -> None:
    result = lab(*arguments)
    assert result.returncode != 0
    assert "pods" in result.stderr
    assert "Traceback" not in result.stderr
    assert not traces()
