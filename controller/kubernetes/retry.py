"""PURE. Decides when one kind of objects is requested again: how long to pause after what.

- An answer that leads nowhere is not a failure to answer. Only the latter doubles the pause from try to try.
- A server that has just started refuses everybody until it has read its rules. It is there, so it is asked again as
  soon as one that ends a stream, however long it was away before.
- A server that forgot our version (410 Gone) or ended a stream is there: the first 410 is followed by a list at once. A
  server that answers 410 again and again pays for a list each time, so the pauses double until a stream has settled.
- A kind that is not served is asked for again soon at first, then ever more rarely.

The caller shortens pauses at random (`random.uniform(0.5, 1.0)`), so that nodes do not come back together.
"""

from __future__ import annotations

from typing import Final

import msgspec

SETTLED: Final = 10.0  # seconds after which a stream counts as working, even if nothing came
_PASSING: Final = 2  # ended streams or 410s in a row that are everyday life


class RetryPolicy(msgspec.Struct, frozen=True):
    """The pauses and time-outs, in seconds.

    `silence` ends a stream on which not even a bookmark came; servers send these about every minute.
    `quiet` is how long nothing may come, on any stream, before the server is asked whether it is there.
    `lifetime` is how long a stream is asked to live. `rarely` is for kinds that this server does not serve.
    """

    first: float = 0.5  # between tries, doubled with every failure in a row
    longest: float = 30.0
    silence: float = 150.0
    quiet: float = 30.0
    lifetime: tuple[float, float] = (300.0, 600.0)
    rarely: float = 600.0


def honoured(asked: float, pause: float, longest: float, share: float) -> float:
    """Returns the seconds to wait for a server that asks for so many (Retry-After), where ours would be `pause`.

    Many nodes get the same number, so each comes later than asked by a `share` of it, from 0 to 1. Who is refused again
    and again waits for our own pause, which doubles: otherwise all of them would come back each second, for as long as
    it takes. But the server is there, so it is asked again soon enough.
    """
    return max(min(asked, 10 * longest) * (1 + share), min(pause, longest / 3))


class Backoff:
    """The tries of one kind. Methods that return a number return the pause in seconds before the next try."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.failures = 0  # in a row, without an answer that helps
        self._ended = 0  # streams in a row that ended early with no event
        self._refused = 0  # in a row, by a server that may have just started
        self._forgotten = 0  # 410s in a row, with no settled stream between them
        self._unusable = 0  # unusable answers in a row, with no settled stream between them
        self._absent = 0

    def failed(self) -> float:
        """Notes that there was no answer, or one that refuses."""
        self.failures += 1
        return self._doubled(self.failures, self._policy.longest)

    def refused(self) -> float:
        """Notes a refusal that will probably end soon."""
        self.failures = 1
        self._refused += 1
        return self._doubled(self._refused, max(self._policy.first, self._policy.longest / 8))

    def ended(self) -> float:
        """Notes that a stream ended before its time. It was accepted, and to continue it costs the server little."""
        self.failures = 0
        self._ended += 1
        return self._doubled(self._ended, max(self._policy.first, self._policy.longest / 8))

    def forgotten(self) -> float:
        """Notes that everything has to be listed again; how streams ended before does not matter any more."""
        self.failures = self._ended = 0
        self._forgotten += 1
        return 0.0 if self._forgotten == 1 else self._doubled(self._forgotten - 1, self._policy.longest)

    def unusable(self) -> float:
        """Notes an answer that cannot be used; the same may come again."""
        self._unusable += 1
        return self._doubled(self._unusable, self._policy.longest)

    def absent(self) -> float:
        """Notes that the server does not serve this kind, or does not let us read it."""
        self.failures = 0
        self._absent += 1
        return self._doubled(self._absent, self._policy.rarely)

    def answered(self) -> None:
        """Notes that a complete list came, or a watch was accepted."""
        self.failures = self._absent = self._refused = 0

    def received(self) -> None:
        """Notes that an event came."""
        self.failures = self._ended = 0

    def settled(self) -> None:
        """Notes that a stream lived for `SETTLED` seconds, or as long as it was asked to."""
        self.failures = self._ended = self._forgotten = self._unusable = 0

    @property
    def passing(self) -> bool:
        """Return whether what went wrong is everyday life so far: streams that end, versions that the server forgot."""
        return not (self.failures or self._unusable) and self._ended <= _PASSING and self._forgotten <= _PASSING

    def _doubled(self, times: int, longest: float) -> float:
        return min(longest, self._policy.first * 2.0 ** min(times - 1, 16))
