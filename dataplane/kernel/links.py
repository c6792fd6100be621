"""Interfaces by rtnetlink: lists them, tells pods' from uplinks, and reports changes.

Default rule: an uplink is an interface that has a default route or one of the node's primary addresses, or a device
(also a bond, a VLAN, a tunnel, ...: `UPLINK_KINDS`) with an address; a pod's interface is a veth or netkit device that
is no uplink and whose peer lives in another namespace. Patterns in the options replace either half of the rule.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final

import msgspec

from hybrid_proxy.dataplane.firewall_rules import Detour
from hybrid_proxy.dataplane.kernel import netlink as nl
from hybrid_proxy.dataplane.table import family_of

POD_KINDS = frozenset({"veth", "netkit"})
ETHERNET = 1  # ARPHRD_ETHER
ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # addresses of nobody (RFC 5737, RFC 3849)
DEVICE_KINDS = frozenset({"", "bond", "team", "vlan"})  # "": a device of its own
# Others behind which hosts are: other nodes' pods, or clients of a private network. A bridge is not among them, because
# its ports are served one by one.
UPLINK_KINDS = DEVICE_KINDS | {
    "geneve", "gre", "gretap", "ip6gre", "ip6gretap", "ip6tnl", "ipip", "ipvlan", "macsec", "macvlan", "openvswitch",
    "sit", "tun", "vxlan", "wireguard", "xfrm",
}  # fmt: skip
# ARPHRD_ of interfaces whose packets have no header before IP's (linux/if_arp.h): PPP, IPIP, ip6tnl, sit, GRE, raw IP,
# ip6gre, WireGuard and TUN, xfrm.
BARE = frozenset({512, 768, 769, 776, 778, 519, 823, 0xFFFE})
SERVICES_DEVICE = "kube-ipvs0"  # of mode ipvs, ours or kube-proxy's: its addresses are services'
SERVICES_DEVICES = frozenset({SERVICES_DEVICE, "kube-dummy-if"})  # and kube-router's
# linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h
NEW_LINK = 16
GET_LINK, GET_ADDRESS, GET_ROUTE, GET_RULE = 18, 22, 26, 34  # a rule has the fields of a route (linux/fib_rules.h)
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINK = 1, 3, 4, 5
IFLA_MASTER, IFLA_OPERSTATE, IFLA_LINKINFO = 10, 16, 18
IFLA_EXT_MASK, IFLA_LINK_NETNSID, IFLA_INFO_KIND = 29, 37, 1
WITHOUT_STATISTICS = 1 << 3  # RTEXT_FILTER_SKIP_STATS: statistics are most of a report of an interface
UP, RUNNING = 0x01, 0x40  # IFF_: set by the administrator, and both ends are up; linux/if.h
OPERATION_DOWN = (2, 3)  # IF_OPER_DOWN, IF_OPER_LOWERLAYERDOWN: the other end of a veth is
IFA_ADDRESS, IFA_LOCAL = 1, 2
RTA_DST, RTA_SRC, RTA_IIF, RTA_OIF, RTA_GATEWAY, RTA_PRIORITY, RTA_PREFSRC, RTA_MULTIPATH = 1, 2, 3, 4, 5, 6, 7, 9
RTA_TABLE, RTA_MARK, RTA_VIA = 15, 16, 18
FRA_FWMARK, FRA_FWMASK = 10, 16
UNICAST, LOCAL, BROADCAST, BLACKHOLE, MAIN_TABLE, SCOPE_LINK, SCOPE_HOST = 1, 2, 3, 6, 254, 253, 254
REFUSING = {BLACKHOLE: "blackhole", 7: "unreachable", 8: "prohibit"}
LOOPBACK = 1  # the index of lo
BY_KERNEL, ON_LINK = 2, 4  # RTPROT_KERNEL: a route that comes with an address; RTNH_F_ONLINK
# RTNLGRP_: LINK, IPV4_IFADDR, IPV4_ROUTE, IPV6_IFADDR, IPV6_ROUTE; IPV4_NETCONF: settings of interfaces, as rp_filter
GROUPS: Final = sum(1 << (group - 1) for group in (1, 5, 7, 9, 11, 24))
_LINK: Final = struct.Struct("=BxHiII")  # family, type of hardware, index, flags, changed ones
_ADDRESS: Final = struct.Struct("=BBBBI")  # family, length of the prefix, flags, scope, index of the interface
# family, lengths of destination and source, tos, table, protocol, scope, type, flags
_ROUTE: Final = struct.Struct("=BBBBBBBBI")
_HOP: Final = struct.Struct("=HBBi")  # length, flags, weight, index of the interface
RTM_GETNETCONF, NETCONFA_IFINDEX, NETCONFA_RP_FILTER, NETCONFA_IFINDEX_ALL = 82, 1, 3, -1  # linux/netconf.h


class Interface(msgspec.Struct, frozen=True):
    index: int
    name: str
    kind: str
    up: bool
    peer_elsewhere: bool
    default_route: bool
    addresses: tuple[str, ...]
    master: int = 0  # index of the bridge or bond that it is a port of
    ethernet: bool = True  # packets have an Ethernet header
    bare: bool = False  # packets begin with the IP header
    lower: int = 0  # of a VLAN or a macvlan: index of the interface that it is on; of a pair: of the other end
    mac: str = "00:00:00:00:00:00"
    mtu: int = 0
    down: str = ""  # which end of a pair is: "node", or the other one, "pod"
    namespace: int = 0  # number of the other end's, where that is elsewhere
    hosts: tuple[str, ...] = ()  # to which a route each leads by it

    @property
    def facts(self) -> dict[str, str]:
        """Returns the facts that may change while it stays: of pods' links, also to which addresses they lead."""
        found = {f"link {self.name}": "up" if self.up else "down", f"MTU of {self.name}": str(self.mtu)}
        return found | ({f"routes by {self.name}": " ".join(self.hosts)} if self.peer_elsewhere else {})


