"""A service of a node, measured where it is; the node is one of a lab."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hybrid_proxy.controller import cli
from hybrid_proxy.workshop.compare import objects
from hybrid_proxy.workshop.compare.report import Report
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab
from hybrid_proxy.workshop.lab.objects import manifest

pytestmark = pytest.mark.root
NAME = "compare/moving"


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes network namespaces")
    if not shutil.which("wrk"):
        pytest.skip("wrk is missing: make setup")
    with Lab(f"live{os.getpid()}", 2) as lab:
        lab.serve("pod2", http=(9001,), udp=())
        folder = lab.folder / "manifests"
        folder.mkdir()
        items = objects.moving(lab["pod2"].address4, NODE_NAMES["node"], 9001)
        (folder / "service.json").write_text(manifest(items))
        made = Agent(lab, folder, "nftables")
        with made.serving():
            yield made


def command(agent: Agent, state: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "hybrid_proxy.controller", *arguments(agent, state, *more)]


def arguments(agent: Agent, state: Path, *more: str) -> list[str]:
    return [
        "compare", "--live", NAME, "--admin-socket", str(agent.socket),
        "--rounds", "2", "--turns", "1", "--state", str(state), "-o", "json", *more,
    ]  # fmt: skip


def test_the_service_beside_its_endpoint(agent: Agent, tmp_path: Path) -> None:
    before = agent.status()
    done = agent.lab.run("node", command(agent, tmp_path), timeout=120)
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout, type=Report)
    assert report.run.complete
    assert report.run.works == ("nftables",)
    assert {row.metric for row in report.findings.rows} == {
        "connections", "connection_cpu", "requests", "request_cpu", "latency_p50", "latency_p90", "latency_p99",
    }  # fmt: skip
    for row in report.findings.rows:
        assert row.value is not None, row.missing
        assert row.control is not None
        assert row.value.count == 2
        assert not row.verdict, "nobody to be compared with"
    assert not any("failed" in note for note in report.findings.notes)
    few, control = report.findings.warnings
    assert "Too few rounds" in few
    assert "50 %" in few
    assert "the control, always the same work" in control
    assert report.findings.trust != "good"
    assert len(report.summary) == 3
    assert all(sentence.startswith("compare/moving, in mode nftables, needs ") for sentence in report.summary)
    after = agent.status()
    assert before is not None
    assert after is not None
    assert after.generation == before.generation, "nothing was programmed"


def test_what_answers_in_a_lab_is_not_asked_for(agent: Agent, tmp_path: Path) -> None:
    """Of the load generators wrk alone is needed: the service answers itself."""
    (tmp_path / "wrk").symlink_to(shutil.which("wrk") or "")
    limited = ["env", f"PATH={tmp_path}", *command(agent, tmp_path / "state", "--rounds", "1")]
    done = agent.lab.run("node", limited, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "is not installed" not in done.stderr
    assert all(row.value for row in msgspec.json.decode(done.stdout, type=Report).findings.rows)


def test_refused_requests_are_reported(agent: Agent, tmp_path: Path) -> None:
    """The server hangs up where the path asks for a body that long."""
    done = agent.lab.run("node", command(agent, tmp_path, "--rounds", "1", "--path", "/a b"), timeout=120)
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout, type=Report)
    rows = report.findings.rows
    assert all(row.value is None and "wrk" in row.missing for row in rows), [row.missing for row in rows]


def test_from_another_namespace_it_is_refused(agent: Agent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent.lab.inside("client"):
        assert cli.main(arguments(agent, tmp_path)) == 1
    assert "serves another network namespace" in capsys.readouterr().err
    assert not (tmp_path / "cells.jsonl").exists(), "no packet was sent"


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (("--live", "compare/nobody"), 2, "no such service is programmed here"),
        (("--admin-socket", "/nowhere/agent.sock"), 1, "no agent listens at"),
        (("--path", "healthz"), 2, "begins with /"),
    ],
)
def test_what_cannot_be_measured(
    agent: Agent, tmp_path: Path, more: tuple[str, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent.lab.inside("node"):
        assert cli.main(arguments(agent, tmp_path, *more)) == code
    assert words in capsys.readouterr().err
