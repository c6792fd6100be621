"""The demonstration: what a service proxy does, shown with real traffic in under a minute.

Each step announces what is about to happen, lets it happen, and checks that it did. Nothing is
staged: the agent is the one of `hybrid-proxy run`, the requests are HTTP and UDP over sockets of pods and
of the node, and what is shown are answers counted at the clients.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybrid_proxy.controller.commands.terminal import wants_colours
from hybrid_proxy.workshop.lab import examples
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.namespace import PATIENCE
from hybrid_proxy.workshop.lab.network import Lab, LabError, Place
from hybrid_proxy.workshop.lab.traffic import TIMEOUT, Tally, ask_tcp, load, meanwhile, target_of

V4, V6 = socket.AF_INET, socket.AF_INET6
FAMILIES: Final = ((V4, "IPv4"), (V6, "IPv6"))
FRAME: Final = 0.25  # seconds between two pictures
RATE: Final = 600.0  # requests a second, of those that are watched
LATER: Final = 4.0 * PATIENCE  # seconds that a load may take longer than planned
FOLLOWED_WITHIN: Final = 5.0 * PATIENCE  # seconds in which traffic must follow an edited file
LOOK: Final = 0.1  # seconds of a moment in which answers are counted


@dataclass
class Summary:
    """The results, for the last lines and for `-o json`."""

    checks: list[tuple[bool, str]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if every step did what it said."""
        return bool(self.checks) and all(good for good, _ in self.checks)


