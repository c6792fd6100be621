"""Packets that stand for many, and packets with tags: as devices with offloads hand them to tc."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from pyroute2.netlink.exceptions import NetlinkError
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Raw
from vm.features import missing

from hybrid_proxy.workshop.lab.traffic import ask_tcp, download

from .kit import HTTP, V4, Bench, counted, eventually
from .kit import UDP as UDP_PORT
from .test_rows import target_of

SOL_UDP, UDP_SEGMENT = 17, 103  # linux/udp.h, Linux 4.18
ETH_P_ALL = 0x0003  # linux/if_ether.h
SO_ATTACH_FILTER = 26  # asm-generic/socket.h
COUNT, SIZE, ECHO = 40, 1000, 7008
BIG = 180_000
WAYS = [("pod1", "cluster", "pod2"), ("pod1", "cluster", "remote1"), ("client", "nodeport", "pod2"),
        ("client", "nodeport", "remote1")]  # fmt: skip
IDS = ["-".join(way) for way in WAYS]


@pytest.mark.parametrize(("place", "way", "pod"), WAYS, ids=IDS)
def test_datagrams_that_are_sent_as_one(bench: Bench, place: str, way: str, pod: str, family: int) -> None:
    """UDP GSO, both ways: one send, many datagrams, each of them through the service."""
    service = bench.service(pod, protocol="UDP", port=53, target=ECHO, outside=True, settle=False)
    target = target_of(bench, service, way, family)
    parts = [bytes([number]) * SIZE for number in range(COUNT)]
    with (
        bench.socket(pod, family, socket.SOCK_DGRAM, timeout=0.3) as server,
        bench.socket(place, family, socket.SOCK_DGRAM, timeout=1.0) as client,
    ):
        server.bind((bench.lab[pod].address(family), ECHO))
        for one in (server, client):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)

        def serves() -> bool:
            client.sendto(b"", target)
            return server.recv(100) == b""

        eventually(serves, 8, "nothing arrives at all")
        client.setsockopt(SOL_UDP, UDP_SEGMENT, SIZE)
        client.sendto(b"".join(parts), target)
        seen = []
        for _ in parts:
            data, peer = server.recvfrom(65536)
            seen.append(data)
        assert seen == parts
        server.setsockopt(SOL_UDP, UDP_SEGMENT, SIZE)
        server.sendto(b"".join(parts), peer)
        answers = [client.recvfrom(65536) for _ in parts]
        assert [data for data, _ in answers] == parts
        assert {source[:2] for _, source in answers} == {target}


@contextmanager
def big_segments(bench: Bench, *places: str) -> Iterator[None]:
    """BIG TCP over IPv6 (Linux 5.19): the links between these and the node take packets of more than 64 KiB."""
    devices = [("node", "eth0"), ("client", "eth0"), ("client", "to-node")]
    for name in places:
        if bench.lab[name].node == "node":
            devices += [("node", bench.lab[name].interface), (name, "eth0")]
    changed = []
    try:
        for where, device in devices:
            link = bench.lab.netlink(where)
            index = link.link_lookup(ifname=device)[0]
            try:
                link.link("set", index=index, gso_max_size=BIG, gro_max_size=BIG)
            except NetlinkError as error:
                missing("BIG TCP over IPv6", str(error))
            changed.append((link, index))
        yield
    finally:
        for link, index in changed:
            link.link("set", index=index, gso_max_size=65536, gro_max_size=65536)


# Linux's classic BPF, linux/filter.h: frames that came in and are too long for the length in IPv6's header.
LONG_ONES = struct.pack(
    "=" + "HBBI" * 6,
    *(0x20, 0, 0, 0xFFFFF004),  # the packet's type, SKF_AD_OFF + SKF_AD_PKTTYPE
    *(0x15, 3, 0, socket.PACKET_OUTGOING),
    *(0x80, 0, 0, 0),  # its length
    *(0x25, 0, 1, 65_600),
    *(0x06, 0, 0, 64),
    *(0x06, 0, 0, 0),
)


@contextmanager
def long_ones(bench: Bench, place: str) -> Iterator[Callable[[], bool]]:
    """Whether a frame of more than 64 KiB came in at the place's interface."""
    with bench.lab.inside(place):
        listener = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    with listener:
        code = ctypes.create_string_buffer(LONG_ONES)
        program = struct.pack("@HP", len(LONG_ONES) // 8, ctypes.addressof(code))
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        listener.bind(("eth0", ETH_P_ALL))
        listener.setblocking(False)

        def came() -> bool:
            try:
                return bool(listener.recv(64))
            except BlockingIOError:
                return False

        yield came


@pytest.fixture(scope="module")
def forwarded(bench: Bench) -> bool:
    """Whether this kernel, as a router without any proxy, carries BIG TCP over IPv6.

    Before 7.0 it takes the extra header that such packets have on their way for a part of what they stand for, finds
    them eight bytes too long and drops them (skb_gso_validate_network_len).
    """
    with (
        big_segments(bench, "pod1", "pod3"),
        long_ones(bench, "pod3") as came,
        bench.connect("pod1", (bench.lab["pod3"].address6, HTTP), socket.AF_INET6, timeout=1.0) as connection,
    ):
        with contextlib.suppress(TimeoutError):
            ask_tcp(connection, body=bytes(4_000_000))
        return came()


@pytest.mark.parametrize(("place", "way"), [("pod1", "cluster"), ("client", "nodeport")])
def test_a_transfer_in_packets_of_more_than_64_kilobytes(
    bench: Bench, mode: str, place: str, way: str, request: pytest.FixtureRequest
) -> None:
    """Between two pods, and between a masqueraded client outside and a pod."""
    if mode not in {"ebpf", "userspace"} and not request.getfixturevalue("forwarded"):
        missing("forwarding of BIG TCP over IPv6")  # the modes in netfilter leave that to the kernel
    service = bench.service("pod2", outside=True)
    target = target_of(bench, service, way, socket.AF_INET6)
    with (
        big_segments(bench, "pod1", "pod2"),
        long_ones(bench, "pod2") as came_to_pod,
        long_ones(bench, place) as came_to_client,
        bench.connect(place, target, socket.AF_INET6, timeout=30.0) as connection,
    ):
        for _ in range(3):
            assert ask_tcp(connection, body=bytes(8_000_000)).received == 8_000_000
            assert download(connection, 8_000_000) == 8_000_000
        assert came_to_pod(), "no packet was that long"
        assert came_to_client(), "no answer was that long"


NUMBERS = itertools.count(41000)


@pytest.mark.parametrize("tags", [(0,), (0, 0), (0, 0, 0), (10,), (0, 10)], ids=str)
def test_tagged_frames(bench: Bench, mode: str, tags: tuple[int, ...], family: int) -> None:
    """Tags that only carry a priority change nothing; a VLAN that the node is not in is not served."""
    service = bench.service("pod2", protocol="UDP", port=53, target=UDP_PORT, outside=True)
    target = target_of(bench, service, "nodeport", family)
    lab = bench.lab
    node = lab.netlink("node")
    node_mac = node.get_links(node.link_lookup(ifname="eth0")[0])[0].get_attr("IFLA_ADDRESS")
    with lab.socket("client", family, socket.SOCK_DGRAM) as client:
        client.bind((lab["client"].address(family), next(NUMBERS)))
        client.settimeout(0.5)
        source = client.getsockname()[:2]
        head = IP(src=source[0], dst=target[0]) if family == V4 else IPv6(src=source[0], dst=target[0])
        payload = head / UDP(sport=source[1], dport=target[1]) / Raw(b"who?")
        kind = 0x0800 if family == V4 else 0x86DD
        kinds = [*[0x8100] * (len(tags) - 1), kind]
        for tag, inner in zip(reversed(tags), reversed(kinds), strict=True):
            payload = Dot1Q(vlan=tag, prio=5, type=inner) / payload
        frame = bytes(Ether(dst=node_mac, type=0x8100) / payload)
        with lab.inside("client"):
            raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            raw.bind(("to-node", 0))
        before = counted(bench.agent, "new_flow") if mode == "ebpf" else 0
        with raw:
            raw.send(frame)
        if any(tags):
            with pytest.raises(TimeoutError):
                client.recv(65536)
            assert mode != "ebpf" or counted(bench.agent, "new_flow") == before, "it was translated"
        else:
            data, peer = client.recvfrom(65536)
            assert b"pod2" in data
            assert peer[:2] == target
