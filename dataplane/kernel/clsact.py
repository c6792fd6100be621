"""Our filters at clsact qdiscs, for kernels without TCX links: attached, detached, and checked for drift.

The kernel reports when a filter or a qdisc changes, and only then the filters are read. pyroute2 does not decode the
id of a filter's program, so that dump is unpacked here. Where the kernel has TCX, nothing imports pyroute2.
"""

from __future__ import annotations

import contextlib
import errno
import struct
import sys
from collections.abc import Mapping
from typing import Any, Final

from hybrid_proxy.dataplane.kernel.attachment import program_number
from hybrid_proxy.dataplane.kernel.bpf import BpfError
from hybrid_proxy.dataplane.kernel.netlink import NLM_F_DUMP, ROUTE, Events, Message, Netlink, NetlinkFailed, attributes

RTM_GETTFILTER, RTMGRP_TC = 46, 8  # linux/rtnetlink.h
INGRESS, EGRESS = 0xFFFFFFF2, 0xFFFFFFF3  # TC_H_CLSACT with TC_H_MIN_INGRESS and TC_H_MIN_EGRESS
PRIORITY: Final = 1
HANDLE: Final = 0x4850  # "HP": our filters have this handle and a name of ours
NAME: Final = "hybrid_proxy_"
TCA_OPTIONS, TCA_BPF_NAME, TCA_BPF_ID = 2, 7, 11  # linux/rtnetlink.h, linux/pkt_cls.h
_TCMSG: Final = struct.Struct("=B3xiIII")  # family, interface, handle, parent, info


def attach(index: int, program: int, name: str, *, ingress: bool) -> None:
    """Attach or replace our filter of this name at an interface's clsact qdisc, which is made if need be."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    parent = INGRESS if ingress else EGRESS
    with IPRoute() as ip:
        try:
            ip.tc("add", "clsact", index)
        except NetlinkError as error:
            if error.code != errno.EEXIST:
                raise BpfError(f"clsact at interface {index}", error.code) from error
        try:
            ip.tc(
                "replace-filter", "bpf", index, handle=HANDLE, prio=PRIORITY, fd=program, name=NAME + name,
                parent=parent, classid=1, direct_action=True,
            )  # fmt: skip
        except NetlinkError as error:
            raise BpfError(f"tc filter at interface {index}", error.code) from error


def _is_ours(found: Any) -> bool:
    """By handle and name: another program may have chosen the same handle."""
    options = found.get_attr("TCA_OPTIONS")
    name = options.get_attr("TCA_BPF_NAME") if hasattr(options, "get_attr") else None
    return found["handle"] == HANDLE and str(name or "").startswith(NAME)


def detach(index: int) -> int:
    """Remove our filters from an interface, and no others; returns how many there were."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    removed = 0
    with IPRoute() as ip:
        for parent in (INGRESS, EGRESS):
            try:
                filters = [found for found in ip.get_filters(index=index, parent=parent) if _is_ours(found)]
                for _ in filters:
                    ip.tc("del-filter", "bpf", index, handle=HANDLE, prio=PRIORITY, parent=parent)
                    removed += 1
            except NetlinkError as error:
                if error.code not in (errno.ENOENT, errno.EINVAL, errno.ENODEV):
                    raise
    return removed


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
            self._missing[index] = [
                name
                for (name, ingress), program in programs.items()
                if _program_at(index, name, ingress=ingress) != program_number(program)
            ]
        return self._missing[index]

    def close(self) -> None:
        self._events.close()


def _program_at(index: int, name: str, *, ingress: bool) -> int | None:
    """The id of the program that our filter of this name runs; None: there is no such filter."""
    request = _TCMSG.pack(0, index, 0, INGRESS if ingress else EGRESS, 0)
    message = Message(RTM_GETTFILTER, request, NLM_F_DUMP, f"reading the filters of interface {index}")
    with Netlink(ROUTE) as wire, contextlib.suppress(NetlinkFailed):  # no qdisc, or no interface any more
        for body in wire.dump(message):
            _, _, handle, _, _ = _TCMSG.unpack_from(body)
            options = dict(attributes(dict(attributes(body, _TCMSG.size)).get(TCA_OPTIONS, b"")))
            if handle == HANDLE and options.get(TCA_BPF_NAME, b"").rstrip(b"\0").decode() == NAME + name:
                return int.from_bytes(options.get(TCA_BPF_ID, b""), sys.byteorder)
    return None
