"""Corrects the counts of open flows by a reading of the flows, for algorithms that use the counts.

Programs count up and down (`bpf/open_flows.h`), without an agent, too. They cannot see: flows of a service
that asks for the count only now, of programs of another version, flows that user space hands over or moves into larger
tables, and what was counted while the counts were copied into a larger map.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import abi_constants, dtype_of, signed

Numbers = NDArray[np.int64]


class Recount:
    """One reading of all flows: made before the reading, given each table, finished afterwards."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        backends = maps["backends"].glimpse(dtype_of("backend"))
        self._ids = np.flatnonzero(backends["flags"] & abi_constants()["BACKEND_COUNTED"])
        self._rows = maps["loads"].glimpse(dtype_of("load"))
        self._before = self._rows[self._ids]
        self._seen: Numbers = np.zeros(len(backends), dtype=np.int64)

    def add(self, flows: NDArray[Any]) -> None:
        """Count the flows of one table that evicts nothing."""
        replies = flows["flags"] & (abi_constants()["FLOW_REPLY"] | abi_constants()["FLOW_OTHERS"])
        backends = flows["backend"][replies == abi_constants()["FLOW_REPLY"]]
        self._seen += np.bincount(backends[backends < len(self._seen)], minlength=len(self._seen))

    def finish(self) -> int:
        """Write the corrections. Returns how many backends had wrong counts."""
        after, ids = self._rows[self._ids], self._ids
        wanted = corrections(self._before, after, self._seen[ids])
        wrong = wanted != signed(after["correction"])
        self._rows["correction"][ids[wrong]] = wanted[wrong].astype(np.uint32)
        return int(np.count_nonzero(wrong))


def corrections(before: NDArray[Any], after: NDArray[Any], seen: Numbers) -> Numbers:
    """PURE. Returns the correction that each row should have, if the flows were read between two readings of it.

    A flow that began or ended meanwhile may have been seen or not. As long as that explains the difference, the
    correction stays what it is: so where flows begin and end all the time, nothing is made worse, and where none does,
    the count is exact.
    """
    opened, closed = (signed(after[name] - before[name]) for name in ("opened", "closed"))
    counted = signed(before["opened"] - before["closed"])
    return np.clip(signed(after["correction"]), seen - opened - counted, seen + closed - counted)
