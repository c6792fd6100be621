"""PURE. Service ports as elements of the sets in `tables`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hybrid_proxy.dataplane.modes.nftables import tables
from hybrid_proxy.dataplane.modes.nftables.picks import Pick
from hybrid_proxy.dataplane.nftables.expressions import Family, Verdict
from hybrid_proxy.dataplane.nftables.schema import Element, Key
from hybrid_proxy.dataplane.nftables.uapi import NFT_GOTO
from hybrid_proxy.dataplane.table import Backend, Entry, Frontend, Kind, NodeNetwork, WhenEmpty, disjoint, family_of

COMMENT: Final = 127  # characters of a comment, nft's own limit
_REFUSAL: Final = {
    WhenEmpty.REJECT: Verdict(NFT_GOTO, tables.REFUSE),
    WhenEmpty.DROP: Verdict(NFT_GOTO, tables.DISCARD),
}

Number = Callable[[str], int]  # a number for each name


def number_name(entry: Entry, backend: Backend | None = None) -> str:
    """Names a number: a service port, or one of its backends."""
    name = f"{entry.name}/{entry.protocol.name}/IPv{entry.family}"
    return f"{name} {backend.address} {backend.port}" if backend else name


def elements(entry: Entry, number: Number) -> list[Element]:
    """Returns, in order, the elements that one service port owns alone; `number` numbers what affinity keeps."""
    found: list[Element] = []
    protocol = int(entry.protocol)
    remembered = entry.backend_sets if entry.affinity_seconds else ()
    for members, backend_set in zip(tables.MEMBERS, remembered, strict=False):
        found += [
            Element(members, (number(number_name(entry, backend)),), (backend.address, backend.port))
            for backend in backend_set.backends
        ]
    for frontend in entry.frontends:
        key: Key = (protocol, frontend.port)
        if frontend.address is not None:
            key = (frontend.address, *key)
        if frontend.source_ranges is not None:
            found.append(Element(tables.RESTRICTED, key))
            found += [Element(tables.ALLOWED, (*key, cidr)) for cidr in disjoint(frontend.source_ranges)]
        for space, position in _spaces(frontend):
            backends = entry.backend_sets[position].backends
            found.append(Element(space, key, _verdict(entry, frontend, space, position), entry.name[:COMMENT]))
            found += [
                Element(f"{space}-slots", (slot, *key), (backend.address, backend.port))
                for slot, backend in enumerate(backends)
            ]
            if entry.affinity_seconds and backends:
                found.append(Element(f"{space}-numbers", key, number(number_name(entry))))
                found += [
                    Element(f"{space}-candidates", (slot, *key), number(number_name(entry, backend)))
                    for slot, backend in enumerate(backends)
                ]
    return found


def _spaces(frontend: Frontend) -> list[tuple[str, int]]:
    """Returns the key spaces in which clients find the frontend, each with its backend set.

    `external` holds only frontends that treat clients beyond the cluster differently.
    """
    ports = "" if frontend.address is not None else "-ports"
    if frontend.external == frontend.internal:
        return [(f"internal{ports}", frontend.internal)]
    return [(f"internal{ports}", frontend.internal), (f"external{ports}", frontend.external)]


def _verdict(entry: Entry, frontend: Frontend, space: str, position: int) -> Verdict:
    backend_set = entry.backend_sets[position]
    if not backend_set.backends:
        return _REFUSAL[backend_set.when_empty]
    members = position if entry.affinity_seconds else 0
    return Verdict(
        NFT_GOTO, Pick(space, len(backend_set.backends), frontend.masquerade, entry.affinity_seconds, members)
    )


def shared(entry: Entry) -> set[Element]:
    """Returns the elements that other service ports may have too: ClusterIPs."""
    return {
        Element(tables.CLUSTER_IPS, (frontend.address,))
        for frontend in entry.frontends
        if frontend.kind is Kind.CLUSTER_IP and frontend.address is not None
    }


def node_elements(family: Family, node: NodeNetwork) -> list[Element]:
    """Returns the elements for the addresses at which node ports are served."""
    mine = (a for a in node.node_port_addresses if family_of(a) == family.version)
    return [Element(tables.NODE_PORT_ADDRESSES, (address,)) for address in mine]
