"""PURE. Describes a generation of the datapath as a value, and plans the steps that replace one by another.

A generation is the layout of the maps, their sizes, and the programs that use them. Programs are not part of the value:
each process loads its own, those of both address families and of all hooks. So generations differ in their maps alone.

`plan_replacement` is a table of cases. `runner.py` carries its steps out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Final

import msgspec

from hybrid_proxy.dataplane.modes.ebpf.maps.sizes import WRITTEN, Sizes

Recorded = tuple[str, int, int, int, int, str | None]  # a `kernel.shape.Shape`
Enums = Mapping[str, Mapping[str, int]]

TABLES: Final = (
    "services", "backends", "frontends4", "frontends6", "bitmaps", "source_ranges4", "source_ranges6", "slots",
)  # fmt: skip # of the service table: both generations use all of them, or the new one has its own
FLOWS: Final = ("flows4", "half_open4", "flows6", "half_open6")
OWN: Final = frozenset({"datapaths", "links", "events"})  # never those of another version
CARRIED: Final = frozenset(
    {*TABLES, *FLOWS, "affinity", "timewait", "node"} - {"bitmaps", "source_ranges4", "source_ranges6"}
)  # row by row; the first sync writes the others again, or they are forgotten
# Enums by which the rows of a map are read, and the beginnings of the names that count.
READ_BY: Final = {
    **dict.fromkeys(TABLES, (("backend_flags", ""), ("abi_limits", "RANGE_"), ("abi_limits", "BACKEND_SETS"))),
    **dict.fromkeys(("frontends4", "frontends6"), (("frontend_flags", ""),)),
    **dict.fromkeys(FLOWS, (("flow_flags", ""), ("origin", ""))),
    **dict.fromkeys(("traffic", "traffic_gone"), (("abi_limits", "TRAFFIC_"),)),
    "services": (("service_flags", ""), ("abi_limits", "RANGE_"), ("abi_limits", "BACKEND_SETS")),
    "timewait": (("abi_limits", "TIMEWAIT_"),),
}  # fmt: skip
CALLS: Final = ("hook", "datapath")  # by which one version's hooks call the other's datapath


class Layout(msgspec.Struct, frozen=True):
    """The layout of a version's maps: enums of `abi.h` by name, and shapes of maps by name."""

    enums: dict[str, dict[str, int]]
    maps: dict[str, Recorded]


@dataclass(frozen=True)
class Generation:
    """The maps of a datapath.

    Attributes:
        layout: of their rows.
        sizes: entries of the maps whose size is chosen.
        serves: programs of this generation carry traffic.
        place: the name of its directory of pins.
    """

    layout: Layout
    sizes: Sizes = field(default_factory=dict)
    serves: bool = True
    place: str = ""


class Fate(Enum):
    """The treatment of one map in a replacement."""

    SHARED = "both generations use it"
    CARRIED = "its rows are carried over into a new map"
    NEW = "a new, empty map is made"


class Step(Enum):
    """One step of a replacement."""

    MAKE = "make the maps that the generations do not share"
    COPY = "copy what only the agent writes"
    LOAD = "load the programs"
    LINK = "adopt the former links, and pin the mark"
    BRIDGE = "attach programs that choose the datapath which knows a packet's flow"
    COPY_FLOWS = "copy the flows, or what changed since they were copied"
    NEW_FLOWS = "let new flows begin in the new tables"
    ALL_FLOWS = "let the new datapath serve every packet"
    MERGE = "merge what the former datapath wrote in the last moment"
    PUBLISH = "let links, sockets and drivers run the new programs"
    RENAME = "pin the new maps in place of the former ones"
    REMOVE = "remove the former pins, and the mark"


class Mark(IntEnum):
    """The progress of a replacement: the state of map `carrying` (enum carry_state of bpf/abi.h)."""

    ALL_FORMER = 0
    NEW_FLOWS_OURS = 1
    ALL_OURS = 2


@dataclass(frozen=True)
class Replacement:
    """The fate of each map, and the steps in their order."""

    fates: Mapping[str, Fate]
    steps: tuple[Step, ...]

    @property
    def bridged(self) -> bool:
        """True if both datapaths serve for a while, because their tables of flows differ."""
        return self.fates.get(FLOWS[0]) is Fate.CARRIED


class UnknownMeaningError(Exception):
    """Raised where rows of a layout mean something that this version does not know."""


FIRST_START: Final = (Step.MAKE, Step.LOAD, Step.PUBLISH)
RESTART: Final = (Step.LOAD, Step.PUBLISH)
# No program reads these maps yet, and the first table is written to them while programs load.
LARGER_BEFORE_SERVING: Final = (Step.MAKE, Step.COPY, Step.RENAME, Step.LOAD, Step.PUBLISH)
# From the copy to the end the agent writes nothing, so former and larger maps are equal.
LARGER: Final = (Step.MAKE, Step.LOAD, Step.COPY, Step.PUBLISH, Step.RENAME)
# Ids of services and backends stay what flows know them by, so the rest is a restart: the first sync adopts the maps.
CONVERTED: Final = (Step.MAKE, Step.COPY, Step.LOAD, Step.LINK, Step.PUBLISH, Step.REMOVE)
BRIDGED: Final = (
    Step.MAKE, Step.COPY, Step.LOAD, Step.LINK, Step.BRIDGE, Step.COPY_FLOWS, Step.NEW_FLOWS, Step.COPY_FLOWS,
    Step.ALL_FLOWS, Step.MERGE, Step.PUBLISH, Step.REMOVE,
)  # fmt: skip
# What a process that ended had done already, by the mark that it left. It had made and filled the maps, and a process
# that finds no mark makes them again.
DONE: Final[Mapping[Mark, Collection[Step]]] = {
    Mark.ALL_FORMER: (Step.MAKE, Step.COPY),
    Mark.NEW_FLOWS_OURS: (Step.MAKE, Step.COPY, Step.NEW_FLOWS),
    Mark.ALL_OURS: (Step.MAKE, Step.COPY, Step.BRIDGE, Step.COPY_FLOWS, Step.NEW_FLOWS, Step.ALL_FLOWS, Step.MERGE),
}


