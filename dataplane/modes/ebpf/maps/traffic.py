"""Reads flows, packets and bytes of backends and services, and moves a backend's figures on when its id is freed.

Programs count by backend alone, each CPU in rows of its own (`bpf/traffic.h`). A service's figures are the sum over
its backends, present and former: the sum of the former ones is in map `traffic_gone`, which only user space writes.
Both maps are pinned, so figures outlive the agent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import abi_constants, dtype_of
from hybrid_proxy.dataplane.modes.ebpf.maps.making import possible_cpus
from hybrid_proxy.dataplane.reports import TrafficCounts

Figures = NDArray[np.uint64]  # a row for each number, a column for each of FIELDS

_GROUPS = 1024  # of backends, read in one go: 0.6 MB for each CPU
FIELDS = TrafficCounts.__struct_fields__  # the order of bpf/traffic.h


class Traffic:
    """The counts of flows, packets and bytes, in two maps.

    Args:
        counted: maps the rows that programs write; called for each reading, because the pages of what stays mapped
            count as the agent's memory, 20 MB of them.
        gone: the sums of each service's former backends.
        cpus: as in the programs' settings; 0: nothing is counted, and all figures are 0.
    """

    def __init__(self, counted: Callable[[], NDArray[Any]], gone: NDArray[Any], cpus: int) -> None:
        self.counting = cpus > 0
        self._counted = counted
        self._cpus = max(cpus, 1)
        self.gone: NDArray[np.uint64] = gone.view(np.uint64).reshape(-1, len(FIELDS))
        self._group = abi_constants()["TRAFFIC_GROUP"]
        self.bytes = counted().nbytes + gone.nbytes
        self.backends = len(counted()) // self._cpus if cpus else 0  # numbers of those that are counted are lower

    @property
    def rows(self) -> NDArray[np.uint64]:
        """Returns rows by group of backends, CPU, place in the group, field."""
        words: NDArray[np.uint64] = self._counted().view(np.uint64)
        return words.reshape(-1, self._cpus, self._group, len(FIELDS))

    def of_backends(self, ids: NDArray[np.int64]) -> Figures:
        """Returns the figures of these backends, over all CPUs."""
        if not self.counting:
            return np.zeros((len(ids), len(FIELDS)), dtype=np.uint64)
        return self._sums(self.rows, ids)

    def _sums(self, rows: NDArray[np.uint64], ids: NDArray[np.int64]) -> Figures:
        figures: Figures = np.zeros((len(ids), len(FIELDS)), dtype=np.uint64)
        known = ids < self.backends
        ids = ids[known]
        figures[known] = rows[ids // self._group, :, ids % self._group].sum(axis=1, dtype=np.uint64)
        return figures

    def of_services(self, owners: NDArray[Any]) -> Figures:
        """Returns the figures of every service; `owners` is the service of each backend, 0 for none."""
        figures: Figures = self.gone.copy()
        rows = self.rows if self.counting else self.rows[:0]
        for first in range(0, len(rows), _GROUPS):
            counted = rows[first : first + _GROUPS]
            if counted.any():  # most backends of a large cluster have no traffic from this node
                _add(figures, counted.sum(axis=1).reshape(-1, len(FIELDS)), owners[first * self._group :])
        return figures

    def give_back(self, services: Collection[int], backends: NDArray[np.int64], owners: NDArray[Any]) -> None:
        """Clear the figures of these freed ids; those of backends are added to their `owners`."""
        if not self.counting:
            return
        if len(backends):
            rows = self.rows  # mapped once: that takes longer than the rest
            figures = self._sums(rows, backends)
            np.add.at(self.gone, owners, figures)
            self._clear(rows, backends[figures.any(axis=1)])
        self.gone[list(services)] = 0

    def only(self, services: Iterable[int], backends: Iterable[int]) -> None:
        """Clear the figures of all other ids than these."""
        if not self.counting:
            return
        unused = np.ones(len(self.gone), dtype=bool)
        unused[list(services)] = False
        self.gone[unused] = 0
        rows = self.rows
        touched: NDArray[np.bool_] = rows.any(axis=(1, 3)).reshape(-1)
        touched[[number for number in backends if number < self.backends]] = False
        self._clear(rows, np.flatnonzero(touched))

    def _clear(self, rows: NDArray[np.uint64], backends: NDArray[np.int64]) -> None:
        rows[backends // self._group, :, backends % self._group] = 0


def _add(figures: Figures, backends: Figures, owners: NDArray[Any]) -> None:
    """Adds the figures of backends to those of their owners; 0 is no owner."""
    busy = np.flatnonzero(backends[: len(owners)].any(axis=1))
    busy = busy[owners[busy] != 0]
    np.add.at(figures, owners[busy], backends[busy])


def traffic_of(maps: Mapping[str, Map]) -> Traffic | None:
    """Returns the figures in pinned maps, to read only; None if traffic is not counted."""
    kind = dtype_of("traffic")
    known = maps.get("traffic")
    if known is None or known.entries <= abi_constants()["TRAFFIC_GROUP"] or known.value_size != kind.itemsize:
        return None
    return Traffic(lambda: maps["traffic"].glimpse(kind), maps["traffic_gone"].view(kind), possible_cpus())


def counts_of(figures: NDArray[np.uint64]) -> TrafficCounts:
    """Returns one row of figures as a value."""
    return TrafficCounts(*figures.tolist())
