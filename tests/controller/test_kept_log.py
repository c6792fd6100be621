"""The end of the log that an agent leaves beside its socket: bounded, private, and never in anybody's way."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_proxy.controller.agent import process
from hybrid_proxy.controller.agent.process import KEPT_BYTES, KeptLog, start_logging
from hybrid_proxy.controller.serving.memory import before, forget, log_path
from hybrid_proxy.controller.settings.config import from_flags

LOG = logging.getLogger("hybrid_proxy.test")


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptLog]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    made = KeptLog(log_path(str(tmp_path / "agent.sock")))
    root.addHandler(made)
    LOG.setLevel(logging.INFO)
    yield made
    root.handlers[:] = handlers
    root.setLevel(level)
    made.close()


def test_the_lines_are_behind_the_command_line_and_private(kept: KeptLog) -> None:
    LOG.info("programmed %d services", 7)
    path = Path(kept.baseFilename)
    first, second = path.read_text().splitlines()
    assert first.endswith(shlex.quote(sys.orig_argv[-1]))
    assert second.endswith(f" {os.getpid()} I programmed 7 services")
    assert path.stat().st_mode & 0o777 == 0o600


def test_they_are_bounded_and_the_last_ones_stay(kept: KeptLog) -> None:
    path = Path(kept.baseFilename)
    for number in range(3 * KEPT_BYTES // 1000):
        LOG.info("%d %s", number, "x" * 1000)
    assert path.stat().st_size + before(path).stat().st_size <= 2 * KEPT_BYTES
    assert path.read_text().splitlines()[-1].split()[-2] == str(number)
    assert sorted(each.name for each in path.parent.iterdir()) == ["agent.log", "agent.log.1"]
    forget(str(path.with_name("agent.sock")))
    assert not list(path.parent.iterdir())


def test_another_agent_appends(kept: KeptLog) -> None:
    LOG.info("the first one")
    second = KeptLog(Path(kept.baseFilename))
    second.handle(logging.makeLogRecord({"msg": "the second one"}))
    second.close()
    text = Path(kept.baseFilename).read_text()
    assert text.index("the first one") < text.index("the second one")


def test_a_changed_configuration_does_not_end_it(kept: KeptLog) -> None:
    start_logging(from_flags({}), kept)
    LOG.info("after the change")
    assert "after the change" in Path(kept.baseFilename).read_text()


@pytest.mark.parametrize("place", ["a-folder", "a-link", "nowhere/agent.log"])
def test_where_nothing_can_be_written_the_agent_goes_on(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "a-link").symlink_to(tmp_path / "of somebody else")
    made = process.KeptLog(tmp_path / place)
    made.handle(logging.makeLogRecord({"msg": "x"}))
    assert not (tmp_path / "of somebody else").exists()
    assert capsys.readouterr().err == ""
