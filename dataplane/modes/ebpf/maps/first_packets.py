"""Reads how long the clients of each service waited for a first packet, and chooses which services metrics name."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.first_packets import BOUNDS, STEPS
from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import dtype_of

Counts = NDArray[np.uint32]  # a column for each step; they wrap

NAMED: Final = 10  # services that metrics name
BUSIER: Final = 2  # times as many first packets as a service that is named let another take its place
GONE: Final = 0  # the row of the sums of former services: no service has this number


class FirstPackets:
    """The histograms of all services.

    Args:
        rows: maps what the programs count, by service; called for each reading.
        counting: whether they do.
    """

    def __init__(self, rows: Callable[[], NDArray[Any]], *, counting: bool) -> None:
        self.counting = counting
        self._rows = rows
        self.busiest = Busiest()

    @property
    def counts(self) -> Counts:
        """The counts of each service."""
        return self._rows()["counts"]

    def of_service(self, number: int) -> dict[int, int]:
        """Returns one histogram by the upper bounds of its steps."""
        return by_bound(self.counts[number])

    def give_back(self, services: Collection[int]) -> None:
        """Move the counts of these freed ids to those of former services."""
        if self.counting and services:
            counts, freed = self.counts, list(services)
            counts[GONE] += counts[freed].sum(axis=0, dtype=np.uint32)
            counts[freed] = 0
            self.busiest.forget(services)

    def only(self, services: Iterable[int]) -> None:
        """Clear the counts of all other ids than these."""
        if self.counting:
            counts = self.counts
            unused = np.asarray(counts.any(axis=1))
            unused[[GONE, *services]] = False
            self.give_back(np.flatnonzero(unused).tolist())

    def series(self, names: Mapping[int, str]) -> dict[str, list[int]]:
        """Returns the histograms for metrics, by the name of a service port; that of all others has none."""
        return self.busiest.read(self.counts, names) if self.counting else {}


class Busiest:
    """The service ports with the most first packets, of which each has a series in metrics; the others share one.

    Every count gets into one series, which only grows until it ends. So a service port that takes another's place
    begins at 0: what it counted before is in the common series. Each family of a service port has a number of its own.
    """

    def __init__(self, most: int = NAMED) -> None:
        self._most = most
        self._all: Counts | None = None  # of all services, when they were last read
        self._sums = np.zeros(0, np.uint32)  # of each service, then
        self._activity = np.zeros(0)  # of each service: what was added, halved at each reading
        self._last: dict[int, Counts] = {}  # of the services that are named, by number
        self._named: dict[str, NDArray[np.int64]] = {}
        self._rest = np.zeros(STEPS, np.int64)

    def forget(self, services: Iterable[int]) -> None:
        """Start again at 0 with these ids, which other services may get soon."""
        for number in services:
            self._last.pop(number, None)
            self._sums[number : number + 1] = 0
            self._activity[number : number + 1] = 0

    def read(self, counts: Counts, names: Mapping[int, str]) -> dict[str, list[int]]:
        """Adds what was counted since the last reading, and returns all series."""
        total = counts.sum(axis=0, dtype=np.uint32)
        rest = _growth(total if self._all is None else self._all, total)
        for number, before in self._last.items():
            if (name := names.get(number)) in self._named:
                added = _growth(before, counts[number])
                self._named[name] += added
                rest -= added
        self._all = total
        self._rest += np.maximum(rest, 0)
        self._choose(counts, names)
        self._last = {number: counts[number].copy() for number, name in names.items() if name in self._named}
        return {name: row.tolist() for name, row in {**self._named, "": self._rest}.items()}

    def _choose(self, counts: Counts, names: Mapping[int, str]) -> None:
        sums = counts.sum(axis=1, dtype=np.uint32)
        self._activity = _fitted(self._activity, len(sums)) / 2 + _growth(_fitted(self._sums, len(sums)), sums)
        self._sums = sums
        activity: dict[str, float] = dict.fromkeys(names.values(), 0.0)
        for number in np.flatnonzero(self._activity >= 1).tolist():
            if number in names:
                activity[names[number]] += self._activity[number]
        self._named = {name: row for name, row in self._named.items() if name in activity}
        for name in heapq.nlargest(self._most, activity, key=activity.__getitem__):
            if name in self._named or not activity[name]:
                continue
            if len(self._named) >= self._most:
                least = min(self._named, key=activity.__getitem__)
                if activity[name] <= BUSIER * activity[least]:
                    break
                del self._named[least]
            self._named[name] = np.zeros(STEPS, np.int64)


def _fitted(values: NDArray[Any], length: int) -> NDArray[Any]:
    """Returns the values of so many services: maps grow."""
    return np.pad(values, (0, max(length - len(values), 0)))[:length]


def _growth(before: Counts, now: Counts) -> NDArray[np.int64]:
    """Returns the difference of counts that wrap; 0 of those that are lower: the maps were copied in between."""
    return np.maximum((now - before).view(np.int32), 0).astype(np.int64)


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
