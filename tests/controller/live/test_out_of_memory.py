"""The agent is killed again and again, for lack of memory in its cgroup or as it starts; what was served goes on."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from hybrid_proxy.workshop.lab import examples
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.namespace import DEADLINES
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.objects import endpoint_slice, manifest, service
from hybrid_proxy.workshop.lab.traffic import Tally, load, meanwhile
from tests.loads import goes_on
from tests.memory import Limited, limited
from tests.namespaces import new_lab
from tests.waiting import bound, until

pytestmark = [pytest.mark.root, pytest.mark.cold]

MIB = 1 << 20
KILLS = 5  # as often as a kubelet restarts a container within some five minutes
SERVICES, ENDPOINTS = 3000, 5  # they need 32 MB more
WEB = (socket.AF_INET, ("10.96.0.10", 80))
STARTS = 10
OTHER_FLOWS = ("--max-flows", str(1 << 17))
MANY_FLOWS = ("--max-flows", str(1 << 20))  # tables of 64 MiB, before the first flow


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab("oom", 3) as made:
        yield made


@contextmanager
def traffic(lab: Lab) -> Iterator[list[Tally]]:
    """New connections and open ones, from a pod and from the node; at the end none has failed."""
    tallies = list[Tally]()
    clients = []
    for place in ("pod1", "node"):
        for kind in ("connections", "streams"):
            tallies.append(Tally())
            clients.append(
                partial(load, kind, WEB, tally=tallies[-1], rate=20, concurrency=2, timeout=20 * DEADLINES,
                        open_socket=partial(lab.socket, place))
            )  # fmt: skip
    with meanwhile(clients):
        goes_on(tallies)
        yield tallies
        goes_on(tallies)
    assert not any(tally.failures or tally.moved for tally in tallies), [tally.report() for tally in tallies]


@contextmanager
def serving(lab: Lab, mode: str = "ebpf") -> Iterator[tuple[Agent, Limited, list[Tally]]]:
    """An agent in a cgroup whose memory can be limited, and traffic to what it serves."""
    folder = examples.serve(lab)
    with limited(lab) as memory:
        agent = Agent(lab, folder, mode, under=memory.under)
        with agent.serving(), traffic(lab) as tallies:
            yield agent, memory, tallies


def start(agent: Agent) -> subprocess.Popen[str]:
    """Starts it, and does not wait until it serves."""
    with agent.log.open("a") as log:
        agent.process = agent.lab.start("node", agent.argv, output=log, errors=log)
    return agent.process


def more_services() -> str:
    items = []
    for number in range(SERVICES):
        name, ends = f"more/s{number}", range(number * ENDPOINTS, (number + 1) * ENDPOINTS)
        items.append(service(name, f"10.100.{number >> 8}.{number & 255}", [("TCP", 80)]))
        addresses = [f"10.77.{64 + (end >> 8)}.{end & 255}" for end in ends]
        items.append(endpoint_slice(name, addresses, [("TCP", 8080)], "another"))
    return manifest(items)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["ebpf", "nftables"])
def test_an_agent_that_is_killed_again_and_again_leaves_what_it_served(lab: Lab, mode: str) -> None:
    """More services need more than the limit; with a higher one the next agent catches up."""
    with serving(lab, mode) as (agent, memory, tallies):
        memory.limit(memory.used + 8 * MIB)
        (agent.manifests / ".more").write_text(more_services())
        (agent.manifests / ".more").rename(agent.manifests / "more.json")
        left = []  # bytes that the kernel keeps for the agents that were killed
        for kills in range(1, KILLS + 1):
            assert agent.process is not None
            assert agent.process.wait(60 * DEADLINES) == -9, agent.tail()
            assert memory.kills == kills
            goes_on(tallies)
            left.append(memory.used)
            said = agent.command("status").stdout, agent.command("doctor").stdout
            assert all("out of memory" in text and "limits.memory" in text for text in said), said
            start(agent)
        assert max(left) < left[0] + 2 * MIB, "what an agent leaves does not add up"
        agent.process.wait(60 * DEADLINES)
        memory.limit(1 << 30)
        start(agent)
        agent.wait(lambda status: status.synced and status.services > SERVICES, 60, "up to date")
        assert agent.log.read_text().count("out of memory") >= KILLS, "each agent says why the one before it ended"
        goes_on(tallies)


@pytest.mark.long
def test_there_is_no_memory_for_other_maps_at_a_start(lab: Lab) -> None:
    """The agent says so, and leaves the former maps with their flows; with memory the next one carries them over."""
    with serving(lab) as (agent, memory, tallies):
        agent.kill()
        agent.flags = MANY_FLOWS
        memory.limit(memory.used + 60 * MIB)
        process = start(agent)
        assert process.wait(60 * DEADLINES) == 1, agent.tail()
        said = agent.log.read_text().splitlines()[-1]
        assert "Cannot allocate memory" in said
        assert "limits.memory" in said
        goes_on(tallies)
        memory.limit(1 << 30)
        agent.start()
        assert "were carried over" in agent.log.read_text()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["ebpf", "nftables"])
def test_an_agent_that_is_killed_ten_times_while_it_starts(lab: Lab, mode: str) -> None:
    """At moments spread over a start, every other time with tables of another size; then a start is as it was."""
    with serving(lab, mode) as (agent, memory, tallies):
        agent.kill()
        left = memory.used
        seconds = agent.timed_start(60 * DEADLINES)
        for number in range(STARTS):
            agent.kill()
            agent.flags = OTHER_FLOWS if number % 2 else ()
            process = start(agent)
            time.sleep(seconds * (number + 0.5) / STARTS)
            assert process.poll() is None, agent.tail()
            goes_on(tallies)
        agent.kill()
        agent.flags = ()
        again = agent.timed_start(60 * DEADLINES)
        assert again < bound(seconds), "the start after a crash loop is an ordinary one"
        goes_on(tallies)
        agent.kill()
        until(lambda: memory.used < left + 2 * MIB, "what an agent leaves does not add up")
        agent.start()
