"""What the other tests' Services, which have one port and one type, leave out: sig-network tests these in clusters."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from hybrid_proxy.workshop.lab.traffic import ask_tcp, ask_udp

from .kit import HTTP, SECOND_HTTP, UDP, V4, V6, Bench, End, Service, eventually, silent
from .world import STICKY

FAMILIES = (V4, V6)
Port = tuple[str, str, int]  # name, protocol, number


def write_ports(service: Service, ports: list[Port], *slices: tuple[str, dict[str, int]], node_port: int = 0) -> None:
    """A Service with several ports. Each of its slices has one pod, and that pod's numbers of some ports by name."""
    made = service.service_json()
    more = {"nodePort": node_port} if node_port else {}
    made["spec"] |= {"type": "NodePort" if node_port else "ClusterIP"}
    made["spec"]["ports"] = [
        {"name": name, "protocol": protocol, "port": number} | (more if number == ports[0][2] else {})
        for name, protocol, number in ports
    ]
    protocols = {name: protocol for name, protocol, _ in ports}
    items: list[Any] = [made]
    for pod, numbers in slices:
        for family in FAMILIES:
            items.append({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {"namespace": "conformance", "name": f"{service.name}-{pod}-{int(family)}",
                             "labels": {"kubernetes.io/service-name": service.name}},
                "addressType": "IPv4" if family == V4 else "IPv6",
                "ports": [{"name": n, "protocol": protocols[n], "port": number} for n, number in numbers.items()],
                "endpoints": [End(service.bench.lab[pod]).json(family)],
            })  # fmt: skip
    draft = service.path.with_name(f".{service.name}.draft")
    draft.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    draft.replace(service.path)


def answering(bench: Bench, place: str, target: tuple[str, int], protocol: str, family: int) -> set[str]:
    """Which pods answer twelve new flows."""
    seen = set()
    for _ in range(12):
        if protocol == "TCP":
            with bench.connect(place, target, family) as connection:
                seen.add(ask_tcp(connection, close=True).pod)
        else:
            with bench.socket(place, family, socket.SOCK_DGRAM) as sender:
                seen.add(ask_udp(sender, target)[0].pod)
    return seen


def wait_for(look: Callable[[], object], want: object) -> None:
    last: object = None

    def reached() -> bool:
        nonlocal last
        last = look()
        return last == want

    eventually(reached, 8, lambda: f"want {want}, see {last}")


@pytest.mark.row("1.5", "several ports, protocols at one number, and endpoints with numbers of their own")
def test_ports_are_joined_one_by_one(bench: Bench, mode: str) -> None:
    service = Service(bench, next(bench.numbers), ())
    ports = [("http", "TCP", 80), ("dns", "UDP", 80), ("admin", "TCP", 81)]
    both = {"pod2", "pod3"}
    write_ports(
        service, ports, ("pod2", {"http": HTTP, "dns": UDP}),
        ("pod3", {"http": SECOND_HTTP, "dns": UDP, "admin": SECOND_HTTP}), node_port=service.node_port,
    )  # fmt: skip
    for family in FAMILIES:
        at = service.address(family)
        for protocol, number, want in (("TCP", 80, both), ("UDP", 80, both), ("TCP", 81, {"pod3"})):
            wait_for(lambda: answering(bench, "pod1", (at, number), protocol, family), want)  # noqa: B023
        node = bench.lab["node"].address(family)
        for protocol in ("TCP", "UDP"):
            assert answering(bench, "client", (node, service.node_port), protocol, family) == both
    service.delete()


@pytest.mark.row("1.4", "a Service changes its type: ExternalName is served nowhere")
def test_a_type_changes(bench: Bench, mode: str) -> None:
    service = bench.service("pod2")
    external = {"type": "ExternalName", "externalName": "somewhere.invalid", "clusterIP": None, "clusterIPs": None}
    node_port = {"type": "NodePort", "ports": [{"name": "main", "port": 80, "nodePort": service.node_port}]}

    def by_node_port(family: int) -> str:
        try:
            with bench.connect("client", (bench.lab["node"].address(family), service.node_port), family) as connection:
                return ask_tcp(connection, close=True).pod
        except ConnectionRefusedError:
            return "refused"

    for spec, pod, at_node in (
        (external, False, "refused"), (node_port, True, "pod2"), (external, False, "refused"), ({}, True, "refused")
    ):  # fmt: skip
        service.write(spec=spec)
        for family in FAMILIES:
            if pod:
                bench.settle(service, {"pod2"}, family)
            else:
                eventually(lambda family=family: silent(bench, "pod1", service, family), 8, "an ExternalName is served")
            wait_for(lambda family=family: by_node_port(family), at_node)
    service.delete()


@pytest.mark.row("2.15", "affinity is turned on and off while the service serves")
def test_affinity_is_switched(bench: Bench, mode: str) -> None:
    pods = {"pod2", "pod3", "remote1"}
    service = bench.service(*sorted(pods), outside=True)

    def at(place: str, family: int) -> int:
        target = service.vip(family) if place == "pod1" else (bench.lab["node"].address(family), service.node_port)
        return min(len(answering(bench, place, target, "TCP", family)), 2)

    for spec, several in ((STICKY, 1), ({}, 2)):
        service.write(spec=spec)
        for place in ("pod1", "client"):
            for family in FAMILIES:
                wait_for(lambda place=place, family=family: at(place, family), several)
    service.delete()


@pytest.mark.row("2.13", "node hints: others serve while the node's own endpoint is away")
def test_node_hints_fall_back(bench: Bench, mode: str) -> None:
    here = End(bench.lab["pod2"], hints=(("forNodes", "lab-node"),))
    gone = End(bench.lab["pod2"], ready=False, hints=here.hints)
    away = End(bench.lab["remote1"], hints=(("forNodes", "lab-node2"),))
    service = bench.service(here, away, settle=False)
    for ends, want in (((here, away), "pod2"), ((gone, away), "remote1"), ((here, away), "pod2")):
        service.write(*ends)
        for family in FAMILIES:
            bench.settle(service, {want}, family)
    service.delete()


@pytest.mark.row("2.19", "a Service has its ClusterIP from the eleventh ServiceCIDR")
def test_a_cluster_ip_of_another_service_cidr(bench: Bench, mode: str) -> None:
    service = bench.service("pod2", settle=False, spec={"clusterIP": "172.30.19.7",
                                                        "clusterIPs": ["172.30.19.7", "fdc0:19::7"]})  # fmt: skip
    for family, address in ((V4, "172.30.19.7"), (V6, "fdc0:19::7")):
        for place in ("pod1", "node"):
            wait_for(lambda: answering(bench, place, (address, 80), "TCP", family), {"pod2"})  # noqa: B023
    service.delete()
