"""PURE. Random: each new connection goes to any backend, by weight, as in kube-proxy's modes. The default."""

from __future__ import annotations

from typing import Final

from hybrid_proxy.dataplane.balancing.ring import Algorithm, Spread, turns

RANDOM: Final = Algorithm("random", "each connection goes to a random backend", Spread.RANDOM, turns)
