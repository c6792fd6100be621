"""The table of pairs of modes in docs/switching.md: which kinds of flow do not simply go on."""

from __future__ import annotations

from typing import Final

import pytest

from hybrid_proxy.controller.settings.documents import MODES

from .grid import Grid, Key, Rows

__all__ = ["CANNOT_BE", "GOES_ON", "PROPERTY", "Switches"]

PROPERTY: Final = "switch"  # of a report: (former mode, mode, cells by kind)
GOES_ON, CANNOT_BE = "goes on", "-"
NOTHING: Final = "nothing: all goes on"
KINDS_BETWEEN: Final = "; "


class Switches(Grid):
    """Collects what became of the flows over each switch."""

    title, document, heads = "flows over a switch", "switching.md", ("from", "to")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the cells that a test has recorded, in another process perhaps."""
        found = dict(report.user_properties).get(PROPERTY) if report.when == "call" else None
        if found is not None:
            former, mode, cells = found
            self.rows[former, mode] = cells

    @classmethod
    def render(cls, rows: Rows) -> str:
        """The kinds, and for each pair what differs from GOES_ON."""
        lines = [
            f"Kinds: {KINDS_BETWEEN.join(cls.columns(rows))}",
            "",
            "| from | to | does not go on as it was |",
            "|---|---|---|",
        ]
        for pair in cls.order(rows):
            but = [f"{kind}: {cell}" for kind, cell in rows[pair].items() if cell != GOES_ON]
            lines.append(cls._line([*pair, "<br>".join(but) or NOTHING]))
        return "\n".join(lines)

    @classmethod
    def read(cls, text: str) -> Rows:
        """Reverses `render`."""
        _, found, table = text.partition("Kinds: ")
        kinds = table.partition("\n")[0].split(KINDS_BETWEEN) if found else []
        rows: Rows = {}
        for line in table.splitlines():
            if line.startswith("|") and not line.startswith(("| from |", "|---")):
                former, mode, but = (cell.strip() for cell in line.strip().strip("|").split("|"))
                cells = dict.fromkeys(kinds, GOES_ON)
                for each in () if but == NOTHING else but.split("<br>"):
                    kind, _, cell = each.partition(": ")
                    cells[kind] = cell
                rows[former, mode] = cells
        return rows

    @classmethod
    def columns(cls, rows: Rows) -> list[str]:
        """Kinds, as the first row has them."""
        return list(dict.fromkeys(kind for cells in rows.values() for kind in cells))

    @classmethod
    def order(cls, rows: Rows) -> list[Key]:
        """Modes in their usual order."""
        return sorted(rows, key=lambda pair: [MODES.index(mode) for mode in pair])

    @classmethod
    def joined(cls, before: Rows, rows: Rows) -> Rows:
        """Pairs that did not run stay as they are, kinds that are gone go."""
        kinds = cls.columns(rows)
        return {pair: {k: cells[k] for k in kinds if k in cells} for pair, cells in before.items()} | rows
