"""PURE. Events that the loop has not taken yet: one place for each object, however often it changes.

Only what holds in the end is told; of what it overtook stays when it came, so that times are not made more beautiful
than they were. An event may overtake those before it because the cluster's memory of an object is its last event alone.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from controller.kubernetes.model import (
    EndpointSlice,
    Event,
    Problem,
    Removed,
    Replaced,
    Superseded,
    Upserted,
    key_of,
    kind_of,
)

__all__ = ["MAX_SUPERSEDED", "QueuedEvent", "PendingEvents"]

MAX_SUPERSEDED: Final = 10_000  # superseded changes of which is known when they came; of more than that the first count

_Key = tuple[str, ...]


class QueuedEvent(NamedTuple):
    """An event, and what it overtook."""

    event: Event
    superseded: tuple[Superseded, ...] = ()


class PendingEvents:
    """Not for several threads at once."""

    def __init__(self) -> None:
        self._told: dict[_Key, QueuedEvent] = {}
        self._notes = 0

    def __len__(self) -> int:
        return len(self._told)

    def accepts(self, event: Event, room: int) -> bool:
        """Whether this event need not wait until what is here was taken.

        It does when so many wait that there is no room for more; one that overtakes another needs none. And so does a
        list that keeps objects which it does not have: their last good versions may be in the list before it.
        """
        before = _key(event) in self._told
        if isinstance(event, Replaced) and event.kept:
            return not before
        return before or len(self._told) < room

    def put(self, event: Event) -> None:
        """One more, which is taken, as the last of all."""
        superseded: list[Superseded] = []
        if isinstance(event, Replaced):  # it tells all there is of its kind, but what it keeps
            kind, kept = event.kind, event.kept
            for known in [known for known in self._told if known[0] == kind and known[1] not in kept]:
                self._supersede(known, superseded)
        key = _key(event)
        if key in self._told:
            self._supersede(key, superseded)
        room = max(0, MAX_SUPERSEDED - self._notes)
        self._notes += min(room, len(superseded))
        self._told[key] = QueuedEvent(event, tuple(superseded[:room]))

    def take(self) -> list[QueuedEvent]:
        """All of it, in an order that ends as the order in which it came; nothing waits then."""
        taken = list(self._told.values())
        self._told = {}
        self._notes = 0
        return taken

    def _supersede(self, key: _Key, superseded: list[Superseded]) -> None:
        event, older = self._told.pop(key)
        self._notes -= len(older)
        superseded += older
        if isinstance(event, Upserted | Removed):
            superseded.append(_note(event))


def _key(event: Event) -> _Key:
    match event:
        case Upserted():
            return kind_of(event.object), key_of(event.object)
        case Removed():
            return event.kind, event.key
        case Replaced():
            return event.kind, ""
        case Problem():
            return "Problem", event.kind, event.key
    return ("SourceState",)


def _note(event: Upserted | Removed) -> Superseded:
    if isinstance(event, Removed):
        return Superseded(event.kind, event.received)
    family = event.object.family if isinstance(event.object, EndpointSlice) else 0
    return Superseded(kind_of(event.object), event.received, family, event.triggered)
