"""Ends sockets of this namespace by sock_diag, named by their cookies: exact, whatever their addresses are.

pyroute2 has no SOCK_DESTROY; the two messages that are needed are built here.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Collection, Iterator

from dataplane.kernel.netlink import (
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_REQUEST,
    NLMSG_DONE,
    NLMSG_ERROR,
    SOCK_DIAG,
    error_of,
    message,
    messages,
)

__all__ = ["end_datagram_sockets"]

SOCK_DIAG_BY_FAMILY, SOCK_DESTROY = 20, 21
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
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as diag:
        for family in (socket.AF_INET, socket.AF_INET6):
            request = REQUEST.pack(family, socket.IPPROTO_UDP, 0, 0, ALL_STATES)
            diag.send(message(SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, request + bytes(48)))
            chosen = [identity for identity in _identities(diag) if COOKIE.unpack(identity[-8:])[0] in cookies]
            for identity in chosen:
                diag.send(message(SOCK_DESTROY, NLM_F_REQUEST | NLM_F_ACK, request + identity))
                code = _acknowledged(diag)
                if code == 0:
                    ended += 1
                elif code != errno.ENOENT:  # it closed by itself
                    raise OSError(code, "SOCK_DESTROY")
    return ended


def _identities(diag: socket.socket) -> Iterator[bytes]:
    """The inet_diag_sockid of each socket in a dump."""
    while True:
        for kind, _, _, _, body in messages(diag.recv(1 << 16)):
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                raise OSError(error_of(body), "reading UDP sockets")
            yield body[SOCKET_ID]


def _acknowledged(diag: socket.socket) -> int:
    return next(error_of(body) for *_, body in messages(diag.recv(1 << 16)))