class Hop(msgspec.Struct, frozen=True):
    """A next hop of a route."""

    index: int  # of the interface
    gateway: str  # "": the interface alone


class Node(msgspec.Struct, frozen=True):
    """The interfaces and the addresses on them; `addresses` are without loopback, link-local and services' ones.

    `local` are the node's addresses and its networks' broadcast addresses, as its tables have them. `equal_paths` are
    routes that have several next hops, as destination, length of its prefix, and hops. `bridged` are the networks of
    bridges' addresses, whose hosts reach each other without the node's routing. `sources` are those of `addresses` that
    packets to other hosts may have, the best of each family first. `networks` are the destinations of routes, without
    default routes and single hosts, and the next hops of default routes. `held` are the commands that add
    addresses, and routes other than to single hosts.
    """

    interfaces: tuple[Interface, ...]
    addresses: tuple[str, ...]
    local: frozenset[str] = frozenset()
    equal_paths: frozenset[tuple[str, int, tuple[Hop, ...]]] = frozenset()
    bridged: frozenset[str] = frozenset()
    sources: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    held: frozenset[str] = frozenset()


def interface_name(index: int) -> str | None:
    """Returns the name of an interface; None: it does not exist."""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return None


def hardware_address(index: int) -> bytes:
    """Returns the hardware address of an interface; zeros where there is none, as for loopback."""
    request = nl.Message(GET_LINK, _LINK.pack(0, 0, index, 0, 0), what=f"reading interface {index}")
    found = None
    if index:
        with nl.Netlink(nl.ROUTE) as wire, contextlib.suppress(nl.NetlinkFailed):
            found = wire.get(request)
    return _hardware_address(dict(nl.attributes(found, _LINK.size)) if found else {})


