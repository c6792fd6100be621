"""Manifests of the measured cluster: three services with clients, and others that only fill the table."""

from __future__ import annotations

from typing import Any, Final

from hybrid_proxy.workshop.lab.objects import endpoint_slice, service

# In the lab's ranges: services in 10.96.0.0/12, pods in 10.77.0.0/16, of which 10.77.1.0/24 are real.
HTTP, STREAM, MOVING = "10.97.0.1", "10.97.0.2", "10.97.0.3"
HTTP_PORT, STREAM_PORT = 8080, 5201  # services and first backends
CHANGING: Final = (9001, 9002)  # where the backends of the service that moves listen
FEWEST: Final = 3


def measured(address: str, node: str, backends: int) -> list[dict[str, Any]]:
    """Returns the service of HTTP, with so many backends at one pod, and that of iperf3 with one backend."""
    ports = [("TCP", STREAM_PORT), ("UDP", STREAM_PORT)]
    return [
        service("compare/http", HTTP, [("TCP", HTTP_PORT)]),
        *(endpoint_slice("compare/http", [address], [("TCP", HTTP_PORT + n)], node, n) for n in range(backends)),
        service("compare/stream", STREAM, ports),
        endpoint_slice("compare/stream", [address], ports, node),
    ]


def moving(address: str, node: str, port: int) -> list[dict[str, Any]]:
    """Returns the service whose only backend changes."""
    name = "compare/moving"
    return [service(name, MOVING, [("TCP", 80)]), endpoint_slice(name, [address], [("TCP", port)], node)]


def filler(count: int, backends: int) -> list[dict[str, Any]]:
    """Returns services without clients, with endpoints on another node."""
    made = []
    for number in range(count):
        name, last = f"compare/other-{number}", number + 256
        addresses = [_pod(number * backends + n) for n in range(backends)]
        made.append(service(name, f"10.{98 + (last >> 16)}.{last >> 8 & 255}.{last & 255}", [("TCP", 80)]))
        made.append(endpoint_slice(name, addresses, [("TCP", 8080)], "elsewhere"))
    return made


def _pod(number: int) -> str:
    """Returns one of 62,250 addresses that no pod of the lab has; beyond that they repeat in other services."""
    number %= 249 * 250
    return f"10.77.{number // 250 + 3}.{number % 250 + 1}"
