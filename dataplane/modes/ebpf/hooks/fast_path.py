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


def decide(setting: str, met: Sequence[str], shapers: Sequence[str] = ()) -> Decision:
    """PURE. Returns what the setting means where packets meet this in the stack.

    Rules may judge a flow when it opens. Shapers have to see every packet, because they limit what an interface sends.
    """
    if setting == "auto":
        path = "off" if shapers else "established" if met else "always"
        found = shapers or met
        return Decision(path, f"the stack has {_some(found)}" if found else "nothing in the stack has to see them")
    skipped = [*shapers, *met] if setting == "always" else shapers if setting == "established" else ()
    if skipped:
        return Decision(
            setting, "the setting",
            f"rules do not see flows to Services between pods of this node, because fastPath is `{setting}`: those of "
            f"{_some(skipped)}. If they must, use --fast-path=auto",
        )  # fmt: skip
    return Decision(setting, "the setting")


def _some(met: Sequence[str]) -> str:
    found = [each for each in met if " hybrid-proxy" not in each] or ["what a former mode has for its flows"]
    return ", ".join(found[:SHOWN]) + (", ..." if len(found) > SHOWN else "")


class FastPath:
    """The decision in force.

    Args:
        setting: `ebpf.fastPath`.
        row: the element of map `node`, shared with the kernel.
        rules: reads what packets meet in the stack.
        translates: tells whether the stack may translate some although it has no rules.
        shapers: reads what limits the interfaces of pods.
    """

    def __init__(
        self,
        setting: str,
        row: Callable[[], NDArray[Any]],
        rules: Callable[[], Iterable[str]],
        translates: Callable[[], bool],
        shapers: Callable[[], Iterable[str]],
    ) -> None:
        self._setting, self._row, self._rules, self._translates = setting, row, rules, translates
        self._shapers = shapers
        names = layout.abi_constants()
        self._words = {path: names[f"FAST_PATH_{path.upper()}"] for path in ("off", "established", "always", "direct")}
        former = int(row()["fast_path"][0])
        unread = ("not been looked at yet",) if setting == "auto" and former < self._words["always"] else ()
        self.decision = decide(setting, unread, () if former else unread)
        self._write(direct=former == self._words["direct"])

    def maintain(self) -> None:
        """Decides again, also where a program has seen that a packet was translated."""
        asked = self._setting in ("auto", "always")
        met, translates = (list(self._rules()), self._translates()) if asked else ([], True)
        shapers = list(self._shapers()) if self._setting != "off" else []
        before, self.decision = self.decision, decide(self._setting, met, shapers)
        self._write(direct=not met and not shapers and not translates)
        if self.decision.warning and self.decision != before:
            log.warning("%s", self.decision.warning)
        elif self.decision != before:
            log.debug("fast path of packets between pods: %s (%s)", self.decision.path, self.decision.why)

    def keep_to_flows(self) -> None:
        """Leaves what belongs to no flow to the stack: from now on, another mode may translate it there."""
        self._write(direct=False)

    def _write(self, *, direct: bool) -> None:
        """Writes the decision. `direct`: packets of no flow meet nothing in the stack either."""
        path = self.decision.path
        self._row()["fast_path"] = self._words["direct" if direct and path == "always" else path]
