"""Beside a kube-proxy: we serve the Services that name us, it serves the others, and a Service moves by its label."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from hybrid_proxy.controller.agent.syncer import CEDE_SECONDS
from hybrid_proxy.workshop.lab.network import SERVICE_CIDRS
from hybrid_proxy.workshop.lab.traffic import meanwhile
from tests.loads import goes_on

from .conftest import bench_of, new_lab, route_services, serve
from .conversations import failures_of, wait_for_answers
from .kit import PATIENCE, UDP, as_terminating, eventually
from .kube_proxy import ANSWERS, KUBE_PROXYS, OURS, KubeProxy, Named, Node, flows, new_flows

NAME = "lab.example"
SYNC = 1.0  # seconds that a kube-proxy takes


@pytest.fixture(
    scope="module", params=[pytest.param("iptables", marks=pytest.mark.long), "nftables"]  # the other: test_takeover.py
)  # fmt: skip
def node(mode: str, request: pytest.FixtureRequest) -> Iterator[Node]:
    """A Service that a test moves is ours again at its end."""
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


def wait_until_served(node: Node, pod: str) -> None:
    for service in (node.tcp, node.udp):
        eventually(partial(node.is_served_by, service, pod), CEDE_SECONDS + 5, f"{service.name} has not moved to {pod}")


def move(node: Node, label: str | None) -> None:
    """The label is another; kube-proxy needs a moment more than we, as its minSyncPeriod wants it."""
    for service in (node.tcp, node.udp):
        service.write(label=label)
    time.sleep(SYNC * PATIENCE)
    node.kube_proxy.sync(*((node.other,) if label == NAME else (node.other, node.tcp, node.udp)))


@pytest.mark.row("1.4", "only Services that name this proxy are served, the others pass to kube-proxy, untouched")
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
                wait_for_answers(opened, ANSWERS)
            assert failures_of(opened) == [], label
            assert {flow.pod for flow in opened} == {before}
            goes_on(tallies, 5)
    for name, tally in tallies.items():
        assert not tally.failures, f"{name}: {tally.report()}"


@pytest.mark.row("1.4", "flows that began at kube-proxy stay there, however often their Service moves")
def test_flows_stay_where_they_began_however_often_their_service_moves(node: Node) -> None:
    """Twice there and back in less time than an entry of conntrack lives without a datagram."""
    move(node, None)
    wait_until_served(node, KUBE_PROXYS)
    with ExitStack() as stack:
        opened = [flow for _ in range(3) for flow in flows(node, stack)]
        with meanwhile(flow.go_on for flow in opened):
            for label, after in ((NAME, OURS), (None, KUBE_PROXYS), (NAME, OURS)):
                move(node, label)
                wait_until_served(node, after)
                wait_for_answers(opened, ANSWERS)
    assert failures_of(opened) == []
    assert {flow.pod for flow in opened} == {KUBE_PROXYS}


@pytest.mark.row("1.4", "a connection to a Service that moved to kube-proxy goes on when the agent starts anew")
def test_a_connection_outlives_the_agent_that_knew_its_service(node: Node, mode: str) -> None:
    if mode == "ipvs":
        pytest.xfail("missing feature: an agent that starts removes virtual servers of Services that moved before")
    with ExitStack() as stack:
        opened = [flow for flow in flows(node, stack) if flow.name.endswith("TCP")]
        with meanwhile(flow.go_on for flow in opened):
            move(node, None)
            wait_until_served(node, KUBE_PROXYS)
            node.bench.agent.terminate()
            node.bench.agent.start()
            wait_for_answers(opened, ANSWERS)
    assert failures_of(opened) == []
    move(node, NAME)
    wait_until_served(node, OURS)
