"""A relay in a thread of the test, on loopback, with backends that misbehave on demand. No privilege is needed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from hybrid_proxy.dataplane.modes.userspace import messages as m
from hybrid_proxy.dataplane.modes.userspace.relay import Relay
from hybrid_proxy.dataplane.modes.userspace.sockets import State

HOST = "127.0.0.1"
TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP
NETWORK = m.Network({4: HOST, 6: "::1"})


class Running:
    """A relay whose loop runs in a thread."""

    def __init__(self, limit: int | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.failures: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.failures.append(context))
        self.relay = Relay(State(self.loop, limit))
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    @property
    def counters(self) -> dict[str, int]:
        return self.relay.state.counters

    def do(self, act: Callable[[], Any]) -> Any:
        """Run something in the relay's thread."""
        done: Future[Any] = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(act()))
        return done.result(5)

    def serve(self, *backends: tuple[str, int], key: str = "a", protocol: int = TCP, **fields: Any) -> tuple[str, int]:
        """Program one service port; returns where its clients connect."""
        row = m.Row(key, key, 4, protocol, (backends,), (m.Port(0, m.Keep.NEVER),), backends, **fields)
        answer = self.apply({key: row})
        assert not answer.failed, answer.failed
        return HOST, answer.ports[key][0]

    def apply(self, rows: dict[str, m.Row | None]) -> m.Applied:
        request = m.Apply(rows, NETWORK)
        answer = asyncio.run_coroutine_threadsafe(self.relay.apply(request), self.loop).result(10)
        self.do(self.relay.commit)
        return answer

    def close(self) -> None:
        self.do(self.relay.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        assert not self.failures, self.failures


class Backend:
    """A TCP server that says its name first and then answers each message, or does what `act` says."""

    def __init__(self, name: str, act: Callable[[socket.socket], None] | None = None) -> None:
        self.name = name
        self.listener = socket.create_server((HOST, 0))
        self.address: tuple[str, int] = self.listener.getsockname()
        self.act = act or self.echo
        self.accepted = 0
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while self.listener.fileno() >= 0:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # closed; or the process is full (EMFILE), as a test wants it
                time.sleep(0.05)
                continue
            self.accepted += 1
            threading.Thread(target=self.talk, args=(connection,), daemon=True).start()

    def talk(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self.act(connection)

    def echo(self, connection: socket.socket) -> None:
        connection.sendall(self.name.encode())
        while data := connection.recv(1 << 16):
            connection.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=60)


def who(address: tuple[str, int]) -> str:
    with connect(address) as client:
        return client.recv(16).decode()


def nobody() -> tuple[str, int]:
    """An address where connections are refused."""
    with socket.create_server((HOST, 0)) as listener:
        address: tuple[str, int] = listener.getsockname()
        return address


def eventually(check: Callable[[], Any], what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextlib.contextmanager
def silent() -> Iterator[tuple[str, int]]:
    """An address where SYNs stay unanswered: the queue of connections that wait to be accepted is full."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(0)
        waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
            waiting.append(one)
        time.sleep(0.1)
        yield listener.getsockname()
        for one in waiting:
            one.close()
