"""Encodes keys and values of sets as bytes, and decodes them."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Callable

from hybrid_proxy.dataplane.kernel.netlink import AF
from hybrid_proxy.dataplane.nftables.expressions import Family
from hybrid_proxy.dataplane.nftables.schema import ADDRESS, PORT, PROTOCOL, RANGE, SLOT, Key, width


class Codec:
    """Encodes and decodes the keys and values of one family."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._af = AF[family.version]

    def address(self, text: str) -> bytes:
        """Encode an address as packets have it."""
        return socket.inet_pton(self._af, text)

    def encoder(self, fields: tuple[str, ...]) -> Callable[[Key], bytes]:
        """Returns key -> bytes. Slots of one frontend follow each other, so their common part is encoded once."""
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
        """Returns the first and last key of a key that ends in a CIDR."""
        network = ipaddress.ip_network(str(key[-1]))
        start = self.encoder(fields[:-1])(key[:-1])
        return start + network.network_address.packed, start + network.broadcast_address.packed

    def decoder(self, fields: tuple[str, ...]) -> Callable[[bytes], Key]:
        """Returns bytes -> key. The common part of a frontend's slots is decoded once."""
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

        def one(field: str, data: bytes) -> str | int:
            if field in {ADDRESS, RANGE}:
                found = known.get(data)
                if found is None:
                    found = known[data] = socket.inet_ntop(self._af, data)
                return found
            return int.from_bytes(data, "big" if field in {PORT, PROTOCOL} else sys.byteorder)

        return lambda data: tuple([one(field, data[start:end]) for field, start, end in places])


def cidr_between(first: str, last: str) -> str:
    """Returns the CIDR that begins and ends with these addresses."""
    networks = ipaddress.summarize_address_range(ipaddress.ip_address(first), ipaddress.ip_address(last))
    return str(next(iter(networks)))
