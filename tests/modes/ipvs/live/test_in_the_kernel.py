"""The programmer with the kernel's IPVS, in a namespace of its own; services are in the conformance tests."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from pyroute2 import IPRoute

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel import sysctl, xtables
from hybrid_proxy.dataplane.kernel.ipset import Ipsets
from hybrid_proxy.dataplane.kernel.ipvs import Ipvs as VirtualServers
from hybrid_proxy.dataplane.kernel.local_routes import LocalRoutes
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ipvs.programmer import DRAIN_SECONDS, Ipvs, clean, drain, look, probe
from hybrid_proxy.dataplane.modes.ipvs.rules import ours
from hybrid_proxy.dataplane.modes.ipvs.writer import DEVICE
from hybrid_proxy.dataplane.options import IpvsOptions
from hybrid_proxy.dataplane.table import (
    EMPTY,
    Backend,
    BackendSet,
    Kind,
    Masquerade,
    NodeNetwork,
    Protocol,
    ServiceTable,
    socket_text,
)
from hybrid_proxy.dataplane.virtual_servers import Server
from hybrid_proxy.workshop.lab.namespace import DEADLINES
from tests import namespaces
from tests.nft import nft
from tests.tables import Front, entry_of
from tests.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.kernel("ip_vs")]

SYN_SENT = 2  # include/net/tcp_states.h
SERVER = Server(4, 6, "10.96.0.1", 80)


@pytest.fixture
def home() -> Iterator[None]:
    with namespaces.fresh():
        namespaces.loopback("10.1.0.11", "10.1.0.12")
        yield


@pytest.fixture
def ipvs(home: None) -> Iterator[VirtualServers]:
    with contextlib.closing(VirtualServers()) as opened:
        yield opened


def table(*ends: str, generation: int = 0, services: int = 1) -> ServiceTable:
    backends = tuple(Backend(address, 8080, local=True) for address in ends)
    route = BackendSet(backends, why="all")
    held = {}
    for number in range(services):
        frontend = Front(Kind.CLUSTER_IP, f"10.96.0.{number + 1}", 80, route, route, Masquerade.NEVER)
        name = f"default/s{number}"
        held[name] = (entry_of(f"{name}:http", 4, Protocol.TCP, (frontend,), backends),)
    return ServiceTable(held, NodeNetwork(service_cidrs=("10.96.0.0/12",)), generation)


def state(one: socket.socket) -> int:
    """The first byte of what the kernel says of a TCP socket (tcp(7), TCP_INFO: tcpi_state)."""
    return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def waiting(listener: socket.socket) -> int:
    """The connections that a listener has not accepted yet (tcpi_unacked, which a listener uses for that)."""
    return int(struct.unpack_from("=I", listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 24)[0])


def start(clock: Callable[[], float] = time.monotonic, **options: object) -> Ipvs:
    return Ipvs(Options(ipvs=IpvsOptions(**options)), lambda: None, clock=clock)  # type: ignore[arg-type]


def test_the_mode_works_here_and_trying_it_leaves_nothing(home: None) -> None:
    assert probe(Options()) is None
    with IPRoute() as ip:
        assert ip.link_lookup(ifname=DEVICE) == []
    with contextlib.closing(Ipsets()) as sets:
        assert sets.names("HPV") == []
    with pytest.raises(Unsupported, match="ip_vs_nosuch"):
        start(scheduler="nosuch")


@pytest.mark.core(long=True)
def test_a_connection_outlives_its_endpoint_which_goes_when_the_connection_is_over(
    home: None, ipvs: VirtualServers
) -> None:
    agent = start(clock=lambda: DRAIN_SECONDS * time.monotonic())
    agent.sync(table("10.1.0.11"))
    with (
        socket.create_server(("10.1.0.11", 8080)) as listener,
        socket.create_connection(("10.96.0.1", 80), 5) as client,
    ):
        there, _ = listener.accept()
        agent.sync(table("10.1.0.12", generation=1))
        agent.maintain()
        loads = {end.address: load.weight for end, load in ipvs.destinations(SERVER).items()}
        assert loads == {"10.1.0.11": 0, "10.1.0.12": 1}
        there.sendall(b"still here")
        assert client.recv(100) == b"still here"
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset: no FIN_WAIT
        there.close()
    deadline = time.monotonic() + 60
    while len(ipvs.destinations(SERVER)) == 2:
        assert time.monotonic() < deadline, ipvs.destinations(SERVER)
        agent.maintain()
        time.sleep(1)
    assert agent.status().ipvs.draining == 0
    agent.close()


@pytest.mark.parametrize("strict", [False, True])
def test_strict_arp_sets_what_keeps_the_node_from_answering_for_others(home: None, strict: bool) -> None:
    before = sysctl.read("net/ipv4/conf/all/arp_ignore")
    agent = start(strict_arp=strict)
    agent.sync(table("10.1.0.11"))
    assert sysctl.read("net/ipv4/conf/all/arp_ignore") == ("1" if strict else before)
    assert sysctl.read("net/ipv4/conf/all/arp_announce") == ("2" if strict else "0")
    for name in ("net/ipv4/vs/conntrack", "net/ipv4/vs/expire_nodest_conn", "net/ipv4/ip_forward"):
        assert sysctl.read(name) == "1"
    assert agent.warnings() == []
    agent.close()


@pytest.mark.core(long=True)
def test_draining_takes_the_rules_away_and_leaves_connections_until_cleaning(home: None, ipvs: VirtualServers) -> None:
    assert not drain(Options())
    agent = start()
    agent.sync(table("10.1.0.11"))
    agent.close()
    with (
        socket.create_server(("10.1.0.11", 8080)) as listener,
        socket.create_connection(("10.96.0.1", 80), 5) as client,
    ):
        there, _ = listener.accept()
        assert drain(Options())
        assert not [
            line for name in ("mangle", "nat") for line in ours(xtables.find().save(4, name)) if "-A HPV" in line
        ]
        with contextlib.closing(start()) as counts:
            assert counts.open_flows(EMPTY) == {"TCP": 1}
        there.sendall(b"goes on")
        assert client.recv(100) == b"goes on"
        there.close()
    assert clean(Options()) > 0
    assert not drain(Options())


@pytest.mark.core
def test_while_the_mode_drains_what_is_open_goes_on_and_what_is_new_is_refused(
    home: None, ipvs: VirtualServers
) -> None:
    agent = start()
    served = msgspec.structs.replace(table("10.1.0.11"), node=NodeNetwork(addresses=("10.1.0.11",)))
    agent.sync(served)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("10.1.0.11", 8080), backlog=0))
        client = stack.enter_context(socket.create_connection(("10.96.0.1", 80), 5))
        # The end of its handshake may still be on its way, on another processor. A SYN that overtook it would be
        # answered with a cookie, and for a connection that its client alone has, nobody repeats anything.
        until(lambda: waiting(listener) == 1, "the connection did not get to the queue")
        half_open = stack.enter_context(socket.socket())
        half_open.setblocking(False)
        half_open.connect_ex(("10.96.0.1", 80))

        agent.drain(served)
        assert state(half_open) == SYN_SENT, "one connection waits, and no more may"
        # Room for the half-open one: its client repeats the SYN after 1, 3, 7 ... 63 seconds, and gives up at 127.
        listener.settimeout(70)  # seconds, more than between any two of these
        accepted = [stack.enter_context(listener.accept()[0])]
        assert agent.open_flows(served) == {"TCP": 2}
        assert {load.weight for load in ipvs.destinations(SERVER).values()} == {0}
        with contextlib.closing(LocalRoutes()) as routes:
            assert routes.held() == {"10.96.0.1": "10.1.0.11"}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("10.96.0.1", 80), 10)

        accepted.append(stack.enter_context(listener.accept()[0]))
        for one, there in zip((client, half_open), accepted, strict=True):
            for end in (one, there):
                end.settimeout(10 * DEADLINES)  # a segment that found the queue full is repeated, later each time
            one.sendall(b"?")
            assert there.recv(1) == b"?"
            there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        agent.maintain()
        assert agent.repaired.count == 0
    assert agent.open_flows(served) == {}
    agent.close()
    assert clean(Options()) > 0
    assert ipvs.servers() == {}
    with contextlib.closing(LocalRoutes()) as routes:
        assert routes.held() == {}


@pytest.mark.core
def test_a_connection_that_this_node_opens_meanwhile_outlives_the_mode(home: None, ipvs: VirtualServers) -> None:
    """Another mode translates it. The address on the device would be its own, and it would lose it."""
    agent = start()
    served = msgspec.structs.replace(table("10.1.0.11"), node=NodeNetwork(addresses=("10.1.0.11",)))
    agent.sync(served)
    with IPRoute() as ip:  # as every node has one for what is not its own
        ip.route("add", dst="10.96.0.0/12", oif=ip.link_lookup(ifname="lo")[0])
    with (
        socket.create_server(("10.1.0.11", 8080)) as listener,
        socket.create_connection(("10.96.0.1", 80), 5) as before,
        listener.accept()[0],
    ):
        nft("add table ip other; add chain ip other out { type nat hook output priority -100; }")
        nft("add rule ip other out ip daddr 10.96.0.1 tcp dport 80 dnat to 10.1.0.11:8080")
        agent.drain(served)
        with socket.create_connection(("10.96.0.1", 80), 5) as client, listener.accept()[0] as there:
            assert agent.open_flows(served) == {"TCP": 1}, "of IPVS alone"
            view = look(Options(), {})
            assert view is not None
            rows, total = view.flows(9)
            assert [(row.client, row.backend) for row in rows] == [
                (socket_text(*before.getsockname()), "10.1.0.11:8080")
            ], "which conntrack cannot tell from the other"
            assert total == 1
            assert client.getsockname()[0] == "10.1.0.11"
            agent.close()
            clean(Options())
            there.settimeout(10)
            client.sendall(b"?")
            assert there.recv(1) == b"?"
