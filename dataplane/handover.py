"""Flows of a mode that was left, handed to the one that serves now: for those who do not want to wait for their end.

Between mode ebpf, whose programs translate by flows of their own, and those that translate by conntrack. What both have
at the same time decides which packets meet whom, so the order is everything:

    ebpf to conntrack                                      and back
    1  plain entries in a zone of their own (passage.py)   answers into the maps: programs translate what conntrack
    2  conntrack: translated entries for plain ones           leaves
    3  requests out of the maps: now conntrack             the same zone
       translates them, and programs go on with answers    requests into the maps
    4  the zone ends: conntrack translates answers, too    conntrack: plain entries for translated ones
    5  answers out of the maps                             the zone ends

No step loses a packet, and each packet meets exactly one translation on its way.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Final, Protocol, runtime_checkable

import numpy as np

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.flows import FlowFlag, Flows, Half, HandOver, Mask, concatenated
from hybrid_proxy.dataplane.kernel.conntrack_flows import delete, insert, loosen, reasons
from hybrid_proxy.dataplane.kernel.grace import wait_for_programs
from hybrid_proxy.dataplane.passage import Passage
from hybrid_proxy.dataplane.table import Protocol as Transport
from hybrid_proxy.dataplane.table import ServiceTable

DSR: Final = "direct server return: answers do not pass this node"
SCTP: Final = "SCTP: the tags of an association are not known"


class TooManyLost(DataplaneError):
    """More flows than may be lost cannot be moved; nothing has changed."""


class Unmovable(DataplaneError):
    """Between these modes no flow can be moved."""


class Receives(Protocol):
    """Flows on their way into a mode's maps; `flows` are those that come, `left` counts the others by reason.

    Of `repeated` the SYN came again, and they began anew in the mode.
    """

    left: Counter[str]
    repeated: Flows

    @property
    def flows(self) -> Flows:
        """In their order."""

    def take(self, half: Half) -> None:
        """Have programs translate one half of each flow."""

    def refuse(self, reason: str, which: Mask) -> None:
        """Some of `flows` do not come after all."""


@runtime_checkable
class TranslatesByMaps(Protocol):
    """A mode whose programs translate each direction of a flow by an entry of its own."""

    def export_flows(self) -> Flows:
        """All that are not over.

        Raises:
            DataplaneError, OSError: they cannot be read.
        """

    def forget_flows(self, flows: Flows, half: Half) -> Mask:
        """Leave one half of each flow to the stack; of which flows it was still there, the others have ended.

        Raises:
            DataplaneError, OSError: some may still be translated.
        """

    def receive_flows(self, flows: Flows) -> Receives:
        """Find out which of these it can take; nothing changes.

        Raises:
            DataplaneError, OSError: it cannot be found out.
        """


@runtime_checkable
class TranslatesByConntrack(Protocol):
    """A mode of whose flows conntrack knows everything."""

    def conntrack_flows(self, table: ServiceTable) -> Flows:
        """Those to the table's frontends that are not over.

        Raises:
            DataplaneError, OSError: conntrack cannot be read.
        """


def survey(old: object, new: object, table: ServiceTable) -> HandOver:
    """What `hand_over` would do; nothing changes.

    Raises:
        as `hand_over`.
    """
    if isinstance(old, TranslatesByMaps) and isinstance(new, TranslatesByConntrack):
        flows, left = _sorted_out(old.export_flows())
        return HandOver(flows.count(), left)
    if isinstance(old, TranslatesByConntrack) and isinstance(new, TranslatesByMaps):
        flows, left = _sorted_out(old.conntrack_flows(table))
        reception = new.receive_flows(flows)
        return HandOver(reception.flows.count(), left + reception.left)
    return _shared(old, new)


def hand_over(old: object, new: object, table: ServiceTable, max_lost: int | None = None) -> HandOver:
    """Move the flows of a mode that takes no new ones to the one that does.

    Args:
        old: the mode that was left; it drains.
        new: the mode that serves.
        table: what it serves.
        max_lost: how many flows may be left behind, None: any number.

    Raises:
        TooManyLost: more cannot be moved; nothing has changed.
        DataplaneError, OSError: flows that have not been moved are still the old mode's.
    """
    if isinstance(old, TranslatesByMaps) and isinstance(new, TranslatesByConntrack):
        return to_conntrack(old, max_lost)
    if isinstance(old, TranslatesByConntrack) and isinstance(new, TranslatesByMaps):
        return from_conntrack(old.conntrack_flows(table), new, max_lost)
    return _shared(old, new)


def _shared(old: object, new: object) -> HandOver:
    """Of two modes that translate by conntrack the flows are the same."""
    if isinstance(old, TranslatesByConntrack) and isinstance(new, TranslatesByConntrack):
        return HandOver({}, {})
    raise Unmovable("flows move between mode ebpf and the modes nftables and iptables alone: let the mode drain")


def to_conntrack(old: TranslatesByMaps, max_lost: int | None = None) -> HandOver:
    """Hand the flows of a mode that takes no new ones to conntrack, where another mode or proxy translates by it.

    Args, raises: as `hand_over`.
    """
    began = time.monotonic()
    flows, left = _sorted_out(old.export_flows())
    _check(left, max_lost)
    stack = flows.through_stack
    through, past = flows.where(stack), flows.where(~stack)
    with Passage(through) as passage:
        left += reasons(passage.refused)
        through = through.where(passage.refused == 0)
        delete(through.untranslated(), translated=False)
        codes = [insert(part, translated=True) for part in (through, past)]
        insert(through.where(codes[0] != 0).untranslated(), translated=False)  # they stay what they were
        for part, refused in zip((through, past), codes, strict=True):
            left += reasons(np.where(part.opening, 0, refused))  # their next SYN begins anew
        moved = concatenated(through.where(codes[0] == 0), past.where(codes[1] == 0))
        old.forget_flows(moved, Half.BEFORE)
        wait_for_programs()
    alive = old.forget_flows(moved, Half.BEHIND)
    delete(moved.where(~alive), translated=True)
    return HandOver(moved.where(alive).count(), left, time.monotonic() - began)


def from_conntrack(known: Flows, new: TranslatesByMaps, max_lost: int | None = None) -> HandOver:
    """Hand flows that conntrack translates to a mode that translates by maps of its own, and serves.

    Args:
        known: conntrack's flows.
        new: the mode that serves.
        max_lost: how many flows may be left behind, None: any number.

    Raises:
        as `hand_over`.
    """
    began = time.monotonic()
    flows, left = _sorted_out(known)
    reception = new.receive_flows(flows)
    _check(left + reception.left, max_lost)
    loosen(reception.flows)
    reception.take(Half.BEHIND)
    coming = reception.flows
    with Passage(coming.where(coming.through_stack)) as passage:
        refused = np.zeros(len(coming), dtype=bool)
        refused[coming.through_stack] = passage.refused != 0
        reception.refuse("conntrack could not keep their packets apart meanwhile", refused)
        reception.take(Half.BEFORE)
        wait_for_programs()
        moved = reception.flows
        delete(concatenated(moved, reception.repeated), translated=True)
        delete(reception.repeated, translated=False)  # conntrack gave it another port, to keep the two apart
        insert(moved.where(moved.through_stack).untranslated(), translated=False)
    return HandOver(moved.count(), left + reception.left, time.monotonic() - began)


def _check(left: Counter[str], max_lost: int | None) -> None:
    lost = left.total()
    if max_lost is not None and lost > max_lost:
        listed = "; ".join(f"{count} of {reason}" for reason, count in left.items())
        raise TooManyLost(f"{lost} flows would be lost, and {max_lost} may be: {listed}")


def _sorted_out(flows: Flows) -> tuple[Flows, Counter[str]]:
    """Those that conntrack can be given, and how many cannot be, by reason."""
    kinds = ((DSR, flows.flagged(FlowFlag.DSR)), (SCTP, flows.rows["protocol"] == Transport.SCTP))
    left, movable = Counter[str](), np.ones(len(flows), dtype=bool)
    for reason, which in kinds:
        if count := int(np.count_nonzero(which & movable)):
            left[reason] = count
        movable &= ~which
    return flows.where(movable), left
