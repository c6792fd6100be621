"""The latest packet events of the programs, with the names of services: drops, and traces that are asked for.

Programs emit a few events per second and CPU (`bpf/packet_events.h`); counters count all of them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.bpf import Ring
from hybrid_proxy.dataplane.kernel.links import interface_name
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.maps.reasons import WORDS, kind_of
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.reports import PacketEvent, some
from hybrid_proxy.dataplane.table import Protocol

log = logging.getLogger(__name__)

KEPT = 1000
LOG_SECONDS, LONGEST_SECONDS = 1.0, 600.0  # between lines about drops: of new kinds, and of those that go on
HOOKS = {
    "pod_ingress": "from a pod", "pod_egress": "to a pod", "uplink_ingress": "from outside",
    "uplink_egress": "to outside", "socket": "socket of this node", "xdp": "from outside (XDP)",
}  # fmt: skip

TCP_FLAGS = ("FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR")  # by their bits (RFC 9293)

Addresses = dict[tuple[int, str], str]  # family and address -> name of a service there


class Journal:
    """The latest events, with names. They are numbered from 1; `last` is the number of the latest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.last = 0
        self._clock = clock
        self._rows: deque[PacketEvent] = deque(maxlen=KEPT)
        self._unlogged: Counter[tuple[str, str]] = Counter()
        self._logged: set[tuple[str, str]] = set()  # reasons, and whose packets
        self._logged_at, self._rest = 0.0, LOG_SECONDS

    def add(
        self, raw: list[bytes], names: Mapping[int, str], addresses: Callable[[], Addresses], backends: Any
    ) -> None:
        """Add events with names. `names` has the service of each id, `backends` the rows of the map."""
        whose: Addresses | None = None
        for event in np.frombuffer(b"".join(raw), dtype=layout.dtype_of("event")):
            self.last += 1
            row = _row(self.last, event, names, backends)
            if row.service is None:
                whose = addresses() if whose is None else whose
                family = int(event["family"])
                ends = (layout.address_text(event[end].tobytes(), family) for end in ("daddr", "saddr"))
                row.service = next((whose[family, end] for end in ends if (family, end) in whose), None)
            self._rows.append(row)
            if row.what == "drop":
                self._unlogged[row.reason, row.service or row.destination] += 1

    def rows(self, after: int) -> list[PacketEvent]:
        """Returns the events with larger numbers, the oldest first."""
        return [row for row in self._rows if row.number > after]

    def log_drops(self) -> None:
        """Log what is dropped: new kinds within a second, and how often they went on after ever longer times."""
        seconds = self._clock() - self._logged_at
        if seconds > 2 * LONGEST_SECONDS or len(self._logged) > KEPT:
            self._logged.clear()
        new = self._unlogged.keys() - self._logged
        if not self._unlogged or seconds < (LOG_SECONDS if new else self._rest):
            return
        drops = [f"{n} x {WORDS.get(why, why)} ({whose})" for (why, whose), n in self._unlogged.most_common()]
        during = "" if new else f" in {seconds:.0f} s"
        log.warning("dropped%s: %s; `hybrid-proxy drops` shows them", during, some(drops))
        self._rest = min(2 * (LOG_SECONDS if new else self._rest), LONGEST_SECONDS)
        self._logged_at += seconds
        self._logged |= new
        self._unlogged.clear()


class PacketLog:
    """Keeps the latest events. Until they are taken, the programs' ring buffer keeps more than the journal does.

    Args:
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


def _row(number: int, event: Any, names: Mapping[int, str], backends: Any) -> PacketEvent:
    family = int(event["family"])
    reason = layout.named("COUNT_")[int(event["reason"])]
    service, protocol, ifindex = int(event["service"]), int(event["protocol"]), int(event["ifindex"])
    replied = reason == "backend_refused" and not event["traced"]  # a reply: source and destination are swapped
    ends = (("saddr", "sport"), ("daddr", "dport"))[:: -1 if replied else 1]
    flags = int(event["tcp_flags"]) if protocol == Protocol.TCP else 0
    return PacketEvent(
        number=number,
        time=time.time() - (time.monotonic() - int(event["time"]) / 1e9),
        what="trace" if event["traced"] else kind_of(reason),
        reason=reason,
        message=WORDS.get(reason, ""),
        service=names.get(service),
        protocol=Protocol.name_of(protocol),
        source=layout.end_text(event, family, *ends[0]),
        destination=layout.end_text(event, family, *ends[1]),
        backend=_backend(backends, int(event["backend"]), service, family),
        where="reply, " * replied + HOOKS[layout.named("HOOK_")[int(event["hook"])]],
        interface=interface_name(ifindex) if ifindex else None,
        flags=" ".join(name for bit, name in enumerate(TCP_FLAGS) if flags >> bit & 1) or None,
    )


def _backend(backends: Any, number: int, service: int, family: int) -> str | None:
    """Returns the address of a backend, unless its id has been given to another one."""
    if not number or number >= len(backends) or int(backends[number]["service"]) != service:
        return None
    return layout.end_text(backends[number], family)
