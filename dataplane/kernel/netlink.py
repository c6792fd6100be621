"""Netlink: one codec for messages and attributes, one socket for requests, one for the kernel's reports.

All kernel interfaces that speak netlink use this module. The kernel handles the messages of one buffer in order and
answers each one that failed; only the last requests an acknowledgement, so that any number of changes takes one system
call each way. A message built through pyroute2's classes costs 300 to 700 us, here it is a few.

What the kernel refuses, or does not answer, is a `NetlinkFailed`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import socket
import struct
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Self

from hybrid_proxy.dataplane.errors import RIGHTS, DataplaneError, reason_of

# linux/netlink.h. pyroute2 has these numbers too, but its package imports all of itself (22 MB, 150 ms or more), and
# commands that only list what is programmed do without it.
ROUTE, SOCK_DIAG, XFRM, NETFILTER, GENERIC = 0, 4, 6, 12, 16
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP_INTR, NLM_F_DUMP = 0x1, 0x4, 0x10, 0x300
NLM_F_EXCL, NLM_F_CREATE, NLM_F_APPEND = 0x200, 0x400, 0x800
NLMSG_ERROR, NLMSG_DONE, NLMSG_MIN_TYPE = 2, 3, 16
NESTED: Final = 0x8000
NET_BYTEORDER: Final = 0x4000
TYPE_MASK: Final = 0x3FFF
SOL_NETLINK, NETLINK_CAP_ACK = 270, 10
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33

SEND_BUFFER: Final = 1 << 17  # bytes; every kernel's default for a socket is larger
RECEIVE_BUFFER: Final = 4 << 20  # bytes that may be pending
DATAGRAM: Final = 1 << 16  # bytes; the kernel puts at most 32 KiB of a dump into one
# The requests of one burst. Each failed request takes receive buffer for its answer.
BURST_BYTES, BURST_MESSAGES = 1 << 17, 256
MARGIN: Final = 1 << 16  # bytes of the send buffer that the kernel accounts in addition to the messages
ANSWER_SECONDS: Final = 30.0
STOP_SECONDS: Final = 5.0  # within which `Events.until` notices that it should stop
AF: Final = {4: socket.AF_INET, 6: socket.AF_INET6}
HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
ATTRIBUTE: Final = struct.Struct("=HH")  # length, type
NFGEN: Final = struct.Struct(">BBH")  # family, version, resource: before the attributes of NETFILTER's messages
_INT: Final = struct.Struct("=i")
OWN_RANGE: Final = 1 << 31  # no number of a process is in this half of the ports
_ports: Final = itertools.count(int.from_bytes(os.urandom(3), "big"))


class NetlinkFailed(DataplaneError):
    """The kernel refused a request, or did not answer.

    `code` is positive. Codes from 4096 on are those of ip_set.
    """

    def __init__(self, what: str, code: int) -> None:
        text = os.strerror(code) if code < 4096 else f"ip_set error {code}"
        super().__init__(reason_of(OSError(code, text), what, RIGHTS))
        self.what = what
        self.code = code


class Message(NamedTuple):
    """One request: type, body after the header, flags in addition to NLM_F_REQUEST, and a description for errors."""

    kind: int
    payload: bytes
    flags: int = 0
    what: str = "a netlink request"


def attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return ATTRIBUTE.pack(length, kind) + value + bytes(-length % 4)


def nested(kind: int, *parts: bytes) -> bytes:
    return attribute(kind | NESTED, b"".join(parts))


def string(kind: int, value: str) -> bytes:
    """An attribute of text with its zero."""
    return attribute(kind, value.encode() + b"\0")


def parcels(parts: Iterable[bytes], room: int) -> Iterator[list[bytes]]:
    """Yields these parts together, as many at a time as `room` bytes hold: an attribute's length has 16 bits."""
    kept: list[bytes] = []
    size = 0
    for part in parts:
        if size + len(part) > room:
            yield kept
            kept, size = [], 0
        kept.append(part)
        size += len(part)
    if kept:
        yield kept


def text(value: bytes) -> str:
    """Returns the text of such an attribute."""
    return value.rstrip(b"\0").decode(errors="replace")


