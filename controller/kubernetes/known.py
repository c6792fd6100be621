"""Keeps the objects of one kind as they were reported last, and reports what changes; with a bound on their memory."""

from __future__ import annotations

from typing import Final

import msgspec

from hybrid_proxy.controller.errors import Refused
from hybrid_proxy.controller.kubernetes import Emit
from hybrid_proxy.controller.kubernetes.connection import Connection
from hybrid_proxy.controller.kubernetes.model import EndpointSlice, Object, Problem, Removed, Replaced, Upserted
from hybrid_proxy.controller.kubernetes.parse import UNNAMED
from hybrid_proxy.controller.kubernetes.watch import Versions

__all__ = ["KnownObjects", "PartialList", "UnusableError"]

# What all objects of a kind may take of our memory, about 1 KB for one and 150 bytes for each of its endpoints.
# 150,000 pods and 10,000 Services, which Kubernetes is made for, take 50 MB.
_MAX_KIND: Final = 512 << 20
_OBJECT: Final = 1024
_ENDPOINT: Final = 150


class UnusableError(Exception):
    """The server answered with something that is not what was asked for; says what."""


class PartialList:
    """The part of a list that has come: objects to use, and what is wrong with others, both by key."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._weight = 0
        self.objects: dict[str, Object] = {}
        self.problems: dict[str, str] = {}

    def put(self, key: str, obj: Object) -> None:
        """Add an object, or replace it.

        Raises:
            UnusableError: these are too many.
        """
        self.drop(key)
        self.objects[key] = obj
        self._grow(_weight(obj))

    def refuse(self, refused: Refused) -> None:
        """Note an object that cannot be used."""
        self.drop(refused.key)
        self.problems[refused.key] = str(refused)
        self._grow(_OBJECT)

    def _grow(self, more: int) -> None:
        self._weight += more
        if self._weight > _MAX_KIND:
            raise too_many(self._kind, len(self.objects) + len(self.problems))

    def drop(self, key: str) -> None:
        obj = self.objects.pop(key, None)
        if obj is not None:
            self._weight -= _weight(obj)
        elif self.problems.pop(key, None) is not None:
            self._weight -= _OBJECT


class KnownObjects:
    """All objects of one kind that were emitted and not removed; the cluster shares these values.

    Attributes:
        listed: Whether a list was complete once, or the kind is not served.
    """

    def __init__(self, kind: str, connection: Connection, emit: Emit) -> None:
        self.listed = False
        self._kind = kind
        self._connection = connection
        self._emit = emit
        self._versions = Versions()
        self._known: dict[str, Object] = {}
        self._weight = 0  # of these, in bytes
        self._refused: dict[str, str] = {}  # keys with a Problem, and what it says

    def replace(self, version: str, gathered: PartialList) -> None:
        """A list is complete: it has everything that there is at this version."""
        objects, problems = gathered.objects, gathered.problems
        self._versions.listed(version)
        self.listed = True
        for key in self._refused.keys() - problems.keys():
            self._clear(key)
        for key, message in problems.items():
            self._refuse(key, message)
        # One without a name may be any of those that are known.
        kept = self._known if any(key.endswith(UNNAMED) for key in problems) else problems.keys() & self._known.keys()
        self._known = {key: self._known[key] for key in kept} | objects
        self._weight = sum(map(_weight, self._known.values()))
        self._emit(Replaced(self._kind, tuple(objects.values()), frozenset(problems) | (self._known.keys() - objects)))

    def renewed(self, key: str, obj: Object) -> Object:
        """The value to use for an object of a list. A known one that has changed is reported at once.

        Otherwise old and new objects, and the tables made of both, would be in memory together: 10 MB at 100,000
        endpoints. What is not known waits until the list proves to be one.
        """
        obj = self._as_known(key, obj)
        if self._known.get(key, obj) is not obj:
            self._learn(key, obj)
            self._emit(Upserted(obj))
        return obj

    def _as_known(self, key: str, obj: Object) -> Object:
        """The known value where it is the same; of a slice that changed, the endpoints that did not.

        A value that stays leaves no holes in memory.
        """
        known = self._known.get(key)
        if known is None:
            return obj
        if known == obj:
            return known
        if not isinstance(known, EndpointSlice) or not isinstance(obj, EndpointSlice):
            return obj
        before = {endpoint.address: endpoint for endpoint in known.endpoints}
        shared = (before.get(endpoint.address, endpoint) for endpoint in obj.endpoints)
        endpoints = tuple(old if old == new else new for old, new in zip(shared, obj.endpoints, strict=True))
        return msgspec.structs.replace(obj, endpoints=endpoints)

    def _learn(self, key: str, obj: Object) -> None:
        before = self._known.get(key)
        more = _weight(obj) - (_weight(before) if before is not None else 0)
        self._bounded(more)
        self._clear(key)
        self._known[key] = obj
        self._weight += more

    def upsert(self, key: str, obj: Object, received: float, triggered: float) -> None:
        """An object was created or changed. `triggered` is when what a slice reports changed."""
        obj = self._as_known(key, obj)
        self._learn(key, obj)
        self._emit(Upserted(obj, received, triggered if isinstance(obj, EndpointSlice) else 0.0))

    def ignore(self, key: str, received: float) -> None:
        """Remove an object that belongs to another proxy now."""
        self._versions.add_tombstone(key)
        self.forget(key, received)

    def refuse(self, key: str, message: str) -> None:
        """An object is malformed; its last good version stays."""
        self._bounded(_OBJECT)
        self._refuse(key, message)

    def is_news(self, key: str, version: str | None, *, gone: bool) -> bool:
        """Return whether an event is newer than what is known of its object."""
        return self._versions.is_news(key, version, gone)

    def absent(self, why: str) -> None:
        """The server has no objects of this kind, and the agent does without."""
        self.listed = True
        self._emit(Replaced(self._kind, (), absent=why))

    def forget(self, key: str, received: float) -> None:
        """An object was deleted."""
        self._clear(key)
        before = self._known.pop(key, None)
        if before is None:
            return  # nobody heard of it: another proxy's, or one whose deletion came before its creation
        self._weight -= _weight(before)
        self._emit(Removed(self._kind, key, received))

    def _bounded(self, more: int) -> None:
        if self._weight + _OBJECT * len(self._refused) + more > _MAX_KIND and more > 0:
            raise too_many(self._kind, len(self._known))

    # Problems

    def _refuse(self, key: str, message: str) -> None:
        if self._refused.get(key) == message:
            return
        self._refused[key] = message
        self._emit(Problem(self._kind, key, message, self._connection.where))

    def _clear(self, key: str) -> None:
        if key in self._refused:
            del self._refused[key]
            self._emit(Problem(self._kind, key, "", self._connection.where))


def _weight(obj: Object) -> int:
    """About how many bytes this takes."""
    return _OBJECT + _ENDPOINT * len(obj.endpoints) if isinstance(obj, EndpointSlice) else _OBJECT


def too_many(kind: str, count: int) -> UnusableError:
    return UnusableError(f"more than {count} {kind}s, which would take more than {_MAX_KIND >> 20} MiB of memory")
