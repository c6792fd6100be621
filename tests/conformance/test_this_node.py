"""What is said of this node is missing or wrong, and what the node itself has of a Service.

Every answer to a client is as if all were well. `status` says what is wrong.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from hybrid_proxy.controller.commands.status import Verdict, verdict
from hybrid_proxy.controller.semantics.explain import Explainer, Packet
from hybrid_proxy.controller.serving.memory import changes_path, read_changes
from hybrid_proxy.workshop.lab.examples import node_manifest
from hybrid_proxy.workshop.lab.network import Lab

from .cases import node, own
from .conftest import bench_of, every_mode_but, new_lab, route_services, serve
from .kit import V4, V6, Bench, Service, eventually
from .probes import SILENT, Probe, To, observe, sight, volley
from .test_rows import target_of
from .world import UNALLOCATED, table_of

STREAM = socket.SOCK_STREAM
Json = dict[str, Any]
ANOTHER_HOSTS = ("192.168.77.3", "fd77::3")
TRANSLATED = ("203.0.113.9", "2001:db8::9")  # outside, to this node
LOCAL = {"externalTrafficPolicy": "Local"}
RANGES = ("0.0.0.0/0", "::/0", "10.0.0.0/8", "fd00::/8", "192.168.77.0/31", "fd77::/127")


@pytest.fixture(scope="module")
def field() -> Iterator[Lab]:
    with new_lab(2, 1) as made:
        route_services(made)
        serve(made)
        yield made


@pytest.fixture(scope="module")
def here(field: Lab, mode: str) -> Iterator[tuple[Bench, dict[str, Service]]]:
    """An agent that knows pods by the Node's podCIDRs, and services whose backends are at all sorts of places."""
    bench = bench_of(field, mode, ("--detect-local-mode=NodeCIDR",))
    plans = {"far": ("remote1", {}), "near": ("pod2", {}), "self": ("pod1", {}), "away": ("remote1", LOCAL)}
    made = {
        name: bench.service(pod, settle=False, spec=spec, outside=True, title=name)
        for name, (pod, spec) in plans.items()
    }
    bench.agent.start()
    yield bench, made
    bench.agent.end()
    for path in bench.agent.manifests.iterdir():
        path.unlink()


def addresses(*texts: str, kind: str = "InternalIP") -> Callable[[Json], None]:
    def change(node: Json) -> None:
        node["status"]["addresses"] = [{"type": kind, "address": text} for text in texts]

    return change


def without(*path: str) -> Callable[[Json], None]:
    def change(node: Json) -> None:
        for name in path[:-1]:
            node = node[name]
        del node[path[-1]]

    return change


def deleted(node: Json) -> None:
    node["metadata"]["name"] = "another"


# What becomes of the Node object, whether `status` tells of it, and whether a first agent serves with that as well.
STATES = [
    pytest.param(deleted, True, True, id="deleted"),
    pytest.param(without("status"), True, False, id="registered-anew-without-status"),
    pytest.param(addresses("lab-node", kind="Hostname"), True, False, id="only-a-hostname"),
    pytest.param(addresses("192.168.77.2"), True, True, id="IPv4-alone"),
    pytest.param(addresses("fd77::2"), True, False, id="IPv6-alone"),
    pytest.param(addresses(*ANOTHER_HOSTS), True, True, id="another-hosts-addresses"),
    pytest.param(addresses(*TRANSLATED), True, False, id="behind-1-to-1-NAT"),
    pytest.param(addresses("fd77::2", "192.168.77.2"), False, False, id="in-the-other-order"),
    pytest.param(without("spec", "podCIDRs"), True, False, id="no-podCIDRs"),
    pytest.param(without("metadata", "labels"), True, False, id="no-zone"),
]  # fmt: skip


def write(bench: Bench, change: Callable[[Json], None] | None = None, cidrs: tuple[str, ...] = ()) -> None:
    """The Node and the ranges of services, changed."""
    known = json.loads(node_manifest(bench.lab))
    if change:
        change(known["items"][0])
    known["items"][1]["spec"]["cidrs"] += cidrs
    draft = bench.agent.manifests / ".node.draft"
    draft.write_text(json.dumps(known))
    draft.replace(bench.agent.manifests / "node.json")


