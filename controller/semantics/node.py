"""PURE. Decides what is believed about this node: its Node object, its interfaces and its routes.

- The last statement of the Node object holds when the object disappears, or says less (`Cluster.node`). Cloud
  controllers and autoscalers delete Nodes that live, and register them again.
- The primary address is the source of what is masqueraded, so an interface must have it: the first of the Node's
  addresses that one has, else the kernel's own source. The families are independent of each other.
- Node ports are served at the address that the Node reports, even if no interface has it (1:1 NAT), and at that one.
- A service range is not believed where other addresses are inside: those would be dropped, as sources and destinations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address, ip_network

import msgspec

from hybrid_proxy.controller.kubernetes.model import Node
from hybrid_proxy.controller.semantics.entries import (
    LOOPBACK_ADDRESSES,
    NODE_PORT_KEYWORDS,
    DetectLocalMode,
    Settings,
    networks_of,
)
from hybrid_proxy.dataplane.table import NodeNetwork, PodMatch, family_of


class Routes(msgspec.Struct, frozen=True):
    """The kernel's routes.

    `sources` are addresses that packets to other hosts may have, the best of each family first. `networks` are the
    destinations of routes, without default routes, and the next hops of these.
    """

    sources: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()


NO_ROUTES = Routes()


def node_network(
    settings: Settings,
    node: Node | None,
    interface_addresses: tuple[str, ...],
    service_cidrs: tuple[str, ...],
    routes: Routes = NO_ROUTES,
) -> NodeNetwork:
    """Returns the part of the node that a mode must know besides the services.

    Addresses of interfaces are empty when they cannot be read: the Node's addresses replace them then. ClusterIPs come
    from `service_cidrs` (KEP-1880).

    Raises:
        ValueError: an address or CIDR is not one.
    """
    named = _named(settings, node)
    claimed, present = _first_of_each_family(named), _canonical(interface_addresses)
    carried = tuple(a for a in named if a in present)
    primary = _first_of_each_family((*carried, *_canonical(routes.sources), *claimed))
    known = (*(present or named), *primary, *claimed)
    addresses = tuple(sorted({a for a in known if not ip_address(a).is_loopback}))
    wrong = wrong_ranges(settings, node, primary + claimed, service_cidrs, routes)
    return NodeNetwork(
        name=settings.node_name,
        primary=primary,
        addresses=addresses,
        node_port_addresses=_node_port_addresses(settings.node_port_addresses, primary + claimed, addresses),
        loopback=_loopback(settings, addresses),
        pods=_pod_match(settings, node),
        # Alongside another proxy, most addresses that we don't know are its own Services.
        service_cidrs=()
        if settings.proxy_name
        else tuple(cidr for cidr in dict.fromkeys(service_cidrs) if cidr not in wrong),
        masquerade_bit=settings.masquerade_bit,
    )


def _named(settings: Settings, node: Node | None) -> tuple[str, ...]:
    """Returns the addresses that the Node object names; the first of a family counts."""
    said = _canonical((*settings.primary, *(node.addresses if node else ())))
    return tuple(a for a in said if not (ip_address(a).is_unspecified or ip_address(a).is_loopback))


def wrong_ranges(
    settings: Settings, node: Node | None, own: Iterable[str], service_cidrs: Iterable[str], routes: Routes
) -> Mapping[str, str]:
    """Returns the service ranges that contain addresses other than services', with these.

    A range is right next to the pods' range and the node's network, and inside of a larger one, as some clusters have
    it. A route to the range itself, or to a single address inside, may lead to services.
    """
    pods = (*settings.cluster_cidrs, *(node.pod_cidrs if node else ()))
    inside = [(ip_network(a), f"{a}, an address of this node") for a in own]
    inside += [(ip_network(cidr, strict=False), f"{cidr}, where pods are") for cidr in pods]
    inside += [(ip_network(cidr), "every address") for cidr in ("0.0.0.0/0", "::/0")]
    routed = [(ip_network(cidr), f"{cidr}, to which this node has a route") for cidr in routes.networks]
    wrong: dict[str, str] = {}
    for cidr in service_cidrs:
        whole = ip_network(cidr, strict=False)
        for network, what in (*inside, *(each for each in routed if each[0] != whole)):
            if network.version == whole.version and network.subnet_of(whole):  # type: ignore[arg-type]
                wrong.setdefault(cidr, what)
    return wrong


def node_faults(
    settings: Settings, reported: Node | None, unread: str, network: NodeNetwork, node: Node | None,
    interface_addresses: Iterable[str], service_cidrs: Iterable[str], routes: Routes,
) -> Iterator[str]:  # fmt: skip
    """Describes what is missing or wrong, what serves instead, and what to do: a sentence each.

    `reported` is the Node object as it is now, `unread` why it cannot be read (empty: it can), and `network` the result
    of `node_network`.
    """
    name, known = settings.node_name, node or Node(settings.node_name)
    instead = f"the interfaces' addresses serve instead ({', '.join(network.primary) or 'none'})"
    stays = "what it said last stays in use" if node else instead
    if unread:
        yield f"the Node {name} cannot be read, and {stays}: {unread}"
    elif reported is None:
        yield f"there is no Node {name}, and {stays}: have the kubelet register it, or correct --hostname-override"
    else:
        lost = [
            *(["addresses"] if set(known.addresses) - set(reported.addresses) else []),
            *(["podCIDRs"] if set(known.pod_cidrs) - set(reported.pod_cidrs) else []),
            *(["zone"] if known.zone != reported.zone else []),
        ]
        if lost:
            yield (
                f"the Node {name} no longer has its {' and '.join(lost)}, and what it said last stays in use: correct "
                "the Node, or restart the agent if that is meant"
            )
        if not known.addresses:
            yield f"the Node {name} reports no IP address, and {instead}: check the kubelet and the cloud controller"
        if settings.detect is DetectLocalMode.NODE_CIDR and not known.pod_cidrs:
            yield f"the Node {name} has no podCIDRs, and pods count as clients from outside: check --detect-local-mode"
    present = _canonical(interface_addresses)
    for address in _first_of_each_family(_named(settings, node)) if present else ():
        if address not in (*present, *_canonical(settings.primary)):
            serving = next((a for a in network.primary if family_of(a) == family_of(address)), "")
            instead = f"{serving} is the source of what is masqueraded, and node ports are served at both"
            if serving == address:
                instead = "what is masqueraded gets no answer, and there is no other address"
            yield (
                f"no interface has {address}, which the Node {name} reports: {instead}; correct the kubelet's "
                "--node-ip, or set --bind-address"
            )
    yield from node_port_faults(settings, network)
    own = (*network.primary, *_first_of_each_family(_named(settings, node)))
    for cidr, what in wrong_ranges(settings, node, own, service_cidrs, routes).items():
        if not settings.proxy_name:
            yield (
                f"the service range {cidr} is not believed, because it contains {what}: its unallocated addresses are "
                "not dropped; correct the ServiceCIDR"
            )


def pods_outside(settings: Settings, node: Node | None) -> Iterator[str]:
    """Describes podCIDRs that clusterCIDR lacks; only a remark, because some CNIs do not use podCIDRs."""
    ranges = networks_of(settings.cluster_cidrs) if settings.detect is DetectLocalMode.CLUSTER_CIDR else ()
    for cidr in node.pod_cidrs if node else ():
        pods = ip_network(cidr, strict=False)
        same = [each for each in ranges if each.version == pods.version]
        if same and not any(pods.subnet_of(each) for each in same):  # type: ignore[arg-type]
            yield (
                f"clusterCIDR ({', '.join(map(str, same))}) does not contain {cidr}, the Node's podCIDR: if pods have "
                "its addresses, they count as clients from outside"
            )


def node_port_faults(settings: Settings, network: NodeNetwork) -> Iterator[str]:
    """Describes ranges of `node_port_addresses` that leave a family of this node without any node port."""
    for family in (4, 6):
        ranges = [str(each) for each in networks_of(settings.node_port_addresses) if each.version == family]
        have = [address for address in network.addresses if family_of(address) == family]
        served = any(family_of(address) == family for address in network.node_port_addresses + network.loopback)
        if ranges and have and not served:
            yield (
                f"nodePortAddresses ({', '.join(ranges)}) match no IPv{family} address of this node "
                f"({', '.join(have)}), so node ports are served at none: correct the ranges"
            )


def _canonical(addresses: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(ip_address(a)) for a in addresses))


def _first_of_each_family(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns at most one IPv4 and one IPv6 address, in this order."""
    first: dict[int, str] = {}
    for text in texts:
        first.setdefault(family_of(text), text)
    return tuple(first[f] for f in (4, 6) if f in first)


