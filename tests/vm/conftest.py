"""A kernel for the tests that start guests themselves."""

from __future__ import annotations

import os

import pytest

from .architectures import split
from .kernels import Kernel, get
from .machine import missing_programs


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> Kernel:
    series = getattr(request, "param", "6.1")
    if os.geteuid() != 0:
        pytest.skip("needs root: the guest reads this machine's files as root")
    if missing := missing_programs(split(series)[1]):
        pytest.skip(f"not installed: {' '.join(missing)} (make vm)")
    return get(series, print)
