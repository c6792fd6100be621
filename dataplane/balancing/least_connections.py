"""PURE. Least connections: shares of new connections that follow how many each backend has; IPVS's `lc` and `wlc`.

The datapath does not compare backends for each connection. User space counts the connections of each backend from time
to time (every five seconds, with the scan of flows) and fills the ring anew; until then a random place decides. So a
burst within that time is spread by the last count, and what is slow, or holds many connections, gets fewer.

Counts lag behind, and shares that followed them in full would swing from one backend to the other: each goes half of
the way. Nobody gets less than a sixteenth of its fair share: who is never asked is never seen to be well again. Nobody
gets more than four times of it: a new backend is not flooded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hybrid_proxy.dataplane.balancing.ring import Algorithm, Spread, turns

FAIR: Final = 16  # parts in a fair share
LEAST, MOST = 1, 4 * FAIR


def shares(weights: Sequence[int], loads: Sequence[int], before: Sequence[int | None]) -> list[int]:
    """What each backend gets of the next connections, in sixteenths of a fair share.

    Args:
        weights: of the backends, 1 or more.
        loads: connections that each has now.
        before: what this function returned for each the last time; None: the backend is new.
    """
    fair = [weight * len(weights) / sum(weights) for weight in weights]  # 1 on average
    pull = [part * part / (load + part) for part, load in zip(fair, loads, strict=True)]  # fair / (load / fair + 1)
    scale = FAIR * len(fair) / sum(pull)
    found = []
    for part, strength, last in zip(fair, pull, before, strict=True):
        aim = max(LEAST, round(min(max(strength * scale, LEAST * part), MOST * part)))
        found.append(aim if last is None else _halfway(last, aim))
    return found


def _halfway(last: int, aim: int) -> int:
    """Between the two, and never stuck beside the aim."""
    return (last + aim + (aim > last)) // 2


LEAST_CONNECTIONS: Final = Algorithm(
    "lc", "backends with fewer connections get more of the next ones", Spread.RANDOM, turns, loads=True
)
WEIGHTED_LEAST_CONNECTIONS: Final = Algorithm(
    "wlc", "backends with fewer connections for their weight get more of the next ones", Spread.RANDOM, turns,
    loads=True,
)  # fmt: skip
