"""The statistics, on numbers whose answers are known."""

from __future__ import annotations

import math

import pytest

from hybrid_proxy.workshop.measuring.stats import Estimate, coverage, estimate, judge, ratios, spread


@pytest.mark.parametrize(
    ("count", "k", "known"),
    [
        (1, 1, 0.0),
        (5, 1, 1 - 2 / 2**5),
        (6, 1, 0.96875),
        (9, 2, 1 - 2 * (1 + 9) / 2**9),
        (10, 2, 0.978515625),  # from tables of the sign test
        (20, 6, 0.9586105346679688),
    ],
)
def test_how_sure_an_interval_of_two_measurements_is(count: int, k: int, known: float) -> None:
    assert math.isclose(coverage(count, k), known)


def test_of_six_the_whole_range_is_needed() -> None:
    assert estimate([6, 1, 5, 2, 4, 3]) == Estimate(3.5, 1, 6, 0.96875, 6)


def test_of_nine_the_outermost_are_excluded() -> None:
    found = estimate([9, 8, 7, 6, 5, 4, 3, 2, 1])
    assert found is not None
    assert (found.median, found.low, found.high) == (5, 2, 8)
    assert found.sure >= 0.95


def test_with_few_the_interval_says_how_little_it_is_worth() -> None:
    assert estimate([3, 1, 2]) == Estimate(2, 1, 3, 0.75, 3)
    assert estimate([7]) == Estimate(7, 7, 7, 0.0, 1)
    assert estimate([]) is None


def test_one_wild_measurement_moves_neither_median_nor_interval_of_many() -> None:
    calm = estimate([10.0] * 9)
    wild = estimate([10.0] * 8 + [1000.0])
    assert calm is not None
    assert wild is not None
    assert (wild.median, wild.low, wild.high) == (calm.median, calm.low, calm.high)


def test_ratios_are_of_pairs() -> None:
    assert ratios([2, None, 6, 8], [1, 1, 3, 0]) == [2, 2]


@pytest.mark.parametrize(
    ("low", "high", "better", "verdict"),
    [
        (1.1, 1.3, "more", "ahead"),
        (0.7, 0.9, "more", "behind"),
        (0.7, 0.9, "less", "ahead"),
        (1.1, 1.3, "less", "behind"),
        (0.9, 1.1, "more", "even"),
        (1.0, 1.2, "less", "even"),
        (1.1, 1.3, "neither", ""),
    ],
)
def test_a_verdict_needs_an_interval_beside_one(low: float, high: float, better: str, verdict: str) -> None:
    assert judge(Estimate((low + high) / 2, low, high, 0.97, 6), better) == verdict  # type: ignore[arg-type]


def test_the_spread_is_of_the_middle_half() -> None:
    assert spread([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)
    assert spread([100]) == 0
    assert spread([]) == 0
    assert spread([0, 0, 0]) == 0


def test_few_measurements_tell_no_difference() -> None:
    assert judge(Estimate(2.0, 2.0, 2.0, 0.0, 1), "more") == "even"
    assert judge(Estimate(2.0, 1.9, 2.1, 0.5, 2), "more") == "even"
    assert judge(Estimate(2.0, 1.9, 2.1, 0.9375, 5), "more") == "even"
    assert judge(Estimate(2.0, 1.9, 2.1, 0.96875, 6), "more") == "ahead"
