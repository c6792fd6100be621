"""Runs that nobody measured, for the statistics and the reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from hybrid_proxy.workshop.compare.plan import METRICS, Settings, steps
from hybrid_proxy.workshop.compare.result import BINS, Cell, ModeState, Run
from hybrid_proxy.workshop.measuring.machine import Machine

MACHINE = Machine("6.18.0", "Debian 12", "a <processor> & more", 2, 8 << 30, "kvm", False, 0.5, {"wrk": "4.1.0"})

# How each mode stands to the control, in every metric that has one: rates are multiplied, times divided.
SPEED = {"ebpf": 1.05, "ipvs": 0.9, "nftables": 0.85, "iptables": 0.8, "userspace": 0.2,
         "kube-proxy-nftables": 0.7}  # fmt: skip
EVERY = ("ebpf", "ipvs", "nftables", "iptables", "userspace", "kube-proxy-nftables")
WOBBLE = (0.99, 1.01, 1.0, 1.02, 0.98, 1.0)


def made_up(
    modes: Sequence[str] = ("ebpf", "nftables", "iptables"),
    sizes: Sequence[int] = (10, 1000),
    rounds: int = 6,
    broken: Mapping[str, str] | None = None,
    speed: Mapping[str, float] = SPEED,
    machine: Machine = MACHINE,
    upto: int | None = None,
    turns: int = 1,
) -> Run:
    """A run whose ratios to the control are those of `speed`, with a little wobble in both."""
    settings = Settings(tuple(modes), tuple(sizes), 3, rounds, 1, 2, turns=turns)
    broken = broken or {}
    works = tuple(mode for mode in modes if mode not in broken)
    planned = list(steps(settings, works))
    cells = tuple(_cell(step, speed[step.mode]) for step in planned[:upto])
    states = tuple(ModeState(mode, mode in works, broken.get(mode, "")) for mode in modes)
    return Run("2026-11-22T02:00:00+00:00", settings, machine, states, cells, len(planned))


def all_modes(**more: object) -> Run:
    """Every mode with three sizes, on a kernel that has no IPVS."""
    return made_up(modes=EVERY, sizes=(10, 1000, 10_000), broken={"ipvs": "the kernel has no <ip_vs> & more"}, **more)  # type: ignore[arg-type]


def swung(run: Run, mode: str, factors: Sequence[float]) -> Run:
    """The same, with all values of the mode times the factor of their round."""
    cells = list(run.cells)
    for number, cell in enumerate(cells):
        if cell.step.mode == mode:
            swing = factors[cell.step.round % len(factors)]
            values = {name: value * swing for name, value in cell.values.items()}
            cells[number] = msgspec.structs.replace(cell, values=values)
    return msgspec.structs.replace(run, cells=tuple(cells))


def _cell(step, speed: float) -> Cell:  # type: ignore[no-untyped-def]
    wobble = WOBBLE[step.round % len(WOBBLE)]
    values, controls = {}, {}
    for known in METRICS:
        if known.kind != step.kind or (known.better == "neither" and step.round):  # counted once, as in reality
            continue
        factor = speed if known.better == "more" else 1 / speed if known.better == "less" else 1
        values[known.name] = 100 * wobble * factor * (1 + 0.001 * step.round)
        if known.control:
            controls[known.name] = 100 * wobble
    latency, plain = (_histogram(speed), _histogram(1)) if step.kind == "traffic" else ({}, {})
    each = (3.0 / speed, 4.0 / speed) if step.kind == "change" else ()
    return Cell(step, 1.0, values, controls, latency, plain, each)


def _histogram(speed: float) -> dict[int, int]:
    """A median of 0.2 ms without a proxy, and a long tail."""
    middle = round(BINS * math.log2(200 / speed))
    return {middle + n: round(10_000 * math.exp(-(n**2) / 20)) for n in range(-8, 9)} | {middle + 20: 40}
