"""PURE. One service port to what the relay serves and to the elements that lead there."""

from __future__ import annotations

from typing import Final, NamedTuple

from dataplane.modes.userspace.messages import Keep, Network, Port, Row
from dataplane.table import (
    Detect,
    Entry,
    Frontend,
    Kind,
    Masquerade,
    NodeNetwork,
    Protocol,
    Route,
    WhenEmpty,
    disjoint,
    socket_text,
)

__all__ = ["CIDR_DETECTION", "Element", "Lowered", "listen_addresses", "lower", "lower_node", "row_key"]

CIDR_DETECTION: Final = frozenset({Detect.CLUSTER_CIDR, Detect.NODE_CIDR})


class Element(NamedTuple):
    """Where clients of one side find a frontend: a proxy port (index into `Row.ports`), or a refusal.

    `address` None: at every address that serves node ports.
    """

    side: str  # "inside" or "outside"
    address: str | None
    port: int
    target: int | WhenEmpty


class Lowered(NamedTuple):
    """One service port: the relay's row and the elements of the rules.

    The row is None when no route has a backend; datagrams have one all the same, so that their sessions go on.
    """

    row: Row | None
    elements: tuple[Element, ...]
    cluster_ips: tuple[str, ...]
    firewalled: tuple[tuple[str, int, tuple[str, ...]], ...]  # address, port, sources that may pass


def row_key(entry: Entry) -> str:
    """What names a service port everywhere in this mode."""
    return f"{entry.name}/{entry.protocol.name}/{entry.family}"


def lower(entry: Entry, node: NodeNetwork) -> Lowered:
    """The rows of one service port on this node."""
    routes: list[Route] = []
    ports: list[Port] = []
    elements: list[Element] = []
    firewalled: list[tuple[str, int, tuple[str, ...]]] = []
    cluster_ips: list[str] = []
    for frontend in entry.frontends:
        if frontend.kind is Kind.CLUSTER_IP and frontend.address is not None:
            cluster_ips.append(frontend.address)
        if frontend.sources is not None:
            sources = tuple(disjoint(frontend.sources))
            firewalled += [(at, frontend.port, sources) for at in _addresses(frontend, entry.family, node)]
        keeps = _keeps(frontend, entry.family, node)
        for side, route, keep in zip(("inside", "outside"), (frontend.inside, frontend.outside), keeps, strict=True):
            target = _target(route, keep, routes, ports) if route.backends else route.when_empty
            elements.append(Element(side, frontend.address, frontend.port, target))
    row = None
    if ports or entry.protocol is Protocol.UDP:
        row = Row(
            row_key(entry),
            entry.name,
            entry.family,
            int(entry.protocol),
            tuple(tuple((backend.address, backend.port) for backend in route.backends) for route in routes),
            tuple(ports),
            tuple((backend.address, backend.port) for backend in entry.serving),
            entry.affinity_seconds,
            tuple(dict.fromkeys(socket_text(f.address or "*", f.port) for f in entry.frontends)),
        )
    return Lowered(row, tuple(elements), tuple(dict.fromkeys(cluster_ips)), tuple(firewalled))


def _target(route: Route, keep: Keep, routes: list[Route], ports: list[Port]) -> int:
    number = next((n for n, known in enumerate(routes) if known.backends == route.backends), None)
    if number is None:
        routes.append(route)
        number = len(routes) - 1
    want = Port(number, keep)
    if want not in ports:
        ports.append(want)
    return ports.index(want)


def _addresses(frontend: Frontend, family: int, node: NodeNetwork) -> list[str]:
    if frontend.address is not None:
        return [frontend.address]
    return [address for address in node.node_port_addresses if (":" in address) == (family == 6)]


def _keeps(frontend: Frontend, family: int, node: NodeNetwork) -> tuple[Keep, Keep]:
    """Whose address is kept inside and outside.

    Where the relay can tell a pod by its address, one proxy port does for both sides of a ClusterIP.
    """
    pods_kept = not frontend.masquerade & Masquerade.POD and _detects(node, family)
    inside = Keep.ALWAYS if pods_kept else Keep.NEVER
    outside = Keep.NEVER if frontend.masquerade & Masquerade.EXTERNAL else Keep.ALWAYS
    if frontend.inside.backends != frontend.outside.backends or inside is outside:
        return inside, outside
    if pods_kept and node.detect in CIDR_DETECTION:
        return Keep.PODS, Keep.PODS
    if not _detects(node, family):  # inside is the node alone, whose address is its own either way
        return outside, outside
    return inside, outside


def _detects(node: NodeNetwork, family: int) -> bool:
    if node.detect in CIDR_DETECTION:
        return any((":" in cidr) == (family == 6) for cidr in node.pod_cidrs)
    return node.detect is not Detect.NONE and bool(node.pod_interface)


def lower_node(node: NodeNetwork, transparent: tuple[int, ...]) -> Network:
    """What the relay must know of the node."""
    pods = node.pod_cidrs if node.detect in CIDR_DETECTION else ()
    return Network(listen_addresses(node), (*node.addresses, *node.primary), pods, transparent)


def listen_addresses(node: NodeNetwork) -> dict[int, str]:
    """The address of each family that clients are led to: the node's primary, or else any of its own."""
    found: dict[int, str] = {}
    for address in (*node.primary, *node.addresses):
        if not address.lower().startswith("fe80:"):
            found.setdefault(6 if ":" in address else 4, address)
    return found
