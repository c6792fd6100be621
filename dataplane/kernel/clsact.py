"""Our filters at clsact qdiscs: attached by the hundred, detached, and checked for drift.

They serve where the kernel has no TCX links, and where many interfaces come at once: each link costs a grace period, in
which nothing else of the node's interfaces can be changed, filters cost none. The kernel reports when a filter or a
qdisc changes, and only then the filters are read.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.kernel.attachment import program_number
from hybrid_proxy.dataplane.kernel.bpf import BpfError
from hybrid_proxy.dataplane.kernel.netlink import (
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    ROUTE,
    Events,
    Message,
    Netlink,
    NetlinkFailed,
    attribute,
    attributes,
    nested,
    string,
)

# linux/rtnetlink.h, linux/pkt_sched.h, linux/pkt_cls.h
NEW_QDISC, GET_QDISC, NEW_FILTER, DELETE_FILTER, GET_FILTER, RTMGRP_TC = 36, 38, 44, 45, 46, 8
CLSACT, AT_CLSACT = 0xFFFF0000, 0xFFFFFFF1  # the qdisc's handle and parent
INGRESS, EGRESS = 0xFFFFFFF2, 0xFFFFFFF3  # TC_H_CLSACT with TC_H_MIN_INGRESS and TC_H_MIN_EGRESS
TCA_KIND, TCA_OPTIONS = 1, 2
TCA_BPF_CLASSID, TCA_BPF_FD, TCA_BPF_NAME, TCA_BPF_FLAGS, TCA_BPF_ID = 3, 6, 7, 8, 11
DIRECT_ACTION = 1  # TCA_BPF_FLAG_ACT_DIRECT
ALL_PROTOCOLS = 3  # ETH_P_ALL
PRIORITY: Final = 1
HANDLE: Final = 0x4850  # "HP": our filters have this handle and a name of ours
NAME: Final = "hybrid_proxy_"
_TCMSG: Final = struct.Struct("=B3xiIII")  # family, interface, handle, parent, info
_INFO: Final = PRIORITY << 16 | socket.htons(ALL_PROTOCOLS)


class Filter(NamedTuple):
    """One of ours: its interface, its name, the descriptor of its program, and the way of its packets."""

    interface: int
    name: str
    program: int
    ingress: bool

    @property
    def parent(self) -> int:
        """The half of the qdisc that it is at."""
        return INGRESS if self.ingress else EGRESS


def attach(filters: Sequence[Filter]) -> dict[int, BpfError]:
    """Attach or replace our filters of these names; qdiscs are made where there are none.

    Returns:
        By interface, why a filter could not be attached there.
    """
    failed: dict[int, BpfError] = {}
    indices = list(dict.fromkeys(one.interface for one in filters))
    with Netlink(ROUTE) as wire:
        codes = dict(wire.send([_qdisc(index) for index in indices]))
        others = _ingress_alone(wire) if errno.EEXIST in codes.values() else frozenset()
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


def _qdisc(index: int) -> Message:
    body = _TCMSG.pack(0, index, CLSACT, AT_CLSACT, 0) + string(TCA_KIND, "clsact")
    return Message(NEW_QDISC, body, NLM_F_CREATE | NLM_F_EXCL, "making clsact qdiscs")


def _ingress_alone(wire: Netlink) -> frozenset[int]:
    """Interfaces with a qdisc of others in the same place. It would run filters for egress at ingress."""
    request = Message(GET_QDISC, _TCMSG.pack(0, 0, 0, 0, 0), NLM_F_DUMP, "reading the qdiscs")
    found = set()
    for body in wire.dump(request):
        _, index, _, parent, _ = _TCMSG.unpack_from(body)
        kind = dict(attributes(body, _TCMSG.size)).get(TCA_KIND, b"")
        if parent == AT_CLSACT and kind.rstrip(b"\0") != b"clsact":
            found.add(index)
    return frozenset(found)


def _new(wanted: Filter) -> Message:
    options = nested(
        TCA_OPTIONS,
        attribute(TCA_BPF_FD, _word(wanted.program)),
        string(TCA_BPF_NAME, NAME + wanted.name),
        attribute(TCA_BPF_FLAGS, _word(DIRECT_ACTION)),
        attribute(TCA_BPF_CLASSID, _word(1)),
    )
    body = _TCMSG.pack(0, wanted.interface, HANDLE, wanted.parent, _INFO) + string(TCA_KIND, "bpf") + options
    return Message(NEW_FILTER, body, NLM_F_CREATE, "attaching tc filters")


def _word(value: int) -> bytes:
    return value.to_bytes(4, sys.byteorder)


def detach(index: int) -> int:
    """Remove our filters from an interface, and no others; returns how many there were."""
    with Netlink(ROUTE) as wire:
        found = [parent for parent in (INGRESS, EGRESS) for _ in _ours(wire, index, parent)]
        requests = [
            Message(DELETE_FILTER, _TCMSG.pack(0, index, HANDLE, parent, _INFO) + string(TCA_KIND, "bpf"))
            for parent in found
        ]
        for _, code in wire.send(requests):
            if code not in (errno.ENOENT, errno.EINVAL, errno.ENODEV):  # they went with their interface
                raise NetlinkFailed(f"removing filters of interface {index}", code)
    return len(found)


def names(index: int, *, ingress: bool) -> list[tuple[str, bool]]:
    """The filters of an interface in the order in which they run, by name or else by kind, and whether one is ours."""
    with Netlink(ROUTE) as wire:
        filters = list(_filters(wire, index, INGRESS if ingress else EGRESS))
    return [(one.name or one.kind, one.ours) for one in filters if one.handle]  # without: the head of a list of filters


class _Found(NamedTuple):
    """A filter as the kernel has it; name and number of the program are empty and 0 of one that is no BPF program."""

    kind: str
    handle: int
    name: str
    program: int

    @property
    def ours(self) -> bool:
        """Another program's may have the same handle."""
        return self.handle == HANDLE and self.name.startswith(NAME)


