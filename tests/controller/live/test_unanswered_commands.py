"""Commands on a node whose agent hangs, and then is killed: each says why nobody answers, and none waits twice."""

from __future__ import annotations

import json
import os
import signal
import socket
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_proxy.controller import __version__, cli
from hybrid_proxy.controller.serving.memory import memory_path, recall
from hybrid_proxy.controller.serving.protocol import GetStatus, SwitchMode, answer_seconds
from hybrid_proxy.workshop.lab import examples
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.namespace import DEADLINES
from tests.namespaces import new_lab
from tests.waiting import until

# What is read of a process in /proc is that of a command as a node runs it.
pytestmark = [pytest.mark.root, pytest.mark.cold]

PACKET = ("--from", "10.77.1.11", "--to", "default/web:80")
# fmt: off
COMMANDS = (
    pytest.param(("switch", "nftables"),               id="switch"),
    pytest.param(("drain",),                           id="drain"),
    pytest.param(("explain", "--live", *PACKET),       id="explain"),
    pytest.param(("trace", "--seconds", "1"),          id="trace"),
    pytest.param(("drops", "--follow"),                id="drops that are followed"),
)
# fmt: on


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with new_lab("u", 4) as lab:
        made = Agent(lab, examples.serve(lab))
        with made.serving():

            def has_names() -> bool:
                memory = recall(memory_path(str(made.socket)))
                return memory is not None and any(name.startswith("default/web:") for name in memory.names.values())

            with lab.inside("node"):
                until(has_names, "the names that the agent writes down")
            yield made


@pytest.fixture(scope="module")
def hung(agent: Agent) -> Iterator[Agent]:
    assert agent.process is not None
    agent.process.send_signal(signal.SIGSTOP)
    yield agent
    if agent.process is not None:
        agent.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def dead(agent: Agent) -> Agent:
    if agent.running():
        agent.kill()
    return agent


def test_the_log_of_a_start_says_what_runs_where_and_that_it_is_in_sync(agent: Agent) -> None:
    begun, *_ = agent.log.read_text().splitlines()
    (ready,) = (line for line in agent.log.read_text().splitlines() if "in sync: " in line)
    assert f"hybrid-proxy {__version__} for node {agent.hostname}, mode ebpf, objects from manifests" in begun
    assert f"services in mode ebpf at {agent.lab['node'].address4}, " in ready


def parts(agent: Agent, name: str) -> dict[str, str]:
    """What a bundle has that is made now."""
    file = agent.lab.folder / name
    done = agent.command("bundle", str(file))
    assert done.returncode == 0, done.stderr
    with tarfile.open(file) as archive:
        return {
            entry.name.partition("/")[2]: found.read().decode()
            for entry in archive
            if (found := archive.extractfile(entry))
        }


class TestAHungAgent:
    def test_drops_shows_what_the_kernel_has_after_one_short_look(self, hung: Agent) -> None:
        began = time.monotonic()
        done = hung.command("drops", "default/web")
        assert done.returncode == 0, done.stderr
        assert "does not answer" in done.stderr
        assert time.monotonic() - began < answer_seconds(GetStatus()) * DEADLINES

    def test_a_bundle_has_everything_but_what_the_agent_alone_knows(self, hung: Agent) -> None:
        assert hung.process is not None
        began = time.monotonic()
        found = parts(hung, "hung.tar.gz")
        assert time.monotonic() - began < 1.5 * answer_seconds(GetStatus()) * DEADLINES
        assert "default/web:http" in found["dataplane/services.json"]
        assert "--manifests" in found["agent/command-line.txt"]
        assert "programmed" in found["agent/log.txt"]
        assert "does not answer" in json.loads(found["agent/status.json"])["reason"]
        assert "does not answer" in json.loads(found["doctor.json"])["verdict"]

    def test_switch_says_so_sooner_than_a_switch_may_take(self, hung: Agent) -> None:
        began = time.monotonic()
        done = hung.command("switch", "ebpf")
        assert done.returncode == 1
        assert "does not answer" in done.stderr
        assert time.monotonic() - began < answer_seconds(SwitchMode("ebpf"))

    def test_modes_say_which_one_serves_all_the_same(self, hung: Agent) -> None:
        states = {row["mode"]: row["state"] for row in json.loads(hung.command("modes", "-o", "json").stdout)}
        assert (states["ebpf"], states["nftables"]) == ("serves as last programmed", "works")

    def test_trace_says_what_to_do(self, hung: Agent) -> None:
        done = hung.command("trace", "--seconds", "1")
        assert done.returncode == 1
        assert "does not answer" in done.stderr
        assert "restart it" in done.stderr


