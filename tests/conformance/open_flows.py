"""Kinds of flows that are open while the mode changes: each is a function that opens some of them, with their turns.

All of them run at the same time, over one switch, so a turn is short, and most of the time is rest.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hybrid_proxy.workshop.lab.traffic import Reply, ask_tcp, ask_udp

from .associations import associate
from .conftest import serve
from .kit import PATIENCE, UDP, V4, V6, Bench, Service
from .test_fragments import ECHO, echo, returned
from .test_rows import target_of

EACH = 0.3  # seconds from one turn of a flow to the next
OFTEN = 0.1
ENOUGH = 3  # failures, after which a flow has shown what it can
FAMILIES = {V4: "IPv4", V6: "IPv6"}
QUIET, SILENT, MUTE, LATE, ONE_WAY = 8123, 8124, 8125, 8126, 8127  # ports of servers of these flows alone
LOCAL = {"externalTrafficPolicy": "Local"}
STICKY = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}
CHUNK, LARGE = bytes(range(256)) * 16, bytes(range(250)) * 16  # of a stream, of a datagram in fragments
HELD_BACK = f"""
table inet held_back {{
    chain input {{ type filter hook input priority 0; tcp dport {SILENT} drop; }}
    chain output {{ type filter hook output priority 0; tcp sport {MUTE} tcp flags & (syn | ack) == (syn | ack) drop; }}
}}
"""
LOST_ANSWERS = """
table inet held_back {{
    chain input {{
        type filter hook input priority 0
        tcp sport {{ {}, {} }} tcp flags & (syn | ack) == (syn | ack) drop
    }}
}}
"""
ONCE = f"""
table inet once {{
    chain input {{ type filter hook input priority 0; tcp dport {LATE} tcp flags & (syn | ack) == syn drop; }}
}}
"""
BACKENDS, CLIENTS = ("pod2", "pod3"), ("pod1", "client")


def services_of(bench: Bench) -> dict[str, Service]:
    """The services that the flows go to; their servers run when this returns."""
    serve(bench.lab)
    bench.lab.serve("pod2", "pod3", http=(SILENT, MUTE, LATE), udp=())
    made = {
        "tcp": bench.service("pod2", outside=True, settle=False),
        "far": bench.service("remote1", outside=True, settle=False),
        "local": bench.service("pod3", outside=True, settle=False, spec=LOCAL),
        "itself": bench.service("pod1", settle=False),
        "its datagrams": bench.service("pod1", protocol="UDP", port=53, target=UDP, settle=False),
        "sticky": bench.service("pod2", "pod3", outside=True, settle=False, spec=STICKY),
        "quiet": bench.service("pod2", outside=True, settle=False, target=QUIET),
        "silent": bench.service("pod2", "pod3", outside=True, settle=False, target=SILENT),
        "mute": bench.service("pod2", "pod3", outside=True, settle=False, target=MUTE),
        "late": bench.service("pod2", "pod3", outside=True, settle=False, target=LATE, port=LATE),
        "sctp": bench.service("pod3", protocol="SCTP", port=7000, target=7777, settle=False),
    }
    for name, pods, target in (
        ("udp", ("pod2", "pod3"), UDP), ("far datagrams", ("remote1",), UDP),
        ("one way", ("pod2", "pod3"), ONE_WAY), ("echo", ("pod2",), ECHO),
    ):  # fmt: skip
        made[name] = bench.service(*pods, protocol="UDP", port=53, target=target, outside=True, settle=False)
    return made


class Turn(NamedTuple):
    """One question and its answer, or an attempt of them."""

    start: float  # monotonic
    seconds: float
    failed: str


@dataclass
class Flow:
    """One open conversation; the body takes turns until `stop`."""

    name: str
    body: Callable[[Flow], object]
    switched: threading.Event  # another mode serves
    stop: threading.Event = field(default_factory=threading.Event)
    turns: list[Turn] = field(default_factory=list)

    def go_on(self, stop: threading.Event) -> None:
        self.stop = stop
        self.body(self)

    def take(self, turn: Callable[[], object]) -> bool:
        """Whether it is worth while to go on."""
        start, failed = time.monotonic(), ""
        try:
            turn()
        except OSError as error:
            failed = repr(error)
        self.turns.append(Turn(start, time.monotonic() - start, failed))
        return len(self.failures()) < ENOUGH

    @property
    def is_unbound_of_node(self) -> bool:
        """Whether a socket of the node takes its source anew for each datagram."""
        return self.name.endswith(("node, unconnected", "node, one way"))

    def failures(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.failed]


def again_and_again(turn: Callable[[], object], each: float = EACH) -> Callable[[Flow], None]:
    def body(flow: Flow) -> None:
        while not flow.stop.wait(each * PATIENCE) and flow.take(turn):
            pass

    return body


def after_the_switch(turn: Callable[[], object]) -> Callable[[Flow], None]:
    """Not a byte before and during the switch."""

    def body(flow: Flow) -> None:
        while not flow.switched.wait(0.1) and not flow.stop.is_set():
            pass
        again_and_again(turn)(flow)

    return body


@dataclass
class Scene:
    """Where flows are opened: what they use is closed with the stack."""

    bench: Bench
    services: dict[str, Service]
    former: str
    stack: ExitStack
    family: int = V4
    switched: threading.Event = field(default_factory=threading.Event)

    def flow(self, place: str, what: str, body: Callable[[Flow], object]) -> Flow:
        return Flow(f"{FAMILIES[self.family]}, {place}, {what}", body, self.switched)

    def target(self, place: str, name: str) -> tuple[str, int]:
        """A client outside uses the node port, which masquerades it unless the service's policy is Local."""
        return target_of(self.bench, self.services[name], "nodeport" if place == "client" else "cluster", self.family)

    def ask_tcp(self, place: str, name: str, *, reset: bool = False) -> Callable[[], Reply]:
        """Open a connection, which ends by a reset if wanted; what this returns asks on it."""
        connection = self.stack.enter_context(self.bench.connect(place, self.target(place, name), self.family))
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return of_one_backend(partial(ask_tcp, connection))

    def ask_udp(self, place: str, name: str, *, connected: bool = False) -> Callable[[], Reply]:
        """A socket of datagrams; each question has a length of its own, which its answer repeats."""
        client, target = self.socket(place, socket.SOCK_DGRAM), self.target(place, name)
        lengths = itertools.cycle(range(1, 1000))
        if connected:
            client.connect(target)

        def ask() -> Reply:
            length = next(lengths)
            reply, source = ask_udp(client, None if connected else target, text="." * length)
            if (reply.received, source) != (length, target):
                raise ConnectionError(f"asked {length}, and {source} answers {reply}")
            return reply

        return of_one_backend(ask)

    def socket(self, place: str, kind: int, port: int = 0) -> socket.socket:
        return self.stack.enter_context(self.bench.socket(place, self.family, kind, port))

    def listener(self) -> socket.socket:
        """Of service `quiet`."""
        made = self.socket("pod2", socket.SOCK_STREAM, QUIET)
        made.listen()
        return made

    def pair(self, place: str, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection to service `quiet`."""
        client = self.stack.enter_context(self.bench.connect(place, self.target(place, "quiet"), self.family))
        server = self.stack.enter_context(listener.accept()[0])
        server.settimeout(2.0 * PATIENCE)
        return client, server


def of_one_backend(ask: Callable[[], Reply]) -> Callable[[], Reply]:
    """The same question, which fails as soon as another backend answers than the first, or sees another client."""
    first: list[Reply] = []

    def same() -> Reply:
        reply = ask()
        first.append(reply)
        if (reply.pod, reply.peer) != (first[0].pod, first[0].peer):
            raise ConnectionError(f"{reply.pod} answers {reply.peer}, not {first[0].pod} {first[0].peer}")
        return reply

    return same


def pass_on(sender: socket.socket, receiver: socket.socket, data: bytes = b"still here") -> None:
    """The other end gets exactly this."""
    sender.sendall(data)
    got = b""
    while len(got) < len(data):
        more = receiver.recv(len(data) - len(got))
        if not more:
            raise ConnectionError("the other end has closed")
        got += more
    if got != data:
        raise ConnectionError("the other end got something else")


def ask_once(connection: socket.socket) -> Reply:
    """The server ends the connection, and the client follows."""
    reply = ask_tcp(connection, close=True)
    if connection.recv(1):
        raise ConnectionError("the server goes on")
    return reply


# Kinds

Kind = Callable[[Scene], Iterator[Flow]]


def tcp(scene: Scene) -> Iterator[Flow]:
    for place, name in (("pod1", "tcp"), ("pod1", "far"), ("node", "tcp"), ("node", "far")):
        yield scene.flow(place, name, again_and_again(scene.ask_tcp(place, name)))


def masqueraded(scene: Scene) -> Iterator[Flow]:
    """The node port's clients are seen as the node."""
    yield scene.flow("client", "TCP", again_and_again(scene.ask_tcp("client", "tcp")))
    yield scene.flow("client", "UDP", again_and_again(scene.ask_udp("client", "udp"), OFTEN))


def policy_local(scene: Scene) -> Iterator[Flow]:
    ask, own = scene.ask_tcp("client", "local"), scene.bench.lab["client"].address(scene.family)
    yield scene.flow("client", "policy Local", again_and_again(lambda: seen_as(own, ask())))


def seen_as(address: str, reply: Reply) -> None:
    if reply.peer[0] != address:
        raise ConnectionError(f"{reply.pod} sees {reply.peer[0]}, not {address}")


def hairpin(scene: Scene) -> Iterator[Flow]:
    yield scene.flow("pod1", "TCP to itself", again_and_again(scene.ask_tcp("pod1", "itself")))
    yield scene.flow("pod1", "UDP to itself", again_and_again(scene.ask_udp("pod1", "its datagrams")))


def idle(scene: Scene) -> Iterator[Flow]:
    with scene.listener() as listener:
        for place in ("pod1", "node", "client"):
            client, server = scene.pair(place, listener)
            pass_on(client, server)
            pass_on(server, client)
            yield scene.flow(place, "client speaks first", after_the_switch(partial(pass_on, client, server)))
            client, server = scene.pair(place, listener)
            pass_on(client, server)
            yield scene.flow(place, "backend speaks first", after_the_switch(partial(pass_on, server, client)))


def both_ways(scene: Scene) -> Iterator[Flow]:
    def exchange(client: socket.socket, server: socket.socket) -> None:
        pass_on(client, server, CHUNK)
        pass_on(server, client, CHUNK)

    with scene.listener() as listener:
        for place in ("pod1", "node", "client"):
            body = again_and_again(partial(exchange, *scene.pair(place, listener)), OFTEN)
            yield scene.flow(place, "streams", body)


def half_closed(scene: Scene) -> Iterator[Flow]:
    with scene.listener() as listener:
        for place, closed in itertools.product(("pod1", "node", "client"), (0, 1)):
            ends = scene.pair(place, listener)
            ends[closed].shutdown(socket.SHUT_WR)
            assert ends[1 - closed].recv(1) == b""
            body = again_and_again(partial(pass_on, ends[1 - closed], ends[closed]))
            yield scene.flow(place, f"{('client', 'backend')[closed]} has closed", body)


def half_open(scene: Scene) -> Iterator[Flow]:
    """The backends get no SYN, or their answers do not arrive, until `answer_late` ends that.

    Of backends that are late only the one that got the first SYN answers. Modes that do not translate by conntrack
    send a repeated SYN elsewhere, switch or no switch.
    """
    late = ("late",) if scene.former in ("nftables", "iptables") else ()
    for place, name in itertools.product(("pod1", "node", "client"), ("silent", "mute", *late)):
        if name == "late" and place not in CLIENTS:
            continue
        client, target = scene.socket(place, socket.SOCK_STREAM), scene.target(place, name)
        client.settimeout(200.0 * PATIENCE)  # longer than any of these tests waits with the switch
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 9)  # an emulated processor switches for a minute

        def body(flow: Flow, client: socket.socket = client, target: tuple[str, int] = target) -> None:
            if flow.take(partial(client.connect, target)):
                for _ in range(3):
                    flow.take(partial(ask_tcp, client))

        yield scene.flow(place, f"backends are {name}", body)


