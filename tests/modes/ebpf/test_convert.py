"""How rows of another version's maps become ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_proxy.dataplane.modes.ebpf.generations import convert
from hybrid_proxy.dataplane.modes.ebpf.generations.convert import Converter, types_of
from hybrid_proxy.dataplane.modes.ebpf.generations.generation import UnknownMeaningError
from hybrid_proxy.dataplane.modes.ebpf.generations.layouts import ours
from hybrid_proxy.dataplane.modes.ebpf.maps import layout


def test_a_record_describes_rows_as_python_reads_them() -> None:
    for name, key, value in (
        ("flows4", "flow4_key", "flow"), ("flows6", "flow6_key", "flow"), ("affinity", "affinity_key", ""),
        ("backends", "", "backend"), ("sockets", "", "socket_state"),
    ):  # fmt: skip
        found = types_of(ours().maps[name][5] or "")
        for kind, struct in zip(found, (key, value), strict=True):
            assert not struct or _spread(kind) == _spread(layout.dtype_of(struct))


def _spread(kind: np.dtype[Any]) -> Any:
    if kind.fields is None:
        return str(kind)
    return {name: (_spread(found[0]), found[1]) for name, found in kind.fields.items()}


# Rows

OLD = np.dtype({"names": ["a", "b", "pad"], "formats": ["u4", "u2", "u2"], "offsets": [0, 4, 6], "itemsize": 8})
NEW = np.dtype({"names": ["zone", "a", "b", "pad"], "formats": ["u4"] * 4, "offsets": [0, 4, 8, 12], "itemsize": 16})
WORDS = np.dtype([("flags", "u4"), ("list", "u4", (2,)), ("deep", [("x", "u2"), ("y", "u2")])])
MORE = np.dtype([("deep", [("y", "u2"), ("x", "u4")]), ("list", "u4", (4,)), ("flags", "u8")])

drawn_rows = st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3, *[st.integers(0, 2**16 - 1)] * 2), max_size=20)


@given(drawn_rows)
def test_every_row_survives_the_way_up_and_down(drawn: list[tuple[int, ...]]) -> None:
    rows = np.array([(flags, [x, y], (p, q)) for flags, x, y, p, q in drawn], dtype=WORDS)
    keys = np.zeros(len(rows), dtype=OLD)
    keys["a"], keys["b"] = np.arange(len(rows)), 7
    up, down = Converter((OLD, WORDS), (NEW, MORE)), Converter((NEW, MORE), (OLD, WORDS))
    new_keys, new_rows, fit = up.rows(keys, rows)
    assert fit.all()
    assert not new_keys["zone"].any()
    back_keys, back, fit = down.rows(new_keys, new_rows)
    assert fit.all()
    assert back_keys.tobytes() == keys.tobytes()
    assert back.tobytes() == rows.tobytes()


def test_a_key_that_says_more_than_ours_can_is_left_out() -> None:
    keys = np.array([(0, 1, 2, 0), (5, 1, 2, 0), (0, 1, 70_000, 0)], dtype=NEW)
    kept, _, fit = Converter((NEW, WORDS), (OLD, WORDS)).rows(keys, np.zeros(3, dtype=WORDS))
    assert fit.tolist() == [True, False, False]
    assert kept["b"].tolist() == [2]


def test_an_array_that_is_shorter_here_loses_only_zeros() -> None:
    rows = np.zeros(2, dtype=MORE)
    rows["list"][1, 3] = 9
    assert Converter((OLD, MORE), (OLD, WORDS)).values(rows)[1].tolist() == [True, False]


def test_flags_are_translated_by_their_names() -> None:
    rows = np.zeros(3, dtype=WORDS)
    rows["flags"] = [0b001, 0b010, 0b111]
    theirs, known = {"A": 1, "B": 2, "GONE": 4}, {"A": 8, "B": 2, "NEW": 1}
    assert Converter((OLD, WORDS), (OLD, WORDS), (theirs, known)).values(rows)[0]["flags"].tolist() == [8, 2, 10]
    assert rows["flags"].tolist() == [0b001, 0b010, 0b111], "the former rows are still in use"


def test_the_places_of_a_key_are_those_of_its_fields() -> None:
    wanted = {"saddr": 0, "daddr": 4, "sport": 8, "dport": 10, "protocol": 12}
    assert convert.places(layout.dtype_of("flow4_key")) == wanted
    with pytest.raises(UnknownMeaningError):
        convert.places(np.dtype([("saddr", "u4"), ("daddr", "u4"), ("ports", "u4"), ("protocol", "u1")]))


def test_rows_that_differ_in_one_bit_have_other_numbers() -> None:
    rows = np.zeros(2 + 8 * WORDS.itemsize, dtype=WORDS)
    raw = rows.view(np.uint8).reshape(len(rows), -1)
    for bit in range(8 * WORDS.itemsize):
        raw[2 + bit, bit // 8] = 1 << bit % 8
    numbers = convert.hashes(rows)
    assert numbers[0] == numbers[1]
    assert len(set(numbers.tolist())) == len(rows) - 1
