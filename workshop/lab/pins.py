"""Makes folders for pins on the BPF file system, for tests and benchmarks that open maps without an agent."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hybrid_proxy.dataplane.kernel.host_paths import bpf_fs

_PREFIX: Final = "hybrid-proxy-workshop-"
_NUMBERS: Final = itertools.count()


@contextmanager
def pin_folder() -> Iterator[Path]:
    """An empty folder, which goes with the block and everything in it.

    Raises:
        Unsupported: there is no BPF file system, and none can be mounted.
    """
    root = bpf_fs(mount=True)
    _sweep(root)
    folder = root / f"{_PREFIX}{os.getpid()}-{next(_NUMBERS)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        if folder.exists():
            shutil.rmtree(folder)


@functools.cache
def _sweep(root: Path) -> None:
    """Remove the pins of processes that were killed: their links would stay attached, their maps in memory."""
    for folder in root.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)  # another process may be sweeping it, too
