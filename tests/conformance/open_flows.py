"""Kinds of flows that are open while the mode changes: each is a function that opens some of them, with their turns.

All of them run at the same time, over one switch, so a turn is short, and most of the time is rest.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from hybrid_proxy.workshop.lab.traffic import Reply, ask_tcp
from tests.waiting import bound

from .associations import associate
from .conftest import serve
from .conversations import FAMILIES, OFTEN, Flow, Scene, after_the_switch, again_and_again
from .kit import PATIENCE, UDP, Bench, Service
from .test_fragments import ECHO, echo, returned

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


def listener_of(scene: Scene) -> socket.socket:
    """Of service `quiet`."""
    made = scene.socket("pod2", socket.SOCK_STREAM, QUIET)
    made.listen()
    return made


def pair(scene: Scene, place: str, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection to service `quiet`."""
    client = scene.stack.enter_context(scene.bench.connect(place, scene.target(place, "quiet"), scene.family))
    server = scene.stack.enter_context(listener.accept()[0])
    server.settimeout(client.gettimeout())
    return client, server


# Kinds

Kind = Callable[[Scene], Iterator[Flow]]


def tcp(scene: Scene) -> Iterator[Flow]:
    for place, name in (("pod1", "tcp"), ("pod1", "far"), ("node", "tcp"), ("node", "far")):
        yield scene.flow(place, name, scene.ask_tcp(place, name))


def masqueraded(scene: Scene) -> Iterator[Flow]:
    """The node port's clients are seen as the node."""
    yield scene.flow("client", "TCP", scene.ask_tcp("client", "tcp"))
    yield scene.flow("client", "UDP", scene.ask_udp("client", "udp"), OFTEN)


def policy_local(scene: Scene) -> Iterator[Flow]:
    ask, own = scene.ask_tcp("client", "local"), scene.bench.lab["client"].address(scene.family)
    yield scene.flow("client", "policy Local", lambda: seen_as(own, ask()))


def seen_as(address: str, reply: Reply) -> Reply:
    if reply.peer[0] != address:
        raise ConnectionError(f"{reply.pod} sees {reply.peer[0]}, not {address}")
    return reply


def hairpin(scene: Scene) -> Iterator[Flow]:
    yield scene.flow("pod1", "TCP to itself", scene.ask_tcp("pod1", "itself"))
    yield scene.flow("pod1", "UDP to itself", scene.ask_udp("pod1", "its datagrams"))


def idle(scene: Scene) -> Iterator[Flow]:
    with listener_of(scene) as listener:
        for place in ("pod1", "node", "client"):
            client, server = pair(scene, place, listener)
            pass_on(client, server)
            pass_on(server, client)
            yield scene.flow(place, "client speaks first", partial(pass_on, client, server), body=after_the_switch)
            client, server = pair(scene, place, listener)
            pass_on(client, server)
            yield scene.flow(place, "backend speaks first", partial(pass_on, server, client), body=after_the_switch)


def both_ways(scene: Scene) -> Iterator[Flow]:
    def exchange(client: socket.socket, server: socket.socket) -> None:
        pass_on(client, server, CHUNK)
        pass_on(server, client, CHUNK)

    with listener_of(scene) as listener:
        for place in ("pod1", "node", "client"):
            yield scene.flow(place, "streams", partial(exchange, *pair(scene, place, listener)), OFTEN)


def half_closed(scene: Scene) -> Iterator[Flow]:
    with listener_of(scene) as listener:
        for place, closed in itertools.product(("pod1", "node", "client"), (0, 1)):
            ends = pair(scene, place, listener)
            ends[closed].shutdown(socket.SHUT_WR)
            assert ends[1 - closed].recv(1) == b""
            name = f"{('client', 'backend')[closed]} has closed"
            yield scene.flow(place, name, partial(pass_on, ends[1 - closed], ends[closed]))


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

        def body(flow: Flow, client: socket.socket = client) -> None:
            if flow.once():
                for _ in range(3):
                    flow.take(partial(ask_tcp, client))

        yield scene.flow(place, f"backends are {name}", partial(client.connect, target), body=body)


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
        yield scene.flow(place, "unconnected", scene.ask_udp(place, "udp"), OFTEN)
    yield scene.flow("pod1", "to another node", scene.ask_udp("pod1", "far datagrams"), OFTEN)


def udp_connected(scene: Scene) -> Iterator[Flow]:
    for place in ("pod1", "node", "client"):
        yield scene.flow(place, "connected", scene.ask_udp(place, "udp", connected=True), OFTEN)


def udp_one_way(scene: Scene) -> Iterator[Flow]:
    """Datagrams that nobody answers: each arrives once, all at one backend."""
    backends = [scene.socket(pod, socket.SOCK_DGRAM, ONE_WAY) for pod in ("pod2", "pod3")]
    inbox = Inbox(backends)
    for number, place in enumerate(("pod1", "node", "client")):
        client, target = scene.socket(place, socket.SOCK_DGRAM), scene.target(place, "one way")

        sent = itertools.count()

        def send(number: int = number, client: socket.socket = client, target=target, sent=sent) -> None:
            client.sendto(b"%d %d" % (number, next(sent)), target)
            inbox.read()  # it holds 128 of them

        def body(flow: Flow, number: int = number, sent: Iterator[int] = sent) -> None:
            again_and_again(flow)
            time.sleep(0.3 * PATIENCE)  # what comes twice comes soon
            flow.take(partial(inbox.verify, number, next(sent)))

        yield scene.flow(place, "one way", send, OFTEN, body)


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
        deadline = time.monotonic() + bound(5)
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

        yield scene.flow(place, "fragments", turn)


def sctp(scene: Scene) -> Iterator[Flow]:
    if scene.former != "userspace":  # a relay has an association of its own, which these packets are none of
        yield scene.flow("pod1", "SCTP", associate(scene.bench, scene.stack, scene.services["sctp"], scene.family))


def dsr(scene: Scene) -> Iterator[Flow]:
    """The backend's node answers the client, whom the backend sees. Its FIN is not seen here, so the client resets."""
    if scene.former == "ebpf":
        own = scene.bench.lab["client"].address(scene.family)
        for what, ask in (
            ("TCP", scene.ask_tcp("client", "far", reset=True)), ("UDP", scene.ask_udp("client", "far datagrams"))
        ):  # fmt: skip
            yield scene.flow("client", what, lambda ask=ask: seen_as(own, ask()))


def affinity(scene: Scene) -> Iterator[Flow]:
    """A new connection each time, always to one backend."""
    for place in ("pod1", "pod3", "node", "client"):
        first: list[str] = []

        def turn(place: str = place, first: list[str] = first) -> None:
            with scene.bench.connect(place, scene.target(place, "sticky"), scene.family, timeout=10.0) as connection:
                first.append(ask_once(connection).pod)
            if first[-1] != first[0]:
                raise ConnectionError(f"{first[-1]} answers, not {first[0]}")

        yield scene.flow(place, "affinity", turn)


def new(scene: Scene) -> Iterator[Flow]:
    """One new connection after the other; not one fails, whichever mode has it."""
    for place in ("pod1", "node", "client"):
        target = scene.target(place, "tcp")

        def turn(place: str = place, target: tuple[str, int] = target) -> None:
            with scene.bench.connect(place, target, scene.family, timeout=10.0) as connection:
                ask_once(connection)

        yield scene.flow(place, "new connections", turn, OFTEN)


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
