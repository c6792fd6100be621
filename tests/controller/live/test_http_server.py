"""The server by itself, on loopback: what a hostile or clumsy client does to it, and what that does to the others."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from hybrid_proxy.controller.serving import http_server
from hybrid_proxy.controller.serving.health import Answer, Handler, Listener
from hybrid_proxy.controller.serving.http_server import HttpServer
from tests.waiting import until

DEADLINE = 60.0


class Served:
    """A web on ports that were free a moment ago, and what it said of those that were not."""

    def __init__(self) -> None:
        self.failures: list[tuple[str, str]] = []
        self.server = HttpServer(lambda key, trouble: self.failures.append((key, trouble)), retry_seconds=0.05)
        self.port = free_port()

    def listener(self, pages: dict[str, Handler], port: int = 0, *addresses: str) -> Listener:
        return Listener("the listener", addresses or ("127.0.0.1",), port or self.port, pages)

    def follow(self, **listeners: Listener) -> None:
        self.server.follow(listeners)
        until(lambda: self.server.served | set(self.server.troubles) == set(listeners))

    def get(self, path: str = "/", port: int = 0, address: str = "127.0.0.1") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(address, port or self.port, timeout=DEADLINE)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def ended(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


def page(text: str, code: int = 200) -> Handler:
    return Handler(lambda family, accept: Answer(code, text.encode(), "text/plain", ()))


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.server.close()


def test_pages_by_path_and_all_the_others(served):
    served.follow(a=served.listener({"/one": page("1"), "*": page("rest", 503)}))
    assert served.get("/one") == (200, b"1")
    assert served.get("/one?x=y") == (200, b"1")
    assert served.get("/two") == (503, b"rest")


def test_many_requests_on_one_connection(served):
    served.follow(a=served.listener({"/": page("hello")}))
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=DEADLINE)
    for _ in range(20):
        connection.request("POST", "/", body=b"x" * 1000)  # Go's mux does not mind either
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"hello")
    assert len(served.server.connections) == 1
    connection.close()
    until(lambda: not served.server.connections)


def test_requests_that_come_together_are_answered_in_turn(served):
    served.follow(a=served.listener({"/1": page("one"), "/2": Handler(lambda *_: Answer(200, b"two"), slow=True)}))
    with served.connect() as line:
        line.sendall(b"GET /2 HTTP/1.1\r\nHost: x\r\n\r\nGET /1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: line.recv(1 << 16), b""))
    assert answer.index(b"two") < answer.index(b"one")
    assert answer.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00", id="TLS"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="no Host"),
        pytest.param(b"GET /" + b"a" * (http_server.REQUEST_BYTES + 10), id="too long"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: one\r\n\r\n", id="nonsense"),
    ],
)
def test_what_is_no_request_is_refused(served, sent):
    served.follow(a=served.listener({"/": page("hello")}))
    with served.connect() as line:
        line.sendall(sent)
        line.shutdown(socket.SHUT_WR)
        try:
            answer = b"".join(iter(lambda: line.recv(1 << 16), b""))
        except ConnectionResetError:
            answer = b"HTTP/1.1 4"
    assert answer.startswith(b"HTTP/1.1 4")
    assert served.get() == (200, b"hello")


def test_a_page_that_fails_is_its_own_trouble(served):
    def broken(family: int, accept: str) -> Answer:
        raise ValueError("no")

    served.follow(
        a=served.listener({"/": page("hello"), "/broken": Handler(broken), "/slow": Handler(broken, slow=True)})
    )
    assert served.get("/broken")[0] == served.get("/slow")[0] == 500
    assert served.get() == (200, b"hello")


def test_a_slow_page_keeps_nobody_waiting(served):
    release = threading.Event()

    def slow(family: int, accept: str) -> Answer:
        release.wait(DEADLINE)
        return Answer(200, b"at last")

    served.follow(a=served.listener({"/": page("hello"), "/slow": Handler(slow, slow=True)}))
    found: list[tuple[int, bytes]] = []
    asker = threading.Thread(target=lambda: found.append(served.get("/slow")))
    asker.start()
    assert served.get() == (200, b"hello")
    assert not found
    release.set()
    asker.join(DEADLINE)
    assert found == [(200, b"at last")]


def test_the_oldest_of_too_many_connections_ends(served, monkeypatch):
    monkeypatch.setattr(http_server, "CONNECTIONS", 3)
    served.follow(a=served.listener({"/": page("hello")}))
    lines = [served.connect() for _ in range(3)]
    until(lambda: len(served.server.connections) == 3)
    assert served.get() == (200, b"hello")
    assert ended(lines[0])
    for line in lines:
        line.close()


def test_who_says_nothing_is_ended(served, monkeypatch):
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 0.05)
    served.follow(a=served.listener({"/": page("hello")}))
    with served.connect() as line:
        line.sendall(b"GET / HT")
        assert ended(line)


def test_sites_come_change_and_go(served):
    other = free_port()
    served.follow(a=served.listener({"/": page("a")}))
    served.follow(a=served.listener({"/": page("A")}), b=served.listener({"/": page("b")}, other))
    assert [served.get(), served.get(port=other)] == [(200, b"A"), (200, b"b")]
    served.follow(b=served.listener({"/": page("b")}, other))
    until(lambda: served.server.served == {"b"})
    with pytest.raises(ConnectionRefusedError):
        served.get()
    assert served.get(port=other) == (200, b"b")


def test_a_port_moves_from_one_site_to_another(served):
    served.follow(a=served.listener({"/": page("a")}))
    served.follow(b=served.listener({"/": page("b")}))
    assert served.get() == (200, b"b")
    assert not served.failures


def test_a_site_that_closes_ends_its_connections(served):
    served.follow(a=served.listener({"/": page("a")}))
    with served.connect() as line:
        until(lambda: served.server.connections)
        served.server.follow({})
        assert ended(line)


def test_half_of_a_site_is_none(served):
    """kube-proxy, too, serves a health check at all its addresses or not at all."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.3", 0))
        port = taken.getsockname()[1]
        taken.listen()
        served.follow(a=served.listener({"/": page("a")}, port, "127.0.0.2", "127.0.0.3"))
        assert not served.server.served
        with pytest.raises(ConnectionRefusedError):
            served.get(port=port, address="127.0.0.2")
        time.sleep(0.2)  # several tries
        assert len(served.failures) == 1, "reported once"
        assert f"127.0.0.3:{port}: process {os.getpid()} (" in served.failures[0][1]
    until(lambda: served.server.served == {"a"})
    assert served.get(port=port, address="127.0.0.2") == (200, b"a")
    assert served.get(port=port, address="127.0.0.3") == (200, b"a")


