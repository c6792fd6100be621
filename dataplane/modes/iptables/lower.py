"""PURE. Lowers one service port to chains and rules, and builds the chains that every node has.

A packet's way in table nat:

    PREROUTING, OUTPUT -> HP-SERVICES -> a tree over addresses -> HP-SVC-... -> DNAT
                                      -> a tree over node ports

A rule of the tree leads to the service's chain at once where its frontend has no peculiarity. Peculiarities (who is
masqueraded, another backend set for outsiders, source ranges) have a chain of their own before it: HP-EXT-... or HP-
FW-... An endpoint has a chain (HP-SEP-...) only with affinity; otherwise the service's chain translates.

Table filter rejects and drops: a packet that still has a service's address after nat was not translated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.bytecode import same_addresses
from hybrid_proxy.dataplane.modes.iptables.names import (
    ACCEPTED,
    FORWARD,
    MINE,
    POSTROUTING,
    REJECT,
    SERVICES,
    chain,
    comment,
    endpoint_chain,
    identity,
    number,
    service_chains,
)
from hybrid_proxy.dataplane.modes.iptables.tree import Rank
from hybrid_proxy.dataplane.table import (
    BackendSet,
    Entry,
    Frontend,
    Kind,
    Masquerade,
    NodeNetwork,
    WhenEmpty,
    family_of,
    socket_text,
)

Chains = dict[str, tuple[str, ...]]  # name -> rules without `-A NAME`
Leaves = dict[tuple[str, int], tuple[Rank, ...]]  # (tree, key) -> rules

FROM_NODE: Final = "-m addrtype --src-type LOCAL"  # packets of this machine to itself: no other may have such a source
DROP: Final = "-j DROP"
REFUSE: Final = f"-j {REJECT}"


class Able(NamedTuple):
    """The optional matches and targets that one family's iptables has."""

    random_fully: bool = True
    compares: bool = True  # source and destination (match bpf)
    remembers: bool = True  # clients (match recent)
    sctp: bool = True


class Node(NamedTuple):
    """The node's part of the rules of one family, as text."""

    family: int
    bit: str  # the masquerade mark, `0x4000`
    pod: str | None  # the match of a pod's packet, None: pods are not recognized
    port_addresses: tuple[str, ...]
    loopback: tuple[str, ...]
    service_cidrs: tuple[str, ...]
    usual: Masquerade = Masquerade.NEVER  # the clients that most ClusterIPs masquerade: marked once for all of them
    able: Able = Able()
    drop_invalid: bool = True


class Lowered(NamedTuple):
    """The chains and rules of one service port."""

    chains: Chains  # in table nat
    nat: Leaves
    filter: Leaves


def usual_masquerade(entries: Iterable[Entry], node: Node) -> Masquerade:
    """Returns the masquerading that most ClusterIPs share; a guess if there are none. The others have own chains."""
    counts = Counter(f.masquerade for entry in entries for f in entry.frontends if f.kind is Kind.CLUSTER_IP)
    if counts:
        return counts.most_common(1)[0][0]
    return Masquerade.NEVER if node.pod is None else Masquerade.NODE | Masquerade.EXTERNAL


def _in_family(addresses: Iterable[str], family: int) -> tuple[str, ...]:
    return tuple(address for address in addresses if family_of(address) == family)


def node_of(network: NodeNetwork, family: int) -> Node:
    """Returns the node's part of the table as text of rules."""
    pod, prefix = None, network.pods.prefix(family)
    if network.pods.interface:
        pod = f"-i {network.pods.interface}{'+' * network.pods.by_name_prefix}"
    elif prefix:
        pod = f"-s {prefix}"
    return Node(
        family=family,
        bit=hex(1 << network.masquerade_bit),
        pod=pod,
        port_addresses=_in_family(network.node_port_addresses, family),
        loopback=_in_family(network.loopback, family),
        service_cidrs=_in_family(network.service_cidrs, family),
    )


# One service port


def lower(entry: Entry, node: Node) -> Lowered:
    """Returns the chains and rules of one service port."""
    sets = _distinct_sets(entry)
    names = service_chains(entry)
    chains: Chains = {}
    for position, chosen in enumerate(sets):
        chains |= _set_chains(entry, names[position], chosen, node)
    nat: dict[tuple[str, int], list[Rank]] = {}
    refused: dict[tuple[str, int], list[Rank]] = {}
    for frontend in entry.frontends:
        way = _Way(*(_target(entry.backend_sets[n], sets, names) for n in (frontend.internal, frontend.external)))
        place, match = _place(entry, frontend)
        target = _frontend_target(entry, frontend, way, node, chains)
        if target == ACCEPTED and frontend.kind is Kind.CLUSTER_IP:
            target = "-j RETURN"  # there can be no node port at its address, and the mark has to be taken off again
        nat.setdefault(place, []).append((0, f"{match} {comment(entry, frontend)} {target}"))
        for rank in _refusals(entry, frontend, match):
            refused.setdefault(place, []).append(rank)
    return Lowered(chains, {k: tuple(v) for k, v in nat.items()}, {k: tuple(v) for k, v in refused.items()})