def _hardware_address(known: Mapping[int, bytes]) -> bytes:
    mac = known.get(IFLA_ADDRESS, b"")
    return mac if len(mac) == 6 else bytes(6)  # tunnels have addresses of other lengths


def next_hop(address: str, source: str = "", index: int = 0, mark: int = 0) -> Hop | None:
    """Returns where packets to an address go, from this source, that come in at this interface; None: nowhere."""
    with nl.Netlink(nl.ROUTE) as wire:
        known = _route_to(wire, address, source, index, mark)
    gateway = known.get(RTA_GATEWAY)
    text = socket.inet_ntop(nl.AF[family_of(address)], gateway) if gateway else ""
    return Hop(_number(known.get(RTA_OIF)), text) if known else None


def interface_to(address: str) -> str:
    """Returns the name of the interface by which packets to an address leave; empty: none does."""
    return (interface_name(hop.index) if (hop := next_hop(address)) else None) or ""


def main_route(address: str) -> tuple[int, list[str], list[str]]:
    """Returns the interface to which the main table leads an address, 0: none; and the rules to it, and from it."""
    family, to, best = nl.AF[family_of(address)], ip_address(address), _best_of(address)
    with nl.Netlink(nl.ROUTE) as wire:
        rules = [each for each in read_routes(wire, family, GET_RULE) if each.table != MAIN_TABLE]
    named = [(f"pref {_number(each.known.get(RTA_PRIORITY))}", each) for each in rules]
    there = [f"{pref} to {each.network}" for pref, each in named if each.length and to in each.network]
    back = [f"{pref} from {address}" for pref, each in named if each.known.get(RTA_SRC) == to.packed]
    return _number(best.known.get(RTA_OIF)) if best and best.kind == UNICAST else 0, there, back


def refusing_route(address: str) -> str:
    """Returns the route of the main table that refuses what goes to an address, in iproute2's words; empty: none."""
    best = _best_of(address)
    return f"{REFUSING[best.kind]} {best.network}" if best and best.kind in REFUSING and best.length else ""


def detour(address: str, mark: int) -> Detour | None:
    """Returns where packets to an address go for their mark alone; None: where others go."""
    family = family_of(address)
    with nl.Netlink(nl.ROUTE) as wire:
        rules = list(read_routes(wire, nl.AF[family], GET_RULE))
    for each in rules if next_hop(address) != next_hop(address, mark=mark) else ():
        value, mask, priority = (_number(each.known.get(name)) for name in (FRA_FWMARK, FRA_FWMASK, RTA_PRIORITY))
        to = each if each.kind in REFUSING else _best_of(address, each.table)
        if mask and mark & mask == value and to:
            lookup = REFUSING.get(each.kind) or f"lookup {each.table}"
            rule = f"pref {priority} fwmark {value:#x}{f'/{mask:#x}' * (mask != 0xFFFFFFFF)} {lookup}"
            by = "" if to.kind in REFUSING else f" dev {interface_name(_number(to.known.get(RTA_OIF)))}"
            route = f"{REFUSING.get(to.kind, '')} {to.network}{by}".lstrip()
            return Detour(rule, route, not by, f"ip {'-6 ' * (family == 6)}rule del {rule}")
    return None


def _best_of(address: str, table: int = MAIN_TABLE) -> Route | None:
    with nl.Netlink(nl.ROUTE) as wire:
        routes = [each for each in read_routes(wire, nl.AF[family_of(address)]) if each.table == table]
    those = (each for each in routes if ip_address(address) in each.network)
    return max(those, key=lambda each: each.length, default=None)


