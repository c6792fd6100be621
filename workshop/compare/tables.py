"""The tables of a report as texts, for HTML, Markdown and the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

import msgspec

from hybrid_proxy.workshop.compare.findings import Findings, Row, shown
from hybrid_proxy.workshop.compare.plan import METRICS, Metric
from hybrid_proxy.workshop.compare.result import Run
from hybrid_proxy.workshop.measuring.stats import Estimate, Verdict

VERDICTS: Final = {"ahead": "▲", "behind": "▼", "even": "≈", "": ""}


class Text(msgspec.Struct, frozen=True):
    """One field of a table."""

    value: str = ""  # the median; empty where times mean nothing, or nothing was measured
    interval: str = ""  # the value's interval
    ratio: str = ""  # relative to the control
    lead: str = ""  # the first mode relative to this one
    verdict: Verdict = ""  # of the first mode against this one
    missing: str = ""  # why there is no value


class Line(msgspec.Struct, frozen=True):
    """One metric: its title, with the unit, the control's value and a field for each mode."""

    metric: Metric
    title: str
    control: str
    fields: Sequence[Text]


class Table(msgspec.Struct, frozen=True):
    """All metrics with one number of services."""

    size: int
    modes: Sequence[str]
    lines: Sequence[Line]


def tables(run: Run, found: Findings) -> list[Table]:
    """Returns a table for each number of services; what was not measured, a metric or a mode, has no place in it."""
    made = []
    for size in run.settings.sizes:
        lines = [_line(run, found, metric, size) for metric in METRICS]
        made.append(Table(size, run.works, [line for line in lines if line is not None]))
    return made


def _line(run: Run, found: Findings, metric: Metric, size: int) -> Line | None:
    rows = [found.row(metric.name, mode, size) for mode in run.works]
    if not any(rows):
        return None
    emulated = run.machine.emulated and metric.unit not in ("", "MB")
    controls = [row.control.median for row in rows if row is not None and row.control]
    plain = "" if emulated or not controls else shown(median(controls))
    unit = f" ({metric.unit})" if metric.unit and not emulated else ""
    return Line(metric, metric.title + unit, plain, [_field(row, metric, hide=emulated) for row in rows])


def _field(row: Row | None, metric: Metric, *, hide: bool) -> Text:
    if row is None or row.value is None:
        return Text(missing=row.missing if row else "not measured")
    whole = metric.better == "neither"
    unit = "" if row.ratio or row.lead else "1 ×"  # of those without a control, the first mode is the measure
    return Text(
        value=unit if hide else shown(row.value.median, whole),
        interval="" if hide or row.value.count < 2 else f"{shown(row.value.low)} to {shown(row.value.high)}",
        ratio=_times(row.ratio) if row.ratio else "",
        lead=_times(row.lead) if row.lead and row.verdict else "",
        verdict=row.verdict,
    )


def _times(ratio: Estimate) -> str:
    if ratio.count < 2:
        return f"{times(ratio.median)} ×"
    return f"{times(ratio.median)} × ({' to '.join(ends(ratio))})"


def times(ratio: float, digits: int = 2) -> str:
    """Returns a ratio, how many times as much, as text."""
    return f"{ratio:.{digits}f}" if ratio < 10 else f"{ratio:,.0f}"


def ends(ratio: Estimate) -> tuple[str, str]:
    """Returns the ends of an interval as texts, with the digits that show on which side of 1 it is."""
    apart = (n for n in range(2, 9) if ratio.holds(1.0) or not round(ratio.low, n) <= 1 <= round(ratio.high, n))
    digits = next(apart, 9)
    return times(ratio.low, digits), times(ratio.high, digits)


def place(run: Run) -> list[tuple[str, str]]:
    """Returns names and values of the machine and the settings."""
    m, s = run.machine, run.settings
    virtual = f", in {m.virtual}" if m.virtual else ""
    rows = [
        ("product", run.product),
        ("date", run.began),
        ("machine", f"{m.processor}, {m.cpus} CPUs, {m.memory / 2**30:.0f} GiB{virtual}"),
        ("system", f"Linux {m.kernel}, {m.system}"),
        ("load before", f"{m.load:.2f} running processes"),
        ("rounds", f"{s.rounds}; in each {s.turns} turns of loads of {s.seconds} s, {s.changes} changes"),
        ("tools", ", ".join(f"{name} {version}" for name, version in m.tools.items()) or "none"),
    ]
    if s.live:
        return [*rows, ("service", f"{s.live} of this node")]
    return [*rows, ("cluster", f"{s.backends} endpoints for each service")]


def reasons(found: Findings) -> Iterable[str]:
    """Returns the reasons for empty fields, each once."""
    return dict.fromkeys(row.missing for row in found.rows if row.missing)
