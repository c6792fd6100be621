"""What bcc is given: numbers, the programs of packets.c, an entry for each point. Pure text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, NamedTuple

from hybrid_proxy.workshop.tracing.points import (
    AT_DATA,
    BEGINS,
    DROP,
    ENDS,
    EVERYWHERE,
    HERE,
    POINTS,
    WHOLE,
    Function,
    Point,
)

__all__ = ["FIELDS", "Entry", "Plan", "View", "entries", "program"]


class View(Enum):
    """What is asked for; the value stands in the text."""

    STAGES = "STAGES"
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
        points: points of packets, tracepoints and hooks.
        wanted: how many addresses with ports count.
        client: of packets of this source address alone, 16 bytes (IPv4 mapped); None: of everybody.
        reasons: the kernel says why it drops (Linux 5.17).
        functions: of the kernel, whose entries and returns are points.
    """

    view: View
    home: int
    points: tuple[Point, ...]
    wanted: int
    client: bytes | None = None
    reasons: bool = True
    functions: tuple[Function, ...] = ()


class Entry(NamedTuple):
    """A function of the text, and what calls it: a tracepoint, a hook, or a function of the kernel."""

    function: str
    tracepoint: str | None
    point: Point | None
    body: str
    needed: bool  # without it nothing can be shown
    probed: str | None = None
    returns: bool = False  # at the function's return


def program(plan: Plan, fields: Mapping[str, int], source: str) -> str:
    """The whole text: `fields` has the byte offset of each of FIELDS, `source` is packets.c."""
    numbers = {
        plan.view.value: 1, "HOME": plan.home, "WANTED": max(1, plan.wanted), "POINT_BEGINS": BEGINS,
        "POINT_ENDS": ENDS, "POINT_AT_DATA": AT_DATA, "POINT_HERE": HERE, "POINT_ANYWHERE": EVERYWHERE,
        "POINT_DROP": DROP, "POINT_WHOLE": WHOLE, **fields,
    }  # fmt: skip
    lines = [f"#define {name} {number}" for name, number in numbers.items()]
    if plan.client is not None:
        for name, part in (("FROM_HIGH", plan.client[:8]), ("FROM_LOW", plan.client[8:])):
            lines.append(f"#define {name} {int.from_bytes(part, 'little')}ULL")
    if plan.functions:
        lines += ["#define PROBES 1", "#include <uapi/linux/ptrace.h>"]
    return "\n".join([*lines, source, *(_function(entry) for entry in entries(plan))])


def entries(plan: Plan) -> list[Entry]:
    """The functions of a plan, in the order of attaching."""
    return [*_of_points(plan), *_of_functions(plan), *_of_view(plan)]


def _of_points(plan: Plan) -> Iterable[Entry]:
    for point in plan.points:
        skb = 0 if point.hook is None else 1  # a program at a hook has struct bpf_nf_ctx: state, skb
        if point.name == "tcp_probe":
            skb = 1
        body = f"step(arguments[{skb}], {point.number}, {point.kind});"
        tracepoint = point.name if point.hook is None else None
        yield Entry(f"at_{point.name}", tracepoint, point, body, tracepoint not in (None, "tcp_probe"))


def _of_functions(plan: Plan) -> Iterable[Entry]:
    for number, function in enumerate(plan.functions):
        ends = "".join(f"case {hook}: point = {point}; break; " for hook, point in function.ends.items())
        begins = "".join(
            f"case {hook}: point = {point}; kind = {POINTS[point].kind & ~HERE}; break; "
            for hook, point in function.begins.items()
        )
        # What is passed is gone at the return: it is kept from the entry on.
        entered = (
            f"u32 point = 0, kind = 0; u64 skb = PT_REGS_PARM{function.packet}(ctx); "
            f"u32 hook = quarter(PT_REGS_PARM{function.state}(ctx)) & 0xff; "
            f"switch (hook) {{ {begins}default: return 0; }} step(skb, point, kind); "
            f"point = 0; switch (hook) {{ {ends}}} entered({number}, skb, point);"
        )
        yield Entry(f"into_{function.name}", None, None, entered, needed=False, probed=function.name)
        body = f"returned({number}, PT_REGS_RC(ctx));"
        yield Entry(f"out_of_{function.name}", None, None, body, needed=False, probed=function.name, returns=True)


def _of_view(plan: Plan) -> Iterable[Entry]:
    reason = "arguments[2]" if plan.reasons else "0"
    if plan.view in (View.DROPS, View.FOLLOW):
        yield Entry("freed_packet", "kfree_skb", None, f"freed(arguments[0], arguments[1], {reason});", needed=True)
    if plan.view is View.FOLLOW:
        yield Entry("used_packet", "consume_skb", None, "freed(arguments[0], 0, 0);", needed=False)
    if plan.view is View.RETRANSMITS:
        yield Entry("repeated_packet", "tcp_retransmit_skb", None, "repeated(arguments[0]);", needed=True)
    if plan.view is View.LATENCY:
        body = "changed(arguments[0], arguments[1], arguments[2]);"
        yield Entry("changed_socket", "inet_sock_set_state", None, body, needed=False)


def _function(entry: Entry) -> str:
    if entry.probed is not None:
        return f"int {entry.function}(struct pt_regs *ctx)\n{{\n\t{entry.body}\n\treturn 0;\n}}"
    accept = 1 if entry.point is not None and entry.point.hook is not None else 0  # NF_ACCEPT
    return f"int {entry.function}(void *ctx)\n{{\n\tu64 *arguments = ctx;\n\n\t{entry.body}\n\treturn {accept};\n}}"
