"""2.18: a segment outside the window, of a connection that is translated, must not cost the connection.

Conntrack calls it INVALID and translates nothing of it, so the backend's own address leaves the node. A client that
gets it knows no such connection and answers with a reset, which the backend believes (kubernetes #74839).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import pytest

from workshop.lab.traffic import ask_tcp

from .kit import HTTP, V4, V6, Bench
from .test_rows import target_of
from .world import World

ETH_P_ALL = 0x0003  # linux/if_ether.h
IPV6_CHECKSUM = 7  # linux/in6.h: where the kernel puts the sum of a raw packet
ACK, PUSH, RST = 0x10, 0x08, 0x04
FAR = 1 << 29  # beyond any window that was offered here, and still ahead in the circle of sequence numbers


class Segment(NamedTuple):
    """What matters here of a TCP segment (RFC 9293)."""

    source: tuple[str, int]
    target: tuple[str, int]
    sequence: int
    acknowledged: int
    flags: int
    size: int  # of its data


def read_segment(frame: bytes) -> Segment | None:
    """A frame without its Ethernet header; None: no TCP. Nobody here sends options of IP or extension headers."""
    if frame[0] >> 4 == 4:
        protocol, addresses, start = frame[9], (frame[12:16], frame[16:20]), 20
        end, family = struct.unpack_from("!H", frame, 2)[0], V4
    else:
        protocol, addresses, start = frame[6], (frame[8:24], frame[24:40]), 40
        end, family = 40 + struct.unpack_from("!H", frame, 4)[0], V6
    if protocol != socket.IPPROTO_TCP:
        return None
    sport, dport, sequence, acknowledged, offset, flags = struct.unpack_from("!HHIIBB", frame, start)
    source, target = (socket.inet_ntop(family, address) for address in addresses)
    return Segment((source, sport), (target, dport), sequence, acknowledged, flags, end - start - (offset >> 4) * 4)


@contextmanager
def wire(bench: Bench, place: str) -> Iterator[Callable[[], Iterator[Segment]]]:
    """Listen at the interface of a place (packet(7)): what it yields returns the segments since its last call."""
    with bench.lab.inside(place):
        listener = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
        listener.bind(("eth0", ETH_P_ALL))
    listener.setblocking(False)

    def captured() -> Iterator[Segment]:
        with suppress(BlockingIOError):
            while frame := listener.recv(65536):
                if segment := read_segment(frame):
                    yield segment

    with listener:
        yield captured


def send_far_ahead(bench: Bench, place: str, last: Segment, family: int) -> int:
    """Say again what was said last, but far outside the window; its sequence number."""
    with bench.lab.socket(place, family, socket.SOCK_RAW, socket.IPPROTO_TCP) as raw:
        sequence = (last.sequence + FAR) % (1 << 32)
        ports = last.source[1], last.target[1]
        header = struct.pack("!HHIIBBHHH", *ports, sequence, last.acknowledged, 5 << 4, ACK | PUSH, 500, 0, 0)
        data = header + b"late"
        if family == V4:
            addresses = b"".join(socket.inet_aton(address) for address, _ in (last.source, last.target))
            summed = internet_sum(addresses + struct.pack("!HH", socket.IPPROTO_TCP, len(data)) + data)
            data = data[:16] + struct.pack("!H", summed) + data[18:]
        else:
            raw.setsockopt(socket.IPPROTO_IPV6, IPV6_CHECKSUM, 16)
        raw.sendto(data, (last.target[0], 0))
    return sequence


def internet_sum(data: bytes) -> int:
    """RFC 1071, of an even number of bytes."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


# Where both ends are beyond the node. What is masqueraded comes back to the node itself, whose own reset not every mode
# spares the backend: a proxy that drops what is sent to the node would be a firewall.
WAYS = [("pod1", "one", "cluster"), ("client", "local", "lb")]


@pytest.mark.core
@pytest.mark.row("2.18", "a segment outside the window resets no connection")
@pytest.mark.parametrize(("place", "name", "way"), WAYS, ids=["-".join(way) for way in WAYS])
def test_a_segment_outside_the_window_resets_nothing(
    world: World, mode: str, place: str, name: str, way: str, family: int
) -> None:
    bench, pod = world.bench, world.bench.lab["pod2"]
    target = target_of(bench, world.services[name], way, family)
    with wire(bench, "pod2") as captured, bench.connect(place, target, family) as connection:
        assert ask_tcp(connection).pod == "pod2"
        served = (pod.address(family), HTTP)
        last = next(s for s in reversed(list(captured())) if s.source == served and s.size)
        sequence = send_far_ahead(bench, "pod2", last, family)
        assert ask_tcp(connection).pod == "pod2"
        seen = list(captured())
    assert any(segment.sequence == sequence for segment in seen), "nothing was sent"
    resets = [segment for segment in seen if segment.flags & RST]
    assert not resets, f"the backend got a reset: {resets}"
