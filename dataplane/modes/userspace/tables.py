"""PURE. The nf_tables table of each family: its chains, its sets, and the operations that change it.

The number of rules is constant. Each service port adds elements:

    internal, external        address . protocol . port -> address and proxy port of the relay
    internal-ports, ...       the same for node ports, without the address
    internal-empty, ...       the same keys -> the verdict on packets to a frontend without a proxy port
    firewalled                frontends with source ranges, which are in `allowed-sources`
    cluster-ips               ClusterIPs: their other ports are rejected
    listeners                 protocol . proxy port

A packet meets, by priority: the marks of replies to a kept client address (-150), the source ranges (-110), the
redirection (-100), the verdict on service packets that were not redirected (-90), and at the proxy ports themselves the
guard against packets that no router would have forwarded or that were not redirected (0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from hybrid_proxy.dataplane.modes.userspace.lower import Lowered, listen_addresses
from hybrid_proxy.dataplane.modes.userspace.messages import KEEPING, PLAIN
from hybrid_proxy.dataplane.netfilter import RELAY_PORTS, RELAY_TABLE
from hybrid_proxy.dataplane.nftables import expressions as x
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables import uapi as nf
from hybrid_proxy.dataplane.nftables.expressions import DROP, RETURN, Family, Verdict, rule
from hybrid_proxy.dataplane.nftables.ruleset import Ruleset, additions, deletions
from hybrid_proxy.dataplane.nftables.schema import (
    ADDRESS,
    PORT,
    PROTOCOL,
    RANGE,
    VERDICT,
    Chain,
    Element,
    Hook,
    Key,
    Set,
    Value,
)
from hybrid_proxy.dataplane.table import NodeNetwork, WhenEmpty, family_of

Elements = dict[tuple[str, Key], Value]  # (name of the set, key) -> value

TABLE: Final = RELAY_TABLE
FIREWALLED, ALLOWED = "firewalled", "allowed-sources"
CLUSTER_IPS, NODE_ADDRESSES, LISTENERS = "cluster-ips", "node-addresses", RELAY_PORTS
REFUSE: Final = "refuse"

# The chains that decide about new flows, at both hooks. The other chains serve flows that conntrack knows.
LEADING: Final = tuple(f"{name}-{hook}" for name in ("firewall", "nat", "rest") for hook in ("prerouting", "output"))

_BEFORE_NAT, _AFTER_NAT = nf.NF_IP_PRI_NAT_DST - 10, nf.NF_IP_PRI_NAT_DST + 10


def _sets() -> Iterator[Set]:
    key, port_key = (ADDRESS, PROTOCOL, PORT), (PROTOCOL, PORT)
    for side in ("internal", "external"):
        yield Set(side, key, (ADDRESS, PORT))
        yield Set(f"{side}-ports", port_key, (ADDRESS, PORT))
        yield Set(f"{side}-empty", key, (VERDICT,))
        yield Set(f"{side}-ports-empty", port_key, (VERDICT,))
    yield Set(FIREWALLED, key)
    yield Set(ALLOWED, (*key, RANGE))
    yield Set(CLUSTER_IPS, (ADDRESS,))
    yield Set(NODE_ADDRESSES, (ADDRESS,))
    yield Set(LISTENERS, port_key)


SETS: Final = {one.name: one for one in _sets()}


def answer_mark(node: NodeNetwork) -> int:
    """Returns the mark of replies to a kept client address, which this node receives: the masquerade bit and another.

    With the masquerade bit alone, packets that another proxy is about to masquerade would be delivered here, too: those
    of a kube-proxy with the same bit, or of the mode that serves while this one starts.
    """
    return 1 << node.masquerade_bit | 1 << (12 if node.masquerade_bit != 12 else 13)


def structure(family: Family, node: NodeNetwork, *, draining: bool = False) -> tuple[Chain, ...]:
    """Returns the chains of a family. While draining, those of new flows are empty, to keep conntrack's hooks."""
    chains = (
        *_refusals(family, node),
        *_redirections(family),
        *_firewall(family),
        *_marks(answer_mark(node)),
        *_base_chains(family, node),
        _guard(family, node),
    )
    return tuple(chain._replace(rules=()) if draining and chain.name in LEADING else chain for chain in chains)


