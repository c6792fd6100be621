"""A stage for packets by hand: a lab of its own, its services, established flows, and ears at pods and at the wire."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hybrid_proxy.workshop.lab.frames import Receiver, fill_in_checksums
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import ask_tcp, ask_udp

from .conftest import bench_of, new_lab, route_services, serve
from .forgeries import Flow
from .kit import HTTP, PATIENCE, UDP, V4, V6, Bench, Service, eventually
from .packets import SYN, read
from .test_rows import target_of
from .world import CLIENT_ONLY, LOCAL, SECOND

__all__ = ["Ears", "End", "Injector", "Numbers", "Stage", "Talk", "XDP", "stage"]

ETH_P_ALL, PACKET_OUTGOING = 0x0003, 4  # linux/if_ether.h, linux/if_packet.h
SO_RCVBUFFORCE = 33  # asm-generic/socket.h
WIRE: Final = "to-node"  # the segment's end of the node's uplink
GATEWAY: Final = bytes.fromhex("eeeeeeeeeeee")
QUIET: Final = 0.15  # seconds without a packet: what was to come has come
XDP: Final = ("--xdp=native", "--uplink-interfaces=eth0")
SERVICES: Final = {
    "one": (("pod2",), CLIENT_ONLY),
    "far": (("remote1",), {}),
    "local": (("pod2",), LOCAL),
    "many": (("pod2", "pod4", "remote1", "remote2"), {}),
}
PROTOCOLS: Final[dict[str, dict[str, Any]]] = {
    "tcp": {"protocol": "TCP", "port": 80, "target": HTTP},
    "udp": {"protocol": "UDP", "port": 53, "target": UDP},
}

End = tuple[str, int]


@dataclass(frozen=True)
class Talk:
    """One established flow: its client's socket, its backend, and from where to where each part of it sends."""

    client: socket.socket
    pod: str
    ends: dict[str, tuple[End, End]]


@dataclass(frozen=True)
class Injector:
    """How a place sends frames to the node: they begin with `target` and `source`."""

    send: Callable[[bytes], Any]
    target: bytes
    source: bytes


class Ears:
    """Listens at the pods' interfaces and at the wire (packet(7)), at what goes out there, too."""

    def __init__(self, lab: Lab, stack: ExitStack) -> None:
        self.sockets: dict[socket.socket, str] = {}
        for name, interface in [*((pod.name, "eth0") for pod in lab.pods()), ("client", WIRE)]:
            with lab.inside(name):
                ear = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)))
                ear.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)
                ear.bind((interface, ETH_P_ALL))
            ear.setblocking(False)
            self.sockets[ear] = name

    def captured(self, wait: float = QUIET * PATIENCE) -> Iterator[tuple[str, bool, bytes]]:
        """Place, whether it came in there, and the frame, until nobody says anything for so long."""
        while ready := select.select(list(self.sockets), [], [], wait)[0]:
            for ear in ready:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        frame, (_, _, kind, *_) = ear.recvfrom(65536)
                        yield self.sockets[ear], kind != PACKET_OUTGOING, frame


class Numbers:
    """Sequence numbers that are due on each direction of a TCP connection, and what it acknowledges."""

    def __init__(self) -> None:
        self.due: dict[tuple[End, End], tuple[int, int]] = {}

    def note(self, frame: bytes) -> None:
        segment = read(frame[14:])
        if segment and segment.protocol == socket.IPPROTO_TCP:
            due = (segment.sequence + segment.size + bool(segment.flags & SYN)) % 2**32
            self.due[segment.source, segment.target] = due, segment.acknowledged

    def of(self, talk: Talk, part: str) -> tuple[int, int]:
        """A direction that is not on any wire (before a masquerade, behind a socket's hook) has the other's numbers."""
        alias = {"direct": "client", "client": "peer"}.get(part, part)
        ways = (talk.ends[part], talk.ends[alias], talk.ends["peer"])
        return next(self.due[way] for way in ways if way in self.due)


@dataclass(frozen=True)
class Stage:
    """A lab with an agent, and services for TCP and UDP by name."""

    bench: Bench
    services: dict[tuple[str, str], Service]

    def talk(self, flow: Flow, protocol: str, family: int, stack: ExitStack) -> Talk:
        """A flow that is established, and has been used since."""
        target = target_of(self.bench, self.services[flow.service, protocol], flow.way, family)
        kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
        client = stack.enter_context(self.bench.socket(flow.client, family, kind))
        client.connect(target)
        for _ in range(2):
            reply = ask_tcp(client) if protocol == "tcp" else ask_udp(client)[0]
        assert flow.backend in {"", reply.pod}
        own: End = client.getsockname()[:2]
        return Talk(client, reply.pod, {
            "client": (own, target), "service": (target, own), "direct": (own, reply.local),
            "backend": (reply.local, reply.peer), "peer": (reply.peer, reply.local),
        })  # fmt: skip

    def injector(self, name: str, stack: ExitStack) -> Injector:
        """The place's interface, opened with packet(7). The client's is the one on the node's wire."""
        lab = self.bench.lab
        with lab.inside(name):
            injector = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
            injector.bind((WIRE if name == "client" else "eth0", 0))
        link = lab.netlink("node")
        node = link.get_links(link.link_lookup(ifname="eth0")[0])[0].get_attr("IFLA_ADDRESS")
        target = bytes.fromhex(node.replace(":", "")) if name == "client" else GATEWAY
        return Injector(injector.send, target, injector.getsockname()[4])


@contextmanager
def stage(mode: str, *flags: str) -> Iterator[Stage]:
    """All services answer; with `XDP`, the other end of the node's uplink takes frames from there."""
    with new_lab(4, 2) as lab, ExitStack() as stack:
        route_services(lab)
        serve(lab, SECOND)
        with lab.inside("node"):
            Path("/proc/sys/net/ipv4/icmp_ratemask").write_text("0")
            Path("/proc/sys/net/ipv6/icmp/ratemask").write_text("\n")
        if flags == XDP:
            with lab.inside("client"):
                fill_in_checksums(WIRE)
                stack.enter_context(Receiver(WIRE))
        bench = bench_of(lab, mode, flags)
        services = {
            (name, protocol): bench.service(
                *pods, settle=False, outside=True, title=f"{name}-{protocol}", spec=spec, **ports
            )
            for (name, (pods, spec)), (protocol, ports) in itertools.product(SERVICES.items(), PROTOCOLS.items())
        }
        bench.agent.start()
        try:
            for (name, protocol), service in services.items():
                for family in (V4, V6):
                    eventually(
                        lambda s=service, f=family: bench.ask("pod1", s, f).pod, 5, f"{name} {protocol} is silent"
                    )
            yield Stage(bench, services)
        finally:
            if bench.agent.running():
                bench.agent.terminate()
            cleaned = bench.agent.cleanup()
            assert cleaned.returncode == 0, cleaned.stderr
