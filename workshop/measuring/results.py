"""Results of benchmarks: a figure with its control, and its targets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hybrid_proxy.workshop.measuring.machine import describe, mitigations


@dataclass(frozen=True)
class Target:
    """The limit of a figure, as a maximum or a minimum."""

    what: str
    limit: float
    at_least: bool = False

    def summary(self, found: float) -> str:
        """Returns the figure, the target, and whether it is reached."""
        reached = found >= self.limit if self.at_least else found <= self.limit
        relation = ">=" if self.at_least else "<="
        return f"{self.what} {found:.4g}, target {relation} {self.limit:g}: {'reached' if reached else 'MISSED'}"


@dataclass(frozen=True)
class Result:
    """One benchmark's outcome. `value` is compared with `control`, measured in the same run: 0 gives no ratio."""

    name: str
    value: float
    unit: str
    what: str  # the control
    control: float
    targets: Sequence[tuple[Target, float]]
    notes: Sequence[str] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def report(self) -> None:
        """Prints the notes and targets, the machine, and one JSON object as the last line."""
        machine = describe()
        for note in self.notes:
            print(note)
        for target, found in self.targets:
            print(f"{self.name}: {target.summary(found)}")
        weak = mitigations()
        listed = "; ".join(f"{name}: {what}" for name, what in weak.items()) or "none"
        cpus = f"{machine.cpus} CPUs, load {machine.load:.1f}"
        print(f"{self.name}: {machine.processor}, {cpus}, Linux {machine.kernel}; mitigations: {listed}")
        report = {
            "name": self.name, "value": _short(self.value), "unit": self.unit,
            "control": {"what": self.what, "value": _short(self.control)},
            "ratio": _short(self.value / self.control) if self.control else None, **self.extra,
            "machine": {**msgspec.to_builtins(machine), "mitigations": weak},
        }  # fmt: skip
        print(json.dumps(report), flush=True)


def _short(number: float) -> float:
    return float(f"{number:.4g}")
