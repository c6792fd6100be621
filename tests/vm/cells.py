"""One cell of the table mode x kernel: what became of the conformance suite there. Counting and writing, both pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .features import PREFIX, skipped_for

__all__ = [
    "BEGIN",
    "END",
    "Cell",
    "count",
    "read_cells",
    "render",
    "replace_table",
    "replaced",
    "summary",
    "write_cells",
]

_OTHER_MODE = "mode "  # so begins the reason of a skip that is no matter of the kernel
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass
class Cell:
    """Results of one mode on one kernel.

    `subset` is "all" or "core". `failed` are node ids, `skipped` how many tests for which reason, `unfinished` why
    the run ended before all tests had a result (empty: it did not).
    """

    kernel: str
    release: str
    mode: str
    subset: str
    date: str
    seconds: float = 0.0
    passed: int = 0
    expected: int = 0  # known gaps: failures that the suite names and expects
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    unfinished: str = ""


def count(cell: Cell, reports: Iterable[Mapping[str, Any]]) -> Cell:
    """Put pytest's serialised reports into the cell; a test has the worst outcome of its three phases."""
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
    cell.passed, cell.expected, cell.skipped = found["passed"], found["expected"], dict(reasons)
    cell.failed = [nodeid for nodeid, outcome in outcomes.items() if outcome == "failed"]
    return cell


def _reason(report: Mapping[str, Any]) -> str:
    longrepr = report["longrepr"]
    text = longrepr[2] if isinstance(longrepr, Sequence) and not isinstance(longrepr, str) else str(longrepr)
    return skipped_for(text) or text.removeprefix("Skipped: ").removeprefix(PREFIX)


def read_cells(path: Path) -> list[Cell]:
    """What earlier runs found; nothing if there was none."""
    try:
        return [Cell(**each) for each in json.loads(path.read_text())]
    except FileNotFoundError:
        return []


def write_cells(path: Path, cells: Iterable[Cell]) -> None:
    path.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")


def replaced(cells: Iterable[Cell], cell: Cell) -> list[Cell]:
    """All cells, this one instead of an older one of the same mode and kernel."""
    return [each for each in cells if (each.kernel, each.mode) != (cell.kernel, cell.mode)] + [cell]


def render(cells: Sequence[Cell], kernels: Sequence[str], modes: Sequence[str], before: str = "") -> str:
    """The table in Markdown, and below it one line for each failing case and each run that did not end.

    What no cell is about stays as it is in `before`, an earlier table: results of another machine, say.
    """
    known = {(cell.mode, cell.kernel): cell for cell in cells}
    heads = _earlier_heads(before) | {cell.kernel: f"{cell.kernel} ({cell.release})" for cell in cells}
    earlier = _earlier_cells(before)
    kernels = [*kernels, *sorted({*heads} - {*kernels})]
    lines = [
        f"| mode | {' | '.join(heads.get(kernel, kernel) for kernel in kernels)} |",
        f"|---|{'---|' * len(kernels)}",
    ]
    notes: list[str] = []
    for mode in modes:
        row = []
        for kernel in kernels:
            cell = known.get((mode, kernel))
            row.append(summary(cell) if cell else earlier.get((mode, kernel), "not run"))
            begins = f"- {mode} on {kernel}: "
            notes += _notes(cell) if cell else [line for line in before.splitlines() if line.startswith(begins)]
        lines.append(f"| {mode} | {' | '.join(row)} |")
    return "\n".join([*lines, *([""] if notes else []), *notes, ""])


def _rows(table: str) -> list[list[str]]:
    return [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]


def _earlier_heads(table: str) -> dict[str, str]:
    """Kernel -> what stands above its column."""
    return {head.partition(" ")[0]: head for row in _rows(table)[:1] for head in row[1:]}


def _earlier_cells(table: str) -> dict[tuple[str, str], str]:
    """(mode, kernel) -> what stands there."""
    kernels = list(_earlier_heads(table))
    return {(row[0], kernel): text for row in _rows(table)[2:] for kernel, text in zip(kernels, row[1:], strict=True)}


def summary(cell: Cell) -> str:
    """The counts in words."""
    words = [f"{cell.passed} passed"]
    words += [f"{cell.expected} not yet"] if cell.expected else []
    words += [f"**{len(cell.failed)} failed**"] if cell.failed else []
    other = sum(number for reason, number in cell.skipped.items() if reason.startswith(_OTHER_MODE))
    words += [f"{n} skipped: {why}" for why, n in sorted(cell.skipped.items()) if not why.startswith(_OTHER_MODE)]
    words += [f"{other} of other modes"] if other else []
    words += ["**not finished**"] if cell.unfinished else []
    return ", ".join(words) + (" (core)" if cell.subset == "core" else "")


def _notes(cell: Cell) -> list[str]:
    where = f"- {cell.mode} on {cell.kernel}"
    cases: Counter[str] = Counter(nodeid.partition("::")[2].partition("[")[0] for nodeid in cell.failed)
    notes = [f"{where}: `{name}` failed ({number})" for name, number in sorted(cases.items())]
    return notes + ([f"{where}: {cell.unfinished}"] if cell.unfinished else [])


def replace_table(document: str, make: Callable[[str], str]) -> str:
    """The document with the table that `make` makes of the one between its marks.

    Raises:
        ValueError: it has no marks.
    """
    before, begin, rest = document.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END} in the document")
    return f"{before}{BEGIN}\n{make(table.strip())}{END}{after}"
