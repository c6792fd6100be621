"""Forged packets of strangers, more than any table keeps: whoever is honest is served as before.

The floods are counted, not timed: they come between a client's SYN and its acknowledgement, however long that takes.
"""

from __future__ import annotations

import errno
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hybrid_proxy.workshop.lab.traffic import ask_tcp
from tests.waiting import bound

from .conftest import bench_of, every_mode_but, routed_lab
from .forging import WIRE, Injector, Stage
from .kit import HTTP, UDP, V4, Bench, Service
from .packets import ACK, PUSH, RST, SYN, Header, Read, datagram, ether, packet, read, segment
from .world import LOCAL

MANY = 12_000  # beside half-open connections in a table that forgets nothing, all that the other one has room for
CLIENTS = 12
HONEST = {4: "203.0.113.%d", 6: "2001:db8::%x"}
FORGED = {4: "198.51.100.%d", 6: "2001:db8:f::%x"}
REQUEST = b"POST / HTTP/1.1\r\nHost: lab\r\nContent-Length: 0\r\n\r\n"
ETH_P_ALL, SO_RCVBUFFORCE = 0x0003, 33


@dataclass
class Client:
    """A host on the wire that nobody's kernel has: all that it says is said here."""

    header: Header
    ports: tuple[int, int]
    due: int = 0  # the number of what it expects next
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1000, 1 << 30, 1 << 16)))
    sequence: int = 0

    def segment(self, flags: int, data: bytes = b"", ahead: int = 1) -> bytes:
        content = segment(self.header, self.ports, self.sequence + ahead, self.due, flags, data)
        return packet(self.header, socket.IPPROTO_TCP, content)

    def syn(self) -> bytes:
        self.sequence, self.due = next(self.numbers), 0
        return self.segment(SYN, ahead=0)

    def datagram(self) -> bytes:
        return packet(self.header, socket.IPPROTO_UDP, datagram(self.header, self.ports, b"hello"))


class Wire:
    """What honest clients and forgers send to the node, and what comes back to the honest ones."""

    def __init__(self, injector: Injector, ear: socket.socket, family: int) -> None:
        self.injector, self.ear, self.family = injector, ear, family

    def send(self, content: bytes) -> None:
        self._send(ether(self.injector.target, self.injector.source, self.family, content))

    def _send(self, frame: bytes) -> None:
        """Also where the queue of the interface is full at the moment."""
        while True:
            try:
                self.injector.send(frame)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                time.sleep(0.001)
            else:
                return

    def flood(self, target: tuple[str, int], protocol: int, first: int, many: int = MANY) -> None:
        """As many packets, of as many clients. What a port adds, another word takes away: checksums stay right."""
        for host in range(1, 5):
            header = Header(FORGED[self.family] % host, target[0])
            ports = first, target[1]
            if protocol == socket.IPPROTO_TCP:
                content, place = segment(header, ports, 0x1234FFFF, 0, SYN, b""), 6
            else:
                content, place = datagram(header, ports, b"\xff\xffforged"), 8
            whole = bytearray(ether(self.injector.target, self.injector.source, self.family,
                                    packet(header, protocol, content)))  # fmt: skip
            start = len(whole) - len(content)
            for number in range(many // 4):
                struct.pack_into("!H", whole, start, first + number)
                struct.pack_into("!H", whole, start + place, 0xFFFF - number)
                self._send(bytes(whole))

    def answers(self) -> Iterator[tuple[Read, bytes]]:
        """What has come for honest clients since it was last asked for."""
        try:
            while frame := self.ear.recv(65536):
                one = read(frame[14:])
                if one is not None and one.target[0].startswith((HONEST[self.family] % 0)[:-1]):
                    yield one, frame
        except BlockingIOError:
            return

    def until(self, waiting: dict[int, Client], say: Callable[[Client], bytes],
              hear: Callable[[Client, Read, bytes], bool]) -> None:  # fmt: skip
        """Let each say something, again every second, until it has heard what it waits for; who has is left out."""
        deadline = time.monotonic() + bound(20)
        while waiting:
            assert time.monotonic() < deadline, f"{len(waiting)} of {CLIENTS} clients hear nothing"
            for one in waiting.values():
                self.send(say(one))
            again = time.monotonic() + 1
            while waiting and time.monotonic() < again:
                for heard, frame in self.answers():
                    one = waiting.get(heard.target[1])
                    if one is not None and hear(one, heard, frame):
                        del waiting[heard.target[1]]
                time.sleep(0.005)


@pytest.fixture(scope="module")
def bench(mode: str) -> Iterator[Bench]:
    """A lab of its own: the floods stay in tables for a minute."""
    with routed_lab(3, 1) as lab:
        made = bench_of(lab, mode)
        pods = [lab["pod2"], lab["pod3"]]
        plans = [("web", "TCP", 80, HTTP, {}), ("kept", "TCP", 80, HTTP, LOCAL), ("dns", "UDP", 53, UDP, {})]
        for name, protocol, port, target, spec in plans:
            service = Service(made, next(made.numbers), (), protocol, port, target, spec, outside=True, title=name)
            service.write(*pods)
            made.static[name] = service
        # Thousands of half-open connections would all repeat their SYN/ACK in one moment.
        for place in (lab["node"], *pods):
            with lab.inside(place.name):
                Path("/proc/sys/net/ipv4/tcp_syncookies").write_text("2")  # every connection; of IPv6, too
        made.agent.start()
        try:
            yield made
        finally:
            made.agent.end()


@contextmanager
def wire(bench: Bench, family: int) -> Iterator[Wire]:
    with ExitStack() as stack:
        with bench.lab.inside("client"):
            ear = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)))
            ear.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 27)
            ear.bind((WIRE, ETH_P_ALL))
        ear.setblocking(False)
        yield Wire(Stage(bench, {}).injector("client", stack), ear, 4 if family == V4 else 6)


