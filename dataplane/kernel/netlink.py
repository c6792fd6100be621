"""Netlink: messages and attributes in bytes, many messages in one system call, and dumps.

Every door to the kernel that speaks netlink packs and unpacks with what is here. The kernel takes the messages of one
buffer in order and answers each one that failed; only the last is asked to be acknowledged. Building a message through
pyroute2's classes costs 300 to 700 us each, in one buffer it is a few.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from dataplane.errors import DataplaneError

__all__ = [
    "ATTRIBUTE", "GENERIC", "HEADER", "NESTED", "NETFILTER", "NET_BYTEORDER", "NFGEN", "NLMSG_DONE", "NLMSG_ERROR",
    "NLM_F_ACK", "NLM_F_APPEND", "NLM_F_CREATE", "NLM_F_DUMP", "NLM_F_DUMP_INTR", "NLM_F_REQUEST", "ROUTE",
    "SOCK_DIAG", "SO_RCVBUFFORCE", "SO_SNDBUFFORCE", "Message", "Netlink", "NetlinkFailed", "attribute", "attributes",
    "error_of", "heard", "message", "messages", "nested", "string",
]  # fmt: skip

# linux/netlink.h
ROUTE, SOCK_DIAG, NETFILTER, GENERIC = 0, 4, 12, 16
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP_INTR, NLM_F_DUMP = 0x1, 0x4, 0x10, 0x300
NLM_F_CREATE, NLM_F_APPEND = 0x400, 0x800
NLMSG_ERROR, NLMSG_DONE = 2, 3
NESTED: Final = 0x8000
NET_BYTEORDER: Final = 0x4000
TYPE_MASK: Final = 0x3FFF
SOL_NETLINK, NETLINK_CAP_ACK = 270, 10
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
BUFFER: Final = 1 << 20
BURST_BYTES, BURST_MESSAGES = 1 << 17, 256  # what one call carries: each failed message takes room for its answer
ANSWER_SECONDS: Final = 30.0
HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
ATTRIBUTE: Final = struct.Struct("=HH")  # length, type
NFGEN: Final = struct.Struct(">BBH")  # family, version, resource: before the attributes of NETFILTER's messages
_INT: Final = struct.Struct("=i")


class NetlinkFailed(DataplaneError):
    """The kernel refused a message.

    Args:
        what: what was asked for, in words.
        code: the error number, positive; codes from 4096 on are those of ip_set.
    """

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what}: {os.strerror(code) if code < 4096 else f'ip_set error {code}'}")
        self.code = code


class Message(NamedTuple):
    """One request: type, flags beside NLM_F_REQUEST, and what follows the header."""

    kind: int
    payload: bytes
    flags: int = 0


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded."""
    length = 4 + len(value)
    return ATTRIBUTE.pack(length, kind) + value + bytes(-length % 4)


def nested(kind: int, *parts: bytes) -> bytes:
    """An attribute of attributes."""
    return attribute(kind | NESTED, b"".join(parts))


def string(kind: int, value: str) -> bytes:
    """An attribute of text with its zero."""
    return attribute(kind, value.encode() + b"\0")


def attributes(data: bytes, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Type (without its flags) and value of each attribute from `start` on."""
    end = len(data)
    while start + 4 <= end:
        length, kind = ATTRIBUTE.unpack_from(data, start)
        if length < 4:
            return
        yield kind & TYPE_MASK, data[start + 4 : start + length]
        start += (length + 3) & ~3


def message(kind: int, flags: int, body: bytes, number: int = 0) -> bytes:
    """One message, padded, with the sequence number that its answers will have."""
    length = 16 + len(body)
    return HEADER.pack(length, kind, flags, number, 0) + body + bytes(-length % 4)


def messages(data: bytes) -> Iterator[tuple[int, int, int, int, bytes]]:
    """Type, flags, sequence number, port and body of each message of one datagram."""
    start, end = 0, len(data)
    while start + 16 <= end:
        length, kind, flags, number, port = HEADER.unpack_from(data, start)
        if length < 16:
            return
        yield kind, flags, number, port, data[start + 16 : start + length]
        start += (length + 3) & ~3


def heard(sock: socket.socket, seconds: float) -> bool:
    """Whether there is something to receive, or an error, within so many seconds; for any number of a descriptor."""
    poll = select.poll()  # select(2) knows none beyond 1023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def error_of(body: bytes) -> int:
    """The error number, positive, in the body of NLMSG_ERROR or NLMSG_DONE; 0: done as asked."""
    return -int(_INT.unpack_from(body)[0]) if len(body) >= _INT.size else 0


class Netlink:
    """A socket of the network namespace that the calling thread is in now."""

    def __init__(self, protocol: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket.bind((0, 0))
        self._socket.settimeout(ANSWER_SECONDS)
        self._socket.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
        for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, option, BUFFER)
            except PermissionError:  # the default sizes still carry small requests, such as dumps
                break
        self._sequence = 0

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def send(self, requests: Sequence[Message]) -> list[tuple[int, int]]:
        """Have all messages done, in their order, whether or not others fail.

        Returns:
            (position, error number) of each one that the kernel refused.

        Raises:
            OSError: the kernel did not answer.
        """
        failed: list[tuple[int, int]] = []
        start = 0
        while start < len(requests):
            end, size = start, 0
            while end < len(requests) and end - start < BURST_MESSAGES and size < BURST_BYTES:
                size += len(requests[end].payload) + HEADER.size
                end += 1
            failed += self._burst(requests, start, end)
            start = end
        return failed

    def _burst(self, requests: Sequence[Message], start: int, end: int) -> list[tuple[int, int]]:
        first = self._sequence + 1
        self._sequence += end - start
        last = self._sequence
        parts = []
        for number, (kind, payload, more) in enumerate(requests[start:end], first):
            flags = NLM_F_REQUEST | more | (NLM_F_ACK if number == last else 0)
            parts.append(message(kind, flags, payload, number))
        self._socket.send(b"".join(parts))
        failed: list[tuple[int, int]] = []
        while True:
            for kind, _, number, _, body in messages(self._socket.recv(BUFFER)):
                if kind != NLMSG_ERROR or not first <= number <= last:
                    continue
                code = error_of(body)
                if code:
                    failed.append((start + number - first, code))
                if number == last:
                    return failed

    def dump(self, request: Message, what: str) -> Iterator[bytes]:
        """What follows the header of each answer to a dump request, or to one that is answered once.

        Raises:
            NetlinkFailed: the kernel refused; `what` is said.
            OSError: the kernel did not answer.
        """
        self._sequence += 1
        wanted = self._sequence
        flags = NLM_F_REQUEST | NLM_F_ACK | request.flags
        self._socket.send(message(request.kind, flags, request.payload, wanted))
        while True:
            for kind, _, number, _, body in messages(self._socket.recv(BUFFER)):
                if number != wanted:
                    continue  # the rest of a dump that nobody read to its end
                if kind in (NLMSG_ERROR, NLMSG_DONE):
                    code = error_of(body)
                    if code > 0:
                        raise NetlinkFailed(what, code)
                    return
                yield body
