"""Effects of a switch on clients, for each pair of modes: lost answers, new connections, the longest wait."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hybrid_proxy.controller.serving.admin import ask
from hybrid_proxy.controller.serving.protocol import SwitchAnswer, SwitchMode
from hybrid_proxy.workshop.benchmarks.kit import say, working_modes
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.examples import folder
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab
from hybrid_proxy.workshop.lab.objects import endpoint_slice, service
from hybrid_proxy.workshop.measuring.nodes import lab
from hybrid_proxy.workshop.measuring.results import Result, Target

SECONDS: Final = 4.0  # of the loads before and after a switch, each
TCP, UDP, BACKENDS = 8080, 5353, ("pod2", "pod3")
WEB, DNS, WEB_NODE, DNS_NODE = "10.96.0.10", "10.96.0.11", 30_080, 30_053
UDP_ENDS_SOON = ("--conntrack-udp-timeout", "10s", "--conntrack-udp-timeout-stream", "10s")
PLAIN = "plain"  # the load whose waits are the machine's
PLACES: Sequence[str] = ("pod1", "node", "client")
NEW_RATE = 200  # new connections a second of all places


@dataclass(frozen=True)
class Load:
    """One process of clients; `kind` and `socket` as of `workshop.lab.traffic`."""

    name: str
    place: str
    kind: str
    target: str
    socket: str = "fresh"


@dataclass(frozen=True)
class Seen:
    """The results of clients over one switch."""

    lost: dict[str, int]  # answers, by the load and the failure's name
    moved: dict[str, int]  # likewise, answers from another backend than before to the same socket
    new_failed: int
    wait: float  # ms: the slowest answer to what was open
    plain_wait: float  # ms: the same of a connection that no proxy touches
    new_p99: float  # ms


Pair = tuple[str, str]


def measure() -> Result:
    """Runs loads of every kind from a pod, the node and outside while an agent switches.

    The control: before each switch the same loads run without one. For a pair, both modes' controls count, and the
    waits of a connection that no proxy touches.
    """
    with lab(pods=3, plain=2) as made:
        modes = working_modes(made)
        made.serve(*BACKENDS, "plain2", http=(TCP,), udp=(UDP,))
        agent = Agent(made, _manifests(made), modes[0], UDP_ENDS_SOON)
        found: dict[Pair, Seen] = {}
        without: dict[str, list[Seen]] = {mode: [] for mode in modes}
        with agent.serving():
            for pair in itertools.permutations(modes, 2):
                if agent.running_status().mode.effective != pair[0]:
                    _switch(agent, pair[0])
                    agent.wait(lambda status: not status.draining, 60, "alone")
                without[pair[0]].append(_switched(made, agent, None))
                found[pair] = _switched(made, agent, pair[1])
    worst, slowdown = (max(how(one, [*without[a], *without[b]]) for (a, b), one in found.items())
                       for how in (_beyond, _slowdown))  # fmt: skip
    lost, moved = (sum(sum(getattr(one, what).values()) for one in found.values()) for what in ("lost", "moved"))
    return Result(
        "switch", lost, "answers lost", "the same loads without a switch",
        sum(sum(one.lost.values()) for some in without.values() for one in some),
        [
            (Target(f"answers lost, of {len(found)} pairs", 0), lost),
            (Target("backends changed", 0), moved),
            (Target("new connections failed", 0), sum(one.new_failed for one in found.values())),
            (Target("longest wait beyond the longest without a switch, in ms", 25), worst),
            (Target("p99 of a new connection / the highest without a switch", 1.5), slowdown),
        ],
        [f"switch: {' > '.join(pair)}: {one}" for pair, one in found.items()],
        {"pairs": {" > ".join(pair): vars(one) for pair, one in found.items()},
         "without": {mode: [vars(one) for one in some] for mode, some in without.items()}},
    )  # fmt: skip


def _beyond(one: Seen, without: Sequence[Seen]) -> float:
    """By how many ms clients waited longer over a switch."""
    return one.wait - max(one.plain_wait, *(control.wait for control in without))


def _slowdown(one: Seen, without: Sequence[Seen]) -> float:
    return one.new_p99 / max(control.new_p99 for control in without)


def _switch(agent: Agent, mode: str) -> None:
    ask(str(agent.socket), SwitchMode(mode), SwitchAnswer)
    agent.wait(lambda status: status.mode.effective == mode and status.synced, 30, f"in mode {mode}")


def _switched(made: Lab, agent: Agent, mode: str | None) -> Seen:
    """Start the loads, switch in their midst (None: do not), and wait until the mode before is gone."""
    with ExitStack() as stack:
        running = {load: stack.enter_context(_started(made, load)) for load in _loads(made)}
        time.sleep(SECONDS)
        if mode is not None:
            _switch(agent, mode)
        time.sleep(SECONDS)
        for process in running.values():
            process.terminate()
        found = {
            load: json.loads(process.communicate(timeout=60)[0].splitlines()[-1]) for load, process in running.items()
        }
    agent.wait(lambda status: not status.draining, 60, "alone")
    seen = _judged(found)
    say(f"  to {mode or 'nothing else'}: {seen}")
    return seen


def _loads(made: Lab) -> list[Load]:
    """From each place: connections that stay open, new ones, and datagrams of both kinds of sockets."""
    node, loads = made["node"].address4, [Load(PLAIN, "plain1", "streams", f"{made['plain2'].address4}:{TCP}")]
    for place in PLACES:
        web, dns = (f"{node}:{WEB_NODE}", f"{node}:{DNS_NODE}") if place == "client" else (f"{WEB}:80", f"{DNS}:53")
        loads += [
            Load(f"{place} streams", place, "streams", web),
            Load(f"{place} new", place, "connections", web),
            Load(f"{place} connected UDP", place, "udp", dns, "connected"),
            Load(f"{place} unconnected UDP", place, "udp", dns, "one"),
        ]
    return loads


def _started(made: Lab, load: Load) -> subprocess.Popen[str]:
    rate = NEW_RATE / 3 if load.kind == "connections" else 100
    argv = [
        sys.executable, "-m", "hybrid_proxy.workshop.lab.traffic", "load", load.kind, load.target,
        "--socket", load.socket, "--rate", str(rate), "--concurrency", "2", "--timeout", "5", "--report", "3600",
    ]  # fmt: skip
    return made.start(load.place, argv, output=subprocess.PIPE)


def _judged(found: dict[Load, dict[str, Any]]) -> Seen:
    new = [row for load, row in found.items() if load.kind == "connections"]
    kept = {load: row for load, row in found.items() if load.kind != "connections" and load.name != PLAIN}
    (plain,) = (row for load, row in found.items() if load.name == PLAIN)
    for load, row in found.items():
        if load.kind == "connections" and row["failures"]:
            say(f"  {load.name}: {row['failures']}")
    return Seen(
        lost={f"{load.name}: {why}": n for load, row in kept.items() for why, n in row["failures"].items()},
        moved={load.name: row["moved"] for load, row in kept.items() if row["moved"]},
        new_failed=sum(row["failed"] for row in new),
        wait=max(row["slowest_answer_ms"] or 0.0 for row in kept.values()),
        plain_wait=plain["slowest_answer_ms"] or 0.0,
        new_p99=max(row["connect_ms"]["p99"] for row in new),
    )


def _manifests(made: Lab) -> Path:
    """Writes two Services with node ports."""
    items, backends = [], [made[pod].address4 for pod in BACKENDS]
    for name, address, protocol, port, target, node_port in (
        ("bench/web", WEB, "TCP", 80, TCP, WEB_NODE), ("bench/dns", DNS, "UDP", 53, UDP, DNS_NODE),
    ):  # fmt: skip
        items.append(service(name, address, [(protocol, port)], node_port))
        items.append(endpoint_slice(name, backends, [(protocol, target)], NODE_NAMES["node"]))
    return folder(made, items)