def run(name: str, pods: int, *, as_json: bool = False, console: Console | None = None) -> int:
    """Build a lab, show everything, remove the lab. 0 when every step did what it said, otherwise 1.

    Raises:
        LabError: no lab can be built here.
    """
    console = console or Console(
        stderr=as_json, highlight=False, soft_wrap=True, color_system="auto" if wants_colours() else None
    )
    summary = Summary()
    start = time.monotonic()
    console.print("[bold]hybrid-proxy: a Service is an address that no machine has.[/bold]")
    console.print(
        "Something on every node must carry its traffic to the pods behind it. Here is that something at work."
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exit that cleans up on its way
    with Lab(name, pods + 2) as lab:
        built = time.monotonic() - start
        demo = _Demo(lab, pods, console, summary)
        try:
            demo.show(built)
        except (LabError, OSError) as error:  # of the network: a step whose traffic did not even start
            summary.checks.append((False, f"step {demo.number}: {error}"))
            console.print(Text(f"✘ {error}", "red"))
        finally:
            demo.clean()
    console.print(f"  The lab is removed. {time.monotonic() - start:.0f} s in all.")
    _conclude(console, summary)
    if as_json:
        print(json.dumps({"passed": summary.passed, "checks": summary.checks, "numbers": summary.numbers}, indent=2))
    return 0 if summary.passed else 1


def _conclude(console: Console, summary: Summary) -> None:
    table = Table(title="What was measured", title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in summary.numbers.items():
        table.add_row(name, f"[bold]{value}[/bold]")
    console.print()
    console.print(table)
    failed = [text for good, text in summary.checks if not good]
    if failed:
        console.print(f"[red]{len(failed)} of {len(summary.checks)} checks failed:[/red] {'; '.join(failed)}")
    else:
        console.print(f"[green]All {len(summary.checks)} checks passed.[/green]")


class _Demo:
    """The steps, in order."""

    def __init__(self, lab: Lab, pods: int, console: Console, summary: Summary) -> None:
        self.lab, self.console, self.summary = lab, console, summary
        self.serving, self.spare, self.client = lab.pods()[:pods], lab.pods()[pods], lab.pods()[pods + 1]
        self.manifests = examples.copy(lab)
        examples.scale(self.web, self.serving)
        self.agent = Agent(lab, self.manifests)
        self.addresses = _addresses(self.manifests)
        self.requests = 0
        self.number = 0

    @property
    def web(self) -> Path:
        return self.manifests / "web.yaml"

    def show(self, built: float) -> None:
        """Every step. Raises `LabError` when going on makes no sense."""
        self.the_lab(built)
        self.the_agent()
        self.from_a_pod()
        self.from_the_node()
        self.affinity()
        self.scaling()
        self.refusal()
        self.killing()
        self.summary.numbers["requests answered"] = f"{self.requests:,}"

    # The steps

    def the_lab(self, built: float) -> None:
        self.step("A small cluster", "A node, its pods and a client outside, as network namespaces of this machine.")
        for place in self.lab.places.values():
            role = {"client": "a machine outside", "node": "the node, a router"}.get(place.name, "a pod")
            if place == self.client:
                role = "a pod that only asks"
            self.say(f"{place.name:<7} {place.address4:<13} {place.address6:<12} {role}")
        http, udp = examples.ports(self.manifests)
        self.lab.serve(*(pod.name for pod in (*self.serving, self.spare)), http=http, udp=udp)
        self.check(built < 10, f"built in {built:.1f} s; the pods answer HTTP and UDP with their own name")

    def the_agent(self) -> None:
        self.step("The agent", "hybrid-proxy run reads Services from a folder and programs the node's kernel.")
        start = time.monotonic()
        self.agent.start()
        took = time.monotonic() - start
        status = self.agent.status()
        for name, addresses in self.addresses.items():
            self.say(f"{name:<7} {' '.join(addresses.values())}")
        mode = status.mode.effective if status else "?"
        self.check(
            status is not None and status.synced,
            f"mode {mode}: everything programmed {took:.1f} s after the process started",
        )
        self.summary.numbers["agent start to programmed"] = f"{took:.2f} s"

    def from_a_pod(self) -> None:
        names = [pod.name for pod in self.serving]
        self.step(
            "Requests from a pod",
            f"{self.client.name} asks the service web. No machine has that address; {', '.join(names)} answer in turn.",
        )
        for family, version in FAMILIES:
            self.watch(f"HTTP over {version}", names, "connections", "web", family, count=600)
        with self.connected(self.client, "web", V4) as connection:
            peer = ask_tcp(connection).peer[0]
        self.check(peer == self.client.address4, f"the backend sees the client's own address, {peer}")
        asked = self.addresses["dns"]
        for family, version in FAMILIES:
            self.watch(f"UDP over {version}", names[:2], "udp", "dns", family, count=300)
        self.check(True, f"and every UDP answer came from the address that was asked, {asked[V4]} or {asked[V6]}")

    def from_the_node(self) -> None:
        self.step(
            "Requests from the node itself",
            "Its processes choose a backend once, at connect(). Nothing is translated after that.",
        )
        names = [pod.name for pod in self.serving]
        for family, version in FAMILIES:
            what = f"HTTP over {version} from the node"
            self.watch(what, names, "connections", "web", family, count=300, place="node")
        with self.connected(self.lab["node"], "web", V4) as connection:
            ask_tcp(connection)
            shown = connection.getpeername()[0]
        self.check(f"{shown}:80" == self.addresses["web"][V4], f"the process still believes that it talks to {shown}")

    def affinity(self) -> None:
        self.step("A service with a memory", "sticky has sessionAffinity: a client comes back to where it was first.")
        seen: Counter[str] = Counter()
        for _ in range(20):
            with self.connected(self.client, "sticky", V4) as connection:
                seen[ask_tcp(connection, close=True).pod] += 1
        self.requests += seen.total()
        self.check(len(seen) == 1, f"20 connections of {self.client.name} all went to {' and '.join(seen)}")

    def scaling(self) -> None:
        self.step(
            "Scaling under load", "The file web.yaml is edited while requests go on. Traffic follows, none fails."
        )
        everyone = [pod.name for pod in (*self.serving, self.spare)]
        plans = [
            ("one pod more", [*self.serving, self.spare]),
            ("down to a single pod", self.serving[-1:]),
            ("back to the start", self.serving),
        ]
        slowest, tally, title = 0.0, Tally(), f"HTTP from {self.client.name}, each moment"
        requests = self.load("connections", "web", V4, self.client, tally, rate=500)
        with meanwhile([requests]), self.charts(title, everyone, lambda: tally.backends) as chart:
            chart.watch(1.0)
            for what, pods in plans:
                slowest = max(slowest, self.follow(what, pods, tally, chart))
        self.requests += tally.answered
        self.check(not tally.failed, f"{tally.answered:,} requests meanwhile, {tally.failed} failed {_why(tally)}")
        self.summary.numbers["edit of a file to traffic that follows, slowest of 3"] = (
            f"{(slowest + LOOK) * 1000:.0f} ms"
        )

    def follow(self, what: str, pods: Sequence[Place], tally: Tally, chart: _LiveChart) -> float:
        """Edit, wait until the answers of a moment come from exactly these pods; seconds until it began."""
        wanted = {pod.name for pod in pods}
        start = time.monotonic()
        examples.scale(self.web, pods)
        before, since = Counter(tally.backends), start
        while True:
            chart.watch(LOOK)
            moment = Counter(tally.backends) - before
            if set(moment) == wanted and moment.total() >= 12 * len(wanted):
                break
            if set(moment) - wanted or moment.total() > 60 * len(wanted):  # not yet: judge a new moment
                before, since = Counter(tally.backends), time.monotonic()
            if time.monotonic() - start > FOLLOWED_WITHIN:
                raise LabError(f"{what}: {sorted(wanted)} should answer, {dict(moment)} do")
        followed = since - start
        chart.watch(0.7)
        self.check(True, f"{what}: {', '.join(sorted(wanted))} {'answers' if len(wanted) == 1 else 'answer'}")
        return followed

    def refusal(self) -> None:
        self.step("A service without pods", "Its clients are refused at once, they need not wait for a timeout.")
        for place in (self.client, self.lab["node"]):
            for family, version in FAMILIES:
                with self.lab.socket(place.name, family) as connection:
                    connection.settimeout(2.0)
                    start = time.monotonic()
                    refused = "answered"
                    try:
                        connection.connect(target_of(self.addresses["empty"][family])[1])
                    except ConnectionRefusedError:
                        refused = "refused"
                    except TimeoutError:
                        refused = "silence"
                    took = (time.monotonic() - start) * 1000
                self.check(
                    refused == "refused" and took < 100, f"{place.name:<5} {version}: {refused} after {took:.1f} ms"
                )

    def killing(self) -> None:
        self.step(
            "kill -9 under load",
            "The programs stay in the kernel. The agent dies without a word, and later a new one takes over.",
        )
        tallies, loads = {}, []
        for place in (self.client, self.lab["node"]):
            for kind, service, family in (("connections", "web", V4), ("streams", "web", V6), ("udp", "dns", V4)):
                tally = tallies[f"{kind} from {place.name}"] = Tally()
                loads.append(self.load(kind, service, family, place, tally, rate=100))

        def answered() -> Counter[str]:
            return Counter({name: tally.answered for name, tally in tallies.items()})

        with meanwhile(loads), self.charts("answers, each moment", [*tallies], answered) as chart:
            chart.watch(0.8)
            self.agent.kill()
            self.check(not self.agent.running(), "the agent is killed")
            chart.watch(2.0)
            start = time.monotonic()
            self.agent.start()
            took = time.monotonic() - start
            chart.watch(0.8)
        status = self.agent.status()
        self.check(
            status is not None and status.dataplane.adopted is True,
            f"a new agent adopted what runs, {took:.1f} s after its start, and goes on",
        )
        total, failed = sum(t.answered for t in tallies.values()), sum(t.failed for t in tallies.values())
        moved = sum(t.moved for t in tallies.values())
        self.requests += total
        why = ", ".join(f"{name} {_why(tally)}" for name, tally in tallies.items() if tally.failed)
        self.check(total > 100 and not failed, f"{total:,} requests all the while, {failed} failed {why}")
        self.check(not moved, "no open connection was cut or moved to another pod")
        self.summary.numbers["requests failed while the agent was dead and restarted"] = f"{failed} of {total:,}"

    def clean(self) -> None:
        """End the agent and remove what it programmed, with the command that people use."""
        self.step("Cleaning up", "hybrid-proxy cleanup removes its programs, maps and pins, and nothing else.")
        if self.agent.running():
            self.agent.terminate()
        cleaned = self.agent.cleanup()
        self.check(
            cleaned.returncode == 0, "removed" if cleaned.returncode == 0 else f"cleanup failed: {cleaned.stderr}"
        )
        time.sleep(0.2)  # the kernel detaches a program some milliseconds after its last pin is gone
        with contextlib.suppress(OSError), self.connected(self.client, "web", V4, timeout=0.3):
            self.check(False, "the service still answers")

    # What they are made of

    def step(self, title: str, what: str) -> None:
        self.number += 1
        self.console.print()
        self.console.print(f"[bold cyan]{self.number}. {title}[/bold cyan]  {what}")

    def say(self, text: str) -> None:
        self.console.print(f"  {text}", style="dim", markup=False)

    def check(self, good: bool, text: str) -> None:
        """Note whether something is as it was said to be."""
        self.summary.checks.append((good, text.strip()))
        line = Text.assemble(("  ✔ " if good else "  ✘ ", "green" if good else "red"), text.strip())
        self.console.print(line)

    def check_spread(self, what: str, tally: Tally, names: Sequence[str]) -> None:
        """Everybody answered, nobody else did, nobody got less than a third of a fair share."""
        fair = tally.answered / len(names)
        good = not tally.failed and set(tally.backends) == set(names) and min(tally.backends.values()) > fair / 3
        shares = ", ".join(f"{name} {tally.backends[name]}" for name in names)
        self.check(
            good, f"{what}: {tally.answered} of {tally.answered + tally.failed} answered ({shares}) {_why(tally)}"
        )
        times = tally.report()["connect_ms"]
        if times["p50"] is not None:
            self.summary.numbers[f"connect, {what} (median, p99)"] = f"{times['p50']:.2f} ms, {times['p99']:.2f} ms"

    def watch(
        self, what: str, names: Sequence[str], kind: str, service: str, family: int, *, count: int, place: str = ""
    ) -> None:
        """Runs a load to its end, draws its spread meanwhile, and checks it."""
        tally, title = Tally(), f"{what}, {count} requests"
        source = self.lab[place] if place else self.client
        requests = self.load(kind, service, family, source, tally, rate=RATE, count=count)
        until = time.monotonic() + count / RATE + LATER
        with meanwhile([requests]), self.charts(title, names, lambda: tally.backends, count // len(names)) as chart:
            while tally.answered + tally.failed < count and time.monotonic() < until:
                chart.watch(FRAME / 2)
        self.requests += tally.answered
        self.check_spread(what, tally, names)

    def load(self, kind: str, service: str, family: int, place: Place, tally: Tally, **how: Any) -> partial[Tally]:
        """Returns the load of a service from a place, to be run; `how` as of `traffic.load`."""
        return partial(
            load, kind, target_of(self.addresses[service][family]), tally=tally, timeout=TIMEOUT * PATIENCE,
            open_socket=partial(self.lab.socket, place.name), **how,
        )  # fmt: skip

    @contextlib.contextmanager
    def connected(self, place: Place, service: str, family: int, timeout: float = 2.0) -> Iterator[socket.socket]:
        with self.lab.socket(place.name, family) as connection:
            connection.settimeout(timeout)
            connection.connect(target_of(self.addresses[service][family])[1])
            yield connection

    @contextlib.contextmanager
    def charts(
        self, title: str, names: Sequence[str], counts: Callable[[], Counter[str]], total: int | None = None
    ) -> Iterator[_LiveChart]:
        chart = _LiveChart(self.console, title, names, counts, total)
        with chart.live or contextlib.nullcontext():
            yield chart
            chart.draw()


class _LiveChart:
    """Bars of who answers how much: redrawn all the time at a terminal, and not drawn elsewhere.

    Args:
        console: where to draw.
        title: above the bars.
        names: one bar each.
        counts: answers so far, by name.
        total: the length of a full bar; None: bars show the answers of the last moment, not of all time.
    """

    def __init__(
        self, console: Console, title: str, names: Sequence[str], counts: Callable[[], Counter[str]], total: int | None
    ) -> None:
        self.console, self.title, self.names, self.counts, self.total = console, title, names, counts, total
        self.past: list[tuple[float, Counter[str]]] = []
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.draw()
            time.sleep(min(left, FRAME))

    def draw(self) -> None:
        if self.live:
            self.live.update(self._bars(), refresh=True)

    def _bars(self) -> Table:
        now, counts = time.monotonic(), Counter(self.counts())
        shown, full = counts, self.total or 1
        if self.total is None:
            self.past = [(at, old) for at, old in self.past if now - at < 1.0] + [(now, counts)]
            shown = counts - self.past[0][1]
            full = max(1, *shown.values(), shown.total() // 2) if shown else 1
        table = Table.grid(padding=(0, 1))
        table.title, table.title_justify = f"  {self.title}", "left"
        width = max(map(len, self.names)) + 2
        for name in self.names:
            bar = ProgressBar(total=full, completed=min(shown[name], full), width=40)
            table.add_row(f"{name:>{width}}", bar, f"{shown[name]}")
        return table


def _addresses(manifests: Path) -> dict[str, dict[int, str]]:
    """Of each example service by family, with its first port: `10.96.0.10:80`, `[fd96::10]:80`."""
    found: dict[str, dict[int, str]] = {}
    for path in sorted(manifests.glob("*.yaml")):
        for item in yaml.safe_load_all(path.read_text()):
            if item and item["kind"] == "Service":
                port = item["spec"]["ports"][0]["port"]
                four, six = item["spec"]["clusterIPs"]
                found[item["metadata"]["name"]] = {V4: f"{four}:{port}", V6: f"[{six}]:{port}"}
    return found


def _why(tally: Tally) -> str:
    failures = tally.failures.items()
    return f"({', '.join(f'{name} {count}' for name, count in failures)})" if failures else ""
