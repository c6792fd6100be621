"""Grace periods: when every program that runs now has ended; and the clock that programs use."""

from __future__ import annotations

import ctypes
import os
import platform
import time

__all__ = ["jiffies_per_second", "wait_for_programs"]

MEMBARRIER = {"x86_64": 324, "aarch64": 283}
MEMBARRIER_CMD_GLOBAL = 1
CLOCK_MONOTONIC_COARSE = 6
FALLBACK_SECONDS = 2.0


def jiffies_per_second() -> int:
    """The kernel's HZ: the coarse clock advances once for each jiffy."""
    return round(1 / time.clock_getres(CLOCK_MONOTONIC_COARSE))


def wait_for_programs() -> None:
    """Return when every BPF program that was running at the call has ended.

    membarrier(GLOBAL) waits for an RCU grace period (7-17 ms). It does nothing on one CPU and fails with
    nohz_full; there, far more time passes than a program can take.
    """
    number = MEMBARRIER.get(platform.machine())
    if number is not None and (os.cpu_count() or 1) > 1:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(number, MEMBARRIER_CMD_GLOBAL, 0, 0) == 0:
            return
    time.sleep(FALLBACK_SECONDS)
