"""Keeps conntrack's flows apart from ours: leaves open ones to whoever began them, and deletes stale entries."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.kernel.conntrack import delete_stale
from hybrid_proxy.dataplane.modes.ebpf.flows.foreign import OthersFlows
from hybrid_proxy.dataplane.netfilter import relays
from hybrid_proxy.dataplane.stale import Judge
from hybrid_proxy.dataplane.table import ServiceTable

FIRST_SCANS = 2  # after the first table: foreign flows that began while our programs were attached


class ForeignFlows:
    """Follows the flows that conntrack translates; packets of those never come to our programs.

    Args:
        maps: by name.
        leave: descriptor of the program that enters foreign flows.
        wake: has the collector's thread call `scan` soon.
    """

    def __init__(self, maps: Mapping[str, Map], leave: int, wake: Callable[[], None]) -> None:
        self._maps, self._leave, self._wake = maps, leave, wake
        self._judges = deque[Judge]()
        self._scans = 0
        self.flows = self._open()

    def _open(self) -> OthersFlows:
        return OthersFlows({family: self._maps[f"flows{family}"] for family in (4, 6)}, self._leave)

    def before_first(self, before: ServiceTable, table: ServiceTable) -> None:
        """Enters foreign flows before the first packet could begin one in place of theirs.

        Raises:
            DataplaneError, OSError: conntrack cannot be read.
        """
        self.flows.expect(before, table)
        self.flows.look()

    def reopen(self) -> None:
        """Reads our tables again: foreign flows were carried over."""
        self.flows = self._open()

    def programmed(
        self, before: ServiceTable, table: ServiceTable, names: Collection[str], moving: Collection[str], *, first: bool
    ) -> None:
        """A table is programmed, in which these services may differ, and others did not serve us before."""
        self.flows.expect(table)
        if first:
            self._wake()
        if moving:
            self._scans = 0
        if self.flows.known or moving:
            self.judge(before, table, names)

    def judge(self, before: ServiceTable, table: ServiceTable, names: Collection[str]) -> None:
        """Has the thread delete conntrack's entries that lead to backends which no longer serve."""
        self._judges.append(Judge(before, table, names, partial(relays, table.node)))
        self._wake()

    def forget(self) -> None:
        """Nothing is known to be foreign any more."""
        self.flows.known = frozenset()

    def scan(self) -> None:
        """Reads conntrack as long as there are foreign flows, or may be some that were not seen yet.

        Raises:
            DataplaneError, OSError: conntrack cannot be read.
        """
        while self._judges:
            delete_stale(self._judges.popleft())
        if self.flows.known or self._scans < FIRST_SCANS:
            self._scans += 1
            self.flows.look(connections=self._scans <= FIRST_SCANS)
