"""PURE. The service table: what this node does with service traffic, with nothing left to decide.

One frozen value goes from the controller to a mode. It has no traffic policy, no readiness and no
zones: those were questions, `controller.semantics.entries` answered them. Objects of an unchanged service
stay the same objects from one table to the next, so that a comparison is `is`.

Addresses are canonical text (`10.0.0.1`, `fd00::1`), ports are host integers, times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum, IntFlag
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network

import msgspec

__all__ = [
    "EMPTY", "Backend", "Detect", "Entry", "Frontend", "Kind", "Masquerade", "NodeNetwork", "Probe", "Protocol",
    "Route", "ServiceTable", "WhenEmpty", "disjoint", "socket_text",
]  # fmt: skip


class Protocol(IntEnum):
    """Transport protocols that a Service can name; the value is the IANA number."""

    TCP = 6
    UDP = 17
    SCTP = 132


class Kind(Enum):
    """Which address of a Service a frontend is."""

    CLUSTER_IP = "ClusterIP"
    EXTERNAL_IP = "externalIP"
    LOAD_BALANCER = "load-balancer IP"
    NODE_PORT = "nodePort"


class WhenEmpty(Enum):
    """What happens to a packet whose route has no backend."""

    REJECT = "reject"  # ICMP port unreachable: a TCP client sees ECONNREFUSED at once
    DROP = "drop"  # silence: the endpoints are elsewhere, clients and load balancers retry there


class Masquerade(IntFlag):
    """The classes of clients whose source address is replaced by the node's."""

    NEVER = 0
    POD = 1
    NODE = 2
    EXTERNAL = 4
    ALWAYS = 7


class Backend(msgspec.Struct, frozen=True, gc=False):
    """One endpoint of one service port.

    `weight` is its share among the backends of a route, for algorithms that weigh. 0: no new connections; such a
    backend is in no route.
    """

    address: str
    port: int
    local: bool = False
    weight: int = 1


class Route(msgspec.Struct, frozen=True):
    """The backends that a client may reach, and what happens when there are none.

    `why` is the rule that chose these backends, as a person would say it.
    """

    backends: tuple[Backend, ...]
    when_empty: WhenEmpty = WhenEmpty.REJECT
    why: str = ""


class Frontend(msgspec.Struct, frozen=True):
    """One address and port at which clients find the service port of an `Entry`.

    `inside` is for pods and this node, `outside` for clients beyond the cluster. `sources` are the
    CIDRs of this family that may connect (None: everybody); others are dropped, and that decision
    comes before any other (KEP-3866, table `firewall`). `address` is None for a node port: it is served
    at every address in `NodeNetwork.node_port_addresses`.
    """

    kind: Kind
    address: str | None
    port: int
    inside: Route
    outside: Route
    masquerade: Masquerade = Masquerade.NEVER
    sources: tuple[str, ...] | None = None


class Probe(msgspec.Struct, frozen=True):
    """How this node asks backends whether they are well: by a connection, or by a request for an HTTP path."""

    path: str | None = None


class Entry(msgspec.Struct, frozen=True):
    """One service port of one address family, with all its frontends.

    All routes of the frontends are one of at most two distinct ones (the cluster's backends and this
    node's). `serving` holds every endpoint that still serves, used by a route or not: established
    flows to these are left alone (kube-proxy's conntrack rules).
    """

    name: str  # "namespace/service:port"
    family: int  # 4 or 6
    protocol: Protocol
    frontends: tuple[Frontend, ...]
    serving: tuple[Backend, ...] = ()
    affinity_seconds: int = 0  # 0: no session affinity
    algorithm: str = "random"
    probe: Probe | None = None  # None: nobody asks; of TCP ports alone

    def routes(self) -> list[Route]:
        """The distinct routes of the frontends, in their order."""
        found: list[Route] = []
        for frontend in self.frontends:
            for route in (frontend.inside, frontend.outside):
                if route not in found:  # the same one, or an equal one
                    found.append(route)
        return found


class Detect(Enum):
    """How a packet's source is recognised as a pod of the cluster."""

    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_PREFIX = "InterfaceNamePrefix"
    NONE = ""  # not implemented: pods are not told apart


class NodeNetwork(msgspec.Struct, frozen=True):
    """What a mode must know of this node besides the services."""

    name: str = ""
    primary: tuple[str, ...] = ()  # at most one of each family: the source of masqueraded traffic
    addresses: tuple[str, ...] = ()  # every address on the node's interfaces that is not loopback
    node_port_addresses: tuple[str, ...] = ()  # where node ports are served, a subset of the node's addresses
    detect: Detect = Detect.NONE
    pod_cidrs: tuple[str, ...] = ()  # at most one of each family, for the two CIDR kinds of detection
    pod_interface: str = ""  # bridge name or interface prefix, for the other two
    service_cidrs: tuple[str, ...] = ()  # unallocated addresses in these are dropped
    masquerade_bit: int = 14


class ServiceTable(msgspec.Struct, frozen=True):
    """Everything. `changed` names the services that differ from the table with generation `base`.

    At the TCP ports `health_ports` this node itself answers load balancers: where kube-proxy lets them through the
    host's firewall, so does the mode of that name.
    """

    services: Mapping[str, tuple[Entry, ...]]
    node: NodeNetwork = NodeNetwork()
    generation: int = 0
    base: int = -1
    changed: frozenset[str] = frozenset()
    health_ports: tuple[int, ...] = ()  # sorted


EMPTY = ServiceTable(services={})


def socket_text(address: str, port: int) -> str:
    """`10.0.0.1:80` or `[fd00::1]:80`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def disjoint(cidrs: Iterable[str]) -> list[str]:
    """The same addresses as ranges without overlaps, which is all that a set of ranges in the kernel can hold."""
    networks = [ip_network(cidr, strict=False) for cidr in cidrs]
    v4 = [network for network in networks if isinstance(network, IPv4Network)]
    v6 = [network for network in networks if isinstance(network, IPv6Network)]
    return [str(network) for network in (*collapse_addresses(v4), *collapse_addresses(v6))]
