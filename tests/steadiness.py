"""pytest: what passed only at its second try is named at the end, and more than a few of those are a failure.

`make test` gives a failed test a second try (`--reruns 1`): real packets, processes and deadlines on a machine shared
with others lose a second, or a packet, now and then. Each one named here is a test to mend all the same.
"""

from __future__ import annotations

from typing import Final

import pytest

ALLOWED: Final = 5  # of thousands; a change that makes tests unsteady shows by more than these
_TRIED: Final = pytest.StashKey[dict[str, str]]()  # node id -> what was wrong the first time


class SecondTries:
    """Collects the tests that were tried again."""

    def __init__(self, tried: dict[str, str]) -> None:
        self.tried = tried

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = str(crash.message if crash else report.longrepr or "").splitlines()
            self.tried[report.nodeid] = f"{report.when}: {lines[0] if lines else 'no words'}"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TRIED] = {}
    config.pluginmanager.register(SecondTries(config.stash[_TRIED]))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(session.config.stash[_TRIED]) > ALLOWED and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if tried := config.stash[_TRIED]:
        terminalreporter.section(f"tried twice: {len(tried)}, at most {ALLOWED} are accepted")
        for name, words in tried.items():
            terminalreporter.line(f"{name}: {words}")
