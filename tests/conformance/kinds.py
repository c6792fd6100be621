"""The tables kind of network x mode and foreign rules x mode in docs/kernels.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hybrid_proxy.controller.settings.documents import MODES

from .grid import Grouped, Key, Rows

__all__ = ["PROPERTY", "RULES", "ForeignRules", "Kinds"]

PROPERTY: Final = "kind"  # of a report: (kind, mode, cell of a test that passes)
RULES: Final = "rules"  # of a report: (whose rules, mode, cell of a test that passes)


class Kinds(Grouped):
    """Collects what a node serves in each kind of network."""

    title, document, heads = "kinds of networks", "kernels.md", ("kind of network",)
    marks = "<!-- networks: begin -->", "<!-- networks: end -->"
    recorded = PROPERTY

    def is_long(self, asked: Mapping[str, Any]) -> bool:
        """A kind is asked in mode ebpf, and in the first mode of those for which the same checks fail."""
        if "kind" not in asked or asked.get("mode") in (None, "ebpf"):
            return False
        from .topologies import KINDS

        known = KINDS.get(asked["kind"])
        return known is not None and asked["mode"] not in _first_of_those_that_fail(known.instead)

    @classmethod
    def order(cls, rows: Rows) -> list[Key]:
        """As their modules' names have it; kinds that are gone go."""
        return [key for key in _known() if key in rows]

    @classmethod
    def joined(cls, before: Rows, rows: Rows) -> Rows:
        """Every kind has a row, if nothing ran in it, too."""
        return {key: {} for key in _known()} | super().joined(before, rows)


def _first_of_those_that_fail(instead: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Modes that stand for those after them in which a network fails the same checks for the same reasons."""
    modes = [mode for mode in MODES if mode in instead]
    return {mode for mode in modes if mode == next(one for one in modes if instead[one] == instead[mode])}


def _known() -> list[Key]:
    from .topologies import KINDS  # which needs our conftest, as that needs this

    return [(kind.row,) for kind in KINDS.values()]


class ForeignRules(Grouped):
    """Collects what becomes of services where another program has rules."""

    title, document, heads = "services with foreign rules", "kernels.md", ("rules",)
    marks = "<!-- rules: begin -->", "<!-- rules: end -->"
    recorded = RULES
