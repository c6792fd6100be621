"""What a client sees of a ClusterIP: who answers, from where, and what happens when nobody can."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from functools import partial

import pytest

from hybrid_proxy.workshop.lab.network import MTU, Lab
from hybrid_proxy.workshop.lab.traffic import ask_tcp, ask_udp, download
from tests.waiting import slowness

from .kit import (
    HTTP,
    PATIENCE,
    SECOND_HTTP,
    UDP,
    V4,
    V6,
    Bench,
    End,
    Service,
    chi_square,
    eventually,
    forget_path_mtus,
    refused,
)

CHI_SQUARE_2 = 27.6  # 3 pods: an even spread exceeds this once in a million runs


@pytest.fixture(scope="module")
def web(bench: Bench) -> Service:
    return bench.service("pod2", "pod3", "pod4")


@pytest.fixture(scope="module")
def dns(bench: Bench) -> Service:
    return bench.service("pod2", "pod3", "pod4", protocol="UDP", port=53, target=UDP)


@pytest.fixture(scope="module")
def empty(bench: Bench) -> Service:
    return emptied(bench)


@pytest.fixture(scope="module")
def empty_dns(bench: Bench) -> Service:
    return emptied(bench, protocol="UDP", port=53, target=UDP)


def emptied(bench: Bench, **fields: object) -> Service:
    made = bench.service(**fields)
    for family in (V4, V6):
        eventually(lambda family=family: refused(bench, "pod1", made, family), 8, "an empty service is not refused")
    return made


# 2.1: spread


@pytest.mark.core(long=True)
@pytest.mark.row("2.1", "ClusterIP: every backend gets its share")
@pytest.mark.parametrize("place", ["pod1", "node"])
@pytest.mark.parametrize("kind", ["web", "dns"])
def test_every_backend_gets_its_share(
    bench: Bench, request: pytest.FixtureRequest, kind: str, place: str, family: int
) -> None:
    service = request.getfixturevalue(kind)
    seen = bench.spread(place, service, family, 120)
    assert set(seen) == {"pod2", "pod3", "pod4"}
    assert chi_square(seen, ["pod2", "pod3", "pod4"]) < CHI_SQUARE_2, seen


# 2.3 and 2.19: refusal


@pytest.mark.row("2.3", "refused in less than 100 ms")
@pytest.mark.parametrize("place", ["pod1", "node"])
@pytest.mark.parametrize("kind", ["empty", "empty_dns"])
def test_no_endpoints_is_refused_at_once(
    bench: Bench, request: pytest.FixtureRequest, kind: str, place: str, family: int
) -> None:
    service = request.getfixturevalue(kind)
    waited = sorted(bench.refusal(place, service, family) for _ in range(5))
    assert waited[2] < 0.1, f"the middle one of five refusals took {waited[2] * 1000:.0f} ms"


@pytest.mark.row("2.19", "an unknown port is refused in less than 100 ms")
@pytest.mark.parametrize("place", ["pod1", "node"])
def test_unknown_port_of_a_cluster_ip_is_refused_at_once(bench: Bench, web: Service, place: str, family: int) -> None:
    waited = sorted(bench.refusal(place, web, family, port=81) for _ in range(5))
    assert waited[2] < 0.1, f"the middle one of five refusals took {waited[2] * 1000:.0f} ms"


def test_refusals_do_not_break_the_service_beside(bench: Bench, web: Service, empty: Service, family: int) -> None:
    for _ in range(10):
        bench.refusal("pod1", empty, family)
        bench.ask("pod1", web, family)


# 2.15: session affinity

PODS = ["pod1", "pod2", "pod3", "pod4", "pod5"]


def sticky(bench: Bench, seconds: int) -> Service:
    spec = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}}
    made = bench.service("remote1", "remote2", "pod2", settle=False, spec=spec)
    for family in (V4, V6):
        eventually(
            lambda family=family: bench.ask("pod5", made, family, timeout=1.0), 8, "a sticky service does not answer"
        )
    return made


@pytest.mark.row("2.15", "clients are independent of each other")
def test_clients_are_independent_of_each_other(bench: Bench, family: int) -> None:
    """All five clients at one backend of three, in each of three services: less than once in 500,000 runs."""
    chosen = []
    for _ in range(3):
        service = sticky(bench, 10800)
        chosen.append({bench.ask(place, service, family).pod for place in PODS})
    assert max(map(len, chosen)) > 1, "every client went to the same backend"


@pytest.mark.row("2.15", "affinity lasts while it is used and ends when idle")
def test_affinity_lasts_while_it_is_used_and_ends_when_idle(bench: Bench, mode: str) -> None:
    seconds = round(2 * PATIENCE * slowness())  # a round of questions must take less
    service = sticky(bench, seconds)

    def backends() -> dict[int, list[str]]:
        return {family: [bench.ask(place, service, family).pod for place in PODS] for family in (V4, V6)}

    first = backends()
    for _ in range(4):  # longer than that in all, never idle for so long
        time.sleep(0.4 * seconds)
        assert backends() == first
    if mode == "ipvs":
        return  # the kernel keeps it as long as it remembers a connection, minutes (docs/differences.md)
    stayed = {V4, V6}
    for _ in range(4):  # five clients choose anew among three backends: all the same four times is 1 in 3 billion
        time.sleep(1.3 * seconds)
        now = backends()
        stayed = {family for family in stayed if now[family] == first[family]}
        if not stayed:
            return
    pytest.fail(f"no client moved although all were idle for longer than the timeout: {stayed}")


# The node's own clients (cgroup hooks, or what a mode has instead)


def test_node_client_sees_the_vip_as_its_peer(bench: Bench, web: Service, dns: Service, family: int) -> None:
    with bench.connect("node", web.vip(family), family) as connection:
        assert connection.getpeername()[:2] == web.vip(family)
        ask_tcp(connection)
    with bench.socket("node", family, socket.SOCK_DGRAM) as client:
        client.connect(dns.vip(family))
        ask_udp(client)
        assert client.getpeername()[:2] == dns.vip(family)


def test_node_client_gets_datagrams_from_the_vip(bench: Bench, dns: Service, family: int) -> None:
    with bench.socket("node", family, socket.SOCK_DGRAM) as client:
        for _ in range(10):
            _, source = ask_udp(client, dns.vip(family))
            assert source == dns.vip(family)


def test_one_node_socket_may_ask_a_service_and_a_pod(bench: Bench, dns: Service, family: int) -> None:
    direct = (bench.lab["pod5"].address(family), UDP)
    with bench.socket("node", family, socket.SOCK_DGRAM) as client:
        for _ in range(5):
            assert ask_udp(client, dns.vip(family))[1] == dns.vip(family)
            reply, source = ask_udp(client, direct)
            assert (reply.pod, source) == ("pod5", direct)


def test_dual_stack_socket_of_the_node_reaches_an_ipv4_service(bench: Bench, web: Service, dns: Service) -> None:
    with bench.socket("node", socket.AF_INET6, socket.SOCK_STREAM) as connection:
        connection.connect((f"::ffff:{web.address(V4)}", web.port))
        assert ask_tcp(connection).pod in {"pod2", "pod3", "pod4"}
    with bench.socket("node", socket.AF_INET6, socket.SOCK_DGRAM) as client:
        target = (f"::ffff:{dns.address(V4)}", dns.port)
        assert ask_udp(client, target)[1] == target


# Tuple collisions: one source port, two ways to one backend


@pytest.mark.parametrize("first", ["vip", "direct"])
@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_vip_and_direct_from_one_source_port(bench: Bench, mode: str, protocol: str, first: str, family: int) -> None:
    skip_where_ports_are_confused(mode)
    target = HTTP if protocol == "TCP" else UDP
    service = bench.service("pod2", protocol=protocol, target=target)
    ways = [("pod1", service.vip(family)), ("pod1", (bench.lab["pod2"].address(family), target))]
    clients = both_answer(bench, ways if first == "vip" else ways[::-1], protocol, family)
    assert {address for address, _ in clients} == {bench.lab["pod1"].address(family)}


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_two_vips_of_one_backend_from_one_source_port(bench: Bench, mode: str, protocol: str, family: int) -> None:
    skip_where_ports_are_confused(mode)
    target = HTTP if protocol == "TCP" else UDP
    services = [bench.service("pod2", protocol=protocol, target=target) for _ in range(2)]
    clients = both_answer(bench, [("pod1", service.vip(family)) for service in services], protocol, family)
    assert {address for address, _ in clients} == {bench.lab["pod1"].address(family)}


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_a_pod_that_asks_itself_takes_no_port_of_the_nodes_sockets(
    bench: Bench, mode: str, protocol: str, family: int
) -> None:
    """To its backend such a pod is the node: with its own port, the node's socket of that port would get no answer."""
    skip_where_ports_are_confused(mode)
    target = HTTP if protocol == "TCP" else UDP
    service = bench.service("pod1", protocol=protocol, target=target)
    direct = (bench.lab["pod1"].address(family), target)
    both_answer(bench, [("pod1", service.vip(family)), ("node", direct)], protocol, family)


