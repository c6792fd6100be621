"""Has one generation take the place of another by the steps of generation.py.

There are two kinds of replacement. A process enlarges the maps that only it writes, in its own directory of pins
(datapath.py). Or a process that starts finds maps of another layout, or tables of flows of another size: it makes new
maps and removes the former ones at the end. `Succession` does that.

Both directions of a flow must meet the same entries. So where tables of flows differ, both datapaths serve for a while:
programs at all tc hooks (bpf/carry.bpf.c) call the datapath that knows a packet's flow.

The pin `carrying` is the mark. It exists from step LINK to the end, and its value says which datapath serves what. A
process that ends before has changed nothing, and the next one makes the maps again. A process that finds the mark
resumes the replacement: both datapaths are in the kernel, and serve meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map
from hybrid_proxy.dataplane.kernel.grace import wait_for_programs
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.generations import convert, copying
from hybrid_proxy.dataplane.modes.ebpf.generations.convert import Converter
from hybrid_proxy.dataplane.modes.ebpf.generations.datapath import Datapath
from hybrid_proxy.dataplane.modes.ebpf.generations.generation import (
    FLOWS,
    TABLES,
    Fate,
    Generation,
    Layout,
    Mark,
    Step,
    UnknownMeaningError,
    plan_replacement,
)
from hybrid_proxy.dataplane.modes.ebpf.generations.layouts import ARRAY, ours, recorded
from hybrid_proxy.dataplane.modes.ebpf.generations.runner import Runner
from hybrid_proxy.dataplane.modes.ebpf.maps import layout, sizes
from hybrid_proxy.dataplane.modes.ebpf.maps.making import make, possible_cpus, traffic_cpus, traffic_sizes
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import remove_unfinished
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import LINK, former_folder, former_layouts, is_link_pin, remove_pins
from hybrid_proxy.dataplane.reports import several

log = logging.getLogger(__name__)

MARK: Final = "carrying"
SLOTS: Final = "slots"  # pinned last: without it a folder is unfinished
BRIDGE: Final = {
    "former_flows4": "flows4", "former_half4": "half_open4", "former_flows6": "flows6", "former_half6": "half_open6",
    "former_paths": "datapaths",
}  # fmt: skip

FLOW_STEPS: Final = (Step.COPY_FLOWS, Step.NEW_FLOWS, Step.ALL_FLOWS, Step.MERGE)


class Succession:
    """Replaces the generation that a former process left, if there is one, by that of this process.

    The maps are made and filled at once. `run` does the rest once the first table is written to them.

    Attributes:
        former: the folder of the former generation; None: it is ours, or there is none.
        plan: what becomes of each map, and the steps.
        failed: the kernel refused the programs that choose a datapath, and flows end.
    """

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder = folder
        self.failed = False
        self._options = options
        self._known = ours()
        self._wanted = Generation(ours(), sizes.written(options, possible_cpus()))
        self._reached: Mark | None = None
        self._converters: dict[str, Converter] = {}
        self._tables: list[copying.FlowTable] = []
        self._opened = contextlib.ExitStack()  # the bridge, and former maps
        self.former = _former_of(folder)
        if self.former is None or not self._begin(self.former):
            self._plan(Generation(ours(), self._wanted.sizes) if (folder / SLOTS).exists() else None)

    def _begin(self, former: Path) -> bool:
        """Makes and fills our maps. Returns False, after a warning, if the former rows are not understood.

        Raises:
            BpfError: there is no memory for them. The next start finds the former ones again.
        """
        try:
            self._known, self._reached = _understood(former), _reached(self.folder, former)
            wanted = wanted_sizes(former, self._options) if self._reached is None else written_sizes(self.folder)
            self._wanted = Generation(ours(), wanted)  # maps that were made have the sizes wanted then
            self._plan(Generation(self._known, written_sizes(former), place=former.name))
            if Step.COPY in self._runner.left:
                self._runner.run(Step.COPY)
        except (UnknownMeaningError, ValueError, BpfError) as error:
            if isinstance(error, BpfError) and error.code == errno.ENOMEM:
                raise
            flows = sum(_entries_in(former / name) for name in FLOWS) // 2
            log.warning(
                "the maps at %s are of another layout, and %s there cannot be carried over: %s. New maps are "
                "made, which end them", former, several(flows, "flow"), error,
            )  # fmt: skip
            self.former = self._reached = None
            return False
        return True

    def _plan(self, former: Generation | None) -> None:
        self.plan = plan_replacement(former, self._wanted, self._reached)
        carried = [name for name, fate in self.plan.fates.items() if fate is Fate.CARRIED]
        self._converters = {name: copying.converter(name, self._known, ours()) for name in carried}
        self._places = {
            family: convert.places(self._converters[f"flows{family}"].former[0]) for family in (4, 6)
        } if self.plan.bridged else {}  # fmt: skip
        steps = list(self.plan.steps)
        if Step.REMOVE not in steps and former_layouts(self.folder):
            steps.append(Step.REMOVE)  # maps that were not understood
        self._runner = Runner(steps, {
            Step.MAKE: self._make, Step.COPY: self._copy, Step.LOAD: self._load, Step.LINK: self._link,
            Step.BRIDGE: self._bridge, Step.COPY_FLOWS: self._copy_flows,
            Step.NEW_FLOWS: partial(self._enter, Mark.NEW_FLOWS_OURS),
            Step.ALL_FLOWS: partial(self._enter, Mark.ALL_OURS), Step.MERGE: self._merge, Step.PUBLISH: self._publish,
            Step.REMOVE: self._remove,
        })  # fmt: skip

    @property
    def begun(self) -> bool:
        """True if the former links are in our directory already."""
        return (self.folder / MARK).exists()

    def run(self, datapath: Datapath) -> None:
        """Puts our programs to use, with all flows that the former ones knew. May be called again after an error.

        Raises:
            BpfError: a map cannot be read or written, or the kernel refuses our programs.
        """
        started, self._datapath = time.monotonic(), datapath
        self._runner.run()
        if self._tables:
            carried = sum(table.flows() for table in self._tables)
            lost = sum(len(table.unsuitable) for table in self._tables) // 2
            log.info(
                "%s carried over from the maps at %s, in %.0f ms%s",
                several(carried, "flow was", "flows were"), self.former, 1000 * (time.monotonic() - started),
                f"; {lost} cannot be expressed in ours, and end" if lost else "",
            )  # fmt: skip
        self.close()

    def close(self) -> None:
        """Closes what a replacement that is not finished holds open."""
        self._opened.close()

    # The steps

    def _make(self) -> None:
        """Makes our maps. Without a former generation, the open set of maps does it."""
        if self.former is None:
            return
        remove_unfinished(self.folder)
        known = {name: self._open(name) for name in self._known.maps if (self.former / name).exists()}
        self._shared = {n: known[n] for n, fate in self.plan.fates.items() if fate is Fate.SHARED and n in known}
        self._made = make(self._sizes(known) | dict(self._wanted.sizes), self._shared)

    def _open(self, name: str) -> Map:
        """Opens a map of the former generation, until `close`."""
        assert self.former is not None
        return self._opened.enter_context(contextlib.closing(Map.pinned(self.former / name)))

    def _sizes(self, former: Mapping[str, Map]) -> dict[str, int]:
        """Returns the size of each map of the service table: at least that of the former one."""
        wanted = sizes.first_sizes(sizes.bounds(self._options))
        wanted = {name: max(size, former[name].entries if name in former else 0) for name, size in wanted.items()}
        return wanted | traffic_sizes(wanted["services"], wanted["backends"], traffic_cpus(self._options))

    def _copy(self) -> None:
        """Copies the service table into our maps, and pins them."""
        for name, new in self._made.items():
            if name in {*TABLES, "node"} and name in self._converters:
                copying.copy_table(name, self._open(name), new, self._converters[name])
            elif name == "affinity" and name in self._converters and not self.plan.bridged:
                copying.FlowTable(self._open(name), new, self._converters[name]).copy()
        together = {**self._shared, **self._made}
        for name in sorted(together, key=lambda name: (name == SLOTS, name)):
            together[name].pin(self.folder / name)
        for new in self._made.values():
            new.close()
        self.close()

    def _load(self) -> None:
        self._datapath.load()

    def _publish(self) -> None:
        self._datapath.attach(None)

    def _link(self) -> None:
        """Moves the former links to our directory. From now on the next process resumes the replacement."""
        if not self.begun:
            with contextlib.closing(Map.made(ARRAY, MARK, 4, layout.dtype_of("carrying").itemsize, 1)) as made:
                made.update(bytes(4), self._value(self._reached or Mark.ALL_FORMER))
                made.pin(self.folder / MARK)
        assert self.former is not None
        for link in self.former.glob(f"{LINK}*"):
            if is_link_pin(link) and not (self.folder / link.name).exists():
                link.rename(self.folder / link.name)

    def _bridge(self) -> None:
        """Attaches programs that call the datapath which knows a packet's flow."""
        others = {name: self._open(which) for name, which in BRIDGE.items()}
        try:
            with contextlib.closing(Map.pinned(self.folder / MARK)) as mark:
                loaded = self._datapath.loader.one("carry", others | {MARK: mark})
        except BpfError as error:
            log.warning("flows cannot be carried over from the maps at %s: %s", self.former, error)
            self.failed = True
            self._runner.skip(FLOW_STEPS)
            return
        self._opened.callback(loaded.close)
        self._datapath.attach(loaded)
        maps = self._datapath.loader.maps
        self._tables = [
            copying.FlowTable(self._open(name), maps[name], self._converters[name], *self._kind(name))
            for name in (*FLOWS, "affinity") if name in self._converters
        ]  # fmt: skip

    def _kind(self, name: str) -> tuple[int, ...]:
        """Returns the former flags and the family of a table of flows; nothing for other tables."""
        flags = self._known.enums["flow_flags"]
        return (flags["FLOW_REPLY"], flags.get("FLOW_DSR", 0), int(name[-1])) if name in FLOWS else ()

    def _copy_flows(self) -> None:
        """Copies what has changed since the last time."""
        for table in self._tables:
            table.copy()
        for name, copy in (("node", copying.copy_flags_of_node), ("timewait", copying.copy_timewait)):
            if name in self._converters:
                copy(self._open(name), self._datapath.loader.maps[name], self._converters[name])

    def _merge(self) -> None:
        for table in self._tables:
            table.merge()

    def _enter(self, state: Mark) -> None:
        with contextlib.closing(Map.pinned(self.folder / MARK)) as mark:
            mark.update(bytes(4), self._value(state))
        wait_for_programs()  # those that saw the former state may still write

    def _value(self, state: Mark) -> bytes:
        """Returns the element of map `carrying`: the state, and the offsets of fields in the former keys."""
        row = np.zeros(1, dtype=layout.dtype_of("carrying"))
        row["state"] = state
        for family, found in self._places.items():
            for name, place in found.items():
                row[f"places{family}"][name] = place
        return row.tobytes()

    def _remove(self) -> None:
        """Removes the maps, and programs, of former generations."""
        for former in former_layouts(self.folder):
            if remove_pins(former):
                known = self.former == former and not self.failed
                log.log(
                    logging.INFO if known else logging.WARNING, "maps of another generation at %s are removed; %s",
                    former, "what they knew is carried over" if known else "flows that only they knew end",
                )  # fmt: skip
        (self.folder / MARK).unlink(missing_ok=True)


