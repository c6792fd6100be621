"""Datagrams of 8 kB over an MTU of 1500, both ways through a service, in order and not."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

from .at_once import inbox, send_at_once, two_processors
from .kit import V4, Bench, Service, counted, eventually, forget_path_mtus, ruleset
from .packets import Header, datagram, fragments
from .test_rows import target_of

SIZE = 8000
ECHO = 7007
COUNT = 300
PIECE = 1400  # bytes of a datagram in one fragment
LOCAL = {"externalTrafficPolicy": "Local"}
WAYS = [("pod1", "cluster", "pod2", {}), ("pod1", "cluster", "remote1", {}), ("pod1", "cluster", "pod1", {}),
        ("client", "nodeport", "pod2", {}), ("client", "nodeport", "pod2", LOCAL),
        ("client", "nodeport", "remote1", {}), ("client", "lb", "pod2", {}),
        ("node", "cluster", "remote1", {})]  # fmt: skip
IDS = ["-".join(way[:3]) + ("-local" if way[3] else "") for way in WAYS]
NUMBERS = itertools.count(1000)  # of datagrams
PORTS = itertools.count(10_000)
ORDERS: dict[str, Callable[[list[bytes]], Sequence[bytes]]] = {
    "in-order": lambda pieces: pieces,
    "reversed": lambda pieces: pieces[::-1],
    "first-last": lambda pieces: [*pieces[1:], pieces[0]],
    "second-first": lambda pieces: [pieces[1], pieces[0], *pieces[2:]],
    "doubled": lambda pieces: [*pieces[1:], *pieces, *pieces[1:]],
}
CONNTRACK = """
table inet tracking {
    chain forward { type filter hook forward priority 0; ct state invalid counter drop; }
}
"""


@pytest.fixture(params=[False, True], ids=["", "conntrack"])
def conntrack(bench: Bench, request: pytest.FixtureRequest) -> Iterator[None]:
    """Where conntrack works on the node, it puts fragments together on their way and they are cut again."""
    if not request.param:
        yield
        return
    with ruleset(bench.lab, CONNTRACK):
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
    """Whether the datagram comes back from where it went."""
    client.sendto(data, target)
    got, source = client.recvfrom(65536)
    return got == data and source[:2] == target


def service_of(bench: Bench, pod: str, spec: dict[str, str]) -> Service:
    return bench.service(pod, protocol="UDP", port=53, target=ECHO, outside=True, spec=spec, settle=False)


@pytest.mark.row("2.23", "datagrams larger than the MTU, both ways")
@pytest.mark.parametrize(("place", "way", "pod", "spec"), WAYS, ids=IDS)
def test_a_large_datagram_comes_back(
    bench: Bench, conntrack: None, place: str, way: str, pod: str, spec: dict[str, str], family: int
) -> None:
    service = service_of(bench, pod, spec)
    target = target_of(bench, service, way, family)
    with echo(bench, pod, family), bench.socket(place, family, socket.SOCK_DGRAM, timeout=0.5) as client:
        eventually(lambda: returned(client, b"small", target), 8, "nothing comes back at all")
        for _ in range(5):
            assert returned(client, random.randbytes(SIZE), target)


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
@pytest.mark.parametrize(
    ("place", "way", "spec"),
    [("client", "nodeport", {}), ("client", "cluster", {}), ("pod1", "nodeport", {}), ("pod1", "cluster", {}),
     ("client", "nodeport", LOCAL), ("remote2", "cluster", {})],
    ids=lambda value: value if isinstance(value, str) else "local" if value else "",
)  # fmt: skip
def test_fragments_fit_a_narrow_pod(
    bench: Bench, narrow_pod: str, place: str, way: str, spec: dict[str, str], family: int
) -> None:
    """Of IPv6 only the sender can cut them: it must learn the size that fits, by the first that is lost."""
    service = service_of(bench, narrow_pod, spec)
    target = target_of(bench, service, way, family)
    with echo(bench, narrow_pod, family), bench.socket(place, family, socket.SOCK_DGRAM, timeout=0.5) as client:
        eventually(lambda: returned(client, b"small", target), 8, "nothing comes back at all")
        eventually(lambda: returned(client, random.randbytes(4000), target), 5, "no large datagram comes back")
        for _ in range(3):
            assert returned(client, random.randbytes(4000), target)


def test_an_established_flow_of_large_datagrams_skips_the_stack(bench: Bench, mode: str, family: int) -> None:
    """After two seconds both pods' packets are handed over directly, fragments too."""
    service = service_of(bench, "pod2", {})
    with echo(bench, "pod2", family), bench.socket("pod1", family, socket.SOCK_DGRAM, timeout=0.5) as client:
        eventually(lambda: returned(client, b"small", service.vip(family)), 8, "nothing comes back at all")
        if mode == "ebpf":
            before = counted(bench.agent, "fast")
            data = random.randbytes(SIZE)
            eventually(
                lambda: returned(client, data, service.vip(family)) and counted(bench.agent, "fast") > before + 5,
                6, "no packet takes the short way",
            )  # fmt: skip
        for _ in range(5):
            assert returned(client, random.randbytes(SIZE), service.vip(family))


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
    """A datagram and its sender; where none comes, the message has the counters of the agent and of the receiver."""
    try:
        data, peer = receiver.recvfrom(65536)
    except TimeoutError:
        counters = {name: count for name, count in bench.agent.status().dataplane.counters.items() if "frag" in name}
        kernel = bench.lab.run(place, ["grep", "-h", "^Ip6*:\\|^Ip6Reasm", "/proc/net/snmp", "/proc/net/snmp6"]).stdout
        raise AssertionError(f"{what}: nothing came; {counters}\n{kernel}") from None
    return data, peer[:2]


