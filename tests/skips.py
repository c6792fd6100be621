"""pytest: what was skipped, a line for each reason, in front of pytest's own summary of what failed."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        terminalreporter.section(f"skipped: {reasons.total()}")
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{count:5} {reason}")