# The maps of former processes


def _former_of(folder: Path) -> Path | None:
    """Returns the directory of the generation that serves; None: it is ours, or there is none."""
    formers = [known for known in former_layouts(folder) if (known / SLOTS).exists()]
    resumed = (folder / MARK).exists()
    if not formers and resumed:
        (folder / MARK).unlink()  # a former process removed the maps and ended
    if not formers or (not resumed and any(folder.glob(f"{LINK}*"))):
        return None
    return max(formers, key=lambda known: (len(list(known.glob(f"{LINK}*"))), known.stat().st_mtime))


def _understood(former: Path) -> Layout:
    known = recorded(former)
    if known is None:
        raise UnknownMeaningError("nothing says how their rows are laid out, or others' pins are among them")
    return known


def _reached(folder: Path, former: Path) -> Mark | None:
    """Returns the mark of the replacement of these maps by ours, or, at a downgrade, of the reverse."""
    if (folder / MARK).exists():
        return _state_in(folder)
    if not (folder / SLOTS).exists() or not (former / MARK).exists():
        return None
    # An agent of the other version was killed before our datapath gave anything away: ours serves all.
    seen_from_here = {Mark.ALL_FORMER: Mark.ALL_OURS, Mark.NEW_FLOWS_OURS: Mark.NEW_FLOWS_OURS}
    return seen_from_here.get(_state_in(former))


