"""Mode iptables: one endpoint change at 10,000 services x 10 endpoints, from the API server to rules in the kernel."""

from __future__ import annotations

import time

from dataplane.kernel.xtables import Xtables
from dataplane.modes.iptables.readback import Saved, parse
from workshop.benchmarks.apidata import ApiProcess
from workshop.benchmarks.ipt_start import agent_with, end
from workshop.benchmarks.kit import Result, Target, lab, median, quantile, say
from workshop.lab.apiserver import cluster_address
from workshop.lab.network import Lab

SERVICES, ENDPOINTS = 10_000, 10
CHANGES = {"nft": 100, "legacy": 20}
PAUSE, POLL = 0.05, 0.0005
STEP = 7  # services are taken in no particular order: 7 and 10,000 have no common divisor
KUBE_PROXY = "kube-proxy v1.36.2 with iptables-nft at this size, measured before: > 60 s"


def measure() -> Result:
    """Change one service after the other, and read the chains in the end."""
    with lab() as made, ApiProcess(SERVICES, ENDPOINTS, lab=made) as api:
        counts = dict.fromkeys(range(SERVICES), ENDPOINTS)
        seen, agent_says = _changes(made, api, "nft", counts)
        _, legacy = _changes(made, api, "legacy", counts)
    p50, p99 = 1000 * median(seen[0]), 1000 * quantile(seen[0], 0.99)
    note = (
        f"ipt-change: {len(seen[0])} changes, from the moment the API server sends the event (TLS included) to the new "
        f"generation of the ruleset; the agent's own figure, from its receipt: median {1000 * agent_says:.1f} ms; "
        f"with iptables-legacy {1000 * legacy:.0f} ms; {KUBE_PROXY}"
    )
    return Result(
        "ipt-change", p50, "ms", "iptables-nft-restore of table nat as it stands", 1000 * seen[1],
        [(Target("median in ms, iptables-nft", 200), p50)],
        [note],
        {"p50": round(p50, 1), "p99": round(p99, 1), "max": round(1000 * max(seen[0]), 1),
         "agent_p50": round(1000 * agent_says, 1), "legacy_agent_p50": round(1000 * legacy, 1)},
    )  # fmt: skip


def _changes(
    made: Lab, api: ApiProcess, variant: str, counts: dict[int, int]
) -> tuple[tuple[list[float], float], float]:
    """Seconds of each change from outside (nft) and of the control, and the agent's own median."""
    agent = agent_with(made, api, variant)
    say(f"  iptables-{variant}: the agent is ready after {agent.timed_start():.2f} s")
    agent.wait(lambda status: bool(status.get("synced")), 30, "at leisure")
    time.sleep(2)
    xtables = Xtables(variant)
    seconds: list[float] = []
    with made.inside("node"):
        for number in range(CHANGES[variant]):
            index = number * STEP % SERVICES
            before = xtables.generation()
            done = (agent.status() or {})["change_seconds"]["count"] if before is None else 0
            counts[index] -= 1
            api.send_endpoints(index, list(range(counts[index])))
            deadline = time.monotonic() + 10
            while before is not None and xtables.generation() == before:
                time.sleep(POLL)
                assert time.monotonic() < deadline, f"the change of service {index} is not in the kernel after 10 s"
            visible = time.monotonic_ns()
            seconds.append((visible - api.sent_endpoints()) / 1e9)
            while before is None and (agent.status() or {})["change_seconds"]["count"] == done:
                assert time.monotonic() < deadline, f"the change of service {index} is not done after 10 s"
            time.sleep(PAUSE)
        own = (agent.status() or {})["change_seconds"]["p50"]
        agent.terminate()  # it would look at what the control does
        chains = parse(xtables.save(4, "nat"))
        _check(chains, counts)
        control = _control(xtables, chains)
    say(f"  {len(seconds)} changes: the agent says {1000 * own:.1f} ms, everything again takes {control:.2f} s")
    end(made, agent, variant)
    return (seconds, control), own


def _check(chains: Saved, counts: dict[int, int]) -> None:
    """Each service has as many endpoints as it should."""
    leads = {
        rule.partition(" ")[2].partition("/32 ")[0]: rule.rpartition(" -j ")[2]
        for name, rules in chains.items()
        for rule in rules
        if name.startswith("HP-C-") and " -j HP-SVC-" in rule
    }
    assert len(leads) == len(counts)
    for number, count in counts.items():
        found = len(chains[leads[cluster_address(number)]])
        assert found == count, f"service {number} leads to {found} endpoints instead of {count}"


def _control(xtables: Xtables, chains: Saved) -> float:
    """Seconds to write all of ours again, in the order in which it is told."""
    mine = {name: rules for name, rules in chains.items() if name.startswith("HP-")}
    lines = [f":{name} - [0:0]" for name in mine]
    lines += [f"-A {name} {rule}" for name, rules in mine.items() for rule in rules]
    start = time.monotonic()
    xtables.restore(4, "\n".join(["*nat", *lines, "COMMIT", ""]))
    return time.monotonic() - start
