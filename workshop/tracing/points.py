"""The places of a packet's way at which it is looked at, and the names of the stages between them.

A tracepoint is a place of the kernel's source that stays; a netfilter point is a program at a hook, right before or
behind a priority that is somebody's (include/uapi/linux/netfilter_ipv4.h). A stage is what lies between two points that
a packet passed one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
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
_BEFORE_DNAT, _AFTER_DNAT, _BEFORE_SNAT, _AFTER_SNAT = -101, -99, 99, 101  # around NF_IP_PRI_NAT_DST and _SRC


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
HOOKS: Final = tuple(
    Point(16 + number, name, description, HERE | kind, hook, priority)
    for number, (name, description, kind, hook, priority) in enumerate(
        (
            ("prerouting_first", "PREROUTING begins", 0, PREROUTING, _FIRST),
            ("prerouting_second", "PREROUTING begins (control)", 0, PREROUTING, _FIRST + 1),
            ("prerouting_before_nat", "PREROUTING, before NAT", 0, PREROUTING, _BEFORE_DNAT),
            ("prerouting_after_nat", "PREROUTING, after NAT", 0, PREROUTING, _AFTER_DNAT),
            ("prerouting_last", "PREROUTING ends", 0, PREROUTING, _LAST),
            ("input_first", "INPUT begins", 0, INPUT, _FIRST),
            ("input_last", "INPUT ends", 0, INPUT, _LAST),
            ("forward_first", "FORWARD begins", 0, FORWARD, _FIRST),
            ("forward_last", "FORWARD ends", 0, FORWARD, _LAST),
            ("output_first", "OUTPUT begins", BEGINS, OUTPUT, _FIRST),
            ("output_before_nat", "OUTPUT, before NAT", 0, OUTPUT, _BEFORE_DNAT),
            ("output_after_nat", "OUTPUT, after NAT", 0, OUTPUT, _AFTER_DNAT),
            ("output_last", "OUTPUT ends", 0, OUTPUT, _LAST),
            ("postrouting_first", "POSTROUTING begins", 0, POSTROUTING, _FIRST),
            ("postrouting_before_nat", "POSTROUTING, before NAT", 0, POSTROUTING, _BEFORE_SNAT),
            ("postrouting_after_nat", "POSTROUTING, after NAT", 0, POSTROUTING, _AFTER_SNAT),
            ("postrouting_last", "POSTROUTING ends", 0, POSTROUTING, _LAST),
        )
    )
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
    ("prerouting_before_nat", "prerouting_after_nat"): "PREROUTING: NAT",
    ("prerouting_after_nat", "prerouting_last"): "PREROUTING: behind NAT",
    ("prerouting_first", "prerouting_before_nat"): "PREROUTING: raw, conntrack, mangle",
    ("prerouting_first", "prerouting_last"): "PREROUTING",
    ("output_first", "output_last"): "OUTPUT",
    ("postrouting_first", "postrouting_last"): "POSTROUTING",
    ("input_first", "ipvs_first"): "INPUT before IPVS",
    ("ipvs_first", "output_first"): "IPVS and its routing",
    ("ipvs_first", "ipvs_last"): "IPVS",
    ("prerouting_last", "forward_first"): "routing",
    ("prerouting_last", "input_first"): "routing",
    ("input_first", "input_last"): "INPUT",
    ("input_first", "output_first"): "INPUT, IPVS and its routing",
    ("input_last", "socket"): "TCP of the node",
    ("forward_first", "forward_last"): "FORWARD",
    ("forward_last", "postrouting_first"): "from FORWARD to POSTROUTING",
    ("output_first", "output_before_nat"): "OUTPUT: raw, conntrack, mangle",
    ("output_before_nat", "output_after_nat"): "OUTPUT: NAT",
    ("output_after_nat", "output_last"): "OUTPUT: behind NAT",
    ("output_last", "postrouting_first"): "from OUTPUT to POSTROUTING",
    ("postrouting_first", "postrouting_before_nat"): "POSTROUTING: mangle",
    ("postrouting_before_nat", "postrouting_after_nat"): "POSTROUTING: NAT",
    ("postrouting_after_nat", "postrouting_last"): "POSTROUTING: behind NAT",
    ("postrouting_last", "transmit"): "conntrack's last word, neighbour, tc programs, queue",
    ("receive", "transmit"): "programs, routing, neighbour, queue",
    ("receive", "socket"): "program, hand-over, and the pod's own IP and TCP",
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
