"""The report as a page, in a real browser: at three widths, light, dark, printed. The pictures are kept for eyes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hybrid_proxy.controller import cli
from hybrid_proxy.workshop.compare.report import Report, report
from hybrid_proxy.workshop.compare.state import opened
from tests.waiting import until
from tests.workshop.compare.browser import PROGRAM, Browser, Media, Scheme, browser
from tests.workshop.compare.kit import all_modes

ROOT = Path(__file__).resolve().parents[4]
PICTURES = ROOT / "build/compare-pictures"
WIDTHS = (400, 900, 1400)
PAPER = 688  # A4 without its margins


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by the command, of the folder of a run."""
    folder = tmp_path_factory.mktemp("report")
    run = all_modes()
    with opened(folder / "state") as state:
        state.begin(run)
        for cell in run.cells:
            state.add(cell)
    target = folder / "deep" / "report.html"
    assert cli.main(["compare", "--from", str(folder / "state"), "--report", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory, page: Path) -> Iterator[Browser]:
    """A browser that has the page open."""
    if PROGRAM is None:
        pytest.skip("chromium is missing: make setup")
    with browser(tmp_path_factory.mktemp("browser")) as made:
        made.open(page)
        yield made


def unfold(window: Browser, *, wide: bool) -> None:
    window.value(f"document.querySelectorAll('details').forEach(one => one.open = {str(wide).lower()})")


def test_it_opens_with_the_sentences_and_one_plot_and_the_rest_is_folded(window: Browser, page: Path) -> None:
    window.look(1400)
    unfold(window, wide=False)
    box = "[...document.querySelectorAll('#summary p')].map(one => one.textContent.replaceAll('\\u00a0', ' '))"
    sentences = window.value(box)
    summary = msgspec.json.decode(page.with_suffix(".json").read_bytes(), type=Report).summary
    assert sentences == [sentence.replace("`", "") for sentence in summary]
    assert len(sentences) == 3
    until(lambda: len(shown(window, "table, dl")) == 0, "folding")  # takes effect with the next frame
    assert window.value("document.querySelector('#trust').className") == "good"
    assert shown(window, "#trust strong") == ["Trust: good."]
    titles = shown(window, "h4")
    assert titles[:2] == ["cost of a connection", "cost of a request"]
    assert len(titles) == 17
    unfold(window, wide=True)
    until(lambda: len(shown(window, "table")) == 3, "tables of three sizes")


def shown(window: Browser, selector: str) -> list[str]:
    """The words of what is not folded away."""
    visible = "one => one.checkVisibility({contentVisibilityAuto: true})"
    found: list[str] = window.value(
        f"[...document.querySelectorAll('{selector}')].filter({visible}).map(one => one.textContent)"
    )
    return found


def test_each_dot_has_its_words(window: Browser) -> None:
    window.look(1400)
    marks = window.value(
        "[...document.querySelector('#forest .item').querySelectorAll('.mark')].map("
        "one => [one.querySelector('.who').textContent, one.querySelector('.tip').textContent])"
    )
    assert [name for name, _ in marks] == ["ebpf", "nftables", "iptables", "userspace", "kube-proxy-nftables"]
    assert re.search(r"0\.95 × .*6 pairs, 97 % sure; 95\.\d µs .*without a proxy 100 µs", dict(marks)["ebpf"])


@pytest.mark.parametrize(("width", "media"), [(1400, "screen"), (500, "screen"), (PAPER, "print")])
def test_each_dot_has_its_interval_and_its_value_beside_it(window: Browser, width: int, media: Media) -> None:
    window.look(width, media=media)
    assert shown(window, "#forest .of-nftables .value > span")[0] == "1.18 1.18-1.18"
    assert shown(window, "#forest .of-nftables .absolute")[0] == "118 µs"
    assert len(shown(window, "#forest .value small")) == 2 * len(shown(window, "#forest .value > span")) == 2 * 17 * 5
    assert len(shown(window, "#curves figure")) == 4


@pytest.mark.parametrize("width", WIDTHS)
def test_values_appear_below_the_mouse(window: Browser, width: int) -> None:
    window.look(width)
    for number in (0, -1):  # the leftmost and the rightmost column
        box = window.value(
            f"(mark => {{ mark.scrollIntoView({{block: 'center'}}); return mark.getBoundingClientRect().toJSON() }})"
            f"([...document.querySelectorAll('#forest .mark:not(.axis)')].at({number}))"
        )
        window.point_at(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        tip = window.value(
            "[...document.querySelectorAll('.tip')].filter(one => one.checkVisibility())"
            ".map(one => one.getBoundingClientRect().toJSON())"
        )
        assert len(tip) == 1
        assert 0 <= tip[0]["left"] < tip[0]["right"] <= width
    window.point_at(0, 0)


LAYOUTS: list[tuple[int, Scheme, Media]] = [
    *((width, "light", "screen") for width in WIDTHS),
    *((width, "dark", "screen") for width in WIDTHS),
    (PAPER, "dark", "print"),
]


@pytest.mark.parametrize(("width", "scheme", "media"), LAYOUTS, ids=[f"{w}-{s}-{m}" for w, s, m in LAYOUTS])
def test_nothing_is_cut(window: Browser, width: int, scheme: Scheme, media: Media) -> None:
    window.look(width, scheme, media)
    for wide in (True, False):
        unfold(window, wide=wide)
        assert window.value("document.documentElement.scrollWidth") <= width
        assert window.value(OUTSIDE) == []
    window.picture(PICTURES / f"report-{width}-{scheme}-{media}.png")


@pytest.mark.parametrize(("scheme", "media"), [("light", "screen"), ("dark", "screen"), ("dark", "print")])
def test_words_stand_out_from_the_ground(window: Browser, scheme: Scheme, media: Media) -> None:
    window.look(PAPER, scheme, media)
    unfold(window, wide=True)
    seen = window.value(COLOURS)
    assert len(seen) > 7, "modes, words, soft words"
    poor = [(words, ratio) for words, ink, ground in seen if (ratio := contrast(ink, ground)) < 4.5]
    assert not poor, "WCAG 2, 1.4.3"


# Words that reach beyond the page or over those beside them. A wide table scrolls in a box of its own.
OUTSIDE = """
[...document.querySelectorAll('p, h1, h2, h3, h4, li, dd, .who, .value, .axis text')]
    .filter(one => one.checkVisibility() && !one.closest('.scroll'))
    .filter(one => {
        const box = one.getBoundingClientRect(), next = one.nextElementSibling?.getBoundingClientRect();
        return box.left < 0 || box.right > innerWidth || one.clientWidth && one.scrollWidth > one.clientWidth + 1
            || one.matches('text') && next && box.right > next.left;
    }).map(one => one.textContent)
"""
# Each colour of words on each colour of the ground behind them, with an example.
COLOURS = """
[...new Map([...document.querySelectorAll('p, h1, h2, h4, small, li, dt, dd, .who, .value, td b, th, .axis text')]
    .filter(one => one.textContent.trim() && one.checkVisibility())
    .map(one => {
        let ground = one;
        while (getComputedStyle(ground).backgroundColor == 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
        const style = getComputedStyle(one), ink = one.matches('text') ? style.fill : style.color;
        const behind = getComputedStyle(ground).backgroundColor;
        return [ink + behind, [one.textContent, ink, behind]];
    })).values()]
"""


def contrast(ink: str, ground: str) -> float:
    """Of two colours, as WCAG 2 defines it: 1 to 21."""
    dark, light = sorted(luminance(*map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, ground))
    return (light + 0.05) / (dark + 0.05)


def luminance(*colour: int) -> float:
    parts = (part / 255 for part in colour)
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_on_paper_everything_is_unfolded_and_light(window: Browser) -> None:
    window.look(PAPER, "dark", "print")
    unfold(window, wide=False)
    assert window.value("[...document.querySelectorAll('details')].every(one => one.offsetHeight > 60)")
    assert window.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    paper = window.value("document.documentElement.scrollHeight")
    window.look(PAPER)
    assert window.value("document.documentElement.scrollHeight") < paper / 2


def test_nothing_is_fetched_and_nothing_runs(window: Browser, page: Path) -> None:
    assert set(window.fetched) == {page.as_uri()}
    text = page.read_text()
    assert not re.search(r"url\((?!#)|@import|\b(?:src|href|on\w+)=", text.partition("<script")[0])
    assert re.findall(r"<script[^>]*>", text) == ['<script type="application/json" id="data">']


def test_the_raw_data_is_in_the_page(window: Browser, page: Path) -> None:
    embedded = msgspec.json.decode(window.value("document.querySelector('#data').textContent"), type=Report)
    assert embedded == msgspec.json.decode(page.with_suffix(".json").read_bytes(), type=Report)
    assert embedded == report(all_modes())


def test_the_demonstration_of_the_machines_hands_over(page: Path, tmp_path: Path) -> None:
    """`demo compare` with all tools in place: the command itself, with a report and the flags that were given."""
    for tool in ("nginx", "wrk", "iperf3"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is missing: make setup")
    target = tmp_path / "there" / "report.html"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", str(ROOT / "vagrant/demo.sh"), "compare", "--from", str(page.with_suffix(".json"))],
        env=os.environ | {"ROOT_COMMAND": "env", "REPORT": str(target), "PATH": path},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert target.read_text() == page.read_text(), "the report of a report"
