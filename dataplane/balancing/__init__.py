"""PURE. Algorithms that choose backends: each file fills a ring of backends; the datapath only indexes it.

An algorithm is a list of places, each the position of a backend, and the way in which the datapath chooses a place
(`Spread`). A new one that only fills a ring is one more file here and one more line in `ALGORITHMS`.

Names are those of IPVS's schedulers where there is an equivalent, so that one annotation means the same in the modes
ebpf and ipvs; `ALIASES` are what people call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hybrid_proxy.dataplane.balancing import at_random, least_connections, maglev, round_robin, source_hash, weighted
from hybrid_proxy.dataplane.balancing.ring import Algorithm, Spread
from hybrid_proxy.dataplane.table import Backend

__all__ = ["ALGORITHMS", "ALIASES", "KNOWN", "Algorithm", "Spread", "canonical", "find", "ring_of"]

ALGORITHMS: Final = {
    algorithm.name: algorithm
    for algorithm in (
        at_random.RANDOM,
        round_robin.ROUND_ROBIN,
        weighted.WEIGHTED,
        least_connections.LEAST_CONNECTIONS,
        least_connections.WEIGHTED_LEAST_CONNECTIONS,
        source_hash.SOURCE_HASH,
        maglev.MAGLEV,
    )
}
ALIASES: Final = {
    "round-robin": "rr",
    "weighted": "wrr",
    "least-connections": "lc",
    "source-hash": "sh",
    "maglev": "mh",
}
# Schedulers of IPVS that do the same with other means: they compare connections and weights.
_EQUIVALENT: Final = {"sed": "wlc", "nq": "wlc", "twos": "wlc"}
KNOWN: Final = frozenset({*ALGORITHMS, *_EQUIVALENT})  # what `find` finds


def canonical(name: str) -> str:
    """Returns the one name of an algorithm, for the service table."""
    return ALIASES.get(name, name)


def find(name: str) -> Algorithm | None:
    """Returns the algorithm for a canonical name or a scheduler of IPVS; None: there is no equivalent here."""
    return ALGORITHMS.get(_EQUIVALENT.get(name, name))


def ring_of(algorithm: Algorithm, backends: Sequence[Backend], limit: int) -> list[int]:
    """Fills a ring. Returns positions in `backends`, each of which occurs at least once.

    Args:
        algorithm: fills it.
        backends: those of one route, in any order; all with a weight of 1 or more.
        limit: places that the ring may have; it has more only where there are more backends. 0: one for each.
    """
    if len(backends) < 2 or not limit:
        return list(range(len(backends)))
    return algorithm.ring(backends, [backend.weight for backend in backends], limit)
