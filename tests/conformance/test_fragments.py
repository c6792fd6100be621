"""Datagrams of 8 kB over an MTU of 1500, both ways through a service, in order and not."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import pytest

from tests.waiting import bound

from .at_once import inbox, send_at_once, two_processors
from .conftest import every_mode_but
from .kit import V4, Bench, Service, aware_of, counted, eventually, forget_path_mtus, ruleset
from .packets import Header, datagram, fragments
from .test_rows import target_of

SIZE = 8000
ECHO = 7007
COUNT = 300
SMALL = b"small"
PIECE = 1400  # bytes of a datagram in one fragment
LOCAL = {"externalTrafficPolicy": "Local"}
Target = tuple[str, int]


class Way(NamedTuple):
    """Whence a client asks, at which of a service's addresses, where its endpoint is, and the service's policy."""

    place: str
    kind: str
    pod: str
    spec: Mapping[str, str] = {}

    def __str__(self) -> str:
        return "-".join(self[:3]) + ("-local" if self.spec else "")


WAYS = [Way("pod1", "cluster", "pod2"), Way("pod1", "cluster", "remote1"), Way("pod1", "cluster", "pod1"),
        Way("client", "nodeport", "pod2"), Way("client", "nodeport", "pod2", LOCAL),
        Way("client", "nodeport", "remote1"), Way("client", "lb", "pod2"),
        Way("node", "cluster", "remote1")]  # fmt: skip
FORWARDED = [way for way in WAYS if way.place != "node"]
OF_THE_NODE = [way for way in WAYS if way.place == "node"]
TO_A_NARROW_POD = [
    Way(place, kind, "pod2", spec)
    for place, kind, spec in (
        ("client", "nodeport", {}), ("client", "cluster", {}), ("pod1", "nodeport", {}), ("pod1", "cluster", {}),
        ("client", "nodeport", LOCAL), ("remote2", "cluster", {}),
    )
]  # fmt: skip
NUMBERS = itertools.count(1000)  # of datagrams
PORTS = itertools.count(10_000)
ORDERS: dict[str, Callable[[list[bytes]], Sequence[bytes]]] = {
    "in-order": lambda pieces: pieces,
    "reversed": lambda pieces: pieces[::-1],
    "first-last": lambda pieces: [*pieces[1:], pieces[0]],
    "second-first": lambda pieces: [pieces[1], pieces[0], *pieces[2:]],
    "doubled": lambda pieces: [*pieces[1:], *pieces, *pieces[1:]],
}
# Not TCP: a reset of an earlier test's connection, which conntrack has forgotten since, is INVALID by right.
CONNTRACK = """
table inet tracking {
    chain forward { type filter hook forward priority 0; meta l4proto != tcp ct state invalid counter drop; }
}
"""


@pytest.fixture(params=[False, True], ids=["", "conntrack"])
def conntrack(bench: Bench, request: pytest.FixtureRequest) -> Iterator[None]:
    """Where conntrack works on the node, it puts fragments together on their way and they are cut again."""
    if not request.param:
        yield
        return
    with ruleset(bench.lab, CONNTRACK):
        aware_of(bench.agent, CONNTRACK)
        yield
        listing = bench.lab.run("node", ["nft", "list", "table", "inet", "tracking"]).stdout
    assert "counter packets 0 " in listing, listing


@contextmanager
def echo(bench: Bench, place: str, family: int) -> Iterator[None]:
    """A server that sends every datagram back."""
    stop = threading.Event()
    with bench.lab.socket(place, family, socket.SOCK_DGRAM) as server:
        server.bind((bench.lab[place].address(family), ECHO))
        server.settimeout(0.1)

        def serve() -> None:
            while not stop.is_set():
                try:
                    data, client = server.recvfrom(65536)
                    server.sendto(data, client)
                except TimeoutError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def returned(client: socket.socket, data: bytes, target: tuple[str, int]) -> bool:
    """Whether the datagram comes back from where it went; earlier ones that were late may come before it."""
    client.sendto(data, target)
    while (got := client.recvfrom(65536))[0] != data:
        pass
    return got[1][:2] == target


def service_of(bench: Bench, pod: str, spec: Mapping[str, str]) -> Service:
    return bench.service(pod, protocol="UDP", port=53, target=ECHO, outside=True, spec=dict(spec), settle=False)


@contextmanager
def echoing(bench: Bench, ways: Sequence[Way], family: int) -> Iterator[Iterator[tuple[Way, socket.socket, Target]]]:
    """Services of all these ways, made at once; of each a client that has had an answer, and whom it asks."""
    services = [service_of(bench, way.pod, way.spec) for way in ways]
    with ExitStack() as stack:
        for pod in {way.pod for way in ways}:
            stack.enter_context(echo(bench, pod, family))

        def clients() -> Iterator[tuple[Way, socket.socket, Target]]:
            for way, service in zip(ways, services, strict=True):
                target = target_of(bench, service, way.kind, family)
                with bench.socket(way.place, family, socket.SOCK_DGRAM, timeout=0.5) as client:
                    first_answer(client, SMALL, target, str(way))
                    yield way, client, target

        yield clients()


def first_answer(client: socket.socket, data: bytes, target: Target, what: str) -> None:
    """Wait until the datagram comes back: what is lost before that is soon sent again."""
    patience = client.gettimeout()
    client.settimeout(0.1)
    eventually(lambda: returned(client, data, target), 8, f"{what}: nothing comes back at all")
    client.settimeout(patience)


@pytest.mark.row("2.23", "datagrams larger than the MTU, both ways")
def test_a_large_datagram_comes_back(bench: Bench, conntrack: None, family: int) -> None:
    large_datagrams_come_back(bench, FORWARDED, family)


@pytest.mark.row("2.23", "datagrams of the node itself, larger than the MTU")
def test_a_large_datagram_of_the_node_comes_back(bench: Bench, mode: str, conntrack: None, family: int) -> None:
    if mode == "ipvs":
        with pytest.raises(TimeoutError):
            large_datagrams_come_back(bench, OF_THE_NODE, family)
        pytest.xfail("missing feature: the kernel does not cut what is for an address of its own (docs/differences.md)")
    large_datagrams_come_back(bench, OF_THE_NODE, family)


def large_datagrams_come_back(bench: Bench, ways: Sequence[Way], family: int) -> None:
    with echoing(bench, ways, family) as clients:
        for way, client, target in clients:
            for _ in range(5):
                assert returned(client, random.randbytes(SIZE), target), way


@pytest.fixture
def narrow_pod(bench: Bench) -> Iterator[str]:
    """A pod whose network has less room than the wire, as behind every overlay."""
    pod = bench.lab["pod2"]

    def set_mtu(mtu: int) -> None:
        for place, name in (("node", pod.interface), (pod.name, "eth0")):
            link = bench.lab.netlink(place)
            link.link("set", index=link.link_lookup(ifname=name)[0], mtu=mtu)

    set_mtu(1400)
    yield pod.name
    set_mtu(1500)
    forget_path_mtus(bench.lab)


@pytest.mark.row("2.23", "datagrams in fragments to a pod with less room than the wire")
def test_fragments_fit_a_narrow_pod(bench: Bench, narrow_pod: str, family: int) -> None:
    """Of IPv6 only the sender can cut them: it must learn the size that fits, by the first that is lost."""
    with echoing(bench, TO_A_NARROW_POD, family) as clients:
        for way, client, target in clients:
            first_answer(client, random.randbytes(4000), target, f"{way}, large")
            for _ in range(3):
                assert returned(client, random.randbytes(4000), target), way


def test_an_established_flow_of_large_datagrams_skips_the_stack(bench: Bench, mode: str, family: int) -> None:
    """After two seconds both pods' packets are handed over directly, fragments too."""
    with echoing(bench, WAYS[:1], family) as clients:
        for _, client, target in clients:
            if mode == "ebpf":
                goal = counted(bench.agent, "fast") + 5
                eventually(
                    lambda client=client, target=target, goal=goal: (
                        returned(client, random.randbytes(SIZE), target) and counted(bench.agent, "fast") > goal
                    ),
                    6, "no packet takes the short way",
                )  # fmt: skip
            for _ in range(5):
                assert returned(client, random.randbytes(SIZE), target)


