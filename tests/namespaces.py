"""A network namespace of its own for a test."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyroute2 import IPRoute

from controller.lab.namespace import CLONE_NEWNET

_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def fresh() -> Iterator[None]:
    """The calling thread is in a new network namespace, which goes with the block; skips without root."""
    if os.geteuid() != 0:
        pytest.skip("needs root: makes a network namespace of its own")
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if _LIBC.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        try:
            yield
        finally:
            if _LIBC.setns(before, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(before)


def loopback(*addresses: str) -> None:
    """Bring up the loopback of the namespace that the calling thread is in, with these addresses."""
    with IPRoute() as link:
        index = link.link_lookup(ifname="lo")[0]
        link.link("set", index=index, state="up")
        for address in addresses:
            link.addr("add", index=index, address=address, prefixlen=128 if ":" in address else 32)
