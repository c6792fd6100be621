"""Real connections to backends and to the Service, from the node and from a pod of it, all at the same time.

Each is one that a client could make: it is closed as soon as something was answered. The kernel repeats a SYN after a
second, and says that it did; others are lost at random: SYNs follow that show it (`repeated`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
import ssl
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Final, NamedTuple

from hybrid_proxy.controller.commands.doctor.facts import NO_FREE_PORT, REACHED, Outcome, Place, Tried
from hybrid_proxy.dataplane.kernel.namespaces import inside
from hybrid_proxy.dataplane.table import Protocol, family_of, socket_text

HTTP_PORTS: Final = frozenset({80, 8080})
TLS_PORTS: Final = frozenset({443, 6443, 8443})
DNS_PORT: Final = 53
GREETING: Final = ("ssh", "mysql", "smtp", "ftp")  # the server speaks first
DNS_QUESTION: Final = struct.pack(">HHHHHH", 0x6870, 0x0100, 1, 0, 0, 0) + b"\0" + struct.pack(">HH", 2, 1)  # . NS
HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # RFC 9113, 3.4: preface and SETTINGS
UNREACHABLE: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM, errno.ENETDOWN, errno.EINVAL)
_OUTCOMES: Final[Mapping[int | None, Outcome]] = {
    errno.ECONNREFUSED: "refused", errno.ETIMEDOUT: "silent", **dict.fromkeys(UNREACHABLE, "unreachable")
}  # fmt: skip
MOST_BYTES: Final = 512 << 10  # of an answer: more shows nothing new
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)(?=\r\n).*?\r\n\r\n", re.IGNORECASE | re.DOTALL)
REPEATS, REPEAT_SECONDS = 5, 0.9  # before the kernel repeats a SYN itself
MOST_REPEATED: Final = 40
_INFO: Final = struct.Struct("=B99xI")  # of struct tcp_info the state, and how many segments were sent again
_ESTABLISHED: Final = 1
_KIND: Final = {"TCP": socket.SOCK_STREAM, "UDP": socket.SOCK_DGRAM, "SCTP": socket.SOCK_STREAM}


class Speech(NamedTuple):
    """The first bytes of a client, which make a server answer; without `waits` nobody can tell whether it does."""

    data: bytes = b""
    waits: bool = False
    name: str = ""  # in words


class Origin(NamedTuple):
    """A place where connections begin; `path` is that of a pod's network namespace, empty: the node's own.

    Where an address of it was `named`, connections begin there alone.
    """

    place: Place
    path: str
    addresses: tuple[str, ...]
    named: str = ""

    def address(self, family: int) -> str:
        known = (self.named,) if self.named in self.addresses else self.addresses
        return next((each for each in known if family_of(each) == family), "")


class Attempt(NamedTuple):
    """One connection to try."""

    origin: Origin
    via: str  # "backend" or "service"
    address: str
    port: int
    protocol: str
    speech: Speech
    service_port: str  # namespace/name:port
    number: int = 0  # among those that repeat it


def speech_of(port_name: str, port: int, protocol: str, *, path: str | None = None, host: str = "") -> Speech:
    """Return what to say at a port of this name and number; `path` (of HTTP) overrules both.

    DNS is asked by UDP alone: what listens by TCP may be anything, and a wrong guess looks like a server that hangs.
    `port_name` is that of the Service's port: the application protocol begins it by custom (`http-admin`, `grpc`).
    """
    word = port_name.lower().replace("_", "-").partition("-")[0]
    if protocol == "UDP":
        return Speech(DNS_QUESTION, waits=True, name="DNS") if word == "dns" or port == DNS_PORT else Speech()
    if protocol != "TCP":
        return Speech()
    if path is not None or word in ("http", "web", "metrics"):
        return _http(path or "/", host)
    if word in ("grpc", "h2c", "http2"):
        return Speech(HTTP2, waits=True, name="an HTTP/2 preface")
    if word in GREETING:
        return Speech(waits=True)
    if word in ("https", "tls") or port in TLS_PORTS:
        return Speech(_client_hello(host), waits=True, name="a TLS ClientHello")
    return _http("/", host) if port in HTTP_PORTS else Speech()


def _http(path: str, host: str) -> Speech:
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: hybrid-proxy-doctor\r\nConnection: close\r\n\r\n"
    return Speech(request.encode(), waits=True, name=f"GET {path}")


def _client_hello(host: str) -> bytes:
    """The first message of a TLS handshake, which any server answers, if only with an alert."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent or believed; only whether somebody answers counts
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=host or None)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def try_all(attempts: Sequence[Attempt], seconds: float) -> dict[Attempt, Tried]:
    """Make all connections at once; each has so many seconds to be accepted, and as many for its answer."""
    opened: list[tuple[Attempt, socket.socket | OSError]] = []
    for origin in dict.fromkeys(attempt.origin for attempt in attempts):
        mine = [attempt for attempt in attempts if attempt.origin == origin]
        try:
            with inside(origin.path) if origin.path else nullcontext():
                opened += [(attempt, _open(attempt)) for attempt in mine]
        except OSError as error:  # the pod has just gone
            opened += [(attempt, error) for attempt in mine]
    return asyncio.run(_together(opened, seconds))


