"""PURE. Maps the addresses of programmed services to keys of the programs' maps, and back to names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.reports import BackendRow, ServiceRow
from hybrid_proxy.dataplane.table import socket_text

PROTOCOLS: Final = {"TCP": 6, "UDP": 17, "SCTP": 132}
_V4: Final = bytes(10) + b"\xff\xff"  # RFC 4291, 2.5.5.2
_NODE_PORT: Final = re.compile(r"node port (\d+)")


class Place(NamedTuple):
    """An address (16 bytes), a port and a protocol's number."""

    address: bytes
    port: int
    protocol: int


class Targets(NamedTuple):
    """The measured places and backends, each with the index of its service's name."""

    names: tuple[str, ...]
    places: Mapping[Place, int]
    backends: Mapping[Place, int]


def mapped(text: str) -> bytes:
    """Returns the 16 bytes of an address; IPv4 as an IPv4-mapped one."""
    address = ip_address(text)
    return _V4 + address.packed if isinstance(address, IPv4Address) else address.packed


def unmapped(address: bytes) -> str:
    """Returns the text of an address of 16 bytes."""
    return str(IPv4Address(address[12:]) if address.startswith(_V4) else IPv6Address(address))


def place_text(address: bytes, port: int) -> str:
    """Returns `10.0.0.1:80` or `[fd00::1]:80`; without a port, the address alone."""
    text = unmapped(address)
    return socket_text(text, port) if port else text


def place_of(text: str, protocol: str) -> Place:
    host, _, port = text.rpartition(":")
    return Place(mapped(host.strip("[]")), int(port), PROTOCOLS[protocol])


def of_services(
    services: Sequence[ServiceRow], backends: Iterable[BackendRow], node: Sequence[str], *, to: Place | None = None
) -> Targets:
    """Selects all services, or one destination, of a service or not. `node` are its addresses, for node ports."""
    names: list[str] = []
    places: dict[Place, int] = {}
    for row in services:
        name = row.name or "?"
        if name not in names:
            names.append(name)
        for text in row.frontends:
            for place in _frontend(text, row.protocol, node):
                places.setdefault(place, names.index(name))
    if to is not None and to not in places:
        return Targets((place_text(to.address, to.port),), {to: 0}, {to: 0})
    if to is not None:
        names, places = [names[places[to]]], {to: 0}
    served = {place_of(row.address, row.protocol): row.service for row in backends if row.service in names}
    return Targets(tuple(names), places, {at: names.index(name or "?") for at, name in served.items()})


def _frontend(text: str, protocol: str, node: Sequence[str]) -> Iterable[Place]:
    """A node port is served at addresses of the node."""
    if found := _NODE_PORT.fullmatch(text):
        return [Place(mapped(address), int(found[1]), PROTOCOLS[protocol]) for address in node]
    return [place_of(text, protocol)]
