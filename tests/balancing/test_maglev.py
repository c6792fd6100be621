"""Maglev: the same on every node, even, and little moves when backends change."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_proxy.dataplane.balancing import ALGORITHMS, ring_of
from hybrid_proxy.dataplane.balancing.maglev import SIZES, size_of
from hybrid_proxy.dataplane.table import Backend
from tests.balancing.make import LIMIT, backends, counted, several

MAGLEV = ALGORITHMS["mh"]


def chosen(made: list[Backend], limit: int = LIMIT) -> list[Backend]:
    """The backend at each place."""
    return [made[position] for position in ring_of(MAGLEV, made, limit)]


def moved(before: list[Backend], after: list[Backend]) -> float:
    """The part of places that changed; rings of different sizes are compared where a flow's hash finds them."""
    points = 20_011
    return (
        sum(before[point * len(before) // points] != after[point * len(after) // points] for point in range(points))
        / points
    )


@settings(deadline=None)
@given(several, st.randoms(use_true_random=False), st.booleans())
def test_order_and_place_of_backends_do_not_matter(made, rng, local):
    """Another node lists them in another order, and other ones are local to it."""
    other = [msgspec.structs.replace(backend, local=local) for backend in made]
    rng.shuffle(other)
    here = [(b.address, b.port) for b in chosen(made)]
    there = [(b.address, b.port) for b in chosen(other)]
    assert here == there


@settings(deadline=None)
@given(several)
def test_equal_weights_differ_by_one_place(made):
    counts = counted(ring_of(MAGLEV, made, LIMIT), len(made))
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("count", [2, 3, 5, 10, 30, 100, 160])
def test_a_backend_that_leaves_moves_its_own_share(count):
    """At most 1/n + 5 %, of any backend; the mean is closer to 1/n."""
    made = backends(count)
    before = chosen(made)
    parts = []
    for gone in random.Random(count).sample(made, min(count, 12)):
        after = chosen([backend for backend in made if backend != gone])
        parts.append(moved(before, after))
        assert parts[-1] <= 1 / count + 0.05
    assert sum(parts) / len(parts) <= 1 / count + 0.03


@pytest.mark.parametrize("count", [2, 5, 9, 30, 100, 160])
def test_a_backend_that_comes_takes_its_own_share(count):
    made = backends(count)
    before, after = chosen(made), chosen([*made, Backend("fd00::99", 443)])
    assert moved(before, after) <= 1 / (count + 1) + 0.05


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=3, max_size=30), st.data())
def test_a_weighted_backend_that_leaves_moves_its_own_share(given_weights, data):
    made = [
        msgspec.structs.replace(b, weight=w) for b, w in zip(backends(len(given_weights)), given_weights, strict=True)
    ]
    gone = data.draw(st.sampled_from(made))
    before, after = chosen(made), chosen([backend for backend in made if backend != gone])
    if len(before) == len(after):  # not from 11 to 10
        assert moved(before, after) <= gone.weight / sum(given_weights) + 0.08


def test_a_changed_weight_moves_little():
    made = backends(10, weight=10)
    heavier = [msgspec.structs.replace(made[0], weight=11), *made[1:]]
    assert moved(chosen(made), chosen(heavier)) <= 0.15


@pytest.mark.parametrize(
    ("count", "limit", "size"),
    [
        (2, LIMIT, 1021), (10, LIMIT, 1021), (11, LIMIT, 4093), (40, LIMIT, 4093), (41, LIMIT, 16_381),
        (1000, LIMIT, 16_381), (1000, 65_521, 65_521), (20, 2500, 2039), (10, 251, 251), (10, 1, 251), (300, 251, 509),
        (20_000, LIMIT, 65_521), (70_000, LIMIT, 70_000),
    ],
)  # fmt: skip
def test_size(count, limit, size):
    assert size_of(count, limit) == size


def test_weights_do_not_change_the_size():
    """Another size is another ring: a changed weight would move everything."""
    made = [Backend("10.0.0.1", 80, weight=1000), Backend("10.0.0.2", 80)]
    assert len(ring_of(MAGLEV, made, LIMIT)) == 1021
    assert counted(ring_of(MAGLEV, made, LIMIT), 2) == [1020, 1]


def test_sizes_are_primes():
    for size in SIZES:
        assert all(size % divisor for divisor in range(2, int(size**0.5) + 1))


def test_the_table_of_the_paper_is_what_is_filled():
    """The straightforward loop of the paper's pseudocode, on names of our own hash."""
    from hybrid_proxy.dataplane.balancing.maglev import _permutations

    made = backends(9)
    names = sorted(f"{backend.address}:{backend.port}" for backend in made)
    starts, steps = _permutations(names, 1021)
    table: list[str | None] = [None] * 1021
    upcoming = [0] * len(names)
    filled = 0
    while filled < 1021:
        for i, name in enumerate(names):
            place = (starts[i] + upcoming[i] * steps[i]) % 1021
            while table[place] is not None:
                upcoming[i] += 1
                place = (starts[i] + upcoming[i] * steps[i]) % 1021
            table[place] = name
            upcoming[i] += 1
            filled += 1
            if filled == 1021:
                break
    assert [f"{backend.address}:{backend.port}" for backend in chosen(made)] == table


def test_the_ring_of_three_known_backends_stays_what_it_was():
    """A node that is upgraded must choose as the other nodes do: another hash is another layout for all of them."""
    made = [Backend("10.0.0.1", 80), Backend("10.0.0.2", 80), Backend("fd00::3", 80)]
    assert ring_of(MAGLEV, made, LIMIT)[:24] == GOLDEN


GOLDEN = [1, 1, 1, 0, 2, 1, 2, 1, 2, 1, 0, 0, 0, 2, 0, 2, 1, 1, 0, 0, 1, 0, 1, 2]
