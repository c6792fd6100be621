"""PURE. Round robin: one backend after the other; where weights differ, as often as they say, as `wrr`.

IPVS's `rr` knows no weights. With the same weight for all there is no difference between the two.
"""

from __future__ import annotations

from typing import Final

from hybrid_proxy.dataplane.balancing.ring import Algorithm, Spread, turns

ROUND_ROBIN: Final = Algorithm("rr", "connections go to one backend after the other", Spread.IN_TURN, turns)
