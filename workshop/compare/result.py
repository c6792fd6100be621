"""Measurements as kept in files: one `Cell` for each step, and their `Run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from hybrid_proxy.workshop.compare.plan import Settings, Step
from hybrid_proxy.workshop.measuring.machine import Machine

BINS: Final = 16  # of a histogram, in an octave: bin n begins at 2 ** (n / BINS) µs


class ModeState(msgspec.Struct, frozen=True):
    """A mode and whether it works here; `missing` says why not."""

    mode: str
    works: bool
    missing: str = ""


class Cell(msgspec.Struct, frozen=True):
    """The results of one step."""

    step: Step  # the step
    took: float  # seconds
    values: Mapping[str, float] = {}  # by the metric's name, in its unit
    controls: Mapping[str, float] = {}  # the same for the plain address of a pod
    latency: Mapping[int, int] = {}  # the number of requests on open connections by bin of their latency
    control_latency: Mapping[int, int] = {}  # the same for the plain address
    each: tuple[float, ...] = ()  # milliseconds of every single change
    missing: Mapping[str, str] = {}  # by metric, why it could not be measured
    notes: tuple[str, ...] = ()  # messages about oddities


class Run(msgspec.Struct, frozen=True):
    """Everything of one comparison."""

    began: str  # ISO 8601, UTC
    settings: Settings  # of the run
    machine: Machine  # its machine
    modes: tuple[ModeState, ...]  # all requested modes, working or not
    cells: tuple[Cell, ...]  # the finished steps in order of time
    planned: int  # the number of all steps
    product: str = "hybrid-proxy"  # name, version and commit of what was measured

    @property
    def complete(self) -> bool:
        return len(self.cells) >= self.planned

    @property
    def size(self) -> int:
        """The last number of services that was measured."""
        return self.cells[-1].step.size if self.cells else self.settings.sizes[-1]

    @property
    def works(self) -> tuple[str, ...]:
        return tuple(state.mode for state in self.modes if state.works)
