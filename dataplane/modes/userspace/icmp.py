"""Rejects datagrams of clients by ICMP and ICMPv6 port unreachable (RFC 792, RFC 4443).

A UDP socket cannot reject. The message quotes the client's packet as it reached the proxy port; conntrack translates
the quoted packet, as it does in the kernel's own errors.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Final

from hybrid_proxy.dataplane.kernel.netlink import AF
from hybrid_proxy.dataplane.kernel.tcp_segments import checksum

_V4: Final = struct.Struct("!BBHHHBBH4s4s")
_V6: Final = struct.Struct("!IHBB16s16s")
_UDP: Final = struct.Struct("!HHHH")
PER_SECOND: Final = 1000
QUOTED: Final = 64  # bytes of the client's datagram


class IcmpErrors:
    """Sends ICMP errors by raw sockets, which are opened for the first error; without CAP_NET_RAW nothing is sent.

    At most `PER_SECOND` messages are sent in a second, so that a flood with forged sources is not reflected (RFC 1812
    4.3.2.8, RFC 4443 2.4 (f)).
    """

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket | None] = {}
        self._left = float(PER_SECOND)
        self._at = 0.0

    def send_port_unreachable(
        self, family: int, client: tuple[str, int], listener: tuple[str, int], data: bytes
    ) -> None:
        """Tells the client that its datagram to that listener reached no backend."""
        if not self.ratelimit_allow(time.monotonic()):
            return
        if family not in self._sockets:
            self._sockets[family] = _open(family)
        raw = self._sockets[family]
        if raw is not None:
            with contextlib.suppress(OSError):
                raw.sendto(message(family, client, listener, data), (client[0], 0))

    def ratelimit_allow(self, now: float) -> bool:
        """Tells whether one more message may be sent at this time, and counts it."""
        self._left = min(PER_SECOND, self._left + (now - self._at) * PER_SECOND)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _open(family: int) -> socket.socket | None:
    try:
        protocol = socket.IPPROTO_ICMP if family == 4 else socket.IPPROTO_ICMPV6
        return socket.socket(AF[family], socket.SOCK_RAW | socket.SOCK_NONBLOCK, protocol)
    except OSError:
        return None


def message(family: int, client: tuple[str, int], listener: tuple[str, int], data: bytes) -> bytes:
    """Returns port unreachable for a datagram of the client. The kernel adds the checksum of ICMPv6."""
    udp = _UDP.pack(client[1], listener[1], _UDP.size + len(data), 0) + data[:QUOTED]
    addresses = [socket.inet_pton(AF[family], address) for address in (client[0], listener[0])]
    if family == 6:
        inner = _V6.pack(6 << 28, _UDP.size + len(data), socket.IPPROTO_UDP, 64, *addresses) + udp
        return struct.pack("!BBHI", 1, 4, 0, 0) + inner
    head = _V4.pack(0x45, 0, _V4.size + _UDP.size + len(data), 0, 0, 64, socket.IPPROTO_UDP, 0, *addresses)
    head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
    body = head + udp
    return struct.pack("!BBHI", 3, 3, checksum(struct.pack("!BBHI", 3, 3, 0, 0) + body), 0) + body
