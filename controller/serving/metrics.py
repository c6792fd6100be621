"""Metrics for Prometheus: the loop's counters, and the dataplane's state at each scrape.

docs/metrics.md lists them. Those that begin with `kubeproxy_` or `rest_client_` have the meaning of kube-proxy's
metrics of that name, so that its dashboards and alerts work; a metric that would mean something else is not exported.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import attrgetter, mul
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from hybrid_proxy.controller import __version__
from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.serving.counters import FAMILIES, Counters, Durations
from hybrid_proxy.controller.serving.health import OK, UNAVAILABLE, Health
from hybrid_proxy.controller.serving.protocol import AgentStatus, ApiRequests, DrainingMode, TrafficAnswer
from hybrid_proxy.dataplane.first_packets import BOUNDS
from hybrid_proxy.dataplane.reports import Status, TrafficRow

Rows = Sequence[TrafficRow]
_Values = float | Mapping[Any, float]  # by the value of the label, or by those of several

# Which failure of kube-proxy's a failed sync of this mode is.
_FAILURES: Final = {
    "iptables": "iptables_restore_failures", "ipvs": "iptables_restore_failures", "nftables": "nftables_sync_failures",
}  # fmt: skip
_POLICIES: Final = ("internal", "external")
_END: Final = b"# EOF\n"


class Metrics:
    """A registry of our own; nothing global.

    Args:
        status: called once for each scrape, in the server's thread; None: the loop does not answer.
        traffic: of the dataplane, called likewise.
    """

    def __init__(
        self,
        status: Callable[[], AgentStatus | None],
        traffic: Callable[[], TrafficAnswer] = lambda: TrafficAnswer([]),
        counters: Counters | None = None,
        health: Health | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counters, health = counters or Counters(), health or Health(60.0)
        self.registry.register(_Families(lambda: _of_all(status(), counters, health)))
        self._health_checks = CollectorRegistry()
        self._health_checks.register(_Families(lambda: _of_health_checks(counters, health)))
        self._traffic = traffic

    def page(self, accept: str) -> tuple[bytes, str]:
        """Returns the text of a scrape and its content type, in the requested format."""
        encode, content_type = choose_encoder(accept)
        body = bytearray(redact(encode(self.registry).decode()).encode())
        openmetrics = content_type.startswith("application/openmetrics-text")
        if openmetrics:
            del body[-len(_END) :]
        traffic = self._traffic()
        rows = _traffic_text(traffic.rows, openmetrics=openmetrics)
        for text in chain(rows, _first_packets_text(traffic.first_packets)):
            body += text.encode()
        if openmetrics:
            body += _END
        return bytes(body), content_type

    def health_checks(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics of `/metrics/slis` alone (KEP-3466)."""
        encode, content_type = choose_encoder(accept)
        return encode(self._health_checks), content_type


class _Families(Collector):
    """The metrics that a function makes for each scrape."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: registering must not ask the loop."""
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._make()


def _of_health_checks(counters: Counters, health: Health) -> Iterator[Metric]:
    """The health pages for a scrape every second: whether they answer 200 now, and how often they did."""
    pages, asked = ("healthz", "livez"), dict(health.asked)
    now = {(page, page): int(health.passes(page, time.monotonic())) for page in pages}
    yield _gauge("kubernetes_healthcheck", "1: this health check succeeds now; 0: it fails", now, "name", "type")
    statuses = (("success", OK), ("error", UNAVAILABLE))
    total = {(page, page, status): asked.get((page, code), 0) for page in pages for status, code in statuses}
    text = "Health checks that were asked for"
    yield _counter("kubernetes_healthchecks", text, total, "name", "type", "status")
    yield _gauge("process_start_time_seconds", "When this process started, since 1970", counters.started)


def _of_all(status: AgentStatus | None, counters: Counters, health: Health) -> Iterator[Metric]:
    """Returns all families of an agent; without an answer of the loop those that need none."""
    build = {(__version__, platform.python_version()): 1}
    yield _gauge("hybrid_proxy_build_info", "1, with the version as label", build, "version", "python")
    yield from _of_loop(counters, health)
    yield from _of_failures(counters, health, status.mode.effective if status else "")
    if status is not None:
        yield from _of_agent(status, counters)
        yield from _of_connection(status.requests)
        yield from _of_dataplane(status.dataplane, status.draining)


