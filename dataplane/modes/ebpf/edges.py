"""What stands around the frontends: where node ports are served, and who may come to load-balancer IPs."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane.kernel.bpf import Map
from dataplane.kernel.links import Interface
from dataplane.modes.ebpf import layout
from dataplane.modes.ebpf.ids import FullError
from dataplane.table import Detect, NodeNetwork

__all__ = ["Sources", "own_addresses", "pod_columns", "pod_links"]


class Sources:
    """Source ranges in two tries, (service, prefix). A range is added before a former one goes."""

    def __init__(self, maps: dict[int, Map]) -> None:
        self._maps = maps
        self._known: dict[int, tuple[int, tuple[str, ...]]] = {}  # service -> family, its ranges
        self._count = {4: 0, 6: 0}

    def check_room(self, family: int, cidrs: tuple[str, ...], planned: int) -> None:
        """Raises FullError: there is no room for these beside what is known and so many that are planned."""
        limit = self._maps[family].entries
        if self._count[family] + planned + len(cidrs) > limit:
            raise FullError(f"sources{family}", limit)

    def allow(self, service: int, family: int, cidrs: tuple[str, ...]) -> None:
        """From now on these may come, and only these."""
        _, before = self._known.pop(service, (family, ()))
        for cidr in dict.fromkeys(cidrs):
            if cidr not in before:
                self._maps[family].update(self._key(service, family, cidr), bytes(4))
        wanted = {self._key(service, family, cidr) for cidr in cidrs}
        for cidr in before:
            if (key := self._key(service, family, cidr)) not in wanted:
                self._maps[family].delete(key)
        self._count[family] += len(cidrs) - len(before)
        if cidrs:
            self._known[service] = family, cidrs

    def only(self) -> None:
        """Remove what a former process left and nobody wants."""
        for family, known in self._maps.items():
            wanted = {
                self._key(service, family, cidr)
                for service, (of, cidrs) in self._known.items()
                if of == family
                for cidr in cidrs
            }
            keys, _ = known.items(layout.dtype_of(f"source{family}_key"), np.dtype(np.uint32))
            size = keys.dtype.itemsize
            raw = keys.tobytes()
            for start in range(0, len(raw), size):
                if raw[start : start + size] not in wanted:
                    known.delete(raw[start : start + size])

    @staticmethod
    def _key(service: int, family: int, cidr: str) -> bytes:
        network = ipaddress.ip_network(cidr, strict=False)
        words = layout.address_words([str(network.network_address)])[0]
        return layout.pack(
            f"source{family}_key", bits=32 + network.prefixlen, service=service,
            address=words if family == 6 else words[0],
        )  # fmt: skip


def pod_columns(node: NodeNetwork) -> dict[str, Any]:
    """How sources are told apart, as columns of struct node."""
    columns: dict[str, Any] = {
        "pods_by_link": int(node.detect in (Detect.BRIDGE_INTERFACE, Detect.INTERFACE_PREFIX)),
        "pod4_known": 0,
        "pod6_known": 0,
    }
    for network in map(ipaddress.ip_network, _cidrs(node)):
        family = network.version
        for name, address in ((f"pod{family}", network.network_address), (f"pod{family}_mask", network.netmask)):
            words: NDArray[Any] = layout.address_words([str(address)])[0]
            columns[name] = words if family == 6 else words[0]
        columns[f"pod{family}_known"] = 1
    return columns


def _cidrs(node: NodeNetwork) -> Iterable[str]:
    return node.pod_cidrs if node.detect in (Detect.CLUSTER_CIDR, Detect.NODE_CIDR) else ()


def pod_links(interfaces: Iterable[Interface], node: NodeNetwork) -> set[int]:
    """Indexes of the interfaces behind which every source is a pod: those of that name, and a bridge's ports."""
    interfaces = tuple(interfaces)
    if node.detect is Detect.INTERFACE_PREFIX:
        return {interface.index for interface in interfaces if interface.name.startswith(node.pod_interface)}
    if node.detect is not Detect.BRIDGE_INTERFACE:
        return set()
    bridge = {interface.index for interface in interfaces if interface.name == node.pod_interface}
    return bridge | {interface.index for interface in interfaces if interface.master in bridge}


def own_addresses(addresses: Iterable[str]) -> set[bytes]:
    """Keys of map `own_addresses`."""
    return {
        layout.pack("own_address", address=layout.words_of(address), family=6 if ":" in address else 4)
        for address in addresses
    }
