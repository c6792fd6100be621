"""Keys and values of sets as octets, and back."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

from dataplane.modes.nftables.expressions import Family
from dataplane.modes.nftables.lower import ADDRESS, NUMBER, PORT, PROTOCOL, RANGE, SLOT, VERDICT, Key

__all__ = ["Codec", "cidr_between", "length", "type_of", "width"]

# nft's own numbers of types (its include/datatype.h): they only say how to list a set.
_TYPE: Final = {PROTOCOL: 12, PORT: 13, SLOT: 19, NUMBER: 23}


def width(family: Family, field: str) -> int:
    """Octets of a field; in a concatenation each is padded to four."""
    if field in {ADDRESS, RANGE}:
        return family.length
    return {PROTOCOL: 1, PORT: 2, SLOT: 4, NUMBER: 4, VERDICT: 0}[field]


def length(family: Family, fields: Sequence[str]) -> int:
    """Octets of a key or of data."""
    if len(fields) == 1:
        return width(family, fields[0])
    return sum(-(-width(family, field) // 4) * 4 for field in fields)


def type_of(family: Family, fields: Sequence[str]) -> int:
    """Nft's number of a concatenation: six bits for each field."""
    number = 0
    for field in fields:
        number = number << 6 | (_TYPE.get(field) or (7 if family.version == 4 else 8))
    return number


class Codec:
    """Keys and values of one family as octets and back."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._af = socket.AF_INET if family.version == 4 else socket.AF_INET6

    def address(self, text: str) -> bytes:
        """An address as packets have it."""
        return socket.inet_pton(self._af, text)

    def encoder(self, fields: tuple[str, ...]) -> Callable[[Key], bytes]:
        """Key -> octets. The slots of one frontend follow each other: what they share is made once."""
        if fields[:1] == (SLOT,) and len(fields) > 1:
            rest = self.encoder(fields[1:])
            last: list[tuple[Key, bytes]] = [((), b"")]

            def slot(key: Key) -> bytes:
                if last[0][0] != key[1:]:
                    last[0] = (key[1:], rest(key[1:]))
                return int(key[0]).to_bytes(4, sys.byteorder) + last[0][1]

            return slot
        alone = len(fields) == 1

        def one(field: str, value: str | int) -> bytes:
            if isinstance(value, str):
                return self.address(value)
            if field == PORT:
                return value.to_bytes(2, "big") + (b"" if alone else bytes(2))
            if field == PROTOCOL:
                return bytes([value]) if alone else bytes([value, 0, 0, 0])
            return value.to_bytes(4, sys.byteorder)

        return lambda key: b"".join([one(field, value) for field, value in zip(fields, key, strict=True)])

    def range_ends(self, fields: tuple[str, ...], key: Key) -> tuple[bytes, bytes]:
        """First and last key of a key that ends in a CIDR."""
        network = ipaddress.ip_network(str(key[-1]))
        start = self.encoder(fields[:-1])(key[:-1])
        return start + network.network_address.packed, start + network.broadcast_address.packed

    def decoder(self, fields: tuple[str, ...]) -> Callable[[bytes], Key]:
        """Octets -> key. What the slots of one frontend share is made once."""
        if fields[:1] == (SLOT,) and len(fields) > 1:
            rest = self.decoder(fields[1:])
            tails: dict[bytes, Key] = {}

            def slot(data: bytes) -> Key:
                tail = tails.get(data[4:])
                if tail is None:
                    tail = tails[data[4:]] = rest(data[4:])
                return (int.from_bytes(data[:4], sys.byteorder), *tail)

            return slot
        alone = len(fields) == 1
        places: list[tuple[str, int, int]] = []
        offset = 0
        for field in fields:
            wide = width(self.family, field)
            places.append((field, offset, offset + wide))
            offset += wide if alone else -(-wide // 4) * 4
        known: dict[bytes, str] = {}

        def one(field: str, octets: bytes) -> str | int:
            if field in {ADDRESS, RANGE}:
                found = known.get(octets)
                if found is None:
                    found = known[octets] = socket.inet_ntop(self._af, octets)
                return found
            return int.from_bytes(octets, "big" if field in {PORT, PROTOCOL} else sys.byteorder)

        return lambda data: tuple([one(field, data[start:end]) for field, start, end in places])

    def decode(self, fields: tuple[str, ...], data: bytes) -> Key:
        """One key."""
        return self.decoder(fields)(data)


def cidr_between(first: str, last: str) -> str:
    """The CIDR whose first and last address these are."""
    networks = ipaddress.summarize_address_range(ipaddress.ip_address(first), ipaddress.ip_address(last))
    return str(next(iter(networks)))
