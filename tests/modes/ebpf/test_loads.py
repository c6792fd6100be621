"""Corrections of counted flows: exact where nothing happens meanwhile, and never for the worse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_proxy.dataplane.modes.ebpf.flows.collector import corrections
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import dtype_of

TOP = (1 << 32) - 1


def row(opened: int, closed: int, correction: int = 0) -> np.ndarray:
    made = np.zeros(1, dtype=dtype_of("load"))
    made["opened"], made["closed"], made["correction"] = opened & TOP, closed & TOP, correction & TOP
    return made


CASES = [
    #            before        after              flows seen  correction
    pytest.param((10, 4, 0),   (10, 4, 0),        6,          0,    id="right"),
    pytest.param((10, 4, 0),   (10, 4, 0),        9,          3,    id="some were not counted"),
    pytest.param((10, 4, 3),   (10, 4, 3),        6,          0,    id="a correction that was too much"),
    pytest.param((0, 0, 0),    (0, 0, 0),         0,          0,    id="nothing"),
    pytest.param((10, 4, 0),   (12, 4, 0),        7,          0,    id="of two that began one was seen"),
    pytest.param((10, 4, 0),   (10, 6, 0),        4,          0,    id="of two that ended none was seen"),
    pytest.param((10, 4, 0),   (12, 4, 0),        9,          1,    id="more than began"),
    pytest.param((10, 4, 5),   (12, 6, 5),        6,          2,    id="as little as explains it"),
    pytest.param((TOP, TOP - 2, 0), (TOP, TOP - 2, 0), 2,     0,    id="before counters begin anew"),
    pytest.param((1, TOP, 0),  (1, TOP, 0),       2,          0,    id="between"),
    pytest.param((TOP, TOP, 0), (TOP + 2, TOP, 0), 1,         0,    id="while it does"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "seen", "expected"), CASES)
def test_corrections(before: tuple[int, ...], after: tuple[int, ...], seen: int, expected: int) -> None:
    assert corrections(row(*before), row(*after), np.array([seen])).tolist() == [expected]


@given(*[st.integers(0, 1000)] * 4, st.integers(-50, 50), st.data())
def test_a_right_count_stays_right(
    open_: int, closed: int, more: int, less: int, correction: int, data: st.DataObject
) -> None:
    """Whatever was seen of the flows that came and went."""
    less = min(less, open_ + more)
    seen = open_ + data.draw(st.integers(-min(less, open_), more))
    opened = open_ + closed - correction
    before, after = row(opened, closed, correction), row(opened + more, closed + less, correction)
    assert corrections(before, after, np.array([seen])).tolist() == [correction]
