"""One endpoint change at 10,000 services x 10 endpoints: sent by the API server to visible in the kernel."""

from __future__ import annotations

import time

import msgspec

from controller.kubernetes.model import Upserted
from controller.semantics.cluster import Cluster
from controller.semantics.entries import Settings
from controller.semantics.tables import Builder
from dataplane.mode import Options
from dataplane.modes.ebpf import layout
from dataplane.modes.ebpf.programmer import Ebpf, clean
from workshop.benchmarks.apidata import ApiProcess
from workshop.benchmarks.kit import (
    HEALTH_CHECKS,
    NODE,
    ApiAgent,
    Kernel,
    Result,
    Scraper,
    Target,
    lab,
    listed,
    median,
    quantile,
    say,
)
from workshop.lab.apiserver import cluster_address
from workshop.lab.network import Lab

SERVICES, ENDPOINTS = 10_000, 10
CHANGES, PAUSE = 400, 0.02
SCRAPES = 1.0  # seconds between two of /metrics: far more often than anybody does
FULL_SYNCS = 3
STEP = 7  # services are taken in no particular order: 7 and 10,000 have no common divisor
KUBE_PROXY = "kube-proxy v1.36.2 at this size, measured before: 7.4 s (nftables), > 60 s (iptables)"
POLL = 0.00005


def measure() -> Result:
    """Change one service after the other and look into the maps from outside."""
    with lab() as made, ApiProcess(SERVICES, ENDPOINTS, lab=made, health_checks=HEALTH_CHECKS) as api:
        agent = ApiAgent(made, api.kubeconfig)
        say(f"  the agent is ready after {agent.timed_start():.2f} s")
        time.sleep(2)  # the first maintenance is over
        kernel = Kernel(made)
        with Scraper(made, metrics_every=SCRAPES) as scraper:
            seen = _changes(kernel, api)
        status = agent.status() or {}
        own = status["change_seconds"]
        kernel.close()
        say(f"  {len(seen)} changes: median {1000 * median(seen):.2f} ms")
        agent.end()
        full = _full_syncs(made, api)
    p50, p99 = 1000 * median(seen), 1000 * quantile(seen, 0.99)
    note = (
        f"change: {len(seen)} changes, from the moment the API server sends the event (TLS included) to the new slice "
        f"in the kernel; the agent's own figures, from its receipt: median {1000 * own['p50']:.2f} ms, "
        f"p99 {1000 * own['p99']:.2f} ms; meanwhile {scraper.sentence()}; {KUBE_PROXY}"
    )
    return Result(
        "change", p50, "ms", "one change by building the whole table again and programming what differs",
        1000 * median(full),
        [(Target("median in ms", 5), p50), (Target("p99 in ms", 20), p99)],
        [note],
        {
            "p50": round(p50, 2), "p99": round(p99, 2), "max": round(1000 * max(seen), 2),
            "agent_p50": round(1000 * own["p50"], 2), "agent_p99": round(1000 * own["p99"], 2),
        },
    )  # fmt: skip


def _changes(kernel: Kernel, api: ApiProcess) -> list[float]:
    """Seconds that each change took, from the API server's write to the kernel."""
    ids = kernel.ids()
    seconds = []
    for number in range(CHANGES):
        index = number * STEP % SERVICES
        service = ids[cluster_address(index)]
        row = kernel.services[service]["sets"]
        before = int(row[0])
        api.send_endpoints(index, list(range(ENDPOINTS - 1)))
        deadline = time.monotonic() + 5
        while int(row[0]) == before:
            time.sleep(POLL)
            assert time.monotonic() < deadline, f"the change of service {index} is not in the kernel after 5 s"
        visible = time.monotonic_ns()
        seconds.append((visible - api.sent_endpoints()) / 1e9)
        _, count, _ = layout.split_range_word(int(row[0]))
        assert count == ENDPOINTS - 1, f"service {index} has {count} backends after the change"
        assert len(kernel.backends_of(service)) == ENDPOINTS - 1
        time.sleep(PAUSE)
    return seconds


def _full_syncs(made: Lab, api: ApiProcess) -> list[float]:
    """Seconds for one change by the same code, with nothing kept of the table before."""
    events = listed(made, api)
    seconds = []
    with made.inside("node"):
        programmer = Ebpf(Options(cgroup=str(made.cgroup)), lambda: None)
        try:
            for number in range(FULL_SYNCS + 1):
                cluster = Cluster(NODE)
                for event in events:
                    cluster.apply(event)
                changed = next(iter(cluster.slices_of(next(iter(cluster.services)))))
                cluster.apply(Upserted(msgspec.structs.replace(changed, endpoints=changed.endpoints[number + 1 :])))
                start = time.monotonic()
                result = programmer.sync(Builder(Settings(node_name=NODE)).build(cluster, ()))
                assert result.changed == (1 if number else SERVICES)
                if number:  # the first one fills
                    seconds.append(time.monotonic() - start)
        finally:
            programmer.close()
            clean(Options(cgroup=str(made.cgroup)))
    say(f"  the whole table again: {', '.join(f'{s:.2f}' for s in seconds)} s")
    return seconds
