"""Records the time of a start by its parts, which several threads may do at once.

A process starts once, so there is one recorder, `START`. After the start nothing is recorded, at no cost.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hybrid_proxy.dataplane.reports import StartPart


class Timings:
    """The parts of a start, in the order in which they ended. Any thread may add one."""

    def __init__(self) -> None:
        self.parts: list[StartPart] = []
        self.processor: float | None = None  # seconds of all threads, until the end
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # hundredths of a second
        self._origin = int(ticks) / os.sysconf("SC_CLK_TCK")  # since the machine began
        self._begun: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record what the thread does in the block as this part."""
        if self.processor is not None:
            yield
            return
        began, used = self.elapsed(), time.thread_time()
        try:
            yield
        finally:
            self.parts.append(StartPart(name, began, self.elapsed() - began, time.thread_time() - used))

    def begin(self, name: str) -> None:
        """Begin a part that other threads do, or that is waited for."""
        self._begun[name] = self.elapsed()

    def end(self, name: str) -> None:
        """End a part; does nothing if it was not begun or the start is over."""
        began = self._begun.pop(name, None)
        if began is not None and self.processor is None:
            self.parts.append(StartPart(name, began, self.elapsed() - began))

    def imported(self) -> None:
        """Record everything so far as the interpreter and its imports."""
        self.parts.append(StartPart("imports", 0.0, self.elapsed(), time.process_time()))

    def close(self) -> None:
        """End the start."""
        if self.processor is None:
            self.processor = time.process_time()

    def elapsed(self) -> float:
        """Return the seconds since this process began."""
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self._origin)


START = Timings()