def test_every_address_means_both_families(served):
    families: list[int] = []

    def note(family: int, accept: str) -> Answer:
        families.append(family)
        return Answer(200, b"")

    served.follow(a=served.listener({"*": Handler(note)}, 0, "0.0.0.0"))
    served.get()
    served.get(address="::1")
    assert families == [4, 6]


def test_an_address_that_is_not_there_yet(served):
    served.follow(a=served.listener({"/": page("a")}, 0, "192.0.2.77", "2001:db8::77"))
    assert served.server.served == {"a"}


def test_nothing_listens_after_the_end(served):
    served.follow(a=served.listener({"/": page("a")}))
    served.server.close()
    with pytest.raises(ConnectionRefusedError):
        served.get()
    served.server.follow({})  # too late, and no error


def test_answers_have_a_reason_phrase(served):
    """Kubernetes' own end-to-end tests look for "200 OK" and "503 Service Unavailable"."""
    codes = {200: b"200 OK", 404: b"404 Not Found", 500: b"500 Internal Server Error", 503: b"503 Service Unavailable"}
    served.follow(a=served.listener({f"/{code}": page("x", code) for code in codes}))
    for code, expected in codes.items():
        with served.connect() as line:
            line.sendall(f"GET /{code} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            received = b"".join(iter(lambda: line.recv(1 << 16), b""))
        assert received.partition(b"\r\n")[0] == b"HTTP/1.1 " + expected


FEW_DESCRIPTORS = """\
import logging, resource, sys, threading
from hybrid_proxy.controller.serving.health import Answer, Handler, Listener
from hybrid_proxy.controller.serving.http_server import HttpServer

logging.basicConfig(level=logging.INFO)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = [open("/dev/null") for _ in range(30)]
page = Handler(lambda family, accept: Answer(200, b"hello"))
ports = [int(port) for port in sys.argv[1:]]
server = HttpServer(lambda key, trouble: print(trouble, flush=True))
server.follow({str(port): Listener("the listener", ("127.0.0.1",), port, {"/": page}) for port in ports})
while len(server.served) < len(ports):
    threading.Event().wait(0.01)
print("serves", flush=True)
sys.stdin.read()
"""


def test_descriptors_that_run_out(served):
    """A hundred clients who say nothing: others are answered, and the log says once what is wrong."""
    ports = [free_port() for _ in range(3)]
    command = [sys.executable, "-c", FEW_DESCRIPTORS, *map(str, ports)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as few:
        assert few.stdin
        assert few.stdout
        assert few.stderr
        assert few.stdout.readline() == "serves\n"
        many = ports[:2] * 50
        lines = [socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) for port in many]
        assert [served.get(port=port) for port in ports * 3] == [(200, b"hello")] * 9
        for line in lines:
            line.close()
        few.stdin.close()
        lines = few.stderr.read().splitlines()
    assert len(lines) == 1, lines[:10]
    assert "Too many open files" in lines[0]
