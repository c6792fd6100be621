"""Serves this agent's pages by HTTP: health, metrics, and the health-check node ports of Services.

    healthz_bind_address   /healthz /livez                            for load balancers and the kubelet
    metrics_bind_address   /metrics /metrics/slis                     for Prometheus
                           /healthz /proxyMode /configz /statusz /flagz    for people
    each health-check node port, at any path                          for the load balancer of one Service

Paths and answers are kube-proxy's. Its pages for debugging a Go program (/debug/pprof) have no counterpart here; with
`enable_profiling` there is /debug/threads, which shows what each thread does.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.controller.kubernetes.events import Recorder
from hybrid_proxy.controller.semantics.entries import HealthCheck
from hybrid_proxy.controller.serving import protocol
from hybrid_proxy.controller.serving.counters import Counters
from hybrid_proxy.controller.serving.health import (
    NOSNIFF,
    OK,
    TEXT,
    UNAVAILABLE,
    Answer,
    Handler,
    Health,
    Listener,
    service_answer,
)
from hybrid_proxy.controller.serving.protocol import HealthChecks, Request
from hybrid_proxy.controller.serving.zpages import flagz, statusz
from hybrid_proxy.controller.settings.config import Config

if TYPE_CHECKING:
    from hybrid_proxy.controller.serving.http_server import HttpServer
    from hybrid_proxy.controller.serving.metrics import Metrics

log = logging.getLogger(__name__)

HEALTH, METRICS = "--healthz-bind-address", "--metrics-bind-address"
_REASONS: Final = {HEALTH: "FailedToStartProxierHealthcheck", METRICS: "FailedToStartMetricServer"}


class HttpHandlers:
    """The pages of one agent.

    `end` is called when the agent must end, because `bind_address_hard_fail` says so.
    """

    def __init__(
        self,
        config: Config,
        health: Health,
        counters: Counters,
        ask: Callable[[Request], protocol.Answer],
        in_effect: Callable[[], list[dict[str, Any]]],
        flags: Mapping[str, Any],
        events: Recorder,
        end: Callable[[Exception], None],
    ) -> None:
        self._config = config
        self._health = health
        self._counters = counters
        self._ask = ask
        self._in_effect = in_effect
        self._flags = flags
        self._events = events
        self._end = end
        self._metrics: Metrics | None = None
        self._checks: Mapping[str, HealthCheck] = {}
        self._addresses: tuple[str, ...] = ()
        self._own = dict(self._own_listeners())
        self.mode = config.mode  # the one that serves, when that is known
        self._server: HttpServer | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Begin to serve, once; any thread. What the server needs is imported now, and is no part of a quick start."""
        from hybrid_proxy.controller.serving.http_server import HttpServer

        with self._starting:
            self._server = self._server or HttpServer(self._failed)
        self._serve()

    def close(self) -> None:
        with self._starting:
            if self._server is not None:
                self._server.close()

    def follow(self, checks: Mapping[str, HealthCheck], addresses: tuple[str, ...]) -> None:
        """Serve the health-check node ports of these Services, by `namespace/name`, at these addresses."""
        before, self._checks = self._checks, checks
        if addresses == self._addresses and _ports(before) == _ports(checks):
            return
        self._addresses = addresses
        self._serve()

    def configure(self, config: Config) -> None:
        """Serve as another configuration says; what listens at the same address and port stays."""
        self._config = config
        self._own = dict(self._own_listeners())
        self._serve()

    def status(self) -> HealthChecks:
        """Counts the served health-check node ports, and says why others are not served."""
        server = self._server
        if server is None:
            return HealthChecks(0, {}, {})
        troubles = server.troubles
        return HealthChecks(
            served=sum(1 for name in server.served if name not in self._own),
            failed={name: trouble for name, trouble in troubles.items() if name not in self._own},
            listeners={name: trouble for name, trouble in troubles.items() if name in self._own},
        )

    def _serve(self) -> None:
        if self._server is None:
            return
        checks = {
            name: Listener(
                f"the health check of service {name}", self._addresses, check.port, {"*": self._check_page(name)}
            )
            for name, check in self._checks.items()
        }
        self._server.follow(self._own | checks)

    # Sites

    def _own_listeners(self) -> dict[str, Listener]:
        listeners = {}
        if (place := self._config.healthz_bind_address) is not None:
            pages = {
                "/healthz": Handler(lambda *_: self._health.healthz(time.monotonic(), time.time())),
                "/livez": Handler(lambda *_: self._health.livez(time.monotonic(), time.time())),
            }
            listeners[HEALTH] = Listener("health", (place.address,), place.port, pages)
        if (place := self._config.metrics_bind_address) is not None:
            pages = {
                "/metrics": Handler(lambda _, accept: self._scrape(accept, every=True), slow=True, redacted=True),
                "/metrics/slis": Handler(lambda _, accept: self._scrape(accept, every=False), slow=True),
                "/healthz": Handler(lambda *_: _text("ok")),
                "/proxyMode": Handler(lambda *_: _text(self.mode)),
                "/configz": Handler(lambda *_: Answer(OK, self._configz()), slow=True),
                "/flagz": Handler(lambda _, accept: self._flagz(accept), slow=True),
            }
            if self._config.kube_proxy.enable_profiling:
                pages["/debug/threads"] = Handler(lambda *_: _text(_threads()))
            paths = sorted((*pages, "/statusz"))
            pages["/statusz"] = Handler(
                lambda _, accept: statusz(accept, self._counters.started, time.time(), paths), slow=True
            )
            listeners[METRICS] = Listener("metrics", (place.address,), place.port, pages)
        return listeners

    def _failed(self, key: str, trouble: str) -> None:
        if key not in _REASONS:
            note = f"node {self._config.settings.node_name}: {trouble}"
            self._events.event("Warning", "FailedToStartServiceHealthcheck", "Listen", note, of=key)
            return
        if self._config.kube_proxy.bind_address_hard_fail:
            self._events.event("Warning", _REASONS[key], "StartProxy", trouble)
            self._end(ConfigError(f"{key}: {trouble}; --bind-address-hard-fail says to end then"))
        elif key == HEALTH:
            self._events.event("Warning", _REASONS[key], "StartProxy", trouble)

    # HttpHandlers

    def _check_page(self, name: str) -> Handler:
        def make(family: int, _: str) -> Answer:
            check = self._checks.get(name)
            if check is None:  # a moment before its socket is closed
                return Answer(UNAVAILABLE, b"")
            well = self._health.well(time.monotonic()) and not self._health.leaving
            return service_answer(name, check, family, well=well)

        return Handler(make)

    def _scrape(self, accept: str, *, every: bool) -> Answer:
        """Returns all metrics, or those of the health checks alone."""
        if self._metrics is None:
            # 1.5 MB that an agent without Prometheus does without
            from hybrid_proxy.controller.serving.metrics import Metrics

            self._metrics = Metrics(self._agent_status, self._traffic, self._counters, self._health)
        body, content_type = self._metrics.page(accept) if every else self._metrics.health_checks(accept)
        return Answer(OK, body, content_type, ())

    def _flagz(self, accept: str) -> Answer:
        from hybrid_proxy.controller.settings.given import texts

        return flagz(accept, texts(self._flags))

    def _agent_status(self) -> protocol.AgentStatus | None:
        answer = self._ask(protocol.GetStatus())
        return answer.status if isinstance(answer, protocol.StatusAnswer) else None

    def _traffic(self) -> protocol.TrafficAnswer:
        answer = self._ask(protocol.GetTraffic())
        return answer if isinstance(answer, protocol.TrafficAnswer) else protocol.TrafficAnswer([])

    def _configz(self) -> bytes:
        """Returns documents by the group of their apiVersion, as kube-proxy has its own."""
        made = self._in_effect()
        return msgspec.json.encode({document["apiVersion"].partition("/")[0]: document for document in made})


def _ports(checks: Mapping[str, HealthCheck]) -> dict[str, int]:
    return {name: check.port for name, check in checks.items()}


def _text(text: str) -> Answer:
    return Answer(OK, text.encode(), TEXT, (NOSNIFF,))


def _threads() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = sys._current_frames()  # noqa: SLF001 (documented; there is no other way)
    return "\n".join(
        f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}" for ident, frame in stacks.items()
    )
