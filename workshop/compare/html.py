"""Writes a report as one HTML file with style, plots and raw data, without scripts."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from hybrid_proxy.workshop.compare.plots import distributions, forest
from hybrid_proxy.workshop.compare.report import Report
from hybrid_proxy.workshop.compare.tables import VERDICTS, method, place, reasons, tables

__all__ = ["html"]


def html(report: Report) -> str:
    """Returns the page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {
        "forest": forest, "distributions": distributions, "tables": tables, "reasons": reasons, "place": place,
        "method": method, "marks": VERDICTS,
    }  # fmt: skip
    environment.filters["code"] = _code
    return environment.get_template("page.html.jinja").render(report=report, data=_embedded(report))


def _code(text: str) -> Markup:
    """Marks up words in backquotes; a number and its % stay in one line."""
    text = str(escape(text)).replace(" %", "&nbsp;%")
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", text))  # noqa: S704 - escaped


def _embedded(report: Report) -> Markup:
    """Returns JSON for a script element, which `</` would end."""
    return Markup(msgspec.json.encode(report).decode().replace("<", "\\u003c"))  # noqa: S704 - no markup is left