REMOTE = [way for way in WAYS if way[0] != "node"]


@pytest.mark.row("2.23", "fragments in any order, both ways")
@pytest.mark.parametrize(("place", "way", "pod", "spec"), REMOTE, ids=IDS[: len(REMOTE)])
def test_fragments_may_come_in_any_order(
    bench: Bench, place: str, way: str, pod: str, spec: dict[str, str], family: int
) -> None:
    """Of a datagram that opens a flow, and of the answer."""
    service = service_of(bench, pod, spec)
    target = target_of(bench, service, way, family)
    with (
        bench.socket(place, family, socket.SOCK_DGRAM, timeout=1.0) as client,
        bench.socket(pod, family, socket.SOCK_DGRAM, timeout=1.0) as server,
    ):
        server.bind((bench.lab[pod].address(family), ECHO))
        with bench.socket(place, family, socket.SOCK_DGRAM, timeout=0.2) as other:

            def serves() -> bool:
                other.sendto(b"small", target)
                return server.recv(100) == b"small"

            server.settimeout(0.2)
            eventually(serves, 8, "nothing arrives at all")
            server.settimeout(1.0)
        client.bind((bench.lab[place].address(family), 0))
        own = client.getsockname()[:2]
        for name, order in ORDERS.items():
            asked = random.randbytes(SIZE)
            send_pieces(bench, place, order(pieces_of(own, target, asked)), target)
            data, peer = heard(bench, pod, server, name)
            assert data == asked, name
            payload = random.randbytes(SIZE)
            answer = pieces_of((bench.lab[pod].address(family), ECHO), peer[:2], payload)
            send_pieces(bench, pod, order(answer), peer[:2])
            data, source = heard(bench, place, client, f"the answer, {name}")
            assert data == payload, name
            assert source[:2] == target


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
            eventually(lambda: returned(client, b"small", target), 8, "nothing comes back at all")
        address, port = client.getsockname()[:2]
        sources = [(address, next(PORTS) if begins else port) for _ in range(COUNT)]
        datagrams = [pieces_of(source, target, number.to_bytes(4) * 400) for number, source in enumerate(sources)]
        first, last = zip(*datagrams, strict=True)
        with inbox(bench, "pod2", family, ECHO) as server:
            send_at_once(bench, place, (first, last), target[0])
            got = set()
            with suppress(TimeoutError):
                while len(got) < COUNT:
                    got.add(int.from_bytes(server.recv(65536)[:4]))
    lost = sorted(set(range(COUNT)) - got)
    assert not lost, f"{len(lost)} of {COUNT} are lost: {lost[:9]}"