def hold_back(scene: Scene) -> None:
    """Nobody answers on half-open connections, until `answer_late`.

    A backend that is late repeats its answer for two minutes instead of half of one: an emulated processor switches for
    longer than that.
    """
    for place in BACKENDS:
        with scene.bench.lab.inside(place):
            Path("/proc/sys/net/ipv4/tcp_synack_retries").write_text("7")
    late = scene.services["late"]
    for places, table in (BACKENDS, HELD_BACK), (CLIENTS, LOST_ANSWERS.format(late.port, late.node_port)):
        _program(scene, places, table)


def lose_repeated(scene: Scene) -> None:
    """From now on no SYN gets to the backends that are late."""
    _program(scene, BACKENDS, ONCE)


def answer_late(scene: Scene) -> None:
    for place in (*BACKENDS, *CLIENTS):
        scene.bench.lab.run(place, ["nft", "delete table inet held_back"])


def forget_rules(scene: Scene) -> None:
    for place in (*BACKENDS, *CLIENTS):
        scene.bench.lab.run(place, ["nft", "flush ruleset"])


def _program(scene: Scene, places: Iterable[str], table: str) -> None:
    for place in places:
        made = scene.bench.lab.run(place, ["nft", table])
        assert made.returncode == 0, made.stderr


def udp(scene: Scene) -> Iterator[Flow]:
    for place in ("pod1", "node", "client"):
        yield scene.flow(place, "unconnected", again_and_again(scene.ask_udp(place, "udp"), OFTEN))
    yield scene.flow("pod1", "to another node", again_and_again(scene.ask_udp("pod1", "far datagrams"), OFTEN))


