"""One cell of the table mode x kernel in docs/kernels.md: what became of the conformance suite there. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_proxy.controller.settings.documents import MODES
from tests.conformance.grid import Grid, Key, Rows

from .features import PREFIX, skipped_for
from .kernels import SERIES

__all__ = ["Cell", "Kernels", "count"]

_OTHER_MODE = "mode "  # so begins the reason of a skip that is no matter of the kernel


@dataclass
class Cell:
    """Results of one mode on one kernel.

    `failed` are node ids, `skipped` how many tests for which reason, `unfinished` why the run ended before all tests
    had a result (empty: it did not).
    """

    core: bool = False  # the cases marked so alone, as usual here
    passed: int = 0
    expected: int = 0  # known gaps: failures that the suite names and expects
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    unfinished: str = ""

    @property
    def text(self) -> str:
        """The counts in words, and which tests failed."""
        cases = Counter(nodeid.partition("::")[2].partition("[")[0] for nodeid in self.failed)
        names = ", ".join(f"`{name}` ({number})" for name, number in sorted(cases.items()))
        words = [f"{self.passed} passed"]
        words += [f"{self.expected} not yet"] if self.expected else []
        words += [f"**{len(self.failed)} failed**: {names}"] if self.failed else []
        other = sum(number for reason, number in self.skipped.items() if reason.startswith(_OTHER_MODE))
        words += [f"{n} skipped: {why}" for why, n in sorted(self.skipped.items()) if not why.startswith(_OTHER_MODE)]
        words += [f"{other} of other modes"] if other else []
        words += [f"**not finished**: {self.unfinished}"] if self.unfinished else []
        return ", ".join(words).replace("\n", " ").replace("|", "/") + ("" if self.core else " (whole suite)")


def count(reports: Iterable[Mapping[str, Any]], *, core: bool = False) -> Cell:
    """What pytest's serialised reports say; a test has the worst outcome of its three phases."""
    outcomes: dict[str, str] = {}
    reasons: Counter[str] = Counter()
    for report in reports:
        nodeid, outcome = report["nodeid"], report["outcome"]
        if outcome == "skipped" and "wasxfail" in report:
            outcome = "expected"
        elif outcome == "skipped":
            reasons[_reason(report)] += 1
        if outcome == "failed" or (outcome != "passed" and outcomes.get(nodeid) != "failed"):
            outcomes[nodeid] = outcome
        elif report["when"] == "call":
            outcomes.setdefault(nodeid, outcome)
    found = Counter(outcomes.values())
    failed = [nodeid for nodeid, outcome in outcomes.items() if outcome == "failed"]
    return Cell(core, found["passed"], found["expected"], failed, dict(reasons))


def _reason(report: Mapping[str, Any]) -> str:
    longrepr = report["longrepr"]
    text = longrepr[2] if isinstance(longrepr, Sequence) and not isinstance(longrepr, str) else str(longrepr)
    return skipped_for(text) or text.removeprefix("Skipped: ").removeprefix(PREFIX)


class Kernels(Grid):
    """The table. A column is called by the kernel's series and release: `6.1 (6.1.0-56-amd64)`."""

    title, document, heads = "kernels", "kernels.md", ("mode",)

    @classmethod
    def columns(cls, rows: Rows) -> list[str]:
        """Kernels as `SERIES` has them, then others."""
        heads = dict.fromkeys(head for cells in rows.values() for head in cells)
        known = [*SERIES, *sorted({_series(head) for head in heads} - {*SERIES})]
        return sorted(heads, key=lambda head: known.index(_series(head)))

    @classmethod
    def order(cls, rows: Rows) -> list[Key]:
        """Modes in their usual order."""
        return sorted(rows, key=lambda row: MODES.index(row[0]))

    @classmethod
    def joined(cls, before: Rows, rows: Rows) -> Rows:
        """A column is called by the release that ran last; results of the one before stay in it."""
        heads = {_series(head): head for known in (before, rows) for cells in known.values() for head in cells}
        renamed = {row: {heads[_series(head)]: cell for head, cell in cells.items()} for row, cells in before.items()}
        return super().joined(renamed, rows)


def _series(head: str) -> str:
    return head.partition(" ")[0]
