"""Reads tables of flows, and runs the programs that take keys of flows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.kernel.bpf import Map, run_on_packet
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import abi_constants, dtype_of

ETHERNET = bytes(12) + b"\x08\x00"


def flow_arrays(known: Map, family: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns keys and values of a table of flows."""
    return known.items(dtype_of(f"flow{family}_key"), dtype_of("flow"))


def run_in_parts(program: int, family: int, keys: NDArray[Any], idle: NDArray[np.int64] | None = None) -> None:
    """Run a program of `inspect` that takes keys of flows on all of these; `idle` (jiffies) is for the sweep."""
    size = abi_constants()["SWEEP_KEYS"]
    for start in range(0, len(keys), size):
        part = slice(start, start + size)
        run_on_packet(program, ETHERNET + _request(family, keys[part], None if idle is None else idle[part]))


def _request(family: int, keys: NDArray[Any], idle: NDArray[np.int64] | None) -> bytes:
    request = np.zeros(1, dtype=dtype_of("sweep"))
    request["count"], request["family"] = len(keys), family
    if idle is not None:
        request["idle"][0, : len(keys)] = idle
    rows = request["keys"][0]
    for name in ("sport", "dport", "protocol"):
        rows[name][: len(keys)] = keys[name]
    for name in ("saddr", "daddr"):
        if family == 6:
            rows[name][: len(keys)] = keys[name]
        else:
            rows[name][: len(keys), 0] = keys[name]
    return request.tobytes()
