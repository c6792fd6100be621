"""API objects in, model values out: the only file that knows JSON names.

A forgiving reader and a strict checker. Forgiving: fields that nobody here reads are skipped unseen, explicit
nulls and Go's zero values mean "absent", as they do for the API's own readers. Strict: whatever is read is
checked here, once, so that everything behind this file works with canonical addresses and ports in range.
A value that cannot be used costs that part alone, and the object has a complaint by field and value (the table in
docs/differences.md). Refused is what no API server stores: another type than the field's, and an object without a
usable name, ClusterIP or address family. kube-proxy's selectors make others `Ignored`.

JSON goes straight into lean wire structs (no intermediate dicts), then into `controller.kubernetes.model`. The structs
are not tracked by the garbage collector: they hold no cycles and most live for microseconds. Strings that
repeat over a cluster (names of nodes, services and zones) and tuples that repeat (ports, hints) are shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from sys import intern
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

import msgspec
from msgspec import UNSET, Struct
from msgspec import field as json_field

from hybrid_proxy.controller.errors import MOST, Refused
from hybrid_proxy.controller.kubernetes import model
from hybrid_proxy.dataplane.addresses import canonical_address, canonical_cidr, shown, why_special
from hybrid_proxy.dataplane.balancing import CHOICES
from hybrid_proxy.dataplane.table import Probe, Protocol, family_of

ALGORITHM: Final = "hybrid-proxy.io/algorithm"
WEIGHTS: Final = "hybrid-proxy.io/weights"
PROBE: Final = "hybrid-proxy.io/probe"
SLOW_START: Final = "hybrid-proxy.io/slow-start"
WEIGHT: Final = "hybrid-proxy.io/weight"  # of an EndpointSlice
CILIUM_WEIGHT: Final = "service.cilium.io/weight"  # the same, as Cilium 1.20 reads it
RESET_GONE: Final = "hybrid-proxy.io/reset-gone-backends"

# Limits against absurd objects; what exceeds them is left out. A name is a DNS subdomain (RFC 1123). The API allows
# 1,000 endpoints and 20,000 ports a slice, and as many ports of a Service as fit in 1.5 MB. Each endpoint of a slice is
# a backend of each of its ports: their product is what one object may cost.
_MAX_NAME: Final = 253
_MAX_PORTS: Final = 100_000
_MAX_ENDPOINTS: Final = 5000
_MAX_BACKENDS: Final = 5_000_000
_MAX_ADDRESSES: Final = 5000  # external IPs, source ranges and the like
_MAX_WEIGHT: Final = 1000
_MAX_SLICE_WEIGHT: Final = 65_535  # as Cilium has it
_MAX_SLOW_START: Final = 3_600  # seconds
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

_DEFAULT_AFFINITY: Final = 10_800  # seconds, the API's default for sessionAffinity: ClientIP
_MAX_AFFINITY: Final = 86_400

PROXY_NAME: Final = "service.kubernetes.io/service-proxy-name"
_SERVICE_TYPES: Final = frozenset({"ClusterIP", "NodePort", "LoadBalancer", "ExternalName"})
_POLICIES: Final = {"Local": True, "Cluster": False, "": False, None: False}


# ------------------------------------------------------------------------------------ the wire, as JSON has it


class _Wire(Struct, rename="camel", gc=False):
    """Base of the wire structs: camelCase names; unknown fields are skipped."""


class _Labels(_Wire):
    """The labels that are read: the first of a Service, the next two of an EndpointSlice, the last of a Node."""

    proxy_name: object = json_field(default=UNSET, name="service.kubernetes.io/service-proxy-name")
    service: str | None = json_field(default=None, name="kubernetes.io/service-name")
    headless: object = json_field(default=UNSET, name="service.kubernetes.io/headless")
    zone: str | None = json_field(default=None, name="topology.kubernetes.io/zone")


class _Annotations(_Wire):
    """The annotations that are read: the last two of an EndpointSlice, the others of a Service."""

    algorithm: object = json_field(default=UNSET, name=ALGORITHM)
    weights: object = json_field(default=UNSET, name=WEIGHTS)
    probe: object = json_field(default=UNSET, name=PROBE)
    slow_start: object = json_field(default=UNSET, name=SLOW_START)
    reset_gone: object = json_field(default=UNSET, name=RESET_GONE)
    weight: object = json_field(default=UNSET, name=WEIGHT)
    cilium_weight: object = json_field(default=UNSET, name=CILIUM_WEIGHT)


class _Meta(_Wire):
    name: str | None = None
    namespace: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: _Labels | None = None
    annotations: _Annotations | None = None


class _Port(_Wire):
    """A port of a Service, or without `node_port` one of an EndpointSlice."""

    name: str | None = None
    protocol: str | None = None
    port: int | None = None
    node_port: int | None = None


class _ClientIP(_Wire):
    timeout_seconds: int | None = None


class _AffinityConfig(_Wire):
    client_ip: _ClientIP | None = json_field(default=None, name="clientIP")


class _ServiceSpec(_Wire):
    type: str | None = None
    cluster_ip: str | None = json_field(default=None, name="clusterIP")
    cluster_ips: list[str | None] | None = json_field(default=None, name="clusterIPs")
    external_ips: list[str | None] | None = json_field(default=None, name="externalIPs")
    load_balancer_source_ranges: list[str | None] | None = None
    ports: list[_Port | None] | None = None
    external_traffic_policy: str | None = None
    internal_traffic_policy: str | None = None
    session_affinity: str | None = None
    session_affinity_config: _AffinityConfig | None = None
    health_check_node_port: int | None = None
    traffic_distribution: str | None = None
    selector: object = None  # only shown in messages, so any type is accepted


class _Ingress(_Wire):
    ip: str | None = None
    ip_mode: str | None = None


class _LoadBalancer(_Wire):
    ingress: list[_Ingress | None] | None = None


class _ServiceStatus(_Wire):
    load_balancer: _LoadBalancer | None = None


class _Service(_Wire):
    metadata: _Meta | None = None
    spec: _ServiceSpec | None = None
    status: _ServiceStatus | None = None


class _Conditions(_Wire):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Hint(_Wire):
    name: str | None = None


class _Hints(_Wire):
    for_zones: list[_Hint | None] | None = None
    for_nodes: list[_Hint | None] | None = None


class _Endpoint(_Wire):
    addresses: list[str] | None = None
    conditions: _Conditions | None = None
    node_name: str | None = None
    hints: _Hints | None = None


class _EndpointSlice(_Wire):
    metadata: _Meta | None = None
    address_type: str | None = None
    ports: list[_Port | None] | None = None
    endpoints: list[_Endpoint | None] | None = None


class _Taint(_Wire):
    key: str | None = None


class _NodeSpec(_Wire):
    pod_cidr: str | None = json_field(default=None, name="podCIDR")
    pod_cidrs: list[str | None] | None = json_field(default=None, name="podCIDRs")
    taints: list[_Taint | None] | None = None


class _NodeAddress(_Wire):
    type: str | None = None
    address: str | None = None


class _NodeStatus(_Wire):
    addresses: list[_NodeAddress | None] | None = None


class _Node(_Wire):
    metadata: _Meta | None = None
    spec: _NodeSpec | None = None
    status: _NodeStatus | None = None


class _ServiceCIDRSpec(_Wire):
    cidrs: list[str | None] | None = None


class _ServiceCIDR(_Wire):
    metadata: _Meta | None = None
    spec: _ServiceCIDRSpec | None = None


# Stand-ins for what is absent, so that each rule is written once.
_NO_META, _NO_ANNOTATIONS, _NO_PORT = _Meta(), _Annotations(), _Port()
_NO_SPEC, _NO_NODE_SPEC = _ServiceSpec(), _NodeSpec()


# ------------------------------------------------------------------------------------------------ checks


class _BadError(Exception):
    """A field that cannot be used, and why: a complaint, or `Refused` where the object's key is known."""


