"""Where the marks of the plots are."""

from __future__ import annotations

import itertools
import re

import msgspec
import pytest

from hybrid_proxy.workshop.compare.pages import html
from hybrid_proxy.workshop.compare.plots import Axis, Mark, Panel, curves, distributions, forest
from hybrid_proxy.workshop.compare.report import report
from hybrid_proxy.workshop.compare.result import Run
from tests.workshop.compare.kit import MACHINE, all_modes, made_up, swung


def marks(panel: Panel, title: str) -> dict[str, Mark]:
    item = next(item for item in panel.items if item.title == title)
    return {mark.label: mark for mark in item.marks}


def test_an_axis_is_logarithmic() -> None:
    axis = Axis(0.5, 2.0)
    assert [axis.place(value) for value in (0.5, 1, 2)] == [0, 50, 100]
    assert axis.place(4) > 100
    assert (axis.within(4), axis.within(0.1)) == (100, 0)
    assert [(tick.at, tick.text) for tick in axis.ticks((0.1, 1, 2, 4))] == [(50, "1"), (100, "2")]


def test_cost_is_first_and_each_group_has_one_side_that_is_better() -> None:
    panels = forest(report(made_up()), 1000)
    assert [(panel.title, panel.better, panel.one) for panel in panels] == [
        ("Cost and latency", "less", 50), ("Rates", "more", 50), ("The agent", "less", 50),
    ]  # fmt: skip
    assert panels[0].items[0].title == "cost of a connection"
    assert [len(panel.items) for panel in panels] == [9, 4, 4]


def test_an_interval_lies_around_its_median_between_all_pairs() -> None:
    run = swung(made_up(modes=("ebpf", "nftables")), "nftables", (0.9, 0.95, 1.0, 1.05, 1.1, 1.2))
    mark = marks(forest(report(run), 1000)[0], "cost of a connection")["nftables"]
    assert mark.span[0] < mark.at < mark.span[1]
    assert (min(mark.points), max(mark.points)) == mark.span, "of six pairs the interval is the whole range"
    assert len(mark.points) == 6
    assert mark.value == "1.21"
    assert mark.interval == "1.06-1.42"
    assert "1.21 × (1.06 to 1.42); 6 pairs, 97 % sure" in mark.tip


def test_what_is_no_difference_is_grey_and_its_value_stands_beside_it() -> None:
    run = swung(made_up(speed={"ebpf": 1.0, "nftables": 0.9, "iptables": 0.5}), "ebpf", (0.9, 1.1))
    found = marks(forest(report(run), 1000)[0], "cost of a connection")
    assert {label: mark.even for label, mark in found.items()} == {"ebpf": True, "nftables": False, "iptables": False}
    assert found["iptables"].absolute == "201 µs"
    assert not marks(forest(report(run), 1000)[2], "time to start")["ebpf"].even, "the measure itself"
    emulated = made_up(machine=msgspec.structs.replace(MACHINE, emulated=True))
    assert marks(forest(report(emulated), 1000)[0], "cost of a connection")["ebpf"].absolute == ""


def growing(run: Run, mode: str) -> Run:
    """The same, with changes of the mode that take as long as there are services."""
    cells = [
        msgspec.structs.replace(cell, values={**cell.values, "change": float(cell.step.size)})
        if cell.step.mode == mode and cell.step.kind == "change" else cell
        for cell in run.cells
    ]  # fmt: skip
    return msgspec.structs.replace(run, cells=tuple(cells))


def test_what_grows_with_the_services_is_a_curve() -> None:
    found = {curve.title: curve for curve in curves(report(growing(all_modes(), "iptables")))}
    assert list(found) == ["cost of a connection, µs", "time until a change takes effect, ms", "time to start, s",
                           "memory of the agent, MB"]  # fmt: skip
    lines = {line.mode: line for line in found["time until a change takes effect, ms"].lines}
    heights = [y for _, y, _, _ in lines["iptables"].points]
    assert heights == sorted(heights, reverse=True), "places are from the top"
    assert heights[0] - heights[1] == pytest.approx(2 * (heights[1] - heights[2]), abs=0.1), "10, 1,000, 10,000"
    assert lines["iptables"].label == "iptables 10,000"
    assert len({y for _, y, _, _ in lines["ebpf"].points}) == 1
    assert [tick.text for tick in found["time to start, s"].across] == ["10", "1,000", "10,000"]
    labels = sorted(line.label_at for line in found["cost of a connection, µs"].lines)
    assert len(labels) == 6, "and no proxy"
    assert all(upper + 8.9 < lower for upper, lower in itertools.pairwise(labels))


