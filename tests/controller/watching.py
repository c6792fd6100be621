"""What a source reports, and the state that follows from it; sources that run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from hybrid_proxy.controller.kubernetes.apiserver import Kubernetes
from hybrid_proxy.controller.kubernetes.manifests import Manifests
from hybrid_proxy.controller.kubernetes.model import (
    KINDS,
    Event,
    KindState,
    Object,
    Problem,
    Removed,
    Replaced,
    Service,
    SourceState,
    Upserted,
    key_of,
    kind_of,
)
from hybrid_proxy.workshop.lab.apiserver import namespace_of, slice_name
from tests.waiting import bound


class Listener:
    """Applies events as the cluster does, and remembers them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.state: dict[str, dict[str, Object]] = {kind: {} for kind in KINDS}
        self.problems: dict[tuple[str, str], Problem] = {}
        self.healthy: bool | None = None
        self._changed = threading.Condition()

    def take(self, *events: Event) -> None:
        with self._changed:
            for event in events:
                self._apply(event)
            self._changed.notify_all()

    def _apply(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case Replaced(kind, objects, kept):
                old = {key: one for key, one in self.state[kind].items() if key in kept}
                self.state[kind] = old | {key_of(one): one for one in objects}
            case Upserted(one):
                self.state[kind_of(one)][key_of(one)] = one
            case Removed(kind, key):
                del self.state[kind][key]  # KeyError: the source removed what it never reported
            case Problem(kind, key, ""):
                del self.problems[kind, key]
            case Problem(kind, key):
                self.problems[kind, key] = event
            case SourceState(healthy):
                self.healthy = healthy

    def until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """Wait for a condition on what was reported."""
        deadline = time.monotonic() + bound(10)
        with self._changed:
            while not (found := condition()):
                left = deadline - time.monotonic()
                assert left > 0, f"did not happen: {what or condition}; the last events: {self.events[-5:]}"
                # The condition may also depend on the server, which does not notify.
                self._changed.wait(min(left, 0.01))
            return found

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def news(self) -> list[Event]:
        """Events since the last call."""
        with self._changed:
            events, self.events = self.events, []
        return events

    @property
    def objects(self) -> dict[tuple[str, str], Object]:
        return {(kind, key): one for kind, known in self.state.items() for key, one in known.items()}

    @property
    def addresses(self) -> dict[str, str]:
        """The ClusterIP of each Service, by its name."""
        return {one.name: one.cluster_ips[0] for one in self.state["Service"].values() if isinstance(one, Service)}


class Watcher(Listener):
    """Listens to a source that runs on a thread."""

    def __init__(self, source: Kubernetes | Manifests) -> None:
        super().__init__()
        self.source = source
        self.error: BaseException | None = None
        self.stop_event = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.source.run(self.take, self.stop_event)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.stop_event.set()
        self.thread.join(5)
        assert not self.thread.is_alive()
        assert self.error is None

    # of an API server

    def complete(self) -> None:
        self.until(lambda: {event.kind for event in self.of(Replaced)} == set(KINDS), "all kinds listed")

    def lists(self, kind: str) -> list[Replaced]:
        return [event for event in self.of(Replaced) if event.kind == kind]

    def kind(self, kind: str) -> KindState:
        """How this kind is read."""
        return next(state for state in self.source.states() if state.kind == kind)

    def endpoints(self, index: int) -> list[str]:
        """Addresses of the slice of service `index` as known now."""
        one: Any = self.state["EndpointSlice"].get(f"{namespace_of(index)}/{slice_name(index)}")
        return [endpoint.address for endpoint in one.endpoints] if one else []