def plan_replacement(former: Generation | None, wanted: Generation, reached: Mark | None = None) -> Replacement:
    """Plans the steps from a former generation to the wanted one; `reached` is the mark of a process that ended.

    Raises:
        UnknownMeaningError: the former rows cannot be carried over.
    """
    if former is None:
        return Replacement(dict.fromkeys(wanted.layout.maps, Fate.NEW), FIRST_START)
    if (former.place, former.layout) == (wanted.place, wanted.layout) and not _differ(former, wanted, WRITTEN):
        names = [name for name in wanted.sizes if _differ(former, wanted, (name,))]
        fates = dict.fromkeys(wanted.layout.maps, Fate.SHARED) | dict.fromkeys(names, Fate.CARRIED)
        return Replacement(fates, RESTART if not names else LARGER if former.serves else LARGER_BEFORE_SERVING)
    fates = fates_of(former, wanted)
    bridged = fates[FLOWS[0]] is Fate.CARRIED
    return Replacement(fates, _left(BRIDGED if bridged else CONVERTED, reached))


def _left(steps: Sequence[Step], reached: Mark | None) -> tuple[Step, ...]:
    """Returns the steps that are left; flows are copied once more if new ones begin in the new tables already."""
    done = DONE[reached] if reached is not None else ()
    left = [step for step in steps if step not in done]
    if reached is Mark.NEW_FLOWS_OURS:
        left.remove(Step.COPY_FLOWS)
    return tuple(left)


def _differ(former: Generation, wanted: Generation, names: Collection[str]) -> bool:
    """Returns True if one of these maps has another size."""
    return any(former.sizes.get(name) != wanted.sizes.get(name) for name in names)


def fates_of(former: Generation, wanted: Generation) -> dict[str, Fate]:
    """Decides the fate of each map of the wanted generation.

    Raises:
        UnknownMeaningError: nothing can be carried over.
    """
    theirs, ours = former.layout, wanted.layout
    version, known = (one.enums.get("abi_limits", {}).get("ABI_VERSION", 0) for one in (theirs, ours))
    if version != known:
        raise UnknownMeaningError(f"its rows have the meaning of ABI version {version}, and this version knows {known}")
    fates = {name: _fate(name, theirs, ours) for name in ours.maps}
    for name in (*FLOWS, "affinity"):
        if fates[name] is Fate.SHARED and _differ(former, wanted, (name,)):
            fates[name] = Fate.CARRIED
    if any(fates[name] is not Fate.SHARED for name in TABLES):
        if not _agree(theirs.enums, ours.enums, "abi_limits", "RANGE_"):
            raise UnknownMeaningError("the slot ranges of its services are written in another way")
        fates |= {name: Fate.CARRIED if _can_carry(name, theirs, ours) else Fate.NEW for name in TABLES}
    if any(fates[name] is not Fate.SHARED for name in FLOWS):
        if not all(_agree(theirs.enums, ours.enums, enum) for enum in CALLS):
            raise UnknownMeaningError("its hooks call the datapath in another way")
        if not _agree(theirs.enums, ours.enums, "origin"):
            raise UnknownMeaningError("its flows name interfaces in another way")
        fates |= dict.fromkeys(FLOWS, Fate.CARRIED)
    return fates


def _fate(name: str, former: Layout, ours: Layout) -> Fate:
    theirs, known = former.maps.get(name), ours.maps[name]
    if theirs is None or name in OWN:
        return Fate.NEW
    if theirs == known and all(_agree(former.enums, ours.enums, *read) for read in READ_BY.get(name, ())):
        return Fate.SHARED
    return Fate.CARRIED if _can_carry(name, former, ours) else Fate.NEW


def _can_carry(name: str, former: Layout, ours: Layout) -> bool:
    """Returns True if rows can be carried over one by one, which needs elements that are counted in the same way."""
    counted = all(_agree(former.enums, ours.enums, *read) for read in READ_BY.get(name, ()) if read[0] == "abi_limits")
    return name in CARRIED and name in former.maps and counted


def _agree(former: Enums, ours: Enums, enum: str, beginning: str = "") -> bool:
    """Returns True if no name has two numbers, and no number two names."""
    theirs, known = (
        {name: number for name, number in one.get(enum, {}).items() if name.startswith(beginning)}
        for one in (former, ours)
    )
    taken = set(known.values())
    return all(known[name] == number if name in known else number not in taken for name, number in theirs.items())
