"""The common part of the netfilter modes: the order of a sync, unprogrammed service ports, stale flows.

A mode writes a whole table (`_replace`) or what changed of it (`_change`). After a failure the next sync writes all. A
relay of mode userspace may drain next to any mode, which then leaves alone the datagrams that conntrack leads there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from hybrid_proxy.dataplane.diff import changed_services
from hybrid_proxy.dataplane.errors import DataplaneError, SyncError, Unsupported
from hybrid_proxy.dataplane.kernel import conntrack, tcp_segments
from hybrid_proxy.dataplane.kernel.nfmonitor import watch_ruleset
from hybrid_proxy.dataplane.kernel.other_proxies import may_have_left
from hybrid_proxy.dataplane.kernel.tcp_segments import Segment
from hybrid_proxy.dataplane.localhost import Localhost
from hybrid_proxy.dataplane.mode import Options, Programmer, RequestMaintenance, SyncResult
from hybrid_proxy.dataplane.reports import Status, Unprogrammed
from hybrid_proxy.dataplane.stale import Gone, Judge, Place, Socket, gone_endpoints, new_places
from hybrid_proxy.dataplane.table import EMPTY, Entry, EntryKey, NodeNetwork, Protocol, ServiceTable, family_of
from hybrid_proxy.dataplane.unmet import Unmet

log = logging.getLogger(__name__)

NEARLY_FULL: Final = 0.95  # of conntrack: then the kernel begins to drop entries early (nf_conntrack_max95)
OWN_TOOLS: Final = {"iptables-nft-re", "ip6tables-nft-r"}  # iptables-nft-restore, as the kernel names processes
# A socket that replied to a stray segment replies to no other one for half a second (net.ipv4.tcp_invalid_ratelimit).
CHALLENGE_SECONDS: Final = 0.6  # before the second time; then twice as long each time, because packets may be lost
CHALLENGE_MOST_SECONDS: Final = 2.4
RELAY_TABLE: Final = "hybrid-proxy-userspace"
RELAY_PORTS: Final = "listeners"  # a set of that table: protocol . proxy port


def relays(node: NodeNetwork) -> Collection[Socket]:
    """Returns the proxy ports of this node at which a relay of mode userspace receives datagrams, as its table says."""
    if not may_have_left("userspace", None):
        return ()
    from hybrid_proxy.dataplane.kernel.nfnetlink import NftablesError
    from hybrid_proxy.dataplane.nftables.expressions import FAMILIES
    from hybrid_proxy.dataplane.nftables.schema import PORT, PROTOCOL, Set
    from hybrid_proxy.dataplane.nftables.wire import Kernel

    found = set[Socket]()
    with contextlib.closing(Kernel(RELAY_TABLE, {RELAY_PORTS: Set(RELAY_PORTS, (PROTOCOL, PORT))})) as kernel:
        for version, family in FAMILIES.items():
            addresses = [at for at in (*node.primary, *node.addresses) if family_of(at) == version]
            try:
                ports = [port for protocol, port in kernel.contents(family, RELAY_PORTS) if protocol == Protocol.UDP]
            except NftablesError as error:
                if error.code != errno.ENOENT:
                    raise
            else:
                found.update((address, int(port)) for address in addresses for port in ports)
    return found


def refuse_full_conntrack() -> None:
    """Check that conntrack has room. With our rules it begins to track all traffic of the node.

    Raises:
        Unsupported: it is so full that the kernel would drop packets of flows that it does not know yet.
    """
    found = conntrack.fill()
    if found is not None and found.used > found.limit * NEARLY_FULL:
        has = f"it has {found.used} entries of at most {found.limit}"
        raise Unsupported("room in conntrack", f"{has}: raise net.netfilter.nf_conntrack_max")


class NetfilterMode(Programmer):
    """The common base of the `dataplane.mode.Programmer` of these modes.

    `monitoring` is set while the kernel reports foreign changes of our rules, `_touched` when there were some.
    """

    writes: str  # what a sync writes, for messages
    _unmet: Unmet
    needs_sources = True  # its packets to loopback addresses would keep their source: see dataplane.localhost

    def __init__(self, options: Options, request_maintenance: RequestMaintenance) -> None:
        self.options = options
        self.table: ServiceTable = EMPTY
        self.stale_deleted = Counter({4: 0, 6: 0})  # conntrack entries, by family
        self.connections_reset = 0  # to endpoints that were gone
        self.monitoring = threading.Event()
        self._request_maintenance = request_maintenance
        self._full = True  # the next sync writes everything
        self._programmed = False
        self._unprogrammed: dict[EntryKey, Unprogrammed] = {}
        self._judges = True  # conntrack entries
        self._former: Collection[conntrack.Key] = ()  # frontends that were programmed when this process began
        self._watched = False  # the rules are, by a thread
        self._changed_by = set[str]()  # programs that changed them; empty text: the kernel did not say which
        self._touched, self._stop = threading.Event(), threading.Event()
        self._localhost = Localhost(options, self.name, self.repaired) if self.needs_sources else None

    # Changes

    def sync(self, table: ServiceTable) -> SyncResult:
        names: Collection[str] = changed_services(self.table, table)
        if self.options.all_or_nothing and not self._programmed:
            refuse_full_conntrack()
        whole = self._full or self._must_replace(table, names)
        if whole:
            names = dict.fromkeys((*table.services, *self.table.services))
        if self._localhost is not None:  # before the rules, which do nothing for sockets without a source
            self._localhost.apply(table)
        result = self._write(table, names, whole=whole)
        before, gone = self.table, gone_endpoints(self.table, table, names)
        self.table, self._full, self._programmed = table, False, True
        self._written()
        self._unmet.keep_up(table)
        self._judge(before, names, repaired=whole)
        if gone:
            self._reset_connections(gone)
        return result

    @property
    def unprogrammed(self) -> Collection[Unprogrammed]:
        return self._unprogrammed.values()

    def _reset_connections(self, gone: Collection[Gone]) -> None:
        """Reset the clients of endpoints that are gone; called when the rules lead elsewhere."""

    def _write(self, table: ServiceTable, names: Collection[str], *, whole: bool) -> SyncResult:
        old = {entry.key: entry for entry in self.table.entries(names)}
        new = {entry.key: entry for entry in table.entries(names)}
        for key in list(self._unprogrammed) if whole else old:
            self._unprogrammed.pop(key, None)
        for key, entry in new.items():
            if reason := self._why_unsupported(entry):
                self._unprogrammed[key] = Unprogrammed(entry.name, reason)
        try:
            if whole:
                self._replace(table)
            else:
                self._change(table, names)
        except (DataplaneError, OSError, ValueError) as error:
            self._full = True
            self._failed()
            raise SyncError(f"{self.writes} could not be programmed: {error}") from error
        changed = sum(
            1 for key, entry in new.items() if key not in self._unprogrammed and (whole or old.get(key) != entry)
        )
        return SyncResult(changed, len(old.keys() - new.keys()))

    def _must_replace(self, table: ServiceTable, names: Collection[str]) -> bool:
        """True if more than these services must be written."""
        raise NotImplementedError

    def _replace(self, table: ServiceTable) -> None:
        raise NotImplementedError

    def _change(self, table: ServiceTable, names: Collection[str]) -> None:
        raise NotImplementedError

    def _written(self) -> None:
        """Hook: a table was programmed."""

    def _failed(self) -> None:
        """Hook: a table could not be programmed."""

    def _why_unsupported(self, entry: Entry) -> str:
        """Says why a service port cannot be programmed; empty: it can."""
        return ""

    def _supported(self, table: ServiceTable, names: Iterable[str], family: int) -> tuple[Entry, ...]:
        """Returns the service ports of these services that are programmed in a family."""
        return tuple([e for e in table.entries(names) if e.family == family and not self._why_unsupported(e)])

    def _judge(self, before: ServiceTable, names: Collection[str], *, repaired: bool) -> None:
        """Delete the stale conntrack entries of these services. `repaired`: any rule may have been absent."""
        former, self._former = self._former, ()
        if not self._judges:
            return
        judge = Judge(before, self.table, names, self._relays, former)
        self._delete_stale(judge, new_places(EMPTY if repaired else before, self.table, names))

    def _delete_stale(self, judge: Judge, openings: Collection[Place]) -> None:
        self.stale_deleted.update(conntrack.delete_stale(judge, openings))

    def _relays(self) -> Collection[Socket]:
        """Returns the proxy ports of this node at which our relay receives datagrams."""
        return relays(self.table.node)

    def other_mode_stopped(self) -> None:
        self._judge(EMPTY, self.table.services.keys(), repaired=True)

    # Drift

    def _watch_rules(self, tables: Collection[str]) -> None:
        """Let a thread request `maintain` when another program changes these tables (`ip nat`); the first call does."""
        if self._watched:
            return
        self._watched = True

        def watch() -> None:
            try:
                watch_ruleset(self.ruleset_changed, self._stop, tables, self.monitoring)
            except OSError as error:
                every = self.options.sync_seconds
                log.warning("what others change of %s is only found every %g s: %s", self.writes, every, error)
            self.monitoring.clear()

        threading.Thread(target=watch, name=f"{self.name}-drift", daemon=True).start()

    def ruleset_changed(self, program: str) -> None:
        """Note that another process changed our tables; called from any thread."""
        if program not in OWN_TOOLS:
            self._changed_by.add(program)
        self._touched.set()
        self._request_maintenance()

    def _changers(self) -> str:
        """Returns who changed our tables since the last call; empty: it is not known of each change."""
        names, self._changed_by = self._changed_by, set()
        return " or ".join(sorted(names)) * ("" not in names)

    def _maintain_common(self) -> None:
        if self._localhost is not None:
            self._localhost.maintain()

    # What is asked

    def warnings(self) -> list[str]:
        """Returns what the table asks for and this mode does not do."""
        return self._unmet.warnings(self.table)

    def counters(self) -> dict[str, int]:
        served = self._localhost.counters() if self._localhost is not None else {}
        reset = {"connections_reset": self.connections_reset}
        return {"stale_conntrack_entries_deleted": self.stale_deleted.total(), **reset, **served}

    def _status(self, **parts: Any) -> Status:
        """Returns the status with `parts`, which only this mode has."""
        reasons = [self._localhost.reason] if self._localhost is not None and self._localhost.reason else []
        return Status(
            mode=self.name,
            unprogrammed=list(self._unprogrammed.values()),
            audit_repairs=self.repaired.count,
            stale_deleted={f"IPv{family}": count for family, count in self.stale_deleted.items()},
            **({"warnings": [*self.warnings(), *reasons]} | parts),
        )

    def close(self) -> None:
        self._stop.set()
        if self._localhost is not None:
            self._localhost.close()


def _challenge(ends: Iterable[conntrack.FlowKey]) -> None:
    """Make these clients send a segment (`tcp_segments`)."""
    tcp_segments.send(
        Segment(end.family, end.daddr, end.dport, end.saddr, end.sport, flags=tcp_segments.SYN_ACK) for end in ends
    )


class TranslatingMode(NetfilterMode):
    """A mode whose flows are known to conntrack alone: they go on as long as its chains exist, even empty ones."""

    def __init__(self, options: Options, request_maintenance: RequestMaintenance) -> None:
        super().__init__(options, request_maintenance)
        # When clients are challenged again, and how long after the time before.
        self._challenged: list[tuple[float, float, list[conntrack.FlowKey]]] = []

    def drain(self, table: ServiceTable) -> None:
        """Remove all rules that lead to services. The kernel translates as long as a chain of type nat exists.

        The mode that serves judges conntrack's entries.
        """
        self._judges = False
        node = msgspec.structs.replace(table.node, node_port_addresses=(), loopback=(), service_cidrs=())
        self.sync(ServiceTable({}, node))

    def _reset_connections(self, gone: Collection[Gone]) -> None:
        """Delete their entries and make each client send a segment, which meets the rules as a new connection would.

        So another backend answers it by a reset, or, if there is none, a rule does. A SYN/ACK from the service's
        address makes a client send it (`tcp_segments`).
        """
        names = {one.entry.name.partition(":")[0] for one in gone}
        services = frontends(self.table, (Protocol.TCP,), names)
        places = {(one.address, one.port, int(Protocol.TCP)) for one in gone}
        try:
            ends = conntrack.forget_connections(services, places)
            _challenge(ends)
        except (DataplaneError, OSError) as error:
            log.warning("connections to endpoints that are gone could not be reset: %s", error)
        else:
            self.connections_reset += len(ends)
            self._challenged.append((time.monotonic() + CHALLENGE_SECONDS, CHALLENGE_SECONDS, ends))

    def _maintain_common(self) -> None:
        super()._maintain_common()
        now = time.monotonic()
        due = [one for one in self._challenged if one[0] <= now]
        self._challenged = [one for one in self._challenged if one[0] > now]
        self._challenged += [(now + 2 * s, 2 * s, ends) for _, s, ends in due if s < CHALLENGE_MOST_SECONDS]
        again = {end for _, _, ends in due for end in ends}
        with contextlib.suppress(DataplaneError, OSError):
            # The backend may have an ended connection from the port that masquerading chose, and answers that by no
            # reset (RFC 9293, 3.10.7.8: TIME-WAIT). The next reply gets another port.
            conntrack.forget_resumed(again)
            _challenge(again)

    def open_flows(self, table: ServiceTable) -> Mapping[str, int]:
        """Count open flows, and those of the node's sockets to backends that would lose a port given by conntrack."""
        backends = ((at.address, at.port, int(entry.protocol)) for entry in table.entries() for at in entry.serving)
        return conntrack.open_flows(frontends(table)) + conntrack.open_renumbered(backends)

    def abandon(self, table: ServiceTable) -> None:
        """Give up the remaining datagrams. TCP is unchanged: it goes on if another table of type nat exists."""
        conntrack.delete_translated({key: None for key in frontends(table) if key[2] != Protocol.TCP})


def frontends(
    table: ServiceTable, protocols: Collection[Protocol] = tuple(Protocol), names: Iterable[str] | None = None
) -> dict[conntrack.Key, None]:
    """Returns address, port and protocol of every frontend of these services, or of those with these protocols."""
    return {
        (frontend.address, frontend.port, int(entry.protocol)): None
        for entry in table.entries(names)
        if entry.protocol in protocols
        for frontend in entry.frontends
    }
