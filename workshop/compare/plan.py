"""The steps of a comparison and their order.

In each round the modes take turns, so that other work of the machine affects all of them alike. The order rotates from
round to round: no mode is always the first, or always after the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from hybrid_proxy.workshop.measuring.stats import rotated

Kind = Literal["start", "traffic", "change", "live"]


class Metric(msgspec.Struct, frozen=True):
    """One row of the report."""

    name: str  # in JSON
    title: str  # for people
    unit: str  # of its values; "" for a number of things
    better: Literal["more", "less", "neither"]  # the better direction
    control: bool  # the plain address of a pod is measured in turn
    kind: Kind  # the step that measures it
    load: str = ""  # the load that yields it


METRICS: Final = (
    Metric("connection_cost", "cost of a connection", "µs", "less", True, "traffic", "connections"),
    Metric("request_cost", "cost of a request", "µs", "less", True, "traffic", "requests"),
    Metric("stream_cost", "cost of a Gbit", "ms", "less", True, "traffic", "stream"),
    Metric("datagram_cost", "cost of a UDP packet", "µs", "less", True, "traffic", "datagrams"),
    Metric("connection_cpu", "the machine's CPU for a connection", "µs", "less", True, "traffic", "connections"),
    Metric("request_cpu", "the machine's CPU for a request", "µs", "less", True, "traffic", "requests"),
    Metric("latency_p50", "latency, p50", "ms", "less", True, "traffic", "requests"),
    Metric("latency_p90", "latency, p90", "ms", "less", True, "traffic", "requests"),
    Metric("latency_p99", "latency, p99", "ms", "less", True, "traffic", "requests"),
    Metric("connections", "new connections", "1/s", "more", True, "traffic", "connections"),
    Metric("requests", "requests on open connections", "1/s", "more", True, "traffic", "requests"),
    Metric("stream", "throughput of one connection", "Gbit/s", "more", True, "traffic", "stream"),
    Metric("datagrams", "small UDP packets", "1/s", "more", True, "traffic", "datagrams"),
    Metric("change", "time until a change takes effect", "ms", "less", False, "change"),
    Metric("applied", "the agent's part of a change", "ms", "less", False, "change"),
    Metric("start", "time to start", "s", "less", False, "start"),
    Metric("memory", "memory of the agent", "MB", "less", False, "change"),
    Metric("rules", "rules in the kernel", "", "neither", False, "start"),
    Metric("entries", "entries of maps, sets and tables", "", "neither", False, "start"),
)
KUBE_PROXY: Final = "kube-proxy-"  # begins the names of its modes
LOADS: Final = ("connections", "requests", "stream", "datagrams")


def metric(name: str) -> Metric:
    """Returns the metric of that name."""
    return next(known for known in METRICS if known.name == name)


class Settings(msgspec.Struct, frozen=True):
    """The settings of a run; one that is continued must have the same."""

    modes: tuple[str, ...]  # the first one is compared with each of the others
    sizes: tuple[int, ...]  # numbers of services
    backends: int  # endpoints of each service
    rounds: int  # how often everything is measured
    seconds: int  # how long each load lasts
    changes: int  # of a backend, in each round
    one_cpu: bool = True  # clients and servers share one CPU
    live: str = ""  # `NAMESPACE/NAME` of a service of this node, "": a lab
    path: str = "/"  # of the requests to that service
    kube_proxy: str = ""  # path of its binary, which its modes need
    turns: int = 1  # how often each load has its turn in a round; a start takes longer and is measured once


class Step(msgspec.Struct, frozen=True):
    """One measurement: its kind, mode, number of services, and round (from 0; for traffic: the turn)."""

    kind: Kind
    mode: str
    size: int
    round: int

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.mode}/{self.size}/{self.round}"


def steps(settings: Settings, works: tuple[str, ...]) -> Iterator[Step]:
    """Yields all steps for the modes that work here, by size and round.

    A round restarts every mode, then measures traffic in each turn, then changes.
    """
    chosen = [mode for mode in settings.modes if mode in works]
    for size in settings.sizes:
        for number in range(settings.rounds):
            for kind, turn in _parts(settings, number):
                for mode in rotated(chosen, turn):
                    yield Step(kind, mode, size, turn)


def _parts(settings: Settings, number: int) -> Iterator[tuple[Kind, int]]:
    """Yields the kinds of steps in one round, each with the number of its steps."""
    turns = range(number * settings.turns, (number + 1) * settings.turns)
    if settings.live:
        yield from (("live", turn) for turn in turns)
        return
    yield "start", number
    yield from (("traffic", turn) for turn in turns)
    yield "change", number


def control_first(step: Step, load: str) -> bool:
    """Tells whether the control is measured before the service: in half of all cases, for each load."""
    return (step.round + LOADS.index(load)) % 2 == 0
