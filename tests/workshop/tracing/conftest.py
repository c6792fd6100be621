"""A lab with the examples and an agent for each mode; its last pod is a client that no service leads to."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hybrid_proxy.workshop.lab import examples
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab

from .kit import Stage, skip_without_bcc

MODES = ("ebpf", "nftables", "iptables", "ipvs", "userspace")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Each measurement compiles programs: modes other than ebpf and nftables are measured before a release."""
    call = getattr(item, "callspec", None)
    if call and call.params.get("mode") in ("iptables", "userspace"):
        item.add_marker("long")


@pytest.fixture(scope="session")
def measurable() -> None:
    """Root, bcc and headers; without them these tests say what is missing."""
    if os.geteuid() != 0:
        pytest.skip("needs root: makes network namespaces and loads BPF programs")
    skip_without_bcc()


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def stage(mode: str, measurable: None) -> Iterator[Stage]:
    with Lab(f"tr{os.getpid()}", 4) as lab:
        folder = examples.serve(lab, lab.pods()[:3])
        agent = Agent(lab, folder, mode)
        agent.start()
        yield Stage(lab, agent, mode)
        agent.terminate()
        cleaned = agent.cleanup()
        assert cleaned.returncode == 0, cleaned.stderr


@pytest.fixture
def translating(mode: str) -> None:
    """The mode has the clients' SYNs answered by backends."""
    if mode == "userspace":
        pytest.skip("mode userspace answers SYNs itself: its relay listens on the node")
