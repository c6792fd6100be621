"""The loop's queue: events from the source, coalesced by object, and messages from other threads.

Memory is bounded however slow the loop is. An event supersedes earlier events of the same object
(`controller.agent.coalescing`). When too many objects are queued, the source blocks: nobody reads the API server's
streams, so the server holds its data back or closes them, and they are resumed at the last version seen. What a source
emits together is never divided, and may exceed the limit: files that changed at once are in memory already.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Final, Generic, TypeVar

from hybrid_proxy.controller.agent.coalescing import PendingEvents, QueuedEvent
from hybrid_proxy.controller.kubernetes.model import Event

Message = TypeVar("Message")

CAPACITY: Final = 2048  # objects with queued events: two seconds of 1,000 changes a second, some MB


class EventQueue(Generic[Message]):
    """One thread takes, any thread puts.

    `most` is the largest number of objects that were ever queued.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        # The one queue of the library that a signal handler may put into while its own thread takes.
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: there are events
        self._lock = threading.Lock()
        self._taken = threading.Condition(self._lock)
        self._events = PendingEvents()
        self._woken = False  # the taker knows of events, or does not want to
        self._closed = False
        self.most = 0

    def __len__(self) -> int:
        return len(self._events)

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def emit(self, *events: Event) -> None:
        """Queue events of the source, which are taken together. Blocks while the queue is full."""
        with self._lock:
            while not self._closed and not all(self._events.accepts(event, self._capacity) for event in events):
                self._taken.wait()
            for event in events:
                self._events.put(event)
            self.most = max(self.most, len(self._events))
            wake, self._woken = not self._woken, True
        if wake:
            self._messages.put(None)

    def take(self, timeout: float, *, messages_only: bool = False) -> tuple[list[QueuedEvent], list[Message]]:
        """Everything that is queued; if nothing is, what comes first within `timeout` seconds.

        Args:
            timeout: in seconds; 0 does not wait.
            messages_only: events alone do not end the wait, messages do.
        """
        with self._lock:
            self._woken = messages_only
            if len(self._events) and not messages_only:
                timeout = 0.0
        messages: list[Message] = []
        with contextlib.suppress(queue.Empty):
            found = self._messages.get(timeout=timeout) if timeout > 0 else self._messages.get_nowait()
            while True:
                if found is not None:
                    messages.append(found)
                found = self._messages.get_nowait()
        with self._lock:
            self._woken = True
            events = self._events.take()
            self._taken.notify_all()
        return events, messages

    def close(self) -> None:
        """Nobody takes any more: threads that are blocked go on."""
        with self._lock:
            self._closed = True
            self._taken.notify_all()
