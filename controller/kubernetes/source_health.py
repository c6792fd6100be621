"""Keeps the state of the API server as the threads of all kinds see it, and the pauses that its news end."""

from __future__ import annotations

import threading
import time
from typing import Final

import msgspec

from hybrid_proxy.controller.kubernetes import Emit
from hybrid_proxy.controller.kubernetes.connection import Connection
from hybrid_proxy.controller.kubernetes.model import KindState, SourceState
from hybrid_proxy.dataplane.reports import clock

SERVES_ON: Final = "what is programmed serves on, and the server is asked again every few seconds"
CHECK_SECONDS: Final = 1.0  # between two checks of the files with credentials, while nothing can be read


class SourceHealth:
    """The state of the API server as all threads see it, reported when it changes; and the pauses that its news end.

    `emit` is called in the order of the changes, and without the lock that `states` needs: the receiver may hold a lock
    that a caller of `states` holds. It is set before any thread starts.
    """

    emit: Emit

    def __init__(self, connection: Connection, kinds: tuple[str, ...]) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._emitting = threading.Lock()  # taken before `_changed`, and held while `emit` is called
        self._states = {kind: KindState(kind, "waiting", time.time()) for kind in kinds}
        self._heard = dict.fromkeys(kinds, 0.0)  # when something of this kind came; and of none (""), an answer
        self._lost: dict[str, None] = {}  # kinds that cannot be read; the kind "" stands for a server that is silent
        self._told: set[str] = set()  # sorts of reasons that were reported since the first of these was lost
        self._since = 0.0
        self._reported: bool | None = None
        self._news = dict.fromkeys(kinds, 0)  # how often each kind had news for the others
        self._asker = kinds[0]  # the kind that asks while the server refuses all, or nobody knows yet whether it does
        self._closed = False

    def states(self) -> list[KindState]:
        """Returns how each kind is read; for any thread."""
        with self._changed:
            silent = f"nothing came since {clock(self._since)}, and the server does not answer" * ("" in self._lost)
            changes = {"state": "waiting", "since": self._since, "why": silent}
            return [
                msgspec.structs.replace(
                    each, heard=self._heard[kind], **changes if silent and each.state == "read" else {}
                )
                for kind, each in self._states.items()
            ]

    def heard(self, kind: str) -> None:
        """Notes that something came from the server, for this kind or ("") an answer alone."""
        self._heard[kind] = time.time()

    def silence(self) -> float:
        """Return for how many seconds nothing has come; 0 while a kind is tried again, which will tell."""
        with self._changed:
            tried = any(state.state == "waiting" for state in self._states.values())
            return 0.0 if tried else abs(time.time() - max(self._heard.values()))

    def see(self, trouble: str) -> None:
        """Reports that nothing comes and that the server does not answer, with the reason; empty: it answers."""
        with self._emitting:
            with self._changed:
                text = self._recovery() if not trouble and self._lost.pop("", "") is None else ""
                if trouble and not self._lost:
                    self._lost[""], self._told, self._since = None, {""}, max(self._heard.values())
                    self._reported = False
                    text = (
                        f"{self._where()}: nothing came since {clock(self._since)}, and the server does not answer: "
                        f"{trouble}; what is programmed serves on"
                    )
            if text:
                self.emit(SourceState(not trouble, text))

    def close(self) -> None:
        """Ends all pauses for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def lost(self, kind: str, why: str, sort: str | None = "") -> None:
        """Reports that this kind cannot be read.

        `sort` is what a person can do something about, empty: nothing. Each is reported once in an outage. None: the
        others will tell whether it is one.
        """
        with self._emitting:
            if text := self._lose(kind, why, sort):
                self.emit(SourceState(healthy=False, message=text))

    def _lose(self, kind: str, why: str, sort: str | None) -> str:
        with self._changed:
            now, before = time.time(), self._states[kind]
            since = before.since if before.why and before.state == "waiting" else now
            self._states[kind] = KindState(kind, "waiting", since, why, before.listed)
            if sort is None:
                return ""
            if not self._lost:
                self._since, self._told = now, set()
            self._lost[kind] = None
            if self._told and (not sort or sort in self._told):
                return ""
            self._told.add(sort)
            self._reported = False
            what = f"{self._where()}: {kind}s" if sort else self._where()
            return f"{what} cannot be read since {clock(since)} ({'' if sort else f'{kind}s: '}{why}); {SERVES_ON}"

    def found(self, kind: str, absent: str = "") -> None:
        """Reports that this kind is read, or (`absent` says why) that the service works without it."""
        with self._emitting:
            if text := self._find(kind, absent):
                self.emit(SourceState(healthy=True, message=text))

    def _find(self, kind: str, absent: str) -> str:
        with self._changed:
            state, before = "not served" if absent else "read", self._states[kind]
            if before.state != state or before.why != absent:
                self._states[kind] = KindState(kind, state, time.time(), absent, listed=True)
                self._changed.notify_all()
            return self._recovery() if self._lost.pop(kind, "") is None or not before.listed else ""

    def _recovery(self) -> str:
        if self._lost or self._reported is True or not all(state.listed for state in self._states.values()):
            return ""
        after = "" if self._reported is None else f" again, after {time.time() - self._since:.1f} s"
        self._reported = True
        text = f"{self._where()}: all kinds are read{after}"
        missing = [f"{state.kind}s" for state in self._states.values() if state.state == "not served"]
        return text + (f", but {', '.join(missing)}: {self._where()} does not serve them" if missing else "")

    def _where(self) -> str:
        return f"API server {self._connection.where}"

    # Pauses

    def news(self, kind: str) -> int:
        """Returns a number that grows when another kind than this one has news."""
        with self._changed:
            return sum(self._news.values()) - self._news[kind]

    def ring(self, kind: str) -> None:
        """Note that the obstacle of this kind has ended: the pauses of the others end, too."""
        with self._changed:
            self._news[kind] += 1
            self._changed.notify_all()

    def wait(self, kind: str, seconds: float, least: float, news: int) -> None:
        """Pause; not for less than `least` seconds, and not longer than it takes that `news` is out of date.

        New credentials end it at once.
        """
        now = time.monotonic()
        earliest, end = now + min(least, seconds), now + seconds
        while (left := end - time.monotonic()) > 0 and not self._connection.changed():
            with self._changed:
                early = self.news(kind) != news
                to_earliest = earliest - time.monotonic()
                if self._closed or (early and to_earliest <= 0):
                    return
                self._changed.wait(min(left, to_earliest if early else CHECK_SECONDS, CHECK_SECONDS))

    def another_is_read(self, kind: str, within: float) -> bool:
        """Return whether any other kind is read, or comes to be within so many seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or any(s.state == "read" for s in self._states.values() if s.kind != kind), within
            )

    def wait_for_asker(self, kind: str, longest: float) -> None:
        """Waits, before the first request, for the kind that asks for all to be let in; `longest` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._asker in {"", kind}, longest)

    def is_asker(self, kind: str, *, refused: bool) -> bool:
        """Return whether this kind goes on asking. While the server has `refused` us, one of all does."""
        with self._changed:
            if refused:
                self._asker = self._asker or kind
                return self._asker == kind
            if self._asker == kind:
                self._asker = ""
                self.ring(kind)
            return True