def udp_connected(scene: Scene) -> Iterator[Flow]:
    for place in ("pod1", "node", "client"):
        body = again_and_again(scene.ask_udp(place, "udp", connected=True), OFTEN)
        yield scene.flow(place, "connected", body)


def udp_one_way(scene: Scene) -> Iterator[Flow]:
    """Datagrams that nobody answers: each arrives once, all at one backend."""
    backends = [scene.socket(pod, socket.SOCK_DGRAM, ONE_WAY) for pod in ("pod2", "pod3")]
    inbox = Inbox(backends)
    for number, place in enumerate(("pod1", "node", "client")):
        client, target = scene.socket(place, socket.SOCK_DGRAM), scene.target(place, "one way")

        def body(flow: Flow, number: int = number, client: socket.socket = client, target=target) -> None:
            sent = itertools.count()

            def send() -> None:
                client.sendto(b"%d %d" % (number, next(sent)), target)
                inbox.read()  # it holds 128 of them

            again_and_again(send, OFTEN)(flow)
            time.sleep(0.3 * PATIENCE)  # what comes twice comes soon
            flow.take(partial(inbox.verify, number, next(sent)))

        yield scene.flow(place, "one way", body)


class Inbox:
    """What several backends got of numbered flows of numbered datagrams."""

    def __init__(self, backends: list[socket.socket]) -> None:
        self.backends = backends
        for backend in backends:
            backend.setblocking(False)
        self.got: dict[int, list[tuple[int, int]]] = {}  # flow -> (datagram, backend)
        self.lock = threading.Lock()

    def read(self) -> None:
        with self.lock:
            for backend, one in enumerate(self.backends):
                with suppress(BlockingIOError):
                    while True:
                        whose, datagram = map(int, one.recv(100).split())
                        self.got.setdefault(whose, []).append((datagram, backend))

    def verify(self, flow: int, sent: int) -> None:
        deadline = time.monotonic() + 5 * PATIENCE
        self.read()
        while len(self.got.get(flow, [])) < sent and time.monotonic() < deadline:
            time.sleep(0.05)  # a relay that waits for a processor has what was sent last
            self.read()
        got = self.got.get(flow, [])
        numbers = [datagram for datagram, _ in got]
        lost, doubled = sorted(set(range(sent)) - set(numbers)), len(numbers) - len(set(numbers))
        moved = [datagram for datagram, backend in got if backend != got[0][1]]
        if lost or doubled or moved:
            raise ConnectionError(
                f"of {sent} datagrams {len(lost)} were lost (of them {lost[:9]}), {doubled} came twice, "
                f"{len(moved)} elsewhere ({moved[:9]})"
            )


