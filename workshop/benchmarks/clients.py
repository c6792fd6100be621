"""The client and the servers of crr.c in a lab, and the service that they measure."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any, Final

from hybrid_proxy.workshop.lab.network import Lab, Place
from hybrid_proxy.workshop.lab.objects import endpoint_slice, service
from hybrid_proxy.workshop.measuring.nodes import NODE

CLIENT: Final = "build/workshop/benchmarks/crr"
PORT, VIP, NODE_PORT = 9000, "10.97.1.1", 30_000
# Client and server share a CPU, so that what is measured is the work for an exchange and not how fast an idle CPU wakes
# up, and nothing else works there meanwhile. The last CPU has the fewest interrupts.
CPU: Final = max(os.sched_getaffinity(0))
ALONE: Final = ("chrt", "-f", "20", "taskset", "-c", str(CPU))
ALL_PODS: Final = "10.0.0.0/8"  # the lab's and the API server's pods: clients are pods, and are not masqueraded


def serve(
    made: Lab, name: str, program: str, what: str = "serve", prefix: Sequence[str] = ALONE, port: int = PORT
) -> subprocess.Popen[str]:
    """Starts the server in that place, and returns it when it listens."""
    server = made.start(name, [*prefix, program, what, str(port)], output=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n", f"no server in {name}"
    return server


def measured(
    *backends: Place,
    node_port: int = 0,
    ports: Sequence[int] = (PORT,),
    protocol: str = "TCP",
    address: str = VIP,
    node: str = NODE,
) -> list[dict[str, Any]]:
    """Returns the measured service, with these backends of that node."""
    name, listed = f"bench/measured-{address.replace('.', '-')}", [(protocol, port) for port in ports]
    return [
        service(name, address, listed, node_port),
        endpoint_slice(name, [backend.address4 for backend in backends], listed, node),
    ]
