"""The cases in docs/conformance.md, grouped by the modes that do what is expected."""

from __future__ import annotations

from typing import Final

import pytest

from hybrid_proxy.controller.settings.documents import MODES

from .grid import Grid, Key, Rows

__all__ = ["Matrix"]

# From good to bad; of several runs of one case (families, places) the worst is shown.
MARKS: Final = {"passed": "yes", "xfailed": "not yet", "skipped": "skipped", "failed": "**no**"}
_WORST: Final = list(MARKS.values())
PROPERTY: Final = "row"  # of a report: (number, words, mode) and, where its test has several rows, the outcome of one
BETWEEN: Final = "; "  # cases of one row


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
        if report.when != "call" and report.passed:
            return
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        for name, about in report.user_properties:
            if name == PROPERTY:
                number, words, mode, *own = map(str, about)
                mark, cells = MARKS[own[0] if own else outcome], self.rows.setdefault((number, words), {})
                cells[mode] = max(mark, cells.get(mode, mark), key=_WORST.index)

    @classmethod
    def render(cls, rows: Rows) -> str:
        """A heading for each combination of verdicts (`yes: ebpf, nftables; not yet: ipvs`), its cases below."""
        groups: dict[str, list[Key]] = {}
        for key in cls.order(rows):
            groups.setdefault(_verdicts(rows[key]), []).append(key)
        most_first = sorted(groups, key=lambda verdicts: -len(groups[verdicts]))
        return "\n\n".join(f"### {verdicts}\n\n{_listed(groups[verdicts])}" for verdicts in most_first)

    @classmethod
    def read(cls, text: str) -> Rows:
        """Reverses `render`."""
        rows: Rows = {}
        cells: dict[str, str] = {}
        for line in text.splitlines():
            if line.startswith("### "):
                parts = [part.partition(": ") for part in line.removeprefix("### ").split("; ")]
                cells = {mode: mark for mark, _, modes in parts for mode in modes.split(", ")}
            elif line.startswith("- "):
                row, _, text = line.removeprefix("- ").partition(" ")
                rows.update({(row, case): dict(cells) for case in text.split(BETWEEN)})
        return rows

    @classmethod
    def order(cls, rows: Rows) -> list[Key]:
        """By number."""
        return sorted(rows, key=_order)


def _listed(keys: list[Key]) -> str:
    cases: dict[str, list[str]] = {}
    for row, case in keys:
        cases.setdefault(row, []).append(case)
    return "\n".join(f"- {row} {BETWEEN.join(some)}" for row, some in cases.items())


def _verdicts(cells: dict[str, str]) -> str:
    modes = {mark: [mode for mode in MODES if cells.get(mode) == mark] for mark in _WORST}
    return "; ".join(f"{mark}: {', '.join(modes[mark])}" for mark in _WORST if modes[mark])


def _order(key: Key) -> tuple[list[tuple[int, str]], str]:
    parts = key[0].split(".")
    numbers = [(int(digits), part) for part in parts if (digits := "".join(c for c in part if c.isdigit()))]
    return numbers, key[1]
