"""Interfaces by rtnetlink: which there are, which are pods, when they change.

Default rule: an uplink is an interface that carries a default route or one of the node's primary addresses, or a
device (also a bond, a team, a VLAN) with an address; a
pod's interface is a veth or netkit device that is no uplink and whose peer lives in another namespace. Patterns
in the options replace either half of the rule.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from ipaddress import ip_address

import msgspec
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import (
    RTMGRP_IPV4_IFADDR,
    RTMGRP_IPV4_ROUTE,
    RTMGRP_IPV6_IFADDR,
    RTMGRP_IPV6_ROUTE,
    RTMGRP_LINK,
    rt_scope,
    rt_type,
)

from hybrid_proxy.dataplane.kernel.netlink import NLM_F_DUMP, ROUTE, Events, Message, Netlink, attributes

POD_KINDS = frozenset({"veth", "netkit"})
ETHERNET = 1  # ARPHRD_ETHER
UNICAST, LOCAL, BROADCAST, MAIN_TABLE = rt_type["unicast"], rt_type["local"], rt_type["broadcast"], 254
UPLINK_KINDS = frozenset({"", "bond", "team", "vlan"})  # "": a device of its own
SERVICES_DEVICE = "kube-ipvs0"  # of mode ipvs, ours or kube-proxy's: its addresses are services'
RTNLGRP_IPV4_NETCONF = 24  # IPv4's settings of interfaces, such as rp_filter
GROUPS = (
    RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR | RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_ROUTE
    | 1 << (RTNLGRP_IPV4_NETCONF - 1)
)  # fmt: skip
RTM_GETNETCONF, NETCONFA_IFINDEX, NETCONFA_RP_FILTER, NETCONFA_IFINDEX_ALL = 82, 1, 3, -1  # linux/netconf.h


class Interface(msgspec.Struct, frozen=True):
    """One interface of this namespace."""

    index: int
    name: str
    kind: str
    up: bool
    peer_elsewhere: bool
    default_route: bool
    addresses: tuple[str, ...]
    master: int = 0  # index of the bridge or bond that it is a port of
    ethernet: bool = True  # packets have an Ethernet header, which the programs expect
    lower: int = 0  # of a VLAN or a macvlan: index of the interface that it is on
    mac: str = "00:00:00:00:00:00"


class Hop(msgspec.Struct, frozen=True):
    """A next hop of a route."""

    index: int  # of the interface
    gateway: str  # "": the interface alone


class Node(msgspec.Struct, frozen=True):
    """The interfaces and the addresses on them; in `addresses` without loopback, link-local and services' ones.

    `local` are the node's addresses and its networks' broadcast addresses, as its tables have them. `equal_paths` are
    routes that have several next hops, as destination, length of its prefix, and hops.
    """

    interfaces: tuple[Interface, ...]
    addresses: tuple[str, ...]
    local: frozenset[str] = frozenset()
    equal_paths: frozenset[tuple[str, int, tuple[Hop, ...]]] = frozenset()


def interface_name(index: int) -> str | None:
    """None: it is gone, or there never was one."""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return None


def hardware_address(index: int) -> bytes:
    """Of an interface; zeros where there is none, as loopback's."""
    with IPRoute() as ip:
        try:
            links = list(ip.get_links(index)) if index else []
        except NetlinkError:
            links = []
    mac = links[0].get_attr("IFLA_ADDRESS") if links else None
    return bytes.fromhex(mac.replace(":", "")) if mac else bytes(6)


def interface_towards(address: str) -> int | None:
    """Index of the interface by which this node's packets to an address leave; None: by none."""
    with IPRoute() as ip:
        try:
            found = ip.route("get", dst=address)
        except NetlinkError:
            return None
        index: int | None = found[0].get_attr("RTA_OIF") if found else None
        return index


