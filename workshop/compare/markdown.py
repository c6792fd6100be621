"""Writes a report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybrid_proxy.workshop.compare.report import Report
from hybrid_proxy.workshop.compare.tables import VERDICTS, Line, Table, Text, method, place, reasons, tables

__all__ = ["markdown"]


def markdown(report: Report) -> str:
    """Returns the report without plots and raw data."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    run, found = report.run, report.findings
    yield "# Modes compared"
    yield ""
    yield from _list(report.summary or ["Nothing was compared."])
    trust = [*found.warnings, *found.notes, *(one.summary(run.settings.modes[0]) for one in found.standings)]
    if trust:
        yield from ("", "## How far to trust it", "")
        yield from _list(trust)
    for table in tables(run, found):
        yield from ("", f"## {table.size:,} services", "")
        yield from _table(table, run.settings.modes[0])
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


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
