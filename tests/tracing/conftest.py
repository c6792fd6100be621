"""A lab with the examples and an agent for each mode; its last pod is a client that no service leads to."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from controller.errors import ControllerError
from controller.lab import examples
from controller.lab.agent import Agent
from controller.lab.network import Lab
from controller.tracing import compiler, headers
from tests.conformance.kit import PATIENCE

from .kit import Stage

MODES = ("ebpf", "nftables", "iptables", "ipvs", "userspace")


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
        agent.start(20 * PATIENCE)
        yield Stage(lab, agent, mode)
        agent.terminate()
        cleaned = agent.cleanup()
        assert cleaned.returncode == 0, cleaned.stderr
