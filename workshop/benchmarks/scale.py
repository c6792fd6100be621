"""What grows with a cluster, and how: start, one change, memory and rules, from 10 services to 1,000,000 endpoints.

The plot is written to docs/scale.svg, beside what others published of kube-proxy.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from hybrid_proxy.workshop.benchmarks import curves
from hybrid_proxy.workshop.benchmarks.apidata import ApiProcess
from hybrid_proxy.workshop.benchmarks.change import PLANS, timed_change
from hybrid_proxy.workshop.benchmarks.kit import (
    METRICS,
    ROOT,
    ApiAgent,
    Result,
    Target,
    get,
    lab,
    median,
    quantile,
    say,
)
from hybrid_proxy.workshop.benchmarks.views import EbpfView, IptablesView, NftablesView, View
from hybrid_proxy.workshop.lab.network import LabError


class Size(NamedTuple):
    """A cluster: services, and endpoints of each."""

    services: int
    endpoints: int

    @property
    def total(self) -> int:
        """All endpoints."""
        return self.services * self.endpoints

    def __str__(self) -> str:
        return f"{self.services:,} x {self.endpoints}"


class Bars(NamedTuple):
    """What mode ebpf must reach at a size: seconds, milliseconds, MB."""

    start: float
    p50: float
    p99: float
    memory: float


SIZES = (Size(10, 10), Size(1_000, 1), Size(1_000, 10), Size(10_000, 10), Size(44_125, 1), Size(5_006, 50),
         Size(50_000, 20))  # fmt: skip
BARS = {
    Size(44_125, 1): Bars(3.0, 3, 15, 260),
    Size(5_006, 50): Bars(3.5, 3, 15, 260),
    Size(50_000, 20): Bars(15.0, 5, 30, 900),
}
SMALL: Final = Size(1_000, 1)  # the control: a change at 1,000 endpoints
FLAT = 1.5  # times as long a change may take at the largest size
VIEWS: dict[str, type[View]] = {"ebpf": EbpfView, "nftables": NftablesView, "iptables": IptablesView}
CHANGES = 200
PAUSE = 0.02  # seconds between two changes
SETTLED = 3.0  # seconds after the start: the first maintenance is over
# Seconds for a start or for one change; what takes longer ends the mode's part, larger sizes are left out.
BOUND = float(os.environ.get("HYBRID_PROXY_SCALE_BOUND", "120"))
MODES = tuple(os.environ.get("HYBRID_PROXY_SCALE_MODES", "ebpf,nftables,iptables").split(","))
PLOT = ROOT / "docs" / "scale.svg"


class Point(msgspec.Struct, frozen=True):
    """One mode at one size. Memory in MB; `rules` are entries of maps, elements and rules of tables."""

    mode: str
    services: int
    endpoints: int
    start: float
    start_cpu: float
    p50: float  # ms
    p99: float
    change_cpu: float  # ms of all threads, a change
    idle_cpu: float  # % of a core
    memory: float
    kernel: float
    rules: int
    scrape: float  # ms
    status: float

    @property
    def size(self) -> Size:
        """Of the cluster."""
        return Size(self.services, self.endpoints)


def measure() -> Result:
    """Each size with an API server of its own, each mode on an empty node."""
    points, left_out = _points()
    if PLOT is not None:
        PLOT.write_text(curves.drawn([(p.mode, p.services + p.size.total, p.start, p.p50) for p in points]))
    ebpf = {point.size: point for point in points if point.mode == "ebpf"}
    if not ebpf:
        raise RuntimeError("mode ebpf was not measured: HYBRID_PROXY_SCALE_MODES must name it")
    ordered = sorted(ebpf.values(), key=lambda point: point.size.total)
    largest, small = ordered[-1], ebpf.get(SMALL, ordered[0])
    targets = [(Target(f"change at {largest.size} against at {small.size}", FLAT), largest.p50 / small.p50)]
    for size, bars in BARS.items():
        if (point := ebpf.get(size)) is not None:
            for what, bar, found in (
                ("seconds to start", bars.start, point.start), ("ms of a change, median", bars.p50, point.p50),
                ("ms of a change, p99", bars.p99, point.p99), ("MB of the agent", bars.memory, point.memory),
            ):  # fmt: skip
                targets.append((Target(f"{size}: {what}", bar), found))
    exponents = _exponents(points)
    notes = [
        *(_line(point) for point in points),
        *left_out,
        *(f"{mode}: {what} grows as size^{power}" for (mode, what), power in exponents.items()),
    ]
    return Result(
        "scale", largest.p50, "ms", f"a change at {small.size}", small.p50, targets, notes,
        {"points": [msgspec.to_builtins(point) for point in points],
         "exponents": {f"{mode} {what}": power for (mode, what), power in exponents.items()}},
    )  # fmt: skip


def _line(point: Point) -> str:
    return (
        f"{point.mode:8} {point.size!s:>12}: start {point.start:.2f} s ({point.start_cpu:.2f} s of a CPU), change "
        f"{point.p50:.2f} / {point.p99:.2f} ms ({point.change_cpu:.2f} ms of a CPU), idle {point.idle_cpu:.1f} %, "
        f"{point.memory:.0f} MB, kernel {point.kernel:.1f} MB, {point.rules:,} rules, scrape {point.scrape:.0f} ms, "
        f"status {point.status:.0f} ms"
    )


def _points() -> tuple[list[Point], list[str]]:
    points: list[Point] = []
    left_out: list[str] = []
    modes = list(MODES)
    with lab(kind="curves") as made:
        for size in sorted(SIZES, key=lambda size: size.services + size.total):
            say(f"  {size}")
            with ApiProcess(*size, lab=made) as api:
                endpoints = [size.endpoints] * size.services  # as the API server has them, whatever the mode
                for mode in list(modes):
                    try:
                        points.append(_point(VIEWS[mode](made, api), size, endpoints))
                        say("  " + _line(points[-1]))
                    except (LabError, AssertionError, TimeoutError) as error:
                        modes.remove(mode)
                        left_out.append(f"{mode} ends before {size}: {str(error).splitlines()[0]}, {BOUND:g} s at most")
                        say("  " + left_out[-1])
    return points, left_out


def _point(view: View, size: Size, endpoints: list[int]) -> Point:
    agent = view.agent()
    agent.patience = 4 * BOUND
    try:
        seconds = agent.timed_start(BOUND)
        start_cpu = agent.processor_seconds()
        agent.wait(lambda status: status.synced, BOUND, "at leisure")
        time.sleep(SETTLED)
        idle, since = agent.processor_seconds(), time.monotonic()
        time.sleep(SETTLED)
        idle = 100 * (agent.processor_seconds() - idle) / (time.monotonic() - since)
        before = agent.processor_seconds()
        with view.lab.inside("node"), contextlib.closing(view):
            view.open()
            changes = _changes(view, agent, size, endpoints)
        change_cpu = (agent.processor_seconds() - before) / len(changes)
        memory = agent.memory()["VmRSS"]
        scrape = _milliseconds(lambda: get(view.lab, METRICS, "/metrics"))
        asked = time.monotonic()
        status = agent.running_status()
        answered = 1000 * (time.monotonic() - asked)
        with view.lab.inside("node"):
            rules = view.rules(status)
        agent.terminate()
        kernel = _kernel_memory()
    finally:
        view.end(agent)
    time.sleep(min(1.0, SETTLED))  # the kernel frees after a grace period
    kernel -= _kernel_memory()
    if (maps := status.dataplane.ebpf) is not None:
        kernel = sum(row.bytes for row in maps.maps.values()) / 1e6
    return Point(
        view.mode, size.services, size.endpoints, round(seconds, 3), round(start_cpu, 2),
        round(1000 * median(changes), 2), round(1000 * quantile(changes, 0.99), 2), round(1000 * change_cpu, 2),
        round(idle, 2), round(memory, 1), round(kernel, 1), rules, round(scrape, 1), round(answered, 1),
    )  # fmt: skip


def _changes(view: View, agent: ApiAgent, size: Size, counts: list[int]) -> list[float]:
    """Seconds of each of so many changes; the first one is not counted. A service loses its last endpoint.

    `counts`: how many endpoints each service has; follows the changes.
    """
    plan, seconds = PLANS[view.mode], []
    end = time.monotonic() + BOUND
    step = next(step for step in (7, 11, 13, 17) if math.gcd(step, size.services) == 1)
    for number in range(CHANGES + 1):
        index = number * step % size.services
        counts[index] = counts[index] - 1 if counts[index] else size.endpoints
        seconds.append(timed_change(plan, view, agent, index, counts[index]))
        if time.monotonic() > end:
            break
        time.sleep(PAUSE)
    return seconds[1:] or seconds


def _milliseconds(act: Callable[[], object]) -> float:
    start = time.monotonic()
    act()
    return 1000 * (time.monotonic() - start)


def _kernel_memory() -> float:
    """MB of the whole kernel's memory that rules may be in: only a difference of two moments says something."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(rows[name].split()[0]) * 1024 / 1e6 for name in ("Slab", "VmallocUsed", "Percpu"))


def _exponents(points: Sequence[Point]) -> dict[tuple[str, str], float]:
    """By mode and figure: the power of all services and endpoints with which it grows, from 1,000 services on."""
    found = {}
    for mode in dict.fromkeys(point.mode for point in points):
        large = [point for point in points if point.mode == mode and point.services >= SMALL.services]
        if len(large) < 3:
            continue
        for what in ("start", "start_cpu", "p50", "p99", "memory", "kernel", "rules", "scrape", "status"):
            rows = [(p.services + p.size.total, float(getattr(p, what))) for p in large]
            found[mode, what] = round(curves.exponent([row for row in rows if row[1] > 0]), 2)
    return found
