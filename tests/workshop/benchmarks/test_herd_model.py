"""The model of many agents: what it must get right whatever the figures are."""

from __future__ import annotations

import random
from xml.etree import ElementTree as ET

import pytest

from hybrid_proxy.controller.kubernetes.model import KINDS
from hybrid_proxy.workshop.benchmarks.herd_model import Costs, Outcome, Servers, simulate
from hybrid_proxy.workshop.benchmarks.herd_plot import Line, drawn

COSTS = Costs({"EndpointSlice": 4_000_000, "Service": 1_000_000, "Node": 1_000, "ServiceCIDR": 1_000}, program=1.0)


def run(nodes: int, servers: Servers, away: float = 0.0) -> Outcome:
    return simulate(nodes, servers, COSTS, random.Random(1).random, away=away)


def test_one_agent_takes_as_long_as_its_bytes() -> None:
    found = run(1, Servers(number=1, rate=1e6))
    assert found.refused == 0
    assert found.requests == len(KINDS)
    assert found.converged == pytest.approx(5.0 + COSTS.program + COSTS.start, abs=COSTS.apart + 0.01)


def test_nobody_is_faster_than_the_servers_can_send() -> None:
    found = run(200, Servers(number=2, seats=20, queue=20, rate=100e6))
    assert found.converged > 200 * 5e6 / 200e6
    assert found.refused > 0
    assert found.converged < 40, "and all get there"


def test_agents_that_read_slowly_keep_their_seats() -> None:
    """100 lists of ten seats each, one second long: two at a time on 20 seats, four once 40 are lent."""
    costs = Costs({"EndpointSlice": 1, "Service": 1, "Node": 1, "ServiceCIDR": 1}, program=0.0,
                  read={"EndpointSlice": 1.0}, seats={"EndpointSlice": 10}, start=0.0, apart=0.0)  # fmt: skip
    patient = Servers(number=1, seats=20, borrowed=20, queue=1000, patience=1000.0)
    alone = simulate(100, patient, costs, random.Random(1).random)
    lent = simulate(100, patient._replace(borrowed=40), costs, random.Random(1).random)
    assert alone.refused == lent.refused == 0
    assert alone.converged == pytest.approx(50, abs=2)
    assert lent.converged == pytest.approx(10 + 20, abs=2)


def test_an_agent_reads_one_kind_at_a_time() -> None:
    costs = Costs(dict.fromkeys(KINDS, 1), program=0.0, read=dict.fromkeys(KINDS, 2.0), start=0.0, apart=0.0)
    assert simulate(3, Servers(), costs, random.Random(1).random).converged == pytest.approx(2.0 * len(KINDS), abs=0.01)


def test_who_is_refused_does_not_come_back_each_second() -> None:
    found = run(300, Servers(number=1, seats=5, queue=5, rate=30e6))
    assert found.converged > 50
    assert found.refused < 300 * 20, "far fewer than one a second and kind"


def test_of_an_agent_that_starts_one_kind_asks_until_it_is_let_in() -> None:
    found = run(300, Servers(number=1, seats=5, queue=5, rate=30e6))
    assert sum(found.by_second[second] for second in (0, 1)) < 1.5 * 300
    assert run(1, Servers()).done == [pytest.approx(COSTS.start + COSTS.program, abs=COSTS.apart + 0.01)]


def test_a_server_that_comes_back_is_asked_by_all_but_not_at_once() -> None:
    found = run(300, Servers(number=1, rate=1e9), away=20.0)
    assert min(found.by_second) >= 20, "what is refused by no server reaches none"
    assert found.converged < 20 + 35
    assert found.peak < 300 * len(KINDS) / 2


def test_every_line_of_the_plot_says_when_all_serve() -> None:
    text = drawn([Line("a few", 3, [1.0, 2.0, 43.0]), Line("not all", 3, [1.0, 2.0])], 60)
    texts = [element.text for element in ET.fromstring(text).iter() if element.tag.endswith("text")]
    assert {"a few", "all after 43 s", "not all", "2 of them", "100 s"} < set(texts)
