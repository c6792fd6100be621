"""Flows and what belongs to them, from the maps of another version's layout to ours, while both carry traffic.

1. Our maps are made beside the former ones. Those that are laid out alike are the same maps, pinned a second time; rows
   of the service table are converted, so that ids of services and backends stay what flows know them by. From here on
   it is a restart: the first sync adopts.
2. The former links become ours. Where tables of flows are laid out otherwise, programs come to all tc hooks that call
   the former datapath or ours (bpf/carry.bpf.c). At first the former one serves everything.
3. Flows are copied. Then new flows begin in our tables, and the former ones only lose some: what changed since is
   copied. Then ours serve everything, and what changed in the last moment is merged.
4. The links get the programs that stay, and the former pins go.

The pin `carrying` is there from step 2 to 4. A process that finds it goes on: with the copying, as long as the former
tables serve. One that ends before step 2 has changed nothing, and what it made is made again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map, Object
from hybrid_proxy.dataplane.kernel.grace import wait_for_programs
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.generations import convert
from hybrid_proxy.dataplane.modes.ebpf.generations.convert import FLOWS, Converter, Fate, Layout, UnknownMeaningError
from hybrid_proxy.dataplane.modes.ebpf.generations.layouts import ARRAY, ours, recorded
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import Loader
from hybrid_proxy.dataplane.modes.ebpf.maps import layout, sizes
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import BITMAPS, make, remove_unfinished, traffic_cpus
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import LINK, former_layouts, is_link_pin
from hybrid_proxy.dataplane.modes.ebpf.maps.traffic import possible_cpus, traffic_sizes

log = logging.getLogger(__name__)

MARK: Final = "carrying"
SLOTS: Final = "slots"  # pinned last: without it a folder is unfinished
BRIDGE: Final = {
    "former_flows4": "flows4", "former_half4": "half_open4", "former_flows6": "flows6", "former_half6": "half_open6",
    "former_paths": "datapaths",
}  # fmt: skip
HASHES: Final = ("frontends4", "frontends6")  # of the service table
MONOTONE: Final = ("overflowed", "direct_flows")  # of `node`: what programs set once
BATCH: Final = 16384  # rows that are converted at once


def prepare(folder: Path, options: Options) -> Carry | None:
    """Make our maps beside those of another layout that serve here; None: there are none, or they are not understood.

    With a warning in the second case: their flows end.
    """
    formers = [known for known in former_layouts(folder) if (known / SLOTS).exists()]
    resumed = (folder / MARK).exists()
    if not formers and resumed:
        (folder / MARK).unlink()  # a former process removed the maps and ended
    if not formers or (not resumed and any(folder.glob(f"{LINK}*"))):
        return None
    former = max(formers, key=lambda known: (len(list(known.glob(f"{LINK}*"))), known.stat().st_mtime))
    try:
        carry = Carry(folder, former, _understood(former))
        if not resumed and not carry.goes_back:
            carry.fill(options)
    except (UnknownMeaningError, ValueError, BpfError) as error:
        log.warning(
            "the maps at %s are of another layout, and %d flows there cannot be carried over: %s. New maps are made, "
            "and these flows end when the new maps serve", former, _flows_in(former), error,
        )  # fmt: skip
        return None
    return carry


def _understood(former: Path) -> Layout:
    known = recorded(former)
    if known is None:
        raise UnknownMeaningError("nothing says how their rows are laid out, or others' pins are among them")
    return known


def _flows_in(former: Path) -> int:
    """Pairs of entries in tables of flows, whatever these look like."""
    entries = 0
    for name in FLOWS:
        if (former / name).exists():
            with contextlib.suppress(BpfError), contextlib.closing(Map.pinned(former / name)) as known:
                entries += len(
                    known.items(np.dtype((np.void, known.key_size)), np.dtype((np.void, known.value_size)))[0]
                )
    return entries // 2


class Carry:
    """What is carried over from one folder of pins to another.

    Attributes:
        live: tables of flows are laid out otherwise: `run` has to copy them while packets come.
        carried: flows that were carried over, and `left` those that cannot be.
        failed: the kernel refused the programs for it, and flows end.

    Raises:
        UnknownMeaningError: nothing can be.
        ValueError: a row of the former layout has a type that is not known here.
    """

    def __init__(self, folder: Path, former: Path, known: Layout) -> None:
        self.folder, self.former = folder, former
        self._known = known
        self.fates = convert.plan(known, ours())
        self.live = self.fates[FLOWS[0]] is Fate.CARRIED
        self.failed = False
        self.carried = self.left = 0
        self._converters = {name: self._converter(name) for name, fate in self.fates.items() if fate is Fate.CARRIED}
        self._places = {
            family: convert.places(self._converters[f"flows{family}"].former[0]) for family in (4, 6) if self.live
        }

    def _converter(self, name: str) -> Converter:
        theirs, known = (convert.types_of(one.maps[name][5] or "") for one in (self._known, ours()))
        enum = "flow_flags" if name in FLOWS else convert.FLAGS.get(name, "")
        return Converter(theirs, known, (self._known.enums.get(enum, {}), ours().enums.get(enum, {})))

    # The service table

    def fill(self, options: Options) -> None:
        """Make and pin our maps; those of the service table have the former ones' rows.

        Raises:
            BpfError: the kernel refuses a map.
        """
        remove_unfinished(self.folder)
        with self._former_maps(self._known.maps) as former:
            shared = {n: former[n] for n, fate in self.fates.items() if fate is Fate.SHARED and n in former}
            made = make(self._sizes(former, options), shared)
            for name, new in made.items():
                if name in former and name not in FLOWS and name in self._converters:
                    self._carry_table(name, former[name], new)
                elif name in BITMAPS:
                    new.view(np.dtype(np.uint64))[:] = np.uint64(0xFFFFFFFFFFFFFFFF)  # everything may be a service's
            together = {**shared, **made}
            for name in sorted(together, key=lambda name: (name == SLOTS, name)):
                together[name].pin(self.folder / name)
            for new in made.values():
                new.close()

    def _sizes(self, former: Mapping[str, Map], options: Options) -> dict[str, int]:
        """Each map at least as large as the former one."""
        cpus = possible_cpus()
        wanted = sizes.first_sizes(sizes.bounds(options)) | sizes.written(options, cpus)
        wanted = {name: max(size, former[name].entries if name in former else 0) for name, size in wanted.items()}
        return wanted | traffic_sizes(wanted["services"], wanted["backends"], traffic_cpus(options))

    def _carry_table(self, name: str, former: Map, new: Map) -> None:
        converter = self._converters[name]
        if name in HASHES:
            keys, values, _ = converter.rows(*former.items(*converter.former))
            if new.update_batch(keys, values) < len(keys):
                raise UnknownMeaningError(f"map {name} has no room for what is in the former one")
        elif name != "affinity":
            theirs, known = former.view(converter.former[1]), new.view(converter.ours[1])
            count = min(len(theirs), len(known))
            known[:count] = converter.values(theirs[:count])[0]

    @contextlib.contextmanager
    def _former_maps(self, names: Iterable[str]) -> Iterator[dict[str, Map]]:
        opened = {name: Map.pinned(self.former / name) for name in names if (self.former / name).exists()}
        try:
            yield opened
        finally:
            for known in opened.values():
                known.close()

    # Links and flows

    def take_links(self) -> None:
        """Let the former links be ours. From here on a process that ends is resumed."""
        if not (self.folder / MARK).exists():
            with contextlib.closing(Map.made(ARRAY, MARK, 4, layout.dtype_of("carrying").itemsize, 1)) as made:
                made.update(bytes(4), self._value(self._first_state()))
                made.pin(self.folder / MARK)
        for link in self.former.glob(f"{LINK}*"):
            if is_link_pin(link) and not (self.folder / link.name).exists():
                link.rename(self.folder / link.name)

    @property
    def goes_back(self) -> bool:
        """Whether somebody goes back to this version in the midst of the way from it: our maps still serve."""
        return (self.folder / SLOTS).exists() and self._first_state() != layout.abi_constants()["CARRY_ALL_FORMER"]

    def _first_state(self) -> int:
        """Who serves now. Where an agent of the other version was killed before ours gave anything away, ours do."""
        states = layout.abi_constants()
        if not (self.former / MARK).exists():
            return states["CARRY_ALL_FORMER"]
        with contextlib.closing(Map.pinned(self.former / MARK)) as known:
            theirs = state_of(known)
        seen_from_here = {"CARRY_ALL_FORMER": "CARRY_ALL_OURS", "CARRY_ALL_OURS": "CARRY_ALL_FORMER"}
        return states[
            next((ours for name, ours in seen_from_here.items() if states[name] == theirs), "CARRY_NEW_FLOWS_OURS")
        ]

    def _value(self, state: int) -> bytes:
        return carrying_row(state, self._places)

    def bridge(self, loader: Loader) -> Object:
        """The programs that let a packet meet the datapath that knows its flow.

        Raises:
            BpfError: the kernel refuses them.
        """
        with self._former_maps(BRIDGE.values()) as former, contextlib.closing(Map.pinned(self.folder / MARK)) as mark:
            return loader.one("carry", {name: former[which] for name, which in BRIDGE.items()} | {MARK: mark})

    def run(self, maps: Mapping[str, Map]) -> None:
        """Carry the flows over, with the programs of `bridge` at all hooks.

        Raises:
            BpfError: a map cannot be read or written. May be called again.
        """
        started = time.monotonic()
        states = layout.abi_constants()
        with self._former_maps((*FLOWS, "affinity", "timewait", "node")) as former:
            tables = [
                Table(former[name], maps[name], self._converters[name], *self._kind(name))
                for name in (*FLOWS, "affinity") if name in self._converters and name in former
            ]  # fmt: skip
            with contextlib.closing(Map.pinned(self.folder / MARK)) as mark:
                if state_of(mark) == states["CARRY_ALL_FORMER"]:
                    self._pass(tables, former, maps)
                    self._enter(mark, states["CARRY_NEW_FLOWS_OURS"])
                if state_of(mark) == states["CARRY_NEW_FLOWS_OURS"]:
                    self._pass(tables, former, maps)
                    self._enter(mark, states["CARRY_ALL_OURS"])
                    for table in tables:
                        table.merge()
        self.carried, self.left = sum(table.flows() for table in tables), sum(table.left for table in tables) // 2
        log.info(
            "%d flows were carried over from the maps of another layout at %s, in %.0f ms%s",
            self.carried, self.former, 1000 * (time.monotonic() - started),
            f"; {self.left} cannot be expressed in ours, and end" if self.left else "",
        )  # fmt: skip

    def _kind(self, name: str) -> tuple[int, ...]:
        """The former flags and the family of a table of flows; nothing of another table."""
        flags = self._known.enums["flow_flags"]
        return (flags["FLOW_REPLY"], flags.get("FLOW_DSR", 0), int(name[-1])) if name in FLOWS else ()

    def _enter(self, mark: Map, state: int) -> None:
        mark.update(bytes(4), self._value(state))
        wait_for_programs()  # those that saw the former state may still write

    def _pass(self, tables: Iterable[Table], former: Mapping[str, Map], maps: Mapping[str, Map]) -> None:
        for table in tables:
            table.copy()
        if self.fates["node"] is Fate.CARRIED:
            theirs, known = (
                former["node"].view(self._converters["node"].former[1]),
                maps["node"].view(layout.dtype_of("node")),
            )
            for name in MONOTONE:
                if name in (theirs.dtype.names or ()):
                    known[name] |= theirs[name]
        if self.fates["timewait"] is Fate.CARRIED:
            converter = self._converters["timewait"]
            rows = converter.values(former["timewait"].view(converter.former[1]))[0]
            known = maps["timewait"].view(converter.ours[1])["entries"]
            np.copyto(known, rows["entries"], where=known == 0)

    @property
    def begun(self) -> bool:
        """Whether links are ours already."""
        return (self.folder / MARK).exists()

    def close(self) -> None:
        """The former maps are gone."""
        (self.folder / MARK).unlink(missing_ok=True)


def carrying_row(state: int, places: Mapping[int, Mapping[str, int]]) -> bytes:
    """The element of map `carrying`: who serves, and where the former keys of each family have their fields."""
    row = np.zeros(1, dtype=layout.dtype_of("carrying"))
    row["state"] = state
    for family, found in places.items():
        for name, place in found.items():
            row[f"places{family}"][name] = place
    return row.tobytes()


def state_of(mark: Map) -> int:
    """Who serves."""
    return int(np.frombuffer(mark.lookup(bytes(4)) or b"", dtype=layout.dtype_of("carrying"))["state"][0])


class Table:
    """A table of flows, or of affinity, of another layout, and ours; it remembers what it has copied.

    Args:
        reply: the former flag of the backend's half of a flow; 0: these are no flows.
        dsr: that of a flow with direct server return.
        family: of the flows.
    """

    def __init__(
        self, former: Map, ours: Map, converter: Converter, reply: int = 0, dsr: int = 0, family: int = 0
    ) -> None:
        self._former, self._ours = former, ours
        self._converter = converter
        self._reply, self._dsr, self._family = reply, dsr, family
        self._rows = Rows(np.empty(0, converter.former[0]), np.empty(0, converter.former[1]))
        self._unfit: set[int] = set()  # names of rows

    @property
    def left(self) -> int:
        """How many rows cannot be expressed in our layout."""
        return len(self._unfit)

    def _converted(self, rows: Rows, chosen: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """These rows as ours, without those that cannot be expressed so."""
        keys, values, fit = self._converter.rows(rows.keys[chosen], rows.values[chosen])
        self._unfit.update(rows.names[chosen][~fit].tolist())
        if self._reply and "tag" in (values.dtype.names or ()):
            values["tag"] = layout.flow_tags(keys, self._family)
        return keys, values

    def copy(self) -> None:
        """Write what is new or has changed since the last time, and remove what is gone.

        Raises:
            BpfError: the map is full, or cannot be written.
        """
        rows = Rows(*self._former.items(*self._converter.former))
        changed = rows.unlike(self._rows)
        for start in range(0, len(changed), BATCH):
            keys, values = self._converted(rows, changed[start : start + BATCH])
            if self._ours.update_batch(keys, values) < len(keys):
                raise BpfError(f"map {self._ours.name} has no room for the former one's flows", errno.E2BIG)
        self._remove_gone(rows)
        self._rows = rows

    def merge(self) -> None:
        """Add what the former programs wrote after the last copy. Our programs write to these rows by now."""
        rows, former = Rows(*self._former.items(*self._converter.former)), self._rows
        changed = rows.unlike(former)
        before = former.places(rows.names[changed])
        settled = (before >= 0) & (self._settled(rows.values[changed]) == self._settled(former.values[before]))
        for index, known in zip(changed[~settled].tolist(), before[~settled].tolist(), strict=True):
            keys, values = self._converted(rows, slice(index, index + 1))
            present = self._ours.lookup(keys.tobytes()) if len(keys) else None
            if present is not None and self._reply:
                _, copied = self._converted(former, slice(max(known, 0), known + 1))
                merged = _merged(np.frombuffer(present, values.dtype).copy(), values, copied)
                self._ours.update(keys.tobytes(), merged.tobytes())
            elif len(keys) and known < 0:
                self._ours.update(keys.tobytes(), values.tobytes())
        self._remove_gone(rows)
        self._rows = rows

    def _settled(self, values: NDArray[Any]) -> NDArray[np.uint64]:
        """Numbers of these values, without what each packet changes, and the next one puts right.

        With direct server return the sequence number of the last segment has to be right.
        """
        values = values.copy()
        names = values.dtype.names or ()
        if "seen" in names:
            values["seen"] = 0
        if "ack" in names:
            values["ack"][values["flags"] & self._dsr == 0] = 0
        return convert.hashes(values)

    def _remove_gone(self, rows: Rows) -> None:
        """Remove what was copied and has ended in the former table, unless our programs know more of it."""
        for index in rows.missing(self._rows).tolist():
            keys, values = self._converted(self._rows, slice(index, index + 1))
            if len(keys) and self._ours.lookup(keys.tobytes()) == values.tobytes():
                self._ours.delete(keys.tobytes())

    def flows(self) -> int:
        """How many flows were copied."""
        if not self._reply:
            return 0
        return int(np.count_nonzero(self._rows.values["flags"] & self._reply == 0)) - self.left // 2


class Rows:
    """Rows of a table as they were at one time.

    Attributes:
        names: a number for each key, by which it is found again; and `numbers` for key and value.
    """

    def __init__(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        self.keys, self.values = keys, values
        self.names = convert.hashes(keys)
        self.numbers = self.names * np.uint64(3) ^ convert.hashes(values)

    def unlike(self, former: Rows) -> NDArray[np.int64]:
        """The places of rows that were not there, or were others."""
        return _without(self.numbers, former.numbers)

    def missing(self, former: Rows) -> NDArray[np.int64]:
        """The places of former rows whose keys are not here."""
        return _without(former.names, self.names)

    def places(self, names: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Where the rows with these names are, -1: nowhere."""
        if not len(self.names) or not len(names):
            return np.full(len(names), -1)
        order = np.argsort(self.names)
        found = order[np.minimum(np.searchsorted(self.names, names, sorter=order), len(order) - 1)]
        return np.where(self.names[found] == names, found, -1)


def _without(numbers: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The places of these numbers that are not known; mostly there are few, at the same places."""
    count = min(len(numbers), len(known))
    if len(numbers) <= len(known) and np.array_equal(numbers, known[:count]):
        return np.empty(0, np.int64)
    if not count:
        return np.arange(len(numbers))
    return np.flatnonzero(~np.isin(numbers, known))


def _merged(row: NDArray[Any], theirs: NDArray[Any], copied: NDArray[Any]) -> NDArray[Any]:
    """Our row, with what the former one says more than when it was copied; theirs, where it is another flow."""
    if not all(np.array_equal(row[name], theirs[name]) for name in ("saddr", "daddr", "sport", "dport")):
        return theirs
    if len(copied) and copied["started_or_fin"] != theirs["started_or_fin"]:  # a FIN
        row["started_or_fin"] = theirs["started_or_fin"]
    row["flags"] |= theirs["flags"]
    for name in ("seen", "ack"):
        later = (theirs[name] - row[name]).astype(np.int32) > 0
        row[name] = np.where(later, theirs[name], row[name])
    return row
