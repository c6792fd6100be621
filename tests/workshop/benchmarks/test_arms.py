"""Arms of benchmarks of exchanges: their names, their controls, and what their rounds say."""

from __future__ import annotations

import pytest

from hybrid_proxy.workshop.benchmarks.arms import Arm, Node, Quartiles, Round, arms_of, parse, rows, table
from hybrid_proxy.workshop.benchmarks.exchanges import BENCHES


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("default:service", Arm(Node("default"), "service")),
        ("always+firewall:direct", Arm(Node("always", firewall=True), "direct")),
        ("iptables+10000:service", Arm(Node("iptables", services=10_000), "service")),
        ("nftables+firewall+100:nodeport", Arm(Node("nftables", firewall=True, services=100), "nodeport")),
    ],
)
def test_a_name_says_what_the_arm_is(text: str, arm: Arm) -> None:
    assert parse(text) == arm
    assert str(arm) == text


@pytest.mark.parametrize("text", ["", "default", "default:", ":service", "cilium:service", "default+wall:service"])
def test_another_name_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ValueError, match=r"NODE\[\+firewall\].*kube-proxy-nftables.*nodeport"):
        parse(text)


def test_each_benchmark_has_arms_that_there_are_and_targets_of_them() -> None:
    for name, bench in BENCHES.items():
        assert [str(parse(arm)) for arm in bench.arms] == list(bench.arms), name
        assert set(bench.targets) <= set(bench.arms), name


def test_controls_come_first_and_an_agents_arm_once_for_each_tree() -> None:
    listed = [str(arm) for arm in arms_of(["always+firewall:service", "floor-always:nodeport"], ["old", "new"])]
    assert listed == [
        "bare+firewall:direct",
        "bare:outside",
        "always+firewall@old:service",
        "always+firewall@new:service",
        "floor-always:nodeport",
    ]


def test_rounds_are_compared_in_pairs_so_that_a_slower_hour_changes_nothing() -> None:
    control, old, new = arms_of(["default:service"], ["old", "new"])
    speeds = [1.0, 1.0, 3.0, 9.0]
    found = rows({arm: [Round(cost * speed, 1e6 / cost) for speed in speeds] for arm, cost in
                  ((control, 50.0), (old, 62.5), (new, 40.0))})  # fmt: skip
    assert found[old].ratio == (0.8, 0.8, 0.8)
    assert found[new].ratio == (1.25, 1.25, 1.25)
    assert found[new].gain == (1.5625, 1.5625, 1.5625)
    assert found[old].gain is None
    assert (found[new].rate, found[new].slowest, found[new].failed) == (25_000, 25_000, 0)
    assert found[control].cpu.median == 100


def test_quartiles_lie_around_the_median() -> None:
    assert Quartiles.of([5, 1, 4, 2, 3]) == (2, 3, 4)
    assert Quartiles.of([7]) == (7, 7, 7)


def test_the_table_has_a_line_for_each_arm() -> None:
    arms = arms_of(["default:service"])
    lines = table(rows({arm: [Round(50.0, 20_000.0)] for arm in arms}))
    assert [line.split()[0] for line in lines] == ["arm", "bare:direct", "default:service"]
    assert "1.000 (1.000 to 1.000)" in lines[-1]
    assert "20,000" in lines[-1]
