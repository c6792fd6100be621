"""One endpoint change at 10,000 services x 10 endpoints, in one mode: from the API server to the kernel."""

from __future__ import annotations

import contextlib
import time
from typing import Any, NamedTuple

from hybrid_proxy.workshop.benchmarks.apidata import ApiProcess
from hybrid_proxy.workshop.benchmarks.kit import (
    HEALTH_CHECKS,
    ApiAgent,
    Result,
    Scraper,
    Target,
    lab,
    median,
    quantile,
    say,
)
from hybrid_proxy.workshop.benchmarks.views import EbpfView, IptablesView, NftablesView, View, check

SERVICES, ENDPOINTS = 10_000, 10
CHANGES = {"ebpf": 400, "nftables": 200, "iptables": 100, "legacy": 20}
SCRAPES = 1.0  # seconds between two of /metrics: far more often than anybody does
STEP = 7  # services are taken in no particular order: 7 and 10,000 have no common divisor


class Plan(NamedTuple):
    """A benchmark: its name, what it measures, and what that must reach."""

    name: str
    view: type[View]
    targets: tuple[Target, ...]  # of the median, of the 99th percentile
    pause: float  # seconds between two changes
    poll: float  # seconds between two looks
    peer: str


PLANS = {
    "ebpf": Plan("change", EbpfView, (Target("median in ms", 5), Target("p99 in ms", 20)), 0.02, 0.00005,
                 "7.4 s (nftables), > 60 s (iptables)"),
    "nftables": Plan("nft-change", NftablesView, (Target("median in ms", 40),), 0.03, 0.0002, "7.4 s in the same mode"),
    "iptables": Plan("ipt-change", IptablesView, (Target("median in ms, iptables-nft", 200),), 0.05, 0.0005,
                     "> 60 s in the same mode"),
}  # fmt: skip


class Seen(NamedTuple):
    """What one agent's changes took, in seconds, and what the agent itself says."""

    seconds: list[float]
    own: dict[str, float]
    memory: float
    control: float


def measure(mode: str = "ebpf") -> Result:
    """Change one service after the other, look at the kernel from outside, and read it in the end."""
    plan = PLANS[mode]
    counts = dict.fromkeys(range(SERVICES), ENDPOINTS)
    checks = HEALTH_CHECKS if mode == "ebpf" else 0
    with lab() as made, ApiProcess(SERVICES, ENDPOINTS, lab=made, health_checks=checks) as api:
        found = _changes(plan, plan.view(made, api), counts, CHANGES[mode])
        extra: dict[str, Any] = {}
        if mode == "iptables":
            legacy = _changes(plan, IptablesView(made, api, "legacy"), counts, CHANGES["legacy"])
            extra["legacy_agent_p50"] = round(1000 * legacy.own["p50"], 1)
    p50, p99 = 1000 * median(found.seconds), 1000 * quantile(found.seconds, 0.99)
    targets = list(zip(plan.targets, (p50, p99), strict=False))
    if mode == "nftables":
        targets.append((Target("MB of memory of the agent", 150), found.memory))
    own = {name: 1000 * found.own[name] for name in ("p50", "p99")}
    note = (
        f"{plan.name}: {len(found.seconds)} changes, from the moment the API server sends the event (TLS included) to "
        f"the change in the kernel; the agent's own figures, from its receipt: median {own['p50']:.2f} ms, "
        f"p99 {own['p99']:.2f} ms; kube-proxy v1.36.2 at this size, measured before: {plan.peer}"
    )
    return Result(
        plan.name, p50, "ms", plan.view.rewriting, 1000 * found.control, targets, [note],
        {"p50": round(p50, 2), "p99": round(p99, 2), "max": round(1000 * max(found.seconds), 2),
         "agent_p50": round(own["p50"], 2), "agent_p99": round(own["p99"], 2),
         "memory_mb": round(found.memory, 1), **extra},
    )  # fmt: skip


def _changes(plan: Plan, view: View, counts: dict[int, int], changes: int) -> Seen:
    """One agent, as many changes, and the control."""
    agent = view.agent()
    say(f"  the agent is ready after {agent.timed_start():.2f} s")
    agent.wait(lambda status: status.synced, 30, "at leisure")
    time.sleep(2)  # the first maintenance is over
    with contextlib.ExitStack() as stack:
        if view.mode == "ebpf":
            stack.enter_context(Scraper(view.lab, metrics_every=SCRAPES))
        with view.lab.inside("node"):
            view.open()
            stack.callback(view.close)
            seconds = []
            for number in range(changes):
                index = number * STEP % len(counts)
                counts[index] -= 1
                seconds.append(timed_change(plan, view, agent, index, counts[index]))
                time.sleep(plan.pause)
        latency, memory = agent.running_status().change_seconds, agent.memory()["VmRSS"]
        own = {"p50": latency.p50 or 0.0, "p99": latency.p99 or 0.0}
    check(view, counts, ENDPOINTS)
    agent.kill()
    control = view.rewritten()
    say(f"  {changes} changes: median {1000 * median(seconds):.2f} ms; everything again takes {control:.2f} s")
    view.end(agent)
    return Seen(seconds, own, memory, control)


def timed_change(plan: Plan, view: View, agent: ApiAgent, index: int, wanted: int) -> float:
    """Seconds from the API server's write to the kernel; where that cannot be seen, until the agent says so."""
    before = view.state(index)
    done = _done(agent) if before is None else 0
    view.api.send_endpoints(index, list(range(wanted)))
    deadline = time.monotonic() + 10
    while _done(agent) == done if before is None else view.state(index) == before:
        if before is not None:
            time.sleep(plan.poll)
        if time.monotonic() > deadline:
            view.api.sent_endpoints()  # the API server can be asked again
            raise TimeoutError(f"the change of service {index} is not in the kernel after 10 s")
    return (time.monotonic_ns() - view.api.sent_endpoints()) / 1e9


def _done(agent: ApiAgent) -> int:
    return agent.running_status().change_seconds.count
