"""Rate of connections through a ClusterIP to a pod of the same node, relative to one that no proxy serves.

`connections` compares settings of mode ebpf; the control are pods whose interfaces the agent does not serve.
`mode-connections` compares all modes that work here, and rules in the shape of kube-proxy's; the control is a node
without a proxy. `ipvs-connections` does so with mode ipvs. Where the kernel has no ip_vs, it runs in a virtual machine
whose clock counts instructions: rates then tell how many a connection takes, of client, server and kernel together, and
cache misses cost nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ipvs.programmer import probe
from hybrid_proxy.workshop.benchmarks.kit import GUEST, ROOT, built, in_a_guest, median, say, take_turns, working_modes
from hybrid_proxy.workshop.lab import kube_proxy_rules
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab, Place
from hybrid_proxy.workshop.lab.objects import endpoint_slice, manifest, service
from hybrid_proxy.workshop.measuring.apidata import ApiProcess
from hybrid_proxy.workshop.measuring.nodes import NODE, ApiAgent, lab
from hybrid_proxy.workshop.measuring.results import Result, Target
from hybrid_proxy.workshop.measuring.stats import ratios

SERVICES, ENDPOINTS = 10_000, 10
PORT, VIP = 9000, "10.97.1.1"
SECONDS = 0.3
ROUNDS, FEW = 30, 7
SIZES, MODE_ROUNDS = (10, 10_000), 11
GUEST_SIZES, GUEST_ROUNDS = (100,), 3
CLIENT = "build/workshop/benchmarks/crr"
PEERS = {f"kube-proxy's {mode} rules": mode for mode in kube_proxy_rules.MODES}
# Client and server share a CPU, so that the rate is the cost of a connection and not how fast an idle CPU wakes up. The
# last CPU has the fewest interrupts.
ONE_CPU = ("taskset", "-c", str(max(os.sched_getaffinity(0))))
ALL_PODS = "10.0.0.0/8"  # the lab's and the API server's pods: clients are pods, and are not masqueraded
PODS_ONLY = ("--pod-interfaces", "veth*")  # the agent does not serve the interfaces of plain pods
# Kubelets, container runtimes and network plugins install such rules on practically every node.
FIREWALL = (
    "add table inet firewall; add chain inet firewall forward { type filter hook forward priority 0; }; "
    "add rule inet firewall forward ct state established,related accept; "
    "add rule inet firewall forward ct state invalid drop"
)


@dataclass
class Arm:
    """Clients in one place that connect to one address."""

    place: str
    address: str
    prefix: tuple[str, ...] = ONE_CPU
    rates: list[float] = field(default_factory=list)

    def run(self, made: Lab, program: str) -> None:
        """Measures the connections in a second for one round."""
        done = made.run(self.place, [*self.prefix, program, "ask", self.address, str(PORT), str(SECONDS)])
        assert done.returncode == 0, done.stderr
        count, seconds, failed, *_ = done.stdout.split()
        assert failed == "0", f"{failed} of {count} exchanges with {self.address} failed"
        self.rates.append(int(count) / float(seconds))


def measure(question: str = "settings") -> Result:
    """Answers one of the questions above."""
    return {"settings": _settings, "modes": _modes, "ipvs": _ipvs}[question]()


class Pair(NamedTuple):
    """Connections in a second, through the ClusterIP and of the control, and the median of the rounds' ratios."""

    service: float
    plain: float
    ratio: float


def _pair(service: Arm, plain: Arm) -> Pair:
    """Compares two arms that were measured in turn; the first round warms up."""
    rates, controls = service.rates[1:], plain.rates[1:]
    return Pair(median(rates), median(controls), median(ratios(rates, controls)))


def _settings() -> Result:
    """Measures mode ebpf with 10,000 services and several settings, and with one service alone."""
    program = str(built(CLIENT))
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
        [f"connections: ClusterIP / plain, each beside its own control: {listed}"],
        {
            "ratio_always": round(always.ratio, 3),
            "ratio_firewall": round(firewall.ratio, 3),
            "ratio_no_fast_path": round(slow.ratio, 3),
            "ratio_any_cpu": round(any_cpu.ratio, 3),
            "ratio_1_service": round(one.ratio, 3),
        },
    )  # fmt: skip


def _modes() -> Result:
    """Measures all modes that work here, and kube-proxy's rules, with few services and with many."""
    program = str(built(CLIENT))
    with lab() as made:
        works = working_modes(made)
    arms = [*works, *(peer for peer, mode in PEERS.items() if mode != "ipvs" or mode in works)]
    found = _beside_a_bare_node(arms, SIZES, MODE_ROUNDS, program)
    targets = [
        (Target(f"{mode} with {size:,} services, relative to {peer},", 1.0, at_least=True),
         found[mode, size].ratio / found[peer, size].ratio)
        for peer, mode in PEERS.items() for size in SIZES if (mode, size) in found and (peer, size) in found
    ]  # fmt: skip
    first = found[arms[0], SIZES[-1]]
    return Result(
        "mode-connections", first.service, "1/s", "the same client and server on a node without a proxy", first.plain,
        targets,
        [f"mode-connections: {arm}: "
         + ", ".join(f"{found[arm, size].ratio:.2f} of a bare node's rate with {size:,} services" for size in SIZES)
         for arm in arms],
        {"ratios": {arm: {str(size): round(found[arm, size].ratio, 3) for size in SIZES} for arm in arms}},
    )  # fmt: skip