def attributes(data: bytes, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields type (without its flags) and value of each attribute from `start` on."""
    end = len(data)
    while start + 4 <= end:
        length, kind = ATTRIBUTE.unpack_from(data, start)
        if length < 4:
            return
        yield kind & TYPE_MASK, data[start + 4 : start + length]
        start += (length + 3) & ~3


def message(kind: int, flags: int, body: bytes, number: int = 0) -> bytes:
    """Returns one message, padded, with the sequence number that its answers will have."""
    length = 16 + len(body)
    return HEADER.pack(length, kind, flags, number, 0) + body + bytes(-length % 4)


def messages(data: bytes) -> Iterator[tuple[int, int, int, int, bytes]]:
    """Yields type, flags, sequence number, port and body of each message of one datagram."""
    start, end = 0, len(data)
    while start + 16 <= end:
        length, kind, flags, number, port = HEADER.unpack_from(data, start)
        if length < 16:
            return
        yield kind, flags, number, port, data[start + 16 : start + length]
        start += (length + 3) & ~3


def _error_of(body: bytes) -> int:
    """The error number, positive, in the body of NLMSG_ERROR or NLMSG_DONE; 0: success."""
    return -int(_INT.unpack_from(body)[0]) if len(body) >= _INT.size else 0


class Closing:
    """A socket that is closed at the end of a `with` block."""

    _socket: socket.socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()


class Netlink(Closing):
    """A socket for requests, of the network namespace that the calling thread is in now. A context manager.

    Args:
        protocol: ROUTE, SOCK_DIAG, XFRM, NETFILTER or GENERIC.
        seconds: how long the kernel may take for an answer.

    Raises:
        OSError: this kernel does not have that protocol.
    """

    def __init__(self, protocol: int, seconds: float = ANSWER_SECONDS) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._bind()
        self._socket.settimeout(seconds)
        self._socket.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)  # errors do not repeat the request
        with contextlib.suppress(PermissionError):  # the default suffices for small requests, such as dumps
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
        self._room = SEND_BUFFER
        self._sequence = 0
        self.port: int = self._socket.getsockname()[0]

    def _bind(self) -> None:
        """Bind to a port that none of our sockets had before.

        The kernel would choose the number of our process whenever it is free. When a socket is closed, nf_tables
        removes the tables that its port owns (nft_rcv_nl_event), a moment after that port has become free: the tables
        of the next socket with that port would be removed, too.
        """
        while True:
            try:
                self._socket.bind((OWN_RANGE + next(_ports) % OWN_RANGE, 0))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return

    def send(self, requests: Sequence[Message]) -> list[tuple[int, int]]:
        """Send all requests, which the kernel handles in their order, whether or not others fail.

        Returns:
            (position, error number) of each one that the kernel refused.
        """
        failed: list[tuple[int, int]] = []
        start = 0
        while start < len(requests):
            end, size = start, 0
            while end < len(requests) and end - start < BURST_MESSAGES and size < BURST_BYTES:
                size += len(requests[end].payload) + HEADER.size
                end += 1
            first = self._write(requests[start:end], acknowledge=end - start - 1)
            answers = self._answers(first, first + end - start - 1, requests[start].what)
            failed += [(start + position, code) for position, code in answers if code]
            start = end
        return failed

    def change(self, requests: Sequence[Message], ignored: Collection[tuple[int, int]] = ()) -> None:
        """Send all requests, without an answer but those (kind and error number) that are ignored.

        Raises:
            NetlinkFailed: the kernel refused one; the others are done.
        """
        for position, code in self.send(requests):
            if (requests[position].kind, code) not in ignored:
                raise NetlinkFailed(requests[position].what, code)

    def transact(self, begin: Message, requests: Sequence[Message], end: Message) -> tuple[int, int] | None:
        """Send requests as one transaction between two messages of the protocol: all of them take effect or none.

        Returns:
            None, or the position and the error number of a request that was refused; -1: the transaction as a whole.
        """
        # The answer to the last request says that all were handled. The end itself is answered since Linux 6.10 only.
        first = self._write([begin, *requests, end], acknowledge=len(requests))
        for position, code in self._answers(first, first + len(requests), begin.what):
            if code:
                return position - 1, code
        return None

    def dump(self, request: Message, *, consistent: bool = False) -> Iterator[bytes]:
        """Yields the body of each answer to a dump request; read it to the end.

        Args:
            request: has NLM_F_DUMP among its flags.
            consistent: refuse an answer that mixes two states, with EINTR at its end.
        """
        wanted = self._write([request])
        seen = 0
        while True:
            for kind, flags, number, _, body in self._read(request.what):
                if number != wanted:
                    continue  # the rest of an answer that was not read to its end
                seen |= flags
                if kind >= NLMSG_MIN_TYPE:
                    yield body
                elif kind in (NLMSG_ERROR, NLMSG_DONE):
                    code = _error_of(body)
                    if code > 0 or (consistent and seen & NLM_F_DUMP_INTR):
                        raise NetlinkFailed(request.what, code if code > 0 else errno.EINTR)
                    return

    def get(self, request: Message) -> bytes | None:
        """Returns the body of the answer to a request for one object; None: there is no such object (ENOENT)."""
        wanted = self._write([request])
        while True:
            for kind, _, number, _, body in self._read(request.what):
                if number != wanted:
                    continue
                if kind != NLMSG_ERROR:
                    return body
                code = _error_of(body)
                if code in (0, errno.ENOENT):
                    return None
                raise NetlinkFailed(request.what, code)

    def _write(self, requests: Sequence[Message], acknowledge: int = -1) -> int:
        """Send requests in one buffer; the one at `acknowledge` requests an answer. Returns the first number."""
        if self._sequence + len(requests) >= 1 << 32:
            self._sequence = 0
        first = self._sequence + 1
        self._sequence += len(requests)
        parts = []
        for position, (kind, payload, more, _) in enumerate(requests):
            flags = NLM_F_REQUEST | more | (NLM_F_ACK if position == acknowledge else 0)
            parts.append(message(kind, flags, payload, first + position))
        self._send(b"".join(parts), requests[0].what)
        return first

    def _send(self, data: bytes, what: str) -> None:
        try:
            if len(data) + MARGIN > self._room:
                self._room = len(data) + MARGIN
                self._socket.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, self._room)
            self._socket.send(data)
        except OSError as error:
            raise NetlinkFailed(what, error.errno or errno.ETIMEDOUT) from error

    def _read(self, what: str) -> Iterator[tuple[int, int, int, int, bytes]]:
        try:
            return messages(self._socket.recv(DATAGRAM))
        except OSError as error:  # a timeout has no number
            raise NetlinkFailed(what, error.errno or errno.ETIMEDOUT) from error

    def _answers(self, first: int, last: int, what: str) -> Iterator[tuple[int, int]]:
        """Yields position and error number (0: success) of each answered request, until the last one is answered."""
        while True:
            for kind, _, number, _, body in self._read(what):
                if kind != NLMSG_ERROR or not first <= number <= last:
                    continue
                yield number - first, _error_of(body)
                if number == last:
                    return


class Events(Closing):
    """The kernel's reports to multicast groups of the calling thread's network namespace. A context manager.

    pyroute2's `IPRoute().bind()` decodes each report, which takes 70 us where reading one takes 2; watchers here only
    need to know that something changed.

    Args:
        protocol: ROUTE or NETFILTER.
        groups: bits, one for each of the first 32 groups.
        room: bytes of reports that may wait; 0: as the system has it.

    Raises:
        OSError: this kernel does not have that protocol, or the caller may not listen.
    """

    def __init__(self, protocol: int, groups: int, room: int = 0) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        try:
            if room:
                self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, room)
            self._socket.bind((0, groups))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._poll = select.poll()  # select(2) takes no descriptor beyond 1023
        self._poll.register(self._socket, select.POLLIN)

    def read(self) -> bytes | None:
        """Returns the next datagram, empty when none waits; None: there were too many, and some are lost."""
        try:
            return self._socket.recv(DATAGRAM)
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            return None

    def discard(self) -> bool:
        """Discard all pending reports. Returns whether there were any; the caller then reads the state itself."""
        found = False
        while self.read() != b"":
            found = True
        return found

    def until(self, stop: threading.Event) -> Iterator[bytes | None]:
        """Yields the results of `read` until `stop` is set, which is noticed within seconds: to look costs a wakeup."""
        while not stop.is_set():
            if self._poll.poll(1000 * STOP_SECONDS) and (data := self.read()) != b"":
                yield data