def _fail(field: str, problem: str) -> NoReturn:
    raise _BadError(field, problem)


_Read = TypeVar("_Read")
_Given = ParamSpec("_Given")


class _Complaints(list[str]):
    """What is wrong with parts of one object, which is used without them."""

    def add(self, field: str, problem: str) -> None:
        self.append(f"{field}: {problem}")

    def part(self, instead: _Read, read: Callable[_Given, _Read], *given: _Given.args, **named: _Given.kwargs) -> _Read:
        """Reads a part of the object. If it cannot be used, notes a complaint and returns what counts in its place."""
        try:
            return read(*given, **named)
        except _BadError as error:
            self.add(*error.args)
            return instead

    def each(self, read: Callable[[Any, str], _Read], items: Iterable[Any] | None, field: str) -> list[_Read]:
        """Reads the items that can be used, each once; nulls and empty texts are absent, as for kube-proxy."""
        if not items:
            return []
        found: dict[_Read, None] = {}
        for index, item in enumerate(self.few(list(items), field, _MAX_ADDRESSES)):
            if item and (made := self.part(None, read, item, f"{field}[{index}]")) is not None:
                found[made] = None
        return list(found)

    def few(self, items: list[_Read], field: str, most: int) -> list[_Read]:
        """Returns the first `most` items, and notes a complaint about the others."""
        if len(items) <= most:
            return items
        self.add(field, f"{len(items)} items, and only the first {most} count")
        return items[:most]

    def texts(self) -> tuple[str, ...]:
        """Returns all of them; of very many the first ones, and how many more there are."""
        return (*self[:MOST], f"and {len(self) - MOST} more") if len(self) > MOST else tuple(self)


