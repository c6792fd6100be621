"""Figures of a status as metrics, as a scrape sees them."""

from __future__ import annotations

from typing import Any

from prometheus_client import generate_latest

from controller.metrics import Metrics


def scrape(**dataplane: Any) -> list[str]:
    told = {"mode": "ebpf", "misfits": [], "fill": {}, "counters": {}, "audit_repairs": 0, "limitations": []}
    status = {
        "mode": {"requested": "ebpf", "effective": "ebpf", "reason": ""},
        "services": 1, "synced": True, "problems": [], "dataplane": told | dataplane,
    }  # fmt: skip
    return generate_latest(Metrics(lambda: status).registry).decode().splitlines()


def test_who_is_left_out_and_who_would_be() -> None:
    rows = [{"service": "d/web:http", "address": f"10.1.0.{n}:80", "left_out": n == 1, "state": ""} for n in (1, 2)]
    lines = scrape(left_out=rows, counters={"failover": 3})
    assert 'hybrid_proxy_backend_left_out{backend="10.1.0.1:80",entry="d/web:http"} 1.0' in lines
    assert 'hybrid_proxy_backend_left_out{backend="10.1.0.2:80",entry="d/web:http"} 0.0' in lines
    assert 'hybrid_proxy_events_total{reason="failover"} 3.0' in lines


def test_a_mode_that_leaves_nobody_out() -> None:
    assert not [line for line in scrape() if line.startswith("hybrid_proxy_backend_left_out{")]
