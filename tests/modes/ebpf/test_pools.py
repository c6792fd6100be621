"""Numbers and stretches: nothing is handed out twice, nothing overlaps, everything comes back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybrid_proxy.dataplane.modes.ebpf.maps.pools import (
    Freed,
    FullError,
    IdPool,
    Pools,
    Removed,
    SlotAllocator,
    size_class,
)


# count   slots
@pytest.mark.parametrize(("count", "slots"), [
    (0, 0), (1, 4), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (1000, 1024), (1024, 1024), (1025, 2048),
])  # fmt: skip
def test_size_classes(count: int, slots: int) -> None:
    assert size_class(count) == slots


def test_numbers_begin_at_one_and_end_before_the_limit() -> None:
    pool = IdPool(5, "services")
    assert pool.take(4) == [1, 2, 3, 4]
    with pytest.raises(FullError, match=r"map services \(--max-services\) is full \(5\)"):
        pool.take(1)
    pool.give([3])
    assert pool.take(1) == [3]


def test_small_adjacent_free_ranges_make_room_for_a_large_one() -> None:
    pool = SlotAllocator(64, "slots")
    pieces = [pool.take(4) for _ in range(16)]
    for piece in pieces[:8]:
        pool.give(*piece)
    assert pool.take(32) == (0, 32)
    with pytest.raises(FullError):
        pool.take(1)
    for piece in pieces[8:]:
        pool.give(*piece)
    assert pool.take(32) == (32, 32)


def test_no_slots_take_no_room() -> None:
    pool = SlotAllocator(4, "slots")
    assert pool.take(0) == (0, 0)
    pool.give(0, 0)
    assert pool.in_use == 0


class Numbers(RuleBasedStateMachine):
    """An IdPool beside a set."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = IdPool(12, "backends", used=(3, 7))
        self.out = {3, 7}

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        if count > 11 - len(self.out):
            with pytest.raises(FullError):
                self.pool.take(count)
            return
        numbers = self.pool.take(count)
        assert len(set(numbers)) == count
        assert not self.out & set(numbers)
        assert all(0 < number < 12 for number in numbers)
        self.out.update(numbers)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        back = data.draw(st.sets(st.sampled_from(sorted(self.out))))
        self.pool.give(sorted(back))
        self.out -= back

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.pool.left == 11 - len(self.out)


class Stretches(RuleBasedStateMachine):
    """A SlotAllocator beside the list of what is out."""

    LIMIT = 128

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotAllocator(self.LIMIT, "slots", used=[(16, 4), (40, 16)])
        self.out = [(16, 4), (40, 16)]

    @rule(count=st.integers(1, 40))
    def take(self, count: int) -> None:
        try:
            offset, size = self.pool.take(count)
        except FullError:
            assert self.longest_gap() < size_class(count)
            return
        assert size == size_class(count)
        assert offset >= 0
        assert offset + size <= self.LIMIT
        assert all(offset + size <= start or start + length <= offset for start, length in self.out)
        self.out.append((offset, size))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        piece = data.draw(st.sampled_from(self.out))
        self.out.remove(piece)
        self.pool.give(*piece)

    def longest_gap(self) -> int:
        edges = [(0, 0), *sorted(self.out), (self.LIMIT, 0)]
        return max(after - (start + size) for (start, size), (after, _) in itertools.pairwise(edges))

    @invariant()
    def the_count_is_right(self) -> None:
        assert self.pool.in_use == sum(size for _, size in self.out)


FEW = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNumbers = Numbers.TestCase
TestNumbers.settings = FEW
TestStretches = Stretches.TestCase
TestStretches.settings = FEW


SIZES = {"services": 8, "backends": 8, "slots": 32}


def test_slices_return_after_the_grace_period_and_ids_after_a_scan() -> None:
    pools = Pools(SIZES)
    services, backends, slots = pools.services, pools.backends, pools.slots
    (service,), (first, second), piece = services.take(1), backends.take(2), slots.take(3)
    pools.defer(Removed([service], [first, second], [piece]))
    assert len(pools) == 4
    assert pools.graced(0) == Freed()
    assert slots.in_use == 4
    assert pools.graced(1) == Freed([service], [first, second])
    assert slots.in_use == 0
    assert services.left == 6
    assert pools.candidates == ({service}, {first, second})
    assert pools.scanned([], [first]) == Freed([], [first])
    assert (services.left, backends.left) == (6, 6)
    assert pools.candidates == ({service}, {second})
    assert pools.scanned([service], [second]) == Freed([service], [second])
    assert (services.left, backends.left, len(pools)) == (7, 7, 0)


def test_a_scan_frees_only_what_it_looked_for() -> None:
    pools = Pools(SIZES)
    services, backends = pools.services, pools.backends
    early, late = backends.take(2)
    pools.defer(Removed(backends=[early]))
    pools.graced(1)
    asked = pools.candidates
    pools.defer(Removed(backends=[late]))
    pools.graced(2)
    assert pools.scanned(*asked) == Freed([], [early])
    assert pools.candidates == (frozenset(), {late})
    assert services.left == 7


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=30))
def test_everything_that_is_released_comes_back_once(steps: list[tuple[int, bool]]) -> None:
    pools = Pools(SIZES)
    services, backends, slots = pools.services, pools.backends, pools.slots
    for count, named in steps:
        try:
            numbers, piece = backends.take(count), slots.take(count)
        except FullError:
            pools.graced(pools.stamp)
            pools.scanned(*pools.candidates)
            continue
        pools.defer(Removed(backends=numbers, ranges=[piece]))
        if named:
            pools.graced(pools.stamp)
            pools.scanned([], pools.candidates[1].difference(numbers))
    pools.graced(pools.stamp)
    pools.scanned(*pools.candidates)
    if len(pools) == 0:
        assert (services.left, slots.in_use) == (7, 0)
