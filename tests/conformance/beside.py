"""A kube-proxy on the node of a lab, as far as packets and our agent see it, and flows that began at it or at us.

Its rules have its shapes, and lead to another endpoint than ours: so an answer says who served.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from hybrid_proxy.workshop.lab import kube_proxy_rules
from hybrid_proxy.workshop.lab.network import CLUSTER_CIDRS
from hybrid_proxy.workshop.lab.traffic import Tally, ask_tcp, ask_udp, load

from .kit import PATIENCE, V4, Bench, Service, eventually

OURS, KUBE_PROXYS = "pod2", "pod3"  # who answers the flows of whom; both serve, so flows to either go on
PLACES = ("pod1", "node", "client")
EACH = 0.02 * PATIENCE**2  # seconds between two questions of a flow; an emulated processor needs what is left


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
        self.process.wait(10)

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
                return bool(kube_proxy_rules.traces_of_ipvs())
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


@dataclass
class Flow:
    """An open conversation that asks on and on, and remembers every question without the right answer."""

    name: str
    ask: Callable[[], str]
    pod: str = ""
    asked: int = 0
    failed: list[str] = field(default_factory=list)

    def go_on(self, stop: threading.Event) -> None:
        self.pod = self.ask()
        while not stop.wait(EACH):
            self.asked += 1
            try:
                pod = self.ask()
            except OSError as error:
                self.failed.append(repr(error))
                return
            if pod != self.pod:
                self.failed.append(f"{pod} answers, not {self.pod}")
                return


def flows(node: Node, stack: ExitStack) -> list[Flow]:
    """To both Services that may move, from everywhere.

    Beside mode ipvs also by the node port, and from the node by a socket that is not connected.
    """
    made = []
    for place in PLACES:
        stream = stack.enter_context(node.bench.connect(place, node.tcp.vip(V4), V4, timeout=5.0))
        made.append(Flow(f"TCP from {place}", lambda stream=stream: ask_tcp(stream).pod))
        sender = stack.enter_context(node.bench.socket(place, V4, socket.SOCK_DGRAM, timeout=5.0))
        sender.connect(node.udp.vip(V4))
        made.append(Flow(f"UDP from {place}", lambda sender=sender: ask_udp(sender)[0].pod))
    if node.kube_proxy.mode == "ipvs":
        port = node.bench.lab["node"].address4, node.tcp.node_port
        by_port = stack.enter_context(node.bench.connect("client", port, V4, timeout=5.0))
        made.append(Flow("TCP from client by the node port", lambda: ask_tcp(by_port).pod))
        loose, vip = (
            stack.enter_context(node.bench.socket("node", V4, socket.SOCK_DGRAM, timeout=5.0)),
            node.udp.vip(V4),
        )
        made.append(Flow("UDP from node, not connected", lambda: ask_udp(loose, vip)[0].pod))
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


def wait_for_answers(opened: list[Flow]) -> None:
    """Until each flow has had many more, or has failed."""
    goals = [flow.asked + 50 / PATIENCE for flow in opened]
    eventually(
        lambda: all(flow.asked > goal or flow.failed for flow, goal in zip(opened, goals, strict=True)),
        30, "open flows do not go on",
    )  # fmt: skip