def _route_to(wire: nl.Netlink, address: str, source: str = "", index: int = 0, mark: int = 0) -> dict[int, bytes]:
    """Returns the route to an address, empty: there is none."""
    family = nl.AF[family_of(address)]
    packed = socket.inet_pton(family, address)
    bits = 8 * len(packed)
    body = _ROUTE.pack(family, bits, bits * bool(source), 0, 0, 0, 0, 0, 0) + nl.attribute(RTA_DST, packed)
    body += nl.attribute(RTA_SRC, socket.inet_pton(family, source)) if source else b""
    body += nl.attribute(RTA_IIF, index.to_bytes(4, sys.byteorder)) if index else b""
    body += nl.attribute(RTA_MARK, mark.to_bytes(4, sys.byteorder)) if mark else b""
    try:
        found = wire.get(nl.Message(GET_ROUTE, body, what=f"reading the route to {address}"))
    except nl.NetlinkFailed:
        return {}
    return dict(nl.attributes(found, _ROUTE.size)) if found else {}


class Route(msgspec.Struct):
    """The fields of a route that are read."""

    family: int
    length: int  # of the destination's prefix
    table: int
    kind: int
    known: dict[int, bytes]
    tos: int = 0
    protocol: int = 0  # who made it
    flags: int = 0

    @property
    def destination(self) -> str:
        """The zero address for a default route."""
        found = self.known.get(RTA_DST)
        return socket.inet_ntop(self.family, found or bytes(4 if self.family == socket.AF_INET else 16))

    @property
    def single(self) -> bool:
        """True if it leads to one address."""
        return self.length == (32 if self.family == socket.AF_INET else 128)

    @property
    def network(self) -> IPv4Network | IPv6Network:
        return ip_network((self.destination, self.length), strict=False)

    def hops(self) -> Iterator[Hop]:
        """The next hops, where there are several."""
        data, start = self.known.get(RTA_MULTIPATH, b""), 0
        while start + _HOP.size <= len(data):
            length, _, _, index = _HOP.unpack_from(data, start)
            if length < _HOP.size:
                return
            known = dict(nl.attributes(data[start : start + length], _HOP.size))
            via, gateway = known.get(RTA_VIA), known.get(RTA_GATEWAY)
            if via:  # a gateway of the other family, after the number of that
                yield Hop(index, socket.inet_ntop(int.from_bytes(via[:2], sys.byteorder), via[2:]))
            else:
                yield Hop(index, socket.inet_ntop(self.family, gateway) if gateway else "")
            start += (length + 3) & ~3


def read_node() -> Node:
    """Reads the present state, by one dump each of links, addresses and the routes of a family."""
    with nl.Netlink(nl.ROUTE) as wire:
        routes = [route for family in nl.AF.values() for route in read_routes(wire, family)]
        body = _LINK.pack(0, 0, 0, 0, 0) + nl.attribute(IFLA_EXT_MASK, WITHOUT_STATISTICS.to_bytes(4, sys.byteorder))
        links = [
            (kind, index, flags, dict(nl.attributes(answer, _LINK.size)))
            for answer in wire.dump(nl.Message(GET_LINK, body, nl.NLM_F_DUMP, "reading the interfaces"))
            for _, kind, index, flags, _ in [_LINK.unpack_from(answer)]
        ]
        services = {index for _, index, _, known in links if nl.text(known.get(IFLA_IFNAME, b"")) in SERVICES_DEVICES}
        addresses: dict[int, list[str]] = {}
        networks: list[tuple[int, str]] = []
        usable: list[str] = []
        held: list[tuple[int, str]] = []
        wanted = nl.Message(GET_ADDRESS, _ADDRESS.pack(0, 0, 0, 0, 0), nl.NLM_F_DUMP, "reading the addresses")
        for answer in wire.dump(wanted):
            family, length, _, scope, index = _ADDRESS.unpack_from(answer)
            known = dict(nl.attributes(answer, _ADDRESS.size))
            text = socket.inet_ntop(family, known.get(IFA_LOCAL) or known[IFA_ADDRESS])
            addresses.setdefault(index, []).append(text)
            if scope not in (SCOPE_LINK, SCOPE_HOST) and index not in services:
                usable.append(text)
                held.append((index, f"ip address add {text}/{length}"))
                networks.append((index, str(ip_network((text, length), strict=False))))
        unicast = [route for route in routes if route.kind == UNICAST]
        hosts: dict[int, list[str]] = {}
        defaults = set[int]()
        for route in unicast:
            index = _number(route.known.get(RTA_OIF)) if route.table == MAIN_TABLE else 0
            if route.length == 0:
                defaults.add(index)
            elif route.single:
                hosts.setdefault(index, []).append(route.destination)
        interfaces = tuple(_interface(*link, defaults, addresses, hosts) for link in links)
        sources = _sources(wire, interfaces)
    bridges = {interface.index for interface in interfaces if interface.kind == "bridge"}
    names = {interface.index: interface.name for interface in interfaces}
    held += map(_command, unicast)
    return Node(
        interfaces,
        tuple(dict.fromkeys(usable)),
        frozenset(route.destination for route in routes if route.kind in (LOCAL, BROADCAST) and route.single),
        frozenset((route.destination, route.length, hops) for route in unicast if (hops := tuple(route.hops()))),
        frozenset(network for index, network in networks if index in bridges),
        sources,
        _networks(route for route in routes if route.kind in (UNICAST, BLACKHOLE)),
        frozenset(f"{what} dev {names[index]}" for index, what in held if what and index in names),
    )