def udp_fragments(scene: Scene) -> Iterator[Flow]:
    """IPVS drops those of the node itself (dataplane/modes/ipvs/README.md)."""
    scene.stack.enter_context(echo(scene.bench, "pod2", scene.family))
    for place in ("pod1", "client") if scene.former == "ipvs" else ("pod1", "node", "client"):
        client, target = scene.socket(place, socket.SOCK_DGRAM), scene.target(place, "echo")

        def turn(client: socket.socket = client, target: tuple[str, int] = target) -> None:
            if not returned(client, LARGE, target):
                raise ConnectionError("something else comes back")

        yield scene.flow(place, "fragments", again_and_again(turn))


def sctp(scene: Scene) -> Iterator[Flow]:
    if scene.former != "userspace":  # a relay has an association of its own, which these packets are none of
        ask = associate(scene.bench, scene.stack, scene.services["sctp"], scene.family)
        yield scene.flow("pod1", "SCTP", again_and_again(ask))


def dsr(scene: Scene) -> Iterator[Flow]:
    """The backend's node answers the client, whom the backend sees. Its FIN is not seen here, so the client resets."""
    if scene.former == "ebpf":
        own = scene.bench.lab["client"].address(scene.family)
        for what, ask in (
            ("TCP", scene.ask_tcp("client", "far", reset=True)), ("UDP", scene.ask_udp("client", "far datagrams"))
        ):  # fmt: skip
            yield scene.flow("client", what, again_and_again(lambda ask=ask: seen_as(own, ask())))


