"""Node ports at 127.0.0.1 and ::1: what sockets of the node see, and that nobody else is served there."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hybrid_proxy.workshop.lab.traffic import ask_tcp, ask_udp

from .conftest import only_in
from .forging import Ears, Stage
from .kit import HTTP, UDP, V4, V6, Bench, Service, counted, eventually
from .packets import ACK, SYN, Header, datagram, ether, packet, read, segment
from .test_rows import target_of
from .world import STICKY

LOOPBACK = {V4: "127.0.0.1", V6: "::1"}
FIRST = 0x5EED  # sequence number of the SYNs that are sent by hand: others' SYNs have another one
LINKS = ("connect4", "connect6", "sendmsg4", "sendmsg6")


def dns(bench: Bench, *ends: str, **fields: object) -> Service:
    return bench.service(*ends, protocol="UDP", port=53, target=UDP, outside=True, **fields)


@pytest.mark.row("3.5", "localhost: datagrams show the address that was asked, connected or not")
@pytest.mark.parametrize("connected", [False, True], ids=["unconnected", "connected"])
def test_datagrams_show_the_loopback_address(bench: Bench, connected: bool, family: int) -> None:
    service = dns(bench, "pod2")
    target = target_of(bench, service, "localhost", family)
    with bench.socket("node", family, socket.SOCK_DGRAM) as client:
        if connected:
            client.connect(target)
            assert client.getpeername()[:2] == target
        for _ in range(3):
            reply, source = ask_udp(client, None if connected else target)
            assert (reply.pod, source) == ("pod2", target)


@pytest.mark.row("3.5", "localhost: a socket bound to a port, unconnected")
def test_a_socket_with_a_port_of_its_own(bench: Bench, family: int) -> None:
    service = dns(bench, "remote1")
    target = target_of(bench, service, "localhost", family)
    with bench.socket("node", family, socket.SOCK_DGRAM) as client:
        client.bind(("", 0))
        reply, source = ask_udp(client, target)
        assert (reply.pod, source) == ("remote1", target)


@pytest.mark.row("3.5", "localhost: an IPv4-mapped address")
def test_mapped_addresses(bench: Bench) -> None:
    service = bench.service("pod2", outside=True)
    with bench.lab.socket("node", V6, socket.SOCK_STREAM) as client:
        client.settimeout(20)
        client.connect(("::ffff:127.0.0.1", service.node_port))
        assert client.getpeername()[:2] == ("::ffff:127.0.0.1", service.node_port)
        assert ask_tcp(client).pod == "pod2"


@pytest.mark.row("3.5", "localhost: affinity holds over it and the other addresses")
def test_affinity_is_the_nodes(bench: Bench, mode: str, family: int) -> None:
    service = bench.service("pod2", "pod3", "remote1", outside=True, spec=STICKY, settle=False)
    target = target_of(bench, service, "localhost", family)

    def answerer(at: tuple[str, int]) -> str:
        with bench.connect("node", at, family) as client:
            assert client.getpeername()[:2] == at
            return ask_tcp(client, close=True).pod

    eventually(lambda: answerer(target), 5, "the service is not served")
    first = answerer(target)
    assert {answerer(target) for _ in range(6)} == {first}
    if mode == "ipvs":
        return  # it remembers clients for each address (docs/differences.md)
    if mode == "userspace":
        return  # there the client's address is the loopback address itself
    assert answerer(target_of(bench, service, "nodeport", family)) == first


@pytest.mark.row("3.5", "localhost: a socket that is bound to a loopback address is refused, and counted")
def test_a_bound_socket_is_refused(bench: Bench, mode: str, family: int) -> None:
    """Its packets cannot leave the node, and no hook can give it another address. A relay needs none."""
    service = bench.service("pod2", outside=True)
    target = target_of(bench, service, "localhost", family)
    before = counted(bench.agent, "socket_localhost_bound") if mode != "userspace" else 0
    with bench.lab.socket("node", family, socket.SOCK_STREAM) as client:
        client.settimeout(20)
        client.bind((LOOPBACK[family], 0))
        if mode == "userspace":
            client.connect(target)
            assert ask_tcp(client).pod == "pod2"
            return
        assert client.connect_ex(target) != 0
    assert counted(bench.agent, "socket_localhost_bound") > before
    before = counted(bench.agent, "socket_localhost")
    with bench.connect("node", target, family) as client:
        assert ask_tcp(client).pod == "pod2"
    assert counted(bench.agent, "socket_localhost") == before + 1


@pytest.mark.row("3.5", "localhost: a pod's own loopback address is its own")
def test_a_pod_keeps_its_loopback(bench: Bench, family: int) -> None:
    service = bench.service("pod2", outside=True)
    target = target_of(bench, service, "localhost", family)
    with bench.socket("pod1", family, socket.SOCK_STREAM) as client:
        assert client.connect_ex(target) == errno.ECONNREFUSED


@contextmanager
def route_localnet(bench: Bench, value: str) -> Iterator[None]:
    with bench.lab.inside("node"):
        path = Path("/proc/sys/net/ipv4/conf/eth0/route_localnet")
        path.write_text(value)
    try:
        yield
    finally:
        with bench.lab.inside("node"):
            path.write_text("0")


@pytest.mark.row("3.7", "localhost: a neighbour's packets to loopback addresses reach no backend")
@pytest.mark.parametrize("localnet", ["0", "1"], ids=["", "route_localnet"])
def test_a_neighbour_stays_out(bench: Bench, localnet: str) -> None:
    """With and without route_localnet, which a kube-proxy that worked here before leaves on."""
    services = {"tcp": bench.service("pod2", outside=True), "udp": dns(bench, "pod2")}
    node, client = bench.lab["node"], bench.lab["client"]
    with ExitStack() as stack:
        stack.enter_context(route_localnet(bench, localnet))
        ears = Ears(bench.lab, stack)
        wire = Stage(bench, {}).injector("client", stack)

        def send(source: str, target: str, kind: str, port: int) -> None:
            header = Header(source, target)
            ports = port, services[kind].node_port
            syn = segment(header, ports, FIRST, 0, SYN, b"")
            content = syn if kind == "tcp" else datagram(header, ports, b"who?")
            number = socket.IPPROTO_TCP if kind == "tcp" else socket.IPPROTO_UDP
            wire.send(ether(wire.target, wire.source, 6 if ":" in target else 4, packet(header, number, content)))

        def heard() -> set[str]:
            """What came in at the backend, and whether a connection was accepted; a relay connects only then."""
            found = set()
            for place, inward, frame in ears.captured():
                seen = read(frame[14:])
                if seen and inward and place == "pod2" and seen.target[1] == UDP:
                    found.add("udp")
                elif seen and inward and place == "pod2" and seen.target[1] == HTTP:
                    found |= {"tcp"} if (seen.flags, seen.sequence) == (SYN, FIRST) else set()
                elif seen and place == "client" and seen.source[1] == services["tcp"].node_port:
                    found |= {"tcp"} if (seen.flags, seen.acknowledged) == (SYN | ACK, FIRST + 1) else set()
            return found

        for family in (V4, V6):
            for kind in services:
                for source in (client.address(family), node.address(family), LOOPBACK[family]):
                    send(source, LOOPBACK[family], kind, 20_001)
        assert not heard(), "a neighbour's packet to a loopback address got to a backend"
        for family in (V4, V6):
            for kind in services:
                send(client.address(family), node.address(family), kind, 20_002)
        assert heard() == {"tcp", "udp"}, "the same packets to the node's own address do not get there"


@pytest.mark.row("3.5", "localhost: programs that others take away come back")
@only_in("nftables", "iptables", "ipvs")
def test_programs_that_others_remove_come_back(bench: Bench, mode: str) -> None:
    service = bench.service("pod2", outside=True)
    target = target_of(bench, service, "localhost", V4)
    folder = next(Path("/sys/fs/bpf/hybrid-proxy").glob(f"{own_folder(bench)}/localhost-{mode}"))
    before = bench.agent.running_status().dataplane.audit_repairs
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"link_{name}" for name in LINKS)
    (folder / "link_connect4").unlink()
    eventually((folder / "link_connect4").exists, 5, "the link's pin does not come back")
    with bench.connect("node", target, V4) as client:
        assert ask_tcp(client).pod == "pod2"
    assert bench.agent.running_status().dataplane.audit_repairs > before


def own_folder(bench: Bench) -> str:
    """The folder of the lab's pins, by its node's network namespace."""
    from hybrid_proxy.dataplane.kernel.host_paths import netns_number

    with bench.lab.inside("node"):
        return f"netns-{netns_number()}"
