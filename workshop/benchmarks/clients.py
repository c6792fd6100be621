"""The client and the servers of crr.c in a lab, the service that they measure, and arms that take turns."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hybrid_proxy.workshop.benchmarks.kit import median, say, take_turns
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab, Place
from hybrid_proxy.workshop.lab.objects import endpoint_slice, service
from hybrid_proxy.workshop.measuring.apidata import ApiProcess
from hybrid_proxy.workshop.measuring.nodes import NODE, ApiAgent
from hybrid_proxy.workshop.measuring.stats import ratios

CLIENT = "build/workshop/benchmarks/crr"
ENDPOINTS = 10
PORT, VIP = 9000, "10.97.1.1"
# Client and server share a CPU, so that the rate is the cost of a connection and not how fast an idle CPU wakes up. The
# last CPU has the fewest interrupts.
ONE_CPU = ("taskset", "-c", str(max(os.sched_getaffinity(0))))
ALL_PODS = "10.0.0.0/8"  # the lab's and the API server's pods: clients are pods, and are not masqueraded
PODS_ONLY = ("--pod-interfaces", "veth*")  # the agent does not serve the interfaces of plain pods


@dataclass
class Arm:
    """Clients in one place that load one address.

    Args:
        place: of the lab.
        address: with the servers' port.
        seconds: of one round.
        verb: `ask` makes connections, `pour` sends bits over one, `throw` sends datagrams.
        prefix: of the command.
        more: arguments of the verb.
        rates: connections, bits or datagrams per second, by round.
    """

    place: str
    address: str
    seconds: float
    verb: str = "ask"
    prefix: tuple[str, ...] = ONE_CPU
    more: tuple[str, ...] = ()
    rates: list[float] = field(default_factory=list)

    def run(self, made: Lab, program: str) -> None:
        """Measures one round."""
        argv = [*self.prefix, program, self.verb, self.address, str(PORT), str(self.seconds), *self.more]
        done = made.run(self.place, argv)
        assert done.returncode == 0, done.stderr
        count, seconds, *failed = done.stdout.split()
        assert failed[:1] in ([], ["0"]), f"{failed[0]} of {count} exchanges with {self.address} failed"
        self.rates.append(int(count) * (8 if self.verb == "pour" else 1) / float(seconds))


class Pair(NamedTuple):
    """Rates through the ClusterIP and of the control, and the median of the rounds' ratios."""

    service: float
    plain: float
    ratio: float


def pair(through: Arm, plain: Arm) -> Pair:
    """Compares two arms that were measured in turn; the first round warms up."""
    rates, controls = through.rates[1:], plain.rates[1:]
    return Pair(median(rates), median(controls), median(ratios(rates, controls)))


def compare(made: Lab, program: str, rounds: int, agent: Agent, through: Arm, plain: Arm) -> Pair:
    """Measures the ClusterIP and a plain pod's address in turn, with this agent."""
    with agent.serving():
        ebpf = agent.running_status().dataplane.ebpf
        served = ebpf.pods.interfaces if ebpf else []
        assert sorted(served) == sorted(place.interface for place in made.pods()), served
        take_turns(rounds, *(partial(arm.run, made, program) for arm in (plain, through)))
    found = pair(through, plain)
    say(f"  {' '.join(agent.flags)}: plain {found.plain:,.0f}/s, ClusterIP {found.service:,.0f}/s, {found.ratio:.3f}")
    return found


@contextlib.contextmanager
def cluster(
    made: Lab, size: int, program: str, backend: str = "pod2", what: str = "serve", prefix: tuple[str, ...] = ONE_CPU
) -> Iterator[ApiProcess]:
    """Starts an API server with so many services and the measured one, and the measured one's server."""
    serve(made, backend, program, what, prefix)
    with ApiProcess(size, ENDPOINTS, lab=made) as api:
        for obj in measured(made[backend]):
            api.control("put", **obj)
        yield api


def agent_of(made: Lab, api: ApiProcess, *flags: str) -> ApiAgent:
    """Returns an agent that serves the lab's pods but the plain ones."""
    return ApiAgent(made, api.kubeconfig, flags=(*PODS_ONLY, *flags), cluster_cidr=ALL_PODS)


def serve(made: Lab, name: str, program: str, what: str = "serve", prefix: tuple[str, ...] = ONE_CPU) -> None:
    """Starts the server in that place, and returns when it listens."""
    server = made.start(name, [*prefix, program, what, str(PORT)], output=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n", f"no server in {name}"


def measured(*backends: Place, node_port: int = 0, protocol: str = "TCP") -> list[dict[str, Any]]:
    """Returns the measured service, with local backends."""
    name, ports = "bench/measured", [(protocol, PORT)]
    return [
        service(name, VIP, ports, node_port),
        endpoint_slice(name, [backend.address4 for backend in backends], ports, NODE),
    ]
