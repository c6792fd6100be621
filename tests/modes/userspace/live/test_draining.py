"""A relay that was left: it serves what conntrack leads to it until that is over, and gets nothing new. Needs root."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.errors import Occupied
from hybrid_proxy.dataplane.kernel import conntrack
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.nftables import programmer as nftables
from hybrid_proxy.dataplane.modes.userspace import messages as m
from hybrid_proxy.dataplane.modes.userspace import programmer
from hybrid_proxy.dataplane.modes.userspace.relay_client import connect, other_relays
from hybrid_proxy.dataplane.table import (
    EMPTY,
    Backend,
    BackendSet,
    Kind,
    Masquerade,
    NodeNetwork,
    PodMatch,
    Protocol,
    ServiceTable,
)
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Reply, ask_tcp, ask_udp
from tests.namespaces import new_lab
from tests.nft import nft
from tests.tables import Front, entry_of

from ..kit import eventually

pytestmark = pytest.mark.root

WEB, DNS, LATER = ("10.96.0.9", 80), ("10.96.0.9", 53), ("10.96.0.10", 80)
HTTP, UDP = 8080, 5353
HOLD = "table ip hold { chain in { type filter hook input priority 0; tcp flags & (syn | ack) == syn | ack drop; }; }"


@dataclass
class Node:
    """Mode userspace with two services, and mode nftables, which comes after it."""

    lab: Lab
    woken: threading.Event = field(default_factory=threading.Event)
    mode: programmer.Userspace = field(init=False)
    after: nftables.Nftables = field(init=False)

    def open(self) -> None:
        self.mode = programmer.Userspace(Options(), self.woken.set)

    def table(self, *pods: str, later: bool = False) -> ServiceTable:
        services = {
            "d/web": (self.entry("d/web:http", Protocol.TCP, WEB, HTTP, pods),),
            "d/dns": (self.entry("d/dns:dns", Protocol.UDP, DNS, UDP, pods),),
        }
        if later:
            services["d/later"] = (self.entry("d/later:http", Protocol.TCP, LATER, HTTP, pods),)
        address = self.lab["node"].address4
        network = NodeNetwork(
            primary=(address,), addresses=(address,), pods=PodMatch(("10.77.0.0/16",)),
            service_cidrs=("10.96.0.0/12",),
        )  # fmt: skip
        return ServiceTable(services, network)

    def entry(self, name: str, protocol: Protocol, vip: tuple[str, int], target: int, pods: tuple[str, ...]):
        route = BackendSet(tuple(Backend(self.lab[pod].address4, target, local=True) for pod in pods))
        front = Front(Kind.CLUSTER_IP, *vip, route, route, Masquerade.NODE | Masquerade.EXTERNAL)
        return entry_of(name, 4, protocol, (front,), route.backends)

    def leave(self, *pods: str) -> None:
        """The next mode serves, then this one drains."""
        self.after.sync(self.table(*pods))
        self.mode.drain(self.table(*pods))

    @contextlib.contextmanager
    def client(self, target: tuple[str, int], kind: socket.SocketKind = socket.SOCK_STREAM) -> Iterator[socket.socket]:
        with self.lab.socket("pod1", socket.AF_INET, kind) as made:
            made.settimeout(20)
            made.connect(target)
            yield made

    def new(self) -> Reply:
        with self.client(WEB) as client:
            return ask_tcp(client)

    def relay(self) -> m.Report:
        relay = connect(agent=False)
        assert relay is not None
        with contextlib.closing(relay):
            return relay.ask(m.Status(), m.Report)

    def flows(self) -> dict[str, int]:
        counted = self.mode.open_flows(self.table("pod2"))
        return {protocol: count for protocol, count in counted.items() if count}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("u", 3) as made:
        made.serve("pod1", "pod2", "pod3", http=(HTTP,), udp=(UDP,))
        yield made


@pytest.fixture
def node(lab: Lab) -> Iterator[Node]:
    with lab.inside("node"):
        for name in ("udp_timeout", "udp_timeout_stream"):
            Path(f"/proc/sys/net/netfilter/nf_conntrack_{name}").write_text("5")
        made = Node(lab)
        made.open()
        made.mode.sync(made.table("pod2"))
        made.after = nftables.Nftables(Options(), lambda: None)
        try:
            yield made
        finally:
            made.mode.close()
            made.after.close()
            with contextlib.suppress(Occupied):
                programmer.clean(Options())
            nftables.clean(Options())


def is_direct(reply: Reply, client: socket.socket) -> bool:
    """Whether the backend was asked by the client itself, not by the relay in its name."""
    return reply.peer == client.getsockname()


def test_it_follows_its_services(node: Node) -> None:
    with node.client(WEB) as web, node.client(DNS, socket.SOCK_DGRAM) as dns:
        ask_tcp(web), ask_udp(dns)
        node.leave("pod2")
        before = node.relay().proxy_ports
        node.mode.drain(node.table("pod3", later=True))
        assert node.relay().proxy_ports == before, "a service that came later has flows elsewhere"
        assert ask_tcp(web).pod == "pod2"
        assert ask_udp(dns)[0].pod == "pod3"


def test_back_at_once_it_takes_new_flows_and_keeps_those_that_it_had(node: Node) -> None:
    with node.client(WEB) as web, node.client(DNS, socket.SOCK_DGRAM) as dns:
        tcp, udp = ask_tcp(web), ask_udp(dns)[0]
        node.leave("pod2")
        node.mode.close()
        node.open()
        node.mode.sync(node.table("pod2"))
        node.after.close()
        nftables.clean(Options())
        assert (ask_tcp(web).peer, ask_udp(dns)[0].peer) == (tcp.peer, udp.peer)
        served = node.relay().counters["connections"]
        assert node.new().pod == "pod2"
        assert node.relay().counters["connections"] == served + 1


def test_its_rules_are_repaired_as_those_of_a_mode_that_drains(node: Node) -> None:
    with node.client(WEB) as web:
        ask_tcp(web)
        node.leave("pod2")
        node.woken.clear()
        nft("delete", "table", "ip", programmer.TABLE)
        assert node.woken.wait(60), "maintenance was not requested"
        node.mode.maintain()
        assert node.mode.repaired.count == 1
        assert ask_tcp(web).pod == "pod2"
        with node.client(WEB) as client:
            assert is_direct(ask_tcp(client), client)


def test_when_its_process_is_killed_the_next_mode_has_its_datagrams(node: Node) -> None:
    with node.client(DNS, socket.SOCK_DGRAM) as dns:
        ask_udp(dns)
        node.leave("pod2")
        node.woken.clear()
        os.kill(node.mode.client.pid, signal.SIGKILL)
        assert node.woken.wait(60), "maintenance was not requested"
        node.mode.maintain()
        assert not node.flows()
        assert is_direct(ask_udp(dns)[0], dns)


def test_what_is_left_when_its_time_is_over_is_reset_or_goes_elsewhere(node: Node) -> None:
    """Conntrack translates the reset, although no other mode keeps it at work."""
    with node.client(WEB) as web, node.client(DNS, socket.SOCK_DGRAM) as dns:
        ask_tcp(web), ask_udp(dns)
        node.mode.drain(node.table("pod2"))
        node.mode.abandon(node.table("pod2"))
        assert node.flows() == {"TCP": 1}
        node.mode.close()
        programmer.clean(Options())
        with pytest.raises(ConnectionResetError):
            ask_tcp(web)
        node.after.sync(node.table("pod2"))
        assert is_direct(ask_udp(dns)[0], dns)


OTHER_VERSION = f"{m.ADDRESSES}999"


def test_the_relay_of_a_former_version_serves_until_the_first_sync_and_ends_with_its_last_connection(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node.client(WEB) as web:
        ask_tcp(web)
        former = node.mode.client.pid
        node.mode.close()
        monkeypatch.setattr(m, "ADDRESS", OTHER_VERSION)
        node.open()
        assert node.mode.client.pid != former
        assert node.new().pod == "pod2"
        assert node.lab.run("pod1", ["nft", HOLD]).returncode == 0
        with node.lab.socket("pod1") as half_open:
            half_open.setblocking(False)
            half_open.connect_ex(WEB)
            eventually(
                lambda: conntrack.half_open_keys({(*WEB, int(Protocol.TCP)): None}), "conntrack does not have it"
            )
            # The SYN comes again a second later, and after that more than ACCEPT_SECONDS later.
            assert node.lab.run("pod1", ["nft", "delete table ip hold"]).returncode == 0
            node.mode.sync(node.table("pod3"))
            half_open.settimeout(20)
            assert ask_tcp(half_open).pod == "pod2"
        assert node.new().pod == "pod3"
        assert ask_tcp(web).pod == "pod2"
    eventually(lambda: not other_relays(), "the former relay does not end")


def test_datagrams_leave_the_relay_of_a_former_version(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with node.client(DNS, socket.SOCK_DGRAM) as dns:
        ask_udp(dns)
        node.mode.close()
        monkeypatch.setattr(m, "ADDRESS", OTHER_VERSION)
        node.open()
        node.mode.sync(node.table("pod3"))
        assert ask_udp(dns)[0].pod == "pod3"
        eventually(lambda: not other_relays(), "the former relay does not end")
        assert ask_udp(dns)[0].pod == "pod3"


def test_a_conversation_by_datagrams_is_open_without_a_table(node: Node) -> None:
    """`cleanup --drain` has none."""
    with node.client(DNS, socket.SOCK_DGRAM) as dns:
        ask_udp(dns)
        node.leave("pod2")
        assert node.mode.open_flows(EMPTY)["UDP"] == 1


def test_datagrams_leave_a_relay_that_is_removed(node: Node) -> None:
    with node.client(DNS, socket.SOCK_DGRAM) as dns:
        assert not is_direct(ask_udp(dns)[0], dns)
        node.leave("pod2")
        assert not is_direct(ask_udp(dns)[0], dns)
        node.mode.close()
        programmer.clean(Options())
        assert is_direct(ask_udp(dns)[0], dns)


def test_after_a_downgrade_the_relay_that_drained_serves_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with node.client(WEB) as web:
        ask_tcp(web)
        former = node.mode.client.pid
        node.mode.close()
        with monkeypatch.context() as upgraded:
            upgraded.setattr(m, "ADDRESS", OTHER_VERSION)
            node.open()
            node.mode.sync(node.table("pod2"))
            node.mode.close()
        node.open()
        assert node.mode.client.pid == former
        node.mode.sync(node.table("pod3"))
        eventually(lambda: not other_relays(), "the other relay does not end")
        assert node.new().pod == "pod3"
        assert ask_tcp(web).pod == "pod2"


def test_agents_of_two_versions_exclude_each_other(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "ADDRESS", OTHER_VERSION)
    with pytest.raises(Occupied, match=f"process {os.getpid()}"):
        programmer.Userspace(Options(), lambda: None)


def test_the_relay_of_a_former_version_drains_without_an_agent(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with node.client(WEB) as web:
        ask_tcp(web)
        node.mode.close()
        monkeypatch.setattr(m, "ADDRESS", OTHER_VERSION)
        assert programmer.drain(Options())
        assert "internal-nat" not in nft("list", "chain", "ip", "hybrid-proxy-userspace", "nat-output")
        assert ask_tcp(web).pod == "pod2"
