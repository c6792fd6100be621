"""Reports when another process changes the nftables ruleset of this network namespace.

The kernel sends every transaction to the group NFNLGRP_NFTABLES: one message for each object, with the netlink port of
the writer, and at the end NFT_MSG_NEWGEN with its name. Rules of iptables-nft are reported like all others; those of
iptables-legacy are not part of nftables and are not reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from hybrid_proxy.dataplane.kernel.netlink import NETFILTER, NFGEN, Events, attributes, messages, text

NFNLGRP_NFTABLES: Final = 7
NFNL_SUBSYS_NFTABLES: Final = 10
RECEIVE_BUFFER: Final = 8 << 20
_NEWGEN: Final = NFNL_SUBSYS_NFTABLES << 8 | 15
_NAME: Final = 1  # the attribute that names the table is number 1 in messages of every kind
_PROC_NAME: Final = 3  # NFTA_GEN_PROC_NAME
_FAMILIES: Final = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}

OWN_PORTS: Final[set[int]] = set()
"""Netlink ports through which this process itself writes: what comes from these is not reported.

An open `Nfnetlink` adds its port.
"""


def watch_ruleset(
    changed: Callable[[str], None],
    stop: threading.Event,
    tables: Collection[str] = (),
    ready: threading.Event | None = None,
) -> None:
    """Call `changed` for each foreign transaction until `stop` is set. Blocks: run it in a daemon thread.

    Transactions of this process are ignored, those of its children (iptables-restore) are not. `changed` is also called
    after a burst that the socket could not hold.

    Args:
        changed: called in this thread, with the name of the program if it is known; must be quick.
        stop: ends it within seconds.
        tables: tables that matter, as `ip nat`; empty: all.
        ready: set when changes are reported from now on.

    Raises:
        OSError: the socket cannot be made (no nf_tables in this kernel, no privilege).
    """
    wanted = frozenset(tables)
    with Events(NETFILTER, 1 << (NFNLGRP_NFTABLES - 1), RECEIVE_BUFFER) as monitor:
        if ready is not None:
            ready.set()
        for touched, program in _transactions(monitor.until(stop)):
            if touched is None or not wanted or touched & wanted:
                changed(program)


def _transactions(reports: Iterable[bytes | None]) -> Iterator[tuple[frozenset[str] | None, str]]:
    """Yields the tables (`ip nat`) of each foreign transaction, and whose it is; None: reports were lost."""
    tables: set[str] = set()
    for data in reports:
        if data is None:
            tables.clear()
            yield None, ""
            continue
        for kind, _, _, port, body in messages(data):
            if port in OWN_PORTS:
                continue
            known = dict(attributes(body, NFGEN.size))
            if kind == _NEWGEN:
                touched, tables = frozenset(tables), set()
                yield touched, text(known.get(_PROC_NAME, b""))
            elif _NAME in known:
                tables.add(f"{_FAMILIES.get(body[0], str(body[0]))} {text(known[_NAME])}")
