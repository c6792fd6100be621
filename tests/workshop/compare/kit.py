"""Runs that nobody measured, for the statistics and the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workshop.compare.plan import METRICS, Settings, steps
from workshop.compare.result import SHARES, Cell, Machine, ModeState, Run

MACHINE = Machine("6.18.0", "Debian 12", "a <processor> & more", 2, 8 << 30, "kvm", False, 0.5, {"wrk": "4.1.0"})

# How each mode stands to the control, in every metric that has one: rates are multiplied, times divided.
SPEED = {"ebpf": 1.05, "ipvs": 0.9, "nftables": 0.85, "iptables": 0.8, "userspace": 0.2}
WOBBLE = (0.99, 1.01, 1.0, 1.02, 0.98, 1.0)


def made_up(
    modes: Sequence[str] = ("ebpf", "nftables", "iptables"),
    sizes: Sequence[int] = (10, 1000),
    rounds: int = 6,
    broken: Mapping[str, str] | None = None,
    speed: Mapping[str, float] = SPEED,
    machine: Machine = MACHINE,
    upto: int | None = None,
) -> Run:
    """A run whose ratios to the control are those of `speed`, with a little wobble in both."""
    settings = Settings(tuple(modes), tuple(sizes), 3, rounds, 1, 2)
    broken = broken or {}
    works = tuple(mode for mode in modes if mode not in broken)
    planned = list(steps(settings, works))
    cells = tuple(_cell(step, speed[step.mode]) for step in planned[:upto])
    states = tuple(ModeState(mode, mode in works, broken.get(mode, "")) for mode in modes)
    return Run("2026-11-22T02:00:00+00:00", settings, machine, states, cells, len(planned))


def _cell(step, speed: float) -> Cell:  # type: ignore[no-untyped-def]
    wobble = WOBBLE[step.round % len(WOBBLE)]
    values, controls = {}, {}
    for known in METRICS:
        if known.kind != step.kind:
            continue
        factor = speed if known.better == "more" else 1 / speed if known.better == "less" else 1
        values[known.name] = 100 * wobble * factor * (1 + 0.001 * step.round)
        if known.control:
            controls[known.name] = 100 * wobble
    curve = tuple(0.1 * (n + 1) / speed for n in range(len(SHARES))) if step.kind == "traffic" else ()
    each = (3.0 / speed, 4.0 / speed) if step.kind == "change" else ()
    return Cell(step, 1.0, values, controls, curve, tuple(value * speed for value in curve), each)
