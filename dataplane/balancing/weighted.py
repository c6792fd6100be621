"""PURE. Weighted round robin: in turn, and as often as the weight says, evenly apart; IPVS's `wrr`."""

from __future__ import annotations

from typing import Final

from hybrid_proxy.dataplane.balancing.ring import Algorithm, Spread, turns

WEIGHTED: Final = Algorithm("wrr", "connections go to one backend after the other, by weight", Spread.IN_TURN, turns)
