"""Measures a service of this node by processes of the node, without changing anything."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import msgspec

from hybrid_proxy.controller.commands.views import programmed
from hybrid_proxy.controller.errors import ConfigError, ControllerError
from hybrid_proxy.controller.serving.admin import ask, listener
from hybrid_proxy.controller.serving.protocol import GetStatus, StatusAnswer
from hybrid_proxy.dataplane.table import NODE_PORT, family_of
from hybrid_proxy.workshop.compare.measure import traffic
from hybrid_proxy.workshop.compare.plan import Settings, Step
from hybrid_proxy.workshop.compare.result import Cell
from hybrid_proxy.workshop.compare.stand import SCRIPT
from hybrid_proxy.workshop.measuring.loads import Found, argv
from hybrid_proxy.workshop.measuring.running import measured

LOADS = ("connections", "requests")  # iperf3 would need a server of its own behind the service


class Live(msgspec.Struct, frozen=True):
    """The service and one of its endpoints, each with a port; the active mode, and the number of services."""

    mode: str
    services: int
    address: str
    port: int
    endpoint: str
    endpoint_port: int

    def carry_out(self, step: Step, settings: Settings, lacking: Mapping[str, str]) -> Cell:
        """Measures both loads, to the service and to the endpoint in turn."""

        def load(name: str, address: str, port: int) -> Found:
            return measured(name, argv(name, address, port, settings.seconds, SCRIPT, settings.path), settings.seconds)

        return traffic(
            step,
            lambda name: load(name, self.address, self.port),
            lambda name: load(name, self.endpoint, self.endpoint_port),
            LOADS,
            lacking,
        )


def look(name: str, admin_socket: str) -> Live:
    """Asks the agent of this node about the service.

    Raises:
        ConfigError: there is no such service here, or it has no TCP port with an endpoint.
        ControllerError: no agent runs, or it serves another network namespace than this process is in.
        DataplaneError: what is programmed cannot be read.
    """
    status = ask(admin_socket, GetStatus(), StatusAnswer).status
    _refuse_elsewhere(admin_socket)
    with closing(programmed(admin_socket)) as here:
        services, backends = here.services(name), here.backends(name)
    if not services:
        raise ConfigError(f"--live {name}: no such service is programmed here; `hybrid-proxy services` lists them")
    for row in services:
        for frontend in [each for each in row.frontends if row.protocol == "TCP" and not each.startswith(NODE_PORT)]:
            address, port = _parted(frontend)
            of = [_parted(each.address) for each in backends if each.service == row.name]
            near = [known for known in of if family_of(known[0]) == family_of(address)]
            if near:
                return Live(status.mode.effective, status.services, address, port, *near[0])
    raise ConfigError(f"--live {name}: has no TCP port with an address and an endpoint; HTTP is what is measured")


def _parted(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _refuse_elsewhere(admin_socket: str) -> None:
    """Refuses agents of other network namespaces, whose rules packets of this process would not meet."""
    pid = listener(admin_socket)
    theirs, ours = Path(f"/proc/{pid}/ns/net"), Path("/proc/thread-self/ns/net")
    if pid and theirs.exists() and theirs.stat().st_ino != ours.stat().st_ino:
        raise ControllerError(
            f"the agent at {admin_socket} (process {pid}) serves another network namespace than this one: run compare "
            f"there, as `nsenter --net=/proc/{pid}/ns/net hybrid-proxy compare ...`; in a lab, in the lab's cgroup, too"
        )
