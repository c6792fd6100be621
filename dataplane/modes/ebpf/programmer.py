"""The eBPF mode, open on this node: objects loaded, maps filled, programs attached."""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.balancing import KNOWN
from dataplane.diff import changed_services
from dataplane.errors import DataplaneError, SyncError, Unsupported
from dataplane.kernel.bpf import BpfError, Object, has_helper
from dataplane.kernel.grace import jiffies_per_second, wait_for_programs
from dataplane.kernel.links import Interface, interface_name, interface_towards, read_node
from dataplane.kernel.lock import hold
from dataplane.kernel.places import netns_cookie, pin_folder
from dataplane.mode import Mode, Notice, Options, Question, SyncResult, Wake, misfit_rows, unknown_algorithms
from dataplane.modes.ebpf import attach, explaining, layout, listing
from dataplane.modes.ebpf.driver import Drivers
from dataplane.modes.ebpf.edges import pod_columns, pod_links
from dataplane.modes.ebpf.events import Journal, Reader
from dataplane.modes.ebpf.failover import Failover
from dataplane.modes.ebpf.flows import Caretaker
from dataplane.modes.ebpf.maps import MapSet, open_pinned_maps, traffic_cpus
from dataplane.modes.ebpf.store import Store
from dataplane.table import EMPTY, NodeNetwork, ServiceTable

__all__ = ["MODE", "Ebpf", "clean", "drain", "folder_of", "look", "probe"]

log = logging.getLogger(__name__)

CHECK_MTU = 163  # BPF_FUNC_check_mtu, linux/bpf.h (Linux 5.12)


def folder_of(options: Options, *, mount: bool = False) -> Path:
    """Where this namespace's pins are, of this layout version."""
    return pin_folder(options.pin_root, mount=mount) / f"abi{layout.abi_constants()['ABI_VERSION']}"


def clean(options: Options) -> int:
    """Remove everything of ours from this network namespace; returns how many things went."""
    folder = folder_of(options)
    if folder.is_dir():
        os.close(hold(folder, f"the eBPF maps at {folder}"))
    formerly = sum(attach.remove_pins(former) for former in former_layouts(folder))
    return formerly + attach.detach_everything(folder)


def former_layouts(folder: Path) -> list[Path]:
    """Pins beside these, of agents whose maps were laid out otherwise."""
    return [beside for beside in folder.parent.glob("abi*") if beside != folder and beside.is_dir()]


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
        for family in (4, 6):
            frontends = maps[f"frontends{family}"]
            frontends.delete_batch(frontends.items(layout.frontend_dtype(family), np.dtype(np.uint64))[0])
    finally:
        for known in maps.values():
            known.close()
    return True


