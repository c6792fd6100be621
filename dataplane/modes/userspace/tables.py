"""PURE. The table of each family: sets and chains, a constant number of rules whatever the services are.

A service adds elements:

    internal, external        address . protocol . port -> address and proxy port of the relay
    internal-ports, ...       the same for node ports, without the address
    internal-empty, ...       the same keys -> what becomes of packets to a frontend without a proxy port
    firewalled                frontends with source ranges, which are in `allowed-sources`
    cluster-ips               ClusterIPs, to refuse ports that they have not
    listeners                 protocol . proxy port

Order of a packet: the marks of replies to a kept address (-150), sources that may not pass (-110), redirection
(-100), what was not redirected although it is a service's (-90), and at the proxy ports themselves what no router would
have forwarded, and what did not come by a redirection (0).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hybrid_proxy.dataplane.modes.userspace.lower import listen_addresses
from hybrid_proxy.dataplane.modes.userspace.messages import KEEPING, PLAIN
from hybrid_proxy.dataplane.netfilter import RELAY_PORTS, RELAY_TABLE
from hybrid_proxy.dataplane.nftables import expressions as x
from hybrid_proxy.dataplane.nftables import uapi as nf
from hybrid_proxy.dataplane.nftables.expressions import DROP, RETURN, Family, rule
from hybrid_proxy.dataplane.nftables.schema import ADDRESS, PORT, PROTOCOL, RANGE, VERDICT, Chain, Hook, Set
from hybrid_proxy.dataplane.table import NodeNetwork, family_of

TABLE: Final = RELAY_TABLE
FIREWALLED, ALLOWED = "firewalled", "allowed-sources"
CLUSTER_IPS, NODE_ADDRESSES, LISTENERS = "cluster-ips", "node-addresses", RELAY_PORTS
REFUSE: Final = "refuse"

# Chains of new flows, at both hooks. The others serve flows that are known.
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
    """The mark of answers that this node receives for a kept address: the masquerade bit and one more.

    With the masquerade bit alone, whatever another proxy is about to masquerade would be delivered here: a mode of
    ours that still serves while this one starts, a kube-proxy with the same bit.
    """
    return 1 << node.masquerade_bit | 1 << (12 if node.masquerade_bit != 12 else 13)


def structure(family: Family, node: NodeNetwork, *, draining: bool = False) -> tuple[Chain, ...]:
    """The chains of a family; `draining`: those of new flows are empty, and only keep conntrack's hooks in place."""
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
    """What becomes of packets to services that are not redirected."""
    here = family.destination_in(NODE_ADDRESSES)
    yield Chain(REFUSE, (rule(x.invalid(), DROP), rule(x.reject_tcp()), rule(family.reject_port())))
    unallocated = (family.destination_within(cidr) for cidr in node.service_cidrs if family_of(cidr) == family.version)
    yield Chain(
        "strangers",
        (
            rule(family.destination_in(CLUSTER_IPS), x.goto(REFUSE)),
            *(rule(destination, family.destination_not_local(), DROP) for destination in unallocated),
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
    """Connections with a client's address are marked, and their replies with them, to be delivered to this node."""
    kept = (*x.is_reply(), *x.connection_mark_has_all(bits))
    begin = rule(x.has_priority(KEEPING), x.new(), x.set_connection_mark(bits))
    mangle = nf.NF_IP_PRI_MANGLE
    yield Chain("marks-prerouting", (rule(kept, x.set_mark(bits)),), Hook(nf.NF_INET_PRE_ROUTING, mangle, "filter"))
    yield Chain("marks-output", (begin, rule(kept, x.set_mark(bits))), Hook(nf.NF_INET_LOCAL_OUT, mangle, "route"))
    yield Chain("marks-input", (rule(kept, x.clear_mark(bits)),), Hook(nf.NF_INET_LOCAL_IN, mangle, "filter"))


def _base_chains(family: Family, node: NodeNetwork) -> Iterator[Chain]:
    """Redirection, and what was not redirected; the relay's own packets to backends pass."""
    pod = family.from_pod(node.pods)
    own = (rule(x.has_priority(PLAIN), RETURN), rule(x.has_priority(KEEPING), RETURN))
    # What mode ipvs still serves while it drains: its addresses are this node's, and IPVS leaves them in the packet.
    others = rule(x.confirmed(), family.destination_local(), RETURN)
    elsewhere = rule(x.translated(), RETURN), others

    def by_side(chain: str) -> tuple[x.Rule, ...]:
        from_pods = (rule(pod, x.goto(f"internal-{chain}")),) if pod else ()
        return *from_pods, rule(x.goto(f"external-{chain}"))

    # Only of this node's own packets: a neighbour's packet to a loopback address stays what the kernel drops.
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
    """Proxy ports are for redirected packets alone.

    The stack would not have forwarded to a backend what came as a broadcast, or from a source whose scope ends here.
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
