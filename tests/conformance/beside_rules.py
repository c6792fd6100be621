"""The table rules of others x mode in docs/kernels.md."""

from __future__ import annotations

from typing import Final

import pytest

from .grid import Grid

__all__ = ["PROPERTY", "BesideRules"]

PROPERTY: Final = "beside"  # of a report: (rules, mode, cell of a test that passes)


class BesideRules(Grid):
    """Collects what becomes of services beside rules of others."""

    title, document, heads = "services beside rules of others", "kernels.md", ("rules",)
    marks = "<!-- beside: begin -->", "<!-- beside: end -->"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the cell that a test has recorded, in another process perhaps."""
        found = dict(report.user_properties).get(PROPERTY) if report.when == "call" else None
        if found is not None:
            rules, mode, cell = map(str, found)
            self.rows.setdefault((rules,), {})[mode] = cell if report.passed else "**no**"
