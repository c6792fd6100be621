"""Builds a packet as bytes, to run programs on."""

from __future__ import annotations

import socket
import struct

ETHERNET = bytes(12)
SOURCE_PORT = 40000
SYN = 0x02


def first_packet(src: str, dst: str, port: int, protocol: int, source_port: int | None = None) -> bytes:
    """Returns the first packet of a connection: a SYN for TCP, an empty datagram otherwise.

    `protocol` is TCP, UDP or SCTP. The transport's checksum is 0. Without a `source_port` it is one of those that
    clients get.
    """
    ports = struct.pack("!HH", source_port or SOURCE_PORT, port)
    if protocol == socket.IPPROTO_TCP:
        transport = ports + struct.pack("!IIBBHHH", 1, 0, 5 << 4, SYN, 65535, 0, 0)
    else:
        transport = ports + struct.pack("!HH", 8, 0) + bytes(8)
    if ":" in dst:
        addresses = socket.inet_pton(socket.AF_INET6, src) + socket.inet_pton(socket.AF_INET6, dst)
        return (
            ETHERNET + b"\x86\xdd" + struct.pack("!IHBB", 6 << 28, len(transport), protocol, 64) + addresses + transport
        )
    addresses = socket.inet_aton(src) + socket.inet_aton(dst)
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(transport), 0, 0, 64, protocol, 0)
    total = sum(struct.unpack("!10H", header + addresses))  # RFC 1071
    check = struct.pack("!H", 0xFFFF - (total % 0xFFFF or 0xFFFF))
    return ETHERNET + b"\x08\x00" + header[:10] + check + addresses + transport
