"""Nodes of a lab with the real agent and a fake API server, and its maps as another process reads them."""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Final

import numpy as np

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import open_pinned_maps
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import folder_of
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, Frontend, Kind, Masquerade, Protocol
from hybrid_proxy.workshop.lab.agent import Agent, remove_forsaken, resident
from hybrid_proxy.workshop.lab.network import Lab

NODE: Final = "node-0"  # the Node that the fake API server has
HEALTH_CHECKS: Final = 10  # services with a health-check node port, where all servers of the agent are on
METRICS, HEALTHZ = ("127.0.0.1", 10249), ("127.0.0.1", 10256)  # as kube-proxy's
FIRST_ANSWER: Final = 20.0  # seconds from the first table until both are surely served


@contextlib.contextmanager
def lab(pods: int = 0, plain: int = 0, kind: str = "bench", remote: int = 0) -> Iterator[Lab]:
    """Makes a lab of this process, one of each kind; those of killed benchmarks are removed first."""
    remove_forsaken(kind)
    with Lab(f"{kind}{os.getpid()}", pods, plain=plain, remote=remote) as made:
        yield made


def entry(
    name: str,
    address: str,
    port: int,
    backends: tuple[Backend, ...],
    masquerade: Masquerade = Masquerade.NEVER,
    protocol: Protocol = Protocol.TCP,
) -> Entry:
    """Returns a service port that has only a ClusterIP."""
    frontend = Frontend(Kind.CLUSTER_IP, address, port, 0, 0, masquerade)
    family = 6 if ":" in address else 4
    return Entry(name, family, protocol, (frontend,), (BackendSet(backends, why="every endpoint"),), backends)


class Scraper(AbstractContextManager["Scraper"]):
    """Asks for /metrics and /healthz of an agent as Prometheus and the kubelet do, from a thread, until it is closed.

    An error is raised at the end. An agent serves both a moment after its first table: to be refused before the first
    answer is no error.
    """

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._stop = threading.Event()
        self._error: Exception | None = None
        # Seconds between two requests, the page, and the seconds of each answer.
        self._plan: list[tuple[float, tuple[str, int], str, list[float]]] = [
            (15.0, METRICS, "/metrics", []), (1.0, HEALTHZ, "/healthz", []),
        ]  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        if self._error is not None:
            raise self._error

    def summary(self) -> str:
        """Returns the number of answers and their durations."""
        return ", ".join(
            f"{len(seconds)} of {name} ({1000 * median(seconds):.0f} ms, {1000 * max(seconds):.0f} ms at most)"
            for _, _, name, seconds in self._plan
        )

    def _run(self) -> None:
        due = [time.monotonic()] * len(self._plan)
        given_up = due[0] + FIRST_ANSWER
        try:
            while not self._stop.wait(max(0.0, min(due) - time.monotonic())):
                for number, (every, place, path, seconds) in enumerate(self._plan):
                    if time.monotonic() >= due[number]:
                        due[number] += every
                        start = time.monotonic()
                        try:
                            get(self._lab, place, path)
                        except ConnectionRefusedError:
                            if seconds or start > given_up:
                                raise
                            due[number] = start + 0.05
                        else:
                            seconds.append(time.monotonic() - start)
        except Exception as error:
            self._error = error


def get(lab: Lab, place: tuple[str, int], path: str) -> bytes:
    """Fetches a page from the lab's node.

    Raises:
        RuntimeError: the answer is not 200.
    """
    connection = http.client.HTTPConnection(*place, timeout=20)
    connection.sock = lab.socket("node")
    connection.sock.settimeout(20)
    try:
        connection.sock.connect(place)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path} answered {answer.status}: {body[:200]!r}")
    return body


class ApiAgent(Agent):
    """The agent on the lab's node, with the fake API server as its source.

    It takes no part of the lab for the cluster's, unless `cluster_cidr` says so: the node and the pods are those of
    the fake API server.
    """

    def __init__(
        self,
        lab: Lab,
        kubeconfig: str,
        mode: str = "ebpf",
        flags: Sequence[str] = (),
        cluster_cidr: str = "10.128.0.0/9",
    ) -> None:
        metrics = ("--metrics-bind-address", f"{METRICS[0]}:{METRICS[1]}")
        super().__init__(lab, lab.folder / "no-manifests", mode, (*metrics, *flags))
        self.kubeconfig, self.hostname, self.cluster_cidr = kubeconfig, NODE, cluster_cidr

    def busy(self, seconds: float) -> float:
        """Returns the part of a CPU that it uses in this time."""
        start, used = time.monotonic(), self.processor_seconds()
        time.sleep(seconds)
        return (self.processor_seconds() - used) / (time.monotonic() - start)

    def memory(self) -> dict[str, float]:
        """Returns VmRSS, RssAnon and RssFile in MB (10^6 bytes)."""
        assert self.process is not None
        return resident(self.process.pid)


class Kernel:
    """The maps of the agent in a lab, read by another process."""

    def __init__(self, lab: Lab) -> None:
        with lab.inside("node"):
            self.maps: dict[str, Map] = open_pinned_maps(folder_of(Options()))
        self.services = self.maps["services"].view(layout.dtype_of("service"))
        self.slots = self.maps["slots"].view(layout.dtype_of("slot"))["backend"]
        self.backends = self.maps["backends"].view(layout.dtype_of("backend"))

    def ids(self) -> dict[str, int]:
        """Service id by ClusterIP (IPv4)."""
        keys, values = self.maps["frontends4"].items(layout.frontend_dtype(4), np.dtype(np.uint64))
        real = keys["port"] != 0
        texts = (layout.address_text(word.tobytes(), 4) for word in keys["address"][real])
        return dict(zip(texts, (values[real] & np.uint64(0xFFFFFFFF)).tolist(), strict=True))

    def backends_of(self, service: int) -> list[str]:
        """Returns the backends of a service by every step of the programs, and checks each step."""
        offset, count, _ = layout.split_range_word(int(self.services[service]["sets"][0]))
        slots = self.slots[offset : offset + count]
        assert all(slots >> np.uint64(32) == service), f"service {service} reads a foreign slot"
        rows = self.backends[slots & np.uint64(0xFFFFFFFF)]
        assert all(rows["service"] == service), f"service {service} leads to a foreign backend"
        ports = layout.swap16(rows["port"]).tolist()
        return [
            f"{layout.address_text(row.tobytes(), 4)}:{port}" for row, port in zip(rows["address"], ports, strict=True)
        ]

    def all_backends(self) -> dict[str, set[str]]:
        """Returns the backends of each service by its ClusterIP."""
        return {address: set(self.backends_of(number)) for address, number in self.ids().items()}

    def close(self) -> None:
        for known in self.maps.values():
            known.close()
