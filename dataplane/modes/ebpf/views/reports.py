"""The reports of an open mode: status, warnings, counters, traffic, and explanations of packets."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from hybrid_proxy.dataplane.balancing import KNOWN
from hybrid_proxy.dataplane.kernel.bpf import Object
from hybrid_proxy.dataplane.kernel.links import interface_name
from hybrid_proxy.dataplane.mode import Event, Options, ProbePacket
from hybrid_proxy.dataplane.modes.ebpf.ejection.failover import Failover
from hybrid_proxy.dataplane.modes.ebpf.flows.collector import FlowGC
from hybrid_proxy.dataplane.modes.ebpf.generations.datapath import Datapath
from hybrid_proxy.dataplane.modes.ebpf.hooks.attachments import Attachments
from hybrid_proxy.dataplane.modes.ebpf.hooks.fast_path import FastPath
from hybrid_proxy.dataplane.modes.ebpf.maps.making import MOST_BYTES
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.modes.ebpf.views import explanation, listing
from hybrid_proxy.dataplane.reports import EbpfStatus, ExplainAnswer, Fill, MapUsage, Status, TrafficRow, several
from hybrid_proxy.dataplane.table import EMPTY, ServiceTable
from hybrid_proxy.dataplane.unmet import Unmet

log = logging.getLogger(__name__)


class Reports:
    """Reads what the other parts know."""

    def __init__(
        self, options: Options, maps: MapSet, store: Store, datapath: Datapath, attachments: Attachments, gc: FlowGC,
        failover: Failover, fast_path: FastPath,
    ) -> None:  # fmt: skip
        self._options, self._maps, self._store, self._datapath = options, maps, store, datapath
        self._attachments, self._gc, self._failover, self._fast_path = attachments, gc, failover, fast_path
        self.unmet = Unmet(KNOWN, "random", weighs=True, probes=True)
        self._nearly_full: dict[str, str] = {}  # map -> message
        self._explain: Object | None = None  # loaded when somebody asks
        self._growths = 0  # of maps, when they were loaded

    def names(self, table: ServiceTable) -> Mapping[int, str]:
        """Service id -> name of the service port; until the first table, of what was adopted."""
        return self._options.names() if table is EMPTY else self._store.names()

    def warnings(self, table: ServiceTable) -> list[str]:
        """Returns what the table asks for and this mode does not do."""
        messages = self.unmet.warnings(table)
        cut = [(key[0], has, wanted) for key, (has, wanted) in self._store.plan.cut.items()]
        if cut:
            name, has, wanted = cut[0]
            messages.append(
                f"{several(len(cut), 'service port')} with rings smaller than the algorithm fills ({name}: {has} of "
                f"{wanted} slots): --max-slots is used up, and other nodes may choose other backends"
            )
        traffic, backends = self._store.traffic, self._maps.maps["backends"].entries
        if traffic.counting and backends > traffic.backends:
            messages.append(
                f"the traffic of backends with numbers from {traffic.backends} on is not counted: rows for {backends} "
                f"would take more than {MOST_BYTES >> 20} MiB"
            )
        others = filter(None, [self._fast_path.decision.warning, self._datapath.failure])
        return [*messages, *others]

    def nearly_full(self) -> Iterable[Event]:
        """An event for each map that is nearly full, once until it has room again."""
        full = self._datapath.nearly_full(self._store.plan.pools.used() | self._gc.used)
        for name in full.keys() - self._nearly_full.keys():
            log.warning("%s", full[name])
            yield Event("", "Warning", "MapNearlyFull", "GrowMap", full[name])
        self._nearly_full = full

    def status(self, mode: str, table: ServiceTable, audit_repairs: int) -> Status:
        """Returns what is loaded, attached and filled."""
        self._failover.take_back(self._store)
        failing, failing_backends = listing.failing_ports(self._maps.maps, lambda: self.names(table))
        store, used, maps, attached = self._store, self._store.plan.pools.used(), self._maps.maps, self._attachments
        return Status(
            mode=mode,
            adopted=self._maps.adopted,
            fill={
                "services": Fill(used["services"], maps["services"].entries - 1),
                "backends": Fill(used["backends"], maps["backends"].entries - 1),
                "slots": Fill(used["slots"], maps["slots"].entries),
                "flows": Fill(sum(self._gc.used.values()), maps["flows4"].entries + maps["flows6"].entries),
            },
            unprogrammed=list(store.plan.unprogrammed.values()),
            failing=sorted(failing),
            failing_in={name: family for name, family in failing.items() if family},
            failing_backends=failing_backends,
            slow_starts=len(self._failover.slow_start),
            warnings=self.warnings(table),
            audit_repairs=audit_repairs,
            counters=self.counters(),
            ebpf=EbpfStatus(
                pins=str(self._maps.folder),
                pods=attached.pods.status(),
                uplinks=attached.uplinks.status(),
                xdp=attached.drivers.status(),
                sockets=attached.sockets.status(),
                fast_path=self._fast_path.decision.path,
                fast_path_reason=self._fast_path.decision.why,
                maps=self._map_usage(),
                traffic_bytes=store.traffic.bytes if store.traffic.counting else 0,
                deferred_frees=len(store.plan.pools),
                ejections=self._failover.rows(),
                probes=self._failover.prober.status(),
            ),
        )

    def _map_usage(self) -> dict[str, MapUsage]:
        """By the name of each map."""
        used, upper = self._store.plan.pools.used() | self._gc.used, self._datapath.upper
        rows = {}
        for name, known in sorted(self._maps.maps.items()):
            bound = max(upper.get(name, 0), known.entries) if name in used else None
            rows[name] = MapUsage(known.entries, known.memory, used.get(name), bound)
        return rows

    def counters(self) -> dict[str, int]:
        """Events by reason since the maps were made."""
        return self._maps.counters() | {"connections_reset": self._gc.resets.count}

    def traffic(self, table: ServiceTable, *, by_backend: bool) -> list[TrafficRow]:
        """A row for each service port that had traffic, or for each backend of each."""
        return listing.traffic(self._store.traffic, self._maps.maps, self.names(table), by_backend=by_backend)

    def explain(self, packet: ProbePacket, table: ServiceTable) -> ExplainAnswer:
        """Runs a probe packet through the loaded programs."""
        if self._growths != self._datapath.growths:  # the programs use maps that were replaced
            self.close()
        if self._explain is None:
            self._explain, self._growths = self._datapath.loader.one("explain", quiet=True), self._datapath.growths
        around = explanation.ExplainContext(
            self.names(table), self._store.backends, self._store.services, self._datapath.loader.hz, interface_name
        )
        return explanation.explain(self._explain, packet, *self._attachments.entrance(packet), around)

    def close(self) -> None:
        """Closes the programs that explain."""
        if self._explain is not None:
            self._explain.close()
        self._explain = None
