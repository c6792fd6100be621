"""Removes idle flows, and finds which ids no flow names any more, in a thread of its own.

The thread reads all flows at once and chooses the idle ones; the sweep program deletes them. It compares the time stamp
once more, because the datapath may have refreshed it. The same read shows which ids of deferred frees a flow names.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.bpf import Map, run_on_packet
from hybrid_proxy.dataplane.kernel.grace import wait_for_programs
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.flows.resets import Resets
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays, run_in_parts
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import abi_constants, dtype_of, is_over, signed
from hybrid_proxy.dataplane.reports import several
from hybrid_proxy.dataplane.table import Protocol

log = logging.getLogger(__name__)

Ids = tuple[frozenset[int], frozenset[int]]  # of services, and of backends

SCAN_SECONDS = 5.0
# Idle times in seconds, as nf_conntrack's; those that kube-proxy sets, too, are in the options.
OPENING, DOUBTED, LAST_ACK, ENDED, SCTP = 60, 60, 30, 10, 210
# With direct server return nobody here sees whether the backend has ended, too. IPVS waits as long then (`FIN_WAIT` of
# connections whose answers go another way); whoever has ended and still receives acknowledges that.
DSR_ENDING = 120


def idle_limits(keys: NDArray[Any], values: NDArray[Any], options: Options) -> NDArray[np.int64]:
    """Returns after how many seconds without a packet each flow is deleted."""
    flags, protocols, names = values["flags"], keys["protocol"], abi_constants()
    limits = np.full(len(keys), options.timeouts.tcp_established, dtype=np.int64)
    limits[flags & names["FLOW_ESTABLISHED"] == 0] = OPENING
    limits[flags & (names["FLOW_FIN"] | names["FLOW_PEER_FIN"]) != 0] = options.timeouts.tcp_close_wait
    # Both have ended, and not both are known to know it. Two processors that note two FINs at once may lose one note of
    # four; the other half of the pair has it, and a pair goes with either half.
    both = names["FLOW_FIN"] | names["FLOW_PEER_FIN"]
    limits[flags & both == both] = LAST_ACK
    ending = names["FLOW_DSR"] | names["FLOW_FIN"]
    limits[flags & ending == ending] = min(DSR_ENDING, options.timeouts.tcp_close_wait)
    limits[flags & names["FLOW_DOUBTED"] != 0] = DOUBTED
    limits[is_over(flags)] = ENDED
    limits[protocols == Protocol.UDP] = options.timeouts.udp_stream
    limits[protocols == Protocol.SCTP] = SCTP
    return limits


def forget_half_open(maps: Mapping[str, Map], options: Options, now: int, hz: int) -> None:
    """Delete half-open flows that are idle; `now` is the time of time stamps, in jiffies.

    The collector does not sweep these tables, because LRU tables evict. But without new flows nothing is evicted, and a
    socket that gets the port of an earlier one would go on with its flow.
    """
    for family in (4, 6):
        table = maps[f"half_open{family}"]
        keys, values = flow_arrays(table, family)
        limits = np.where(keys["protocol"] == Protocol.UDP, options.timeouts.udp, OPENING) * hz
        idle = np.uint32(now) - values["seen"] >= limits
        table.delete_batch(keys[idle])


def open_flows(maps: Mapping[str, Map]) -> Counter[str]:
    """Counts open flows by the name of their protocol."""
    names, found = abi_constants(), Counter[str]()
    for table, family in itertools.product(("flows", "half_open"), (4, 6)):
        keys, values = flow_arrays(maps[f"{table}{family}"], family)
        alive = (values["flags"] & (names["FLOW_REPLY"] | names["FLOW_OTHERS"]) == 0) & ~is_over(values["flags"])
        numbers, counts = np.unique(keys["protocol"][alive], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            found[Protocol(number).name] += count
    return found


class GracePeriods:
    """Waits for the programs that may have read what a change removed.

    Args:
        wake: has the collector's thread call `run`.

    Attributes:
        over: the number of the last grace period that is over.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.over = self._wanted = 0
        self._wake = wake

    def want(self, stamp: int) -> None:
        """A change with this stamp is written: wait for the programs that may have read what it removed."""
        if stamp > self._wanted:
            self._wanted = stamp
            self._wake()

    def run(self) -> None:
        """Waits, if a change was written since the last grace period."""
        wanted = self._wanted
        if wanted > self.over:
            wait_for_programs()
            self.over = wanted


