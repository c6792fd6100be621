"""Makes real traffic: servers that answer with their name and their peer, and clients that count answers.

Inside a namespace:

    python -m hybrid_proxy.workshop.lab.traffic serve --at pod1=/run/netns/...,10.77.1.11 --http 8080 --udp 5353
    python -m hybrid_proxy.workshop.lab.traffic load connections 10.96.0.10:80 --count 200
    python -m hybrid_proxy.workshop.lab.traffic load streams [fd96::10]:80 --seconds 5
    python -m hybrid_proxy.workshop.lab.traffic load udp 10.96.0.53:53 --count 100 --socket connected

Servers answer every request, over HTTP/1.1 and over UDP, with one JSON object `{"pod", "peer", "local"}`, where
peer and local are `[address, port]`. Clients print JSON lines, the last with `"final": true`: requests answered,
failures by the name of their error, answers of each backend, times to connect in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import ipaddress
import json
import math
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from hybrid_proxy.workshop.lab import namespace

Address = tuple[str, int]
OpenSocket = Callable[[int, int], socket.socket]  # family, kind

KINDS: Final = ("connections", "streams", "udp")
UDP_SOCKETS: Final = ("fresh", "one", "connected")
TIMEOUT: Final = 2.0  # seconds that a client waits for an answer
_LIMIT: Final = 64 * 1024 * 1024  # bytes that a server sends or takes in one request


# Clients


class Reply(msgspec.Struct, frozen=True):
    """A server's answer."""

    pod: str
    peer: Address  # the client, as the server sees it
    local: Address  # the server's own end
    received: int = 0  # bytes of the request's body


class WrongSource(OSError):
    """An answer from an address that the client did not ask."""

    def __init__(self, source: Address) -> None:
        super().__init__(f"answer from {source[0]} port {source[1]}")


def target_of(text: str) -> tuple[int, Address]:
    """Family and socket address of `10.96.0.10:80` or `[fd96::10]:80`.

    Raises:
        ValueError: anything else.
    """
    host, _, port = text.rpartition(":")
    address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    number = int(port)
    if not 0 < number < 65536:
        raise ValueError(f"port {number} in {text!r}: between 1 and 65535")
    return (socket.AF_INET if address.version == 4 else socket.AF_INET6), (str(address), number)


def failure(error: OSError) -> str:
    """The name of what went wrong: `ECONNREFUSED`, `timeout`, `closed`, `answer from ...`."""
    if isinstance(error, WrongSource):
        return str(error)
    if isinstance(error, TimeoutError):
        return "timeout"
    if error.errno is None:
        return "closed"
    return errno.errorcode.get(error.errno, str(error.errno))


def ask_tcp(connection: socket.socket, *, body: bytes = b"", close: bool = False) -> Reply:
    """One HTTP request on a connected socket.

    Raises:
        OSError: no whole answer; `ConnectionError` without a number when the server hung up.
    """
    head = f"POST / HTTP/1.1\r\nHost: lab\r\nContent-Length: {len(body)}\r\n"
    connection.sendall((head + ("Connection: close\r\n\r\n" if close else "\r\n")).encode() + body)
    return msgspec.json.decode(_read_body(connection), type=Reply)


def download(connection: socket.socket, size: int) -> int:
    """Fetch that many bytes over a connected socket; returns how many came."""
    connection.sendall(f"GET /bytes/{size} HTTP/1.1\r\nHost: lab\r\n\r\n".encode())
    return len(_read_body(connection))


def _read_body(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    fields = (line.split(b":", 1) for line in head.split(b"\r\n")[1:])
    length = next(int(value) for name, value in fields if name.lower() == b"content-length")
    parts, missing = [body], length - len(body)
    while missing > 0:
        parts.append(_some(connection))
        missing -= len(parts[-1])
    return b"".join(parts)


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 18)
    if not data:
        raise ConnectionError("the server closed the connection")
    return data


def ask_udp(sender: socket.socket, target: Address | None = None, *, text: str = "") -> tuple[Reply, Address]:
    """One datagram and its answer, and the address that the answer shows as its source; `target` None: connected.

    Raises:
        OSError: refused, or nothing came in time.
    """
    if target is None:
        sender.send(text.encode())
        data = sender.recv(65536)
        source: Address = sender.getpeername()
    else:
        sender.sendto(text.encode(), target)
        data, source = sender.recvfrom(65536)
    return msgspec.json.decode(data, type=Reply), (source[0], source[1])


