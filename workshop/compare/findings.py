"""Turns measurements into rows: which mode is ahead, by how much, and with which confidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from hybrid_proxy.workshop.compare.plan import METRICS, Metric
from hybrid_proxy.workshop.compare.result import Cell, Run
from hybrid_proxy.workshop.measuring.stats import SURE, Estimate, Verdict, estimate, judge, ratios, spread

Trust = Literal["good", "limited", "poor"]

NOISY: Final = 0.10  # a control that spreads further than this part of its median shows a busy machine


class Row(msgspec.Struct, frozen=True):
    """One metric of one mode with one number of services."""

    metric: str  # its name
    mode: str  # which
    size: int  # number of services
    value: Estimate | None  # in the metric's unit
    control: Estimate | None = None  # of the plain pod address, in the metric's unit
    ratio: Estimate | None = None  # value / control, each pair of one round
    points: tuple[float, ...] = ()  # each pair's ratio, for the plot; without a control, this mode / the first one
    lead: Estimate | None = None  # the first mode / this one, each relative to its control; None for the first itself
    verdict: Verdict = ""  # of the first mode against this one
    missing: str = ""  # why there is no value


class Noise(msgspec.Struct, frozen=True):
    """The spread of a metric's control: the middle half of its measurements, as a part of their median."""

    metric: str
    size: int
    spread: float


class Findings(msgspec.Struct, frozen=True):
    """The results of a run."""

    rows: tuple[Row, ...]  # one for each metric, mode and number of services
    noise: tuple[Noise, ...]  # of the controls
    warnings: tuple[str, ...]  # limits of all figures
    notes: tuple[str, ...]  # limits of some figures, and oddities
    trust: Trust = "good"  # how far the figures as a whole can be trusted

    @property
    def headline(self) -> str:
        """The first line about trust."""
        return _HEADLINES[self.trust]

    def row(self, metric: str, mode: str, size: int) -> Row | None:
        return next((r for r in self.rows if (r.metric, r.mode, r.size) == (metric, mode, size)), None)


def findings(run: Run) -> Findings:
    """Computes the results of a run, finished or not."""
    rows = tuple(_row(run, metric, mode, size) for size, metric, mode in _all(run))
    noise = tuple(_noise(run))
    limits, loud = tuple(_limits(run, rows)), _loud(noise)
    poor = run.machine.emulated or 2 * len(loud) > len({known.metric for known in noise} or "?")
    return Findings(
        rows,
        noise,
        (*limits, *_certainty(rows, noise, poor)),
        tuple(_notes(run)),
        "poor" if poor else "limited" if limits or loud else "good",
    )


def _all(run: Run) -> Iterator[tuple[int, Metric, str]]:
    for size in run.settings.sizes:
        for metric in METRICS:
            # Of a live service nobody knows which processes serve it: there is no cost of them alone.
            if not run.settings.live or (metric.load in ("connections", "requests") and "_cost" not in metric.name):
                for mode in run.settings.modes:
                    yield size, metric, mode


def _cells(run: Run, metric: Metric, mode: str, size: int) -> dict[int, Cell]:
    """Returns cells by round."""
    kinds = {metric.kind, "live"} if metric.load else {metric.kind}
    return {
        cell.step.round: cell
        for cell in run.cells
        if (cell.step.mode, cell.step.size) == (mode, size) and cell.step.kind in kinds
    }


def _row(run: Run, metric: Metric, mode: str, size: int) -> Row:
    state = next((known for known in run.modes if known.mode == mode), None)
    if state is not None and not state.works:
        return Row(metric.name, mode, size, None, missing=f"mode {mode} does not work here: {state.missing}")
    cells = _cells(run, metric, mode, size)
    value = estimate([cell.values[metric.name] for cell in cells.values() if metric.name in cell.values])
    if value is None:
        return Row(metric.name, mode, size, None, missing=_why(run, metric, mode, size))
    controls = [cell.controls[metric.name] for cell in cells.values() if metric.name in cell.controls]
    own = _relative(metric, cells)
    first = run.settings.modes[0]
    ratio = estimate(list(own.values())) if metric.control else None
    points = tuple(own.values()) if metric.control else ()
    lead = None
    if mode != first:
        theirs = _relative(metric, _cells(run, metric, first, size))
        both = sorted(own.keys() & theirs.keys())
        lead = estimate(ratios([theirs[n] for n in both], [own[n] for n in both]))
        points = points or tuple(ratios([own[n] for n in both], [theirs[n] for n in both]))
    return Row(metric.name, mode, size, value, estimate(controls), ratio, points, lead, judge(lead, metric.better))


