"""Tables of results in our documents: printed at the end of a run, and kept in the document on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from hybrid_proxy.controller.settings.documents import MODES

__all__ = ["BEGIN", "DOCS", "END", "Grid", "Grouped", "Key", "Rows"]

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

Key = tuple[str, ...]  # what names a row
Rows = dict[Key, dict[str, str]]  # -> column -> cell


class Grid:
    """A plugin of pytest that collects one table. Those that inherit from it say how its rows are found and ordered.

    Attributes:
        rows: what this run has found.
    """

    title: ClassVar[str]  # of the section at the end of the run
    document: ClassVar[str]  # below docs/
    heads: ClassVar[Sequence[str]]  # of the columns that name a row
    marks: ClassVar[tuple[str, str]] = BEGIN, END  # where in the document
    # The property of a report that has a row, a mode and the cell of a passing test; or reports are noted otherwise.
    recorded: ClassVar[str] = ""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.rows: Rows = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the cell that a test has recorded, in another process perhaps. What is skipped records none."""
        found = dict(report.user_properties).get(self.recorded) if report.when == "call" else None
        if found is not None:
            row, mode, cell = map(str, found)
            self.rows.setdefault((row,), {})[mode] = cell if report.passed else "**no**"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if isinstance(item, pytest.Function) and hasattr(item, "callspec") and self.is_long(item.callspec.params):
                item.add_marker(pytest.mark.long)

    def is_long(self, asked: Mapping[str, Any]) -> bool:
        """Whether the test with these parameters shows nothing of its mode that another one does not show."""
        return False

    @classmethod
    def columns(cls, rows: Rows) -> list[str]:
        """The modes that have results, in their usual order."""
        return [mode for mode in MODES if any(mode in cells for cells in rows.values())]

    @classmethod
    def order(cls, rows: Rows) -> list[Key]:
        """The rows from top to bottom; the table has no others."""
        return list(rows)

    @classmethod
    def joined(cls, before: Rows, rows: Rows) -> Rows:
        """The document's rows and this run's: cells that did not run stay as they are."""
        return {key: {**before.get(key, {}), **rows.get(key, {})} for key in {**before, **rows}}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table; write it if asked for."""
        if not self.rows:
            return
        terminalreporter.section(self.title)
        for line in self.render(self.rows).splitlines():
            terminalreporter.line(line)
        if self.config.getoption("--write-conformance-table", default=False):
            file = DOCS / self.document
            file.write_text(self.merge(file.read_text(), self.rows))
            terminalreporter.line(f"written to {file}")

    @classmethod
    def render(cls, rows: Rows) -> str:
        """In Markdown."""
        columns = cls.columns(rows)
        lines = [cls._line([*cls.heads, *columns]), "|" + "---|" * (len(cls.heads) + len(columns))]
        lines += [cls._line([*key, *(rows[key].get(column, "") for column in columns)]) for key in cls.order(rows)]
        return "\n".join(lines)

    @staticmethod
    def _line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    @classmethod
    def read(cls, text: str) -> Rows:
        """What `render` wrote."""
        lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
        if not lines:
            return {}
        head, _, *rest = [[cell.strip() for cell in line] for line in lines]
        names = len(cls.heads)
        return {
            tuple(row[:names]): {column: cell for column, cell in zip(head[names:], row[names:], strict=True) if cell}
            for row in rest
        }

    @classmethod
    def merge(cls, text: str, rows: Rows) -> str:
        """The document with these results in.

        Raises:
            ValueError: it has no place for them.
        """
        begin, end = cls.marks
        head, found, rest = text.partition(begin)
        before, found_too, tail = rest.partition(end)
        if not (found and found_too):
            raise ValueError(f"docs/{cls.document} has no lines {begin} and {end}")
        return f"{head}{begin}\n\n{cls.render(cls.joined(cls.read(before), rows))}\n\n{end}{tail}"


class Grouped(Grid):
    """A table with one column for results: rows, and modes (`ebpf, ipvs: yes`), with the same result stand together."""

    @classmethod
    def render(cls, rows: Rows) -> str:
        """In Markdown."""
        names: dict[str, list[str]] = {}
        for (name,) in cls.order(rows):
            names.setdefault(cls._result(rows[name,]), []).append(name)
        lines = [cls._line([*cls.heads, "result"]), "|---|---|"]
        return "\n".join(lines + [cls._line(["<br>".join(some), result]) for result, some in names.items()])

    @staticmethod
    def _result(cells: dict[str, str]) -> str:
        groups: dict[str, list[str]] = {}
        for mode in MODES:
            if mode in cells:
                groups.setdefault(cells[mode], []).append(mode)
        return "<br>".join(f"{_named(modes)}: {cell}" for cell, modes in groups.items())

    @classmethod
    def read(cls, text: str) -> Rows:
        """Reverses `render`."""
        rows: Rows = {}
        for line in [line for line in text.splitlines() if line.startswith("|")][2:]:
            names, result = (cell.strip() for cell in line.strip().strip("|").split("|"))
            cells: dict[str, str] = {}
            for part in result.split("<br>") if result else ():
                modes, _, cell = part.partition(": ")
                without = modes.removeprefix("all but ") if modes.startswith("all") else ""
                named = [mode for mode in MODES if mode != without] if without else modes.split(", ")
                cells.update(dict.fromkeys(named, cell))
            rows.update({(name,): dict(cells) for name in names.split("<br>")})
        return rows


def _named(modes: Sequence[str]) -> str:
    missing = [mode for mode in MODES if mode not in modes]
    return ", ".join(modes) if len(missing) > 1 else f"all but {missing[0]}" if missing else "all"
