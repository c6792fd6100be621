"""PURE. Builds the next service table from the last one, redoing only what is dirty.

Two services may claim one address and port: a ClusterIP of one is an external IP of the other, or two name one load-
balancer IP. One of them gets it whatever order they came in (a ClusterIP first, then the older service, then the name),
the other loses that frontend alone, and gets it back when the winner is removed. `Builder.conflicts` names the losers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from msgspec.structs import replace

from hybrid_proxy.controller.kubernetes.model import Node, Service
from hybrid_proxy.controller.semantics.cluster import Cluster
from hybrid_proxy.controller.semantics.entries import (
    ExternalIPs,
    HealthCheck,
    Settings,
    entries,
    external_ips,
    health_addresses,
    health_check,
)
from hybrid_proxy.controller.semantics.lacks import KnownLacks, Lack
from hybrid_proxy.controller.semantics.node import NO_ROUTES, Routes, node_faults, node_network, node_port_faults
from hybrid_proxy.dataplane.shards import Shards
from hybrid_proxy.dataplane.table import EMPTY, Entry, Frontend, Kind, NodeNetwork, Protocol, ServiceTable, socket_text

Key = tuple[str | int, int, Protocol]  # address (or family, for a node port), port, protocol
Entries = tuple[Entry, ...]
_T = TypeVar("_T")


class Builder:
    """Builds table after table from one cluster; keeps the state between them.

    Attributes:
        table: The last one.
        node_port_faults: Ranges of node ports that match no address of this node.
        health_checks: Service -> its health-check node port, of the last table; the very same object when none changed.
        external_ips: Service -> the decision on its external IPs; likewise.
    """

    def __init__(self, settings: Settings) -> None:
        self.table = EMPTY
        self.node_port_faults: tuple[str, ...] = ()
        self.health_checks: Mapping[str, HealthCheck] = MappingProxyType({})
        self.external_ips: Mapping[str, ExternalIPs] = MappingProxyType({})
        self._settings = settings
        self._services = Shards[Entries]()
        self._claims = _Claims()
        self._lacks = KnownLacks()
        self._asked: tuple[Node | None, tuple[str, ...], tuple[str, ...], Routes] | None = None
        self._faults: tuple[object, tuple[str, ...]] = None, ()
        self._basis: object = None
        self._own: frozenset[str] = frozenset()  # addresses on this node's interfaces
        self._left: Mapping[str, str] = MappingProxyType({})

    def update_settings(self, settings: Settings) -> None:
        """Use these settings from the next table on; services that they do not change stay the same objects."""
        self._settings, self._asked, self._basis = settings, None, None

    @property
    def health_addresses(self) -> tuple[str, ...]:
        """The addresses of health-check node ports."""
        return health_addresses(self._settings, self.table.node)

    @property
    def lacks(self) -> list[Lack]:
        """Service ports of the newest table that have no backend on this node."""
        return self._lacks.of(self.table)

    @property
    def conflicts(self) -> Mapping[str, Mapping[str, str]]:
        """Service -> messages about its frontends that another service has -> that service."""
        return MappingProxyType(self._claims.lost)

    def node_faults(self, cluster: Cluster, *, needs_node: bool) -> tuple[str, ...]:
        """Describes what is missing or wrong about this node; `needs_node`: it has a Node object."""
        if self._asked is None:
            return ()
        if not (needs_node or cluster.node):
            return self.node_port_faults
        problem = cluster.problems.get(("Node", self._settings.node_name))
        unread = cluster.unread("Node") or (problem.text if problem else "")
        asked = self._settings, cluster.reported, unread, self.table.node, *self._asked
        if asked != self._faults[0]:  # it is asked every second
            self._faults = asked, tuple(node_faults(*asked))
        return self._faults[1]

    def build(self, cluster: Cluster, interface_addresses: tuple[str, ...], routes: Routes = NO_ROUTES) -> ServiceTable:
        """Build the table of the cluster as it is now; the very same object when nothing changed.

        The cluster's dirty state is taken. Addresses and routes of this node are empty when they are not known.
        """
        dirty = cluster.take_dirty()
        network = self._network(cluster, interface_addresses, routes)
        # The inputs of entries apart from their own service: when they differ, all are redone.
        zone, pods = cluster.node.zone if cluster.node else "", network.pods
        basis = zone, network.primary, pods.recognizes(4), pods.recognizes(6)
        names: Collection[str]
        if dirty is None or basis != self._basis:
            # In one order, so that two agents with one cluster make one table.
            names = sorted({*cluster.services, *self._claims.wanted, *self.external_ips})
        else:
            names = dirty
            if moved := self._own.symmetric_difference(network.addresses):
                names |= {name for name, one in cluster.services.items() if not moved.isdisjoint(one.cluster_ips)}
        self._basis, self._own = basis, frozenset(network.addresses)
        services = cluster.services
        self.health_checks = _updated(
            self.health_checks, names, lambda name: self._health_check(services.get(name), cluster)
        )
        self.external_ips = _updated(self.external_ips, names, lambda name: self._decide(services.get(name)))
        changes = self._claims.update(cluster, {name: self._entries(cluster, name, network) for name in names})
        return self._next({name: self._without_own(name, granted) for name, granted in changes.items()}, network)

    def _without_own(self, name: str, granted: Entries) -> Entries:
        """Leave a ClusterIP to this node if an interface has it: what listens there gets the packets.

        NodeLocal DNSCache works so. The address stays claimed all the same.
        """
        here = {f.address for e in granted for f in e.frontends if f.kind is Kind.CLUSTER_IP} & self._own
        if here or name in self._left.values():
            left = {address: owner for address, owner in self._left.items() if owner != name}
            self._left = MappingProxyType(left | {address: name for address in here if address})
        if not here:
            return granted
        kept = [(entry, [f for f in entry.frontends if f.address not in here]) for entry in granted]
        return tuple([_with_frontends(entry, those) for entry, those in kept if those or entry.serving])

    def _network(self, cluster: Cluster, interface_addresses: tuple[str, ...], routes: Routes) -> NodeNetwork:
        asked = (cluster.node, interface_addresses, cluster.service_cidrs, routes)
        if asked == self._asked:
            return self.table.node
        network = node_network(self._settings, *asked)
        self.node_port_faults = tuple(node_port_faults(self._settings, network))
        self._asked = asked
        return network

    def _health_check(self, service: Service | None, cluster: Cluster) -> HealthCheck | None:
        if service is None or not service.health_check_node_port:
            return None
        slices = cluster.slices_of(f"{service.namespace}/{service.name}")
        return health_check(service, slices, self._settings.node_name)

    def _decide(self, service: Service | None) -> ExternalIPs | None:
        return external_ips(service, self._settings) if service is not None and service.external_ips else None

    def _entries(self, cluster: Cluster, name: str, network: NodeNetwork) -> Entries:
        service = cluster.served(name)
        if service is None:
            return ()
        found = entries(
            service, cluster.slices_of(name), self._settings, cluster.node, network, self._claims.wanted.get(name, ())
        )
        if name not in cluster.ceded:
            return found
        # Without frontends no client finds them, and their backends still serve open flows.
        return tuple([_with_frontends(entry, []) for entry in found if entry.serving])

    def _next(self, wanted: Mapping[str, Entries], network: NodeNetwork) -> ServiceTable:
        last = self.table
        changed = {name: new for name, new in wanted.items() if last.services.get(name, ()) != new}
        ports = tuple(sorted({check.port for check in self.health_checks.values()}))
        if not changed and (network, ports, self._left) == (last.node, last.health_ports, last.left_to_node):
            return last
        self._services = self._services.replaced(changed)
        self.table = ServiceTable(
            services=self._services,
            node=network,
            generation=last.generation + 1,
            base=last.generation,
            changed=frozenset(changed),
            health_ports=ports,
            left_to_node=self._left,
        )
        self._lacks.keep_up(self.table)
        return self.table


def _updated(known: Mapping[str, _T], names: Iterable[str], decide: Callable[[str], _T | None]) -> Mapping[str, _T]:
    """Returns decisions by service, after those of some services were made again; the same object if none differs."""
    changed = {name: new for name in names if (new := decide(name)) != known.get(name)}
    if not changed:
        return known
    return MappingProxyType({name: one for name, one in {**known, **changed}.items() if one is not None})


class _Claims:
    """The claimants of each address and port, and its owner."""

    def __init__(self) -> None:
        self.wanted: dict[str, Entries] = {}  # by service, before any frontend is lost
        self.lost: dict[str, dict[str, str]] = {}
        self._owner: dict[Key, str] = {}
        self._rivals: dict[Key, set[str]] = {}  # of the keys with more than one claimant, the owner included

    def update(self, cluster: Cluster, new: Mapping[str, Entries]) -> dict[str, Entries]:
        """Apply new entries of some services. Returns the present entries of all services that are affected."""
        contested: set[Key] = set()
        for name, after in new.items():
            before = self.wanted.get(name, ())
            if before:
                self._release(name, before, contested)
            if not after:
                self.wanted.pop(name, None)
            elif after != before:  # equal ones stay the same objects
                self.wanted[name] = after
        touched = {name for name, after in new.items() if not self._claim(name, after, contested)}
        for key in contested:
            touched |= self._resolve(key, cluster)
        alone = {name: self.wanted.get(name, ()) for name in new if name not in touched}
        if self.lost:
            for name in alone:
                self.lost.pop(name, None)
        return alone | {name: self._granted(name) for name in touched}

    def _release(self, name: str, entries: Entries, contested: set[Key]) -> None:
        for key, _ in _keys(entries):
            rivals = self._rivals.get(key)
            if rivals is not None:
                rivals.discard(name)
                contested.add(key)
            elif self._owner.get(key) == name:
                del self._owner[key]

    def _claim(self, name: str, entries: Entries, contested: set[Key]) -> bool:
        """Claim all addresses and ports, which a service names once. True if nobody had any of these."""
        owners, alone = self._owner, True
        for key, _ in _keys(entries):
            owner = owners.get(key)
            if owner is None:
                owners[key] = name
                continue
            alone = False
            self._rivals.setdefault(key, {owner}).add(name)
            contested.add(key)
        return alone

    def _resolve(self, key: Key, cluster: Cluster) -> set[str]:
        """Give a contested key to the strongest claimant. Returns everybody whose entries may differ now."""
        rivals = self._rivals.get(key)
        if rivals is None:
            return set()
        if rivals:
            self._owner[key] = min(rivals, key=lambda name: self._strength(key, name, cluster))
        else:
            del self._owner[key]
        if len(rivals) < 2:
            del self._rivals[key]
        return rivals

    def _strength(self, key: Key, name: str, cluster: Cluster) -> tuple[bool, bool, str, str]:
        """Sorts claimants, the strongest first. A service without a time of creation counts as the newest."""
        service = cluster.services.get(name)
        created = service.created if service else ""
        mine = any(k == key and front.kind is Kind.CLUSTER_IP for k, front in _keys(self.wanted[name]))
        return not mine, not created, created, name

    def _granted(self, name: str) -> Entries:
        """Returns the entries of a service without the frontends that others have, the same objects if none is lost."""
        wanted = self.wanted.get(name, ())
        losses: dict[str, str] = {}
        result: list[Entry] = []
        for entry in wanted:
            kept: list[Frontend] = []
            for frontend in entry.frontends:
                key = frontend.address or entry.family, frontend.port, entry.protocol
                owner = self._owner[key]
                if owner != name:
                    where = f"{frontend.port} on IPv{entry.family}"
                    if frontend.address is not None:
                        where = socket_text(frontend.address, frontend.port)
                    claim = f"{frontend.kind.value} {where} {entry.protocol.name} of {entry.name}"
                    losses[f"{claim} belongs to {owner}"] = owner
                else:
                    kept.append(frontend)
            if len(kept) == len(entry.frontends):
                result.append(entry)
            elif kept:
                result.append(_with_frontends(entry, kept))
        if not losses:
            self.lost.pop(name, None)
            return wanted
        self.lost[name] = losses
        return tuple(result)


def _keys(entries: Entries) -> list[tuple[Key, Frontend]]:
    return [((f.address or e.family, f.port, e.protocol), f) for e in entries for f in e.frontends]


def _with_frontends(entry: Entry, frontends: list[Frontend]) -> Entry:
    """Returns the entry with some of its frontends, and the backend sets that these use."""
    used = list(dict.fromkeys(index for f in frontends for index in (f.internal, f.external)))
    return replace(
        entry,
        frontends=tuple(
            [replace(f, internal=used.index(f.internal), external=used.index(f.external)) for f in frontends]
        ),
        backend_sets=tuple([entry.backend_sets[index] for index in used]),
    )
