"""The report as Markdown, JSON and a page; the page opened by a real browser, in light and dark."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from controller import cli
from tests.workshop.compare import browser
from tests.workshop.compare.kit import MACHINE, made_up
from workshop.compare.findings import Report, findings
from workshop.compare.markdown import markdown
from workshop.compare.result import Run

ROOT = Path(__file__).resolve().parents[3]
PICTURES = ROOT / "build/compare-pictures"
EVERY = ("ebpf", "ipvs", "nftables", "iptables", "userspace")


def all_modes(**more: object) -> Run:
    return made_up(modes=EVERY, sizes=(10, 1000, 10_000), broken={"ipvs": "the kernel has no <ip_vs> & more"}, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by the command, of a run's JSON."""
    folder = tmp_path_factory.mktemp("report")
    run = all_modes()
    (folder / "run.json").write_bytes(msgspec.json.encode(Report(run, findings(run))))
    target = folder / "deep" / "report.html"
    done = subprocess.run(
        [sys.executable, "-m", "controller", "compare", "--from", str(folder / "run.json"), "--report", str(target)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ebpf makes 1.24 times nftables" in done.stdout
    return target


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if browser.PROGRAM is None:
        pytest.skip("chromium is missing: make setup")
    return tmp_path_factory.mktemp("profile")


class Seen(HTMLParser):
    """Words of sections, links to elsewhere, and the content of the script element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.elsewhere: list[str] = []
        self.data = ""
        self.tags: list[str] = []
        self._open: list[str] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.tags.append(tag)
        if tag == "section":
            self._open.append(known.get("id") or "")
        self._script = tag == "script"
        self.elsewhere += [
            value for name, value in attrs if value and name in ("src", "href", "xlink:href") and value[0] != "#"
        ]

    def handle_endtag(self, tag: str) -> None:
        if tag == "section":
            self._open.pop()
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            self.data += data
        elif self._open:
            self.sections[self._open[-1]] = self.sections.get(self._open[-1], "") + data


def test_the_browser_sees_the_whole_report(page: Path, profile: Path) -> None:
    seen = Seen(browser.dom(page, profile))
    assert list(seen.sections) == ["summary", "warnings", "plots", "tables", "method"]
    assert "ebpf against" in seen.sections["summary"]
    assert "the kernel has no <ip_vs> & more" in seen.sections["warnings"]
    for words in (
        "10 services",
        "1,000 services",
        "10,000 services",
        "new connections (1/s)",
        "memory of the agent (MB)",
    ):
        assert words in seen.sections["tables"]
    assert "a <processor> & more" in seen.sections["method"]
    assert seen.tags.count("svg") == 5, "rates, latency with each number of services, changes"
    assert seen.tags.count("script") == 1, "nothing runs"


def test_nothing_is_fetched(page: Path) -> None:
    text = page.read_text()
    assert not Seen(text).elsewhere
    assert not re.search(r"url\((?!#)|@import", text)


def test_the_raw_data_is_in_the_page(page: Path, profile: Path) -> None:
    embedded = msgspec.json.decode(Seen(browser.dom(page, profile)).data, type=Report)
    beside = msgspec.json.decode(page.with_suffix(".json").read_bytes(), type=Report)
    assert embedded == beside
    assert embedded.run == all_modes()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_light_and_dark(page: Path, profile: Path, scheme: browser.Scheme) -> None:
    """Text and lines stand out from the ground; the pictures are kept for eyes."""
    image = pytest.importorskip("PIL.Image")
    target = PICTURES / f"report-{scheme}.png"
    browser.screenshot(page, profile, scheme, target)
    with image.open(target) as picture:
        grey = picture.convert("L")
    ground = grey.getpixel((5, 5))
    assert ground > 240 if scheme == "light" else ground < 40
    colours = dict((value, count) for count, value in grey.getcolors())  # noqa: C402
    far = sum(count for value, count in colours.items() if abs(value - ground) > 120)
    assert far > 20_000, "there is hardly anything to read"
    dull = sum(count for value, count in colours.items() if 40 < abs(value - ground) < 60)
    assert dull < far * 3, "most of it is nearly as bright as the ground"


def test_markdown_has_the_same_tables() -> None:
    text = markdown(all_modes(), findings(all_modes()))
    assert "| ebpf against | 10 services | 1,000 services | 10,000 services |" in text
    assert "| nftables | ▲ 17 ▼ 0 ≈ 0 | ▲ 17 ▼ 0 ≈ 0 | ▲ 17 ▼ 0 ≈ 0 |" in text
    assert "▲ ebpf 1.24 × (1.24 to 1.24)" in text
    assert "- mode ipvs does not work here: the kernel has no &lt;ip_vs> & more" in text
    rows = [line for line in text.splitlines() if line.startswith("| new connections")]
    assert len(rows) == 3
    assert all(line.count("|") == 3 + len(EVERY) for line in rows)


def test_of_an_emulated_machine_only_ratios_are_reported() -> None:
    run = all_modes(machine=msgspec.structs.replace(MACHINE, emulated=True))
    text = markdown(run, findings(run))
    assert "emulated" in text.split("## How far to trust it")[1].splitlines()[2]
    for line in text.splitlines():
        if line.startswith(("| new connections", "| latency", "| throughput", "| time")):
            fields = [field.strip() for field in line.split("|")[2:-1]]
            assert all(not field or "×" in field or field == "-" for field in fields), line
            assert "1/s" not in line


def test_a_report_of_nothing_can_be_written(tmp_path: Path) -> None:
    from workshop.compare.html import html

    run = made_up(upto=0)
    assert "not finished" in html(run, findings(run))
    assert "not finished" in markdown(run, findings(run))


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
    assert target.read_text() == page.read_text()


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
