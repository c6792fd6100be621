"""Tests that run elsewhere are shown here: what the guest's pytest said, in order, and a failure when it stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from .remote import REPORTS, Remote


def line(nodeid: str, when: str) -> dict[str, Any]:
    return {"nodeid": nodeid, "when": when, "outcome": "passed"}


class Told(Remote):
    """In place of a guest: writes these lines, slowly, and ends."""

    lines: tuple[dict[str, Any], ...] = ()

    def _run(self, folder: Path) -> None:
        for each in self.lines:
            text = json.dumps(each) + "\n"
            with (folder / REPORTS).open("a") as file:
                file.write(text[:10])
                file.flush()
                time.sleep(0.02)
                file.write(text[10:])
        self._ended = "it stopped"


def remote(*lines: dict[str, Any]) -> Told:
    made = Told("6.1", ["a", "b"])
    made.lines = lines
    return made


def test_the_reports_of_each_test_come_in_order_whatever_the_guest_ran_first() -> None:
    every = [line(nodeid, when) for nodeid in ("b", "a") for when in ("setup", "call", "teardown")]
    told = remote(*every)
    for nodeid in ("a", "b"):
        assert [report["when"] for report in told.reports(nodeid)] == ["setup", "call", "teardown"]
    told.close()


def test_a_guest_that_stops_fails_the_tests_that_it_did_not_finish() -> None:
    told = remote(line("a", "setup"))
    first, last = told.reports("a")
    assert first["when"] == "setup"
    assert last["outcome"] == "failed"
    assert "it stopped" in last["longrepr"]
    assert [report["outcome"] for report in told.reports("b")] == ["failed"]
    told.close()


def test_nothing_starts_before_somebody_asks() -> None:
    told = remote()
    assert not told.started
    told.close()
