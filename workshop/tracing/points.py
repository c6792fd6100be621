"""The places of a packet's way at which it is looked at, and the names of the stages between them.

A tracepoint is a place of the kernel's source that stays; a netfilter point is a program at a hook, right before or
behind a priority that is somebody's (include/uapi/linux/netfilter_ipv4.h). A stage is what lies between two points that
a packet passed one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

__all__ = [
    "AT_DATA", "BEGINS", "DROP", "ENDS", "EVERYWHERE", "FUNCTIONS", "HERE", "HOOKS", "INPUT_ENDS", "IPVS", "PASSED",
    "POINTS", "RECEIVE", "SOCKET", "TRACEPOINTS", "TRANSMIT", "WHOLE", "Function", "Point", "label", "stage",
]  # fmt: skip

# What an entry does; the same numbers are in the text that bcc gets.
BEGINS: Final = 1  # a packet's way may begin here
ENDS: Final = 2  # and ends here
AT_DATA: Final = 4  # the network header is not set yet: it is where the data begins
HERE: Final = 8  # passed in our network namespace alone
EVERYWHERE: Final = 16  # also in another one, if the packet came from ours

RECEIVE, SOCKET, TRANSMIT, DROP = 1, 2, 3, 4
WHOLE: Final = 128  # added to the end: the whole way

PREROUTING, INPUT, FORWARD, OUTPUT, POSTROUTING = range(5)  # enum nf_inet_hooks
_FIRST, _LAST = -(2**31) + 1, 2**31 - 2  # NF_IP_PRI_FIRST and _LAST themselves are not for programs
_NAT: Final = {PREROUTING: -100, OUTPUT: -100, POSTROUTING: 100}  # NF_IP_PRI_NAT_DST and _SRC
_NAMES: Final = ("prerouting", "input", "forward", "output", "postrouting")


class Point(NamedTuple):
    """One place: a tracepoint (`hook` None) or a netfilter hook and priority."""

    number: int
    name: str  # for a tracepoint its own
    description: str
    kind: int
    hook: int | None = None
    priority: int = 0

    @property
    def aside(self) -> int:
        """Where to go from a priority that is taken: away from what the point is before or behind."""
        return 1 if self.name.endswith(("_first", "_second", "_after_nat")) else -1


TRACEPOINTS: Final = (
    Point(RECEIVE, "netif_receive_skb", "received", BEGINS | AT_DATA),
    Point(SOCKET, "tcp_probe", "at the socket", ENDS | EVERYWHERE),
    Point(TRANSMIT, "net_dev_start_xmit", "sent", ENDS),
)


def _hook_points() -> Iterator[tuple[str, str, int, int]]:
    """Name, description, hook and priority of the points at netfilter's hooks, in the order of the way."""
    for hook, name in enumerate(_NAMES):
        shown = name.upper()
        yield f"{name}_first", f"{shown} begins", hook, _FIRST
        if hook == PREROUTING:
            yield f"{name}_second", f"{shown} begins (control)", hook, _FIRST + 1
        if hook in _NAT:
            yield f"{name}_before_nat", f"{shown}, before NAT", hook, _NAT[hook] - 1
            yield f"{name}_after_nat", f"{shown}, after NAT", hook, _NAT[hook] + 1
        yield f"{name}_last", f"{shown} ends", hook, _LAST


HOOKS: Final = tuple(
    Point(16 + number, name, description, HERE | BEGINS * (name == "output_first"), hook, priority)
    for number, (name, description, hook, priority) in enumerate(_hook_points())
)
PASSED: Final = tuple(point for point in HOOKS if not point.name.endswith("_second"))  # without the control
INPUT_ENDS: Final = next(point.number for point in HOOKS if point.name == "input_last")
IPVS: Final = (Point(40, "ipvs_first", "IPVS begins", 0), Point(41, "ipvs_last", "IPVS ends", 0))
POINTS: Final = {point.number: point for point in (*TRACEPOINTS, *HOOKS, *IPVS)}


