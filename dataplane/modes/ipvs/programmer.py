"""Mode ipvs, open on this node."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final

from hybrid_proxy.dataplane import localhost
from hybrid_proxy.dataplane.diff import changed_services
from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported
from hybrid_proxy.dataplane.kernel.ipset import LIMIT, Ipsets
from hybrid_proxy.dataplane.kernel.ipvs import Ipvs as VirtualServers
from hybrid_proxy.dataplane.kernel.netlink import NetlinkFailed
from hybrid_proxy.dataplane.kernel.repairs import processor_seconds
from hybrid_proxy.dataplane.mode import Mode, Options, RequestMaintenance, SyncResult
from hybrid_proxy.dataplane.modes.ipvs import writer
from hybrid_proxy.dataplane.modes.ipvs.audit import Audit
from hybrid_proxy.dataplane.modes.ipvs.draining import READINGS, Flows, sources
from hybrid_proxy.dataplane.modes.ipvs.listing import Programmed
from hybrid_proxy.dataplane.modes.ipvs.lower import PREFIX, Node, is_excluded, node_of
from hybrid_proxy.dataplane.modes.ipvs.needs import Needs, explicit
from hybrid_proxy.dataplane.modes.ipvs.plan import NO_STEPS, Actual, quiet
from hybrid_proxy.dataplane.netfilter import NetfilterMode
from hybrid_proxy.dataplane.reports import Fill, IpvsStatus, Status, several
from hybrid_proxy.dataplane.slow_start import SlowStart
from hybrid_proxy.dataplane.stale import Judge, Place
from hybrid_proxy.dataplane.table import EMPTY, Entry, NodeNetwork, Protocol, ServiceTable, service_of
from hybrid_proxy.dataplane.unmet import Unmet
from hybrid_proxy.dataplane.virtual_servers import Change, Timeouts, Verb

log = logging.getLogger(__name__)

DRAIN_SECONDS: Final = 5.0  # how often real servers of weight 0 are checked; kube-proxy does it each minute


class Ipvs(NetfilterMode):
    """A `dataplane.mode.Programmer`.

    Raises:
        Unsupported: this machine cannot run the mode; says what is missing.
    """

    name = "ipvs"
    writes = "IPVS"

    def __init__(
        self,
        options: Options,
        wake: RequestMaintenance,
        kernel: writer.Kernel | None = None,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = processor_seconds,
    ) -> None:
        super().__init__(options, wake)
        self._unmet = Unmet(None, weighs=True, resets=False)
        self.kernel = kernel or writer.open_kernel(options)
        self._clock = clock
        self.actual = Actual()
        self.needs = Needs(options.ipvs.default_scheduler, self.kernel.ipvs.schedules)
        self.audit = Audit(self.kernel, self.actual, self._settings, options.sync_seconds, clock, spent)
        self.unset: dict[str, str] = {}  # settings of the kernel that could not be made
        self._slow_start = SlowStart()
        self._drain_at = 0.0
        self._owed = 0  # foreign changes that are not repaired yet
        self._left = False  # the mode drains
        self._flows = Flows(self.kernel, self.actual)
        self.kernel.device.watch(self.actual.addresses, self._lost, self._stop)

    # Changes

    def sync(self, table: ServiceTable) -> SyncResult:
        now, names = self._clock(), changed_services(self.table, table)
        self._slow_start.follow(now, self.table, table, names)
        others = {key: parts for key, parts in self.needs.parts.items() if service_of(key) not in names}
        due = {key: parts for key, parts in self._slow_start.parts(now).items() if service_of(key) in names}
        self.needs.parts = others | due
        return super().sync(table)

    def _must_replace(self, table: ServiceTable, names: Collection[str]) -> bool:
        """True if a service takes or gives up an address of node ports: then other services change, too."""
        return table.node != self.table.node or any(
            explicit(table, name) != explicit(self.table, name) for name in names
        )

    def _replace(self, table: ServiceTable) -> None:
        """Read everything from the kernel, and change whatever differs in place."""
        if self._programmed and not self._owed:  # a repair counts on whatever occasion it happens
            self._owed = len(self.audit.addresses())
        self.unset = {}
        self.unset = self.kernel.set_sysctls(self._settings())
        options = self.options
        self.kernel.ipvs.set_timeouts(
            Timeouts(options.ipvs.tcp_timeout, options.ipvs.tcp_fin_timeout, options.ipvs.udp_timeout)
        )
        self.kernel.device.ensure()
        writer.make_sets(self.kernel)
        node = node_of(table.node, self.kernel.tables.families, options.ipvs.exclude_cidrs)
        self._adopt(node)
        if self._left:
            self._quiet(table)
        else:
            self._serve(table)
        self.repaired.count, self._owed = self.repaired.count + self._owed, 0

    def _serve(self, table: ServiceTable) -> None:
        steps = self.needs.replace(table, self.actual)

        def ready() -> None:  # the rules' sets are full, and no packet arrives before the rules
            self.audit.rules = writer.write_rules(self.kernel, table.node, table.health_ports)

        writer.perform(self.kernel, steps, self.actual, ready)
        self.kernel.routes.hold({})

    def _adopt(self, node: Node) -> None:
        found = writer.read_actual(self.kernel, node.masquerade)
        self.actual.servers, self.actual.members = found.servers, found.members
        self.actual.addresses.clear()  # the watcher holds this very set
        self.actual.addresses.update(found.addresses)
        self.needs.adopt(node, found)

    def _change(self, table: ServiceTable, names: Collection[str]) -> None:
        """Write what changed; nothing else is read or written."""
        if self._left:
            return
        writer.perform(self.kernel, self.needs.change(table, names, self.actual), self.actual)
        if table.health_ports != self.table.health_ports:
            self.audit.rules = writer.write_rules(self.kernel, table.node, table.health_ports)

    def _why_unsupported(self, entry: Entry) -> str:
        if entry.family in self.kernel.tables.families:
            return ""
        return f"IPv{entry.family} does not work here: {self.kernel.tables.missing.get(entry.family, 'no iptables')}"

    def _settings(self) -> dict[str, str]:
        wanted = writer.sysctls(self.options, draining=self._left)
        return {name: value for name, value in wanted.items() if name not in self.unset}

    # Draining: the whole mode

    def drain(self, table: ServiceTable) -> None:
        if not self._left:
            self._left = self._full = True
        self.sync(table)

    def open_flows(self, table: ServiceTable) -> Mapping[str, int]:
        # Of the table nothing is needed: the virtual servers are known, also those of services that are gone.
        if not self._programmed:  # by another process
            self._adopt(self.needs.node)
        return self._flows.count()

    def abandon(self, table: ServiceTable) -> None:
        self._flows.forget()

    def _quiet(self, table: ServiceTable) -> None:
        writer.perform(self.kernel, quiet(self.actual), self.actual)
        self.audit.rules = writer.write_rules(self.kernel, table.node, table.health_ports, draining=True)
        for _ in range(READINGS):
            self._flows.read()
        self._hold(table.node)

    def _hold(self, node: NodeNetwork) -> None:
        """Keep the addresses that flows need, and no others.

        A new connection of this node to a bound address uses that address as its source too, and would lose it. So they
        are held by routes, if there is another source; that of an open connection stays. Where the mode that serves
        translates at sockets, there are no such connections. Then the address stays bound, because an unconnected
        socket of the node chooses its source for each datagram.
        """
        ours = {element.address for name, element in self.actual.members if name.endswith("-ADDRESSES")}
        needed = self._flows.addresses & ours
        datagrams = {server.address: server for server in self.actual.servers if server.protocol == Protocol.UDP}
        bound = {each for each in needed & datagrams.keys() if self.kernel.translated_at_sockets(datagrams[each])}
        self.actual.held = sources(needed - bound, node)
        try:
            self.kernel.routes.hold(self.actual.held)
        except NetlinkFailed as error:
            log.warning("%s: while mode ipvs drains, new connections of this node to it end with the mode", error)
            self.actual.held = self.kernel.routes.held()
        others = sorted(self.actual.addresses.difference(needed - self.actual.held.keys()))
        writer.perform(self.kernel, NO_STEPS._replace(unbind=others), self.actual)

    def _delete_stale(self, judge: Judge, openings: Collection[Place]) -> None:
        if not self._left:
            super()._delete_stale(judge, openings)
            return
        try:  # of this mode's flows alone: the mode that serves judges its own
            self.stale_deleted.update(self._flows.forget_stale(judge))
        except (DataplaneError, OSError) as error:
            log.warning("datagrams that lead to endpoints that are gone still go there: %s", error)

    # Draining: real servers

    def _drain(self) -> None:
        """Remove real servers of weight 0 whose last connection ended (row 4.9)."""
        if self._clock() < self._drain_at:
            return
        self._drain_at = self._clock() + DRAIN_SECONDS
        changes = []
        for server, leaving in self.actual.leaving():
            loads = self.kernel.ipvs.destinations(server)
            for destination in leaving:
                load = loads.get(destination)
                if load is None or not load.active + load.inactive:
                    changes.append(Change(Verb.DELETE_DESTINATION, server, None, destination))
        if changes:
            writer.serve(self.kernel, changes, self.actual)
            log.info("%s without connections gone", several(len(changes), "real server is", "real servers are"))

    # Drift

    def _lost(self) -> None:
        """Note that one of our addresses, or the device, is gone. Called by the watching thread."""
        self.audit.address_lost.set()
        self._request_maintenance()

    def maintain(self) -> None:
        if self._full:
            return  # the next sync reads and writes everything
        self._maintain_common()
        if self._owed:
            self._repair()
        self._let_start()
        self._drain()
        if self._left and not self.actual.held.keys() | self.actual.addresses <= self._flows.addresses:
            self._hold(self.table.node)
        if damage := self.audit.step():
            self.repaired.add(damage)
            self._owed += len(damage)
        if self._owed:
            self._repair()

    def _let_start(self) -> None:
        """Set the weights that are due of real servers that start slowly."""
        due, former = self._slow_start.parts(self._clock()), self.needs.parts
        keys = [key for key in {*due, *former} if due.get(key) != former.get(key)]
        if not keys:
            return
        self.needs.parts = due
        try:
            self._change(self.table, {service_of(key) for key in keys})
        except (DataplaneError, OSError) as error:
            self.needs.parts = former  # the next call repeats it
            raise DataplaneError(f"weights of real servers that start slowly could not be changed: {error}") from error

    def _repair(self) -> None:
        """Read everything and repair what differs; the next `maintain` repeats what failed."""
        try:
            self._replace(self.table)
        except (DataplaneError, OSError) as error:
            raise DataplaneError(f"what another program changed could not be repaired: {error}") from error

    # Status

    def warnings(self) -> list[str]:
        entries = list(self.table.entries())
        messages = super().warnings()
        for algorithm in sorted(name for name, works in self.needs.schedulers.items() if not works):
            who = [entry.name for entry in entries if self.needs.asked(entry) == algorithm]
            if who:
                named = f"{several(len(who), 'service port')} ({who[0]}{', ...' if len(who) > 1 else ''})"
                instead = f"as a scheduler: {self.options.ipvs.default_scheduler} serves instead"
                messages.append(f"{named} asking for {algorithm}, which this kernel does not have {instead}")
        excluded = sum(1 for e in entries for f in e.frontends if f.address and is_excluded(f.address, self.needs.node))
        if excluded:
            messages.append(f"{several(excluded, 'address', 'addresses')} in --ipvs-exclude-cidrs, left to others")
        sticky = sum(1 for e in entries if e.affinity_seconds and len(e.frontends) > 1)
        if sticky:
            messages.append(f"{several(sticky, 'service port')} with an affinity of its own for each address")
        if refused := self.needs.marks.refused:
            served = several(refused, "address", "addresses")
            messages.append(f"{served} serving external clients like internal ones: no mark is free")
        messages += [f"{reason}" for reason in self.unset.values()]
        return messages

    def status(self) -> Status:
        elements = Counter(name for name, _ in self.actual.members)
        return self._status(
            fill={f"set {name}": Fill(count, LIMIT) for name, count in sorted(elements.items())},
            counters=self.counters(),
            slow_starts=len(self._slow_start),
            ipvs=IpvsStatus(
                scheduler=self.options.ipvs.default_scheduler,
                device=writer.DEVICE,
                addresses=len(self.actual.addresses),
                virtual_servers=len(self.actual.servers),
                draining=sum(len(leaving) for _, leaving in self.actual.leaving()),
                variant=self.kernel.tables.variant,
                families=list(self.kernel.tables.families),
                strict_arp=self.options.ipvs.strict_arp,
            ),
        )

    def close(self) -> None:
        super().close()
        self.kernel.close()


def clean(options: Options) -> int:
    """Remove all our objects from this network namespace. Returns how many."""
    return writer.clean() + bool(localhost.remove(options, Ipvs.name))


def probe(options: Options) -> str | None:
    """Create, and remove again, one of each object that the mode needs."""
    try:
        writer.open_kernel(options).close()
    except Unsupported as error:
        return str(error)
    except (DataplaneError, OSError) as error:
        return f"IPVS cannot be used here: {error}"
    return None


def look(options: Options, names: Mapping[int, str]) -> Programmed | None:
    """Read what is programmed, with or without a running agent."""
    try:
        sets = Ipsets()
    except Unsupported:
        return None
    with contextlib.closing(sets):
        if not sets.names(f"{PREFIX}4-") and not sets.names(f"{PREFIX}6-"):
            return None
        with contextlib.closing(VirtualServers()) as ipvs:
            return Programmed(sets, ipvs)


def drain(options: Options) -> bool:
    """Stop new flows; those that IPVS knows go on. Returns whether anything of the mode was here."""
    if look(options, {}) is None:
        return False
    with contextlib.closing(Ipvs(options, lambda: None)) as programmer:
        programmer.drain(EMPTY)
    return True


MODE = Mode("ipvs", Ipvs, clean, probe, look, drain)
