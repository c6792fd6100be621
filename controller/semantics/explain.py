"""PURE. Explains the treatment of one packet on this node.

Walks the table that a mode programs; nothing is decided here a second time. Destinations are looked up in an index that
is built once for each table, so that thousands of packets are quick.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property, lru_cache, partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final, Literal, NamedTuple

import msgspec

from hybrid_proxy.dataplane.balancing import find
from hybrid_proxy.dataplane.reports import some
from hybrid_proxy.dataplane.table import (
    BackendSet,
    Entry,
    Frontend,
    Kind,
    Masquerade,
    Protocol,
    ServiceTable,
    WhenEmpty,
    socket_text,
)

SourceClass = Literal["pod", "node", "external"]
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_CLASSES: Final[tuple[SourceClass, ...]] = ("pod", "node", "external")
_PROTOCOLS: Final = {"tcp": Protocol.TCP, "udp": Protocol.UDP, "sctp": Protocol.SCTP}
_PORTLESS: Final = ("icmp", "icmpv6")

# What each verdict means, as the end of a sentence about the packet.
MEANINGS: Final = {
    "dnat": "goes to a backend",
    "reject": "is rejected at once",
    "drop": "is dropped without an answer",
    "untouched": "is not changed",
}

_BIT: Final = {"pod": Masquerade.POD, "node": Masquerade.NODE, "external": Masquerade.EXTERNAL}


class Packet(msgspec.Struct, frozen=True):
    """The first packet of a flow as this node sees it.

    `protocol` is `tcp`, `udp`, `sctp`, `icmp` or `icmpv6` in any case; `port` has no meaning for the last two.
    `source_class` says what the source is if its address alone does not show it.
    """

    name: str
    src: str
    dst: str
    port: int
    protocol: str
    source_class: SourceClass | None = None


class Verdict(msgspec.Struct, frozen=True):
    """The verdict on a packet.

    `backends` are the candidates as `ip:port`, `service` is the entry's name. `masquerade`: the source address becomes
    the node's, whichever candidate is chosen. `rule` is what keeps the packet from a backend, `why` its clause; of a
    packet to a `backend` itself, its service port.
    """

    name: str
    verdict: Literal["dnat", "reject", "drop", "untouched"]
    reason: str
    backends: tuple[str, ...] = ()
    masquerade: bool = False
    service: str | None = None
    rule: Literal["", "source-ranges", "no-backend", "backend"] = ""
    why: str = ""


def left_text(address: str, service: str, unheard: Collection[str] = ()) -> str:
    """Describes a ClusterIP in `ServiceTable.left_to_node`; at those in `unheard` nothing listens."""
    what = "nothing listens at its ports" if address in unheard else "what listens there gets the packets"
    return f"{address}, the ClusterIP of {service}, is on an interface of this node: {what}"


def meant_by(port: int, entries: Collection[Entry], address: str = "") -> str:
    """Tells what a number is of a service that has no such port, or not for the protocol that was asked for."""
    there = {each.address: e.protocol.name.lower() for e in entries for each in e.frontends if each.port == port}
    if address in there:
        return f" (`--to {socket_text(address, port)}/{there[address]}` asks for that)"
    if None in there:
        return f" ({port} is its node port)"
    return f" ({port} is its targetPort)" * any(each.port == port for e in entries for each in e.serving)


def verdict_to_dict(verdict: Verdict) -> dict[str, Any]:
    """Returns the row of `explain -o json`."""
    shown = ("name", "verdict", "backends", "masquerade", "service", "reason")
    return {name: getattr(verdict, name) for name in shown} | {"backends": list(verdict.backends)}


def packet_from_dict(row: Mapping[str, Any]) -> Packet:
    """Returns a packet from one row of a flows file: name, src, dst, port, proto, src_class (optional).

    Raises:
        ValueError: a field is missing or cannot be used; names the row and the field.
    """
    name = str(row.get("name", ""))
    proto = str(row.get("proto", "")).lower()
    if proto not in _PROTOCOLS and proto not in _PORTLESS:
        raise ValueError(f"flow {name!r}: proto: {row.get('proto')!r} is not tcp, udp, sctp, icmp or icmpv6")
    port = row.get("port", 0 if proto in _PORTLESS else None)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise ValueError(f"flow {name!r}: port: {port!r} is not a number from 0 to 65535")
    source_class = row.get("src_class")
    if source_class is not None and source_class not in _CLASSES:
        raise ValueError(f"flow {name!r}: src_class: {source_class!r} is not pod, node or external")
    addresses = {}
    for field in ("src", "dst"):
        try:
            addresses[field] = str(ip_address(str(row.get(field, "")).strip()))
        except ValueError:
            raise ValueError(f"flow {name!r}: {field}: {row.get(field)!r} is not an IP address") from None
    return Packet(name, addresses["src"], addresses["dst"], port, proto, source_class)


class Destination(NamedTuple):
    """The destination of packets to a service; `left` is about an address of the service that this node has."""

    address: str
    port: int
    protocol: Protocol
    left: str = ""


def destination_of(table: ServiceTable, service: str, port: str, protocol: str, family: int) -> Destination:
    """Returns the address of a service (`namespace/name`), its ClusterIP if it has one; family 0: 4 if it has that.

    The port is a number, also one that the service does not have, or the name of a port; empty: the only one.

    Raises:
        LookupError: there is no such service, or no such port of it; the message says what there is.
    """
    entries = [entry for entry in table.services.get(service, ()) if entry.frontends]
    here = [entry for entry in entries if family in (0, entry.family)]
    left = next((left_text(*pair) for pair in table.left_to_node.items() if pair[1] == service), "")
    if not here:
        text = f"service {service} has no IPv{family} address" if entries else f"no service {service} is served here"
        raise LookupError(": ".join(filter(None, (text, left))))
    here.sort(key=lambda entry: (entry.family, entry.protocol.name.lower() != (protocol or "tcp")))
    known = [(entry, frontend) for entry in here for frontend in entry.frontends if frontend.address is not None]
    if not known:
        raise LookupError(f"service {service} has no address of its own: name a node's address and the node port")
    known.sort(key=lambda one: one[1].kind is not Kind.CLUSTER_IP)
    asked = _PROTOCOLS.get(protocol)
    having = [(entry, frontend) for entry, frontend in known if asked in (None, entry.protocol)]
    if port.isdecimal():
        found = next((one for one in having if one[1].port == int(port)), None)
        entry, frontend = found or known[0]
        default = entry.protocol if found else Protocol.TCP
        return Destination(frontend.address or "", int(port), asked or default, left)
    ports = {entry.name.partition(":")[2]: (entry, frontend) for entry, frontend in reversed(having)}
    chosen = ports.get(port) if port else next(iter(ports.values())) if len(ports) == 1 else None
    if chosen is None:
        there = ", ".join(sorted(f"{frontend.port} ({name})" for name, (_, frontend) in ports.items()))
        raise LookupError(f"which port of {service}? It has {there or f'none of protocol {protocol}'}")
    return Destination(chosen[1].address or "", chosen[1].port, chosen[0].protocol, left)


class Explainer:
    """One table, indexed for questions about packets."""

    def __init__(self, table: ServiceTable) -> None:
        self.table = table
        self._node = node = table.node
        self._at: dict[tuple[str | int, int, int], tuple[Entry, Frontend]] = {}
        self._owner: dict[str, tuple[str, Kind]] = {}  # an address of a service, and its first kind -> service
        for service, entries in table.services.items():
            for entry in entries:
                for frontend in entry.frontends:
                    key = (frontend.address or entry.family, frontend.port, int(entry.protocol))
                    self._at[key] = (entry, frontend)
                    if frontend.address and (frontend.kind is Kind.CLUSTER_IP or frontend.address not in self._owner):
                        self._owner[frontend.address] = service, frontend.kind
        self._own = frozenset((*node.addresses, *node.primary))
        self._node_port_addresses = frozenset(node.node_port_addresses)
        self._loopback = frozenset(node.loopback)
        self._pods: list[Network] = [ip_network(prefix) for prefix in node.pods.prefixes]
        self._service_cidrs: list[Network] = [ip_network(cidr) for cidr in node.service_cidrs]

    def explain(self, packet: Packet) -> Verdict:
        """Returns the verdict on a packet.

        Raises:
            ValueError: an address of it is not one.
        """
        src, dst = ip_address(packet.src), ip_address(packet.dst)
        if src.version != dst.version:
            return Verdict(packet.name, "untouched", f"{src} and {dst} are of different address families.")
        protocol = _PROTOCOLS.get(packet.protocol.lower())
        if protocol is not None:
            found = self._find(str(dst), dst.version, packet.port, protocol, self._classify(packet, src)[0])
            if found is not None:
                return self._at_frontend(packet, src, dst, *found)
        verdict = Verdict(packet.name, *self._elsewhere(packet, dst, protocol))
        is_left = protocol is not None and verdict.verdict == "untouched"
        backend = self._backends.get((str(dst), packet.port, int(protocol or 0))) if is_left else None
        return msgspec.structs.replace(verdict, rule="backend", why=backend) if backend else verdict

    def _find(
        self, dst: str, family: int, port: int, protocol: Protocol, source: SourceClass
    ) -> tuple[Entry, Frontend] | None:
        """Finds the frontend: an address of a service comes before a node port, as in kube-proxy's lookups."""
        found = self._at.get((dst, port, int(protocol)))
        here = self._loopback if source == "node" and protocol is not Protocol.SCTP else ()
        if found is None and (dst in self._node_port_addresses or dst in here):
            found = self._at.get((family, port, int(protocol)))
        return found

    # No frontend

    def _elsewhere(
        self, packet: Packet, dst: Address, protocol: Protocol | None
    ) -> tuple[Literal["reject", "drop", "untouched"], str]:
        text = str(dst)
        what = (
            f"{socket_text(text, packet.port)}/{protocol.name}" if protocol else f"{packet.protocol.upper()} to {dst}"
        )
        if text in self.table.left_to_node:
            return "untouched", f"{what}: {left_text(text, self.table.left_to_node[text])}."
        owner, kind = self._owner.get(text, ("", Kind.NODE_PORT))
        ends = ((f, e.protocol.name) for e in self.table.services.get(owner, ()) for f in e.frontends)
        ports = ", ".join(sorted({f"{f.port}/{name}" for f, name in ends if f.address == text}))
        if kind is Kind.CLUSTER_IP:
            nothing = "the service has no such port" if protocol else "only its ports are served"
            ports += meant_by(packet.port, self.table.services[owner], text) if protocol else ""
            return "reject", f"{what}: {dst} is the ClusterIP of {owner}, and {nothing}; it has {ports}."
        for cidr in self._service_cidrs:
            if dst in cidr and text not in self._own:
                return "drop", f"{what}: {dst} is in the service range {cidr}, but it is no service's ClusterIP."
        other = protocol and self._at.get((dst.version, packet.port, int(protocol)))
        if other and dst.is_loopback:
            reason = f"{what}: {packet.port} is a node port of {other[0].name}, but only TCP and UDP of the node's own"
            where = ", ".join(sorted(self._loopback)) or "no loopback address"
            return "untouched", f"{reason} clients are served at loopback addresses ({where})."
        if other and text in self._own:
            served = ", ".join(a for a in self._node.node_port_addresses if ip_address(a).version == dst.version)
            reason = f"{what}: {packet.port} is a node port of {other[0].name}, but node ports are not served at {dst}"
            return "untouched", f"{reason} (only at {served or 'no address of this family'})."
        if owner and protocol:
            reason = f"{what}: {dst} is the {kind.value} of {owner}, which has {ports} there alone; the packet is left"
            ipvs = "in mode ipvs it is refused, because the address is the node's own there"
            return "untouched", f"{reason} alone ({ipvs})."
        backend = protocol and self._backends.get((text, packet.port, int(protocol)))
        if backend:
            return "untouched", f"{what} is a backend of {backend} itself."
        return "untouched", f"{what} is no address and port of a service: {dst} is {self._whose(packet, dst)}."

    @cached_property
    def _backends(self) -> dict[tuple[str, int, int], str]:
        """The service port of each backend. Few packets are to a backend itself."""
        return {(b.address, b.port, int(e.protocol)): e.name for e in self.table.entries() for b in e.serving}

    def _whose(self, packet: Packet, dst: Address) -> str:
        """Describes an address that no service has, and what near it a service has."""
        if near := {f"{name} (at port {port})" for (at, port, _), name in self._backends.items() if at == str(dst)}:
            return f"a backend of {some(sorted(near))}"
        given, how = self._classify(msgspec.structs.replace(packet, source_class=None), dst)
        ports = [f"{port} ({entry.name})" for (at, port, _), (entry, _) in self._at.items() if at == dst.version]
        more = f"; node ports are {some(sorted(ports))}" if ports and given == "node" else ""
        return f"{_A_CLASS[given]} ({how}{more})"

    # A frontend

    def _at_frontend(self, packet: Packet, src: Address, dst: Address, entry: Entry, frontend: Frontend) -> Verdict:
        given, how = self._classify(packet, src)
        where = f"{socket_text(str(dst), packet.port)}/{entry.protocol.name}"
        says = [f"{where} is the {frontend.kind.value} of {entry.name}."]
        ranges = frontend.source_ranges
        if ranges is not None and not any(src in _range(cidr) for cidr in ranges):
            why = f"{src} is not in {', '.join(ranges)}"
            says.append(f"loadBalancerSourceRanges: {why}.")
            return Verdict(packet.name, "drop", " ".join(says), service=entry.name, rule="source-ranges", why=why)

        # Without detection a pod is an external client to every rule, whatever the caller knows about it.
        told_apart = self._node.pods.recognizes(entry.family)
        acts_as: SourceClass = "external" if given == "pod" and not told_apart else given
        backend_set = entry.backend_sets[frontend.external if acts_as == "external" else frontend.internal]
        says.append(f"The source {src} is {_A_CLASS[given]} ({how}).")
        inside, same = frontend.kind is Kind.CLUSTER_IP, frontend.internal == frontend.external
        if (
            not told_apart
            and given != "node"
            and (frontend.masquerade is not Masquerade.ALWAYS if inside else not same)
        ):
            lacks = (
                f"has no IPv{entry.family} CIDR"
                if self._node.pods.prefixes
                else "is off, or lacks its CIDR or interface"
            )
            says.append(f"Pods are not distinguished from outsiders: detection {lacks}.")
        if not same and acts_as != "external":
            says.append("externalTrafficPolicy Local does not bind pods and this node.")
        if not backend_set.backends:
            return _empty(packet.name, entry, backend_set, says)

        masquerade = bool(frontend.masquerade & _BIT[acts_as])
        says.append(f"Candidates: {backend_set.why}.")
        says += _choice(entry, backend_set)
        if entry.affinity_seconds:
            says.append(f"A client stays with its backend while it is not idle for {entry.affinity_seconds} s.")
        if entry.present is not None:
            says.append("Its connections are reset when the backend's endpoint is gone.")
        selves = sum(1 for backend in backend_set.backends if backend.address == str(src))
        hairpin = bool(selves) and selves == len(backend_set.backends)
        says.append(_masquerade_text(frontend, masquerade, acts_as))
        if hairpin and not masquerade:
            says[-1] = "The source is its own backend: its address is replaced by the node's (hairpin)."
        elif selves and not masquerade:
            says.append("Where the source is chosen as its own backend, its address is replaced (hairpin).")
        return Verdict(
            name=packet.name,
            verdict="dnat",
            reason=" ".join(says),
            backends=tuple(socket_text(b.address, b.port) for b in backend_set.backends),
            masquerade=masquerade or hairpin,
            service=entry.name,
        )

    def _classify(self, packet: Packet, src: Address) -> tuple[SourceClass, str]:
        """Returns the class of the source, and how it is known."""
        if packet.source_class is not None:
            return packet.source_class, "as given"
        if src.is_loopback or str(src) in self._own:
            return "node", "an address of the node"
        for cidr in self._pods:
            if src in cidr:
                return "pod", f"in {cidr}"
        if self._node.pods.interface:
            return "external", "pods are known by their interface, not by an address; give the class to say otherwise"
        return "external", "neither an address of the node nor in a pod range"


