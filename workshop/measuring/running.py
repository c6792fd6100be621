"""Runs load generators, and measures the CPU time of a load."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hybrid_proxy.workshop.measuring.loads import Found, LoadFailed, busy_seconds, found, interrupt_seconds


def measured(
    load: str, command: Sequence[str], seconds: int, used: Callable[[], float] | None = None, tries: int = 2
) -> Found:
    """Runs a load generator and parses its output; iperf3's server may need a moment after the last client.

    `used` returns the CPU seconds of client, server and proxy so far.

    Raises:
        LoadFailed: nothing was measured.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    while True:
        before = _clocks(ticks, used)
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds + 60, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise LoadFailed(f"{load}: no end after {seconds + 60} s") from error
        busy, own = (now - then for now, then in zip(_clocks(ticks, used), before, strict=True))
        try:
            return found(load, done.stdout, busy, own if used else None)
        except LoadFailed as error:
            tries -= 1
            if not tries:
                errors = done.stderr.strip()
                raise LoadFailed(f"{error} {errors[-200:]}".strip()) from error
            time.sleep(0.5)


def _clocks(ticks: int, used: Callable[[], float] | None) -> tuple[float, float]:
    """Returns the CPU seconds of the machine, and those of client, server and proxy with the kernel's interrupts."""
    stat = Path("/proc/stat").read_text()
    return busy_seconds(stat, ticks), (used() + interrupt_seconds(stat, ticks)) if used else 0.0
