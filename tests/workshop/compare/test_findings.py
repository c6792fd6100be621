"""What a run comes to: rows with known answers, warnings about what is not certain."""

from __future__ import annotations

import msgspec
import pytest

from hybrid_proxy.workshop.compare import plan
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
    assert sum(known.verdict == "behind" for known in found.rows) == 2 * 17


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


def test_three_rounds_of_two_turns_show_differences_of_loads_alone() -> None:
    """As docs/compare.md, the help of --rounds and both reports say."""
    found = findings(made_up(rounds=3, turns=2))
    rows = [row for row in found.rows if row.verdict]
    differ = {plan.metric(row.metric).kind for row in rows if row.verdict != "even"}
    assert (differ, {plan.metric(row.metric).kind for row in rows}) == ({"traffic"}, {"traffic", "start", "change"})


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


def busy(run: Run, parts: int) -> Run:
    """The same, with the controls of so many metrics of each step spread far."""
    cells = []
    for cell in run.cells:
        loud = {name: value * (1 + cell.step.round) for name, value in list(cell.controls.items())[:parts]}
        cells.append(msgspec.structs.replace(cell, controls={**cell.controls, **loud}))
    return msgspec.structs.replace(run, cells=tuple(cells))


@pytest.mark.parametrize(
    ("run", "trust", "words"),
    [
        pytest.param(made_up(), "good", "spread by 2 % at most", id="quiet"),
        pytest.param(busy(made_up(), 1), "limited", "(up to 81 %) in cost of a connection.", id="one row is noisy"),
        pytest.param(busy(made_up(), 99), "poor", "(up to 81 %) in 13 of 13 rows.", id="all rows are noisy"),
        pytest.param(made_up(upto=40), "limited", "40 of 108", id="not finished"),
        pytest.param(made_up(rounds=3), "limited", "75 % only", id="few rounds"),
        pytest.param(made_up(machine=msgspec.structs.replace(MACHINE, emulated=True)), "poor", "emulated", id="VM"),
    ],
)
def test_how_far_a_run_can_be_trusted(run: Run, trust: str, words: str) -> None:
    found = findings(run)
    assert found.trust == trust
    assert any(words in warning for warning in found.warnings), found.warnings


def test_many_comparisons_differ_at_random_too() -> None:
    """Six pairs on one side of 1 have a probability of 1/32; fewer are never significant."""
    random = "; at random alone, about {} would."
    for rounds, differ, wrong in ((6, "68", random.format(2)), (5, " 0", "."), (1, " 0", ".")):
        assert findings(made_up(rounds=rounds)).warnings[-1].endswith(f"{differ} differ significantly{wrong}")
    alike = made_up(modes=("ebpf", "nftables"), speed={"ebpf": 1.0, "nftables": 1.0})
    none = findings(swung(alike, "ebpf", (0.8, 1.3))).warnings[-1]
    assert none == f"Of 34 comparisons, 0 differ significantly{random.format(1)}"


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
