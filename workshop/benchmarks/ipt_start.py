"""Mode iptables: process start to fully programmed, 10,000 services x 10 endpoints, with both variants of iptables."""

from __future__ import annotations

import random
import time

from dataplane.kernel.xtables import Xtables
from dataplane.modes.iptables.listing import Programmed
from dataplane.modes.iptables.readback import parse
from workshop.benchmarks.apidata import ApiProcess
from workshop.benchmarks.kit import ApiAgent, Result, Target, lab, median, say
from workshop.lab.apiserver import cluster_address, pod_address
from workshop.lab.network import Lab

SERVICES, ENDPOINTS, RUNS = 10_000, 10, 3
KUBE_PROXY = "kube-proxy v1.36.2 with iptables-nft at this size on such a machine, measured before: 72 s"
HINT = "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n"  # the kubelet's, which says what a node uses
NO_HINT = "*mangle\n-X KUBE-IPTABLES-HINT\nCOMMIT\n"


def measure() -> Result:
    """Run the agent several times on an empty node, and the control once."""
    with lab() as made, ApiProcess(SERVICES, ENDPOINTS, lab=made) as api:
        seconds = [_start(made, api, "nft") for _ in range(RUNS)]
        again, control = _restart(made, api)
        legacy = [_start(made, api, "legacy") for _ in range(RUNS)]
    value = median(seconds)
    told = ", ".join(f"{s:.2f}" for s in seconds)
    return Result(
        "ipt-start", value, "s", "iptables-nft-restore of the same chains and rules at once, in any order, text ready",
        control,
        [(Target("seconds from process start to fully programmed, iptables-nft", 8.0), value)],
        [f"ipt-start: {told} s; over the chains of the agent before: {again:.2f} s; {KUBE_PROXY}"],
        {"min": round(min(seconds), 2), "max": round(max(seconds), 2), "restart": round(again, 2),
         "legacy": round(median(legacy), 2)},
    )  # fmt: skip


def agent_with(made: Lab, api: ApiProcess, variant: str) -> ApiAgent:
    """An agent in a namespace that says which variant it uses, as a kubelet would."""
    with made.inside("node"):
        Xtables(variant).restore(4, HINT)
    return ApiAgent(made, api.kubeconfig, "iptables")


def end(made: Lab, agent: ApiAgent, variant: str) -> None:
    """Stop the agent, and remove what it and `agent_with` left."""
    agent.end()
    with made.inside("node"):
        Xtables(variant).restore(4, NO_HINT)


def check(made: Lab, variant: str) -> None:
    """Every service of the fake API server leads to exactly its endpoints."""
    with made.inside("node"):
        view = Programmed(variant, {4: Xtables(variant).save(4, "nat")})
    found: dict[str, set[str]] = {}
    for row in view.backends():
        found.setdefault(row["service"], set()).add(row["address"])
    names = {row["frontends"][0]: row["name"] for row in view.services()}
    assert len(names) == SERVICES, f"{len(names)} of {SERVICES} services are in the chains"
    for number in range(SERVICES):
        wanted = {f"{pod_address(number, n, ENDPOINTS)}:8080" for n in range(ENDPOINTS)}
        name = names[f"{cluster_address(number)}:80"]
        assert found[name] == wanted, f"{name} leads to {found[name]}"


def _start(made: Lab, api: ApiProcess, variant: str) -> float:
    agent = agent_with(made, api, variant)
    seconds = agent.timed_start()
    status = agent.status() or {}
    assert status["dataplane"]["variant"] == variant, "the agent did not take the hint"
    check(made, variant)
    say(f"  start {seconds:.2f} s with iptables-{variant} (the agent says {agent.own_figure():.2f} s), all is there")
    end(made, agent, variant)
    return seconds


def _restart(made: Lab, api: ApiProcess) -> tuple[float, float]:
    """Seconds of a start over the chains of an agent that was killed, and of the control."""
    agent = agent_with(made, api, "nft")
    agent.timed_start()
    agent.kill()
    seconds = agent.timed_start()
    check(made, "nft")
    say(f"  start over what is there {seconds:.2f} s")
    with made.inside("node"):
        chains = {name: rules for name, rules in parse(Xtables("nft").save(4, "nat")).items() if name.startswith("HP-")}
    end(made, agent, "nft")
    return seconds, _control(made, chains)


def _control(made: Lab, chains: dict[str, list[str]]) -> float:
    """One restore as one would write it: all chains, then all rules, in no particular order."""
    names = list(chains)
    random.Random(1).shuffle(names)
    lines = [f":{name} - [0:0]" for name in names]
    lines += [f"-A {name} {rule}" for name in names for rule in chains[name]]
    text = "\n".join(["*nat", *lines, "COMMIT", ""])
    remove = "\n".join(["*nat", *(f"-F {n}" for n in names), *(f"-X {n}" for n in names), "COMMIT", ""])
    with made.inside("node"):
        start = time.monotonic()
        Xtables("nft").restore(4, text)
        seconds = time.monotonic() - start
        Xtables("nft").restore(4, remove)
    say(f"  control: {seconds:.2f} s")
    return seconds
