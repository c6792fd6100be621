"""PURE. Converts rows of another version's maps to the layout of this version.

Fields are matched by name. Fields that this version does not have are dropped, and those that are missing are 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.modes.ebpf.generations.generation import UnknownMeaningError

# Types as `kernel.btf.spelled` writes them


def types_of(rows: str) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Returns the types of key and value that `Shape.rows` describes."""
    key, _, value = rows.partition(" -> ")
    return _type(key), _type(value)


def _type(text: str) -> np.dtype[Any]:
    kind, rest = _parse(text)
    if rest:
        raise ValueError(f"{text!r} is no type that is known here")
    found: np.dtype[Any] = np.dtype(kind)
    return found


def _parse(text: str) -> tuple[Any, str]:
    """Returns the type at the beginning of a text, and the rest of the text."""
    kind: Any
    if text.startswith("struct "):
        head, _, rest = text.removeprefix("struct ").partition("{")
        names, formats, offsets = [], [], []
        while not rest.startswith("}"):
            place, name, rest = rest.removeprefix(",").split(":", 2)
            kind, rest = _parse(rest)
            names.append(name)
            formats.append(kind)
            offsets.append(int(place) // 8)
        kind = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": int(head)})
        rest = rest[1:]
    elif found := re.match(r"\d+/([1248])(?!\d)", text):
        kind, rest = np.dtype(f"u{found[1]}"), text[found.end() :]
    else:
        raise ValueError(f"{text!r} is no type that is known here")
    lengths = []
    while found := re.match(r"\[(\d+)\]", rest):
        lengths.append(int(found[1]))
        rest = rest[found.end() :]
    return (kind if not lengths else np.dtype((kind, tuple(reversed(lengths))))), rest


def matching(former: np.dtype[Any], ours: np.dtype[Any]) -> Iterator[str]:
    """Returns the names of fields that both types have."""
    return (name for name in former.names or () if name in (ours.names or ()))


# Rows


class Converter:
    """Converts rows of one map to our layout.

    Args:
        former, ours: types of keys and values.
        flags: numbers of the bits of field `flags`, on both sides by name.
    """

    def __init__(
        self, former: tuple[np.dtype[Any], np.dtype[Any]], ours: tuple[np.dtype[Any], np.dtype[Any]],
        flags: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {}),
    ) -> None:  # fmt: skip
        self.former, self.ours = former, ours
        self._bits = [(number, flags[1][name]) for name, number in flags[0].items() if name in flags[1]]
        self._flags_differ = flags[0] != {name: flags[1].get(name) for name in flags[0]}

    def rows(self, keys: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
        """Returns keys and values in our layout, and which rows these are; the others cannot be expressed in it."""
        new_keys, fit = self._convert(keys, self.ours[0])
        for name in set(self.former[0].names or ()) - set(self.ours[0].names or ()):
            fit &= _zero(keys[name])  # others would become another key
        new_values, fits = self.values(values)
        fit &= fits
        return new_keys[fit], new_values[fit], fit

    def values(self, values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Returns values alone, as of an array, and which of them can be expressed."""
        new, fit = self._convert(values, self.ours[1])
        if self._flags_differ and new.dtype.names and "flags" in new.dtype.names:
            former = values["flags"]
            new["flags"] = 0
            for theirs, known in self._bits:
                new["flags"] |= np.where(former & theirs != 0, known, 0).astype(new["flags"].dtype)
        return new, fit

    def _convert(self, rows: NDArray[Any], kind: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        fit = np.ones(len(rows), dtype=np.bool_)
        if rows.dtype == kind:
            return np.frombuffer(bytearray(rows.tobytes()), dtype=kind), fit
        new = np.zeros(len(rows), dtype=kind)
        if kind.fields is None or rows.dtype.fields is None:
            new[:] = rows
            fit &= np.equal(new, rows)
            return new, fit
        for field in matching(rows.dtype, kind):
            fit &= _put(rows[field], new[field])
        return new, fit


def _put(former: NDArray[Any], ours: NDArray[Any]) -> NDArray[np.bool_]:
    """Copies a column, and returns which rows fit. If arrays have become shorter, the rest must be 0."""
    count = len(former)
    if former.dtype.fields is not None and ours.dtype.fields is not None and former.shape == ours.shape:
        fit = np.ones(count, dtype=np.bool_)
        for field in matching(former.dtype, ours.dtype):
            fit &= _put(former[field], ours[field])
        return fit
    if former.ndim != ours.ndim or former.dtype.fields is not None or ours.dtype.fields is not None:
        return _zero(former) if former.dtype.fields is None else np.zeros(count, np.bool_)
    both = (slice(None), *(slice(min(a, b)) for a, b in zip(former.shape[1:], ours.shape[1:], strict=True)))
    ours[both] = former[both].astype(ours.dtype)
    lost = former.copy()
    lost[both] -= ours[both].astype(former.dtype)
    return _zero(lost)


def _zero(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns which elements of a column, possibly arrays, are 0."""
    zero: NDArray[np.bool_] = np.equal(column, 0).all(axis=tuple(range(1, column.ndim)))
    return zero


def places(key: np.dtype[Any]) -> dict[str, int]:
    """Returns the offsets of the fields of a flow's key, in bytes.

    Raises:
        UnknownMeaningError: a field is missing, or has another type than the one by which flows are looked up.
    """
    fields = {name: (found[0], found[1]) for name, found in (key.fields or {}).items()}
    wanted = {"saddr": 4 * (1 + 3 * bool(key["saddr"].shape)), "sport": 2, "dport": 2, "protocol": 1}
    wanted["daddr"] = wanted["saddr"]
    if any(
        name not in fields or fields[name][0].itemsize != size or fields[name][1] > 63 for name, size in wanted.items()
    ):
        raise UnknownMeaningError("the keys of its flows have other fields")
    return {name: fields[name][1] for name in wanted}


def hashes(rows: NDArray[Any], at_once: int = 16384) -> NDArray[np.uint64]:
    """Returns a number for each row, by which rows of one type are compared; `at_once` rows are copied at a time."""
    parts = [_hashes(rows[start : start + at_once]) for start in range(0, len(rows), at_once)]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def _hashes(rows: NDArray[Any]) -> NDArray[np.uint64]:
    size = rows.dtype.itemsize
    raw = np.frombuffer(rows.tobytes(), dtype=np.uint8).reshape(len(rows), size)
    words = np.pad(raw, ((0, 0), (0, -size % 4))).view(np.uint32)
    total = np.zeros(len(rows), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in range(words.shape[1]):
            total = (total ^ words[:, column]) * np.uint64(0x9E3779B97F4A7C15)
            total ^= total >> np.uint64(29)
    return total