def _refusals(family: Family, node: NodeNetwork) -> Iterator[Chain]:
    """Yields the chains with the verdicts on packets to services that were not redirected."""
    here = family.destination_in(NODE_ADDRESSES)
    yield Chain(REFUSE, (rule(x.invalid(), DROP), rule(x.reject_tcp()), rule(family.reject_port())))
    unallocated = (family.destination_within(cidr) for cidr in node.service_cidrs if family_of(cidr) == family.version)
    yield Chain(
        "strangers",
        (
            rule(family.destination_in(CLUSTER_IPS), x.goto(REFUSE)),
            *(rule(destination, family.destination_local(negate=True), DROP) for destination in unallocated),
        ),
    )
    for side in ("internal", "external"):
        yield Chain(
            f"{side}-rest",
            (
                rule(family.find_verdict(f"{side}-empty")),
                rule(here, family.find_verdict(f"{side}-ports-empty", port_only=True)),
                rule(x.goto("strangers")),
            ),
        )


def _redirections(family: Family) -> Iterator[Chain]:
    here = family.destination_in(NODE_ADDRESSES)
    for side in ("internal", "external"):
        by_port = rule(here, family.dnat_by(f"{side}-ports", port_only=True))
        yield Chain(f"{side}-nat", (rule(family.dnat_by(side)), by_port))


def _firewall(family: Family) -> Iterator[Chain]:
    guard = rule(family.frontend_in(FIREWALLED), family.source_not_in(ALLOWED), DROP)
    yield Chain("firewall-prerouting", (guard,), Hook(nf.NF_INET_PRE_ROUTING, _BEFORE_NAT, "filter"))
    yield Chain("firewall-output", (guard,), Hook(nf.NF_INET_LOCAL_OUT, _BEFORE_NAT, "filter"))


def _marks(bits: int) -> Iterator[Chain]:
    """Marks connections with a client's address as source, and their replies, so that this node receives them."""
    kept = (*x.is_reply(), *x.connection_mark_has_all(bits))
    begin = rule(x.has_priority(KEEPING), x.new(), x.set_connection_mark(bits))
    mangle = nf.NF_IP_PRI_MANGLE
    yield Chain("marks-prerouting", (rule(kept, x.set_mark(bits)),), Hook(nf.NF_INET_PRE_ROUTING, mangle, "filter"))
    yield Chain("marks-output", (begin, rule(kept, x.set_mark(bits))), Hook(nf.NF_INET_LOCAL_OUT, mangle, "route"))
    yield Chain("marks-input", (rule(kept, x.set_mark(bits, on=False)),), Hook(nf.NF_INET_LOCAL_IN, mangle, "filter"))


def _base_chains(family: Family, node: NodeNetwork) -> Iterator[Chain]:
    """Yields the chains of the redirection and of what was not redirected. The relay's own packets to backends pass."""
    pod = family.from_pod(node.pods)
    own = (rule(x.has_priority(PLAIN), RETURN), rule(x.has_priority(KEEPING), RETURN))
    # Flows that mode ipvs serves while it drains: its addresses are this node's, and IPVS leaves them in the packet.
    others = rule(x.confirmed(), family.destination_local(), RETURN)
    elsewhere = rule(x.translated(), RETURN), others

    def by_side(chain: str) -> tuple[x.Rule, ...]:
        from_pods = (rule(pod, x.goto(f"internal-{chain}")),) if pod else ()
        return *from_pods, rule(x.goto(f"external-{chain}"))

    # Only for this node's own packets: the kernel drops those of neighbours to a loopback address.
    loopback = [family.destination_is(a) for a in node.loopback if family_of(a) == family.version]
    led = (rule(here, family.dnat_by("internal-ports", port_only=True)) for here in loopback)
    left = (rule(here, family.find_verdict("internal-ports-empty", port_only=True)) for here in loopback)

    at_nat = nf.NF_IP_PRI_NAT_DST
    yield Chain("nat-prerouting", by_side("nat"), Hook(nf.NF_INET_PRE_ROUTING, at_nat))
    yield Chain("nat-output", (*own, *led, rule(x.goto("internal-nat"))), Hook(nf.NF_INET_LOCAL_OUT, at_nat))
    rest = (*elsewhere, *by_side("rest"))
    yield Chain("rest-prerouting", rest, Hook(nf.NF_INET_PRE_ROUTING, _AFTER_NAT, "filter"))
    rest = (*elsewhere, *own, *left, rule(x.goto("internal-rest")))
    yield Chain("rest-output", rest, Hook(nf.NF_INET_LOCAL_OUT, _AFTER_NAT, "filter"))