def _command(route: Route) -> tuple[int, str]:
    """Returns interface and command of a route of the main table; empty: it is to a single host, or the kernel's."""
    known = route.known
    if route.table != MAIN_TABLE or route.protocol == BY_KERNEL or route.single or RTA_VIA in known:
        return 0, ""
    via = f" via {socket.inet_ntop(route.family, known[RTA_GATEWAY])}" if RTA_GATEWAY in known else ""
    onlink = " onlink" if route.flags & ON_LINK else ""
    return _number(known.get(RTA_OIF)), f"ip route add {route.destination}/{route.length}{via}{onlink}"


def _sources(wire: nl.Netlink, interfaces: Iterable[Interface]) -> tuple[str, ...]:
    """Returns the kernel's own sources to other hosts, then addresses of devices, where there is no default route.

    Bridges, veths and dummies may have addresses of pods' networks or of services, which mean nothing elsewhere.
    """
    routes = [(nl.AF[family_of(address)], _route_to(wire, address)) for address in ELSEWHERE]
    chosen = [socket.inet_ntop(family, known[RTA_PREFSRC]) for family, known in routes if RTA_PREFSRC in known]
    devices = (i for i in interfaces if i.kind in UPLINK_KINDS and i.name != "lo")
    return tuple(dict.fromkeys(filter(is_usable, (*chosen, *(a for i in devices for a in i.addresses)))))


def _networks(routes: Iterable[Route]) -> tuple[str, ...]:
    found = set()
    for route in routes:
        if route.table == MAIN_TABLE and route.length and not route.single and is_usable(route.destination):
            found.add(str(route.network))
        elif not route.length and RTA_GATEWAY in route.known:
            found.add(str(ip_network(socket.inet_ntop(route.family, route.known[RTA_GATEWAY]))))
    return tuple(sorted(found))


def read_routes(wire: nl.Netlink, family: int, what: int = GET_ROUTE) -> Iterator[Route]:
    """Yields the routes of a family, or its rules."""
    body = _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)
    for answer in wire.dump(nl.Message(what, body, nl.NLM_F_DUMP, "reading the routes")):
        found, length, _, tos, table, protocol, _, kind, flags = _ROUTE.unpack_from(answer)
        known = dict(nl.attributes(answer, _ROUTE.size))
        if found == family:  # a kernel without that family answers with all
            yield Route(family, length, _number(known.get(RTA_TABLE)) or table, kind, known, tos, protocol, flags)


def _number(value: bytes | None) -> int:
    return int.from_bytes(value or b"", sys.byteorder)


