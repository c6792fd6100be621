"""Histograms of the time to first packet: their steps, and the bounded number of series that metrics get."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from hybrid_proxy.dataplane.first_packets import BOUNDS, STEPS, TICK, quantile
from hybrid_proxy.dataplane.modes.ebpf.maps.first_packets import FirstPackets, by_bound
from hybrid_proxy.workshop.top.rates import growth


def counted(seconds: NDArray[np.float64]) -> dict[int, int]:
    steps = np.searchsorted(BOUNDS, seconds * 1e9, side="right")
    return by_bound(np.bincount(steps, minlength=STEPS).astype(np.uint32))


def test_there_are_four_steps_for_each_octave() -> None:
    assert [bound // TICK for bound in BOUNDS[:9]] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert all(BOUNDS[step + 4] == 2 * BOUNDS[step] for step in range(3, STEPS - 4))
    assert 34 < BOUNDS[-1] / 1e9 < 35


@pytest.mark.parametrize("median", [0.00003, 0.0011, 0.25])
def test_a_median_that_is_ten_percent_higher_shows(median: float) -> None:
    times = median * np.random.default_rng(7).lognormal(0, 0.3, 20_000)
    before, after = (quantile(counted(times * by), 0.5) for by in (1.0, 1.1))
    assert before is not None
    assert after is not None
    assert before == pytest.approx(median, rel=0.04)
    assert 1.06 < after / before < 1.14


def test_quantiles_of_nothing_and_of_one() -> None:
    assert quantile({}, 0.99) is None
    assert quantile({BOUNDS[20]: 1}, 0.99) == pytest.approx(BOUNDS[20] / 1e9, rel=0.01)
    assert growth({BOUNDS[20]: 2}, {BOUNDS[20]: 5, BOUNDS[21]: 1}) == {BOUNDS[20]: 3, BOUNDS[21]: 1}
    assert growth({BOUNDS[20]: 2}, {BOUNDS[20]: 1}) is None


class Node:
    """Counts as the programs do, and reads as a scrape does."""

    def __init__(self, services: int, most: int) -> None:
        self.rows = np.zeros(services, [("counts", np.uint32, STEPS)])
        self.names = {number: f"d/s{number}:p" for number in range(1, services)}
        self.packets = FirstPackets(lambda: self.rows, counting=True, most=most)

    def scrape(self, **added: int) -> dict[str, int]:
        for name, count in added.items():
            with np.errstate(over="ignore"):
                self.rows["counts"][int(name[1:]), 30] += np.uint32(count)
        read = self.packets.series(self.names)
        return {name.removeprefix("d/").removesuffix(":p"): sum(row) for name, row in read.items()}


def test_every_first_packet_is_in_one_series_which_grows() -> None:
    node = Node(6, 2)
    assert node.scrape(s1=100, s2=50, s3=5).keys() == {"s1", "s2", "others"}
    assert node.scrape(s1=10, s2=10, s3=10) == {"s1": 10, "s2": 10, "others": 10}
    assert node.scrape(s3=1000) == {"s1": 10, "s3": 0, "others": 1010}  # it takes the place of the least busy one
    assert node.scrape(s3=7, s2=2) == {"s1": 10, "s3": 7, "others": 1012}


def test_one_that_is_a_little_busier_takes_no_place() -> None:
    node = Node(4, 1)
    node.scrape(s1=100)
    for _ in range(10):
        assert node.scrape(s1=100, s2=150).keys() == {"s1", "others"}


def test_counts_wrap_and_maps_are_copied() -> None:
    node = Node(3, 1)
    node.scrape(s1=1)
    total = 0
    for _ in range(3):
        total += 0x60000000
        assert node.scrape(s1=0x60000000) == {"s1": total, "others": 0}
    assert node.scrape(s1=10, s2=3) == {"s1": total + 10, "others": 3}
    node.rows["counts"][1, 30] -= 2  # what was counted while a larger map was filled is lost
    assert node.scrape() == {"s1": total + 10, "others": 3}
    node.rows = np.pad(node.rows, (0, 3))
    assert node.scrape(s1=1) == {"s1": total + 11, "others": 3}


def test_a_service_that_is_gone_has_no_series_and_its_number_is_anothers() -> None:
    node = Node(3, 1)
    node.scrape(s1=1)
    assert node.scrape(s1=9) == {"s1": 9, "others": 0}
    node.packets.give_back([1])
    node.names[1] = "d/new:p"
    assert node.scrape(s1=4) == {"new": 0, "others": 4}
    assert node.scrape(s1=4) == {"new": 4, "others": 4}


def test_both_families_of_a_service_port_are_one_series() -> None:
    node = Node(4, 1)
    node.names[2] = node.names[1]
    node.scrape(s1=5)
    assert node.scrape(s1=3, s2=4) == {"s1": 7, "others": 0}
