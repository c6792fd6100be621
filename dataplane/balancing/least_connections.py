"""PURE. Least connections: of four random backends the one with the fewest open flows for its weight; IPVS's `lc`.

Programs count the flows of each backend as they begin and end, and compare those of four slots for each new one. Every
processor would find the best of all at the same moment, and flood it; the best of a few random ones is nearly as good
(Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001). With equal counts the first of the four
is taken, so weights fill the ring as for `random`.
"""

from __future__ import annotations

from typing import Final

from hybrid_proxy.dataplane.balancing.ring import Algorithm, Spread, turns

LEAST_CONNECTIONS: Final = Algorithm("lc", "of four backends the one with the fewest open flows", Spread.FEWEST, turns)
WEIGHTED_LEAST_CONNECTIONS: Final = Algorithm(
    "wlc", "of four backends the one with the fewest open flows for its weight", Spread.FEWEST, turns
)
