"""PURE. Allocates ids of services and backends, and ranges of the slots array, and frees them once they are unused.

An id that a running program may have read must not get another meaning yet. So what is released waits for a grace
period (every program that ran at the time has ended), and ids of backends and services also until no flow names them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# What bounds each map that grows.
SETTINGS = {
    "services": "--max-services", "backends": "--max-backends", "slots": "--max-slots",
    "frontends4": "--max-services", "frontends6": "--max-services", "flows4": "--max-flows", "flows6": "--max-flows",
}  # fmt: skip


class FullError(Exception):
    """The map `name` is full."""

    def __init__(self, name: str, limit: int) -> None:
        setting = f" ({SETTINGS[name]})" if name in SETTINGS else ""
        super().__init__(f"map {name}{setting} is full ({limit})")
        self.name = name


class IdPool:
    """Allocates small numbers from 1 to `limit` - 1; 0 means none."""

    def __init__(self, limit: int, name: str, used: Iterable[int] = ()) -> None:
        self.limit = limit
        self.name = name
        taken = sorted(set(used))
        self._next = taken[-1] + 1 if taken else 1
        present = set(taken)
        self._free: deque[int] = deque(i for i in range(1, self._next) if i not in present)

    @property
    def end(self) -> int:
        """The first number above every number that was ever in use."""
        return self._next

    @property
    def left(self) -> int:
        return self.limit - self._next + len(self._free)

    @property
    def used(self) -> int:
        return self.limit - 1 - self.left

    def take(self, count: int) -> list[int]:
        """Allocate `count` numbers, or none at all.

        Raises:
            FullError: fewer are left.
        """
        fresh = min(count, self.limit - self._next)
        if count - fresh > len(self._free):
            raise FullError(self.name, self.limit)
        numbers = [*range(self._next, self._next + fresh)]
        self._next += fresh
        if fresh < count:
            numbers += [self._free.popleft() for _ in range(count - fresh)]
        return numbers

    def give(self, numbers: Iterable[int]) -> None:
        self._free.extend(numbers)


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


@dataclass(slots=True)
class Freed:
    """The ids, slots and frontends that are free now. Frontends are named by the caller's own keys."""

    services: list[int] = field(default_factory=list)
    backends: list[int] = field(default_factory=list)
    frontends: list[Any] = field(default_factory=list)


class DeferredFree:
    """Holds what is out of use but not free yet. Stamps are numbers of grace periods, counted by the caller.

    Flows go on when their service is removed or loses its frontends, so the prefilter must still pass their packets
    on: the frontends of such a service are free when its id is. Other frontends only wait for the grace period.
    """

    def __init__(self, services: IdPool, backends: IdPool, slots: SlotAllocator) -> None:
        self._services, self._backends, self._slots = services, backends, slots
        self._waiting: deque[tuple[int, Sequence[int], Sequence[int], Sequence[tuple[int, int]], list[Any]]] = deque()
        self._frontends: dict[int, list[Any]] = {}  # of services that are gone, or have no others
        self._unnamed_services: set[int] = set()
        self._unnamed_backends: set[int] = set()

    def __len__(self) -> int:
        waiting = sum(len(services) + len(backends) + len(ranges) for _, services, backends, ranges, _ in self._waiting)
        return waiting + len(self._unnamed_services) + len(self._unnamed_backends)

    @property
    def has_slots(self) -> bool:
        """True if slots wait for a grace period."""
        return any(ranges for _, _, _, ranges, _ in self._waiting)

    def put(
        self, stamp: int, services: Sequence[int], backends: Sequence[int], ranges: Sequence[tuple[int, int]],
        frontends: Iterable[tuple[Any, int]] = (), bare: Iterable[int] = (),
    ) -> None:  # fmt: skip
        """Free these once grace period `stamp` is over; each frontend comes with the service that had it.

        `bare` are services that stay, without frontends.
        """
        others, gone = [], frozenset((*services, *bare))
        for frontend, service in frontends:
            if service in gone:
                self._frontends.setdefault(service, []).append(frontend)
            else:
                others.append(frontend)
        if services or backends or ranges or others:
            self._waiting.append((stamp, services, backends, ranges, others))

    def graced(self, stamp: int) -> Freed:
        """Free slots and frontends: grace period `stamp` is over. The returned ids wait for their flows."""
        freed = Freed()
        while self._waiting and self._waiting[0][0] <= stamp:
            _, services, backends, ranges, frontends = self._waiting.popleft()
            for offset, size in ranges:
                self._slots.give(offset, size)
            freed.services += services
            freed.backends += backends
            freed.frontends += frontends
        self._unnamed_services.update(freed.services)
        self._unnamed_backends.update(freed.backends)
        return freed

    @property
    def candidates(self) -> tuple[frozenset[int], frozenset[int]]:
        """The service and backend ids that wait only for flows: the next scan looks for them."""
        return frozenset(self._unnamed_services), frozenset(self._unnamed_backends)

    def scanned(
        self, services: Collection[int], backends: Collection[int], named_services: Collection[int],
        named_backends: Collection[int],
    ) -> Freed:  # fmt: skip
        """Free the ids that a scan looked for and found in no flow. Returns them."""
        free_services = self._unnamed_services & set(services) - set(named_services)
        free_backends = self._unnamed_backends & set(backends) - set(named_backends)
        self._unnamed_services -= free_services
        self._unnamed_backends -= free_backends
        freed = Freed(sorted(free_services), sorted(free_backends))
        self._services.give(freed.services)
        self._backends.give(freed.backends)
        for service in freed.services:
            freed.frontends += self._frontends.pop(service, ())
        return freed
