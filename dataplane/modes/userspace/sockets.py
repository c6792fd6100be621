"""Sockets of the relay: listening ones, and those to a backend, with the client's own address where it is kept."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hybrid_proxy.dataplane.modes.userspace.messages import KEEPING, PLAIN

# linux/in.h, linux/in6.h
IP_TRANSPARENT, IPV6_TRANSPARENT = 19, 75
SCTP_NODELAY = 3

OWN_PORTS: Final = (61_000, 65_535)
"""Source ports with a client's address: beside those that clients choose themselves (32768-60999 by default), because
the client may talk to the same backend directly, and conntrack must not take the two for one. (IP_LOCAL_PORT_RANGE
would be the kernel's own way, but it only narrows the node's range, and that is the clients' range, too.)"""

KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 600), (socket.TCP_KEEPINTVL, 60), (socket.TCP_KEEPCNT, 5))
BACKLOG: Final = 4096
RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close sends a reset
_TRIES: Final = 8


def family_of(number: int) -> socket.AddressFamily:
    return socket.AF_INET if number == 4 else socket.AF_INET6


def listening(family: int, protocol: int, address: str) -> socket.socket:
    """A proxy port: the kernel chooses its number.

    Raises:
        OSError: no port or no descriptor is left, or this kernel lacks the protocol.
    """
    datagrams = protocol == socket.IPPROTO_UDP
    kind = socket.SOCK_DGRAM if datagrams else socket.SOCK_STREAM
    made = socket.socket(family_of(family), kind | socket.SOCK_NONBLOCK, protocol)
    try:
        if family == 6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, 0))
        if not datagrams:
            _at_once(made, protocol)  # accepted sockets inherit it
            made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def _at_once(made: socket.socket, protocol: int) -> None:
    """A relay holds nothing back, and notices some day that a silent peer is gone."""
    if protocol == socket.IPPROTO_TCP:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    else:
        made.setsockopt(socket.IPPROTO_SCTP, SCTP_NODELAY, 1)


def toward(family: int, protocol: int, client: str | None) -> socket.socket:
    """A socket to a backend, not yet connected; `client`: the source address that the backend is to see.

    Raises:
        OSError: no descriptor or port is left.
    """
    datagrams = protocol == socket.IPPROTO_UDP
    kind = socket.SOCK_DGRAM if datagrams else socket.SOCK_STREAM
    made = socket.socket(family_of(family), kind | socket.SOCK_NONBLOCK, protocol)
    try:
        if not datagrams:
            _at_once(made, protocol)
        with contextlib.suppress(PermissionError):  # without CAP_NET_ADMIN there are no rules either
            made.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, KEEPING if client else PLAIN)
        if client:
            _bind_as(made, family, client, datagrams=datagrams)
    except OSError:
        made.close()
        raise
    return made


def _bind_as(made: socket.socket, family: int, client: str, *, datagrams: bool) -> None:
    level, option = (socket.IPPROTO_IP, IP_TRANSPARENT) if family == 4 else (socket.IPPROTO_IPV6, IPV6_TRANSPARENT)
    made.setsockopt(level, option, 1)
    if not datagrams:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one port for several backends
    for port in _ports_to_try():
        try:
            made.bind((client, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == 0:
                raise
        else:
            return


def _ports_to_try() -> Iterator[int]:
    for _ in range(_TRIES):
        yield random.randint(*OWN_PORTS)
    yield 0


def resetting(sock: socket.socket) -> None:
    """Close it so that the peer gets a reset."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()


def transparent_works(family: int) -> bool:
    """Whether this process may use addresses that are not the node's; it needs CAP_NET_ADMIN."""
    level, option = (socket.IPPROTO_IP, IP_TRANSPARENT) if family == 4 else (socket.IPPROTO_IPV6, IPV6_TRANSPARENT)
    try:
        with socket.socket(family_of(family), socket.SOCK_DGRAM) as probe:
            probe.setsockopt(level, option, 1)
    except OSError:
        return False
    return True


def open_files() -> int:
    """How many descriptors this process has."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1
