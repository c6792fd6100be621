"""Places of a report's plots on logarithmic axes, in per cent of their width; the page draws them in any width."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from hybrid_proxy.workshop.compare.findings import Row, shown
from hybrid_proxy.workshop.compare.plan import METRICS, Metric, metric
from hybrid_proxy.workshop.compare.report import Report
from hybrid_proxy.workshop.compare.result import BINS, Run
from hybrid_proxy.workshop.compare.tables import ends, times
from hybrid_proxy.workshop.measuring.stats import Estimate, estimate

_FARTHEST: Final = 2.5  # what is farther from 1 is an arrow at the edge, so that small differences stay visible
_NEAREST: Final = 1.25
_RIM: Final = 1.06  # of an axis, beyond its outermost values
_FINE: Final = (0.8, 0.9, 1, 1.1, 1.25)
_COARSE: Final = (0.5, 0.7, 1, 1.4, 2)
_FLAT: Final = 4.0  # the least that an axis of curves spans, so that what hardly grows looks flat
_BESIDE: Final = 9.0  # per cent of a curve's height between two labels
_SLOWEST: Final = 0.001  # part of the requests that the axis of latencies leaves out at either end


class Tick(msgspec.Struct, frozen=True):
    """A value below an axis, and its place."""

    at: float
    text: str


class Axis(msgspec.Struct, frozen=True):
    """A logarithmic axis from `low` to `high`."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Returns a place in per cent; below 0 or above 100 if it is not on the axis."""
        return round(100 * math.log(value / self.low) / math.log(self.high / self.low), 2) if value > 0 else -1.0

    def within(self, value: float) -> float:
        return min(100.0, max(0.0, self.place(value)))

    def ticks(self, values: Sequence[float]) -> tuple[Tick, ...]:
        return tuple(Tick(self.place(value), f"{value:g}") for value in values if self.low <= value <= self.high)


class Bar(msgspec.Struct, frozen=True):
    """One bin of a histogram: left edge, width, height (all in per cent), and its tooltip."""

    at: float
    width: float
    height: float
    tip: str


class Mark(msgspec.Struct, frozen=True):
    """One mode's line of a plot."""

    mode: str  # the mode, for its colour
    label: str  # its name
    tip: str  # all values as a tooltip
    value: str = ""  # the median
    interval: str = ""  # of the median
    absolute: str = ""  # the median in the metric's unit
    even: bool = False  # no significant difference
    at: float = 0.0  # place of the median
    off: Literal["", "low", "high"] = ""  # the end of the axis beyond which the median lies
    span: tuple[float, float] = (0.0, 0.0)  # places of the interval's ends
    points: tuple[float, ...] = ()  # places of the single measurements
    bars: tuple[Bar, ...] = ()  # a histogram


class Item(msgspec.Struct, frozen=True):
    """A title, and the lines of the modes."""

    title: str
    marks: tuple[Mark, ...]


class Panel(msgspec.Struct, frozen=True):
    """Items above one axis."""

    title: str  # their common title
    hint: str  # how to read the axis
    better: Literal["less", "more", ""]  # the better side of 1; "": there is none
    one: float | None  # the place of 1, if that is a line
    ticks: tuple[Tick, ...]  # of the axis
    items: tuple[Item, ...]  # in order


class Line(msgspec.Struct, frozen=True):
    """One mode's line of a curve: places of medians and of their intervals' ends from the left; a label at the right.

    Args:
        mode: the mode, for its colour.
        points: for each number of services x, y, and the ends of the interval on y.
        label: the mode and its last value.
        label_at: y of the label, which keeps away from others.
    """

    mode: str
    points: tuple[tuple[float, float, float, float], ...]
    label: str
    label_at: float


class Curve(msgspec.Struct, frozen=True):
    """A metric against the number of services, both on logarithmic axes; places on y are from the top."""

    title: str
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]
    lines: tuple[Line, ...]


# The forest plot


def forest(report: Report, size: int) -> list[Panel]:
    """Plots every metric relative to the control, with one number of services."""
    first, live = report.run.settings.modes[0], report.run.settings.live
    one = "one of its endpoints" if live else "no proxy"
    groups: tuple[tuple[str, str, bool, Literal["less", "more"]], ...] = (
        ("Cost and latency", f"less is better; 1 = {one}", True, "less"),
        ("Rates", f"more is better; 1 = {one}", True, "more"),
        ("The agent", f"less is better; 1 = {first}", False, "less"),
    )
    made = []
    for title, hint, control, better in groups:
        chosen = [known for known in METRICS if (known.control, known.better) == (control, better)]
        lines = [(known.title, _rows(report, known, size)) for known in chosen]
        lines = [(name, rows) for name, rows in lines if any(row.points for row in rows)]
        if lines:
            reach = _reach([row for _, rows in lines for row in rows])
            axis = Axis(1 / reach, reach)
            items = tuple(Item(name, tuple(_mark(axis, row, report.run) for row in rows)) for name, rows in lines)
            ticks = axis.ticks(_COARSE if reach > 1.5 else _FINE)
            made.append(Panel(title, hint, better, axis.place(1), ticks, items))
    return made


