"""The eBPF mode, open on this node: objects loaded, maps filled, programs attached."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from numpy.typing import NDArray

from hybrid_proxy.dataplane.balancing import KNOWN
from hybrid_proxy.dataplane.diff import changed_services
from hybrid_proxy.dataplane.errors import DataplaneError, SyncError, Unsupported
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map, Object
from hybrid_proxy.dataplane.kernel.conntrack import delete_stale
from hybrid_proxy.dataplane.kernel.grace import jiffies_per_second, wait_for_programs
from hybrid_proxy.dataplane.kernel.host_netns import teach_namespace, write_namespace
from hybrid_proxy.dataplane.kernel.host_paths import pin_folder
from hybrid_proxy.dataplane.kernel.links import (
    Interface,
    Node,
    interface_name,
    interface_towards,
    read_node,
    read_reverse_path_filters,
)
from hybrid_proxy.dataplane.kernel.lock import hold
from hybrid_proxy.dataplane.kernel.repairs import Contents, Repairs
from hybrid_proxy.dataplane.kernel.roles import Roles
from hybrid_proxy.dataplane.mode import (
    Event,
    Mode,
    Options,
    ProbePacket,
    Programmer,
    RequestMaintenance,
    SyncResult,
)
from hybrid_proxy.dataplane.modes.ebpf.ejection.failover import Failover
from hybrid_proxy.dataplane.modes.ebpf.flows.collector import FlowGC, forget_half_open, open_flows
from hybrid_proxy.dataplane.modes.ebpf.flows.foreign import OthersFlows, take_datagrams
from hybrid_proxy.dataplane.modes.ebpf.flows.resets import Endpoint
from hybrid_proxy.dataplane.modes.ebpf.generations.carry import Carry, prepare
from hybrid_proxy.dataplane.modes.ebpf.generations.layouts import layout_record
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import (
    Loader,
    Programs,
    missing_datapaths,
    put_datapaths,
)
from hybrid_proxy.dataplane.modes.ebpf.generations.resizer import MapResizer
from hybrid_proxy.dataplane.modes.ebpf.hooks.cgroup import SocketPrograms
from hybrid_proxy.dataplane.modes.ebpf.hooks.interfaces import InterfacePrograms, detach_everything
from hybrid_proxy.dataplane.modes.ebpf.hooks.xdp import XdpPrograms
from hybrid_proxy.dataplane.modes.ebpf.maps import layout, sizes
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import Larger, MapSet, open_pinned_maps
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import (
    NodeMaps,
    cidr_columns,
    equal_paths,
    interface_addresses,
    interface_flags,
    own_addresses,
    pod_columns,
    pod_links,
    served_links,
    word,
)
from hybrid_proxy.dataplane.modes.ebpf.maps.orphans import collect, namespace_map, own_directory
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import (
    folder_of,
    former_layouts,
    remove_pins,
)
from hybrid_proxy.dataplane.modes.ebpf.maps.traffic import MOST_BYTES
from hybrid_proxy.dataplane.modes.ebpf.services import affinity
from hybrid_proxy.dataplane.modes.ebpf.services.capacity import check_room
from hybrid_proxy.dataplane.modes.ebpf.services.store import ForeignEntries, Store
from hybrid_proxy.dataplane.modes.ebpf.views import explanation, listing
from hybrid_proxy.dataplane.modes.ebpf.views.events import Journal, Reader
from hybrid_proxy.dataplane.netfilter import relays
from hybrid_proxy.dataplane.reports import (
    EbpfStatus,
    Ejection,
    ExplainAnswer,
    Fill,
    MapUsage,
    PacketEvent,
    Status,
    TrafficRow,
    Unprogrammed,
)
from hybrid_proxy.dataplane.stale import Judge, gone_endpoints
from hybrid_proxy.dataplane.table import EMPTY, Entry, NodeNetwork, ServiceTable, family_of
from hybrid_proxy.dataplane.timings import START
from hybrid_proxy.dataplane.unmet import Unmet

SPARE_PROCESSORS = 4  # from so many on, loading programs in vain slows nothing down
OTHERS_LOOKS = 2  # after the first table: what others began while our programs were attached
SHOWN = 5  # things that others changed, in one line of the log

log = logging.getLogger(__name__)


def clean(options: Options) -> int:
    """Remove everything of ours from this network namespace; returns how many things went."""
    folder = folder_of(options)
    if folder.is_dir():
        os.close(hold(folder, f"the eBPF maps at {folder}"))
    formerly = sum(remove_pins(former) for former in former_layouts(folder))
    return formerly + detach_everything(folder)


def _skipped_rules(options: Options) -> Iterator[str]:
    """A warning: which rules of the node do not see flows that are handed over from their first packet on."""
    if options.ebpf.fast_path != "always":
        return
    from hybrid_proxy.dataplane.kernel.base_chains import passing_rules

    found = passing_rules("hybrid-proxy")
    if found:
        more = ", ..." if len(found) > SHOWN else ""
        yield (
            f"rules do not see flows to Services between pods of this node, because fastPath is `always`: those of "
            f"{', '.join(found[:SHOWN])}{more}. If they must, use --fast-path=established"
        )


def drain(options: Options) -> bool:
    """Forget every address of a service: nothing is translated, refused or dropped that is no known flow.

    The next sync of an agent in this mode writes them all again.
    """
    folder = folder_of(options)
    maps = open_pinned_maps(folder)
    if not maps:
        return False
    try:
        os.close(hold(folder, f"the eBPF maps at {folder}"))
        row = maps["node"].view(layout.dtype_of("node"))
        row["cidr4_count"] = row["cidr6_count"] = 0
        row["draining"] = 1
    finally:
        for known in maps.values():
            known.close()
    return True


class Ebpf(Programmer):
    """A `dataplane.mode.Programmer`.

    Raises:
        Unsupported: this machine cannot run the mode; says what is missing.
        Occupied: another instance serves this namespace.
    """

    name = "ebpf"
    reports_packets = True

    def __init__(self, options: Options, wake: RequestMaintenance) -> None:
        self.options = options
        self._directory = own_directory(options)
        self.folder = self._directory.path
        self.hz = jiffies_per_second()
        try:
            self.mark = namespace_map(self.folder)
            self._carry = prepare(self.folder, options)
            self.record = layout_record(self.folder)
            upper = sizes.bounds(options)
            self.maps = MapSet(self.folder, options, sizes.first_sizes(upper))
            self.adopted = self.maps.adopted
            self.loader = Loader(self.maps, options, self.hz)
            self._inspect = self.loader.one("inspect")
        except BpfError as error:
            if not getattr(self, "adopted", True):
                remove_pins(self.folder)
            self._directory.close()
            raise Unsupported("eBPF", f"the kernel refused the programs or maps: {error}") from error
        for name, size in self.maps.other_sizes.items():
            log.warning(
                "map %s has room for %d, as it was made; the settings' %d hold after `hybrid-proxy cleanup`",
                name, self.maps.maps[name].entries, size,
            )  # fmt: skip
        self.store = self._new_store(adopt=self.adopted)
        self.table: ServiceTable = EMPTY
        self._unmet = Unmet(KNOWN, "random", weighs=True, probes=True)
        self._unprogrammed: frozenset[str] = frozenset()
        self._failed: frozenset[str] = frozenset()  # services of a sync that could not be finished
        self._attached = self._serves_adopted = False
        self.programs: Programs | None = None  # those in use; there are some from the first table on
        self.roles = Roles(options.ebpf.pod_interfaces, options.ebpf.uplink_interfaces)
        self.pods, self.uplinks = (InterfacePrograms(self.folder, kind) for kind in ("pod", "uplink"))
        self.drivers = XdpPrograms(self.folder, options.ebpf.xdp, self._load_xdp, lambda: self.maps.maps["xdp_links"])
        self.sockets = SocketPrograms(self.folder, options)
        self.resizer = MapResizer(self.maps, upper, self._load, self._use, self._quiet, self._take_larger_maps, wake)
        self.node_maps = NodeMaps(self.maps.maps, lambda: self.maps.view("node"))
        self.nearly_full: dict[str, str] = {}  # map -> message
        self.skipped_rules = list(_skipped_rules(options))
        for message in self.skipped_rules:
            log.warning("%s", message)
        self._draining = self._leaving = False
        self._others_looks = 0
        # What carries traffic comes first.
        self.repairs = Repairs(
            self._directory,
            (self.pods, self.uplinks, self.drivers, self.sockets, self.maps, self.mark, self.record, self.node_maps,
             Contents(self._missing_datapaths, self._put_datapaths),
             Contents(self._emptied_frontends, self._sync_again)),
        )  # fmt: skip
        self.failover = Failover(options)
        self.gc = FlowGC(
            self.maps.maps, self._inspect.program("sweep"), self._inspect.program("read_clock"), self.hz, options,
            self._look_at_others,
        )  # fmt: skip
        self.others = self._new_others()
        self._judges = deque[Judge]()
        self.gc.start()
        self._explain: Object | None = None  # loaded when somebody asks
        self.journal = Journal()
        self._trace_until = 0.0
        self.maps.view("node")["trace"] = 0
        self.events = Reader(self.maps.maps["events"])
        self.events.start()
        if not options.all_or_nothing and (self.adopted or len(os.sched_getaffinity(0)) >= SPARE_PROCESSORS):
            self.resizer.begin({})  # load while objects are listed: most clusters fit these maps

    def _new_store(self, *, adopt: bool) -> Store:
        return Store(
            self.maps,
            self.hz,
            adopt=adopt,
            max_ring=self.options.ebpf.limits.ring,
            max_slots=self.options.ebpf.limits.slots,
        )

    def _new_others(self) -> OthersFlows:
        others = OthersFlows(self._flow_tables(), self._inspect.program("leave"))
        others.expect(self.table)
        return others

    def _flow_tables(self) -> dict[int, Map]:
        return {family: self.maps.maps[f"flows{family}"] for family in (4, 6)}

    def _load(self, larger: Larger) -> Programs:
        return self.loader.generation(larger, xdp=self.drivers.loaded)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """No other thread reads the maps."""
        with self.gc.reading:
            yield

    def _load_xdp(self) -> Object:
        """For a device that qualified, when the others are loaded already."""
        loaded = self.loader.one("xdp")
        self.maps.pin_new(loaded)
        return loaded

    def _use(self, programs: Programs) -> None:
        """Let all links run this generation; before the first attachment there are none of sockets."""
        for loaded in programs:
            self.maps.pin_new(loaded)
        put_datapaths(self.maps.maps["datapaths"], programs.datapaths)
        for links in (self.pods, self.uplinks):
            links.use(programs.hooks)
        if programs.xdp is not None:
            self.drivers.use(programs.xdp)
        if self._attached:
            self.sockets.use(programs.connect, programs.sockops)
        former, self.programs = self.programs, programs
        if former is not None:
            former.close()

    def _serve_sockets(self) -> None:
        """Attach to the node's cgroup."""
        assert self.programs is not None
        if self.programs.connect is None:  # switched off or refused by the kernel, and so their map is missing
            return
        host_netns = self.maps.maps["host_netns"]
        known = write_namespace(host_netns)
        self.sockets.use(self.programs.connect, self.programs.sockops)
        if not known and self.sockets.cgroup is not None and not teach_namespace(host_netns):
            log.warning("the node's own sockets are not served: the agent runs in none of the node's cgroups")

    def _take_larger_maps(self) -> None:
        """Maps have been replaced by larger ones; nobody reads them at the moment."""
        self.store.grown()
        self._forget_explain()
        if self.programs is not None and self.programs.xdp is None and self.drivers.loaded:
            self.drivers.use(self._load_xdp())  # a device qualified meanwhile

    def _forget_explain(self) -> None:
        if self._explain is not None:
            self._explain.close()
        self._explain = None

    def prewarm(self, ports: int, endpoints: int) -> None:
        with contextlib.suppress(DataplaneError, OSError):  # `sync` tries again, and reports the error
            if self.programs is None:
                need = sizes.foreseen(ports, endpoints)
                if self.resizer.growing and not self.resizer.holds(need):
                    self.resizer.give_up()
                if not self.resizer.growing:
                    self.resizer.begin(need)

    def sync(self, table: ServiceTable) -> SyncResult:
        names = changed_services(self.table, table) | self._unprogrammed | self._failed
        try:
            if self.programs is None and not self.resizer.growing:
                self.resizer.begin(sizes.needs(table.entries()))
            come = take_datagrams(self.table, table, names) if self.options.shares_node else frozenset()
            if not self._attached or come:
                self.others.expect(self.table, table)
            if not self._attached:
                self.others.look()  # before the first packet could begin a flow in place of theirs
            if not self._attached and (self.options.all_or_nothing or not self.adopted):
                self.others.check_room()
            if table.node != self.table.node or not self._attached:
                # Programs that drain find no frontend yet, and would drop what goes to addresses of services.
                drains = not self._attached and bool(self.maps.view("node")["draining"])
                self._write_node(msgspec.structs.replace(table.node, service_cidrs=()) if drains else table.node)
            if self.gc.graced > self.store.graced_stamp:
                self.store.graced(self.gc.graced)  # `maintain` does the rest of `_collect`
            services = {name: table.services.get(name, ()) for name in names}
            self.failover.follow(self.store, self.table, table, names)
            with START.part("lowering and maps"):
                changed, removed = self.store.apply({name: services[name] for name in names - come})
                if come:  # last, because it takes a dump of conntrack
                    self.others.come(come)
                    more = self.store.apply({name: services[name] for name in come})
                    changed, removed = changed + more[0], removed + more[1]
            plan = self.store.plan
            if plan.full:
                changed += self._make_room(services)
            if self.options.all_or_nothing and not self._attached:
                _refuse_unprogrammed(plan.unprogrammed.values())
            if plan.probes_changed:
                self.failover.services_changed(self.store)
            if not self._leaving:
                self._reset_gone(table, names)
            moved = table.node.primary != self.table.node.primary
            before, self.table = self.table, table
            self.others.expect(table)
            self._unprogrammed, self._failed = frozenset(plan.unfit), frozenset()
            if table.clients:
                self._remember(table)
            if not self._attached or moved:
                self.maps.view("node")["draining"] = self._draining
                self._write_node(table.node)
                self._attach()
                self._take_over()
                self.gc.hurry()  # and look for what others began meanwhile
            if come:
                self._others_looks = 0
            if self.others.known or come:
                self._judge_others(before, names)
        except Unsupported:
            raise
        except (DataplaneError, OSError, ValueError) as error:
            self._failed = names
            if isinstance(error, ForeignEntries):
                self._start_over()
            raise SyncError(f"the eBPF maps could not be programmed: {error}") from error
        self.gc.want_grace(plan.stamp)  # last: it wakes a thread, which takes the interpreter
        return SyncResult(changed, removed, tuple(plan.unprogrammed.values()))

    def _reset_gone(self, table: ServiceTable, names: Collection[str]) -> None:
        """Have connections to endpoints that are gone reset, where their service wants that."""
        ports = self.store.plan.find
        self.gc.reset_connections([
            Endpoint(port.service, entry.family, address, number)
            for entry, address, number in gone_endpoints(self.table, table, names)
            if (port := ports(entry.key)) is not None
        ])  # fmt: skip

    def _remember(self, table: ServiceTable) -> None:
        """Session affinity goes on: this is before the first packet."""
        plan = self.store.plan
        ports = {entry: port for entry in {one.entry for one in table.clients} if (port := plan.find(entry))}
        ids = {entry: (port.service, self.store.numbers(entry)) for entry, port in ports.items()}
        affinity.remember(self.maps.maps["affinity"], table.clients, ids, self.gc.clock())

    def _judge_others(self, before: ServiceTable, names: Collection[str]) -> None:
        """What conntrack translates does not come to our programs. It is read beside the syncs."""
        self._judges.append(Judge(before, self.table, names, partial(relays, self.table.node)))
        self.gc.hurry()

    def _look_at_others(self) -> None:
        """As long as there are flows of others, or may be some that were not seen yet."""
        while self._judges:
            delete_stale(self._judges.popleft())
        if self.others.known or self._others_looks < OTHERS_LOOKS:
            self._others_looks += 1
            self.others.look(connections=self._others_looks <= OTHERS_LOOKS)

    def drain(self, table: ServiceTable) -> None:
        """No flow begins any more. The maps follow the table: flows go on, and whoever serves next finds all rows."""
        self._draining = True
        self.maps.view("node")["draining"] = True  # first: the mode that serves may have room for what we have not
        node = msgspec.structs.replace(table.node, service_cidrs=())
        self.sync(msgspec.structs.replace(table, node=node))

    def open_flows(self, table: ServiceTable) -> Mapping[str, int]:
        del table
        forget_half_open(self.maps.maps, self.options, self.gc.clock(), self.hz)
        return open_flows(self.maps.maps)

    def abandon(self, table: ServiceTable) -> None:
        """Without backends, no socket of the node has its datagrams translated; answers under way still are.

        Sockets that are connected to a backend know it by its own address, and go on without us.
        """
        self._leaving = True
        self.others.known = frozenset()  # they serve on: their entries are not judged by an empty table
        self.sync(ServiceTable({}, msgspec.structs.replace(table.node, service_cidrs=())))

    def _make_room(self, services: dict[str, tuple[Entry, ...]]) -> int:
        """Let maps grow for which something did not fit; how many service ports fit then."""
        plan, changed = self.store.plan, 0
        while plan.full:
            if not self._free_slots():
                need = Counter(plan.used()) + Counter(
                    sizes.needs(entry for name in plan.unfit for entry in services.get(name, ()))
                )
                if not self.resizer.make_room(plan.full, need):
                    if "slots" not in plan.full or plan.slots.limit >= plan.max_slots:
                        break
                    plan.max_slots = 0  # they cannot be more at the moment: rings are cut
            plan.full.clear()
            changed += self.store.apply({name: services[name] for name in plan.unfit if name in services})[0]
        plan.full.clear()
        plan.max_slots = self.options.ebpf.limits.slots
        return changed

    def _free_slots(self) -> bool:
        """Where slots lack and some only wait for programs that may still look at them: wait for these programs.

        A change of most services at once takes their new slots before it gives the old ones back.
        """
        if "slots" not in self.store.plan.full or not self.store.plan.deferred.has_slots:
            return False
        wait_for_programs()
        self.store.graced(self.store.plan.stamp)
        return True

    def _take_over(self) -> None:
        """An agent of another layout left its maps, and perhaps its programs attached: ours serve now."""
        for former in former_layouts(self.folder):
            if remove_pins(former):
                known = self._carry is not None and self._carry.former == former and not self._carry.failed
                what = "what they knew is carried over" if known else "flows that only they knew end"
                log.log(
                    logging.INFO if known else logging.WARNING,
                    "maps of another layout at %s are removed; %s",
                    former,
                    what,
                )
        if self._carry is not None:
            self._carry.close()
            self._carry = None

    def _start_over(self) -> None:
        """The maps hold what this process did not write: the next sync reads them, adopts, and removes the rest."""
        wait_for_programs()  # deferred frees are forgotten with the store: no program may still use what waits there
        stamp = self.store.plan.stamp
        self.store = self._new_store(adopt=True)
        self.store.plan.stamp = stamp
        self.failover.forget()
        self.table = EMPTY

    def _attach(self) -> None:
        if self._carry is not None:
            self._carry.take_links()
        try:
            self.resizer.catch_up()
        except BpfError as error:
            raise Unsupported("eBPF", f"the kernel refused the programs: {error}") from error
        if not self._attached:
            with START.part("attach: sockets"):
                self._serve_sockets()
        if self._carry is None or not self._carry.live or self._attached:
            with START.part("attach: interfaces"):
                self._refresh_links()
        else:
            self._carry_flows(self._carry)
        self._attached = True

    def _carry_flows(self, carry: Carry) -> None:
        """The former datapath and ours serve beside each other until ours knows all flows."""
        assert self.programs is not None
        try:
            bridge = carry.bridge(self.loader)
        except BpfError as error:
            log.warning("flows cannot be carried over from the maps at %s: %s", carry.former, error)
            carry.failed = True
            self._refresh_links()
            return
        with contextlib.closing(bridge):
            for links in (self.pods, self.uplinks):
                links.use(bridge)
            self._refresh_links()
            carry.run(self.maps.maps)
            for links in (self.pods, self.uplinks):
                links.use(self.programs.hooks)
        self.others = self._new_others()

    def _write_node(self, node: NodeNetwork) -> None:
        row = self.maps.view("node")
        primary = {family_of(address): address for address in node.primary}
        columns: dict[str, int | NDArray[Any]] = {
            "primary4": layout.address_words([primary[4]])[0, 0] if 4 in primary else 0,
            "primary6": layout.address_words([primary[6]]) if 6 in primary else 0,
        }
        for family in (4, 6):
            cidrs, others = cidr_columns(node.service_cidrs, family)
            self.store.note_service_cidrs(family, others)
            row[f"cidr{family}_count"] = 0
            columns |= dict(reversed(cidrs.items()))
        self.node_maps.write_row(columns | pod_columns(node))
        self.store.serve_node_ports_at(node.node_port_addresses, node.loopback)

    def other_mode_stopped(self) -> None:
        self._judge_others(self.table, self.table.services.keys())

    def links_changed(self) -> None:
        if self._serves:
            self._refresh_links()

    @property
    def _serves(self) -> bool:
        """Whether programs are attached, if only for what was adopted."""
        return self._attached or self._serves_adopted

    def _serve_adopted(self) -> None:
        """Before the first table: interfaces that came while no agent was here need programs for what the maps have."""
        if self.adopted and self._carry is None and self.programs is not None and not self._serves:
            self._serves_adopted = True
            self._refresh_links()

    def _primary(self) -> tuple[str, ...]:
        """The node's primary addresses; before the first table, those that a former agent wrote."""
        if self.table is not EMPTY:
            return self.table.node.primary
        row = self.maps.view("node")
        known = ((row[f"primary{family}"].tobytes(), family) for family in (4, 6))
        return tuple(layout.address_text(words, family) for words, family in known if any(words))

    def _refresh_links(self) -> None:
        node, primary = read_node(), self._primary()
        pods, uplinks = self.roles.look(node.interfaces, primary)
        self._write_surroundings(node, primary, pods, uplinks)
        for links, others in ((self.pods, uplinks), (self.uplinks, pods)):
            links.leave([interface.index for interface in others])
        for links, wanted in ((self.pods, pods), (self.uplinks, uplinks)):
            links.refresh(wanted)
        self.drivers.refresh(self.uplinks.attached.values(), node.interfaces)

    def _write_surroundings(
        self, node: Node, primary: Collection[str], pods: Sequence[Interface], uplinks: Sequence[Interface]
    ) -> None:
        """What the programs must know of the node before they see packets of its interfaces."""
        flags = interface_flags(
            node.interfaces,
            read_reverse_path_filters(),
            strictly=self.options.ebpf.source_check == "strict",
            is_served=lambda interface: interface in uplinks,
        )
        routes, paths = equal_paths(node.equal_paths)
        wanted = {
            "own_addresses": dict.fromkeys(own_addresses(node.local), bytes(4)),
            "pod_links": dict.fromkeys(map(word, pod_links(node.interfaces, self.table.node)), bytes(4)),
            "equal_paths": paths,
            "equal_routes": routes,
            "interface_addresses": interface_addresses(node.interfaces, primary),
            "interfaces": {word(index): word(asked) for index, asked in flags.items()},
            # Where programs are, or will be in a moment.
            "links": {word(key): word(index) for key, index in served_links(pods, uplinks).items()},
        }
        if self.table is EMPTY:
            del wanted["pod_links"]  # the first table says which these are
        for name, elements in wanted.items():
            try:
                self.node_maps.write(name, elements)
            except BpfError as error:
                if name != "links":
                    raise
                if error.code not in (errno.EINVAL, errno.ENODEV):  # the next change of interfaces is on its way
                    log.warning("packets are not handed over at all interfaces: %s", error)

    def may_have_drifted(self) -> bool:
        return self._serves and any(True for _ in self.repairs.damage())

    @property
    def unrepaired(self) -> tuple[str, ...]:
        return self.repairs.unrepaired

    @property
    def audit_repairs(self) -> int:
        return self.repairs.count

    def _missing_datapaths(self) -> Iterator[str]:
        if self.programs is not None:
            yield from missing_datapaths(self.maps.maps["datapaths"], self.programs.datapaths)

    def _put_datapaths(self) -> None:
        if self.programs is not None:
            put_datapaths(self.maps.maps["datapaths"], self.programs.datapaths)

    def _emptied_frontends(self) -> Iterator[str]:
        yield from (f"map frontends{family} is empty" for family in self.store.emptied())

    def _sync_again(self) -> None:
        table = self.table
        self._start_over()
        self.sync(table)

    def maintain(self) -> Sequence[Event]:
        if self._serves:
            self.repairs.run()
        if self._attached and self.sockets.cgroup is None:  # what stood in the way may be gone
            self._serve_sockets()
        self._collect()
        self.gc.look_for(*self.store.plan.deferred.candidates)
        self._recount()
        if self._unprogrammed and not self._failed:
            self.sync(self.table)
        self.resizer.step(self.store.plan.used())
        self._serve_adopted()
        if self.roles.uncertain:
            self.links_changed()
        repaired = self.store.writer.rows.repair()
        if repaired:
            self.repairs.count += repaired
            log.warning("others had changed %d slot ranges of services in the maps; they are repaired", repaired)
        self._name_events()
        self.journal.log_drops()
        if self._trace_until and time.monotonic() > self._trace_until:
            self.maps.view("node")["trace"] = 0
            self._trace_until = 0.0
        notices = self.failover.look(self.store)
        self.gc.want_grace(self.store.plan.stamp)
        return [*notices, *self._report_nearly_full()]

    def _report_nearly_full(self) -> Iterable[Event]:
        """Once for each map, until it has room again."""
        full = self.resizer.nearly_full(self.store.plan.used() | self.gc.used)
        for name in full.keys() - self.nearly_full.keys():
            log.warning("%s", full[name])
            yield Event("", "Warning", "MapNearlyFull", "GrowMap", full[name])
        self.nearly_full = full

    def _collect(self) -> None:
        graced, scanned = self.gc.collect()
        if self.gc.opening_flows is not None:
            self.maps.view("node")["half_open"] = self.gc.opening_flows
            self.gc.opening_flows = None
        self.store.graced(graced)
        if scanned is not None:
            self.store.scanned(*scanned)

    def _recount(self) -> None:
        """Let open flows be counted again with each scan, and now, where that is new for a service port."""
        plan = self.store.plan
        self.gc.recounts = bool(plan.counts_flows)
        if plan.recount:
            plan.recount = False
            self.gc.hurry()

    def names(self) -> Mapping[int, str]:
        """Service id -> name of the service port; until the first table, of what was adopted."""
        return self.options.names() if self.table is EMPTY else self.store.names()

    def warnings(self) -> list[str]:
        """What the table asks for and this mode does not do."""
        messages = self._unmet.warnings(self.table)
        cut = [(key[0], has, wanted) for key, (has, wanted) in self.store.plan.cut.items()]
        if cut:
            name, has, wanted = cut[0]
            messages.append(
                f"{len(cut)} service ports have smaller rings than their algorithm would fill ({name}: {has} of "
                f"{wanted} slots): --max-slots is used up, and other nodes may choose other backends"
            )
        traffic, backends = self.store.traffic, self.maps.maps["backends"].entries
        if traffic.counting and backends > traffic.backends:
            messages.append(
                f"the traffic of backends with numbers from {traffic.backends} on is not counted: rows for {backends} "
                f"would take more than {MOST_BYTES >> 20} MiB"
            )
        return [*messages, *self.skipped_rules, *self.nearly_full.values(), *filter(None, [self.resizer.failure])]

    def status(self) -> Status:
        store, used, maps = self.store, self.store.plan.used(), self.maps.maps
        return Status(
            mode=self.name,
            adopted=self.adopted,
            fill={
                "services": Fill(used["services"], maps["services"].entries - 1),
                "backends": Fill(used["backends"], maps["backends"].entries - 1),
                "slots": Fill(used["slots"], maps["slots"].entries),
                "flows": Fill(self.gc.known_flows, maps["flows4"].entries + maps["flows6"].entries),
            },
            unprogrammed=list(store.plan.unprogrammed.values()),
            failing=listing.failing_ports(maps, self.names),
            slow_starts=len(self.failover.slow_start),
            warnings=self.warnings(),
            audit_repairs=self.audit_repairs,
            counters=self.counters(),
            ebpf=EbpfStatus(
                pins=str(self.folder),
                pods=self.pods.status(),
                uplinks=self.uplinks.status(),
                xdp=self.drivers.status(),
                sockets=self.sockets.status(),
                fast_path=self.options.ebpf.fast_path,
                maps=self.map_usage(),
                traffic_bytes=store.traffic.bytes if store.traffic.counting else 0,
                deferred_frees=len(store.plan.deferred),
                ejections=self.ejections(),
                probes=self.failover.probes(),
            ),
        )

    def ejections(self) -> list[Ejection]:
        return self.failover.rows()

    def map_usage(self) -> dict[str, MapUsage]:
        """By the name of each map."""
        used, upper = self.store.plan.used() | self.gc.used, self.resizer.upper
        rows = {}
        for name, known in sorted(self.maps.maps.items()):
            bound = max(upper.get(name, 0), known.entries) if name in used else None
            rows[name] = MapUsage(known.entries, known.memory, used.get(name), bound)
        return rows

    def counters(self) -> dict[str, int]:
        return self.maps.counters() | {"connections_reset": self.gc.reset}

    def traffic(self, *, by_backend: bool) -> list[TrafficRow]:
        return listing.traffic(self.store.traffic, self.maps.maps, self.names(), by_backend=by_backend)

    def explain(self, packet: ProbePacket) -> ExplainAnswer:
        if self._explain is None:
            self._explain = self.loader.one("explain", quiet=True)
        around = explanation.ExplainContext(
            self.names(), self.store.backends, self.store.services, self.hz, interface_name
        )
        return explanation.explain(self._explain, packet, *self._place_of(packet), around)

    def _place_of(self, packet: ProbePacket) -> tuple[str, int]:
        """Whose packet it is, and the interface at which it comes in; 0 for none."""
        node = self.table.node
        towards = interface_towards(packet.src)
        place = packet.source_class
        if place is None:
            own = packet.src in {*node.addresses, *node.primary} or (towards and interface_name(towards) == "lo")
            place = "node" if own else "pod" if towards in self._of_pods() else "external"
        attached = {"pod": self.pods, "external": self.uplinks}.get(place)
        if attached is None or not attached.attached:
            return place, 0
        return place, towards if towards in attached.attached else min(attached.attached)

    def _of_pods(self) -> set[int]:
        """Interfaces of pods; before the first table, those where programs are to come."""
        if self.pods.attached:
            return set(self.pods.attached)
        pods, _ = self.roles.look(read_node().interfaces, self._primary())
        return {interface.index for interface in pods}

    def packet_events(self, after: int) -> tuple[list[PacketEvent], int]:
        self._name_events()
        return self.journal.rows(after), self.journal.last

    def _name_events(self) -> None:
        raw = self.events.take()
        if raw:
            self.journal.add(raw, self.names(), self.store.addresses, self.store.backends)

    def trace(self, service: str | None, client: str | None, seconds: float) -> None:
        limit = self.maps.view("node")["trace_services"].shape[1]
        wanted = [number for number, name in self.names().items() if service in {name, name.partition(":")[0]}]
        if service and not wanted:
            raise DataplaneError(f"{service}: no such service is programmed; NAMESPACE/NAME, or NAMESPACE/NAME:PORT")
        if len(wanted) > limit:
            raise DataplaneError(f"{service} has {len(wanted)} ports, and {limit} can be traced: name one of them")
        row = self.maps.view("node")
        row["trace"] = 0
        row["trace_services"] = wanted + [0] * (limit - len(wanted))
        row["trace_client"] = layout.address_words([client])[0] if client else 0
        row["trace"] = int(seconds > 0)
        self._trace_until = time.monotonic() + seconds

    def close(self) -> None:
        self.gc.stop()
        self.failover.close()
        self.events.stop()
        self.maps.view("node")["trace"] = 0
        self.resizer.close()
        self._forget_explain()
        self._inspect.close()
        if self.programs is not None:
            self.programs.close()
        for links in (self.pods, self.uplinks, self.sockets, self.drivers):
            links.close()
        self.mark.close()
        self.record.close()
        self.maps.close()
        unused = not self.adopted if self._carry is None else not self._carry.begun
        if not self._attached and unused:
            remove_pins(self.folder)  # nothing was ever programmed: leave no empty maps behind
        self._directory.close()


def _refuse_unprogrammed(ports: Collection[Unprogrammed]) -> None:
    for one in ports:
        raise Unsupported("room for every service port", f"{len(ports)} have none: {one.reason}")


def probe(options: Options) -> str | None:
    """Load the smallest of our objects, maps and all, and let it go."""
    try:
        pin_folder(options.ebpf.pin_root, mount=False)
        loaded = Object(layout.OBJECTS / "inspect.bpf.o")
        try:
            loaded.load()
        finally:
            loaded.close()
    except Unsupported as error:
        return str(error)
    except (DataplaneError, OSError) as error:
        return f"the kernel refused BPF programs or maps: {error}"
    return None


def look(options: Options, names: Mapping[int, str]) -> listing.Pinned | None:
    """The pinned maps, of an agent that runs or not."""
    folder = folder_of(options)
    try:
        maps = open_pinned_maps(folder)
    except BpfError as error:
        if error.code != errno.ENOENT:
            raise
        return None  # they are being removed
    return listing.Pinned(str(folder), maps, names) if maps else None


MODE = Mode("ebpf", Ebpf, clean, probe, look, drain, conntrack=False, collect=collect, check_room=check_room)
