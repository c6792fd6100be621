"""CPU time of an exchange, of client and server together, compared with one on a node without any proxy.

`connections` asks a ClusterIP, a backend's own address and plain pods with every setting of the fast path, with and
without a firewall; `mode-connections` does so with all modes, and rules in the shape of kube-proxy's. `udp-query` has a
socket for each question, `udp-round-trip` one for all, and `udp-one-way` sends datagrams of one flow, as of logs;
`stream` is one TCP connection. `mixed` has one pod ask a Service and its backend in turn, thousands of times a second,
and counts connections in the slowest round. `floor-established` and `floor-always` are the least that a program can do
that translates addresses (floors.bpf.c).

Each arm (arms.py) has its node, and all nodes stand at once. Client and server have a real-time class and share one
CPU, so that nothing else works there; rounds are short, and arms take turns. The kernel's work for packets is done in
their time, too. A ratio is that of the control's CPU time to the arm's, above 1: cheaper than no proxy.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from socket import inet_aton
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.kernel import clsact
from hybrid_proxy.dataplane.kernel.bpf import Object
from hybrid_proxy.workshop.benchmarks.arms import (
    BARE,
    KINDS,
    WAYS,
    Arm,
    Node,
    Round,
    Row,
    Way,
    arms_of,
    parse,
    rows,
    table,
)
from hybrid_proxy.workshop.benchmarks.clients import ALL_PODS, ALONE, CLIENT, NODE_PORT, PORT, VIP, measured, serve
from hybrid_proxy.workshop.benchmarks.kit import ROOT, built, say, take_turns
from hybrid_proxy.workshop.compare.objects import filler
from hybrid_proxy.workshop.lab import kube_proxy_rules
from hybrid_proxy.workshop.lab.agent import Agent, remove_forsaken
from hybrid_proxy.workshop.lab.examples import folder
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab
from hybrid_proxy.workshop.measuring.machine import missing_of_modes
from hybrid_proxy.workshop.measuring.results import Result, Target

FAR = "10.97.1.2"  # the ClusterIP of a service on another node
PODS_ONLY = ("--pod-interfaces", "veth*")  # the agent does not serve the interfaces of plain pods
FIREWALL = (
    "add table inet firewall; add chain inet firewall forward { type filter hook forward priority 0; }; "
    "add rule inet firewall forward ct state established,related accept; "
    "add rule inet firewall forward ct state invalid drop"
)


class Load(NamedTuple):
    """Says what client and server do for `seconds`; with `fresh` each round has a port: all its flows are new."""

    client: str
    server: str
    protocol: str
    seconds: float
    rounds: int
    fresh: bool = False
    unit: str = "exchanges"
    per: int = 1  # of what the client counts


CONNECTIONS = Load("ask", "serve", "TCP", 0.1, 60)
# Short rounds: the tables of flows and of conntrack hold those of half a minute.
QUERIES = Load("query", "echo", "UDP", 0.06, 48, fresh=True)
TALK = Load("talk", "echo", "UDP", 0.1, 60)
THROW = Load("throw", "catch", "UDP", 0.1, 60, unit="datagrams")
MIXED = CONNECTIONS._replace(seconds=0.3, rounds=8)  # a pod's ports are used three times within a minute
POUR = Load("pour", "sink", "TCP", 0.1, 60, unit="megabytes", per=10**6)


class Bench(NamedTuple):
    """A load, its arms, and the least ratios of some; or, of `mixed`, connections a second in their slowest rounds.

    The benchmark's value is its first arm's, its control that arm's own or `control`.
    """

    load: Load
    arms: tuple[str, ...]
    targets: Mapping[str, float] = {}
    control: str = ""


_DATAGRAMS: Final = ("default:service", "always:service", "nftables:service", "floor-always:service")
BENCHES: Final[Mapping[str, Bench]] = {
    "connections": Bench(
        CONNECTIONS,
        (
            "default:service", "default:direct", "default:plain",
            "always:service", "always:direct", "established:service", "off:service",
            "default+firewall:service", "default+firewall:direct", "always+firewall:service",
            "floor-established:service", "floor-always:service", "floor-always:direct",
        ),
        {
            "default:service": 0.97, "default+firewall:service": 1.02, "always:service": 1.0,
            "always+firewall:service": 1.12, "default:direct": 1.08, "default+firewall:direct": 0.985,
            "default:plain": 0.998,
        },
    ),
    "mode_connections": Bench(
        CONNECTIONS,
        tuple(
            f"{node}{size}:service"
            for size in ("", "+10000")
            for node in (
                "default", "nftables", "iptables", "ipvs", "userspace",
                "kube-proxy-nftables", "kube-proxy-iptables", "kube-proxy-ipvs",
            )
        ),
    ),
    "mixed": Bench(
        MIXED,
        tuple(f"{node}:{way}" for node in ("default", "always", "nftables") for way in ("service", "beside")),
        {"default:service": 5000, "default:beside": 5000, "always:service": 5000, "always:beside": 5000},
        "nftables:service",
    ),
    "udp_query": Bench(QUERIES, _DATAGRAMS, {"default:service": 1 / 1.16}),
    "udp_round_trip": Bench(TALK, _DATAGRAMS, {"default:service": 1 / 1.05}),
    "udp_one_way": Bench(
        THROW, ("default:service", "off:service", "always:service", "floor-always:service"), {"default:service": 1.0}
    ),
    "stream": Bench(
        POUR, ("default:service", "default:far", "floor-always:service"), {"default:service": 0.99, "default:far": 0.99}
    ),
}  # fmt: skip


class Stand:
    """A lab with what serves its node until `stack` ends, and the servers that arms there ask.

    Each server is at one of `ports` ports, in turn.
    """

    def __init__(self, stack: contextlib.ExitStack, made: Lab, node: Node, load: Load, ports: int, tree: Path) -> None:
        self.made, self.node, self.load, self.ports = made, node, load, range(PORT, PORT + ports)
        self.servers: dict[tuple[str, int], subprocess.Popen[str]] = {}
        kind = KINDS[node.kind]
        if node.firewall:
            made.run("node", ["nft", FIREWALL])
        if kind.what == "agent":
            under = ("env", "-C", str(tree), f"PYTHONPATH={tree}") if node.tree else ()
            flags = (*PODS_ONLY, *kind.flags) if kind.name == "ebpf" else ()
            agent = Agent(made, self._manifests(), kind.name, flags, under=under)
            stack.callback(agent.end)
            agent.timed_start(180)  # by its log: another tree's agent may report in another form
        elif kind.what == "rules":
            backend, protocol = made["pod2"].address4, load.protocol.lower()
            own = [kube_proxy_rules.Row((VIP, port), ((backend, port),), protocol) for port in self.ports]
            kube_proxy_rules.load(made, kind.name, node.services, ALL_PODS, own)
        elif kind.what == "floor":
            stack.enter_context(_floor(made, kind.name))
        say(f"  {node} stands")

    def _manifests(self) -> Path:
        own = partial(measured, ports=self.ports, protocol=self.load.protocol)
        items = own(self.made["pod2"], node_port=NODE_PORT, node=NODE_NAMES["node"])
        if "remote1" in self.made.places:
            items += own(self.made["remote1"], address=FAR, node=NODE_NAMES["node2"])
        return folder(self.made, [*items, *filler(self.node.services, 10)])

    def run(self, way: Way, found: list[Round]) -> None:
        made, load, number = self.made, self.load, len(found) % len(self.ports)
        place, address, first = {
            "service": ("pod2", VIP, PORT),
            "nodeport": ("pod2", made["node"].address4, NODE_PORT),
            "far": ("remote1", FAR, PORT),
        }.get(way.target) or (way.target, made[way.target].address4, PORT)
        key, program = (place, self.ports[number]), str(ROOT / CLIENT)
        if key not in self.servers:
            self.servers[key] = serve(made, place, program, load.server, port=key[1])
        before = _ran(self.servers[key])
        argv = [*ALONE, program, load.client, address, str(first + number), str(load.seconds)]
        done = made.run(way.client, argv)
        assert done.returncode == 0, f"{self.node}: {done.stderr}"
        count, seconds, failed, *_, cpu = done.stdout.split()
        exchanges = max(int(count), 1) / load.per
        spent = float(cpu) + _ran(self.servers[key]) - before
        found.append(Round(1e6 * spent / exchanges, exchanges / float(seconds), int(failed)))


def _ran(process: subprocess.Popen[str]) -> float:
    """Returns the seconds that a process was on a CPU."""
    return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e9


def measure(question: str, arms: str = "", rounds: int = 0, trees: Sequence[str] = ()) -> Result:
    """Measures one of `BENCHES`, or these arms of it; each agent's once for each of these source trees."""
    bench = BENCHES[question]
    named = {f"{Path(tree).name}{number or ''}": Path(tree) for number, tree in enumerate(trees)}
    wanted = arms_of(arms.split(",") if arms else bench.arms, list(named))
    rounds, remote = rounds or bench.load.rounds, any("remote" in WAYS[arm.way].control for arm in wanted)
    built(CLIENT)
    remove_forsaken("bench")
    found: dict[Arm, list[Round]] = {}
    stands: dict[Node, Stand] = {}
    missing: dict[str, str] = {}
    turns = []
    with contextlib.ExitStack() as stack:
        for arm in wanted:
            if reason := missing.get(KINDS[arm.node.kind].name):
                say(f"  {arm} is skipped: {reason}")
                continue
            if arm.node not in stands:
                made = stack.enter_context(Lab(f"bench{os.getpid()}x{len(stands)}", 3, plain=2, remote=int(remote)))
                missing = missing or missing_of_modes(made)
                tree, ports = named.get(arm.node.tree, ROOT), rounds + 1 if bench.load.fresh else 1
                stands[arm.node] = Stand(stack, made, arm.node, bench.load, ports, tree)
            turns.append(partial(stands[arm.node].run, WAYS[arm.way], found.setdefault(arm, [])))
        take_turns(rounds, *turns)
    return _result(question, bench, rows({arm: each[1:] for arm, each in found.items()}))  # the first round warms up