def test_a_port_serves_the_vip_and_then_the_backend(bench: Bench, mode: str, family: int) -> None:
    """The backend closes first and keeps each tuple in TIME_WAIT; its answer to another conversation there would be
    an acknowledgement, and the client's next SYN comes a second later. Many ports, because luck is half of it.
    """
    skip_where_ports_are_confused(mode)
    service = bench.service("pod2", target=HTTP)
    direct = (bench.lab["pod2"].address(family), HTTP)
    for way in (service.vip(family), direct, service.vip(family)):
        for port in range(31_000, 31_040):
            with bench.connect("pod1", way, family, port, timeout=0.8) as connection:
                assert ask_tcp(connection, close=True).pod == "pod2"
                assert connection.recv(1) == b"", "the server was to close first"


def skip_where_ports_are_confused(mode: str) -> None:
    if mode == "ipvs":
        pytest.skip("IPVS finds an answer's flow by client, backend and ports alone (docs/differences.md)")


def both_answer(
    bench: Bench, ways: list[tuple[str, tuple[str, int]]], protocol: str, family: int
) -> list[tuple[str, int]]:
    """Two sockets of one source port, used in turns: the backend must see two different clients, which are returned."""
    port = both_answer.port = both_answer.port + 1
    with contextlib.ExitStack() as stack:
        asks = []
        for place, target in ways:
            if protocol == "TCP":
                connection = stack.enter_context(bench.connect(place, target, family, port))
                asks.append(partial(ask_tcp, connection))
            else:
                client = stack.enter_context(bench.socket(place, family, socket.SOCK_DGRAM, port))
                client.connect(target)
                asks.append(lambda client=client: ask_udp(client)[0])
            asks[-1]()
        peers = [[ask().peer for ask in asks] for _ in range(5)]
    assert all(turn == peers[0] for turn in peers), peers
    assert peers[0][0] != peers[0][1], "two clients are one for the backend"
    return peers[0]


