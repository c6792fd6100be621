"""Ten minutes of churn under load: 100 service changes and 1,000 connections a second; nothing lost, nothing leaked.

HYBRID_PROXY_SOAK=60 makes it a minute.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

from hybrid_proxy.workshop.benchmarks.clients import ALL_PODS, CLIENT, PORT, VIP, measured, serve
from hybrid_proxy.workshop.benchmarks.kit import built, median, say
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.measuring.apidata import ApiProcess
from hybrid_proxy.workshop.measuring.nodes import ApiAgent, lab
from hybrid_proxy.workshop.measuring.results import Result, Target

SECONDS = float(os.environ.get("HYBRID_PROXY_SOAK", "600"))
SERVICES, ENDPOINTS = 1_000, 10
CHANGES, CONNECTIONS = 100, 1_000  # a second
OUTSIDE = 5  # one of so many connections comes from a client beyond the node, through the node port
NODE_PORT = 30_999
BACKENDS = ("pod2", "pod3", "pod4")
SAMPLES = 20


def measure() -> Result:
    """Traffic runs on its own; this process changes services, takes samples, and compares their halves."""
    program = str(built(CLIENT))
    with lab(pods=4, kind="soak") as made, ApiProcess(SERVICES, ENDPOINTS, lab=made) as api:
        for name in BACKENDS:
            serve(made, name, program, prefix=())
        agent = ApiAgent(made, api.kubeconfig, flags=("--nodeport-addresses", "0.0.0.0/0"), cluster_cidr=ALL_PODS)
        _measured(made, api, BACKENDS)
        with agent.serving():
            clients = _clients(made, program)
            samples, changes = _churn(made, api, agent)
            done, failed = _collect(clients)
            status = agent.running_status().dataplane
    grown = _growth(samples)
    say(f"  {done:,} connections, {failed} failed; {changes:,} changes; growth {grown}")
    left = {name: value for name, value in status.counters.items() if value and ("full" in name or "lost" in name)}
    return Result(
        "soak", done / SECONDS, "1/s", "connections that failed, at least one to divide by", max(failed, 1),
        [
            (Target("connections that failed", 0), failed),
            (Target("connections a second", 0.95 * CONNECTIONS, at_least=True), done / SECONDS),
            (Target("changes a second", 0.95 * CHANGES, at_least=True), changes / SECONDS),
            *((Target(f"{what}, last quarter / second quarter", 1.05), ratio) for what, ratio in grown.items()),
        ],
        [f"soak: {SECONDS:.0f} s, {SERVICES:,} services x {ENDPOINTS} endpoints; trouble counted: {left or 'none'}"],
        {"failed": failed, "changes": changes, "growth": grown},
    )  # fmt: skip


def _measured(made: Lab, api: ApiProcess, pods: tuple[str, ...]) -> None:
    """The service that is used, with these pods behind it; it has a node port, too."""
    for obj in measured(*(made[name] for name in pods), node_port=NODE_PORT):
        api.control("put", **obj)


def _clients(made: Lab, program: str) -> list[subprocess.Popen[str]]:
    """A pod by the ClusterIP and a client outside by the node port, at their part of the rate each."""
    node = made["node"].address4
    outside = CONNECTIONS / OUTSIDE
    plans = [("pod1", VIP, PORT, CONNECTIONS - outside), ("client", node, NODE_PORT, outside)]
    return [
        made.start(place, [program, "ask", address, str(port), str(SECONDS), str(rate)], output=subprocess.PIPE)
        for place, address, port, rate in plans
    ]


def _churn(made: Lab, api: ApiProcess, agent: ApiAgent) -> tuple[list[dict[str, float]], int]:
    """Change services, at every tenth change the one in use; samples and the number of changes."""
    samples: list[dict[str, float]] = []
    start, number = time.monotonic(), 0
    while (now := time.monotonic() - start) < SECONDS:
        if number < now * CHANGES:
            if number % 10:
                api.send_endpoints(number % SERVICES, [n for n in range(ENDPOINTS) if n != number % ENDPOINTS])
                with contextlib.suppress(RuntimeError):  # an update that changes nothing is no event
                    api.sent_endpoints()
            else:
                gone = number // 10 % len(BACKENDS)
                _measured(made, api, tuple(name for place, name in enumerate(BACKENDS) if place != gone))
            number += 1
        else:
            time.sleep(0.002)
        if now >= len(samples) * SECONDS / SAMPLES:
            samples.append(_sample(agent))
    return samples, number


def _sample(agent: ApiAgent) -> dict[str, float]:
    """Reads what must not grow: memory, descriptors, threads, numbers in use."""
    assert agent.process is not None
    process = Path("/proc", str(agent.process.pid))
    dataplane = agent.running_status().dataplane
    assert dataplane.ebpf is not None
    fill = {name: float(row.used) for name, row in dataplane.fill.items()}
    return {
        "memory": agent.memory()["VmRSS"],
        "descriptors": float(len(list((process / "fd").iterdir()))),
        "threads": float(len(list((process / "task").iterdir()))),
        "services": fill["services"],
        "backends": fill["backends"] + float(dataplane.ebpf.deferred_frees),
        "slots": fill["slots"],
    }


def _growth(samples: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the last quarter in parts of those of the second one; the first one warms up."""
    quarter = len(samples) // 4
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]
    return {
        name: round(median([sample[name] for sample in last]) / median([sample[name] for sample in second]), 3)
        for name in samples[0]
    }


def _collect(clients: list[subprocess.Popen[str]]) -> tuple[int, int]:
    done = failed = 0
    for client in clients:
        output, _ = client.communicate(timeout=60)
        good, _, bad, *_ = output.split()
        done, failed = done + int(good), failed + int(bad)
    return done, failed
