"""A source that runs, what it reported, and the state that follows from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from controller.kubernetes.apiserver import Kubernetes
from controller.kubernetes.model import KINDS, Event, KindState, Problem, Removed, Replaced, Upserted, key_of, kind_of
from workshop.lab.apiserver import namespace_of, slice_name

DEADLINE = 60.0  # of any wait; a passing run comes nowhere near


class Watcher:
    """Runs a source on a thread and remembers what it reported, and the state that follows from it."""

    def __init__(self, source: Kubernetes) -> None:
        self.source = source
        self.events: list[Event] = []
        self.state: dict[str, dict[str, object]] = {kind: {} for kind in KINDS}
        self.problems: dict[tuple[str, str], str] = {}
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self.stop_event = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.source.run(self._take, self.stop_event)
        except BaseException as error:
            self.error = error

    def _take(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            match event:
                case Replaced():
                    kept = {k: o for k, o in self.state[event.kind].items() if k in event.kept}
                    self.state[event.kind] = kept | {key_of(obj): obj for obj in event.objects}
                case Upserted():
                    self.state[kind_of(event.object)][key_of(event.object)] = event.object
                case Removed():
                    self.state[event.kind].pop(event.key, None)
                case Problem():
                    self.problems[event.kind, event.key] = event.message
                    if not event.message:
                        del self.problems[event.kind, event.key]
            self._changed.notify_all()

    def until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """Wait for a condition on what was reported."""
        deadline = time.monotonic() + DEADLINE
        with self._changed:
            while not (found := condition()):
                left = deadline - time.monotonic()
                assert left > 0, f"did not happen: {what or condition}; the last events: {self.events[-5:]}"
                # The condition may also depend on the server, which does not notify.
                self._changed.wait(min(left, 0.01))
            return found

    def complete(self) -> None:
        self.until(lambda: {e.kind for e in self.of(Replaced)} == set(KINDS), "all kinds listed")

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def lists(self, kind: str) -> list[Replaced]:
        return [event for event in self.of(Replaced) if event.kind == kind]

    def kind(self, kind: str) -> KindState:
        """How this kind is read."""
        return next(state for state in self.source.states() if state.kind == kind)

    def endpoints(self, index: int) -> list[str]:
        """Addresses of the slice of service `index` as known now."""
        one: Any = self.state["EndpointSlice"].get(f"{namespace_of(index)}/{slice_name(index)}")
        return [endpoint.address for endpoint in one.endpoints] if one else []

    def stop(self) -> None:
        self.stop_event.set()
        self.thread.join(5)
        assert not self.thread.is_alive()
