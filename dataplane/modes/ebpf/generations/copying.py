"""Copies rows from the maps of a former generation into those of the next one, while packets come."""

from __future__ import annotations

import errno
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map
from hybrid_proxy.dataplane.modes.ebpf.generations import convert
from hybrid_proxy.dataplane.modes.ebpf.generations.convert import Converter
from hybrid_proxy.dataplane.modes.ebpf.generations.generation import FLOWS, Layout, UnknownMeaningError
from hybrid_proxy.dataplane.modes.ebpf.maps import layout

BATCH: Final = 16384  # rows that are converted at once
HASHES: Final = ("frontends4", "frontends6")  # of the service table
MONOTONE: Final = ("overflowed", "direct_flows")  # columns of map `node` that programs set once
FLAGS: Final = {**dict.fromkeys(FLOWS, "flow_flags"), "backends": "backend_flags", "services": "service_flags"}


def converter(name: str, former: Layout, ours: Layout) -> Converter:
    """Converts rows of one map by the names of their fields and flags.

    Raises:
        ValueError: a row of the former layout has a type that is not known here.
    """
    theirs, known = (convert.types_of(one.maps[name][5] or "") for one in (former, ours))
    enum = FLAGS.get(name, "")
    return Converter(theirs, known, (former.enums.get(enum, {}), ours.enums.get(enum, {})))


def copy_table(name: str, former: Map, new: Map, rows: Converter) -> None:
    """Copies a map of the service table into an empty one.

    Raises:
        UnknownMeaningError: there is no room for all rows.
    """
    if name in HASHES:
        keys, values, _ = rows.rows(*former.items(*rows.former))
        if new.update_batch(keys, values) < len(keys):
            raise UnknownMeaningError(f"map {name} has no room for what is in the former one")
    else:
        theirs, known = former.view(rows.former[1]), new.view(rows.ours[1])
        count = min(len(theirs), len(known))
        known[:count] = rows.values(theirs[:count])[0]


def copy_flags_of_node(former: Map, new: Map, rows: Converter) -> None:
    """Copies the columns that programs write into map `node`."""
    theirs, known = former.view(rows.former[1]), new.view(rows.ours[1])
    for name in MONOTONE:
        if name in (theirs.dtype.names or ()):
            known[name] |= theirs[name]


def copy_timewait(former: Map, new: Map, rows: Converter) -> None:
    """Copies the marks of map `timewait`; those that the new programs have written meanwhile stay."""
    theirs = rows.values(former.view(rows.former[1]))[0]["entries"]
    known = new.view(rows.ours[1])["entries"]
    np.copyto(known, theirs, where=known == 0)


class FlowTable:
    """Copies a table of flows, or of affinity, again and again; remembers what it has copied.

    Args:
        former: the map that the former programs write.
        ours: the map that takes its place.
        reply: the former flag of the backend's half of a flow; 0: these are no flows.
        dsr: that of a flow with direct server return.

    Attributes:
        unsuitable: names of rows that cannot be expressed in our layout.
    """

    def __init__(self, former: Map, ours: Map, rows: Converter, reply: int = 0, dsr: int = 0, family: int = 0) -> None:
        self._former, self._ours = former, ours
        self._converter = rows
        self._reply, self._dsr, self._family = reply, dsr, family
        self._rows = Rows(np.empty(0, rows.former[0]), np.empty(0, rows.former[1]))
        self.unsuitable: set[int] = set()

    def _converted(self, rows: Rows, chosen: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Converts these rows to our layout, without those that cannot be expressed in it."""
        keys, values, fit = self._converter.rows(rows.keys[chosen], rows.values[chosen])
        self.unsuitable.update(rows.names[chosen][~fit].tolist())
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
        """Returns numbers of these values, without fields that the next packet writes again.

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
        """Returns how many flows were copied."""
        if not self._reply:
            return 0
        return int(np.count_nonzero(self._rows.values["flags"] & self._reply == 0)) - len(self.unsuitable) // 2


class Rows:
    """The rows of a table at one time.

    Attributes:
        names: a number for each key, by which it is found again; and `numbers` for key and value.
    """

    def __init__(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        self.keys, self.values = keys, values
        self.names = convert.hashes(keys)
        self.numbers = self.names * np.uint64(3) ^ convert.hashes(values)

    def unlike(self, former: Rows) -> NDArray[np.int64]:
        """Returns the positions of rows that are new or have changed."""
        return _without(self.numbers, former.numbers)

    def missing(self, former: Rows) -> NDArray[np.int64]:
        """Returns the positions of former rows whose keys are gone."""
        return _without(former.names, self.names)

    def places(self, names: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the positions of the rows with these names; -1: there is none."""
        if not len(self.names) or not len(names):
            return np.full(len(names), -1)
        order = np.argsort(self.names)
        found = order[np.minimum(np.searchsorted(self.names, names, sorter=order), len(order) - 1)]
        return np.where(self.names[found] == names, found, -1)


def _without(numbers: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the positions of numbers that are not known; mostly there are few."""
    count = min(len(numbers), len(known))
    if len(numbers) <= len(known) and np.array_equal(numbers, known[:count]):
        return np.empty(0, np.int64)
    if not count:
        return np.arange(len(numbers))
    return np.flatnonzero(~np.isin(numbers, known))


def _merged(row: NDArray[Any], theirs: NDArray[Any], copied: NDArray[Any]) -> NDArray[Any]:
    """Returns our row with what the former row has learned since its copy; the former row, if it is another flow."""
    if not all(np.array_equal(row[name], theirs[name]) for name in ("saddr", "daddr", "sport", "dport")):
        return theirs
    if len(copied) and copied["started"] != theirs["started"]:  # a FIN: it is `fin_end` now
        row["started"] = theirs["started"]
    row["flags"] |= theirs["flags"]
    for name in ("seen", "ack"):
        later = (theirs[name] - row[name]).astype(np.int32) > 0
        row[name] = np.where(later, theirs[name], row[name])
    return row
