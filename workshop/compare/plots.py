"""The plots of a report: SVG for a page, in colours that the page decides, so that they fit light and dark."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Sequence
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from workshop.compare.findings import Findings
from workshop.compare.plan import metric
from workshop.compare.result import SHARES, Cell, Run

__all__ = ["Plot", "plots"]

# Matplotlib knows colours alone; these stand for variables of the page's style sheet.
_STAND_IN: Final = {
    "ebpf": "#0000a1", "ipvs": "#0000a2", "nftables": "#0000a3", "iptables": "#0000a4", "userspace": "#0000a5",
    "control": "#0000a6", "text": "#0000a7", "grid": "#0000a8",
}  # fmt: skip
_MARKERS: Final = {"ebpf": "o", "ipvs": "D", "nftables": "s", "iptables": "^", "userspace": "v", "control": ""}
_STYLE: Final[Any] = {  # matplotlib types each name
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "text.color": _STAND_IN["text"],
    "axes.labelcolor": _STAND_IN["text"], "xtick.color": _STAND_IN["text"], "ytick.color": _STAND_IN["text"],
    "axes.edgecolor": _STAND_IN["grid"], "grid.color": _STAND_IN["grid"], "axes.grid": True, "axes.grid.axis": "y",
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11, "axes.titlelocation": "left",
    "legend.frameon": False, "axes.axisbelow": True, "grid.linewidth": 0.6,
}  # fmt: skip
_SHOWN: Final = (50, 75, 90, 95, 99, 99.9)


class Plot:
    """A title, a caption, and an SVG element."""

    def __init__(self, title: str, caption: str, svg: str) -> None:
        self.title, self.caption, self.svg = title, caption, svg


def plots(run: Run, found: Findings) -> list[Plot]:
    """Those for which there is something to show."""
    with mpl.rc_context(_STYLE):
        made = [_rates(run, found), *(_latency(run, size) for size in run.settings.sizes), _changes(run)]
    return [plot for plot in made if plot is not None]


def _rates(run: Run, found: Findings) -> Plot | None:
    """Four rates in times of the control, against the number of services."""
    names: tuple[str, ...] = (
        ("connections", "requests") if run.settings.live else ("connections", "requests", "stream", "datagrams")
    )
    names = tuple(name for name in names if any(row.metric == name and row.ratio for row in found.rows))
    if not names:
        return None
    figure = Figure(figsize=(9, 3.1 * ((len(names) + 1) // 2)), layout="constrained")
    axes = figure.subplots((len(names) + 1) // 2, 2, squeeze=False).flatten()
    for name, ax in zip(names, axes, strict=False):
        ax.set_title(metric(name).title)
        ax.axhline(1, color=_STAND_IN["control"], linewidth=1, linestyle="--")
        _against_sizes(ax, run, found, name)
        ax.set_ylim(bottom=0)
    for ax in axes[len(names) :]:
        ax.set_visible(False)
    axes[0].set_ylabel("× the plain pod address")
    _legend(figure, axes[0])
    caption = "Rates in times of the control (dashed), by number of services; bars are intervals of the median."
    return Plot("Rates", caption, _svg(figure, "rates", caption))


def _against_sizes(ax: Any, run: Run, found: Findings, name: str) -> None:
    sizes, works = run.settings.sizes, run.works
    for number, mode in enumerate(works):
        shift = (number - (len(works) - 1) / 2) * 0.05
        rows = [(place, found.row(name, mode, size)) for place, size in enumerate(sizes)]
        there = [(place, row.ratio) for place, row in rows if row is not None and row.ratio is not None]
        if there:
            below = [known.median - known.low for _, known in there]
            above = [known.high - known.median for _, known in there]
            ax.errorbar(
                [place + shift for place, _ in there], [known.median for _, known in there], yerr=[below, above],
                color=_STAND_IN[mode], marker=_MARKERS[mode], markersize=5, linewidth=1.5, capsize=2, label=mode,
            )  # fmt: skip
    ax.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    ax.set_xlim(-0.5, len(sizes) - 0.5)
    ax.set_xlabel("services")


def _latency(run: Run, size: int) -> Plot | None:
    """Percentiles of requests on open connections; the median of all rounds at each."""
    cells = [cell for cell in run.cells if cell.step.size == size and cell.curve]
    if not cells:
        return None
    curves = {mode: _middle([cell.curve for cell in cells if cell.step.mode == mode]) for mode in run.works}
    plain = _middle([cell.control_curve for cell in cells])
    unit = plain[_SHOWN.index(50)] if run.machine.emulated and plain else 1.0
    figure = Figure(figsize=(9, 3.3), layout="constrained")
    ax = figure.subplots()
    for name, curve in [("control", plain), *curves.items()]:
        if curve:
            ax.plot(
                range(len(_SHOWN)), [value / unit for value in curve], color=_STAND_IN[name], marker=_MARKERS[name],
                markersize=5, linewidth=1.5, linestyle="--" if name == "control" else "-", label=name,
            )  # fmt: skip
    ax.set_yscale("log")
    _plain_numbers(ax)
    ax.set_xticks(range(len(_SHOWN)), [f"{share:g} %" for share in _SHOWN])
    ax.set_xlabel("of all requests are answered within")
    ax.set_ylabel("× the control's median" if run.machine.emulated else "ms")
    _legend(figure, ax)
    caption = f"Latency of requests on open connections with {size:,} services: medians of all rounds, by percentile."
    return Plot(f"Latency with {size:,} services", caption, _svg(figure, f"latency{size}", caption))


def _middle(curves: Sequence[Sequence[float]]) -> list[float]:
    curves = [curve for curve in curves if curve]
    if not curves:
        return []
    return [statistics.median(curve[SHARES.index(share)] for curve in curves) for share in _SHOWN]


def _changes(run: Run) -> Plot | None:
    """Every single change as a dot."""
    cells = [cell for cell in run.cells if cell.each]
    if not cells:
        return None
    unit = 1.0
    if run.machine.emulated:
        unit = statistics.median(_each(cells, run.works[0], run.settings.sizes[0]) or [1.0])
    figure = Figure(figsize=(9, 3.3), layout="constrained")
    ax = figure.subplots()
    works = run.works
    for number, mode in enumerate(works):
        shift = (number - (len(works) - 1) / 2) * 0.8 / max(1, len(works))
        for place, size in enumerate(run.settings.sizes):
            values = [value / unit for value in _each(cells, mode, size)]
            if values:
                label = mode if place == 0 else None
                spots = [place + shift + (i % 7 - 3) * 0.012 for i in range(len(values))]
                ax.plot(
                    spots, values, color=_STAND_IN[mode], marker=_MARKERS[mode], markersize=3.5, linestyle="",
                    alpha=0.55, label=label,
                )  # fmt: skip
                ax.hlines(statistics.median(values), place + shift - 0.06, place + shift + 0.06, color=_STAND_IN[mode])
    ax.set_yscale("log")
    _plain_numbers(ax)
    ax.set_xticks(range(len(run.settings.sizes)), [f"{size:,}" for size in run.settings.sizes])
    ax.set_xlim(-0.5, len(run.settings.sizes) - 0.5)
    ax.set_xlabel("services")
    ax.set_ylabel(f"× {works[0]}'s median" if run.machine.emulated else "ms")
    _legend(figure, ax)
    caption = (
        "Time from a changed manifest to the first connection that reaches the new backend: each change, and medians."
    )
    return Plot("Time until a change counts", caption, _svg(figure, "changes", caption))


def _each(cells: Sequence[Cell], mode: str, size: int) -> list[float]:
    return [value for cell in cells if (cell.step.mode, cell.step.size) == (mode, size) for value in cell.each]


def _plain_numbers(ax: Any) -> None:
    """Of a logarithmic axis: 2, 5 and 10, not powers; in between only where there is little else."""
    low, high = ax.get_ylim()
    wanted = (1, 2, 5) if high / low > 20 else (1, 1.5, 2, 3, 4, 5, 7)
    ax.yaxis.set_major_locator(LogLocator(subs=wanted))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def _legend(figure: Figure, ax: Any) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels) or 1)


def _svg(figure: Figure, name: str, caption: str) -> str:
    """The svg element alone; its ids are its own, so that several stand in one page."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="(?![mp][0-9a-f]{10})[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text)
    for variable, colour in _STAND_IN.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.replace("<svg", f'<svg role="img" aria-label="{caption}"', 1)