class _Way(NamedTuple):
    """Verdicts for internal and for external clients; `-j ACCEPT` for a backend set without backends."""

    internal: str
    external: str


def _distinct_sets(entry: Entry) -> list[BackendSet]:
    """Returns the backend sets of an entry that differ in their backends, at most two; that of ClusterIPs first."""
    found: list[BackendSet] = []
    frontends = sorted(entry.frontends, key=lambda frontend: frontend.kind is not Kind.CLUSTER_IP)
    for frontend in frontends:
        for chosen in (entry.backend_sets[frontend.internal], entry.backend_sets[frontend.external]):
            if chosen.backends and all(chosen.backends != known.backends for known in found):
                found.append(chosen)
    return found


def _target(chosen: BackendSet, sets: list[BackendSet], names: tuple[str, str]) -> str:
    for position, known in enumerate(sets):
        if known is chosen or known.backends == chosen.backends:
            return f"-j {names[position]}"
    return ACCEPTED


def _place(entry: Entry, frontend: Frontend) -> tuple[tuple[str, int], str]:
    """Returns the frontend's tree and key, and the matches that its packets need there."""
    protocol = entry.protocol.name.lower()
    match = f"-p {protocol} -m {protocol} --dport {frontend.port}"
    if frontend.address is None:
        return (entry.protocol.name, frontend.port), match
    bits = 32 if entry.family == 4 else 128
    tree = "C" if frontend.kind is Kind.CLUSTER_IP else "E"
    return (tree, number(frontend.address)), f"-d {frontend.address}/{bits} {match}"


def _frontend_target(entry: Entry, frontend: Frontend, way: _Way, node: Node, chains: Chains) -> str:
    """Returns the target of the frontend's rule in the tree; adds the chains that it needs."""
    target = way.internal
    usual = node.usual if frontend.kind is Kind.CLUSTER_IP else Masquerade.NEVER
    if way.internal != way.external or (frontend.masquerade != usual and way.internal != ACCEPTED):
        rules = [*_mark(frontend, usual, node)]
        if way.internal != way.external:
            rules += [f"{each} {way.internal}" for each in (FROM_NODE, node.pod) if each is not None]
        name = chain("EXT", identity(entry), str(int(frontend.masquerade)), str(int(usual)), *way)
        chains[name] = (*rules, way.external)
        target = f"-j {name}"
    if frontend.source_ranges is not None and target != ACCEPTED:
        name = chain("FW", identity(entry), *frontend.source_ranges, target)
        chains[name] = (*(f"-s {cidr} {target}" for cidr in frontend.source_ranges), ACCEPTED)
        target = f"-j {name}"
    return target


def _mark(frontend: Frontend, usual: Masquerade, node: Node) -> Iterable[str]:
    """Returns rules that set or clear the masquerade mark as this frontend requires."""
    if frontend.masquerade == usual:
        return
    if usual:
        yield f"-j MARK --set-xmark 0x0/{node.bit}"
    if frontend.masquerade:
        yield f"-j {_mark_chain(frontend.masquerade)}"


def _mark_chain(classes: Masquerade) -> str:
    return f"{MINE}MARK-MASQ-{int(classes)}"


# The backends of a set


def _set_chains(entry: Entry, name: str, chosen: BackendSet, node: Node) -> Chains:
    protocol = entry.protocol.name.lower()
    goals = [f"-j DNAT --to-destination {socket_text(b.address, b.port)}" for b in chosen.backends]
    if not entry.affinity_seconds or not node.able.remembers:
        return {name: tuple(_pick(f"-p {protocol} ", goals))}
    chains: Chains = {}
    again = []
    for position, backend in enumerate(chosen.backends):
        endpoint = endpoint_chain(entry, backend)
        chains[endpoint] = (f"-p {protocol} -m recent --set --name {endpoint} {_by_source(node)} {goals[position]}",)
        remembered = f"--rcheck --seconds {entry.affinity_seconds} --reap --name {endpoint} {_by_source(node)}"
        again.append(f"-m recent {remembered} -j {endpoint}")
        goals[position] = f"-j {endpoint}"
    chains[name] = (*again, *_pick("", goals))
    return chains


def _by_source(node: Node) -> str:
    everything = "255.255.255.255" if node.family == 4 else "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
    return f"--mask {everything} --rsource"


