"""Reads and writes rows of the map `affinity` (which backend a client keeps) as values that all modes know."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.services.lower import ANY
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.modes.ebpf.services.writer import frontend_rows
from hybrid_proxy.dataplane.table import Entry, Remembered, ServiceTable


def remembered(maps: Mapping[str, Map], table: ServiceTable, now: int, hz: int) -> list[Remembered]:
    """Returns the clients whose affinity has not timed out; `now` in jiffies, `hz` of them in a second."""
    ports = {number: entry for entry in table.entries() if entry.affinity_seconds and (number := _id(maps, entry))}
    keys, values = maps["affinity"].items(layout.dtype_of("affinity_key"), np.dtype(np.uint64))
    rows = maps["backends"].view(layout.dtype_of("backend"))
    ages = (np.uint32(now) - (values >> np.uint64(32)).astype(np.uint32)).tolist()
    found = []
    for key, backend, age in zip(keys, (values & np.uint64(0xFFFFFFFF)).tolist(), ages, strict=True):
        entry, row = ports.get(int(key["service"])), rows[backend]
        if entry is not None and age <= entry.affinity_seconds * hz and row["service"] == key["service"]:
            client, address = (
                layout.address_text(words.tobytes(), entry.family) for words in (key["client"], row["address"])
            )
            found.append(Remembered(entry.key, client, address, int(layout.swap16([int(row["port"])])[0])))
    return found


def _id(maps: Mapping[str, Map], entry: Entry) -> int:
    """Returns the id of the service port in the maps; 0 if they do not have it."""
    for frontend in entry.frontends:
        key = (entry.family, frontend.address or ANY[entry.family], frontend.port, int(entry.protocol))
        value = maps[f"frontends{entry.family}"].lookup(frontend_rows([key], entry.family)[0].tobytes())
        if value is not None:
            return int.from_bytes(value[:4], "little")
    return 0


def remember(known: Map, clients: Collection[Remembered], store: Store, now: int) -> None:
    """Write rows for clients that the map does not have."""
    installed = {entry: found for entry in {one.entry for one in clients} if (found := store.plan.find(entry))}
    ids = {entry: (found.service, store.numbers(entry)) for entry, found in installed.items()}
    dtype = layout.dtype_of("affinity_key")
    have = {row.tobytes() for row in known.items(dtype, np.dtype(np.uint64))[0]}
    rows: dict[bytes, int] = {}
    for entry, client, address, port in clients:
        service, backends = ids.get(entry, (0, {}))
        key = layout.address_bytes(client) + service.to_bytes(4, "little")
        if (backend := backends.get((address, port))) and key not in have:
            rows.setdefault(key, now << 32 | backend)
    keys = np.frombuffer(b"".join(rows), dtype=dtype)
    known.update_batch(keys, np.array(list(rows.values()), dtype=np.uint64))