class Function(NamedTuple):
    """A function of the kernel, probed where programs cannot be at netfilter's hooks: its entry and its return.

    Its arguments are named by position: the packet, and the state of the hook (struct nf_hook_state). `begins` and
    `ends` are the points that these are, by the hook's number; a hook that is not among them does not count.
    """

    name: str
    packet: int
    state: int
    begins: Mapping[int, int]
    ends: Mapping[int, int]


def _at(*names: str) -> dict[int, int]:
    return {
        point.hook: point.number
        for point in HOOKS
        for name in names
        if point.name.endswith(name) and point.hook is not None
    }


_ROUND_IPVS: Final = (dict.fromkeys((INPUT, FORWARD, OUTPUT), 40), dict.fromkeys((INPUT, FORWARD, OUTPUT), 41))
FUNCTIONS: Final = (
    Function("nf_hook_slow", 1, 2, _at("_first"), _at("_last")),  # net/netfilter/core.c
    Function("nf_nat_inet_fn", 2, 3, _at("_before_nat"), _at("_after_nat")),  # net/netfilter/nf_nat_core.c
    Function("ip_vs_in_hook", 2, 3, *_ROUND_IPVS),  # net/netfilter/ipvs/ip_vs_core.c, Linux 5.14
    Function("ip_vs_remote_request4", 2, 3, *_ROUND_IPVS),  # and before
    Function("ip_vs_remote_request6", 2, 3, *_ROUND_IPVS),
)

_STAGES: Final = {
    ("receive", "prerouting_first"): "tc programs, and the way into IP",
    ("prerouting_first", "prerouting_second"): "nothing: what one point costs",
    ("prerouting_second", "prerouting_before_nat"): "PREROUTING: raw, conntrack, mangle",
    ("input_first", "ipvs_first"): "INPUT before IPVS",
    ("ipvs_first", "output_first"): "IPVS and its routing",
    ("ipvs_first", "ipvs_last"): "IPVS",
    ("prerouting_last", "forward_first"): "routing",
    ("prerouting_last", "input_first"): "routing",
    ("input_first", "output_first"): "INPUT, IPVS and its routing",
    ("input_last", "socket"): "TCP of the node",
    ("forward_last", "postrouting_first"): "from FORWARD to POSTROUTING",
    ("output_last", "postrouting_first"): "from OUTPUT to POSTROUTING",
    ("postrouting_last", "transmit"): "conntrack's last word, neighbour, tc programs, queue",
    ("receive", "transmit"): "programs, routing, neighbour, queue",
    ("receive", "socket"): "program, hand-over, and the pod's own IP and TCP",
    **{(f"{name}_first", f"{name}_last"): name.upper() for name in _NAMES},
    **{
        (f"{_NAMES[hook]}_{first}", f"{_NAMES[hook]}_{last}"): f"{_NAMES[hook].upper()}: {what}"
        for hook in _NAT
        for first, last, what in (
            ("first", "before_nat", "mangle" if hook == POSTROUTING else "raw, conntrack, mangle"),
            ("before_nat", "after_nat", "NAT"),
            ("after_nat", "last", "behind NAT"),
        )
    },
}
_SHORT: Final = {RECEIVE: "receive", SOCKET: "socket", TRANSMIT: "transmit"} | {
    p.number: p.name for p in (*HOOKS, *IPVS)
}


def label(number: int) -> str:
    """What happens at a point."""
    return "dropped" if number == DROP else POINTS[number].description


def stage(first: int, last: int) -> str:
    """What lies between two points; `last` with WHOLE: the whole way."""
    if last >= WHOLE:
        return f"whole way: {label(first)} to {label(last - WHOLE)}"
    if not first:
        return label(last)
    return _STAGES.get((_SHORT[first], _SHORT[last]), f"{label(first)} to {label(last)}")
