"""The loop's queue: events from the source, coalesced by object, and messages from other threads.

Memory is bounded however slow the loop is. An event supersedes earlier events of the same object
(`controller.agent.coalescing`). When too many objects are queued, the source blocks: nobody reads the API server's
streams, so the server holds its data back or closes them, and they are resumed at the last version seen.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Final, Generic, TypeVar

from controller.agent.coalescing import PendingEvents, QueuedEvent
from controller.kubernetes.model import Event

__all__ = ["CAPACITY", "EventQueue"]

Message = TypeVar("Message")

CAPACITY: Final = 2048  # objects whose events wait: two seconds of 1,000 changes a second, some MB


class _Wake:
    """There are events."""


class EventQueue(Generic[Message]):
    """One thread takes, any thread puts.

    `most` is the largest number of objects that were ever queued.
    """

    def __init__(self, room: int = CAPACITY) -> None:
        self._room = room
        # The one queue that a signal handler may put into while its own thread takes.
        self._messages: queue.SimpleQueue[Message | _Wake] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._taken = threading.Condition(self._lock)
        self._waiting = PendingEvents()
        self._woken = False  # the taker knows of events, or does not want to
        self._closed = False
        self.most = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: Message) -> None:
        """A message; never waits."""
        self._messages.put(message)

    def emit(self, event: Event) -> None:
        """An event of a source. Waits as long as there is no room for it."""
        with self._lock:
            while not self._closed and not self._waiting.accepts(event, self._room):
                self._taken.wait()
            self._waiting.put(event)
            self.most = max(self.most, len(self._waiting))
            wake, self._woken = not self._woken, True
        if wake:
            self._messages.put(_Wake())

    def take(self, timeout: float, *, messages_only: bool = False) -> tuple[list[QueuedEvent], list[Message]]:
        """Everything that is there; when that is nothing, what comes first within `timeout` seconds.

        Args:
            timeout: in seconds; 0 does not wait.
            messages_only: events alone do not end the wait, messages do.
        """
        with self._lock:
            self._woken = messages_only
            if len(self._waiting) and not messages_only:
                timeout = 0.0
        messages: list[Message] = []
        with contextlib.suppress(queue.Empty):
            found = self._messages.get(timeout=timeout) if timeout > 0 else self._messages.get_nowait()
            while True:
                if not isinstance(found, _Wake):
                    messages.append(found)
                found = self._messages.get_nowait()
        with self._lock:
            self._woken = True
            told = self._waiting.take()
            self._taken.notify_all()
        return told, messages

    def close(self) -> None:
        """Nobody takes any more: whoever waits for room goes on."""
        with self._lock:
            self._closed = True
            self._taken.notify_all()
