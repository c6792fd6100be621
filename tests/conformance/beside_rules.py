"""The table rules of others x mode in docs/kernels.md."""

from __future__ import annotations

from typing import Final

from .grid import Grouped

__all__ = ["PROPERTY", "BesideRules"]

PROPERTY: Final = "beside"  # of a report: (rules, mode, cell of a test that passes)


class BesideRules(Grouped):
    """Collects what becomes of services beside rules of others."""

    title, document, heads = "services beside rules of others", "kernels.md", ("rules",)
    marks = "<!-- beside: begin -->", "<!-- beside: end -->"
    recorded = PROPERTY