def _pod_match(settings: Settings, node: Node | None) -> PodMatch:
    match settings.detect:
        case DetectLocalMode.CLUSTER_CIDR:
            return PodMatch(_first_of_each_family(settings.cluster_cidrs))
        case DetectLocalMode.NODE_CIDR:
            return PodMatch(_first_of_each_family(node.pod_cidrs if node else ()))
        case DetectLocalMode.BRIDGE_INTERFACE:
            return PodMatch(interface=settings.pod_interface)
        case DetectLocalMode.INTERFACE_PREFIX:
            return PodMatch(interface=settings.pod_interface, by_name_prefix=bool(settings.pod_interface))


def _node_port_addresses(wanted: tuple[str, ...], own: tuple[str, ...], addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the node's addresses that serve node ports to everybody; never loopback and IPv6 link-local."""
    usable = [a for a in map(ip_address, addresses) if not (a.version == 6 and a.is_link_local)]
    keywords = {word for word in wanted if word in NODE_PORT_KEYWORDS} if wanted else {"primary"}
    if "all" in keywords:
        return tuple(map(str, usable))
    networks = networks_of(wanted)
    # A family without a CIDR is not restricted, as in kube-proxy; a keyword is about both.
    limited = {4, 6} if keywords else {n.version for n in networks}
    chosen = own if "primary" in keywords else ()
    return tuple(
        str(a) for a in usable if a.version not in limited or str(a) in chosen or any(a in n for n in networks)
    )


def _loopback(settings: Settings, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the loopback addresses at which this node's own clients find node ports.

    As kube-proxy's iptables mode: without `node_port_addresses`, and where these cover the address; for IPv6 as well as
    for IPv4, in the families of the node's addresses. The keyword `localhost` (KEP-6032) asks for both, whatever
    `localhost_node_ports` says.
    """
    wanted = settings.node_port_addresses
    families = {family_of(a) for a in addresses}
    candidates = tuple(a for a in LOOPBACK_ADDRESSES if family_of(a) in families)
    if "localhost" in wanted:
        return candidates
    if not settings.localhost_node_ports:
        return ()
    if not wanted or "all" in wanted:
        return candidates
    networks = networks_of(wanted)
    limited = {4, 6} if "primary" in wanted else {n.version for n in networks}
    return tuple(a for a in candidates if family_of(a) not in limited or any(ip_address(a) in n for n in networks))
