"""A report as one HTML file that needs nothing else: style, plots and raw data are in it, scripts are not."""

from __future__ import annotations

from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from workshop.compare.findings import Findings, Report
from workshop.compare.plots import plots
from workshop.compare.result import Run
from workshop.compare.tables import VERDICTS, method, not_ahead, place, reasons, scoreboard, tables

__all__ = ["html"]


def html(run: Run, found: Findings) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.jinja").render(
        run=run,
        found=found,
        standings=scoreboard(run, found),
        not_ahead=not_ahead(run, found),
        tables=tables(run, found),
        plots=[(plot.title, plot.caption, Markup(plot.svg)) for plot in plots(run, found)],  # noqa: S704 - made here
        place=place(run),
        reasons=list(reasons(found)),
        method=method(run),
        marks=VERDICTS,
        data=_embedded(Report(run, found)),
    )


def _embedded(report: Report) -> Markup:
    """JSON for a script element, which `</` would end."""
    return Markup(msgspec.json.encode(report).decode().replace("<", "\\u003c"))  # noqa: S704 - no markup is left
