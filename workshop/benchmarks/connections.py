"""Rate of connect, request, response, close: pod -> ClusterIP -> local pod, beside the plain address of a pod."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hybrid_proxy.workshop.benchmarks.apidata import ApiProcess
from hybrid_proxy.workshop.benchmarks.kit import NODE, ApiAgent, Result, Target, built, lab, median, say, take_turns
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab, Place
from hybrid_proxy.workshop.lab.objects import endpoint_slice, manifest, service

SERVICES, ENDPOINTS = 10_000, 10
PORT, VIP = 9000, "10.97.1.1"
SECONDS = 0.3
ROUNDS, FEW = 30, 7
# Client and server share one: what a connection costs in all, no idle CPU to wake. The last has fewest interrupts.
ONE_CPU = ("taskset", "-c", str(max(os.sched_getaffinity(0))))
ALL_PODS = "10.0.0.0/8"  # the lab's and the API server's: clients are pods and keep their addresses
PODS_ONLY = ("--pod-interfaces", "veth*")  # the interfaces of plain pods are left alone
# What practically every node has: the kubelet, the container runtime or the network plugin brings such rules.
FIREWALL = (
    "add table inet firewall; add chain inet firewall forward { type filter hook forward priority 0; }; "
    "add rule inet firewall forward ct state established,related accept; "
    "add rule inet firewall forward ct state invalid drop"
)
IPTABLES = "with iptables and 10,000 services the same kind of exchange had 0.5 of the plain rate, measured before"


@dataclass
class Arm:
    """One kind of client: where it runs and whom it asks."""

    place: str
    address: str
    prefix: tuple[str, ...] = ONE_CPU
    rates: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)  # of an exchange, in microseconds; and the next
    slowest: list[float] = field(default_factory=list)  # 99th percentiles

    def run(self, made: Lab, program: str) -> None:
        """One round; connections in a second."""
        done = made.run(self.place, [*self.prefix, program, "ask", self.address, str(PORT), str(SECONDS)])
        assert done.returncode == 0, done.stderr
        count, seconds, failed, middle, slow = done.stdout.split()
        assert failed == "0", f"{failed} of {count} exchanges with {self.address} failed"
        self.rates.append(int(count) / float(seconds))
        self.medians.append(float(middle))
        self.slowest.append(float(slow))

    def rate(self) -> float:
        """The median of the rates, without the first round, which warms up."""
        return median(self.rates[1:])


def measure() -> Result:
    """Rounds of both kinds in turn: 10,000 services, the same without the fast path, and one service alone."""
    program = str(built("build/workshop/benchmarks/crr"))
    with lab(pods=2, plain=2) as made:
        serve(made, "plain2", program)
        with cluster(made, SERVICES, program) as api:
            full = _compare(made, program, ROUNDS, agent_of(made, api))
            always = _compare(made, program, ROUNDS, agent_of(made, api, "--fast-path=always"))
            any_cpu = _compare(made, program, FEW, agent_of(made, api), prefix=())
            made.run("node", ["nft", FIREWALL])
            firewall = _compare(made, program, FEW, agent_of(made, api))
            made.run("node", ["nft", "delete table inet firewall"])
            slow = _compare(made, program, FEW, agent_of(made, api, "--fast-path=off"))
        folder = made.folder / "one"
        folder.mkdir()
        (folder / "one.json").write_text(manifest(measured(made["pod2"])))
        one = _compare(made, program, FEW, Agent(made, folder, flags=PODS_ONLY))
    ratios = {
        f"{SERVICES:,} services": full.ratio,
        "the same with --fast-path=always": always.ratio,
        "with a firewall on the node that knows connections": firewall.ratio,
        "the same without the fast path": slow.ratio,
        "client on any CPU": any_cpu.ratio,
        "one service": one.ratio,
    }
    listed = ", ".join(f"{what} {ratio:.3f}" for what, ratio in ratios.items())
    return Result(
        "connections", full.service, "1/s",
        "the same client and server on pods that the proxy does not serve, no ClusterIP", full.plain,
        [(Target("ClusterIP / plain", 1.02, at_least=True), full.ratio),
         (Target("the same with --fast-path=always", 1.1, at_least=True), always.ratio),
         (Target("by default, with a firewall", 1.1, at_least=True), firewall.ratio)],
        [f"connections: ClusterIP / plain, each beside its own control: {listed}; {IPTABLES}"],
        {
            "ratio_always": round(always.ratio, 3),
            "ratio_firewall": round(firewall.ratio, 3),
            "ratio_no_fast_path": round(slow.ratio, 3),
            "ratio_any_cpu": round(any_cpu.ratio, 3),
            "ratio_1_service": round(one.ratio, 3),
        },
    )  # fmt: skip


class Pair(NamedTuple):
    """Connections in a second, by the ClusterIP and to the plain address."""

    service: float
    plain: float

    @property
    def ratio(self) -> float:
        """In times of the plain address."""
        return self.service / self.plain


@contextlib.contextmanager
def cluster(
    made: Lab, size: int, program: str, backend: str = "pod2", what: str = "serve", prefix: tuple[str, ...] = ONE_CPU
) -> Iterator[ApiProcess]:
    """An API server with so many services and the one that is measured, whose server listens."""
    serve(made, backend, program, what, prefix)
    with ApiProcess(size, ENDPOINTS, lab=made) as api:
        for obj in measured(made[backend]):
            api.control("put", **obj)
        yield api


def agent_of(made: Lab, api: ApiProcess, *flags: str) -> ApiAgent:
    """An agent that serves the lab's pods; clients are pods and keep their addresses."""
    return ApiAgent(made, api.kubeconfig, flags=(*PODS_ONLY, *flags), cluster_cidr=ALL_PODS)


def serve(made: Lab, name: str, program: str, what: str = "serve", prefix: tuple[str, ...] = ONE_CPU) -> None:
    """Start the server in that place; returns when it listens."""
    server = made.start(name, [*prefix, program, what, str(PORT)], output=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n", f"no server in {name}"


def _compare(made: Lab, program: str, rounds: int, agent: Agent, prefix: tuple[str, ...] = ONE_CPU) -> Pair:
    """Medians of the ClusterIP's rate and the plain one, measured in turn under this agent."""
    plain, service = Arm("plain1", made["plain2"].address4, prefix), Arm("pod1", VIP, prefix)
    with agent.serving():
        ebpf = agent.running_status().dataplane.ebpf
        served = ebpf.pods.interfaces if ebpf else []
        assert sorted(served) == sorted(place.interface for place in made.pods()), served
        take_turns(rounds, *(partial(arm.run, made, program) for arm in (plain, service)))
    found = Pair(service.rate(), plain.rate())
    say(f"  {' '.join(agent.flags)}: plain {found.plain:,.0f}/s, ClusterIP {found.service:,.0f}/s, {found.ratio:.3f}")
    return found


def measured(*backends: Place, node_port: int = 0) -> list[dict[str, Any]]:
    """The service that is measured, with local backends."""
    name, ports = "bench/measured", [("TCP", PORT)]
    return [
        service(name, VIP, ports, node_port),
        endpoint_slice(name, [backend.address4 for backend in backends], ports, NODE),
    ]
