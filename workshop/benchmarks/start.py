"""Process start to fully programmed, 10,000 services x 10 endpoints from an API server over TLS."""

from __future__ import annotations

import subprocess
import sys
import time

from workshop.benchmarks.apidata import ApiProcess
from workshop.benchmarks.kit import HEALTH_CHECKS, ApiAgent, Kernel, Result, Target, lab, median, say
from workshop.lab.network import Lab

SERVICES, ENDPOINTS, RUNS = 10_000, 10, 5
KUBE_PROXY = "kube-proxy v1.36.2 at this size on such a machine, measured before: 42 s (nftables), 72 s (iptables)"

# A process that gets no further than to have the objects, by the official client's own typed lists.
STOCK = """
import sys
from kubernetes import client, config
config.load_kube_config(sys.argv[1])
kept = []
for read in (client.CoreV1Api().list_service_for_all_namespaces,
             client.DiscoveryV1Api().list_endpoint_slice_for_all_namespaces):
    page = read(limit=500)
    kept += page.items
    while page.metadata._continue:
        page = read(limit=500, _continue=page.metadata._continue)
        kept += page.items
assert len(kept) == 2 * int(sys.argv[2]), len(kept)
"""


def measure() -> Result:
    """Run the agent several times on an empty node, and the control once."""
    with lab() as made, ApiProcess(SERVICES, ENDPOINTS, lab=made, health_checks=HEALTH_CHECKS) as api:
        seconds, own = [], []
        for _ in range(RUNS):
            agent = ApiAgent(made, api.kubeconfig)
            seconds.append(agent.timed_start())
            own.append(agent.own_figure())
            kernel = Kernel(made)
            kernel.check(SERVICES, ENDPOINTS)
            kernel.close()
            say(f"  start {seconds[-1]:.3f} s (the agent says {own[-1]:.2f} s), the maps are complete")
            agent.end()
        stock = _stock(made, api)
    value = median(seconds)
    return Result(
        "start", value, "s", "official client, typed lists of the same objects, programming nothing", stock,
        [(Target("seconds from process start to fully programmed", 2.0), value)],
        [f"start: {', '.join(f'{s:.3f}' for s in seconds)} s; {KUBE_PROXY}"],
        {"min": round(min(seconds), 3), "max": round(max(seconds), 3), "agent_says": median(own)},
    )  # fmt: skip


def _stock(made: Lab, api: ApiProcess) -> float:
    say("  control: the official client's typed lists")
    start = time.monotonic()
    done: subprocess.CompletedProcess[str] = made.run(
        "node", [sys.executable, "-c", STOCK, api.kubeconfig, str(SERVICES)]
    )
    if done.returncode:
        raise RuntimeError(f"the control failed: {done.stderr}")
    return time.monotonic() - start
