"""Opens mode ebpf on this node: fills maps with the service table, and attaches programs.

`TRANSITIONS` has every state of an open mode and what can happen in it.

             ADOPTED              PROGRAMMED            DRAINED
    OPENED ----------> LOADED ----------------> ATTACHED -------> DRAINING
      |  |                                       ^   |               |
      |  '----------------- PROGRAMMED ----------|   | ABANDONED     | ABANDONED
      | REPLACED                                 |   v               |
      '-----------> REPLACING -------------------'  LEFT <-----------'

`sync` reads as plan, write, publish: what the table changes, rows of maps, and what makes them serve.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from enum import Enum, auto
from typing import Final, NamedTuple

import msgspec

from hybrid_proxy.dataplane.diff import changed_services
from hybrid_proxy.dataplane.errors import DataplaneError, SyncError, Unsupported
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object, refusal
from hybrid_proxy.dataplane.kernel.foreign_rules import PassingRules
from hybrid_proxy.dataplane.kernel.grace import jiffies_per_second, wait_for_programs
from hybrid_proxy.dataplane.kernel.host_paths import pin_folder
from hybrid_proxy.dataplane.kernel.lock import hold
from hybrid_proxy.dataplane.kernel.repairs import Repairs
from hybrid_proxy.dataplane.mode import Event, Mode, Options, ProbePacket, Programmer, RequestMaintenance, SyncResult
from hybrid_proxy.dataplane.modes.ebpf.ejection.failover import Failover
from hybrid_proxy.dataplane.modes.ebpf.flows import foreign
from hybrid_proxy.dataplane.modes.ebpf.flows.collector import FlowGC, forget_half_open, open_flows
from hybrid_proxy.dataplane.modes.ebpf.flows.resets import Endpoint
from hybrid_proxy.dataplane.modes.ebpf.generations.ahead import AHEAD, enough_processors
from hybrid_proxy.dataplane.modes.ebpf.generations.datapath import Datapath
from hybrid_proxy.dataplane.modes.ebpf.generations.layouts import layout_record
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import Loader
from hybrid_proxy.dataplane.modes.ebpf.generations.replacement import Succession, has_other_sizes
from hybrid_proxy.dataplane.modes.ebpf.hooks.attachments import Attachments
from hybrid_proxy.dataplane.modes.ebpf.hooks.fast_path import FastPath
from hybrid_proxy.dataplane.modes.ebpf.hooks.interfaces import detach_everything
from hybrid_proxy.dataplane.modes.ebpf.maps import layout, sizes
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet, open_pinned_maps
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import NO_SERVICE, node_columns
from hybrid_proxy.dataplane.modes.ebpf.maps.orphans import collect, namespace_map, own_directory
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import folder_of, former_layouts, remove_pins
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import SETTINGS
from hybrid_proxy.dataplane.modes.ebpf.services import affinity
from hybrid_proxy.dataplane.modes.ebpf.services.audit import Audit
from hybrid_proxy.dataplane.modes.ebpf.services.plan import Rings
from hybrid_proxy.dataplane.modes.ebpf.services.store import ForeignEntries, Store
from hybrid_proxy.dataplane.modes.ebpf.views import listing
from hybrid_proxy.dataplane.modes.ebpf.views.events import PacketLog
from hybrid_proxy.dataplane.modes.ebpf.views.reports import Reports
from hybrid_proxy.dataplane.reports import Ejection, ExplainAnswer, PacketEvent, Status, TrafficRow, Unprogrammed
from hybrid_proxy.dataplane.table import EMPTY, Entry, NodeNetwork, ServiceTable
from hybrid_proxy.dataplane.timings import START

MOST_DEFERRED = 32  # changes whose slots wait, before a grace period is asked for

log = logging.getLogger(__name__)


class State(Enum):
    """The states of an open mode, by what it does for traffic."""

    OPENED = auto()  # maps are there; programs of a former agent may serve
    LOADED = auto()  # our programs serve the maps that were adopted
    REPLACING = auto()  # ours and those of a former generation serve side by side
    ATTACHED = auto()  # our programs serve the table
    DRAINING = auto()  # they serve the flows that they know, and no new one begins
    LEFT = auto()  # nothing is served any more, and the mode is about to be removed


class Input(Enum):
    """The events that change the state of an open mode."""

    ADOPTED = auto()  # programs are loaded for the maps that were adopted, before there is a table
    REPLACED = auto()  # the replacement of a former generation begins
    PROGRAMMED = auto()  # a table is programmed, and programs are attached
    DRAINED = auto()  # no new flow is wanted
    ABANDONED = auto()  # the flows that are left are given up


# What may happen in every state before the last one.
_ENDS: Final = {Input.DRAINED: State.DRAINING, Input.ABANDONED: State.LEFT}
TRANSITIONS: Final[dict[State, dict[Input, State]]] = {
    State.OPENED: {
        Input.ADOPTED: State.LOADED, Input.REPLACED: State.REPLACING, Input.PROGRAMMED: State.ATTACHED, **_ENDS,
    },
    State.LOADED: {Input.PROGRAMMED: State.ATTACHED, **_ENDS},
    State.REPLACING: {Input.REPLACED: State.REPLACING, Input.PROGRAMMED: State.ATTACHED, **_ENDS},
    State.ATTACHED: {Input.PROGRAMMED: State.ATTACHED, **_ENDS},
    State.DRAINING: {Input.REPLACED: State.DRAINING, Input.PROGRAMMED: State.DRAINING, **_ENDS},
    State.LEFT: dict.fromkeys((Input.REPLACED, Input.PROGRAMMED, *_ENDS), State.LEFT),
}  # fmt: skip


def clean(options: Options) -> int:
    """Removes all our pins and attachments from this network namespace; returns how many objects were removed."""
    folder = folder_of(options)
    if folder.is_dir():
        os.close(hold(folder, f"the eBPF maps at {folder}"))
    formerly = sum(remove_pins(former) for former in former_layouts(folder))
    return formerly + detach_everything(folder)


def drain(options: Options) -> bool:
    """Removes every service address, so that only packets of known flows are translated, rejected or dropped.

    The next sync of an agent in this mode writes them all again.
    """
    folder = folder_of(options)
    maps = open_pinned_maps(folder)
    if not maps:
        return False
    try:
        os.close(hold(folder, f"the eBPF maps at {folder}"))
        row = maps["node"].view(layout.dtype_of("node"))
        row["fast_path"] = min(row["fast_path"][0], layout.abi_constants()["FAST_PATH_ALWAYS"])
        row["cidr4_count"] = row["cidr6_count"] = 0
        row["draining"] = 1
    finally:
        for known in maps.values():
            known.close()
    return True


class Change(NamedTuple):
    """A change from one table to the next."""

    before: ServiceTable
    table: ServiceTable
    names: frozenset[str]  # services that may differ from what is programmed
    moving: frozenset[str] = frozenset()  # of these, services that another proxy served until now
    first: bool = False  # nothing is attached yet


class Ebpf(Programmer):
    """Mode ebpf, open on this node.

    Raises:
        Unsupported: this machine cannot run the mode; says what is missing.
        Occupied: another instance serves this namespace.
    """

    name = "ebpf"
    reports_packets = True

    def __init__(self, options: Options, wake: RequestMaintenance) -> None:
        self.options = options
        self.state = State.OPENED
        self.table: ServiceTable = EMPTY
        self._unprogrammed: frozenset[str] = frozenset()  # services with a port for which there was no room
        self._failed: frozenset[str] = frozenset()  # services of a sync that could not be finished
        self._opened = ExitStack()
        directory = own_directory(options, lambda known: has_other_sizes(known, options))
        self._opened.callback(directory.close)
        self.folder, hz = directory.path, jiffies_per_second()
        try:
            namespace = self._opened.enter_context(closing(namespace_map(self.folder)))
            self.succession = Succession(self.folder, options)
            record = self._opened.enter_context(closing(layout_record(self.folder)))
            upper = sizes.bounds(options)
            ahead = None if self.succession.former else AHEAD.take(self.folder, options)
            maps = MapSet(self.folder, options, sizes.first_sizes(upper), ahead and ahead.loader.maps)
            self.maps = self._opened.enter_context(closing(maps))
            loader = ahead.loader if ahead else Loader(self.maps.maps, options, hz)
            inspect = self._opened.enter_context(closing(loader.one("inspect")))
        except BpfError as error:
            if not getattr(getattr(self, "maps", None), "adopted", True):
                remove_pins(self.folder)
            self._opened.close()
            raise Unsupported("eBPF", refusal("the programs or maps", error)) from error
        for name, size in self.maps.other_sizes.items():
            log.warning(
                "map %s has room for %d, as it was made; the settings' %d hold after `hybrid-proxy cleanup`",
                name, self.maps.maps[name].entries, size,
            )  # fmt: skip
        self.store = Store(self.maps, hz, rings=Rings(options.ebpf.limits.ring, options.ebpf.limits.slots))
        self.attachments = Attachments(self.folder, options, self.maps, lambda: self.datapath.load_xdp())  # noqa: PLW0108 (bound later)
        self.foreign = foreign.ForeignFlows(self.maps.flows(), inspect.program("leave"), lambda: self.gc.scan_now())  # noqa: PLW0108 (bound later)
        self._reserved = -math.inf  # when the ports of flows were reserved
        self.gc = FlowGC(
            self.maps.maps, inspect.program("sweep"), inspect.program("read_clock"), hz, options, self.foreign.scan
        )
        self.datapath = Datapath(
            self.maps, loader, self.attachments, upper, self.gc.reading, self.store.grown, wake,
            ahead.programs if ahead else None,
        )  # fmt: skip
        self.failover = Failover(options)
        rules = self._opened.enter_context(closing(PassingRules()))
        self.fast_path = FastPath(
            options.ebpf.fast_path, lambda: self.maps.view("node"),
            lambda: (*rules.found(), *self.attachments.pods.foreign()), rules.translate, self.attachments.pods.shapers,
        )  # fmt: skip
        self.reports = Reports(
            options, self.maps, self.store, self.datapath, self.attachments, self.gc, self.failover, self.fast_path
        )
        self.packets = PacketLog(self.maps, self.store, self.names)
        attached, self.audit = self.attachments, Audit(self.store)
        # What carries traffic comes first.
        self.repairs = Repairs(directory, (
            attached.pods, attached.uplinks, attached.drivers, attached.sockets, self.maps, namespace, record,
            attached.node_maps, self.datapath, self.audit,
        ), self.repaired)  # fmt: skip
        self.gc.start()
        if not options.all_or_nothing and (self.maps.adopted or enough_processors()):
            self.datapath.prepare({})  # load while objects are listed: most clusters fit these maps

    def _on(self, happened: Input) -> None:
        self.state = TRANSITIONS[self.state][happened]

    # Tables

    def prewarm(self, ports: int, endpoints: int) -> None:
        with contextlib.suppress(DataplaneError, OSError):  # `sync` tries again, and reports the error
            if self.datapath.programs is None:
                self.datapath.prepare(sizes.foreseen(ports, endpoints))

    def sync(self, table: ServiceTable) -> SyncResult:
        names = changed_services(self.table, table) | self._unprogrammed | self._failed
        change = Change(self.table, table, names, first=not self.attachments.attached)
        try:
            if change.first or self.options.shares_node:
                change = self._plan(change)
            with START.part("lowering and maps") if change.first else contextlib.nullcontext():
                changed, removed = self._write(change)
            self._publish(change)
        except Unsupported:
            raise
        except (DataplaneError, OSError, ValueError) as error:
            self._failed = names
            if isinstance(error, ForeignEntries):  # the maps hold other rows: the next sync adopts them
                wait_for_programs()  # deferred frees are forgotten with the plan: none may still use what waits there
                self.store.start_over()
                self.failover.forget()
                self.table = EMPTY
            raise SyncError(f"the eBPF maps could not be programmed: {error}") from error
        self.reports.unmet.keep_up(table)
        if self.store.plan.pools.deferred >= MOST_DEFERRED:  # else with the next maintenance: a thread wakes for it
            self.gc.grace.want(self.store.plan.pools.stamp)
        return SyncResult(changed, removed)

    def _plan(self, change: Change) -> Change:
        """Finds foreign flows, which must be known before a row could lead their packets elsewhere."""
        first, table = change.first, change.table
        if self.options.shares_node:
            change = change._replace(moving=foreign.newly_receiving(change.before, table, change.names))
        if first and self.datapath.programs is None and not self.datapath.growing:
            self.datapath.prepare(sizes.needs(table.entries()))
        if first or change.moving:
            self.foreign.begin_move(change.before, table)
        if first:
            self.foreign.read()  # enters them before the first packet could begin a flow in their place
            if self.options.all_or_nothing or not self.maps.adopted:
                self.foreign.check_room()
        return change

    def _write(self, change: Change) -> tuple[int, int]:
        """Writes what differs into the maps; returns service ports changed and removed."""
        store, plan, table, names = self.store, self.store.plan, change.table, change.names
        if change.first or table.node != change.before.node:
            # Programs that drain find no frontend yet, and would drop what goes to addresses of services.
            drains = change.first and bool(self.maps.view("node")["draining"])
            self._write_node(_without_cidrs(table.node) if drains else table.node)
        if self.gc.grace.over > store.graced_stamp:
            store.graced(self.gc.grace.over)  # `maintain` does the rest
        parts = self.failover.slow_start.follow(time.monotonic(), change.before, table, names)
        changed, removed = store.apply(table.services, names - change.moving, parts)
        if change.moving:  # last, because it takes a dump of conntrack
            self.foreign.enter_datagrams(change.moving)
            more = store.apply(table.services, change.moving)
            changed, removed = changed + more[0], removed + more[1]
        if plan.full:
            changed += self._make_room(change)
        if self.options.all_or_nothing and change.first and (unfit := list(plan.unprogrammed.values())):
            raise Unsupported("room for every service port", f"{len(unfit)} have none: {unfit[0].reason}")
        if plan.probes_changed:
            self.failover.services_changed(store)
        return changed, removed

    def _publish(self, change: Change) -> None:
        """Puts the written rows into service: the first time, programs are attached."""
        table, plan = change.table, self.store.plan
        if plan.removed_endpoints:
            self.gc.resets.add([Endpoint.of(*gone) for gone in plan.removed_endpoints])
            plan.removed_endpoints.clear()
        self.table = self.foreign.table = table
        self._unprogrammed, self._failed = frozenset(plan.unfit), frozenset()
        self.attachments.node = table.node
        if table.clients:  # before the first packet
            affinity.remember(self.maps.maps["affinity"], table.clients, self.store, self.gc.clock())
        if change.first:
            self._attach(table)
            self._on(Input.PROGRAMMED)
        elif table.node.primary != change.before.node.primary:
            self._write_node(table.node)
            self.attachments.refresh()
        if change.first or self.options.shares_node or self.foreign.known:
            self.foreign.programmed(change.before, table, change.names, change.moving, first=change.first)

    def _attach(self, table: ServiceTable) -> None:
        """Attaches programs, and replaces those of a former generation."""
        self.maps.view("node")["draining"] = self.state in (State.DRAINING, State.LEFT)
        self._write_node(table.node)
        if self.succession.former is not None:
            self._on(Input.REPLACED)
        try:
            self.succession.run(self.datapath)
        except BpfError as error:
            if self.datapath.programs is None:
                raise Unsupported("eBPF", refusal("the programs", error)) from error
            raise
        if self.succession.plan.bridged:
            self.foreign.reopen(self.maps.flows())

    def _write_node(self, node: NodeNetwork) -> None:
        columns, others = node_columns(node)
        row = self.maps.view("node")
        row["cidr4_count"] = row["cidr6_count"] = 0  # while the CIDRs are written
        for family, cidrs in others.items():  # those for which map `node` has no room
            self.store.writer.source_ranges.allow(NO_SERVICE, family, cidrs)
        self.attachments.node_maps.write_row(columns)
        self.store.serve_node_ports_at(node.node_port_addresses, node.loopback)

    def _make_room(self, change: Change) -> int:
        """Lets maps grow for which something did not fit; returns how many service ports fit then."""
        plan, changed, cut_rings = self.store.plan, 0, False
        while plan.full:
            if not self.store.free_slots():
                entries = (entry for name in plan.unfit for entry in change.table.services.get(name, ()))
                need = Counter(plan.pools.used()) + Counter(sizes.needs(entries))
                if not self.datapath.make_room(plan.full, need):
                    if "slots" not in plan.full or cut_rings or plan.pools.slots.limit >= plan.rings.all:
                        break
                    cut_rings = True  # slots cannot be more at the moment
            plan.retry(cut_rings=cut_rings)
            changed += self.store.apply(change.table.services, plan.unfit.keys() & change.names)[0]
        plan.retry()
        return changed

    # Draining

    def drain(self, table: ServiceTable) -> None:
        """Lets no flow begin. Rows are still written: open flows go on, and the next mode finds all rows."""
        self._on(Input.DRAINED)
        self.fast_path.keep_to_flows()
        self.maps.view("node")["draining"] = True  # first: the mode that serves may have room for what we have not
        self.sync(msgspec.structs.replace(table, node=_without_cidrs(table.node)))

    def reserve_ports(self) -> None:
        if time.monotonic() - self._reserved > foreign.RESERVED_SECONDS / 3:
            foreign.reserve_ports(self.maps.maps)
            self._reserved = time.monotonic()

    def open_flows(self, table: ServiceTable) -> Mapping[str, int]:
        forget_half_open(self.maps.maps, self.options, self.gc.clock(), self.gc.hz)
        return open_flows(self.maps.maps)

    def abandon(self, table: ServiceTable) -> None:
        """Removes all backends, so that no socket of the node has its datagrams translated; their answers still are.

        Sockets that are connected to a backend know it by its own address, and go on without us.
        """
        self._on(Input.ABANDONED)
        self.foreign.forget()  # they serve on: their entries are not judged by an empty table
        self.sync(ServiceTable({}, _without_cidrs(table.node)))

    # Everything else

    def other_mode_stopped(self) -> None:
        self.foreign.judge(self.table, self.table, self.table.services.keys())

    def links_changed(self) -> None:
        self.attachments.links_changed()

    @property
    def unprogrammed(self) -> Collection[Unprogrammed]:
        return self.store.plan.unprogrammed.values()

    @property
    def unrepaired(self) -> tuple[str, ...]:
        return self.repairs.unrepaired

    def maintain(self) -> Sequence[Event]:
        if self.attachments.serves:
            self.repairs.run()
            self.audit.advance()
        self._free()
        if self._unprogrammed and not self._failed:
            self.sync(self.table)
        if self.state is not State.OPENED or self.maps.adopted:  # otherwise the first table may need larger maps
            self.datapath.step(self.store.plan.pools.used())
        adopted = self.maps.adopted and self.succession.former is None and self.datapath.programs is not None
        if self.state is State.OPENED and adopted:
            self.attachments.attach_adopted()
            self._on(Input.ADOPTED)
        self.attachments.maintain()
        if self.state not in (State.DRAINING, State.LEFT):  # the rules of the mode that serves are not in the way
            self.fast_path.maintain()
        self.packets.maintain()
        notices = self.failover.evaluate(self.store)
        self.gc.grace.want(self.store.plan.pools.stamp)
        return [*notices, *self.reports.nearly_full()]

    def _free(self) -> None:
        """Frees ids and slots that no program and no flow uses any more, and says what the next scan searches for."""
        graced, scanned = self.gc.collect()
        if self.gc.opening_flows is not None:
            self.maps.view("node")["half_open"], self.gc.opening_flows = self.gc.opening_flows, None
        self.store.graced(graced)
        if scanned is not None:
            self.store.scanned(*scanned)
        plan = self.store.plan
        self.gc.search_for(*plan.pools.candidates)
        self.gc.recounts = bool(plan.counts_flows)
        if plan.needs_recount():  # now, and not with the next scan
            self.gc.scan_now()

    def names(self) -> Mapping[int, str]:
        return self.reports.names(self.table)

    def status(self) -> Status:
        return self.reports.status(self.name, self.table, self.repaired.count)

    def ejections(self) -> list[Ejection]:
        return self.failover.rows()

    def counters(self) -> dict[str, int]:
        return self.reports.counters()

    def traffic(self, *, by_backend: bool) -> list[TrafficRow]:
        return self.reports.traffic(self.table, by_backend=by_backend)

    def first_packets(self) -> dict[str, list[int]]:
        return self.store.first_packets.series(self.names())

    def explain(self, packet: ProbePacket) -> ExplainAnswer:
        return self.reports.explain(packet, self.table)

    def packet_events(self, after: int) -> tuple[list[PacketEvent], int]:
        return self.packets.rows(after)

    def trace(self, service: str | None, client: str | None, seconds: float) -> None:
        self.packets.trace(service, client, seconds)

    def spare(self, seconds: float) -> None:
        self.failover.spare(self.store, seconds)

    def close(self) -> None:
        self.gc.stop()
        self.failover.close()
        self.packets.close()
        self.datapath.close()
        self.reports.close()
        self.attachments.close()
        unused = not self.maps.adopted if self.succession.former is None else not self.succession.begun
        if unused and not self.attachments.attached:
            remove_pins(self.folder)  # nothing was ever programmed: leave no empty maps behind
        self.succession.close()
        self._opened.close()


def _without_cidrs(node: NodeNetwork) -> NodeNetwork:
    """Returns the node without service CIDRs: an address without a frontend belongs to no service then."""
    return msgspec.structs.replace(node, service_cidrs=())


def probe(options: Options) -> str | None:
    """Returns why this kernel cannot run the mode, or None. Tries the smallest of our objects, with its maps."""
    try:
        pin_folder(options.ebpf.pin_root, mount=False)
        with closing(Object(layout.OBJECTS / "inspect.bpf.o")) as loaded:
            loaded.load()
    except Unsupported as error:
        return str(error)
    except (DataplaneError, OSError) as error:
        return refusal("BPF programs or maps", error)
    return None


def refuse_unfit(entries: Iterable[Entry], upper: sizes.Sizes) -> None:
    """PURE. Check that these service ports fit into maps of these sizes. Slots do not count: rings are cut.

    Raises:
        Unsupported: some ports do not fit.
    """
    need = sizes.needs(entries)
    for name in ("services", "backends"):
        if need[name] > upper[name]:
            raise Unsupported(
                "room for every service port",
                f"they need {need[name]} entries of map {name}, which has room for {upper[name]}: "
                f"raise {SETTINGS[name]}",
            )


def check_room(options: Options, table: ServiceTable) -> None:
    """Check that the mode could serve the whole table, and leave open datagram flows to the proxy that has them.

    Raises:
        Unsupported: it could not.
        DataplaneError, OSError: conntrack cannot be read.
    """
    refuse_unfit(table.entries(), sizes.bounds(options))
    foreign.refuse_crowd(foreign.datagram_flows(table), dict.fromkeys((4, 6), options.max_flows))


def look(options: Options, names: Mapping[int, str]) -> listing.Pinned | None:
    """Opens the pinned maps of an agent, running or not; None: there are none."""
    folder = folder_of(options)
    try:
        maps = open_pinned_maps(folder)
    except BpfError as error:
        if error.code != errno.ENOENT:
            raise
        return None  # they are being removed
    return listing.Pinned(str(folder), maps, names) if maps else None


MODE = Mode("ebpf", Ebpf, clean, probe, look, drain, conntrack=False, collect=collect, check_room=check_room)
