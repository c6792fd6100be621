"""Reads and writes session affinity: lists of the match `recent`, one for each endpoint.

A line of such a list begins with `src=ADDRESS`; writing `+ADDRESS` adds a client (iptables-extensions(8), recent).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from hybrid_proxy.dataplane.modes.iptables.names import endpoint_chain
from hybrid_proxy.dataplane.table import Backend, Entry, EntryKey, Remembered, ServiceTable

LISTS: Final = Path("/proc/thread-self/net/xt_recent")


def remembered(table: ServiceTable) -> list[Remembered]:
    """Read the clients in the lists; some may have been silent for longer than affinity lasts."""
    return [
        Remembered(entry.key, client, backend.address, backend.port)
        for entry in table.entries()
        for backend, path in _lists(entry)
        for client in _clients(path)
    ]


def remember(table: ServiceTable) -> None:
    """Add clients that no list of their service port has.

    Raises:
        OSError: a list cannot be written.
    """
    wanted: dict[EntryKey, dict[str, tuple[str, int]]] = defaultdict(dict)
    for one in table.clients:
        wanted[one.entry].setdefault(one.client, (one.backend, one.port))
    for entry in table.entries():
        if entry.key not in wanted:
            continue
        lists = list(_lists(entry))
        have = {client for _, path in lists for client in _clients(path)}
        for backend, path in lists:
            for client, socket in wanted[entry.key].items():
                if client not in have and socket == (backend.address, backend.port):
                    path.write_text(f"+{client}\n")


def _lists(entry: Entry) -> Iterator[tuple[Backend, Path]]:
    if entry.affinity_seconds:
        for backend in {backend for chosen in entry.backend_sets for backend in chosen.backends}:
            path = LISTS / endpoint_chain(entry, backend)
            if path.exists():
                yield backend, path


def _clients(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        yield str(ip_address(line.split()[0].removeprefix("src=")))
