"""What a cluster does to its objects, from a real API server's stream to real connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.namespaces import new_lab
from tests.served import METRICS, Served, fetch, samples, the_node, until
from workshop.lab.apiserver import CHANGED, ApiServer
from workshop.lab.namespace import PATIENCE
from workshop.lab.network import NODE_NAMES, Lab
from workshop.lab.traffic import ask_tcp

pytestmark = pytest.mark.root

MODES = ("ebpf", "nftables")
VIP, NODE_PORT, BALANCER = "10.96.7.7", 30_777, "203.0.113.77"
NOW_DUE = 3.0  # minSyncPeriod of the test that makes changes wait


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("a", 3) as made:
        made.serve("pod2", "pod3")
        yield made


def shop(name: str = "web", **spec: Any) -> dict[str, Any]:
    """A Service; by default ClusterIP."""
    ports = [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}]
    usual = {"type": "ClusterIP", "clusterIP": VIP, "clusterIPs": [VIP], "ports": ports, "ipFamilies": ["IPv4"]}
    return {
        "kind": "Service", "apiVersion": "v1", "metadata": {"name": name, "namespace": "shop"},
        "spec": usual | spec, "status": {"loadBalancer": {}},
    }  # fmt: skip


def slice_of(lab: Lab, pods: dict[str, dict[str, Any]], name: str = "web", headless: bool = False) -> dict[str, Any]:
    """The slice of a Service: pods, and further fields of each endpoint."""
    usual = {"conditions": {"ready": True, "serving": True, "terminating": False}, "nodeName": NODE_NAMES["node"]}
    labels = {"kubernetes.io/service-name": name} | ({"service.kubernetes.io/headless": ""} if headless else {})
    return {
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": f"{name}-x", "namespace": "shop", "labels": labels}, "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": [usual | {"addresses": [lab[pod].address4]} | more for pod, more in pods.items()],
    }  # fmt: skip


def who(lab: Lab, address: str = VIP, port: int = 80, place: str = "pod1", times: int = 12) -> set[str]:
    """The pods that answer new connections, `-` for none."""
    found = set()
    for _ in range(times):
        with lab.socket(place) as client:
            client.settimeout(2 * PATIENCE)  # a dropped SYN is silent for all of it; `until` asks again
            try:
                client.connect((address, port))
                found.add(ask_tcp(client, close=True).pod)
            except OSError:
                found.add("-")
                if times > 3:
                    break
    return found


def at_zone(lab: Lab, zone: str) -> dict[str, Any]:
    made = the_node(lab)
    made["metadata"]["labels"]["topology.kubernetes.io/zone"] = zone
    return made


@pytest.mark.parametrize("mode", MODES)
def test_a_node_that_moves_to_another_zone(mode: str, start: Callable[..., Served], lab: Lab, api: ApiServer) -> None:
    """Hints are decided again for services that did not change themselves."""
    hints = {pod: {"hints": {"forZones": [{"name": zone}]}} for pod, zone in (("pod2", "a"), ("pod3", "b"))}
    api.put(at_zone(lab, "a"))
    api.put_all([shop(), slice_of(lab, hints)])
    start(mode=mode)
    until(lambda: who(lab) == {"pod2"}, "the backend of zone a")
    api.put(at_zone(lab, "b"))
    until(lambda: who(lab) == {"pod3"}, "the backend of zone b")
    api.put(at_zone(lab, "c"))  # nobody is meant for it: all serve
    until(lambda: who(lab, times=24) == {"pod2", "pod3"}, "both backends")
    api.delete("nodes", NODE_NAMES["node"])
    until(lambda: who(lab, times=24) == {"pod2", "pod3"}, "both backends, without a Node")


@pytest.mark.parametrize("mode", MODES)
def test_a_service_that_changes_its_type(mode: str, start: Callable[..., Served], lab: Lab, api: ApiServer) -> None:
    """ClusterIP, NodePort, LoadBalancer, ExternalName, ClusterIP, headless and back: nothing of a former type stays."""
    node = lab["node"].address4
    port = [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080, "nodePort": NODE_PORT}]
    balancer = shop(type="LoadBalancer", ports=port)
    balancer["status"]["loadBalancer"] = {"ingress": [{"ip": BALANCER}]}
    external = shop(type="ExternalName", externalName="example.org")
    for gone in ("clusterIP", "clusterIPs"):
        del external["spec"][gone]
    api.put_all([shop(), slice_of(lab, {"pod2": {}})])
    start("--nodeport-addresses", "0.0.0.0/0", mode=mode)

    def served() -> tuple[bool, bool, bool]:
        """At the ClusterIP, at the node port, at the load balancer's IP."""
        return (
            who(lab, times=2) == {"pod2"},
            who(lab, node, NODE_PORT, "client", times=2) == {"pod2"},
            who(lab, BALANCER, 80, times=2) == {"pod2"},
        )

    for step, obj, wanted in (
        ("ClusterIP", shop(), (True, False, False)),
        ("NodePort", shop(type="NodePort", ports=port), (True, True, False)),
        ("LoadBalancer", balancer, (True, True, True)),
        ("ExternalName", external, (False, False, False)),
        ("ClusterIP again", shop(), (True, False, False)),
        ("headless", shop(clusterIP="None", clusterIPs=["None"]), (False, False, False)),
        ("LoadBalancer again", balancer, (True, True, True)),
        ("NodePort again", shop(type="NodePort", ports=port), (True, True, False)),
    ):
        api.put(obj)
        until(lambda wanted=wanted: served() == wanted, step, 20)