def repeated(tried: Mapping[Attempt, Tried]) -> dict[Attempt, Tried]:
    """Send SYNs that show whether packets are lost: to each backend one at a time until one looks lost, then several.

    Only these say how sure that is: of a segment that was lost twice, one attempt looks like a process that hangs. More
    to one that is well would fill the queue of a server that listens for five (listen(2)), as Python's does.
    """
    ones: dict[tuple[str, int], Attempt] = {}  # those of a pod, which pass more hooks than the node's own
    for one, each in tried.items():
        known = (one.address, one.port) in ones and one.origin.place == "node"
        if (one.via, one.protocol) == ("backend", "TCP") and each.outcome in REACHED and not known:
            ones[one.address, one.port] = one._replace(speech=Speech())
    syns, turn = dict[Attempt, Tried](), 0
    while not (lost := doubtful({**tried, **syns})) and ones and turn < REPEATS:
        turn += 1
        syns |= try_all([one._replace(number=-turn) for one in islice(ones.values(), MOST_REPEATED)], REPEAT_SECONDS)
    again = [one._replace(speech=Speech(), number=1 + number) for one in lost for number in range(REPEATS)]
    return syns | try_all(again, REPEAT_SECONDS)


def doubtful(tried: Mapping[Attempt, Tried]) -> list[Attempt]:
    """Return those that failed by silence, or sent a segment again; by a Service's address if none to its backends."""
    seen = [one for one, each in tried.items() if each.resent or each.outcome in ("silent", "mute", "stalled")]
    direct = {one.service_port for one in seen if one.via == "backend"}
    mine = (one for one in seen if one.protocol == "TCP" and (one.via == "backend" or one.service_port not in direct))
    return list(mine)[:MOST_REPEATED]


def _open(attempt: Attempt) -> socket.socket | OSError:
    family = socket.AF_INET6 if family_of(attempt.address) == 6 else socket.AF_INET
    protocol = int(Protocol[attempt.protocol])
    try:
        made = socket.socket(family, _KIND[attempt.protocol], protocol)
        if attempt.origin.named in attempt.origin.addresses:
            made.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: connect chooses it, as for clients
            made.bind((attempt.origin.named, 0))
    except OSError as error:
        return error
    made.setblocking(False)
    return made


async def _together(opened: Sequence[tuple[Attempt, socket.socket | OSError]], seconds: float) -> dict[Attempt, Tried]:
    tried = await asyncio.gather(*(_timed(attempt, made, seconds) for attempt, made in opened))
    return dict(zip((attempt for attempt, _ in opened), tried, strict=True))


async def _timed(attempt: Attempt, made: socket.socket | OSError, seconds: float) -> Tried:
    began = time.monotonic()
    detail, resent, client_port, heard = "", 0, 0, bytearray()
    try:
        if isinstance(made, OSError):
            raise made
        with made:
            try:
                outcome = await _converse(attempt, made, seconds, heard)
            finally:
                resent, client_port = _info(made)[1], made.getsockname()[1]
    except OSError as error:
        ports = f"{NO_FREE_PORT}: " * (error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL))
        outcome, detail = _OUTCOMES.get(error.errno, "failed"), ports + (error.strerror or str(error))
    return Tried(
        place=attempt.origin.place,
        source=attempt.origin.address(family_of(attempt.address)),
        via="service" if attempt.via == "service" else "backend",
        target=socket_text(attempt.address, attempt.port),
        protocol=attempt.protocol,
        outcome=outcome,
        seconds=round(time.monotonic() - began, 4),
        detail=detail or _bad_answer(attempt.speech, heard),
        port=attempt.service_port,
        resent=resent,
        client_port=client_port,
        sent=attempt.speech.name,
    )


async def _converse(attempt: Attempt, made: socket.socket, seconds: float, heard: bytearray) -> Outcome:
    """Connect, speak, and listen; the beginning of a whole answer is added to `heard`.

    Raises:
        OSError: it was not accepted.
    """
    loop = asyncio.get_running_loop()
    try:
        await asyncio.wait_for(loop.sock_connect(made, (attempt.address, attempt.port)), seconds)
    except TimeoutError:
        if _info(made)[0] != _ESTABLISHED:  # else this process was late
            return "silent"
    datagrams = made.type == socket.SOCK_DGRAM
    speech = attempt.speech
    try:
        if speech.data or datagrams:  # an empty datagram is one, too: a closed port answers it
            await loop.sock_sendall(made, speech.data) if speech.data else made.send(b"")
        elif not speech.waits:
            return "accepted"
        answer = await asyncio.wait_for(loop.sock_recv(made, 4096), seconds)
        if not datagrams and not await _is_whole(answer, made, seconds):
            return "stalled"
    except TimeoutError:
        return ("silent" if speech.waits else "sent") if datagrams else "mute"
    except ConnectionRefusedError:
        return "refused"
    except ConnectionError:
        return "reset"
    heard += answer
    return "answered" if answer or datagrams else "closed"


def _bad_answer(speech: Speech, answer: bytearray) -> str:
    """What came instead of what a GET asks for: an error of the server, or another protocol."""
    status = re.match(rb"HTTP/[0-9.]+ ([0-9]{3})", answer)
    if not answer or not speech.name.startswith("GET ") or (status and status[1] < b"500"):
        return ""
    return f"HTTP {status[1].decode()}" if status else "bytes that are no HTTP"


async def _is_whole(begin: bytes, made: socket.socket, seconds: float) -> bool:
    """Read an answer of HTTP to its end; False: a part of it did not come in time. Others have no known end."""
    head = _LENGTH.search(begin)
    left = min(MOST_BYTES, head.end() + int(head[1])) - len(begin) if head else 0
    while left > 0:
        try:
            more = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(made, 1 << 16), seconds)
        except TimeoutError:
            return False
        left -= len(more) or left
    return True


def _info(made: socket.socket) -> tuple[int, int]:
    """Return the state of a TCP connection, and how many segments were sent again; zeros: of another protocol."""
    if made.type == socket.SOCK_DGRAM or made.proto != socket.IPPROTO_TCP:
        return 0, 0
    state, resent = _INFO.unpack(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return state, resent
