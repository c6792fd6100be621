"""Mode userspace: a relay process that serves connections, and rules that redirect clients to it."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from hybrid_proxy.dataplane.errors import DataplaneError, Occupied, SyncError, Unsupported
from hybrid_proxy.dataplane.kernel import policy
from hybrid_proxy.dataplane.kernel.conntrack import delete_translated, open_flows
from hybrid_proxy.dataplane.kernel.links import read_node
from hybrid_proxy.dataplane.kernel.nfnetlink import NftablesError
from hybrid_proxy.dataplane.mode import Mode, Options, RequestMaintenance
from hybrid_proxy.dataplane.modes.userspace import lower as low
from hybrid_proxy.dataplane.modes.userspace import messages as m
from hybrid_proxy.dataplane.modes.userspace import relay_client, tables
from hybrid_proxy.dataplane.modes.userspace.listing import Relayed
from hybrid_proxy.dataplane.modes.userspace.sockets import transparent_works
from hybrid_proxy.dataplane.modes.userspace.tables import LISTENERS, SETS, TABLE, answer_mark
from hybrid_proxy.dataplane.netfilter import NetfilterMode, frontends
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES
from hybrid_proxy.dataplane.nftables.ruleset import describe
from hybrid_proxy.dataplane.nftables.wire import Kernel, missing, remove_tables
from hybrid_proxy.dataplane.reports import Ejection, Fill, RelayStatus, Status, Unprogrammed, UserspaceStatus
from hybrid_proxy.dataplane.stale import Place, Socket
from hybrid_proxy.dataplane.table import EMPTY, Entry, NodeNetwork, Protocol, ServiceTable, socket_text
from hybrid_proxy.dataplane.unmet import Unmet

log = logging.getLogger(__name__)

TRIAL: Final = f"{TABLE}-trial"
END_SECONDS: Final = 5.0
STATUS_SECONDS: Final = 5.0


class _ClientAddresses:
    """The policy routing of replies to clients' addresses, which backends see as their source, to this node.

    `kept` are the families in which it works; in others backends see the node. `changes` has reports of changed routing
    rules and routes.
    """

    def __init__(self) -> None:
        self._possible = tuple(family for family in (4, 6) if transparent_works(family))
        self.kept = self._possible
        self.changes = policy.watch()

    def route(self, mark: int) -> None:
        kept = []
        for family in self._possible:
            try:
                policy.deliver_marked(family, mark)
                kept.append(family)
            except DataplaneError as error:
                log.warning("backends see the node's address instead of their clients': %s", error)
        self.kept = tuple(kept)

    def repair(self, mark: int) -> tuple[int, bool]:
        """Repairs removed rules. Returns how many, and whether a family works now that did not.

        Raises:
            DataplaneError: a rule cannot be repaired.
        """
        repaired, more = 0, False
        for family in self._possible:
            if family not in self.kept:
                with contextlib.suppress(DataplaneError):
                    policy.deliver_marked(family, mark)
                    more = True
            elif policy.deliver_marked(family, mark):
                repaired += 1
                log.warning("repaired: the routing rule of replies to clients' IPv%d addresses was gone", family)
        return repaired, more


class _Known(NamedTuple):
    """What is programmed of one service port."""

    family: int
    row: m.Row | None
    elements: tables.Elements


class Userspace(NetfilterMode):
    """The `dataplane.mode.Programmer` of mode userspace.

    Raises:
        Unsupported: this machine cannot run the mode; the message names what is missing.
        Occupied: another agent has a relay in this network namespace.
    """

    name = "userspace"
    needs_sources = False  # the relay is on this node, and has a source of its own
    writes = "the relay or its rules"

    def __init__(
        self, options: Options, request_maintenance: RequestMaintenance, clock: Callable[[], float] = time.monotonic
    ) -> None:
        reason = probe(options)
        if reason:
            raise Unsupported("the userspace mode", reason)
        super().__init__(options, request_maintenance)
        self._unmet = Unmet({"random", "rr"}, "round robin")
        self._clock = clock
        self._addresses = _ClientAddresses()
        self._bridged = frozenset[str]()  # networks of bridges, as the relay has them
        self._sctp = _has_sctp()
        self._known: dict[str, dict[str, _Known]] = {}  # service -> service port
        self._lost = threading.Event()
        self._drained: frozenset[str] | None = None  # services that had a proxy port when draining began
        self._listeners = frozenset[Place]()  # proxy ports while draining; replaced, since another thread reads it
        self._audit_at = 0.0
        self._kernel = Kernel(TABLE, SETS)
        self.client: relay_client.RelayClient = relay_client.open_client()
        self.adopted = not self.client.started
        self._watch_relay()
        self._watch_rules([f"{family.name} {TABLE}" for family in FAMILIES.values()])

    # Watching

    def _watch_relay(self) -> None:
        client = self.client

        def ended() -> None:
            if self.client is client and not self._stop.is_set():
                self._lost.set()
                self._request_maintenance()

        client.watch(ended)

    # Sync

    def _must_replace(self, table: ServiceTable, names: Collection[str]) -> bool:
        return self._lost.is_set() or self.table.node != table.node

    def _replace(self, table: ServiceTable) -> None:
        if self._lost.is_set():
            self._reopen()
        self._addresses.route(answer_mark(table.node))
        self._bridged = read_node().bridged
        self._program(table, dict.fromkeys((*table.services, *self._known)), whole=True)

    def _change(self, table: ServiceTable, names: Collection[str]) -> None:
        self._program(table, names, whole=False)

    def _failed(self) -> None:
        if self.client.broken:
            self._lost.set()

    def _program(self, table: ServiceTable, names: Collection[str], *, whole: bool) -> None:
        """Opens proxy ports, changes the rules in one transaction, then closes proxy ports that have no rule."""
        network = low.lower_node(table.node, self._addresses.kept, self._bridged)
        lowered: dict[str, dict[str, tuple[Entry, low.Lowered]]] = {}
        rows: dict[str, m.Row | None] = {}
        for name in names:
            ports = {
                low.row_key(entry): (entry, low.lower(entry, table.node)) for entry in table.services.get(name, ())
            }
            lowered[name] = ports
            for known in self._known.get(name, {}):
                rows[known] = None
            for key, (entry, found) in ports.items():
                if entry.family not in network.listen:
                    reason = f"this node has no IPv{entry.family} address at which the relay could listen"
                    self._unprogrammed[entry.key] = Unprogrammed(entry.name, reason)
                rows[key] = None if entry.key in self._unprogrammed else found.row
        applied = self.client.ask(m.Apply(rows, network if whole else None, whole), m.Applied)
        fresh: dict[str, dict[str, _Known]] = {}
        for name, ports in lowered.items():
            fresh[name] = {}
            for key, (entry, found) in ports.items():
                if key in applied.failed:
                    self._unprogrammed[entry.key] = Unprogrammed(entry.name, applied.failed[key])
                numbers = applied.ports.get(key, ())
                listen = network.listen.get(entry.family, "")
                elements = tables.elements_of(found, int(entry.protocol), listen, numbers)
                if self._draining:
                    elements = {place: value for place, value in elements.items() if place[0] == LISTENERS}
                fresh[name][key] = _Known(entry.family, rows[key], elements)
        self._kernel.commit(*self._work(table.node, fresh, whole=whole))
        self.client.ask(m.Commit(), m.Done)
        if whole:
            relay_client.drain_other_relays()
        for name, found_ports in fresh.items():
            if found_ports:
                self._known[name] = found_ports
            else:
                self._known.pop(name, None)
        if self._draining:
            self._listeners = frozenset(self._proxy_ports(table))

    def _work(self, node: NodeNetwork, fresh: dict[str, dict[str, _Known]], *, whole: bool) -> Iterator[op.Work]:
        for version, family in FAMILIES.items():
            new = _join(fresh.values(), version)
            if whole:
                yield family, tables.replace(family, node, new, draining=self._draining)
            else:
                yield family, tables.change(_join((self._known.get(name, {}) for name in fresh), version), new)

    def _why_unsupported(self, entry: Entry) -> str:
        if entry.protocol is Protocol.SCTP and not self._sctp:
            return "this kernel has no SCTP sockets, which a relay needs (module sctp)"
        return ""

    def _proxy_ports(self, table: ServiceTable) -> Iterator[Place]:
        listen = low.listen_addresses(table.node)
        for ports in self._known.values():
            for known in ports.values():
                for name, key in known.elements:
                    if name == LISTENERS:
                        yield listen[known.family], int(key[1]), int(key[0])

    def _relays(self) -> Collection[Socket]:
        return {(at, port) for at, port, protocol in self._proxy_ports(self.table) if protocol == Protocol.UDP}

    # Draining

    @property
    def _draining(self) -> bool:
        return self._drained is not None

    def drain(self, table: ServiceTable) -> None:
        """Redirects nothing new to the relay. It serves what conntrack redirects, half-open connections too."""
        if self._drained is None:
            self._drained = self._served()
            self._full = True
        services = {name: entries for name, entries in table.services.items() if name in self._drained}
        self.sync(ServiceTable(services, table.node, table.generation))

    def _served(self) -> frozenset[str]:
        """Returns the services that the relay has."""
        try:
            if self._lost.is_set():
                self._reopen()
            rows = self.client.ask(m.List(), m.Listing).rows
        except DataplaneError as error:
            self._failed()
            raise SyncError(f"the relay cannot be drained: {error}") from error
        return frozenset(row.name.rpartition(":")[0] for row in rows)

    def open_flows(self, table: ServiceTable) -> Mapping[str, int]:
        """Counts what conntrack redirects to relays, and relays' conversations that conntrack forgot."""
        counted, relayed = open_flows(frontends(table), self._listeners), Counter[str]()
        for relay in relay_client.relays(agent=False):
            report = relay.ask(m.Status(), m.Report, seconds=STATUS_SECONDS)
            # Without the services' addresses, conntrack does not tell which datagrams it redirects.
            relayed.update(TCP=report.connections, UDP=0 if table.services else report.sessions)
        relayed[Protocol.TCP.name] -= counted[Protocol.SCTP.name]
        return counted | relayed  # the larger one of each protocol

    def abandon(self, table: ServiceTable) -> None:
        """Ends UDP redirections, so that the next datagrams meet the other mode. Connections end with the relay."""
        others = {key: None for key in frontends(table) if key[2] != Protocol.TCP}
        delete_translated(others, self._listeners)

    # Drift

    def links_changed(self) -> None:
        """Has the relay told of new bridges, whose neighbours must see the node's address."""
        if self.table is not EMPTY and read_node().bridged != self._bridged:
            self._full = True
            self._request_maintenance()

    def maintain(self) -> None:
        """Repairs what another program changed, and retries what could not be programmed."""
        if self.table is EMPTY:
            return
        wrong = []
        if self._lost.is_set():
            wrong.append("the relay's process had ended")
        due = self._addresses.changes.discard() or self._clock() >= self._audit_at
        if self._touched.is_set() or (due and not self.monitoring.is_set()):
            self._touched.clear()
            wrong += self._drift()
        if wrong:
            self._full = True
        if due:
            self._audit_at = self._clock() + self.options.sync_seconds
            repaired, more = self._addresses.repair(answer_mark(self.table.node))
            self.repaired.count += repaired
            self._full |= more
        if wrong:
            self.repaired.add(wrong, len(wrong))
        if self._full:  # also when the last attempt failed
            self.sync(self.table)
        elif any("cannot listen" in left.reason for left in self._unprogrammed.values()):
            # There was no descriptor for their proxy ports, or no address yet.
            names = {left.entry.rpartition(":")[0] for left in self._unprogrammed.values()}
            self._write(self.table, names, whole=self._lost.is_set())

    def _drift(self) -> list[str]:
        """Describes how the tables differ from what this process wrote."""
        found = []
        for version, family in FAMILIES.items():
            name = f"{family.name} {TABLE}"
            try:
                skeleton = self._kernel.skeleton(family)
                if skeleton is None:
                    found.append(f"the table {name} was gone")
                    continue
                contents = {one: self._kernel.contents(family, one) for one in SETS if one in skeleton.sets}
            except (DataplaneError, OSError) as error:
                found.append(f"the table {name} could not be read ({error})")
                continue
            elements = _join(self._known.values(), version)
            changed = tables.differences(
                family, self.table.node, elements, skeleton, contents, draining=self._draining
            )  # fmt: skip
            if changed:
                found.append(f"the table {name} was changed: {describe(changed)}")
        return found

    def _reopen(self) -> None:
        self.client.close()
        self.client = relay_client.open_client()
        self._lost.clear()
        self._watch_relay()

    # Status

    def names(self) -> dict[int, str]:
        """Maps a number of each service port to its name."""
        rows = (known.row for ports in self._known.values() for known in ports.values() if known.row)
        return {number: row.name for number, row in enumerate(sorted(rows, key=lambda row: row.key), 1)}

    def warnings(self) -> list[str]:
        warnings = [
            "a client is connected before its backend: where no backend can be reached it sees a reset, not a refusal",
            "connections in flight end when the relay's process ends",
        ]
        warnings += super().warnings()
        if len(self._addresses.kept) < len(FAMILIES):
            warnings.append("client addresses cannot be kept here: backends see the node's address")
        return warnings

    def status(self) -> Status:
        report, trouble = self._relay_report()
        relay = None if report is None else msgspec.convert(report, RelayStatus, from_attributes=True)
        return self._status(
            adopted=self.adopted,
            fill={"files": Fill(*report.files) if report else Fill(0, 0)},
            warnings=self.warnings() + [trouble] * bool(trouble),
            counters=report.counters if report else {},
            failing=sorted(report.failing) if report else [],
            failing_in=report.failing_in if report else {},
            failing_backends=[
                Ejection(name, socket_text(*pair), False, None, f"{count} connections in a row failed")
                for name, pair, count in (report.failing_backends if report else ())
            ],
            userspace=UserspaceStatus(relay=relay, kept_addresses=[f"IPv{family}" for family in self._addresses.kept]),
        )

    def _relay_report(self) -> tuple[m.Report | None, str]:
        """Returns the relay's report and what it lacks. Without an answer, the report is None."""
        try:
            report = self.client.ask(m.Status(), m.Report, seconds=STATUS_SECONDS)
        except DataplaneError as error:
            if not self._stop.is_set():
                self._lost.set()  # the next maintenance reconnects, or starts another
            return None, str(error)
        return report, report.trouble

    def counters(self) -> dict[str, int]:
        report, _ = self._relay_report()
        return dict(report.counters) if report else {}

    def close(self) -> None:
        """Closes the mode. The relay goes on, unless nothing was ever programmed."""
        super().close()
        if self._full and self.client.started and not self._known:
            with contextlib.suppress(DataplaneError):
                self.client.ask(m.End(), m.Done)
        self.client.close()
        self._addresses.changes.close()
        self._kernel.close()


