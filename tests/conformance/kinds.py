"""The table kind of network x mode in docs/kernels.md."""

from __future__ import annotations

from typing import Final

import pytest

from .grid import Grouped, Key, Rows

__all__ = ["PROPERTY", "Kinds"]

PROPERTY: Final = "kind"  # of a report: (kind, mode, cell of a test that passes)


class Kinds(Grouped):
    """Collects what a node serves in each kind of network."""

    title, document, heads = "kinds of networks", "kernels.md", ("kind of network",)
    marks = "<!-- networks: begin -->", "<!-- networks: end -->"
    recorded = PROPERTY

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """A kind that a mode serves like any other is asked in that mode before a release; in mode ebpf always."""
        from .topologies import KINDS

        for item in items:
            asked = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
            if "kind" not in asked or asked.get("mode") in (None, "ebpf"):
                continue
            known = KINDS.get(asked["kind"])
            if known is not None and asked["mode"] not in known.instead:
                item.add_marker(pytest.mark.long)

    @classmethod
    def order(cls, rows: Rows) -> list[Key]:
        """As their modules' names have it; kinds that are gone go."""
        return [key for key in _known() if key in rows]

    @classmethod
    def joined(cls, before: Rows, rows: Rows) -> Rows:
        """Every kind has a row, if nothing ran in it, too."""
        return {key: {} for key in _known()} | super().joined(before, rows)


def _known() -> list[Key]:
    from .topologies import KINDS  # which needs our conftest, as that needs this

    return [(kind.row,) for kind in KINDS.values()]
