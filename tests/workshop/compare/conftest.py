"""The tools that `make setup` unpacks for comparisons."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "build/tools/usr/sbin"


@pytest.fixture(autouse=True, scope="session")
def _tools() -> None:
    os.environ["PATH"] = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
