"""PURE. Frames packed by hand, so that every field can be wrong, and read again as what identifies them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

__all__ = [
    "FIN",
    "ACK",
    "PUSH",
    "RST",
    "SYN",
    "Header",
    "Read",
    "datagram",
    "ether",
    "fragments",
    "icmp_error",
    "packet",
    "read",
    "segment",
]

FIN, SYN, RST, PUSH, ACK = 0x01, 0x02, 0x04, 0x08, 0x10
TCP, UDP, ICMP, ICMP6 = socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_ICMP, socket.IPPROTO_ICMPV6
FRAGMENT: Final = 44
EXTENSIONS: Final = {0, 43, FRAGMENT, 60}  # hop-by-hop, routing, fragment, destination options
ETHERTYPE: Final = {4: 0x0800, 6: 0x86DD}


@dataclass(frozen=True)
class Header:
    """What an IP header says; None: what is right."""

    source: str
    target: str
    version: int | None = None
    words: int | None = None  # IPv4: its length
    length: int | None = None  # IPv4: of the packet; IPv6: of what follows
    check: int | None = None
    options: bytes = b""  # IPv4: a multiple of four bytes
    fragment: int = 0  # IPv4: flags and offset
    extensions: tuple[tuple[int, bytes], ...] = ()  # IPv6: number and the bytes after its first one
    ident: int = 1
    ttl: int = 64

    @property
    def family(self) -> int:
        """4 or 6."""
        return 6 if ":" in self.source else 4


def _packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def internet_sum(data: bytes) -> int:
    """RFC 1071."""
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ether(target: bytes, source: bytes, family: int, content: bytes) -> bytes:
    return target + source + struct.pack("!H", ETHERTYPE[family]) + content


def packet(header: Header, protocol: int, content: bytes) -> bytes:
    """One IP packet."""
    return (_packet4 if header.family == 4 else _packet6)(header, protocol, content)


def fragments(header: Header, protocol: int, content: bytes, cuts: Iterable[tuple[int, int | None]]) -> Iterator[bytes]:
    """One IP packet in pieces, each from one byte of its content to another; None: to its end."""
    for start, end in cuts:
        part, more = content[start:end], end is not None
        if header.family == 4:
            yield packet(replace(header, fragment=start // 8 | more << 13), protocol, part)
        else:
            body = struct.pack("!BHI", 0, start | more, header.ident)
            yield packet(replace(header, extensions=((FRAGMENT, body),)), protocol, part)


def _packet4(h: Header, protocol: int, content: bytes) -> bytes:
    words = 5 + len(h.options) // 4
    first = (4 if h.version is None else h.version) << 4 | (words if h.words is None else h.words)
    length = words * 4 + len(content) if h.length is None else h.length
    head = struct.pack("!BBHHHBBH", first, 0, length, h.ident, h.fragment, h.ttl, protocol, 0)
    head += _packed(h.source) + _packed(h.target) + h.options
    check = internet_sum(head) if h.check is None else h.check
    return head[:10] + struct.pack("!H", check) + head[12:] + content


def _packet6(h: Header, protocol: int, content: bytes) -> bytes:
    following = protocol
    for number, body in reversed(h.extensions):
        content = bytes([following]) + body + content
        following = number
    length = len(content) if h.length is None else h.length
    first = (6 if h.version is None else h.version) << 28
    head = struct.pack("!IHBB", first, length, following, h.ttl)
    return head + _packed(h.source) + _packed(h.target) + content


def _pseudo(header: Header, protocol: int, length: int) -> bytes:
    return _packed(header.source) + _packed(header.target) + struct.pack("!II", length, protocol)


def segment(header: Header, ports: tuple[int, int], sequence: int, acknowledged: int, flags: int, data: bytes,
            *, words: int = 5) -> bytes:  # fmt: skip
    """TCP (RFC 9293), without options; `words` is the length that its header claims."""
    head = struct.pack("!HHIIBBHHH", *ports, sequence % 2**32, acknowledged % 2**32, words << 4, flags, 500, 0, 0)
    whole = head + data
    return whole[:16] + struct.pack("!H", internet_sum(_pseudo(header, TCP, len(whole)) + whole)) + whole[18:]


def datagram(header: Header, ports: tuple[int, int], data: bytes, *, length: int | None = None) -> bytes:
    """UDP (RFC 768); `length` is what its header claims."""
    said = 8 + len(data) if length is None else length
    whole = struct.pack("!HHHH", *ports, said, 0) + data
    check = internet_sum(_pseudo(header, UDP, said) + whole) or 0xFFFF
    return whole[:6] + struct.pack("!H", check) + data


def icmp_error(header: Header, kind: int, code: int, value: int, quoted: bytes) -> bytes:
    """An error about a packet (RFC 792, RFC 4443)."""
    whole = struct.pack("!BBHI", kind, code, 0, value) + quoted
    check = internet_sum(whole if header.family == 4 else _pseudo(header, ICMP6, len(whole)) + whole)
    return whole[:2] + struct.pack("!H", check) + whole[4:]


def _is_error(protocol: int, kind: bytes) -> bool:
    return bool(kind) and ((protocol == ICMP and kind[0] in {3, 4, 5, 11, 12}) or (protocol == ICMP6 and kind[0] < 128))


class Read(NamedTuple):
    """What a packet is, and what an error that it carries quotes. Ports are 0 where there are none."""

    protocol: int
    source: tuple[str, int]
    target: tuple[str, int]
    flags: int = 0
    sequence: int = 0
    acknowledged: int = 0
    size: int = 0  # of TCP's data
    quoted: Read | None = None


def read(content: bytes) -> Read | None:
    """An IP packet; None: none that has addresses."""
    if len(content) >= 20 and content[0] >> 4 == 4:
        family, start, protocol = socket.AF_INET, (content[0] & 15) * 4, content[9]
        addresses, end = (content[12:16], content[16:20]), struct.unpack_from("!H", content, 2)[0]
        if struct.unpack_from("!H", content, 6)[0] & 0x1FFF:
            start = len(content)
    elif len(content) >= 40 and content[0] >> 4 == 6:
        family, start, protocol = socket.AF_INET6, 40, content[6]
        addresses, end = (content[8:24], content[24:40]), 40 + struct.unpack_from("!H", content, 4)[0]
        while protocol in EXTENSIONS and start + 8 <= len(content):
            if protocol == FRAGMENT and struct.unpack_from("!H", content, start + 2)[0] & 0xFFF8:
                start = len(content)
                break
            length = 8 if protocol == FRAGMENT else (content[start + 1] + 1) * 8
            protocol, start = content[start], start + length
    else:
        return None
    source, target = (socket.inet_ntop(family, address) for address in addresses)
    if _is_error(protocol, content[start : start + 1]):
        return Read(protocol, (source, 0), (target, 0), quoted=read(content[start + 8 :]))
    if protocol not in {TCP, UDP} or len(content) < start + 4:
        return Read(protocol, (source, 0), (target, 0))
    ports = struct.unpack_from("!HH", content, start)
    ends = (source, ports[0]), (target, ports[1])
    if protocol == UDP or len(content) < start + 20:
        return Read(protocol, *ends)
    sequence, acknowledged, offset, flags = struct.unpack_from("!IIBB", content, start + 4)
    return Read(protocol, *ends, flags, sequence, acknowledged, end - start - (offset >> 4) * 4)
