"""Medians, how sure they are, and when a difference is one.

Nothing is assumed of how measurements are distributed. The interval around a median is made of two of the
measurements themselves: the true median lies between the k-th smallest and the k-th largest of n with probability
1 - 2 P(B < k), B binomial of n and 1/2 (the sign test turned around; David and Nagaraja, Order Statistics, 7.1). Six
measurements are the fewest that reach 95 %; with fewer the whole range is given, with its probability.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

__all__ = ["SURE", "Estimate", "Verdict", "coverage", "estimate", "judge", "ratios", "spread"]

SURE: Final = 0.95

Better = Literal["more", "less", "neither"]
Verdict = Literal["ahead", "behind", "even", ""]


class Estimate(msgspec.Struct, frozen=True):
    """A median and the interval that holds the true one with probability `sure` (0 to 1), of `count` measurements."""

    median: float
    low: float
    high: float
    sure: float
    count: int

    def holds(self, value: float) -> bool:
        """Whether the interval does not rule this value out."""
        return self.low <= value <= self.high


def coverage(count: int, k: int) -> float:
    """Probability that the median lies between the k-th smallest and the k-th largest of `count` measurements."""
    below: int = sum(math.comb(count, i) for i in range(k))
    return max(0.0, 1 - below * math.ldexp(1.0, 1 - count))


def estimate(values: Sequence[float], wanted: float = SURE) -> Estimate | None:
    """The median with the narrowest interval of measurements that is as sure as `wanted`, else with the whole range.

    None when there is no measurement.
    """
    if not values:
        return None
    ordered, count = sorted(values), len(values)
    k = 1
    while 2 * (k + 1) <= count + 1 and coverage(count, k + 1) >= wanted:
        k += 1
    return Estimate(statistics.median(ordered), ordered[k - 1], ordered[count - k], coverage(count, k), count)


def ratios(values: Sequence[float | None], controls: Sequence[float | None]) -> list[float]:
    """Each value in times of the control beside it; pairs that lack a side, or divide by 0, are skipped."""
    return [v / c for v, c in zip(values, controls, strict=True) if v is not None and c]


def judge(ratio: Estimate | None, better: Better) -> Verdict:
    """What a ratio of two modes says of the first one: ahead, behind, or even: the interval does not rule out 1.

    Empty where neither direction is better, or nothing was measured. With fewer than six pairs `Estimate.sure` says
    how little an interval is worth; the verdict does not.
    """
    if ratio is None or better == "neither":
        return ""
    if ratio.holds(1.0):
        return "even"
    return "ahead" if (ratio.low > 1) == (better == "more") else "behind"


def spread(values: Sequence[float]) -> float:
    """How far the middle half of the measurements reaches, as a part of their median: (Q3 - Q1) / median.

    0 with fewer than two measurements, or a median of 0.
    """
    middle = statistics.median(values) if values else 0.0
    if len(values) < 2 or not middle:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / middle