def _checked_name(name: str | None, field: str) -> str:
    if not name:
        _fail(field, "missing")
    if len(name) > _MAX_NAME:
        _fail(field, f"{len(name)} characters, at most {_MAX_NAME} are possible: {shown(name)}")
    if "/" in name or " " in name or not name.isprintable():
        _fail(field, f"{shown(name)} is not a name")
    return name


def _optional_name(name: str | None, field: str) -> str:
    return intern(_checked_name(name, field)) if name else ""


def _port(number: int | None, field: str) -> int:
    if number is None:
        _fail(field, "missing")
    if not 1 <= number <= 65535:
        _fail(field, f"{shown(number)} is not a port (1 to 65535)")
    return number


def _optional_port(number: int | None, field: str) -> int:
    return _port(number, field) if number else 0


def _protocol(text: str | None, field: str) -> Protocol:
    protocol = Protocol.__members__.get(text or "TCP")
    if protocol is None:
        _fail(field, f"{shown(text)} is not TCP, UDP or SCTP")
    return protocol


def _is_local(policy: str | None, field: str, said: _Complaints) -> bool:
    local = _POLICIES.get(policy)
    if local is None:
        said.add(field, f"{shown(policy)} is not Cluster or Local: Cluster counts")
    return local is True


# First bytes of addresses that `why_special` must examine; all others are ordinary.
_ODD: Final = {4: frozenset({0, 127, 169, *range(224, 256)}), 6: frozenset({0, 0xFE, 0xFF})}
_IN_DOUBT: Final = b"\0"


def _address(text: str | None, field: str, *, link_local: bool = False) -> str:
    """Returns the canonical form of an address that the API allows (ValidateNonSpecialIP)."""
    text = text or ""
    try:
        if inet_pton(AF_INET, text)[0] not in _ODD[4]:
            return text  # nearly all: canonical and ordinary
    except (OSError, ValueError):
        pass
    try:
        address = canonical_address(text)
    except ValueError as error:
        _fail(field, str(error))
    if why := why_special(inet_pton(AF_INET6 if ":" in address else AF_INET, address), link_local):
        _fail(field, f"{shown(text)} {why}")
    return address


def _outer_address(text: str, field: str) -> str:
    return _address(text, field, link_local=True)


def _cidr(text: str, field: str) -> str:
    try:
        return canonical_cidr(text)
    except ValueError as error:
        _fail(field, str(error))


# Tuples that are the same all over a cluster, kept once. Bounded: a cluster where all differ gains nothing.
_SHARED: dict[tuple[str, ...], tuple[str, ...]] = {}


def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(_SHARED) > 8192:
        _SHARED.clear()
    return _SHARED.setdefault(names, names)


# -------------------------------------------------------------------------------------------- the kinds


def _namespaced(metadata: _Meta) -> tuple[str, str]:
    """Returns the checked namespace and name."""
    namespace = intern(_checked_name(metadata.namespace or "default", "metadata.namespace"))
    return namespace, _checked_name(metadata.name, "metadata.name")


def _ignored(metadata: _Meta, why: str) -> model.Ignored:
    return model.Ignored("/".join(_namespaced(metadata)), why)


def _of_another_proxy(wire: _Service, proxy_name: str | None) -> model.Ignored | None:
    """Kube-proxy's rule for a proxy without a name is DoesNotExist: any value counts, an empty one too."""
    metadata = wire.metadata or _NO_META
    label = metadata.labels.proxy_name if metadata.labels else UNSET
    if label == (UNSET if proxy_name is None else proxy_name):
        return None
    said = "without" if label is UNSET else "with another value of" if proxy_name is not None else "with"
    return _ignored(metadata, f"{said} label {PROXY_NAME}: another proxy serves it")


