"""Tables that programs write give way to larger ones, while packets come: flows, half-open ones, affinity, `timewait`.

Both directions of a flow have to meet the same entries, so two generations of programs cannot just follow each other.
They stand beside each other, as where flows come from maps of another layout (carry.py, bpf/carry.bpf.c):

1. A thread loads a generation on the larger tables and copies what is there. Nobody calls these programs yet.
2. The larger tables and an array with the new datapaths are pinned as `next_NAME`, the state of it all as `growing`.
   All tc hooks get programs that call the former datapath or the new one. At first the former one serves everything.
3. New flows begin in the new tables. A packet whose flow the former tables know goes to the former datapath. What has
   changed there is copied. Then the new datapath serves everything, programs at sockets and in drivers are replaced,
   and what changed in the last moment is merged.
4. The links get programs that call the new datapath alone, and the pins take the former ones' places.

A process may end anywhere. In state "all former" nothing has changed, and the next one removes what was prepared. Later
it finishes the copying before it does anything else: both datapaths are in the kernel, and serve meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map, Object
from hybrid_proxy.dataplane.kernel.grace import wait_for_programs
from hybrid_proxy.dataplane.modes.ebpf.generations import convert
from hybrid_proxy.dataplane.modes.ebpf.generations.carry import BRIDGE, MARK, Table, carrying_row, state_of
from hybrid_proxy.dataplane.modes.ebpf.generations.convert import Converter
from hybrid_proxy.dataplane.modes.ebpf.generations.layouts import ARRAY, ours
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import Loader
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import DATAPATHS, spread
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import NEXT
from hybrid_proxy.dataplane.modes.ebpf.maps.sizes import WRITTEN

log = logging.getLogger(__name__)

GROWING: Final = "growing"
TRIES: Final = 3  # to copy what the kernel has no memory for at the moment
TRY_AGAIN_SECONDS: Final = 0.2

Hooks = Callable[[Object], None]


class Growth:
    """The contents of some tables on their way into larger ones.

    Args:
        folder: of the pins.
        former: all maps that serve.
        larger: what will replace some of them. Of these the tables that programs write are copied here.
    """

    def __init__(self, folder: Path, former: Mapping[str, Map], larger: Mapping[str, Map]) -> None:
        self._folder, self._former, self._larger = folder, former, larger
        names = sorted(WRITTEN & larger.keys())
        self._tables = [_table(name, former[name], larger[name]) for name in names if name != "timewait"]
        self._marks = Marks(former["timewait"], larger["timewait"]) if "timewait" in names else None

    def copy(self) -> None:
        """Copy what has changed since the last time.

        Raises:
            BpfError: the kernel has no memory for it.
        """
        for table in self._tables:
            table.copy()
        if self._marks is not None:
            self._marks.copy()

    def run(self, loader: Loader, new: Object, hooks: Hooks, rest: Callable[[], None]) -> None:
        """Let the larger tables serve. Then their pins have to be renamed, and `settle`.

        Args:
            loader: loads the programs that choose a datapath.
            new: the hooks' programs that stay.
            hooks: lets all tc hooks run these programs.
            rest: lets sockets and drivers run their new programs.

        Raises:
            BpfError: the former tables serve on.
        """
        with contextlib.closing(Map.made(ARRAY, GROWING, 4, layout.dtype_of("carrying").itemsize, 1)) as mark:
            _enter(mark, "CARRY_ALL_FORMER")
            try:
                bridge = loader.one("carry", self._meet(mark))
            except BpfError:
                _forget_next(self._folder)
                settle(self._folder)
                raise
            with contextlib.closing(bridge):
                hooks(bridge)
                self.move(mark, rest)
                hooks(new)

    def _meet(self, mark: Map) -> dict[str, Map]:
        """Pin what the programs that choose a datapath need; their maps. What does not grow is in no former table."""
        _forget_next(self._folder)
        for name in {*WRITTEN, DATAPATHS} & self._larger.keys():
            self._larger[name].pin(self._folder / f"{NEXT}{name}")
        mark.pin(self._folder / GROWING)
        former = {name: self._former[which] for name, which in BRIDGE.items() if which in {*self._larger, DATAPATHS}}
        return former | {DATAPATHS: self._larger[DATAPATHS], MARK: mark}

    def move(self, mark: Map, rest: Callable[[], None] = lambda: None) -> None:
        """From "all former" or "new flows ours" to the end; nothing but lack of memory stops it, and costs flows."""
        if state_of(mark) != layout.abi_constants()["CARRY_NEW_FLOWS_OURS"]:
            self._insist(self.copy)
            _enter(mark, "CARRY_NEW_FLOWS_OURS")
        self._insist(self.copy)
        _enter(mark, "CARRY_ALL_OURS")
        rest()
        wait_for_programs()
        for table in self._tables:
            self._insist(table.merge)
        self._bring_back()

    def _bring_back(self) -> None:
        """Established flows that found a table full stayed where new ones may evict them: there is room now."""
        maps = {**self._former, **self._larger}
        for family in (4, 6):
            flows, half = maps.get(f"flows{family}"), maps.get(f"half_open{family}")
            if flows is None or half is None:
                continue
            keys, values = flow_arrays(half, family)
            lasting = values["flags"] & layout.abi_constants()["FLOW_ESTABLISHED"] != 0
            keys, values = keys[lasting], values[lasting]
            half.delete_batch(keys[: flows.update_batch(keys, values)])

    def _insist(self, what: Callable[[], None]) -> None:
        for left in reversed(range(TRIES)):
            try:
                return what()
            except BpfError:
                if not left:
                    log.exception("some flows are lost, because they cannot be copied into larger tables")
                time.sleep(TRY_AGAIN_SECONDS)
        return None


class Marks:
    """Map `timewait` and a larger one: a mark goes to all buckets that its own becomes."""

    def __init__(self, former: Map, larger: Map) -> None:
        kind = layout.dtype_of("timewait_bucket")
        self._former, self._larger = former.view(kind)["entries"], larger.view(kind)["entries"]
        self._copied: NDArray[Any] = np.zeros_like(self._larger)

    def copy(self) -> None:
        """What the new programs have noted by now stays."""
        rows = spread(self._former, len(self._larger))
        np.copyto(self._larger, rows, where=self._larger == self._copied)
        self._copied = rows


def resume(folder: Path) -> None:
    """Finish what a process that ended has begun, or remove what it had only prepared. Before the maps are opened.

    Raises:
        BpfError: a map cannot be read or written.
    """
    if not (folder / GROWING).exists():
        return
    names = [name for name in (*sorted(WRITTEN), DATAPATHS) if (folder / f"{NEXT}{name}").exists()]
    with contextlib.ExitStack() as opened:
        mark = opened.enter_context(contextlib.closing(Map.pinned(folder / GROWING)))
        state, states = state_of(mark), layout.abi_constants()
        if state == states["CARRY_ALL_FORMER"]:
            _forget_next(folder)
        else:
            if state == states["CARRY_NEW_FLOWS_OURS"]:
                former, larger = (
                    {name: opened.enter_context(contextlib.closing(Map.pinned(folder / f"{kind}{name}")))
                     for name in names}
                    for kind in ("", NEXT)
                )  # fmt: skip
                Growth(folder, former, larger).move(mark)
                log.info("tables of flows have grown: what a former process had begun is finished")
            for name in names:
                (folder / f"{NEXT}{name}").rename(folder / name)
    settle(folder)


def settle(folder: Path) -> None:
    """Nothing is under way any more."""
    (folder / GROWING).unlink(missing_ok=True)


def _forget_next(folder: Path) -> None:
    for name in (*WRITTEN, DATAPATHS):
        (folder / f"{NEXT}{name}").unlink(missing_ok=True)


def _enter(mark: Map, state: str) -> None:
    places = {family: convert.places(layout.dtype_of(f"flow{family}_key")) for family in (4, 6)}
    mark.update(bytes(4), carrying_row(layout.abi_constants()[state], places))
    wait_for_programs()  # those that saw the former state may still write


def _table(name: str, former: Map, larger: Map) -> Table:
    types = convert.types_of(ours().maps[name][5] or "")
    if name == "affinity":
        return Table(former, larger, Converter(types, types))
    flags = layout.abi_constants()
    return Table(former, larger, Converter(types, types), flags["FLOW_REPLY"], flags["FLOW_DSR"], int(name[-1]))