def affinity(scene: Scene) -> Iterator[Flow]:
    """A new connection each time, always to one backend."""
    for place in ("pod1", "pod3", "node", "client"):
        first: list[str] = []

        def turn(place: str = place, first: list[str] = first) -> None:
            with scene.bench.connect(place, scene.target(place, "sticky"), scene.family, timeout=10.0) as connection:
                first.append(ask_once(connection).pod)
            if first[-1] != first[0]:
                raise ConnectionError(f"{first[-1]} answers, not {first[0]}")

        yield scene.flow(place, "affinity", again_and_again(turn))


def new(scene: Scene) -> Iterator[Flow]:
    """One new connection after the other; not one fails, whichever mode has it."""
    for place in ("pod1", "node", "client"):
        target = scene.target(place, "tcp")

        def turn(place: str = place, target: tuple[str, int] = target) -> None:
            with scene.bench.connect(place, target, scene.family, timeout=10.0) as connection:
                ask_once(connection)

        yield scene.flow(place, "new connections", again_and_again(turn, OFTEN))


KINDS: dict[str, Kind] = {
    "TCP": tcp,
    "TCP, idle": idle,
    "TCP, streaming": both_ways,
    "TCP, half-closed": half_closed,
    "TCP, half-open": half_open,
    "UDP": udp,
    "UDP, connected": udp_connected,
    "UDP, one way": udp_one_way,
    "UDP, fragments": udp_fragments,
    "SCTP": sctp,
    "hairpin": hairpin,
    "masqueraded": masqueraded,
    "policy Local": policy_local,
    "DSR": dsr,
    "affinity": affinity,
    "new TCP": new,
}


def open_flows(scene: Scene) -> dict[str, list[Flow]]:
    """Flows of each kind, of both families."""
    made: dict[str, list[Flow]] = {name: [] for name in KINDS}
    for name, kind in KINDS.items():
        for family in FAMILIES:
            made[name] += kind(replace(scene, family=family))
    return made