# What the loop counts


def histogram(durations: Durations) -> Metric:
    """Returns the histogram, with a label `ip_family` if the families are counted separately."""
    made = HistogramMetricFamily(
        durations.name, durations.text, labels=["ip_family"] if durations.counts.keys() <= FAMILIES.keys() else []
    )
    bounds = [*map(floatToGoString, durations.bounds), "+Inf"]
    for family, counts in durations.counts.items():
        labels = [FAMILIES[family]] if family else []
        made.add_metric(labels, [*zip(bounds, accumulate(counts), strict=True)], durations.sums[family])
    return made


def _of_loop(counters: Counters, health: Health) -> Iterator[Metric]:
    prefix, names = "kubeproxy_sync_proxy_rules", [FAMILIES[family] for family in health.families]
    yield from map(histogram, counters.durations)
    for name, moment, text in (
        ("last", counters.last_synced, "When a table was last programmed"),
        ("last_queued", counters.last_queued, "When a change that is to be programmed last came"),
    ):
        yield _gauge(f"{prefix}_{name}_timestamp_seconds", text, dict.fromkeys(names, moment), "ip_family")
    for name, thing, waiting, total in (
        ("endpoint", "EndpointSlices", counters.endpoints_waiting, counters.endpoint_changes),
        ("service", "Services", counters.services_waiting, counters.service_changes),
    ):
        yield _gauge(f"{prefix}_{name}_changes_pending", f"Changes of {thing} that wait to be programmed", waiting)
        yield _counter(f"{prefix}_{name}_changes", f"Changes of {thing} that were seen", total)
    asked = dict(health.asked)
    for page in ("healthz", "livez"):
        codes = {str(code): asked.get((page, code), 0) for code in (OK, UNAVAILABLE)}
        yield _counter(f"kubeproxy_proxy_{page}", f"Answers of /{page}, by status", codes, "code")
    text = "Services with a Local traffic policy and endpoints, but none on this node"
    lacking = {
        (FAMILIES[family], policy): counters.totals.no_local.get((family, policy), 0)
        for family in health.families
        for policy in _POLICIES
    }
    yield _gauge(f"{prefix}_no_local_endpoints_total", text, lacking, "ip_family", "traffic_policy")


def _of_failures(counters: Counters, health: Health, mode: str) -> Iterator[Metric]:
    counted = dict(counters.sync_failures)
    counted.setdefault(mode, 0)
    counted.pop("", None)
    yield _counter("hybrid_proxy_sync_failures", "Syncs that failed, by mode", counted, "mode")
    for name in sorted({_FAILURES[mode] for mode in counted if mode in _FAILURES}):
        total = sum(count for mode, count in counted.items() if _FAILURES.get(mode) == name)
        both = {FAMILIES[family]: total for family in health.families}
        yield _counter(f"kubeproxy_sync_proxy_rules_{name}", "Syncs of this mode that failed", both, "ip_family")


# What the agent and its mode say