@contextmanager
def said_of_this_node(bench: Bench, told: bool, **changes: Any) -> Iterator[None]:
    write(bench, **changes)
    status = bench.agent.wait(lambda status: status.synced and bool(status.node_faults) is told, what="told")
    assert (verdict(status) is not Verdict.OK) is told
    path, faults = changes_path(str(bench.agent.socket)), set(status.node_faults)
    eventually(lambda: faults <= {row.what for row in read_changes(path)}, 5, "no change tells of it")
    try:
        yield
    finally:
        if bench.agent.running():
            write(bench)
            bench.agent.wait(lambda status: status.synced and not status.node_faults, what="well")
            over = {f"is over: {fault}" for fault in faults}
            eventually(lambda: over <= {row.what for row in read_changes(path)}, 5, "no change tells that it is over")


def serves(bench: Bench, services: dict[str, Service]) -> None:
    """Whatever depends on what is known of the node."""
    questions = [
        ("client", "far", "nodeport", node("remote1")), ("client", "near", "lb", node("pod2")),
        ("client", "far", "cluster", node("remote1")), ("pod1", "self", "cluster", node("pod1")),
        ("pod1", "far", "nodeport", node("remote1")), ("pod1", "away", "lb", own("remote1")),
        ("pod1", "near", "cluster", own("pod2")), ("node", "far", "nodeport", node("remote1")),
    ]  # fmt: skip
    wanted = [
        (Probe(place, target_of(bench, services[name], way, family), STREAM), want)
        for (place, name, way, want), family in itertools.product(questions, (V4, V6))
    ]

    def wrong() -> str:
        answers = volley(bench, [probe for probe, _ in wanted], wait=2.5)
        seen = [sight(bench, probe.place, [answer]) for (probe, _), answer in zip(wanted, answers, strict=True)]
        return "\n".join(
            f"{probe.place} to {probe.target}: want {want}, see {found}"
            for (probe, want), found in zip(wanted, seen, strict=True)
            if not found.is_(want, probe.place)
        )

    eventually(lambda: not wrong(), 10, wrong)


@pytest.mark.row("1.11", "the Node object is gone, or says nothing or something wrong: what serves goes on")
@pytest.mark.parametrize(("change", "told", "_first"), STATES)
def test_what_the_node_object_lacks(
    here: tuple[Bench, dict[str, Service]], change: Callable[[Json], None], told: bool, _first: bool
) -> None:
    bench, services = here
    with said_of_this_node(bench, told, change=change):
        serves(bench, services)


# What an agent knows at its start is the same in every mode: here by programs, and by rules.
@every_mode_but("iptables", "userspace")
@pytest.mark.row("1.11", "the Node object is gone, or says nothing or something wrong: what serves goes on")
@pytest.mark.parametrize("change", [pytest.param(one.values[0], id=one.id) for one in STATES if one.values[2]])
def test_an_agent_that_starts_without_the_node_object(
    here: tuple[Bench, dict[str, Service]], change: Callable[[Json], None]
) -> None:
    """One that knows the node from an agent before it, and one that does not."""
    bench, services = here
    agent, flags = bench.agent, bench.agent.flags
    for first in (False, True):
        agent.terminate()
        if first:
            assert agent.cleanup().returncode == 0
            agent.flags = ()  # nobody could know the podCIDRs
        write(bench, change)
        agent.start()
        try:
            assert first or agent.running_status().node_faults
            serves(bench, services)
        finally:
            agent.flags = flags
            write(bench)
    agent.terminate()
    agent.start()
    assert not agent.running_status().node_faults


@pytest.mark.row("1.12", "a service range that contains pods, nodes or the gateway is not believed")
def test_service_ranges_that_contain_other_addresses(here: tuple[Bench, dict[str, Service]]) -> None:
    bench, services = here
    with said_of_this_node(bench, True, cidrs=RANGES):
        assert len(bench.agent.running_status().node_faults) == len(RANGES)
        serves(bench, services)
        for family in (V4, V6):
            probe = Probe("pod1", (UNALLOCATED[family != V4], 80), STREAM)
            assert observe(bench, probe, SILENT).is_(SILENT, "pod1"), "the right range is not believed any more"


