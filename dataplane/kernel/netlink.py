"""Many netlink messages in one system call, and dumps without a class for each message.

The kernel takes the messages of one buffer in order and answers each one that failed; only the last is asked to
be acknowledged. Building a message through pyroute2's classes costs 300 to 700 us each, in one buffer it is a few.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from dataplane.errors import DataplaneError

__all__ = ["NESTED", "NETFILTER", "ROUTE", "GENERIC", "Message", "Netlink", "NetlinkFailed", "attribute", "attributes"]

ROUTE, NETFILTER, GENERIC = 0, 12, 16  # linux/netlink.h
REQUEST, ACK, DUMP = 0x1, 0x4, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
NESTED: Final = 0x8000
NET_BYTEORDER: Final = 0x4000
TYPE_MASK: Final = 0x3FFF
SOL_NETLINK, NETLINK_CAP_ACK = 270, 10
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
BUFFER: Final = 1 << 20
BURST_BYTES, BURST_MESSAGES = 1 << 17, 256  # what one call carries: each failed message takes room for its answer
ANSWER_SECONDS: Final = 30.0
_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ATTRIBUTE: Final = struct.Struct("=HH")
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
    return _ATTRIBUTE.pack(len(value) + 4, kind) + value + b"\0" * (-len(value) % 4)


def attributes(data: bytes, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Type (without its flags) and value of each attribute from `start` on."""
    end = len(data)
    while start + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, start)
        if length < 4:
            return
        yield kind & TYPE_MASK, data[start + 4 : start + length]
        start += (length + 3) & ~3


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

    def send(self, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Have all messages done, in their order, whether or not others fail.

        Returns:
            (position, error number) of each one that the kernel refused.

        Raises:
            OSError: the kernel did not answer.
        """
        failed: list[tuple[int, int]] = []
        start = 0
        while start < len(messages):
            end, size = start, 0
            while end < len(messages) and end - start < BURST_MESSAGES and size < BURST_BYTES:
                size += len(messages[end].payload) + _HEADER.size
                end += 1
            failed += self._burst(messages, start, end)
            start = end
        return failed

    def _burst(self, messages: Sequence[Message], start: int, end: int) -> list[tuple[int, int]]:
        first = self._sequence + 1
        self._sequence += end - start
        last = self._sequence
        parts = []
        for number, (kind, payload, more) in enumerate(messages[start:end], first):
            flags = REQUEST | more | (ACK if number == last else 0)
            padding = b"\0" * (-len(payload) % 4)
            parts.append(_HEADER.pack(_HEADER.size + len(payload), kind, flags, number, 0) + payload + padding)
        self._socket.send(b"".join(parts))
        failed: list[tuple[int, int]] = []
        while True:
            for kind, number, data in self._received():
                if kind != NLMSG_ERROR or not first <= number <= last:
                    continue
                code = -_INT.unpack_from(data)[0]
                if code:
                    failed.append((start + number - first, code))
                if number == last:
                    return failed

    def dump(self, message: Message, what: str) -> Iterator[bytes]:
        """What follows the header of each answer to a dump request, or to one that is answered once.

        Raises:
            NetlinkFailed: the kernel refused; `what` is said.
            OSError: the kernel did not answer.
        """
        self._sequence += 1
        wanted = self._sequence
        flags = REQUEST | ACK | message.flags
        size = _HEADER.size + len(message.payload)
        self._socket.send(_HEADER.pack(size, message.kind, flags, wanted, 0) + message.payload)
        while True:
            for kind, number, data in self._received():
                if number != wanted:
                    continue  # the rest of a dump that nobody read to its end
                if kind in (NLMSG_ERROR, NLMSG_DONE):
                    code = -_INT.unpack_from(data)[0] if len(data) >= _INT.size else 0
                    if code > 0:
                        raise NetlinkFailed(what, code)
                    return
                yield data

    def _received(self) -> list[tuple[int, int, bytes]]:
        """Type, sequence number and payload of each message of one datagram."""
        data = self._socket.recv(BUFFER)
        found = []
        start = 0
        while start + _HEADER.size <= len(data):
            length, kind, _, number, _ = _HEADER.unpack_from(data, start)
            if length < _HEADER.size:
                break
            found.append((kind, number, data[start + _HEADER.size : start + length]))
            start += (length + 3) & ~3
        return found
