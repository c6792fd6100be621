"""PURE. Random: each new connection goes anywhere, by weight. What kube-proxy's modes do, and the default."""

from __future__ import annotations

from typing import Final

from hybrid_proxy.dataplane.balancing.ring import Algorithm, Spread, turns

RANDOM: Final = Algorithm("random", "each connection goes to a random backend", Spread.RANDOM, turns)
