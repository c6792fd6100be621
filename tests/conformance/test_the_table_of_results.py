"""The tables of results, and the short list."""

from __future__ import annotations

from . import cases
from .grid import BEGIN, DOCS, END, Rows
from .kinds import Kinds
from .matrix import Matrix
from .switches import Switches

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
    names = {f"test_row[{case.name}]" for case in cases.CASES}
    assert {f"test_row[{name}]" for name in cases.CORE} <= names
    assert len(names) == len(cases.CASES), "two cases have one name"


SWITCHES = f"""# Title

{BEGIN}

| from | to | TCP | gone |
|---|---|---|---|
| ebpf | nftables | goes on | goes on |
| nftables | ebpf | ends: why | - |

{END}
tail
"""


def test_a_run_of_one_pair_changes_its_row_alone() -> None:
    text = Switches.merge(SWITCHES, {("nftables", "ebpf"): {"TCP": "goes on", "UDP": "-"}})
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "| from | to | TCP | UDP |",
        "|---|---|---|---|",
        "| ebpf | nftables | goes on |  |",
        "| nftables | ebpf | goes on | - |",
    ]
    assert text.startswith("# Title")
    assert text.endswith("tail\n")


def test_every_kind_of_network_has_a_row_in_the_document() -> None:
    begin, end = Kinds.marks
    rows = Kinds.read((DOCS / Kinds.document).read_text().partition(begin)[2].partition(end)[0])
    assert [*rows] == Kinds.order(Kinds.joined({}, {})), "run test_topologies.py with --write-conformance-table"
