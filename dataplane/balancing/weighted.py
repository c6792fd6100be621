"""PURE. Weighted round robin: in turn, and as often as the weight says, evenly apart; IPVS's `wrr`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dataplane.balancing.ring import Algorithm, Spread, turns
from dataplane.table import Backend

__all__ = ["WEIGHTED"]


def ring(backends: Sequence[Backend], shares: Sequence[int], limit: int) -> list[int]:
    """Weights 3 and 1 make a ring of four places: three turns, and one between them."""
    del backends
    return turns(shares, limit)


WEIGHTED: Final = Algorithm("wrr", "connections go to one backend after the other, by weight", Spread.IN_TURN, ring)
