"""Messages between the agent and its relay: frozen rows, packed by msgspec, each behind its length.

The relay listens on a socket in the abstract namespace of unix(7), which belongs to the network namespace: one
relay for each, no file that can be stale, and none of another namespace can be reached.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import msgspec

from hybrid_proxy.dataplane.reports import FailureHistory

ADDRESS: Final = "\0hybrid-proxy-userspace"
VERSION: Final = 3  # of these messages and of what a relay does: an agent replaces a relay of another version
LENGTH: Final = struct.Struct("=I")

PLAIN, KEEPING = 0x4850_0000, 0x4850_0010
"""SO_PRIORITY of the relay's sockets to backends, by which the rules know them: with the node's address, with the
client's. tc(8) writes them as classes 4850:0 and 4850:10.

No qdisc has the class 4850:, and the last four bits, which pfifo_fast and mqprio look at, are those of the default.
"""

Pair = tuple[str, int]  # address and port of a backend or a client


class Keep(IntEnum):
    """Whose source address the backend sees instead of the node's; that of the node's own clients is the node's."""

    NEVER = 0
    ALWAYS = 1
    PODS = 2  # of clients whose address is in `Network.pods`


class Port(msgspec.Struct, frozen=True):
    """One proxy port: which route its clients take, and whose address is kept."""

    route: int
    keep: Keep


class Row(msgspec.Struct, frozen=True):
    """One service port as the relay knows it. `serving`: conversations with these are left alone.

    `present`: connections to an endpoint that was in it before are reset; None: they are left alone.
    """

    key: str
    name: str
    family: int
    protocol: int
    routes: tuple[tuple[Pair, ...], ...]
    ports: tuple[Port, ...]
    serving: tuple[Pair, ...] = ()
    affinity: int = 0
    frontends: tuple[str, ...] = ()  # for people
    present: tuple[Pair, ...] | None = None


class Network(msgspec.Struct, frozen=True):
    """Where to listen, by family (4, 6), which clients are the node itself, and which are pods.

    What is in one of the networks `bridged` reaches its neighbours there past the node's routing.
    """

    listen: dict[int, str] = {}
    own: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    transparent: tuple[int, ...] = ()  # families in which source addresses can be kept
    bridged: tuple[str, ...] = ()


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First on every connection. The relay has at most one agent; others may only look."""

    agent: bool
    version: int = VERSION


class Apply(msgspec.Struct, frozen=True, tag=True):
    """Service ports that changed (None: gone); `whole`: these are all there are."""

    rows: dict[str, Row | None]
    network: Network | None = None
    whole: bool = False


class Commit(msgspec.Struct, frozen=True, tag=True):
    """The rules no longer lead to the proxy ports that the last `Apply` made needless: close them."""


class Status(msgspec.Struct, frozen=True, tag=True):
    """Ask for counters and fill."""


class Look(msgspec.Struct, frozen=True, tag=True):
    """Ask for what is programmed, and for at most `flows` conversations."""

    flows: int = 0


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """A new relay asks for the listening sockets; the old one serves its conversations to their end, and exits."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Close everything and exit."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The relay's answer to `Hello`."""

    pid: int
    version: int = VERSION
    ports: int = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Not done, and why."""

    reason: str


class Applied(msgspec.Struct, frozen=True, tag=True):
    """The proxy ports of the rows that were sent, in the order of `Row.ports`; reasons for those that have none."""

    ports: dict[str, tuple[int, ...]]
    failed: dict[str, str]


class Stale(msgspec.Struct, frozen=True):
    """One listening socket that changes hands."""

    key: str
    port: Port
    number: int
    row: Row


class Sockets(msgspec.Struct, frozen=True, tag="Tell"):
    """Listening sockets; as many descriptors come with this message."""

    sockets: tuple[Stale, ...]
    last: bool
    network: Network


class Report(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Status`: the relay's counters and fill.

    `agent` is the process that the relay takes orders from (0: none), `files` how many descriptors are in use and how
    many there may be, `trouble` what the relay lacks, empty: nothing.
    """

    pid: int
    agent: int
    proxy_ports: int
    connections: int
    dialling: int
    sessions: int
    files: tuple[int, int]
    trouble: str
    counters: dict[str, int]


class Conversation(msgspec.Struct, frozen=True):
    """A connection or a session of datagrams. `source` is what the backend sees as its client."""

    service: str
    protocol: int
    client: Pair
    frontend: Pair
    backend: Pair | None
    source: str
    state: str


class Listing(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Look`. `used` counts conversations by service port (`Row.key`), backend address and port.

    `failures` has, for each backend that failed, how many of its last connections did, and how.
    """

    pid: int
    rows: tuple[Row, ...]
    used: tuple[tuple[str, str, int, int], ...]
    flows: tuple[Conversation, ...]
    flow_count: int
    failures: tuple[tuple[str, str, int, int, FailureHistory], ...] = ()


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is done."""


Request = Hello | Apply | Commit | Status | Look | HandOver | End
Answer = Welcome | Refused | Applied | Sockets | Report | Listing | Done

_encoder: Final = msgspec.msgpack.Encoder()
# What is no message of this version is a msgspec.MsgspecError.
decode_request: Final = msgspec.msgpack.Decoder(Request).decode
decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode


def pack(message: Request | Answer) -> bytes:
    """The message behind its length."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