def read_reverse_path_filters() -> dict[int, int]:
    """Returns interface index -> effective `rp_filter`, the larger one of its own and of `all`."""
    request = nl.Message(
        RTM_GETNETCONF, bytes([socket.AF_INET, 0, 0, 0]), nl.NLM_F_DUMP, "reading settings of interfaces"
    )
    with nl.Netlink(nl.ROUTE) as wire:
        settings = [dict(nl.attributes(answer, 4)) for answer in wire.dump(request)]
    own = {
        int.from_bytes(known[NETCONFA_IFINDEX], sys.byteorder, signed=True): _number(known[NETCONFA_RP_FILTER])
        for known in settings
        if NETCONFA_RP_FILTER in known
    }
    everywhere = own.get(NETCONFA_IFINDEX_ALL, 0)
    return {index: max(value, everywhere) for index, value in own.items() if index > 0}


def _interface(
    kind: int, index: int, flags: int, known: Mapping[int, bytes], defaults: Iterable[int],
    addresses: Mapping[int, Iterable[str]], hosts: Mapping[int, Iterable[str]],
) -> Interface:  # fmt: skip
    info = dict(nl.attributes(known.get(IFLA_LINKINFO, b"")))
    return Interface(
        index=index,
        name=nl.text(known.get(IFLA_IFNAME, b"")),
        kind=nl.text(info.get(IFLA_INFO_KIND, b"")),
        up=_number(known.get(IFLA_OPERSTATE)) not in OPERATION_DOWN,
        peer_elsewhere=IFLA_LINK_NETNSID in known,
        default_route=index in defaults,
        addresses=tuple(addresses.get(index, ())),
        master=_number(known.get(IFLA_MASTER)),
        ethernet=kind == ETHERNET,
        bare=kind in BARE,
        lower=_number(known.get(IFLA_LINK)),
        mac=_hardware_address(known).hex(":"),
        mtu=_number(known.get(IFLA_MTU)),
        down="" if flags & RUNNING else "pod" if flags & UP else "node",
        namespace=_number(known.get(IFLA_LINK_NETNSID)),
        hosts=tuple(sorted(hosts.get(index, ()))),
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_uplink(interface: Interface, patterns: tuple[str, ...], primary: Iterable[str]) -> bool:
    """True if traffic from beyond the node arrives here."""
    if patterns:
        return _matches(interface.name, patterns)
    if interface.default_route or any(address in interface.addresses for address in primary):
        return True
    device = interface.kind in UPLINK_KINDS and interface.name != "lo"  # which may have a ClusterIP
    return device and any(is_usable(address) for address in interface.addresses)


def is_usable(address: str) -> bool:
    """True if other hosts can send to this address."""
    parsed = ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


def is_pod(interface: Interface, patterns: tuple[str, ...], uplinks: tuple[str, ...], primary: Iterable[str]) -> bool:
    """True if a pod is at the other end."""
    if patterns:
        return _matches(interface.name, patterns)
    return interface.kind in POD_KINDS and interface.peer_elsewhere and not is_uplink(interface, uplinks, primary)


def watch(changed: Callable[[], None], stop: threading.Event, fallen: set[str]) -> None:
    """Call `changed` soon after links, addresses, routes or settings change, until `stop`. Runs in its own thread.

    The caller reads the state from the kernel; `fallen` gets the names of links that went down, as some are up again.
    """
    down = set[str]()
    with nl.Events(nl.ROUTE, GROUPS) as events:
        for first in events.until(stop):
            reports = (first, *iter(events.read, b""))
            for body in (body for each in reports for kind, *_, body in nl.messages(each or b"") if kind == NEW_LINK):
                known = dict(nl.attributes(body, _LINK.size))
                name = nl.text(known.get(IFLA_IFNAME, b""))
                if _number(known.get(IFLA_OPERSTATE)) not in OPERATION_DOWN:
                    down.discard(name)
                elif name not in down:  # the kernel reports each state several times
                    down.add(name)
                    fallen.add(name)
            changed()
