"""Start, one change and memory of an agent, in three modes, from 10 services to 1,000,000 endpoints.

Each size has an API server of its own (TLS, pages of 500), each mode an empty node. A start runs from the fork of the
agent to its log line "programmed". A change runs from the moment at which the API server writes the event until another
process sees it in the kernel. Afterwards every service in the kernel is compared with the API's objects. The control is
a change at 1,000 services of one endpoint.

HYBRID_PROXY_SCALE_SIZES=10x10,10000x10 measures these sizes, HYBRID_PROXY_SCALE_MODES=ebpf these modes, with
HYBRID_PROXY_SCALE_PODS=30 on a node with so many pods. A mode ends when a start or a change takes longer than
HYBRID_PROXY_SCALE_BOUND seconds.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from hybrid_proxy.workshop.benchmarks.kit import median, say
from hybrid_proxy.workshop.benchmarks.views import EbpfView, IptablesView, NftablesView, View, check
from hybrid_proxy.workshop.lab.network import Lab, LabError
from hybrid_proxy.workshop.measuring.apidata import ApiProcess
from hybrid_proxy.workshop.measuring.nodes import METRICS, get, lab
from hybrid_proxy.workshop.measuring.results import Result, Target
from hybrid_proxy.workshop.measuring.stats import quantile


class Size(NamedTuple):
    """The size of a cluster: services, and endpoints of each."""

    services: int
    endpoints: int

    @property
    def total(self) -> int:
        return self.services * self.endpoints

    def __str__(self) -> str:
        return f"{self.services:,} x {self.endpoints}"


class Limits(NamedTuple):
    """The targets of mode ebpf at a size: seconds, milliseconds, MB, and for CPU milliseconds and % of a core."""

    start: float
    p50: float
    p99: float
    memory: float
    cpu: float = math.inf
    idle: float = math.inf


ALL_SIZES = "10x10,1000x1,1000x10,10000x10,44125x1,5006x50,50000x20"
ALL_MODES = "ebpf,nftables,iptables"
SIZES = tuple(
    Size(*map(int, text.split("x"))) for text in os.environ.get("HYBRID_PROXY_SCALE_SIZES", ALL_SIZES).split(",")
)
LIMITS = {
    Size(10_000, 10): Limits(2.0, 5, 20, 150, 1.6, 0.2),
    Size(44_125, 1): Limits(3.0, 3, 15, 260),
    Size(5_006, 50): Limits(3.5, 3, 15, 260),
    Size(50_000, 20): Limits(15.0, 5, 30, 900),
}
SMALL: Final = Size(1_000, 1)  # the control: a change at 1,000 endpoints
FLAT = 1.5  # times as long a change may take at the largest size
VIEWS: dict[str, type[View]] = {"ebpf": EbpfView, "nftables": NftablesView, "iptables": IptablesView}
CHANGES = int(os.environ.get("HYBRID_PROXY_SCALE_CHANGES", "200"))
PAUSE = 0.2  # seconds between two changes: caches are cold, as where changes are rare
SETTLED = 3.0  # seconds after the start: the first maintenance is over
IDLE = 15.0  # seconds in which nothing changes: three reads of the flows
# Seconds for a start or for one change; what takes longer ends the mode's part, larger sizes are left out.
BOUND = float(os.environ.get("HYBRID_PROXY_SCALE_BOUND", "120"))
PODS = int(os.environ.get("HYBRID_PROXY_SCALE_PODS", "0"))
CHECKED = 100_000  # endpoints up to which the kernel is compared with the API
MODES = tuple(os.environ.get("HYBRID_PROXY_SCALE_MODES", ALL_MODES).split(","))
KERNEL = ("Slab", "VmallocUsed", "Percpu")  # rules may be there: only a difference of two moments says something
POLLS = {"ebpf": 0.00005, "nftables": 0.0002, "iptables": 0.0005}  # seconds between two reads of the kernel


class Point(msgspec.Struct, frozen=True):
    """One mode at one size. Memory in MB."""

    mode: str
    services: int
    endpoints: int
    start: float
    start_cpu: float
    restart: float  # over what a killed agent left
    restart_cpu: float
    p50: float  # ms
    p99: float
    change_cpu: float  # ms of all threads, a change
    idle_cpu: float  # % of a core
    memory: float
    peak: float
    kernel: float
    available: float  # of the machine
    scrape: float  # ms
    status: float

    @property
    def size(self) -> Size:
        return Size(self.services, self.endpoints)


def measure() -> Result:
    """Measures each size with an API server of its own, each mode on an empty node."""
    points, left_out = _points()
    ebpf = {point.size: point for point in points if point.mode == "ebpf"}
    if not ebpf:
        raise RuntimeError("mode ebpf was not measured: HYBRID_PROXY_SCALE_MODES must name it")
    ordered = sorted(ebpf.values(), key=lambda point: point.size.total)
    largest, small = ordered[-1], ebpf.get(SMALL, ordered[0])
    targets = [(Target(f"change at {largest.size} against at {small.size}", FLAT), largest.p50 / small.p50)]
    for size, limits in LIMITS.items():
        if (point := ebpf.get(size)) is not None:
            for what, limit, found in (
                ("seconds to start", limits.start, point.start), ("ms of a change, median", limits.p50, point.p50),
                ("ms of a change, p99", limits.p99, point.p99), ("MB of the agent", limits.memory, point.memory),
                ("ms of a CPU for a change, idle use included", limits.cpu, point.change_cpu),
                ("% of a CPU when idle", limits.idle, point.idle_cpu),
            ):  # fmt: skip
                targets.append((Target(f"{size}: {what}", limit), found))
    return Result(
        "scale", largest.p50, "ms", f"a change at {small.size}", small.p50, targets,
        [*(_line(point) for point in points), *left_out],
        {"points": [msgspec.to_builtins(point) for point in points]},
    )  # fmt: skip


def _line(point: Point) -> str:
    return (
        f"{point.mode:8} {point.size!s:>12}: start {point.start:.2f} s ({point.start_cpu:.2f} s of a CPU), "
        f"restart {point.restart:.2f} s ({point.restart_cpu:.2f} s of a CPU), change "
        f"{point.p50:.2f} / {point.p99:.2f} ms ({point.change_cpu:.2f} ms of a CPU), idle {point.idle_cpu:.2f} %, "
        f"{point.memory:.0f} MB ({point.peak:.0f} at most), kernel {point.kernel:.1f} MB, "
        f"{point.available:.0f} MB available, scrape {point.scrape:.0f} ms, "
        f"status {point.status:.0f} ms"
    )


def _points() -> tuple[list[Point], list[str]]:
    points: list[Point] = []
    left_out: list[str] = []
    modes = list(MODES)
    with lab(min(PODS, 1), kind="scale") as made:
        _add_links(made)
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


def _add_links(made: Lab) -> None:
    """Gives the node the other pods' links; their far ends are in the namespace of the first pod."""
    for number in range(2, PODS + 1):
        far = {"ifname": f"eth{number}", "net_ns_fd": made["pod1"].namespace.name}
        made.netlink("node").link("add", kind="veth", ifname=f"veth{number}", peer=far, state="up")