def _service(wire: _Service) -> model.Service | model.Ignored:
    metadata = wire.metadata or _NO_META
    spec = wire.spec or _NO_SPEC
    namespace, name = _namespaced(metadata)
    kind = spec.type or "ClusterIP"
    if kind == "ExternalName":
        return _ignored(metadata, "type ExternalName: it is a DNS name alone")
    texts = [text for text in spec.cluster_ips or () if text] or ([spec.cluster_ip] if spec.cluster_ip else [])
    if spec.cluster_ip == "None" or "None" in texts:
        return _ignored(metadata, "headless: clusterIP is None, clients connect to pods directly")
    if not texts:
        return _ignored(metadata, "no cluster IP yet")
    said = _Complaints()
    if kind not in _SERVICE_TYPES:
        said.add("spec.type", f"{shown(kind)} is not one of {', '.join(sorted(_SERVICE_TYPES))}")
        kind = "ClusterIP"
    wanted = said.few(spec.ports or [], "spec.ports", _MAX_PORTS)
    ports, about_ports = _ports(wanted, _service_ports, _known_service_ports)
    said += about_ports
    ours = metadata.annotations
    annotated: dict[str, Any] = {}
    if ours is not None and ours != _NO_ANNOTATIONS:
        annotated = {
            "algorithm": said.part("", _algorithm, ours.algorithm),
            "weights": said.part((), _weights, ours.weights, said),
            "probe": said.part(None, _probe, ours.probe),
            "slow_start": said.part(0.0, _slow_start, ours.slow_start),
            "reset_gone": said.part(None, _truth, ours.reset_gone, RESET_GONE),
        }
    labels = spec.selector if isinstance(spec.selector, dict) else {}
    return model.Service(
        namespace=namespace,
        name=name,
        type=kind,
        cluster_ips=_cluster_ips(spec, said),
        external_ips=tuple(said.each(_outer_address, spec.external_ips, "spec.externalIPs")),
        load_balancer_ips=_load_balancer_ips(wire.status, said),
        source_ranges=_source_ranges(spec.load_balancer_source_ranges, said),
        ports=ports,
        external_local=_is_local(spec.external_traffic_policy, "spec.externalTrafficPolicy", said),
        internal_local=_is_local(spec.internal_traffic_policy, "spec.internalTrafficPolicy", said),
        affinity_seconds=_affinity(spec, said),
        health_check_node_port=said.part(0, _optional_port, spec.health_check_node_port, "spec.healthCheckNodePort"),
        traffic_distribution=spec.traffic_distribution or "",
        created=metadata.creation_timestamp or "",
        selector=",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        complaints=said.texts(),
        **annotated,
    )


def _cluster_ips(spec: _ServiceSpec, said: _Complaints) -> tuple[str, ...]:
    """Returns one address of each family at most; `clusterIP` repeats the first of `clusterIPs`."""
    if not spec.cluster_ips:
        return (_address(spec.cluster_ip, "spec.clusterIP"),)
    if len(spec.cluster_ips) == 1 and spec.cluster_ips[0] == spec.cluster_ip:
        return (_address(spec.cluster_ip, "spec.clusterIPs[0]"),)
    found: dict[int, str] = {}
    for address in said.each(_address, spec.cluster_ips, "spec.clusterIPs"):
        if found.setdefault(family_of(address), address) != address:
            said.add("spec.clusterIPs", f"{shown(address)}: one address of each family is possible")
    if not found:
        _fail("spec.clusterIPs", f"{shown(spec.cluster_ips)}: none is an address of a Service")
    if spec.cluster_ip and spec.cluster_ip != spec.cluster_ips[0]:
        said.add("spec.clusterIP", f"{shown(spec.cluster_ip)} differs from spec.clusterIPs[0], which counts")
    return tuple(found.values())


# Sources that no packet has.
_NOBODY: Final = {4: "0.0.0.0/32", 6: "::/128"}


def _source_ranges(texts: list[str | None] | None, said: _Complaints) -> tuple[str, ...]:
    """A range that cannot be read admits nobody, where kube-proxy serves everybody if no other one is there.

    It restricts the family that it seems to have been written for, or both.
    """
    if not texts:
        return ()
    field = "spec.loadBalancerSourceRanges"
    given = [text for text in texts if text and text.strip()] or [""]
    found: dict[str, None] = {}
    for index, text in enumerate(said.few(given, field, _MAX_ADDRESSES)):
        cidr = said.part("", _cidr, text, f"{field}[{index}]")
        families = (6,) if ":" in text else (4,) if "." in text else (4, 6)
        found |= dict.fromkeys([cidr] if cidr else [_NOBODY[family] for family in families])
    return tuple(found)


