"""PURE. Decides whether this proxy and its node are healthy, and the answers for kubelets and load balancers.

The rules are kube-proxy's (pkg/proxy/healthcheck; KEP-3836 for the Node, KEP-3458 for the pages of load balancers):

- A family is unhealthy when a change of it has waited for as long as the timeout, twice the sync period. Further
  changes do not restart the wait. A family that was never programmed is not unhealthy.
- `/livez` shows that alone, because a restart may repair it. `/healthz` includes the Node: one that is being deleted
  should get no new connections.
- A health-check node port shows whether *this* node has endpoints of a Service: ready ones, each address once. Those
  that terminate do not count, although they still serve.

Three rules are our own. A loop that hangs is unhealthy, whatever waits. `/healthz` is 503 until the first table is
programmed: a load balancer should not send to a node that knows no Service yet. And it is 503 while something is
missing that another program removed; a restart does not repair that, so `/livez` does not show it.

The caller passes the time: monotonic seconds for ages, seconds since 1970 for what is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from hybrid_proxy.controller.semantics.entries import HealthCheck
from hybrid_proxy.controller.serving.counters import FAMILIES

NEVER: Final = "0001-01-01T00:00:00Z"  # Go's zero time
JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
NOSNIFF: Final = ("X-Content-Type-Options", "nosniff")
OK, UNAVAILABLE = 200, 503


class Answer(NamedTuple):
    """An answer of HTTP."""

    code: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = (NOSNIFF,)


class Handler(NamedTuple):
    """A page: called with the family of the address that was connected to (4 or 6) and the request's Accept.

    `slow`: it may wait, so it is called in a thread; one such page is made at a time. `redacted`: it has removed
    secrets itself, because most of it is long and has none.
    """

    make: Callable[[int, str], Answer]
    slow: bool = False
    redacted: bool = False


class Listener(NamedTuple):
    """Pages by path at some addresses and one port; path `*` answers all that have none.

    `0.0.0.0` and `::` are every address of both families, as in Go. `what` names it in messages.
    """

    what: str
    addresses: tuple[str, ...]
    port: int
    pages: Mapping[str, Handler]

    @property
    def place(self) -> tuple[tuple[str, ...], int]:
        """The part that needs another socket when it changes."""
        return self.addresses, self.port


class Health:
    """The health of this proxy. One thread writes; any may read, because values are replaced and never changed.

    Args:
        timeout: seconds that a change may wait.
        families: those that are programmed, 4 and 6.
        needs_node: a missing Node is not eligible. Without an API server there may never be one.
    """

    def __init__(self, timeout: float, families: Iterable[int] = (4, 6), *, needs_node: bool = True) -> None:
        self.timeout = timeout
        self.families = tuple(families)
        self.node_eligible = not needs_node
        self.leaving = False  # load balancers should send nothing more to this node
        self.awaited: tuple[str, ...] = ()  # kinds of objects without which nothing is programmed
        self.warnings: tuple[str, ...] = ()  # of settings that serve nowhere: they change no answer's status
        self.asked: Counter[tuple[str, int]] = Counter()  # page and status -> how often
        self._needs_node = needs_node
        self._waiting: Mapping[int, float] = {}  # family -> since when the oldest change waits
        self._updated: Mapping[int, float] = {}
        self._turned = float("inf")
        self.drift: tuple[str, ...] = ()  # messages: drift of the dataplane that is not repaired yet

    def turned(self, now: float) -> None:
        """Note that the loop is at work."""
        self._turned = now

    def queued(self, now: float, family: int | None = None) -> None:
        """Note a change that is still to be programmed; of both families if that is not known."""
        for one in (family,) if family in self.families else self.families:
            if one not in self._waiting:
                self._waiting = {**self._waiting, one: now}

    def updated(self, now: float) -> None:
        """Note that everything that arrived is programmed."""
        self._waiting = {}
        self._updated = dict.fromkeys(self.families, now)

    def node(self, eligible: bool | None) -> None:
        self.node_eligible = not self._needs_node if eligible is None else eligible

    def well(self, now: float) -> bool:
        """True if the proxy does its work, whatever the Node says."""
        return self._timely(now) and not self.drift

    def _timely(self, now: float) -> bool:
        return all(self._family_well(family, now) for family in self._updated)

    def _family_well(self, family: int, now: float) -> bool:
        return now - min(self._waiting.get(family, now), self._turned) < self.timeout

    def passes(self, page: str, now: float) -> bool:
        """True if this page, `healthz` or `livez`, answers 200."""
        return self._timely(now) if page == "livez" else self._serves(now) and self._eligible

    def _serves(self, now: float) -> bool:
        return self.well(now) and bool(self._updated)

    @property
    def _eligible(self) -> bool:
        return self.node_eligible and not self.leaving

    def healthz(self, now: float, wall: float) -> Answer:
        return self._page("healthz", now, wall, self._serves(now), {"nodeEligible": self._eligible})

    def livez(self, now: float, wall: float) -> Answer:
        return self._page("livez", now, wall, self._timely(now), {})

    def _page(self, name: str, now: float, wall: float, well: bool, more: Mapping[str, bool]) -> Answer:
        updated, good = self._updated, self.passes(name, now)
        # As in releases of kube-proxy in which every turn of its loop counted as an update.
        last = rfc3339(wall) if good else rfc3339(wall - now + max(updated.values())) if updated else NEVER
        body: dict[str, object] = {"lastUpdated": last, "currentTime": rfc3339(wall), **more, "healthy": well}
        if updated:
            body["status"] = {
                FAMILIES[family]: {"lastUpdated": rfc3339(wall - now + at), "healthy": self._family_well(family, now)}
                for family, at in sorted(updated.items())
            }
        elif self.awaited:
            body["waitingFor"] = self.awaited
        if self.warnings:
            body["warnings"] = self.warnings
        code = OK if good else UNAVAILABLE
        self.asked[name, code] += 1
        return Answer(code, msgspec.json.encode(body))


def rfc3339(wall: float) -> str:
    """Formats a time as Go's JSON has it, in UTC."""
    return f"{datetime.fromtimestamp(wall, UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


def service_answer(service: str, check: HealthCheck, family: int, *, well: bool) -> Answer:
    """Returns the answer of a Service's health-check node port, at any path.

    Args:
        service: `namespace/name`.
        check: the Service's endpoints on this node.
        family: of the address that was connected to, 4 or 6.
        well: whether this proxy does its work (`Health.well`).
    """
    namespace, _, name = service.partition("/")
    count = check.local_endpoints(family)
    body = {"service": {"namespace": namespace, "name": name}, "localEndpoints": count, "serviceProxyHealthy": well}
    headers = (NOSNIFF, ("X-Load-Balancing-Endpoint-Weight", str(count)))
    return Answer(OK if count and well else UNAVAILABLE, msgspec.json.encode(body), JSON, headers)
