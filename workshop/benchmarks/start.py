"""Process start to fully programmed, 10,000 services x 10 endpoints from an API server over TLS, in one mode."""

from __future__ import annotations

from typing import NamedTuple

from hybrid_proxy.workshop.benchmarks.apidata import ApiProcess
from hybrid_proxy.workshop.benchmarks.kit import HEALTH_CHECKS, Result, Target, lab, median, say
from hybrid_proxy.workshop.benchmarks.views import EbpfView, IptablesView, NftablesView, View, check

SERVICES, ENDPOINTS = 10_000, 10
RUNS = {"ebpf": 5, "nftables": 3, "iptables": 3}


class Plan(NamedTuple):
    """A benchmark: its name, what it measures, and what that must reach."""

    name: str
    view: type[View]
    seconds: float
    peer: str


PLANS = {
    "ebpf": Plan("start", EbpfView, 2.0, "42 s (nftables), 72 s (iptables)"),
    "nftables": Plan("nft-start", NftablesView, 3.0, "42 s in the same mode"),
    "iptables": Plan("ipt-start", IptablesView, 8.0, "72 s in the same mode, with iptables-nft"),
}


def measure(mode: str = "ebpf") -> Result:
    """Run the agent several times on an empty node, once over what is there, and the control once."""
    plan = PLANS[mode]
    counts = dict.fromkeys(range(SERVICES), ENDPOINTS)
    checks = HEALTH_CHECKS if mode == "ebpf" else 0
    with lab() as made, ApiProcess(SERVICES, ENDPOINTS, lab=made, health_checks=checks) as api:
        view = plan.view(made, api)
        runs = [_start(view, counts) for _ in range(RUNS[mode])]
        again = _start(view, counts, twice=True)
        control = view.loaded(counts)
        extra: dict[str, float] = {}
        if mode == "iptables":
            legacy = [_start(IptablesView(made, api, "legacy"), counts) for _ in range(RUNS[mode])]
            extra["legacy"] = round(median([run.seconds for run in legacy]), 2)
    seconds = [run.seconds for run in runs]
    memory, value = median([run.memory for run in runs]), median(seconds)
    targets = [(Target("seconds from process start to fully programmed", plan.seconds), value)]
    if mode == "nftables":
        targets.append((Target("MB of memory of the agent, programmed", 150), memory))
    listed = ", ".join(f"{one:.3f}" for one in seconds)
    note = (
        f"{plan.name}: {listed} s; over what the agent before has left: {again.seconds:.2f} s; "
        f"kube-proxy v1.36.2 at this size on such a machine, measured before: {plan.peer}"
    )
    return Result(
        plan.name, value, "s", view.loading, control, targets, [note],
        {"min": round(min(seconds), 3), "max": round(max(seconds), 3), "restart": round(again.seconds, 2),
         "agent_says": median([run.own for run in runs]), "memory_mb": round(memory, 1), **extra},
    )  # fmt: skip


class _Run(NamedTuple):
    seconds: float
    own: float  # by the agent's clock
    memory: float


def _start(view: View, counts: dict[int, int], *, twice: bool = False) -> _Run:
    """One start on an empty node; or `twice`, the one over what an agent that was killed has left."""
    agent = view.agent()
    seconds = agent.timed_start()
    if twice:
        agent.kill()
        seconds = agent.timed_start()
    check(view, counts, ENDPOINTS)
    run = _Run(seconds, agent.own_figure(), agent.memory()["VmRSS"])
    say(f"  start {seconds:.3f} s (the agent says {run.own:.2f} s), {run.memory:.0f} MB, all is there")
    view.end(agent)
    return run
