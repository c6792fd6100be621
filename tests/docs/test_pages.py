"""What pages say of the tree and of each other is true."""

import re

import pytest

from tests.docs.pages import PAGES, ROOT, anchors
from workshop import house, manual, output

LINK = re.compile(r"\]\((?P<file>[^)#\s:]*)(?:#(?P<anchor>[^)]+))?\)")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in LINK.finditer((ROOT / page).read_text()):
        target = (ROOT / page).parent / link["file"] if link["file"] else ROOT / page
        assert target.exists(), link[0]
        if link["anchor"]:
            assert link["anchor"] in anchors(target), link[0]


def test_the_tree_of_packages_is_the_one_on_disk() -> None:
    page = (ROOT / house.PAGE).read_text()

    assert house.written(ROOT) == page, "run `make docs`"


def test_the_readme_is_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_manual_page_is_of_the_flags_that_exist() -> None:
    assert (ROOT / manual.PAGE).read_text() == manual.page(), "run `make docs`"


def test_the_page_of_json_output_is_of_the_types_that_are_printed() -> None:
    assert (ROOT / output.PAGE).read_text() == output.page(), "run `make docs`"