@dataclass
class Tally:
    """Counts of what clients got. Several threads may add to it."""

    answered: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    backends: Counter[str] = field(default_factory=Counter)
    moved: int = 0  # answers to a socket that came from another backend than the one before
    connects: list[float] = field(default_factory=list)  # seconds
    slowest_answer: float = 0.0  # seconds, of requests on what was open already
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def answer(self, reply: Reply, connected: float | None = None, waited: float = 0.0, *, moved: bool = False) -> None:
        """One good answer, the seconds its connection took if it was new, and those it was waited for if not.

        `moved`: it came from another backend than the answer before, to the same socket.
        """
        with self.lock:
            self.answered += 1
            self.moved += moved
            self.slowest_answer = max(self.slowest_answer, waited)
            self.backends[reply.pod] += 1
            if connected is not None:
                self.connects.append(connected)

    def fail(self, error: OSError) -> None:
        with self.lock:
            self.failures[failure(error)] += 1

    @property
    def failed(self) -> int:
        return self.failures.total()

    def report(self) -> dict[str, Any]:
        """Returns the counts as plain values, times in milliseconds; None: nothing of the kind was measured."""
        with self.lock:
            times = sorted(self.connects)
            return {
                "answered": self.answered,
                "failed": self.failures.total(),
                "failures": dict(self.failures),
                "backends": dict(sorted(self.backends.items())),
                "moved": self.moved,
                "connect_ms": {name: _quantile_ms(times, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
                "slowest_answer_ms": round(self.slowest_answer * 1000, 3) or None,
            }


def _quantile_ms(times: Sequence[float], quantile: float) -> float | None:
    return round(times[max(0, math.ceil(quantile * len(times)) - 1)] * 1000, 3) if times else None


class Stream:
    """A connection that stays open and asks again and again; keeps count of what it sees."""

    def __init__(self, connection: socket.socket, tally: Tally) -> None:
        self.connection = connection
        self.tally = tally
        self.pod: str | None = None

    def ask(self) -> Reply:
        """One request on the open connection."""
        start = time.monotonic()
        reply = ask_tcp(self.connection)
        self.tally.answer(reply, waited=time.monotonic() - start, moved=self.pod not in {None, reply.pod})
        self.pod = reply.pod
        return reply


def load(
    kind: str,
    target: tuple[int, Address],
    *,
    tally: Tally | None = None,
    count: int | None = None,
    seconds: float | None = None,
    rate: float | None = None,
    concurrency: int = 4,
    udp_socket: str = "fresh",
    timeout: float = TIMEOUT,
    open_socket: OpenSocket = socket.socket,
    stop: threading.Event | None = None,
) -> Tally:
    """Clients of one kind, until `count` requests are made, `seconds` have passed or `stop` is set.

    Args:
        kind: `connections` makes a new TCP connection for each request, `streams` keeps one for each client,
            `udp` sends datagrams.
        target: family and address, see `target_of`.
        tally: where to count, for those who watch; a new one by default.
        count: requests in all.
        seconds: how long.
        rate: requests a second of all clients together; None: as fast as they can.
        concurrency: clients at the same time.
        udp_socket: `fresh` a socket for each datagram, `one` for all of a client, `connected` one connect()ed.
        timeout: seconds to wait for an answer.
        open_socket: makes a socket of a family and kind.
        stop: ends the load early.
    """
    if count is None and seconds is None and stop is None:
        raise ValueError("a load without an end: give count, seconds or stop")
    tally = tally or Tally()
    stop = stop or threading.Event()
    turns = _Turns(count, None if seconds is None else time.monotonic() + seconds, rate, stop)
    clients: dict[str, Callable[[_Run], None]] = {
        "connections": _connections,
        "streams": partial(_connections, stay=True),
        "udp": _datagrams,
    }
    run = _Run(target[0], target[1], tally, turns, udp_socket, timeout, open_socket)
    threads = [threading.Thread(target=clients[kind], args=(run,), daemon=True) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


@contextmanager
def meanwhile(calls: Iterable[Callable[..., object]]) -> Iterator[None]:
    """All of these at the same time for as long as the block lasts; each is given `stop`, the event that ends it."""
    stop = threading.Event()
    threads = [threading.Thread(target=call, kwargs={"stop": stop}) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class _Turns:
    """Who may send next, and when: bounds the number, the time and the rate of requests."""

    def __init__(self, count: int | None, until: float | None, rate: float | None, stop: threading.Event) -> None:
        self._left, self._until, self._gap, self._stop = count, until, 1 / rate if rate else 0.0, stop
        self._next = time.monotonic()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Wait for the next turn; False: it is over."""
        with self._lock:
            if self._stop.is_set() or self._left == 0:
                return False
            if self._left is not None:
                self._left -= 1
            now = time.monotonic()
            at = max(self._next, now)
            self._next = at + self._gap
        if self._until is not None and at >= self._until:
            return False
        return at <= now or not self._stop.wait(at - now)


@dataclass(frozen=True, slots=True)
class _Run:
    """What every client of one load shares."""

    family: int
    address: Address
    tally: Tally
    turns: _Turns
    udp_socket: str
    timeout: float
    open_socket: OpenSocket

    def socket(self, kind: int) -> socket.socket:
        made = self.open_socket(self.family, kind)
        made.settimeout(self.timeout)
        return made


def _connections(run: _Run, *, stay: bool = False) -> None:
    while run.turns.take():
        try:
            with run.socket(socket.SOCK_STREAM) as connection:
                start = time.monotonic()  # a socket may have had to be fetched
                connection.connect(run.address)
                connected = time.monotonic() - start
                if not stay:
                    run.tally.answer(ask_tcp(connection, close=True), connected)
                    continue
                run.tally.connects.append(connected)
                stream = Stream(connection, run.tally)
                stream.ask()
                while run.turns.take():
                    stream.ask()
        except OSError as error:
            run.tally.fail(error)


def _datagrams(run: _Run) -> None:
    with ExitStack() as stack:
        kept: socket.socket | None = None
        if run.udp_socket != "fresh":
            kept = stack.enter_context(run.socket(socket.SOCK_DGRAM))
            if run.udp_socket == "connected":
                kept.connect(run.address)
        backend: str | None = None
        while run.turns.take():
            start = time.monotonic()
            try:
                with nullcontext(kept) if kept else run.socket(socket.SOCK_DGRAM) as sender:
                    reply, source = ask_udp(sender, None if run.udp_socket == "connected" else run.address)
                if source == run.address:
                    moved = kept is not None and backend not in {None, reply.pod}
                    run.tally.answer(reply, waited=time.monotonic() - start if kept else 0.0, moved=moved)
                    backend = reply.pod
                else:
                    run.tally.fail(WrongSource(source))
            except OSError as error:
                run.tally.fail(error)


# Servers


class _Http(asyncio.Protocol):
    """Just enough of HTTP/1.1 (RFC 9112): Content-Length bodies, keep-alive, one request after another."""

    def __init__(self, pod: str) -> None:
        self.pod = pod
        self.buffer = b""
        self.body_left = 0
        self.received = 0
        self.request: tuple[str, bool] | None = None  # path, close afterwards
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while self.buffer or self.request:
            if self.request is None and not self._head():
                return
            taken = min(self.body_left, len(self.buffer))
            self.buffer = self.buffer[taken:]
            self.body_left -= taken
            self.received += taken
            if self.body_left:
                return
            self._answer()

    def _head(self) -> bool:
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            if len(self.buffer) > 16384:
                self.transport.abort()
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        request_line = first.split(" ")
        length = fields.get("content-length", "0")
        if len(request_line) != 3 or not length.isdigit() or int(length) > _LIMIT:
            self.transport.abort()
            return False
        self.request = (request_line[1], fields.get("connection", "").lower() == "close")
        self.buffer, self.body_left, self.received = rest, int(length), 0
        return True

    def _answer(self) -> None:
        assert self.request is not None
        path, close = self.request
        self.request = None
        size = path.removeprefix("/bytes/")
        if size != path and size.isdigit() and int(size) <= _LIMIT:
            kind, body = "application/octet-stream", bytes(int(size))
        else:
            peer, local = (self.transport.get_extra_info(name)[:2] for name in ("peername", "sockname"))
            kind, body = "application/json", msgspec.json.encode(Reply(self.pod, peer, local, self.received)) + b"\n"
        last = "close" if close else "keep-alive"
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: {last}\r\n\r\n"
        self.transport.write(head.encode() + body)
        if close:
            self.transport.close()


class _Udp(asyncio.DatagramProtocol):
    """Says to every datagram who got it and from whom."""

    def __init__(self, pod: str) -> None:
        self.pod = pod
        self.transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)  # no subclass of it before Python 3.12

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        local = self.transport.get_extra_info("sockname")[:2]
        self.transport.sendto(msgspec.json.encode(Reply(self.pod, addr[:2], local, len(data))) + b"\n", addr)


async def _serve(places: Sequence[tuple[str, Path, Sequence[str]]], http: Sequence[int], udp: Sequence[int]) -> None:
    loop = asyncio.get_running_loop()
    for pod, path, addresses in places:
        for address in addresses:
            for port in http:
                sock = _bound(path, address, port, socket.SOCK_STREAM)
                await loop.create_server(lambda pod=pod: _Http(pod), sock=sock, backlog=1024)  # type: ignore[misc]
            for port in udp:
                sock = _bound(path, address, port, socket.SOCK_DGRAM)
                await loop.create_datagram_endpoint(lambda pod=pod: _Udp(pod), sock=sock)  # type: ignore[misc]
    print(json.dumps({"serving": [pod for pod, _, _ in places], "http": [*http], "udp": [*udp]}), flush=True)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    await ended.wait()


def _bound(path: Path, address: str, port: int, kind: int) -> socket.socket:
    """A server socket at one address in the namespace at `path`.

    UDP needs the very address: the answer must leave from where the question went.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with namespace.inside(path):
        sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.bind((address, port))
    sock.setblocking(False)
    return sock


# Command line


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal, or make a load and print its result; returns 1 if a request of the load failed."""
    args = _parser().parse_args(argv)
    if args.action == "serve":
        asyncio.run(_serve(args.at, args.http, args.udp))
        return 0
    return _run_load(args)


def _run_load(args: argparse.Namespace) -> int:
    stop, tally, start = threading.Event(), Tally(), time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    worker = threading.Thread(
        target=load,
        args=(args.kind, args.target),
        kwargs={
            "tally": tally, "count": args.count, "seconds": args.seconds, "rate": args.rate, "stop": stop,
            "concurrency": args.concurrency, "udp_socket": args.socket, "timeout": args.timeout,
        },
    )  # fmt: skip
    worker.start()
    while worker.is_alive():
        worker.join(args.report)
        if worker.is_alive():
            _print({"seconds": round(time.monotonic() - start, 3)} | tally.report())
    _print({"seconds": round(time.monotonic() - start, 3), "final": True} | tally.report())
    return 1 if tally.failed else 0


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def _place(text: str) -> tuple[str, Path, list[str]]:
    name, _, rest = text.partition("=")
    path, *addresses = rest.split(",")
    if not name or not path or not addresses:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NAMESPACE,ADDRESS[,ADDRESS]")
    return name, Path(path), addresses


def _target(text: str) -> tuple[int, Address]:
    try:
        return target_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: give ADDRESS:PORT, as 10.96.0.10:80 or [fd96::10]:80") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("traffic", description="Real servers and clients for the lab.")
    actions = parser.add_subparsers(dest="action", required=True)
    serve = actions.add_parser("serve", help="HTTP and UDP servers that say who they are")
    serve.add_argument("--at", type=_place, action="append", required=True, metavar="NAME=NAMESPACE,ADDRESS[,ADDRESS]")
    serve.add_argument("--http", type=int, action="append", default=[], metavar="PORT")
    serve.add_argument("--udp", type=int, action="append", default=[], metavar="PORT")
    loads = actions.add_parser("load", help="clients that count answers, failures and backends")
    loads.add_argument("kind", choices=KINDS)
    loads.add_argument("target", type=_target, metavar="ADDRESS:PORT")
    loads.add_argument("--count", type=int, help="requests in all")
    loads.add_argument("--seconds", type=float, help="how long (default: until SIGTERM)")
    loads.add_argument("--rate", type=float, help="requests a second of all clients together (default: no limit)")
    loads.add_argument("--concurrency", type=int, default=4, help="clients at the same time (default: 4)")
    loads.add_argument("--socket", choices=UDP_SOCKETS, default="fresh", help="UDP: a socket for each datagram, or one")
    loads.add_argument(
        "--timeout", type=float, default=TIMEOUT, help=f"seconds to wait for an answer (default: {TIMEOUT})"
    )
    loads.add_argument("--report", type=float, default=0.5, help="seconds between two lines (default: 0.5)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