@contextmanager
def carried(bench: Bench, device: str, *addresses: str) -> Iterator[None]:
    """A device of the node, made for that unless it is there, has these addresses."""
    link, made = bench.lab.netlink("node"), not bench.lab.netlink("node").link_lookup(ifname=device)
    if made:
        link.link("add", ifname=device, kind="bridge", state="up")  # where a kernel has no dummies, too
    index = link.link_lookup(ifname=device)[0]
    for address in addresses:
        link.addr("add", index=index, address=address, prefixlen=128 if ":" in address else 32, flags=0x02)
    try:
        yield
    finally:
        for address in addresses:
            link.addr("delete", index=index, address=address, prefixlen=128 if ":" in address else 32)
        if made:
            link.link("del", index=index)


@pytest.mark.row("1.13", "a ClusterIP that an interface of the node has is the node's own (NodeLocal DNSCache)")
def test_a_cluster_ip_that_the_node_has(here: tuple[Bench, dict[str, Service]]) -> None:
    """It comes and goes while everything runs. Load-balancer IPs that the node announces are served all the while."""
    bench, services = here
    agent, cached, announced = bench.agent, services["near"], services["far"]
    own_ips = [cached.address(family) for family in (V4, V6)]
    vips = [announced.load_balancer_ip(family) for family in (V4, V6)]
    with carried(bench, "lo", *vips):
        with carried(bench, "nodelocaldns", *own_ips, "169.254.20.10"):
            found = agent.wait(lambda status: status.synced and len(status.left_to_node) == 2, what="told")
            assert found.left_to_node == dict.fromkeys(own_ips, f"conformance/{cached.name}")
            assert (verdict(found), sorted(found.unheard)) == (Verdict.DEGRADED, sorted(own_ips))
            for (place, family), target in itertools.product(
                itertools.product(("pod1", "node"), (V4, V6)), ("cluster", "lb", "nodeport")
            ):
                probe = Probe(place, target_of(bench, cached, target, family), STREAM)
                if target == "cluster":
                    reaches_the_node(bench, probe, own_ips)
                else:
                    assert observe(bench, probe, anybody("pod2")).is_(anybody("pod2"), place), probe
            serves_announced(bench, announced)
            for family in (V4, V6):
                probe = Probe("pod1", (UNALLOCATED[family != V4], 80), STREAM)
                assert observe(bench, probe, SILENT).is_(SILENT, "pod1")
        agent.wait(lambda status: status.synced and not status.left_to_node, what="as before")
        serves_announced(bench, announced)
    serves(bench, services)


def reaches_the_node(bench: Bench, probe: Probe, own_ips: list[str]) -> None:
    """What listens there gets the connection, and `explain` says so."""
    with bench.lab.socket("node", probe.family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(probe.target)
        listener.listen()
        listener.settimeout(10)
        assert probe.target[0] not in bench.agent.status().unheard
        with bench.connect(probe.place, probe.target, probe.family) as client:
            accepted, peer = listener.accept()
            accepted.close()
            assert peer[:2] == client.getsockname()[:2]
    table = table_of(replace(bench, node_addresses=(*bench.node_addresses, *own_ips)), bench.agent)
    found = Explainer(table).explain(Packet("", bench.lab[probe.place].address(probe.family), *probe.target, "tcp"))
    assert (found.verdict, table.left_to_node.keys()) == ("untouched", set(own_ips))


def serves_announced(bench: Bench, announced: Service) -> None:
    for (place, kind), family in itertools.product((("client", "lb"), ("pod1", "lb"), ("node", "lb")), (V4, V6)):
        probe = Probe(place, target_of(bench, announced, kind, family), STREAM)
        assert observe(bench, probe, anybody("remote1")).is_(anybody("remote1"), place), probe


def anybody(pod: str) -> To:
    """The pod answers. Where an interface has no address, netfilter masquerades to one of loopback's."""
    return To(frozenset({pod}), "any")
