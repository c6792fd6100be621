"""Many agents and one API server: what each costs it, and how long until all serve after all of them were restarted.

Hundreds of the agent's real sources are measured against the fake API server. The rest is computed: `herd_model`.
"""

from __future__ import annotations

import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hybrid_proxy.workshop.benchmarks.apidata import ApiProcess
from hybrid_proxy.workshop.benchmarks.herd import EVERY, Report
from hybrid_proxy.workshop.benchmarks.herd_model import Costs, Outcome, Servers, simulate
from hybrid_proxy.workshop.benchmarks.herd_plot import Line, drawn
from hybrid_proxy.workshop.benchmarks.kit import ROOT, Result, Target, lab, say
from hybrid_proxy.workshop.lab.apiserver import endpoint_slice, service
from hybrid_proxy.workshop.lab.network import Lab

SERVICES, ENDPOINTS = 1_000, 10
PROCESSES, EACH = 2, 100  # sources
FEW = 4  # of which changes are measured: the fake server sends no faster
RATES = (100, 1_000)  # changes a second
SECONDS = 5.0
WAIT = 300.0
SETTLED = 3.0  # seconds without a request
CLUSTER = (10_000, 10)  # services and endpoints of each, of the simulated cluster; one source reads it for real
PROGRAM = 1.0  # seconds from the last list until all of it serves, as `start` measures
OBJECTS_PER_SEAT, MOST_SEATS = 100, 10  # of a list, as API priority and fairness estimates it
FAST, SLOW = 2e9, 1.25e9  # bytes a second of a server: 16 cores that encode 125 MB/s of JSON each, or 10 Gbit/s
AWAY = 20.0  # seconds without any server
BAR = 60.0  # seconds until all serve
PLOT = ROOT / "docs" / "many-agents.svg"


class Scenario(NamedTuple):
    """What happens to how many agents and which servers."""

    words: str
    nodes: int
    servers: Servers
    away: float = 0.0


SCENARIOS = (
    Scenario("5,000 restarted at once", 5_000, Servers(rate=FAST)),
    Scenario("5,000, an own level of 390 seats", 5_000, Servers(rate=FAST, seats=390)),
    Scenario("5,000, servers of 10 Gbit/s", 5_000, Servers(rate=SLOW)),
    Scenario("5,000, no seats to borrow", 5_000, Servers(rate=FAST, borrowed=98)),
    Scenario(f"5,000, no server for {AWAY:g} s", 5_000, Servers(rate=FAST), AWAY),
    Scenario("15,000 restarted at once", 15_000, Servers(rate=FAST)),
)


class Reading(NamedTuple):
    """One source that reads the simulated cluster alone."""

    requests: int
    bytes: float
    cpu: float  # seconds
    seconds: float
    memory: float  # MB
    streams: dict[
        str, float
    ]  # kind -> seconds that the server was busy with its stream, until all objects were written


class Changes(NamedTuple):
    """What changes cost one source: bytes and milliseconds of a CPU a second."""

    bytes: float
    cpu: float


class Measured(NamedTuple):
    """Of one agent among many."""

    cpu: float  # seconds
    memory: float  # MB
    seconds: float  # until all of them had listed everything
    changes: dict[int, Changes]  # by changes a second
    again: float  # requests after every stream was cut
    refused: float  # 429s, when the server had said so once to each stream


