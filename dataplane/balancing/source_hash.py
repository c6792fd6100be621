"""PURE. Source hash: a client always gets the same backend, on every node, without any state; IPVS's `sh`.

IPVS has a table of 256 buckets that it redistributes when a backend is added or removed: most clients move. Here the
hash of the client's address indexes a Maglev ring, so that only the clients of a removed backend have to move.
"""

from __future__ import annotations

from typing import Final

from hybrid_proxy.dataplane.balancing import maglev
from hybrid_proxy.dataplane.balancing.ring import Algorithm, Spread

SOURCE_HASH: Final = Algorithm("sh", "the client's address decides, alike on every node", Spread.CLIENT, maglev.ring)
