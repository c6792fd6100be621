"""A dummy device that holds addresses of services, so that packets to them are this node's own.

The device comes from pyroute2; its addresses, of which there may be thousands, go many in one system call.

IPv4 addresses have the scope of this host and IPv6 addresses count as deprecated: neither is then chosen as the
source of anything that leaves the node, such as masqueraded traffic (inet_select_addr(), RFC 6724 rule 3).
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Final

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel import netlink as nl
from hybrid_proxy.dataplane.kernel import sysctl
from hybrid_proxy.dataplane.kernel.ipvs import load_module
from hybrid_proxy.dataplane.kernel.links import SCOPE_HOST, SCOPE_LINK

ALIAS: Final = "hybrid-proxy"  # on devices that we made
# linux/rtnetlink.h, linux/if_addr.h
RTM_DELLINK, RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 17, 20, 21, 22
GROUPS: Final = 1 | 0x10 | 0x100  # RTMGRP_LINK, _IPV4_IFADDR and _IPV6_IFADDR
IFA_ADDRESS, IFA_LOCAL, IFA_CACHEINFO, IFA_FLAGS = 1, 2, 6, 8
IFA_F_NODAD, IFA_F_NOPREFIXROUTE = 0x02, 0x200
FOREVER: Final = 0xFFFFFFFF
_IFADDR: Final = struct.Struct("=BBBBI")
_IFINFO_INDEX: Final = struct.Struct("=BBHi")
_CACHEINFO: Final = struct.Struct("=IIII")


class Dummy:
    """One dummy device of the network namespace that the calling thread is in now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._netlink = nl.Netlink(nl.ROUTE)
        self.index = 0

    def close(self) -> None:
        """Close the socket; the device stays."""
        self._netlink.close()

    def find(self) -> bool:
        with IPRoute() as ip:
            self.index = next(iter(ip.link_lookup(ifname=self.name)), 0)
        return bool(self.index)

    def ensure(self) -> None:
        """Create it if it does not exist, and set it up.

        Raises:
            Unsupported: the kernel has no dummy device, or this process may not make one.
        """
        with IPRoute() as ip:
            if not self.find():
                self._make(ip)
                self.index = ip.link_lookup(ifname=self.name)[0]
                ip.link("set", index=self.index, ifalias=ALIAS)
                # The kernel gives it no link-local address: nothing may use it as a source.
                sysctl.write(f"net/ipv6/conf/{self.name}/addr_gen_mode", "1")
            ip.link("set", index=self.index, state="up")

    def _make(self, ip: IPRoute) -> None:
        for attempt in range(2):
            try:
                ip.link("add", ifname=self.name, kind="dummy")
            except NetlinkError as error:
                if error.code == errno.EEXIST:
                    return
                why = load_module("dummy") if error.code == errno.EOPNOTSUPP and attempt == 0 else None
                if error.code != errno.EOPNOTSUPP or attempt or why:
                    reason = f"the kernel makes no dummy device ({error}{f', {why}' if why else ''})"
                    raise Unsupported(f"device {self.name}", f"{reason}: load or build that module") from error
            else:
                return

    def addresses(self) -> set[str]:
        """Returns its addresses without link-local ones; none when it does not exist."""
        what = f"reading the addresses of {self.name}"  # of both families
        request = nl.Message(RTM_GETADDR, _IFADDR.pack(0, 0, 0, 0, 0), nl.NLM_F_DUMP, what)
        return set(filter(None, (_address(answer, self.index) for answer in self._netlink.dump(request))))

    def change(self, add: Iterable[str], remove: Iterable[str]) -> None:
        """Add and remove addresses. Existing ones are left as they are; missing ones are ignored.

        Raises:
            NetlinkFailed: the kernel refused one; the others are done.
        """
        requests = [self._message(RTM_NEWADDR, text) for text in add]
        requests += [self._message(RTM_DELADDR, text) for text in remove]
        self._netlink.change(requests, ((RTM_NEWADDR, errno.EEXIST), (RTM_DELADDR, errno.EADDRNOTAVAIL)))

    def _message(self, kind: int, text: str) -> nl.Message:
        family = socket.AF_INET6 if ":" in text else socket.AF_INET
        packed = socket.inet_pton(family, text)
        body = _IFADDR.pack(family, 8 * len(packed), 0, SCOPE_HOST if family == socket.AF_INET else 0, self.index)
        body += nl.attribute(IFA_LOCAL, packed)
        if kind == RTM_DELADDR:
            return nl.Message(kind, body, what=f"removing address {text} at {self.name}")
        body += nl.attribute(IFA_ADDRESS, packed)
        if family == socket.AF_INET6:
            body += nl.attribute(IFA_FLAGS, struct.pack("=I", IFA_F_NODAD | IFA_F_NOPREFIXROUTE))
            body += nl.attribute(IFA_CACHEINFO, _CACHEINFO.pack(0, FOREVER, 0, 0))
        return nl.Message(kind, body, nl.NLM_F_CREATE, f"adding address {text} at {self.name}")

    def remove(self, *, of_others: bool = False) -> bool:
        """Remove it if it is ours, or another agent's, and has no address left. Returns whether it was removed."""
        if not self.find() or self.addresses():
            return False
        with IPRoute() as ip:
            link = ip.get_links(self.index)[0]
            if link.get_attr("IFLA_IFALIAS") != ALIAS and not of_others:
                return False
            with contextlib.suppress(NetlinkError):
                ip.link("del", index=self.index)
        return True

    def watch(self, wanted: Collection[str], changed: Callable[[], None], stop: threading.Event) -> threading.Thread:
        """Call `changed` when the device or an address in `wanted` is removed, until `stop`.

        Take an address out of `wanted` before removing it, so that our own change is not reported.
        """
        arguments = (nl.Events(nl.ROUTE, GROUPS), wanted, changed, stop)  # in the namespace of the calling thread
        thread = threading.Thread(target=self._watch, args=arguments, name=self.name, daemon=True)
        thread.start()
        return thread

    def _watch(
        self, events: nl.Events, wanted: Collection[str], changed: Callable[[], None], stop: threading.Event
    ) -> None:
        with events:
            for data in events.until(stop):
                if data is None or self._is_loss(data, wanted):  # lost reports may have been about a lost address
                    changed()

    def _is_loss(self, data: bytes, wanted: Collection[str]) -> bool:
        for kind, _, _, _, body in nl.messages(data):
            if kind == RTM_DELLINK and _IFINFO_INDEX.unpack_from(body)[3] == self.index:
                return True
            if kind == RTM_DELADDR and _address(body, self.index) in wanted:
                return True
        return False


def _address(message: bytes, index: int) -> str:
    """Returns the address in a message of rtnetlink; empty: of another device, or link-local."""
    family, _, _, scope, of = _IFADDR.unpack_from(message)
    if of != index or scope == SCOPE_LINK:
        return ""
    known = dict(nl.attributes(message, _IFADDR.size))
    packed = known.get(IFA_LOCAL) or known.get(IFA_ADDRESS)
    return socket.inet_ntop(family, packed) if packed else ""
