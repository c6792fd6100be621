"""PURE. Translates a service port into the relay's row and into redirections of its frontends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hybrid_proxy.dataplane import table
from hybrid_proxy.dataplane.modes.userspace.messages import Keep, Network, Port, Row


class Redirect(NamedTuple):
    """Leads clients of one side from a frontend to a proxy port (index into `Row.ports`), or to a verdict.

    `address` is None for node ports, which are served at every node-port address.
    """

    side: str  # "internal" or "external"
    address: str | None
    port: int
    target: int | table.WhenEmpty


class Lowered(NamedTuple):
    """One service port: the relay's row, and what the rules need.

    The row is None when no client reaches it. UDP always has one, so that sessions go on.
    """

    row: Row | None
    redirects: tuple[Redirect, ...]
    cluster_ips: tuple[str, ...]
    firewalled: tuple[tuple[str, int, tuple[str, ...]], ...]  # address, port, source ranges


def row_key(entry: table.Entry) -> str:
    """Returns the key of a service port in this mode."""
    return f"{entry.name}/{entry.protocol.name}/{entry.family}"


def lower(entry: table.Entry, node: table.NodeNetwork) -> Lowered:
    """Translates one service port for this node."""
    routes: list[table.BackendSet] = []
    ports: list[Port] = []
    redirects: list[Redirect] = []
    firewalled: list[tuple[str, int, tuple[str, ...]]] = []
    cluster_ips: list[str] = []
    for frontend in entry.frontends:
        if frontend.kind is table.Kind.CLUSTER_IP and frontend.address is not None:
            cluster_ips.append(frontend.address)
        if frontend.source_ranges is not None:
            ranges = tuple(table.disjoint(frontend.source_ranges))
            firewalled += [(at, frontend.port, ranges) for at in _addresses(frontend, entry.family, node)]
        internal, external = entry.backend_sets[frontend.internal], entry.backend_sets[frontend.external]
        keeps = _keeps(frontend, entry.family, node, same=internal.backends == external.backends)
        for side, route, keep in zip(("internal", "external"), (internal, external), keeps, strict=True):
            target = _target(route, keep, routes, ports) if route.backends else route.when_empty
            redirects.append(Redirect(side, frontend.address, frontend.port, target))
    row = None
    if entry.frontends or entry.protocol is table.Protocol.UDP or entry.present is not None:
        row = Row(
            row_key(entry),
            entry.name,
            entry.family,
            int(entry.protocol),
            tuple(tuple((backend.address, backend.port) for backend in route.backends) for route in routes),
            tuple(ports),
            tuple((backend.address, backend.port) for backend in entry.serving),
            entry.affinity_seconds,
            tuple(dict.fromkeys(table.frontend_text(f.address, f.port) for f in entry.frontends)),
            entry.present,
        )
    return Lowered(row, tuple(redirects), tuple(dict.fromkeys(cluster_ips)), tuple(firewalled))


def _target(route: table.BackendSet, keep: Keep, routes: list[table.BackendSet], ports: list[Port]) -> int:
    number = next((n for n, known in enumerate(routes) if known.backends == route.backends), None)
    if number is None:
        routes.append(route)
        number = len(routes) - 1
    want = Port(number, keep)
    if want not in ports:
        ports.append(want)
    return ports.index(want)


def _addresses(frontend: table.Frontend, family: int, node: table.NodeNetwork) -> list[str]:
    if frontend.address is not None:
        return [frontend.address]
    return [address for address in node.node_port_addresses if table.family_of(address) == family]


def _keeps(frontend: table.Frontend, family: int, node: table.NodeNetwork, *, same: bool) -> tuple[Keep, Keep]:
    """Returns whose addresses are kept, of internal and of external clients.

    Where the relay recognises pods by their addresses, one proxy port serves both sides of a ClusterIP.
    """
    pods_kept = not frontend.masquerade & table.Masquerade.POD and node.pods.recognizes(family)
    internal = Keep.ALWAYS if pods_kept else Keep.NEVER
    external = Keep.NEVER if frontend.masquerade & table.Masquerade.EXTERNAL else Keep.ALWAYS
    if not same or internal is external:
        return internal, external
    if pods_kept and not node.pods.interface:
        return Keep.PODS, Keep.PODS
    if not node.pods.recognizes(family):  # the only internal client is the node, whose address is its own either way
        return external, external
    return internal, external


def lower_node(node: table.NodeNetwork, transparent: tuple[int, ...], bridged: Iterable[str] = ()) -> Network:
    """Returns what the relay must know of the node."""
    own = (*node.addresses, *node.primary, *node.loopback)
    return Network(listen_addresses(node), own, node.pods.prefixes, transparent, tuple(sorted(bridged)))


def listen_addresses(node: table.NodeNetwork) -> dict[int, str]:
    """Returns, by family, the address at which the relay listens: the node's primary one, or else any of its own."""
    found: dict[int, str] = {}
    for address in (*node.primary, *node.addresses):
        if not address.lower().startswith("fe80:"):
            found.setdefault(table.family_of(address), address)
    return found
