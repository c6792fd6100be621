"""The cluster that is measured: three services that are used, and as many others as are wanted, as manifests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

__all__ = [
    "CHANGING", "FEWEST", "HTTP", "HTTP_PORT", "MOVING", "STREAM", "STREAM_PORT",
    "filler", "listed", "measured", "moving",
]  # fmt: skip

# In the lab's ranges: services in 10.96.0.0/12, pods in 10.77.0.0/16, of which 10.77.1.0/24 are real.
HTTP, STREAM, MOVING = "10.97.0.1", "10.97.0.2", "10.97.0.3"
HTTP_PORT, STREAM_PORT = 8080, 5201  # services and first backends
CHANGING: Final = (9001, 9002)  # where the backends of the service that moves listen
FEWEST: Final = 3


def measured(address: str, node: str, backends: int) -> list[dict[str, Any]]:
    """The service that HTTP clients ask, with so many backends at one pod, and the one of iperf3 with one backend."""
    http = _service("http", HTTP, [("TCP", HTTP_PORT)])
    slices = [_slice(f"http-{n}", "http", [address], [("TCP", HTTP_PORT + n)], node) for n in range(backends)]
    ports = [("TCP", STREAM_PORT), ("UDP", STREAM_PORT)]
    return [http, *slices, _service("stream", STREAM, ports), _slice("stream-0", "stream", [address], ports, node)]


def moving(address: str, node: str, port: int) -> list[dict[str, Any]]:
    """The service whose only backend changes."""
    return [
        _service("moving", MOVING, [("TCP", 80)]),
        _slice("moving-0", "moving", [address], [("TCP", port)], node),
    ]


def filler(count: int, backends: int) -> list[dict[str, Any]]:
    """Services that nobody asks, with endpoints on another node."""
    made = []
    for number in range(count):
        name, last = f"other-{number}", number + 256
        first = number * backends
        addresses = [_pod(first + n) for n in range(backends)]
        made.append(_service(name, f"10.{98 + (last >> 16)}.{last >> 8 & 255}.{last & 255}", [("TCP", 80)]))
        made.append(_slice(f"{name}-0", name, addresses, [("TCP", 8080)], "elsewhere"))
    return made


def listed(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One object of kind List."""
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def _pod(number: int) -> str:
    """One of 62,250 addresses that no pod of the lab has; after that they repeat, in other services."""
    number %= 249 * 250
    return f"10.77.{number // 250 + 3}.{number % 250 + 1}"


def _service(name: str, address: str, ports: Sequence[tuple[str, int]]) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "compare", "name": name},
        "spec": {
            "type": "ClusterIP", "clusterIP": address, "clusterIPs": [address], "ipFamilies": ["IPv4"],
            "ports": [{"name": protocol.lower(), "protocol": protocol, "port": port} for protocol, port in ports],
        },
    }  # fmt: skip


def _slice(
    name: str, service: str, addresses: Sequence[str], ports: Sequence[tuple[str, int]], node: str
) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"namespace": "compare", "name": name, "labels": {"kubernetes.io/service-name": service}},
        "ports": [{"name": protocol.lower(), "protocol": protocol, "port": port} for protocol, port in ports],
        "endpoints": [{"addresses": [each], "conditions": {"ready": True}, "nodeName": node} for each in addresses],
    }  # fmt: skip
