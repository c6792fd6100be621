"""nf_tables over netlink: batches of messages as one transaction, and dumps.

For whoever writes many elements or changes few of many: nothing is parsed, nothing but what is asked for is read.
Bodies of messages are built by the caller out of `number` and what `netlink` has; numbers of messages and attributes
are those of linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Self

from dataplane.errors import DataplaneError
from dataplane.kernel import netlink
from dataplane.kernel.netlink import (
    NETFILTER,
    NFGEN,
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_DUMP_INTR,
    NLM_F_REQUEST,
    NLMSG_DONE,
    NLMSG_ERROR,
    SO_RCVBUFFORCE,
    SO_SNDBUFFORCE,
    error_of,
)
from dataplane.kernel.nfmonitor import OWN_PORTS

__all__ = ["NFPROTO", "Message", "Nfnetlink", "NftablesError", "attributes", "number", "number64"]

SUBSYSTEM: Final = 10 << 8
BATCH_BEGIN, BATCH_END = 0x10, 0x11
GETGEN: Final = 16
NFPROTO: Final = {4: 2, 6: 10}
_BE32, _BE64 = struct.Struct(">I"), struct.Struct(">Q")
_TIMEOUT: Final = 30.0
_ATTEMPTS: Final = 20
_REST: Final = 1 << 16  # of the send buffer: what is in it besides the message


class NftablesError(DataplaneError):
    """The kernel refused a transaction; nothing of it is in effect.

    Args:
        code: errno.
        what: the message that was refused.
    """

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"the kernel refused {what}: {os.strerror(code)}")
        self.code = code
        self.what = what


class Message(NamedTuple):
    """One message of a batch: NFT_MSG_..., its flags, the family (NFPROTO_...), attributes, and what it is in words."""

    kind: int
    flags: int
    family: int
    body: bytes
    what: str


def number(kind: int, value: int) -> bytes:
    """32 bits in network order, as nf_tables has almost everything."""
    return netlink.attribute(kind, _BE32.pack(value & 0xFFFFFFFF))


def number64(kind: int, value: int) -> bytes:
    """64 bits in network order."""
    return netlink.attribute(kind, _BE64.pack(value))


def attributes(data: bytes) -> dict[int, bytes]:
    """The attributes of a body; of several with one number the last."""
    return dict(netlink.attributes(data))


class Nfnetlink:
    """A socket of the calling thread's network namespace. A context manager."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETFILTER)
        self._socket.bind((0, 0))
        self._socket.settimeout(_TIMEOUT)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 4 << 20)
        self._sequence = 0
        self._room = 0
        self.port: int = self._socket.getsockname()[0]
        OWN_PORTS.add(self.port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the socket back."""
        OWN_PORTS.discard(self.port)
        self._socket.close()

    def generation(self) -> int:
        """The number of the ruleset's generation: it changes with every transaction of anybody (16 bits count)."""
        for found in self._ask(GETGEN, 0, b"", NLM_F_REQUEST):
            return int.from_bytes(attributes(found).get(1, b""), "big")
        return 0

    def commit(self, messages: Sequence[Message]) -> None:
        """Send messages as one transaction: all of them or none.

        Raises:
            NftablesError: the kernel refused one; says which.
        """
        if not messages:
            return
        parts = [self._message(BATCH_BEGIN, NLM_F_REQUEST, 0, b"", 10)]
        first = self._sequence
        for message in messages:
            # The answer to the last one says that all were looked at; the end itself is answered since Linux 6.10 only.
            flags = NLM_F_REQUEST | message.flags | (NLM_F_ACK if message is messages[-1] else 0)
            parts.append(self._message(SUBSYSTEM | message.kind, flags, message.family, message.body))
        last = self._sequence
        parts.append(self._message(BATCH_END, NLM_F_REQUEST, 0, b"", 10))
        data = b"".join(parts)
        if len(data) + _REST > self._room:
            self._room = len(data) + _REST
            self._socket.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, self._room)
        self._drain()
        self._socket.send(data)
        self._await(first, last, messages)

    def dump(self, kind: int, family: int, body: bytes = b"") -> list[bytes]:
        """The bodies of all objects of one kind (NFT_MSG_GET...), from one generation of the ruleset.

        Raises:
            NftablesError: refused, ENOENT where the table or set that was asked for is not there.
        """
        for _ in range(_ATTEMPTS):
            found = self._dump_once(kind, family, body)
            if found is not None:
                return found
        raise NftablesError(errno.EAGAIN, "to list a ruleset that changes all the time")

    def get(self, kind: int, family: int, body: bytes) -> bytes | None:
        """The body of one object, None where there is none."""
        try:
            return next(iter(self._ask(kind, family, body, NLM_F_REQUEST)), None)
        except NftablesError as error:
            if error.code == errno.ENOENT:
                return None
            raise

    def _message(self, kind: int, flags: int, family: int, body: bytes, resource: int = 0) -> bytes:
        self._sequence = self._sequence % 0x7FFFFFFF + 1
        return netlink.message(kind, flags, NFGEN.pack(family, 0, resource) + body, self._sequence)

    def _drain(self) -> None:
        """What an earlier, interrupted conversation left."""
        self._socket.setblocking(False)
        try:
            while self._socket.recv(1 << 16):
                pass
        except OSError:
            pass
        finally:
            self._socket.settimeout(_TIMEOUT)

    def _await(self, first: int, last: int, messages: Sequence[Message]) -> None:
        """The first error refuses everything; without one the answer to the last message is the end."""
        while True:
            for kind, _, sequence, _, body in netlink.messages(self._receive()):
                if kind != NLMSG_ERROR:
                    continue
                code = error_of(body)
                index = sequence - first - 1
                if code:
                    what = messages[index].what if 0 <= index < len(messages) else "a transaction"
                    raise NftablesError(code, what)
                if sequence == last:
                    return

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(1 << 20)
        except TimeoutError as error:
            raise NftablesError(errno.ETIMEDOUT, "to answer on netlink") from error

    def _ask(self, kind: int, family: int, body: bytes, flags: int) -> Iterator[bytes]:
        """One object: its message, or an error."""
        self._drain()
        self._socket.send(self._message(SUBSYSTEM | kind, flags, family, body))
        for answered, _, _, _, told in netlink.messages(self._receive()):
            if answered != NLMSG_ERROR:
                yield told[NFGEN.size :]
            elif code := error_of(told):
                raise NftablesError(code, "a question")
            return

    def _dump_once(self, kind: int, family: int, body: bytes) -> list[bytes] | None:
        """None: the ruleset changed meanwhile."""
        self._drain()
        self._socket.send(self._message(SUBSYSTEM | kind, NLM_F_REQUEST | NLM_F_DUMP, family, body))
        found: list[bytes] = []
        interrupted = False
        while True:
            for answered, flags, _, _, told in netlink.messages(self._receive()):
                interrupted = interrupted or bool(flags & NLM_F_DUMP_INTR)
                if answered in {NLMSG_DONE, NLMSG_ERROR}:
                    code = error_of(told)
                    if code in {errno.EINTR, errno.EAGAIN} or interrupted:
                        return None
                    if code:
                        raise NftablesError(code, "a listing")
                    return found
                found.append(told[NFGEN.size :])
