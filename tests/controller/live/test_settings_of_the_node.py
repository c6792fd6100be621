"""What an agent sets on its node: when, and how `cleanup` puts it back. Connection tracking of a lab's namespace."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from tests.conformance.kit import node_manifest
from tests.namespaces import new_lab
from tests.switching import works

pytestmark = pytest.mark.root
PATIENCE = 10.0

ESTABLISHED = "net/netfilter/nf_conntrack_tcp_timeout_established"
CLOSE_WAIT = "net/netfilter/nf_conntrack_tcp_timeout_close_wait"
UDP = "net/netfilter/nf_conntrack_udp_timeout"
WANTED = {ESTABLISHED: "18000", CLOSE_WAIT: "7200", UDP: "77"}
FLAGS = (
    "--conntrack-tcp-timeout-established=5h", "--conntrack-tcp-timeout-close-wait=2h", "--conntrack-udp-timeout=77s",
)  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("s", 1) as made:
        (made.folder / "manifests").mkdir(exist_ok=True)
        (made.folder / "manifests" / "node.json").write_text(node_manifest(made))
        yield made


def settings(lab: Lab) -> dict[str, str]:
    with lab.inside("node"):
        return {name: Path("/proc/sys", name).read_text().strip() for name in WANTED}


def set_by_hand(lab: Lab, name: str, value: str) -> None:
    with lab.inside("node"):
        Path("/proc/sys", name).write_text(value)


def agent_of(lab: Lab, *flags: str) -> Agent:
    works("nftables", lab)
    return Agent(lab, lab.folder / "manifests", "nftables", (*FLAGS, *flags))


@pytest.fixture
def before(lab: Lab) -> Iterator[dict[str, str]]:
    """The settings as they are; as they were, at the end."""
    works("nftables", lab)  # which loads connection tracking
    found = settings(lab)
    assert not set(found.items()) & set(WANTED.items())
    yield found
    for name, value in found.items():
        set_by_hand(lab, name, value)


def test_they_are_set_and_put_back(lab: Lab, before: dict[str, str]) -> None:
    """That a start which is refused changes none is in test_modes.py."""
    agent = agent_of(lab)
    agent.start()
    assert settings(lab) == WANTED
    agent.kill()
    agent.start()
    agent.terminate()
    assert settings(lab) == WANTED, "the dataplane stays as it is, and so do they"
    result = agent.cleanup()
    assert result.returncode == 0, result.stderr
    assert "put back 3 settings" in result.stdout
    assert settings(lab) == before


def test_what_somebody_else_changed_stays(lab: Lab, before: dict[str, str]) -> None:
    agent = agent_of(lab)
    agent.start()
    set_by_hand(lab, UDP, "55")
    agent.terminate()
    result = agent.cleanup()
    assert "put back 2 settings" in result.stdout, result.stderr
    assert settings(lab) == {**before, UDP: "55"}
    result = agent.cleanup()
    assert "put back" not in result.stdout
    assert settings(lab) == {**before, UDP: "55"}


def test_what_somebody_changed_between_two_agents_is_what_was_before(lab: Lab, before: dict[str, str]) -> None:
    agent = agent_of(lab)
    agent.start()
    agent.terminate()
    set_by_hand(lab, UDP, "55")
    agent.start()
    agent.terminate()
    assert settings(lab) == WANTED
    agent.cleanup()
    assert settings(lab) == {**before, UDP: "55"}


def test_the_node_prepared_alone_is_put_back_too(lab: Lab, before: dict[str, str]) -> None:
    """`--init-only`, as the first container of a pod and the unit's ExecStartPre have it."""
    agent = agent_of(lab)
    result = agent.command("run", "--init-only", *FLAGS)
    assert result.returncode == 0, result.stderr
    assert "connection tracking" not in result.stderr
    assert settings(lab) == WANTED
    agent.cleanup()
    assert settings(lab) == before


def test_only_an_agent_that_stays_asks_for_its_place_when_memory_is_short(lab: Lab) -> None:
    """Without CAP_SYS_RESOURCE it gets none, and says so once, whatever the configuration becomes."""
    agent = agent_of(lab, "--oom-score-adj=-900")
    agent.under = ("setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource")
    prepared = lab.run("node", [*agent.argv, "--init-only"])
    assert (prepared.returncode, "oomScoreAdj" in prepared.stderr) == (0, False), prepared.stderr
    with agent.serving():
        for words in (("iptables",), ("--back",)):
            assert agent.command("switch", *words).returncode == 0
    assert agent.log.read_text().count("oomScoreAdj stays at") == 1


CONTAINER = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
READ_ONLY = ["sh", "-c", 'mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys && exec "$@"', "sh"]


def test_what_a_container_can_never_set_is_no_warning(lab: Lab, before: dict[str, str]) -> None:
    """Its process 1 is in its own network namespace, which proves nothing: the table's size is the machine's alone."""
    argv = [sys.executable, "-m", "hybrid_proxy.controller", "run", "--init-only", *FLAGS]
    result = lab.run("node", [*CONTAINER, *argv])
    assert result.returncode == 0, result.stderr
    assert settings(lab) == WANTED
    assert "connection tracking" not in result.stderr
    unchanged = settings(lab)
    result = lab.run("node", [*CONTAINER, *READ_ONLY, *argv, "--conntrack-udp-timeout=78s"])
    assert result.returncode == 0, result.stderr
    assert settings(lab) == unchanged
    lines = [line for line in result.stderr.splitlines() if "connection tracking" in line]
    assert len(lines) == 1, result.stderr
    assert f" I connection tracking: {UDP} is 77 and cannot be set to 78" in lines[0]
