"""One lab and one real agent for each module and mode; modes are found by looking into the folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.config import available_modes
from controller.lab.agent import Agent, remove
from controller.lab.network import RUN, Lab, LabError

from .kit import HTTP, SECOND_HTTP, UDP, Bench, node_manifest

MODES = available_modes()
LABS = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.root)


@pytest.fixture(scope="session", autouse=True)
def no_leftovers() -> None:
    """Labs of test runs that were killed: their names say whose they were."""
    for folder in RUN.glob("c*x*"):
        owner = folder.name[1:].partition("x")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            try:
                remove(Lab.standing(folder.name))
            except LabError:
                Lab(folder.name, 0).down()


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes network namespaces and a cgroup of its own")
    with Lab(f"c{os.getpid()}x{next(LABS)}", 5, remote=2) as made:
        made.serve(*(place.name for place in made.pods()), http=(HTTP, SECOND_HTTP), udp=(UDP,))
        made.serve(*(place.name for place in made.pods("remote")), http=(HTTP, SECOND_HTTP), udp=(UDP,))
        yield made


@pytest.fixture(scope="module")
def bench(lab: Lab, mode: str, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The lab with an agent that runs; what it leaves behind is cleaned up, and what it said is shown on failure."""
    manifests = lab.folder / "manifests"
    manifests.mkdir(exist_ok=True)
    (manifests / "node.json").write_text(node_manifest(lab))
    agent = Agent(lab, manifests, mode)
    before = request.session.testsfailed
    agent.start()
    yield Bench(lab, agent, itertools.count(1))
    if request.session.testsfailed > before:
        print(f"--- log of the agent\n{agent.tail(60)}")
    if agent.running():
        agent.terminate()
    with contextlib.suppress(FileNotFoundError):
        for path in manifests.iterdir():
            path.unlink()
    cleaned = agent.cleanup()
    assert cleaned.returncode == 0, cleaned.stderr


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["v4", "v6"])
def family(request: pytest.FixtureRequest) -> int:
    return request.param