def _ours(wire: Netlink, index: int, parent: int) -> Iterator[tuple[str, int]]:
    """Name and number of the program of each filter of ours."""
    for one in _filters(wire, index, parent):
        if one.ours:
            yield one.name.removeprefix(NAME), one.program


def _filters(wire: Netlink, index: int, parent: int) -> Iterator[_Found]:
    request = _TCMSG.pack(0, index, 0, parent, 0)
    message = Message(GET_FILTER, request, NLM_F_DUMP, f"reading the filters of interface {index}")
    with contextlib.suppress(NetlinkFailed):  # no qdisc, or no interface any more
        for body in wire.dump(message):
            _, _, handle, _, _ = _TCMSG.unpack_from(body)
            known = dict(attributes(body, _TCMSG.size))
            kind = known.get(TCA_KIND, b"").rstrip(b"\0").decode(errors="replace")
            # Of other kinds, the same numbers mean something else.
            options = dict(attributes(known.get(TCA_OPTIONS, b""))) if kind == "bpf" else {}
            name = options.get(TCA_BPF_NAME, b"").rstrip(b"\0").decode(errors="replace")
            yield _Found(kind, handle, name, int.from_bytes(options.get(TCA_BPF_ID, b""), sys.byteorder))


class Filters:
    """The filters in the network namespace of the calling thread, read again when the kernel reports a change."""

    def __init__(self) -> None:
        self._events = Events(ROUTE, RTMGRP_TC)
        self._missing: dict[int, list[str]] = {}  # by interface, of those read since the last change

    def missing(self, index: int, programs: Mapping[tuple[str, bool], int]) -> list[str]:
        """Names of our filters that an interface does not have, or that run another program.

        `programs` has descriptors by name and by whether the filter is at ingress.
        """
        if self._events.drain():
            self._missing.clear()
        if index not in self._missing:
            with Netlink(ROUTE) as wire:
                found = {ingress: dict(_ours(wire, index, INGRESS if ingress else EGRESS)) for ingress in (True, False)}
            self._missing[index] = [
                name
                for (name, ingress), program in programs.items()
                if found[ingress].get(name) != program_number(program)
            ]
        return self._missing[index]

    def close(self) -> None:
        self._events.close()
