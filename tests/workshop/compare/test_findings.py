"""What a run comes to: rows with known answers, warnings about what is not certain."""

from __future__ import annotations

import msgspec
import pytest

from hybrid_proxy.workshop.compare.findings import findings, shown
from hybrid_proxy.workshop.compare.result import Run
from tests.workshop.compare.kit import MACHINE, made_up, swung


def test_ratios_are_of_the_round_and_not_of_the_day() -> None:
    row = findings(made_up()).row("connections", "nftables", 1000)
    assert row is not None
    assert row.ratio is not None
    assert row.lead is not None
    assert row.ratio.median == pytest.approx(0.85, rel=0.01)
    assert row.lead.median == pytest.approx(1.05 / 0.85, rel=1e-6)
    assert row.lead.high - row.lead.low < 1e-9, "the wobble of a round is in both sides of its ratio"
    assert row.verdict == "ahead"


def test_less_time_is_ahead_too() -> None:
    found = findings(made_up())
    for metric in ("latency_p99", "change", "start", "memory"):
        row = found.row(metric, "iptables", 10)
        assert row is not None
        assert row.verdict == "ahead", metric


def test_a_mode_that_is_behind_is_reported() -> None:
    found = findings(made_up(modes=("iptables", "ebpf")))
    row = found.row("requests", "ebpf", 10)
    assert row is not None
    assert row.verdict == "behind"
    for standing in found.standings:
        assert (standing.ahead, standing.behind, standing.even) == (0, 17, 0)


def test_a_mode_that_does_not_work_has_rows_with_the_reason() -> None:
    found = findings(made_up(modes=("ebpf", "ipvs"), broken={"ipvs": "the kernel has no IPVS"}))
    row = found.row("connections", "ipvs", 10)
    assert row is not None
    assert row.value is None
    assert "the kernel has no IPVS" in row.missing
    assert any("ipvs does not work" in note for note in found.notes)


def test_an_unfinished_run_says_so() -> None:
    run = made_up(upto=7)
    found = findings(run)
    assert not run.complete
    assert any("7 of 108" in warning for warning in found.warnings)
    row = found.row("connections", "iptables", 1000)
    assert row is not None
    assert row.missing == "not measured yet"


@pytest.mark.parametrize("modes", [("ebpf", "nftables", "iptables"), ("nftables",)], ids=["several modes", "one mode"])
def test_few_rounds_are_not_sure(modes: tuple[str, ...]) -> None:
    for rounds, sure in ((1, "0 %"), (2, "50 %"), (3, "75 %")):
        warnings = findings(made_up(modes=modes, rounds=rounds)).warnings
        assert any("Too few rounds" in warning and f" {sure} " in warning for warning in warnings)
    assert not any("Too few" in warning for warning in findings(made_up(modes=modes)).warnings)


def test_a_row_keeps_each_pair() -> None:
    found = findings(swung(made_up(modes=("ebpf", "nftables")), "nftables", (1.0, 2.0)))
    row = found.row("requests", "nftables", 10)
    assert row is not None
    assert row.points == pytest.approx([0.85, 1.7] * 3, rel=0.01), "in times of the control"
    row = found.row("start", "nftables", 10)
    assert row is not None
    assert row.points == pytest.approx([1.05 / 0.85, 2.1 / 0.85] * 3, rel=0.01), "in times of the first mode"
    first = found.row("start", "ebpf", 10)
    assert first is not None
    assert first.points == ()


def test_noise_that_is_larger_than_the_difference_is_called_that() -> None:
    run = made_up(modes=("ebpf", "nftables"), speed={"ebpf": 1.0, "nftables": 1.0})
    found = findings(swung(run, "ebpf", (0.8, 1.3)))  # now one, now the other is faster
    row = found.row("connections", "nftables", 10)
    assert row is not None
    assert row.verdict == "even"
    assert any("noise is larger than the difference" in note for note in found.notes)


def test_a_control_that_spreads_means_a_busy_machine() -> None:
    run = made_up()
    assert not any("not quiet" in note for note in findings(run).notes)
    cells = [
        msgspec.structs.replace(
            cell, controls={name: value * (1 + cell.step.round) for name, value in cell.controls.items()}
        )
        for cell in run.cells
    ]
    assert any("not quiet" in note for note in findings(msgspec.structs.replace(run, cells=tuple(cells))).notes)


def test_an_emulated_machine_is_reported_first() -> None:
    emulated = msgspec.structs.replace(MACHINE, emulated=True)
    assert "emulated" in findings(made_up(machine=emulated)).warnings[0]


def test_a_run_survives_a_file() -> None:
    run = made_up()
    assert msgspec.json.decode(msgspec.json.encode(run), type=Run) == run


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123")]
)
def test_numbers_have_few_digits(value: float, text: str) -> None:
    assert shown(value) == text
