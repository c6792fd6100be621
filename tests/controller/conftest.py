"""Agents that are asked for their pages; see `tests.served`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from hybrid_proxy.controller.kubernetes.manifests import Manifests
from hybrid_proxy.workshop.lab.apiserver import ApiServer
from hybrid_proxy.workshop.lab.network import Lab
from tests.controller.watching import Watcher
from tests.namespaces import new_lab
from tests.served import FRAGILE, SYNC_PERIOD, Served, api_server


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("p", 1) as made:
        yield made


@pytest.fixture
def api(lab: Lab) -> Iterator[ApiServer]:
    with api_server(lab) as server:
        yield server


@pytest.fixture
def fragile(tmp_path: Path) -> Path:
    home = tmp_path / "fragile"
    home.mkdir()
    (home / "__init__.py").touch()
    (home / "programmer.py").write_text(dedent(FRAGILE))
    return home


@pytest.fixture
def start(lab: Lab, api: ApiServer, fragile: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def begin(*flags: str, mode: str = "fragile", wait: bool = True, kubeconfig: Path | None = None) -> Served:
        agent = Served(lab, lab.folder, mode, ("--iptables-sync-period", f"{SYNC_PERIOD:g}s", *flags))
        agent.folder, agent.kubeconfig = fragile.parent, kubeconfig or api.kubeconfig()
        started.append(agent)
        if wait:
            agent.start()
        else:
            with agent.log.open("a") as log:
                agent.process = lab.start("node", agent.argv, output=log, errors=log)
        return agent

    yield begin
    for agent in started:
        print(f"--- log of the agent\n{agent.tail(40)}")
        if agent.running():
            agent.terminate()
        agent.log.unlink(missing_ok=True)
        agent.socket.with_suffix(".memory").unlink(missing_ok=True)
        if agent.mode != "fragile":
            agent.cleanup()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Watcher]]:
    """Start a source of manifests and wait for its first lists."""
    started: list[Watcher] = []

    def start(path: Path = tmp_path, ready: bool = True) -> Watcher:
        watcher = Watcher(Manifests(path))
        started.append(watcher)
        if ready:
            watcher.until(lambda: watcher.healthy, "the first lists")
        return watcher

    yield start
    for watcher in started:
        watcher.stop()
