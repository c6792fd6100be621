"""Decides which packets between pods of this node bypass the host's stack, and writes that for the programs.

Programs read the decision from map `node` for each packet. Without an agent the last one stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from hybrid_proxy.dataplane.modes.ebpf.maps import layout

SHOWN: Final = 5  # of what packets meet, in one line

log = logging.getLogger(__name__)


class Decision(NamedTuple):
    """The meaning of the setting (`off`, `established` or `always`), why, and a warning about what is skipped."""

    path: str
    why: str
    warning: str = ""


def decide(setting: str, met: Sequence[str]) -> Decision:
    """PURE. Returns what the setting means where packets meet this in the stack."""
    some = ", ".join(met[:SHOWN]) + (", ..." if len(met) > SHOWN else "")
    if setting == "auto":
        return Decision("established", f"the stack has {some}") if met else Decision("always", "nothing is skipped")
    if setting == "always" and met:
        return Decision(
            setting, "the setting",
            "rules do not see flows to Services between pods of this node, because fastPath is `always`: those of "
            f"{some}. If they must, use --fast-path=auto",
        )  # fmt: skip
    return Decision(setting, "the setting")


class FastPath:
    """The decision in force.

    Args:
        setting: `ebpf.fastPath`.
        row: the element of map `node`, shared with the kernel.
        rules: reads what packets meet in the stack.
        translates: tells whether the stack may translate some although it has no rules.
    """

    def __init__(
        self,
        setting: str,
        row: Callable[[], NDArray[Any]],
        rules: Callable[[], Iterable[str]],
        translates: Callable[[], bool],
    ) -> None:
        self._setting, self._row, self._rules, self._translates = setting, row, rules, translates
        names = layout.abi_constants()
        self._words = {path: names[f"FAST_PATH_{path.upper()}"] for path in ("off", "established", "always", "direct")}
        former = int(row()["fast_path"][0])
        stays = setting == "auto" and former >= self._words["always"]
        self.decision = decide(setting, () if stays or setting != "auto" else ("not been looked at yet",))
        self._write(direct=former == self._words["direct"])

    def maintain(self) -> None:
        """Decides again, also where a program has seen that a packet was translated."""
        met, translates = self._read()
        before, self.decision = self.decision, decide(self._setting, met)
        self._write(direct=not met and not translates)
        if self.decision.warning and self.decision != before:
            log.warning("%s", self.decision.warning)
        elif self.decision != before:
            log.info("fast path: %s, because %s", self.decision.path, self.decision.why)

    def _read(self) -> tuple[list[str], bool]:
        asked = self._setting in ("auto", "always")
        return (list(self._rules()), self._translates()) if asked else ([], True)

    def keep_to_flows(self) -> None:
        """Leaves what belongs to no flow to the stack: from now on, another mode may translate it there."""
        self._write(direct=False)

    def _write(self, *, direct: bool) -> None:
        """Writes the decision. `direct`: packets of no flow meet nothing in the stack either."""
        path = self.decision.path
        self._row()["fast_path"] = self._words["direct" if direct and path == "always" else path]
