"""Short builders for the tables of cases: a service, its endpoints, and what a node makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hybrid_proxy.controller.kubernetes.model import (
    KINDS,
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Event,
    Node,
    Object,
    Replaced,
    Service,
    ServiceCIDR,
    ServicePort,
    kind_of,
)  # fmt: skip  # isort: skip
from hybrid_proxy.controller.semantics.cluster import Cluster
from hybrid_proxy.controller.semantics.entries import Settings, entries
from hybrid_proxy.controller.semantics.node import node_network
from hybrid_proxy.controller.semantics.tables import Builder
from hybrid_proxy.dataplane.table import BackendSet, Entry, Kind, Protocol, ServiceTable, socket_text
from tests.tables import Front, fronts_of

ME = "node-a"
NODE = Node(ME, ("192.168.0.1", "fd01::1"), pod_cidrs=("10.1.0.0/24", "fd02::/64"), zone="zone-a")
SETTINGS = Settings(node_name=ME, cluster_cidrs=("10.1.0.0/16", "fd02::/48"))
HTTP = ServicePort("http", Protocol.TCP, 80)

STATES = {
    # state           ready  serving terminating
    "ready":         (True,  True,  False),
    "unready":       (False, False, False),
    "starting":      (False, True,  False),  # only `ready: false` was set; nil serving is true
    "draining":      (False, True,  True),
    "draining-ready": (True, True,  True),   # publishNotReadyAddresses
    "gone":          (False, False, True),
    "odd":           (True,  False, False),
}  # fmt: skip


def ep(
    address: str, node: str | None = None, state: str = "ready", zones: Iterable[str] = (), nodes: Iterable[str] = ()
) -> Endpoint:
    ready, serving, terminating = STATES[state]
    return Endpoint(address, node, ready, serving, terminating, tuple(zones), tuple(nodes))


def here(address: str, state: str = "ready", **hints: Iterable[str]) -> Endpoint:
    """An endpoint on this node."""
    return ep(address, ME, state, **hints)


def away(address: str, state: str = "ready", **hints: Iterable[str]) -> Endpoint:
    """An endpoint on another node."""
    return ep(address, "node-b", state, **hints)


def service(name: str = "web", **fields: Any) -> Service:
    values = {"type": "ClusterIP", "cluster_ips": ("10.96.0.10",), "ports": (HTTP,), **fields}
    return Service("default", name, **values)


def endpoint_slice(
    *endpoints: Endpoint,
    name: str = "web-1",
    of: str = "web",
    ports: Iterable[EndpointPort] = (EndpointPort("http", Protocol.TCP, 8080),),
    family: int = 4,
    **fields: Any,
) -> EndpointSlice:
    return EndpointSlice("default", name, f"default/{of}", family, tuple(ports), endpoints, **fields)


def decide(
    svc: Service, *slices: EndpointSlice, settings: Settings = SETTINGS, node: Node | None = NODE
) -> tuple[Entry, ...]:
    return entries(svc, slices, settings, node, node_network(settings, node, (), ()))


def only(svc: Service, *slices: EndpointSlice, settings: Settings = SETTINGS, node: Node | None = NODE) -> Entry:
    """The one entry of a service with one port and one family."""
    (entry,) = decide(svc, *slices, settings=settings, node=node)
    return entry


def frontend(entry: Entry, kind: Kind = Kind.CLUSTER_IP) -> Front:
    (found,) = [f for f in fronts_of(entry) if f.kind is kind]
    return found


def shown(backend_set: BackendSet) -> str:
    """A backend set in one word: addresses of its backends, or what happens without them."""
    return " ".join(b.address for b in backend_set.backends) or backend_set.when_empty.value


def sockets(backends: Iterable[Any]) -> list[str]:
    return [socket_text(b.address, b.port) for b in backends]


def listing(objects: Iterable[Object], kept: Iterable[str] = ()) -> list[Event]:
    """The first list of a source."""
    objects = tuple(objects)
    return [Replaced(k, tuple(o for o in objects if kind_of(o) == k), frozenset(kept)) for k in KINDS]


def cluster(*objects: Object, me: str = ME) -> Cluster:
    made = Cluster(me)
    for event in listing(objects):
        made.apply(event)
    return made


def table(*objects: Object, settings: Settings = SETTINGS, addresses: tuple[str, ...] = ()) -> ServiceTable:
    return Builder(settings).build(cluster(*objects), addresses)


SERVICE_RANGE = ServiceCIDR("kubernetes", ("10.96.0.0/16", "fd00::/112"))
