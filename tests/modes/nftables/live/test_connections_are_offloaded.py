"""A real flowtable, in a lab: what it forwards, what it leaves to the rules, and how connections come back from it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Self

import pytest

from hybrid_proxy.dataplane.kernel import conntrack
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.nftables.programmer import MODE, Nftables
from hybrid_proxy.dataplane.modes.nftables.tables import FLOWTABLE, TABLE
from hybrid_proxy.dataplane.netfilter import frontends
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES
from hybrid_proxy.dataplane.nftables.wire import Kernel
from hybrid_proxy.dataplane.options import NftablesOptions
from hybrid_proxy.dataplane.reports import FlowRow
from hybrid_proxy.dataplane.table import (
    Backend,
    BackendSet,
    Entry,
    Kind,
    Masquerade,
    NodeNetwork,
    PodMatch,
    Protocol,
    ServiceTable,
)
from hybrid_proxy.workshop.lab.network import Lab
from tests.namespaces import new_lab
from tests.nft import nft
from tests.tables import Front, entry_of
from tests.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.kernel("nf_flow_table"), pytest.mark.core(long=True)]

V4, V6 = socket.AF_INET, socket.AF_INET6
VIP = {V4: "10.96.0.80", V6: "fd00:10:96::80"}
PORT, NODE_PORT, TARGET, PACKETS = 80, 30080, 8080, 20
ROUNDS = 30  # each of at least two packets


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("o", 2) as made:
        yield made


@pytest.fixture
def node(lab: Lab) -> Iterator[None]:
    with lab.inside("node"):
        nft("add table inet others; add chain inet others forward { type filter hook forward priority 50; }")
        nft("add rule inet others forward meta l4proto { tcp, udp } counter")
        yield
        MODE.clean(Options())
        nft("delete table inet others")


@pytest.fixture
def mode(node: None) -> Iterator[Nftables]:
    with contextlib.closing(Nftables(Options(nftables=NftablesOptions(offload_packets=PACKETS)), lambda: None)) as made:
        yield made


def table(lab: Lab, *, masquerade: Masquerade = Masquerade.NEVER) -> ServiceTable:
    """A service with pod2 behind it, at a ClusterIP and a node port, by TCP and UDP."""
    entries: list[Entry] = []
    for family, version in ((V4, 4), (V6, 6)):
        backends = (Backend(lab["pod2"].address(family), TARGET, local=True),)
        route = BackendSet(backends, why="all")
        fronts = (
            Front(Kind.CLUSTER_IP, VIP[family], PORT, route, route, masquerade),
            Front(Kind.NODE_PORT, None, NODE_PORT, route, route, Masquerade.EXTERNAL),
        )
        entries += [
            entry_of(f"default/web:{protocol.name}", version, protocol, fronts, backends)
            for protocol in (Protocol.TCP, Protocol.UDP)
        ]
    addresses = tuple(lab["node"].address(family) for family in (V4, V6))
    pods = tuple(f"{lab['pod1'].address(family)}/{32 if family == V4 else 128}" for family in (V4, V6))
    network = NodeNetwork(primary=addresses, addresses=addresses, node_port_addresses=addresses, pods=PodMatch(pods))
    return ServiceTable({"default/web": tuple(entries)}, network, 1)


class Connection:
    """From a place of the lab to the service; the other end is in pod2."""

    def __init__(self, lab: Lab, family: int, place: str, to: tuple[str, int]) -> None:
        self.family = family
        self.client = lab.socket(place, family, socket.SOCK_STREAM)
        with lab.socket("pod2", family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((lab["pod2"].address(family), TARGET))
            listener.listen()
            listener.settimeout(20)
            self.client.settimeout(20)
            self.client.connect(to)
            self.server, _ = listener.accept()
        self.server.settimeout(20)
        self.port = self.client.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.close()

    def exchange(self, rounds: int = ROUNDS) -> None:
        for number in range(rounds):
            for one, other in ((self.client, self.server), (self.server, self.client)):
                text = b"round %d" % number
                one.sendall(text)
                assert other.recv(100) == text

    def send_much(self) -> None:
        """More than windows hold, in segments that the card would cut."""
        sent = bytes(range(256)) * 800
        self.client.settimeout(60)
        got = bytearray()
        left = memoryview(sent)
        while len(got) < len(sent):
            if left:
                left = left[self.client.send(left[:60_000]) :]
            got += self.server.recv(200_000)
        assert got == sent

    def row(self, wanted: ServiceTable) -> FlowRow:
        """What `flows` says of it."""
        rows, _ = conntrack.flows(frontends(wanted), 100)
        return next(row for row in rows if row.client.endswith(f":{self.port}") and row.protocol == "TCP")


def seen() -> int:
    """Packets that the rules of others have seen."""
    line = next(line for line in nft("list", "chain", "inet", "others", "forward").splitlines() if "packets" in line)
    return int(line.split("packets ")[1].split()[0])


def seen_during(act: Callable[[], None]) -> int:
    before = seen()
    act()
    return seen() - before


def at(family: int) -> frozenset[str] | None:
    """The interfaces of our flowtable."""
    with contextlib.closing(Kernel(TABLE)) as kernel:
        return kernel.flowtables(FAMILIES[4 if family == V4 else 6]).get(FLOWTABLE)


@pytest.mark.parametrize("family", [V4, V6], ids=["v4", "v6"])
@pytest.mark.parametrize(
    ("place", "port", "masquerade"),
    [
        pytest.param("pod1", PORT, Masquerade.NEVER, id="a pod"),
        pytest.param("pod1", PORT, Masquerade.ALWAYS, id="a masqueraded pod"),
        pytest.param("pod2", PORT, Masquerade.NEVER, id="the backend itself"),
        pytest.param("client", NODE_PORT, Masquerade.NEVER, id="a client outside, at a node port"),
    ],
)
def test_a_long_connection_passes_no_rule_any_more(
    lab: Lab, mode: Nftables, family: int, place: str, port: int, masquerade: Masquerade
) -> None:
    wanted = table(lab, masquerade=masquerade)
    mode.sync(wanted)
    address = VIP[family] if port == PORT else lab["node"].address(family)
    with Connection(lab, family, place, (address, port)) as connection:
        connection.exchange(3)
        assert not connection.row(wanted).fast_path
        connection.exchange()
        assert connection.row(wanted).fast_path
        assert connection.row(wanted).state == "established"
        assert seen_during(connection.exchange) == 0
        connection.send_much()
    until(lambda: connection.row(wanted).state == "closed", "conntrack has seen the end")


def test_datagrams_and_the_connections_of_others_stay_with_the_rules(lab: Lab, mode: Nftables) -> None:
    """The entry of a datagram in a flowtable could not be deleted when its backend is gone."""
    wanted = table(lab)
    mode.sync(wanted)
    backend = lab["pod2"].address(V4), TARGET
    with (
        lab.socket("pod1", V4, socket.SOCK_DGRAM) as client,
        lab.socket("pod2", V4, socket.SOCK_DGRAM) as server,
        Connection(lab, V4, "pod1", backend) as plain,
    ):
        server.bind(backend)
        for one in (client, server):
            one.settimeout(20)
        client.sendto(b"?", (VIP[V4], PORT))
        _, peer = server.recvfrom(10)

        def ask() -> None:
            for _ in range(ROUNDS):
                client.sendto(b"?", (VIP[V4], PORT))
                server.sendto(server.recvfrom(10)[0], peer)
                client.recv(10)

        ask()
        assert seen_during(ask) == 2 * ROUNDS
        plain.exchange()
        assert seen_during(plain.exchange) >= 2 * ROUNDS


def test_a_connection_whose_packets_others_drop_is_not_offloaded(lab: Lab, mode: Nftables) -> None:
    wanted = table(lab)
    mode.sync(wanted)
    with Connection(lab, V4, "pod1", (VIP[V4], PORT)) as connection:
        connection.exchange(3)
        nft(f"insert rule inet others forward tcp dport {TARGET} drop")
        connection.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2 * PACKETS):
            connection.client.send(b"x")
        assert not connection.row(wanted).fast_path


@pytest.mark.core
def test_a_mode_that_drains_gives_connections_back_and_takes_them_again(lab: Lab, mode: Nftables) -> None:
    wanted = table(lab)
    mode.sync(wanted)
    with Connection(lab, V4, "pod1", (VIP[V4], PORT)) as connection:
        connection.exchange()
        assert connection.row(wanted).fast_path
        mode.drain(wanted)
        assert at(V4) is None
        assert (connection.row(wanted).fast_path, connection.row(wanted).state) == (False, "established")
        assert mode.open_flows(wanted)["TCP"] == 1
        assert seen_during(connection.exchange) >= 2 * ROUNDS
        mode.sync(wanted)
        connection.exchange(3)
        assert connection.row(wanted).fast_path


def test_the_flowtable_follows_interfaces_and_is_made_again_when_others_delete_it(lab: Lab, mode: Nftables) -> None:
    mode.sync(table(lab))
    first = at(V4)
    assert first is not None
    assert {lab["pod1"].interface, lab["pod2"].interface} <= first
    made = lab.add_pod()
    mode.links_changed()
    assert (at(V4), at(V6)) == (first | {made.interface}, first | {made.interface})
    lab.remove_pod(made.name)
    mode.links_changed()
    assert (at(V4), at(V6)) == (first, first)
    offload = mode.status().nftables
    assert offload is not None
    assert offload.offload is not None
    assert set(offload.offload.interfaces) == first
    nft(f"flush chain ip {TABLE} offload-services; delete flowtable ip {TABLE} {FLOWTABLE}")
    mode.ruleset_changed()
    mode.maintain()
    assert (at(V4), mode.audit_repairs) == (first, 1)


def test_without_the_setting_nothing_of_it_stays(lab: Lab, mode: Nftables) -> None:
    mode.sync(table(lab))
    with contextlib.closing(Nftables(Options(), lambda: None)) as later:
        later.sync(table(lab))
        assert at(V4) is None
        assert "offload" not in nft("list", "table", "ip", TABLE)
