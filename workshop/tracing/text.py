"""PURE. The text that bcc compiles: definitions, the programs of packets.c, and a function for each tracepoint."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

# Flags of a point: a packet leaves here; its network header is not set yet and is where the data begins; the point
# counts in any network namespace if the packet came from ours.
ENDS, AT_DATA, EVERYWHERE = 1, 2, 4
RECEIVE, SOCKET, TRANSMIT, DROP, READ = 1, 2, 3, 4, 5


class View(Enum):
    """Names the views; the value is defined in the text."""

    LATENCY = "LATENCY"
    DROPS = "DROPS"
    RETRANSMITS = "RETRANSMITS"
    FOLLOW = "FOLLOW"


class Point(NamedTuple):
    """A tracepoint that packets pass. Tracepoints stay the same from one kernel to the next."""

    number: int
    name: str
    description: str
    kind: int


TRACEPOINTS: Final = (
    Point(RECEIVE, "netif_receive_skb", "received", AT_DATA),
    Point(SOCKET, "tcp_probe", "at the socket", ENDS | EVERYWHERE),
    Point(TRANSMIT, "net_dev_start_xmit", "sent", ENDS),
)
LABELS: Final = {point.number: point.description for point in TRACEPOINTS} | {DROP: "dropped", READ: "read and freed"}

# Name in the text -> field of the running kernel whose byte offset it has.
FIELDS: Final = {
    "SKB_DEV": "sk_buff.dev",
    "SKB_SK": "sk_buff.sk",
    "SKB_HEAD": "sk_buff.head",
    "SKB_DATA": "sk_buff.data",
    "SKB_LEN": "sk_buff.len",
    "SKB_NETWORK": "sk_buff.network_header",
    "DEV_NET": "net_device.nd_net.net",
    "DEV_NAME": "net_device.name",
    "NET_INUM": "net.ns.inum",
    "SOCK_NET": "sock.__sk_common.skc_net.net",
    "SOCK_FAMILY": "sock.__sk_common.skc_family",
    "SOCK_NUM": "sock.__sk_common.skc_num",
    "SOCK_DPORT": "sock.__sk_common.skc_dport",
    "SOCK_DADDR": "sock.__sk_common.skc_daddr",
    "SOCK_SADDR": "sock.__sk_common.skc_rcv_saddr",
    "SOCK_DADDR6": "sock.__sk_common.skc_v6_daddr",
    "SOCK_SADDR6": "sock.__sk_common.skc_v6_rcv_saddr",
}


class Entry(NamedTuple):
    """A function of the text, and the tracepoint that calls it. Without a `needed` one, nothing can be measured."""

    function: str
    tracepoint: str
    body: str
    needed: bool


def program(view: View, fields: Mapping[str, int], source: str, *, reasons: bool = True) -> str:
    """Returns the whole text.

    `fields` has the byte offset of each of FIELDS, `source` packets.c; `reasons`: this kernel says why it drops
    a packet (Linux 5.17).
    """
    numbers = {
        view.value: 1, "POINT_ENDS": ENDS, "POINT_AT_DATA": AT_DATA, "POINT_ANYWHERE": EVERYWHERE,
        "POINT_RECEIVE": RECEIVE, "POINT_SOCKET": SOCKET, "POINT_TRANSMIT": TRANSMIT, "POINT_DROP": DROP,
        "POINT_READ": READ, **fields,
    }  # fmt: skip
    lines = [f"#define {name} {number}" for name, number in numbers.items()]
    functions = (
        f"int {entry.function}(void *ctx)\n{{\n\tu64 *arguments = ctx;\n\n\t{entry.body}\n\treturn 0;\n}}"
        for entry in entries(view, reasons=reasons)
    )
    return "\n".join([*lines, source, *functions])


def entries(view: View, *, reasons: bool = True) -> list[Entry]:
    """Returns the functions of a view, in the order in which packets meet them."""
    found = []
    for point in TRACEPOINTS:
        socket = point.number == SOCKET  # which is its first argument
        body = f"step(arguments[{int(socket)}], {point.number}, {point.kind});"
        found.append(Entry(f"at_{point.name}", point.name, body, needed=not socket))
    if view in (View.LATENCY, View.FOLLOW):
        body = "changed(arguments[0], arguments[1], arguments[2]);"
        found.append(Entry("changed_socket", "inet_sock_set_state", body, needed=False))
    if view is View.LATENCY:
        return found
    body = f"freed(arguments[0], arguments[1], {'arguments[2]' if reasons else '0'});"
    found.append(Entry("freed_packet", "kfree_skb", body, needed=True))
    if view is View.FOLLOW:
        found.append(Entry("used_packet", "consume_skb", "freed(arguments[0], 0, 0);", needed=False))
    if view is View.RETRANSMITS:
        found.append(Entry("repeated_packet", "tcp_retransmit_skb", "repeated(arguments[0]);", needed=True))
    return found
