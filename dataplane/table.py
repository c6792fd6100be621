"""PURE. The service table: what this node does with service traffic, with nothing left to decide.

One frozen value goes from the controller to a mode. It has no traffic policy, no readiness and no zones:
`controller.semantics.entries` has already applied them. Objects of an unchanged service stay the same objects from one
table to the next, so that a comparison is `is`.

Addresses are canonical text (`10.0.0.1`, `fd00::1`), ports are host integers, times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, IntEnum, IntFlag
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network
from itertools import chain
from typing import Final, NamedTuple

import msgspec

NODE_PORT: Final = "node port "  # in listings, which sort it behind addresses


class Protocol(IntEnum):
    """Transport protocols that a Service can name; the value is the IANA number."""

    TCP = 6
    UDP = 17
    SCTP = 132

    @classmethod
    def name_of(cls, number: int) -> str:
        """Returns the name of a protocol; of one that no Service has, its number."""
        return cls(number).name if number in set(cls) else str(number)


class Kind(Enum):
    """The kind of address of a Service that a frontend is."""

    CLUSTER_IP = "ClusterIP"
    EXTERNAL_IP = "externalIP"
    LOAD_BALANCER = "load-balancer IP"
    NODE_PORT = "nodePort"


class WhenEmpty(Enum):
    """The treatment of a packet whose backend set is empty."""

    REJECT = "reject"  # ICMP port unreachable: a TCP client sees ECONNREFUSED at once
    DROP = "drop"  # no answer: the endpoints are elsewhere, clients and load balancers retry there


class Masquerade(IntFlag):
    """The classes of clients whose source address is replaced by the node's."""

    NEVER = 0
    POD = 1
    NODE = 2
    EXTERNAL = 4
    ALWAYS = 7


class Backend(msgspec.Struct, frozen=True, gc=False):
    """One endpoint of one service port.

    `weight` is its share among the backends of a set, for algorithms that weigh. 0: no new connections; such a
    backend is in no set.
    """

    address: str
    port: int
    local: bool = False
    weight: int = 1


class BackendSet(msgspec.Struct, frozen=True, gc=False):
    """The backends that a client may reach, and what happens when there are none.

    If both sets of an entry are empty, the same happens for both. `why` describes the rule that chose these backends.
    """

    backends: tuple[Backend, ...]
    when_empty: WhenEmpty = WhenEmpty.REJECT
    why: str = ""


class Frontend(msgspec.Struct, frozen=True, gc=False):
    """One address and port at which clients find the service port of an `Entry`.

    `internal` and `external` are indexes into `Entry.backend_sets`: the set for pods and this node, and the set for
    clients beyond the cluster. `source_ranges` are the CIDRs of this family that may connect (None: all); packets
    from elsewhere are dropped before anything else is decided (KEP-3866, table `firewall`). `address` is None for a
    node port, which is served at every address in `NodeNetwork.node_port_addresses`.
    """

    kind: Kind
    address: str | None
    port: int
    internal: int
    external: int
    masquerade: Masquerade = Masquerade.NEVER
    source_ranges: tuple[str, ...] | None = None


class Probe(msgspec.Struct, frozen=True):
    """The way in which this node probes the health of backends: a connection, or a request for an HTTP path."""

    path: str | None = None


EntryKey = tuple[str, int, int]  # name, family, protocol


class Entry(msgspec.Struct, frozen=True):
    """One service port of one address family, with all its frontends.

    `backend_sets` holds one or two distinct sets (the cluster's backends and this node's), each used by a frontend, in
    the order in which the frontends first use them. `serving` holds every endpoint that still serves, in a backend set
    or not: established flows to these are left alone (kube-proxy's conntrack rules).
    """

    name: str  # "namespace/service:port"
    family: int  # 4 or 6
    protocol: Protocol
    frontends: tuple[Frontend, ...]
    backend_sets: tuple[BackendSet, ...] = ()
    serving: tuple[Backend, ...] = ()
    affinity_seconds: int = 0  # 0: no session affinity
    algorithm: str = "random"
    probe: Probe | None = None  # None: no health probes; of TCP ports alone
    slow_start: float = 0.0  # seconds in which a new backend comes to its whole weight, see `dataplane.slow_start`
    # Address and port of every endpoint that there is, in whatever condition: connections to one that was there before
    # are reset. None: they are left alone. Of TCP ports alone.
    present: tuple[tuple[str, int], ...] | None = None

    @property
    def key(self) -> EntryKey:
        """The name of a service port of one family."""
        return self.name, self.family, int(self.protocol)


