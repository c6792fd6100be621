"""Reads how long the clients of each service waited for a first packet, and chooses which services metrics name."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.first_packets import BOUNDS, STEPS
from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import dtype_of, signed

Counts = NDArray[np.uint32]  # a column for each step; they wrap

NAMED: Final = 10  # services that metrics name
BUSIER: Final = 2  # times as many first packets as a service that is named let another take its place
OTHERS: Final = "others"  # of the common series; names of service ports have a slash
GONE: Final = 0  # the row of the sums of former services: no service has this number


class FirstPackets:
    """The histograms of all services. The service ports with the most first packets have a series each in metrics.

    Every count gets into one series, which only grows until it ends. So a service port that takes another's place
    begins at 0: what it counted before is in the common series. Each family of a service port has a number of its own.

    Args:
        rows: maps what the programs count, by service; called for each reading.
        counting: whether they do.
        most: service ports that metrics name.
    """

    def __init__(self, rows: Callable[[], NDArray[Any]], *, counting: bool, most: int = NAMED) -> None:
        self._rows, self._counting, self._most = rows, counting, most
        self._total: Counts | None = None  # of all services, when they were last read
        self._sums = np.zeros(0, np.uint32)  # of each service, then
        self._activity = np.zeros(0)  # of each service: what was added, halved at each reading
        self._last: dict[int, Counts] = {}  # of the services that are named, by number
        self._named: dict[str, NDArray[np.int64]] = {}
        self._rest = np.zeros(STEPS, np.int64)

    @property
    def counts(self) -> Counts:
        """The counts of each service."""
        return self._rows()["counts"]

    def give_back(self, services: Collection[int]) -> None:
        """Move the counts of these freed ids to those of former services."""
        if self._counting and services:
            counts, freed = self.counts, list(services)
            counts[GONE] += counts[freed].sum(axis=0, dtype=np.uint32)
            counts[freed] = 0

    def only(self, services: Iterable[int]) -> None:
        """Clear the counts of all other ids than these."""
        if self._counting:
            unused = np.asarray(self.counts.any(axis=1))
            unused[[GONE, *services]] = False
            self.give_back(np.flatnonzero(unused).tolist())

    def series(self, names: Mapping[int, str]) -> dict[str, list[int]]:
        """Adds what was counted since the last reading; returns all series, by service port and OTHERS."""
        if not self._counting:
            return {}
        counts = self.counts
        total = counts.sum(axis=0, dtype=np.uint32)
        rest = _growth(total if self._total is None else self._total, total)
        for number, before in self._last.items():
            if (name := names.get(number)) in self._named:
                added = _growth(before, counts[number])
                self._named[name] += added
                rest -= added
        self._total = total
        self._rest += np.maximum(rest, 0)
        self._choose(counts.sum(axis=1, dtype=np.uint32), names)
        self._last = {number: counts[number].copy() for number, name in names.items() if name in self._named}
        return {name: row.tolist() for name, row in {**self._named, OTHERS: self._rest}.items()}

    def _choose(self, sums: Counts, names: Mapping[int, str]) -> None:
        if len(sums) != len(self._sums):  # for the first time, or the maps grew
            self._sums, self._activity = np.zeros_like(sums), np.zeros(len(sums))
        self._activity = self._activity / 2 + _growth(self._sums, sums)
        self._sums = sums
        places = {name: 0.0 for name in names.values() if name in self._named}
        for number in np.flatnonzero(self._activity >= 1).tolist():
            if name := names.get(number):
                weight = BUSIER if name in self._named else 1
                places[name] = places.get(name, 0.0) + weight * self._activity[number]
        busiest = heapq.nlargest(self._most, places, key=places.__getitem__)
        self._named = {name: self._named.get(name, np.zeros(STEPS, np.int64)) for name in busiest}


def _growth(before: Counts, now: Counts) -> NDArray[np.int64]:
    """Returns the difference of counts that wrap; 0 of those that are lower, which began again."""
    return np.maximum(signed(now - before), 0)


def by_bound(row: Counts) -> dict[int, int]:
    """Returns the steps that were counted, by their upper bounds in nanoseconds."""
    steps = np.flatnonzero(row)
    return {BOUNDS[step]: count for step, count in zip(steps.tolist(), row[steps].tolist(), strict=True)}


def first_packets_of(maps: Mapping[str, Map]) -> Counts | None:
    """Returns the counts in a pinned map, to read only; None: there are none."""
    kind, known = dtype_of("first_packets"), maps.get("first_packets")
    if known is None or known.entries <= 1 or known.value_size != kind.itemsize:
        return None
    rows: Counts = known.glimpse(kind)["counts"]
    return rows