_range = lru_cache(4096)(partial(ip_network, strict=False))
_A_CLASS: Final = {"pod": "a pod", "node": "this node", "external": "outside the cluster"}


def _empty(name: str, entry: Entry, backend_set: BackendSet, says: list[str]) -> Verdict:
    drops, why = backend_set.when_empty is WhenEmpty.DROP, backend_set.why
    then = "silence makes clients and load balancers try elsewhere" if drops else "the client is refused at once"
    says.append(f"No backend: {why}; {then}.")
    verdict: Literal["drop", "reject"] = "drop" if drops else "reject"
    return Verdict(name, verdict, " ".join(says), service=entry.name, rule="no-backend", why=why)


def _choice(entry: Entry, backend_set: BackendSet) -> list[str]:
    """Describes what decides among several backends, if it is not random alone."""
    algorithm = find(entry.algorithm)
    description = algorithm.description if algorithm else "a scheduler of mode ipvs"
    reasons = [] if entry.algorithm == "random" else [f"Algorithm {entry.algorithm}: {description}."]
    if len({backend.weight for backend in backend_set.backends}) > 1:
        weights = ", ".join(f"{socket_text(b.address, b.port)} {b.weight}" for b in backend_set.backends)
        reasons.append(f"Weights: {weights}.")
    if unused := [socket_text(b.address, b.port) for b in entry.serving if not b.weight]:
        reasons.append(f"Weight 0, so no new connections: {', '.join(unused)}.")
    if entry.slow_start:
        reasons.append(f"A backend that is new has its whole share after {entry.slow_start:g} s.")
    return reasons


def _masquerade_text(frontend: Frontend, masquerade: bool, acts_as: SourceClass) -> str:
    if not masquerade:
        if frontend.kind is Kind.CLUSTER_IP and frontend.masquerade is Masquerade.NEVER:
            return "The source address stays: nothing to a ClusterIP is masqueraded without detection of pods."
        return "The source address stays."
    if frontend.masquerade is not Masquerade.ALWAYS:
        whom = "this node" if acts_as == "node" else "what is no pod"
        return f"The source address is replaced by the node's (masquerade of {whom})."
    if frontend.kind is Kind.CLUSTER_IP:
        return "The source address is replaced by the node's (masqueradeAll)."
    return "The source address is replaced by the node's, so that replies come back this way (policy Cluster)."