def _load_balancer_ips(status: _ServiceStatus | None, said: _Complaints) -> tuple[str, ...]:
    """Returns those with ipMode VIP, the default; otherwise traffic must leave the node (KEP-1860)."""
    wire = status.load_balancer.ingress if status and status.load_balancer else None
    if not wire:
        return ()
    vips = [ingress.ip if ingress and ingress.ip_mode in (None, "", "VIP") else None for ingress in wire]
    return tuple(said.each(_address, vips, "status.loadBalancer.ingress"))


_AnyPort = TypeVar("_AnyPort", model.ServicePort, model.EndpointPort)
_Ports = tuple[tuple[_AnyPort, ...], tuple[str, ...]]  # with complaints
_WirePorts = tuple[tuple[str | None, str | None, int | None, int | None], ...]  # name, protocol, port, node port
_Check = Callable[[_WirePorts], _Ports[_AnyPort]]
_FEW_PORTS: Final = 8


def _ports(wire: list[_Port | None], check: _Check[_AnyPort], known: _Check[_AnyPort]) -> _Ports[_AnyPort]:
    """Most objects of a cluster have one of a few sets of ports: `known` checks, and keeps, each of these once."""
    ports = [item or _NO_PORT for item in wire]
    taken = tuple([(port.name, port.protocol, port.port, port.node_port) for port in ports])
    return known(taken) if len(ports) <= _FEW_PORTS else check(taken)


def _service_ports(wire: _WirePorts) -> _Ports[model.ServicePort]:
    said = _Complaints()
    names: set[str] = set()
    numbers: set[tuple[str, int, int]] = set()
    ports = []
    for index, (name, protocol, port, node_port) in enumerate(wire):
        made = said.part(None, _checked_port, model.ServicePort, name, protocol, port, f"spec.ports[{index}]")
        if made is None:
            continue
        if made.name in names:
            said.add(f"spec.ports[{index}].name", f"{shown(made.name)} is the name of two ports")
            continue
        if ("port", made.protocol, made.port) in numbers:
            said.add(f"spec.ports[{index}].port", f"{made.port}/{made.protocol.name} is there twice")
            continue
        field = f"spec.ports[{index}].nodePort"
        number = said.part(0, _optional_port, node_port, field)
        if number and ("nodePort", made.protocol, number) in numbers:
            said.add(field, f"{number}/{made.protocol.name} is there twice")
            number = 0
        names.add(made.name)
        numbers |= {("port", made.protocol, made.port), ("nodePort", made.protocol, number)}
        ports.append(model.ServicePort(made.name, made.protocol, made.port, number) if number else made)
    return tuple(ports), said.texts()


def _checked_port(
    make: type[_AnyPort], name: str | None, protocol: str | None, port: int | None, field: str
) -> _AnyPort | None:
    return make(
        _optional_name(name, f"{field}.name"), _protocol(protocol, f"{field}.protocol"), _port(port, f"{field}.port")
    )


def _affinity(spec: _ServiceSpec, said: _Complaints) -> int:
    if spec.session_affinity in (None, "", "None"):
        return 0
    if spec.session_affinity != "ClientIP":
        said.add("spec.sessionAffinity", f"{shown(spec.session_affinity)} is not None or ClientIP")
        return 0
    config = spec.session_affinity_config
    seconds = config.client_ip.timeout_seconds if config and config.client_ip else None
    if seconds is None or 1 <= seconds <= _MAX_AFFINITY:
        return _DEFAULT_AFFINITY if seconds is None else seconds
    field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
    said.add(field, f"{shown(seconds)} is not within 1 to {_MAX_AFFINITY}: {_DEFAULT_AFFINITY} counts")
    return _DEFAULT_AFFINITY


def _annotation(value: object, name: str) -> str:
    """Returns the text of an annotation, empty where there is none."""
    if value is UNSET or value is None:
        return ""
    if not isinstance(value, str):
        _fail(f"metadata.annotations[{name}]", f"expected a text, got {shown(value)}")
    return value


def _algorithm(value: object) -> str:
    text = _annotation(value, ALGORITHM)
    if text and text not in CHOICES:
        _fail(f"metadata.annotations[{ALGORITHM}]", f"{shown(text)} is not one of {', '.join(CHOICES)}")
    return text


