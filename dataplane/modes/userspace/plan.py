"""PURE. What must be written so that the table of one family leads to the relay's proxy ports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from hybrid_proxy.dataplane.modes.userspace import tables
from hybrid_proxy.dataplane.modes.userspace.lower import Lowered
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables.expressions import Family, Verdict
from hybrid_proxy.dataplane.nftables.ruleset import Ruleset, additions, deletions
from hybrid_proxy.dataplane.nftables.schema import Element, Key, Value
from hybrid_proxy.dataplane.nftables.uapi import NF_DROP, NFT_GOTO
from hybrid_proxy.dataplane.table import NodeNetwork, WhenEmpty, family_of

Elements = dict[tuple[str, Key], Value]  # (name of the set, key) -> value

_REFUSAL: Final = {WhenEmpty.REJECT: Verdict(NFT_GOTO, tables.REFUSE), WhenEmpty.DROP: Verdict(NF_DROP)}


def elements_of(lowered: Lowered, protocol: int, listen: str, numbers: tuple[int, ...]) -> Elements:
    """The elements of one service port.

    `numbers` are the proxy ports in the order of `Row.ports`; empty: the relay has none, and clients are refused.
    """
    found: Elements = {}
    for side, address, port, target in lowered.redirects:
        name, key = (side, (address, protocol, port)) if address is not None else (f"{side}-ports", (protocol, port))
        if isinstance(target, WhenEmpty):
            found[f"{name}-empty", key] = _REFUSAL[target]
        elif numbers:
            found[name, key] = (listen, numbers[target])
        else:
            found[f"{name}-empty", key] = _REFUSAL[WhenEmpty.REJECT]
    for number in numbers:
        found[tables.LISTENERS, (protocol, number)] = None
    for address, port, ranges in lowered.firewalled:
        found[tables.FIREWALLED, (address, protocol, port)] = None
        for cidr in ranges:
            found[tables.ALLOWED, (address, protocol, port, cidr)] = None
    for address in lowered.cluster_ips:
        found[tables.CLUSTER_IPS, (address,)] = None
    return found


def elements_to_drain(elements: Elements) -> Elements:
    """Those of them that a mode needs which takes no new flows."""
    return {place: value for place, value in elements.items() if place[0] == tables.LISTENERS}


def _ruleset(family: Family, node: NodeNetwork, *, draining: bool) -> Ruleset:
    return Ruleset(family, (), tuple(tables.SETS.values()), tables.structure(family, node, draining=draining))


def _of_node(family: Family, node: NodeNetwork) -> Elements:
    """The elements that are there whatever the services are."""
    addresses = (address for address in node.node_port_addresses if family_of(address) == family.version)
    return {(tables.NODE_ADDRESSES, (address,)): None for address in addresses}


def replace(family: Family, node: NodeNetwork, elements: Elements, *, draining: bool = False) -> Iterator[op.Operation]:
    """The whole table in place of the one that is there."""
    yield from _ruleset(family, node, draining=draining).create(replace=True)
    yield from change({}, _of_node(family, node) | elements)


def change(old: Elements, new: Elements) -> list[op.Operation]:
    """Make elements of others; removals first, so that values can change."""
    gone = [place for place, value in old.items() if place not in new or new[place] != value]
    come = [
        Element(*place, value) for place, value in new.items() if place not in old or old[place] != value
    ]  # fmt: skip
    return [*deletions(gone), *additions(come)]


def differences(
    family: Family, node: NodeNetwork, elements: Elements, skeleton: op.Skeleton,
    contents: Mapping[str, Mapping[Key, tuple[Value, str]]], *, draining: bool = False,
) -> list[op.Operation]:  # fmt: skip
    """What others changed: the operations that would undo it; `skeleton` and `contents` are what the kernel has."""
    ruleset = _ruleset(family, node, draining=draining)
    if ruleset.irreparable(skeleton):
        return list(ruleset.create(replace=True))
    found = {(name, key): value for name, held in contents.items() for key, (value, _) in held.items()}
    wanted = _of_node(family, node) | elements
    return [*ruleset.repair(skeleton), *change(found, wanted), *ruleset.remove_foreign(skeleton)]


def drain() -> list[op.Operation]:
    """Empty the chains that decide about new flows; the next whole update writes them again."""
    return [op.FlushChain(chain) for chain in tables.LEADING]