def read_node() -> Node:
    with IPRoute() as ip:
        routes = [route for family in (socket.AF_INET, socket.AF_INET6) for route in ip.get_routes(family=family)]
        unicast = [route for route in routes if route["type"] == UNICAST]
        defaults = {
            route.get_attr("RTA_OIF")
            for route in unicast
            if route["dst_len"] == 0 and route.get_attr("RTA_TABLE") == MAIN_TABLE
        }
        local = {
            route.get_attr("RTA_DST")
            for route in routes
            if route["type"] in (LOCAL, BROADCAST) and route["dst_len"] == (32 if _is_ipv4(route) else 128)
        }
        links = list(ip.get_links())
        services = {link["index"] for link in links if link.get_attr("IFLA_IFNAME") == SERVICES_DEVICE}
        addresses: dict[int, list[str]] = {}
        usable: list[str] = []
        for message in ip.get_addr():
            text = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
            addresses.setdefault(message["index"], []).append(text)
            if message["scope"] not in (rt_scope["link"], rt_scope["host"]) and message["index"] not in services:
                usable.append(text)
        interfaces = tuple(_interface(link, defaults, addresses) for link in links)
    several = frozenset(
        (
            route.get_attr("RTA_DST") or (str(ip_address(0)) if _is_ipv4(route) else "::"),
            route["dst_len"],
            tuple(map(_hop, hops)),
        )
        for route in unicast
        if (hops := route.get_attr("RTA_MULTIPATH"))
    )
    return Node(interfaces, tuple(dict.fromkeys(usable)), frozenset(local), several)


def _is_ipv4(route: object) -> bool:
    return bool(route["family"] == socket.AF_INET)  # type: ignore[index]


def _hop(hop: object) -> Hop:
    via = hop.get_attr("RTA_VIA")  # type: ignore[attr-defined]
    gateway = via["addr"] if via else hop.get_attr("RTA_GATEWAY")  # type: ignore[attr-defined]
    return Hop(hop["oif"], gateway or "")  # type: ignore[index]


def read_reverse_path_filters() -> dict[int, int]:
    """Interface index -> `rp_filter` as it counts there, the larger one of its own and of `all`."""
    request = Message(RTM_GETNETCONF, bytes([socket.AF_INET, 0, 0, 0]), NLM_F_DUMP, "reading settings of interfaces")
    with Netlink(ROUTE) as wire:
        settings = [dict(attributes(answer, 4)) for answer in wire.dump(request)]
    own = {
        int.from_bytes(known[NETCONFA_IFINDEX], sys.byteorder, signed=True): int.from_bytes(
            known[NETCONFA_RP_FILTER], sys.byteorder
        )
        for known in settings
        if NETCONFA_RP_FILTER in known
    }
    everywhere = own.get(NETCONFA_IFINDEX_ALL, 0)
    return {index: max(value, everywhere) for index, value in own.items() if index > 0}


def _interface(link: object, defaults: set[int], addresses: dict[int, list[str]]) -> Interface:
    get = link.get_attr  # type: ignore[attr-defined]
    info = get("IFLA_LINKINFO")
    index = link["index"]  # type: ignore[index]
    return Interface(
        index=index,
        name=get("IFLA_IFNAME"),
        kind=(info.get_attr("IFLA_INFO_KIND") if info else None) or "",
        up=get("IFLA_OPERSTATE") != "DOWN",
        peer_elsewhere=get("IFLA_LINK_NETNSID") is not None,
        default_route=index in defaults,
        addresses=tuple(addresses.get(index, ())),
        master=get("IFLA_MASTER") or 0,
        ethernet=link["ifi_type"] == ETHERNET,  # type: ignore[index]
        lower=get("IFLA_LINK") or 0,
        mac=get("IFLA_ADDRESS") or "00:00:00:00:00:00",
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_uplink(interface: Interface, patterns: tuple[str, ...], primary: Iterable[str]) -> bool:
    """Whether traffic from beyond the node arrives here."""
    if patterns:
        return _matches(interface.name, patterns)
    if interface.default_route or any(address in interface.addresses for address in primary):
        return True
    return interface.kind in UPLINK_KINDS and any(is_usable(address) for address in interface.addresses)


def is_usable(address: str) -> bool:
    """Whether others can send to this address."""
    parsed = ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


def is_pod(interface: Interface, patterns: tuple[str, ...], uplinks: tuple[str, ...], primary: Iterable[str]) -> bool:
    """Whether a pod is at the other end."""
    if patterns:
        return _matches(interface.name, patterns)
    return interface.kind in POD_KINDS and interface.peer_elsewhere and not is_uplink(interface, uplinks, primary)


def watch(changed: Callable[[], None], stop: threading.Event) -> None:
    """Call `changed` soon after links, addresses, routes or settings change, until `stop`. Runs in its own thread."""
    with Events(ROUTE, GROUPS) as events:
        for _ in events.until(stop):
            events.drain()  # the state is read again from the kernel, whatever the reports say
            changed()
