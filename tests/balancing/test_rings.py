"""What is true of the ring of every algorithm, and the order of turns."""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_proxy.dataplane.balancing import (
    ALGORITHMS,
    ALIASES,
    CHOICES,
    KNOWN,
    SCHEDULERS,
    Spread,
    canonical,
    find,
    ring_of,
)
from hybrid_proxy.dataplane.balancing.ring import divide, in_turns, turns
from hybrid_proxy.dataplane.table import Backend
from tests.balancing.make import LIMIT, backends, counted, several, weights
from tests.docs.pages import table

every = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())


def test_the_page_has_a_row_for_every_algorithm():
    rows = " ".join(table("docs/algorithms.md", "| name | where"))
    assert set(re.findall(r"`(.+?)`", rows)) == KNOWN | ALIASES.keys(), "docs/algorithms.md differs from the code"


@every
@settings(deadline=None)
@given(given_backends=several, data=st.data())
def test_every_backend_is_in_the_ring_and_nothing_else(algorithm, given_backends, data):
    weighed = [msgspec.structs.replace(b, weight=data.draw(st.integers(1, 1000))) for b in given_backends]
    ring = ring_of(algorithm, weighed, 1021)
    assert set(ring) == set(range(len(weighed)))
    assert len(ring) <= 1021


@every
@pytest.mark.parametrize("limit", [1, 251, LIMIT])
def test_no_and_one_backend_need_no_ring(algorithm, limit):
    assert ring_of(algorithm, [], limit) == []
    assert ring_of(algorithm, backends(1, weight=5), limit) == [0]


@every
def test_more_backends_than_places_still_have_one_each(algorithm):
    assert set(ring_of(algorithm, backends(400), 251)) == set(range(400))


@pytest.mark.parametrize("name", ["random", "rr", "wrr", "lc", "wlc"])
def test_equal_backends_need_a_place_each(name):
    assert ring_of(ALGORITHMS[name], backends(7, weight=3), LIMIT) == list(range(7))


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(deadline=None)
@given(given_weights=weights)
def test_places_follow_weights(name, given_weights):
    made = [Backend(f"10.0.0.{n}", 80, weight=weight) for n, weight in enumerate(given_weights)]
    ring = ring_of(ALGORITHMS[name], made, LIMIT)
    tiny = sum(1 for weight in given_weights if weight * len(ring) < sum(given_weights))
    for places, weight in zip(counted(ring, len(made)), given_weights, strict=True):
        share = weight / sum(given_weights) * len(ring)
        assert abs(places - share) <= 1 + tiny, "to a place, and those below one have one"


@pytest.mark.parametrize(("name", "weighing"), [("rr", "wrr"), ("lc", "wlc")])
def test_with_weights_some_are_what_weighs(name, weighing):
    made = [Backend("10.0.0.1", 80, weight=9), Backend("10.0.0.2", 80)]
    assert ring_of(ALGORITHMS[name], made, LIMIT) == ring_of(ALGORITHMS[weighing], made, LIMIT)


def test_places_of_small_shares_are_taken_from_the_others():
    assert divide([1, 1, 1, 10, 10], 10) == [1, 1, 1, 4, 3]


def test_turns_are_apart():
    assert in_turns([2, 2]) == [0, 1, 0, 1]
    assert turns((), [1, 1, 1], LIMIT) == [0, 1, 2]
    assert turns((), [1, 1, 1, 7], LIMIT) == [0, 3, 3, 1, 3, 3, 2, 3, 3, 3]
    assert turns((), [2, 4, 6], LIMIT) == turns((), [1, 2, 3], LIMIT), "the shortest ring that says the same"


@settings(deadline=None)
@given(weights)
def test_between_two_turns_of_one_others_have_theirs(given_weights):
    """Not more than their shares, and one each."""
    ring = turns((), given_weights, 2039)
    counts = counted(ring, len(given_weights))
    for position, count in enumerate(counts):
        places = [place for place, who in enumerate(ring + ring) if who == position]
        widest = max(after - before for before, after in pairwise(places))
        assert widest <= len(ring) / count + len(counts) + 1


@settings(deadline=None)
@given(weights, st.integers(1, 5000))
def test_places_are_divided_without_rest(given_weights, places):
    counts = divide(given_weights, places)
    assert sum(counts) == max(places, len(given_weights))
    assert min(counts) >= 1
    pairs = sorted(zip(given_weights, counts, strict=True))
    assert all(lighter[1] <= heavier[1] for lighter, heavier in pairwise(pairs))


def test_names_are_those_of_ipvs_or_lead_to_one():
    strange = set(ALGORITHMS) - {"random"} - set(SCHEDULERS)
    assert not strange, f"mode ipvs has no scheduler {strange}: take the name of one that IPVS has (ipvsadm -s)"
    assert {canonical(name) for name in ALIASES} <= set(ALGORITHMS)
    assert all(canonical(name) == name for name in (*ALGORITHMS, *SCHEDULERS)), "the table has the canonical name"
    assert all(find(name) is algorithm for name, algorithm in ALGORITHMS.items())
    assert CHOICES[0] == "random"


def test_schedulers_without_an_equivalent_are_known():
    assert {name for name in SCHEDULERS if find(name) is None} == {"dh", "lblc", "lblcr", "fo", "ovf"}
    assert [find(name) for name in ("sed", "nq", "twos")] == [ALGORITHMS["wlc"]] * 3


def test_what_decides_of_each():
    spreads = {name: algorithm.spread for name, algorithm in ALGORITHMS.items()}
    assert spreads == {
        "random": Spread.RANDOM, "rr": Spread.IN_TURN, "wrr": Spread.IN_TURN, "lc": Spread.FEWEST,
        "wlc": Spread.FEWEST, "sh": Spread.CLIENT, "mh": Spread.TUPLE,
    }, "each algorithm has a row here"  # fmt: skip
