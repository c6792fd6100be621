"""Mode nftables: process start to fully programmed, 10,000 services x 10 endpoints from an API server over TLS."""

from __future__ import annotations

import contextlib
import subprocess
import time

from dataplane.modes.nftables.picks import Pick, chain_named
from dataplane.modes.nftables.tables import SETS, TABLE
from dataplane.nftables.expressions import FAMILIES, Verdict
from dataplane.nftables.schema import Key
from dataplane.nftables.wire import Kernel
from workshop.benchmarks.apidata import ApiProcess
from workshop.benchmarks.kit import ApiAgent, Result, Target, lab, median, say
from workshop.lab.apiserver import cluster_address, pod_address
from workshop.lab.network import Lab

SERVICES, ENDPOINTS, RUNS = 10_000, 10, 3
KUBE_PROXY = "kube-proxy v1.36.2 in mode nftables at this size on such a machine, measured before: 42 s"
IPV4 = FAMILIES[4]


def measure() -> Result:
    """Run the agent several times on an empty node, once over what is there, and the control once."""
    with lab() as made, ApiProcess(SERVICES, ENDPOINTS, lab=made) as api:
        runs = [_start(made, api) for _ in range(RUNS)]
        again = _restart(made, api)
        control = _control(made)
    seconds, memory = [run[0] for run in runs], [run[1] for run in runs]
    value = median(seconds)
    told = ", ".join(f"{s:.2f}" for s in seconds)
    return Result(
        "nft-start", value, "s", "the command nft: the same maps and elements as a text that is ready", control,
        [(Target("seconds from process start to fully programmed", 3.0), value),
         (Target("MB of memory of the agent, programmed", 150), median(memory))],
        [f"nft-start: {told} s; over the tables of the agent before: {again:.2f} s; {KUBE_PROXY}"],
        {"min": round(min(seconds), 2), "max": round(max(seconds), 2), "restart": round(again, 2),
         "memory_mb": round(median(memory), 1)},
    )  # fmt: skip


def check(made: Lab, endpoints: int = ENDPOINTS) -> None:
    """Every service of the fake API server leads to exactly its endpoints."""
    with made.inside("node"), contextlib.closing(Kernel(TABLE, SETS, chain_named)) as kernel:
        verdicts = kernel.contents(IPV4, "inside")
        slots = kernel.contents(IPV4, "inside-slots")
    assert len(verdicts) == SERVICES, f"{len(verdicts)} of {SERVICES} services are in the map"
    found: dict[Key, set[object]] = {}
    for sliced, (backend, _) in slots.items():
        found.setdefault(sliced[1:], set()).add(backend)
    for number in range(SERVICES):
        key = (cluster_address(number), 6, 80)
        pick = pick_of(verdicts[key][0])
        assert pick.backends == endpoints, f"service {number} goes to {pick.name}"
        wanted = {(pod_address(number, n, endpoints), 8080) for n in range(endpoints)}
        assert found[key] == wanted, f"service {number} leads to {found[key]}"


def pick_of(value: object) -> Pick:
    """The chain that an element of map `inside` leads to."""
    assert isinstance(value, Verdict)
    assert isinstance(value.chain, Pick), "a service has no backends"
    return value.chain


def _start(made: Lab, api: ApiProcess) -> tuple[float, float]:
    agent = ApiAgent(made, api.kubeconfig, "nftables")
    seconds = agent.timed_start()
    check(made)
    memory = agent.memory()["VmRSS"]
    say(f"  start {seconds:.2f} s (the agent says {agent.own_figure():.2f} s), {memory:.0f} MB, all is there")
    agent.end()
    return seconds, memory


def _restart(made: Lab, api: ApiProcess) -> float:
    """Seconds of a start over the tables of an agent that was killed."""
    agent = ApiAgent(made, api.kubeconfig, "nftables")
    agent.timed_start()
    agent.kill()
    seconds = agent.timed_start()
    check(made)
    say(f"  start over what is there {seconds:.2f} s, {agent.memory()['VmRSS']:.0f} MB")
    agent.end()
    return seconds


def _control(made: Lab) -> float:
    """Seconds for the command nft to parse and send the same elements."""
    verdicts, slots = [], []
    for number in range(SERVICES):
        key = f"{cluster_address(number)} . tcp . 80"
        verdicts.append(f"{key} : goto inside-10-ne")
        slots += [f"{n} . {key} : {pod_address(number, n, ENDPOINTS)} . 8080" for n in range(ENDPOINTS)]
    key = "ipv4_addr . inet_proto . inet_service"
    text = "\n".join(
        [
            "add table ip control",
            "add chain ip control inside-10-ne",
            f"add map ip control inside {{ type {key} : verdict; }}",
            f"add map ip control slots {{ type mark . {key} : ipv4_addr . inet_service; }}",
            f"add element ip control inside {{ {', '.join(verdicts)} }}",
            f"add element ip control slots {{ {', '.join(slots)} }}",
        ]
    )
    with made.inside("node"):
        start = time.monotonic()
        subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)
        seconds = time.monotonic() - start
        subprocess.run(["nft", "delete table ip control"], check=True)
    say(f"  control: {seconds:.2f} s")
    return seconds
