"""A kernel for the tests that start guests themselves."""

from __future__ import annotations

import os

import pytest

from .kernels import Kernel, get
from .machine import missing_programs


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    if os.geteuid() != 0:
        pytest.skip("needs root: the guest reads this machine's files as root")
    if missing := missing_programs():
        pytest.skip(f"not installed: {' '.join(missing)} (make vm)")
    return get("6.1", print)
