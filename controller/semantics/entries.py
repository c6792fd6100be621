"""PURE. Decides the meaning of a Service on this node: every question of traffic policy is answered here.

Takes objects of the API and returns entries of the service table. For each service port the endpoints are joined by
port name and protocol, and give at most two backend sets:

- the *cluster* set: ready endpoints anywhere, narrowed by topology hints (KEP-2433, KEP-4444); when
  none is ready, those that serve while they terminate (KEP-1669);
- the *local* set: the same for endpoints on this node, decided separately and without hints
  (KEP-2086, KEP-1669).

The sets that frontends use, by client:

    frontend             policy     internal (pods, node)   external   source replaced for
    ClusterIP            Cluster    cluster                 cluster    all but pods; nobody without detection
    ClusterIP            Local      local                   local      all but pods; nobody without detection
    externalIP, LB,      Cluster    cluster                 cluster    everybody
      node port          Local      cluster                 local      this node

Where kube-proxy's modes disagree there is one answer, and docs/differences.md lists it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any, Final

import msgspec

from hybrid_proxy.controller.kubernetes.model import Endpoint, EndpointSlice, Node, Service, ServicePort
from hybrid_proxy.dataplane.balancing import canonical
from hybrid_proxy.dataplane.table import (
    Backend,
    BackendSet,
    Entry,
    Frontend,
    Kind,
    Masquerade,
    NodeNetwork,
    Protocol,
    WhenEmpty,
    family_of,
)  # fmt: skip

READY: Final = "ready endpoints"
TERMINATING: Final = "terminating fallback: no endpoint is ready, these still serve"
NO_ENDPOINTS: Final = "the service has no endpoints"
NO_PORT: Final = "no EndpointSlice of the service has a"
NONE_USABLE: Final = "no endpoint is ready, and none serves while it terminates"


# As kube-proxy 1.37 has them: this node's own addresses by its Node object, the loopback addresses, every address.
NODE_PORT_KEYWORDS: Final = ("primary", "localhost", "all")


class DetectLocalMode(Enum):
    """kube-proxy's `detectLocalMode`: how packets of pods are recognized."""

    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_PREFIX = "InterfaceNamePrefix"


class Settings(msgspec.Struct, frozen=True):
    """The settings that change what a Service means; names and defaults follow kube-proxy's.

    `node_port_addresses` has CIDRs and `NODE_PORT_KEYWORDS`; empty means primary and, unless
    `localhost_node_ports` is off, localhost; but see `health_addresses`.
    `primary` overrides the node's primary address of its family (kube-proxy's `bindAddress`).
    `proxy_name` is the name by which Services choose this proxy, empty: those that choose none.
    `external_ips` is the gate AllowServiceExternalIPs (KEP-5707). Where `external_ip_cidrs` or `external_ip_namespaces`
    are given, an external IP is served only inside of one of these ranges, and of a Service in one of these namespaces.
    `reset_gone_backends` holds for services without the annotation `hybrid-proxy.io/reset-gone-backends`.
    `algorithm` is for services without the annotation `hybrid-proxy.io/algorithm`; the table has the canonical name.
    """

    node_name: str = ""
    detect: DetectLocalMode = DetectLocalMode.CLUSTER_CIDR
    cluster_cidrs: tuple[str, ...] = ()
    pod_interface: str = ""
    node_port_addresses: tuple[str, ...] = ()
    localhost_node_ports: bool = True
    masquerade_all: bool = False
    masquerade_bit: int = 14
    external_ips: bool = True
    external_ip_cidrs: tuple[str, ...] = ()
    external_ip_namespaces: tuple[str, ...] = ()
    reset_gone_backends: bool = False
    algorithm: str = "random"
    primary: tuple[str, ...] = ()
    proxy_name: str = ""