@contextlib.contextmanager
def _floor(made: Lab, name: str) -> Iterator[None]:
    """Has a program of floors.bpf.c at the pods' interfaces, as filters: our agent's are such, too."""
    with contextlib.closing(Object(built("build/workshop/benchmarks/floors.bpf.o"))) as programs:
        programs.load()
        filters = []
        for pod in made.pods():
            outer, inner = (
                made.netlink(place).get_links(ifname=interface)[0]
                for place, interface in (("node", pod.interface), (pod.name, "eth0"))
            )
            macs = b"".join(bytes.fromhex(link.get_attr("IFLA_ADDRESS").replace(":", "")) for link in (inner, outer))
            with contextlib.closing(programs.map("pods")) as pods:
                pods.update(inet_aton(pod.address4), outer["index"].to_bytes(4, "little") + macs)
            filters.append(clsact.Filter(outer["index"], "floor", programs.program(name), ingress=True))
            if name == "established":
                filters.append(
                    clsact.Filter(outer["index"], "floor", programs.program(f"{name}_leaves"), ingress=False)
                )
        with contextlib.closing(programs.map("services")) as services:
            services.update(inet_aton(VIP), inet_aton(made["pod2"].address4))
        with made.inside("node"):
            failed = clsact.attach(filters)
        assert not failed, failed
        yield


def _result(question: str, bench: Bench, found: Mapping[Arm, Row]) -> Result:
    """Returns the benchmark's result: exchanges by second of CPU time, or the slowest round's by second."""
    first = next(arm for arm in found if arm.node.kind != BARE)
    control = parse(bench.control) if bench.control else first.control
    floors = {
        arm.way: f" (floor {row.ratio.median:.3f})" for arm, row in found.items() if arm.node.kind == "floor-always"
    }
    targets = [
        (Target(f"{arm}{floors.get(arm.way, '')}", bench.targets[str(arm.of(""))], at_least=True),
         row.slowest if bench.control else row.ratio.median)
        for arm, row in found.items() if str(arm.of("")) in bench.targets
    ]  # fmt: skip
    value, beside = (
        (row.slowest if bench.control else 1e6 / row.cpu.median) if (row := found.get(arm)) else 0.0
        for arm in (first, control)
    )
    return Result(
        question.replace("_", "-"), value, f"{bench.load.unit} by second" + " of CPU time" * (not bench.control),
        str(control), beside,
        [*targets, (Target("exchanges that failed", 0), sum(row.failed for row in found.values()))],
        table(found), {"arms": {str(arm): row._asdict() for arm, row in found.items()}},
    )  # fmt: skip
