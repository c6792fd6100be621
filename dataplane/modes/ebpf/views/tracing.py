"""Events of packets with the names of services: those that programs always report, and traces that are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.bpf import Ring
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.modes.ebpf.views.events import Journal
from hybrid_proxy.dataplane.reports import PacketEvent


class PacketLog:
    """Keeps the latest events. Until they are taken, the programs' ring buffer keeps more than the journal does.

    Args:
        maps: the open set.
        store: knows addresses and backends.
        names: returns the service of each id; called when there are events, because it lists all services.
    """

    def __init__(self, maps: MapSet, store: Store, names: Callable[[], Mapping[int, str]]) -> None:
        self._maps, self._store, self._names = maps, store, names
        self._journal = Journal()
        self._traces_until = 0.0
        maps.view("node")["trace"] = 0
        self._raw: list[bytes] = []
        self._ring = Ring(maps.maps["events"], self._raw.append)

    def rows(self, after: int) -> tuple[list[PacketEvent], int]:
        """Events with larger numbers than `after`, and the number of the latest."""
        self._take()
        return self._journal.rows(after), self._journal.last

    def maintain(self) -> None:
        """Logs drops, and ends a trace whose time is over."""
        self._take()
        self._journal.log_drops()
        if self._traces_until and time.monotonic() > self._traces_until:
            self._maps.view("node")["trace"] = 0
            self._traces_until = 0.0

    def _take(self) -> None:
        if self._ring.poll(0):
            self._journal.add(self._raw, self._names(), self._store.addresses, self._store.backends)
            self._raw.clear()

    def trace(self, service: str | None, client: str | None, seconds: float) -> None:
        """Has each packet of this service, and from or to this address, reported for so long.

        Raises:
            DataplaneError: there is no such service, or it has too many ports.
        """
        row = self._maps.view("node")
        limit = row["trace_services"].shape[1]
        wanted = [number for number, name in self._names().items() if service in {name, name.partition(":")[0]}]
        if service and not wanted:
            raise DataplaneError(f"{service}: no such service is programmed; NAMESPACE/NAME, or NAMESPACE/NAME:PORT")
        if len(wanted) > limit:
            raise DataplaneError(f"{service} has {len(wanted)} ports, and {limit} can be traced: name one of them")
        row["trace"] = 0
        row["trace_services"] = wanted + [0] * (limit - len(wanted))
        row["trace_client"] = layout.address_words([client])[0] if client else 0
        row["trace"] = int(seconds > 0)
        self._traces_until = time.monotonic() + seconds

    def close(self) -> None:
        """Ends traces; programs go on reporting drops to the map."""
        self._ring.close()
        self._maps.view("node")["trace"] = 0