@pytest.mark.parametrize(
    "run", [made_up(sizes=(10,)), made_up(machine=msgspec.structs.replace(MACHINE, emulated=True))]
)
def test_without_several_sizes_or_with_times_that_mean_nothing_there_is_no_curve(run: Run) -> None:
    assert curves(report(run)) == []


def test_what_is_far_away_is_an_arrow_and_what_is_near_keeps_its_place() -> None:
    cost, rates, _ = forest(report(all_modes()), 10)
    far, near = marks(cost, "cost of a connection")["userspace"], marks(cost, "cost of a connection")["ebpf"]
    assert (far.off, far.value, far.points) == ("high", "5.01", ())
    assert near.off == ""
    assert 45 < near.at < 50
    assert marks(rates, "new connections")["userspace"].off == "low"


@pytest.mark.parametrize(("swing", "arrows", "drawn"), [
    ((1.0,) * 6, "", True),  # all of it is on the axis
    ((0.2, 0.3, 0.9, 1.1, 1.2, 1.3), "◀", True),  # the median is, an end of its interval is not
    ((0.9, 1.0, 1.1, 1.2, 4.0, 5.0), "▶", True),
    ((0.1, 0.2, 0.9, 1.1, 4.0, 5.0), "◀▶", True),
    ((4.0,) * 6, "▶", False),
])  # fmt: skip
def test_an_end_of_an_interval_that_is_cut_has_an_arrow(swing: tuple[float, ...], arrows: str, drawn: bool) -> None:
    page = html(report(swung(made_up(modes=("ebpf",), speed={"ebpf": 1.0}), "ebpf", swing)))
    mark = page.partition("<h4>cost of a connection</h4>")[2].partition("</svg>")[0]
    assert ("".join(re.findall("[◀▶]", mark)), 'class="dot"' in mark) == (arrows, drawn)


def test_without_a_control_the_first_mode_is_the_measure() -> None:
    agent = forest(report(made_up()), 10)[2]
    found = marks(agent, "time to start")
    assert (found["ebpf"].at, found["ebpf"].value, found["ebpf"].interval) == (50, "1.00", "")
    assert found["nftables"].value == "1.24"


def test_a_mode_alone_is_measured_by_its_control_only() -> None:
    panels = forest(report(made_up(modes=("nftables",))), 10)
    assert [panel.title for panel in panels] == ["Cost and latency", "Rates"]


def test_a_service_of_a_node_has_a_plot_of_what_was_measured() -> None:
    run = made_up(modes=("nftables",), sizes=(10,))
    live = msgspec.structs.replace(
        run,
        settings=msgspec.structs.replace(run.settings, live="default/web"),
        cells=tuple(
            msgspec.structs.replace(cell, step=msgspec.structs.replace(cell.step, kind="live"))
            for cell in run.cells
            if cell.step.kind == "traffic"
        ),
    )
    panels = forest(report(live), 10)
    assert panels[0].hint == "less is better; 1 = one of its endpoints"
    assert [next(item.title for item in panel.items) for panel in panels] == [
        "the machine's CPU for a connection", "new connections",
    ]  # fmt: skip


def test_the_histogram_counts_every_request() -> None:
    latency, _ = distributions(report(made_up(rounds=2)), 10)
    found = {mark.label: mark for mark in latency.items[0].marks}
    assert list(found) == ["no proxy", "ebpf", "nftables", "iptables"]
    run = made_up(rounds=2)
    one = sum(run.cells[3].latency.values())
    assert found["ebpf"].tip.startswith(f"{2 * one:,} requests; median 0.19")
    assert found["no proxy"].tip.startswith(f"{2 * 3 * one:,} requests; median 0.2"), "beside each of three modes"
    assert max(bar.height for bar in found["ebpf"].bars) == pytest.approx(100, abs=1)
    assert found["ebpf"].at < found["no proxy"].at < found["iptables"].at
    for mark in found.values():
        assert all(left.at + left.width == pytest.approx(right.at, abs=0.05) or right.at > left.at
                   for left, right in zip(mark.bars, mark.bars[1:], strict=False))  # fmt: skip


def test_every_change_is_a_point() -> None:
    _, changes = distributions(report(made_up(rounds=3)), 10)
    assert {mark.label: len(mark.points) for mark in changes.items[0].marks} == {
        "ebpf": 6,
        "nftables": 6,
        "iptables": 6,
    }


def test_a_run_without_traffic_has_no_distributions() -> None:
    assert distributions(report(made_up(upto=0)), 10) == []
    assert forest(report(made_up(upto=0)), 10) == []