@cache
def probability(ways: int) -> str:
    """Formats 1/n as iptables-save prints it: the kernel keeps 31 bits."""
    return f"{round((1 << 31) / ways) / (1 << 31):.11f}"


def _pick(match: str, goals: list[str]) -> Iterable[str]:
    """Returns rules that choose one of the goals with equal probability: 1/n, then 1/(n-1) of the rest, ..."""
    for position, goal in enumerate(goals):
        left = len(goals) - position
        chance = f"-m statistic --mode random --probability {probability(left)} " if left > 1 else ""
        yield f"{match}{chance}{goal}"


# Refusals


def _verdict(chosen: BackendSet) -> str:
    """Returns table filter's verdict on a packet of a set without backends; empty: it was translated."""
    if chosen.backends:
        return ""
    return DROP if chosen.when_empty is WhenEmpty.DROP else REFUSE


def _refusals(entry: Entry, frontend: Frontend, match: str) -> Iterable[Rank]:
    """Returns the rules of table filter; the reject of unknown ports of a ClusterIP comes after them."""
    internal, external = (_verdict(entry.backend_sets[n]) for n in (frontend.internal, frontend.external))
    verdict = internal or external  # if both sets are empty, their verdicts are equal (`BackendSet`)
    if frontend.source_ranges is not None:
        if verdict:
            yield from ((0, f"-s {cidr} {match} {verdict}") for cidr in frontend.source_ranges)
        yield 1, f"{match} {DROP}"
    elif verdict and (frontend.kind is not Kind.CLUSTER_IP or verdict != REFUSE):
        yield 1, f"{match} {verdict}"
    if frontend.kind is Kind.CLUSTER_IP and frontend.address is not None:
        yield 2, f"-d {frontend.address}/{128 if ':' in frontend.address else 32} {REFUSE}"


# What every node has


def constant_chains(node: Node) -> tuple[Chains, Chains]:
    """Returns the chains of nat and filter that do not depend on services, without those that lead into trees."""
    marked = f"--mark {node.bit}/{node.bit}"
    fully = " --random-fully" if node.able.random_fully else ""
    nat: Chains = {f"{MINE}MARK-MASQ-{n}": tuple(_mark_rules(Masquerade(n), node)) for n in range(1, 8)}
    nat[f"{MINE}MASQUERADE"] = (f"-j MARK --set-xmark 0x0/{node.bit}", f"-j MASQUERADE{fully}")
    nat[POSTROUTING] = (f"-m mark {marked} -j {MINE}MASQUERADE",)
    if node.able.compares:  # a pod that was sent to itself: after nat its packet has one address twice
        to_itself = f'-m conntrack --ctstate DNAT -m bpf --bytecode "{same_addresses(node.family)}"'
        nat[POSTROUTING] += (f"{to_itself} -j MASQUERADE{fully}",)
    unreachable = "icmp-port-unreachable" if node.family == 4 else "icmp6-port-unreachable"
    accepts = ["-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"]
    if node.drop_invalid:
        accepts.append("-m conntrack --ctstate INVALID -j DROP")
    accepts += (f"-m conntrack --ctstate NEW -j {SERVICES}", f"-m mark {marked} -j ACCEPT")
    return nat, {
        REJECT: ("-p tcp -j REJECT --reject-with tcp-reset", f"-j REJECT --reject-with {unreachable}"),
        FORWARD: tuple(accepts),
    }


def _mark_rules(classes: Masquerade, node: Node) -> Iterable[str]:
    """Marks packets of these classes; the node comes first, because a pod's address can be the node's (its bridge)."""
    mark = f"-j MARK --set-xmark {node.bit}/{node.bit}"
    if classes is Masquerade.ALWAYS:
        yield mark
        return
    if classes & Masquerade.NODE:
        yield f"{FROM_NODE} {mark}"
    others = classes & (Masquerade.POD | Masquerade.EXTERNAL)
    if not others:
        return
    if not classes & Masquerade.NODE:
        yield f"{FROM_NODE} -j RETURN"
    if others == Masquerade.POD | Masquerade.EXTERNAL or (node.pod is None and others & Masquerade.EXTERNAL):
        yield mark
    elif node.pod is not None:
        yield f"{'! ' if others & Masquerade.EXTERNAL else ''}{node.pod} {mark}"


def cluster_ips(root: str, node: Node) -> tuple[str, ...]:
    """Returns HP-CLUSTER-IPS: set the usual mark, enter the tree, clear the mark if nothing matched.

    A packet with a foreign mark keeps its mark.
    """
    if not node.usual:
        return (f"-j {root}",)
    return (
        f"-m mark --mark {node.bit}/{node.bit} -g {root}",
        f"-j {_mark_chain(node.usual)}",
        f"-j {root}",
        f"-j MARK --set-xmark 0x0/{node.bit}",
    )
