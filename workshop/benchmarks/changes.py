"""1,000 endpoint changes a second at 10,000 services x 10 endpoints: processor time, delay until the kernel, memory.

HYBRID_PROXY_CHANGES=5 makes it 5 seconds instead of 20.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from hybrid_proxy.workshop.benchmarks.apidata import ApiProcess
from hybrid_proxy.workshop.benchmarks.kit import (
    HEALTH_CHECKS,
    ApiAgent,
    Kernel,
    Result,
    Scraper,
    Target,
    lab,
    quantile,
    say,
)
from hybrid_proxy.workshop.lab.apiserver import cluster_address

SERVICES, ENDPOINTS = 10_000, 10
RATE = 1_000  # a second
SECONDS = float(os.environ.get("HYBRID_PROXY_CHANGES", "20"))
IDLE = 10.0  # seconds of the control
SETTLED = 3.0
SCRAPES = 5.0  # seconds between two of /metrics
POLL = 0.0005


def measure() -> Result:
    """Watch the slot ranges of all services in the kernel while the API server changes them, with scrapes."""
    with lab() as made, ApiProcess(SERVICES, ENDPOINTS, lab=made, health_checks=HEALTH_CHECKS) as api:
        agent = ApiAgent(made, api.kubeconfig)
        say(f"  the agent is ready after {agent.timed_start():.2f} s")
        kernel = Kernel(made)
        with Scraper(made, metrics_every=SCRAPES) as scraper:
            time.sleep(SETTLED)
            idle = _share(agent, lambda: time.sleep(IDLE))
            ready = agent.memory()["VmRSS"]
            watcher = Watcher(kernel)
            api.churn(RATE, SECONDS)
            busy = _share(agent, lambda: time.sleep(SECONDS))
            writes = api.churned()
            time.sleep(SETTLED)
            seen = watcher.stop()
        delays = matched(kernel, writes, seen)
        after = agent.memory()["VmRSS"]
        kernel.close()
        agent.end()
    p50, p99 = 1000 * quantile(delays, 0.5), 1000 * quantile(delays, 0.99)
    rate = len(writes) / SECONDS
    note = (
        f"changes: {len(writes):,} changes, {rate:.0f}/s, each seen in the kernel; {scraper.summary()}; "
        f"memory {ready:.1f} MB before, {after:.1f} MB after"
    )
    return Result(
        "changes", 100 * busy, "% of a core", "the same agent without changes, scraped as often", 100 * idle,
        [
            (Target("% of a core at 1,000 changes/s", 40), 100 * busy),
            (Target("median in ms", 10), p50),
            (Target("p99 in ms", 20), p99),
            (Target("resident MB", 150), after),
            (Target("changes a second", 0.95 * RATE, at_least=True), rate),
        ],
        [note],
        {"p50": round(p50, 2), "p99": round(p99, 2), "max": round(1000 * max(delays), 2), "memory": round(after, 1)},
    )  # fmt: skip


def _share(agent: ApiAgent, wait: Callable[[], None]) -> float:
    """Processor time of the agent in parts of the time that `wait` takes."""
    start, used = time.monotonic(), agent.processor_seconds()
    wait()
    return (agent.processor_seconds() - used) / (time.monotonic() - start)


class Watcher:
    """Notes when the slice word of any service becomes another, from a thread that looks at all of them."""

    def __init__(self, kernel: Kernel) -> None:
        self._words = kernel.services["sets"][:, 0]
        self._stop = threading.Event()
        self._seen: dict[int, list[int]] = defaultdict(list)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> dict[int, list[int]]:
        """Service id -> CLOCK_MONOTONIC (ns) of each of its changes."""
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


def matched(kernel: Kernel, writes: list[tuple[int, int | None, int]], seen: dict[int, list[int]]) -> list[float]:
    """Seconds from each write to the change of its service in the kernel.

    Raises:
        AssertionError: a change is not in the kernel, or came before it was written.
    """
    ids = kernel.ids()
    sent: dict[int, list[int]] = defaultdict(list)
    for index, written, _ in writes:
        assert written is not None, f"a change of service {index} was sent to nobody"
        sent[ids[cluster_address(index)]].append(written)
    delays: list[float] = []
    for service, moments in sent.items():
        assert len(seen[service]) == len(moments), f"{len(moments)} changes of {service}, {len(seen[service])} seen"
        delays += [(after - before) / 1e9 for before, after in zip(moments, seen[service], strict=True)]
    assert min(delays) > 0
    return delays
