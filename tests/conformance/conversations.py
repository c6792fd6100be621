"""Open conversations: each asks again and again while a node changes, and remembers every answer that was wrong."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from hybrid_proxy.workshop.lab.traffic import Reply, ask_tcp, ask_udp

from .kit import PATIENCE, V4, V6, Bench, Service, eventually
from .test_rows import target_of

__all__ = ["EACH", "FAMILIES", "OFTEN", "Flow", "Scene", "Turn", "after_the_switch", "failures_of", "wait_for_answers"]

EACH = 0.3  # seconds from one turn of a flow to the next
OFTEN = 0.1
ENOUGH = 3  # failures, after which a flow has shown what it can
FAMILIES = {V4: "IPv4", V6: "IPv6"}


class Turn(NamedTuple):
    """One question and its answer, or an attempt of them."""

    start: float  # monotonic
    seconds: float
    failed: str


def again_and_again(flow: Flow) -> None:
    """The body of a flow that asks until it is stopped, or has failed often enough."""
    while not flow.stop.wait(flow.each * PATIENCE) and flow.once():
        pass


def after_the_switch(flow: Flow) -> None:
    """The body of a flow of which not a byte crosses before and during the switch."""
    while not flow.switched.wait(0.1) and not flow.stop.is_set():
        pass
    again_and_again(flow)


@dataclass
class Flow:
    """One open conversation. An answer of another backend than the first, or to another client, is a failure.

    Attributes:
        ask: one question and its answer.
        each: seconds from one question to the next.
        body: takes turns until `stop`.
        switched: another mode serves.
        turns: all questions so far.
    """

    name: str
    ask: Callable[[], object]
    each: float = EACH
    body: Callable[[Flow], object] = again_and_again
    switched: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    turns: list[Turn] = field(default_factory=list)
    first: Reply | None = None

    def go_on(self, stop: threading.Event) -> None:
        self.stop = stop
        self.body(self)

    def once(self) -> bool:
        """Take one turn; whether it is worth while to go on."""
        return self.take(self.ask)

    def take(self, turn: Callable[[], object]) -> bool:
        """As `once`, with another question."""
        start, failed = time.monotonic(), ""
        try:
            self._verify(turn())
        except OSError as error:
            failed = repr(error)
        self.turns.append(Turn(start, time.monotonic() - start, failed))
        return len(self.failures()) < ENOUGH

    def _verify(self, answer: object) -> None:
        if isinstance(answer, Reply):
            first = self.first = self.first or answer
            if (answer.pod, answer.peer) != (first.pod, first.peer):
                raise ConnectionError(f"{answer.pod} answers {answer.peer}, not {first.pod} {first.peer}")

    @property
    def pod(self) -> str:
        """The backend that answers."""
        return self.first.pod if self.first else ""

    @property
    def is_unbound_of_node(self) -> bool:
        """Whether a socket of the node takes its source anew for each datagram."""
        return self.name.endswith(("node, unconnected", "node, one way"))

    def failures(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.failed]


def wait_for_answers(flows: Sequence[Flow], answers: int) -> None:
    """Until each flow has taken so many turns more, or has failed."""
    goals = [len(flow.turns) + answers for flow in flows]
    eventually(
        lambda: all(flow.failures() or len(flow.turns) >= goal for flow, goal in zip(flows, goals, strict=True)),
        30, "open flows wait for answers",
    )  # fmt: skip


def failures_of(flows: Sequence[Flow]) -> list[str]:
    """In words; empty: every answer was right."""
    return [
        f"{flow.name}, after {turn.seconds:.2f} s of {len(flow.turns)} turns: {turn.failed}"
        for flow in flows
        for turn in flow.failures()[:1]
    ]


@dataclass
class Scene:
    """Where flows are opened: what they use is closed with the stack.

    Attributes:
        services: by the names that flows have for them.
        former: the mode that serves when the flows are opened.
        switched: another mode serves.
        timeout: seconds to wait for an answer.
        outside: how a client outside reaches services. A node port masquerades it unless the service's policy is Local.
    """

    bench: Bench
    services: dict[str, Service]
    former: str
    stack: ExitStack
    family: int = V4
    switched: threading.Event = field(default_factory=threading.Event)
    timeout: float = 2.0
    outside: str = "nodeport"

    def flow(
        self, place: str, what: str, ask: Callable[[], object], each: float = EACH,
        body: Callable[[Flow], object] = again_and_again,
    ) -> Flow:  # fmt: skip
        return Flow(f"{FAMILIES[self.family]}, {place}, {what}", ask, each, body, self.switched)

    def target(self, place: str, name: str, way: str = "") -> tuple[str, int]:
        """The service's address that a client there uses: that of `way` (test_rows.target_of), or the usual one."""
        way = way or (self.outside if place == "client" else "cluster")
        return target_of(self.bench, self.services[name], way, self.family)

    def ask_tcp(self, place: str, name: str, way: str = "", *, reset: bool = False) -> Callable[[], Reply]:
        """Open a connection, which ends by a reset if wanted; what this returns asks on it."""
        target = self.target(place, name, way)
        connection = self.stack.enter_context(self.bench.connect(place, target, self.family, timeout=self.timeout))
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return partial(ask_tcp, connection)

    def ask_udp(self, place: str, name: str, *, connected: bool = False, port: int = 0) -> Callable[[], Reply]:
        """A socket of datagrams, at this port if it is given; each question has a length, which its answer repeats."""
        client, target = self.socket(place, socket.SOCK_DGRAM), self.target(place, name)
        lengths = itertools.cycle(range(1, 1000))
        if port:
            client.bind(("", port))
        if connected:
            client.connect(target)

        def ask() -> Reply:
            length = next(lengths)
            reply, source = ask_udp(client, None if connected else target, text="." * length)
            if (reply.received, source) != (length, target):
                raise ConnectionError(f"asked {length}, and {source} answers {reply}")
            return reply

        return ask

    def socket(self, place: str, kind: int, port: int = 0) -> socket.socket:
        return self.stack.enter_context(self.bench.socket(place, self.family, kind, port, self.timeout))
