"""Folders for pins on the BPF file system, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybrid_proxy.workshop.lab import pins


@contextmanager
def pin_folder() -> Iterator[Path]:
    """As `workshop.lab.pins` has it; skips without root."""
    if os.geteuid() != 0:
        pytest.skip("needs root (CAP_BPF): pins on the BPF file system")
    with pins.pin_folder() as folder:
        yield folder
