"""Ends sockets of this namespace by sock_diag, named by their cookies: exact, whatever their addresses are.

pyroute2 has no SOCK_DESTROY; the two messages that are needed are built here.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Collection, Iterator

__all__ = ["end_datagram_sockets"]

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY, SOCK_DESTROY = 20, 21
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP = 0x1, 0x4, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
REQUEST = struct.Struct("=BBBBI")  # family, protocol, extensions, pad, states; an inet_diag_sockid follows
SOCKET_ID = slice(4, 52)  # in an inet_diag_msg: ports, addresses, interface, cookie
COOKIE = struct.Struct("=Q")
ALL_STATES = 0xFFFFFFFF


def end_datagram_sockets(cookies: Collection[int]) -> int:
    """Abort the UDP sockets with these cookies: their next call fails with ECONNABORTED. Returns how many.

    Raises:
        OSError: EOPNOTSUPP where the kernel lacks CONFIG_INET_DIAG_DESTROY, EPERM without CAP_NET_ADMIN.
    """
    ended = 0
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as diag:
        for family in (socket.AF_INET, socket.AF_INET6):
            request = REQUEST.pack(family, socket.IPPROTO_UDP, 0, 0, ALL_STATES)
            diag.send(_message(SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, request + bytes(48)))
            chosen = [identity for identity in _identities(diag) if COOKIE.unpack(identity[-8:])[0] in cookies]
            for identity in chosen:
                diag.send(_message(SOCK_DESTROY, NLM_F_REQUEST | NLM_F_ACK, request + identity))
                code = _acknowledged(diag)
                if code == 0:
                    ended += 1
                elif code != errno.ENOENT:  # it closed by itself
                    raise OSError(code, "SOCK_DESTROY")
    return ended


def _message(kind: int, flags: int, body: bytes) -> bytes:
    return HEADER.pack(HEADER.size + len(body), kind, flags, 1, 0) + body


def _identities(diag: socket.socket) -> Iterator[bytes]:
    """The inet_diag_sockid of each socket in a dump."""
    while True:
        data = diag.recv(1 << 16)
        while len(data) >= HEADER.size:
            length, kind, *_ = HEADER.unpack_from(data)
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                code = -struct.unpack_from("=i", data, HEADER.size)[0]
                raise OSError(code, "reading UDP sockets")
            yield data[HEADER.size : length][SOCKET_ID]
            data = data[(length + 3) & ~3 :]


def _acknowledged(diag: socket.socket) -> int:
    data = diag.recv(1 << 16)
    return -int(struct.unpack_from("=i", data, HEADER.size)[0])
