"""Rate of connect, request, response, close: pod -> ClusterIP -> local pod, beside the plain address of a pod."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from workshop.benchmarks.apidata import ApiProcess
from workshop.benchmarks.kit import NODE, ApiAgent, Result, Target, built, lab, median, say
from workshop.lab.agent import Agent
from workshop.lab.network import Lab, Place

SERVICES, ENDPOINTS = 10_000, 10
PORT, VIP = 9000, "10.97.1.1"
SECONDS = 0.3
ROUNDS, FEW = 30, 7
# Client and server share one: what a connection costs in all, no idle CPU to wake. The last has fewest interrupts.
ONE_CPU = ("taskset", "-c", str(max(os.sched_getaffinity(0))))
BOTH_CPUS: tuple[str, ...] = ()
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


def measure() -> Result:
    """Rounds of both kinds in turn: 10,000 services, the same without the fast path, and one service alone."""
    program = str(built("build/workshop/benchmarks/crr"))
    with lab(pods=2, plain=2) as made:
        for name in ("pod2", "plain2"):
            serve(made, name, program)
        with ApiProcess(SERVICES, ENDPOINTS, lab=made) as api:
            for obj in objects(made["pod2"]):
                api.control("put", **obj)
            alone = ApiAgent(made, api.kubeconfig, flags=PODS_ONLY, cluster_cidr=ALL_PODS)
            plain, full = _compare(made, program, alone, ROUNDS)
            both = ApiAgent(made, api.kubeconfig, flags=PODS_ONLY, cluster_cidr=ALL_PODS)
            plain_on_both, on_both = _compare(made, program, both, FEW, BOTH_CPUS)
            made.run("node", ["nft", FIREWALL])
            walled = ApiAgent(made, api.kubeconfig, flags=PODS_ONLY, cluster_cidr=ALL_PODS)
            plain_behind_wall, behind_wall = _compare(made, program, walled, FEW)
            made.run("node", ["nft", "delete table inet firewall"])
            slow = ApiAgent(made, api.kubeconfig, flags=(*PODS_ONLY, "--no-fast-path"), cluster_cidr=ALL_PODS)
            plain_beside_slow, without = _compare(made, program, slow, FEW)
        with _manifests(made) as lonely:
            plain_beside_one, one = _compare(made, program, lonely, FEW)
    ratios = {
        f"{SERVICES:,} services": full / plain,
        "with a firewall on the node that knows connections": behind_wall / plain_behind_wall,
        "the same without the fast path": without / plain_beside_slow,
        "client on any CPU": on_both / plain_on_both,
        "one service": one / plain_beside_one,
    }
    listed = ", ".join(f"{what} {ratio:.3f}" for what, ratio in ratios.items())
    return Result(
        "connections", full, "1/s", "the same client and server on pods that the proxy does not serve, no ClusterIP",
        plain,
        [(Target("ClusterIP / plain", 1.1, at_least=True), full / plain),
         (Target("the same with a firewall", 1.1, at_least=True), behind_wall / plain_behind_wall)],
        [f"connections: ClusterIP / plain, each beside its own control: {listed}; {IPTABLES}"],
        {
            "ratio_firewall": round(behind_wall / plain_behind_wall, 3),
            "ratio_no_fast_path": round(without / plain_beside_slow, 3),
            "ratio_any_cpu": round(on_both / plain_on_both, 3),
            "ratio_1_service": round(one / plain_beside_one, 3),
        },
    )  # fmt: skip


def serve(made: Lab, name: str, program: str, what: str = "serve", prefix: tuple[str, ...] = ONE_CPU) -> None:
    """Start the server in that place; returns when it listens."""
    server = made.start(name, [*prefix, program, what, str(PORT)], output=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n", f"no server in {name}"


def _compare(
    made: Lab, program: str, agent: Agent, rounds: int, prefix: tuple[str, ...] = ONE_CPU
) -> tuple[float, float]:
    """Medians of the plain rate and the ClusterIP's, measured in turn under this agent."""
    agent.start(60)
    plain, service = Arm("plain1", made["plain2"].address4, prefix), Arm("pod1", VIP, prefix)
    try:
        ebpf = agent.running_status().dataplane.ebpf
        served = ebpf.pods.interfaces if ebpf else []
        assert sorted(served) == sorted(place.interface for place in made.pods()), served
        for number in range(rounds + 1):
            for arm in (plain, service) if number % 2 else (service, plain):
                arm.run(made, program)
    finally:
        if agent.running():
            agent.terminate()
        agent.cleanup()
    found = median(plain.rates[1:]), median(service.rates[1:])  # the first round warms up
    say(f"  {' '.join(agent.flags)}: plain {found[0]:,.0f}/s, ClusterIP {found[1]:,.0f}/s, {found[1] / found[0]:.3f}")
    return found


def objects(backend: Place) -> list[dict[str, Any]]:
    """The service that is measured, with one local backend."""
    spec = {"type": "ClusterIP", "clusterIP": VIP, "clusterIPs": [VIP], "ipFamilies": ["IPv4"],
            "ports": [{"name": "main", "protocol": "TCP", "port": PORT, "targetPort": PORT}]}  # fmt: skip
    service: dict[str, Any] = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "bench", "name": "measured"}, "spec": spec,
    }  # fmt: skip
    labels = {"kubernetes.io/service-name": "measured"}
    endpoint = {"addresses": [backend.address4], "conditions": {"ready": True}, "nodeName": NODE}
    piece: dict[str, Any] = {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"namespace": "bench", "name": "measured-1", "labels": labels},
        "ports": [{"name": "main", "protocol": "TCP", "port": PORT}], "endpoints": [endpoint],
    }  # fmt: skip
    return [service, piece]


@contextlib.contextmanager
def _manifests(made: Lab) -> Iterator[Agent]:
    folder = made.folder / "one"
    folder.mkdir()
    (folder / "one.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects(made["pod2"])}))
    yield Agent(made, folder, flags=PODS_ONLY)
