"""Sources of Services, EndpointSlices and Nodes. One interface, two implementations.

A source runs in threads of its own and calls `emit` from any of them. It first emits one `Replaced`
for every kind in `kinds` (an empty one too), in any order; the loop programs nothing before all of
them arrived. After that it emits changes, and a `Replaced` again whenever it had to list again. Events of
one call are one change: the loop takes all of them or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hybrid_proxy.controller.kubernetes.model import Event, KindState

if TYPE_CHECKING:
    import threading

    from hybrid_proxy.controller.kubernetes.connection import Connection


class Emit(Protocol):
    """Takes events in, together."""

    def __call__(self, *events: Event) -> None: ...


class Source(Protocol):
    """A source of objects."""

    kinds: tuple[str, ...]

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """Emit until `stop` is set, then return within a second. Never raises for what can be retried.

        Raises:
            SourceError: it can never work (no such folder, unusable configuration).
        """

    @property
    def connection(self) -> Connection | None:
        """The connection to the API server, where there is one: events are written there."""

    def states(self) -> list[KindState]:
        """Return how each kind is read, where that differs from kind to kind; for any thread."""

    def ignored(self, service: str) -> dict[str, str]:
        """Services of this name (namespace/name, or a name in any namespace) that are there and not emitted, and why.

        Of files, also those whose file cannot be read any more, so that an older version is in use. For any thread.

        Raises:
            SourceError: that cannot be found out.
        """

    def describe(self) -> str:
        """One line for the log and `status`."""