def _weights(value: object, said: _Complaints) -> tuple[tuple[str, int], ...]:
    """Returns the weights of endpoints by address, as in `10.0.1.5=3, fd00::6=0`, sorted; of those that can be read."""
    text = _annotation(value, WEIGHTS)
    field = f"metadata.annotations[{WEIGHTS}]"
    found: dict[str, int] = {}
    for address, number in said.each(
        _address_weight, [item.strip() for item in text.split(",")] if text else (), field
    ):
        if address in found:
            said.add(field, f"{address} is there twice, and the first one counts")
        found.setdefault(address, number)
    return tuple(sorted(found.items()))


def _address_weight(item: str, field: str) -> tuple[str, int]:
    address, equals, number = (part.strip() for part in item.partition("="))
    if not equals:
        _fail(field, f"{shown(item)} is not ADDRESS=WEIGHT, such as 10.0.1.5=3")
    address = _outer_address(address, field)
    if not re.fullmatch(r"[0-9]{1,4}", number) or int(number) > _MAX_WEIGHT:
        _fail(field, f"{shown(number)} is not a weight (0 to {_MAX_WEIGHT}) for {address}")
    return address, int(number)


def _probe(value: object) -> Probe | None:
    """Reads `tcp`, or `http:` and a path; None: there is no such annotation."""
    text = _annotation(value, PROBE).strip()
    if text == "tcp" or value is UNSET:
        return Probe() if text else None
    kind, _, path = text.partition(":")
    if kind != "http" or not re.fullmatch(r"/[!-~]{0,1023}", path):
        _fail(f"metadata.annotations[{PROBE}]", f"{shown(value)} is not tcp or http:/PATH, such as http:/healthz")
    return Probe(path)