@pytest.mark.parametrize("mode", MODES)
def test_deleted_and_made_again_in_one_batch(mode: str, start: Callable[..., Served], lab: Lab, api: ApiServer) -> None:
    """The same address goes from one Service to another, of the same name and of another one, in one go."""
    api.put_all([shop(), slice_of(lab, {"pod2": {}})])
    agent = start(mode=mode)
    until(lambda: who(lab) == {"pod2"}, "the first one")
    names = ["web"]
    for name, pod in (("web", "pod3"), ("other", "pod2"), ("third", "pod3"), ("web", "pod2")):
        with api.quiet():
            api.delete("services", f"shop/{names[-1]}")
            api.delete("endpointslices", f"shop/{names[-1]}-x")
            api.put_all([shop(name), slice_of(lab, {pod: {}}, name)])
        names.append(name)
        until(lambda pod=pod: who(lab) == {pod}, f"{name} by {pod}")
    with api.quiet():  # the new one before the old one goes, as servers may send it
        api.put_all([shop("last"), slice_of(lab, {"pod3": {}}, "last")])
        api.delete("services", "shop/web")
    until(lambda: who(lab) == {"pod3"}, "the last one")
    status = agent.wait(lambda status: status.services == 1)
    assert status.conflicts == {}
    assert status.dataplane.unprogrammed == []


def test_each_superseded_change_counts_with_its_own_latency(
    start: Callable[..., Served], lab: Lab, api: ApiServer
) -> None:
    """Changes that wait for a sync and overtake each other count with the time that each of them waited."""
    api.put_all([shop(), slice_of(lab, {"pod2": {}})])
    start("--metrics-bind-address", f"127.0.0.1:{METRICS}", "--iptables-min-sync-period", f"{NOW_DUE:g}s",
          "--iptables-sync-period", "30s", mode="nftables")  # fmt: skip
    fetch(lab, "/metrics", METRICS)

    def counters() -> tuple[float, float, float]:
        metrics = samples(lab)
        name = "kubeproxy_network_programming_duration_seconds"
        return (
            metrics[f"{name}_count"]["IPv4",], metrics[f"{name}_sum"]["IPv4",],
            next(iter(metrics["kubeproxy_sync_proxy_rules_endpoint_changes_total"].values())),
        )  # fmt: skip

    time.sleep(NOW_DUE + 0.5)
    one = slice_of(lab, {"pod3": {}})
    one["metadata"]["annotations"] = {CHANGED: datetime.now(UTC).isoformat()}
    api.put(one)  # programmed at once, and a rest begins
    until(lambda: counters()[0] == 1, "the first one")
    count, total, seen = counters()
    began = time.time()
    for number in range(20):
        one = slice_of(lab, {"pod2": {}, "pod3": {"addresses": [f"10.77.250.{number + 1}"]}})  # as never before
        one["metadata"]["annotations"] = {CHANGED: datetime.now(UTC).isoformat()}
        api.put(one)
        time.sleep(0.02)
    until(lambda: counters()[0] == count + 20, "all changes, each by itself", 20)
    ended = time.time()
    waited = counters()[1] - total
    assert counters()[2] == seen + 20
    assert 20 * 0.3 * NOW_DUE < waited < 20 * (ended - began), "the time of the rest is in each of them"


def test_who_names_the_pod_that_answers(lab: Lab) -> None:
    """What these tests look at: a pod that is asked itself, and nobody."""
    assert who(lab, lab["pod3"].address4, 8080) == {"pod3"}
    assert who(lab, lab["pod3"].address(socket.AF_INET), 8081, times=2) == {"-"}
