"""Mode ipvs, open on this node."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from hybrid_proxy.dataplane import localhost
from hybrid_proxy.dataplane.diff import changed_services
from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported
from hybrid_proxy.dataplane.kernel.ipset import LIMIT, Ipsets
from hybrid_proxy.dataplane.kernel.ipvs import Ipvs as VirtualServers
from hybrid_proxy.dataplane.kernel.netlink import NetlinkFailed
from hybrid_proxy.dataplane.mode import (
    Mode,
    Options,
    RequestMaintenance,
    SyncResult,
)
from hybrid_proxy.dataplane.modes.ipvs import writer
from hybrid_proxy.dataplane.modes.ipvs.audit import Audit
from hybrid_proxy.dataplane.modes.ipvs.draining import READINGS, Flows, sources
from hybrid_proxy.dataplane.modes.ipvs.listing import Programmed
from hybrid_proxy.dataplane.modes.ipvs.lower import PREFIX, Lowered, Member, Node, Wanted, is_excluded, lower, node_of
from hybrid_proxy.dataplane.modes.ipvs.marks import Marks
from hybrid_proxy.dataplane.modes.ipvs.plan import Actual, Steps, give_up, plan, quiet
from hybrid_proxy.dataplane.netfilter import NetfilterMode
from hybrid_proxy.dataplane.reports import Fill, IpvsStatus, Status
from hybrid_proxy.dataplane.slow_start import NO_PARTS, Parts, SlowStart, slowed
from hybrid_proxy.dataplane.stale import Judge, Place
from hybrid_proxy.dataplane.table import EMPTY, Entry, EntryKey, NodeNetwork, Protocol, ServiceTable, service_of
from hybrid_proxy.dataplane.unmet import Unmet
from hybrid_proxy.dataplane.virtual_servers import Change, Server, Timeouts, Value, Verb

log = logging.getLogger(__name__)

DRAIN_SECONDS: Final = 5.0  # how often real servers of weight 0 are checked; kube-proxy does it each minute
NOTHING: Final = Lowered({}, {}, frozenset())
_WEIGHING: Final = {"rr": "wrr", "lc": "wlc"}


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
    ) -> None:
        super().__init__(options, wake)
        self._unmet = Unmet(None, weighs=True, resets=False)
        self.kernel = kernel or writer.open_kernel(options)
        self._clock = clock
        self.actual = Actual()
        self.lowered: dict[str, Lowered] = {}
        self.audit = Audit(self.kernel, self.actual, self._settings, options.sync_seconds, clock)
        self._release = os.uname().release
        self.unset: dict[str, str] = {}  # settings of the kernel that could not be made
        self._members: Counter[Member] = Counter()
        self._addresses: Counter[str] = Counter()
        self._values: dict[Member, Value] = {}
        self._slow_start = SlowStart()
        self._parts: dict[EntryKey, Parts] = {}  # of the weights of real servers that start slowly, as programmed
        self._schedulers: dict[str, bool] = {options.ipvs.default_scheduler: True}
        self._marks = Marks(1 << EMPTY.node.masquerade_bit)
        self._node = Node()
        self._taken: Counter[tuple[str, int, int]] = Counter()
        self._draining: set[Server] = set()
        self._drain_at = 0.0
        self._owed = 0  # foreign changes that are not repaired yet
        self._left = False  # the mode drains
        self._flows = Flows(self.kernel, self.actual)
        self._watching = False

    # Changes

    def sync(self, table: ServiceTable) -> SyncResult:
        now, names = self._clock(), changed_services(self.table, table)
        self._slow_start.follow(now, self.table, table, names)
        others = {key: parts for key, parts in self._parts.items() if service_of(key) not in names}
        due = {key: parts for key, parts in self._slow_start.parts(now).items() if service_of(key) in names}
        self._parts = others | due
        return super().sync(table)

    def _must_replace(self, table: ServiceTable, names: Collection[str]) -> bool:
        """True if a service takes or gives up an address of node ports: then other services change, too."""
        return table.node != self.table.node or any(
            self._explicit(table, name) != self._explicit(self.table, name) for name in names
        )

    def _replace(self, table: ServiceTable) -> None:
        """Read everything from the kernel, and change whatever differs in place."""
        if self._programmed and not self._owed:  # a repair counts on whatever occasion it happens
            self._owed = len(self.audit.addresses())
        self.unset = self.kernel.set_sysctls(self._all_settings())
        options = self.options
        self.kernel.ipvs.set_timeouts(
            Timeouts(options.ipvs.tcp_timeout, options.ipvs.tcp_fin_timeout, options.ipvs.udp_timeout)
        )
        self.kernel.device.ensure()
        writer.make_sets(self.kernel)
        self._node = node_of(table.node, self.kernel.tables.families, self.options.ipvs.exclude_cidrs)
        found = writer.read_actual(self.kernel, self._node.masquerade)
        self._adopt(found)
        if self._left:
            self._quiet(table)
        else:
            self._serve(table)
        self.audit_repairs, self._owed = self.audit_repairs + self._owed, 0
        self._watch()

    def _serve(self, table: ServiceTable) -> None:
        self._lower_all(table)
        steps = self._plan_all()

        def ready() -> None:  # the rules' sets are full, and no packet arrives before the rules
            self.audit.rules = writer.write_rules(self.kernel, table.node, table.health_ports)

        writer.perform(self.kernel, steps, self.actual, ready)
        self.kernel.routes.hold({})
        self._note_draining(steps)

    def _adopt(self, found: Actual) -> None:
        self.actual.servers, self.actual.members = found.servers, found.members
        self.actual.addresses.clear()  # the watcher holds this very set
        self.actual.addresses.update(found.addresses)
        self._draining = {server for server, state in found.servers.items() if 0 in state.weights.values()}
        self._marks = Marks(self._node.masquerade, found.members)

    def _lower_all(self, table: ServiceTable) -> None:
        self.lowered = {}
        self._members, self._addresses, self._values = Counter(), Counter(), {}
        self._taken = Counter(place for name in table.services for place in self._explicit(table, name))
        for name in table.services:
            self._put(name, table.services[name])

    def _plan_all(self) -> Steps:
        servers: dict[Server, Wanted | None] = dict.fromkeys(self.actual.servers)
        for lowered in self.lowered.values():
            servers.update(lowered.servers)
        addresses = {**dict.fromkeys(self.actual.addresses, False), **dict.fromkeys(self._addresses, True)}
        return plan(self.actual, servers, self._wanted_members({**self.actual.members, **self._members}), addresses)

    def _wanted_members(self, members: Iterable[Member]) -> dict[Member, tuple[bool, Value]]:
        return {member: (self._members[member] > 0, self._values.get(member)) for member in members}

    def _change(self, table: ServiceTable, names: Collection[str]) -> None:
        """Write what changed; nothing else is read or written."""
        if self._left:
            return
        servers: dict[Server, Wanted | None] = {}
        members: set[Member] = set()
        addresses: set[str] = set()
        for name in names:
            old = self.lowered.get(name, NOTHING)
            new = self._put(name, table.services.get(name, ()))
            servers.update(dict.fromkeys(old.servers))
            members.update(old.members, new.members)
            addresses |= old.addresses | new.addresses
        for name in names:  # after all that go: a service may have taken over the server of another
            servers.update(self.lowered.get(name, NOTHING).servers)
        self._marks.give_back(server for server, wanted in servers.items() if wanted is None)
        steps = plan(
            self.actual, servers, self._wanted_members(members), {text: self._addresses[text] > 0 for text in addresses}
        )
        writer.perform(self.kernel, steps, self.actual)
        self._note_draining(steps)
        if table.health_ports != self.table.health_ports:
            self.audit.rules = writer.write_rules(self.kernel, table.node, table.health_ports)

    def _put(self, name: str, entries: tuple[Entry, ...]) -> Lowered:
        """Replace the needs of a service by its present ones."""
        old = self.lowered.pop(name, NOTHING)
        for member in old.members:
            if _release(self._members, member):
                self._values.pop(member, None)
        for address in old.addresses:
            _release(self._addresses, address)
        entries = tuple([slowed(entry, self._parts.get(entry.key, NO_PARTS)) for entry in entries])
        new = lower(entries, self._node, self._scheduler, self._marks.take, self._taken)
        self._members.update(new.members.keys())
        self._values.update({member: value for member, value in new.members.items() if value is not None})
        self._addresses.update(new.addresses)
        if new.servers or new.members:
            self.lowered[name] = new
        return new

    def _why_unsupported(self, entry: Entry) -> str:
        if entry.family in self.kernel.tables.families:
            return ""
        return f"IPv{entry.family} does not work here: {self.kernel.tables.missing.get(entry.family, 'no iptables')}"

    def _scheduler(self, entry: Entry) -> str:
        """Returns the entry's scheduler, if the kernel has it; the kernel is asked once for each."""
        default, asked = self.options.ipvs.default_scheduler, self._asked(entry)
        if asked not in self._schedulers:
            self._schedulers[asked] = self.kernel.ipvs.schedules(asked)
        return asked if self._schedulers[asked] else default

    def _asked(self, entry: Entry) -> str:
        """Returns the table's algorithm as a scheduler.

        The kernel has no random one, and its rr and lc know no weights. Where backends may start slowly, the scheduler
        is a weighted one all the time, which saves a change.
        """
        asked = self.options.ipvs.default_scheduler if entry.algorithm == "random" else entry.algorithm
        weighs = entry.slow_start or len({backend.weight for backend in entry.serving if backend.weight}) > 1
        return _WEIGHING.get(asked, asked) if weighs else asked

    def _explicit(self, table: ServiceTable, name: str) -> list[tuple[str, int, int]]:
        """Returns the addresses of a service that are node-port addresses too."""
        return [
            (frontend.address, frontend.port, int(entry.protocol))
            for entry in table.services.get(name, ())
            for frontend in entry.frontends
            if frontend.address is not None and frontend.address in table.node.node_port_addresses
        ]

    def _all_settings(self) -> dict[str, str]:
        return writer.sysctls(self.options, self._release, draining=self._left)

    def _settings(self) -> dict[str, str]:
        return {name: value for name, value in self._all_settings().items() if name not in self.unset}

    # Draining: the whole mode

    def drain(self, table: ServiceTable) -> None:
        if not self._left:
            self._left = self._full = True
        self.sync(table)

    def open_flows(self, table: ServiceTable) -> Mapping[str, int]:
        del table  # the virtual servers are known, those of services that are gone, too
        if not self._programmed:  # by another process
            self._adopt(writer.read_actual(self.kernel, self._node.masquerade))
        return self._flows.count()

    def abandon(self, table: ServiceTable) -> None:
        del table
        self._flows.forget()

    def _quiet(self, table: ServiceTable) -> None:
        steps = quiet(self.actual)
        writer.perform(self.kernel, steps, self.actual)
        self._note_draining(steps)
        self.audit.rules = writer.write_rules(self.kernel, table.node, table.health_ports, draining=True)
        for _ in range(READINGS):
            self._flows.look()
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
        writer.perform(self.kernel, give_up(self.actual, needed - self.actual.held.keys()), self.actual)

    def _delete_stale(self, judge: Judge, openings: Collection[Place]) -> None:
        if not self._left:
            super()._delete_stale(judge, openings)
            return
        try:  # of this mode's flows alone: the mode that serves judges its own
            self.stale_deleted.update(self._flows.forget_stale(judge))
        except (DataplaneError, OSError) as error:
            log.warning("datagrams that lead to endpoints that are gone still go there: %s", error)

    # Draining: real servers

    def _note_draining(self, steps: Steps) -> None:
        self._draining.update(
            change.server for change in steps.servers if change.destination is not None and change.weight == 0
        )

    def _drain(self) -> None:
        """Remove real servers of weight 0 whose last connection ended (row 4.9)."""
        if not self._draining or self._clock() < self._drain_at:
            return
        self._drain_at = self._clock() + DRAIN_SECONDS
        changes = []
        for server in list(self._draining):
            state = self.actual.servers.get(server)
            leaving = [each for each, weight in state.weights.items() if weight == 0] if state else []
            if not leaving:
                self._draining.discard(server)
                continue
            loads = self.kernel.ipvs.destinations(server)
            for destination in leaving:
                load = loads.get(destination)
                if load is None or not load.active + load.inactive:
                    changes.append(Change(Verb.DELETE_DESTINATION, server, None, destination))
        if changes:
            self.kernel.ipvs.change(changes)
            for change in changes:
                writer.note(self.actual, change)
            log.info("%d real servers without connections are gone", len(changes))

    # Drift

    def _watch(self) -> None:
        if not self._watching:
            self.kernel.device.watch(self.actual.addresses, self._lost, self._stop)
            self._watching = True

    def _lost(self) -> None:
        """Note that one of our addresses, or the device, is gone. Called by the watching thread."""
        self.audit.address_lost.set()
        self._request_maintenance()

    def may_have_drifted(self) -> bool:
        """True if it is time to compare."""
        return not self._full and self.audit.due

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
        self._owed += len(self.audit.step())
        if self._owed:
            self._repair()

    def _let_start(self) -> None:
        """Set the weights that are due of real servers that start slowly."""
        due, former = self._slow_start.parts(self._clock()), self._parts
        keys = [key for key in {*due, *former} if due.get(key) != former.get(key)]
        if not keys:
            return
        self._parts = due
        try:
            self._change(self.table, {service_of(key) for key in keys})
        except (DataplaneError, OSError) as error:
            self._parts = former  # the next call repeats it
            raise DataplaneError(f"weights of real servers that start slowly could not be changed: {error}") from error

    def _repair(self) -> None:
        """Read everything and repair what differs; the next `maintain` repeats what failed."""
        try:
            self._replace(self.table)
        except (DataplaneError, OSError) as error:
            raise DataplaneError(f"what others changed could not be put right: {error}") from error

    # Status

    def warnings(self) -> list[str]:
        entries = list(self.table.entries())
        messages = self._unmet.warnings(self.table)
        for algorithm in sorted(name for name, works in self._schedulers.items() if not works):
            who = [entry.name for entry in entries if self._asked(entry) == algorithm]
            if who:
                messages.append(
                    f"{len(who)} service ports ask for {algorithm} ({who[0]}{', ...' if len(who) > 1 else ''}), which "
                    f"this kernel does not have as a scheduler: they get {self.options.ipvs.default_scheduler}"
                )
        excluded = sum(1 for e in entries for f in e.frontends if f.address and is_excluded(f.address, self._node))
        if excluded:
            messages.append(f"{excluded} addresses are in --ipvs-exclude-cidrs and left to others")
        sticky = sum(1 for e in entries if e.affinity_seconds and len(e.frontends) > 1)
        if sticky:
            messages.append(f"{sticky} service ports have an affinity of its own for each of their addresses")
        if self._marks.refused:
            messages.append(
                f"{self._marks.refused} addresses serve external clients like internal ones: no mark is free"
            )
        messages += [f"{reason}" for reason in self.unset.values()]
        return messages

    def status(self) -> Status:
        draining = sum(
            1 for server in self._draining if (state := self.actual.servers.get(server)) is not None
            for weight in state.weights.values() if weight == 0
        )  # fmt: skip
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
                draining=draining,
                variant=self.kernel.tables.variant,
                families=list(self.kernel.tables.families),
                strict_arp=self.options.ipvs.strict_arp,
            ),
        )

    def close(self) -> None:
        super().close()
        self.kernel.close()


def _release(counts: Counter[Any], held: object) -> bool:
    """Count one holder less. Returns True if it was the last."""
    counts[held] -= 1
    if counts[held] > 0:
        return False
    del counts[held]
    return True


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
    del options, names
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
