"""Tells when somebody else changes the nftables ruleset of this network namespace.

The kernel sends every transaction to the group NFNLGRP_NFTABLES: one message for each object, which carries the
netlink port of the writer, and NFT_MSG_NEWGEN with the writer's thread at the end. Rules of iptables-nft are told
like all others; those of iptables-legacy are not part of nftables and are not told.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from dataplane.kernel.netlink import NETFILTER, NFGEN, SO_RCVBUFFORCE, attributes, heard, messages

__all__ = ["OWN_PORTS", "Change", "watch_ruleset"]

NFNLGRP_NFTABLES: Final = 7
NFNL_SUBSYS_NFTABLES: Final = 10
RECEIVE_BUFFER: Final = 8 << 20
_NEWGEN: Final = NFNL_SUBSYS_NFTABLES << 8 | 15
_NAME: Final = 1  # the attribute that names the table is number 1 in messages of every kind
_GEN_PROC_PID: Final = 2
_TICK: Final = 0.5  # seconds until `stop` is noticed
_FAMILIES: Final = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}

OWN_PORTS: Final[set[int]] = set()
"""Netlink ports through which this process itself writes: what comes from these is not told.

A door with a socket of its own adds its port while it is open. Writers without an entry here (libnftables) are
recognised by the thread that NEWGEN names.
"""


class Change(NamedTuple):
    """What one read of the socket told: tables (`ip nat`) that others touched. `lost`: some messages were not seen."""

    tables: frozenset[str]
    lost: bool = False


def watch_ruleset(
    changed: Callable[[], None],
    stop: threading.Event,
    tables: Collection[str] = (),
    ready: threading.Event | None = None,
) -> None:
    """Call `changed` for each foreign transaction until `stop` is set. Blocks: run it in a daemon thread.

    Transactions of this process are ignored. Children of this process are others: whoever runs iptables-restore
    hears of it and finds nothing wrong. After a burst that the socket could not hold, `changed` is called too.

    Args:
        changed: called in this thread; must be quick.
        stop: ends it within half a second.
        tables: tables that matter, as `ip nat`; empty: all.
        ready: set when changes are heard from now on.

    Raises:
        OSError: the socket cannot be made (no nf_tables in this kernel, no privilege).
    """
    wanted = frozenset(tables)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER) as monitor:
        monitor.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
        monitor.bind((0, 1 << (NFNLGRP_NFTABLES - 1)))
        monitor.setblocking(False)
        if ready is not None:
            ready.set()
        reader = _Reader()
        while not stop.is_set():
            if not heard(monitor, _TICK):
                continue
            for change in reader.read(monitor):
                if change.lost or not wanted or change.tables & wanted:
                    changed()


class _Reader:
    """Puts messages together to transactions: those before a NEWGEN belong to it."""

    def __init__(self) -> None:
        self._tables: set[str] = set()

    def read(self, monitor: socket.socket) -> Iterator[Change]:
        try:
            data = monitor.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            self._tables.clear()
            yield Change(frozenset(), lost=True)
            return
        yield from self.take(data)

    def take(self, data: bytes) -> Iterator[Change]:
        """The transactions that end in this buffer."""
        for kind, _, _, port, body in messages(data):
            if port in OWN_PORTS:
                continue
            if kind == _NEWGEN:
                touched, self._tables = frozenset(self._tables), set()
                if _writer(body) not in _own_threads():
                    yield Change(touched)
            elif (name := _attribute(body, _NAME)) is not None:
                family = _FAMILIES.get(body[0], str(body[0]))
                self._tables.add(f"{family} {name.rstrip(bytes(1)).decode(errors='replace')}")


def _own_threads() -> set[int]:
    """As NEWGEN numbers them, unless this process is in a PID namespace: then each writer looks foreign."""
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def _writer(body: bytes) -> int:
    return int.from_bytes(_attribute(body, _GEN_PROC_PID) or b"", "big")


def _attribute(body: bytes, wanted: int) -> bytes | None:
    """The first of that number behind the nfgenmsg of a body."""
    return next((value for kind, value in attributes(body, NFGEN.size) if kind == wanted), None)
