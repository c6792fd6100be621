"""What a client sees, as a value: many first packets at once, and who answered, refused or kept silent."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hybrid_proxy.workshop.lab.traffic import Reply, ask_tcp, ask_udp
from tests.waiting import slowness

from .kit import PATIENCE, V4, V6, Bench

__all__ = ["QUIET", "REFUSED", "SILENT", "Probe", "Seen", "To", "Want", "observe", "sight", "volley"]

QUIET = 0.5  # seconds: a probe without an answer or a refusal by then was dropped
TOGETHER = 400  # sockets at the same time

Peer = Literal["own", "node", "any"]


@dataclass(frozen=True)
class To:
    """Answered by exactly these pods, who see the client's own address or one of the node's."""

    pods: frozenset[str]
    peer: Peer = "own"

    def __str__(self) -> str:
        seen = {"own": "the client", "node": "the node", "any": "somebody"}
        return f"{', '.join(sorted(self.pods))} (sees {seen[self.peer]})"


REFUSED: Literal["refused"] = "refused"
SILENT: Literal["silent"] = "silent"
Want = To | Literal["refused", "silent"]


class Probe(NamedTuple):
    """One client and one address and port."""

    place: str
    target: tuple[str, int]
    kind: int  # SOCK_STREAM or SOCK_DGRAM
    bound: str = ""  # the address that the client's socket is bound to

    @property
    def family(self) -> int:
        return V6 if ":" in self.target[0] else V4


class Seen(NamedTuple):
    """What became of all first packets of one probe."""

    pods: frozenset[str]
    peers: frozenset[tuple[str, str]]  # who answered, and whose address it saw: own, node or the address itself
    errors: frozenset[str]  # refused, silent, or the name of an error

    def __str__(self) -> str:
        shown = [f"{pod} saw {peer}" for pod, peer in sorted(self.peers)]
        return ", ".join([*shown, *sorted(self.errors)])

    def is_(self, want: Want, place: str) -> bool:
        """Whether this is what was wanted. A client that is sent to itself shows the node's address there."""
        if not isinstance(want, To):
            return not self.pods and self.errors == {want}
        if want.peer == "any":
            return not self.errors and self.pods == want.pods
        wanted = {(pod, "node" if place in {pod, "node"} else want.peer) for pod in want.pods}
        return not self.errors and self.peers == wanted


def observe(bench: Bench, probe: Probe, want: Want) -> Seen:
    """Enough first packets to see every backend that is wanted, and others that are not."""
    if not isinstance(want, To):
        return sight(bench, probe.place, volley(bench, [probe] * 2))
    rounds, each = (5, 8 * len(want.pods)) if len(want.pods) > 1 else (1, 3)
    answers: list[Reply | str] = []
    for _ in range(rounds):
        # Long enough for a second SYN: the first one may meet a TIME_WAIT of the same four-tuple at the backend.
        answers += volley(bench, [probe] * each, wait=2.5)
        seen = sight(bench, probe.place, answers)
        if seen.errors or seen.pods >= want.pods:
            break
    return seen


def volley(bench: Bench, probes: Sequence[Probe], wait: float = QUIET) -> list[Reply | str]:
    """All probes at the same time: the reply of each, or `refused`, `silent`, the name of another error."""
    return [answer for start in range(0, len(probes), TOGETHER)
            for answer in _volley(bench, probes[start : start + TOGETHER], wait)]  # fmt: skip


def _volley(bench: Bench, probes: Sequence[Probe], wait: float) -> list[Reply | str]:
    with ExitStack() as stack:
        clients = [stack.enter_context(bench.lab.socket(p.place, p.family, p.kind)) for p in probes]
        results: dict[int, Reply | str] = {}
        waiting = select.poll()
        for number, (client, probe) in enumerate(zip(clients, probes, strict=True)):
            client.setblocking(False)
            if probe.bound:
                client.bind((probe.bound, 0))
            failed = client.connect_ex(probe.target)
            if failed not in (0, errno.EINPROGRESS):
                results[number] = _name(failed)
            elif probe.kind == socket.SOCK_DGRAM:
                with suppress(PermissionError):  # dropped on its way out; if it was refused, an error waits, too
                    client.send(b"who?")
                waiting.register(client, select.POLLIN)
            else:
                waiting.register(client, select.POLLOUT)
        by_descriptor = {client.fileno(): number for number, client in enumerate(clients)}
        deadline = time.monotonic() + wait * PATIENCE * slowness()
        left = 1.0
        while len(results) < len(probes) and left > 0:
            left = deadline - time.monotonic()  # at its end once more: who waited for others to be asked was not silent
            for descriptor, _ in waiting.poll(max(0, 1000 * left)):
                waiting.unregister(descriptor)
                number = by_descriptor[descriptor]
                results[number] = _finish(clients[number])
        return [results.get(number, SILENT) for number in range(len(probes))]


def _finish(client: socket.socket) -> Reply | str:
    failed = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failed == errno.ETIMEDOUT:  # the kernel gave up: nobody has answered for as long as it asks
        return SILENT
    if failed:
        return _name(failed)
    client.settimeout(20 * PATIENCE)
    try:
        if client.type == socket.SOCK_STREAM:
            return _own(client, ask_tcp(client, close=True))
        return _own(client, _datagram(client))
    except TimeoutError:
        return "connected, then silent"
    except OSError as error:
        return _name(error.errno or 0)


def _datagram(client: socket.socket) -> Reply:
    """The answer that waits; asking again is harmless, and one more flow is not made."""
    client.recv(65536)
    return ask_udp(client)[0]


def _own(client: socket.socket, reply: Reply) -> Reply:
    """The client's own address in the reply is reported as `own`."""
    own = client.getsockname()[0]
    return Reply(reply.pod, ("own" if reply.peer[0] == own else reply.peer[0], reply.peer[1]), reply.local)


def _name(number: int) -> str:
    """Of an error. A time-out is one, too, where nobody waited for it: a socket does not learn of silence."""
    return REFUSED if number == errno.ECONNREFUSED else errno.errorcode.get(number, "closed")


def sight(bench: Bench, place: str, answers: Sequence[Reply | str]) -> Seen:
    """What one client saw in all; a node's own address is reported as the node's."""
    nodes = set(bench.node_addresses)
    replies = [answer for answer in answers if isinstance(answer, Reply)]
    peers = set()
    for reply in replies:
        peer = "node" if reply.peer[0] in nodes or (place == "node" and reply.peer[0] == "own") else reply.peer[0]
        peers.add((reply.pod, peer))
    errors = frozenset(answer for answer in answers if isinstance(answer, str))
    return Seen(frozenset(reply.pod for reply in replies), frozenset(peers), errors)
