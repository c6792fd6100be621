"""Folders of manifests, a listener that applies what a source reports of them, and sources that run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from controller.kubernetes.manifests import Manifests, load
from controller.kubernetes.model import (
    Event,
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

WITHIN = 60.0  # seconds that a busy machine may take; the usual time is some 50 ms


def service(name: str, ip: str = "10.96.0.10", port: object = 80) -> str:
    return f"""\
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  clusterIP: {ip}
  ports:
  - {{port: {port}}}
"""


def endpoints(name: str, address: str = "10.0.0.1") -> str:
    return f"""\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}-v4, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv4
ports:
- port: 8080
endpoints:
- addresses: [{address}]
"""


class Listener:
    """Applies events as the cluster does, and remembers them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.objects: dict[tuple[str, str], Object] = {}
        self.problems: dict[tuple[str, str], Problem] = {}
        self.healthy: bool | None = None
        self.changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self.changed:
            self.events.append(event)
            match event:
                case Replaced(kind, objects, kept):
                    old = {name: value for name, value in self.objects.items() if name[0] == kind and name[1] in kept}
                    self.objects = {name: value for name, value in self.objects.items() if name[0] != kind} | old
                    self.objects |= {(kind, key_of(value)): value for value in objects}
                case Upserted(value):
                    self.objects[kind_of(value), key_of(value)] = value
                case Removed(kind, key):
                    del self.objects[kind, key]  # KeyError: the source removed what it never reported
                case Problem(kind, key, ""):
                    del self.problems[kind, key]
                case Problem(kind, key):
                    self.problems[kind, key] = event
                case SourceState(healthy):
                    self.healthy = healthy
            self.changed.notify_all()

    def wait(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WITHIN), (self.events, self.problems)

    @property
    def addresses(self) -> dict[str, str]:
        return {v.name: v.cluster_ips[0] for v in self.objects.values() if isinstance(v, Service)}

    def news(self) -> list[Event]:
        """Events since the last call."""
        with self.changed:
            events, self.events = self.events, []
        return events


class Running:
    """A source in its thread."""

    def __init__(self, path: Path) -> None:
        self.listener = Listener()
        self.stop = threading.Event()
        self.source = Manifests(path)
        self.thread = threading.Thread(target=self.source.run, args=(self.listener, self.stop), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.stop.set()
        self.thread.join(2)
        assert not self.thread.is_alive(), "the source did not stop"


def loaded(path: Path) -> Listener:
    """What a folder holds, without watching it."""
    listener = Listener()
    for event in load(path):
        listener(event)
    return listener


def swap(folder: Path, version: str) -> None:
    """Let `..data` lead to another version, as the kubelet does in the volume of a ConfigMap."""
    (folder / "..data_tmp").symlink_to(version)
    (folder / "..data_tmp").rename(folder / "..data")
