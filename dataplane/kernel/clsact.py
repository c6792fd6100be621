"""Our tc filters at clsact qdiscs: attached to many interfaces at once, detached, and checked."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.kernel import netlink as nl
from hybrid_proxy.dataplane.kernel.bpf import BpfError, program_number

# linux/rtnetlink.h, linux/pkt_sched.h, linux/pkt_cls.h
NEW_QDISC, DELETE_QDISC, GET_QDISC, NEW_FILTER, DELETE_FILTER, GET_FILTER, RTMGRP_TC = 36, 37, 38, 44, 45, 46, 8
# They give packets hooks, or an order, and do not limit an interface.
HARMLESS: Final = frozenset({"noqueue", "noop", "pfifo_fast", "fq", "fq_codel", "mq", "clsact", "ingress"})
CLSACT, AT_CLSACT = 0xFFFF0000, 0xFFFFFFF1  # the qdisc's handle and parent
INGRESS, EGRESS = 0xFFFFFFF2, 0xFFFFFFF3  # TC_H_CLSACT with TC_H_MIN_INGRESS and TC_H_MIN_EGRESS
TCA_KIND, TCA_OPTIONS = 1, 2
TCA_BPF_CLASSID, TCA_BPF_FD, TCA_BPF_NAME, TCA_BPF_FLAGS, TCA_BPF_ID = 3, 6, 7, 8, 11
DIRECT_ACTION = 1  # TCA_BPF_FLAG_ACT_DIRECT
ALL_PROTOCOLS = 3  # ETH_P_ALL
PRIORITY: Final = 1
HANDLE: Final = 0x4850  # "HP": our filters have this handle and one of our names
NAME: Final = "hybrid_proxy_"
_TCMSG: Final = struct.Struct("=B3xiIII")  # family, interface, handle, parent, info
_INFO: Final = PRIORITY << 16 | socket.htons(ALL_PROTOCOLS)


class Filter(NamedTuple):
    """A filter to attach.

    Attributes:
        interface: its index.
        name: of the filter, without our prefix.
        program: a descriptor.
        ingress: whether it sees packets that the interface receives; otherwise those that it sends.
    """

    interface: int
    name: str
    program: int
    ingress: bool

    @property
    def parent(self) -> int:
        """The half of the qdisc."""
        return INGRESS if self.ingress else EGRESS


def attach(filters: Sequence[Filter]) -> dict[int, BpfError]:
    """Attaches filters or replaces their programs, and makes the qdiscs that are missing.

    Returns:
        Why no filter could be attached, by the index of the interface.
    """
    failed: dict[int, BpfError] = {}
    indices = list(dict.fromkeys(one.interface for one in filters))
    with nl.Netlink(nl.ROUTE) as wire:
        codes = dict(wire.send([_qdisc(index) for index in indices]))
        # A foreign `ingress` qdisc in the place of clsact would run egress filters at ingress.
        there = list(_qdiscs(wire)) if errno.EEXIST in codes.values() else []
        others = {index for index, parent, kind in there if parent == AT_CLSACT and kind != "clsact"}
        for position, code in codes.items():
            index = indices[position]
            if code != errno.EEXIST or index in others:
                failed[index] = BpfError(f"clsact at interface {index}", code)
        rest = [one for one in filters if one.interface not in failed]
        for position, code in wire.send([_new(one) for one in rest]):
            failed.setdefault(
                rest[position].interface, BpfError(f"tc filter at interface {rest[position].interface}", code)
            )
    return failed


def _qdisc(index: int) -> nl.Message:
    body = _TCMSG.pack(0, index, CLSACT, AT_CLSACT, 0) + nl.string(TCA_KIND, "clsact")
    return nl.Message(NEW_QDISC, body, nl.NLM_F_CREATE | nl.NLM_F_EXCL, "making clsact qdiscs")


def _qdiscs(wire: nl.Netlink) -> Iterator[tuple[int, int, str]]:
    """Yields interface, parent and kind of each qdisc of this namespace."""
    for body in wire.dump(nl.Message(GET_QDISC, _TCMSG.pack(0, 0, 0, 0, 0), nl.NLM_F_DUMP, "reading the qdiscs")):
        _, index, _, parent, _ = _TCMSG.unpack_from(body)
        yield index, parent, nl.text(dict(nl.attributes(body, _TCMSG.size)).get(TCA_KIND, b""))


def _new(wanted: Filter) -> nl.Message:
    options = nl.nested(
        TCA_OPTIONS,
        nl.attribute(TCA_BPF_FD, _word(wanted.program)),
        nl.string(TCA_BPF_NAME, NAME + wanted.name),
        nl.attribute(TCA_BPF_FLAGS, _word(DIRECT_ACTION)),
        nl.attribute(TCA_BPF_CLASSID, _word(1)),
    )
    body = _TCMSG.pack(0, wanted.interface, HANDLE, wanted.parent, _INFO) + nl.string(TCA_KIND, "bpf") + options
    return nl.Message(NEW_FILTER, body, nl.NLM_F_CREATE, "attaching tc filters")


def _word(value: int) -> bytes:
    return value.to_bytes(4, sys.byteorder)


def detach(index: int) -> int:
    """Removes our filters from an interface, and the qdisc if it is empty then. Returns how many filters there were.

    Raises:
        NetlinkFailed: the kernel refused to remove a filter.
    """
    with nl.Netlink(nl.ROUTE) as wire:
        found = [parent for parent in (INGRESS, EGRESS) for one in _filters(wire, index, parent) if one.ours]
        requests = [
            nl.Message(DELETE_FILTER, _TCMSG.pack(0, index, HANDLE, parent, _INFO) + nl.string(TCA_KIND, "bpf"))
            for parent in found
        ]
        for _, code in wire.send(requests):
            if code not in (errno.ENOENT, errno.EINVAL, errno.ENODEV):  # the interface is gone
                raise nl.NetlinkFailed(f"removing filters of interface {index}", code)
        if found and not any(True for parent in (INGRESS, EGRESS) for _ in _filters(wire, index, parent)):
            body = _TCMSG.pack(0, index, CLSACT, AT_CLSACT, 0) + nl.string(TCA_KIND, "clsact")
            wire.send([nl.Message(DELETE_QDISC, body)])
    return len(found)


def names(index: int, *, ingress: bool) -> list[tuple[str, bool]]:
    """The filters of an interface in the order in which they run: the name or else the kind, and whether it is ours."""
    with nl.Netlink(nl.ROUTE) as wire:
        filters = list(_filters(wire, index, INGRESS if ingress else EGRESS))
    return [(one.name or one.kind, one.ours) for one in filters if one.handle]  # without: the head of a list of filters


class _Found(NamedTuple):
    """A filter in the kernel. A filter that is no BPF program has no name, and the number 0 for a program."""

    kind: str
    handle: int
    name: str
    program: int

    @property
    def ours(self) -> bool:
        """A foreign filter may have the same handle."""
        return self.handle == HANDLE and self.name.startswith(NAME)


def _filters(wire: nl.Netlink, index: int, parent: int) -> Iterator[_Found]:
    request = _TCMSG.pack(0, index, 0, parent, 0)
    message = nl.Message(GET_FILTER, request, nl.NLM_F_DUMP, f"reading the filters of interface {index}")
    with contextlib.suppress(nl.NetlinkFailed):  # no qdisc, or no interface any more
        for body in wire.dump(message):
            _, _, handle, _, _ = _TCMSG.unpack_from(body)
            known = dict(nl.attributes(body, _TCMSG.size))
            kind = nl.text(known.get(TCA_KIND, b""))
            # Of other kinds, the same numbers mean something else.
            options = dict(nl.attributes(known.get(TCA_OPTIONS, b""))) if kind == "bpf" else {}
            name = nl.text(options.get(TCA_BPF_NAME, b""))
            yield _Found(kind, handle, name, int.from_bytes(options.get(TCA_BPF_ID, b""), sys.byteorder))


class FilterWatch:
    """Finds our missing filters, and foreign ones, in the network namespace of the calling thread.

    The filters of an interface are read again only after the kernel has reported a change of its filters or qdiscs.
    """

    def __init__(self) -> None:
        self._events = nl.Events(nl.ROUTE, RTMGRP_TC)
        self._read: dict[int, dict[bool, list[_Found]]] = {}  # by interface, unless changed since: at ingress or not
        self._missing: dict[int, list[str]] = {}  # the same
        self._qdiscs: dict[int, list[str]] | None = None  # of all interfaces, since the last change of any

    def missing(self, index: int, programs: Mapping[tuple[str, bool], int]) -> list[str]:
        """The names of our filters that an interface did not have, or that ran another program, at the last `look`.

        `programs` has the descriptor of each program by the filter's name and whether it is at ingress.
        """
        if index not in self._missing:
            found = self._filters_of(index)
            ours = {(one.name, ingress): one.program for ingress in found for one in found[ingress] if one.ours}
            self._missing[index] = [
                name
                for (name, ingress), program in programs.items()
                if ours.get((NAME + name, ingress)) != program_number(program)
            ]
        return self._missing[index]

    def others(self, index: int) -> list[str]:
        """The names of foreign filters at an interface."""
        return [one.name or one.kind for one in self._foreign(index)]

    def _foreign(self, index: int) -> list[_Found]:
        found = self._filters_of(index)
        return [one for ingress in found for one in found[ingress] if one.handle and not one.ours]

    def _filters_of(self, index: int) -> dict[bool, list[_Found]]:
        if index not in self._read:
            with nl.Netlink(nl.ROUTE) as wire:
                parents = {True: INGRESS, False: EGRESS}
                self._read[index] = {at: list(_filters(wire, index, parent)) for at, parent in parents.items()}
        return self._read[index]

    def shapers(self, index: int) -> list[str]:
        """The qdiscs and the filters of other kinds by which an interface may be limited."""
        found = {f"filter {one.kind}" for one in self._foreign(index) if one.kind != "bpf"}
        if self._qdiscs is None:
            self._qdiscs = {}
            with nl.Netlink(nl.ROUTE) as wire:
                for interface, _, kind in _qdiscs(wire):
                    if kind not in HARMLESS:
                        self._qdiscs.setdefault(interface, []).append(f"qdisc {kind}")
        return [*self._qdiscs.get(index, ()), *sorted(found)]

    def look(self) -> None:
        """Forgets what has changed: once for all interfaces, of which a node may have hundreds."""
        while (data := self._events.read()) != b"":
            self._qdiscs = None
            if data is None:  # reports were lost
                self._missing.clear()
                self._read.clear()
                continue
            for _, _, _, _, body in nl.messages(data):
                if len(body) >= _TCMSG.size:
                    index = _TCMSG.unpack_from(body)[1]
                    self._missing.pop(index, None)
                    self._read.pop(index, None)

    def close(self) -> None:
        """Stops listening to the kernel's reports."""
        self._events.close()
