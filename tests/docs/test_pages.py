"""What pages say of the tree and of each other is true."""

import re

import pytest

from hybrid_proxy.controller.serving import memory
from hybrid_proxy.dataplane.kernel.drivers import TRIED
from hybrid_proxy.dataplane.modes.ebpf.hooks.xdp import LARGEST_MTU
from hybrid_proxy.workshop.pages import PAGES as MADE
from tests.docs.pages import PAGES, ROOT, anchors, table
from tests.vm.cards import CARDS

LINK = re.compile(r"\]\((?P<file>[^)#\s:]*)(?:#(?P<anchor>[^)]+))?\)")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in LINK.finditer((ROOT / page).read_text()):
        target = (ROOT / page).parent / link["file"] if link["file"] else ROOT / page
        assert target.exists(), f"{page}: {link[0]} leads nowhere"
        if link["anchor"]:
            assert link["anchor"] in anchors(target), f"{page}: {link[0]} names no heading of that page"


@pytest.mark.parametrize("page", MADE)
def test_pages_that_are_made_from_definitions_are_current(page: str) -> None:
    assert (ROOT / page).read_text() == MADE[page](), "run `make docs`"


def test_the_files_that_outlive_an_agent_are_those_of_the_page() -> None:
    paths = [path for path in vars(memory).values() if getattr(path, "__module__", "") == memory.__name__]
    made = {path("/run/admin.sock").name for path in paths if path.__name__.endswith("_path")}
    assert len(made) > 2
    assert set(re.findall(r"`(admin\.\w+)`", (ROOT / "docs/operations.md").read_text())) == made


def test_an_index_leads_to_every_page() -> None:
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()
    text = (ROOT / "docs/README.md").read_text()
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/") and page != "docs/README.md"]
    assert [page for page in pages if f"({page})" not in text] == [], "add them to docs/README.md"


def test_the_readme_is_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150, "shorten README.md"


def test_figures_of_the_comparison_in_the_readme_have_a_source() -> None:
    text = (ROOT / "docs/peers.md").read_text()
    compared = table("README.md", "| | kube-proxy | Cilium")
    figures = re.findall(r"[\d.]+ (?:s|ms)\b", " ".join(cell for cells in compared.values() for cell in cells.values()))
    assert len(figures) >= 6
    assert [figure for figure in figures if figure not in text] == []


def test_drivers_of_xdp_are_those_of_the_table() -> None:
    features = table("docs/kernels.md", "| outside clients of node ports |")
    assert features["`--xdp auto`"] == {driver: "yes" if driver in TRIED else "no" for driver in CARDS}
    assert f"an MTU beyond {LARGEST_MTU:,}" in features
    for driver in TRIED:
        cells = {feature: cells[driver] for feature, cells in features.items() if cells[driver] != "yes"}
        assert cells.keys() <= {f"an MTU beyond {LARGEST_MTU:,}"}, f"auto takes {driver}, which lacks {cells}"