def pieces_of(source: tuple[str, int], target: tuple[str, int], data: bytes) -> list[bytes]:
    """The datagram as IP fragments."""
    header = Header(source[0], target[0], ident=next(NUMBERS))
    content = datagram(header, (source[1], target[1]), data)
    starts = range(0, len(content), PIECE)
    cuts = [(start, start + PIECE if start + PIECE < len(content) else None) for start in starts]
    return list(fragments(header, socket.IPPROTO_UDP, content, cuts))


def send_pieces(bench: Bench, place: str, pieces: Sequence[bytes], target: tuple[str, int]) -> None:
    """As they are; the kernel of the place only routes them."""
    family = V4 if pieces[0][0] >> 4 == 4 else socket.AF_INET6
    with bench.lab.socket(place, family, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        for piece in pieces:
            raw.sendto(piece, (target[0], 0))


def heard(bench: Bench, place: str, receiver: socket.socket, what: str) -> tuple[bytes, tuple[str, int]]:
    """A datagram and its sender; where none comes, the message has the counters of all."""
    try:
        while (got := receiver.recvfrom(65536))[0] == SMALL:  # a late one
            pass
    except TimeoutError:
        counters = {name: count for name, count in bench.agent.status().dataplane.counters.items() if count}
        wanted = "^Ip:\\|^Udp:\\|^Icmp:\\|^Ip6Reasm\\|^Udp6"
        kernel = bench.lab.run(place, ["grep", "-h", wanted, "/proc/net/snmp", "/proc/net/snmp6"]).stdout
        kernel += bench.lab.run("node", ["grep", "-h", wanted, "/proc/net/snmp", "/proc/net/snmp6"]).stdout
        raise AssertionError(f"{what}: nothing came; {counters}\n{kernel}") from None
    return got[0], got[1][:2]


@pytest.mark.row("2.23", "fragments in any order, both ways")
def test_fragments_may_come_in_any_order(bench: Bench, family: int) -> None:
    """Of a datagram that opens a flow, and of the answer."""
    services = [service_of(bench, way.pod, way.spec) for way in FORWARDED]
    for way, service in zip(FORWARDED, services, strict=True):
        in_any_order(bench, way, target_of(bench, service, way.kind, family), family)


def in_any_order(bench: Bench, way: Way, target: Target, family: int) -> None:
    with (
        bench.socket(way.place, family, socket.SOCK_DGRAM, timeout=bound(1)) as client,
        bench.socket(way.pod, family, socket.SOCK_DGRAM, timeout=bound(1)) as server,
    ):
        server.bind((bench.lab[way.pod].address(family), ECHO))
        with bench.socket(way.place, family, socket.SOCK_DGRAM) as other:

            def serves() -> bool:
                other.sendto(SMALL, target)
                return server.recv(100) == SMALL

            patience = server.gettimeout()
            server.settimeout(0.1)
            eventually(serves, 8, f"{way}: nothing arrives at all")
            server.settimeout(patience)
        client.bind((bench.lab[way.place].address(family), 0))
        own = client.getsockname()[:2]
        for name, order in ORDERS.items():
            asked = random.randbytes(SIZE)
            send_pieces(bench, way.place, order(pieces_of(own, target, asked)), target)
            data, peer = heard(bench, way.pod, server, f"{way}, {name}")
            assert data == asked, (way, name)
            payload = random.randbytes(SIZE)
            answer = pieces_of((bench.lab[way.pod].address(family), ECHO), peer[:2], payload)
            send_pieces(bench, way.pod, order(answer), peer[:2])
            data, source = heard(bench, way.place, client, f"{way}, the answer, {name}")
            assert data == payload, (way, name)
            assert source[:2] == target, (way, name)


# Of the other modes the kernel's own conntrack, or its sockets, put the fragments together.
@every_mode_but("nftables", "iptables", "ipvs", "userspace")
@two_processors
@pytest.mark.row("2.23", "fragments in any order, both ways")
@pytest.mark.parametrize(("place", "way"), [("pod1", "cluster"), ("client", "nodeport")], ids=["pod1", "client"])
@pytest.mark.parametrize("begins", [False, True], ids=["of-an-open-flow", "of-new-flows"])
def test_two_processors_may_have_fragments_of_a_datagram_at_once(
    bench: Bench, place: str, way: str, begins: bool, family: int
) -> None:
    """The first one may become known while the other one is about to wait for it, and begin a flow after that."""
    service = service_of(bench, "pod2", {})
    target = target_of(bench, service, way, family)
    with bench.socket(place, family, socket.SOCK_DGRAM, timeout=0.5) as client:
        client.bind((bench.lab[place].address(family), 0))
        with echo(bench, "pod2", family):
            first_answer(client, SMALL, target, place)
        address, port = client.getsockname()[:2]

        sources = [(address, next(PORTS) if begins else port) for _ in range(COUNT)]
        datagrams = [pieces_of(source, target, number.to_bytes(4) * 400) for number, source in enumerate(sources)]
        first, last = zip(*datagrams, strict=True)
        got = set[int]()
        with inbox(bench, "pod2", family, ECHO) as server, suppress(TimeoutError):
            server.settimeout(bound(0.5))
            send_at_once(bench, place, (first, last), target[0])
            while len(got) < COUNT:
                got.add(int.from_bytes(server.recv(65536)[:4]))
    lost = sorted(set(range(COUNT)) - got)
    assert not lost, f"{len(lost)} of {COUNT} are lost: {lost[:9]}"
