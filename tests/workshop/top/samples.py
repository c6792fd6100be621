"""Looks at a node that nobody took: rows as views and agents report them."""

from __future__ import annotations

from typing import Any

from hybrid_proxy.controller.serving.protocol import (
    AgentStatus,
    ChangeLatency,
    ConfigurationStatus,
    HealthChecks,
    ModeStatus,
    QueueStatus,
    SourceStatus,
)
from hybrid_proxy.dataplane.reports import (
    BackendRow,
    EbpfStatus,
    Ejection,
    Fill,
    HealthProbes,
    InterfaceHooks,
    MapUsage,
    ServiceRow,
    SocketHooks,
    Status,
    TrafficCounts,
    XdpHooks,
)
from hybrid_proxy.workshop.top.rates import Sample


def service(name: str, flows: int, frontend: str = "10.96.0.10:80", **more: Any) -> ServiceRow:
    """A row of mode ebpf's view, with 10 packets and 1,000 bytes each way for each flow."""
    counts = TrafficCounts(flows, 10 * flows, 1000 * flows, 10 * flows, 1000 * flows, flows, 2_000_000 * flows)
    waited = {1_048_576: flows, 2_097_152: flows // 20}
    fields = {"id": 7, "protocol": "TCP", "backends": 2, "traffic": counts, "first_packets": waited}
    return ServiceRow(name=name, frontends=[frontend], **(fields | more))


def backend(address: str, flows: int, **more: Any) -> BackendRow:
    counts = TrafficCounts(flows, flows, flows, flows, flows, 0, 0)
    fields = {"service": "ns/a:http", "protocol": "TCP", "used": True, "failures": 0, "state": "serving"}
    return BackendRow(address=address, **({"traffic": counts} | fields | more))


def ebpf(*ejections: Ejection) -> EbpfStatus:
    hooks = InterfaceHooks("tcx", [], {})
    return EbpfStatus(
        pins="/sys/fs/bpf/x",
        pods=hooks,
        uplinks=hooks,
        xdp=XdpHooks("auto", [], {}),
        sockets=SocketHooks(None, "off"),
        fast_path="established",
        fast_path_reason="the setting",
        maps={"flows4": MapUsage(100, 4096, 12, 200), "counters": MapUsage(40, 320)},
        traffic_bytes=0,
        deferred_frees=0,
        ejections=list(ejections),
        probes=HealthProbes(0, 0, 0.0),
    )


def dataplane(**fields: Any) -> Status:
    return Status(**({"mode": "ebpf", "fill": {"flows": Fill(12, 524_288)}, "ebpf": ebpf()} | fields))


def agent_status(**fields: Any) -> AgentStatus:
    """The status of an agent that is well."""
    made = {
        "version": "1.2.3", "pid": 4711,
        "node": "n1", "mode": ModeStatus("auto", "ebpf"), "draining": [], "leaving": False, "synced": True,
        "drift": [], "generation": 1, "services": 1, "observed": 1, "waiting": QueueStatus(0, 0),
        "source": SourceStatus("files", True, "", []), "problems": [], "conflicts": {},
        "configuration": ConfigurationStatus(None, [], [], ""), "other_proxies": [],
        "health_checks": HealthChecks(0, {}, {}), "requests": [], "error": "", "ready_seconds": 1.0,
        "last_sync_seconds": 0.1, "change_seconds": ChangeLatency(0, None, None, None), "memory_bytes": 45_000_000,
        "uptime_seconds": 192.0, "dataplane": dataplane(),
    }  # fmt: skip
    return AgentStatus(**(made | fields))


def status(**counters: int) -> AgentStatus:
    return agent_status(dataplane=dataplane(counters=counters))


def sample(at: float, *services: ServiceRow, **more: Any) -> Sample:
    return Sample(at, **{"status": status(), "mode": "ebpf", "services": services, **more})
