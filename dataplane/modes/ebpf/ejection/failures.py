"""Reads how connections to backends failed from the map `failures`, which the programs write."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.reports import FailureHistory


def histories(maps: Mapping[str, Map]) -> dict[int, FailureHistory]:
    """Returns the failures by backend id; empty if the map has the layout of another version."""
    ids, rows, known = _read(maps)
    boot = time.time() - time.monotonic()
    found = {}
    for number, row in zip(ids[known].tolist(), rows[known], strict=True):
        refused_at, unanswered_at = (
            boot + int(row[name]) / 1e9 if row[name] else None for name in ("refused_at", "unanswered_at")
        )
        found[number] = FailureHistory(int(row["refused"]), refused_at, int(row["unanswered"]), unanswered_at)
    return found


def failed_connections(maps: Mapping[str, Map]) -> dict[int, int]:
    """Returns the number of failed connections by backend id; a count may restart at 0."""
    ids, rows, known = _read(maps)
    counts = rows["refused"][known].astype(np.int64) + rows["unanswered"][known]
    return dict(zip(ids[known].tolist(), counts.tolist(), strict=True))


def forget_former(maps: Mapping[str, Map]) -> None:
    """Delete the rows of removed backends."""
    ids, _, known = _read(maps)
    if not known.all():
        maps["failures"].delete_batch(ids[~known])


def _read(maps: Mapping[str, Map]) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
    """Returns ids of backends, rows, and which of these belong to the backends that have these ids now."""
    known, kind = maps.get("failures"), layout.dtype_of("failures")
    if known is None or known.value_size != kind.itemsize:
        return np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=kind), np.zeros(0, dtype=np.bool_)
    ids, rows = known.items(np.dtype(np.uint32), kind)
    table = maps["backends"].view(layout.dtype_of("backend"))
    inside = ids < len(table)
    now = table[np.where(inside, ids, 0)]
    same: NDArray[np.bool_] = inside & (now["service"] == rows["service"]) & (now["port"] == rows["port"])
    same &= (now["address"] == rows["address"]).all(axis=1)
    return ids, rows, same
