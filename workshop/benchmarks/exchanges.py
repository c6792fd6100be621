"""CPU time that an exchange takes, client and server together, beside the same exchange on a node without any proxy.

`connections` asks a ClusterIP, a backend's own address and plain pods with every setting of the fast path, with and
without a firewall; `mode-connections` does so with all modes, and rules in the shape of kube-proxy's;
`ipvs-connections` with mode ipvs: where the kernel has no ip_vs, in a virtual machine whose clock counts instructions,
so that cache misses cost nothing. `udp-query` has a socket for each question, `udp-round-trip` one for all, and
`udp-one-way` sends datagrams of one flow, as of logs; `stream` is one TCP connection. `floor-established` and
`floor-always` are the least that a program can do that translates addresses (floors.bpf.c).

Each arm (arms.py) has its node, and all nodes stand at once. Client and server have a real-time class and share one
CPU, so that nothing else works there; rounds are short, and arms take turns. The kernel's work for packets is done in
their time, too. A ratio is that of the control's CPU time to the arm's, above 1: cheaper than no proxy.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from hybrid_proxy.dataplane.kernel import clsact
from hybrid_proxy.dataplane.kernel.bpf import Object
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ipvs.programmer import probe
from hybrid_proxy.workshop.benchmarks.arms import BARE, KINDS, WAYS, Arm, Round, Row, arms_of, rows, table
from hybrid_proxy.workshop.benchmarks.clients import ALL_PODS, ALONE, CLIENT, NODE_PORT, PORT, VIP, measured, serve
from hybrid_proxy.workshop.benchmarks.kit import GUEST, built, in_a_guest, say, take_turns
from hybrid_proxy.workshop.compare.objects import filler
from hybrid_proxy.workshop.lab import kube_proxy_rules
from hybrid_proxy.workshop.lab.agent import Agent, remove_forsaken
from hybrid_proxy.workshop.lab.examples import folder
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab
from hybrid_proxy.workshop.measuring.machine import missing_of_modes
from hybrid_proxy.workshop.measuring.nodes import lab
from hybrid_proxy.workshop.measuring.results import Result, Target

ROUNDS, GUEST_ROUNDS = 0, 3  # 0: each benchmark's own
FAR = "10.97.1.2"  # the ClusterIP of a service on another node
PODS_ONLY = ("--pod-interfaces", "veth*")  # the agent does not serve the interfaces of plain pods
FIREWALL = (
    "add table inet firewall; add chain inet firewall forward { type filter hook forward priority 0; }; "
    "add rule inet firewall forward ct state established,related accept; "
    "add rule inet firewall forward ct state invalid drop"
)


class Load(NamedTuple):
    """What client and server do for `seconds`; with `fresh` each round has a port, so that all its flows are new."""

    client: str
    server: str
    protocol: str
    seconds: float
    rounds: int
    fresh: bool = False
    more: tuple[str, ...] = ()
    unit: str = "exchanges"
    per: int = 1  # of what the client counts


CONNECTIONS = Load("ask", "serve", "TCP", 0.25, 24)
# Short rounds: the tables of flows and of conntrack hold those of half a minute.
QUERIES = Load("query", "echo", "UDP", 0.06, 48, fresh=True)
TALK = Load("talk", "echo", "UDP", 0.25, 24)
THROW = Load("throw", "catch", "UDP", 0.25, 24, more=("40000",), unit="datagrams")  # of one flow, as if for hours
POUR = Load("pour", "sink", "TCP", 0.25, 24, unit="megabytes", per=10**6)


class Bench(NamedTuple):
    """A load, its arms (the first one is the benchmark's value), and the least ratios of some."""

    load: Load
    arms: tuple[str, ...]
    targets: Mapping[str, float] = {}


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
    "ipvs_connections": Bench(
        CONNECTIONS, ("default+100:service", "ipvs+100:service", "kube-proxy-ipvs+100:service")
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


@dataclass
class Node:
    """A lab with what serves its node, and the servers that arms there ask."""

    made: Lab
    program: str
    load: Load
    servers: dict[tuple[str, int], subprocess.Popen[str]] = field(default_factory=dict)

    def run(self, arm: Arm, found: list[Round], ports: int) -> None:
        """Measures a round of an arm."""
        way, load = WAYS[arm.way], self.load
        place, address, first = {
            "service": ("pod2", VIP, PORT),
            "nodeport": ("pod2", self.made["node"].address4, NODE_PORT),
            "far": ("remote1", FAR, PORT),
        }.get(way.target) or (way.target, self.made[way.target].address4, PORT)
        number = len(found) % ports
        server = self.server(place, PORT + number)
        before = _ran(server)
        argv = [*ALONE, self.program, load.client, address, str(first + number), str(load.seconds), *load.more]
        done = self.made.run(way.client, argv)
        assert done.returncode == 0, f"{arm}: {done.stderr}"
        count, seconds, failed, *_, cpu = done.stdout.split()
        assert failed == "0", f"{arm}: {failed} of {count} exchanges with {address} failed"
        exchanges = int(count) / load.per
        found.append(Round(1e6 * (float(cpu) + _ran(server) - before) / exchanges, exchanges / float(seconds)))

    def server(self, place: str, port: int) -> subprocess.Popen[str]:
        """Returns the server there, started at its first round."""
        if (place, port) not in self.servers:
            self.servers[place, port] = serve(self.made, place, self.program, self.load.server, port=port)
        return self.servers[place, port]


def _ran(process: subprocess.Popen[str]) -> float:
    """Returns the seconds that a process was on a CPU."""
    return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e9


def measure(question: str, arms: str = "", rounds: int = 0, trees: Sequence[str] = ()) -> Result:
    """Measures one of `BENCHES`, or these arms of it; each agent's once for each of these source trees."""
    bench, program = BENCHES[question], str(built(CLIENT))
    if question == "ipvs_connections" and (reason := _without_ipvs()):
        say(f"  in a virtual machine: {reason}")
        return _of_guest(in_a_guest(f"{__package__}", question, "--rounds", str(ROUNDS or GUEST_ROUNDS), counted=True))
    load = bench.load
    rounds = rounds or ROUNDS or load.rounds
    named = {f"{Path(tree).name}{number or ''}": Path(tree) for number, tree in enumerate(trees)}
    wanted = arms_of(arms.split(",") if arms else bench.arms, list(named))
    found: dict[Arm, list[Round]] = {}
    with contextlib.ExitStack() as stack:
        nodes = _Nodes(stack, program, load, rounds, named, wanted)
        turns = []
        for arm in wanted:
            if (node := nodes.of(arm)) is not None:
                found[arm] = []
                turns.append(partial(node.run, arm, found[arm], nodes.ports))
        take_turns(rounds, *turns)
    compared = rows({arm: each[1:] for arm, each in found.items()})  # the first round warms up
    return _result(question.replace("_", "-"), bench, compared)


def _without_ipvs() -> str | None:
    with lab() as made, made.inside("node"):
        return probe(Options())


def _of_guest(report: Mapping[str, Any]) -> Result:
    """Returns a result that was measured in a virtual machine."""
    control, name = report["control"], report["name"]
    return Result(
        name, report["value"], report["unit"], control["what"], control["value"], (),
        [f"{name}: on Debian's kernel {GUEST} in a virtual machine that counts instructions",
         *(f"{arm}: {found['ratio'][1]:.3f} of {control['what']}" for arm, found in report["arms"].items())],
        {"arms": report["arms"]},
    )  # fmt: skip


class _Nodes:
    """Labs with what is on their nodes, until `stack` ends; one for all arms that differ by their way alone."""

    def __init__(
        self, stack: contextlib.ExitStack, program: str, load: Load, rounds: int, trees: Mapping[str, Path],
        arms: Sequence[Arm],
    ) -> None:  # fmt: skip
        self.stack, self.program, self.load, self.trees = stack, program, load, trees
        self.ports = rounds + 1 if load.fresh else 1
        self.remote = int(any("remote1" in WAYS[arm.way] or WAYS[arm.way].target == "far" for arm in arms))
        self.known: dict[tuple[str, bool, int, str], Node | None] = {}
        self.missing: dict[str, str] = {}
        remove_forsaken("bench")

    def of(self, arm: Arm) -> Node | None:
        """Returns the node of an arm, None where this kernel has no such mode."""
        key = (arm.node, arm.firewall, arm.services, arm.tree)
        if key not in self.known:
            self.known[key] = self._new(arm)
        return self.known[key]

    def _new(self, arm: Arm) -> Node | None:
        kind = KINDS[arm.node]
        if self.missing.get(kind.name):
            say(f"  {arm} is skipped: {self.missing[kind.name]}")
            return None
        made = self.stack.enter_context(_lab(len(self.known), self.remote))
        self.missing = self.missing or missing_of_modes(made)
        node = Node(made, self.program, self.load)
        if kind.what == "agent":
            self.stack.enter_context(self._agent(made, arm).serving(180))
        elif kind.what == "rules":
            self._put_rules(made, arm)
        elif kind.what == "floor":
            self.stack.enter_context(_floor(made, kind.name))
        if arm.firewall:
            made.run("node", ["nft", FIREWALL])
        say(f"  {str(arm).partition(':')[0]}{f' of {arm.tree}' if arm.tree else ''} stands")
        return node

    def _agent(self, made: Lab, arm: Arm) -> Agent:
        listed = [PORT + number for number in range(self.ports)]
        items = measured(
            made["pod2"], node_port=NODE_PORT, ports=listed, protocol=self.load.protocol, node=NODE_NAMES["node"]
        )
        if self.remote:
            items += measured(
                made["remote1"], ports=listed, protocol=self.load.protocol, address=FAR, node=NODE_NAMES["node2"]
            )
        manifests = folder(made, [*items, *filler(arm.services, 10)])
        kind = KINDS[arm.node]
        flags = (*PODS_ONLY, *kind.flags) if kind.name == "ebpf" else kind.flags
        under = ("env", "-C", str(self.trees[arm.tree]), f"PYTHONPATH={self.trees[arm.tree]}") if arm.tree else ()
        return Agent(made, manifests, kind.name, flags, under=under)

    def _put_rules(self, made: Lab, arm: Arm) -> None:
        protocol = self.load.protocol.lower()
        own = [
            kube_proxy_rules.Row((VIP, port), ((made["pod2"].address4, port),), protocol)
            for port in range(PORT, PORT + self.ports)
        ]
        kube_proxy_rules.load(made, KINDS[arm.node].name, arm.services, ALL_PODS, own)


def _lab(number: int, remote: int) -> Lab:
    return Lab(f"bench{os.getpid()}x{number}", 3, plain=2, remote=remote)


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
                pods.update(_bytes(pod.address4), outer["index"].to_bytes(4, "little") + macs)
            filters.append(clsact.Filter(outer["index"], "floor", programs.program(name), ingress=True))
            if name == "established":
                filters.append(
                    clsact.Filter(outer["index"], "floor", programs.program(f"{name}_leaves"), ingress=False)
                )
        with contextlib.closing(programs.map("services")) as services:
            services.update(_bytes(VIP), _bytes(made["pod2"].address4))
        with made.inside("node"):
            failed = clsact.attach(filters)
        assert not failed, failed
        yield


def _bytes(address: str) -> bytes:
    return bytes(map(int, address.split(".")))


def _result(name: str, bench: Bench, found: Mapping[Arm, Row]) -> Result:
    """Returns the benchmark's result: exchanges by second of CPU time."""
    first = next(arm for arm in found if arm.node != BARE)
    floors = {arm.way: row.ratio.median for arm, row in found.items() if arm.node == "floor-always"}
    targets = [
        (
            Target(f"{arm}" + (f" (floor {floors[arm.way]:.3f})" if arm.way in floors else ""), least, at_least=True),
            ratio,
        )
        for arm, row in found.items()
        if (least := bench.targets.get(str(arm).partition("@")[0])) and (ratio := row.ratio.median)
    ]
    unit = bench.load.unit
    return Result(
        name, 1e6 / found[first].cpu.median, f"{unit} by second of CPU time", f"{first.control}",
        1e6 / found[first.control].cpu.median,
        targets,
        table(found),
        {
            "arms": {
                str(arm): {
                    "cpu_us": [round(number, 3) for number in row.cpu],
                    "ratio": [round(number, 4) for number in row.ratio],
                    "rate": round(row.rate),
                    **({"gain": [round(number, 4) for number in row.gain]} if row.gain else {}),
                }
                for arm, row in found.items()
            }
        },
    )  # fmt: skip
