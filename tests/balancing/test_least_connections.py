"""Shares by load, alone and in a simulation of some minutes."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_proxy.dataplane.balancing import ALGORITHMS, ring_of
from hybrid_proxy.dataplane.balancing.least_connections import FAIR, shares
from tests.balancing.make import LIMIT, backends

loads = st.lists(st.integers(0, 100_000), min_size=2, max_size=60)


@settings(deadline=None)
@given(loads)
def test_every_backend_gets_connections_and_none_is_flooded(given_loads):
    found = shares([1] * len(given_loads), given_loads, [None] * len(given_loads))
    assert min(found) >= 1
    assert max(found) <= 4 * FAIR


@settings(deadline=None)
@given(loads)
def test_who_has_more_gets_no_more(given_loads):
    found = shares([1] * len(given_loads), given_loads, [None] * len(given_loads))
    pairs = sorted(zip(given_loads, found, strict=True))
    assert all(a[1] >= b[1] for a, b in pairwise(pairs) if a[0] < b[0])


def test_equal_loads_are_fair():
    assert shares([1, 1, 1], [50, 50, 50], [None] * 3) == [FAIR] * 3


def test_weights_divide_equal_fill():
    """Loads as the weights are: the shares are the weights."""
    found = shares([3, 1], [300, 100], [None] * 2)
    assert found == [24, 8]


def test_half_of_the_way_at_a_time():
    aim = shares([1, 1], [30, 10], [None, None])
    half = shares([1, 1], [30, 10], [FAIR, FAIR])
    assert [abs(2 * part - FAIR - end) <= 1 for part, end in zip(half, aim, strict=True)] == [True, True]
    steps = [half]
    for _ in range(6):
        steps.append(shares([1, 1], [30, 10], steps[-1]))
    assert steps[-1] == aim, "it arrives"


class Simulation:
    """Connections of given durations, in steps of a scan's interval divided by ten."""

    def __init__(self, durations: list[float], rate: int) -> None:
        self.durations, self.rate = durations, rate
        self.ends: list[list[float]] = [[] for _ in durations]
        self.before: list[int | None] = [None] * len(durations)
        self.rng = random.Random(7)
        self.now = 0.0
        self.got: Counter[int] = Counter()

    def loads(self) -> list[int]:
        self.ends = [[end for end in ends if end > self.now] for ends in self.ends]
        return [len(ends) for ends in self.ends]

    def scans(self, number: int) -> list[list[int]]:
        seen = []
        count = len(self.durations)
        for _ in range(number):
            loads = self.loads()
            seen.append(loads)
            found = shares([1] * count, loads, self.before)
            self.before = list(found)
            made = backends(count)
            of_sockets = {(backend.address, backend.port): share for backend, share in zip(made, found, strict=True)}
            ring = ring_of(ALGORITHMS["lc"], made, LIMIT, of_sockets)
            for _ in range(10):
                self.now += 0.5
                for _ in range(self.rate // 2):
                    chosen = ring[self.rng.randrange(len(ring))]
                    self.got[chosen] += 1
                    self.ends[chosen].append(self.now + self.durations[chosen] * self.rng.expovariate(1))
        return seen


@pytest.mark.parametrize("duration", [0.2, 3.0, 60.0])
def test_backends_of_one_speed_stay_even(duration):
    """No swing from one to the other, whether connections are shorter or longer than the interval of scans."""
    simulation = Simulation([duration] * 4, 400)
    seen = simulation.scans(40)[10:]
    for loads in seen:
        mean = sum(loads) / len(loads)
        assert all(abs(load - mean) <= 0.25 * mean + 20 for load in loads), loads


def test_a_slow_backend_gets_fewer_and_holds_less_than_at_random():
    simulation = Simulation([1, 1, 1, 8], 400)
    simulation.scans(10)
    simulation.got.clear()
    simulation.scans(30)
    total = sum(simulation.got.values())
    assert simulation.got[3] / total < 0.15, "a quarter at random"
    loads = simulation.loads()
    assert loads[3] / loads[0] < 4.5, "eight times as many at random"


def test_a_backend_that_never_ends_a_connection_is_hardly_used():
    simulation = Simulation([1, 1, 1, 1e9], 100)
    simulation.scans(20)
    simulation.got.clear()
    simulation.scans(20)
    assert simulation.got[3] / sum(simulation.got.values()) <= 1 / FAIR / 4 * 1.6, (
        "a sixteenth of its quarter, and chance"
    )


def test_a_new_backend_beside_long_connections_catches_up():
    simulation = Simulation([300, 300, 300], 60)
    simulation.scans(60)
    simulation.durations.append(300)
    simulation.ends.append([])
    simulation.before.append(None)
    simulation.scans(60)
    loads = simulation.loads()
    assert loads[3] > 0.8 * sum(loads[:3]) / 3, loads