class TestADeadAgent:
    @pytest.mark.parametrize("words", COMMANDS)
    def test_since_when_and_why_it_is_gone_and_what_to_do(self, dead: Agent, words: tuple[str, ...]) -> None:
        done = dead.command(*words)
        assert done.returncode == 1
        for part in ("no agent listens", "is gone since", "killed, or crashed", "start it again"):
            assert part in done.stderr

    @pytest.mark.parametrize(
        ("target", "asked"),
        [
            ("default/web:80", "default/web --from 10.77.1.11"),
            ("10.96.0.10:80", "--from 10.77.1.11 --to 10.96.0.10:80"),
        ],
    )
    def test_explain_says_how_doctor_tries_the_packet(self, dead: Agent, target: str, asked: str) -> None:
        done = dead.command("explain", "--live", "--from", "10.77.1.11", "--to", target)
        assert f"`hybrid-proxy doctor {asked}` looks at that" in done.stderr
        if "--to" not in asked:  # nor does doctor, and trace, know a service by name then
            for words in (("doctor", "--to", target), ("trace", "--latency", "--to", target)):
                assert "`hybrid-proxy doctor default/web" in dead.command(*words).stderr
        tried = json.loads(dead.command("doctor", *asked.split(), "-o", "json").stdout)
        assert any(each["subject"] == "table" and "default/web:http" in each["text"] for each in tried["findings"])

    def test_modes_say_which_one_serves(self, dead: Agent) -> None:
        states = {row["mode"]: row["state"] for row in json.loads(dead.command("modes", "-o", "json").stdout)}
        assert (states["ebpf"], states["nftables"]) == ("serves without an agent", "works")

    def test_a_bundle_has_its_command_line_and_the_end_of_its_log(self, dead: Agent) -> None:
        found = parts(dead, "dead.tar.gz")
        assert f"--manifests {dead.manifests}" in found["agent/command-line.txt"]
        assert "killed, or crashed" in json.loads(found["agent/status.json"])["gone"]["why"]
        assert "default/web:http" in found["dataplane/services.json"]
        assert "events" in json.loads(found["agent/drops.json"])
        assert "agent" in {row["kind"] for row in json.loads(found["agent/changes.json"])}
        for shown in ("killed, or crashed", "default/web:http", str(dead.manifests), "net.ipv4.ip_forward"):
            assert shown in found["index.html"]


def test_status_says_that_an_agent_hangs_before_a_person_gives_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_proxy.controller.commands.inspect.FIRST_SECONDS", 0.2)
    path, begun = tmp_path / "hung.sock", time.monotonic()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert cli.main(["status", "--admin-socket", str(path), "--pin-root", str(tmp_path)]) == 1
    assert f"the agent does not answer; its process {os.getpid()} is" in " ".join(capsys.readouterr().out.split())
    assert time.monotonic() - begun < answer_seconds(GetStatus()), "it waited once, and no longer than it may"


@pytest.mark.parametrize("flags", [("--cluster-cidr", "nonsense"), ("--kubeconfig", "/nowhere")], ids=["flag", "file"])
def test_after_a_refused_start_the_reason_and_what_served_are_named(dead: Agent, flags: tuple[str, str]) -> None:
    served = " ".join(dead.argv[1:])
    refused = dead.command("run", *flags)
    status = json.loads(dead.command("status", "-o", "json").stdout)
    (found,) = (each for each in json.loads(dead.command("doctor", "-o", "json").stdout)["findings"]
                if each["cause"] == "no-agent")  # fmt: skip
    assert refused.returncode, refused.stderr
    assert flags[1] in status["gone"]["why"]
    assert flags[1] in found["text"]
    for again in (status["gone"]["again"], found["todo"]):
        assert again.startswith("mend that, or ")
        assert served in again
