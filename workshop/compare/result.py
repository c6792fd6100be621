"""What was measured, as it is kept in files: one `Cell` for each step, and the `Run` that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from hybrid_proxy.workshop.compare.plan import Settings, Step

__all__ = ["BINS", "Cell", "Machine", "ModeState", "Run"]

BINS: Final = 16  # of a histogram, in an octave: bin n begins at 2 ** (n / BINS) µs


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured.

    Args:
        kernel: release.
        system: the distribution.
        processor: model.
        cpus: that this process may use.
        memory: in bytes.
        virtual: what it runs in, as the machine says: kvm, qemu, ...; "" if nothing.
        emulated: the processor is software, so that times mean nothing.
        load: mean number of running processes in the minute before the start.
        tools: versions of the load generators.
    """

    kernel: str
    system: str
    processor: str
    cpus: int
    memory: int
    virtual: str
    emulated: bool
    load: float
    tools: Mapping[str, str] = {}


class ModeState(msgspec.Struct, frozen=True):
    """Whether a mode works here; `missing` says why not."""

    mode: str
    works: bool
    missing: str = ""


class Cell(msgspec.Struct, frozen=True):
    """What one step found.

    Args:
        step: which.
        took: seconds.
        values: by the metric's name, in its unit.
        controls: the same for the plain address of a pod.
        latency: of requests on open connections: how many took so long, by the number of the bin.
        control_latency: the same for the plain address.
        each: milliseconds of every single change.
        missing: what could not be measured: why, by metric.
        notes: messages about what was odd.
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
        settings: what was asked for.
        machine: where.
        modes: all that were asked for, working or not.
        cells: what is finished, in the order of time.
        planned: how many steps there are in all.
    """

    began: str
    settings: Settings
    machine: Machine
    modes: tuple[ModeState, ...]
    cells: tuple[Cell, ...]
    planned: int

    @property
    def complete(self) -> bool:
        """Whether every step is done."""
        return len(self.cells) >= self.planned

    @property
    def works(self) -> tuple[str, ...]:
        """The modes that work here."""
        return tuple(state.mode for state in self.modes if state.works)
