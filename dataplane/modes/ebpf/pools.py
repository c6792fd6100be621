"""PURE. Ids of services and backends, and ranges of the slots array; freed once nobody uses them.

A number that a program may still be looking at must not mean something else yet. So what is released waits
for a grace period (every program that ran at the time has ended), and backend and service ids also until no
flow names them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable

__all__ = ["SETTINGS", "FullError", "IdPool", "DeferredFree", "SlotAllocator", "size_class"]

# What bounds each map that grows.
SETTINGS = {
    "services": "--max-services", "backends": "--max-backends", "slots": "--max-slots",
    "frontends4": "--max-services", "frontends6": "--max-services",
}  # fmt: skip


class FullError(Exception):
    """A map has nothing left, and `name` says which."""

    def __init__(self, name: str, limit: int) -> None:
        setting = f" ({SETTINGS[name]})" if name in SETTINGS else ""
        super().__init__(f"map {name}{setting} is full ({limit})")
        self.name = name


class IdPool:
    """Small numbers from 1 to `limit` - 1; 0 means none."""

    def __init__(self, limit: int, name: str, used: Iterable[int] = ()) -> None:
        self.limit = limit
        self.name = name
        taken = sorted(set(used))
        self._next = taken[-1] + 1 if taken else 1
        present = set(taken)
        self._free: deque[int] = deque(i for i in range(1, self._next) if i not in present)

    @property
    def left(self) -> int:
        """How many can be taken."""
        return self.limit - self._next + len(self._free)

    @property
    def used(self) -> int:
        """How many are taken, waiting to be freed or not."""
        return self.limit - 1 - self.left

    def take(self, count: int) -> list[int]:
        """`count` numbers, or none at all.

        Raises:
            FullError: fewer are left.
        """
        if count > self.left:
            raise FullError(self.name, self.limit)
        fresh = min(count, self.limit - self._next)
        numbers = list(range(self._next, self._next + fresh))
        self._next += fresh
        while len(numbers) < count:
            numbers.append(self._free.popleft())
        return numbers

    def give(self, numbers: Iterable[int]) -> None:
        """Take numbers back."""
        self._free.extend(numbers)


def size_class(count: int) -> int:
    """Slots that a slice of `count` occupies: the next power of two, at least 4."""
    return 0 if count == 0 else max(4, 1 << (count - 1).bit_length())


class SlotAllocator:
    """Stretches of the slots array in powers of two."""

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
        """Offset and size of a stretch for `count` slots; (0, 0) for none.

        Raises:
            FullError: no stretch is long enough.
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
        """Join neighbours that are free; rare, only when nothing else is long enough."""
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
        """Take a stretch back."""
        if size:
            self._free[size].append(offset)
            self.in_use -= size


class DeferredFree:
    """What was released and must wait. Stamps are numbers of grace periods, counted by the caller."""

    def __init__(self, services: IdPool, backends: IdPool, slices: SlotAllocator) -> None:
        self._services, self._backends, self._slices = services, backends, slices
        self._waiting: deque[tuple[int, list[int], list[int], list[tuple[int, int]]]] = deque()
        self._unnamed_services: set[int] = set()
        self._unnamed_backends: set[int] = set()

    def __len__(self) -> int:
        return (
            sum(len(s) + len(b) + len(p) for _, s, b, p in self._waiting)
            + len(self._unnamed_services)
            + len(self._unnamed_backends)
        )

    @property
    def has_slices(self) -> bool:
        """Whether slices wait for a grace period."""
        return any(slices for _, _, _, slices in self._waiting)

    def put(self, stamp: int, services: list[int], backends: list[int], slices: list[tuple[int, int]]) -> None:
        """Release these once grace period `stamp` is over."""
        if services or backends or slices:
            self._waiting.append((stamp, services, backends, slices))

    def graced(self, stamp: int) -> tuple[list[int], list[int]]:
        """Grace period `stamp` is over: slices are free, ids wait for the flows. Returns those ids."""
        all_services: list[int] = []
        all_backends: list[int] = []
        while self._waiting and self._waiting[0][0] <= stamp:
            _, services, backends, slices = self._waiting.popleft()
            for offset, size in slices:
                self._slices.give(offset, size)
            all_services += services
            all_backends += backends
        self._unnamed_services.update(all_services)
        self._unnamed_backends.update(all_backends)
        return all_services, all_backends

    @property
    def candidates(self) -> tuple[frozenset[int], frozenset[int]]:
        """Service and backend ids that wait only for flows: look for them in the next scan."""
        return frozenset(self._unnamed_services), frozenset(self._unnamed_backends)

    def scanned(
        self, services: Collection[int], backends: Collection[int], named_services: Collection[int],
        named_backends: Collection[int],
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        """A scan looked for these ids and found some of them named by flows: the rest is free, and returned."""
        free_services = self._unnamed_services & set(services) - set(named_services)
        free_backends = self._unnamed_backends & set(backends) - set(named_backends)
        self._unnamed_services -= free_services
        self._unnamed_backends -= free_backends
        self._services.give(sorted(free_services))
        self._backends.give(sorted(free_backends))
        return sorted(free_services), sorted(free_backends)