def measure() -> Result:
    """Measure the sources, then let the model have their costs."""
    reading, found = _reading(), _measured()
    costs = _costs(reading)
    outcomes = [(each, _simulated(each, costs)) for each in SCENARIOS]
    if PLOT is not None:
        PLOT.write_text(drawn([Line(each.words, each.nodes, one.done) for each, one in outcomes], BAR))
    first, servers = outcomes[0][1], SCENARIOS[0].servers
    floor = first.nodes * sum(costs.bytes.values()) / (servers.number * servers.rate)
    return Result(
        "agents", first.converged, "s", "the bytes of all lists, sent as fast as the servers can", floor,
        [
            (Target(f"seconds until {first.nodes:,} agents that were restarted at once serve", BAR), first.converged),
            (Target("requests that are refused, of each agent", 10), first.refused / first.nodes),
        ],
        [f"agents: {note}" for note in (*_notes(reading, found), *map(_told, outcomes))],
        {
            "reading": reading._asdict(),
            "measured": {
                **found._asdict(), "changes": {str(rate): each._asdict() for rate, each in found.changes.items()}
            },
            "costs": costs._asdict(),
            "simulated": [
                {"what": each.words, "nodes": each.nodes, "converged": round(one.converged, 1),
                 "half": round(one.after(0.5), 1), "requests": one.requests, "refused": one.refused, "peak": one.peak}
                for each, one in outcomes
            ],
        },
    )  # fmt: skip


def _notes(reading: Reading, found: Measured) -> Iterator[str]:
    many = f"one of {PROCESSES * EACH} agents, {SERVICES:,} x {ENDPOINTS}"
    yield (
        f"one agent alone, {CLUSTER[0]:,} x {CLUSTER[1]}: {reading.requests} requests, {reading.bytes / 1e6:.1f} MB, "
        f"read in {reading.seconds:.2f} s ({reading.cpu:.2f} s of a CPU); the server is busy for "
        + " and ".join(f"{seconds:.2f} s with {kind}" for kind, seconds in reading.streams.items())
    )
    yield f"{many}: {1000 * found.cpu:.0f} ms of a CPU, {found.memory:.1f} MB to start"
    yield f"all {PROCESSES * EACH} have listed everything after {found.seconds:.1f} s"
    for rate, each in found.changes.items():
        yield f"{rate} changes/s: {each.bytes / 1000:.0f} kB/s to each agent, {each.cpu:.1f} ms of a CPU a second"
    size, speed = _packed()
    yield f"compressed, a list has {size:.3f} of its size, and costs the server a CPU second for {speed:.0f} MB"
    yield f"{many}: {found.again:.1f} requests after all streams were cut"
    yield f"{many}: {found.refused:.1f} answers 429, when each was refused once"


def _told(outcome: tuple[Scenario, Outcome]) -> str:
    each, one = outcome
    return (
        f"{each.words}: all after {one.converged:.0f} s, half after {one.after(0.5):.0f} s, {one.requests:,} requests, "
        f"{one.refused:,} refused, {one.peak:,} in the busiest second"
    )


def _simulated(each: Scenario, costs: Costs) -> Outcome:
    chance = random.Random(each.nodes).random  # the same each time
    return simulate(each.nodes, each.servers, costs, chance, away=each.away)


