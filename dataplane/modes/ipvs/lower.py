"""PURE. Lowers one service to virtual servers, elements of sets and addresses.

A frontend is one virtual server at each of its addresses. Where internal and external clients have different backend
sets, it has the internal one, and a second virtual server, named by a firewall mark, has the external one. The set
MARKS says which mark packets of external clients get. All other needs of a frontend (reject, drop, masquerade, source
ranges, hairpin) are memberships in sets that a constant number of rules match (`rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.table import (
    BackendSet,
    Entry,
    Frontend,
    Masquerade,
    NodeNetwork,
    Protocol,
    WhenEmpty,
    family_of,
)
from hybrid_proxy.dataplane.virtual_servers import Config, Destination, Element, Kind, Server, Value

PREFIX: Final = "HPV-"
_SOCKET: Final = Kind("hash:ip,port")
SETS: Final = {
    "SERVERS": Kind("hash:ip,port", comments=True),  # virtual servers that are ours; the name of the service port
    "PORTS": _SOCKET,  # what is served; nothing is at other ports of ADDRESSES
    "ADDRESSES": Kind("hash:ip"),  # addresses that we put on our device
    "REJECT-IN": _SOCKET,  # frontends without a backend for that side (IN: pods and this node)
    "REJECT-OUT": _SOCKET,
    "DROP-IN": _SOCKET,
    "DROP-OUT": _SOCKET,
    "MASQ-POD": _SOCKET,  # the source of that class becomes the node's
    "MASQ-NODE": _SOCKET,
    "MASQ-EXT": _SOCKET,
    "SOURCES": _SOCKET,  # only clients in ALLOWED may connect
    "ALLOWED": Kind("hash:ip,port,net"),
    "HAIRPIN": Kind("hash:ip,port,ip"),  # backends of this node, with themselves as the client
    "MARKS": Kind("hash:ip,port", marks=True),  # the firewall mark of external clients
}
_MASQUERADE: Final = ((Masquerade.POD, "MASQ-POD"), (Masquerade.NODE, "MASQ-NODE"), (Masquerade.EXTERNAL, "MASQ-EXT"))
# The Maglev scheduler hashes the client's port too, as kube-proxy has it (IP_VS_SVC_F_SCHED_MH_PORT).
_SCHEDULER_FLAGS: Final = {"mh": 0x10}

Network = IPv4Network | IPv6Network
Member = tuple[str, Element]  # the set's full name and the element


class Wanted(NamedTuple):
    """A virtual server as it should be.

    `backends` have weights of 1 or more. A removed real server keeps its flows (weight 0) where `lingers`, or while it
    is in `serving`.
    """

    config: Config
    backends: Mapping[Destination, int]
    serving: frozenset[Destination] = frozenset()
    lingers: bool = True


class Lowered(NamedTuple):
    """The kernel objects that one service needs."""

    servers: dict[Server, Wanted]
    members: dict[Member, Value]
    addresses: frozenset[str]


class Node(NamedTuple):
    """The node's part of lowering. `own` are addresses on other interfaces: they are not bound.

    Node ports at `loopback` serve TCP and UDP of this node alone (`rules`).
    """

    families: tuple[int, ...] = (4, 6)
    node_ports: tuple[str, ...] = ()
    loopback: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    excluded: tuple[Network, ...] = ()
    masquerade: int = 1 << 14


def node_of(node: NodeNetwork, families: tuple[int, ...], excluded: Iterable[str]) -> Node:
    """Returns the part of the table's node that lowering needs."""
    return Node(
        families, node.node_port_addresses, node.loopback, frozenset((*node.addresses, *node.primary)),
        tuple(ip_network(cidr, strict=False) for cidr in excluded), 1 << node.masquerade_bit,
    )  # fmt: skip


def set_name(family: int, name: str) -> str:
    return f"{PREFIX}{family}-{name}"


def is_excluded(address: str, node: Node) -> bool:
    """True if virtual servers at that address belong to other software."""
    return bool(node.excluded) and any(ip_address(address) in network for network in node.excluded)


