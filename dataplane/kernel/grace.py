"""Waits for grace periods, when every running program has ended, and reads the clock that programs use."""

from __future__ import annotations

import ctypes
import os
import platform
import time

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.bpf import await_grace_period

MEMBARRIER = {"x86_64": 324, "aarch64": 283}
MEMBARRIER_CMD_GLOBAL = 1
CLOCK_MONOTONIC_COARSE = 6
FALLBACK_SECONDS = 2.0


def jiffies_per_second() -> int:
    """Returns the kernel's HZ: the coarse clock advances once for each jiffy."""
    return round(1 / time.clock_getres(CLOCK_MONOTONIC_COARSE))


def wait_for_programs() -> None:
    """Return when every BPF program that was running at the call has ended: after an RCU grace period.

    membarrier(GLOBAL) waits for one (7-17 ms). It does nothing on one CPU, where a program may have been preempted, and
    fails with nohz_full; there the change of a map waits. A caller that may do neither waits for far more time than a
    program that gets its CPU can take.
    """
    if not (_barrier() or _changed_a_map()):
        time.sleep(FALLBACK_SECONDS)


def _barrier() -> bool:
    number = MEMBARRIER.get(platform.machine())
    if number is None or (os.cpu_count() or 1) == 1:
        return False
    return bool(ctypes.CDLL(None, use_errno=True).syscall(number, MEMBARRIER_CMD_GLOBAL, 0, 0) == 0)


def _changed_a_map() -> bool:
    try:
        await_grace_period()
    except DataplaneError:
        return False
    return True