def _ipvs() -> Result:
    """Measures modes ebpf and ipvs and kube-proxy's servers, sets and rules, on this kernel if it has IPVS."""
    built(CLIENT)
    with lab() as made, made.inside("node"):
        missing = probe(Options())
    if missing:
        say(f"  in a virtual machine: {missing}")
    ratios = in_a_guest(__name__, counted=True) if missing else _ipvs_ratios()
    *ours, peer = ratios
    size = str(GUEST_SIZES[-1])
    where = f"Debian's kernel {GUEST} in a virtual machine that counts instructions" if missing else "this kernel"
    return Result(
        "ipvs-connections", ratios[ours[0]][size], "of a bare node's rate", f"{peer} on another node",
        ratios[peer][size],
        [(Target(f"{mode} with {size} services, relative to {peer},", 1.0, at_least=True),
          ratios[mode][size] / ratios[peer][size]) for mode in ours],
        [f"ipvs-connections: on {where}"],
        {"ratios": ratios},
    )  # fmt: skip


def _ipvs_ratios() -> dict[str, dict[str, float]]:
    """Returns mode -> number of services -> rate relative to the bare node's."""
    arms = ("ebpf", "ipvs", "kube-proxy's ipvs rules")
    found = _beside_a_bare_node(arms, GUEST_SIZES, GUEST_ROUNDS, str(ROOT / CLIENT))
    return {arm: {str(size): round(found[arm, size].ratio, 3) for size in GUEST_SIZES} for arm in arms}


def _beside_a_bare_node(
    arms: Sequence[str], sizes: Sequence[int], rounds: int, program: str
) -> dict[tuple[str, int], Pair]:
    """Measures each arm, a mode or one of `PEERS`, in turn with a bare node.

    Each has a new node, because conntrack remembers the connections of the one before for two minutes.
    """
    found = {}
    for size in sizes:
        for arm in arms:
            with lab(pods=2) as made, lab(pods=2, kind="bare") as bare, cluster(made, size, program) as api:
                serve(bare, "pod2", program)
                service, plain = Arm("pod1", VIP), Arm("pod1", bare["pod2"].address4)
                with _programmed(arm, made, api, size):
                    take_turns(rounds, partial(service.run, made, program), partial(plain.run, bare, program))
            found[arm, size] = one = _pair(service, plain)
            say(f"  {arm}, {size:,} services: {one.service:,.0f}/s, bare {one.plain:,.0f}/s, {one.ratio:.3f}")
    return found


@contextlib.contextmanager
def _programmed(arm: str, made: Lab, api: ApiProcess, size: int) -> Iterator[None]:
    """Has an agent in that mode, or kube-proxy's rules, on the lab's node."""
    if arm in PEERS:
        kube_proxy_rules.load(made, PEERS[arm], size, ALL_PODS, (VIP, PORT), (made["pod2"].address4, PORT))
        yield
        return
    own = ("--bind-address", made["node"].address4)  # the address in the API server's Node is not this node's
    with ApiAgent(made, api.kubeconfig, arm, own, cluster_cidr=ALL_PODS).serving(180):
        yield


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


def _compare(made: Lab, program: str, rounds: int, agent: Agent, prefix: tuple[str, ...] = ONE_CPU) -> Pair:
    """Measures the ClusterIP and a plain pod's address in turn, with this agent."""
    plain, service = Arm("plain1", made["plain2"].address4, prefix), Arm("pod1", VIP, prefix)
    with agent.serving():
        ebpf = agent.running_status().dataplane.ebpf
        served = ebpf.pods.interfaces if ebpf else []
        assert sorted(served) == sorted(place.interface for place in made.pods()), served
        take_turns(rounds, *(partial(arm.run, made, program) for arm in (plain, service)))
    found = _pair(service, plain)
    say(f"  {' '.join(agent.flags)}: plain {found.plain:,.0f}/s, ClusterIP {found.service:,.0f}/s, {found.ratio:.3f}")
    return found


def measured(*backends: Place, node_port: int = 0) -> list[dict[str, Any]]:
    """Returns the measured service, with local backends."""
    name, ports = "bench/measured", [("TCP", PORT)]
    return [
        service(name, VIP, ports, node_port),
        endpoint_slice(name, [backend.address4 for backend in backends], ports, NODE),
    ]


if __name__ == "__main__":  # in the virtual machine, whose network belongs to nobody else
    os.chdir(ROOT)
    print(json.dumps(_ipvs_ratios()))
