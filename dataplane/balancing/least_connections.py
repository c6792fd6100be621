"""PURE. Least connections: of four backends by chance the one with the fewest open flows for its weight; IPVS's `lc`.

Programs count the flows of each backend as they begin and end, and compare those of four slots for each new one. The
best of all would be found by every processor at the same moment, and be flooded; of few that chance has chosen, the
best is nearly as good (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001). With as many flows
everywhere the first of the four is taken, so weights fill the ring as for `random`.
"""

from __future__ import annotations

from typing import Final

from hybrid_proxy.dataplane.balancing.ring import Algorithm, Spread, turns

LEAST_CONNECTIONS: Final = Algorithm("lc", "of four backends the one with the fewest open flows", Spread.FEWEST, turns)
WEIGHTED_LEAST_CONNECTIONS: Final = Algorithm(
    "wlc", "of four backends the one with the fewest open flows for its weight", Spread.FEWEST, turns
)
