"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workshop.compare.findings import Findings, Standing
from workshop.compare.result import Run
from workshop.compare.tables import VERDICTS, Line, Table, Text, method, not_ahead, place, reasons, scoreboard, tables

__all__ = ["markdown"]


def markdown(run: Run, found: Findings) -> str:
    """The whole report, without plots and raw data."""
    return "\n".join(_lines(run, found)) + "\n"


def _lines(run: Run, found: Findings) -> Iterator[str]:
    yield "# Modes compared"
    yield ""
    yield from _list(found.summary or ["Nothing was compared."])
    first = run.settings.modes[0]
    if found.standings:
        yield from (
            "",
            f"| {first} against | " + " | ".join(f"{size:,} services" for size in run.settings.sizes) + " |",
        )
        yield "|---|" + "---|" * len(run.settings.sizes)
        for mode, row in scoreboard(run, found):
            yield f"| {mode} | {' | '.join(map(_standing, row))} |"
        yield from ("", f"Rows in which {first} is ▲ ahead, ▼ behind, ≈ not distinguishable.")
    behind = not_ahead(run, found)
    if behind:
        yield from ("", f"Where {first} is not ahead:", "")
        yield from _list(behind)
    if found.warnings:
        yield from ("", "## How far to trust it", "")
        yield from _list(found.warnings)
    for table in tables(run, found):
        yield from ("", f"## {table.size:,} services", "")
        yield from _table(table, first)
    why = list(reasons(found))
    if why:
        yield from ("", "Not measured:", "")
        yield from _list(why)
    yield from ("", "## Where and how", "")
    yield from _list([f"{name}: {value}" for name, value in place(run)])
    yield ""
    yield from _list(method(run))


def _list(items: Sequence[str]) -> Iterator[str]:
    yield from (f"- {_escaped(item)}" for item in items)


def _table(table: Table, first: str) -> Iterator[str]:
    yield f"| | control | {' | '.join(table.modes)} |"
    yield f"|---|---|{'---|' * len(table.modes)}"
    for line in table.lines:
        yield _row(line, first)


def _row(line: Line, first: str) -> str:
    fields = " | ".join(_field(field, first) for field in line.fields)
    return f"| {line.title} | {line.control} | {fields} |"


def _field(field: Text, first: str) -> str:
    if field.missing:
        return "-"
    parts = [field.value, field.ratio, f"{VERDICTS[field.verdict]} {first} {field.lead}" if field.lead else ""]
    return "<br>".join(filter(None, parts))


def _standing(one: Standing | None) -> str:
    return f"▲ {len(one.ahead)} ▼ {len(one.behind)} ≈ {len(one.even)}" if one else "-"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
