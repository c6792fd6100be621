"""While an agent starts, it answers at its admin socket with the part of the start that it is at."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_proxy.controller.agent.loop import STILL_SECONDS
from hybrid_proxy.controller.serving.memory import changes_path, read_changes
from hybrid_proxy.workshop.lab.namespace import DEADLINES
from tests import waiting
from tests.served import Served

pytestmark = pytest.mark.root


def until(agent: Served, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What `status` prints as soon as it is as wanted."""
    deadline = time.monotonic() + 30 * DEADLINES
    while True:
        done = agent.command("status", "-o", "json", "--admin-socket", str(agent.socket))
        status = json.loads(done.stdout)
        if reached(status):
            assert done.returncode == (0 if status["agent"] else 1)
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.1)


SLOW = """
import time
from dataclasses import replace

def wait_for(name):
    while not (Path(__file__).parent / name).exists():
        time.sleep(0.05)

class Slow(Fragile):
    def __init__(self, options, wake):
        wait_for("open")
    def sync(self, table):
        wait_for("sync")
        return super().sync(table)

MODE = replace(MODE, open=Slow)
"""


def test_status_says_which_part_of_the_start_an_agent_is_at(start: Callable[..., Served], fragile: Path) -> None:
    """The mode takes its time to open, and then to program the first table."""
    program = fragile / "programmer.py"
    program.write_text(program.read_text() + SLOW)
    agent = start(wait=False)
    opening = until(agent, lambda status: bool(status["agent"] or status["starting"]))
    assert "opens mode fragile" in opening["starting"]
    assert agent.process is not None
    agent.process.send_signal(signal.SIGSTOP)
    time.sleep(STILL_SECONDS + 2)
    agent.process.send_signal(signal.SIGCONT)
    (fragile / "open").touch()
    until(agent, lambda status: not status["agent"] and "programs its first table" in status["starting"])
    (fragile / "sync").touch()
    ready = until(agent, lambda status: status["agent"] and status["synced"])
    assert ready["starting"] == ""
    # A stop is noticed while the agent is busy, too.
    path = changes_path(str(agent.socket))
    waiting.until(lambda: any("stood still" in row.what for row in read_changes(path)), "it is written down")


def test_the_start_is_told_by_its_parts(start: Callable[..., Served], fragile: Path) -> None:
    agent = start()
    status = until(agent, lambda status: status["agent"] and status["synced"])
    parts = {part["name"]: part for part in status["start_parts"]}
    assert parts.keys() >= {"imports", "open the mode", "list and decode", "table", "first sync"}
    for part in parts.values():
        assert 0 <= part["began"] <= part["began"] + part["seconds"] <= status["ready_seconds"] + 5
        assert part["processor"] is None or part["processor"] <= part["seconds"] + 0.05
    first = parts["first sync"]
    assert first["began"] + first["seconds"] - 0.05 < status["ready_seconds"] < status["uptime_seconds"]
    assert sum(part["processor"] or 0 for part in parts.values()) > 0
    assert status["start_processor_seconds"] >= parts["imports"]["processor"]
    agent.command("status", "--admin-socket", str(agent.socket))
    again = until(agent, lambda status: status["agent"] and status["observed"])
    assert again["start_parts"] == status["start_parts"], "nothing is added after the start"
