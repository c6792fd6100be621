"""Fills the maps that describe the node: source ranges, pods, own addresses, routes and reverse-path checks."""

from __future__ import annotations

import ipaddress
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.kernel.links import SERVICES_DEVICE, Hop, Interface, interface_name, is_usable
from hybrid_proxy.dataplane.kernel.repairs import Pins
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.table import NodeNetwork, family_of

NO_SERVICE = 0
# Values of rp_filter: 0 is no check, larger ones are loose (Documentation/networking/ip-sysctl.rst).
STRICT = 1


class SourceRanges:
    """The maps of source ranges: one trie for each family, keyed by service and prefix.

    New ranges are added before others are removed. The ranges of `NO_SERVICE` are service CIDRs that do not fit into
    map `node`.
    """

    def __init__(self, maps: dict[int, Map]) -> None:
        self._maps = maps
        self._known: dict[tuple[int, int], set[bytes]] = {}  # service and family -> the keys of its ranges

    def allow(self, service: int, family: int, cidrs: tuple[str, ...]) -> None:
        """Allows clients from these ranges, and from no others."""
        before = self._known.get((service, family), set())
        wanted = {self._key(service, family, cidr) for cidr in cidrs}
        for key in wanted - before:
            self._maps[family].update(key, bytes(4))
        for key in before - wanted:
            self._maps[family].delete(key)
        if wanted:
            self._known[service, family] = wanted
        else:
            self._known.pop((service, family), None)

    def only(self) -> None:
        """Removes ranges that a previous agent left and the present table does not have."""
        for family, known in self._maps.items():
            wanted = {key for (_, of), keys in self._known.items() if of == family for key in keys}
            for key in known.elements().keys() - wanted:
                known.delete(key)

    @staticmethod
    def _key(service: int, family: int, cidr: str) -> bytes:
        network = ipaddress.ip_network(cidr, strict=False)
        words = layout.words_of(str(network.network_address))
        return layout.pack(
            f"source_range{family}_key", bits=32 + network.prefixlen, service=service,
            address=words if family == 6 else words[0],
        )  # fmt: skip


