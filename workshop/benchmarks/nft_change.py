"""Mode nftables: one endpoint change at 10,000 services x 10 endpoints, from the API server to the kernel's map."""

from __future__ import annotations

import contextlib
import time

from dataplane.kernel.netlink import attribute, nested, string
from dataplane.kernel.nfnetlink import NFPROTO, Nfnetlink
from dataplane.modes.nftables.picks import chain_named, pick_chain
from dataplane.modes.nftables.tables import COUNTERS, SETS, TABLE, structure
from dataplane.nftables.codec import Codec
from dataplane.nftables.expressions import FAMILIES
from dataplane.nftables.ruleset import Ruleset, additions
from dataplane.nftables.schema import Element
from dataplane.nftables.uapi import NFT_MSG_GETSETELEM
from dataplane.nftables.wire import Kernel
from dataplane.table import NodeNetwork, PodMatch
from workshop.benchmarks.apidata import ApiProcess
from workshop.benchmarks.kit import ApiAgent, Result, Target, lab, median, quantile, say
from workshop.benchmarks.nft_start import check, pick_of
from workshop.lab.apiserver import cluster_address
from workshop.lab.network import Lab

SERVICES, ENDPOINTS = 10_000, 10
CHANGES, PAUSE, POLL = 200, 0.03, 0.0002
STEP = 7  # services are taken in no particular order: 7 and 10,000 have no common divisor
IPV4 = FAMILIES[4]
KUBE_PROXY = "kube-proxy v1.36.2 in mode nftables at this size, measured before: 7.4 s median"


def measure() -> Result:
    """Change one service after the other, and look at its element of the map from outside."""
    with lab() as made, ApiProcess(SERVICES, ENDPOINTS, lab=made) as api:
        agent = ApiAgent(made, api.kubeconfig, "nftables")
        say(f"  the agent is ready after {agent.timed_start():.2f} s")
        check(made)
        time.sleep(2)
        with made.inside("node"):
            seen = _changes(api)
        own = (agent.status() or {})["change_seconds"]
        memory = agent.memory()["VmRSS"]
        say(f"  {len(seen)} changes: median {1000 * median(seen):.2f} ms; the agent has {memory:.0f} MB")
        agent.kill()
        control = _whole_table(made)
        agent.end()
    p50, p99 = 1000 * median(seen), 1000 * quantile(seen, 0.99)
    note = (
        f"nft-change: {len(seen)} changes, from the moment the API server sends the event (TLS included) to the new "
        f"verdict in the kernel's map; the agent's own figures, from its receipt: median {1000 * own['p50']:.2f} ms, "
        f"p99 {1000 * own['p99']:.2f} ms; {KUBE_PROXY}"
    )
    return Result(
        "nft-change", p50, "ms", "one transaction that writes the same table again, without the decisions",
        1000 * control,
        [(Target("median in ms", 40), p50), (Target("MB of memory of the agent", 150), memory)],
        [note],
        {"p50": round(p50, 2), "p99": round(p99, 2), "max": round(1000 * max(seen), 2),
         "agent_p50": round(1000 * own["p50"], 2), "memory_mb": round(memory, 1)},
    )  # fmt: skip


def _question(index: int) -> bytes:
    """What asks for the verdict of one service."""
    key = Codec(IPV4).encoder(SETS["inside"].key)((cluster_address(index), 6, 80))
    return string(1, TABLE) + string(2, "inside") + nested(3, nested(1, nested(1, attribute(1, key))))


def _changes(api: ApiProcess) -> list[float]:
    """Seconds that each change took, from the API server's write to the kernel."""
    seconds = []
    wanted = f"inside-{ENDPOINTS - 1}-".encode()
    with Nfnetlink() as kernel:
        for number in range(CHANGES):
            index = number * STEP % SERVICES
            question = _question(index)
            assert f"inside-{ENDPOINTS}-".encode() in (kernel.get(NFT_MSG_GETSETELEM, NFPROTO[4], question) or b"")
            api.send_endpoints(index, list(range(ENDPOINTS - 1)))
            deadline = time.monotonic() + 5
            while wanted not in (kernel.get(NFT_MSG_GETSETELEM, NFPROTO[4], question) or b""):
                time.sleep(POLL)
                assert time.monotonic() < deadline, f"the change of service {index} is not in the kernel after 5 s"
            visible = time.monotonic_ns()
            seconds.append((visible - api.sent_endpoints()) / 1e9)
            time.sleep(PAUSE)
    return seconds


def _whole_table(made: Lab) -> float:
    """Seconds for a transaction that replaces the table by the same elements."""
    node = NodeNetwork(pods=PodMatch(("10.128.0.0/9",)))
    with made.inside("node"), contextlib.closing(Kernel(TABLE, SETS, chain_named)) as kernel:
        held = {name: kernel.contents(IPV4, name) for name in ("inside", "inside-slots", "cluster-ips")}
        elements = [
            Element(name, key, value, comment)
            for name, found in held.items()
            for key, (value, comment) in found.items()
        ]
        picks = {pick_of(value) for value, _ in held["inside"].values()}
        chains = (*structure(IPV4, node), *(pick_chain(IPV4, pick) for pick in picks))
        ruleset = Ruleset(IPV4, COUNTERS, tuple(SETS.values()), chains)
        start = time.monotonic()
        kernel.commit((IPV4, [*ruleset.create(replace=True), *additions(elements)]))
        seconds = time.monotonic() - start
    say(f"  control: {seconds:.2f} s")
    return seconds
