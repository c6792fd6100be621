"""Frees ids and slots that no program and no flow uses any more, by what the collector's thread has found."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from hybrid_proxy.dataplane.modes.ebpf.flows.collector import FlowGC
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store


def free(store: Store, gc: FlowGC, node: NDArray[Any]) -> None:
    """Frees what the collector found unused, and says what its next scan searches for. `node` is the row of the map."""
    graced, scanned = gc.collect()
    if gc.opening_flows is not None:
        node["half_open"], gc.opening_flows = gc.opening_flows, None
    store.graced(graced)
    if scanned is not None:
        store.scanned(*scanned)
    plan = store.plan
    gc.search_for(*plan.pools.candidates)
    gc.recounts = bool(plan.counts_flows)
    if plan.needs_recount():  # now, and not with the next scan
        gc.scan_now()
