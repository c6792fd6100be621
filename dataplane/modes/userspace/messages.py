"""Messages between the agent and its relay: frozen structs in MessagePack, each preceded by its length.

The relay listens on a socket in the abstract namespace of unix(7), which belongs to the network namespace: a relay of
another namespace cannot be reached, and no file can be left behind. Each version of the messages has an address of its
own, so that relays of two versions can serve side by side during an upgrade. An agent of any version can send `Hello`,
`Status`, `Drain` and `End` to a relay of any other.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import msgspec

from hybrid_proxy.dataplane.reports import FailureHistory

VERSION: Final = 4  # of these messages, and of how a relay serves: an agent replaces a relay of another version
ADDRESSES: Final = "\0hybrid-proxy-userspace-"  # what the addresses of all versions begin with
ADDRESS: Final = f"{ADDRESSES}{VERSION}"
LENGTH: Final = struct.Struct("=I")

PLAIN, KEEPING = 0x4850_0000, 0x4850_0010
"""SO_PRIORITY of the relay's sockets to backends, by which the rules recognise them: PLAIN with the node's address as
source, KEEPING with the client's. tc(8) writes them as classes 4850:0 and 4850:10.

No qdisc has the class 4850:, and the last four bits, which pfifo_fast and mqprio evaluate, are those of the default.
"""

Pair = tuple[str, int]  # address and port of a backend or a client


class Keep(IntEnum):
    """Says which clients' source addresses backends see. The node's own clients always have the node's address."""

    NEVER = 0
    ALWAYS = 1
    PODS = 2  # of clients whose address is in `Network.pods`


class Port(msgspec.Struct, frozen=True):
    """One proxy port: the index of its clients' route in `Row.routes`, and which source addresses are kept."""

    route: int
    keep: Keep


class Row(msgspec.Struct, frozen=True):
    """One service port as the relay knows it.

    UDP sessions with backends in `serving` go on. Connections to an endpoint that is no longer in `present` are reset;
    with None, none are. `frontends` are shown in listings only.
    """

    key: str
    name: str
    family: int
    protocol: int
    routes: tuple[tuple[Pair, ...], ...]
    ports: tuple[Port, ...]
    serving: tuple[Pair, ...] = ()
    affinity: int = 0
    frontends: tuple[str, ...] = ()
    present: tuple[Pair, ...] | None = None


class Network(msgspec.Struct, frozen=True):
    """Facts about the node: where to listen, by family (4, 6), and the addresses of the node and of pods.

    Hosts in one of the networks `bridged` reach each other without the node's routing.
    """

    listen: dict[int, str] = {}
    own: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    transparent: tuple[int, ...] = ()  # families in which clients' source addresses can be kept
    bridged: tuple[str, ...] = ()


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of every connection. A relay has at most one agent; other clients may only read."""

    agent: bool


class Apply(msgspec.Struct, frozen=True, tag=True):
    """Service ports that changed (None: removed); with `whole`, all others are removed, too."""

    rows: dict[str, Row | None]
    network: Network | None = None
    whole: bool = False


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Close the proxy ports that the last `Apply` made unnecessary: no rule leads to them any more."""


class Status(msgspec.Struct, frozen=True, tag=True):
    """Asks for counters and limits."""


class List(msgspec.Struct, frozen=True, tag=True):
    """Asks for all service ports, and for at most `flows` conversations."""

    flows: int = 0


class Drain(msgspec.Struct, frozen=True, tag=True):
    """No rule leads to this relay any more: accept nothing new, serve the conversations to their end, then exit."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Reset all connections and exit."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The relay's answer to `Hello`."""

    pid: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request was refused; `reason` says why."""

    reason: str


class Applied(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Apply`: by key, each row's proxy ports in the order of `Row.ports`, or why it has none."""

    ports: dict[str, tuple[int, ...]]
    failed: dict[str, str]


class Report(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Status`: counters and limits.

    `agent` is the process id of the relay's agent (0: none). `files` are the descriptors in use and their limit.
    `trouble` says what the relay lacks; empty: nothing. `failing` are service ports of which the last connection to
    each backend failed lately, `failing_in` the family where that is so in one alone; `failing_backends` are those of
    other service ports, and how often in a row they failed.
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
    failing: tuple[str, ...] = ()
    failing_in: dict[str, int] = {}
    failing_backends: tuple[tuple[str, Pair, int], ...] = ()


class Conversation(msgspec.Struct, frozen=True):
    """A connection or a UDP session. `source` is the client's address as the backend sees it."""

    service: str
    protocol: int
    client: Pair
    frontend: Pair
    backend: Pair | None
    source: str
    state: str


class Listing(msgspec.Struct, frozen=True, tag=True):
    """Answer to `List`. `used` counts conversations by service port (`Row.key`), backend address and port.

    `failures`: by the same three, how many of the backend's last connections failed, and how.
    """

    pid: int
    rows: tuple[Row, ...]
    used: tuple[tuple[str, str, int, int], ...]
    flows: tuple[Conversation, ...]
    flow_count: int
    failures: tuple[tuple[str, str, int, int, FailureHistory], ...] = ()


class Done(msgspec.Struct, frozen=True, tag=True):
    """The request was carried out."""


Request = Hello | Apply | Commit | Status | List | Drain | End
Answer = Welcome | Refused | Applied | Report | Listing | Done

_encoder: Final = msgspec.msgpack.Encoder()
# Raise msgspec.MsgspecError for anything that is no message of this version.
decode_request: Final = msgspec.msgpack.Decoder(Request).decode
decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode


def pack(message: Request | Answer) -> bytes:
    """Returns the message, preceded by its length."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
