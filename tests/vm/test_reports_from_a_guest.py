"""Tests that run elsewhere are shown here: what the guest's pytest said, in order, and a failure when it stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from .remote import REPORTS, Remote


def line(nodeid: str, when: str) -> dict[str, Any]:
    return {"nodeid": nodeid, "when": when, "outcome": "passed"}


class Replayed(Remote):
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


def remote(*lines: dict[str, Any]) -> Replayed:
    made = Replayed("6.1", ["a", "b"])
    made.lines = lines
    return made


def test_the_reports_of_each_test_come_in_order_whatever_the_guest_ran_first() -> None:
    every = [line(nodeid, when) for nodeid in ("b", "a") for when in ("setup", "call", "teardown")]
    guest = remote(*every)
    for nodeid in ("a", "b"):
        assert [report["when"] for report in guest.reports(nodeid)] == ["setup", "call", "teardown"]
    guest.close()


def test_a_guest_that_stops_fails_the_tests_that_it_did_not_finish() -> None:
    guest = remote(line("a", "setup"))
    first, last = guest.reports("a")
    assert first["when"] == "setup"
    assert last["outcome"] == "failed"
    assert "it stopped" in last["longrepr"]
    assert [report["outcome"] for report in guest.reports("b")] == ["failed"]
    guest.close()


def test_nothing_starts_before_somebody_asks() -> None:
    guest = remote()
    assert not guest.started
    guest.close()
