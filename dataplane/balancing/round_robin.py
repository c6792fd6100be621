"""PURE. Round robin: one backend after the other, whatever their weights; IPVS's `rr`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hybrid_proxy.dataplane.balancing.ring import Algorithm, Spread
from hybrid_proxy.dataplane.table import Backend


def ring(backends: Sequence[Backend], shares: Sequence[int], limit: int) -> list[int]:
    """Each backend once."""
    del shares, limit
    return list(range(len(backends)))


ROUND_ROBIN: Final = Algorithm(
    "rr", "connections go to one backend after the other", Spread.IN_TURN, ring, weighs=False
)