def _guard(family: Family, node: NodeNetwork) -> Chain:
    """Admits only redirected packets to proxy ports.

    It drops broadcasts and packets from link-local sources: a router would not have forwarded them to a backend.
    """
    rules = [rule(x.translated(), RETURN)]
    listen = listen_addresses(node).get(family.version)
    if listen:
        relayed = (*family.destination_is(listen), *family.frontend_in(LISTENERS, port_only=True))
        narrow = ("::/128", "fe80::/10") if family.version == 6 else ()
        rules = [
            rule(relayed, x.not_for_this_host(), DROP),
            *(rule(relayed, family.source_within(cidr), DROP) for cidr in narrow),
            *rules,
            rule(relayed, x.goto(REFUSE)),
        ]
    return Chain("guard", tuple(rules), Hook(nf.NF_INET_LOCAL_IN, nf.NF_IP_PRI_FILTER, "filter"))


_REFUSAL: Final = {WhenEmpty.REJECT: Verdict(nf.NFT_GOTO, REFUSE), WhenEmpty.DROP: Verdict(nf.NF_DROP)}


def elements_of(lowered: Lowered, protocol: int, listen: str, numbers: tuple[int, ...]) -> Elements:
    """Returns the elements of one service port.

    `numbers` are the proxy ports in the order of `Row.ports`. Without any, clients are rejected.
    """
    found: Elements = {}
    for side, address, port, target in lowered.redirects:
        name, key = (side, (address, protocol, port)) if address is not None else (f"{side}-ports", (protocol, port))
        if isinstance(target, WhenEmpty):
            found[f"{name}-empty", key] = _REFUSAL[target]
        elif numbers:
            found[name, key] = (listen, numbers[target])
        else:
            found[f"{name}-empty", key] = _REFUSAL[WhenEmpty.REJECT]
    for number in numbers:
        found[LISTENERS, (protocol, number)] = None
    for address, port, ranges in lowered.firewalled:
        found[FIREWALLED, (address, protocol, port)] = None
        for cidr in ranges:
            found[ALLOWED, (address, protocol, port, cidr)] = None
    for address in lowered.cluster_ips:
        found[CLUSTER_IPS, (address,)] = None
    return found


def _ruleset(family: Family, node: NodeNetwork, *, draining: bool) -> Ruleset:
    return Ruleset(family, (), tuple(SETS.values()), structure(family, node, draining=draining))


def _node_elements(family: Family, node: NodeNetwork) -> Elements:
    """Returns the elements that do not depend on services."""
    addresses = (address for address in node.node_port_addresses if family_of(address) == family.version)
    return {(NODE_ADDRESSES, (address,)): None for address in addresses}


def replace(family: Family, node: NodeNetwork, elements: Elements, *, draining: bool = False) -> Iterator[op.Operation]:
    """Returns the operations that replace the whole table."""
    yield from _ruleset(family, node, draining=draining).create(replace=True)
    yield from change({}, _node_elements(family, node) | elements)


def change(old: Elements, new: Elements) -> list[op.Operation]:
    """Returns the operations from the old elements to the new ones: removals first, so that a value can change."""
    gone = [place for place, value in old.items() if place not in new or new[place] != value]
    added = [Element(*place, value) for place, value in new.items() if place not in old or old[place] != value]
    return [*deletions(gone), *additions(added)]


def differences(
    family: Family, node: NodeNetwork, elements: Elements, skeleton: op.Skeleton,
    contents: Mapping[str, Mapping[Key, tuple[Value, str]]], *, draining: bool = False,
) -> list[op.Operation]:  # fmt: skip
    """Returns the operations that repair the kernel's table, whose `skeleton` and `contents` were read."""
    ruleset = _ruleset(family, node, draining=draining)
    if ruleset.irreparable(skeleton):
        return list(ruleset.create(replace=True))
    found = {(name, key): value for name, held in contents.items() for key, (value, _) in held.items()}
    wanted = _node_elements(family, node) | elements
    return [*ruleset.repair(skeleton), *change(found, wanted), *ruleset.remove_foreign(skeleton)]
