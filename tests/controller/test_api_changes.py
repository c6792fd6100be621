"""What a cluster does to its objects, from a real API server's stream to real connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybrid_proxy.workshop.lab.apiserver import ApiServer
from hybrid_proxy.workshop.lab.namespace import PATIENCE
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab
from hybrid_proxy.workshop.lab.traffic import ask_tcp
from tests.namespaces import new_lab
from tests.served import Served
from tests.waiting import until

pytestmark = pytest.mark.root

VIP = "10.96.7.7"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("a", 3) as made:
        made.serve("pod2", "pod3")
        yield made


def shop(name: str = "web") -> dict[str, Any]:
    ports = [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}]
    spec = {"type": "ClusterIP", "clusterIP": VIP, "clusterIPs": [VIP], "ports": ports, "ipFamilies": ["IPv4"]}
    return {"kind": "Service", "apiVersion": "v1", "metadata": {"name": name, "namespace": "shop"}, "spec": spec}


def slice_of(lab: Lab, pod: str, name: str = "web") -> dict[str, Any]:
    """The slice of a Service with one pod."""
    return {
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4",
        "metadata": {"name": f"{name}-x", "namespace": "shop", "labels": {"kubernetes.io/service-name": name}},
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": [{"addresses": [lab[pod].address4], "nodeName": NODE_NAMES["node"]}],
    }  # fmt: skip


def who(lab: Lab) -> set[str]:
    """The pods that answer new connections; `until` asks again where nobody does."""
    found = set()
    for _ in range(12):
        with lab.socket("pod1") as client:
            client.settimeout(2 * PATIENCE)
            client.connect((VIP, 80))
            found.add(ask_tcp(client, close=True).pod)
    return found


@pytest.mark.parametrize("mode", ["ebpf", "nftables"])
def test_deleted_and_made_again_in_one_batch(mode: str, start: Callable[..., Served], lab: Lab, api: ApiServer) -> None:
    """The same address goes from one Service to another, of the same name and of another one, in one go."""
    api.put_all([shop(), slice_of(lab, "pod2")])
    agent = start(mode=mode)
    until(lambda: who(lab) == {"pod2"}, "the first one")
    names = ["web"]
    for name, pod in (("web", "pod3"), ("other", "pod2"), ("third", "pod3"), ("web", "pod2")):
        with api.quiet():
            api.delete("services", f"shop/{names[-1]}")
            api.delete("endpointslices", f"shop/{names[-1]}-x")
            api.put_all([shop(name), slice_of(lab, pod, name)])
        names.append(name)
        until(lambda pod=pod: who(lab) == {pod}, f"{name} by {pod}")
    with api.quiet():  # the new one before the old one goes, as servers may send it
        api.put_all([shop("last"), slice_of(lab, "pod3", "last")])
        api.delete("services", "shop/web")
    until(lambda: who(lab) == {"pod3"}, "the last one")
    status = agent.wait(lambda status: status.services == 1)
    assert status.conflicts == {}
    assert status.dataplane.unprogrammed == []


def test_external_ips_are_told_by_events(start: Callable[..., Served], lab: Lab, api: ApiServer) -> None:
    web, other = shop(), shop("other")
    web["spec"]["externalIPs"] = ["198.51.100.1", "192.0.2.1"]
    other["spec"] |= {"clusterIP": "10.96.7.8", "clusterIPs": ["10.96.7.8"]}
    api.put_all([web, other])
    agent = start("--external-ips-cidrs=198.51.100.0/24")
    until(lambda: api.events("ExternalIPsServed") and api.events("ExternalIPsRefused"), "both events")
    for reason, kind, said in (
        ("ExternalIPsServed", "Normal", "198.51.100.1"), ("ExternalIPsRefused", "Warning", "192.0.2.1")
    ):  # fmt: skip
        (event,) = api.events(reason)
        assert (event["regarding"]["namespace"], event["regarding"]["name"], event["type"]) == ("shop", "web", kind)
        assert said in event["note"]
    assert agent.running_status().refused_external_ips.keys() == {"shop/web"}
    del web["spec"]["externalIPs"]
    api.put(web)
    agent.wait(lambda status: not status.refused_external_ips)
