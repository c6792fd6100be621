"""PURE. The table of each family, which does not depend on the services: sets, and the chains from the hooks to them.

The number of rules is constant; services add elements:

    internal, external        address . protocol . port -> goto the chain for so many backends (see `picks`)
    internal-slots, ...       slot . address . protocol . port -> address and port of one backend
    internal-ports, ...       the same for node ports, without the address
    cluster-ips               ClusterIPs, whose unknown ports are rejected

Pods and this node use `internal`. Clients beyond the cluster are looked up in `external` first, which holds only
frontends that treat them differently.

Affinity adds some maps, the same for all services. Every service port and each of its backends has a number:

    internal-numbers          address . protocol . port -> number of the service port
    internal-candidates       slot . address . protocol . port -> number of a backend
    members-0, members-1      number of a backend -> its address and port, while the first or second set has it
    clients-10800             client . number of the service port -> number of the backend; packets write it
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hybrid_proxy.dataplane.nftables import expressions as x
from hybrid_proxy.dataplane.nftables import uapi as nf
from hybrid_proxy.dataplane.nftables.expressions import RETURN, Family, rule
from hybrid_proxy.dataplane.nftables.schema import (
    ADDRESS,
    NUMBER,
    PORT,
    PROTOCOL,
    RANGE,
    SLOT,
    VERDICT,
    Chain,
    Hook,
    Set,
)
from hybrid_proxy.dataplane.table import LOOPBACK, Masquerade, NodeNetwork, family_of

TABLE: Final = "hybrid-proxy"
SPACES: Final = ("internal", "external", "internal-ports", "external-ports")
RESTRICTED, ALLOWED = "restricted", "allowed-sources"
CLUSTER_IPS, NODE_PORT_ADDRESSES = "cluster-ips", "node-port-addresses"
ITSELF, ITSELF_SECONDS = "itself", 60  # pairs (backend, backend) of connections, for hairpin
REFUSE, DISCARD, ELSEWHERE = "refuse", "discard", "elsewhere"
MEMBERS: Final = ("members-0", "members-1")  # of the first and second backend set of a service port
KEPT_MARKS, KEPT_SECONDS = "kept-marks", 5
MAX_CLIENTS: Final = 262_144  # of one affinity time and family; beyond that a new client gets a random backend

COUNTERS: Final = (
    "refused", "discarded", "source-not-allowed", "unknown-port", "unallocated", "masqueraded", "to-itself", "no-slot",
    "invalid",
)  # fmt: skip


def port_only(space: str) -> bool:
    """True if the keys of this space have no address."""
    return space.endswith("-ports")


def _sets() -> Iterator[Set]:
    yield Set(CLUSTER_IPS, (ADDRESS,))
    yield Set(NODE_PORT_ADDRESSES, (ADDRESS,))
    yield Set(RESTRICTED, (ADDRESS, PROTOCOL, PORT))
    yield Set(ALLOWED, (ADDRESS, PROTOCOL, PORT, RANGE))
    for space in SPACES:
        key = (PROTOCOL, PORT) if port_only(space) else (ADDRESS, PROTOCOL, PORT)
        yield Set(space, key, (VERDICT,))
        yield Set(f"{space}-slots", (SLOT, *key), (ADDRESS, PORT))
        yield Set(f"{space}-numbers", key, (NUMBER,))
        yield Set(f"{space}-candidates", (SLOT, *key), (SLOT,))
    for members in MEMBERS:
        yield Set(members, (NUMBER,), (ADDRESS, PORT))
    yield Set(KEPT_MARKS, (ADDRESS, PORT, PROTOCOL), (SLOT,), KEPT_SECONDS, MAX_CLIENTS)
    yield Set(ITSELF, (ADDRESS, ADDRESS), (), ITSELF_SECONDS, MAX_CLIENTS)


SETS: Final = {one.name: one for one in _sets()}


def clients_set(seconds: int) -> Set:
    """Returns the map that holds the clients of that affinity time."""
    return Set(f"clients-{seconds}", (ADDRESS, NUMBER), (SLOT,), seconds, MAX_CLIENTS)


def set_named(name: str) -> Set | None:
    """Returns our set of that name; None: there is none."""
    kind, _, seconds = name.rpartition("-")
    if kind == "clients" and seconds.isdigit():
        return clients_set(int(seconds))
    return SETS.get(name)


class AllSets(dict[str, Set]):
    """`SETS`, and the sets of affinity times, which are created on request."""

    def __init__(self) -> None:
        super().__init__(SETS)

    def __missing__(self, name: str) -> Set:
        if (found := set_named(name)) is None:
            raise KeyError(name)
        return found


def structure(family: Family, node: NodeNetwork, *, drop_invalid: bool = True) -> tuple[Chain, ...]:
    """Returns the chains of a family that do not depend on the services.

    A segment that conntrack calls invalid is not translated: a client would get a backend's own address, know nothing
    of that connection and reset it (`drop_invalid`, kubernetes #74839).
    """
    strict = (rule(x.invalid(), x.count("invalid"), x.DROP),) if drop_invalid else ()
    forward = Chain("filter-forward", strict, Hook(nf.NF_INET_FORWARD, nf.NF_IP_PRI_FILTER, "filter"))
    lookups = *_lookups(family, node), *_base_chains(family, node)
    return (*_refusals(family), *_marks(family, node), *lookups, forward)


def _refusals(family: Family) -> Iterator[Chain]:
    refuse = rule(x.reject_tcp()), rule(family.reject_port())
    yield Chain(REFUSE, (rule(x.count("refused")), *refuse))
    yield Chain("refuse-port", (rule(x.count("unknown-port")), *refuse))
    yield Chain(DISCARD, (rule(x.count("discarded"), x.DROP),))


def mark_chain(classes: Masquerade) -> str:
    """Returns the chain that marks packets of these classes for masquerading."""
    pairs = ((Masquerade.POD, "p"), (Masquerade.NODE, "n"), (Masquerade.EXTERNAL, "e"))
    return "mark-" + "".join(letter for bit, letter in pairs if classes & bit)


def _marks(family: Family, node: NodeNetwork) -> Iterator[Chain]:
    """Returns one chain for each set of classes that can be masqueraded."""
    pod = family.from_pod(node.pods)
    mark = x.set_mark(1 << node.masquerade_bit)
    own = x.is_own()
    for classes in map(Masquerade, range(1, 8)):
        rules = []
        if classes is not Masquerade.ALWAYS:
            rules.append(rule(own, mark) if classes & Masquerade.NODE else rule(own, RETURN))
            if classes & Masquerade.NODE:
                rules.append(rule(own, RETURN))
            if pod is not None and classes & Masquerade.POD:
                rules.append(rule(pod, mark))
            if pod is not None:
                rules.append(rule(pod, RETURN))
        if classes & Masquerade.EXTERNAL:
            rules.append(rule(mark))
        yield Chain(mark_chain(classes), tuple(rules))


def _lookups(family: Family, node: NodeNetwork) -> Iterator[Chain]:
    """Returns the rules that lead from a class of clients to the verdict maps."""
    here, elsewhere = family.destination_in(NODE_PORT_ADDRESSES), family.destination_local(negate=True)
    yield Chain(
        ELSEWHERE,
        (
            rule(family.destination_in(CLUSTER_IPS), elsewhere, x.goto("refuse-port")),
            *(
                rule(family.destination_within(cidr), elsewhere, x.count("unallocated"), x.DROP)
                for cidr in node.service_cidrs
                if family_of(cidr) == family.version
            ),
        ),
    )  # fmt: skip
    yield Chain(
        "to-ports", (rule(here, family.find_verdict("internal-ports", port_only=True)), rule(x.goto(ELSEWHERE)))
    )
    yield Chain("from-internal", (rule(family.find_verdict("internal")), rule(x.goto("to-ports"))))
    yield Chain(
        "from-external",
        (
            rule(family.find_verdict("external")),
            rule(family.find_verdict("internal")),
            rule(here, family.find_verdict("external-ports", port_only=True)),
            rule(x.goto("to-ports")),
        ),
    )


def _base_chains(family: Family, node: NodeNetwork) -> Iterator[Chain]:
    pod = family.from_pod(node.pods)
    guard = rule(family.frontend_in(RESTRICTED), family.source_not_in(ALLOWED), x.count("source-not-allowed"), x.DROP)
    mark = 1 << node.masquerade_bit
    yield Chain(
        "nat-prerouting",
        (guard, *((rule(pod, x.goto("from-internal")),) if pod else ()), rule(x.goto("from-external"))),
        Hook(nf.NF_INET_PRE_ROUTING, nf.NF_IP_PRI_NAT_DST),
    )
    # Own packets of this node only: the kernel drops a neighbour's packet to a loopback address. With
    # such a source they could not leave the node (`dataplane.localhost`).
    here = tuple(
        rule(
            family.destination_is(a),
            family.source_within(LOOPBACK[family.version], negate=True),
            family.find_verdict("internal-ports", port_only=True),
        )
        for a in node.loopback
        if family_of(a) == family.version
    )
    yield Chain(
        "nat-output", (guard, *here, rule(x.goto("from-internal"))), Hook(nf.NF_INET_LOCAL_OUT, nf.NF_IP_PRI_NAT_DST)
    )
    yield Chain(
        "nat-postrouting",
        (
            rule(x.mark_has_any(mark), x.set_mark(mark, on=False), x.count("masqueraded"), x.masquerade()),
            rule(x.translated(), family.hairpin(ITSELF), x.count("to-itself"), x.masquerade()),
        ),
        Hook(nf.NF_INET_POST_ROUTING, nf.NF_IP_PRI_NAT_SRC),
    )
