"""Kernel clients and raw sockets of the node: what they send never meets the hooks of its sockets, but its uplink's.

Stood in for by sockets of a cgroup beside the one that the agent serves; where services are no addresses of the node's
own, their packets go to the uplink, as those of an NFS mount do.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hybrid_proxy.workshop.lab.sockets import Opener
from hybrid_proxy.workshop.lab.traffic import ask_tcp, ask_udp, download

from .conftest import only_in
from .kit import UDP, Bench, eventually
from .test_rows import target_of

pytestmark = only_in("ebpf")  # in the others all sockets of the node are alike
SIZE = 1_000_000
WAYS = [("cluster", "remote1"), ("cluster", "pod2"), ("lb", "remote1"), ("cluster", "node2")]
IDS = ["-".join(way) for way in WAYS]


@pytest.fixture(scope="module")
def beyond(bench: Bench) -> Iterator[Opener]:
    """Sockets of the node's namespace in a cgroup next to the lab's."""
    folder = bench.lab.cgroup.with_name(bench.lab.cgroup.name + "-beside")
    folder.mkdir()
    opener = Opener(folder, bench.lab["node"].namespace, bench.lab.environment())
    try:
        yield opener
    finally:
        opener.close()
        eventually(lambda: not (folder / "cgroup.procs").read_text(), 5, f"processes are left in {folder}")
        folder.rmdir()


@contextmanager
def past_the_hooks(bench: Bench, opener: Opener, family: int, kind: int) -> Iterator[socket.socket]:
    with opener.open(bench.lab["node"].namespace, family, kind, 0) as made:
        made.settimeout(20)
        yield made


@pytest.mark.parametrize(("way", "pod"), WAYS, ids=IDS)
def test_connections(bench: Bench, beyond: Opener, way: str, pod: str, family: int) -> None:
    service = bench.service(pod, outside=True, **({"target": 9090} if pod == "node2" else {}))
    target = target_of(bench, service, way, family)
    with past_the_hooks(bench, beyond, family, socket.SOCK_STREAM) as client:
        client.connect(target)
        assert client.getpeername()[:2] == target
        reply = ask_tcp(client)
        assert reply.pod == pod
        assert reply.peer[0] == bench.lab["node"].address(family)
        assert ask_tcp(client, body=bytes(SIZE)).received == SIZE
        assert download(client, SIZE) == SIZE


@pytest.mark.parametrize(("way", "pod"), WAYS[:3], ids=IDS[:3])
def test_datagrams(bench: Bench, beyond: Opener, way: str, pod: str, family: int) -> None:
    service = bench.service(pod, protocol="UDP", port=53, target=UDP, outside=True)
    target = target_of(bench, service, way, family)
    with past_the_hooks(bench, beyond, family, socket.SOCK_DGRAM) as client:
        for _ in range(3):
            reply, source = ask_udp(client, target, text="x" * random.choice([10, 5000]))
            assert reply.pod == pod
            assert source == target


@pytest.mark.parametrize("connected", [True, False])
def test_a_flow_of_one_port_leaves_a_later_socket_its_answers(
    bench: Bench, beyond: Opener, connected: bool, family: int
) -> None:
    """The hooks lead two sockets' datagrams, and those of the flow, to one backend from one port."""
    first, second = (bench.service("pod2", protocol="UDP", port=53, target=UDP) for _ in range(2))
    with past_the_hooks(bench, beyond, family, socket.SOCK_DGRAM) as client:
        assert ask_udp(client, first.vip(family))[1] == first.vip(family)
        port = client.getsockname()[1]
    for service in (second, first, second):
        with bench.socket("node", family, socket.SOCK_DGRAM, port) as client:
            if connected:
                client.connect(service.vip(family))
            assert ask_udp(client, None if connected else service.vip(family))[1] == service.vip(family)


def test_a_refusal(bench: Bench, beyond: Opener, family: int) -> None:
    service = bench.service("pod2", outside=True)
    with past_the_hooks(bench, beyond, family, socket.SOCK_STREAM) as client, pytest.raises(ConnectionRefusedError):
        client.connect((service.address(family), 81))


def test_datagrams_move_when_their_backend_is_gone(bench: Bench, beyond: Opener, family: int) -> None:
    service = bench.service("pod2", "remote1", protocol="UDP", port=53, target=UDP)
    with past_the_hooks(bench, beyond, family, socket.SOCK_DGRAM) as client:
        client.connect(service.vip(family))
        client.settimeout(0.3)
        gone = ask_udp(client)[0].pod
        left = ({"pod2", "remote1"} - {gone}).pop()
        service.write(bench.lab[left])
        eventually(lambda: ask_udp(client)[0].pod == left, 5, f"the flow still goes to {gone}, which is gone")


def test_more_than_one_client_port(bench: Bench, beyond: Opener, family: int) -> None:
    """New connections all the time, as a mount that is made again and again."""
    service = bench.service("pod2", "remote1")
    seen = set()
    for _ in range(40):
        with past_the_hooks(bench, beyond, family, socket.SOCK_STREAM) as client:
            client.connect(service.vip(family))
            seen.add(ask_tcp(client, close=True).pod)
    assert seen == {"pod2", "remote1"}


def test_a_backend_that_can_be_reached_is_taken(bench: Bench, beyond: Opener, family: int) -> None:
    """What is on its way out of the node cannot come back to it: of two backends only the other one serves."""
    service = bench.service("node", "node2", protocol="UDP", port=53, target=UDP)
    for _ in range(12):
        with past_the_hooks(bench, beyond, family, socket.SOCK_DGRAM) as client:
            reply, source = ask_udp(client, service.vip(family))
            assert reply.pod == "node2"
            assert source == service.vip(family)
