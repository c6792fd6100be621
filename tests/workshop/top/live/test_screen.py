"""`hybrid-proxy top` on a node with real traffic: by its library's pilot, in a real terminal, and as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
from textual import events
from textual.css.query import NoMatches
from textual.pilot import Pilot
from textual.widgets import Footer, Static, TabbedContent

from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.top.app import Listing, Top
from hybrid_proxy.workshop.top.poller import NodeReader
from hybrid_proxy.workshop.top.rates import Sample

pytestmark = pytest.mark.root
PATIENCE = 90.0
INTERVAL = 0.6

Driven = Callable[[Top, "Pilot[None]"], Awaitable[None]]


WIDE = (240, 40)  # all columns fit


class LateReader(NodeReader):
    """Its agent takes until `answers` is set."""

    answers = threading.Event()

    def read(self, chosen: str | None) -> Sample:
        self.answers.wait(PATIENCE)
        return super().read(chosen)


def drive(
    lab: Lab, agent: Agent, keys: Driven, size: tuple[int, int] = WIDE, reader: type[NodeReader] = NodeReader
) -> Top:
    """The screen in the node's namespace, without a terminal, at the hands of `keys`."""

    async def run() -> Top:
        screen = Top(reader(str(agent.socket), None), INTERVAL)
        async with screen.run_test(size=size) as pilot:
            await keys(screen, pilot)
        return screen

    with lab.inside("node"):
        return asyncio.run(run())


