"""Resident memory of the agent at 10,000 services x 10 endpoints, with all its servers on and scraped."""

from __future__ import annotations

import subprocess
import sys
import time

from hybrid_proxy.workshop.benchmarks.apidata import ApiProcess
from hybrid_proxy.workshop.benchmarks.kit import HEALTH_CHECKS, ROOT, ApiAgent, Result, Scraper, Target, lab, say
from hybrid_proxy.workshop.lab.agent import resident

SERVICES, ENDPOINTS = 10_000, 10
CHANGES = 200
SETTLED = 10.0  # seconds after the last change
SCRAPES = 3.0  # seconds between two of /metrics
KUBE_PROXY = "kube-proxy v1.36.2 at this size, measured before: 279 MB (nftables), 333 MB (iptables)"

# What the agent cannot do without: the interpreter and the libraries that it imports, with nothing in them.
BARE = """
import sys
import cffi, h11, msgspec, numpy, prometheus_client, ssl, urllib3, yaml
print("ready", flush=True)
sys.stdin.read()
"""


def measure() -> Result:
    """Fill the agent, change some services, let it settle, and read what the kernel counts."""
    with lab() as made, ApiProcess(SERVICES, ENDPOINTS, lab=made, health_checks=HEALTH_CHECKS) as api:
        agent = ApiAgent(made, api.kubeconfig)
        say(f"  the agent is ready after {agent.timed_start():.2f} s")
        first = agent.memory()
        with Scraper(made, metrics_every=SCRAPES) as scraper:
            for number in range(CHANGES):
                api.set_endpoints(number, list(range(ENDPOINTS - 1)))
            time.sleep(SETTLED)
        settled = agent.memory()
        agent.end()
    bare = _bare()
    parts = f"{settled['RssAnon']:.1f} MB its own, {settled['RssFile']:.1f} MB files and mapped parts of kernel maps"
    note = (
        f"memory: {first['VmRSS']:.1f} MB when ready, {settled['VmRSS']:.1f} MB {SETTLED:.0f} s after {CHANGES} "
        f"changes ({parts}); answers {scraper.summary()}; bare imports {bare['VmRSS']:.1f} MB; {KUBE_PROXY}"
    )
    return Result(
        "memory", settled["VmRSS"], "MB", "a Python process that only imports the same libraries", bare["VmRSS"],
        [(Target("resident MB", 150), settled["VmRSS"])],
        [note],
        {
            "anonymous": round(settled["RssAnon"], 1), "file": round(settled["RssFile"], 1),
            "when_ready": round(first["VmRSS"], 1), "control_anonymous": round(bare["RssAnon"], 1),
        },
    )  # fmt: skip


def _bare() -> dict[str, float]:
    with subprocess.Popen(
        [sys.executable, "-c", BARE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        found = resident(process.pid)
        process.stdin.close()
    return found
