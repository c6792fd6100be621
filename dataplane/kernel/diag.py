"""Sockets of this namespace by sock_diag: aborts some, named by their cookies, and finds listeners that are full.

pyroute2's DiagSocket has the number of SOCK_DESTROY, and drops every error that the kernel answers with (its messages
of type 2 are taken for sockets of AF_INET). So it cannot distinguish a socket that closed by itself from a kernel
that cannot abort any.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final

from hybrid_proxy.dataplane.kernel.netlink import NLM_F_DUMP, SOCK_DIAG, Message, Netlink, attribute, attributes, nested

SOCK_DIAG_BY_FAMILY, SOCK_DESTROY = 20, 21  # linux/sock_diag.h
_REQUEST: Final = struct.Struct("=BBBBI")  # family, protocol, extensions, pad, states; an inet_diag_sockid follows
_SOCKET_ID: Final = slice(4, 52)  # in an inet_diag_msg: ports, addresses, interface, cookie
_LISTEN: Final = 1 << 10  # TCP_LISTEN
_OPEN_STATES: Final = 0xFFFFFFFF & ~(_LISTEN | 1 << 6)  # not TCP_TIME_WAIT
_REQ_STORAGES, _REQ_MAP = 2, 1  # INET_DIAG_REQ_SK_BPF_STORAGES, SK_DIAG_BPF_STORAGE_REQ_MAP_FD
_STORAGES, _STORAGE_VALUE = 20, 3  # INET_DIAG_SK_BPF_STORAGES, SK_DIAG_BPF_STORAGE_MAP_VALUE
_PORT, _QUEUES = slice(4, 6), struct.Struct("=56x2I")  # in an inet_diag_msg; of a listener the second is the limit
_ATTRIBUTES: Final = 72  # where those of an inet_diag_msg begin


def end_connections(storage: int, judge: Callable[[bytes], bool]) -> int:
    """Abort the TCP sockets for which a program keeps a value that `judge` picks; their peers get a reset.

    Their next call fails with ECONNABORTED, a waiting one as well. Returns how many.

    Args:
        storage: descriptor of a map of type SK_STORAGE.
        judge: gets the value of each socket that has one.

    Raises:
        NetlinkFailed: the sockets cannot be read: Linux before 5.7, or no CAP_BPF.
        OSError: EOPNOTSUPP where the kernel lacks CONFIG_INET_DIAG_DESTROY, EPERM without CAP_NET_ADMIN.
    """
    asked = nested(_REQ_STORAGES, attribute(_REQ_MAP, struct.pack("=I", storage)))
    ended = 0
    with Netlink(SOCK_DIAG) as wire:
        for family in (socket.AF_INET, socket.AF_INET6):
            head = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _OPEN_STATES)
            found = wire.dump(Message(SOCK_DIAG_BY_FAMILY, head + bytes(48) + asked, NLM_F_DUMP, "reading TCP sockets"))
            names = [answer[_SOCKET_ID] for answer in found if any(map(judge, _stored(answer)))]
            failed = wire.send([Message(SOCK_DESTROY, head + name, what="aborting TCP sockets") for name in names])
            ended += len(names) - len(failed)
            for _, code in failed:
                if code != errno.ENOENT:  # it closed by itself
                    raise OSError(code, f"SOCK_DESTROY: {os.strerror(code)}")
    return ended


def full_queues() -> dict[int, int]:
    """Returns the TCP ports whose listener has as many connections as it takes until its process accepts some.

    Raises:
        NetlinkFailed: the kernel does not tell.
    """
    found = {}
    with Netlink(SOCK_DIAG) as wire:
        for family in (socket.AF_INET, socket.AF_INET6):
            asked = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _LISTEN) + bytes(48)
            for answer in wire.dump(Message(SOCK_DIAG_BY_FAMILY, asked, NLM_F_DUMP, "reading TCP listeners")):
                waiting, most = _QUEUES.unpack_from(answer)
                if waiting > most:
                    found[int.from_bytes(answer[_PORT])] = most
    return found


def _stored(answer: bytes) -> Iterator[bytes]:
    for kind, value in attributes(answer, _ATTRIBUTES):
        if kind == _STORAGES:
            for _, storage in attributes(value):
                yield from (text for inner, text in attributes(storage) if inner == _STORAGE_VALUE)
