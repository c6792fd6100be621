"""pytest in a guest, and its reports here while it runs: one line of JSON for each."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .architectures import split
from .kernels import get
from .machine import Finished, GuestFailed, Machine, missing_programs

__all__ = ["PYTEST_LIMIT", "Remote", "read_reports", "run_pytest"]

TEST_LIMIT = 900  # seconds for one test in a guest
PYTEST_LIMIT = 3600.0  # for all of one guest
REPORTS = "reports.jsonl"
_POLL = 0.2


def run_pytest(
    machine: Machine,
    arguments: Sequence[str],
    folder: Path,
    timeout: float = PYTEST_LIMIT,
    memory: int = 2048,
    stop: threading.Event | None = None,
) -> Finished:
    """Run pytest with these arguments in a guest; its reports go to `folder`, while it runs."""
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=short", f"--timeout={TEST_LIMIT}",
        f"--report-to={folder / REPORTS}", *arguments,
    ]  # fmt: skip
    return machine.run(command, timeout, memory, shared=folder, stop=stop)


def read_reports(folder: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The complete lines of the reports from an offset in bytes, and the offset behind them."""
    try:
        with (folder / REPORTS).open("rb") as file:
            file.seek(start)
            text = file.read()
    except FileNotFoundError:
        return [], start
    whole = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], start + len(whole)


class Remote:
    """A run of pytest in one guest, begun when the first report is asked for.

    Args:
        kernel: its series.
        nodeids: of the tests, in the order in which they run.
    """

    def __init__(self, kernel: str, nodeids: Sequence[str]) -> None:
        self.kernel = kernel
        self.nodeids = tuple(nodeids)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._ended = ""  # why there are no more reports
        self._read = 0
        self._known: dict[str, list[dict[str, Any]]] = {}

    def reports(self, nodeid: str) -> Iterator[dict[str, Any]]:
        """The serialised reports of one test, as they come; a made-up failure if the guest ended before."""
        if self._thread is None:
            self._start()
        sent = 0
        while True:
            here = self._known.get(nodeid, [])
            for report in here[sent:]:
                yield report
                if report["when"] == "teardown":
                    if nodeid == self.nodeids[-1]:
                        self._thread.join(60)  # its CPU time counts from its end on
                    return
            sent = len(here)
            ended = not self._running()
            if not self._look() and ended:
                yield _lost(nodeid, self._ended)
                return

    @property
    def started(self) -> bool:
        """Whether any test asked for it."""
        return self._thread is not None

    def close(self) -> None:
        """End the guest, if it runs; nothing of it is left."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._folder is not None:
            self._folder.cleanup()

    def _running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _look(self) -> bool:
        """Read what is new, waiting a moment while there is nothing; whether there was something."""
        assert self._folder is not None
        fresh, self._read = read_reports(Path(self._folder.name), self._read)
        for report in fresh:
            self._known.setdefault(report["nodeid"], []).append(report)
        if not fresh and self._running():
            time.sleep(_POLL)
        return bool(fresh)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hybrid-proxy-guest-")
        self._thread = threading.Thread(target=self._run, args=(Path(self._folder.name),), name="guest", daemon=True)
        self._thread.start()

    def _run(self, folder: Path) -> None:
        if missing := missing_programs(split(self.kernel)[1]):
            self._ended = f"this machine cannot run guests: it lacks {' '.join(missing)} (make vm)"
            return
        wanted = folder / "tests.txt"
        wanted.write_text("".join(f"{nodeid}\n" for nodeid in self.nodeids))
        try:
            # Two emulated processors cost twice the time of one: each locked instruction of the kernel is a call then.
            machine = Machine(get(self.kernel, _nothing), cpus=1, log=_nothing)
            done = run_pytest(machine, [f"@{wanted}"], folder, stop=self._stop)
        except (GuestFailed, LookupError, OSError) as error:
            self._ended = str(error)
        except subprocess.CalledProcessError as error:
            self._ended = f"{error}: {error.stderr}"
        else:
            self._ended = (
                f"pytest ended with {done.code} after {done.seconds:.0f} s in the guest:\n{done.output[-3000:]}"
            )


def _nothing(_: str) -> None:
    """What is being waited for does not belong between the results."""


def _lost(nodeid: str, why: str) -> dict[str, Any]:
    """The report of a test that the guest did not get to: failed, as pytest serialises it."""
    return {
        "$report_type": "TestReport",
        "nodeid": nodeid,
        "location": (nodeid.partition("::")[0], 0, nodeid.partition("::")[2]),
        "keywords": {},
        "outcome": "failed",
        "longrepr": f"no report came from the guest: {why}",
        "when": "call",
        "sections": [],
        "user_properties": [],
        "duration": 0.0,
        "start": 0.0,
        "stop": 0.0,
    }
