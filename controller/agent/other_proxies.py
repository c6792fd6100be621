"""Searches for other proxies, and NAT of other programs for addresses of Services, on a thread of its own.

It does so at the start, when this agent begins to serve, when nftables' rules change, every minute, and more often
while such NAT is there: it counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from hybrid_proxy.dataplane.firewall_rules import Taken, taken
from hybrid_proxy.dataplane.kernel.foreign_rules import read_rules
from hybrid_proxy.dataplane.kernel.other_proxies import find_other_proxies, ruleset_generation
from hybrid_proxy.dataplane.other_proxies import warnings
from hybrid_proxy.dataplane.table import EMPTY, ServiceTable

log = logging.getLogger(__name__)

SECONDS: Final = 60.0
NAT_SECONDS: Final = 2.0  # `status` says how much such NAT has counted
PATIENCE: Final = 20  # reading many rules takes a twentieth of the time at most
READ_SECONDS: Final = 1.0  # between two readings of the number of the ruleset: a search costs fifty times as much


class OtherProxiesWatcher:
    """Holds the result of the last search in `warnings`; each new warning is reported once.

    `settled` is set when the first table is programmed and former modes are removed. Before that, such a mode is not
    another proxy: it serves until then.

    `former` returns the modes that have objects here although another one serves: they still have flows, or are being
    removed.
    `report` is called with each new warning, from the thread.
    `nat` is None until the first search, `table` returns the table that is served.
    `left_took` is how many connections rules that a kube-proxy left took since `settled`, of mode ebpf; None: unknown.
    `beside`: this agent serves only some Services, alongside a kube-proxy.
    """

    def __init__(
        self,
        mode: str,
        report: Callable[[str], None],
        *,
        former: Callable[[], Collection[str]] = frozenset,
        beside: bool = False,
        table: Callable[[], ServiceTable] = lambda: EMPTY,
    ) -> None:
        self.warnings: tuple[str, ...] = ()
        self.nat: tuple[Taken, ...] | None = None
        self.left_took: int | None = None
        self._took_before: int | None = None
        self.mode = mode
        self.settled = False
        self._former = former
        self._beside = beside
        self._report = report
        self._table = table
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="other-proxies", daemon=True).start()

    def stop(self) -> None:
        """Search no more; returns at once."""
        self._stop.set()

    def search(self) -> None:
        """Search once; never raises."""
        try:
            served = self._table().entries()
            frontends = (((f.address, f.port, e.protocol), e.name) for e in served for f in e.frontends)
            self.nat = tuple(dict.fromkeys(taken(read_rules(nat=True)[0], frontends)))
            modes = {self.mode, *self._former()}
            seen = find_other_proxies(self.mode, modes)
            if not self.settled or modes != {self.mode, *self._former()}:  # a switch: nobody has left anything yet
                seen = msgspec.structs.replace(seen, ours=())
            found = warnings(seen, beside=self._beside)
            took = None
            if self.mode == "ebpf" and self.settled and seen.kube_proxy:
                from hybrid_proxy.dataplane import kube_proxy  # few nodes need all that it imports

                took = kube_proxy.took()
        except Exception:
            log.exception("the search for other proxies and NAT failed")
            return
        self._took_before = took if took is None or self._took_before is None else min(took, self._took_before)
        self.left_took = took if took is None or self._took_before is None else took - self._took_before
        before, self.warnings = self.warnings, found
        for warning in set(found).difference(before):
            self._report(warning)

    def _run(self) -> None:
        due, rested, known = 0.0, 0.0, (b"", False)
        while not self._stop.is_set():
            state, now = (ruleset_generation(), self.settled), time.monotonic()
            if now >= rested and (now >= due or state != known):
                known = state
                self.search()
                due, ended = now + (NAT_SECONDS if self.nat else SECONDS), time.monotonic()
                rested = ended + PATIENCE * (ended - now)
            self._stop.wait(READ_SECONDS)
