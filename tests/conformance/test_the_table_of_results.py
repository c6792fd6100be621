"""The tables of results, and the short list."""

from __future__ import annotations

from hybrid_proxy.controller.settings.documents import MODES

from . import cases
from .grid import BEGIN, DOCS, END, Grouped, Rows
from .kinds import Kinds
from .matrix import Matrix
from .switches import Switches


class Networks(Grouped):
    heads = ("kind",)


OLD = f"""# Title

{BEGIN}

### yes: nftables; not yet: ebpf

- 2.10 silence

### yes: ebpf; **no**: nftables

- 2.3 no endpoints: refused

{END}
tail
"""


def test_a_run_of_one_mode_changes_its_verdicts_alone() -> None:
    text = Matrix.merge(OLD, {("2.3", "no endpoints: refused"): {"nftables": "yes"}})
    assert "### yes: ebpf, nftables\n\n- 2.3 no endpoints: refused\n" in text
    assert "### yes: nftables; not yet: ebpf\n\n- 2.10 silence\n" in text
    assert text.startswith("# Title")
    assert text.endswith("tail\n")


def test_cases_stand_in_order_below_their_verdicts() -> None:
    text = Matrix.merge(OLD, {("2.9", "short cut"): {"ebpf": "yes", "nftables": "**no**"}})
    lines = [line for line in text.splitlines() if line.startswith(("- ", "### "))]
    assert lines == [
        "### yes: ebpf; **no**: nftables",
        "- 2.3 no endpoints: refused",
        "- 2.9 short cut",
        "### yes: nftables; not yet: ebpf",
        "- 2.10 silence",
    ]


def test_what_is_written_can_be_read() -> None:
    rows: Rows = {("2.14a", "a"): {"ebpf": "yes"}, ("2.14", "b"): {"iptables": "**no**"}}
    assert Matrix.read(Matrix.render(rows)) == rows


def test_the_short_list_names_cases_that_exist() -> None:
    names = {case.name for case in cases.CASES}
    assert names >= cases.CORE
    assert len(names) == len(cases.CASES), "two cases have one name"


SWITCHES = f"""# Title

{BEGIN}

Kinds: TCP; gone

| from | to | does not go on as it was |
|---|---|---|
| ebpf | nftables | nothing: all goes on |
| nftables | ebpf | TCP: ends: why<br>gone: - |

{END}
tail
"""


def test_a_run_of_one_pair_changes_its_row_alone() -> None:
    text = Switches.merge(SWITCHES, {("nftables", "ebpf"): {"TCP": "goes on", "UDP": "-"}})
    assert [line for line in text.splitlines() if line.startswith(("|", "Kinds"))] == [
        "Kinds: TCP; UDP",
        "| from | to | does not go on as it was |",
        "|---|---|---|",
        "| ebpf | nftables | nothing: all goes on |",
        "| nftables | ebpf | UDP: - |",
    ]
    assert text.startswith("# Title")
    assert text.endswith("tail\n")


def test_switches_that_are_written_can_be_read() -> None:
    rows: Rows = {("ebpf", "ipvs"): {"TCP, idle": "goes on", "UDP": "goes on; from a socket: another backend"}}
    assert Switches.read(Switches.render(rows)) == rows


def test_modes_and_rows_with_one_result_stand_together() -> None:
    cells = {"ebpf": "yes", "nftables": "all but a port: it is closed", "userspace": "yes"}
    alone = dict.fromkeys([mode for mode in MODES if mode != "ipvs"], "yes")
    rows: Rows = {("a bond",): dict.fromkeys(MODES, "yes"), ("a bridge",): cells, ("new",): {}, ("tun",): alone}
    rows["a VLAN",] = rows["a bond",]
    text = Networks.render(rows)
    assert text.splitlines()[2:] == [
        "| a bond<br>a VLAN | all: yes |",
        "| a bridge | ebpf, userspace: yes<br>nftables: all but a port: it is closed |",
        "| new |  |",
        "| tun | all but ipvs: yes |",
    ]
    assert Networks.read(text) == rows


def test_every_kind_of_network_has_a_row_in_the_document() -> None:
    begin, end = Kinds.marks
    rows = Kinds.read((DOCS / Kinds.document).read_text().partition(begin)[2].partition(end)[0])
    assert rows.keys() == set(Kinds.order(Kinds.joined({}, {}))), (
        "run test_topologies.py with --write-conformance-table"
    )