def clients(target: tuple[str, int], family: int, first: int) -> dict[int, Client]:
    """By their ports."""
    hosts = HONEST[4 if family == V4 else 6]
    return {first + n: Client(Header(hosts % (1 + n), target[0]), (first + n, target[1])) for n in range(CLIENTS)}


# What conntrack keeps of a flood is the kernel's own, and the same in both modes.
@every_mode_but("iptables", "nftables")
@pytest.mark.parametrize("name", ["web", "kept"], ids=["masqueraded", "local"])
def test_clients_far_away_connect_during_a_flood_of_syns(bench: Bench, name: str, family: int) -> None:
    target = bench.lab["node"].address(family), bench.static[name].node_port
    honest = clients(target, family, 50_000 if name == "web" else 51_000)
    forged = 2_000 if name == "web" else 20_000

    def accepted(one: Client, heard: Read, _: bytes) -> bool:
        if heard.flags & (SYN | ACK) == ACK:  # of another's connection: the backend is told so, as TCP does
            wired.send(packet(one.header, socket.IPPROTO_TCP,
                              segment(one.header, one.ports, heard.acknowledged, 0, RST, b"")))  # fmt: skip
        one.due = (heard.sequence + 1) % 2**32
        return heard.flags & (SYN | ACK) == SYN | ACK and heard.acknowledged == one.sequence + 1

    def answered(one: Client, heard: Read, frame: bytes) -> bool:
        assert not heard.flags & RST, "the connection was reset"
        return b"200 OK" in frame

    with wire(bench, family) as wired, bench.connect("client", target, family) as established:
        pod = ask_tcp(established).pod
        wired.flood(target, socket.IPPROTO_TCP, forged)
        wired.until(dict(honest), lambda one: one.syn(), accepted)
        wired.flood(target, socket.IPPROTO_TCP, forged + MANY // 4)
        for one in honest.values():
            wired.send(one.segment(ACK))
        wired.until(dict(honest), lambda one: one.segment(ACK | PUSH, REQUEST), answered)
        assert ask_tcp(established).pod == pod
        with bench.connect("pod1", bench.static[name].vip(family), family) as beside:
            assert ask_tcp(beside).pod in {"pod2", "pod3"}


@every_mode_but("iptables", "nftables")
@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_datagrams_of_one_port_keep_their_backend_during_a_flood(
    bench: Bench, mode: str, protocol: str, family: int
) -> None:
    address = bench.lab["node"].address(family)
    target = address, bench.static["dns"].node_port
    flooded = (address, bench.static["web"].node_port) if protocol == "TCP" else target
    honest = clients(target, family, 52_000 if protocol == "TCP" else 53_000)
    pods: dict[int, set[str]] = {port: set() for port in honest}
    many = 400 if (mode, protocol) == ("userspace", "UDP") else MANY  # a relay has a socket for each client

    def answered(one: Client, _: Read, frame: bytes) -> bool:
        pods[one.ports[0]].add(json.loads(frame[frame.index(b'{"pod"') :].rstrip(b"\0"))["pod"])
        return True

    with wire(bench, family) as wired:
        for round_ in range(2):
            wired.until(dict(honest), lambda one: one.datagram(), answered)
            first = 30_000 + round_ * MANY // 4 + (MANY if protocol == "UDP" else 0)
            wired.flood(flooded, socket.IPPROTO_TCP if protocol == "TCP" else socket.IPPROTO_UDP, first, many)
        wired.until(dict(honest), lambda one: one.datagram(), answered)
    assert {len(seen) for seen in pods.values()} == {1}
