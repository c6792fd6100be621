"""Waits for grace periods, when every running program has ended, and reads the clock that programs use."""

from __future__ import annotations

import time

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.bpf import await_grace_period

CLOCK_MONOTONIC_COARSE = 6
FALLBACK_SECONDS = 2.0


def jiffies_per_second() -> int:
    """Returns the kernel's HZ: the coarse clock advances once for each jiffy."""
    return round(1 / time.clock_getres(CLOCK_MONOTONIC_COARSE))


def wait_for_programs() -> None:
    """Return when every BPF program that was running at the call has ended: after an RCU grace period.

    A caller that may not wait for one waits for far more time than a program that gets its CPU can take.
    """
    # membarrier(2) waits as long, but does nothing on one CPU, where a program may be preempted, nor with nohz_full.
    try:
        await_grace_period()
    except DataplaneError:
        time.sleep(FALLBACK_SECONDS)