def lower(
    entries: Iterable[Entry],
    node: Node,
    scheduler_of: Callable[[Entry], str],
    mark_of: Callable[[Server], int],
    taken: Collection[tuple[str, int, int]] = (),
) -> Lowered:
    """Lowers one service.

    Args:
        entries: its service ports.
        node: the node's part.
        scheduler_of: the kernel's scheduler for an entry.
        mark_of: a number of its own for each virtual server that treats external clients differently, without the
            masquerade bit; 0: there is none left.
        taken: (address, port, protocol) of addresses of services that are node-port addresses too: they come first.
    """
    lowered = Lowered({}, {}, frozenset())
    bound: set[str] = set()
    for entry in entries:
        if entry.family not in node.families:
            continue
        scheduler = scheduler_of(entry)
        config = Config(scheduler, entry.affinity_seconds, _SCHEDULER_FLAGS.get(scheduler, 0))
        for frontend in entry.frontends:
            for address in _addresses(frontend, entry, node, taken):
                server = Server(entry.family, int(entry.protocol), address, frontend.port)
                _frontend(lowered, entry, frontend, config, server, node, mark_of)
                if frontend.address is not None and address not in node.own:
                    bound.add(address)
                    lowered.members[set_name(entry.family, "ADDRESSES"), Element(address)] = None
        _hairpins(lowered, entry)
    return lowered._replace(addresses=frozenset(bound))


def _addresses(frontend: Frontend, entry: Entry, node: Node, taken: Collection[tuple[str, int, int]]) -> Iterator[str]:
    candidates = node.node_ports if frontend.address is None else (frontend.address,)
    if frontend.address is None and entry.protocol is not Protocol.SCTP:
        candidates += node.loopback
    for address in candidates:
        if family_of(address) != entry.family or is_excluded(address, node):
            continue
        if frontend.address is None and (address, frontend.port, int(entry.protocol)) in taken:
            continue
        yield address


def _frontend(
    lowered: Lowered,
    entry: Entry,
    frontend: Frontend,
    config: Config,
    server: Server,
    node: Node,
    mark_of: Callable[[Server], int],
) -> None:
    internal, external = entry.backend_sets[frontend.internal], entry.backend_sets[frontend.external]
    lowered.servers[server] = _wanted(entry, config, internal)
    element = Element(server.address, server.port, server.protocol)
    names = ["PORTS"]
    for backend_set, side in ((internal, "IN"), (external, "OUT")):
        if not backend_set.backends:
            names.append(f"{'REJECT' if backend_set.when_empty is WhenEmpty.REJECT else 'DROP'}-{side}")
    names += [name for bit, name in _MASQUERADE if frontend.masquerade & bit]
    if frontend.source_ranges is not None:
        names.append("SOURCES")
        for network in _networks(frontend.source_ranges):
            member = set_name(entry.family, "ALLOWED"), element._replace(second=network)
            lowered.members[member] = None
    for name in names:
        lowered.members[set_name(entry.family, name), element] = None
    lowered.members[set_name(entry.family, "SERVERS"), element] = entry.name
    # The policy decides, not the present backends: flows must end with the virtual server that they began at.
    if frontend.internal != frontend.external and (mark := mark_of(server)):
        mark |= node.masquerade if frontend.masquerade & Masquerade.EXTERNAL else 0
        lowered.servers[Server(entry.family, mark=mark)] = _wanted(entry, config, external)
        lowered.members[set_name(entry.family, "MARKS"), element] = mark


def _wanted(entry: Entry, config: Config, backend_set: BackendSet) -> Wanted:
    return Wanted(
        config,
        {Destination(backend.address, backend.port): backend.weight for backend in backend_set.backends},
        frozenset(Destination(backend.address, backend.port) for backend in entry.serving),
        entry.protocol is Protocol.TCP,
    )


def _networks(cidrs: Iterable[str]) -> Iterator[str]:
    """Returns the networks as a set can hold them: a prefix of 0 bits becomes two of one bit."""
    for text in cidrs:
        network = ip_network(text, strict=False)
        for part in network.subnets() if network.prefixlen == 0 else (network,):
            yield str(part)


def _hairpins(lowered: Lowered, entry: Entry) -> None:
    """Returns each backend of this node as its own client. Ready or not: its flows may be older than its state."""
    backends = {*entry.serving, *(backend for backend_set in entry.backend_sets for backend in backend_set.backends)}
    name = set_name(entry.family, "HAIRPIN")
    for backend in backends:
        if backend.local:
            element = Element(backend.address, backend.port, int(entry.protocol), backend.address)
            lowered.members[name, element] = None
