"""PURE. Pages of a list and lines of a watch, as JSON has them, and which of them are news.

Only what every object has is read here (`ObjectHead`), in one pass; `controller.kubernetes.parse` reads the rest.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

import msgspec

from hybrid_proxy.controller.kubernetes.parse import UNNAMED

_MAX_TOMBSTONES: Final = 4096


class _ListMeta(msgspec.Struct):
    version: str | None = msgspec.field(default=None, name="resourceVersion")
    token: str | None = msgspec.field(default=None, name="continue")


class ListPage(msgspec.Struct):
    """One page of a list, its objects still as JSON."""

    metadata: _ListMeta
    items: list[msgspec.Raw] | None  # Go writes an empty list as null in some places; without it, it is no list
    kind: str


class WatchEvent(msgspec.Struct):
    """One line of a watch, its object still as JSON."""

    type: str
    object: msgspec.Raw


class _Annotations(msgspec.Struct):
    trigger: object = msgspec.field(default=None, name="endpoints.kubernetes.io/last-change-trigger-time")
    initial_end: object = msgspec.field(default=None, name="k8s.io/initial-events-end")


class _Meta(msgspec.Struct, frozen=True):
    name: str | None = None
    namespace: str | None = None
    version: str | None = msgspec.field(default=None, name="resourceVersion")
    annotations: msgspec.Raw = msgspec.Raw(b"null")  # raw: malformed ones must not cost the object its name


class ObjectHead(msgspec.Struct):
    """The fields that every object has. Forgiving: a malformed object still has a name, most of the time."""

    metadata: _Meta = _Meta()
    kind: str | None = None

    def key(self, kind: str) -> str:
        """Returns `namespace/name`, or the name; as `controller.kubernetes.model.key_of`."""
        name = self.metadata.name or UNNAMED
        return f"{self.metadata.namespace or 'default'}/{name}" if kind in {"Service", "EndpointSlice"} else name

    @property
    def triggered(self) -> float:
        """Returns when the change that an EndpointSlice reports was made, in seconds since 1970.

        0 when its controller does not say so, or not in RFC 3339.
        """
        trigger = self._annotations().trigger
        try:
            moment = datetime.fromisoformat(trigger) if isinstance(trigger, str) else None
            return moment.timestamp() if moment and moment.tzinfo else 0.0
        except (ValueError, OverflowError):
            return 0.0

    @property
    def ends_initial(self) -> bool:
        """Says whether this bookmark comes after everything that there was at the beginning (KEP-3157)."""
        return self._annotations().initial_end == "true"

    def _annotations(self) -> _Annotations:
        try:
            return _decode_annotations(self.metadata.annotations) or _Annotations()
        except msgspec.MsgspecError:
            return _Annotations()


decode_page = msgspec.json.Decoder(ListPage).decode
decode_line = msgspec.json.Decoder(WatchEvent).decode
_decode_head = msgspec.json.Decoder(ObjectHead).decode
_decode_annotations = msgspec.json.Decoder(_Annotations | None).decode


def decode_head(raw: msgspec.Raw) -> ObjectHead:
    """Decode the head of any JSON; it is empty when it is no object with a name."""
    try:
        return _decode_head(raw)
    except msgspec.MsgspecError:
        return ObjectHead()


def version_number(version: str | None) -> int | None:
    """Returns a version that can be compared (KEP-5504: decimal, no leading zero), else None."""
    if version and len(version) <= 40 and version.isascii() and version.isdigit() and version[0] != "0":
        return int(version)
    return None


class Versions:
    """The versions that were `seen` of each object, so that none goes back in time.

    A complete list at version N has the state of all objects at N: whatever is older is old news, also
    about objects that are not in it. So only what changed since the list needs a note of its own.
    """

    def __init__(self) -> None:
        self._floor: int | None = None
        self.seen: dict[str, int] = {}
        self._tombstones: dict[str, None] = {}  # deleted objects, the newest last

    def listed(self, version: str | None) -> None:
        """Forgets what is older than a complete list of this version."""
        self._floor = version_number(version)
        self.seen.clear()
        self._tombstones.clear()

    def is_news(self, key: str, version: str | None, gone: bool) -> bool:
        """Return whether an event is news; it is then noted."""
        number = version_number(version)
        if number is None or self._floor is None:
            return True
        known = self.seen.get(key, self._floor)
        # A deletion may carry the version of the last change.
        if number < known or (number == known and not gone):
            return False
        self.seen[key] = number
        self._tombstones.pop(key, None)
        if gone:
            self.add_tombstone(key)
        return True

    def add_tombstone(self, key: str) -> None:
        """Note that this object is not served here any more; what was seen of it is kept for a while."""
        if key not in self.seen:
            return
        self._tombstones[key] = None
        if len(self._tombstones) > _MAX_TOMBSTONES:
            oldest = next(iter(self._tombstones))
            del self._tombstones[oldest], self.seen[oldest]
