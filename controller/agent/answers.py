"""What a running agent answers at its admin socket and to scrapes.

Other threads put a query into the loop's queue and wait (`ask`). The loop answers it (`Answers`), so that every answer
is one consistent state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from controller.agent.active_mode import ActiveMode
from controller.agent.config_follower import ConfigFollower
from controller.agent.event_queue import EventQueue
from controller.agent.other_proxies import OtherProxiesWatcher
from controller.agent.process import resident_bytes
from controller.agent.syncer import Syncer
from controller.errors import ControllerError
from controller.kubernetes import Source
from controller.serving.health import Health
from controller.serving.http_handlers import HttpHandlers
from dataplane.errors import DataplaneError
from dataplane.mode import PacketEvents, ProbePacket

__all__ = ["Answers", "Query", "ask"]

ANSWER_SECONDS: Final = 30.0


@dataclass(slots=True)
class Query:
    """A request from another thread, and the answer when there is one."""

    request: dict[str, Any]
    answered: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Any] = field(default_factory=dict)


def ask(put: Callable[[Query], None], request: dict[str, Any]) -> dict[str, Any]:
    """Put a request into the loop's queue and wait for the answer; with the key `failed` if there is none."""
    query = Query(request)
    put(query)
    if not query.answered.wait(ANSWER_SECONDS):
        return {"failed": f"the agent is busy and did not answer within {ANSWER_SECONDS:g} s"}
    return query.answer


@dataclass(slots=True)
class Answers:
    """Answers of one agent, made of its parts; in the loop's thread."""

    mode: ActiveMode
    syncer: Syncer
    source: Source
    queue: EventQueue[Any]
    follower: ConfigFollower
    other_proxies: OtherProxiesWatcher
    health: Health
    http: HttpHandlers

    def answer(self, query: Query) -> None:
        """Answer, whatever the request is."""
        try:
            query.answer = self._answer(query.request)
        except (ControllerError, DataplaneError, OSError, ValueError, KeyError, TypeError) as error:
            query.answer = {"failed": f"{type(error).__name__}: {error}"}
        query.answered.set()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        programmer, config = self.mode.programmer, self.mode.config
        match request.get("command"):
            case "status":
                return self._status()
            case "names":
                return {
                    "names": {str(number): name for number, name in programmer.names().items()},
                    "mode": self.mode.choice.effective,
                    "pin_root": config.options.pin_root,
                    "backends": programmer.status().get("ejections", []),
                }
            case "traffic":
                return {"rows": programmer.traffic(by_backend=config.metrics_per_backend)}
            case "explain":
                return {"answers": [programmer.ask(ProbePacket(*packet)) for packet in request["packets"]]}
            case "events":
                events, last = self._packet_events().packet_events(request["after"])
                return {"events": events, "last": last}
            case "trace":
                self._packet_events().trace(request["service"], request["client"], request["seconds"])
                return {}
            case other:
                raise ValueError(f"no such command: {other!r}")

    def _packet_events(self) -> PacketEvents:
        programmer, name = self.mode.programmer, self.mode.choice.effective
        if not isinstance(programmer, PacketEvents):
            raise ControllerError(f"mode {name} does not report what happens to packets; mode ebpf does")
        return programmer

    def _status(self) -> dict[str, Any]:
        syncer, source, drift = self.syncer, self.source, self.health.drift
        cluster, builder = syncer.cluster, syncer.builder
        state = cluster.source_state
        return {
            "node": self.mode.config.settings.node_name,
            "mode": self.mode.choice._asdict(),
            "synced": syncer.ready_seconds is not None and not syncer.waits and not drift,
            "drift": list(drift),
            "generation": builder.table.generation,
            "services": len(builder.table.services),
            "observed": syncer.observed,
            "waiting": {"now": len(self.queue), "most": self.queue.most},
            "source": {
                "description": source.describe(),
                "healthy": state.healthy if state else True,
                "message": state.message if state else "",
                "kinds": [msgspec.structs.asdict(state) for state in source.states()],
            },
            "problems": [
                {"kind": p.kind, "key": p.key, "message": p.message, "where": p.where}
                for p in cluster.problems.values()
            ],
            "conflicts": {service: list(messages) for service, messages in builder.conflicts.items()},
            "configuration": self.follower.status(self.mode.config),
            "neighbours": list(self.other_proxies.warnings),
            "health_checks": self.http.status(),
            "requests": source.connection.answers() if source.connection else [],
            "error": syncer.error,
            "ready_seconds": syncer.ready_seconds,
            "last_sync_seconds": syncer.sync_seconds,
            "change_seconds": _quantiles(syncer.latencies),
            "memory_bytes": resident_bytes(),
            "uptime_seconds": time.monotonic() - syncer.started,
            "dataplane": self.mode.programmer.status(),
        }


def _quantiles(seconds: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "p50": ordered[len(ordered) // 2] if ordered else None,
        "p99": ordered[len(ordered) * 99 // 100] if ordered else None,
        "last": seconds[-1] if ordered else None,
    }
