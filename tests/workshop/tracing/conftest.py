"""A lab with the examples and an agent for each mode; its last pod is a client that no service leads to."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.workshop.lab import examples
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.tracing import compiler, headers

from .kit import Stage

MODES = ("ebpf", "nftables", "iptables", "ipvs", "userspace")
HOOKS = {
    "test_stages_count_every_connection_once",
    "test_stages_count_every_datagram",
    "test_a_flow_is_followed_in_order",
}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Each measurement compiles programs: before a release, what is no matter of hooks is shown in more modes than
    ebpf and nftables, and what is, over both families.
    """
    call = getattr(item, "callspec", None)
    if call and call.params.get("mode") in ("iptables", "userspace"):
        hooks = item.originalname in HOOKS  # type: ignore[attr-defined]
        if not hooks or call.params.get("family") == 4:
            item.add_marker("long")


@pytest.fixture(scope="session")
def measurable() -> None:
    """Root, bcc and headers; without them these tests say what is missing."""
    if os.geteuid() != 0:
        pytest.skip("needs root: makes network namespaces and loads BPF programs")
    try:
        compiler.load()
        headers.find()
    except ControllerError as error:
        pytest.skip(str(error))


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
