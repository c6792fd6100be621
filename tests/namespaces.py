"""Network namespaces of their own for tests: one, or a lab of them."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from socket import AF_INET6
from typing import Final

import pytest
from pyroute2 import IPRoute

from hybrid_proxy.workshop.lab.namespace import CLONE_NEWNET
from hybrid_proxy.workshop.lab.network import Lab
from tests.waiting import until

_LIBC = ctypes.CDLL(None, use_errno=True)
LOCAL: Final = 255  # RT_TABLE_LOCAL
_LABS = itertools.count()


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


@contextmanager
def new_lab(letter: str, pods: int, *, remote: int = 0) -> Iterator[Lab]:
    """A lab whose name, which begins with the letter, is this process's alone; skips without root."""
    if os.geteuid() != 0:
        pytest.skip("needs root: makes network namespaces and a cgroup of its own")
    with Lab(f"{letter}{os.getpid()}x{next(_LABS)}", pods, remote=remote) as made:
        yield made


def loopback(*addresses: str) -> None:
    """Bring up the loopback of the namespace that the calling thread is in, with these addresses.

    The kernel makes the local routes of IPv6 addresses later (addrconf_dad_work); until then, packets to them are lost.
    """
    with IPRoute() as link:
        index = link.link_lookup(ifname="lo")[0]
        link.link("set", index=index, state="up")
        for address in addresses:
            link.addr("add", index=index, address=address, prefixlen=128 if ":" in address else 32)
        wanted = {address for address in addresses if ":" in address}

        until(
            lambda: wanted <= {str(route.get("dst")) for route in link.get_routes(family=AF_INET6, table=LOCAL)},
            f"local routes of {wanted}",
        )