def networks_of(wanted: Iterable[str]) -> list[IPv4Network | IPv6Network]:
    """Returns the CIDRs among them, without `NODE_PORT_KEYWORDS`."""
    return [ip_network(cidr, strict=False) for cidr in wanted if cidr not in NODE_PORT_KEYWORDS]


# Health-check node ports


class HealthCheck(msgspec.Struct, frozen=True):
    """A health-check node port, and whether this node has endpoints of its Service.

    `local` are pairs of a family that the Service has, and how many addresses are ready on this node.
    """

    port: int
    local: tuple[tuple[int, int], ...]

    def local_endpoints(self, family: int) -> int:
        """Counts the endpoints, for a request to an address of this family.

        The endpoints of a dual-stack Service have an address of each family: they are not counted twice.
        """
        counts = dict(self.local)
        return counts.get(family, max(counts.values(), default=0))


def health_check(service: Service, slices: Iterable[EndpointSlice], node_name: str) -> HealthCheck | None:
    """Returns the health-check node port of a Service of type LoadBalancer with externalTrafficPolicy Local.

    Endpoints count by address, whatever ports they have, if they are ready and on this node; of copies the best one
    counts. An address of weight 0 at all of its ports gets no new connections and does not count.
    """
    if not (service.health_check_node_port and service.external_local and service.type == "LoadBalancer"):
        return None
    families = tuple(dict.fromkeys(family_of(address) for address in service.cluster_ips))
    by_address = dict(service.weights)
    best = _best_copies([(one, port.port) for one in slices for port in one.ports], node_name)
    ready = {
        (family_of(address), address)
        for (address, _), (endpoint, weight) in best.items()
        if node_name and endpoint.node == node_name and endpoint.ready and _weight(by_address.get(address), weight)
    }
    return HealthCheck(
        service.health_check_node_port, tuple((family, sum(f == family for f, _ in ready)) for family in families)
    )


def health_addresses(settings: Settings, network: NodeNetwork) -> tuple[str, ...]:
    """Returns the addresses of health-check node ports; `0.0.0.0` is every address of both families.

    As kube-proxy's iptables mode: at every address unless `node_port_addresses` names some. Load balancers that probe
    their own IP (Google Cloud's) depend on it.
    """
    wanted = settings.node_port_addresses
    found = network.node_port_addresses + (LOOPBACK_ADDRESSES[:1] if "localhost" in wanted else ())
    if not wanted or not found or "all" in wanted or any(cidr.endswith("/0") for cidr in wanted):
        return (_EVERYWHERE,)
    return found


_EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 (kube-proxy's default)
LOOPBACK_ADDRESSES: Final = ("127.0.0.1", "::1")


# One service


class ExternalIPs(msgspec.Struct, frozen=True):
    """The `spec.externalIPs` of a Service: addresses that are served, and why others are not."""

    served: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def external_ips(service: Service, settings: Settings) -> ExternalIPs:
    """Decides which external IPs of a Service this node serves.

    Whoever may write a Service can claim any address by this field, and gets what pods and the node send there
    (CVE-2020-8554). Where there is a list, what it does not name is refused; ranges of one family allow none of the
    other. A load-balancer IP comes from the status, which only controllers write, and is never refused.
    """
    why = ""
    if not settings.external_ips:
        why = "external IPs are turned off (feature gate AllowServiceExternalIPs)"
    elif settings.external_ip_namespaces and service.namespace not in settings.external_ip_namespaces:
        why = f"externalIPs.allowedNamespaces does not name {service.namespace}"
    networks = networks_of(settings.external_ip_cidrs)
    served = tuple(
        address
        for address in service.external_ips
        if address in service.load_balancer_ips
        or (not why and (not networks or any(ip_address(address) in network for network in networks)))
    )
    why = why or "no range of externalIPs.allowedCIDRs contains it"
    others = [address for address in service.external_ips if address not in served]
    return ExternalIPs(served, tuple(f"external IP {address} is not served: {why}" for address in others))


def entries(
    service: Service,
    slices: Iterable[EndpointSlice],
    settings: Settings,
    node: Node | None,
    network: NodeNetwork,
    former: Iterable[Entry] = (),
) -> tuple[Entry, ...]:
    """Returns the entries of one service: one for each family that it has a ClusterIP of, and each port.

    The zone of this node decides on zone hints. Parts of the `former` entries that did not change are the same objects,
    as old and new entries of all services may be in memory together.
    """
    slices = list(slices)
    known = {backend.address: backend for entry in former for backend in entry.serving} if former else {}
    algorithm = canonical(service.algorithm or settings.algorithm)
    resets = settings.reset_gone_backends if service.reset_gone is None else service.reset_gone
    zone = node.zone if node else ""
    result: list[Entry] = []
    for cluster_ip in service.cluster_ips:
        family = family_of(cluster_ip)
        mine = [s for s in slices if s.family == family]
        # True if every endpoint is simply ready: no readiness or hints to compare.
        plain = not [
            e for s in mine for e in s.endpoints if e.terminating or not e.ready or e.zone_hints or e.node_hints
        ]
        weighs = bool(service.weights) or any(s.weight is not None for s in mine)
        vips = _Vips(service, cluster_ip, family, settings, network)
        place = _Place(settings.node_name, zone, vips.policy)
        # Joined by name and protocol once for all: with thousands of ports none compares itself with all others.
        by_port: dict[tuple[str, Protocol], list[tuple[EndpointSlice, int]]] = {}
        for one in mine:
            for here in one.ports:
                by_port.setdefault((here.name, here.protocol), []).append((one, here.port))
        for port in service.ports:
            joined = by_port.get((port.name, port.protocol), ())
            cluster, local, serving = _backend_sets(port, mine, joined, plain, place, known)
            if weighs:
                cluster, local, serving = _weighted(_weights(service, joined, place), cluster, local, serving)
            frontends, backend_sets = vips.frontends(port, cluster, local)
            result.append(
                Entry(
                    f"{service.namespace}/{service.name}:{port.name or port.port}",
                    family,
                    port.protocol,
                    frontends,
                    backend_sets,
                    serving,
                    service.affinity_seconds,
                    algorithm,
                    service.probe if port.protocol is Protocol.TCP else None,
                    service.slow_start,
                    _present(joined) if resets and port.protocol is Protocol.TCP else None,
                )
            )
    return tuple(result)


def _present(joined: _Joined) -> tuple[tuple[str, int], ...]:
    """Returns every endpoint of a port: one that terminates, or is not ready, keeps its connections."""
    return tuple(sorted({(endpoint.address, number) for one, number in joined for endpoint in one.endpoints}))


class _Vips:
    """The addresses of one service in one family, and the clients that use the local set there."""

    __slots__ = ("cluster_ip", "cluster_masquerade", "external", "external_local", "external_masquerade",
                 "internal_local", "node_ports", "policy", "source_ranges")  # fmt: skip

    def __init__(
        self, service: Service, cluster_ip: str, family: int, settings: Settings, network: NodeNetwork
    ) -> None:
        self.cluster_ip = cluster_ip
        self.internal_local = service.internal_local
        self.node_ports = service.type in {"NodePort", "LoadBalancer"}
        self.external: list[tuple[Kind, str]] = []
        self.source_ranges: tuple[str, ...] | None = None
        outer = external_ips(service, settings).served if service.external_ips else ()
        if service.load_balancer_ips or outer:
            self.external = _external(service, cluster_ip, family, outer)
            if service.source_ranges:
                self.source_ranges = _source_ranges(service, family, network)
        self.external_local = service.external_local and (self.node_ports or bool(outer))
        if settings.masquerade_all:
            self.cluster_masquerade = Masquerade.ALWAYS
        elif network.pods.recognizes(family):
            self.cluster_masquerade = _NODE_OR_EXTERNAL
        else:
            self.cluster_masquerade = Masquerade.NEVER
        self.external_masquerade = Masquerade.NODE if self.external_local else Masquerade.ALWAYS
        self.policy = ""
        if self.internal_local or self.external_local:
            self.policy = _LOCAL_POLICY[self.internal_local, self.external_local]

    def frontends(
        self, port: ServicePort, cluster: BackendSet, local: BackendSet | None
    ) -> tuple[tuple[Frontend, ...], tuple[BackendSet, ...]]:
        """Returns the frontends of one port, and the backend sets that they use."""
        sets = [local if self.internal_local and local is not None else cluster]
        first = Frontend(Kind.CLUSTER_IP, self.cluster_ip, port.port, 0, 0, self.cluster_masquerade)
        if not self.external and not (self.node_ports and port.node_port):
            return (first,), tuple(sets)
        internal = _index_in(sets, cluster)
        external = _index_in(sets, local) if self.external_local and local is not None else internal
        found = [first]
        for kind, address in self.external:
            ranges = self.source_ranges if kind is Kind.LOAD_BALANCER else None
            found.append(Frontend(kind, address, port.port, internal, external, self.external_masquerade, ranges))
        if self.node_ports and port.node_port:
            found.append(Frontend(Kind.NODE_PORT, None, port.node_port, internal, external, self.external_masquerade))
        return tuple(found), tuple(sets)


def _index_in(sets: list[BackendSet], wanted: BackendSet) -> int:
    """Returns the index of a backend set in the list; appends it if no equal one is there."""
    if wanted not in sets:
        sets.append(wanted)
    return sets.index(wanted)


_NODE_OR_EXTERNAL: Final = Masquerade.NODE | Masquerade.EXTERNAL
_LOCAL_POLICY: Final = {
    (True, False): "internalTrafficPolicy Local",
    (False, True): "externalTrafficPolicy Local",
    (True, True): "internalTrafficPolicy and externalTrafficPolicy Local",
}


def _external(service: Service, cluster_ip: str, family: int, external: Iterable[str]) -> list[tuple[Kind, str]]:
    """Returns load-balancer IPs, then external IPs, of one family, each address once.

    An address that is both is a load-balancer IP: the source ranges must guard it.
    """
    found = dict.fromkeys(service.load_balancer_ips, Kind.LOAD_BALANCER)
    for address in external:
        found.setdefault(address, Kind.EXTERNAL_IP)
    found.pop(cluster_ip, None)
    return [(kind, address) for address, kind in found.items() if family_of(address) == family]


def _source_ranges(service: Service, family: int, network: NodeNetwork) -> tuple[str, ...] | None:
    """Returns the CIDRs of one family that may reach the load-balancer IPs; None: everybody.

    Ranges of the other family alone do not restrict this one, nor does any /0. A node with the load-balancer IP on an
    interface sends *from* it: where the node itself is allowed, that address is too.
    """
    ranges = [r for r in service.source_ranges if family_of(r) == family]
    if not ranges or any(r.endswith("/0") for r in ranges):
        return None
    primary = [ip_address(address) for address in network.primary if family_of(address) == family][:1]
    if any(address in ip_network(r, strict=False) for address in primary for r in ranges):
        bits = 32 if family == 4 else 128
        ranges += [f"{ip}/{bits}" for ip in service.load_balancer_ips if family_of(ip) == family]
    return tuple(dict.fromkeys(ranges))


# One port: endpoints to backend sets


class _Place(msgspec.Struct, frozen=True):
    """This node, its zone, and the Local policies in force ("": none)."""

    node: str
    zone: str
    policy: str


def _backend_sets(
    port: ServicePort,
    slices: Sequence[EndpointSlice],
    joined: _Joined,
    plain: bool,
    place: _Place,
    known: Mapping[str, Backend],
) -> tuple[BackendSet, BackendSet | None, tuple[Backend, ...]]:
    """Returns the cluster set, the local set (None when no policy asks for it), and all backends that still serve."""
    if plain and len(joined) == 1:
        backends = _plain_backends(joined[0][0].endpoints, joined[0][1], place.node, known)
        if backends:
            local = None
            if place.policy:
                here = tuple([b for b in backends if b.local])
                local = _local_set(here, False, True, place.policy)
            return BackendSet(backends, WhenEmpty.REJECT, READY), local, backends
    return _weighed(port, slices, joined, place)


_Joined = Sequence[tuple[EndpointSlice, int]]  # the slices that have a service port's port, and its number there


def _plain_backends(
    endpoints: Sequence[Endpoint], number: int, me: str, known: Mapping[str, Backend]
) -> tuple[Backend, ...] | None:
    """Returns the sorted backends of one slice, those of this node first; None: an address is there twice."""
    here = sorted([e.address for e in endpoints if e.node == me]) if me else []
    away = sorted([e.address for e in endpoints if e.node != me or not me])
    if len({*here, *away}) != len(endpoints):
        return None
    backends = [Backend(a, number, True) for a in here]
    backends += [Backend(a, number) for a in away]
    if known:
        return tuple([old if (old := known.get(new.address)) == new else new for new in backends])
    return tuple(backends)


def _weighed(
    port: ServicePort, slices: Sequence[EndpointSlice], joined: _Joined, place: _Place
) -> tuple[BackendSet, BackendSet | None, tuple[Backend, ...]]:
    """Decides the general case of `_backend_sets`."""
    me = place.node
    pairs = [
        (endpoint, Backend(address, number, bool(me) and endpoint.node == me))
        for (address, number), (endpoint, _) in _best_copies(joined, me).items()
    ]
    pairs.sort(key=lambda pair: (not pair[1].local, pair[1].address, pair[1].port))

    ready = [pair for pair in pairs if pair[0].ready]
    draining = [pair for pair in pairs if pair[0].serving and pair[0].terminating and not pair[0].ready]
    # What a set holds is never stale, even when its conditions contradict each other (ready, not serving).
    serving = tuple([b for e, b in pairs if e.serving or e.ready])
    if ready:
        chosen, why = _by_hints(ready, me, place.zone)
        cluster = BackendSet(tuple([b for _, b in chosen]), WhenEmpty.REJECT, why)
    elif draining:
        cluster = BackendSet(tuple([b for _, b in draining]), WhenEmpty.REJECT, TERMINATING)
    else:
        cluster = BackendSet((), WhenEmpty.REJECT, _why_none(port, slices, joined, bool(pairs)))
    if not place.policy:
        return cluster, None, serving
    here = tuple([b for _, b in ready if b.local])
    fallback = not here
    if fallback:
        here = tuple([b for _, b in draining if b.local])
    if not cluster.backends:
        return cluster, cluster, serving
    return cluster, _local_set(here, fallback, bool(ready), place.policy), serving


def _best_copies(
    joined: Iterable[tuple[EndpointSlice, int]], me: str
) -> dict[tuple[str, int], tuple[Endpoint, int | None]]:
    """Returns the best copy of each address and port, with the weight that the copy's slice gives."""
    best: dict[tuple[str, int], tuple[Endpoint, int | None]] = {}
    for one, number in joined:
        for endpoint in one.endpoints:
            key = (endpoint.address, number)
            held = best.get(key)
            if held is None or _rank(endpoint, one.weight, me) < _rank(*held, me):
                best[key] = endpoint, one.weight
    return best


def _local_set(here: tuple[Backend, ...], fallback: bool, ready_elsewhere: bool, policy: str) -> BackendSet:
    """Returns the local set of a service that has endpoints somewhere: none here means drop."""
    if not here:
        return BackendSet((), WhenEmpty.DROP, f"{policy}: no endpoint on this node, there are some on others")
    if not fallback:
        return BackendSet(here, WhenEmpty.DROP, f"{policy}: endpoints on this node")
    others = ", others are ready elsewhere" if ready_elsewhere else ""
    return BackendSet(here, WhenEmpty.DROP, f"{policy}: terminating fallback on this node: none here is ready{others}")


def _weight(by_address: int | None, of_slice: int | None) -> int:
    """Returns the weight of an endpoint: the Service's for its address precedes the slice's."""
    if by_address is not None:
        return by_address
    return 1 if of_slice is None else of_slice


def _weights(service: Service, joined: _Joined, place: _Place) -> dict[tuple[str, int], int]:
    """Returns the weight of each endpoint of a service port, by address and port."""
    by_address = dict(service.weights)
    best = _best_copies(joined, place.node)
    return {key: _weight(by_address.get(key[0]), of_slice) for key, (_, of_slice) in best.items()}


def _weighted(
    weights: Mapping[tuple[str, int], int], cluster: BackendSet, local: BackendSet | None, serving: tuple[Backend, ...]
) -> tuple[BackendSet, BackendSet | None, tuple[Backend, ...]]:
    """Applies weights. A backend of weight 0 is in no set and still serves: its connections may stay."""

    def weigh(backends: tuple[Backend, ...]) -> tuple[Backend, ...]:
        return tuple([Backend(b.address, b.port, b.local, weights[b.address, b.port]) for b in backends])

    def narrow(whole: BackendSet) -> BackendSet:
        backends = weigh(whole.backends)
        left = tuple([b for b in backends if b.weight])
        why = f"{whole.why}, but all of weight 0" if backends and not left else whole.why
        return BackendSet(left, whole.when_empty, why)

    cluster, known = narrow(cluster), cluster
    if local is None:
        return cluster, None, weigh(serving)
    # As without weights: drop only if other nodes have endpoints.
    local = cluster if local is known or not cluster.backends else narrow(local)
    return cluster, local, weigh(serving)


def _rank(endpoint: Endpoint, weight: int | None, me: str) -> tuple[Any, ...]:
    """Orders copies of one address and port, the best first, so that the order of slices does not matter.

    An address that a new pod took over from a terminating one counts as the new pod's. Of two copies that are worth the
    same, the lower weight is preferred: maintenance takes effect at once.
    """
    e = endpoint
    worth = e.terminating, not e.ready, not e.serving, e.node != me, e.node_hints, e.zone_hints, e.node or ""
    return *worth, _weight(None, weight)


def _by_hints(ready: list[tuple[Endpoint, Backend]], me: str, zone: str) -> tuple[list[tuple[Endpoint, Backend]], str]:
    """Returns the ready endpoints that the hints allow, and why these; all or nothing (KEP-2433, KEP-4444)."""
    ignored = ""
    for kind, here, nowhere in (("node", me, "this node has no name"), ("zone", zone, "this node has no zone label")):
        hints = [e.node_hints if kind == "node" else e.zone_hints for e, _ in ready]
        hinted = sum(map(bool, hints))
        if hinted == len(ready):
            if chosen := [pair for pair, hint in zip(ready, hints, strict=True) if here and here in hint]:
                return chosen, f"{kind} hints: {here}"
            ignored = f"no endpoint has a {kind} hint for {here}" if here else nowhere
        elif hinted:
            ignored = f"{len(ready) - hinted} of {len(ready)} ready endpoints have no {kind} hint"
    return ready, f"{READY}; topology hints ignored: {ignored}" if ignored else READY


def _why_none(port: ServicePort, slices: Sequence[EndpointSlice], joined: _Joined, some: bool) -> str:
    """Says why a set has no backend, naming the commonest mistake."""
    if some:
        return NONE_USABLE
    if joined or not any(s.endpoints for s in slices):
        return NO_ENDPOINTS
    wanted = f"named {port.name!r}" if port.name else "without a name"
    there = sorted({f"{each.name!r} ({each.protocol.name})" for one in slices for each in one.ports})
    return f"{NO_PORT} {port.protocol.name} port {wanted}; they have {', '.join(there) or 'none'}"
