"""A short comparison of two modes: a process that is interrupted, then this one, which goes on from there."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from hybrid_proxy.controller import cli
from hybrid_proxy.workshop.compare import commands
from hybrid_proxy.workshop.compare.measure import carry_out
from hybrid_proxy.workshop.compare.plan import METRICS, Step
from hybrid_proxy.workshop.compare.report import Report
from hybrid_proxy.workshop.compare.result import BINS, Cell
from hybrid_proxy.workshop.compare.stand import Stand
from hybrid_proxy.workshop.lab import namespace
from hybrid_proxy.workshop.lab.network import RUN
from hybrid_proxy.workshop.measuring.loads import DATAGRAM, TOOLS

pytestmark = pytest.mark.root
MODES = ("ebpf", "nftables")
UNPACKED = Path(__file__).parents[4] / "build/tools/usr/sbin"
SHORT = f"--modes {','.join(MODES)} --services 10 --backends 2 --rounds 1 --turns 1 --changes 1".split()


def command(*more: str) -> list[str]:
    """Ctrl-C means something to it, also where this run ignores it, as what a shell starts in the background does.

    It finds by itself what `make setup` unpacked.
    """
    path = os.environ["PATH"].replace(f"{UNPACKED}{os.pathsep}", "")
    return [
        "env",
        "--default-signal=INT",
        f"PATH={path}",
        sys.executable,
        "-m",
        "hybrid_proxy.controller",
        "compare",
        *SHORT,
        *more,
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes network namespaces")
    for tool in ("nginx", "wrk", "iperf3"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is missing: make setup")
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    """A process is interrupted after a step, and this one finishes. Traffic is measured in the first mode alone."""
    state = folder / "state"
    cells = state / "cells.jsonl"
    argv, pipe = command("--state", str(state)), subprocess.PIPE
    begun = subprocess.Popen(argv, stderr=pipe, stdout=pipe, text=True, start_new_session=True)
    deadline = time.monotonic() + 240
    while not cells.exists() or cells.read_bytes().count(b"\n") < 1:
        assert begun.poll() is None, begun.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(begun.pid, signal.SIGINT)  # as a terminal does
    _, errors = begun.communicate(timeout=240)
    assert begun.returncode == 1
    assert "The same command goes on from there" in errors, errors
    assert "Traceback" not in errors, errors
    assert "nginx" not in errors, "what `make setup` unpacked is found"
    assert_nothing_left(begun.pid)
    kept = cells.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "carry_out", without_traffic_of_others)
        assert cli.main(["compare", *SHORT, "--state", str(state), "--report", str(folder / "report.html")]) == 0
    assert cells.read_bytes().startswith(kept), "what was finished is not measured again"
    assert_nothing_left(os.getpid())
    return msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)


def test_kube_proxy_takes_part(folder: Path) -> None:
    """The real one, where it is installed: its start, its rules, a change and its memory, beside the control."""
    program = shutil.which("kube-proxy")
    if program is None:
        pytest.skip("kube-proxy is missing")
    modes = [f"kube-proxy-{mode}" for mode in ("nftables", "iptables")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "carry_out", without_traffic_of_others)
        flags = ["--modes", ",".join(("nftables", *modes)), "--kube-proxy", program]
        target = folder / "kube-proxy.html"
        assert cli.main(["compare", *SHORT, *flags, "--report", str(target)]) == 0
    assert_nothing_left(os.getpid())
    made = msgspec.json.decode(target.with_suffix(".json").read_bytes(), type=Report)
    assert "kube-proxy" in made.run.machine.tools
    for mode in modes:
        rows = {row.metric: row for row in made.findings.rows if row.mode == mode}
        assert all(rows[name].value for name in ("start", "change", "memory", "rules")), rows
        assert "not reported by kube-proxy" in rows["applied"].missing


def without_traffic_of_others(step: Step, stand: Stand, control: Stand, lacking: Mapping[str, str]) -> Cell:
    left_out = dict.fromkeys(TOOLS, "not in this test") if step.mode != MODES[0] else {}
    return carry_out(step, stand, control, {**lacking, **left_out})


def assert_nothing_left(pid: int) -> None:
    for place in (namespace.FOLDER, RUN, namespace.cgroup2_root()):
        assert not [path for path in place.glob("*") if f"cmp{pid}x" in path.name]


def test_everything_is_measured(report: Report) -> None:
    assert report.run.complete
    for metric in METRICS:
        for mode in MODES if metric.kind != "traffic" else MODES[:1]:
            row = report.findings.row(metric.name, mode, 10)
            assert row is not None
            assert row.value is not None, row.missing
            assert row.value.median > 0 or metric.name in ("rules", "entries")
            assert (row.control is not None) == metric.control
            assert (row.lead is None) == (mode == MODES[0])


def test_the_control_is_sane(report: Report) -> None:
    """No proxy: more requests than connections, for less each, and as many as one CPU has the time for."""
    control = {name: row.control.median for row in report.findings.rows if row.control for name in [row.metric]}
    assert 0 < control["connections"] < control["requests"]
    for rate, cost in (("connections", "connection_cost"), ("requests", "request_cost")):
        assert control[rate] * control[cost] < 1.2e6  # microseconds, of one CPU that clients and servers share
    assert control["request_cost"] < control["connection_cost"]
    for cost in ("request", "connection"):  # the machine may have more to do, but not less
        assert control[f"{cost}_cost"] < control[f"{cost}_cpu"] * 1.2
    assert control["latency_p50"] <= control["latency_p90"] <= control["latency_p99"]
    datagrams = control["datagrams"] * 8 * DATAGRAM / 1e9
    assert 0 < datagrams < control["stream"]  # Gbit/s: small packets carry less than large ones


def test_the_histogram_has_the_median_that_the_load_generator_says(report: Report) -> None:
    cell = next(cell for cell in report.run.cells if cell.step.kind == "traffic" and cell.step.mode == "ebpf")
    for histogram, values in ((cell.latency, cell.values), (cell.control_latency, cell.controls)):
        bins = [number for number, count in sorted(histogram.items()) for _ in range(count)]
        assert len(bins) > 300
        middle = bins[len(bins) // 2]
        low, high = (math.exp2((middle + edge) / BINS) / 1000 for edge in (-1, 2))  # or in the bins beside it
        assert low <= values["latency_p50"] <= high


def test_each_mode_stands_for_itself(report: Report) -> None:
    rules = {mode: report.findings.row("rules", mode, 10) for mode in MODES}
    assert rules["ebpf"] is not None
    assert rules["nftables"] is not None
    assert rules["ebpf"].value is not None
    assert rules["nftables"].value is not None
    assert rules["ebpf"].value.median == 0
    assert rules["nftables"].value.median > 20


def test_one_round_is_not_called_sure(report: Report) -> None:
    assert any("Too few rounds" in warning for warning in report.findings.warnings)


@pytest.mark.usefixtures("report")
def test_other_settings_are_not_mixed_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *SHORT, "--state", str(folder / "state"), "--seconds", "2"]) == 2
    errors = capsys.readouterr().err
    assert "seconds 1" in errors
    assert "--fresh" in errors


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--modes", "ebpf,xdp"], "'xdp' is none of"),
        (["--modes", "ebpf,kube-proxy-iptables"], "'kube-proxy-iptables' needs --kube-proxy PATH"),
        (["--kube-proxy", "/nowhere"], "--kube-proxy /nowhere: does not run"),
        (["--services", "10,many"], "--services: 'many'"),
        (["--services", "3"], "from 4 to"),
        (["--rounds", "0"], "--rounds: '0'"),
    ],
)
def test_flags_that_cannot_be_used(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *SHORT, "--state", str(tmp_path), *flags]) == 2
    assert words in capsys.readouterr().err
