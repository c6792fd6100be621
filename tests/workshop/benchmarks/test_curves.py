"""How a figure grows, and the plot of it."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from hybrid_proxy.workshop.benchmarks.curves import PUBLISHED, drawn, exponent


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_is_the_power_of_the_size(power: float) -> None:
    assert exponent([(size, 3 * size**power) for size in (10, 1000, 70_000)]) == pytest.approx(power)


def test_one_size_says_nothing_of_growth() -> None:
    assert exponent([(10, 3.0)]) == 0


def test_every_mode_has_both_curves_and_kube_proxys_points_are_marked() -> None:
    text = drawn([("ebpf", 20, 0.5, 1.0), ("ebpf", 1_050_000, 12.0, 2.0), ("nftables", 20, 0.6, 3.0)])
    texts = [element.text for element in ET.fromstring(text).iter() if element.tag.endswith("text")]
    assert {"ebpf, start", "ebpf, change", "nftables, start", "nftables, change"} < set(texts)
    assert {one.text for one in PUBLISHED} < set(texts)
