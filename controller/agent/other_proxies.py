"""Looks for other proxies on this node, on a thread of its own: at the start and every minute."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from dataplane.kernel.other_proxies import find_other_proxies
from dataplane.other_proxies import warnings

__all__ = ["OtherProxiesWatcher"]

log = logging.getLogger(__name__)

SECONDS: Final = 60.0


class OtherProxiesWatcher:
    """What was found last, in `warnings`; each change is logged and told once.

    `settled` is set when the first table is programmed and what another mode of ours left is removed; before that
    it is no neighbour but what serves until then.

    Args:
        mode: the mode at work here.
        told: called with the warnings that are new, from the thread.
        seconds: how often to look.
    """

    def __init__(self, mode: str, told: Callable[[str], None], seconds: float = SECONDS) -> None:
        self.warnings: tuple[str, ...] = ()
        self.mode = mode
        self.settled = False
        self._told = told
        self._seconds = seconds
        self._stop = threading.Event()

    def start(self) -> None:
        """Look now, and again until stopped."""
        threading.Thread(target=self._run, name="neighbours", daemon=True).start()

    def stop(self) -> None:
        """Look no more; returns at once."""
        self._stop.set()

    def look(self) -> None:
        """Once; nothing that goes wrong gets out."""
        try:
            seen = find_other_proxies(self.mode)
            found = warnings(seen if self.settled else msgspec.structs.replace(seen, ours=()))
        except Exception:
            log.exception("looking for other proxies failed")
            return
        before, self.warnings = self.warnings, found
        for sentence in found:
            if sentence not in before:
                log.warning("neighbour: %s", sentence)
                self._told(sentence)
        if before and not found:
            log.info("no other proxy is here any more")

    def _run(self) -> None:
        while True:
            self.look()
            if self._stop.wait(self._seconds):
                return
