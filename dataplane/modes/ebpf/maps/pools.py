"""PURE. Allocates ids of services and backends, and ranges of the slots array, and frees them once they are unused.

An id that a running program may have read must not get another meaning yet. So what is released waits for a grace
period (every program that ran at the time has ended), and ids of backends and services also until no flow names them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

# What bounds each map that grows.
SETTINGS = {
    "services": "--max-services", "backends": "--max-backends", "slots": "--max-slots",
    "frontends4": "--max-services", "frontends6": "--max-services", "flows4": "--max-flows", "flows6": "--max-flows",
}  # fmt: skip


class FullError(Exception):
    """Raised where a map is full; `name` says which."""

    def __init__(self, name: str, limit: int) -> None:
        setting = f" ({SETTINGS[name]})" if name in SETTINGS else ""
        super().__init__(f"map {name}{setting} is full ({limit})")
        self.name = name


class IdPool:
    """Allocates small numbers from 1 to `limit` - 1; 0 means none. `end` is above every number that was ever in use."""

    def __init__(self, limit: int, name: str, used: Iterable[int] = ()) -> None:
        self.limit = limit
        self.name = name
        taken = sorted(set(used))
        self.end = taken[-1] + 1 if taken else 1
        present = set(taken)
        self._free: deque[int] = deque(i for i in range(1, self.end) if i not in present)

    @property
    def left(self) -> int:
        return self.limit - self.end + len(self._free)

    @property
    def used(self) -> int:
        return self.limit - 1 - self.left

    def take(self, count: int) -> list[int]:
        """Allocate `count` numbers, or none at all.

        Raises:
            FullError: fewer are left.
        """
        fresh = min(count, self.limit - self.end)
        if count - fresh > len(self._free):
            raise FullError(self.name, self.limit)
        numbers = [*range(self.end, self.end + fresh)]
        self.end += fresh
        if fresh < count:
            numbers += [self._free.popleft() for _ in range(count - fresh)]
        return numbers

    def give(self, numbers: Iterable[int]) -> None:
        self._free.extend(numbers)


@cache
def size_class(count: int) -> int:
    """Returns the slots that a ring of `count` occupies: the next power of two, at least 4."""
    return 0 if count == 0 else max(4, 1 << (count - 1).bit_length())


class SlotAllocator:
    """Allocates ranges of the slots array in powers of two."""

    def __init__(self, limit: int, name: str, used: Iterable[tuple[int, int]] = ()) -> None:
        self.limit = limit
        self.name = name
        self.in_use = 0
        self._free: dict[int, list[int]] = defaultdict(list)
        self._next = 0
        for offset, size in sorted(used):
            self._fill_gap(self._next, offset)
            self._next = max(self._next, offset + size)
            self.in_use += size

    def _fill_gap(self, start: int, end: int) -> None:
        while end - start >= 4:
            size = 1 << ((end - start).bit_length() - 1)
            self._free[size].append(start)
            start += size

    def take(self, count: int) -> tuple[int, int]:
        """Returns offset and size of a range for `count` slots; (0, 0) for none.

        Raises:
            FullError: no range is long enough.
        """
        size = size_class(count)
        if not size:
            return 0, 0
        if self._free[size]:
            offset = self._free[size].pop()
        elif self._next + size <= self.limit:
            offset = self._next
            self._next += size
        else:
            offset = self._split(size)
        self.in_use += size
        return offset, size

    def _split(self, size: int) -> int:
        larger = self._at_least(size)
        if not larger:
            self._merge()
            larger = self._at_least(size)
        if not larger:
            raise FullError(self.name, self.limit)
        offset = self._free[larger[0]].pop()
        self._fill_gap(offset + size, offset + larger[0])
        return offset

    def _at_least(self, size: int) -> list[int]:
        return sorted(s for s, free in self._free.items() if s >= size and free)

    def _merge(self) -> None:
        """Join adjacent free ranges; only when no range is long enough, which is rare."""
        pieces = sorted((offset, size) for size, free in self._free.items() for offset in free)
        pieces.append((self._next, self.limit - self._next))
        self._next = self.limit
        self._free.clear()
        start = end = 0
        for offset, size in pieces:
            if offset != end:
                self._fill_gap(start, end)
                start = offset
            end = offset + size
        self._fill_gap(start, end)

    def give(self, offset: int, size: int) -> None:
        if size:
            self._free[size].append(offset)
            self.in_use -= size


class InUse(NamedTuple):
    """The ids and slot ranges that the previous agent's maps name. They are not free until claimed or released."""

    services: Iterable[int] = ()
    backends: Iterable[int] = ()
    ranges: Iterable[tuple[int, int]] = ()


NONE_IN_USE = InUse()


