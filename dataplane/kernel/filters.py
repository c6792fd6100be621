"""Our filters at clsact qdiscs, for kernels without TCX links: are they still there, and ours?

The kernel tells when somebody changes a filter or a qdisc; only then they are looked at. pyroute2 does not decode the
number of a filter's program, so the dump is unpacked here.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Mapping
from typing import Final

from dataplane.kernel.attachment import program_number
from dataplane.kernel.links import EGRESS, HANDLE, INGRESS, NAME
from dataplane.kernel.netlink import NLM_F_DUMP, ROUTE, Message, Netlink, NetlinkFailed, attributes, heard

__all__ = ["Filters"]

RTMGRP_TC: Final = 0x8  # linux/rtnetlink.h: filters and qdiscs
RTM_GETTFILTER: Final = 46
TCA_OPTIONS, TCA_BPF_NAME, TCA_BPF_ID = 2, 7, 11  # linux/rtnetlink.h, linux/pkt_cls.h
_TCMSG: Final = struct.Struct("=B3xiIII")  # family, interface, handle, parent, info


class Filters:
    """What is at the interfaces of the namespace that the calling thread is in now."""

    def __init__(self) -> None:
        self._events = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._events.bind((0, RTMGRP_TC))
        self._events.setblocking(False)
        self._missing: dict[int, list[str]] = {}  # by interface, of those looked at since the last change

    def missing(self, index: int, programs: Mapping[tuple[str, bool], int]) -> list[str]:
        """Names of our filters that an interface does not have, or that run another program.

        Args:
            index: of the interface.
            programs: descriptors by name and by whether the filter is at ingress.
        """
        if heard(self._events, 0):
            self._forget()
        if index not in self._missing:
            self._missing[index] = [
                name
                for (name, ingress), program in programs.items()
                if _program_at(index, name, ingress=ingress) != program_number(program)
            ]
        return self._missing[index]

    def _forget(self) -> None:
        """Something changed: what it was is read from the kernel, so a lost message does not matter."""
        self._missing.clear()
        while heard(self._events, 0):
            try:
                self._events.recv(1 << 16)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise

    def close(self) -> None:
        """Hear no more."""
        self._events.close()


def _program_at(index: int, name: str, *, ingress: bool) -> int | None:
    """The number of the program that our filter of this name runs; None: there is no such filter."""
    request = _TCMSG.pack(0, index, 0, INGRESS if ingress else EGRESS, 0)
    wire = Netlink(ROUTE)
    with contextlib.closing(wire), contextlib.suppress(NetlinkFailed):  # no qdisc, or no interface any more
        for body in wire.dump(Message(RTM_GETTFILTER, request, NLM_F_DUMP), f"filters of interface {index}"):
            _, _, handle, _, _ = _TCMSG.unpack_from(body)
            options = dict(attributes(dict(attributes(body, _TCMSG.size)).get(TCA_OPTIONS, b"")))
            if handle == HANDLE and options.get(TCA_BPF_NAME, b"").rstrip(b"\0").decode() == NAME + name:
                return int.from_bytes(options.get(TCA_BPF_ID, b""), "little")
    return None
