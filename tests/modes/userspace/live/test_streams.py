"""Connections through the relay, with real sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import struct
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from hybrid_proxy.dataplane import reports
from hybrid_proxy.dataplane.modes.userspace import streams
from hybrid_proxy.dataplane.modes.userspace.listing import Relayed
from hybrid_proxy.dataplane.modes.userspace.sockets import RESET
from hybrid_proxy.dataplane.modes.userspace.streams import CHUNK, PIPE

from ..kit import Running, connect, eventually, nobody, silent, who


def test_round_robin_is_even(relay: Running, backend) -> None:
    address = relay.serve(*(backend(name).address for name in "abc"))
    assert Counter(who(address) for _ in range(30)) == {"a": 10, "b": 10, "c": 10}


def test_a_change_of_another_service_does_not_move_the_turn(relay: Running, backend) -> None:
    addresses = [backend(name).address for name in "abc"]
    address = relay.serve(*addresses)
    seen = []
    for _ in range(6):
        seen.append(who(address))
        relay.serve(addresses[0], key="other")
        assert relay.serve(*addresses) == address, "the proxy port changed with nothing else"
    assert seen == list("abcabc")


def test_a_refused_connection_goes_to_another_backend(relay: Running, backend) -> None:
    address = relay.serve(nobody(), backend("a").address, nobody())
    assert [who(address) for _ in range(9)] == ["a"] * 9
    assert relay.counters["retries"] >= 2


def test_a_silent_backend_is_given_up_after_about_a_second(relay: Running, backend) -> None:
    with silent() as nowhere:
        address = relay.serve(nowhere, backend("a").address)
        start = time.monotonic()
        assert {who(address) for _ in range(4)} == {"a"}
        assert 0.9 < time.monotonic() - start < 30
    assert relay.counters["silent_backends"] == 1


def test_how_connections_failed_is_remembered_for_each_backend(relay: Running, backend) -> None:
    """Refused or silent, when, and whether the last one failed; of backends that left, nothing."""
    began, deaf = time.time(), nobody()
    with silent() as nowhere:
        address = relay.serve(deaf, nowhere, backend("a").address)
        assert {who(address) for _ in range(6)} == {"a"}
        failed = {(row[1], row[2]): row[3:] for row in relay.relay.listing(0).failures}
        assert failed.keys() == {deaf, nowhere}
        (times, refused), (once, unanswered) = failed[deaf], failed[nowhere]
        assert (refused.refused, refused.unanswered, refused.last_kind) == (times, 0, "refused")
        assert (unanswered.refused, unanswered.unanswered, unanswered.last_kind) == (0, once, "not answered")
        assert times >= 1 <= once
        assert all(began <= last <= time.time() for last in (refused.last_refused, unanswered.last_unanswered))
        relay.serve(nowhere, backend("a").address)
    assert {(row[1], row[2]) for row in relay.relay.listing(0).failures} == {nowhere}


def test_backends_that_fail_are_reported_and_service_ports_where_all_do(
    relay: Running, backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf, good = nobody(), backend("a")
    relay.serve(deaf, good.address, key="some")
    address = relay.serve(deaf, key="all")
    for _ in range(2):
        relay.relay.services["some"].note_failure(deaf, refused=True)
        with pytest.raises(ConnectionResetError), connect(address) as client:
            client.recv(1)
    eventually(lambda: relay.relay.status().failing == ("all",), "not reported")
    assert relay.relay.status().failing_backends == (("some", deaf, 2),)
    assert relay.relay.status().failing_in == {}
    some = relay.relay.services["some"]
    some.row = msgspec.structs.replace(some.row, name="all", family=6)
    assert relay.relay.status().failing_in == {"all": 4}, "the other family has a backend that answers"
    some.row = msgspec.structs.replace(some.row, name="some", family=4)
    with monkeypatch.context() as changed:
        changed.setattr(reports, "LATELY_SECONDS", -1.0)
        assert relay.relay.status().failing == (), "perhaps no client comes any more"
        view = Relayed(SimpleNamespace(ask=lambda *_: relay.relay.listing(0)))  # type: ignore[arg-type]
        assert {row.failing for row in view.services()} == {0}
        assert {row.state for row in view.backends()} == {None}
    relay.relay.services["all"].note_success(deaf)
    assert relay.relay.status().failing == ()


def test_a_connection_that_succeeds_ends_the_row_of_failures(relay: Running, backend) -> None:
    place = backend("a")
    address = relay.serve(place.address)
    service = next(iter(relay.relay.services.values()))
    service.note_failure(place.address, refused=True)
    assert who(address) == "a"
    ((*_, consecutive, history),) = relay.relay.listing(0).failures
    assert (consecutive, history.refused) == (0, 1)


def test_without_any_backend_the_client_is_reset(relay: Running) -> None:
    address = relay.serve(nobody(), nobody())
    with pytest.raises(ConnectionResetError), connect(address) as client:
        client.recv(1)
    eventually(lambda: relay.counters["unreachable"] == 1, "not counted")


def test_connections_that_a_client_opens_at_once_go_to_one_backend(relay: Running, backend) -> None:
    address = relay.serve(*(backend(name).address for name in "abc"), affinity=100)
    assert at_once(relay, address, 12) in ({"a"}, {"b"}, {"c"})


def test_connections_that_a_client_opens_at_once_move_together_from_a_backend_that_fails(relay: Running, backend):
    address = relay.serve(nobody(), *(backend(name).address for name in "bc"), affinity=100)
    assert at_once(relay, address, 12) in ({"b"}, {"c"})


def at_once(relay: Running, address: tuple[str, int], count: int) -> set[str]:
    """Who answers connections that the relay finds all together."""
    clients: list[socket.socket] = []
    relay.do(lambda: clients.extend(connect(address) for _ in range(count)))
    names = {client.recv(16).decode() for client in clients}
    for client in clients:
        client.close()
    return names


@pytest.mark.parametrize("closer", ["client", "backend"])
def test_half_close_is_passed_on_and_the_other_way_goes_on(relay: Running, backend, closer: str) -> None:
    received: list[bytes] = []
    done = threading.Event()

    def act(connection: socket.socket) -> None:
        if closer == "client":
            while data := connection.recv(100):
                received.append(data)
            connection.sendall(b"after the end")
        else:
            connection.sendall(b"that is all")
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(100):
                received.append(data)
        done.set()

    address = relay.serve(backend("a", act).address)
    with connect(address) as client:
        if closer == "client":
            client.sendall(b"question")
            client.shutdown(socket.SHUT_WR)
            assert client.recv(100) == b"after the end"
            assert client.recv(100) == b""
        else:
            assert client.recv(100) == b"that is all"
            assert client.recv(100) == b""
            time.sleep(0.1)
            client.sendall(b"question")
    assert done.wait(60)
    assert b"".join(received) == b"question"
    eventually(lambda: not relay.relay.flows.all, "the flow is not forgotten")


@pytest.mark.parametrize("resetter", ["client", "backend"])
def test_a_reset_is_passed_on_as_a_reset(relay: Running, backend, resetter: str) -> None:
    seen: list[type[BaseException] | bytes] = []
    done = threading.Event()

    def act(connection: socket.socket) -> None:
        if resetter == "backend":
            connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            return
        try:
            seen.append(connection.recv(1))
            seen.append(connection.recv(1))
        except OSError as error:
            seen.append(type(error))
        done.set()

    address = relay.serve(backend("a", act).address)
    client = connect(address)
    client.sendall(b"x")
    if resetter == "client":
        time.sleep(0.1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        client.close()
        assert done.wait(60)
        assert seen == [b"x", ConnectionResetError]
    else:
        with client, pytest.raises(ConnectionResetError):
            client.recv(1)


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("size", [100, CHUNK + 1, 40_000_000])
def test_every_byte_arrives_in_order(relay: Running, backend, size: int, direction: str) -> None:
    data = os.urandom(1 << 20) * (size // (1 << 20) + 1)
    data = data[:size]
    received = bytearray()
    done = threading.Event()

    def act(connection: socket.socket) -> None:
        if direction == "down":
            connection.sendall(data)
            return
        while part := connection.recv(1 << 18):
            received.extend(part)
        done.set()

    address = relay.serve(backend("a", act).address)
    with connect(address) as client:
        if direction == "up":
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            assert done.wait(60)
        else:
            while part := client.recv(1 << 18):
                received.extend(part)
    assert received == data
    if size > 1 << 24:
        assert relay.counters["spliced_ways"] == 1


def socket_buffers() -> int:
    """The most bytes that a sender's socket and its receiver's hold between them; the limits grow with the machine."""
    limits = (Path("/proc/sys/net/ipv4", name).read_text().split()[-1] for name in ("tcp_wmem", "tcp_rmem"))
    return sum(map(int, limits))


def test_a_slow_reader_stops_its_sender_and_nobody_else(relay: Running, backend) -> None:
    sent = [0]

    def act(connection: socket.socket) -> None:
        connection.settimeout(30)
        while True:
            sent[0] += connection.send(bytes(1 << 16))

    slow = relay.serve(backend("flood", act).address, key="slow")
    quick = relay.serve(backend("b").address, key="quick")
    with connect(slow) as client:
        before = -1
        while before != sent[0]:
            before = sent[0]
            assert before <= PIPE + 2 * socket_buffers(), "the flood went on past two connections' buffers and one pipe"
            time.sleep(0.4)
        held = [way.held + len(way.pending) for flow in relay.relay.flows.all for way in (flow.forth, flow.back)]
        assert max(held) <= PIPE
        start = time.monotonic()
        assert [who(quick) for _ in range(20)] == ["b"] * 20
        assert time.monotonic() - start < 30
        for _ in range(200):
            client.recv(1 << 18)
        eventually(lambda: sent[0] > before, "the sender was not let go on")


def test_an_established_connection_outlives_backend_and_service(relay: Running, backend) -> None:
    a = backend("a")
    address = relay.serve(a.address)
    with connect(address) as client:
        assert client.recv(1) == b"a"
        relay.serve(backend("b").address)
        client.sendall(b"1")
        assert client.recv(1) == b"1"
        relay.apply({"a": None})
        client.sendall(b"2")
        assert client.recv(1) == b"2"
        with pytest.raises(ConnectionRefusedError):
            connect(address)


def test_idle_connections_cost_two_sockets_each(relay: Running) -> None:
    count = 100
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=count))
        address = relay.serve(listener.getsockname())
        files = relay.relay.state.used
        clients, servers = [], []
        for _ in range(count):
            clients.append(stack.enter_context(connect(address)))
            servers.append(stack.enter_context(listener.accept()[0]))
        eventually(lambda: len(relay.relay.flows.all) == count, "not all are there")
        assert relay.relay.state.used - files == 2 * count
        assert not any(way.pending or way.pipe for f in relay.relay.flows.all for way in (f.forth, f.back) if way)
        clients[count // 2].sendall(b"still here")
        ready = select.poll()
        for server in servers:
            ready.register(server, select.POLLIN)
        assert len(ready.poll(60_000)) == 1
    eventually(lambda: relay.relay.state.used == files, "descriptors are lost")


def test_at_the_limit_of_open_files_new_connections_wait_for_their_turn(backend, caplog) -> None:
    relay = Running()
    try:
        address = relay.serve(backend("a").address)
        state = relay.relay.state
        relay.do(lambda: setattr(state, "limit", state.used + 64 + 5))  # room for two connections
        open_ones = [connect(address) for _ in range(2)]
        assert [client.recv(1) for client in open_ones] == [b"a", b"a"]
        late = connect(address)
        late.settimeout(0.5)
        with pytest.raises(TimeoutError):
            late.recv(1)
        turns = state.counters["limit_reached"]
        time.sleep(0.3)
        assert state.counters["limit_reached"] <= turns + 6, "it spins"
        assert "raise the limit of open files" in state.trouble
        assert "raise the limit of open files" in caplog.text
        open_ones[0].close()
        late.settimeout(20)
        assert late.recv(1) == b"a"
        late.close()
        open_ones[1].close()
    finally:
        relay.close()


def test_a_full_process_is_noticed_at_accept(relay: Running, backend) -> None:
    """EMFILE itself, when something else took the descriptors that the relay counted on."""
    address = relay.serve(backend("a").address)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = socket.socket()
    client.settimeout(0.5)
    probe = os.open("/dev/null", os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        client.connect(address)
        with pytest.raises(TimeoutError):
            client.recv(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    client.settimeout(20)
    assert client.recv(1) == b"a"
    assert relay.counters["limit_reached"] > 0
    client.close()


def test_a_relay_without_room_suspects_no_backend(relay: Running, backend, monkeypatch: pytest.MonkeyPatch) -> None:
    address = relay.serve(*(backend(name).address for name in "ab"), affinity=100)
    first = who(address)

    def full(*arguments: object) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(streams, "toward", full)
        with pytest.raises(ConnectionResetError), connect(address) as client:
            client.recv(1)
    assert {who(address) for _ in range(5)} == {first}, "affinity was forgotten"
    assert relay.counters["retries"] == relay.counters["refused_by_backends"] == 0


def test_dead_peers_are_found_some_day(relay: Running, backend) -> None:
    address = relay.serve(backend("a").address)
    with connect(address) as client:
        client.recv(1)
        flow = next(iter(relay.relay.flows.all))
        for sock in (flow.client, flow.upstream):
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert struct.unpack("i", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4))[0] == 600
