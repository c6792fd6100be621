"""PURE. Warnings about service ports that ask for what a mode does not do."""

from __future__ import annotations

from collections.abc import Collection

from hybrid_proxy.dataplane.diff import Follower
from hybrid_proxy.dataplane.reports import several
from hybrid_proxy.dataplane.table import Entry, ServiceTable


class Unmet(Follower):
    """Counts the service ports that ask for what a mode does not do.

    Args:
        known: algorithms of the mode, None: it says itself what it lacks.
        instead: what others get.
        weighs: it uses weights, and lets new backends start slowly.
        probes: it makes health probes.
        resets: it resets connections to endpoints that are gone.
    """

    def __init__(
        self, known: Collection[str] | None, instead: str = "", *, weighs: bool = False, probes: bool = False,
        resets: bool = True,
    ) -> None:  # fmt: skip
        self._known, self._instead, self._weighs, self._probes, self._resets = known, instead, weighs, probes, resets
        self._other = self._weighted = self._slow = self._probed = self._reset = 0

    def warnings(self, table: ServiceTable) -> list[str]:
        """One for each thing that some of this table's service ports ask for in vain."""
        self.follow(table)
        return [
            f"{several(count, 'service port')} {what}"
            for count, what in (
                (self._other, f"asking for another algorithm than {self._instead}, which is used instead"),
                (self._weighted, "with weights: only 0 counts here, all others are the same"),
                (self._slow, "asking for a slow start of new backends, which get their whole share at once here"),
                (self._probed, "asking for probes of backends, which this mode does not make"),
                (
                    self._reset,
                    "asking for resets of connections to backends that are gone, which this mode does not send",
                ),
            )
            if count
        ]

    def _change(self, name: str, before: tuple[Entry, ...], after: tuple[Entry, ...]) -> None:
        for entry, sign in (*((entry, -1) for entry in before), *((entry, 1) for entry in after)):
            self._other += sign * (self._known is not None and entry.algorithm not in self._known)
            if not self._weighs:
                weights = {backend.weight for backend in entry.serving if backend.weight}
                self._weighted += sign * (len(weights) > 1)
                self._slow += sign * (entry.slow_start > 0)
            self._probed += sign * (not self._probes and entry.probe is not None)
            self._reset += sign * (not self._resets and entry.present is not None)