class FlowGC:
    """A thread that waits for grace periods, resets connections and scans flows, in this order whenever it wakes.

    Args:
        sweep: descriptor of the program that deletes idle flows.
        clock: descriptor of the program that returns the time of time stamps.
        hz: ticks of that time per second.
        options: idle times.
        also: called with each scan.

    Attributes:
        reading: held by a thread that reads maps, or replaces them.
        grace: the grace periods.
        resets: the connections to endpoints that are gone.
        used: entries of tables of flows, by map, when they were read last.
        opening_flows: a new count of flows that are not established, for the programs' own.
        recounts: some services have their open flows counted by backend.
    """

    def __init__(
        self, maps: dict[str, Map], sweep: int, clock: int, hz: int, options: Options, also: Callable[[], None]
    ) -> None:
        self.hz = hz
        self.reading = threading.Lock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self.grace = GracePeriods(self._wake.set)
        self.resets = Resets(maps, self._delete, self._wake.set)
        self.used = {"flows4": 0, "flows6": 0}
        self.opening_flows: int | None = None
        self.recounts = False
        self._maps, self._options, self._also = maps, options, also
        self._sweep, self._clock = sweep, clock
        self._candidates: Ids = (frozenset(), frozenset())
        self._result: Ids | None = None
        self._lock = threading.Lock()  # of these two
        self._scan_now = False
        self._thread = threading.Thread(target=self._run, name="gc", daemon=True)

    # For other threads

    def start(self) -> None:
        """Starts the thread that reads the flow tables."""
        self._thread.start()

    def search_for(self, services: frozenset[int], backends: frozenset[int]) -> None:
        """Has the next scan find which of these ids no flow names any more."""
        with self._lock:
            if self._result is None:
                self._candidates = (services, backends)

    def scan_now(self) -> None:
        """Has the thread scan at once."""
        self._scan_now = True
        self._wake.set()

    def collect(self) -> tuple[int, Ids | None]:
        """Returns the number of the last grace period that is over, and the result of a scan since the last call."""
        with self._lock:
            result, self._result = self._result, None
        return self.grace.over, result

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=5)

    # The thread

    def _run(self) -> None:
        next_scan = time.monotonic() + SCAN_SECONDS
        while not self._stop.is_set():
            self._wake.wait(timeout=max(0.05, next_scan - time.monotonic()))
            self._wake.clear()
            if self.resets.waiting:
                with self.reading:
                    self.resets.run()
            self.grace.run()
            if self._scan_now or time.monotonic() >= next_scan:
                self._scan_now = False
                try:
                    with self.reading:
                        self.scan()
                        self._also()
                except (DataplaneError, OSError) as error:
                    log.warning("reading flows failed, trying again in %d s: %s", SCAN_SECONDS, error)
                next_scan = time.monotonic() + SCAN_SECONDS

    def _delete(self, family: int, keys: NDArray[Any]) -> None:
        run_in_parts(self._sweep, family, keys, np.zeros(len(keys), dtype=np.int64))

    def scan(self) -> None:
        """Reads all flows once: deletes idle ones, and searches for ids of deferred frees."""
        with self._lock:
            services, backends = wanted = self._candidates
        opening = 0
        recount = _Recount(self._maps) if self.recounts else None
        young = abi_constants()["FLOW_ESTABLISHED"] | abi_constants()["FLOW_REPLY"]
        for family in (4, 6):
            name = f"flows{family}"
            keys, values = flow_arrays(self._maps[name], family)
            self.used[name] = len(keys)
            opening += int(np.count_nonzero(values["flags"] & young == 0))
            if len(keys):
                services = services.difference(np.unique(values["service"]).tolist())
                backends = backends.difference(np.unique(values["backend"]).tolist())
                if recount is not None:
                    recount.add(values)
                self.forget_idle(family, keys, values)
        self.opening_flows = opening
        if recount is not None and (wrong := recount.finish()):
            log.info("counts of open flows are corrected for %s", several(wrong, "backend"))
        with self._lock:
            if any(wanted):
                self._result = services, backends
            self._candidates = (frozenset(), frozenset())

    def clock(self) -> int:
        """Returns the time of time stamps, in jiffies."""
        return run_on_packet(self._clock, bytes(64))[0]

    def forget_idle(self, family: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Deletes the idle ones of these flows; the sweep program compares each one's time stamp once more.

        Foreign flows are deleted when conntrack has forgotten them (`ForeignFlows`).
        """
        age = signed(np.uint32(self.clock()) - values["seen"])  # below 0 where a program wrote a later time
        limits = idle_limits(keys, values, self._options) * self.hz
        ours = values["flags"] & abi_constants()["FLOW_OTHERS"] == 0
        old = np.flatnonzero((age >= limits) & ours)
        run_in_parts(self._sweep, family, keys[old], limits[old])


class _Recount:
    """Corrects the counts of open flows by one reading of all flows, for algorithms that use the counts.

    It is made before the reading, given each table, finished afterwards. Programs count up and down
    (`bpf/open_flows.h`), without an agent, too. They cannot see: flows of a service that asks for the count only now,
    of programs of another version, flows that user space hands over or moves into larger tables, and what was counted
    while the counts were copied into a larger map.
    """

    def __init__(self, maps: Mapping[str, Map]) -> None:
        backends = maps["backends"].glimpse(dtype_of("backend"))
        self._ids = np.flatnonzero(backends["flags"] & abi_constants()["BACKEND_COUNTED"])
        self._rows = maps["loads"].glimpse(dtype_of("load"))
        self._before = self._rows[self._ids]
        self._seen: NDArray[np.int64] = np.zeros(len(backends), dtype=np.int64)

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


def corrections(before: NDArray[Any], after: NDArray[Any], seen: NDArray[np.int64]) -> NDArray[np.int64]:
    """PURE. Returns the correction that each row should have, if the flows were read between two readings of it.

    A flow that began or ended meanwhile may have been seen or not. As long as that explains the difference, the
    correction stays what it is: so where flows begin and end all the time, nothing is made worse, and where none does,
    the count is exact.
    """
    opened, closed = (signed(after[name] - before[name]) for name in ("opened", "closed"))
    counted = signed(before["opened"] - before["closed"])
    return np.clip(signed(after["correction"]), seen - opened - counted, seen + closed - counted)
