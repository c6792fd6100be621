"""Counters of a status as metrics, as a scrape sees them."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as text_parser

from hybrid_proxy.controller.kubernetes.connection import REQUEST_BOUNDS
from hybrid_proxy.controller.serving.metrics import Metrics
from hybrid_proxy.controller.serving.protocol import ApiRequests, DrainingMode, ModeStatus, TrafficAnswer
from hybrid_proxy.dataplane.first_packets import BOUNDS, STEPS
from hybrid_proxy.dataplane.reports import Ejection, IptablesStatus, TrafficCounts, TrafficRow
from tests.docs.pages import documented
from tests.workshop.top.samples import agent_status, dataplane, ebpf


def scrape(**fields: Any) -> list[str]:
    status = agent_status(dataplane=dataplane(**fields))
    return generate_latest(Metrics(lambda: status).registry).decode().splitlines()


def test_ejected_backends_and_those_kept() -> None:
    rows = [Ejection("d/web:http", f"10.1.0.{n}:80", n == 1, None, "") for n in (1, 2)]
    lines = scrape(ebpf=ebpf(*rows), counters={"failover": 3})
    assert 'hybrid_proxy_backend_ejected{backend="10.1.0.1:80",entry="d/web:http"} 1.0' in lines
    assert 'hybrid_proxy_backend_ejected{backend="10.1.0.2:80",entry="d/web:http"} 0.0' in lines
    assert 'hybrid_proxy_events_total{reason="failover"} 3.0' in lines
    assert not [line for line in lines if "localhost_nodeports" in line], "a mode that does not count it"


def test_node_ports_at_localhost_are_counted_as_kube_proxy_does() -> None:
    lines = scrape(counters={"socket_localhost": 7})
    assert "kubeproxy_iptables_localhost_nodeports_accepted_packets_total 7.0" in lines


def test_flows_of_a_mode_that_was_left() -> None:
    left = DrainingMode("ebpf", {"TCP": 12, "UDP": 3}, 40.0, {"drop_empty": 4, "failover": 1})
    status = agent_status(draining=[left], dataplane=dataplane(counters={"drop_empty": 2}))
    lines = generate_latest(Metrics(lambda: status).registry).decode().splitlines()
    assert 'hybrid_proxy_draining_flows{mode="ebpf",protocol="TCP"} 12.0' in lines
    assert 'hybrid_proxy_draining_flows{mode="ebpf",protocol="UDP"} 3.0' in lines
    assert 'hybrid_proxy_events_total{reason="drop_empty"} 6.0' in lines
    assert 'hybrid_proxy_events_total{reason="failover"} 1.0' in lines


@pytest.mark.parametrize("expires", [None, 1_924_991_998.0])
def test_a_certificate_that_expires_has_a_time_and_no_other_has(expires: float | None) -> None:
    name = "hybrid_proxy_certificate_expiry_timestamp_seconds"
    lines = generate_latest(Metrics(lambda: agent_status(certificate_expires=expires)).registry).decode().splitlines()
    assert [float(line.split()[1]) for line in lines if line.startswith(name)] == [expires] * bool(expires)


def test_the_page_has_a_row_for_every_metric() -> None:
    """With the types; tests/controller/live/test_monitoring.py compares labels, too, with those of real agents."""
    requests = [ApiRequests("GET", "10.0.0.1", "200", 1, [0] * (len(REQUEST_BOUNDS) + 1), 0.1)]
    rules = IptablesStatus(
        variant="nft", variant_reason="", families=[4], missing={}, chains=1, rules={}, last_rules={},
        kernel_reports_drift=True,
    )  # fmt: skip
    counts = TrafficCounts(4, 40, 400, 30, 300, 4, 6_000_000)
    of_service, of_backend = (
        TrafficAnswer([TrafficRow("d/web:http", counts, *backend)], {"d/web:http": [0] * STEPS})
        for backend in ((), ("10.1.0.1:80", "TCP"))
    )
    ebpf_counts = dataplane(counters={"socket_localhost": 1})
    iptables_counts = dataplane(iptables=rules, stale_deleted={"IPv4": 1})
    types: dict[str, str] = {}
    for status, traffic in (
        (agent_status(requests=requests, dataplane=ebpf_counts), of_service),
        (agent_status(mode=ModeStatus("auto", "iptables"), dataplane=iptables_counts), of_backend),
        (agent_status(mode=ModeStatus("auto", "nftables")), of_service),
    ):
        body, _ = Metrics(partial(copy, status), partial(copy, traffic)).page("text/plain")
        for family in text_parser(body.decode()):
            types[f"{family.name}_total" if family.type == "counter" else family.name] = family.type
    assert {name: kind for name, (kind, _) in documented().items()} == types, "docs/metrics.md differs from the code"


def test_a_mode_without_ejections() -> None:
    assert not [line for line in scrape() if line.startswith("hybrid_proxy_backend_ejected{")]


@pytest.mark.parametrize("openmetrics", [False, True])
def test_traffic_is_what_a_scraper_can_read(openmetrics: bool) -> None:
    rows = [
        TrafficRow("d/web:http", TrafficCounts(4, 40, 400, 30, 300, 4, 6_000_000)),
        TrafficRow("d/dns:dns", TrafficCounts(4, 40, 400, 30, 300, 0, 0)),
    ]
    accept = "application/openmetrics-text; version=1.0.0" if openmetrics else "text/plain"
    waited = {"d/web:http": [0] * 40 + [3, 1] + [0] * 54, "others": [0] * STEPS}
    body, _ = Metrics(agent_status, lambda: TrafficAnswer(rows, waited)).page(accept)
    parse = openmetrics_parser if openmetrics else text_parser
    samples = {(s.name, *sorted(s.labels.items())): s.value for family in parse(body.decode()) for s in family.samples}
    web, dns = ("service", "d/web:http"), ("service", "d/dns:dns")
    assert samples["hybrid_proxy_service_flows_total", web] == 4
    assert samples["hybrid_proxy_service_bytes_total", ("direction", "reply"), web] == 300
    assert samples["hybrid_proxy_service_connect_seconds_sum", web] == pytest.approx(0.006)
    assert samples["hybrid_proxy_service_connect_seconds_count", web] == 4
    assert ("hybrid_proxy_service_connect_seconds_count", dns) not in samples
    first = "hybrid_proxy_service_first_packet_seconds"
    assert samples[f"{first}_count", web] == samples[f"{first}_bucket", ("le", "+Inf"), web] == 4
    assert samples[f"{first}_bucket", ("le", f"{BOUNDS[40] / 1e9}"), web] == 3
    assert samples[f"{first}_count", ("service", "others")] == 0
    assert len([key for key in samples if key[0].startswith(first)]) < 2 * 92
