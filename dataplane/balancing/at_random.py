"""PURE. Random: each new connection goes anywhere, by weight. What kube-proxy's modes do, and the default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dataplane.balancing.ring import Algorithm, Spread, turns
from dataplane.table import Backend

__all__ = ["RANDOM"]


def ring(backends: Sequence[Backend], shares: Sequence[int], limit: int) -> list[int]:
    """Each backend once; where shares differ, as often as its share says."""
    del backends
    return turns(shares, limit)


RANDOM: Final = Algorithm("random", "each connection goes to a random backend", Spread.RANDOM, ring)
