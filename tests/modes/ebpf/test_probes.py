"""Probes against servers on loopback: what counts as an answer, how many failures count, and who is asked."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.ejection import probes
from hybrid_proxy.dataplane.modes.ebpf.ejection.probes import AT_ONCE, Prober, Target, probe
from hybrid_proxy.dataplane.options import EbpfOptions, ProbeOptions

PATIENCE = 60.0
QUICK = Options(ebpf=EbpfOptions(probes=ProbeOptions(interval=0.1, timeout=0.3, failures=2)))


class Server:
    """Answers each connection by what `answer` is at the time; None: it stays silent."""

    def __init__(self, family: int = socket.AF_INET) -> None:
        self.answer: bytes | None = b""
        self.requests: list[bytes] = []
        self.connections = 0
        self.socket = socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family)
        self.address, self.port = self.socket.getsockname()[:2]
        threading.Thread(target=self.run, daemon=True).start()

    def close(self) -> None:
        """Nobody listens any more, not even the thread that waits for a client."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def target(self, path: str | None = None) -> Target:
        return Target(self.address, self.port, path)

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        with closing(connection):
            try:
                got = connection.recv(4096)
                if got:
                    self.requests.append(got)
                    if self.answer is None:
                        connection.recv(1)
                    else:
                        connection.sendall(self.answer)
            except OSError:
                pass


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["v4", "v6"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(request.param)
    yield made
    made.close()


def ask(target: Target, timeout: float = 2.0) -> str:
    return asyncio.run(probe(target, timeout))


def test_a_connection_is_enough(server: Server) -> None:
    assert ask(server.target()) == ""


def test_nobody_listens(server: Server) -> None:
    server.close()
    assert "refused" in ask(server.target()).lower()
    assert str(server.port) in ask(server.target("/"))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", ""),
        (b"HTTP/1.0 204 No Content\r\n", ""),
        (b"HTTP/1.1 302 Found\r\n\r\n", ""),
        (b"HTTP/1.1 399\r\n", ""),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "GET /up?x=1 was answered by status 400"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "GET /up?x=1 was answered by status 503"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", "status 101"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is not HTTP"),
        (b"HTTP/1.1 abc\r\n", "is not HTTP"),
        (b"\n", "is not HTTP"),
        (b"", "is not HTTP"),
        (b"HTTP/1.1 200", "is not HTTP"),
        (b"x" * 100_000, "is not HTTP"),
    ],
)
def test_answers_to_http(server: Server, answer: bytes, problem: str) -> None:
    server.answer = answer
    said = ask(server.target("/up?x=1"))
    assert problem in said if problem else said == ""
    host = f"[{server.address}]" if ":" in server.address else server.address
    assert server.requests == [
        f"GET /up?x=1 HTTP/1.1\r\nHost: {host}:{server.port}\r\nUser-Agent: hybrid-proxy-probe\r\n"
        "Connection: close\r\n\r\n".encode()
    ]


def test_silence_lasts_as_long_as_the_time_out(server: Server) -> None:
    server.answer = None
    assert ask(server.target("/"), 0.2).endswith("within 0.2 s")


# --- the thread


@pytest.fixture
def prober() -> Iterator[Prober]:
    made = Prober(QUICK)
    yield made
    made.stop()


def eventually(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_down_after_failures_and_up_after_one_success(server: Server, prober: Prober) -> None:
    target = server.target("/")
    server.answer = b"HTTP/1.1 500 no\r\n\r\n"
    prober.watch([target])
    eventually(prober.down)
    assert len(server.requests) >= QUICK.ebpf.probes.failures
    assert prober.down() == {target: "GET / was answered by status 500"}
    assert prober.status().down == 1
    server.answer = b"HTTP/1.1 200 yes\r\n\r\n"
    eventually(lambda: not prober.down())


def test_one_failure_among_successes_is_none(prober: Prober) -> None:
    target = Target("192.0.2.1", 1, None)
    prober.misses[target] = 0
    for problem in ("no", "", "no", "", "no"):
        prober.note(target, problem)
        assert prober.down() == {}
    prober.note(target, "no again")
    assert prober.down() == {target: "no again"}


def test_who_is_not_watched_is_not_asked_and_not_down(server: Server, prober: Prober) -> None:
    other = Server()
    with closing(other):
        server.close()
        prober.watch([server.target()])
        eventually(prober.down)
        prober.watch([other.target()])
        assert prober.down() == {}
        eventually(lambda: other.connections >= 3)
        assert prober.down() == {}
        assert prober.status().targets == 1
        third = Server()
        with closing(third):
            prober.watch([third.target()])
            before = other.connections
            eventually(lambda: third.connections >= 4)
            assert other.connections <= before + 1, "one may have been under way"


def test_no_more_than_so_many_at_once(prober: Prober, monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0
    targets = [Target("192.0.2.1", port, None) for port in range(1, 3 * AT_ONCE)]

    async def slow(target: Target, _: float) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        return "no"

    monkeypatch.setattr(probes, "probe", slow)
    prober.watch(targets)
    eventually(lambda: len(prober.down()) == len(targets))
    assert most == AT_ONCE
    assert prober.lag > 0
