"""PURE. Algorithms that choose backends: each fills a ring of backends; the datapath only indexes it.

An algorithm is a list of places, each the position of a backend, and the way in which the datapath chooses a place
(`Spread`). A new one that only fills a ring is one more line in `ALGORITHMS`.

Names are those of IPVS's schedulers where there is an equivalent, so that one annotation means the same in the modes
ebpf and ipvs; `ALIASES` are what people call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hybrid_proxy.dataplane.balancing import maglev
from hybrid_proxy.dataplane.balancing.ring import Algorithm as Algorithm
from hybrid_proxy.dataplane.balancing.ring import Spread as Spread
from hybrid_proxy.dataplane.balancing.ring import turns
from hybrid_proxy.dataplane.table import Backend

ALGORITHMS: Final = {
    algorithm.name: algorithm
    for algorithm in (
        # The default, as in kube-proxy's modes.
        Algorithm("random", "each connection goes to a random backend", Spread.RANDOM, turns),
        # IPVS's `rr` knows no weights. Where all are the same there is no difference between these two.
        Algorithm("rr", "connections go to one backend after the other", Spread.IN_TURN, turns),
        Algorithm("wrr", "connections go to one backend after the other, by weight", Spread.IN_TURN, turns),
        # Programs count the flows of each backend as they begin and end, and compare those of four slots for each new
        # one. Every processor would find the best of all at the same moment, and flood it; the best of a few random
        # ones is nearly as good (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001). With
        # equal counts the first of the four is taken, so weights fill the ring as for `random`.
        Algorithm("lc", "of four backends the one with the fewest open flows", Spread.FEWEST, turns),
        Algorithm("wlc", "of four backends the one with the fewest open flows for its weight", Spread.FEWEST, turns),
        # IPVS has a table of 256 buckets that it redistributes when a backend is added or removed: most clients move.
        # Here only the clients of a removed backend have to move.
        Algorithm("sh", "the client's address decides, alike on every node", Spread.CLIENT, maglev.ring),
        Algorithm("mh", "a hash of the connection decides, alike on every node", Spread.TUPLE, maglev.ring),
    )
}
ALIASES: Final = {
    "round-robin": "rr", "weighted": "wrr", "least-connections": "lc", "source-hash": "sh", "maglev": "mh",
}  # fmt: skip
# IPVS's
SCHEDULERS: Final = ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "sed", "nq", "fo", "ovf", "mh", "twos")
CHOICES: Final = tuple(dict.fromkeys((*ALGORITHMS, *ALIASES, *SCHEDULERS)))  # what users may name; random is first
# Those that do the same with other means: they compare connections and weights.
_EQUIVALENT: Final = {"sed": "wlc", "nq": "wlc", "twos": "wlc"}
KNOWN: Final = frozenset({*ALGORITHMS, *_EQUIVALENT})  # what `find` finds


def canonical(name: str) -> str:
    """Returns the one name of an algorithm, for the service table."""
    return ALIASES.get(name, name)


def find(name: str) -> Algorithm | None:
    """Returns the algorithm for a canonical name or a scheduler of IPVS; None: there is no equivalent here."""
    return ALGORITHMS.get(_EQUIVALENT.get(name, name))


def ring_of(algorithm: Algorithm, backends: Sequence[Backend], limit: int) -> list[int]:
    """Fills a ring. Returns positions in `backends`, each at least once; all have a weight of 1 or more.

    The `limit` is how many places the ring may have; it has more only where there are more backends. 0: one for each.
    """
    if len(backends) < 2 or not limit:
        return list(range(len(backends)))
    return algorithm.ring(backends, [backend.weight for backend in backends], limit)
