"""From each mode to each other one: what is open, of TCP, UDP and SCTP, lives on as docs/architecture.md says.

The former mode goes when the last of its flows is over. New connections meanwhile, and a bound to that time, are in
tests/controller/test_switching.py. From a mode to itself is a restart: test_lifecycle.py.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

from controller.agent.modes import DRAIN_SECONDS
from workshop.lab.agent import Agent
from workshop.lab.traffic import ask_tcp, ask_udp, meanwhile

from .conftest import MODES, bench_of, new_lab, route_services, serve
from .kit import PATIENCE, UDP, V4, V6, Bench, Service, eventually
from .test_rows import crc32c, target_of

SOON = f"{6 * PATIENCE:g}s"  # longer than the machine takes from one question to the next
UDP_ENDS_SOON = ("--conntrack-udp-timeout", SOON, "--conntrack-udp-timeout-stream", SOON)
EACH = 0.15  # seconds from one question on an open flow to the next
INIT, INIT_ACK, COOKIE_ECHO, COOKIE_ACK, DATA, SACK = 1, 2, 10, 11, 0, 3  # RFC 9260
TO_BACKEND, TO_CLIENT = 7, 9  # verification tags
SCTP = (socket.SOCK_RAW, socket.IPPROTO_SCTP)
SCTP_PORTS = itertools.count(34000)  # of clients, each once: conntrack remembers an association for minutes


@dataclass
class Node:
    """A lab with services, and whichever agent is at work there."""

    bench: Bench
    tcp: Service
    far: Service
    udp: Service
    sctp: Service

    def agent(self, mode: str) -> Agent:
        return Agent(self.bench.lab, self.bench.agent.manifests, mode, UDP_ENDS_SOON)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with new_lab(3, 1) as lab:
        route_services(lab)
        serve(lab)
        bench = bench_of(lab, "ebpf")
        yield Node(
            bench,
            tcp=bench.service("pod2", outside=True, settle=False),
            far=bench.service("remote1", settle=False),
            udp=bench.service("pod2", "pod3", protocol="UDP", port=53, target=UDP, outside=True, settle=False),
            sctp=bench.service("pod3", protocol="SCTP", port=7000, target=7777, settle=False),
        )
        assert bench.agent.cleanup().returncode == 0


@dataclass
class Flow:
    """One open conversation; `ask` is a question and its answer."""

    name: str
    place: str
    protocol: str
    ask: Callable[[], None]
    failed: list[tuple[float, str]] = field(default_factory=list)  # when, and with what
    asked: int = 0

    def go_on(self, stop: threading.Event) -> None:
        while not stop.wait(EACH * PATIENCE):
            self.asked += 1
            start = time.monotonic()
            try:
                self.ask()
            except OSError as error:
                self.failed.append((start, repr(error)))
                if self.protocol == "TCP":
                    return


def tcp_flow(bench: Bench, stack: ExitStack, place: str, target: tuple[str, int], family: int) -> Flow:
    connection = stack.enter_context(bench.connect(place, target, family))

    def ask() -> None:
        ask_tcp(connection)

    return Flow(f"TCP from {place} to {target}", place, "TCP", ask)


def udp_flow(bench: Bench, stack: ExitStack, place: str, target: tuple[str, int], family: int) -> Flow:
    client = stack.enter_context(bench.socket(place, family, socket.SOCK_DGRAM))
    backends = []

    def ask() -> None:
        answer, source = ask_udp(client, target)
        assert source == target
        backends.append(answer.pod)
        if answer.pod != backends[0]:
            raise ConnectionError(f"{answer.pod} answers, not {backends[0]}")

    return Flow(f"UDP from {place} to {target}", place, "UDP", ask)


def sctp_flow(bench: Bench, stack: ExitStack, service: Service, family: int) -> Flow:
    """Packets of an association between pod1 and pod3, written here: not every kernel has SCTP sockets."""
    port = next(SCTP_PORTS)
    client, backend = (stack.enter_context(bench.lab.socket(place, family, *SCTP)) for place in ("pod1", "pod3"))
    for one in (client, backend):
        one.settimeout(0.5 * PATIENCE)
    vip, own = service.address(family), bench.lab["pod1"].address(family)

    def send(kind: int, answer: int) -> None:
        client.sendto(sctp_packet(port, service.port, 0 if kind == INIT else TO_BACKEND, kind), (vip, 0))
        expect(backend, (own, port), kind)
        backend.sendto(sctp_packet(service.target, port, TO_CLIENT, answer), (own, 0))
        expect(client, (vip, service.port), answer)

    def expect(one: socket.socket, sender: tuple[str, int], kind: int) -> None:
        """The next packet of this association; whatever else comes (raw sockets get all of SCTP) is not ours."""
        while True:
            data, source = one.recvfrom(2048)
            data = data[(data[0] & 15) * 4 :] if family == V4 else data
            if (source[0], int.from_bytes(data[:2], "big"), data[12]) == (*sender, kind):
                return

    send(INIT, INIT_ACK)
    send(COOKIE_ECHO, COOKIE_ACK)
    return Flow(f"SCTP from pod1 to {service.vip(family)}", "pod1", "SCTP", lambda: send(DATA, SACK))


def sctp_packet(source: int, target: int, tag: int, kind: int) -> bytes:
    """A packet of one chunk; INIT and INIT ACK say which tag their sender wants to see."""
    wanted = TO_CLIENT if kind == INIT else TO_BACKEND
    body = struct.pack("!IIHHI", wanted, 65535, 1, 1, 1) if kind in (INIT, INIT_ACK) else bytes(12)
    chunk = struct.pack("!BBH", kind, 3 if kind == DATA else 0, 4 + len(body)) + body
    head = struct.pack("!HHI", source, target, tag)
    return head + struct.pack("<I", crc32c(head + bytes(4) + chunk)) + chunk


def open_flows(node: Node, former: str, stack: ExitStack) -> list[Flow]:
    """Between pods, to another node's pod, from outside with a masquerade, and of the node itself."""
    bench, flows = node.bench, []
    for family in (V4, V6):
        outside = target_of(bench, node.tcp, "nodeport", family)
        for place, target in (
            ("pod1", node.tcp.vip(family)), ("pod1", node.far.vip(family)), ("client", outside),
            ("node", node.tcp.vip(family)),
        ):  # fmt: skip
            flows.append(tcp_flow(bench, stack, place, target, family))
        for place, target in (
            ("pod1", node.udp.vip(family)), ("node", node.udp.vip(family)),
            ("client", target_of(bench, node.udp, "nodeport", family)),
        ):  # fmt: skip
            flows.append(udp_flow(bench, stack, place, target, family))
        if former != "userspace":  # a relay has an association of its own, which these packets are none of
            flows.append(sctp_flow(bench, stack, node.sctp, family))
    return flows


