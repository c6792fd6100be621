"""Packets that stand for many, and packets with tags: as devices with offloads hand them to tc."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyroute2.netlink.exceptions import NetlinkError
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Raw

from controller.lab.traffic import ask_tcp, download

from .kit import UDP as UDP_PORT
from .kit import V4, Bench, eventually
from .test_fragments import counted
from .test_rows import target_of

SOL_UDP, UDP_SEGMENT = 17, 103  # linux/udp.h, Linux 4.18
ETH_P_ALL = 0x0003  # linux/if_ether.h
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
def big_segments(bench: Bench, *pods: str) -> Iterator[None]:
    """BIG TCP over IPv6 (Linux 5.19): the veths of these pods take packets of more than 64 KiB."""
    changed = []
    try:
        for name in pods:
            place = bench.lab[name]
            assert place.node is not None
            for where, device in ((place.node, place.interface), (name, "eth0")):
                link = bench.lab.netlink(where)
                index = link.link_lookup(ifname=device)[0]
                try:
                    link.link("set", index=index, gso_max_size=BIG, gro_max_size=BIG)
                except NetlinkError as error:
                    pytest.skip(f"this kernel has no BIG TCP: {error}")
                changed.append((link, index))
        yield
    finally:
        for link, index in changed:
            link.link("set", index=index, gso_max_size=65536, gro_max_size=65536)


@contextmanager
def longest(bench: Bench, place: str) -> Iterator[list[int]]:
    """The length of the longest frame that the place's interface saw, known when the block is over."""
    with bench.lab.inside(place):
        listener = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        listener.bind(("eth0", ETH_P_ALL))
    listener.settimeout(0.1)
    stop, seen = threading.Event(), [0]

    def listen() -> None:
        buffer = bytearray(64)
        while not stop.is_set():
            try:
                seen[0] = max(seen[0], listener.recv_into(buffer, 64, socket.MSG_TRUNC))
            except TimeoutError:
                continue

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
        listener.close()


def test_a_transfer_in_packets_of_more_than_64_kilobytes(bench: Bench, mode: str) -> None:
    if mode == "iptables":
        pytest.skip("mode iptables does not carry such packets through ip6tables")
    family = socket.AF_INET6
    service = bench.service("pod2")
    with (
        big_segments(bench, "pod1", "pod2"),
        longest(bench, "pod2") as seen,
        bench.connect("pod1", service.vip(family), family, timeout=4.0) as connection,
    ):
        for _ in range(3):
            assert ask_tcp(connection, body=bytes(8_000_000)).received == 8_000_000
            assert download(connection, 8_000_000) == 8_000_000
    assert seen[0] > 70_000, f"the longest packet had {seen[0]} bytes: this proves nothing"


NUMBERS = itertools.count(41000)


@pytest.mark.parametrize("tag", [0, 10], ids=["priority-tag", "vlan"])
def test_tagged_frames(bench: Bench, mode: str, tag: int, family: int) -> None:
    """A tag that only tells a priority changes nothing; a VLAN that the node is not in is not served."""
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
        frame = bytes(Ether(dst=node_mac, type=0x8100) / Dot1Q(vlan=tag, prio=5, type=kind) / payload)
        with lab.inside("client"):
            raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            raw.bind(("to-node", 0))
        before = counted(bench, "new_flow") if mode == "ebpf" else 0
        with raw:
            raw.send(frame)
        if tag:
            with pytest.raises(TimeoutError):
                client.recv(65536)
            assert mode != "ebpf" or counted(bench, "new_flow") == before, "it was translated"
        else:
            data, peer = client.recvfrom(65536)
            assert b"pod2" in data
            assert peer[:2] == target
