"""Backends for the tests of this folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st

from hybrid_proxy.dataplane.table import Backend

LIMIT = 16_381


def backends(count: int, weight: int = 1) -> list[Backend]:
    return [Backend(f"10.{n >> 8 & 255}.{n & 255}.7", 8080, weight=weight) for n in range(count)]


def counted(ring: Sequence[int], count: int) -> list[int]:
    """How many places each position has."""
    found = Counter(ring)
    assert set(found) <= set(range(count))
    return [found[position] for position in range(count)]


addresses = st.builds(
    lambda pattern, number, port: Backend(pattern(number), port),
    st.sampled_from([lambda number: f"10.0.{number >> 8}.{number & 255}", lambda number: f"fd00::{number:x}"]),
    st.integers(1, 65_535),
    st.sampled_from([80, 8080]),
)
several = st.lists(addresses, min_size=2, max_size=40, unique=True)
weights = st.lists(st.integers(1, 1000), min_size=2, max_size=40)
