"""Sockets of the relay: proxy ports, sockets to backends, and the budget of file descriptors for both."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
import resource
import socket
import struct
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from hybrid_proxy.dataplane.kernel.netlink import AF
from hybrid_proxy.dataplane.modes.userspace.messages import KEEPING, PLAIN

log = logging.getLogger(__name__)

# Level and option by family: IP_TRANSPARENT and IPV6_TRANSPARENT, linux/in.h and linux/in6.h.
TRANSPARENT: Final = {4: (socket.IPPROTO_IP, 19), 6: (socket.IPPROTO_IPV6, 75)}
SCTP_NODELAY = 3

# Source ports for a client's address: outside of the range from which clients choose (32768-60999 by default), because
# the client may talk to the same backend directly, and conntrack must not take the two for one. (IP_LOCAL_PORT_RANGE
# would be the kernel's own way, but it only narrows the node's range, and that is the clients' range, too.)
OWN_PORTS: Final = (61_000, 65_535)

KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 600), (socket.TCP_KEEPINTVL, 60), (socket.TCP_KEEPCNT, 5))
BACKLOG: Final = 4096
RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close sends a reset
_TRIES: Final = 8

RESERVE: Final = 64  # descriptors for connections of agents to the relay
RETRY_SECONDS: Final = 0.1  # until proxy ports that wait for descriptors are tried again
REPORT_SECONDS: Final = 60.0
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def listening(family: int, protocol: int, address: str) -> socket.socket:
    """Opens a proxy port, whose number the kernel chooses.

    Raises:
        OSError: no port or no descriptor is left, or this kernel lacks the protocol.
    """
    with _made(family, protocol) as made:
        if family == 6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, 0))
        if protocol != socket.IPPROTO_UDP:
            made.listen(BACKLOG)
    return made


@contextlib.contextmanager
def _made(family: int, protocol: int) -> Iterator[socket.socket]:
    """Opens a socket, which is closed if the block fails. Accepted sockets inherit its options."""
    kind = socket.SOCK_DGRAM if protocol == socket.IPPROTO_UDP else socket.SOCK_STREAM
    made = socket.socket(AF[family], kind | socket.SOCK_NONBLOCK, protocol)
    try:
        # Without Nagle's algorithm; keepalives find peers that disappeared.
        if protocol == socket.IPPROTO_TCP:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                made.setsockopt(socket.IPPROTO_TCP, option, value)
        elif kind == socket.SOCK_STREAM:
            made.setsockopt(socket.IPPROTO_SCTP, SCTP_NODELAY, 1)
        yield made
    except OSError:
        made.close()
        raise


def toward(family: int, protocol: int, client: str | None) -> socket.socket:
    """Opens a socket to a backend, not yet connected. `client` is the source address that the backend will see.

    Raises:
        OSError: no descriptor or port is left.
    """
    with _made(family, protocol) as made:
        with contextlib.suppress(PermissionError):  # without CAP_NET_ADMIN there are no rules either
            made.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, KEEPING if client else PLAIN)
        if client:
            _bind_as(made, family, client, datagrams=protocol == socket.IPPROTO_UDP)
    return made


def _bind_as(made: socket.socket, family: int, client: str, *, datagrams: bool) -> None:
    made.setsockopt(*TRANSPARENT[family], 1)
    if not datagrams:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one port for several backends
    for port in (*(random.randint(*OWN_PORTS) for _ in range(_TRIES)), 0):
        try:
            made.bind((client, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == 0:
                raise
        else:
            return


def resetting(sock: socket.socket) -> None:
    """Closes a socket so that its peer gets a reset."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()


def transparent_works(family: int) -> bool:
    """Tells whether this process may use addresses that are not the node's; it needs CAP_NET_ADMIN."""
    try:
        with socket.socket(AF[family], socket.SOCK_DGRAM) as probe:
            probe.setsockopt(*TRANSPARENT[family], 1)
    except OSError:
        return False
    return True


def open_files() -> int:
    """Returns how many descriptors this process has."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1


class State:
    """The relay's event loop, its counters, and its budget of file descriptors.

    Descriptors are counted, so that asking for what is left costs nothing. Proxy ports that found none left register a
    callback with `wait`, which is called when some are free again.

    Attributes:
        used: descriptors that are open; whoever opens or closes one counts it here.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int | None = None) -> None:
        self.loop = loop
        self.limit = limit or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.used = open_files()
        self.counters: Counter[str] = Counter()
        self.trouble = ""
        self._waiting: dict[Callable[[], None], None] = {}
        self._reported_at = -REPORT_SECONDS
        self._retry: asyncio.TimerHandle | None = None

    def may_open(self, count: int) -> bool:
        """Tells whether so many more descriptors are within the limit."""
        return self.used + count + RESERVE <= self.limit

    def note_exhaustion(self, error: OSError) -> bool:
        """Tells whether an error means that descriptors or memory ran out, and reports that."""
        if error.errno not in EXHAUSTED:
            return False
        self.report_limit(str(error))
        return True

    def report_limit(self, why: str = "") -> None:
        """Logs, at most once a minute, that connections wait for descriptors, and what to do."""
        self.counters["limit_reached"] += 1
        self.trouble = (
            f"the relay has {self.used} of {self.limit} files open{f' ({why})' if why else ''}: new connections wait "
            "until others end; raise the limit of open files (LimitNOFILE= of the service, ulimit -n)"
        )
        if self.loop.time() - self._reported_at >= REPORT_SECONDS:
            self._reported_at = self.loop.time()
            log.warning("%s", self.trouble)

    def note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Counts an exception of a callback, and has `status` show it. It broke one conversation; the rest goes on."""
        self.counters["failures"] += 1
        error = context.get("exception")
        where = traceback.extract_tb(error.__traceback__)[-1] if isinstance(error, BaseException) else None
        place = f" at {where.filename.rpartition('/')[2]}:{where.lineno}" if where else ""
        self.trouble = f"the relay failed{place}: {error or context.get('message')!r}"

    def wait(self, listen: Callable[[], None]) -> None:
        """Has `listen` called when descriptors are free."""
        self._waiting[listen] = None
        self._retry_soon()

    def stop_waiting(self, listen: Callable[[], None]) -> None:
        """Withdraws a callback of `wait`."""
        self._waiting.pop(listen, None)

    def resume(self) -> None:
        """Calls those who wait, if descriptors are free; called whenever some were closed."""
        if self._waiting and self.may_open(2):
            self.trouble = ""
            waiting, self._waiting = self._waiting, {}
            for listen in waiting:
                listen()

    # Other processes may have used up what all share (ENFILE, ENOMEM), and do not tell when it is free again.
    def _retry_soon(self) -> None:
        if self._retry is None:
            self._retry = self.loop.call_later(RETRY_SECONDS, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self.resume()
        if self._waiting:
            self._retry_soon()