class Ebpf:
    """A `dataplane.mode.Programmer`.

    Raises:
        Unsupported: this machine cannot run the mode; says what is missing.
        Occupied: another instance serves this namespace.
    """

    name = "ebpf"

    def __init__(self, options: Options, wake: Wake) -> None:
        del wake  # every word is compared each second: nobody has to tell
        self.options = options
        self.folder = folder_of(options, mount=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except PermissionError as error:
            raise Unsupported("eBPF", f"{self.folder} cannot be made: run as root (CAP_BPF, CAP_NET_ADMIN)") from error
        self._lock = hold(self.folder, f"the eBPF maps at {self.folder}")
        self.hz = jiffies_per_second()
        try:
            self.maps = MapSet(self.folder, options)
            self.adopted = self.maps.adopted
            self._pod, self._uplink = self._load_together("pod.bpf.o", "uplink.bpf.o")
            self._inspect = self._load("inspect.bpf.o")
        except BpfError as error:
            if not getattr(self, "adopted", True):
                attach.remove_pins(self.folder)
            os.close(self._lock)
            raise Unsupported("eBPF", f"the kernel refused the programs or maps: {error}") from error
        self._connect = self._load_socket_programs()
        self._watch = self._load_watch()
        self.store = Store(self.maps, self.hz, max_ring=options.max_ring)
        self.table: ServiceTable = EMPTY
        self._misfitting: frozenset[str] = frozenset()
        self._attached = False
        self.pods = attach.pods(self.folder, self._pod, options)
        self.uplinks = attach.uplinks(self.folder, self._uplink, options)
        self.drivers = Drivers(
            self.folder, options.xdp, lambda: self._load("xdp.bpf.o"), lambda: self.maps.maps["xdp_links"]
        )
        self.sockets: attach.Sockets | None = None
        self.audit_repairs = 0
        self.failover = Failover(options)
        self.caretaker = Caretaker(
            self.maps.maps, self._inspect.program("sweep"), self._inspect.program("read_clock"), self.hz, options
        )
        self.caretaker.start()
        self._explain: Object | None = None  # loaded when somebody asks
        self.journal = Journal()
        self._trace_until = 0.0
        self.maps.view("node")["trace"] = 0
        self.events = Reader(self.maps.maps["events"])
        self.events.start()

    def _settings(self, *, can_set_errno: bool = True, quiet: bool = False) -> bytes:
        return layout.pack(
            "settings",
            host_netns=netns_cookie() if self.options.socket_scope == "host" else 0,
            hz=self.hz,
            reject_burst=self.options.reject_rate,
            fast_path=int(self.options.fast_path),
            can_set_errno=int(can_set_errno),
            max_opening=self.options.max_flows // 8,
            udp_timeout=self.options.udp_timeout * self.hz,
            udp_timeout_stream=self.options.udp_timeout_stream * self.hz,
            port_first=self.options.port_first,
            dsr=int(self.options.dsr),
            port_count=self.options.port_count,
            answer_ping=int(self.options.answer_ping),
            can_check_mtu=int(has_helper(CHECK_MTU)),
            traffic_cpus=0 if quiet else traffic_cpus(self.options),
            event_burst=0 if quiet else self.options.event_rate,
        )

    def _load(self, name: str, *, can_set_errno: bool = True, quiet: bool = False) -> Object:
        loaded = self._prepare(name, can_set_errno=can_set_errno, quiet=quiet)
        loaded.load()
        self.maps.pin_new(loaded, self.folder)
        return loaded

    def _prepare(self, name: str, *, can_set_errno: bool = True, quiet: bool = False) -> Object:
        prepared = Object(layout.OBJECTS / name)
        prepared.constants(self._settings(can_set_errno=can_set_errno, quiet=quiet))
        self.maps.share_with(prepared)
        return prepared

    def _load_together(self, *names: str) -> list[Object]:
        """At once, because the verifier takes half a second for each. They have no maps that are not in the set."""
        prepared = [self._prepare(name) for name in names]
        with ThreadPoolExecutor(len(names)) as threads:
            for loading in [threads.submit(one.load) for one in prepared]:
                loading.result()
        return prepared

    def _load_socket_programs(self) -> Object | None:
        """The cgroup programs; without bpf_set_retval (Linux 5.18) a refusal shows as EPERM."""
        if self.options.socket_scope == "off":
            return None
        for can_set_errno in (True, False):
            try:
                return self._load("connect.bpf.o", can_set_errno=can_set_errno)
            except BpfError as error:
                log.warning("socket programs%s: %s", "" if can_set_errno else " without bpf_set_retval", error)
        return None

    def _load_watch(self) -> Object | None:
        """What hears of the node's own connections that get no answer; nobody needs to where none is left out."""
        if self._connect is None or not self.options.failover_failures:
            return None
        try:
            return self._load("watch.bpf.o")
        except BpfError as error:
            log.warning("silent backends are not noticed by what the node's own sockets meet: %s", error)
        return None

    def sync(self, table: ServiceTable) -> SyncResult:
        """See `dataplane.mode.Programmer.sync`."""
        names = changed_services(self.table, table) | self._misfitting
        try:
            if table.node != self.table.node or not self._attached:
                self._write_node(table.node)
            self._collect()
            changed, removed = self.store.apply({name: table.services.get(name, ()) for name in names})
            self.caretaker.want_grace(self.store.stamp)
            self.failover.services_changed(self.store, names)
            self.caretaker.count_for = frozenset(self.store.follows_load())
            self.caretaker.disconnect(self.store.take_gone_datagram_backends())
            moved = table.node.primary != self.table.node.primary
            self.table = table
            self._misfitting = frozenset(self.store.unfit)
            if not self._attached or moved:
                self._attach()
                self._take_over()
        except (DataplaneError, OSError, ValueError) as error:
            self._start_over()
            raise SyncError(f"the eBPF maps could not be programmed: {error}") from error
        return SyncResult(changed, removed, tuple(self.store.misfits.values()))

    def _take_over(self) -> None:
        """An agent of another layout left its programs attached: ours serve now, and what only those knew ends."""
        for former in former_layouts(self.folder):
            log.warning("maps of another layout at %s are removed; flows that only they knew end", former)
            attach.remove_pins(former)

    def _start_over(self) -> None:
        """What was planned and what was written may differ now: the next sync reads the maps and adopts."""
        wait_for_programs()  # the quarantine is forgotten with the store: nobody may still look at what it held
        stamp = self.store.stamp
        self.store = Store(self.maps, self.hz, adopt=True, max_ring=self.options.max_ring)
        self.store.stamp = stamp
        self.failover.forget()
        self.table = EMPTY

    def _attach(self) -> None:
        self._refresh_links()
        if self.sockets is None:
            self.sockets = attach.Sockets(self.folder, self._connect, self.options, self._watch)
        self._attached = True

    def _write_node(self, node: NodeNetwork) -> None:
        row = self.maps.view("node")
        primary = {6 if ":" in address else 4: address for address in node.primary}
        row["primary4"] = layout.address_words([primary[4]])[0, 0] if 4 in primary else 0
        row["primary6"] = layout.address_words([primary[6]]) if 6 in primary else 0
        for family in (4, 6):
            networks = [n for n in map(ipaddress.ip_network, node.service_cidrs) if n.version == family]
            networks = networks[: layout.abi_constants()["SERVICE_CIDRS"]]
            row[f"cidr{family}_count"] = 0
            for position, network in enumerate(networks):
                for column, address in (("cidr", network.network_address), ("mask", network.netmask)):
                    words = layout.address_words([str(address)])[0]
                    row[f"{column}{family}"][0, position] = words if family == 6 else words[0]
            row[f"cidr{family}_count"] = len(networks)
        for column, value in pod_columns(node).items():
            row[column] = value
        self.store.serve_node_ports_at(node.node_port_addresses)

    def links_changed(self) -> None:
        """See `dataplane.mode.Programmer.links_changed`."""
        if self._attached:
            self._refresh_links()

    def _refresh_links(self) -> None:
        interfaces = read_node().interfaces
        self._write_pod_links(interfaces)
        for links in (self.pods, self.uplinks):
            links.refresh(self.table.node.primary)
        self.drivers.refresh(self.uplinks.attached.values(), interfaces)

    def _write_pod_links(self, interfaces: Iterable[Interface]) -> None:
        """Where pods are known by their interface: all interfaces whose packets are pods'."""
        known = self.maps.maps["pod_links"]
        wanted = {index.to_bytes(4, sys.byteorder) for index in pod_links(interfaces, self.table.node)}
        for key in known.items(np.dtype(np.uint32), np.dtype(np.uint32))[0].tolist():
            if (raw := key.to_bytes(4, sys.byteorder)) not in wanted:
                known.delete(raw)
        for raw in wanted:
            known.update(raw, bytes(4))

    def maintain(self) -> Sequence[Notice]:
        """See `dataplane.mode.Programmer.maintain`."""
        self._collect()
        self.caretaker.look_for(*self.store.quarantine.candidates)
        if self._misfitting:
            self.sync(self.table)
        repaired = self.store.audit()
        if repaired:
            self.audit_repairs += repaired
            log.warning("%d slice words in the maps were not ours and have been repaired", repaired)
        self._name_events()
        self.journal.tell()
        if self._trace_until and time.monotonic() > self._trace_until:
            self.maps.view("node")["trace"] = 0
            self._trace_until = 0.0
        notices = self.failover.look(self.store)
        self.caretaker.want_grace(self.store.stamp)
        return notices

    def _collect(self) -> None:
        graced, scanned = self.caretaker.collect()
        if self.caretaker.opening_flows is not None:
            self.maps.view("node")["opening"] = self.caretaker.opening_flows
            self.caretaker.opening_flows = None
        self.store.graced(graced)
        if scanned is not None:
            self.store.scanned(*scanned)
        loads, self.caretaker.loads = self.caretaker.loads, None
        if loads is not None and self.store.balance(loads):
            self.caretaker.want_grace(self.store.stamp)

    def names(self) -> dict[int, str]:
        """Service id -> name of the service port."""
        return {
            known.service: known.entry.name for entries in self.store.installed.values() for known in entries.values()
        }

    def limitations(self) -> list[str]:
        """What the table asks for and this mode does not do, in sentences."""
        sentences = unknown_algorithms(self.table, KNOWN, "random", weighs=True)
        cut = [(key[0], has, wanted) for key, (has, wanted) in self.store.cut.items()]
        if cut:
            name, has, wanted = cut[0]
            sentences.append(
                f"{len(cut)} service ports have smaller rings than their algorithm would fill ({name}: {has} of "
                f"{wanted} slots): --max-slots is used up, and other nodes may choose other backends"
            )
        return sentences

    def status(self) -> dict[str, Any]:
        """See `dataplane.mode.Programmer.status`."""
        store = self.store
        return {
            "mode": self.name,
            "pins": str(self.folder),
            "adopted": self.adopted,
            "pods": self.pods.status(),
            "uplinks": self.uplinks.status(),
            "xdp": self.drivers.status(),
            "sockets": self.sockets.status() if self.sockets else {"cgroup": None, "reason": "not attached yet"},
            "fast_path": self.options.fast_path,
            "fill": {
                "services": [store.service_ids.limit - 1 - store.service_ids.left, store.service_ids.limit - 1],
                "backends": [store.backend_ids.limit - 1 - store.backend_ids.left, store.backend_ids.limit - 1],
                "slots": [store.slices.in_use, store.slices.limit],
                "flows": [self.caretaker.known_flows, 2 * self.options.max_flows],
            },
            "traffic_bytes": store.traffic.bytes if store.traffic.counting else 0,
            "quarantined": len(store.quarantine),
            "misfits": misfit_rows(store.misfits.values()),
            "limitations": self.limitations(),
            "left_out": self.failover.rows(),
            "probes": self.failover.probes(),
            "audit_repairs": self.audit_repairs,
            "counters": self.counters(),
        }

    def counters(self) -> dict[str, int]:
        """See `dataplane.mode.Programmer.counters`."""
        return self.maps.counters()

    def traffic(self, *, by_backend: bool) -> list[dict[str, Any]]:
        """See `dataplane.mode.Programmer.traffic`."""
        return listing.traffic(self.store.traffic, self.maps.maps, self.names(), by_backend=by_backend)

    def ask(self, question: Question) -> dict[str, Any]:
        """See `dataplane.mode.Programmer.ask`."""
        if self._explain is None:
            self._explain = self._load("explain.bpf.o", quiet=True)
        around = explaining.Surroundings(
            self.names(), self.store.backends, self.store.services, self.hz, interface_name
        )
        return explaining.explain(self._explain, question, *self._place_of(question), around)

    def _place_of(self, question: Question) -> tuple[str, int]:
        """Whose packet it is, and the interface at which it comes in; 0 for none."""
        node = self.table.node
        towards = interface_towards(question.src)
        place = question.source_class
        if place is None:
            own = question.src in {*node.addresses, *node.primary} or ipaddress.ip_address(question.src).is_loopback
            place = "node" if own else "pod" if towards in self.pods.attached else "external"
        attached = {"pod": self.pods, "external": self.uplinks}.get(place)
        if attached is None or not attached.attached:
            return place, 0
        return place, towards if towards in attached.attached else min(attached.attached)

    def happened(self, after: int) -> tuple[list[dict[str, Any]], int]:
        """See `dataplane.mode.Watched.happened`."""
        self._name_events()
        return self.journal.rows(after), self.journal.last

    def _name_events(self) -> None:
        raw = self.events.take()
        if raw:
            self.journal.add(raw, self.names(), self.store.addresses, self.store.backends)

    def trace(self, service: str | None, client: str | None, seconds: float) -> None:
        """See `dataplane.mode.Watched.trace`."""
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
        """See `dataplane.mode.Programmer.close`."""
        self.caretaker.stop()
        self.failover.close()
        self.events.stop()
        self.maps.view("node")["trace"] = 0
        for loaded in (self._pod, self._uplink, self._inspect, self._connect, self._watch, self._explain):
            if loaded is not None:
                loaded.close()
        self.drivers.close()
        self.maps.close()
        if not self._attached and not self.adopted:
            attach.remove_pins(self.folder)  # nothing was ever programmed: leave no empty maps behind
        os.close(self._lock)


def probe(options: Options) -> str | None:
    """Load the smallest of our objects, maps and all, and let it go."""
    try:
        pin_folder(options.pin_root, mount=False)
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
    maps = open_pinned_maps(folder)
    return listing.Pinned(str(folder), maps, names) if maps else None


MODE = Mode("ebpf", Ebpf, clean, probe, look, drain, conntrack=False)
