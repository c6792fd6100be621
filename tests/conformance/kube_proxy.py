"""A kube-proxy on the node of a lab, as far as packets and our agent see it, and flows that began at it or at us.

Its rules have its shapes, and lead to another endpoint than ours: so an answer says who served.
"""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from hybrid_proxy.dataplane.kernel.ipset import Ipsets
from hybrid_proxy.dataplane.kernel.ipvs import Ipvs
from hybrid_proxy.workshop.lab import kube_proxy_rules
from hybrid_proxy.workshop.lab.network import CLUSTER_CIDRS
from hybrid_proxy.workshop.lab.traffic import Tally, load
from tests.waiting import bound

from .conversations import Flow, Scene
from .kit import PATIENCE, V4, Bench, Service

OURS, KUBE_PROXYS = "pod2", "pod3"  # who answers the flows of whom; both serve, so flows to either go on
PLACES = ("pod1", "node", "client")
# Of datagrams, each once: one of a conversation that ended lately would go on with that, and with who answered it.
PORTS = itertools.count(20_000)
EACH = 0.05 * PATIENCE  # seconds between two questions of a flow; an emulated processor needs what is left
ANSWERS = max(2, int(20 / PATIENCE))  # of each flow, after which the next step is taken


HOLDS_ITS_PORTS = """
import http.server, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"lastUpdated": "now", "currentTime": "now"}')
servers = [http.server.HTTPServer(("", port), Handler) for port in (10249, 10256)]
print("up", flush=True)
for server in servers:
    threading.Thread(target=server.serve_forever).start()
"""


@dataclass
class KubeProxy:
    """A process of that name with its ports, and its rules."""

    bench: Bench
    mode: str
    began: bool = False
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        program = self.bench.lab.folder / "kube-proxy"
        if not program.is_symlink():
            program.symlink_to(sys.executable)
        self.process = self.bench.lab.start("node", [str(program), "-c", HOLDS_ITS_PORTS], output=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def stop(self) -> None:
        """Its rules stay."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(bound(10))

    def sync(self, *services: Service, endpoint: bool = True) -> None:
        """Program these Services; `endpoint`: theirs has not gone."""
        address = self.bench.lab[KUBE_PROXYS].address4
        rows = [
            kube_proxy_rules.Row(
                one.vip(V4), ((address, one.target),) if endpoint else (), one.protocol.lower(), one.node_port
            )
            for one in services
        ]
        node = tuple(address for address in self.bench.node_addresses if ":" not in address)
        with self.bench.lab.inside("node"):
            kube_proxy_rules.put(self.mode, kube_proxy_rules.Rows(CLUSTER_CIDRS[0], rows, not self.began, node))
        self.began = True

    def text(self) -> str:
        command = {"iptables": ["iptables-save"], "nftables": ["nft", "list", "table", "ip", "kube-proxy"]}[self.mode]
        return self.bench.lab.run("node", command).stdout

    def is_here(self) -> bool:
        """Whether it has rules; a chain is the kubelet's."""
        if self.mode == "ipvs":
            with self.bench.lab.inside("node"):
                return bool(traces_of_ipvs())
        text = self.text().replace("KUBE-FIREWALL", "")
        return "KUBE-" in text or "kube-proxy" in text


@dataclass
class Named(Service):
    """A Service with the label, or without it."""

    label: str | None = None

    def service_json(self) -> dict[str, object]:
        made = super().service_json()
        if self.label is not None:
            made["metadata"]["labels"] = {"service.kubernetes.io/service-proxy-name": self.label}
        return made


@dataclass
class Node:
    """A lab with three Services, of which two may move."""

    bench: Bench
    kube_proxy: KubeProxy
    other: Named
    tcp: Named
    udp: Named

    def is_served_by(self, service: Service, pod: str) -> bool:
        return all(self.bench.ask(place, service, V4, timeout=1.0).pod == pod for place in PLACES for _ in range(3))


def flows(node: Node, stack: ExitStack) -> list[Flow]:
    """To both Services that may move, from everywhere.

    Alongside mode ipvs also by the node port, and from the node by a socket that is not connected.
    """
    services = {"tcp": node.tcp, "udp": node.udp}
    scene = Scene(node.bench, dict[str, Service](services), "", stack, timeout=5.0, outside="cluster")
    made = []
    for place in PLACES:
        made.append(scene.flow(place, "TCP", scene.ask_tcp(place, "tcp"), EACH))
        made.append(scene.flow(place, "UDP", scene.ask_udp(place, "udp", connected=True, port=next(PORTS)), EACH))
    if node.kube_proxy.mode == "ipvs":
        made.append(scene.flow("client", "TCP by the node port", scene.ask_tcp("client", "tcp", "nodeport"), EACH))
        made.append(scene.flow("node", "unconnected", scene.ask_udp("node", "udp"), EACH))
    for flow in made:
        flow.once()
    return made


def new_flows(node: Node) -> tuple[dict[str, Tally], list[Callable[..., object]]]:
    """Clients that begin one flow after the other, to all three Services."""
    tallies: dict[str, Tally] = {}
    clients: list[Callable[..., object]] = []
    for place in PLACES:
        for service, kind in ((node.other, "connections"), (node.tcp, "connections"), (node.udp, "udp")):
            tally = tallies[f"{kind} from {place} to {service.name}"] = Tally()
            clients.append(
                partial(load, kind, (V4, service.vip(V4)), tally=tally, rate=10 / PATIENCE**2, concurrency=1,
                        timeout=5 * PATIENCE, open_socket=partial(node.bench.lab.socket, place))
            )  # fmt: skip
    return tallies, clients


def traces_of_ipvs() -> list[str]:
    """Returns the traces of kube-proxy's mode ipvs in the calling thread's namespace, without the kubelet's chain."""
    saved = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    found = [line for line in saved.splitlines() if "KUBE-" in line.replace("KUBE-FIREWALL", "")]
    with closing(Ipsets()) as sets, closing(Ipvs()) as ipvs:
        found += sets.names("KUBE-")
        found += [f"{server.address}:{server.port}" for server in ipvs.servers()]
    return found + [name for _, name in socket.if_nameindex() if name == "kube-ipvs0"]
