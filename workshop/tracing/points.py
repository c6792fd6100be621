"""The places of a packet's way at which it is looked at: tracepoints, places of the kernel's source that stay."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = [
    "AT_DATA", "BEGINS", "DROP", "ENDS", "EVERYWHERE", "RECEIVE", "SOCKET", "TRACEPOINTS", "TRANSMIT", "Point", "label",
]  # fmt: skip

# What an entry does; the same numbers are in the text that bcc gets.
BEGINS: Final = 1  # a packet's way may begin here
ENDS: Final = 2  # and ends here
AT_DATA: Final = 4  # the network header is not set yet: it is where the data begins
EVERYWHERE: Final = 8  # also in another network namespace than ours, if the packet came from ours

RECEIVE, SOCKET, TRANSMIT, DROP = 1, 2, 3, 4


class Point(NamedTuple):
    """One tracepoint."""

    number: int
    name: str
    description: str
    kind: int


TRACEPOINTS: Final = (
    Point(RECEIVE, "netif_receive_skb", "received", BEGINS | AT_DATA),
    Point(SOCKET, "tcp_probe", "at the socket", ENDS | EVERYWHERE),
    Point(TRANSMIT, "net_dev_start_xmit", "sent", ENDS),
)
_LABELS: Final = {point.number: point.description for point in TRACEPOINTS} | {DROP: "dropped"}


def label(number: int) -> str:
    """What happens at a point."""
    return _LABELS[number]
