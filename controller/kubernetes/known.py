"""Keeps the objects of one kind as they were reported last, and reports what changes; with a bound on their memory."""

from __future__ import annotations

from typing import Final

import msgspec

from hybrid_proxy.controller.kubernetes import Emit
from hybrid_proxy.controller.kubernetes.connection import Connection
from hybrid_proxy.controller.kubernetes.model import EndpointSlice, Object, Problem, Removed, Replaced, Upserted
from hybrid_proxy.controller.kubernetes.parse import UNNAMED
from hybrid_proxy.controller.kubernetes.watch import Versions

# What all objects of a kind may take of our memory, about 1 KB for one and 150 bytes for each of its endpoints.
# 150,000 pods and 10,000 Services, which Kubernetes is made for, take 50 MB.
_MAX_KIND: Final = 512 << 20
_OBJECT: Final = 1024
_ENDPOINT: Final = 150


class UnusableError(Exception):
    """The server answered with something that is not what was asked for; says what."""


class ObjectSet:
    """Objects of one kind, and what is wrong with those that were refused, by key; with a bound on their memory.

    An object that was refused may have its last good version in `objects`.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._weight = 0  # about how many bytes all of it takes
        self.objects: dict[str, Object] = {}
        self.problems: dict[str, str] = {}

    def put(self, key: str, obj: Object) -> None:
        """Add an object, or replace it.

        Raises:
            UnusableError: these are too many.
        """
        self._grow(_weight(obj) - _weight(self.objects.get(key)))
        self.objects[key] = obj

    def refuse(self, key: str, message: str) -> bool:
        """Note an object that cannot be used. True: that is new.

        Raises:
            UnusableError: these are too many.
        """
        known = self.problems.get(key)
        if known is None:
            self._grow(_OBJECT)
        self.problems[key] = message
        return known != message

    def clear(self, key: str) -> bool:
        """Forget what was wrong with an object. True: something was."""
        found = self.problems.pop(key, None) is not None
        self._weight -= found * _OBJECT
        return found

    def drop(self, key: str) -> bool:
        """Remove an object. True: it was there."""
        obj = self.objects.pop(key, None)
        self._weight -= _weight(obj)
        return obj is not None

    def _grow(self, more: int) -> None:
        if self._weight + more > _MAX_KIND and more > 0:
            count = f"more than {len(self.objects) + len(self.problems)} {self._kind}s"
            raise UnusableError(f"{count}, which would take more than {_MAX_KIND >> 20} MiB of memory")
        self._weight += more


class KnownObjects:
    """All objects of one kind that were emitted and not removed; the cluster shares these values.

    Attributes:
        listed: Whether a list was complete once, or the kind is not served.
        versions: What is known of each object's.
    """

    def __init__(self, kind: str, connection: Connection, emit: Emit) -> None:
        self.listed = False
        self._kind = kind
        self._connection = connection
        self._emit = emit
        self.versions = Versions()
        self._known = ObjectSet(kind)

    def replace(self, version: str, listed: ObjectSet) -> None:
        """Use a complete list: it has everything that there is at this version."""
        known, objects = self._known, tuple(listed.objects.values())
        # One without a name may be any of those that are known.
        unnamed = any(key.endswith(UNNAMED) for key in listed.problems)
        kept = (known.objects if unnamed else listed.problems).keys() & known.objects.keys() - listed.objects.keys()
        for key in kept:
            listed.put(key, known.objects[key])
        self.versions.listed(version)
        self.listed = True
        self._known = listed
        for key in known.problems.keys() - listed.problems.keys():
            self._report(key, "")
        for key, message in listed.problems.items():
            if known.problems.get(key) != message:
                self._report(key, message)
        self._emit(Replaced(self._kind, objects, frozenset(listed.problems) | kept))

    def renewed(self, key: str, obj: Object) -> Object:
        """The value to use for an object of a list. A known one that has changed is reported at once.

        Otherwise old and new objects, and the tables made of both, would be in memory together: 10 MB at 100,000
        endpoints. What is not known waits until the list proves to be one.
        """
        obj = self._as_known(key, obj)
        if self._known.objects.get(key, obj) is not obj:
            self._learn(key, obj)
            self._emit(Upserted(obj))
        return obj

    def _as_known(self, key: str, obj: Object) -> Object:
        """The known value where it is the same; of a slice that changed, the endpoints that did not.

        A value that stays leaves no holes in memory.
        """
        known = self._known.objects.get(key)
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
        self._known.put(key, obj)
        self._clear(key)

    def upsert(self, key: str, obj: Object, received: float, triggered: float) -> None:
        """Report an object that was created or changed. `triggered` is when what a slice reports changed."""
        obj = self._as_known(key, obj)
        self._learn(key, obj)
        self._emit(Upserted(obj, received, triggered if isinstance(obj, EndpointSlice) else 0.0))

    def ignore(self, key: str, received: float) -> None:
        """Remove an object that belongs to another proxy now."""
        self.versions.add_tombstone(key)
        self.forget(key, received)

    def refuse(self, key: str, message: str) -> None:
        """Report a malformed object; its last good version stays."""
        if self._known.refuse(key, message):
            self._report(key, message)

    def absent(self, why: str) -> None:
        """The server has no objects of this kind, and the agent does without."""
        self.listed = True
        self._emit(Replaced(self._kind, (), absent=why))

    def forget(self, key: str, received: float) -> None:
        """Remove an object that was deleted."""
        self._clear(key)
        # Nobody heard of some: another proxy's, or one whose deletion came before its creation.
        if self._known.drop(key):
            self._emit(Removed(self._kind, key, received))

    def _clear(self, key: str) -> None:
        if self._known.clear(key):
            self._report(key, "")

    def _report(self, key: str, message: str) -> None:
        self._emit(Problem(self._kind, key, message, self._connection.where))


def _weight(obj: Object | None) -> int:
    """About how many bytes this takes."""
    if obj is None:
        return 0
    return _OBJECT + _ENDPOINT * len(obj.endpoints) if isinstance(obj, EndpointSlice) else _OBJECT
