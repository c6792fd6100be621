"""2.25: connected UDP sockets of the node live through everything that happens to their backends, without a connect.

As those of statsd and syslog, which open one socket for ever and look at no error.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from hybrid_proxy.workshop.lab.traffic import ask_udp

from .kit import V4, V6, Bench, End, Service, eventually
from .test_rows import target_of
from .test_sockets import dns

SENT_TO = 5454  # where nobody answers


@dataclass
class Client:
    """One socket, and who has its last datagram."""

    name: str
    socket: socket.socket
    catchers: dict[str, socket.socket]  # by pod; empty: the backend answers

    def reached(self, pod: str) -> bool:
        """Send once. Whoever only sends learns nothing, so the backend's own socket is asked."""
        if not self.catchers:
            return ask_udp(self.socket)[0].pod == pod
        for catcher in self.catchers.values():
            with contextlib.suppress(BlockingIOError):
                while catcher.recv(100):
                    pass
        with contextlib.suppress(OSError):
            self.socket.send(b"a log line")
        self.catchers[pod].setblocking(True)
        self.catchers[pod].settimeout(0.2)
        try:
            return self.catchers[pod].recv(100) == b"a log line"
        finally:
            self.catchers[pod].setblocking(False)


@contextlib.contextmanager
def clients_of(bench: Bench, asked: Service, thrown: Service, pods: list[str], family: int) -> Iterator[list[Client]]:
    """Of the node: one for each way to a service, of the families of addresses and kinds of source."""
    ways = {"ClusterIP": asked.vip(family), "node port": target_of(bench, asked, "nodeport", family)}
    with contextlib.ExitStack() as stack:
        catchers = {}
        for pod in pods:
            catchers[pod] = stack.enter_context(bench.lab.socket(pod, family, socket.SOCK_DGRAM))
            catchers[pod].bind((bench.lab[pod].address(family), SENT_TO))
            catchers[pod].setblocking(False)

        def client(
            name: str, target: tuple[str, int], kind: int = family, bound: str = "", *, asks: bool = True
        ) -> Client:
            made = stack.enter_context(bench.socket("node", kind, socket.SOCK_DGRAM, timeout=0.3))
            if bound:
                made.bind((bound, 0))
            made.connect(target)
            return Client(name, made, {} if asks else catchers)

        yield [
            *(client(name, target) for name, target in ways.items()),
            client("bound", ways["ClusterIP"], bound=bench.lab["node"].address(family)),
            client("only sends", thrown.vip(family), asks=False),
            *([client("mapped", (f"::ffff:{ways['ClusterIP'][0]}", asked.port), V6)] if family == V4 else []),
        ]  # fmt: skip


@pytest.mark.row("2.25", "a connected UDP socket of the node outlives its backends, never connecting again")
def test_a_connected_socket_outlives_its_backends(bench: Bench, family: int) -> None:
    places = ["pod2", "pod3", "remote1"]
    thrown = bench.service("pod2", protocol="UDP", port=514, target=SENT_TO, settle=False)
    both = dns(bench, "pod2"), thrown

    def change(*ends: End) -> None:
        for service in both:
            service.write(*ends) if ends else service.empty()

    with clients_of(bench, *both, places, family) as clients:

        def all_reach(pod: str, what: str) -> None:
            for client in clients:
                eventually(lambda client=client: client.reached(pod), 5, f"{what}: {client.name} does not reach {pod}")

        ends = {name: End(bench.lab[name]) for name in places}
        all_reach("pod2", "at first")
        change(ends["remote1"])
        all_reach("remote1", "its endpoint was removed")
        change(End(bench.lab["remote1"], ready=False, serving=False), ends["pod3"])
        all_reach("pod3", "its endpoint became unready")
        change()
        other = dns(bench, "pod2")  # settled: both are empty by now
        for client in clients:
            for _ in range(2):
                with contextlib.suppress(OSError):
                    client.reached("pod3")
        change(ends["remote1"])
        all_reach("remote1", "scaled to zero and back")
        for service in (*both, other):
            service.delete()
        dns(bench, "pod2")  # settled
        for client in clients:
            with contextlib.suppress(OSError):
                client.reached("remote1")
        change(ends["pod2"])
        all_reach("pod2", "deleted and made again")
        for client in clients:
            if not client.catchers:
                assert client.socket.getpeername()[1] in {both[0].port, both[0].node_port}