def _join(services: Iterable[Mapping[str, _Known]], family: int) -> tables.Elements:
    joined: tables.Elements = {}
    for ports in services:
        for known in ports.values():
            if known.family == family:
                joined.update(known.elements)
    return joined


def _has_sctp() -> bool:
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, int(Protocol.SCTP)).close()
    except OSError:
        return False
    return True


def probe(options: Options) -> str | None:
    """Returns what the kernel lacks for the tables, by creating and deleting them in one transaction."""
    node = NodeNetwork(primary=("192.0.2.1", "2001:db8::1"), service_cidrs=("192.0.2.0/24", "2001:db8::/108"))
    work: list[op.Work] = [(family, tables.replace(family, node, {})) for family in FAMILIES.values()]
    return missing(TRIAL, SETS, work)


def drain(options: Options) -> bool:
    """Redirects no more new flows to the relay, and tells whether one is here. Existing flows go on.

    Raises:
        Occupied: an agent in this mode runs.
    """
    found = False
    for relay in relay_client.relays(agent=False):  # each is connected until the next one
        found = True
        if agent := relay.ask(m.Status(), m.Report).agent:
            raise Occupied(f"the relay of this network namespace is in use by process {agent}: stop that first")
    if found:
        _stop_redirecting()
    return found


def _stop_redirecting() -> None:
    with contextlib.suppress(OSError), contextlib.closing(Kernel(TABLE)) as kernel:  # else there is no nf_tables
        for family in FAMILIES.values():
            with contextlib.suppress(NftablesError):  # there is no table
                kernel.commit((family, [op.FlushChain(chain) for chain in tables.LEADING]))


