"""PURE. Plans the changes of all chains of one family when services change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.modes.iptables import names
from hybrid_proxy.dataplane.modes.iptables.lower import (
    Chains,
    Leaves,
    Lowered,
    Node,
    cluster_ips,
    constant_chains,
    lower,
)
from hybrid_proxy.dataplane.modes.iptables.tree import Rank, Tree
from hybrid_proxy.dataplane.table import LOOPBACK, Entry, Protocol

_KINDS: Final = ("C", "E", *(protocol.name for protocol in Protocol))


class Delta(NamedTuple):
    """The chains of one table to write, with their rules, and the chains to remove."""

    written: Chains
    gone: tuple[str, ...]


def by_service(damage: Iterable[str], entries: Iterable[Entry], nodes: Mapping[int, Node]) -> list[str]:
    """Say whose chains these damages are about, and how many; names of chains tell people nothing."""
    known = (entry for entry in entries if entry.family in nodes)
    owners = {name: entry.name for entry in known for name in lower(entry, nodes[entry.family]).chains}
    found: dict[str, list[str]] = {}
    for what in damage:
        found.setdefault(next((f"{owners[word]}: " for word in what.split() if word in owners), what), []).append(what)
    return [
        what if owner == what else f"{owner}{f'{1 + len(more)} chains, the first: ' * bool(more)}{what}"
        for owner, (what, *more) in found.items()
    ]


class Plan:
    """The trees of one family and the chains made of them last."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.health_ports: tuple[int, ...] = ()  # of `ServiceTable`
        spaces = {
            kind: names.addresses(node.family, kind) if kind in "CE" else names.ports(Protocol[kind]) for kind in _KINDS
        }
        self._trees = {table: {kind: Tree(spaces[kind]) for kind in _KINDS} for table in ("nat", "filter")}
        self._top: dict[str, Chains] = {"nat": {}, "filter": {}}

    def change(self, before: Iterable[Entry], after: Iterable[Entry]) -> dict[str, Delta]:
        """Returns the changes of tables `filter` and `nat` when these entries replace those."""
        was = {names.identity(entry): lower(entry, self.node) for entry in before}
        now = {names.identity(entry): lower(entry, self.node) for entry in after}
        old = {name: rules for lowered in was.values() for name, rules in lowered.chains.items()}
        new = {name: rules for lowered in now.values() for name, rules in lowered.chains.items()}
        written: dict[str, Chains] = {"nat": _differing(old, new), "filter": {}}
        gone: dict[str, list[str]] = {"nat": [name for name in old if name not in new], "filter": []}
        for table, trees in self._trees.items():
            for kind, tree in trees.items():
                changes = tree.change(*_of_tree(kind, table, was, now))
                written[table] |= changes.written
                gone[table] += changes.gone
            top = self._top_chains(table)
            written[table] |= _differing(self._top[table], top)
            self._top[table] = top
        return {table: Delta(written[table], tuple(gone[table])) for table in ("filter", "nat")}

    def _top_chains(self, table: str) -> Chains:
        """Returns the constant chains, and those that lead into the trees."""
        constant = constant_chains(self.node)[("nat", "filter").index(table)]
        trees = self._trees[table]
        # Flows that mode ipvs began and that were not answered yet: their addresses are this node's, and stay in the
        # packet under IPVS. A rejected flow has no confirmed entry.
        services = (
            ["-m conntrack --ctstatus CONFIRMED -m addrtype --dst-type LOCAL -j RETURN"] if table == "filter" else []
        )
        into_cluster = trees["C"].entrance
        into_others = trees["E"].entrance
        into_ports = [found for protocol in Protocol if (found := trees[protocol.name].entrance) is not None]
        more: Chains = {names.NODE_PORTS: tuple(f"{match} -j {root}" for match, root in into_ports)}
        if table == "nat":
            more[names.CLUSTER_IPS] = cluster_ips(into_cluster[1], self.node) if into_cluster else ()
        if into_cluster:
            services.append(f"{into_cluster[0]} -j {names.CLUSTER_IPS if table == 'nat' else into_cluster[1]}")
        if into_others:
            services.append(f"{into_others[0]} -j {into_others[1]}")
        if into_ports:
            bits = 32 if self.node.family == 4 else 128
            services += (f"-d {address}/{bits} -j {names.NODE_PORTS}" for address in self.node.port_addresses)
            # In OUTPUT alone, where packets have an outgoing interface: a neighbour's packet to a loopback address
            # is dropped by the kernel. With such a source they could not leave the node (`dataplane.localhost`).
            own = f"! -s {LOOPBACK[self.node.family]}"
            services += (f"{own} -d {address}/{bits} -o lo -j {names.NODE_PORTS}" for address in self.node.loopback)
        if table == "filter":
            unallocated = "-m addrtype ! --dst-type LOCAL -j DROP"
            services += (f"-d {cidr} {unallocated}" for cidr in self.node.service_cidrs)
            more[names.HEALTH] = tuple(f"-p tcp -m tcp --dport {port} -j ACCEPT" for port in self.health_ports)
        return constant | more | {names.SERVICES: tuple(services)}


def _differing(old: Chains, new: Chains) -> Chains:
    return {name: rules for name, rules in new.items() if old.get(name) != rules}


def _leaves(lowered: Lowered | None, table: str) -> Leaves:
    if lowered is None:
        return {}
    return lowered.nat if table == "nat" else lowered.filter


def _of_tree(
    kind: str, table: str, was: Mapping[str, Lowered], now: Mapping[str, Lowered]
) -> tuple[list[tuple[str, int]], dict[str, dict[int, tuple[Rank, ...]]]]:
    """Returns arguments of `Tree.change`: owners whose leaves in this tree differ."""
    before: list[tuple[str, int]] = []
    after: dict[str, dict[int, tuple[Rank, ...]]] = {}
    for owner in {**was, **now}:
        old = {key: ranks for (tree, key), ranks in _leaves(was.get(owner), table).items() if tree == kind}
        new = {key: ranks for (tree, key), ranks in _leaves(now.get(owner), table).items() if tree == kind}
        if old != new:
            before += ((owner, key) for key in old)
            after[owner] = new
    return before, after
