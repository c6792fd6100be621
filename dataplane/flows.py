"""PURE. Flows as one value: what a mode exports, and another one imports, whatever either keeps of them itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, IntFlag, auto
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.table import Protocol


class TcpState(IntEnum):
    """Of a connection, as nf_conntrack numbers it (TCP_CONNTRACK_...); 0 for other protocols."""

    NONE = 0
    SYN_SENT = 1
    SYN_RECV = 2
    ESTABLISHED = 3
    FIN_WAIT = 4  # one end has said that it is done
    CLOSE_WAIT = 5  # and the other one knows
    LAST_ACK = 6  # both have said so


class FlowFlag(IntFlag):
    """What else is known of a flow."""

    ANSWERED = 1 << 0  # both ends have spoken
    MASQUERADE = 1 << 1  # the backend sees an address of this node as its client, and answers to that
    HAIRPIN = 1 << 2  # the same, because the client is the backend
    NODE = 1 << 3  # the client is this node itself
    DSR = 1 << 4  # answers do not pass this node


class Half(Enum):
    """Which of a flow's packets: programs translate one direction before the node's stack, and the other behind it.

    Before it are requests, and behind it answers; of a flow of the node itself the other way round.
    """

    BEFORE = auto()
    BEHIND = auto()


# Addresses are four words as packets have them, IPv4 in the first; ports are as packets have them, too.
FLOW: Final = np.dtype(
    [
        ("family", "u1"), ("protocol", "u1"), ("state", "u1"), ("flags", "u1"),
        ("seconds", "u4"),  # after which it is forgotten if no packet comes
        ("client", "u4", 4), ("frontend", "u4", 4),  # whom the client asks
        ("backend", "u4", 4), ("source", "u4", 4),  # whom the backend sees as its client
        ("client_port", "u2"), ("frontend_port", "u2"), ("backend_port", "u2"), ("source_port", "u2"),
    ]
)  # fmt: skip

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Flows:
    """Rows of `FLOW`, one for each flow."""

    rows: NDArray[Any]

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, chosen: Mask) -> Flows:
        """Those of these flows for which it is true."""
        return Flows(self.rows[chosen])

    def of_family(self, family: int) -> Flows:
        return self.where(self.rows["family"] == family)

    def flagged(self, flags: int) -> Mask:
        """Which flows have one of these flags."""
        found: Mask = self.rows["flags"] & np.uint8(flags) != 0
        return found

    @property
    def opening(self) -> Mask:
        """Which are connections that the client does not have yet."""
        return np.isin(self.rows["state"], [TcpState.SYN_SENT, TcpState.SYN_RECV])

    @property
    def through_stack(self) -> Mask:
        """Of which flows packets pass the node's stack when programs translate them."""
        return ~self.flagged(FlowFlag.MASQUERADE | FlowFlag.HAIRPIN | FlowFlag.DSR) | self.flagged(FlowFlag.NODE)

    def untranslated(self) -> Flows:
        """The same with the two ends that the stack sees then: those of the node itself are translated outside."""
        rows = self.rows.copy()
        of_node = self.flagged(FlowFlag.NODE)
        for end, seen in (("source", "client"), ("backend", "frontend")):
            for name in (end, f"{end}_port"):
                rows[name][of_node] = rows[name.replace(end, seen)][of_node]
        return Flows(rows)

    def count(self) -> dict[str, int]:
        """How many there are, by the name of their protocol."""
        numbers, counts = np.unique(self.rows["protocol"], return_counts=True)
        return {Protocol(n).name: count for n, count in zip(numbers.tolist(), counts.tolist(), strict=True)}


def concatenated(*parts: Flows) -> Flows:
    """All of them."""
    return Flows(np.concatenate([np.zeros(0, FLOW), *(part.rows for part in parts)]))


class HandOver(msgspec.Struct, frozen=True):
    """What became of the flows of a mode that was left."""

    moved: Mapping[str, int]  # by protocol
    left: Mapping[str, int]  # by the reason why they could not be moved
    seconds: float = 0.0

    @property
    def lost(self) -> int:
        """How many end when the mode that was left is removed."""
        return sum(self.left.values())