def _relative(metric: Metric, cells: Mapping[int, Cell]) -> dict[int, float]:
    """Returns, by round, the value relative to its control, or the value itself without one."""
    measured = {number: cell for number, cell in cells.items() if metric.name in cell.values}
    controls = {n: cell.controls.get(metric.name) if metric.control else 1.0 for n, cell in measured.items()}
    return {n: cell.values[metric.name] / control for n, cell in measured.items() if (control := controls[n])}


def _why(run: Run, metric: Metric, mode: str, size: int) -> str:
    here = [cell.missing for cell in run.cells if (cell.step.mode, cell.step.size) == (mode, size)]
    # A mode that did not start was not measured any further.
    known = [why for missing in here if (why := missing.get(metric.name) or missing.get("all"))]
    return known[-1] if known else "not measured" if run.complete else "not measured yet"


def _noise(run: Run) -> Iterator[Noise]:
    for size in run.settings.sizes:
        each = [cell.controls for cell in run.cells if cell.step.size == size]
        for metric in METRICS:
            values = [known[metric.name] for known in each if metric.name in known]
            if len(values) > 1:
                yield Noise(metric.name, size, spread(values))


def _loud(noise: Sequence[Noise]) -> list[str]:
    """Returns the titles of the metrics whose control spread too far."""
    return sorted({_TITLES[known.metric] for known in noise if known.spread > NOISY})


def _limits(run: Run, rows: Sequence[Row]) -> Iterator[str]:
    if run.machine.emulated:
        yield (
            "The processor of this machine is emulated by software: times and rates mean nothing. Only ratios of "
            "what was measured in turn are shown, and of these only the direction is worth something."
        )
    if not run.complete:
        yield f"The run is not finished: {len(run.cells)} of {run.planned} measurements."
    judged = [known for row in rows if (known := row.lead if row.verdict else row.ratio)]
    for reason, titles in absent(run, rows).items():
        again = "" if "is not installed" in reason else " with --fresh"
        yield f"Not measured: {'; '.join(titles)}. {reason}; afterwards the same command{again} measures them."
    least = min((known.sure for known in judged), default=1.0)
    if least < SURE:
        yield (
            f"Too few rounds to be sure: some intervals hold with {100 * least:.0f} % only, too little for a "
            "significant difference; six rounds make 97 %."
        )


def absent(run: Run, rows: Sequence[Row]) -> dict[str, list[str]]:
    """Returns the titles of the metrics that could not be measured in any mode, by the reason."""
    measured = {row.metric for row in rows if row.value}
    why = {row.metric: row.missing for row in rows if row.mode in run.works and row.metric not in measured}
    found = {reason: [_TITLES[name] for name in why if why[name] == reason] for reason in why.values()}
    return {reason: titles for reason, titles in found.items() if not reason.startswith("not measured")}


def _certainty(rows: Sequence[Row], noise: Sequence[Noise], poor: bool) -> Iterator[str]:
    loud, worst = _loud(noise), max((known.spread for known in noise), default=0.0)
    if loud:
        where = ", ".join(loud) if len(loud) <= MANY else f"{len(loud)} of {len({one.metric for one in noise})} rows"
        yield (
            f"The machine was not quiet: the control, always the same work, spread by more than {100 * NOISY:.0f} % "
            f"(up to {100 * worst:,.0f} %) in {where}." + ("" if poor else " Trust ratios, not values.")
        )
    elif noise:
        yield f"The machine was quiet: the control, always the same work, spread by {100 * worst:.0f} % at most."
    judged = [row for row in rows if row.verdict]
    if judged:
        differ = f"{sum(row.verdict != 'even' for row in judged)} differ significantly"
        wrong = round(sum(1 - row.lead.sure for row in judged if row.lead and row.lead.sure >= SURE))
        random = f"; at random alone, about {wrong} would" if wrong else ""
        yield f"Of {len(judged)} comparisons, {differ}{random}."


def _notes(run: Run) -> Iterator[str]:
    for state in run.modes:
        if not state.works:
            yield f"Mode {state.mode} does not work on this machine: {state.missing}."
    seen: set[str] = set()
    for cell in run.cells:
        for note in cell.notes:
            if note not in seen:
                seen.add(note)
                yield f"{cell.step.mode}, {cell.step.size:,} services: {note}"


_HEADLINES: Final[Mapping[Trust, str]] = {
    "good": "Trust: good.",
    "limited": "Trust: limited. Read this first.",
    "poor": "Trust: poor. Repeat the run on a quiet machine before you decide by it.",
}
MANY: Final = 3  # more rows than these are counted, not listed
_TITLES: Final = {known.name: known.title for known in METRICS}


def shown(value: float, whole: bool = False) -> str:
    """Formats a number with three digits or a little more; `whole` numbers have no decimals."""
    decimals = 0 if whole else sum(abs(value) < limit for limit in (100, 10, 1))
    return f"{value:,.{decimals}f}"
