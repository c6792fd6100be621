"""PURE. Events that the loop has not taken yet, coalesced: one per object, however often it changes.

An event supersedes earlier ones of the same object, because what the cluster remembers of an object is its last event
alone. The arrival times of superseded events are kept, so that latency is not under-reported.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from hybrid_proxy.controller.kubernetes import model

MAX_SUPERSEDED: Final = 10_000  # superseded changes whose arrival is remembered; of more than that, the first ones

_Key = tuple[str, ...]


class QueuedEvent(NamedTuple):
    """An event, and the changes that it superseded."""

    event: model.Event
    superseded: tuple[model.Superseded, ...] = ()


class PendingEvents:
    """The queued events in their order. Not safe for several threads."""

    def __init__(self) -> None:
        self._events: dict[_Key, QueuedEvent] = {}
        self._superseded = 0

    def __len__(self) -> int:
        return len(self._events)

    def accepts(self, event: model.Event, capacity: int) -> bool:
        """True if this event can be queued before the events that are here were taken.

        A full queue accepts only what supersedes another event. A list that keeps objects which it does not contain
        never supersedes an earlier list: that one may hold their last good versions.
        """
        supersedes = _key(event) in self._events
        if isinstance(event, model.Replaced) and event.kept:
            return not supersedes
        return supersedes or len(self._events) < capacity

    def put(self, event: model.Event) -> None:
        """Queue an event, which was accepted, behind all others."""
        superseded: list[model.Superseded] = []
        if isinstance(event, model.Replaced):  # a complete list, except for the objects that it keeps
            kind, kept = event.kind, event.kept
            for key in [key for key in self._events if key[0] == kind and key[1] not in kept]:
                self._supersede(key, superseded)
        key = _key(event)
        if key in self._events:
            self._supersede(key, superseded)
        room = max(0, MAX_SUPERSEDED - self._superseded)
        self._superseded += min(room, len(superseded))
        self._events[key] = QueuedEvent(event, tuple(superseded[:room]))

    def take(self) -> list[QueuedEvent]:
        """Remove and return all events, in an order with the same outcome as the order of their arrival."""
        taken = list(self._events.values())
        self._events = {}
        self._superseded = 0
        return taken

    def _supersede(self, key: _Key, superseded: list[model.Superseded]) -> None:
        event, older = self._events.pop(key)
        self._superseded -= len(older)
        superseded += older
        if isinstance(event, model.Upserted | model.Removed):
            superseded.append(_summary(event))


def _key(event: model.Event) -> _Key:
    match event:
        case model.Upserted():
            return model.kind_of(event.object), model.key_of(event.object)
        case model.Removed():
            return event.kind, event.key
        case model.Replaced():
            return event.kind, ""
        case model.Problem():
            return "Problem", event.kind, event.key
    return ("SourceState",)


def _summary(event: model.Upserted | model.Removed) -> model.Superseded:
    if isinstance(event, model.Removed):
        return model.Superseded(event.received)
    family = event.object.family if isinstance(event.object, model.EndpointSlice) else 0
    return model.Superseded(event.received, family, event.triggered)
