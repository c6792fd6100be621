"""A lab with the examples, an agent, and load on one service."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from hybrid_proxy.workshop.lab import examples
from hybrid_proxy.workshop.lab.agent import Agent, remove
from hybrid_proxy.workshop.lab.network import Lab
from tests.namespaces import new_lab

TRAFFIC = (sys.executable, "-m", "hybrid_proxy.workshop.lab.traffic", "load")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("t", 3) as made:
        examples.serve(made)
        yield made
        remove(made)


@pytest.fixture(scope="module")
def agent(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Agent]:
    """In mode ebpf, or as a parameter says; shared by tests in a row, each of which leaves it running."""
    made = Agent(lab, lab.folder / "manifests", getattr(request, "param", "ebpf"))
    made.start()
    yield made
    print(f"--- log of the agent\n{made.tail(40)}")
    if made.running():
        made.terminate()
    made.cleanup()


@pytest.fixture(scope="module")
def load(lab: Lab) -> Iterator[None]:
    """20 connections a second to default/web from a pod, and five that are refused by default/empty."""
    wanted = (("10.96.0.10:80", "20"), ("10.96.0.99:80", "5"))
    clients = [
        lab.start("pod1", [*TRAFFIC, "connections", target, "--rate", rate], output=subprocess.DEVNULL)
        for target, rate in wanted
    ]
    yield
    for client in clients:
        client.terminate()
        client.wait(timeout=60)