def _rows(report: Report, metric: Metric, size: int) -> list[Row]:
    """Returns rows with a value."""
    return [row for row in report.findings.rows if (row.metric, row.size) == (metric.name, size) and row.value]


def _reach(rows: Sequence[Row]) -> float:
    """Returns how far the axis reaches on both sides of 1."""
    known = [each for row in rows if (each := estimate(row.points))]
    far = max((max(each.high, 1 / each.low) for each in known if each.low > 0), default=1.0)
    return min(max(far, _NEAREST), _FARTHEST) * _RIM


def _mark(axis: Axis, row: Row, run: Run) -> Mark:
    assert row.value is not None
    known = estimate(row.points) or Estimate(1, 1, 1, row.value.sure, row.value.count)  # the measure itself
    place = axis.place(known.median)
    return Mark(
        mode=row.mode,
        label=row.mode,
        tip="; ".join(_tip(row, known, emulated=run.machine.emulated)),
        value=times(known.median),
        interval="-".join(ends(known)) if known.count > 1 and row.points else "",
        absolute="" if run.machine.emulated else f"{shown(row.value.median)} {metric(row.metric).unit}",
        even=bool(row.points) and not known.differs,
        at=place,
        off="low" if place < 0 else "high" if place > 100 else "",
        span=(axis.within(known.low), axis.within(known.high)),
        points=tuple(axis.place(point) for point in row.points if axis.low <= point <= axis.high),
    )


def _tip(row: Row, known: Estimate, *, emulated: bool) -> Iterator[str]:
    unit = metric(row.metric).unit
    if row.points:
        yield f"{times(known.median)} × ({' to '.join(ends(known))})"
        yield f"{known.count} pairs, {100 * known.sure:.0f} % sure" if known.count > 1 else "one pair"
    if row.value is not None and not emulated:
        yield f"{shown(row.value.median)} {unit} ({shown(row.value.low)} to {shown(row.value.high)})"
    if row.control is not None and not emulated:
        yield f"without a proxy {shown(row.control.median)} {unit}"


# Curves


def curves(report: Report) -> list[Curve]:
    """Plots what may grow with the number of services, if there are several; of an emulated machine nothing."""
    if len(report.run.settings.sizes) < 2 or report.run.machine.emulated:
        return []
    made = (_curve(report, metric(name)) for name in ("connection_cost", "change", "start", "memory"))
    return [curve for curve in made if curve.lines]


def _curve(report: Report, metric: Metric) -> Curve:
    sizes, first = report.run.settings.sizes, report.run.settings.modes[0]
    known: dict[str, dict[int, Estimate]] = {}
    for size in sizes:
        for row in _rows(report, metric, size):
            assert row.value is not None
            known.setdefault(row.mode, {})[size] = row.value
            if row.mode == first and row.control:
                known.setdefault("control", {})[size] = row.control
    ends = [end for row in known.values() for each in row.values() for end in (each.low, each.high)] or [1.0]
    spare = max(1.0, _FLAT * min(ends) / max(ends)) ** 0.5 * _RIM
    across, up = Axis(min(sizes) / 1.5, max(sizes) * 1.5), Axis(min(ends) / spare, max(ends) * spare)
    lines: list[Line] = []
    lowest = 100.0 + _BESIDE
    for mode, of in sorted(known.items(), key=lambda item: [*item[1].values()][-1].median):
        points = tuple(
            (across.place(size), 100 - up.place(at.median), 100 - up.place(at.low), 100 - up.place(at.high))
            for size, at in of.items()
        )
        lowest = min(points[-1][1], lowest - _BESIDE)
        name = "no proxy" if mode == "control" else mode
        lines.append(Line(mode, points, f"{name} {shown([*of.values()][-1].median)}", lowest))
    return Curve(
        f"{metric.title}, {metric.unit}",
        tuple(Tick(across.place(size), f"{size:,}") for size in sorted(sizes)),
        tuple(Tick(100 - tick.at, tick.text) for tick in _ticks(up)),
        tuple(lines),
    )


# Distributions