@pytest.fixture
def elsewhere() -> Iterator[Executor]:
    """A thread that is not in the node's namespace, whatever the test does."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(int).result()
        yield threads


async def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(NoMatches, StopIteration, IndexError):  # what is looked at is not there yet
            if reached():
                return
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


def lines(screen: Top, name: str) -> list[list[str]]:
    """The texts of a table, row by row; none before there is a table."""
    if not screen.query(f"#{name}"):
        return []
    table = screen.query_one(f"#{name}", Listing)
    return [[str(cell) for cell in table.get_row_at(position)] for position in range(table.row_count)]


def titles(screen: Top, name: str) -> list[str]:
    return [str(column.label) for column in screen.query_one(f"#{name}", Listing).ordered_columns]


def text(screen: Top, name: str) -> str:
    return str(screen.query_one(f"#{name}", Static).content)


def web(screen: Top) -> list[str]:
    return next(row for row in lines(screen, "services") if row[0] == "default/web:http" and row[11] == "10.96.0.10:80")


def is_busy(screen: Top) -> bool:
    rows = lines(screen, "services")
    return bool(rows) and rows[0][0] == "default/web:http" and rows[0][1] not in {"-", "0"}


@pytest.mark.usefixtures("load")
def test_the_busiest_service_is_first_and_its_backends_share(lab: Lab, agent: Agent) -> None:
    async def keys(screen: Top, pilot: Pilot[None]) -> None:
        await until(lambda: is_busy(screen), "the service under load is not first")
        await until(lambda: 10 < float(web(screen)[1]) < 30, f"not 20 connections a second: {web(screen)}")
        await until(lambda: len(lines(screen, "backends")) == 6, "there are not three backends of each family")
        backends = [row for row in lines(screen, "backends") if not row[0].startswith("[")]
        assert {row[0] for row in backends} == {f"{pod.address4}:8080" for pod in lab.pods()}

        def shared() -> bool:
            shares = [row[1] for row in lines(screen, "backends") if not row[0].startswith("[")]
            return "-" not in shares and 97 <= sum(int(share.rstrip("%")) for share in shares) <= 103

        await until(shared, f"the shares are not those of one whole: {lines(screen, 'backends')}")
        assert all(row[8] == "serving" for row in backends)
        assert re.search(r"mode ebpf +in sync", text(screen, "head"))

        def timed() -> bool:
            rows = [row for row in lines(screen, "backends") if not row[0].startswith("[")]
            return all(re.fullmatch(r"[0-9.]+(µs|ms)", row[6]) for row in rows)

        await until(timed, f"no time to accept a connection: {lines(screen, 'backends')}")

    drive(lab, agent, keys)


@pytest.mark.usefixtures("load")
def test_keys_sort_turn_and_filter(lab: Lab, agent: Agent) -> None:
    async def keys(screen: Top, pilot: Pilot[None]) -> None:
        await until(lambda: is_busy(screen), "the service under load is not first")
        assert titles(screen, "services")[1] == "conn/s▼"
        await pilot.press("r")
        assert titles(screen, "services")[1] == "conn/s▲"
        await until(lambda: lines(screen, "services")[-1][0] == "default/web:http", "the order was not turned")
        for _ in range(11):
            await pilot.press("s")
        assert titles(screen, "services")[:2] == ["service▲", "conn/s"]
        names = [row[0] for row in lines(screen, "services")]
        assert names == sorted(names)
        await pilot.press("slash", *"dns tcp", "enter")
        await until(lambda: {row[0] for row in lines(screen, "services")} == {"default/dns:dns-tcp"}, "no filter")
        assert "filter 'dns tcp': 2 of 10" in text(screen, "head")
        await pilot.press("slash", "escape")
        for key, character in (("slash", "/"), ("w", "w"), ("e", "e"), ("b", "b"), ("slash", "/")):  # in one burst
            screen.post_message(events.Key(key, character))
        await until(lambda: "filter 'web/': 0 of 10" in text(screen, "head"), f"keys are lost: {text(screen, 'head')}")
        await pilot.press("escape")
        await until(lambda: len(lines(screen, "services")) == 10, "the filter was not forgotten")

    drive(lab, agent, keys)


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize("width", [80, 100, 120])
def test_nothing_is_cut_on_a_narrow_screen(lab: Lab, agent: Agent, width: int) -> None:
    async def keys(screen: Top, pilot: Pilot[None]) -> None:
        await until(lambda: is_busy(screen), "the service under load is not first")
        await until(lambda: bool(lines(screen, "backends")), "no backends")
        for name in ("services", "backends"):
            table = screen.query_one(f"#{name}", Listing)
            assert table.virtual_size.width <= table.size.width
        assert {"service", "conn/s▼", "state", "frontends"} <= {*titles(screen, "services")}
        empty = next(row for row in lines(screen, "services") if row[0] == "default/empty:http")
        assert "no backends: rejects" in empty
        table = screen.query_one("#services", Listing)
        marked = next(row for row in map(table.get_row, table.rows) if str(row[0]) == "default/empty:http")
        assert [cell.style for cell in marked[:2]] == ["bold red"] * 2
        head = text(screen, "head").splitlines()
        assert len(head) <= 3
        assert all(len(line) <= width - 2 for line in head)
        footer = screen.query_one(Footer)
        assert footer.virtual_size.width <= width
        shown = []
        for key in ("question_mark", "h"):
            await pilot.press(key)
            shown.append(screen.query_one("#keys", Static).display)
        assert shown == [True, False]

    drive(lab, agent, keys, (width, 40))


@pytest.mark.usefixtures("load")
def test_the_cursor_stays_with_its_service(lab: Lab, agent: Agent) -> None:
    async def keys(screen: Top, pilot: Pilot[None]) -> None:
        await until(lambda: is_busy(screen), "the service under load is not first")
        await pilot.press("down", "down")
        table = screen.query_one("#services", Listing)
        chosen = table.chosen
        await pilot.press("r")
        await asyncio.sleep(3 * INTERVAL)
        assert table.chosen == chosen
        assert table.cursor_row == 1  # of all others, which are as quiet, in the order of their names
        label = str(screen.query_one("#below", TabbedContent).get_tab("tab-backends").label)
        assert chosen is not None
        assert label == f"backends of {chosen.split()[0]}"

    drive(lab, agent, keys)


@pytest.mark.usefixtures("load")
def test_refusals_and_maps_are_shown_below(lab: Lab, agent: Agent) -> None:
    async def keys(screen: Top, pilot: Pilot[None]) -> None:
        await pilot.press("d")
        assert screen.query_one("#below", TabbedContent).active == "tab-reasons"

        def refused() -> bool:
            first = lines(screen, "reasons")[:1]  # notes come behind it
            return any(row[0] == "REJECTED" and row[1] not in "-0" and "no ready endpoints" in row[3] for row in first)

        await until(refused, "rejections are not shown")
        assert re.search(r"rejected/s [1-9]", text(screen, "head"))
        await pilot.press("m")
        assert screen.query_one("#below", TabbedContent).active == "tab-maps"
        assert {"flows4", "services", "backends"} <= {row[0] for row in lines(screen, "maps")}

    drive(lab, agent, keys)


@pytest.mark.usefixtures("load")
def test_a_pause_stands_still(lab: Lab, agent: Agent) -> None:
    async def keys(screen: Top, pilot: Pilot[None]) -> None:
        await until(lambda: is_busy(screen), "the service under load is not first")
        await pilot.press("p")
        assert "PAUSED" in text(screen, "head")
        await asyncio.sleep(2 * INTERVAL)
        before = web(screen)
        await asyncio.sleep(3 * INTERVAL)
        assert web(screen) == before
        await pilot.press("p")
        await until(lambda: web(screen)[10] != before[9], "it does not go on")

    drive(lab, agent, keys)


@pytest.mark.usefixtures("load")
def test_an_agent_that_goes_and_comes_back(lab: Lab, agent: Agent, elsewhere: Executor) -> None:
    async def keys(screen: Top, pilot: Pilot[None]) -> None:
        await until(lambda: is_busy(screen), "the service under load is not first")
        agent.kill()
        await until(
            lambda: "was killed, or crashed" in text(screen, "trouble"), "the screen does not show that it is gone"
        )
        total = web(screen)[10]
        await until(lambda: web(screen)[10] != total and is_busy(screen), "without an agent nothing is counted")
        assert "as last programmed" in text(screen, "head")
        await asyncio.wrap_future(elsewhere.submit(agent.start))
        await until(lambda: "in sync" in text(screen, "head"), "the screen does not show that it is back")
        assert text(screen, "trouble") == ""

    drive(lab, agent, keys)


def test_services_are_there_before_the_agent_answers(lab: Lab, agent: Agent) -> None:
    async def keys(screen: Top, pilot: Pilot[None]) -> None:
        await pilot.pause()
        assert {row[1] for row in lines(screen, "services")} == {"-"}
        assert "mode ebpf, as last programmed   asking the agent ..." in text(screen, "head")
        LateReader.answers.set()
        await until(lambda: "in sync" in text(screen, "head"), "the agent's answer is not shown")
        await until(lambda: "-" not in {row[1] for row in lines(screen, "services")}, "no rates by the second reading")

    drive(lab, agent, keys, reader=LateReader)


def test_messages_that_come_while_the_screen_is_taken_down_are_no_error(lab: Lab, agent: Agent) -> None:
    async def keys(screen: Top, pilot: Pilot[None]) -> None:
        await until(lambda: bool(lines(screen, "services")), "no services")
        table = screen.query_one("#services", Listing)
        moved = Listing.RowHighlighted(table, 0, next(iter(table.rows)))
        await screen.screen.remove_children()
        screen.post_message(moved)
        await asyncio.sleep(2 * INTERVAL)  # and a look
        await pilot.pause()

    drive(lab, agent, keys)  # what a message meets is raised here


@pytest.mark.usefixtures("load")
def test_programs_get_json(lab: Lab, agent: Agent) -> None:
    argv = ("top", "default/web:http", "--filter", "web", "--count", "2", "-o", "json")
    done = agent.command(*argv, "--admin-socket", str(agent.socket))
    assert done.returncode == 0, done.stderr
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(looks) == 2
    assert {row["name"] for row in looks[1]["services"]} == {"default/web:http"}
    assert 5 < max(row["connections"] for row in looks[1]["services"]) < 60
    assert sum(row["share"] or 0 for row in looks[1]["backends"]) == pytest.approx(1)
    assert looks[1]["mode"] == "ebpf"


def test_it_ends_without_a_word_when_nobody_reads_its_json(lab: Lab, agent: Agent) -> None:
    words = [sys.executable, "-m", "hybrid_proxy.controller", "top", "-o", "json", "--interval", "0.1"]
    read, written = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            lab.command("node", [*words, "--admin-socket", str(agent.socket)]),
            stdout=written, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
    finally:
        os.close(written)
    assert (done.returncode, done.stderr) == (1, "")


def test_without_a_terminal_it_says_what_to_do(lab: Lab, agent: Agent) -> None:
    done = agent.command("top", "--admin-socket", str(agent.socket))
    assert done.returncode == 2
    assert "-o json" in done.stderr


# In a real terminal


class Terminal:
    """A shell in tmux, on a server of its own.

    No two tests share a socket: tmux's server answers on it for a moment after it was told to end.
    """

    def __init__(self, folder: Path) -> None:
        self.argv = ("tmux", "-S", str(folder / "tmux"), "-f", "/dev/null")

    def _run(self, *words: str) -> str:
        return subprocess.run([*self.argv, *words], check=True, capture_output=True, text=True, timeout=20).stdout

    def start(self) -> None:
        self._run("new-session", "-d", "-s", "t", "-x", "120", "-y", "36", "env PS1='$ ' bash --norc --noprofile")

    def type(self, *keys: str) -> None:
        self._run("send-keys", "-t", "t", *keys)

    def screen(self) -> str:
        return self._run("capture-pane", "-p", "-t", "t")

    def alternate(self) -> bool:
        """Whether a program has the terminal's other screen."""
        return self._run("display-message", "-p", "-t", "t", "#{alternate_on}").strip() == "1"

    def wait(self, pattern: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, shown := self.screen(), re.MULTILINE):
            assert time.monotonic() < deadline, f"{pattern!r} does not appear:\n{shown}"
            time.sleep(0.1)
        return shown

    def end(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._run("kill-server")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is missing: make setup installs it")
    made = Terminal(tmp_path)
    made.start()
    yield made
    made.end()


def started(terminal: Terminal, lab: Lab, agent: Agent) -> str:
    words = [sys.executable, "-m", "hybrid_proxy.controller", "top", "--admin-socket", str(agent.socket)]
    terminal.wait(r"^\$$")
    terminal.type(shlex.join(lab.command("node", words)), "Enter")
    return terminal.wait(r"^ default/web:http +[1-9]")


@pytest.mark.usefixtures("load")
def test_in_a_terminal_keys_work_and_it_quits_cleanly(lab: Lab, agent: Agent, terminal: Terminal) -> None:
    shown = started(terminal, lab, agent)
    assert "node lab-node   mode ebpf   in sync" in shown
    assert terminal.alternate()
    terminal.type("/")
    terminal.wait(r"part of a name")
    terminal.type("dns")
    terminal.wait(r"filter 'dns': 4 of 10 service ports")
    terminal.type("Enter")
    terminal.wait(r"q quit")
    terminal.type("q")
    terminal.wait(r"^\$$")
    assert not terminal.alternate()
    terminal.type("echo code $? in $(stty -a | grep -c ' echo ') line", "Enter")
    terminal.wait(r"^code 0 in 1 line")


@pytest.mark.usefixtures("load")
def test_ctrl_c_ends_it_too(lab: Lab, agent: Agent, terminal: Terminal) -> None:
    started(terminal, lab, agent)
    terminal.type("C-c")
    terminal.wait(r"^\$$")
    assert not terminal.alternate()


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize("agent", ["nftables"], indirect=True)
def test_modes_that_do_not_count_say_so(lab: Lab, agent: Agent) -> None:
    async def keys(screen: Top, pilot: Pilot[None]) -> None:
        await until(lambda: bool(lines(screen, "services")), "no services")
        said = f"mode {agent.mode} does not count"  # rows may be there before the agent answers
        await until(lambda: said in text(screen, "trouble"), "it is not said that nothing is counted")
        assert not any(column in title for title in titles(screen, "services") for column in ("conn", "/s", "first"))
        table = screen.query_one("#services", Listing)
        position = next(n for n, row in enumerate(lines(screen, "services")) if row[0] == "default/web:http")
        assert lines(screen, "services")[0][0] == "default/empty:http", "what fails is first"
        await until(lambda: bool(lines(screen, "backends")), "the first Service with backends is not the chosen one")
        await pilot.press(*["down"] * (position - table.cursor_row))
        assert table.cursor_row == position
        wanted = {f"{pod.address4}:8080" for pod in lab.pods()}
        await until(lambda: wanted <= {row[0] for row in lines(screen, "backends")}, "backends are not shown")

    drive(lab, agent, keys)