def _of_agent(status: AgentStatus, counters: Counters) -> Iterator[Metric]:
    mode, text = status.mode, "1 for the mode at work; degraded: it replaces the one that was asked for"
    at_work = {(mode.requested, mode.effective, str(mode.degraded).lower()): 1}
    yield _gauge("hybrid_proxy_mode", text, at_work, "requested", "effective", "degraded")
    flows = {(left.mode, protocol): count for left in status.draining for protocol, count in left.flows.items()}
    text = "Open flows of a mode that was left, by protocol"
    yield _gauge("hybrid_proxy_draining_flows", text, flows, "mode", "protocol")
    refused = sum(map(len, status.refused_external_ips.values()))
    for name, text, value in (
        ("services", "Services in the table", status.services),
        ("service_ports", "Service ports in the table, each family for itself", counters.totals.ports),
        ("backends", "Endpoints that serve, of all service ports", counters.totals.backends),
        ("synced", "1 when everything known is programmed", int(status.synced)),
        ("malformed_objects", "Malformed objects", len(status.problems)),
        ("conflicts", "Services with an address and port that another one has", len(status.conflicts)),
        ("refused_external_ips", "External IPs that are not served", refused),
        ("unrepaired_drift", "Things that others changed and that are not put right yet", len(status.drift)),
        ("other_proxies", "Other proxies that were found on this node", len(status.other_proxies)),
        ("waiting_objects", "Objects whose changes the loop has not taken yet", status.waiting.now),
        ("configuration_refused", "1 while the newest configuration is wrong", int(bool(status.configuration.refused))),
        ("source_up", "1 when the source of objects can be read", int(status.source.healthy)),
        ("start_seconds", "From the start to the first programmed table, 0: not yet", status.ready_seconds or 0),
    ):
        yield _gauge(f"hybrid_proxy_{name}", text, value)
    text, expires = "When the certificate of the kubeconfig expires, since 1970", status.certificate_expires
    yield _gauge("hybrid_proxy_certificate_expiry_timestamp_seconds", text, {} if expires is None else {(): expires})
    checks = {"served": status.health_checks.served, "failed": len(status.health_checks.failed)}
    yield _gauge("hybrid_proxy_health_check_node_ports", "Health-check node ports, by state", checks, "state")


def _of_dataplane(dataplane: Status, draining: list[DrainingMode]) -> Iterator[Metric]:
    missed = {one.entry: 1 for one in dataplane.unprogrammed}
    yield _gauge("hybrid_proxy_unprogrammed", "Service ports that could not be programmed", missed, "entry")
    rows = dataplane.ebpf.ejections if dataplane.ebpf else ()
    ejected = {(row.service, row.address): int(row.ejected) for row in rows}
    text = "1 for a backend that gets no new connections because it fails"
    yield _gauge("hybrid_proxy_backend_ejected", text, ejected, "entry", "backend")
    text = "Backends that start slowly and do not have their whole share yet"
    yield _gauge("hybrid_proxy_slow_start_backends", text, dataplane.slow_starts)
    fill = dataplane.fill
    for name, text, values in (
        ("map_entries", "Used entries of a map", {name: row.used for name, row in fill.items()}),
        ("map_limit", "Entries that a map has room for", {name: row.limit for name, row in fill.items()}),
        ("map_fill_ratio", "Used part of a map", {name: row.used / max(row.limit, 1) for name, row in fill.items()}),
    ):
        yield _gauge(f"hybrid_proxy_{name}", text, values, "map")
    if dataplane.ebpf:
        memory = {name: row.bytes for name, row in dataplane.ebpf.maps.items()}
        yield _gauge("hybrid_proxy_map_bytes", "Kernel memory of a map", memory, "map")
    counted = Counter(dataplane.counters)
    for left in draining:
        counted.update(left.counters)
    yield _counter("hybrid_proxy_events", "Events in the programs, by reason", counted, "reason")
    text = "Things of ours that somebody else had changed"
    yield _counter("hybrid_proxy_audit_repairs", text, dataplane.audit_repairs)
    if written := dataplane.iptables:
        for found, name, text in (
            (written.rules, "total", "Rules of ours in a table"),
            (written.last_rules, "last", "Rules that the last change of a table wrote"),
        ):
            rules = {(family, table): count for family, tables in found.items() for table, count in tables.items()}
            yield _gauge(f"kubeproxy_sync_proxy_rules_iptables_{name}", text, rules, "ip_family", "table")
    if "socket_localhost" in counted:
        name = "kubeproxy_iptables_localhost_nodeports_accepted_packets"
        text = "Connections and datagrams of this node to node ports at loopback addresses, in whatever mode"
        yield _counter(name, text, counted["socket_localhost"])
    if dataplane.stale_deleted is not None:
        name, text = "kubeproxy_conntrack_reconciler_deleted_entries", "Entries that were deleted: they led to nobody"
        yield _counter(name, text, dataplane.stale_deleted, "ip_family")


