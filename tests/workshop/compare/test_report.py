"""The sentences at the top of a report, and the report as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from hybrid_proxy.controller import cli
from hybrid_proxy.workshop.compare.commands import whole
from hybrid_proxy.workshop.compare.pages import html, markdown
from hybrid_proxy.workshop.compare.plan import METRICS
from hybrid_proxy.workshop.compare.progress import Progress
from hybrid_proxy.workshop.compare.report import Report, report
from hybrid_proxy.workshop.compare.result import Run
from hybrid_proxy.workshop.compare.state import opened
from hybrid_proxy.workshop.compare.tables import ends
from hybrid_proxy.workshop.measuring.machine import not_installed
from hybrid_proxy.workshop.measuring.stats import Estimate
from tests.workshop.compare.kit import EVERY, MACHINE, all_modes, made_up, swung
from tests.workshop.compare.test_findings import busy


def needs(run: Run) -> str:
    return report(run).summary[0]


def two(nftables: float, swing: tuple[float, ...] = (1.0,)) -> Run:
    """ebpf, whose figures swing from round to round, and nftables with so much of its speed."""
    run = made_up(modes=("ebpf", "nftables"), sizes=(1000,), speed={"ebpf": 1.0, "nftables": nftables})
    return swung(run, "ebpf", swing)


@pytest.mark.parametrize(
    ("nftables", "swing", "words"),
    [
        pytest.param(0.86, (0.97, 1.0, 1.03), "14 % less CPU for a connection than nftables (11-17 %)", id="less"),
        pytest.param(1.25, (0.96, 1.0, 1.04), "25 % more CPU for a connection than nftables (20-30 %)", id="more"),
        pytest.param(1.006, (1,), "0.6 % more CPU for a connection than nftables (0.6 %)", id="hardly more"),
        pytest.param(
            1.0, (0.96, 1.0, 1.03), "about as much CPU for a connection as nftables (4 % less to 3 % more)", id="even"
        ),
        pytest.param(
            0.86,
            (0.69, 1.0, 1.2),
            "14 % less CPU for a connection than nftables (no significant difference: 41 % less to 3 % more)",
            id="perhaps less",
        ),
        pytest.param(
            3.0, (0.9, 1.0, 1.1), "3.0 times as much CPU for a connection as nftables (2.7-3.3)", id="several times"
        ),
    ],
)
def test_the_first_sentence_is_of_cost(nftables: float, swing: tuple[float, ...], words: str) -> None:
    assert needs(two(nftables, swing)) == f"With 1,000 services, ebpf needs {words}."


@pytest.mark.parametrize(
    ("rounds", "words"), [(1, "nftables (measured once)"), (2, "nftables (19 %, 50 % sure)"), (6, "nftables (19 %)")]
)
def test_an_interval_of_few_pairs_says_how_sure_it_is(rounds: int, words: str) -> None:
    assert words in needs(made_up(modes=("ebpf", "nftables"), rounds=rounds))


@pytest.mark.parametrize(
    ("modes", "rounds", "words"),
    [
        pytest.param(("ebpf", "nftables"), 5, "Each row is judged alone.", id="94 %"),
        pytest.param(("ebpf", "nftables"), 6, "at all, one row in 32 is still called", id="97 %"),
        pytest.param(("ebpf",), 6, "Each row is judged alone.", id="nothing to judge"),
    ],
)
def test_chance_is_that_of_the_intervals(modes: tuple[str, ...], rounds: int, words: str) -> None:
    page = report(made_up(modes=modes, rounds=rounds))
    assert words in markdown(page)
    assert words in html(page)


def test_figures_of_a_poor_run_are_no_promises() -> None:
    quiet, poor = report(made_up()), report(busy(made_up(), 99))
    assert ("ebpf needs" in quiet.summary[0], "ebpf may need" in poor.summary[0]) == (True, True)
    assert "disturbs it less than rates" in markdown(quiet)
    assert "disturbs it less" not in markdown(poor)
    assert "Trust ratios" not in " ".join(poor.findings.warnings)
    pages = {"quiet": html(quiet), "poor": html(poor)}
    forest = {name: page.partition('id="forest"')[2].partition("</section>\n\n")[0] for name, page in pages.items()}
    coloured = {name: re.findall(r'class="(mark of-[\w-]+)"|class="(better)"', text) for name, text in forest.items()}
    assert (bool(coloured["quiet"]), coloured["poor"]) == (True, []), "grey, and no side is the better one"
    assert re.search('class="mark of-[^"]* even"', forest["poor"])
    assert [bool(re.search('<small class="(ahead|behind)">', page)) for page in pages.values()] == [True, False]


def test_where_nothing_else_is_known_the_cost_is_that_of_the_machine() -> None:
    run = two(0.5)
    cells = [msgspec.structs.replace(cell, values=without(cell.values, "connection_cost")) for cell in run.cells]
    run = msgspec.structs.replace(run, cells=tuple(cells))
    assert "50 % less CPU of the machine for a connection" in needs(run)


def without(values: Mapping[str, float], name: str) -> dict[str, float]:
    return {known: value for known, value in values.items() if known != name}


def test_all_other_modes_are_in_one_sentence() -> None:
    assert needs(made_up()) == (
        "With 1,000 services, ebpf needs 19 % less CPU for a connection than nftables (19 %) and 24 % less than "
        "iptables (24 %)."
    )


def test_the_second_sentence_is_of_what_it_costs() -> None:
    assert report(made_up()).summary[1] == "It is significantly behind in nothing."
    few = report(made_up(rounds=2))
    assert "ebpf may need 19 % less CPU for a connection than nftables (19 %, 50 % sure)" in few.summary[0]
    assert few.summary[1] == "Too few rounds to say where ebpf is behind."
    run = made_up()
    slow = [
        msgspec.structs.replace(cell, values=cell.values | {"start": cell.values["start"] * 2})
        if cell.step.kind == "start" and cell.step.mode == "ebpf" else cell
        for cell in run.cells
    ]  # fmt: skip
    summary = report(msgspec.structs.replace(run, cells=tuple(slow))).summary
    assert summary[1] == ("It is behind nftables in time to start (62 % more); iptables in time to start (52 % more).")
    summary = report(made_up(modes=("iptables", "ebpf"))).summary
    assert summary[1] == "It is behind ebpf in 17 of 17 rows."


def test_the_third_sentence_is_of_ipvs() -> None:
    assert report(made_up(modes=("ebpf", "ipvs"))).summary == (
        "IPVS: ebpf needs 14 % less CPU for a connection than ipvs (14 %).",
    )
    *_, last = report(made_up()).summary
    elsewhere = "In a source tree, `make compare-vm` measures it in a virtual machine."
    assert last == f"IPVS was left out. {elsewhere}"
    *_, last = report(all_modes()).summary
    assert last == f"IPVS does not work here: the kernel has no <ip_vs> & more. {elsewhere}"


NGINX = not_installed("nginx")
AGAIN = "afterwards the same command measures them"


def without_nginx(run: Run) -> Run:
    """The same, measured where nginx is not installed."""
    lost = dict.fromkeys((known.name for known in METRICS if known.load in ("connections", "requests")), NGINX)
    cells = [
        msgspec.structs.replace(
            cell, missing=lost, values={name: value for name, value in cell.values.items() if name not in lost}
        ) if cell.step.kind == "traffic" else cell
        for cell in run.cells
    ]  # fmt: skip
    return msgspec.structs.replace(run, cells=tuple(cells))


@pytest.mark.parametrize("modes", [("ebpf", "nftables"), ("ebpf",)], ids=["several modes", "one mode"])
def test_rows_that_no_mode_has_are_named_with_what_they_need(modes: tuple[str, ...]) -> None:
    made = report(without_nginx(made_up(modes=modes)))
    assert made.findings.trust == "limited"
    warning = next(text for text in made.findings.warnings if AGAIN in text)
    for words in ("cost of a connection", "requests on open connections", "latency, p99", NGINX):
        assert words in warning
    assert "; latency, p90; " in warning
    assert "small UDP packets" not in warning
    assert made.summary[0] == f"9 rows are missing, cost of a connection among them: {NGINX}."
    if len(modes) > 1:
        assert made.summary[1] == "With 1,000 services, ebpf is significantly behind in nothing."
    assert not any(AGAIN in text for text in report(all_modes()).findings.warnings), "a mode alone has the reason"


@pytest.mark.parametrize(("lacking", "again"), [({}, {"traffic"}), ({"nginx": NGINX}, set())])
def test_what_lacked_a_tool_is_measured_again_where_it_is_installed(
    lacking: dict[str, str], again: set[str], tmp_path: Path
) -> None:
    run, lost = made_up(), without_nginx(made_up())
    kept = whole(lost, lacking)
    assert {cell.step.kind for cell in lost.cells if cell not in kept} == again
    with opened(tmp_path) as state:
        state.begin(lost)
        for cell in (*lost.cells, *(run.cells if again else ())):
            state.add(cell)
        assert state.load() == (run if again else lost), "the last one of a step counts"


@pytest.mark.parametrize(("emulated", "coloured"), [(False, True), (True, False)])
def test_figures_that_nobody_can_trust_have_no_colour_of_their_verdict(emulated: bool, coloured: bool) -> None:
    page = html(report(made_up(machine=msgspec.structs.replace(MACHINE, emulated=emulated))))
    assert "▲ ebpf" in page
    assert ('class="ahead"' in page) == coloured


def test_a_reason_is_shown_at_the_first_step_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run = without_nginx(made_up())
    progress = Progress(run.planned, [cell.step for cell in run.cells], [])
    for cell in run.cells:
        progress.begins(cell.step)
        progress.ends(cell)
    assert capsys.readouterr().err.count(NGINX) == 1


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        pytest.param(1.003, 1.44, ("1.003", "1.440"), id="above"),
        pytest.param(0.5, 0.99996, ("0.50000", "0.99996"), id="below"),
        pytest.param(1.0, 1.44, ("1.00", "1.44"), id="no difference"),
        pytest.param(0.999, 1.44, ("1.00", "1.44"), id="hardly around it"),
        pytest.param(1.02, 12.3, ("1.02", "12"), id="two digits are enough"),
    ],
)
def test_the_ends_of_an_interval_show_on_which_side_of_1_it_is(low: float, high: float, shown: tuple[str, str]) -> None:
    assert ends(Estimate((low + high) / 2, low, high, 0.97, 6)) == shown


def test_a_mode_alone_is_beside_no_proxy() -> None:
    run = made_up(modes=("nftables",), sizes=(1000,))
    assert report(run).summary == (
        "With 1,000 services, nftables needs 18 % more CPU for a connection than no proxy at all (18 %).",
        "With 1,000 services, nftables needs 18 % more CPU for a request than no proxy at all (18 %).",
        "With 1,000 services, nftables needs 18 % more time for a request at p99 than no proxy at all (18 %).",
    )


def test_nothing_was_compared() -> None:
    empty = report(made_up(upto=0))
    assert empty.summary == ()
    assert any("not finished" in warning for warning in empty.findings.warnings)
    assert "Nothing was compared" in html(empty)
    assert "Nothing was compared" in markdown(empty)


def test_a_report_survives_a_file() -> None:
    made = report(all_modes())
    assert msgspec.json.decode(msgspec.json.encode(made), type=Report) == made


def test_markdown_has_the_same_tables() -> None:
    text = markdown(report(all_modes()))
    assert "▲ ebpf 1.24 × (1.24 to 1.24)" in text
    assert "- mode ipvs does not work here: the kernel has no &lt;ip_vs> & more" in text
    rows = [line for line in text.splitlines() if line.startswith("| new connections")]
    assert len(rows) == 3
    assert all(line.count("|") == 3 + len(EVERY) - 1 for line in rows), "a mode that does not work has no column"


def test_of_an_emulated_machine_only_ratios_are_reported() -> None:
    made = report(all_modes(machine=msgspec.structs.replace(MACHINE, emulated=True)))
    text = markdown(made)
    assert "emulated" in text.split("**Trust: poor.")[1].splitlines()[2]
    for line in text.splitlines():
        if line.startswith(("| new connections", "| latency", "| throughput", "| time")):
            fields = [field.strip() for field in line.split("|")[2:-1]]
            assert all(not field or "×" in field or field == "-" for field in fields), line
            assert "1/s" not in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--from", "/nowhere.json"], "--from /nowhere.json: No such file"),
        (["--from", "/proc"], "no run of compare is there"),
        (["--from", "/dev/null"], "no report of compare"),
        (["--from", "/dev/null", "--report", "x.pdf"], "ends in .html"),
    ],
)
def test_what_cannot_be_reported(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *flags]) == 2
    assert words in capsys.readouterr().err
