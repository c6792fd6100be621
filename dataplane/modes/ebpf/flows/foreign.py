"""Leaves flows to the mode or proxy that began them: those that conntrack translates are entered as foreign.

A segment in the middle of a TCP connection shows that its flow is foreign; a datagram or a repeated SYN does not. So
foreign UDP and SCTP flows and half-open connections have entries in the tables of flows for as long as conntrack has
theirs. So have the answers to connections that conntrack masquerades: both it and our programs assign ports of the
node, and if both assigned one port for one backend, answers would reach the wrong client. Conntrack in turn gets
entries for the ports of our flows before another mode serves, and while this one drains.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, UserDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property, partial
from ipaddress import ip_address

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.kernel.conntrack import (
    FlowKey,
    Key,
    answer_keys,
    delete_stale,
    half_open_keys,
    reserve,
    translated_keys,
)
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays, run_in_parts
from hybrid_proxy.dataplane.netfilter import frontends, relays
from hybrid_proxy.dataplane.stale import Judge
from hybrid_proxy.dataplane.table import EMPTY, Protocol, ServiceTable

DATAGRAMS = (Protocol.UDP, Protocol.SCTP)  # whose first packets do not say that they are the first
FIRST_SCANS = 2  # after the first table: foreign flows may have begun while our programs were attached
RESERVED_SECONDS = 300  # of an entry in conntrack that stands for one of our flows
ANSWERS_SECONDS = 60.0  # after which all connections are read again, to forget the answers to those that are over


def newly_receiving(old: ServiceTable, new: ServiceTable, names: Iterable[str]) -> frozenset[str]:
    """Returns the services that newly receive UDP or SCTP at some address."""
    return frozenset(
        name
        for name in names
        if not frontends(new, DATAGRAMS, (name,)).keys() <= frontends(old, DATAGRAMS, (name,)).keys()
    )


class ListedLater(UserDict[Key, None]):
    """Frontends that are listed when one is asked for: often conntrack has no flows, and services are many."""

    def __init__(self, make: Callable[[], dict[Key, None]]) -> None:
        self._make = make

    @cached_property
    def data(self) -> dict[Key, None]:  # type: ignore[override]  # made when it is read
        return self._make()


class ForeignFlows:
    """Keeps the entries of foreign flows in our tables in step with conntrack, and deletes its stale entries.

    Args:
        flows: the tables of flows, by family.
        leave: descriptor of the program that writes entries of foreign flows.
        wake: has the collector's thread call `scan` soon.

    Attributes:
        known: the foreign flows that have entries in our tables.
        table: the table that was programmed last.
    """

    def __init__(self, flows: Mapping[int, Map], leave: int, wake: Callable[[], None]) -> None:
        self._flows, self._leave, self._wake = flows, leave, wake
        self.table = EMPTY
        self._lock = threading.Lock()
        self._replaced: tuple[ServiceTable, ...] = ()  # tables before and after a change in which services move
        self._moves = 0
        self._answers = frozenset[FlowKey]()
        self._answers_at = 0.0
        self._judges = deque[Judge]()
        self._scans = 0
        self.known = self._entered()

    def _entered(self) -> frozenset[FlowKey]:
        """Returns the foreign flows that have entries in our tables."""
        return frozenset[FlowKey]().union(*(_foreign(flows, family) for family, flows in self._flows.items()))

    # Changes of the table

    def begin_move(self, before: ServiceTable, table: ServiceTable) -> None:
        """Finds foreign flows to the services of both tables from now on, until `programmed` is called."""
        with self._lock:
            self._replaced = before, table
            self._moves += 1

    def enter_datagrams(self, names: Collection[str]) -> None:
        """Enters the foreign datagram flows of these services, which are served here next; `read` does the rest.

        Raises:
            DataplaneError, OSError: conntrack cannot be read.
        """
        found = datagram_flows(*self._replaced[-1:], names=names)
        with self._lock:
            self._change(found - self.known, ())
            self.known |= found

    def programmed(
        self, before: ServiceTable, table: ServiceTable, names: Collection[str], moving: Collection[str], *, first: bool
    ) -> None:
        """Note that a table is programmed in which `names` may differ; `moving` were served by another proxy before."""
        with self._lock:
            self._replaced = ()
        if first:
            self._wake()
        if moving:
            self._scans = 0
        if self.known or moving:
            self.judge(before, table, names)

    def reopen(self, flows: Mapping[int, Map]) -> None:
        """Keep entries in these tables from now on, into which foreign flows were copied."""
        self._flows = flows
        self.known = self._entered()

    def forget(self) -> None:
        """Regard no flow as foreign any more."""
        self.known = frozenset()

    # The entries in our tables

    def read(self, *, connections: bool = True) -> None:
        """Read conntrack: enter new foreign flows, delete ended ones. Any thread may call it.

        A dump takes tens of milliseconds if conntrack has many buckets; no change waits for it.

        `connections`: some may be half-open that are not known yet. Before Linux 5.17 all connections are read for it.

        Raises:
            DataplaneError, OSError: conntrack cannot be read.
        """
        moves, tables = self._moves, self._replaced or (self.table,)
        services = ListedLater(lambda: {key: None for table in tables for key in frontends(table)})
        found = datagram_flows(*tables)
        if connections or any(key.protocol == Protocol.TCP for key in self.known):
            found |= self._bounded(half_open_keys(services))  # during a flood of SYNs none: it would fill the tables
        if connections or (self._answers and time.monotonic() - self._answers_at > ANSWERS_SECONDS):
            self._answers = self._bounded(answer_keys(services))
            self._answers_at = time.monotonic()
        found |= self._answers
        with self._lock:
            if moves == self._moves:  # otherwise these tables may not have services that moved meanwhile
                self._change(found - self.known, self.known - found)
                self.known = found

    def _change(self, new: Collection[FlowKey], gone: Collection[FlowKey]) -> None:
        for family, flows in self._flows.items():
            run_in_parts(self._leave, family, _rows([key for key in new if key.family == family], family))
            if lost := {key for key in gone if key.family == family}:  # an own flow may have the same key
                flows.delete_batch(_rows(lost.intersection(_foreign(flows, family)), family))

    def _bounded(self, found: frozenset[FlowKey]) -> frozenset[FlowKey]:
        """Returns the flows; none if there are so many that they would fill the tables."""
        room = min(flows.entries for flows in self._flows.values()) // 8
        return found if len(found) <= room else frozenset()

    def check_room(self) -> None:
        """Check that the tables have room for every foreign flow.

        Raises:
            Unsupported: they have not, and some flows would get another backend.
        """
        refuse_crowd(self.known - self._answers, {family: flows.entries for family, flows in self._flows.items()})

    # Conntrack's entries

    def judge(self, before: ServiceTable, table: ServiceTable, names: Collection[str]) -> None:
        """Has the collector's thread delete conntrack's entries that lead to backends which no longer serve."""
        self._judges.append(Judge(before, table, names, partial(relays, table.node)))
        self._wake()

    def scan(self) -> None:
        """Judges conntrack's entries, and reads its flows while some are foreign, or may be that are not known yet.

        Raises:
            DataplaneError, OSError: conntrack cannot be read.
        """
        while self._judges:
            delete_stale(self._judges.popleft())
        if self.known or self._scans < FIRST_SCANS:
            self._scans += 1
            self.read(connections=self._scans <= FIRST_SCANS)


def refuse_crowd(foreign: Iterable[FlowKey], room: Mapping[int, int]) -> None:
    """Check that the table of flows of each family has `room` for foreign datagram flows.

    Raises:
        Unsupported: it has not.
    """
    counts = Counter(key.family for key in foreign if key.protocol in DATAGRAMS)
    for family, entries in room.items():
        if counts[family] > entries:
            raise Unsupported(
                "room for the datagram flows of other proxies",
                f"{counts[family]} of IPv{family} are open, and the table of flows has room for {entries}: "
                "raise --max-flows",
            )


def datagram_flows(*tables: ServiceTable, names: Collection[str] | None = None) -> frozenset[FlowKey]:
    """Returns the datagram flows to services of the tables, or to those with these names, that conntrack translates.

    Raises:
        DataplaneError, OSError: conntrack cannot be read.
    """
    services = ListedLater(lambda: {key: None for table in tables for key in frontends(table, DATAGRAMS, names)})
    entries = [entry for table in tables for entry in table.entries(names) if entry.protocol in DATAGRAMS]
    kinds = {(entry.family, int(entry.protocol)) for entry in entries}  # of the flows to dump
    own = {ip_address(address).packed for table in tables for address in table.node.addresses}
    keys = translated_keys(services, sorted(kinds))
    # Unbound sockets of this node have other keys for the same flows: to an address on kube-proxy's device, the node
    # sends from that very address.
    return keys | {
        key._replace(saddr=bytes(len(key.saddr)))
        for key in keys
        if key.protocol == Protocol.UDP and (key.saddr in own or key.saddr == key.daddr)
    }


def reserve_ports(maps: Mapping[str, Map]) -> None:
    """Enter our flows whose backend sees a port of the node in conntrack, for the mode or proxy that serves next."""
    names = layout.abi_constants()
    reserve(
        [
            answer
            for family, masquerades in itertools.product((4, 6), ("FLOW_MASQUERADE", "FLOW_HAIRPIN"))
            for answer in _keys(maps[f"flows{family}"], family, names["FLOW_REPLY"] | names[masquerades])
            if answer.protocol != Protocol.SCTP
        ],
        RESERVED_SECONDS,
    )


def _foreign(flows: Map, family: int) -> Iterator[FlowKey]:
    """Returns the foreign flows that are in the table."""
    return _keys(flows, family, layout.abi_constants()["FLOW_OTHERS"])


def _keys(flows: Map, family: int, flags: int) -> Iterator[FlowKey]:
    """Returns the flows in the table that have all these flags."""
    keys, values = flow_arrays(flows, family)
    for row in keys[values["flags"] & flags == flags]:
        saddr, sport, daddr, dport = (row[name].tobytes() for name in ("saddr", "sport", "daddr", "dport"))
        yield FlowKey(family, int(row["protocol"]), saddr, sport, daddr, dport)


def _rows(keys: Collection[FlowKey], family: int) -> NDArray[np.void]:
    chosen = list(keys)
    rows = np.zeros(len(chosen), dtype=layout.dtype_of(f"flow{family}_key"))
    for name in ("saddr", "daddr"):
        raw = b"".join(getattr(key, name) for key in chosen)
        words = np.frombuffer(raw, dtype=np.uint32)
        rows[name] = words.reshape(-1, 4) if family == 6 else words
    for name in ("sport", "dport"):
        rows[name] = np.frombuffer(b"".join(getattr(key, name) for key in chosen), dtype=np.uint16)
    rows["protocol"] = [key.protocol for key in chosen]
    return rows
