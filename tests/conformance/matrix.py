"""The table mode x case: printed at the end of a run, and kept in docs/conformance.md on request."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

from hybrid_proxy.controller.settings.config import MODES

__all__ = ["FILE", "Matrix", "Rows", "merge", "read_table", "render"]

FILE: Final = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
# From good to bad; of several runs of one case (families, places) the worst is shown.
MARKS: Final = {"passed": "yes", "xfailed": "not yet", "skipped": "skipped", "failed": "**no**"}
_WORST: Final = list(MARKS)
PROPERTY: Final = "row"  # of a report

Key = tuple[str, str]  # row, words
Rows = dict[Key, dict[str, str]]  # -> mode -> mark


class Matrix:
    """Collects what became of every test that names a row; its reports carry that row, from other processes too."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.outcomes: dict[tuple[str, str, str], str] = {}  # row, words, mode

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Let the reports of a test say what it is about."""
        mark, spec = item.get_closest_marker("row"), getattr(item, "callspec", None)
        if mark is not None and spec is not None and "mode" in spec.params:
            item.user_properties.append((PROPERTY, (*mark.args, spec.params["mode"])))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test, and of a set-up that failed."""
        about = dict(report.user_properties).get(PROPERTY)
        if about is None or (report.when != "call" and report.passed):
            return
        row, words, mode = about
        key = str(row), str(words), str(mode)
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        self.outcomes[key] = max(outcome, self.outcomes.get(key, "passed"), key=_WORST.index)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table; write it if asked for."""
        if not self.outcomes:
            return
        rows: Rows = {}
        for (row, words, mode), outcome in self.outcomes.items():
            rows.setdefault((row, words), {})[mode] = MARKS[outcome]
        terminalreporter.section("conformance")
        for line in render(rows).splitlines():
            terminalreporter.line(line)
        if self.config.getoption("--write-conformance-table", default=False):
            text = FILE.read_text()
            FILE.write_text(merge(text, rows))
            terminalreporter.line(f"written to {FILE}")


def render(rows: Rows) -> str:
    """A Markdown table; modes in their usual order, rows by number."""
    modes = [mode for mode in MODES if any(mode in marks for marks in rows.values())]
    lines = ["| row | case | " + " | ".join(modes) + " |", "|---|---|" + "---|" * len(modes)]
    for row, words in sorted(rows, key=_order):
        marks = " | ".join(rows[row, words].get(mode, "") for mode in modes)
        lines.append(f"| {row} | {words} | {marks} |")
    return "\n".join(lines)


def _order(key: Key) -> tuple[list[tuple[int, str]], str]:
    parts = key[0].split(".")
    numbers = [(int(digits), part) for part in parts if (digits := "".join(c for c in part if c.isdigit()))]
    return numbers, key[1]


def read_table(lines: Iterable[str]) -> Rows:
    """What `render` wrote."""
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]
    if not cells:
        return {}
    modes = cells[0][2:]
    return {(row[0], row[1]): {m: mark for m, mark in zip(modes, row[2:], strict=True) if mark} for row in cells[2:]}


def merge(text: str, rows: Rows) -> str:
    """The document with these results in; columns of modes that did not run stay as they are."""
    head, _, rest = text.partition(BEGIN)
    old, _, tail = rest.partition(END)
    table = read_table(old.splitlines())
    for key, marks in rows.items():
        table.setdefault(key, {}).update(marks)
    return f"{head}{BEGIN}\n\n{render(table)}\n\n{END}{tail}"
