"""Shared by the benchmarks: rounds, progress and compiled programs."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.measuring.machine import missing_of_modes
from hybrid_proxy.workshop.measuring.stats import rotated

ROOT: Final = Path(__file__).resolve().parents[2]

median = statistics.median


def take_turns(rounds: int, *turns: Callable[[], None]) -> None:
    """Calls all turns in so many rounds and one to warm up; the order rotates as in `compare`."""
    for number in range(rounds + 1):
        for turn in rotated(turns, number):
            turn()


def say(*parts: object) -> None:
    """Prints a line of progress to standard error; standard output ends with the result."""
    print(*parts, file=sys.stderr, flush=True)


def working_modes(made: Lab) -> list[str]:
    """Returns the modes that work on the node of a lab, and logs what the others lack."""
    missing = missing_of_modes(made)
    for mode, reason in missing.items():
        if reason:
            say(f"  {mode} is skipped: {reason}")
    return [mode for mode, reason in missing.items() if not reason]


def built(target: str) -> Path:
    """Compiles a file of this folder by the Makefile's rule for it."""
    done = subprocess.run(
        ["make", "--no-print-directory", "-s", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"make {target} failed:\n{done.stdout}{done.stderr}")
    return ROOT / target
