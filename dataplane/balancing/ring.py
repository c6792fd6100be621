"""PURE. The common part of algorithms: their description, and places divided by shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from math import gcd
from typing import NamedTuple

from hybrid_proxy.dataplane.table import Backend

Ring = Callable[[Sequence[Backend], Sequence[int], int], list[int]]  # backends, shares, limit -> positions


class Spread(Enum):
    """The way in which the datapath chooses a place in a ring."""

    RANDOM = "random"  # a random number
    TUPLE = "tuple"  # a hash of client and service address, ports and protocol: the same on every node
    CLIENT = "client"  # a hash of the client's address: the same on every node
    IN_TURN = "in turn"  # a counter of the service port
    FEWEST = "fewest flows"  # of several random numbers that of the backend with the fewest open flows


class Algorithm(NamedTuple):
    """One algorithm.

    `description` says what decides; the weights of backends count in each.
    """

    name: str
    description: str
    spread: Spread
    ring: Ring


def divide(shares: Sequence[int], places: int) -> list[int]:
    """Divides places by shares, by the largest remainder; everybody gets at least one."""
    counts = [1] * len(shares)
    large = list(range(len(shares)))
    left, total = max(places, len(shares)), sum(shares)
    while small := {i for i in large if shares[i] * left < total}:  # less than a place: those have theirs
        left, total = left - len(small), total - sum(shares[i] for i in small)
        large = [i for i in large if i not in small]
    for i in large:
        counts[i] = shares[i] * left // total
    rest = left - sum(counts[i] for i in large)
    for i in sorted(large, key=lambda i: (-(shares[i] * left % total), i))[:rest]:
        counts[i] += 1
    return counts


def turns(backends: Sequence[Backend], shares: Sequence[int], limit: int) -> list[int]:
    """Returns positions in which each occurs by its share, evenly spaced; as short as the shares allow.

    Shares that need more than `limit` places are rounded to that many. A `Ring` in which nothing else counts.
    """
    if min(shares) == max(shares):
        return list(range(len(shares)))
    common = gcd(*shares)
    counts = [share // common for share in shares]
    if sum(counts) > max(limit, len(shares)):
        counts = divide(shares, limit)
    return in_turns(counts)


def in_turns(counts: Sequence[int]) -> list[int]:
    """Returns each position as often as its count says, evenly spaced.

    The k-th turn of position i is after (k + i / n) / count of the way: positions with the same few turns have them at
    different times.
    """
    number = len(counts)
    if min(counts) == max(counts):
        return list(range(number)) * counts[0]
    # Imported here: callers that only need an algorithm's name or description must not wait for numpy.
    import numpy as np

    times = np.asarray(counts, dtype=np.int64)
    who = np.repeat(np.arange(number), times)
    nth = np.arange(len(who)) - np.repeat(np.cumsum(times) - times, times)
    found: list[int] = who[np.lexsort((who, (nth + (who + 0.5) / number) / times[who]))].tolist()
    return found
