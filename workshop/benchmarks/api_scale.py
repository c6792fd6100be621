"""1,000 endpoint changes a second at 10,000 services x 10 endpoints: CPU time, delay until the kernel, memory.

`changes` runs for 20 seconds (HYBRID_PROXY_CHANGES). `api-scale` runs for ten minutes (HYBRID_PROXY_API_SCALE) with
faults of the API server every three seconds, and compares the kernel with the server at the end. In both, the control
is the same agent before the changes. Another process reads the words of all services twice a millisecond.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hybrid_proxy.controller.agent.event_queue import CAPACITY
from hybrid_proxy.workshop.benchmarks.kit import say
from hybrid_proxy.workshop.lab.apiserver import cluster_address, endpoint_slice
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.measuring.apidata import ApiProcess
from hybrid_proxy.workshop.measuring.nodes import HEALTH_CHECKS, ApiAgent, Kernel, Scraper, lab
from hybrid_proxy.workshop.measuring.results import Result, Target
from hybrid_proxy.workshop.measuring.stats import quantile

SERVICES, ENDPOINTS = 10_000, 10
RATE = 1_000  # changes a second
SECONDS = float(os.environ.get("HYBRID_PROXY_API_SCALE", "600"))
CHANGES_SECONDS = float(os.environ.get("HYBRID_PROXY_CHANGES", "20"))
POLL = 0.0005
FAULT_EVERY = 3.0  # seconds
HISTORY = 30.0  # seconds of changes that a watch can go back; real servers keep 75 s
IDLE = 20.0  # seconds of the control
SETTLED = 120.0  # at most; a server that came back is believed only after a pause
GROWTH = 1.05  # of memory from the second to the last quarter, as in `soak`


@dataclass(frozen=True)
class Load:
    """The amount of work and its duration."""

    services: int = SERVICES
    endpoints: int = ENDPOINTS
    rate: float = RATE
    seconds: float = SECONDS
    fault_every: float = FAULT_EVERY
    idle: float = IDLE
    watch_list: bool = True


@dataclass
class Outcome:
    """The results."""

    faults: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds since the start, MB
    waiting: int = 0  # objects at most
    busy: float = 0.0  # processor time by time
    idle: float = 0.0
    delays: list[float] = field(default_factory=list)  # seconds from the change in the server to the kernel
    unseen: int = 0  # changes that a later one overtook before anything reached the kernel
    changes: int = 0
    settled: float = 0.0  # seconds from the last change and fault until the kernel was as the server
    wrong: list[str] = field(default_factory=list)  # what was not, in the end
    strange: list[str] = field(default_factory=list)  # lines of the log that should not be there
    answers: str = ""

    def quarter(self, number: int) -> float:
        """Returns the median of memory in MB in this quarter, from 0."""
        size = max(1, len(self.memory) // 4)
        return float(np.median([size for _, size in self.memory[number * size :][:size]]))


def measure(question: str = "faults") -> Result:
    """Measures changes alone (`changes`), or changes and faults."""
    alone = question == "changes"
    load = Load(seconds=CHANGES_SECONDS, fault_every=math.inf, idle=10.0) if alone else Load()
    found = run(load)
    most = max(size for _, size in found.memory)
    p50, p99 = 1000 * quantile(found.delays, 0.5), 1000 * quantile(found.delays, 0.99)
    targets = [
        (Target("services that are not as the server has them", 0), len(found.wrong)),
        (Target("MB at most", 150), most),
        (Target("changes a second", 0.95 * RATE, at_least=True), found.changes / load.seconds),
    ]
    report = Result(
        "changes" if alone else "api-scale", 100 * found.busy, "% of a core",
        "the same agent without changes, scraped as often", 100 * found.idle, targets,
        [f"changes: {found.changes:,} changes, {found.unseen} were superseded; {found.answers}"],
        {"p50": round(p50, 2), "p99": round(p99, 2), "memory": round(most, 1)},
    )  # fmt: skip
    if alone:
        targets += [
            (Target("% of a core at 1,000 changes/s", 40), 100 * found.busy),
            (Target("median in ms", 10), p50),
            (Target("p99 in ms", 20), p99),
        ]
        return report
    grown = found.quarter(3) / found.quarter(1)
    first, last = found.memory[0][1], found.memory[-1][1]
    half = found.memory[len(found.memory) // 2 :]
    slope = float(np.polyfit([at / 60 for at, _ in half], [size for _, size in half], 1)[0])
    targets += [
        (Target("lines of the log that should not be there", 0), len(found.strange)),
        (Target("memory, last quarter / second quarter", GROWTH), grown),
        (Target("objects that waited at most", CAPACITY), found.waiting),
    ]
    faults = ", ".join(f"{count} {name}" for name, count in sorted(found.faults.items()))
    memory = f"memory {first:.1f} MB at first, {most:.1f} at most, {last:.1f} in the end"
    delay = f"a change took {p50:.1f} ms (median), {p99:.0f} ms (p99), {max(found.delays):.1f} s at most"
    notes = (
        f"{found.changes:,} changes in {SECONDS:.0f} s, {found.faults.total()} faults ({faults})",
        f"{memory}, {slope:+.2f} MB a minute in the second half; {found.waiting} objects waited at most",
        f"{delay}, outages included, {found.unseen} were superseded; as the server {found.settled:.1f} s after the end",
        found.answers,
        *found.wrong[:5],
        *found.strange[:5],
    )
    more = {
        "max": round(1000 * max(found.delays)), "slope": round(slope, 2), "waiting": found.waiting,
        "faults": found.faults.total(),
    }  # fmt: skip
    return replace(report, notes=[f"api-scale: {note}" for note in notes], extra=report.extra | more)


def run(load: Load) -> Outcome:
    """Runs the real agent in a lab, and the API server as another process."""
    found = Outcome()
    with (
        lab(kind="scale") as made,
        ApiProcess(
            load.services,
            load.endpoints,
            lab=made,
            health_checks=HEALTH_CHECKS,
            watch_list=load.watch_list,
            window=int(HISTORY * load.rate),
        ) as api,  # fmt: skip
    ):
        agent = ApiAgent(made, api.kubeconfig)
        try:
            say(f"  the agent is ready after {agent.timed_start(120):.2f} s")
            kernel = Kernel(made)
            with Scraper(made) as scraper:
                time.sleep(2)
                found.idle = agent.busy(load.idle)
                watcher = Watcher(kernel)
                _weather(load, api, agent, found)
                writes = api.churned()
                _settle(made, api, found)
                seen = watcher.stop()
            found.answers = scraper.summary()
            found.changes = len(writes)
            _match(kernel, writes, seen, found)
            found.strange = [
                line for line in agent.log.read_text().splitlines()
                if any(word in line for word in ("Traceback", "should not happen", "sync failed", " E "))
            ]  # fmt: skip
            kernel.close()
        finally:
            agent.end()
    return found


class Watcher:
    """Notes when the word of a service changes, in a thread that reads the words of all services."""

    def __init__(self, kernel: Kernel) -> None:
        self._words = kernel.services["sets"][:, 0]
        self._stop = threading.Event()
        self._seen: dict[int, list[int]] = defaultdict(list)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> dict[int, list[int]]:
        """Ends the thread. Returns, by service id, CLOCK_MONOTONIC (ns) of each change."""
        self._stop.set()
        self._thread.join()
        return self._seen

    def _run(self) -> None:
        known = self._words.copy()
        while not self._stop.wait(POLL):
            now = self._words.copy()
            moment = time.monotonic_ns()
            for service in np.flatnonzero(now != known).tolist():
                self._seen[service].append(moment)
            known = now


def _weather(load: Load, api: ApiProcess, agent: ApiAgent, found: Outcome) -> None:
    """Begins faults while the API server makes changes, and samples memory each second."""
    faults = itertools.cycle(FAULTS.items())
    start, used = time.monotonic(), agent.processor_seconds()
    api.control("churn", rate=load.rate, seconds=load.seconds)
    next_fault, next_sample, number = load.fault_every, 0.0, 0
    while (now := time.monotonic() - start) < load.seconds:
        if now >= next_sample:
            found.memory.append((now, agent.memory()["VmRSS"]))
            next_sample += 1.0
            if int(now) % 30 == 0:
                say(f"  {now:.0f} s: {found.memory[-1][1]:.1f} MB, {found.faults.total()} faults")
        if now >= next_fault:
            name, begin = next(faults)
            api.control("mend")
            begin(api, load, number)
            found.faults[name] += 1
            next_fault, number = next_fault + load.fault_every, number + 1
        time.sleep(0.05)
    found.busy = (agent.processor_seconds() - used) / (time.monotonic() - start)
    found.waiting = agent.running_status().waiting.most
    api.control("mend")
    for recent in range(max(0, number - 2 * len(FAULTS)), number):  # later changes repaired those before
        index = _broken(load, recent)
        api.control("put", **endpoint_slice(index, range(load.endpoints), load.endpoints))


# Faults, by what they are called. Each ends when the next one begins.


def _fault(**what: Any) -> Callable[[ApiProcess, Load, int], None]:
    """Returns a fault of slices; with `cut`, their streams are cut, too."""
    cut = what.pop("cut", False)

    def begin(api: ApiProcess, _load: Load, _number: int) -> None:
        api.control("fault", plural="endpointslices", **what)
        if cut:
            api.control("cut", plural="endpointslices")

    return begin


def _expire(api: ApiProcess, _load: Load, _number: int) -> None:
    """Removes the history: the next watch gets 410, and everything is listed again."""
    api.control("expire")
    api.control("cut")


def _malformed(api: ApiProcess, load: Load, number: int) -> None:
    index = _broken(load, number)
    api.control("put", **(endpoint_slice(index, range(3), load.endpoints) | {"endpoints": "none"}))


def _broken(load: Load, number: int) -> int:
    """Returns the service whose slice fault `number` breaks, if it is that fault."""
    return number * 13 % load.services


def _recreate(api: ApiProcess, load: Load, number: int) -> None:
    for step in range(10):
        api.control("recreate", service=(number * 17 + step * 3) % load.services)


FAULTS: dict[str, Callable[[ApiProcess, Load, int], None]] = {
    "all streams cut": lambda api, *_: api.control("cut"),
    "cut in a line": _fault(cut_mid_line=1),
    "recreated in one batch": _recreate,
    "history gone": _expire,
    "duplicates": _fault(duplicate=True),
    "429": _fault(answers=[[429, {"Retry-After": "1"}]], cut=True),
    "silence": _fault(silent=True),
    "410 in a stream": _fault(gone_watches=1, cut=True),
    "swapped neighbours": _fault(reorder=True),
    "500s": _fault(answers=[[500, {}]] * 3, cut=True),
    "slow answers": _fault(delay=1.0, cut=True),
    "malformed object": _malformed,
    "broken line": _fault(bad_line=1),
    "half a list": _fault(gone_watches=1, cut_lists=1, cut=True),
}


# What came of it.


def _settle(made: Lab, api: ApiProcess, found: Outcome) -> None:
    """Waits until the kernel has what the server has."""
    start = time.monotonic()
    wanted = api.table()
    while True:
        with contextlib.closing(Kernel(made)) as kernel:  # there may be larger maps by now
            found.wrong = _differences(kernel, wanted)
        if not found.wrong or time.monotonic() - start > SETTLED:
            break
        time.sleep(0.5)
    found.settled = time.monotonic() - start


def _differences(kernel: Kernel, wanted: dict[str, set[str]]) -> list[str]:
    try:
        found = kernel.all_backends()
    except AssertionError as changing:
        return [str(changing)]
    return [
        f"{address} leads to {found.get(address, 'nothing')}, and should to {wanted.get(address, 'nothing')}"
        for address in sorted(found.keys() | wanted.keys())
        if found.get(address) != wanted.get(address)
    ]


def _match(
    kernel: Kernel, writes: Sequence[tuple[int, int | None, int]], seen: dict[int, list[int]], found: Outcome
) -> None:
    """Measures from each change in the server to the next change of its service in the kernel."""
    ids = kernel.ids()
    made: dict[int, list[int]] = defaultdict(list)
    for index, _, moment in writes:
        made[ids.get(cluster_address(index), 0)].append(moment)
    for service, moments in made.items():
        visible = seen.get(service, [])
        for number, moment in enumerate(moments):
            place = bisect_left(visible, moment)
            if place == len(visible):  # a service that was made again has another number
                continue
            later = moments[number + 1] if number + 1 < len(moments) else None
            found.unseen += later is not None and visible[place] >= later
            found.delays.append((visible[place] - moment) / 1e9)
