"""Aborts sockets of this namespace by sock_diag, named by their cookies: exact, whatever their addresses are.

pyroute2's DiagSocket has the number of SOCK_DESTROY, and drops every error that the kernel answers with (its messages
of type 2 are taken for sockets of AF_INET). So it cannot distinguish a socket that closed by itself from a kernel
that cannot abort any.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Collection
from typing import Final

from hybrid_proxy.dataplane.kernel.netlink import NLM_F_DUMP, SOCK_DIAG, Message, Netlink

SOCK_DIAG_BY_FAMILY, SOCK_DESTROY = 20, 21  # linux/sock_diag.h
_REQUEST: Final = struct.Struct("=BBBBI")  # family, protocol, extensions, pad, states; an inet_diag_sockid follows
_SOCKET_ID: Final = slice(4, 52)  # in an inet_diag_msg: ports, addresses, interface, cookie
_COOKIE: Final = struct.Struct("=Q")
_ALL_STATES: Final = 0xFFFFFFFF


def end_datagram_sockets(cookies: Collection[int]) -> int:
    """Abort the UDP sockets with these cookies: their next call fails with ECONNABORTED. Returns how many.

    Raises:
        NetlinkFailed: the sockets cannot be read.
        OSError: EOPNOTSUPP where the kernel lacks CONFIG_INET_DIAG_DESTROY, EPERM without CAP_NET_ADMIN.
    """
    ended = 0
    with Netlink(SOCK_DIAG) as wire:
        for family in (socket.AF_INET, socket.AF_INET6):
            head = _REQUEST.pack(family, socket.IPPROTO_UDP, 0, 0, _ALL_STATES)
            found = wire.dump(Message(SOCK_DIAG_BY_FAMILY, head + bytes(48), NLM_F_DUMP, "reading UDP sockets"))
            names = [answer[_SOCKET_ID] for answer in found]
            chosen = [name for name in names if _COOKIE.unpack(name[-8:])[0] in cookies]
            failed = wire.send([Message(SOCK_DESTROY, head + name, what="aborting UDP sockets") for name in chosen])
            ended += len(chosen) - len(failed)
            for _, code in failed:
                if code != errno.ENOENT:  # it closed by itself
                    raise OSError(code, f"SOCK_DESTROY: {os.strerror(code)}")
    return ended
