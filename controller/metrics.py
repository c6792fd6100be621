"""Metrics for Prometheus: what the loop measured, and what the dataplane says of itself at each scrape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.config import Endpoint

__all__ = ["Metrics"]

log = logging.getLogger(__name__)

BUCKETS = tuple(0.0001 * 2**n for n in range(18))


class Metrics:
    """A registry of our own; nothing global.

    Args:
        status: asked at each scrape, from the server's thread.
        traffic: rows of `dataplane.mode.Programmer.traffic`, asked likewise.
    """

    def __init__(
        self, status: Callable[[], dict[str, Any]], traffic: Callable[[], list[dict[str, Any]]] = list
    ) -> None:
        self.registry = CollectorRegistry()
        self.sync = Histogram(
            "hybrid_proxy_sync_duration_seconds", "Time to program one table", buckets=BUCKETS, registry=self.registry
        )
        self.change = Histogram(
            "hybrid_proxy_change_latency_seconds",
            "From an event's arrival to its effect in the kernel",
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_Status(status))
        self.registry.register(_Traffic(traffic))

    def serve(self, endpoint: Endpoint) -> None:
        """Listen in a thread; a port that is taken is told and nothing else stops."""
        try:
            start_http_server(endpoint.port, endpoint.address, registry=self.registry)
        except OSError as error:
            log.warning("metrics are not served at %s port %d: %s", endpoint.address, endpoint.port, error.strerror)


class _Status(Collector):
    """Figures of the agent's status as metrics."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        dataplane = status["dataplane"]
        mode = GaugeMetricFamily(
            "hybrid_proxy_mode", "1 for the mode at work; degraded: it replaces the one that was asked for",
            labels=["requested", "effective", "degraded"],
        )  # fmt: skip
        told = status["mode"]
        degraded = bool(told["reason"]) and told["requested"] != "auto"
        mode.add_metric([told["requested"], told["effective"], str(degraded).lower()], 1)
        yield mode
        yield GaugeMetricFamily("hybrid_proxy_services", "Services in the table", value=status["services"])
        yield GaugeMetricFamily("hybrid_proxy_synced", "1 when everything known is programmed", value=status["synced"])
        yield GaugeMetricFamily("hybrid_proxy_refused_objects", "Malformed objects", value=len(status["problems"]))
        yield _labelled(
            GaugeMetricFamily("hybrid_proxy_misfit", "Service ports that did not fit into a map", labels=["entry"]),
            {misfit["entry"]: 1 for misfit in dataplane["misfits"]},
        )
        out = GaugeMetricFamily(
            "hybrid_proxy_backend_left_out", "1 for a backend that gets no new connections because it fails",
            labels=["entry", "backend"],
        )  # fmt: skip
        for row in dataplane.get("left_out", ()):
            out.add_metric([row["service"], row["address"]], int(row["left_out"]))
        yield out
        fill = GaugeMetricFamily("hybrid_proxy_map_fill_ratio", "Used part of a map", labels=["map"])
        yield _labelled(fill, {name: used / max(limit, 1) for name, (used, limit) in dataplane["fill"].items()})
        events = CounterMetricFamily("hybrid_proxy_events", "Events in the programs, by reason", labels=["reason"])
        yield _labelled(events, dataplane["counters"])
        repairs = CounterMetricFamily("hybrid_proxy_audit_repairs", "Things of ours that somebody else had changed")
        repairs.add_metric([], dataplane["audit_repairs"])
        yield repairs


class _Traffic(Collector):
    """Traffic of services, or of backends; those without any have no series."""

    def __init__(self, traffic: Callable[[], list[dict[str, Any]]]) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        rows = [row for row in self._traffic() if row["flows"] or row["packets"] or row["reply_packets"]]
        labels = ["service", "address", "protocol"] if rows and "address" in rows[0] else ["service"]
        what = "backend" if len(labels) > 1 else "service"
        flows = CounterMetricFamily(f"hybrid_proxy_{what}_flows", "Connections and conversations begun", labels=labels)
        packets = CounterMetricFamily(
            f"hybrid_proxy_{what}_packets", "Packets, to backends and back", labels=[*labels, "direction"]
        )
        octets = CounterMetricFamily(
            f"hybrid_proxy_{what}_bytes", "Bytes of IP packets, to backends and back", labels=[*labels, "direction"]
        )
        for row in rows:
            whose = [row[label] for label in labels]
            flows.add_metric(whose, row["flows"])
            for direction, prefix in (("request", ""), ("reply", "reply_")):
                packets.add_metric([*whose, direction], row[f"{prefix}packets"])
                octets.add_metric([*whose, direction], row[f"{prefix}bytes"])
        if rows:
            yield from (flows, packets, octets)


def _labelled(family: Any, values: dict[str, float]) -> Any:
    for label, value in values.items():
        family.add_metric([label], value)
    return family
