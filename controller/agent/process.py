"""This process: its log, and its memory."""

from __future__ import annotations

import ctypes
import gc
import logging
import resource
import sys
from pathlib import Path
from typing import Final

from hybrid_proxy.controller.settings.config import Config

SWITCH_SECONDS: Final = 0.001  # Python's 5 ms would be what a change waits while a page of metrics is made
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # malloc.h


def start_logging(config: Config) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        from pythonjsonlogger.json import JsonFormatter

        handler.setFormatter(JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    level = logging.DEBUG if config.verbosity >= 4 else logging.INFO
    logging.getLogger("hybrid_proxy").setLevel(level)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def begin_fast() -> None:
    """Before anything is read: nothing that the start makes is garbage, and what it frees goes back to the kernel.

    Large buffers (pages of a list) are given back when they are freed, and threads share one arena. Otherwise each
    thread that decodes keeps holes of its own, 4 MB at 10,000 services (mallopt(3)).
    """
    gc.disable()
    sys.setswitchinterval(SWITCH_SECONDS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, 128 << 10)


def settle_down() -> None:
    """After the first table: the collector need not look at it again, and memory that decoding needed goes back."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()
    trim_memory()


def trim_memory() -> None:
    """Give back to the kernel what was freed, also between what is in use; less than 2 ms (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
