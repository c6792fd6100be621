"""`make demo` and `hybrid-proxy lab` are what a newcomer tries first: they must do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hybrid_proxy.workshop.lab import namespace
from hybrid_proxy.workshop.lab.network import RUN
from hybrid_proxy.workshop.lab.recording import LINE
from tests.waiting import bound, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

NAME = f"c{os.getpid()}xd"
ROOT = Path(__file__).resolve().parents[2]


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hybrid_proxy.controller", "lab", *arguments, "--name", NAME]
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=bound(30))


def traces() -> list[Path]:
    found = [*namespace.FOLDER.glob(f"hp-{NAME}-*"), namespace.cgroup2_root() / f"hp-{NAME}", RUN / NAME]
    return [path for path in found if path.exists()]


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended but whose parent has not noticed does not."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_demonstration_does_what_it_says() -> None:
    result = lab("demo", "-o", "json")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["passed"]
    assert len(summary["checks"]) >= 20
    assert all(good for good, _ in summary["checks"])
    assert not traces()
    shown = [without_figures(line) for line in recorded(ROOT / "docs/demo.svg")]
    assert shown == [without_figures(line) for line in result.stderr.splitlines()], "run `make pictures`"


def recorded(picture: Path) -> list[str]:
    """The lines of text in a recording."""
    rows: defaultdict[float, list[tuple[float, str]]] = defaultdict(list)
    for found in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"):
        rows[float(found.attrib["y"])].append((float(found.attrib["x"]), found.text or ""))
    height = min(rows)
    lines = [""] * round((max(rows) - height) / LINE + 1)
    for y, parts in rows.items():
        lines[round((y - height) / LINE)] = " ".join(text for _, text in sorted(parts))
    return lines


def without_figures(line: str) -> str:
    return " ".join(re.sub(r"\d[\d.,]*", "0", line).split())


def test_a_lab_stays_up_until_it_is_taken_down() -> None:
    try:
        result = lab("up", "-o", "json")
        assert result.returncode == 0, result.stderr
        up = json.loads(result.stdout)
        assert set(up["places"]) == {"node", "client", "pod1", "pod2", "pod3"}

        rows = {row["name"]: row for row in json.loads(typed("hybrid-proxy lab list -o json").stdout)}
        assert set(rows[NAME]["places"]) == set(up["places"])
        assert rows[NAME]["log"] == up["log"]

        again = lab("up")
        assert again.returncode != 0
        assert "stands already" in again.stderr
        assert alive(up["agent"]["pid"]), "the second `up` ended the agent of the first"
    finally:
        down = lab("down")
    assert down.returncode == 0, down.stderr
    assert not traces()
    assert not alive(up["agent"]["pid"])


def typed(line: str) -> subprocess.CompletedProcess[str]:
    """A line as it is printed, in a shell that knows `hybrid-proxy`."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, env=os.environ | {"PATH": path}, timeout=bound(30)
    )


def test_what_a_lab_prints_can_be_typed() -> None:
    try:
        up = lab("up")
        assert up.returncode == 0, up.stderr
        second = lab("demo")
        assert second.returncode == 1
        assert re.search(rf"stands already .*\b{NAME}\b.* give another --name", second.stderr), (
            "it may be another user's"
        )
        lines = [line.strip() for line in up.stdout.splitlines() if line.startswith("    ")]
        assert all(len(line) <= 140 for line in lines), lines
        load, *asked, shell, _manifest, _configuration, metrics, _tail, kill, again = lines

        done = typed(load)
        final = json.loads(done.stdout.splitlines()[-1])
        assert (final["answered"], final["failed"], set(final["backends"])) == (100, 0, {"pod1", "pod2", "pod3"})
        for line in (*asked, metrics):
            assert typed(line).returncode == 0, line
        inside = typed(f"echo 'hybrid-proxy status -o json' | {shell}")
        assert json.loads(inside.stdout)["synced"], inside.stderr

        assert typed(kill).returncode == 0
        until(lambda: not alive(int(kill.split()[-1])), "the agent is gone")
        assert typed(load).returncode == 0, "traffic goes on"
        (status,) = (line for line in asked if line.endswith("status"))
        assert typed(status).returncode == 1
        agent = subprocess.Popen(["sh", "-c", f"PATH={Path(sys.executable).parent}:$PATH; exec {again}"])
        until(
            lambda: '"synced": true' in typed(f"{status} -o json").stdout,
            "the agent that was started again is ready",
            30,
        )
    finally:
        lab("down")
    agent.wait(bound(20))
    assert not traces()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(("pod1", "--", "true"), 1, f"no lab named '{NAME}'", id="no lab"),
        pytest.param(("pod1",), 2, "which command", id="no command"),
        pytest.param(("pod1", "--"), 2, "which command", id="nothing after the dashes"),
    ],
)
def test_what_cannot_be_run_in_a_lab_is_refused(arguments: tuple[str, ...], code: int, said: str) -> None:
    argv = [sys.executable, "-m", "hybrid_proxy.controller", "lab", "exec", "--name", NAME, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=bound(30))
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_taking_down_what_is_not_there_says_so() -> None:
    down = lab("down")
    assert down.returncode != 0
    assert f"no lab named '{NAME}'" in down.stderr
    assert "Traceback" not in down.stderr


@pytest.mark.parametrize("arguments", [("up", "--pods", "2"), ("demo", "--pods", "999")])
def test_impossible_labs_are_refused_with_a_message(arguments: tuple[str, ...]) -> None:
    result = lab(*arguments)
    assert result.returncode != 0
    assert "pods" in result.stderr
    assert "Traceback" not in result.stderr
    assert not traces()
