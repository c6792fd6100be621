"""Many agents' sources in one process: the real code that lists and watches, without what it is read for.

`python -m hybrid_proxy.workshop.benchmarks.herd KUBECONFIG COUNT` prints a line of JSON (`Report`) every so often.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import msgspec

from hybrid_proxy.controller.kubernetes.apiserver import Kubernetes
from hybrid_proxy.controller.kubernetes.model import Event, Removed, Replaced, Upserted
from hybrid_proxy.workshop.benchmarks.kit import NODE
from hybrid_proxy.workshop.lab.agent import resident

EVERY = 0.25  # seconds


class Report(msgspec.Struct):
    """All sources of a process together; `ready` have listed every kind, the last one after so many `seconds`."""

    ready: int = 0
    seconds: float = 0.0
    requests: int = 0
    refused: int = 0  # with 429
    changes: int = 0
    cpu: float = 0.0  # seconds since the first of them began
    memory: float = 0.0  # MB


class _Listener:
    """What one source emits, counted."""

    def __init__(self) -> None:
        self.awaited: set[str] = set(Kubernetes.kinds)
        self.changes = 0
        self.ready_at = 0.0

    def emit(self, event: Event) -> None:
        if isinstance(event, Replaced):
            self.awaited.discard(event.kind)
            if not self.awaited and not self.ready_at:
                self.ready_at = time.monotonic()
        elif isinstance(event, Upserted | Removed):
            self.changes += 1


def main(kubeconfig: str, count: int) -> None:
    """Until the process that started this one is gone."""
    sources, listeners = [Kubernetes(NODE, kubeconfig=kubeconfig) for _ in range(count)], []
    sources[0].connection.open()  # what is imported late is imported now
    begun, spent, parent, stop = time.monotonic(), time.process_time(), os.getppid(), threading.Event()
    for source in sources:
        listener = _Listener()
        listeners.append(listener)
        threading.Thread(target=source.run, args=(listener.emit, stop), daemon=True).start()
    while os.getppid() == parent:
        answers = [row for source in sources for row in source.connection.answers()]
        ready = [listener.ready_at for listener in listeners if listener.ready_at]
        report = Report(
            ready=len(ready),
            seconds=max(ready, default=begun) - begun,
            requests=sum(row[3] for row in answers),
            refused=sum(row[3] for row in answers if row[2] == "429"),
            changes=sum(listener.changes for listener in listeners),
            cpu=time.process_time() - spent,
            memory=resident(os.getpid())["RssAnon"],
        )
        print(msgspec.json.encode(report).decode(), flush=True)
        time.sleep(EVERY)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
