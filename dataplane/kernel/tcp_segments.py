"""Sends TCP segments in the name of a service, by raw sockets (raw(7), ipv6(7)).

A reset with the sequence number that its receiver expects ends the connection (RFC 9293, 3.10.7.4). To a SYN/ACK the
end of an open connection replies by a challenge ACK (RFC 5961, 4.2), and connection tracking begins nothing for one.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.kernel.netlink import AF

RESET, SYN_ACK = 0x04, 0x12
_TCP4: Final = struct.Struct("!HHIIBBHHH")


class Segment(NamedTuple):
    """A segment. Addresses are packed, ports two bytes in network order."""

    family: int
    source: bytes
    source_port: bytes
    target: bytes
    target_port: bytes
    sequence: int = 0
    flags: int = RESET


def checksum(data: bytes) -> int:
    """Returns the Internet checksum (RFC 1071)."""
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def packed(segment: Segment) -> bytes:
    """Returns the IP packet."""
    source, target = (int.from_bytes(port, "big") for port in (segment.source_port, segment.target_port))

    def tcp(check: int) -> bytes:
        return _TCP4.pack(source, target, segment.sequence, 0, 5 << 4, segment.flags, 0, check, 0)

    ends = segment.source + segment.target
    content = tcp(checksum(ends + struct.pack("!II", _TCP4.size, socket.IPPROTO_TCP) + tcp(0)))
    if segment.family == 6:
        return struct.pack("!IHBB", 6 << 28, len(content), socket.IPPROTO_TCP, 64) + ends + content
    # The kernel fills in the length, the identification and the checksum of an IPv4 header.
    return struct.pack("!BBHHHBBH", 0x45, 0, 0, 0, 0, 64, socket.IPPROTO_TCP, 0) + ends + content


def send(segments: Iterable[Segment]) -> int:
    """Send them. Returns how many were sent; those without a route, or that a rule drops, are skipped.

    Raises:
        OSError: EPERM without CAP_NET_RAW.
    """
    sent = 0
    with contextlib.ExitStack() as stack:
        senders: dict[int, socket.socket] = {}
        for segment in segments:
            sender = senders.get(segment.family)
            if sender is None:
                sender = stack.enter_context(socket.socket(AF[segment.family], socket.SOCK_RAW, socket.IPPROTO_RAW))
                senders[segment.family] = sender
            with contextlib.suppress(OSError):
                sender.sendto(packed(segment), (socket.inet_ntop(AF[segment.family], segment.target), 0))
                sent += 1
    return sent