class PodMatch(msgspec.Struct, frozen=True):
    """The property that identifies a packet as a pod's: its source address, or its incoming interface.

    `prefixes` are CIDRs, at most one of each family. `interface` is the name of a bridge whose ports lead to pods, or
    with `by_name_prefix` the prefix of such interfaces' names. A match has one of the two; with neither, pods are
    treated as clients beyond the cluster.
    """

    prefixes: tuple[str, ...] = ()
    interface: str = ""
    by_name_prefix: bool = False

    def prefix(self, family: int) -> str | None:
        for prefix in self.prefixes:
            if family_of(prefix) == family:
                return prefix
        return None

    def recognizes(self, family: int) -> bool:
        """True if pods of this family can be distinguished from other clients."""
        return bool(self.interface) or self.prefix(family) is not None


class NodeNetwork(msgspec.Struct, frozen=True):
    """The part of the node that a mode must know besides the services."""

    name: str = ""
    primary: tuple[str, ...] = ()  # at most one of each family: the source of masqueraded traffic
    addresses: tuple[str, ...] = ()  # every address on the node's interfaces that is not loopback
    node_port_addresses: tuple[str, ...] = ()  # where node ports are served, a subset of the node's addresses
    pods: PodMatch = PodMatch()
    service_cidrs: tuple[str, ...] = ()  # unallocated addresses in these are dropped
    masquerade_bit: int = 14
    loopback: tuple[str, ...] = ()  # 127.0.0.1 and ::1, where this node's own clients alone find node ports, too


class Remembered(NamedTuple):
    """A client's session affinity: the backend of a service port that it had last."""

    entry: EntryKey
    client: str
    backend: str
    port: int


class ServiceTable(msgspec.Struct, frozen=True):
    """The whole table. `changed` names the services that differ from the table with generation `base`.

    At the TCP ports `health_ports` this node itself answers load balancers: modes accept them in the host's firewall
    where kube-proxy does. The first table that a mode gets has `clients` of the former mode. `left_to_node` are
    ClusterIPs that an interface of this node has, each with its Service: no frontend is there.
    """

    services: Mapping[str, tuple[Entry, ...]]
    node: NodeNetwork = NodeNetwork()
    generation: int = 0
    base: int = -1
    changed: frozenset[str] = frozenset()
    health_ports: tuple[int, ...] = ()  # sorted
    clients: tuple[Remembered, ...] = ()
    left_to_node: Mapping[str, str] = {}

    def entries(self, names: Iterable[str] | None = None) -> Iterator[Entry]:
        """Returns all service ports, or those of these services."""
        if names is None:
            return chain.from_iterable(self.services.values())
        return chain.from_iterable(self.services.get(name, ()) for name in names)


EMPTY = ServiceTable(services={})
LOOPBACK = {4: "127.0.0.0/8", 6: "::1/128"}


def service_of(key: EntryKey) -> str:
    """Returns the service that a service port belongs to: `namespace/service` of `namespace/service:port`."""
    return key[0].rpartition(":")[0]


def family_of(address: str) -> int:
    """Returns 4 or 6, the family of the canonical text of an address or CIDR."""
    return 6 if ":" in address else 4


def socket_text(address: str, port: int) -> str:
    """Formats `10.0.0.1:80` or `[fd00::1]:80`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def host_of(text: str) -> str:
    """The address in such a text."""
    return text.rpartition(":")[0].strip("[]")


def frontend_text(address: str | None, port: int) -> str:
    """Formats a frontend for listings. None: a node port, which every address of the node serves."""
    return socket_text(address, port) if address else f"{NODE_PORT}{port}"


def frontend_of(text: str) -> tuple[str | None, int]:
    """Returns the address and port that `frontend_text` formatted."""
    address, _, port = text.removeprefix(NODE_PORT).rpartition(":")
    return address.strip("[]") or None, int(port)


def disjoint(cidrs: Iterable[str]) -> list[str]:
    """Returns the same addresses as ranges without overlaps, as sets of ranges in the kernel require."""
    networks = [ip_network(cidr, strict=False) for cidr in cidrs]
    v4 = [network for network in networks if isinstance(network, IPv4Network)]
    v6 = [network for network in networks if isinstance(network, IPv6Network)]
    return [str(network) for network in (*collapse_addresses(v4), *collapse_addresses(v6))]