def _point(view: View, size: Size, endpoints: list[int]) -> Point:
    agent = view.agent()
    agent.patience = 4 * BOUND
    try:
        seconds = agent.timed_start(BOUND)
        start_cpu = agent.processor_seconds()
        agent.wait(lambda status: status.synced, BOUND, "at leisure")
        time.sleep(SETTLED)
        idle = 100 * agent.busy(IDLE)
        before = agent.processor_seconds()
        with view.lab.inside("node"), contextlib.closing(view):
            view.open()
            changes = _changes(view, size, endpoints)
        change_cpu = (agent.processor_seconds() - before) / len(changes)
        memory, available = agent.memory(), _megabytes("MemAvailable")
        scrape = _milliseconds(lambda: get(view.lab, METRICS, "/metrics"))
        answered = _milliseconds(agent.running_status)
        status = agent.running_status()
        if size.total <= CHECKED:
            check(view)
        agent.kill()
        restart, restart_cpu = agent.timed_start(BOUND), agent.processor_seconds()
        agent.terminate()
        kernel = _megabytes(*KERNEL)
    finally:
        view.end(agent)
    time.sleep(min(1.0, SETTLED))  # the kernel frees after a grace period
    kernel -= _megabytes(*KERNEL)
    if (maps := status.dataplane.ebpf) is not None:
        kernel = sum(row.bytes for row in maps.maps.values()) / 1e6
    found = (
        seconds, start_cpu, restart, restart_cpu, 1000 * median(changes), 1000 * quantile(changes, 0.99),
        1000 * change_cpu, idle, memory["VmRSS"], memory["VmHWM"], kernel, available, scrape, answered,
    )  # fmt: skip
    return Point(view.mode, *size, *(round(value, 3) for value in found))


def _changes(view: View, size: Size, counts: list[int]) -> list[float]:
    """Returns the seconds of each of so many changes; the first one is not counted. A service loses its last endpoint.

    `counts`: how many endpoints each service has; follows the changes.
    """
    seconds = []
    end = time.monotonic() + BOUND
    step = next(step for step in (7, 11, 13, 17) if math.gcd(step, size.services) == 1)
    for number in range(CHANGES + 1):
        index = number * step % size.services
        counts[index] = counts[index] - 1 if counts[index] else size.endpoints
        seconds.append(_timed_change(view, index, counts[index]))
        if time.monotonic() > end:
            break
        time.sleep(PAUSE)
    return seconds[1:] or seconds


def _timed_change(view: View, index: int, wanted: int) -> float:
    """Returns the seconds from the API server's write to the kernel."""
    before = view.state(index)
    view.api.send_endpoints(index, list(range(wanted)))
    deadline = time.monotonic() + BOUND
    while view.state(index) == before:
        time.sleep(POLLS[view.mode])
        if time.monotonic() > deadline:
            view.api.sent_endpoints()  # the API server can be asked again
            raise TimeoutError(f"the change of service {index} is not in the kernel after {BOUND:g} s")
    return (time.monotonic_ns() - view.api.sent_endpoints()) / 1e9


def _milliseconds(act: Callable[[], object]) -> float:
    start = time.monotonic()
    act()
    return 1000 * (time.monotonic() - start)


def _megabytes(*names: str) -> float:
    """Returns so much of the whole machine's memory."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(rows[name].split()[0]) * 1024 / 1e6 for name in names)
