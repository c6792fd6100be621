"""Agents with other flags: masqueradeAll, the mark's bit, how pods are matched, where node ports are served."""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybrid_proxy.controller.semantics.explain import Explainer, Packet
from hybrid_proxy.controller.serving.memory import memory_path
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab

from .cases import node, own
from .conftest import bench_of, new_lab, only_in, route_services, serve
from .kit import PATIENCE, V4, V6, Bench, Service, eventually
from .probes import Probe, To, observe
from .test_other_proxies import CNI, run
from .test_rows import target_of
from .world import SECOND, table_of

STREAM = 1  # SOCK_STREAM
FAMILIES = {"v4": V4, "v6": V6}
THIRD = ("192.168.77.33", "fd77::33")
LOCAL = {"externalTrafficPolicy": "Local"}
SUBNETS = "192.168.77.16/28,fd77::20/124"  # SECOND, and not the primary addresses
MORE = "192.168.77.0/24,fd77::/64"


@pytest.fixture(scope="module")
def field(mode: str) -> Iterator[Lab]:
    """A smaller lab, whose agent changes with every setting: each takes over from the one before, which was killed."""
    with new_lab(2, 1) as made:
        route_services(made)
        for place in made.places:
            with made.inside(place):
                Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 0")
        serve(made, SECOND)
        yield made
        cleaned = Agent(made, made.folder / "manifests", mode).cleanup()
        assert cleaned.returncode == 0, cleaned.stderr


@contextmanager
def agent_with(field: Lab, mode: str, *flags: str) -> Iterator[tuple[Bench, dict[str, Service]]]:
    """The same as `next_agent`, with its dataplane removed at the end."""
    with next_agent(field, mode, *flags) as (bench, services):
        try:
            yield bench, services
        finally:
            if bench.agent.running():
                bench.agent.kill()
            cleaned = bench.agent.cleanup()
            assert cleaned.returncode == 0, cleaned.stderr


@contextmanager
def next_agent(field: Lab, mode: str, *flags: str) -> Iterator[tuple[Bench, dict[str, Service]]]:
    """An agent of that mode with these flags, later ones win, and four services; its dataplane stays when it ends."""
    bench = bench_of(field, mode, flags, pod_cidrs=flags != NO_CIDR)
    agent = bench.agent
    memory_path(str(agent.socket)).unlink(missing_ok=True)  # what a Node said last counts, also for the next agent
    plans = {"far": ("remote1", {}), "near": ("pod2", {}), "local": ("pod2", LOCAL), "away": ("remote1", LOCAL)}
    made = {}
    for name, (pod, spec) in plans.items():
        made[name] = bench.service(pod, settle=False, spec=spec, outside=True, title=name)
    try:
        agent.start()
        yield bench, made
    finally:
        if agent.running():
            agent.kill()
        for path in agent.manifests.iterdir():
            path.unlink()


