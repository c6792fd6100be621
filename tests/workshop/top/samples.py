"""Looks at a node that nobody took: rows as views and agents tell them."""

from __future__ import annotations

from typing import Any

from workshop.top.rates import Sample


def service(name: str, flows: int, frontend: str = "10.96.0.10:80", **more: Any) -> dict[str, Any]:
    """A row of mode ebpf's view, with 10 packets and 1,000 bytes each way for each flow."""
    return {
        "name": name, "id": 7, "protocol": "TCP", "frontends": [frontend], "backends": 2, "flows": flows,
        "packets": 10 * flows, "bytes": 1000 * flows, "reply_packets": 10 * flows, "reply_bytes": 1000 * flows,
        "answered": flows, "connect_ns": 2_000_000 * flows, **more,
    }  # fmt: skip


def backend(address: str, flows: int, **more: Any) -> dict[str, Any]:
    return {
        "service": "ns/a:http", "address": address, "protocol": "TCP", "used": True, "failures": 0, "state": "serving",
        "flows": flows, "packets": flows, "bytes": flows, "reply_packets": flows, "reply_bytes": flows, **more,
    }  # fmt: skip


def status(**counters: int) -> dict[str, Any]:
    return {
        "node": "n1", "mode": {"requested": "auto", "effective": "ebpf", "reason": ""}, "synced": True, "error": "",
        "uptime_seconds": 192.0, "memory_bytes": 45_000_000, "neighbours": [],
        "dataplane": {
            "counters": counters, "fill": {"flows": [12, 524_288]}, "unprogrammed": [], "ejections": [],
            "maps": {
                "flows4": {"entries": 100, "bytes": 4096, "used": 12, "bound": 200},
                "counters": {"entries": 40, "bytes": 320},
            },
        },
    }  # fmt: skip


def sample(at: float, *services: dict[str, Any], **more: Any) -> Sample:
    return Sample(at, **{"status": status(), "mode": "ebpf", "services": services, **more})