def distributions(report: Report, size: int) -> list[Panel]:
    """Plots the distributions of requests and of changes, with one number of services."""
    return [panel for panel in (_latency(report, size), _changes(report, size)) if panel is not None]


def _latency(report: Report, size: int) -> Panel | None:
    cells = [cell for cell in report.run.cells if cell.step.size == size]
    counted = {"control": sum((Counter(cell.control_latency) for cell in cells), Counter[int]())}
    for mode in report.run.works:
        counted[mode] = sum((Counter(cell.latency) for cell in cells if cell.step.mode == mode), Counter[int]())
    counted = {mode: bins for mode, bins in counted.items() if bins}
    if not counted:
        return None
    emulated = report.run.machine.emulated
    unit, name = (_quantile(next(iter(counted.values())), 0.5), "×") if emulated else (1.0, "ms")
    low = min(_quantile(bins, _SLOWEST) for bins in counted.values()) / unit
    high = max(_quantile(bins, 1 - _SLOWEST) for bins in counted.values()) / unit
    axis = Axis(low / _RIM, high * _RIM)
    most = max(max(bins.values()) / bins.total() for bins in counted.values())
    marks = tuple(_histogram(axis, mode, bins, unit, name, most) for mode, bins in counted.items())
    hint = "the control's median is 1" if emulated else "ms"
    return Panel("Latency of single requests on open connections", hint, "", None, _ticks(axis), (Item("", marks),))


def _edge(number: int) -> float:
    """Returns the left edge of a bin in milliseconds."""
    return math.exp2(number / BINS) / 1000


def _quantile(bins: Counter[int], share: float) -> float:
    """Returns a quantile in milliseconds: the middle of its bin."""
    left = share * bins.total()
    for number in sorted(bins):
        left -= bins[number]
        if left <= 0:
            break
    return _edge(number) * math.exp2(0.5 / BINS)


def _histogram(axis: Axis, mode: str, bins: Counter[int], unit: float, name: str, most: float) -> Mark:
    bars = []
    for number in sorted(bins):
        low, high = _edge(number) / unit, _edge(number + 1) / unit
        at, width, share = axis.within(low), axis.within(high) - axis.within(low), bins[number] / bins.total()
        if width > 0:
            text = f"{shown(low)} to {shown(high)} {name}: {100 * share:.1f} % of the requests"
            bars.append(Bar(at, round(width, 2), round(100 * share / most, 2), text))
    shares = (0.5, 0.9, 0.99, 0.999)
    middle, *rest = (shown(_quantile(bins, share) / unit) for share in shares)
    tip = f"{bins.total():,} requests; median {middle} {name}, " + ", ".join(
        f"{100 * share:g} % {value}" for share, value in zip(shares[1:], rest, strict=True)
    )
    label = "no proxy" if mode == "control" else mode
    at = axis.within(_quantile(bins, 0.5) / unit)
    return Mark(mode, label, tip, middle, at=at, span=(at, at), bars=tuple(bars))


def _changes(report: Report, size: int) -> Panel | None:
    cells = [cell for cell in report.run.cells if cell.step.size == size and cell.each]
    each = {mode: [ms for cell in cells if cell.step.mode == mode for ms in cell.each] for mode in report.run.works}
    each = {mode: values for mode, values in each.items() if values}
    if not each:
        return None
    first, unit, name = next(iter(each)), 1.0, "ms"
    if report.run.machine.emulated:
        middle = estimate(each[first])
        unit, name = (middle.median if middle else 1.0), "×"
    everything = [value / unit for values in each.values() for value in values]
    axis = Axis(min(everything) / _RIM, max(everything) * _RIM)
    marks = []
    for mode, values in each.items():
        known = estimate([value / unit for value in values])
        assert known is not None
        tip = (
            f"{known.count} changes; median {shown(known.median)} {name}; from {shown(min(values) / unit)} to "
            f"{shown(max(values) / unit)} {name}"
        )
        span = (axis.place(known.low), axis.place(known.high))
        points = tuple(axis.place(value / unit) for value in values)
        marks.append(Mark(mode, mode, tip, shown(known.median), at=axis.place(known.median), span=span, points=points))
    hint = f"{first}'s median is 1" if report.run.machine.emulated else "ms"
    return Panel("Time until each change took effect", hint, "", None, _ticks(axis), (Item("", tuple(marks)),))


def _ticks(axis: Axis) -> tuple[Tick, ...]:
    """Returns 1, 2, 5, 10 and so on, more of them on a short axis."""
    decades = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    ratio = axis.high / axis.low
    wanted = (1,) if ratio > 1000 else (1, 2, 5) if ratio > 8 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    return axis.ticks([number * 10.0**decade for decade in decades for number in wanted])