def clean(options: Options) -> int:
    """Removes rules, routing rules and relays, and returns how many there were.

    Open connections end: the relay resets them while conntrack still translates. The redirections of datagrams are
    deleted, too: they would lead to no socket for as long as a client sends.
    """
    removed = 0
    for relay in relay_client.relays(agent=True):  # Occupied, if an agent runs
        removed += 1
        _stop_redirecting()
        with contextlib.suppress(OSError):  # conntrack is not loaded
            Relayed(relay).forget_datagrams()
        ended = threading.Event()
        relay.watch(ended.set)
        relay.ask(m.End(), m.Done)
        if not ended.wait(END_SECONDS):
            raise DataplaneError(f"the relay, process {relay.pid}, does not end; end it with kill {relay.pid}")
    return removed + remove_tables(TABLE) + sum(policy.remove(version) for version in FAMILIES)


def look(options: Options, names: Mapping[int, str]) -> Relayed | None:
    """Returns a view of what the relay serves; None: there is no relay."""
    client = relay_client.connect(agent=False)
    if client is None:
        return None
    try:
        return Relayed(client)
    except DataplaneError:
        client.close()
        if (again := relay_client.connect(agent=False)) is None:  # it ended meanwhile
            return None
        again.close()
        raise


DROPS = {"refused_by_backends": "backend_refused", "silent_backends": "backend_unanswered"}
MODE = Mode("userspace", Userspace, clean, probe, look, drain, drops=DROPS)
