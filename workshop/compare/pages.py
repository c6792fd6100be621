"""Writes a report as one HTML file with style, plots and raw data, without scripts, and as Markdown."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from hybrid_proxy.workshop.compare.plots import curves, distributions, forest
from hybrid_proxy.workshop.compare.report import Report
from hybrid_proxy.workshop.compare.tables import VERDICTS, place, reasons, tables


def html(report: Report) -> str:
    """Returns the page."""
    return _rendered("page.html.jinja", report)


def markdown(report: Report) -> str:
    """Returns the report without plots and raw data."""
    return _rendered("page.md.jinja", report)


def _rendered(name: str, report: Report) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape(["html.jinja"]),
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {
        "forest": forest, "distributions": distributions, "curves": curves, "tables": tables, "reasons": reasons,
        "place": place, "marks": VERDICTS, "embedded": _embedded,
    }  # fmt: skip
    environment.filters |= {"code": _code, "words": _words}
    return environment.get_template(name).render(report=report, run=report.run, found=report.findings)


def _code(text: str) -> Markup:
    """Marks up words in backquotes; a number and its % stay in one line."""
    text = str(escape(text)).replace(" %", "&nbsp;%")
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", text))  # noqa: S704 - escaped


def _words(text: str) -> str:
    """Escapes what means something else in a list or a table of Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _embedded(report: Report) -> Markup:
    """Returns JSON for a script element, which `</` would end."""
    return Markup(msgspec.json.encode(report).decode().replace("<", "\\u003c"))  # noqa: S704 - no markup is left
