"""One set of programs and maps for all tests here; each test begins with empty ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.namespaces import fresh

from .kit import NETS, Bench, Net, forward_by


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.root)


@pytest.fixture(scope="module", autouse=True)
def routes() -> Iterator[None]:
    """The thread that runs tests here is in a namespace that forwards; all routes lead out of one interface."""
    with fresh():
        forward_by("out0")
        yield


@pytest.fixture(scope="session")
def programs() -> Iterator[Bench]:
    if os.geteuid() != 0:
        pytest.skip("needs root (CAP_BPF, CAP_NET_ADMIN): loads BPF programs and runs them, attached to nothing")
    made = Bench()
    yield made
    made.close()


@pytest.fixture
def bench(programs: Bench) -> Bench:
    programs.reset()
    return programs


@pytest.fixture(params=[4, 6], ids=["v4", "v6"])
def net(request: pytest.FixtureRequest) -> Net:
    return NETS[request.param]