@dataclass(slots=True)
class Freed:
    """The ids, slots and frontends that are free now. Frontends are named by the caller's own keys."""

    services: list[int] = field(default_factory=list)
    backends: list[int] = field(default_factory=list)
    frontends: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Removed:
    """The ids, slots and frontends that one change removes: out of use once it is written, but not free yet.

    Each frontend comes with the service that had it. `bare` are services that stay, without frontends.
    """

    services: list[int] = field(default_factory=list)
    backends: list[int] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    frontends: list[tuple[Any, int]] = field(default_factory=list)
    bare: list[int] = field(default_factory=list)
    source_ranges: Counter[int] = field(default_factory=Counter)  # how many, by family


class Pools:
    """Hands out ids and slots, counts the entries of the other maps, and holds what is out of use but not free yet.

    Flows go on when their service is removed or loses its frontends, so the prefilter must still pass their packets
    on: the frontends of such a service are free when its id is. Other frontends only wait for the grace period.

    Attributes:
        stamp: number of the grace period that covers all that was removed until now.
    """

    def __init__(self, sizes: Mapping[str, int], used: InUse = NONE_IN_USE, stamp: int = 0) -> None:
        self.services = IdPool(sizes["services"], "services", used.services)
        self.backends = IdPool(sizes["backends"], "backends", used.backends)
        self.slots = SlotAllocator(sizes["slots"], "slots", used.ranges)
        self.frontends, self.source_ranges = Counter[int](), Counter[int]()  # entries by family
        self.stamp = stamp
        self._sizes = sizes
        self._waiting: deque[tuple[int, Removed, list[Any]]] = deque()  # with frontends of services that go on
        self._frontends: dict[int, list[Any]] = {}  # of services that are gone, or have no others
        self._unnamed_services: set[int] = set()
        self._unnamed_backends: set[int] = set()

    def __len__(self) -> int:
        """Returns how many ids and ranges wait."""
        waiting = sum(len(gone.services) + len(gone.backends) + len(gone.ranges) for _, gone, _ in self._waiting)
        return waiting + len(self._unnamed_services) + len(self._unnamed_backends)

    @property
    def deferred(self) -> int:
        """The number of changes that wait for a grace period."""
        return len(self._waiting)

    @property
    def has_slots(self) -> bool:
        """True if slots wait for a grace period."""
        return any(gone.ranges for _, gone, _ in self._waiting)

    def resize(self, sizes: Mapping[str, int]) -> None:
        """Hand out numbers for maps of other sizes from now on."""
        self._sizes = sizes
        for pool in (self.services, self.backends, self.slots):
            pool.limit = sizes[pool.name]

    def used(self) -> dict[str, int]:
        """Returns, by map, the entries in use or waiting to be freed."""
        return {
            "services": self.services.used, "backends": self.backends.used, "slots": self.slots.in_use,
            "frontends4": self.frontends[4], "frontends6": self.frontends[6],
        }  # fmt: skip

    def check_room(self, family: int, frontends: int, source_ranges: int) -> None:
        """Check that the maps of the family have room for so many entries more.

        Raises:
            FullError: one of them has not.
        """
        for name, counts, more in (
            ("frontends", self.frontends, frontends), ("source_ranges", self.source_ranges, source_ranges)
        ):  # fmt: skip
            if more and counts[family] + more > (limit := self._sizes[f"{name}{family}"]):
                raise FullError(f"{name}{family}", limit)

    # Freeing

    def defer(self, gone: Removed) -> None:
        """Frees what was just removed from the maps, once no program can use it."""
        self.source_ranges.subtract(gone.source_ranges)
        if not (gone.services or gone.backends or gone.ranges or gone.frontends):
            return
        self.stamp += 1
        free_with_id, free_after_grace = frozenset((*gone.services, *gone.bare)), []
        for frontend, service in gone.frontends:
            if service in free_with_id:
                self._frontends.setdefault(service, []).append(frontend)
            else:
                free_after_grace.append(frontend)
        self._waiting.append((self.stamp, gone, free_after_grace))

    def graced(self, stamp: int) -> Freed:
        """Frees slots and frontends, because grace period `stamp` is over. The returned ids wait for their flows."""
        freed = Freed()
        while self._waiting and self._waiting[0][0] <= stamp:
            _, gone, frontends = self._waiting.popleft()
            for offset, size in gone.ranges:
                self.slots.give(offset, size)
            freed.services += gone.services
            freed.backends += gone.backends
            freed.frontends += frontends
        self._unnamed_services.update(freed.services)
        self._unnamed_backends.update(freed.backends)
        return freed

    @property
    def candidates(self) -> tuple[frozenset[int], frozenset[int]]:
        """The service and backend ids that wait only for flows: the next scan looks for them."""
        return frozenset(self._unnamed_services), frozenset(self._unnamed_backends)

    def scanned(self, services: Collection[int], backends: Collection[int]) -> Freed:
        """Free the ids that a scan looked for and found in no flow. Returns them."""
        freed = Freed(sorted(self._unnamed_services & {*services}), sorted(self._unnamed_backends & {*backends}))
        self._unnamed_services.difference_update(freed.services)
        self._unnamed_backends.difference_update(freed.backends)
        self.services.give(freed.services)
        self.backends.give(freed.backends)
        for service in freed.services:
            freed.frontends += self._frontends.pop(service, ())
        return freed
