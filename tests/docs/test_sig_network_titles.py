"""tests/conformance/sig_network.txt names, for each of sig-network's end-to-end tests, tests of ours that exist."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.conformance.cases import CASES
from tests.docs.pages import ROOT

SUITES = ("Services", "Networking", "Conntrack", "EndpointSlice", "DualStack", "Traffic Distribution", "Topology Hints",
          "KubeProxy", "Service CIDRs")  # fmt: skip
FILE = ROOT / "tests/conformance/sig_network.txt"


def table() -> dict[str, list[tuple[str, list[str]]]]:
    """The titles of each suite, with the entries below them."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    titles: list[tuple[str, list[str]]] = []
    for line in FILE.read_text().splitlines():
        if line.startswith("["):
            titles = found.setdefault(line.strip("[]"), [])
        elif line.startswith(" "):
            titles[-1][1].append(line.strip())
        elif line and not line.startswith("#"):
            titles.append((line, []))
    return found


@cache
def functions() -> frozenset[str]:
    """`file::function` of every test."""
    return frozenset(
        f"{path.name}::{name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    )


def exists(entry: str) -> bool:
    """Whether it is a test, the row and words of a static case, or says whose task it is instead."""
    if entry.startswith("row "):
        return entry in {f"row {case.row}: {case.text}" for case in CASES}
    if entry.startswith("`"):
        return entry.strip("`") in functions()
    return re.match(r"- \[?[a-z]", entry) is not None


def test_every_suite_is_there() -> None:
    assert tuple(table()) == SUITES
    for suite, rows in table().items():
        assert rows, suite
        titles = [title for title, _ in rows]
        assert len(titles) == len(set(titles)), f"{suite}: a title is there twice"
        assert all(entries for _, entries in rows), f"{suite}: a title without an entry"


def test_the_page_has_the_numbers() -> None:
    rows = [entries for suite in table().values() for _, entries in suite]
    theirs = sum(entries[0].startswith("- ") for entries in rows)
    page = (ROOT / "docs/conformance.md").read_text()
    for words in (f"of the {len(rows)} titles", f"{len(rows) - theirs} have a test here", f"The {theirs} others"):
        assert words in page, f"docs/conformance.md says otherwise than sig_network.txt: {words}"


@pytest.mark.parametrize("suite", SUITES)
def test_each_title_has_a_test_of_ours_that_exists(suite: str) -> None:
    missing = [(title, entry) for title, entries in table()[suite] for entry in entries if not exists(entry)]
    assert not missing


@pytest.mark.parametrize(
    "entry", ["`test_rows.py::test_nothing`", "row 2.5: words of no case", "nothing", "", "`test_rows.py`"]
)
def test_what_is_not_there_is_found(entry: str) -> None:
    assert not exists(entry)
