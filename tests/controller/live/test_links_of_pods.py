"""What the agent says of the links of pods, and of what somebody takes away from the node."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from hybrid_proxy.controller.agent.answers import NEW_SECONDS
from hybrid_proxy.controller.semantics.history import GONE
from hybrid_proxy.controller.serving.memory import changes_path, read_changes
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from tests.conformance.kit import node_manifest
from tests.namespaces import new_lab
from tests.switching import works
from tests.waiting import until

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with new_lab("k", 1) as lab:
        works("nftables", lab)
        (lab.folder / "manifests").mkdir(exist_ok=True)
        (lab.folder / "manifests" / "node.json").write_text(node_manifest(lab))
        ip(lab, "address", "add", "198.51.100.9/24", "dev", "eth0")
        made = Agent(lab, lab.folder / "manifests", "nftables")
        with made.serving():
            yield made


def ip(lab: Lab, *words: str) -> None:
    assert lab.run("node", ["ip", *words]).returncode == 0


def remembered(agent: Agent) -> list[str]:
    return [row.what for row in read_changes(changes_path(str(agent.socket)))]


def test_a_link_that_is_new_is_no_trouble_until_it_stays_down(agent: Agent) -> None:
    lab = agent.lab
    began = time.monotonic()
    ip(lab, "link", "add", "new", "type", "veth", "peer", "name", "eth9", "netns", str(lab["pod1"].namespace))
    try:
        while (status := agent.running_status()) and time.monotonic() - began < NEW_SECONDS:  # it may answer late
            assert status.down == []
        agent.wait(lambda status: status.down == ["new"])
    finally:
        ip(lab, "link", "del", "new")
    agent.wait(lambda status: not status.down)


def test_an_uplink_that_is_down_is_not_the_link_of_a_pod(agent: Agent) -> None:
    """Its default route, by which it was known, is gone with it."""
    routes = agent.lab.run("node", ["ip", "route", "show", "dev", "eth0"]).stdout.splitlines()
    ip(agent.lab, "link", "set", "eth0", "down")
    try:
        until(lambda: "link eth0: up → down" in remembered(agent), "it is seen")
        advice = "eth0 is down, and what led by it is gone: `ip link set eth0 up`"
        until(lambda: advice in remembered(agent), "so is what puts it right")
        time.sleep(NEW_SECONDS + 1)
        status = agent.running_status()
        assert (status.down, status.cut, status.lost_routes) == ([], ["eth0"], [])
        assert not [each for each in remembered(agent) if each.endswith(GONE)]
        found = json.loads(agent.command("doctor", "--admin-socket", str(agent.socket), "-o", "json").stdout)
        assert not [each for each in found["findings"] if each["cause"] == "link-down"], found
        told = [each["text"] for each in found["findings"] if each["cause"] == "address-lost"]
        assert told == ["eth0 is down, and what led by it is gone"], found
    finally:
        ip(agent.lab, "link", "set", "eth0", "up")
        agent.wait(lambda status: not status.cut)
        back = "`ip route add 0.0.0.0/0 via 192.168.77.1 dev eth0` puts it back"
        until(lambda: any(back in each for each in remembered(agent)), "what did not come back is gone")
        for line in routes:
            ip(agent.lab, "route", "replace", *line.split(), "dev", "eth0")
    assert not [each for each in remembered(agent) if each.startswith("address 192.168.77.2/24 ")], "it stayed"


def test_changes_have_a_route_to_a_pod_that_is_gone(agent: Agent) -> None:
    lab, pod = agent.lab, agent.lab["pod1"]
    route = [f"{pod.address4}/32", "dev", pod.interface]
    time.sleep(2)  # it is remembered as it is
    ip(lab, "route", "del", *route)
    route_of = f"route to {pod.address4} by {pod.interface}"
    try:
        until(lambda: f"{route_of} removed" in remembered(agent), "it is written down")
    finally:
        ip(lab, "route", "add", *route)
    until(lambda: f"{route_of} added" in remembered(agent), "so is that it is back")
    assert f" W {route_of} removed\n" in agent.log.read_text()
    assert f" I {route_of} added\n" in agent.log.read_text()


def test_changes_say_what_is_gone_and_then_what_puts_it_back(agent: Agent) -> None:
    """Which an address does not need that was there for a moment."""
    ip(agent.lab, "address", "del", "198.51.100.9/24", "dev", "eth0")
    command = "`ip address add 198.51.100.9/24 dev eth0`"
    what = f"address 198.51.100.9/24 dev eth0 is gone: {command} puts it back"
    until(lambda: what in remembered(agent), "it is written down")
    assert f" W {what}\n" in agent.log.read_text()
    ip(agent.lab, "address", "add", "198.51.100.9/24", "dev", "eth0")
    came = "address 198.51.100.9/24 dev eth0 came"
    until(lambda: came in remembered(agent), "the same is written down of what comes, and comes back")
    ip(agent.lab, "address", "del", "198.51.100.9/24", "dev", "eth0")
    until(lambda: remembered(agent)[-1] == "address 198.51.100.9/24 dev eth0 is gone", "without a hint")
    twice = [
        each for each in remembered(agent) if each.startswith("address ") and each.endswith((" added", " removed"))
    ]
    assert not twice
