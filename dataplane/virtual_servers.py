"""PURE. Values that mode ipvs exchanges with the kernel interfaces of IPVS and ip_set."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple

Value = str | int | None  # an element's comment, or the mark that it maps to
_OVER: Final = frozenset({"TIME_WAIT", "CLOSE", "LAST_ACK", "CLOSED", "REJECTED"})


class Server(NamedTuple):
    """The name of a virtual server: an address with protocol and port, or a firewall mark of one family."""

    family: int
    protocol: int = 0
    address: str = ""
    port: int = 0
    mark: int = 0


class Config(NamedTuple):
    """The scheduling of a virtual server; `persistent` is in seconds, 0: not; `flags` are the scheduler's."""

    scheduler: str
    persistent: int = 0
    flags: int = 0


class Destination(NamedTuple):
    """A real server of a virtual server."""

    address: str
    port: int


class Load(NamedTuple):
    """A real server's weight and its connections."""

    weight: int
    active: int = 0
    inactive: int = 0


class Connection(NamedTuple):
    """A flow that IPVS knows; addresses and ports as on the wire, the state as the kernel names it."""

    family: int
    protocol: int
    client: bytes
    client_port: bytes
    address: bytes  # of the virtual server
    port: bytes
    backend: bytes
    backend_port: bytes
    state: str

    @property
    def is_over(self) -> bool:
        """True if both ends of a TCP connection or SCTP association have closed it, or one has reset it."""
        return self.state in _OVER


class Timeouts(NamedTuple):
    """Timeouts in seconds; 0: the kernel's value."""

    tcp: int = 0
    tcp_fin: int = 0
    udp: int = 0


class Verb(IntEnum):
    """The kind of a change; the value is IPVS_CMD_* of linux/ip_vs.h."""

    NEW_SERVER = 1
    SET_SERVER = 2
    DELETE_SERVER = 3
    NEW_DESTINATION = 5
    SET_DESTINATION = 6
    DELETE_DESTINATION = 7


class Change(NamedTuple):
    """One change of one virtual server or of one of its real servers."""

    verb: Verb
    server: Server
    config: Config | None = None
    destination: Destination | None = None
    weight: int = 1


class Kind(NamedTuple):
    """A type of set as ipset(8) names it, and what its elements carry."""

    type: str
    comments: bool = False
    marks: bool = False


class Element(NamedTuple):
    """One element of a set; `second` is an address (hash:ip,port,ip) or a network (hash:ip,port,net)."""

    address: str
    port: int = 0
    protocol: int = 0
    second: str = ""


class Edit(NamedTuple):
    """Elements of one set to add (with their values) or to remove."""

    name: str
    family: int
    add: bool
    elements: Mapping[Element, Value]
