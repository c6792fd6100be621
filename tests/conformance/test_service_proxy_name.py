"""Beside a kube-proxy: we serve the Services that name us, it serves the others, and a Service moves by its label.

The rules of kube-proxy have its shapes, and lead to other endpoints than ours: so an answer says who served.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import pytest

from controller.agent.syncer import HAND_OVER
from tests.loads import goes_on
from workshop.benchmarks import peer_rules
from workshop.lab.network import CLUSTER_CIDRS, SERVICE_CIDRS
from workshop.lab.traffic import Tally, ask_tcp, ask_udp, load, meanwhile

from .conftest import bench_of, new_lab, route_services, serve
from .kit import PATIENCE, UDP, V4, Bench, Service, as_terminating, eventually

NAME = "lab.example"
OURS, KUBE_PROXYS = "pod2", "pod3"  # who answers the flows of whom; both serve, so flows to either go on
PLACES = ("pod1", "node", "client")
SYNC = 1.0  # seconds that a kube-proxy takes
EACH = 0.02  # seconds between two questions of a flow


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

    def start(self) -> None:
        program = self.bench.lab.folder / "kube-proxy"
        program.symlink_to(sys.executable)
        process = self.bench.lab.start("node", [str(program), "-c", HOLDS_ITS_PORTS], output=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"

    def sync(self, *services: Service) -> None:
        address = self.bench.lab[KUBE_PROXYS].address4
        rows = [peer_rules.Row(one.vip(V4), ((address, one.target),), one.protocol.lower()) for one in services]
        peer_rules.put(self.bench.lab, self.mode, peer_rules.Rows(CLUSTER_CIDRS[0], rows, not self.began))
        self.began = True

    def text(self) -> str:
        command = {"iptables": ["iptables-save"], "nftables": ["nft", "list", "table", "ip", "kube-proxy"]}[self.mode]
        return self.bench.lab.run("node", command).stdout


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
    """A lab with one Service that never moves, and two that do."""

    bench: Bench
    kube_proxy: KubeProxy
    other: Named
    tcp: Named
    udp: Named

    def is_served_by(self, service: Service, pod: str) -> bool:
        return all(self.bench.ask(place, service, V4, timeout=1.0).pod == pod for place in PLACES for _ in range(3))


@pytest.fixture(params=["iptables", "nftables"])
def node(mode: str, request: pytest.FixtureRequest) -> Iterator[Node]:
    with new_lab(3, 1) as lab:
        route_services(lab)
        serve(lab)
        bench = bench_of(lab, mode, ("--service-proxy-name", NAME, "--metrics-bind-address", "127.0.0.1:10249"))
        cidr = {"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": "kubernetes"},
                "spec": {"cidrs": [*SERVICE_CIDRS]}}  # fmt: skip
        bench.agent.manifests.joinpath("cidr.json").write_text(json.dumps(cidr))
        ends = (bench.lab[OURS], as_terminating(bench.lab[KUBE_PROXYS]))
        other, tcp = Named(bench, 1, ()), Named(bench, 2, (), label=NAME)
        udp = Named(bench, 3, (), "UDP", 53, UDP, label=NAME)
        for one in (other, tcp, udp):
            one.write(*ends)
        kube_proxy = KubeProxy(bench, request.param)
        kube_proxy.start()
        kube_proxy.sync(other)
        with bench.agent.serving():
            yield Node(bench, kube_proxy, other, tcp, udp)


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


def flows(node: Node, stack: ExitStack) -> list[Flow]:
    """To both Services that move, from everywhere."""
    made = []
    for place in PLACES:
        stream = stack.enter_context(node.bench.connect(place, node.tcp.vip(V4), V4, timeout=5.0))
        made.append(Flow(f"TCP from {place}", lambda stream=stream: ask_tcp(stream).pod))
        sender = stack.enter_context(node.bench.socket(place, V4, socket.SOCK_DGRAM, timeout=5.0))
        sender.connect(node.udp.vip(V4))
        made.append(Flow(f"UDP from {place}", lambda sender=sender: ask_udp(sender)[0].pod))
    return made


def new_flows(node: Node) -> tuple[dict[str, Tally], list[Callable[..., object]]]:
    """Clients that begin one flow after the other, to all three Services."""
    tallies: dict[str, Tally] = {}
    clients: list[Callable[..., object]] = []
    for place in PLACES:
        for service, kind in ((node.other, "connections"), (node.tcp, "connections"), (node.udp, "udp")):
            tally = tallies[f"{kind} from {place} to {service.name}"] = Tally()
            clients.append(
                partial(load, kind, (V4, service.vip(V4)), tally=tally, rate=20 / PATIENCE, concurrency=1,
                        timeout=5 * PATIENCE, open_socket=partial(node.bench.lab.socket, place))
            )  # fmt: skip
    return tallies, clients


def wait_until_served(node: Node, pod: str) -> None:
    for service in (node.tcp, node.udp):
        eventually(partial(node.is_served_by, service, pod), HAND_OVER + 5, f"{service.name} has not moved to {pod}")


def wait_for_answers(opened: list[Flow]) -> None:
    """Until each flow has had many more, or has failed."""
    goals = [flow.asked + 50 for flow in opened]
    eventually(
        lambda: all(flow.asked > goal or flow.failed for flow, goal in zip(opened, goals, strict=True)),
        30, "open flows do not go on",
    )  # fmt: skip


def move(node: Node, label: str | None) -> None:
    """The label is another; kube-proxy needs a moment more than we, as its minSyncPeriod wants it."""
    for service in (node.tcp, node.udp):
        service.write(label=label)
    time.sleep(SYNC * PATIENCE)
    node.kube_proxy.sync(*((node.other,) if label == NAME else (node.other, node.tcp, node.udp)))


@pytest.mark.row("1.4", "only Services that name this proxy are served; the others pass to kube-proxy, untouched")
def test_each_serves_its_own(node: Node) -> None:
    assert node.is_served_by(node.other, KUBE_PROXYS)
    assert node.is_served_by(node.tcp, OURS)
    assert node.is_served_by(node.udp, OURS)
    assert node.bench.agent.running_status().other_proxies == []
    assert fetch(node, "http://127.0.0.1:10356/livez")
    assert "hybrid_proxy_mode" in fetch(node, "http://127.0.0.1:10349/metrics")
    assert "lastUpdated" in fetch(node, "http://127.0.0.1:10256/healthz")
    before = node.kube_proxy.text()
    node.bench.agent.terminate()
    assert node.bench.agent.cleanup().returncode == 0
    assert without_counters(node.kube_proxy.text()) == without_counters(before)
    assert node.is_served_by(node.other, KUBE_PROXYS)
    node.bench.agent.start()


def fetch(node: Node, url: str) -> str:
    with node.bench.lab.inside("node"), urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def without_counters(text: str) -> list[str]:
    return [line for line in text.splitlines() if "KUBE-" in line and line.startswith("-A")] or text.splitlines()


@pytest.mark.row("1.4", "a Service moves to kube-proxy by its label, and back: no flow is lost, old or new")
def test_a_service_moves_by_its_label_and_back(node: Node) -> None:
    tallies, clients = new_flows(node)
    with ExitStack() as stack, meanwhile(clients):
        goes_on(tallies, 5)
        for label, before, after in ((None, OURS, KUBE_PROXYS), (NAME, KUBE_PROXYS, OURS)):
            opened = flows(node, stack)
            with meanwhile(flow.go_on for flow in opened):
                move(node, label)
                wait_until_served(node, after)
                wait_for_answers(opened)
            for flow in opened:
                assert not flow.failed, f"{flow.name}, label {label}, {flow.asked} questions: {flow.failed}"
                assert flow.pod == before, flow.name
            goes_on(tallies, 5)
    for name, tally in tallies.items():
        assert not tally.failures, f"{name}: {tally.report()}"
