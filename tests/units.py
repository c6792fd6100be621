"""Which unit of tests a worker of pytest-xdist takes next. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["GUEST", "UNITS", "Unit", "choose"]

GUEST: Final = "guest"  # the name of the unit that runs in a virtual machine
UNITS: Final = "units"  # in a worker's input: the file with the unit of each test


class Unit(NamedTuple):
    """What one worker runs in a row. `bench`: what stays set up from unit to unit, or nothing."""

    name: str
    bench: str = ""


def choose(waiting: Sequence[Unit], former: Unit | None) -> Unit:
    """The next one: the guest before all, then what needs the bench that the worker has, then the first that waits."""
    wanted = (
        next((unit for unit in waiting if unit.name == GUEST), None),
        next((unit for unit in waiting if former and former.bench and unit.bench == former.bench), None),
    )
    return wanted[0] or wanted[1] or waiting[0]