# Setting -> flags, and for each question (place, service, way) the answer.
NO_CIDR = ("--detect-local-mode=NodeCIDR", "--v=0")  # of a node that has none
PREFIX = ("--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=veth")
BRIDGE = ("--detect-local-mode=BridgeInterface", "--pod-bridge-interface=veth1")
NODE_CIDR = ("--detect-local-mode=NodeCIDR",)
SETTINGS: dict[str, tuple[str, str, tuple[str, ...], list[tuple[str, str, str, To | str, str | None]]]] = {
    "masquerade-all": ("2.5", "masqueradeAll: pods are masqueraded at ClusterIPs", ("--masquerade-all",), [
        ("pod1", "far", "cluster", node("remote1"), None), ("node", "far", "cluster", node("remote1"), None),
        ("client", "local", "lb", own("pod2"), None),
    ]),
    "no-detection": ("2.4", "no CIDR: nobody is a pod", NO_CIDR, [
        ("pod1", "far", "cluster", own("remote1"), None), ("client", "near", "cluster", own("pod2"), None),
        ("pod1", "away", "lb", "silent", None), ("node", "away", "lb", node("remote1"), None),
        ("pod1", "far", "nodeport", node("remote1"), None),
    ]),
    "node-cidr": ("2.4", "NodeCIDR: only this node's pods are pods", NODE_CIDR, [
        ("pod1", "far", "cluster", own("remote1"), None), ("remote1", "near", "cluster", node("pod2"), None),
        ("pod1", "away", "lb", own("remote1"), None), ("remote1", "away", "lb", "silent", None),
    ]),
    "interface-prefix": ("2.4", "InterfaceNamePrefix: what comes from such an interface is a pod", PREFIX, [
        ("pod1", "far", "cluster", own("remote1"), "pod"), ("remote1", "near", "cluster", node("pod2"), "external"),
        ("pod2", "away", "lb", own("remote1"), "pod"), ("client", "far", "cluster", node("remote1"), "external"),
    ]),
    "bridge-interface": ("2.4", "BridgeInterface: what comes from this interface is a pod", BRIDGE, [
        ("pod1", "far", "cluster", own("remote1"), "pod"), ("pod2", "far", "cluster", node("remote1"), "external"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=pytest.mark.row(*SETTINGS[name][:2])) for name in SETTINGS]
)
def test_who_is_a_pod_and_who_is_masqueraded(field: Lab, mode: str, setting: str) -> None:
    flags, questions = SETTINGS[setting][2:]
    with next_agent(field, mode, *flags) as (bench, services):
        table = table_of(bench, bench.agent)
        for (place, name, way, want, given), family in itertools.product(questions, (V4, V6)):
            target = target_of(bench, services[name], way, family)
            found = Explainer(table).explain(Packet("", field[place].address(family), *target, "tcp", given))  # type: ignore[arg-type]
            assert found.verdict == ("dnat" if isinstance(want, To) else "drop"), found
            assert not isinstance(want, To) or found.masquerade == (want.peer == "node"), found
            seen = observe(bench, Probe(place, target, STREAM), want)  # type: ignore[arg-type]
            assert seen.is_(want, place), f"{place} to {name} at {way}: want {want}, see {seen}"  # type: ignore[arg-type]


@pytest.mark.row("2.16", "another bit of the mark")
def test_another_masquerade_bit(field: Lab, mode: str) -> None:
    """The default's bit is somebody else's then: it stays set on what passes, and ours is nowhere to be seen."""
    rules = CNI.replace("0x10000", "0x4000").replace("meta mark and 0x4000 != 0 counter name kept",
                                                        "meta mark and 0x100000 != 0 counter name kept")  # fmt: skip
    with next_agent(field, mode, "--iptables-masquerade-bit=20") as (bench, services):
        run(bench, "nft", rules)
        name, want = ("local", own("pod2")) if mode == "ebpf" else ("far", node("remote1"))  # see test_other_proxies
        try:
            for family in (V4, V6):
                probe = Probe("client", target_of(bench, services[name], "nodeport", family), STREAM)
                assert observe(bench, probe, want).is_(want, "client")
            counters = run(bench, "nft", "list", "counters", "table", "inet", "cni")
        finally:
            run(bench, "nft", "delete", "table", "inet", "cni")
    packets = {part.split()[0]: int(part.split("packets ")[1].split()[0]) for part in counters.split("counter ")[1:]}
    assert packets["seen"] > 0
    assert packets["kept"] == 0, "our mark leaves the node"
    assert packets["lost"] == 0, "the mark of somebody else was lost"


@pytest.mark.row("1.10", "external IPs: those that an allow-list names, and no others")
def test_external_ips_that_are_allowed(field: Lab, mode: str) -> None:
    """`near` has an address outside of the ranges. Whoever has that address keeps it."""
    bench = bench_of(field, mode)
    allowed = Service(bench, 1, ())
    ranges = ",".join(f"{allowed.external_ip(family)}/{32 if family == V4 else 128}" for family in (V4, V6))
    flags = (f"--external-ips-cidrs={ranges}", "--external-ips-namespaces=conformance,1st")
    with next_agent(field, mode, *flags) as (bench, services):
        table = table_of(bench, bench.agent)
        refused = bench.agent.running_status().refused_external_ips
        assert services["far"].number == allowed.number
        assert refused.keys() == {f"conformance/{name}" for name in ("near", "local", "away")}
        for place, family in itertools.product(("client", "pod1", "node"), (V4, V6)):
            target = target_of(bench, services["far"], "external", family)
            seen = observe(bench, Probe(place, target, STREAM), node("remote1"))
            assert seen.is_(node("remote1"), place), f"{place}: {seen}"
            address, port = target_of(bench, services["near"], "external", family)
            assert any(address in message for message in refused["conformance/near"])
            packet = Packet("", field[place].address(family), address, port, "tcp")
            assert Explainer(table).explain(packet).verdict == "untouched"
        for family in (V4, V6):
            address, port = target_of(bench, services["near"], "external", family)
            link = field.netlink("client")
            index = link.link_lookup(ifname="eth0")[0]
            with field.inside("client"):
                listener = socket.socket(family, STREAM)
                link.addr("add", index=index, address=address, prefixlen=32 if family == V4 else 128, flags=0x02)
                listener.bind((address, port))
                listener.listen()
            with listener, bench.connect("pod1", (address, port), family) as connection:
                accepted, _ = listener.accept()
                accepted.close()
                assert connection.recv(1) == b"", "the host that has the address answers"


@pytest.mark.row("3.2", "nodePortAddresses: only addresses in the CIDRs")
def test_node_ports_only_at_the_chosen_addresses(field: Lab, mode: str) -> None:
    with next_agent(field, mode, f"--nodeport-addresses={SUBNETS}") as (bench, services):
        for family in (V4, V6):
            port = services["far"].node_port
            probe = Probe("client", (SECOND[family != V4], port), STREAM)
            seen = observe(bench, probe, node("remote1"))
            assert seen.is_(node("remote1"), "client"), seen
            other = Probe("client", (field["node"].address(family), services["near"].node_port), STREAM)
            assert observe(bench, other, "refused").is_("refused", "client"), "served at an address that is excluded"
            at_loopback = Probe("node", target_of(bench, services["far"], "localhost", family), STREAM)
            seen = observe(bench, at_loopback, own("loopback"))
            assert seen.is_(own("loopback"), "node"), f"served at a loopback address that is excluded: {seen}"


@pytest.mark.row("3.4", "nodePortAddresses: keywords and CIDRs in any mix")
def test_node_ports_at_addresses_by_keyword_and_by_cidr(field: Lab, mode: str) -> None:
    with next_agent(field, mode, f"--nodeport-addresses=localhost,{SUBNETS},primary") as (bench, services):
        for family in (V4, V6):
            for address in (SECOND[family != V4], field["node"].address(family)):
                seen = observe(bench, Probe("client", (address, services["far"].node_port), STREAM), node("remote1"))
                assert seen.is_(node("remote1"), "client"), (address, seen)
            at_loopback = Probe("node", target_of(bench, services["far"], "localhost", family), STREAM)
            seen = observe(bench, at_loopback, node("remote1"))
            assert seen.is_(node("remote1"), "node"), f"not served at the loopback address: {seen}"


@pytest.mark.core(long=True)
@pytest.mark.row("3.9", "no endpoints: at an address that is excluded the node's own port is left alone")
def test_an_excluded_address_refuses_for_no_service(field: Lab, mode: str) -> None:
    """A process of the node listens there: a refusal would be ours."""
    with next_agent(field, mode, f"--nodeport-addresses={SUBNETS}") as (bench, services):
        services["far"].empty()
        table = table_of(bench, bench.agent)
        for family in (V4, V6):
            served = Probe("client", (SECOND[family != V4], services["far"].node_port), STREAM)
            eventually(
                lambda served=served: observe(bench, served, "refused").is_("refused", "client"),
                5, "the service has no endpoints, and its node port does not refuse",
            )  # fmt: skip
            target = target_of(bench, services["far"], "nodeport", family)
            for place in ("client", "pod1", "node"):
                assert (
                    Explainer(table).explain(Packet("", field[place].address(family), *target, "tcp")).verdict
                    == "untouched"
                )
                seen = observe(bench, Probe(place, target, STREAM), own("node"))
                assert seen.is_(own("node"), place), f"{place}: {seen}"


@pytest.mark.row("3.10", "an address that the node gets later serves at once")
def test_addresses_that_come_later_serve(field: Lab, mode: str) -> None:
    link = field.netlink("node")
    index = link.link_lookup(ifname="eth0")[0]
    with next_agent(field, mode, f"--nodeport-addresses={MORE}") as (bench, services):
        try:
            for address, length in zip(THIRD, (24, 64), strict=True):
                link.addr("add", index=index, address=address, prefixlen=length, flags=0x02)
            for family in (V4, V6):
                probe = Probe("client", (THIRD[family != V4], services["near"].node_port), STREAM)
                want = node("pod2")
                bench.node_addresses = (*bench.node_addresses, *THIRD)
                eventually(
                    lambda probe=probe, want=want: observe(bench, probe, want).is_(want, "client"),
                    5, f"{THIRD[family != V4]} does not serve",
                )  # fmt: skip
        finally:
            for address, length in zip(THIRD, (24, 64), strict=True):
                link.addr("delete", index=index, address=address, prefixlen=length)


@only_in("ebpf")
def test_pings_are_answered_where_the_setting_says_so(field: Lab, mode: str) -> None:
    with next_agent(field, mode, "--answer-ping") as (bench, made):
        bench.settle(made["near"], {"pod2"}, V4)
        for place, family in itertools.product(("pod1", "client", "node"), FAMILIES.values()):
            data = ping(bench, place, made["near"].address(family), family)
            assert data == b"how are you?" * 20, "what was asked comes back"


def ping(bench: Bench, place: str, address: str, family: int) -> bytes:
    """The data of an echo reply (RFC 792, RFC 4443); checksums are the kernel's to look at."""
    protocol = socket.IPPROTO_ICMP if family == V4 else socket.IPPROTO_ICMPV6
    with bench.lab.socket(place, family, socket.SOCK_DGRAM, protocol) as client:  # a ping socket, icmp(7)
        client.settimeout(10 * PATIENCE)
        client.sendto(
            struct.pack("!BBHHH", 8 if family == V4 else 128, 0, 0, 0, 1) + b"how are you?" * 20, (address, 0)
        )
        data, source = client.recvfrom(2048)
    assert source[0] == address
    assert data[0] == (0 if family == V4 else 129)
    return data[8:]
