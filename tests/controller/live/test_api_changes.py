"""What a cluster does to its objects, from a real API server's stream to real connections."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybrid_proxy.workshop.lab.apiserver import ApiServer
from hybrid_proxy.workshop.lab.namespace import PATIENCE
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab
from hybrid_proxy.workshop.lab.traffic import ask_tcp
from tests.namespaces import new_lab
from tests.served import Served, fetch
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


def test_a_typo_in_an_annotation_costs_nothing_and_is_told(
    start: Callable[..., Served], lab: Lab, api: ApiServer
) -> None:
    web = shop()
    web["metadata"]["annotations"] = {"hybrid-proxy.io/slow-start": "30"}
    api.put(web)
    agent = start()
    for _ in range(2):
        until(lambda: any(one.in_use and "slow-start" in one.text for one in agent.running_status().problems), "told")
        assert agent.running_status().services == 1
        assert fetch(lab, "/healthz").status == 200
        assert "slow-start" in agent.command("status", "--admin-socket", str(agent.socket)).stdout
        agent.terminate()
        agent.start()
    until(lambda: api.events("LeftOut"), "an event")
    (event,) = api.events("LeftOut")
    assert (event["regarding"]["name"], event["type"]) == ("web", "Warning")
    assert "'30' is not a duration" in event["note"]
    assert agent.log.read_text().count("slow-start") == 3, "once in each process"


def test_names_of_a_hostile_server_do_not_reach_a_terminal(start: Callable[..., Served], api: ApiServer) -> None:
    evil = "\x1b]0;owned\x07\n17:00:00 I all is well\u202e\x9b31m"
    web, bad = shop(), shop()
    web["metadata"]["annotations"] = {"hybrid-proxy.io/probe": evil, "hybrid-proxy.io/algorithm": evil}
    web["spec"]["ports"].append({"name": evil, "port": 81})
    bad["metadata"]["name"] = evil
    bad["metadata"]["namespace"] = evil
    api.put_all([web, bad])
    agent = start()
    api.faults("endpointslices").answers.append((500, {"message": evil, "reason": evil}))
    api.cut("endpointslices")
    until(lambda: "cannot be read since" in agent.log.read_text(), "the server's message")
    said = [agent.log.read_text()]
    for command in ("status", "doctor"):
        done = agent.command(command, "--admin-socket", str(agent.socket))
        said += [done.stdout, done.stderr]
    for text in said:
        lines = text.split("\n")
        assert all(line.isprintable() for line in lines), [line for line in lines if not line.isprintable()]
        assert not any(line.startswith("17:00:00 I all") for line in lines)
    assert "owned" in said[0]
    assert "owned" in said[1]
    found = json.loads(agent.command("status", "-o", "json", "--admin-socket", str(agent.socket)).stdout)
    assert any(evil in one["key"] for one in found["problems"]), "programs get what it is"