@contextmanager
def switch(node: Node, former: str, mode: str) -> Iterator[Callable[[], float]]:
    """The former mode serves in the block, until the function that this yields has switched; it says when."""
    node.bench.agent.cleanup()
    before, after = node.agent(former), node.agent(mode)

    def now() -> float:
        before.terminate()
        after.start()
        served = time.monotonic()
        time.sleep(DRAIN_SECONDS + 2)
        return served

    try:
        before.start()
        yield now
        eventually(lambda: only_associations(after), 20, lambda: f"open still: {after.running_status().draining}")
    finally:
        for agent in (before, after):
            if agent.running():
                agent.terminate()


def only_associations(agent: Agent) -> bool:
    """Whether nothing that drains has more than the associations, which are forgotten after minutes of silence."""
    return all(
        not count for row in agent.running_status().draining for name, count in row.flows.items() if name != "SCTP"
    )


def params() -> list[object]:
    made: list[object] = []
    for former, mode in itertools.permutations(MODES, 2):
        marks = [pytest.mark.kernel("ip_vs")] if "ipvs" in (former, mode) else []
        made.append(pytest.param(mode, former, id=f"{former}-to-{mode}", marks=marks))
    return made


@pytest.mark.parametrize(("mode", "former"), params(), indirect=["mode"], scope="session")
def test_what_is_open_goes_on(node: Node, mode: str, former: str) -> None:
    with switch(node, former, mode) as now, ExitStack() as stack:
        flows = open_flows(node, former, stack)
        with meanwhile(flow.go_on for flow in flows):
            time.sleep(2.5 * PATIENCE)  # by then mode ebpf hands over between pods, past the hooks of others
            served = now()
            time.sleep(2.0 * PATIENCE)
    for flow in flows:
        failed = ", ".join(f"{when - served:+.2f} s after the switch: {error}" for when, error in flow.failed)
        assert not flow.failed, f"{flow.name}, {flow.asked} questions: {failed}"
        assert flow.asked >= 3, f"{flow.name}, {flow.asked} questions"
