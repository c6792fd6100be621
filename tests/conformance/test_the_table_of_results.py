"""The tables of results, and the short list."""

from __future__ import annotations

from . import cases
from .grid import BEGIN, DOCS, END, Rows
from .kinds import Kinds
from .matrix import Matrix
from .switches import Switches

OLD = f"""# Title

{BEGIN}

| row | case | ebpf | nftables |
|---|---|---|---|
| 2.3 | no endpoints: refused | yes | **no** |
| 2.10 | silence | not yet | yes |

{END}
tail
"""


def test_a_run_of_one_mode_changes_its_column_alone() -> None:
    text = Matrix.merge(OLD, {("2.3", "no endpoints: refused"): {"nftables": "yes"}})
    assert "| 2.3 | no endpoints: refused | yes | yes |" in text
    assert "| 2.10 | silence | not yet | yes |" in text
    assert text.startswith("# Title")
    assert text.endswith("tail\n")


def test_a_mode_and_a_row_that_are_new_find_their_place() -> None:
    text = Matrix.merge(OLD, {("2.9", "short cut"): {"userspace": "yes"}})
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == "| row | case | ebpf | nftables | userspace |"
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["2.3", "2.9", "2.10"]


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