def cidr_columns(cidrs: Iterable[str], family: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The service CIDRs of a family as columns of struct node, and those that do not fit into them."""
    networks = [network for network in map(ipaddress.ip_network, cidrs) if network.version == family]
    room: int = layout.abi_constants()["SERVICE_CIDRS"]
    columns: dict[str, Any] = {f"cidr{family}_count": len(networks)}
    for column, part in (("cidr", "network_address"), ("mask", "netmask")):
        rows = np.zeros((room, 4) if family == 6 else room, dtype=np.uint32)
        for position, network in enumerate(networks[:room]):
            words = layout.address_words([str(getattr(network, part))])[0]
            rows[position] = words if family == 6 else words[0]
        columns[f"{column}{family}"] = rows
    return columns, tuple(map(str, networks[room:]))


def node_columns(node: NodeNetwork) -> tuple[dict[str, int | NDArray[Any]], dict[int, tuple[str, ...]]]:
    """The node's network as columns of struct node, in the order in which they are written.

    And by family the service CIDRs for which there is no room.
    """
    primary = {family_of(address): address for address in node.primary}
    columns: dict[str, int | NDArray[Any]] = {
        "primary4": layout.address_words([primary[4]])[0, 0] if 4 in primary else 0,
        "primary6": layout.address_words([primary[6]]) if 6 in primary else 0,
    }
    others = {}
    for family in (4, 6):
        cidrs, others[family] = cidr_columns(node.service_cidrs, family)
        columns |= dict(reversed(cidrs.items()))  # the count comes last
    return columns | pod_columns(node), others


def pod_columns(node: NodeNetwork) -> dict[str, int | NDArray[Any]]:
    """The columns of struct node by which sources are recognized as pods."""
    columns: dict[str, int | NDArray[Any]] = {
        "pods_by_link": int(bool(node.pods.interface)),
        "pod4_known": 0,
        "pod6_known": 0,
    }
    for network in map(ipaddress.ip_network, node.pods.prefixes):
        family = network.version
        for name, address in ((f"pod{family}", network.network_address), (f"pod{family}_mask", network.netmask)):
            words: NDArray[Any] = layout.address_words([str(address)])[0]
            columns[name] = words if family == 6 else words[0]
        columns[f"pod{family}_known"] = 1
    return columns


def pod_links(interfaces: Iterable[Interface], node: NodeNetwork) -> set[int]:
    """Indexes of the interfaces whose sources are all pods: those of the given name, and ports of such a bridge."""
    interfaces = tuple(interfaces)
    if not node.pods.interface:
        return set()
    if node.pods.by_name_prefix:
        return {interface.index for interface in interfaces if interface.name.startswith(node.pods.interface)}
    bridge = {interface.index for interface in interfaces if interface.name == node.pods.interface}
    return bridge | {interface.index for interface in interfaces if interface.master in bridge}


def word(value: int) -> bytes:
    """Packs a key or value of 32 bits."""
    return value.to_bytes(4, sys.byteorder)


def set_elements(known: Map, wanted: Mapping[bytes, bytes]) -> None:
    """Makes these keys and values all elements of a hash. New ones are added before others are removed."""
    present = known.elements()
    for key, value in wanted.items():
        if present.get(key) != value:
            known.update(key, value)
    for key in present.keys() - wanted.keys():
        known.delete(key)


class NodeMaps:
    """The maps that describe the node to the programs, and what was written to them last.

    Args:
        row: the element of map `node`, shared with the kernel.
    """

    def __init__(self, maps: Mapping[str, Map], row: Callable[[], NDArray[Any]]) -> None:
        self._maps, self._row = maps, row
        self._wanted: dict[str, Mapping[bytes, bytes]] = {}
        self._columns: dict[str, int | NDArray[Any]] = {}

    def write(self, name: str, wanted: Mapping[bytes, bytes]) -> None:
        """Makes these keys and values all elements of a map."""
        self._wanted[name] = wanted
        set_elements(self._maps[name], self._possible(name))

    def write_row(self, columns: Mapping[str, int | NDArray[Any]]) -> None:
        """Writes columns of map `node`, in this order."""
        self._columns = dict(columns)
        row = self._row()
        for column, value in columns.items():
            row[column] = value

    def _possible(self, name: str) -> Mapping[bytes, bytes]:
        """The kernel removes an interface that disappears from `links`, and refuses one that does not exist."""
        wanted = self._wanted[name]
        if name != "links":
            return wanted
        return {key: index for key, index in wanted.items() if interface_name(int.from_bytes(index, sys.byteorder))}

    def damage(self, pins: Pins) -> Iterator[str]:
        """Yields a message for each map whose contents differ from what was written."""
        for name, wanted in self._wanted.items():
            found = self._maps[name].elements()
            if found != wanted and not self._possible(name).items() <= found.items() <= wanted.items():
                yield f"map {name} has other elements"
        row = self._row()
        if any((row[column] != value).any() for column, value in self._columns.items()):
            yield "map node has another row"

    def repair(self, pins: Pins) -> None:
        """Writes everything again."""
        for name in self._wanted:
            set_elements(self._maps[name], self._possible(name))
        self.write_row(self._columns)


def own_addresses(addresses: Iterable[str]) -> set[bytes]:
    """Keys of map `own_addresses` for the node's addresses and the broadcast addresses of its networks."""
    return {
        layout.pack("own_address", address=layout.words_of(address), family=family_of(address)) for address in addresses
    }


def interface_addresses(interfaces: Iterable[Interface], primary: Iterable[str]) -> dict[bytes, bytes]:
    """Elements of map `interface_addresses`: the node's primary address of each family, or else the interface's first.

    netfilter masquerades with the same (inet_select_addr), unless an interface has addresses of several networks.
    """
    primary = tuple(primary)
    rows = {}
    for interface in interfaces:
        usable = [address for address in interface.addresses if is_usable(address)]
        chosen = {family_of(address): address for address in reversed(usable)}
        chosen |= {family_of(address): address for address in usable if address in primary}
        if chosen and interface.name != SERVICES_DEVICE:
            rows[word(interface.index)] = layout.pack(
                "interface_address",
                address4=layout.words_of(chosen[4])[0] if 4 in chosen else 0,
                address6=layout.words_of(chosen[6]) if 6 in chosen else [0] * 4,
            )
    return rows


def interface_flags(
    interfaces: Iterable[Interface],
    filters: Mapping[int, int],
    *,
    strictly: bool,
    is_served: Callable[[Interface], bool] = lambda _: False,
) -> dict[int, int]:
    """Elements of map `interfaces`: the reverse-path checks of packets that each of them receives.

    They follow __fib_validate_source(). A loose check is strict at an interface without an address. For a packet that a
    port of a bridge receives, the kernel checks the bridge.

    Args:
        interfaces: all of the node.
        filters: the effective `rp_filter` by index.
        strictly: the route back must lead to the interface itself everywhere, also for IPv6, which the kernel does not
            check.
        is_served: whether an interface has programs as an uplink. If a macvlan has, the interface below it need not
            serve the macvlan's frames.
    """
    interfaces = tuple(interfaces)
    flag = layout.abi_constants()
    vrfs = {interface.index for interface in interfaces if interface.kind == "vrf"}
    bridges = {interface.index: interface for interface in interfaces if interface.kind == "bridge"}
    below = {i.lower for i in interfaces if i.kind == "macvlan" and not (i.peer_elsewhere or is_served(i))}
    asked = {}
    for interface in interfaces:
        if not (interface.ethernet or interface.bare):
            continue
        entered = bridges.get(interface.master, interface)
        setting = filters.get(entered.index, 0)
        strict = strictly or setting == STRICT or (setting > STRICT and not any("." in a for a in entered.addresses))
        asked[interface.index] = (
            flag["INTERFACE_STRICT4"] * strict
            | flag["INTERFACE_LOOSE4"] * (setting > STRICT and not strict)
            | flag["INTERFACE_STRICT6"] * strictly
            | flag["INTERFACE_IN_VRF"] * (interface.master in vrfs)
            | flag["INTERFACE_SHARED"] * (interface.master not in {0, *vrfs} or interface.index in below)
            | (entered.index << flag["INTERFACE_BRIDGE_SHIFT"]) * (entered is not interface)
        )
    return asked


def equal_paths(routes: Iterable[tuple[str, int, tuple[Hop, ...]]]) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """Elements of maps `equal_routes` and `equal_paths` for routes, each a destination, a prefix length and hops."""
    numbers: dict[bytes, int] = {}
    paths: dict[bytes, bytes] = {}
    for destination, length, hops in sorted(routes):
        key = layout.pack(
            "equal_route", bits=32 + length, family=family_of(destination), address=layout.words_of(destination)
        )
        number = numbers.setdefault(key, len(numbers))
        for hop, other in itertools.permutations(hops, 2):
            gateway = layout.words_of(hop.gateway or "::")
            path = layout.pack("equal_path", route=number, ingress=other.index, ifindex=hop.index, gateway=gateway)
            paths[path] = bytes(4)
    return {key: word(number) for key, number in numbers.items()}, paths


def served_links(pods: Iterable[Interface], uplinks: Iterable[Interface]) -> dict[int, int]:
    """Elements of map `links`: the served interfaces, each by its index and by its index with the bit of its kind."""
    bits, pods, uplinks = layout.abi_constants(), tuple(pods), tuple(uplinks)
    before_pods = {interface.master for interface in pods}
    outer = [interface for interface in uplinks if interface.index not in before_pods]
    rows = {interface.index: interface.index for interface in (*pods, *uplinks)}
    for kind, those in (("LINK_POD_BIT", pods), ("LINK_OUTER_BIT", outer)):
        rows |= {interface.index | 1 << bits[kind]: interface.index for interface in those}
    return rows
