"""Affinity, walked packet by packet through the rules: who stays, who moves, what is shared."""

from __future__ import annotations

from collections.abc import Callable

from hybrid_proxy.dataplane.modes.nftables.programmer import Nftables
from hybrid_proxy.dataplane.table import Entry, Kind, Masquerade, WhenEmpty
from tests.fakes.nftables import FakeNftables, Packet
from tests.modes.make import entry
from tests.modes.nftables.make import cluster_ip, nftables_in, route, table
from tests.tables import Front

PODS = ("10.1.0.5", "10.1.0.6", "10.1.0.7")


def first(modulus: int) -> int:
    return 0


def last(modulus: int) -> int:
    return modulus - 1


def sticky(*pods: str) -> Entry:
    both = route(*pods)
    node_port = Front(Kind.NODE_PORT, None, 30080, both, both, Masquerade.ALWAYS)
    return entry(cluster_ip("10.96.0.10", both), node_port, affinity_seconds=60)


def ask(fake: FakeNftables, choose: Callable[[int], int], src: str = "10.1.0.99", dst: str = "10.96.0.10") -> str:
    done = fake.walk(Packet(src, dst, 80 if dst == "10.96.0.10" else 30080, mark=0x80), choose)
    assert done.to is not None
    assert (done.mark, done.priority) == (0x80, 0)
    return done.to[0]


def test_a_client_stays_and_another_chooses(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(table(sticky(*PODS)))
    assert ask(fake, first) == "10.1.0.5"
    assert ask(fake, last) == "10.1.0.5"
    assert ask(fake, last, src="10.1.0.98") == "10.1.0.7"


def test_a_client_stays_at_the_node_port_too(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(table(sticky(*PODS)))
    assert ask(fake, first) == "10.1.0.5"
    assert ask(fake, last, dst="192.168.0.1") == "10.1.0.5"


def test_clients_stay_when_others_backends_come_and_go(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(table(sticky(*PODS)))
    assert ask(fake, last) == "10.1.0.7"
    mode.sync(table(sticky("10.1.0.4", "10.1.0.6", "10.1.0.7"), generation=2))
    assert ask(fake, first) == "10.1.0.7"
    mode.sync(table(sticky("10.1.0.7", "10.1.0.9"), generation=3))
    assert ask(fake, last) == "10.1.0.7"


def test_a_client_moves_when_its_backend_goes_and_does_not_come_back(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(table(sticky(*PODS)))
    assert ask(fake, last) == "10.1.0.7"
    mode.sync(table(sticky("10.1.0.5", "10.1.0.6"), generation=2))
    assert ask(fake, first) == "10.1.0.5"
    mode.sync(table(sticky(*PODS), generation=3))
    assert ask(fake, last) == "10.1.0.5"


def test_a_restart_keeps_clients_where_they_are(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(table(sticky(*PODS)))
    assert ask(fake, last) == "10.1.0.7"
    nftables_in(fake).sync(table(sticky(*PODS, "10.1.0.8")))
    assert ask(fake, first) == "10.1.0.7"


def test_a_backend_of_the_other_route_is_no_choice(fake: FakeNftables, mode: Nftables) -> None:
    """An external client that came by the ClusterIP does not take a remote backend along to a Local node port."""
    internal, local = route("10.1.0.5", "*10.1.0.6"), route("*10.1.0.6", empty=WhenEmpty.DROP)
    node_port = Front(Kind.NODE_PORT, None, 30080, internal, local, Masquerade.NODE)
    mode.sync(table(entry(cluster_ip("10.96.0.10", internal), node_port, affinity_seconds=60)))
    assert ask(fake, first, src="203.0.113.9") == "10.1.0.5"
    assert ask(fake, first, src="203.0.113.9", dst="192.168.0.1") == "10.1.0.6"


def test_without_room_for_the_mark_a_packet_still_finds_a_backend(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(table(sticky(*PODS)))
    fake.tables[4].elements["internal-candidates"].clear()
    assert ask(fake, last) == "10.1.0.7"
