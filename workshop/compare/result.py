"""Measurements as kept in files: one `Cell` for each step, and their `Run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from hybrid_proxy.workshop.compare.plan import Settings, Step
from hybrid_proxy.workshop.measuring.machine import Machine

__all__ = ["BINS", "Cell", "ModeState", "Run"]

BINS: Final = 16  # of a histogram, in an octave: bin n begins at 2 ** (n / BINS) µs


class ModeState(msgspec.Struct, frozen=True):
    """A mode and whether it works here; `missing` says why not."""

    mode: str
    works: bool
    missing: str = ""


class Cell(msgspec.Struct, frozen=True):
    """The results of one step.

    Args:
        step: the step.
        took: seconds.
        values: by the metric's name, in its unit.
        controls: the same for the plain address of a pod.
        latency: the number of requests on open connections by bin of their latency.
        control_latency: the same for the plain address.
        each: milliseconds of every single change.
        missing: by metric, why it could not be measured.
        notes: messages about oddities.
    """

    step: Step
    took: float
    values: Mapping[str, float] = {}
    controls: Mapping[str, float] = {}
    latency: Mapping[int, int] = {}
    control_latency: Mapping[int, int] = {}
    each: tuple[float, ...] = ()
    missing: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()


class Run(msgspec.Struct, frozen=True):
    """Everything of one comparison.

    Args:
        began: ISO 8601, UTC.
        settings: of the run.
        machine: its machine.
        modes: all requested modes, working or not.
        cells: the finished steps in order of time.
        planned: the number of all steps.
    """

    began: str
    settings: Settings
    machine: Machine
    modes: tuple[ModeState, ...]
    cells: tuple[Cell, ...]
    planned: int

    @property
    def complete(self) -> bool:
        """True if every step is done."""
        return len(self.cells) >= self.planned

    @property
    def works(self) -> tuple[str, ...]:
        """The modes that work here."""
        return tuple(state.mode for state in self.modes if state.works)
