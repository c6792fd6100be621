"""The tools that `make setup` unpacks for comparisons."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "build/tools/usr/sbin"


@pytest.fixture(autouse=True, scope="module")
def _tools() -> Iterator[None]:
    """They are found while a file's tests run; `compare` also lets SIGTERM interrupt the process."""
    former = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(TOOLS), prepend=os.pathsep)
        yield
    signal.signal(signal.SIGTERM, former)
