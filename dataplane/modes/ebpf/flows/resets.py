"""Resets TCP connections to removed endpoints, if the Service asks for it.

A flow's entry has what its client acknowledged last, which is the sequence number that the client expects of a reset.
If data was under way, the client challenges the reset (RFC 5961), the programs note what it acknowledges with that, and
the next round has the right number. At the end the flows are deleted, answered or not. Connections of the node's
own sockets are no flows: these sockets are aborted.
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel import tcp_segments
from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.kernel.diag import end_connections
from hybrid_proxy.dataplane.kernel.netlink import AF
from hybrid_proxy.dataplane.kernel.tcp_segments import Segment
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import abi_constants, dtype_of, is_over, swap16
from hybrid_proxy.dataplane.stale import Gone
from hybrid_proxy.dataplane.table import Protocol

log = logging.getLogger(__name__)

ROUNDS, PAUSE = 3, 0.02  # resets of one client, seconds between two

Forget = Callable[[int, NDArray[Any]], None]  # family, keys


class Endpoint(NamedTuple):
    """A removed endpoint: the id of its service port, family, address and port."""

    service: int
    family: int
    address: str
    port: int

    @classmethod
    def of(cls, service: int, gone: Gone) -> Endpoint:
        return cls(service, gone.entry.family, gone.address, gone.port)

    @property
    def words(self) -> NDArray[np.uint32]:
        """The address as the maps have it."""
        packed = socket.inet_pton(AF[self.family], self.address)
        return np.frombuffer(packed.ljust(16, b"\0"), np.uint32)

    @property
    def wire_port(self) -> int:
        """The port as the maps have it."""
        return int(swap16([self.port])[0])


class Resets:
    """Resets the connections to endpoints that are gone.

    Args:
        wake: has the collector's thread call `run`.

    Attributes:
        count: of the connections that were reset.
    """

    def __init__(self, maps: Mapping[str, Map], forget: Forget, wake: Callable[[], None]) -> None:
        self.count = 0
        self._maps, self._forget, self._wake = maps, forget, wake
        self._gone = deque[Endpoint]()

    @property
    def waiting(self) -> bool:
        """True if endpoints wait for `run`."""
        return bool(self._gone)

    def add(self, gone: Collection[Endpoint]) -> None:
        """Have the connections to these endpoints reset. For any thread."""
        if gone:
            self._gone.extend(gone)
            self._wake()

    def run(self) -> None:
        """Resets the connections to the endpoints that were added; what fails is logged, and not tried again."""
        gone = {self._gone.popleft() for _ in range(len(self._gone))}
        try:
            self.count += reset(self._maps, gone, self._forget)
        except (DataplaneError, OSError) as error:
            log.warning("connections to endpoints that are gone could not be reset: %s", error)


def reset(maps: Mapping[str, Map], gone: Collection[Endpoint], forget: Forget) -> int:
    """Reset the open connections to these endpoints. Returns how many there were.

    Raises:
        DataplaneError, OSError: tables cannot be read, or nothing can be sent.
    """
    total = 0
    found: dict[tuple[str, int], NDArray[Any]] = {}
    for number in range(ROUNDS):
        time.sleep(PAUSE if number else 0)
        found = {}
        segments: list[Segment] = []
        for table, family in itertools.product(("flows", "half_open"), {each.family for each in gone}):
            keys, values = flow_arrays(maps[f"{table}{family}"], family)
            chosen = _open_to(keys, values, [each for each in gone if each.family == family])
            found[table, family] = keys[chosen]
            segments += _resets(family, keys[chosen], values[chosen])
        if not number:
            total = sum(map(len, found.values()))
            total += _end_own_sockets(maps, gone)
        if not any(map(len, found.values())):
            return total
        tcp_segments.send(segments)
    for (_, family), keys in found.items():
        if len(keys):
            forget(family, keys)
    return total


def _open_to(keys: NDArray[Any], values: NDArray[Any], gone: Collection[Endpoint]) -> NDArray[np.bool_]:
    """Returns which rows are the clients' direction of TCP connections to the endpoints.

    With direct server return an entry has another number in place of the acknowledgement, so it is left out.
    """
    names = abi_constants()
    not_these = names["FLOW_REPLY"] | names["FLOW_OTHERS"] | names["FLOW_DSR"]
    found = np.zeros(len(keys), dtype=bool)
    for each in gone:
        there = (values["service"] == each.service) & (values["dport"] == each.wire_port)
        found |= there & (values["daddr"] == each.words).all(axis=1)
    found &= (keys["protocol"] == Protocol.TCP) & (values["flags"] & not_these == 0) & ~is_over(values["flags"])
    return found


def _resets(family: int, keys: NDArray[Any], values: NDArray[Any]) -> Iterator[Segment]:
    for key, ack in zip(keys, values["ack"].tolist(), strict=True):
        if ack:
            source, target = key["daddr"].tobytes(), key["saddr"].tobytes()
            yield Segment(family, source, key["dport"].tobytes(), target, key["sport"].tobytes(), ack)


def _end_own_sockets(maps: Mapping[str, Map], gone: Collection[Endpoint]) -> int:
    storage = maps.get("sockets")
    if storage is None:
        return 0
    kind = dtype_of("socket_state")
    places = {(each.service, each.words.tobytes(), each.wire_port) for each in gone}

    def goes_there(value: bytes) -> bool:
        state = np.frombuffer(value, kind, 1)[0]
        peer = state["peers"][0]
        place = int(peer["service"]), peer["backend"].tobytes(), int(peer["backend_port"])
        return bool(state["connected"]) and place in places

    try:
        return end_connections(storage.fd, goes_there)
    except (DataplaneError, OSError) as error:
        log.warning("connections of the node's own sockets to endpoints that are gone could not be reset: %s", error)
        return 0
