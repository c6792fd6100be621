"""Memory of the agent after ten outages of the API server, in each of which every slice is rewritten.

Everything is listed then. In the first outage the endpoints of all services change, later their versions alone. The
control is the same agent, in the same run, before the first of them.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from hybrid_proxy.workshop.benchmarks.kit import say
from hybrid_proxy.workshop.measuring.apidata import ApiProcess
from hybrid_proxy.workshop.measuring.nodes import HEALTH_CHECKS, ApiAgent, Scraper, lab
from hybrid_proxy.workshop.measuring.results import Result, Target

SERVICES, ENDPOINTS = 10_000, 10
RELISTS = 10
RATE = 5_000.0  # changes a second while the streams are cut
AWAY = 3  # seconds that the reader keeps away
SETTLED = 3.0  # seconds after a table was programmed
SCRAPES = 3.0  # seconds between two of /metrics
PATIENCE = 60.0


def measure() -> Result:
    """Measures memory before and after."""
    with lab() as made, ApiProcess(SERVICES, ENDPOINTS, lab=made, health_checks=HEALTH_CHECKS) as api:
        agent = ApiAgent(made, api.kubeconfig)
        try:
            say(f"  the agent is ready after {agent.timed_start():.2f} s")
            with Scraper(made, metrics_every=SCRAPES):
                time.sleep(SETTLED)
                found = [_memory(agent)]
                for number in range(RELISTS):
                    _outage(api, agent)
                    found.append(_memory(agent))
                    rss, pss = found[-1]
                    say(f"  list {number + 1}: {rss:.1f} MB, {pss:.1f} MB by share")
            lists = agent.log.read_text().count("EndpointSlices are listed again")
        finally:
            agent.end()
    (first, first_share), (last, last_share) = found[0], found[-1]
    note = (
        f"relists: {first:.1f} MB before ({first_share:.1f} by share), {last:.1f} MB after {lists} lists of "
        f"{SERVICES} services ({last_share:.1f}), {max(rss for rss, _ in found):.1f} at most"
    )
    return Result(
        "relists", last, "MB", "the same agent before", first,
        [(Target("resident MB", 150), last)],
        [note],
        {"lists": lists, "pss": round(last_share, 1), "pss_before": round(first_share, 1)},
    )  # fmt: skip


def _outage(api: ApiProcess, agent: ApiAgent) -> None:
    """Cuts the streams, changes everything, and removes the server's history, so that everything is listed."""
    for plural in ("services", "endpointslices"):
        api.control("fault", plural=plural, answers=[[503, {"Retry-After": str(AWAY)}]])
        api.control("cut", plural=plural)
    api.churn(RATE, SERVICES / RATE)
    api.churned()
    api.control("expire")
    api.control("cut")
    deadline = time.monotonic() + PATIENCE
    time.sleep(SETTLED)
    while not _well(agent):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the agent does not read everything again:\n{agent.tail()}")
        time.sleep(0.1)
    time.sleep(SETTLED)


def _well(agent: ApiAgent) -> bool:
    status = agent.running_status()
    return status is not None and status.synced and all(kind.state == "read" for kind in status.source.kinds)


def _memory(agent: ApiAgent) -> tuple[float, float]:
    """VmRSS and PSS in MB (10^6 bytes)."""
    assert agent.process is not None
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{agent.process.pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return agent.memory()["VmRSS"], int(found[1]) * 1024 / 1e6
