"""PURE. Chooses backends: round robin, affinity, and another backend after a failure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from hybrid_proxy.dataplane.modes.userspace.messages import Pair

SUSPECT_SECONDS: Final = 5.0
MAX_CLIENTS: Final = 262_144  # with affinity, of one service port: the least recently used is forgotten first


class Chooser:
    """Chooses the backends of one service port. It has a position in each route, and each client's last backend.

    Times are seconds of a monotonic clock. Positions survive a change of the backends. Affinity is shared by all routes
    and proxy ports, is refreshed by new connections, and ends when its backend is not in the route.
    """

    __slots__ = ("_positions", "_sticky", "_suspected", "affinity")

    def __init__(self, affinity: int = 0) -> None:
        self.affinity = affinity
        self._positions: dict[int, int] = {}
        self._suspected: dict[Pair, float] = {}  # until when
        self._sticky: OrderedDict[str, tuple[Pair, float]] = OrderedDict()

    def first(self, number: int, route: tuple[Pair, ...], client: str, now: float) -> Pair | None:
        """Returns the backend of a new conversation; None: the route is empty.

        With affinity it is remembered at once, for connections that the client opens before this one is established.
        """
        known = self._remembered(route, client, now)
        if known is not None:
            return known
        suspected = self._suspected and {backend for backend, until in self._suspected.items() if until > now}
        chosen = self._next(number, route, suspected or ()) or self._next(number, route, ())
        self._remember(client, chosen, now)
        return chosen

    def another(
        self, number: int, route: tuple[Pair, ...], client: str, tried: Collection[Pair], now: float
    ) -> Pair | None:
        """Returns a backend that this conversation has not tried; None: there is none.

        With affinity, all conversations of a client whose backend failed move to the same one.
        """
        known = self._remembered(route, client, now)
        if known is not None and known not in tried:
            return known
        chosen = self._next(number, route, tried)
        self._remember(client, chosen, now)
        return chosen

    def _next(self, number: int, route: tuple[Pair, ...], tried: Collection[Pair]) -> Pair | None:
        for _ in range(len(route)):
            position = self._positions.get(number, 0)
            self._positions[number] = position + 1
            backend = route[position % len(route)]
            if backend not in tried:
                return backend
        return None

    def established(self, client: str, backend: Pair, now: float) -> None:
        """Refreshes the affinity of a client whose conversation was established.

        If the client got another backend meanwhile, that one stays: its route lacks this backend, and the client would
        have to move again.
        """
        self._suspected.pop(backend, None)
        known = self._sticky.get(client)
        if known is None or known[0] == backend:
            self._remember(client, backend, now)

    def _remembered(self, route: tuple[Pair, ...], client: str, now: float) -> Pair | None:
        known = self._sticky.get(client) if self.affinity else None
        if known is None or now - known[1] >= self.affinity or known[0] not in route:
            return None
        return known[0]

    def _remember(self, client: str, backend: Pair | None, now: float) -> None:
        if not self.affinity or backend is None:
            return
        self._sticky[client] = (backend, now)
        self._sticky.move_to_end(client)
        while len(self._sticky) > MAX_CLIENTS or now - next(iter(self._sticky.values()))[1] >= self.affinity:
            self._sticky.popitem(last=False)

    def forget(self, backend: Pair, now: float) -> None:
        """Ends the affinity to a backend that failed, and has new conversations avoid it for `SUSPECT_SECONDS`."""
        self._suspected = {known: until for known, until in self._suspected.items() if until > now}
        self._suspected[backend] = now + SUSPECT_SECONDS
        for client in [client for client, (known, _) in self._sticky.items() if known == backend]:
            del self._sticky[client]