def _slow_start(value: object) -> float:
    """Returns the seconds of a duration such as 1m30s; empty: 0."""
    text = _annotation(value, SLOW_START).strip()
    parts = re.findall(r"([0-9]{1,6})(ms|s|m|h)", text)
    found = sum(int(number) * _UNITS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or found > _MAX_SLOW_START:
        problem = f"{shown(text)} is not a duration, such as 30s or 2m (at most {_MAX_SLOW_START // 60}m)"
        _fail(f"metadata.annotations[{SLOW_START}]", problem)
    return found


def _truth(value: object, name: str) -> bool | None:
    """Reads `true` or `false`; None: there is no such annotation."""
    text = _annotation(value, name).strip()
    if text in ("true", "false") or value is UNSET:
        return text == "true" if text else None
    _fail(f"metadata.annotations[{name}]", f"{shown(value)} is not true or false")


def _slice_weight(wire: _Annotations) -> int | None:
    """Returns the weight of a slice's endpoints, None where none is given."""
    name, text = (WEIGHT, wire.weight) if wire.weight is not UNSET else (CILIUM_WEIGHT, wire.cilium_weight)
    if text is UNSET or text is None:
        return None
    if isinstance(text, str) and re.fullmatch(r"\s*[0-9]{1,5}\s*", text) and int(text) <= _MAX_SLICE_WEIGHT:
        return int(text)
    problem = f"{shown(text)} is not a weight (0 to {_MAX_SLICE_WEIGHT}): the endpoints have weight 1"
    _fail(f"metadata.annotations[{name}]", problem)


def _slice(wire: _EndpointSlice) -> model.EndpointSlice | model.Ignored:
    metadata = wire.metadata or _NO_META
    namespace, name = _namespaced(metadata)
    labels = metadata.labels
    if labels is None or not labels.service:
        return _ignored(metadata, "no label kubernetes.io/service-name: it belongs to no service")
    if labels.headless is not UNSET:
        return _ignored(metadata, "label service.kubernetes.io/headless: clients connect to pods directly")
    if wire.address_type == "FQDN":
        return _ignored(metadata, "addressType FQDN: names are not proxied")
    if wire.address_type not in ("IPv4", "IPv6"):
        problem = f"{shown(wire.address_type)} is not IPv4, IPv6 or FQDN" if wire.address_type else "missing"
        _fail("addressType", problem)
    family = 4 if wire.address_type == "IPv4" else 6
    service = _checked_name(labels.service, "metadata.labels[kubernetes.io/service-name]")
    said = _Complaints()
    endpoints = said.few(wire.endpoints or [], "endpoints", _MAX_ENDPOINTS)
    few = min(_MAX_PORTS, _MAX_BACKENDS // max(1, len(endpoints)))
    ports, about_ports = _ports(said.few(wire.ports or [], "ports", few), _slice_ports, _known_slice_ports)
    said += about_ports
    return model.EndpointSlice(
        namespace,
        name,
        intern(f"{namespace}/{service}"),
        family,
        ports,
        _endpoints(endpoints, family, said),
        said.part(None, _slice_weight, metadata.annotations) if metadata.annotations else None,
        said.texts(),
    )


def _slice_ports(wire: _WirePorts) -> _Ports[model.EndpointPort]:
    """Returns the ports with a number; one without means "all ports", which no proxy can join to a service port."""
    said = _Complaints()
    ports = [
        said.part(None, _checked_port, model.EndpointPort, name, protocol, number, f"ports[{index}]")
        for index, (name, protocol, number, _) in enumerate(wire)
        if number is not None
    ]
    return tuple([port for port in ports if port is not None]), said.texts()


_known_service_ports, _known_slice_ports = lru_cache(4096)(_service_ports), lru_cache(4096)(_slice_ports)


def _endpoints(wire: list[_Endpoint | None], family: int, said: _Complaints) -> tuple[model.Endpoint, ...]:
    """The hot loop: a cluster has a hundred times more endpoints than anything else.

    Only the first address of an endpoint is ever used; an endpoint without any, or with one that is none, is skipped.
    """
    address_family = AF_INET if family == 4 else AF_INET6
    odd = _ODD[family]
    found = []
    for index, endpoint in enumerate(wire):
        if endpoint is None or not endpoint.addresses:
            continue
        address = endpoint.addresses[0]
        try:
            packed = inet_pton(address_family, address)
        except (OSError, ValueError):
            packed = _IN_DOUBT
        if packed[0] in odd:
            address = said.part("", _endpoint_address, address, index, family)
            if not address:
                continue
        elif family == 6:
            address = inet_ntop(AF_INET6, packed)
        node = endpoint.node_name
        if node and len(node) > _MAX_NAME:
            node = said.part("", _checked_name, node, f"endpoints[{index}].nodeName")
        node = intern(node) if node else None
        conditions, hints = endpoint.conditions, endpoint.hints
        if conditions is None and hints is None:
            found.append(model.Endpoint(address, node))
            continue
        ready = serving = True
        terminating = False
        if conditions is not None:  # nil ready and nil serving mean true, nil terminating false: each on its own
            ready = conditions.ready is not False
            serving = conditions.serving is not False
            terminating = conditions.terminating is True
        if hints is None:
            found.append(model.Endpoint(address, node, ready, serving, terminating))
        else:
            zones, nodes = _hint_names(hints.for_zones), _hint_names(hints.for_nodes)
            found.append(model.Endpoint(address, node, ready, serving, terminating, zones, nodes))
    return tuple(found)


def _endpoint_address(text: str, index: int, family: int) -> str:
    field = f"endpoints[{index}].addresses[0]"
    address = _address(text, field, link_local=True)
    if family_of(address) != family:
        _fail(field, f"{shown(text)} is not an IPv{family} address, but addressType is IPv{family}")
    return address


def _hint_names(hints: list[_Hint | None] | None) -> tuple[str, ...]:
    return _shared(tuple([hint.name[:_MAX_NAME] for hint in hints if hint and hint.name])) if hints else ()


def _node(wire: _Node) -> model.Node:
    metadata = wire.metadata or _NO_META
    spec = wire.spec or _NO_NODE_SPEC
    name = _checked_name(metadata.name, "metadata.name")
    said = _Complaints()
    zone = metadata.labels.zone if metadata.labels else None
    tainted = any(taint and taint.key == "ToBeDeletedByClusterAutoscaler" for taint in spec.taints or ())
    return model.Node(
        name=name,
        addresses=_node_addresses(wire.status, said),
        pod_cidrs=tuple(said.each(_cidr, spec.pod_cidrs or [spec.pod_cidr], "spec.podCIDRs")),
        zone=said.part("", _optional_name, zone, "metadata.labels[topology.kubernetes.io/zone]"),
        eligible=not metadata.deletion_timestamp and not tainted,
        complaints=said.texts(),
    )


def _node_addresses(status: _NodeStatus | None, said: _Complaints) -> tuple[str, ...]:
    """Returns InternalIPs, then ExternalIPs: the order in which kube-proxy looks for the node's IP.

    A kubelet reports no address that nobody else can reach (its validateNodeIP).
    """
    wire = status.addresses or () if status else ()
    found: list[str] = []
    for kind in ("InternalIP", "ExternalIP"):
        texts = [item.address if item and item.type == kind else None for item in wire]
        found += said.each(_outer_address, texts, "status.addresses")
    return tuple(dict.fromkeys(found))


def _service_cidr(wire: _ServiceCIDR) -> model.ServiceCIDR:
    name = _checked_name(wire.metadata.name if wire.metadata else None, "metadata.name")
    said = _Complaints()
    found = said.each(_cidr, wire.spec.cidrs if wire.spec else None, "spec.cidrs")
    return model.ServiceCIDR(name, tuple(found), said.texts())


# ------------------------------------------------------------------------------------------- the two doors


_KINDS: Final[dict[str, tuple[msgspec.json.Decoder[Any], Callable[[Any], model.Object | model.Ignored]]]] = {
    "Service": (msgspec.json.Decoder(_Service), _service),
    "EndpointSlice": (msgspec.json.Decoder(_EndpointSlice), _slice),
    "Node": (msgspec.json.Decoder(_Node), _node),
    "ServiceCIDR": (msgspec.json.Decoder(_ServiceCIDR), _service_cidr),
}


def decode(kind: str, given: object, proxy_name: str | None = None) -> model.Object | model.Ignored:
    """Reads one object from its JSON, or from plain dicts and lists, as YAML gives it.

    Args:
        kind: one of `controller.kubernetes.model.KINDS`; the API leaves it out of the items of a list.
        given: the JSON of the object alone, UTF-8; or the object.
        proxy_name: Services with another value of the label `PROXY_NAME` are ignored, None: those with any.

    Raises:
        Refused: it is malformed; names object, field and value.
    """
    decoder, build = _KINDS[kind]
    try:
        wire = decoder.decode(given) if isinstance(given, bytes | msgspec.Raw) else msgspec.convert(given, decoder.type)
        other = _of_another_proxy(wire, proxy_name) if kind == "Service" else None
        return build(wire) if other is None else other
    except _BadError as error:
        raise Refused(kind, _key_of(kind, _untyped(given)), *error.args) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(kind, error, _untyped(given)) from error


def _untyped(given: object) -> object:
    """Returns the object without any types, for messages; UNSET when it is not JSON at all."""
    try:
        return msgspec.json.decode(given) if isinstance(given, bytes | msgspec.Raw) else given
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return UNSET


UNNAMED: Final = "(unnamed)"


def _key_of(kind: str, document: object) -> str:
    """Returns the best key that a malformed document allows."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    metadata = metadata if isinstance(metadata, dict) else {}
    name, namespace = metadata.get("name"), metadata.get("namespace")
    name = name[:_MAX_NAME] if isinstance(name, str) and name else UNNAMED
    if kind not in ("Service", "EndpointSlice"):
        return name
    return f"{namespace[:_MAX_NAME] if isinstance(namespace, str) and namespace else 'default'}/{name}"


# Patterns are texts: few runs meet an error, and compiling costs more of a short run than anything else here.
_AT: Final = r"(?s)(?P<what>.*?) - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$"
_EXPECTED: Final = r"Expected `(?P<types>[^`]+)`, got `[^`]+`"
_STEP: Final = r"\[(\d+)\]|\.?([^.\[\]]+)"
_TYPE_NAMES: Final = {
    "int": "a whole number", "str": "a text", "bool": "true or false", "array": "a list", "object": "a mapping",
}  # fmt: skip


def _refusal(kind: str, error: Exception, document: object) -> Refused:
    """Turns msgspec's error into field, value and a message in plain English."""
    key = _key_of(kind, document)
    if isinstance(error, RecursionError):
        return Refused(kind, key, "", "nested too deeply")
    text = str(error)
    match = re.match(_AT, text)
    path = match["path"] if match else ""
    if match and match["key"]:  # YAML alone can say this
        return Refused(kind, key, path, "a key that is not a text; write it in quotes")
    expected = re.match(_EXPECTED, text)
    if document is UNSET or not expected:
        return Refused(kind, key, path, match["what"] if match else f"not JSON: {text}")
    types = [_TYPE_NAMES.get(name, name) for name in expected["types"].split(" | ") if name != "null"]
    return Refused(kind, key, path, f"expected {' or '.join(types)}, got {shown(_value_at(document, path))}")


def _value_at(document: object, path: str) -> object:
    value = document
    for index, name in re.findall(_STEP, path):
        try:
            value = value[int(index)] if index else value[name]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return value
    return value
