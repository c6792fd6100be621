"""The table mode x case in docs/conformance.md."""

from __future__ import annotations

from typing import Final

import pytest

from .grid import Grid, Key, Rows

__all__ = ["Matrix"]

# From good to bad; of several runs of one case (families, places) the worst is shown.
MARKS: Final = {"passed": "yes", "xfailed": "not yet", "skipped": "skipped", "failed": "**no**"}
_WORST: Final = list(MARKS.values())
PROPERTY: Final = "row"  # of a report


class Matrix(Grid):
    """Collects what became of every test that names a row; its reports carry that row, from other processes too."""

    title, document, heads = "conformance", "conformance.md", ("row", "case")

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
        *key, mode = map(str, about)
        mark = MARKS["xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome]
        cells = self.rows.setdefault(tuple(key), {})
        cells[mode] = max(mark, cells.get(mode, mark), key=_WORST.index)

    @classmethod
    def order(cls, rows: Rows) -> list[Key]:
        """By number."""
        return sorted(rows, key=_order)


def _order(key: Key) -> tuple[list[tuple[int, str]], str]:
    parts = key[0].split(".")
    numbers = [(int(digits), part) for part in parts if (digits := "".join(c for c in part if c.isdigit()))]
    return numbers, key[1]