def _costs(reading: Reading) -> Costs:
    """Of one agent; bytes and processor time are shared by kinds as the objects' texts are."""
    services, endpoints = CLUSTER
    texts = {"Service": service(0), "EndpointSlice": endpoint_slice(0, range(endpoints), endpoints)}
    sizes = {kind: len(msgspec.json.encode(text)) for kind, text in texts.items()}
    shares = {kind: size / sum(sizes.values()) for kind, size in sizes.items()}
    seats = max(1, min(MOST_SEATS, services // OBJECTS_PER_SEAT))
    return Costs(
        {kind: int(reading.bytes * share) for kind, share in shares.items()} | {"Node": 2_000, "ServiceCIDR": 500},
        PROGRAM,
        {kind: reading.cpu * share for kind, share in shares.items()},
        dict.fromkeys(sizes, seats),
    )


def _packed() -> tuple[float, float]:
    """What gzip leaves of a page of slices, at the level that API servers use, and how many MB it packs in a second."""
    page = b",".join(msgspec.json.encode(endpoint_slice(n, range(ENDPOINTS), ENDPOINTS)) for n in range(500))
    begun = time.process_time()
    packed = len(zlib.compress(page, 1))
    return packed / len(page), len(page) / 1e6 / (time.process_time() - begun)


def _reading() -> Reading:
    with lab(kind="herd") as made, ApiProcess(*CLUSTER, lab=made, watch_list=True) as api:
        before = _received(made)
        with _herd(made, api, 1, 1) as one:
            found = one.settled(lambda report: report.ready == 1)
            state: dict[str, Any] = api.control("state")
            streams = {kind: state["began"][kind] for kind in ("services", "endpointslices")}
            return Reading(found.requests, _received(made) - before, found.cpu, found.seconds, found.memory, streams)


def _measured() -> Measured:
    with lab(kind="herd") as made, ApiProcess(SERVICES, ENDPOINTS, lab=made, watch_list=True) as api:
        changes = {}
        with _herd(made, api, 1, FEW) as few:
            few.wait(lambda report: report.ready == FEW)
            for rate in RATES:
                api.churn(rate, SECONDS)
                before, spent = _received(made), few.report().cpu
                written = len(api.churned())
                time.sleep(2 * EVERY)
                share = rate / written / FEW  # of what was measured: one second, one source
                changes[rate] = Changes((_received(made) - before) * share, 1000 * (few.report().cpu - spent) * share)
                say(f"  {written} changes, {rate} a second: {changes[rate].bytes / 1000:.0f} kB/s to each source")
        number = PROCESSES * EACH
        with _herd(made, api, PROCESSES, EACH) as herd:
            started = herd.wait(lambda report: report.ready == number)
            say(f"  {number} sources are ready after {started.seconds:.1f} s")
            api.control("cut")
            again = herd.settled().requests - started.requests
            before_refusal = herd.report().refused
            api.control("fault", plural="endpointslices", answers=[[429, {"Retry-After": "1"}]] * number)
            api.control("cut", plural="endpointslices")
            refused = herd.settled(lambda report: report.refused >= before_refusal + number).refused - before_refusal
    return Measured(
        started.cpu / number, started.memory / number, started.seconds, changes, again / number, refused / number
    )


class _Herd:
    """Processes of sources, by the files that they write to."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def report(self) -> Report:
        """All processes together, as they reported last."""
        whole = Report()
        for file in self._files:
            lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            one = msgspec.json.decode(lines[-1], type=Report) if lines else Report()
            for name in Report.__struct_fields__:
                join = max if name == "seconds" else sum
                setattr(whole, name, join((getattr(whole, name), getattr(one, name))))
        return whole

    def wait(self, reached: Callable[[Report], bool]) -> Report:
        """Until the report is so.

        Raises:
            TimeoutError: it never was.
        """
        deadline = time.monotonic() + WAIT
        while not reached(report := self.report()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the sources came no further than {report}")
            time.sleep(EVERY)
        return report

    def settled(self, reached: Callable[[Report], bool] = lambda _: True) -> Report:
        """The report, once nobody has asked for anything for `SETTLED` seconds."""
        before, since = self.wait(reached), time.monotonic()
        while time.monotonic() - since < SETTLED:
            time.sleep(EVERY)
            if (now := self.report()).requests != before.requests:
                before, since = now, time.monotonic()
        return before


@contextmanager
def _herd(made: Lab, api: ApiProcess, processes: int, each: int) -> Iterator[_Herd]:
    files, command = [], [sys.executable, "-m", "hybrid_proxy.workshop.benchmarks.herd", api.kubeconfig, str(each)]
    with ExitStack() as stack:
        for number in range(processes):
            files.append(made.folder / f"herd-{number}.log")
            process = made.start("node", command, output=stack.enter_context(files[-1].open("w")))
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield _Herd(files)


def _received(made: Lab) -> int:
    """Bytes that the node's loopback interface has delivered."""
    lines = made.run("node", ["cat", "/proc/net/dev"]).stdout.splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))
