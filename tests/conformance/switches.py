"""The table pair of modes x kind of flow: printed at the end of a run, and kept in docs/switching.md on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import pytest

from hybrid_proxy.controller.settings.config import MODES

from .matrix import BEGIN, END

__all__ = ["CANNOT_BE", "FILE", "GOES_ON", "PROPERTY", "Switches", "merge", "read_table", "render"]

FILE: Final = Path(__file__).resolve().parents[2] / "docs" / "switching.md"
PROPERTY: Final = "switch"  # of a report: (former mode, mode, cells by kind)
GOES_ON, CANNOT_BE = "goes on", "-"

Pair = tuple[str, str]
Rows = dict[Pair, dict[str, str]]  # -> kind -> cell


class Switches:
    """Collects what became of the flows over each switch."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.rows: Rows = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the cells that a test has recorded, in another process perhaps."""
        found = dict(report.user_properties).get(PROPERTY) if report.when == "call" else None
        if found is not None:
            former, mode, cells = found
            self.rows[former, mode] = cells

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table; write it if asked for."""
        if not self.rows:
            return
        terminalreporter.section("flows over a switch")
        for line in render(self.rows).splitlines():
            terminalreporter.line(line)
        if self.config.getoption("--write-conformance-table", default=False):
            FILE.write_text(merge(FILE.read_text(), self.rows))
            terminalreporter.line(f"written to {FILE}")


def render(rows: Mapping[Pair, Mapping[str, str]]) -> str:
    """A Markdown table; modes in their usual order, kinds in that of the first row."""
    kinds = list(dict.fromkeys(kind for cells in rows.values() for kind in cells))
    lines = ["| from | to | " + " | ".join(kinds) + " |", "|---|---|" + "---|" * len(kinds)]
    for former, mode in sorted(rows, key=lambda pair: (MODES.index(pair[0]), MODES.index(pair[1]))):
        cells = rows[former, mode]
        lines.append(f"| {former} | {mode} | " + " | ".join(cells.get(kind, "") for kind in kinds) + " |")
    return "\n".join(lines)


def read_table(lines: Iterable[str]) -> Rows:
    """What `render` wrote."""
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]
    if not cells:
        return {}
    kinds = cells[0][2:]
    return {(row[0], row[1]): {k: c for k, c in zip(kinds, row[2:], strict=True) if c} for row in cells[2:]}


def merge(text: str, rows: Rows) -> str:
    """The document with these results in; pairs that did not run stay as they are, kinds that are gone go."""
    head, _, rest = text.partition(BEGIN)
    old, _, tail = rest.partition(END)
    kinds = list(dict.fromkeys(kind for cells in rows.values() for kind in cells))
    table = {pair: {k: cells[k] for k in kinds if k in cells} for pair, cells in read_table(old.splitlines()).items()}
    return f"{head}{BEGIN}\n\n{render(table | rows)}\n\n{END}{tail}"
