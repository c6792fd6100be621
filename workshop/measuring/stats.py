"""PURE. Medians, their confidence intervals, significant differences, and the order of measurements.

Nothing is assumed about the distribution of measurements. The interval around a median consists of two of the
measurements: the true median lies between the k-th smallest and the k-th largest of n with probability
1 - 2 P(B < k), B binomial of n and 1/2 (the sign test turned around; David and Nagaraja, Order Statistics, 7.1). Six
measurements are the fewest that reach 95 %; with fewer the whole range is given, with its probability.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal, TypeVar

import msgspec

SURE: Final = 0.95  # below, nothing is significant

Item = TypeVar("Item")
Better = Literal["more", "less", "neither"]
Verdict = Literal["ahead", "behind", "even", ""]


class Estimate(msgspec.Struct, frozen=True):
    """A median of `count` measurements, and the interval that holds the true one with probability `sure` (0 to 1)."""

    median: float
    low: float
    high: float
    sure: float
    count: int

    def holds(self, value: float) -> bool:
        """Tells whether the interval holds this value."""
        return self.low <= value <= self.high

    @property
    def differs(self) -> bool:
        """Tells whether this ratio is significant: its interval holds no 1, and is sure enough."""
        return self.sure >= SURE and not self.holds(1.0)


def coverage(count: int, k: int) -> float:
    """Returns the probability that the median lies between the k-th smallest and largest of `count` measurements."""
    below: int = sum(math.comb(count, i) for i in range(k))
    return max(0.0, 1 - below * math.ldexp(1.0, 1 - count))


def estimate(values: Sequence[float]) -> Estimate | None:
    """Returns the median with the narrowest interval of probability `SURE`, else with the whole range.

    Without a measurement, returns None.
    """
    if not values:
        return None
    ordered, count = sorted(values), len(values)
    k = 1
    while 2 * (k + 1) <= count + 1 and coverage(count, k + 1) >= SURE:
        k += 1
    return Estimate(statistics.median(ordered), ordered[k - 1], ordered[count - k], coverage(count, k), count)


def ratios(values: Sequence[float | None], controls: Sequence[float | None]) -> list[float]:
    """Returns each value relative to its control; pairs that lack a side, or divide by 0, are skipped."""
    return [v / c for v, c in zip(values, controls, strict=True) if v is not None and c]


def judge(ratio: Estimate | None, better: Better) -> Verdict:
    """Judges the first of two modes by their ratio: ahead, behind, or even, if it does not differ.

    The verdict is empty where neither direction is better, or nothing was measured. It does not say how few pairs there
    were; `Estimate.sure` does.
    """
    if ratio is None or better == "neither":
        return ""
    if not ratio.differs:
        return "even"
    return "ahead" if (ratio.low > 1) == (better == "more") else "behind"


def spread(values: Sequence[float]) -> float:
    """Returns the spread of the middle half of the measurements: (Q3 - Q1) / median.

    It is 0 with fewer than two measurements, or a median of 0.
    """
    middle = statistics.median(values) if values else 0.0
    if len(values) < 2 or not middle:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / middle


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that this share of all values does not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def beyond(mine: Sequence[float], nothing: Sequence[float]) -> float:
    """Returns the median of pairwise differences: a machine that changes its speed is as fast for both of a pair."""
    return statistics.median([one - other for one, other in zip(mine, nothing, strict=True)])


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """Returns the order of a round: each item in turn is the first, and every second round is reversed."""
    if not items:
        return []
    first = number // 2 % len(items)
    order = [*items[first:], *items[:first]]
    return order[::-1] if number % 2 else order
