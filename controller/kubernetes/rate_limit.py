"""Limits the requests that the API server gets from this agent: so many a second, and some at once (a token bucket).

The same as client-go's flow control, with which kube-proxy obeys `clientConnection.qps` and `burst`.
"""

from __future__ import annotations

import threading
import time

import msgspec


class RateLimit(msgspec.Struct, frozen=True):
    """Requests a second, and how many may come at once; without a `rate` there is no limit."""

    rate: float = 5.0
    burst: int = 10


class TokenBucket:
    """Delays requests to a rate limit, those of all threads together."""

    def __init__(self, rate_limit: RateLimit, closed: threading.Event) -> None:
        self._limit = rate_limit
        self._closed = closed
        self._lock = threading.Lock()
        self._full_at = 0.0  # monotonic; when the bucket is full again

    def wait(self) -> None:
        """Waits until the next request may be made, or the connection is closed."""
        pause = self.reserve(time.monotonic())
        if pause > 0:
            self._closed.wait(pause)

    def reserve(self, now: float) -> float:
        """Reserves the next request. Returns in how many seconds it may be made."""
        if self._limit.rate <= 0:
            return 0.0
        with self._lock:
            each = 1.0 / self._limit.rate
            self._full_at = max(self._full_at, now) + each
            return max(0.0, self._full_at - now - max(1, self._limit.burst) * each)