def _of_connection(requests: Sequence[ApiRequests]) -> Iterator[Metric]:
    """Returns the counts and durations of requests to the API server; none without a server."""
    counts = {(row.method, row.host, row.code): row.count for row in requests}
    if counts:
        text = "Requests to the API server, by answer"
        yield _counter("rest_client_requests", text, counts, "method", "host", "code")
        from hybrid_proxy.controller.kubernetes.connection import REQUEST_BOUNDS  # of an agent with a server alone

        text = "From a request to the beginning of its answer, by method"
        made = HistogramMetricFamily("rest_client_request_duration_seconds", text, labels=["verb", "host"])
        bounds = [*map(floatToGoString, REQUEST_BOUNDS), "+Inf"]
        for verb, host in dict.fromkeys((row.method, row.host) for row in requests):
            rows = [row for row in requests if (row.method, row.host) == (verb, host)]
            within = accumulate(map(sum, zip(*(row.within for row in rows), strict=True)))
            made.add_metric([verb, host], [*zip(bounds, within, strict=True)], sum(row.seconds for row in rows))
        yield made


def _traffic_text(traffic: Rows, *, openmetrics: bool) -> Iterator[str]:
    """Formats the traffic of services, or of backends; those without any have no series.

    prometheus-client would make objects of each line: for 10,000 services that takes 36 MB, and 0.8 s in which the loop
    waits for the interpreter's lock. This takes 5 MB and 0.04 s.
    """
    rows = [row for row in traffic if row.counts.flows or row.counts.packets or row.counts.reply_packets]
    if not rows:
        return
    labels = ("service", "address", "protocol") if rows[0].address is not None else ("service",)
    what = "backend" if len(labels) > 1 else "service"
    whose = [",".join(f'{label}="{_escaped(str(getattr(row, label)))}"' for label in labels) for row in rows]
    counts = [row.counts for row in rows]
    for unit, text, directions in (
        ("flows", "Connections and conversations begun", (("", ""),)),
        ("packets", "Packets, to backends and back", _DIRECTIONS),
        ("bytes", "Bytes of IP packets, to backends and back", _DIRECTIONS),
    ):
        name = f"hybrid_proxy_{what}_{unit}"
        family = name if openmetrics else f"{name}_total"
        yield f"# HELP {family} {text}\n# TYPE {family} counter\n"
        for label, prefix in directions:
            values = map(attrgetter(f"{prefix}{unit}"), counts)
            yield from (f"{name}_total{{{text}{label}}} {value}\n" for text, value in zip(whose, values, strict=True))
    name = f"hybrid_proxy_{what}_connect_seconds"
    yield f"# HELP {name} From a connection's SYN to the backend's answer\n# TYPE {name} summary\n"
    for text, row in zip(whose, counts, strict=True):
        if row.answered:
            yield f"{name}_count{{{text}}} {row.answered}\n{name}_sum{{{text}}} {row.connect_ns / 1e9:.9f}\n"


_SHORT: Final = 7  # steps that share the first bucket, up to 8 microseconds
_BUCKETS: Final = [*map(floatToGoString, (bound / 1e9 for bound in BOUNDS[_SHORT:-1])), "+Inf"]
_MIDDLES: Final = [(lower + upper) / 2e9 for lower, upper in pairwise((0, *BOUNDS))]


def _first_packets_text(found: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Formats the histograms of the time to first packet."""
    name = "hybrid_proxy_service_first_packet_seconds"
    if found:
        text = "From the client's first packet to the backend's, of the busiest Services"
        yield f"# HELP {name} {text}\n# TYPE {name} histogram\n"
    for service, counts in sorted(found.items()):
        label, sums = f'service="{_escaped(service)}"', [*accumulate(counts)]
        buckets = zip(_BUCKETS, sums[_SHORT:], strict=True)
        yield "".join(f'{name}_bucket{{{label},le="{bound}"}} {count}\n' for bound, count in buckets)
        seconds = sum(map(mul, counts, _MIDDLES))
        yield f"{name}_sum{{{label}}} {seconds:.6f}\n{name}_count{{{label}}} {sums[-1]}\n"


_DIRECTIONS: Final = ((',direction="request"', ""), (',direction="reply"', "reply_"))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# Families


def _gauge(name: str, text: str, values: _Values, *labels: str) -> Metric:
    """Returns a gauge: one number, or a number for each value of its labels."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _counter(name: str, text: str, values: _Values, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(family: Any, values: _Values) -> Metric:
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric([key] if isinstance(key, str) else key, value)
    made: Metric = family
    return made
