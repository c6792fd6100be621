"""Flows that change hands pass through a zone of conntrack of their own.

While programs translate a flow, the stack sees plain packets between client and backend, and conntrack has an entry of
them. The entry with which conntrack itself will translate has the same tuple of answers: it can be inserted only when
the plain one is gone, and a packet in between would make another plain one. So the packets of these flows get their
entries from another zone meanwhile: a firewall goes on to see established connections, of which no packet is lost.
(Untracked packets would do, too, but for firewalls that accept established connections alone.)
"""

from __future__ import annotations

import contextlib
import errno
from typing import Any, Final, Self

import numpy as np

from hybrid_proxy.dataplane.flows import Flows
from hybrid_proxy.dataplane.kernel.conntrack_flows import delete, insert
from hybrid_proxy.dataplane.kernel.grace import wait_for_programs
from hybrid_proxy.dataplane.kernel.netlink import ATTRIBUTE, NESTED
from hybrid_proxy.dataplane.kernel.nfnetlink import NftablesError
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables import uapi as nf
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES, Family, rule, set_zone
from hybrid_proxy.dataplane.nftables.ruleset import add
from hybrid_proxy.dataplane.nftables.schema import ADDRESS, PORT, PROTOCOL, Chain, Hook, Set
from hybrid_proxy.dataplane.nftables.wire import Kernel, remove_tables

TABLE: Final = "hybrid-proxy-handover"
ZONE: Final = 0x6870
MOVING: Final = Set("moving", (ADDRESS, PORT, ADDRESS, PORT, PROTOCOL))
PIECE: Final = 60_000  # bytes of elements in one message


class Passage:
    """While the block runs, conntrack has these flows, as plain ones, in a zone of their own. A context manager.

    After it the packets are those of the usual zone again, whose entries the block has exchanged. If the process ends
    in the block, so does the zone.

    `refused` has for each flow the error number with which conntrack refused it, or 0.

    Raises:
        NftablesError, OSError: this kernel has no nf_tables, no zones, or does not allow it; nothing has changed.
    """

    def __init__(self, flows: Flows) -> None:
        self._flows = flows.untranslated()
        self._stack = contextlib.ExitStack()
        self.refused = np.zeros(len(flows), dtype=np.int64)

    def __enter__(self) -> Self:
        if len(self._flows):
            self.refused = insert(self._flows, translated=False, zone=ZONE)
            self._stack.callback(self._forget)
            if (self.refused == errno.EEXIST).any():  # of a process that ended in its midst
                delete(self._flows, translated=False, zone=ZONE)
                self.refused = insert(self._flows, translated=False, zone=ZONE)
            self._stack.callback(wait_for_programs)
            with self._stack.pop_all() as ending:
                self._divert(ending, self._flows.where(self.refused == 0))
                self._stack = ending.pop_all()
            wait_for_programs()
        return self

    def _divert(self, ending: contextlib.ExitStack, flows: Flows) -> None:
        """Have packets of these flows get their entries from the zone."""
        remove_tables(TABLE)
        kernel = ending.enter_context(contextlib.closing(Kernel(TABLE, {MOVING.name: MOVING})))
        rulesets = [(family, list(add((MOVING,), _chains(family)))) for family in FAMILIES.values()]
        try:
            kernel.commit(*((family, [op.OwnTable(), *made]) for family, made in rulesets))
        except NftablesError as error:
            if error.code != errno.EOPNOTSUPP:
                raise
            kernel.commit(*((family, [op.AddTable(), *made]) for family, made in rulesets))
        ending.callback(remove_tables, TABLE)
        for family in FAMILIES.values():
            for piece in elements(flows, family):
                kernel.commit((family, [op.AddEncoded(MOVING.name, [piece])]))

    def __exit__(self, *_: object) -> None:
        """From here on the usual entries count; packets on their way meet what they met before."""
        self._stack.close()

    def _forget(self) -> None:
        delete(self._flows.where(self.refused == 0), translated=False, zone=ZONE)


def _chains(family: Family) -> tuple[Chain, ...]:
    rules = (rule(family.tuple_in(MOVING.name), set_zone(ZONE)),)
    return (
        Chain("prerouting", rules, Hook(nf.NF_INET_PRE_ROUTING, nf.NF_IP_PRI_RAW, "filter")),
        Chain("output", rules, Hook(nf.NF_INET_LOCAL_OUT, nf.NF_IP_PRI_RAW, "filter")),
    )


def elements(flows: Flows, family: Family) -> list[bytes]:
    """Both plain tuples of each flow of a family as elements of `MOVING`, in pieces for messages."""
    rows = flows.of_family(family.version).rows
    kind = _element(family)
    made = np.zeros(2 * len(rows), dtype=kind)
    head = kind.itemsize
    for number, (name, attribute) in enumerate(
        (("element", nf.NFTA_LIST_ELEM), ("key", nf.NFTA_SET_ELEM_KEY), ("value", nf.NFTA_DATA_VALUE))
    ):
        nests = 0 if name == "value" else NESTED
        made[name] = np.frombuffer(ATTRIBUTE.pack(head - 4 * number, attribute | nests), dtype="u4")
    for half, (source, destination) in enumerate((("source", "backend"), ("backend", "source"))):
        part = made[half::2]
        part["source"], part["source_port"] = rows[source][:, : family.words], rows[f"{source}_port"]
        part["destination"], part["destination_port"] = (
            rows[destination][:, : family.words],
            rows[f"{destination}_port"],
        )
        part["protocol"] = rows["protocol"]
    step = PIECE // head
    return [made[start : start + step].tobytes() for start in range(0, len(made), step)]


def _element(family: Family) -> np.dtype[Any]:
    address = ("u4", (family.words,))
    return np.dtype(
        [
            ("element", "u4"), ("key", "u4"), ("value", "u4"),
            ("source", *address), ("source_port", "u2"), ("pad1", "u2"),
            ("destination", *address), ("destination_port", "u2"), ("pad2", "u2"),
            ("protocol", "u1"), ("pad3", "u1", 3),
        ]
    )  # fmt: skip
