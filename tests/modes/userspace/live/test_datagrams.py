"""Datagrams through the relay, with real sockets."""

from __future__ import annotations

import errno
import socket
import threading
from collections import Counter

import pytest

from hybrid_proxy.dataplane.kernel.tcp_segments import checksum
from hybrid_proxy.dataplane.modes.userspace import messages as m
from hybrid_proxy.dataplane.modes.userspace.icmp import PER_SECOND, IcmpErrors, message
from hybrid_proxy.dataplane.modes.userspace.streams import MOST_ATTEMPTS

from ..kit import HOST, UDP, Running, eventually


class Echo:
    """Answers each datagram with its name and what it got."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sock.bind((HOST, 0))
        self.address: tuple[str, int] = self.sock.getsockname()
        self.sock.settimeout(0.1)
        self.going = True
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while self.going:
            try:
                data, client = self.sock.recvfrom(65535)
            except TimeoutError:
                continue
            self.sock.sendto(self.name.encode() + data, client)

    def close(self) -> None:
        self.going = False
        self.thread.join()
        self.sock.close()


@pytest.fixture
def echo():
    made = []

    def make(name: str) -> Echo:
        made.append(Echo(name))
        return made[-1]

    yield make
    for one in made:
        one.close()


def client_of(address: tuple[str, int]) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(20)
    made.connect(address)
    return made


def ask(client: socket.socket, data: bytes = b"") -> str:
    client.send(data)
    return client.recv(65535).decode()


def test_a_client_keeps_its_backend_and_clients_take_turns(relay: Running, echo) -> None:
    address = relay.serve(echo("a").address, echo("b").address, protocol=UDP)
    firsts = []
    for _ in range(6):
        with client_of(address) as client:
            firsts.append(ask(client))
            assert {ask(client) for _ in range(5)} == {firsts[-1]}
    assert Counter(firsts) == {"a": 3, "b": 3}


def test_large_and_empty_datagrams_pass_whole(relay: Running, echo) -> None:
    address = relay.serve(echo("a").address, protocol=UDP)
    with client_of(address) as client:
        for size in (0, 1, 1472, 60_000):
            assert ask(client, b"x" * size) == "a" + "x" * size


def test_a_refused_first_datagram_is_said_again_to_another_backend(relay: Running, echo) -> None:
    gone = Echo("gone")
    gone.close()
    address = relay.serve(gone.address, echo("a").address, protocol=UDP)
    for _ in range(4):
        with client_of(address) as client:
            assert ask(client, b"?") == "a?"
    assert relay.counters["retries"] >= 1


def test_a_conversation_moves_when_its_backend_stops_to_listen(relay: Running, echo) -> None:
    first = Echo("a")
    address = relay.serve(first.address, echo("b").address, protocol=UDP)
    with client_of(address) as client:
        assert ask(client) == "a"
        first.close()
        client.send(b"lost")
        eventually(lambda: ask(client, b"again").startswith("b"), "it stays with a backend that refuses")


def test_a_session_ends_when_its_backend_leaves(relay: Running, echo) -> None:
    a, b = echo("a"), echo("b")
    address = relay.serve(a.address, protocol=UDP)
    with client_of(address) as client:
        assert ask(client) == "a"
        relay.serve(b.address, protocol=UDP)
        assert ask(client) == "b"


def without_frontends(*serving: tuple[str, int]) -> m.Row:
    """The rules lead nobody to the relay."""
    return m.Row("a", "a", 4, UDP, (), (), serving)


def test_a_session_goes_on_when_its_service_has_moved_and_no_other_begins(relay: Running, echo) -> None:
    sessions = relay.relay.sessions
    sessions.short_seconds = 0.5
    backend = echo("a").address
    address = relay.serve(backend, protocol=UDP)
    with client_of(address) as client, client_of(address) as late:
        assert ask(client) == "a"
        used = relay.relay.state.used
        relay.apply({"a": without_frontends(backend)})
        assert ask(client) == "a"
        late.send(b"?")
        assert ask(client) == "a"
        assert len(sessions.by_client) == 1, "the late client, who is read before, has a session"
        eventually(lambda: not sessions.by_client, "the session does not end")
        assert relay.relay.state.used == used - 2, "the proxy port is still open"
        client.send(b"?")
        with pytest.raises(ConnectionRefusedError):
            client.recv(1)


def test_who_serves_again_takes_over_from_a_backend_that_is_gone(relay: Running, echo) -> None:
    backend = echo("a").address
    address = relay.serve(backend, protocol=UDP)
    with client_of(address) as client:
        assert ask(client) == "a"
        relay.apply({"a": without_frontends(backend)})
        assert relay.serve(echo("b").address, protocol=UDP) == address, "conntrack leads the client to the old port"
        assert ask(client) == "b"


@pytest.mark.parametrize("row", [None, without_frontends()], ids=["deleted", "without endpoints"])
@pytest.mark.parametrize("moves", [False, True], ids=["", "after it has moved"])
def test_a_service_that_nobody_serves_any_more_ends_its_sessions(
    relay: Running, echo, row: m.Row | None, moves: bool
) -> None:
    before, backend = relay.relay.state.used, echo("a").address
    address = relay.serve(backend, protocol=UDP)
    with client_of(address) as client:
        assert ask(client) == "a"
        if moves:
            relay.apply({"a": without_frontends(backend)})
        relay.apply({"a": row})
        assert not relay.relay.sessions.by_client
        assert relay.relay.state.used == before
        client.send(b"?")
        with pytest.raises(ConnectionRefusedError):
            client.recv(1)


def test_an_idle_session_ends_and_the_next_datagram_begins_another(relay: Running, echo) -> None:
    sessions = relay.relay.sessions
    sessions.short_seconds = 0.5
    address = relay.serve(echo("a").address, echo("b").address, protocol=UDP)
    with client_of(address) as client:
        assert ask(client) == "a"
        used = relay.relay.state.used
        eventually(lambda: not sessions.by_client, "the session does not end")
        assert relay.relay.state.used == used - 1
        assert ask(client) == "b"


def test_a_conversation_lasts_longer_than_a_question(relay: Running, echo, monkeypatch) -> None:
    monkeypatch.setattr("hybrid_proxy.dataplane.modes.userspace.datagrams.CONVERSATION", 0.2)
    sessions = relay.relay.sessions
    sessions.short_seconds = 0.5
    address = relay.serve(echo("a").address, protocol=UDP)
    with client_of(address) as talker, client_of(address) as asker:
        for _ in range(6):
            ask(talker)
            threading.Event().wait(0.1)
        ask(asker)
        eventually(lambda: len(sessions.by_client) == 1, "the single question does not end")
        assert len(sessions.long) == 1


def test_without_room_the_oldest_question_makes_way(relay: Running, echo) -> None:
    address = relay.serve(echo("a").address, protocol=UDP)
    state = relay.relay.state
    relay.do(lambda: setattr(state, "limit", state.used + 64 + 3))
    clients = [client_of(address) for _ in range(8)]
    for client in clients:
        assert ask(client) == "a"
    assert len(relay.relay.sessions.by_client) == 3
    for client in clients:
        client.close()


def test_refusals_are_limited_in_number() -> None:
    refuser = IcmpErrors()
    assert sum(refuser.ratelimit_allow(100.0) for _ in range(3 * PER_SECOND)) == PER_SECOND
    assert sum(refuser.ratelimit_allow(100.5) for _ in range(3 * PER_SECOND)) == PER_SECOND // 2


@pytest.mark.parametrize("family", [4, 6])
def test_a_refusal_quotes_the_datagram_of_the_client(family: int) -> None:
    scapy = pytest.importorskip("scapy.all")
    client, listener = (("10.0.0.1", 1234), ("10.0.0.2", 53)) if family == 4 else (("fd00::1", 1234), ("fd00::2", 53))
    error = message(family, client, listener, b"question")
    if family == 4:
        outer = scapy.ICMP(error)
        assert (outer.type, outer.code) == (3, 3)
        assert checksum(error) == 0
        inner = scapy.IP(error[8:])
        assert checksum(error[8:28]) == 0
    else:
        assert (error[0], error[1]) == (1, 4)
        inner = scapy.IPv6(error[8:])
    assert (inner.src, inner.dst) == (client[0], listener[0])
    assert (inner[scapy.UDP].sport, inner[scapy.UDP].dport) == (client[1], listener[1])
    assert bytes(inner[scapy.UDP].payload) == b"question"


def test_a_datagram_that_the_host_lets_out_to_nobody_is_given_up(relay: Running, monkeypatch) -> None:
    class Forbidden(socket.socket):
        def send(self, data, flags=0):
            raise PermissionError(errno.EPERM, "as a firewall says it")

    def toward(*_: object) -> socket.socket:
        return Forbidden(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    monkeypatch.setattr("hybrid_proxy.dataplane.modes.userspace.datagrams.toward", toward)
    at = relay.serve(*((HOST, 20_000 + number) for number in range(600)), protocol=UDP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"question", at)
        eventually(lambda: relay.counters["refused_by_backends"], "nobody was tried")
        eventually(lambda: not relay.relay.sessions.by_client, "the session is still there")
    assert relay.counters["refused_by_backends"] == MOST_ATTEMPTS
