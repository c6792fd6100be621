"""Detects and repairs damage: links, filters, pins and maps that another program removed or changed.

Every part of a datapath that outlives the process is a `Repairable`. `Repairs` checks all of them, repairs what is
damaged, counts the repairs, and keeps a message for whatever could not be repaired.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, Self

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.lock import hold
from hybrid_proxy.dataplane.reports import several, shortened

if TYPE_CHECKING:
    from hybrid_proxy.dataplane.kernel.bpf import Map

log = logging.getLogger(__name__)

SETTLED_NS: Final = 1_000_000_000
AUDIT_SHARE: Final = 10  # a comparison that took a processor's second is followed by ten seconds without
AUDIT_CREDIT: Final = 30.0  # seconds of these pauses that reported changes do not wait for: one seldom comes alone
SHOWN: Final = 5  # damaged objects in one line of the log

Pins = Mapping[str, int]  # the inode of each file in a pin directory, by name


def processor_seconds() -> float:
    """CPU time of this thread and of its tools. The clock would count the time that a busy node makes them wait."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + ended.ru_utime + ended.ru_stime


class RepairLog:
    """The repairs of one mode; `count` is how many objects were repaired, `by` the program that changed any."""

    def __init__(self) -> None:
        self.by = ""
        self.count = self._taken = 0
        self._last = deque[str](maxlen=SHOWN)

    def add(self, damage: Sequence[str], repaired: int = 0, by: str = "") -> None:
        """Logs what another program changed, and counts what is `repaired` by now."""
        more = f"; and {len(damage) - SHOWN} more" if len(damage) > SHOWN else ""
        shown, what = damage[:SHOWN], several(len(damage), "object")
        self.by, changed = by, shortened("; ".join(shown))
        log.warning("repairing %s that %s changed: %s%s", what, by or "another program", changed, more)
        self._last.extend(shown)
        self.count += repaired

    def take(self) -> tuple[int, list[str]]:
        """Returns how many objects were repaired since the last call, and the last damage, at most `SHOWN` messages."""
        new, self._taken = self.count - self._taken, self.count
        found = list(self._last)
        if new:
            self._last.clear()
        return new, found


class Repairable(Protocol):
    """A part of the datapath that another program may damage."""

    def damage(self, pins: Pins) -> Iterable[str]:
        """Returns a message for each object that is not as it was made. `pins` is what the pin directory has now."""
        ...

    def repair(self, pins: Pins) -> None:
        """Restores what `damage` reports.

        Raises:
            DataplaneError: an object cannot be restored, for example because a foreign pin has its name.
            OSError: the same.
        """
        ...


class PinnedMap:
    """A map that is held open, and pinned at `path`."""

    def __init__(self, path: Path, pinned: Map) -> None:
        self.map = pinned
        self._path = path
        self._inode = path.stat().st_ino

    @classmethod
    def pin(cls, path: Path, made: Map) -> Self:
        """Pins a new map.

        Raises:
            BpfError: EEXIST where something else is pinned.
        """
        made.pin(path)
        return cls(path, made)

    def damage(self, pins: Pins) -> Iterator[str]:
        """Yields a message if the map is not pinned at its path."""
        name = self._path.name
        if pins.get(name) != self._inode:
            yield f"map {name} {'has something else pinned in its place' if name in pins else 'is not pinned'}"

    def repair(self, pins: Pins) -> None:
        """Pins the map again.

        Raises:
            BpfError: EEXIST where something else is pinned.
        """
        if pins.get(self._path.name) != self._inode:
            self.map.pin(self._path)
            self._inode = self._path.stat().st_ino

    def close(self) -> None:
        """Closes the map; the pin keeps it."""
        self.map.close()


class PinDirectory:
    """A directory of pins.

    Args:
        lock: the descriptor that locks it, if anything does.
        what: the directory's name in the message of an agent that finds it locked.
    """

    def __init__(self, path: Path, lock: int | None = None, what: str = "") -> None:
        self.path = path
        self._lock, self._what = lock, what
        self._seen: tuple[int, int, int] | None = None  # the directory when `_pins` was read, unless it was changing
        self._pins: Pins = {}

    def pins(self) -> Pins:
        """The inode of each file in the directory by its name; nothing if another program removed the directory.

        It is the same object until something is pinned or removed: the kernel notes the time in the directory.
        """
        try:
            found = os.stat(self.path)  # noqa: PTH116 (every second)
            seen = found.st_dev, found.st_ino, found.st_mtime_ns
            if seen != self._seen:
                with os.scandir(self.path) as entries:
                    self._pins = {entry.name: entry.inode() for entry in entries}
                # That clock advances by ticks, so what happens next may have the same time.
                self._seen = seen if time.time_ns() - found.st_mtime_ns > SETTLED_NS else None
        except FileNotFoundError:
            self._seen, self._pins = None, {}
        return self._pins

    def restore(self) -> None:
        """Makes the directory and its lock again if another program removed it.

        Raises:
            Occupied: another agent made and locked it meanwhile.
        """
        if self.path.is_dir():
            return
        self.path.mkdir(parents=True)
        if self._lock is not None:
            former, self._lock = self._lock, hold(self.path, self._what)
            os.close(former)

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class Repairs:
    """Checks the parts of a datapath, and repairs what is damaged.

    Attributes:
        unrepaired: a message for each object that could not be repaired; the next `run` tries again.
    """

    def __init__(self, directory: PinDirectory, parts: Sequence[Repairable], repaired: RepairLog) -> None:
        self.unrepaired: tuple[str, ...] = ()
        self._directory, self._parts, self._repaired = directory, parts, repaired

    def damage(self) -> Iterator[str]:
        """Yields a message for each damaged object."""
        pins = self._directory.pins()
        for part in self._parts:
            yield from part.damage(pins)

    def run(self) -> None:
        """Repairs all damage, and logs it once."""
        damage = list(self.damage())
        if not damage:
            self.unrepaired = ()
            return
        new = [message for message in damage if message not in self.unrepaired]
        if new:
            self._repaired.add(new)
        failures = list(self._repair())
        before, self.unrepaired = self.unrepaired, tuple(self.damage())
        self._repaired.count += max(0, len(damage) - len(self.unrepaired))
        if self.unrepaired and self.unrepaired != before:
            why = "; ".join(failures) or "they were changed again"
            log.error("%s cannot be repaired: %s", several(len(self.unrepaired), "object"), why)

    def _repair(self) -> Iterator[str]:
        """Repairs every part; yields a message for each failure."""
        try:
            self._directory.restore()
        except (DataplaneError, OSError) as error:
            yield str(error)
        pins = self._directory.pins()
        for part in self._parts:
            try:
                part.repair(pins)
            except (DataplaneError, OSError) as error:
                yield str(error)
