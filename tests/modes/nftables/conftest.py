"""A network namespace of its own for a test."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from controller.lab.namespace import CLONE_NEWNET

LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def namespace() -> Iterator[None]:
    """The test's thread is in a new network namespace, which goes with it."""
    if os.geteuid() != 0:
        pytest.skip("needs root: makes a network namespace of its own")
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if LIBC.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        yield
    finally:
        LIBC.setns(before, CLONE_NEWNET)
        os.close(before)