both_answer.port = 20_000


# ICMP errors through the translation


def set_segment_mtu(lab: Lab, mtu: int) -> None:
    for name in {"client", "node", "node2"} & lab.places.keys():
        link = lab.netlink(name)
        for interface in ("eth0", "to-node", "to-node2"):  # those to nodes are the client's
            for index in link.link_lookup(ifname=interface):
                link.link("set", index=index, mtu=mtu)


@pytest.fixture
def narrow(bench: Bench):
    set_segment_mtu(bench.lab, 1400)
    yield
    set_segment_mtu(bench.lab, MTU)
    forget_path_mtus(bench.lab)


@pytest.mark.row("2.23", "a large transfer over a narrow segment")
@pytest.mark.parametrize(
    "service_port",
    [
        pytest.param(80, id="port-rewritten", marks=pytest.mark.core),
        pytest.param(HTTP, id="same-port", marks=pytest.mark.core(long=True)),
    ],
)
def test_large_transfer_over_a_smaller_mtu(bench: Bench, narrow: None, service_port: int, family: int) -> None:
    """The node's own kernel says `too big` about a translated packet; the pod must understand it as its own."""
    service = bench.service("remote1", port=service_port)
    size = int(2_000_000 / PATIENCE)
    with bench.connect("pod1", service.vip(family), family, timeout=30.0) as connection:
        assert ask_tcp(connection, body=bytes(size)).received == size
        assert download(connection, size) == size


@pytest.mark.row("2.23", "a backend's ICMP error comes back as the ClusterIP's")
def test_a_closed_port_of_a_backend_is_refused(bench: Bench, family: int) -> None:
    """The backend's own ICMP error, about the pod's address, comes back as one about the VIP."""
    service = bench.service("pod2", protocol="UDP", target=UDP)
    service.write(target=9)  # nobody listens there
    eventually(lambda: refused(bench, "pod1", service, family), 8, "port unreachable does not reach the client")
    with bench.socket("pod1", family, socket.SOCK_DGRAM, timeout=1) as client:
        client.connect(service.vip(family))
        client.send(b"x")
        with pytest.raises(ConnectionRefusedError):
            client.recv(1)


# What is no service's passes untouched


@pytest.mark.parametrize("place", ["pod1", "node", "client", "remote1"])
def test_direct_traffic_is_untouched(bench: Bench, web: Service, place: str, family: int) -> None:
    """A source port that a flow through a service used lately is replaced in every mode, so another one is tried."""
    for port in (HTTP, SECOND_HTTP):
        kept = []
        for _ in range(3):
            with bench.connect(place, (bench.lab["pod2"].address(family), port), family) as connection:
                reply, own = ask_tcp(connection), connection.getsockname()[:2]
                assert (reply.pod, reply.peer[0]) == ("pod2", own[0])
                assert reply.local == connection.getpeername()[:2]
                kept.append(reply.peer == own)
        assert any(kept), "the source port was replaced each time"


def test_direct_refusal_is_untouched(bench: Bench, web: Service, family: int) -> None:
    with bench.socket("pod1", family, socket.SOCK_STREAM) as client:
        assert client.connect_ex((bench.lab["pod2"].address(family), 9)) == errno.ECONNREFUSED


@pytest.mark.row("2.7", "a pod reaches itself, whether or not its slice names its node")
@pytest.mark.parametrize(("protocol", "target"), [("TCP", HTTP), ("UDP", UDP)], ids=["tcp", "udp"])
def test_a_pod_reaches_itself_without_a_node_name(bench: Bench, protocol: str, target: int, family: int) -> None:
    """Slices that people and operators write have none (`nodeName` is optional)."""
    service = bench.service(End(bench.lab["pod1"], named=False), settle=False, protocol=protocol, target=target)
    bench.settle(service, {"pod1"}, family)
