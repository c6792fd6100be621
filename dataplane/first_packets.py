"""PURE. Histograms of the time to first packet, an indicator of SIG Scalability.

It is the time from a client's SYN, or the first datagram of a conversation, to the first packet of the service's
backend. The programs count in steps, four for each octave (bpf/first_packet.h). Rows have those steps that were
counted, by their upper bounds in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TICK: Final = 1024  # nanoseconds of a tick of the programs' clock
STEPS: Final = 96
# Upper bounds in nanoseconds; the last step has whatever took longer.
BOUNDS: Final = tuple(TICK * (step + 1 if step < 4 else (5 + step % 4) << (step // 4 - 1)) for step in range(STEPS))
_STEP: Final = {bound: step for step, bound in enumerate(BOUNDS)}


def quantile(counts: Mapping[int, int], part: float) -> float | None:
    """Returns the seconds within which this part of all first packets came, as `histogram_quantile` does."""
    wanted, seen = part * sum(counts.values()), 0
    for bound, count in sorted(counts.items()):
        if count and seen + count >= wanted:
            lower = BOUNDS[_STEP[bound] - 1] if _STEP[bound] else 0
            return (lower + (bound - lower) * (wanted - seen) / count) / 1e9
        seen += count
    return None
