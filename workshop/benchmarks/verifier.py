"""The cost of each program of mode ebpf for this kernel's verifier: instructions, states, milliseconds."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.kernel.bpf import Object, has_helper
from hybrid_proxy.dataplane.kernel.grace import jiffies_per_second
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import Loader
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.workshop.benchmarks.kit import median, say
from hybrid_proxy.workshop.lab.pins import pin_folder
from hybrid_proxy.workshop.measuring.results import Result, Target

ROUNDS = 5
AT_START: Final = frozenset({"tc_datapath", "hooks", "connect", "sockops", "inspect"})
LIMIT: Final = 1_000_000  # instructions, in every kernel since 5.2
# Instructions that a program may cost, by its name; the others have `SMALL`. It is half as much again as in Linux 6.18,
# and more where 5.10 needs it: kernels differ, because each version forgets other states. A program beyond its budget
# makes every start longer, and the next kernel may refuse it, so what makes it larger should be worth that.
SMALL: Final = 2_000
BUDGET: Final[Mapping[str, int]] = {
    "explain_pod": 196_000, "explain_uplink": 196_000, "explain_socket": 39_000,
    "datapath4": 106_000, "datapath6": 165_000,
    "connect4": 9_000, "connect6": 19_000, "sendmsg4": 18_000, "sendmsg6": 25_000,
    "pod_ingress": 90_000, "pod_egress": 90_000, "uplink_ingress": 90_000, "uplink_egress": 90_000,  # of carry
    "xdp_uplink": 42_000,
}  # fmt: skip
LOG_STATISTICS: Final = 4  # BPF_LOG_STATS
SET_RETVAL: Final = 187  # BPF_FUNC_set_retval (Linux 5.18)
_EFFORT: Final = {
    "instructions": re.compile(r"^processed (\d+) insns", re.MULTILINE),
    "states": re.compile(r" total_states (\d+)"),
    "peak_states": re.compile(r" peak_states (\d+)"),
    "microseconds": re.compile(r"^verification time (\d+) usec", re.MULTILINE),
}


class Effort(NamedTuple):
    """The verifier's cost of a program, with the functions of its object that it calls.

    It walks each way through a program; at a point where it was before in a state like this one, it stops. So
    instructions are the work, states what it had to remember to save more of it.
    """

    instructions: int
    states: int
    peak_states: int
    microseconds: int


def effort_of(log: str) -> Effort:
    """Parses the cost from the verifier's log, 0 where it says nothing."""
    found = {name: pattern.search(log) for name, pattern in _EFFORT.items()}
    return Effort(**{name: int(match[1]) if match else 0 for name, match in found.items()})


def efforts(loader: Loader, name: str) -> dict[str, Effort]:
    """Returns what each program of the object `NAME.bpf.o` costs the verifier; it is loaded and closed for that.

    Raises:
        BpfError: the kernel refuses one.
    """
    with contextlib.closing(Object(layout.OBJECTS / f"{name}.bpf.o")) as opened:
        loader.prepare(opened, None, can_set_errno=has_helper(SET_RETVAL), quiet=False)
        return {program: effort_of(log) for program, log in opened.load(LOG_STATISTICS).items()}


def budget(program: str) -> int:
    """Instructions that this program may cost."""
    return BUDGET.get(program, SMALL)


def objects() -> list[str]:
    """The names of all objects that an agent may load."""
    return sorted(path.name.removesuffix(".bpf.o") for path in layout.OBJECTS.glob("*.bpf.o"))


def measure() -> Result:
    """Loads every object several times; the value is the time of those that every start loads."""
    options = Options()
    rounds: list[dict[str, Effort]] = []
    with pin_folder() as folder, contextlib.closing(MapSet(folder, options)) as maps:
        loader = Loader(maps.maps, options, jiffies_per_second())
        for _ in range(ROUNDS):
            rounds.append({})
            for name in objects():
                rounds[-1] |= {f"{name}/{program}": effort for program, effort in efforts(loader, name).items()}
    found = {
        name: effort._replace(microseconds=int(median([each[name].microseconds for each in rounds])))
        for name, effort in rounds[0].items()
    }
    for line in lines(found):
        say(line)
    worst = max(effort.instructions / budget(name.rpartition("/")[2]) for name, effort in found.items())
    at_start = sum(effort.microseconds for name, effort in found.items() if name.partition("/")[0] in AT_START)
    all_programs = sum(effort.microseconds for effort in found.values())
    return Result(
        "verifier", at_start / 1000, "ms", "all programs, those for explain and upgrades, too", all_programs / 1000,
        [(Target("of its budget, the program that is nearest to it", 1.0), worst)],
        [f"Linux {platform.release()}"],
        {name: list(effort) for name, effort in found.items()},
    )  # fmt: skip


def lines(found: Mapping[str, Effort]) -> Iterator[str]:
    """The table of the documentation."""
    yield "| program | instructions | budget | states | at most at once | ms |"
    yield "|---|---|---|---|---|---|"
    for name, effort in sorted(found.items(), key=lambda item: -item[1].instructions):
        yield (
            f"| {name} | {effort.instructions:,} | {budget(name.rpartition('/')[2]):,} | {effort.states:,} "
            f"| {effort.peak_states:,} | {effort.microseconds / 1000:.1f} |"
        )
