"""What bcc is given: numbers, the programs of packets.c, an entry for each tracepoint. Pure text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, NamedTuple

from hybrid_proxy.workshop.tracing.points import AT_DATA, BEGINS, DROP, ENDS, EVERYWHERE, TRACEPOINTS

__all__ = ["FIELDS", "Entry", "Plan", "View", "entries", "program"]


class View(Enum):
    """What is asked for; the value stands in the text."""

    LATENCY = "LATENCY"
    DROPS = "DROPS"
    RETRANSMITS = "RETRANSMITS"
    FOLLOW = "FOLLOW"


# What stands in the text -> where the running kernel has it.
FIELDS: Final = {
    "SKB_DEV": "sk_buff.dev",
    "SKB_SK": "sk_buff.sk",
    "SKB_HEAD": "sk_buff.head",
    "SKB_DATA": "sk_buff.data",
    "SKB_LEN": "sk_buff.len",
    "SKB_NETWORK": "sk_buff.network_header",
    "DEV_NET": "net_device.nd_net.net",
    "DEV_IFINDEX": "net_device.ifindex",
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


class Plan(NamedTuple):
    """One measurement, decided.

    Args:
        view: what is asked for.
        home: number of the network namespace that is measured.
        wanted: how many addresses with ports count.
        client: of packets of this source address alone, 16 bytes (IPv4 mapped); None: of everybody.
        reasons: the kernel says why it drops (Linux 5.17).
    """

    view: View
    home: int
    wanted: int
    client: bytes | None = None
    reasons: bool = True


class Entry(NamedTuple):
    """A function of the text, and the tracepoint that calls it."""

    function: str
    tracepoint: str
    body: str
    needed: bool  # without it nothing can be shown


def program(plan: Plan, fields: Mapping[str, int], source: str) -> str:
    """The whole text: `fields` has the byte offset of each of FIELDS, `source` is packets.c."""
    numbers = {
        plan.view.value: 1, "HOME": plan.home, "WANTED": max(1, plan.wanted), "POINT_BEGINS": BEGINS,
        "POINT_ENDS": ENDS, "POINT_AT_DATA": AT_DATA, "POINT_ANYWHERE": EVERYWHERE, "POINT_DROP": DROP, **fields,
    }  # fmt: skip
    lines = [f"#define {name} {number}" for name, number in numbers.items()]
    if plan.client is not None:
        for name, part in (("FROM_HIGH", plan.client[:8]), ("FROM_LOW", plan.client[8:])):
            lines.append(f"#define {name} {int.from_bytes(part, 'little')}ULL")
    return "\n".join([*lines, source, *(_function(entry) for entry in entries(plan))])


def entries(plan: Plan) -> list[Entry]:
    """The functions of a plan, in the order of attaching."""
    return [*_of_points(), *_of_view(plan)]


def _of_points() -> Iterable[Entry]:
    for point in TRACEPOINTS:
        socket = point.name == "tcp_probe"  # its first argument is the socket
        body = f"step(arguments[{int(socket)}], {point.number}, {point.kind});"
        yield Entry(f"at_{point.name}", point.name, body, needed=not socket)


def _of_view(plan: Plan) -> Iterable[Entry]:
    reason = "arguments[2]" if plan.reasons else "0"
    if plan.view in (View.DROPS, View.FOLLOW):
        yield Entry("freed_packet", "kfree_skb", f"freed(arguments[0], arguments[1], {reason});", needed=True)
    if plan.view is View.FOLLOW:
        yield Entry("used_packet", "consume_skb", "freed(arguments[0], 0, 0);", needed=False)
    if plan.view is View.RETRANSMITS:
        yield Entry("repeated_packet", "tcp_retransmit_skb", "repeated(arguments[0]);", needed=True)
    if plan.view is View.LATENCY:
        body = "changed(arguments[0], arguments[1], arguments[2]);"
        yield Entry("changed_socket", "inet_sock_set_state", body, needed=False)


def _function(entry: Entry) -> str:
    return f"int {entry.function}(void *ctx)\n{{\n\tu64 *arguments = ctx;\n\n\t{entry.body}\n\treturn 0;\n}}"
