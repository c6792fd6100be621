"""Which unit of tests a worker of pytest-xdist takes next. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final, NamedTuple

__all__ = ["GUEST", "UNITS", "Unit", "choose", "in_order", "is_quick"]

GUEST: Final = "guest"  # the name of the unit that runs in a virtual machine
# Folders whose tests need root, other processes or the kernel: `make test-quick` omits them.
LIVE: Final = frozenset({"bpf", "conformance", "deploy", "kernel", "live", "vm"})
UNITS: Final = "units"  # in a worker's input: the file with the unit of each test


class Unit(NamedTuple):
    """What one worker runs in a row. `bench`: what stays set up from unit to unit, or nothing."""

    name: str
    bench: str = ""
    quick: bool = False  # takes no time


def is_quick(file: str) -> bool:
    """Whether the tests of a file touch nothing outside their own process, by the folder it is in."""
    return LIVE.isdisjoint(PurePath(file).parts)


def in_order(tests: Mapping[Unit, int]) -> list[Unit]:
    """By how many tests each has: first the largest of those with a bench, then the smallest of the others.

    Files with few tests are those that take minutes: at the end of a run one of them would keep one worker alone.
    """
    return sorted(tests, key=lambda unit: (unit.bench == "", -tests[unit] if unit.bench else tests[unit]))


def choose(waiting: Sequence[Unit], former: Unit | None) -> Unit:
    """The next one: the guest, what needs the bench that the worker has, the first that is not quick, the first.

    Quick units come last, so that no long one begins when the other workers have nothing left.
    """

    def rank(unit: Unit) -> tuple[bool, ...]:
        keeps_the_bench = former is not None and unit.bench != "" and unit.bench == former.bench
        return unit.name != GUEST, not keeps_the_bench, unit.quick

    return min(waiting, key=rank)
