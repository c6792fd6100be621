"""What all parts of a relay share: the loop, counters, descriptors in use, and listeners that wait for free ones."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import traceback
from collections import Counter
from typing import Any, Final, Protocol

from hybrid_proxy.dataplane.modes.userspace.sockets import open_files

log = logging.getLogger(__name__)

RESERVE: Final = 64  # descriptors for the agent's and others' connections to the relay, for a hand-over
TICK: Final = 0.1  # seconds between looks at what waits
REPORT_SECONDS: Final = 60.0
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener(Protocol):
    """What stopped listening because descriptors ran out."""

    def listen(self) -> None:
        """Go on."""


class State:
    """Of one relay, on one loop. Descriptors are counted, so that asking what is left costs nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int | None = None) -> None:
        self.loop = loop
        self.limit = limit or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.used = open_files()
        self.counters: Counter[str] = Counter()
        self.waiting: list[Listener] = []
        self.trouble = ""
        self._reported_at = -REPORT_SECONDS
        self._ticking: asyncio.TimerHandle | None = None

    # Descriptors

    def may_open(self, count: int) -> bool:
        """Whether so many more are within the limit."""
        return self.used + count + RESERVE <= self.limit

    def opened(self, count: int) -> None:
        """So many more are in use."""
        self.used += count

    def closed(self, count: int) -> None:
        """So many are free again."""
        self.used -= count

    def note_exhaustion(self, error: OSError) -> bool:
        """Whether the error means that descriptors or memory ran out; it is logged, once a minute."""
        if error.errno not in EXHAUSTED:
            return False
        self.report_limit(str(error))
        return True

    def report_limit(self, why: str = "") -> None:
        """Log once a minute that connections wait, and what to do."""
        self.counters["limit_reached"] += 1
        self.trouble = (
            f"the relay has {self.used} of {self.limit} files open{f' ({why})' if why else ''}: new connections wait "
            "until others end; raise the limit of open files (LimitNOFILE= of the service, ulimit -n)"
        )
        if self.loop.time() - self._reported_at >= REPORT_SECONDS:
            self._reported_at = self.loop.time()
            log.warning("%s", self.trouble)

    def note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised what it should not: one conversation is broken, `status` shows why, the rest goes on."""
        del loop
        self.counters["failures"] += 1
        error = context.get("exception")
        where = traceback.extract_tb(error.__traceback__)[-1] if isinstance(error, BaseException) else None
        place = f" at {where.filename.rpartition('/')[2]}:{where.lineno}" if where else ""
        self.trouble = f"the relay failed{place}: {error or context.get('message')!r}"

    def wait(self, listener: Listener) -> None:
        """Have it listen again when descriptors are free."""
        self.waiting.append(listener)
        self._tick_soon()

    def resume(self) -> None:
        """Something was closed: listeners that wait may go on."""
        if self.waiting and self.may_open(2):
            self.trouble = ""
            waiting, self.waiting = self.waiting, []
            for listener in waiting:
                listener.listen()

    def _tick_soon(self) -> None:
        if self._ticking is None:
            self._ticking = self.loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        """Descriptors of other processes may be free as well (ENFILE, ENOMEM)."""
        self._ticking = None
        self.resume()
        if self.waiting:
            self._tick_soon()