def _state_in(folder: Path) -> Mark:
    with contextlib.closing(Map.pinned(folder / MARK)) as mark:
        row = np.frombuffer(mark.lookup(bytes(4)) or b"", dtype=layout.dtype_of("carrying"))
        return Mark(int(row["state"][0]))


def _entries_in(path: Path) -> int:
    """Returns how many entries a table has, in any layout."""
    if not path.exists():
        return 0
    with contextlib.suppress(BpfError), contextlib.closing(Map.pinned(path)) as known:
        return len(known.items(np.dtype((np.void, known.key_size)), np.dtype((np.void, known.value_size)))[0])
    return 0


def written_sizes(folder: Path) -> dict[str, int]:
    """Returns the sizes of the maps in a directory that programs write."""
    found = {}
    for name in sizes.WRITTEN:
        if (folder / name).exists():
            with contextlib.closing(Map.pinned(folder / name)) as known:
                found[name] = known.entries
    return found


def wanted_sizes(folder: Path, options: Options) -> dict[str, int]:
    """Returns the sizes that these maps should have: those of the options, or room for the flows that are open."""
    wanted, known = sizes.written(options, possible_cpus()), written_sizes(folder)
    for name in sizes.FLOWS:
        if known.get(name, 0) > wanted[name]:
            wanted[name] = sizes.with_room(wanted[name], _entries_in(folder / name), known[name])
    return wanted


def has_other_sizes(folder: Path, options: Options) -> bool:
    """Returns True if the maps in a directory serve, and their tables of flows should have other sizes."""
    if not (folder / SLOTS).exists() or (folder / MARK).exists() or former_folder(folder).exists():
        return False
    known, wanted = written_sizes(folder), wanted_sizes(folder, options)
    return any(known.get(name) != wanted[name] for name in sizes.FLOWS)
