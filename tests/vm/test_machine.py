"""A real guest: another kernel, this machine's files, and nothing left of it afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

from .kernels import ROOT, Kernel
from .machine import TIMED_OUT, Machine
from .matrix import MODES

# Another guest may run before ours. `make test` has one all the time, where mode ipvs is tested.
pytestmark = [pytest.mark.root, pytest.mark.guest, pytest.mark.long, pytest.mark.timeout(1800)]


def guests(parent: int) -> list[int]:
    """The processes of QEMU that a process started; setpriv(1) becomes QEMU."""
    every = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in every if is_guest(pid) and f"PPid:\t{parent}\n" in proc(pid, "status")]


def is_guest(pid: int) -> bool:
    return proc(pid, "cmdline").startswith("qemu-system-x86_64")


def proc(pid: int, name: str) -> str:
    """A file of proc(5); nothing when the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_command_runs_on_the_other_kernel_and_leaves_only_what_it_shared(kernel: Kernel, tmp_path: Path) -> None:
    beside = ROOT / "build" / "written-by-a-guest"
    script = f"uname -r; modprobe ip_vs && echo loaded; echo lost > {beside}; echo kept > {tmp_path}/kept; exit 7"
    pieces: list[str] = []
    done = Machine(kernel).run(["sh", "-c", script], progress=pieces.append, shared=tmp_path)
    assert (done.code, done.output) == (7, f"{kernel.release}\nloaded\n")
    assert "".join(pieces) == done.output
    assert (tmp_path / "kept").read_text() == "kept\n"
    assert not beside.exists()


@pytest.mark.parametrize("kernel", ["6.1-arm64"], indirect=True)
def test_a_guest_of_another_architecture_has_all_modes(kernel: Kernel) -> None:
    """Its Python, what is compiled of ours, the BPF programs and the tools of modes."""
    done = Machine(kernel).run([str(ROOT / ".venv/bin/hybrid-proxy"), "modes", "-o", "json"])
    found = json.loads(done.output[done.output.index("[") :])
    assert [each["mode"] for each in found if each["works"]] == list(MODES), done.output


def test_a_guest_ends_with_its_time(kernel: Kernel) -> None:
    done = Machine(kernel).run(["sleep", "60"], timeout=8)
    assert done.code == TIMED_OUT
    assert guests(os.getpid()) == []


def test_a_guest_ends_when_its_runner_is_killed(kernel: Kernel) -> None:
    words = [sys.executable, "-m", "tests.vm", "run", kernel.series, "--", "sleep", "60"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as runner:
        until(lambda: bool(guests(runner.pid)), "a guest that runs", 60)
        started = guests(runner.pid)
        runner.send_signal(signal.SIGKILL)
    until(lambda: not any(map(is_guest, started)), "the guest's end", 20)


def test_a_guest_whose_clock_counts_instructions_comes_up(kernel: Kernel) -> None:
    """With one processor, whatever is asked for: a second one makes its kernel wait for ever."""
    done = Machine(kernel, cpus=2, counted=True).run(["nproc"], timeout=300)
    assert (done.code, done.output) == (0, "1\n")
