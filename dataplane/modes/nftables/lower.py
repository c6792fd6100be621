"""PURE. The service table as chains, rules, sets and elements of nf_tables.

One table for each family. Its rules are constant in number; what a service adds are elements:

    inside, outside           address . protocol . port -> goto the chain for so many backends
    inside-slots, ...         slot . address . protocol . port -> address and port of one backend
    inside-ports, ...         the same for node ports, without the address
    cluster-ips               ClusterIPs, to refuse ports that they have not

A chain `inside-10-ne` serves all frontends with 10 backends whose packets are masqueraded for clients of the classes
node and external (p: pod, n: node, e: external). `inside` is what pods and this node see, `outside` is looked at
first for clients beyond the cluster and holds only frontends that treat them differently.

Affinity takes some maps more, the same for all services. Every service port has a number and each of its backends
another one:

    inside-numbers            address . protocol . port -> number of the service port
    inside-candidates         slot . address . protocol . port -> number of a backend
    members-0, members-1      number of a backend -> its address and port, while it is in the first or second route
    clients-10800             client . number of the service port -> number of the backend; packets write it

A client whose backend is no member of the route any more is forgotten and chooses anew, by the packet itself: no
entry must be searched and deleted when a backend goes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final, NamedTuple

from dataplane.modes.nftables import expressions as x
from dataplane.modes.nftables.expressions import Family, Rule, rule
from dataplane.table import Backend, Entry, Frontend, Kind, Masquerade, NodeNetwork, WhenEmpty, disjoint, family_of

__all__ = [
    "COUNTERS", "DISCARD", "FAMILIES", "MEMBERS", "SETS", "SPACES", "TABLE", "Chain", "Element", "Family", "Hook",
    "Key", "Pick", "Set", "chain_of", "clients_set", "elements", "node_elements", "number_name", "parse_pick",
    "pick_chain", "set_named", "shared", "structure",
]  # fmt: skip

FAMILIES: Final = {4: Family(4), 6: Family(6)}
TABLE: Final = "hybrid-proxy"

# Fields of keys and data; nft(8)'s names are beside them in `wire`.
ADDRESS, PROTOCOL, PORT, SLOT, NUMBER, RANGE = "address", "protocol", "port", "slot", "number", "range"
VERDICT: Final = "verdict"

RESTRICTED, ALLOWED = "restricted", "allowed-sources"
CLUSTER_IPS, NODE_PORT_ADDRESSES, ITSELF = "cluster-ips", "node-port-addresses", "itself"
REFUSE, DISCARD = "refuse", "discard"
MEMBERS: Final = ("members-0", "members-1")  # of the first and second route of a service port
COMMENT: Final = 127  # characters of a comment, nft's own limit
KEPT_MARKS, KEPT_SECONDS = "kept-marks", 5
MAX_CLIENTS: Final = 262_144  # of one affinity time and family; beyond that a new client gets a backend by chance

COUNTERS: Final = (
    "refused", "discarded", "source-not-allowed", "unknown-port", "unallocated", "masqueraded", "to-itself", "no-slot",
    "invalid",
)  # fmt: skip

Key = tuple[str | int, ...]
Number = Callable[[str], int]


class Element(NamedTuple):
    """One element: `value` is a backend's address and port, a number, a verdict, or None in a set."""

    set: str
    key: Key
    value: tuple[str, int] | int | str | None = None
    comment: str = ""


class Set(NamedTuple):
    """A set or, with `data`, a map. `seconds`: elements are written by packets and live so long after the last one."""

    name: str
    key: tuple[str, ...]
    data: tuple[str, ...] = ()
    seconds: int = 0


class Hook(NamedTuple):
    """Where a base chain sits: the number of the hook (NF_INET_...), its priority, and the chain's type."""

    number: int
    priority: int
    type: str = "nat"


class Chain(NamedTuple):
    """A chain with its rules in order."""

    name: str
    rules: tuple[Rule, ...]
    hook: Hook | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """What its rules are known by in the kernel."""
        return tuple(rule.mark for rule in self.rules)


PREROUTING, FORWARD, LOCAL_OUT, POSTROUTING = 0, 2, 3, 4
DSTNAT, FILTER, SRCNAT = -100, 0, 100
SPACES: Final = ("inside", "outside", "inside-ports", "outside-ports")


def _port_only(space: str) -> bool:
    return space.endswith("-ports")


def _sets() -> Iterator[Set]:
    yield Set(CLUSTER_IPS, (ADDRESS,))
    yield Set(NODE_PORT_ADDRESSES, (ADDRESS,))
    yield Set(ITSELF, (ADDRESS, ADDRESS))
    yield Set(RESTRICTED, (ADDRESS, PROTOCOL, PORT))
    yield Set(ALLOWED, (ADDRESS, PROTOCOL, PORT, RANGE))
    for space in SPACES:
        key = (PROTOCOL, PORT) if _port_only(space) else (ADDRESS, PROTOCOL, PORT)
        yield Set(space, key, (VERDICT,))
        yield Set(f"{space}-slots", (SLOT, *key), (ADDRESS, PORT))
        yield Set(f"{space}-numbers", key, (NUMBER,))
        yield Set(f"{space}-candidates", (SLOT, *key), (SLOT,))
    for members in MEMBERS:
        yield Set(members, (NUMBER,), (ADDRESS, PORT))
    yield Set(KEPT_MARKS, (ADDRESS, PORT, PROTOCOL), (SLOT,), KEPT_SECONDS)


SETS: Final = {one.name: one for one in _sets()}


def clients_set(seconds: int) -> Set:
    """Where clients with that affinity time are remembered."""
    return Set(f"clients-{seconds}", (ADDRESS, NUMBER), (SLOT,), seconds)


def set_named(name: str) -> Set | None:
    """The set of ours with that name; None: we have none."""
    kind, _, seconds = name.rpartition("-")
    if kind == "clients" and seconds.isdigit():
        return clients_set(int(seconds))
    return SETS.get(name)


def structure(family: Family, node: NodeNetwork, *, drop_invalid: bool = True) -> tuple[Chain, ...]:
    """The chains of a family that are there whatever the services are.

    A segment that conntrack calls invalid is not translated: a client would get a backend's own address, know nothing
    of that connection and reset it (`drop_invalid`, kubernetes #74839).
    """
    strict = (rule(x.invalid(), x.count("invalid"), x.end(x.DROP)),) if drop_invalid else ()
    forward = Chain("filter-forward", strict, Hook(FORWARD, FILTER, "filter"))
    return (*_refusals(family), *_marks(family, node), *_ways(family, node), forward)


def _refusals(family: Family) -> Iterator[Chain]:
    refuse = rule(x.reject_tcp()), rule(x.reject_port(family.version))
    yield Chain(REFUSE, (rule(x.count("refused")), *refuse))
    yield Chain("refuse-port", (rule(x.count("unknown-port")), *refuse))
    yield Chain(DISCARD, (rule(x.count("discarded"), x.end(x.DROP)),))


def _marks(family: Family, node: NodeNetwork) -> Iterator[Chain]:
    """One chain for each set of classes that can be masqueraded."""
    pod = _is_pod(family, node)
    mark = rule(x.set_mark(node.masquerade_bit))
    here = x.from_outside(negate=True)
    for classes in map(Masquerade, range(1, 8)):
        rules = []
        if classes is not Masquerade.ALWAYS:
            rules.append(rule(here, x.set_mark(node.masquerade_bit)) if classes & Masquerade.NODE else rule(here, RET))
            if classes & Masquerade.NODE:
                rules.append(rule(here, RET))
            if pod is not None and classes & Masquerade.POD:
                rules.append(rule(pod, x.set_mark(node.masquerade_bit)))
            if pod is not None:
                rules.append(rule(pod, RET))
        if classes & Masquerade.EXTERNAL:
            rules.append(mark)
        yield Chain(f"mark-{_letters(classes)}", tuple(rules))


RET: Final = x.end(x.RETURN)


def _is_pod(family: Family, node: NodeNetwork) -> x.Part | None:
    """What recognises a pod among packets that came in; None: nobody is a pod in this family."""
    if node.pods.interface:
        return x.pod_by_interface(node.pods.interface, prefix=node.pods.by_name_prefix)
    for cidr, network in _networks(node.pods.prefixes, family):
        return family.source_within(cidr, network.network_address.packed, network.netmask.packed)
    return None


def _networks(cidrs: Iterable[str], family: Family) -> list[tuple[str, IPv4Network | IPv6Network]]:
    networks = [ip_network(cidr, strict=False) for cidr in cidrs]
    return [(str(network), network) for network in networks if network.version == family.version]


def _ways(family: Family, node: NodeNetwork) -> Iterator[Chain]:
    """From the hooks to the verdict maps."""
    guard = rule(
        family.frontend_in(RESTRICTED), family.source_not_allowed(ALLOWED), x.count("source-not-allowed"), x.end(x.DROP)
    )
    here = family.destination_in(NODE_PORT_ADDRESSES)
    pod = _is_pod(family, node)
    yield Chain(
        "elsewhere",
        (
            rule(family.destination_in(CLUSTER_IPS), family.destination_not_local(), x.goto("refuse-port")),
            *(
                rule(
                    family.destination_within(cidr, network.network_address.packed, network.netmask.packed),
                    family.destination_not_local(), x.count("unallocated"), x.end(x.DROP),
                )
                for cidr, network in _networks(node.service_cidrs, family)
            ),
        ),
    )  # fmt: skip
    yield Chain(
        "to-ports",
        (rule(here, family.find_verdict("inside-ports", port_only=True)), rule(x.goto("elsewhere"))),
    )
    yield Chain("from-inside", (rule(family.find_verdict("inside")), rule(x.goto("to-ports"))))
    yield Chain(
        "from-outside",
        (
            rule(family.find_verdict("outside")),
            rule(family.find_verdict("inside")),
            rule(here, family.find_verdict("outside-ports", port_only=True)),
            rule(x.goto("to-ports")),
        ),
    )
    yield Chain(
        "nat-prerouting",
        (guard, *((rule(pod, x.goto("from-inside")),) if pod else ()), rule(x.goto("from-outside"))),
        Hook(PREROUTING, DSTNAT),
    )
    yield Chain("nat-output", (guard, rule(x.goto("from-inside"))), Hook(LOCAL_OUT, DSTNAT))
    yield Chain(
        "nat-postrouting",
        (
            rule(
                x.bit_is_set(node.masquerade_bit), x.clear_mark(node.masquerade_bit), x.count("masqueraded"),
                x.masquerade(),
            ),
            rule(x.translated(), family.to_itself(ITSELF), x.count("to-itself"), x.masquerade()),
        ),
        Hook(POSTROUTING, SRCNAT),
    )  # fmt: skip


# The chains that pick a backend


class Pick(NamedTuple):
    """What a picking chain does; its name says it."""

    space: str
    backends: int
    classes: Masquerade
    seconds: int = 0  # of affinity
    route: int = 0  # of affinity: which members

    @property
    def name(self) -> str:
        """The chain's name."""
        words = [self.space, str(self.backends), _letters(self.classes)]
        return "-".join([*words, str(self.seconds), str(self.route)] if self.seconds else words)


def _letters(classes: Masquerade) -> str:
    pairs = ((Masquerade.POD, "p"), (Masquerade.NODE, "n"), (Masquerade.EXTERNAL, "e"))
    return "".join(letter for bit, letter in pairs if classes & bit) or "none"


_PICK: Final = re.compile(rf"({'|'.join(SPACES)})-([1-9]\d*)-(none|(?=.)p?n?e?)(?:-([1-9]\d*)-([01]))?")


def parse_pick(name: str) -> Pick | None:
    """The other way round; None: this chain picks nothing."""
    found = _PICK.fullmatch(name)
    if found is None:
        return None
    space, backends, letters, seconds, route = found.groups()
    classes = Masquerade.NEVER
    if letters != "none":
        classes = Masquerade(sum(bit for bit, letter in ((1, "p"), (2, "n"), (4, "e")) if letter in letters))
    return Pick(space, int(backends), classes, int(seconds or 0), int(route or 0))


def pick_chain(family: Family, pick: Pick) -> Chain:
    """Mark for masquerading, then translate.

    Between two lookups of one packet another transaction can take effect: the slot that was drawn may be gone.
    Then the first slot serves; if that is gone as well so is the service, and the packet is not let out untranslated.
    """
    port_only, slots = _port_only(pick.space), f"{pick.space}-slots"
    rules = []
    if pick.classes:
        rules.append(rule(x.jump(f"mark-{_letters(pick.classes)}")))
    if pick.seconds:
        rules += _affinity(family, pick)
    rules.append(rule(family.to_endpoint(pick.backends, slots, port_only=port_only)))
    if pick.backends > 1:
        rules.append(rule(family.to_endpoint(1, slots, port_only=port_only)))
    rules.append(rule(x.count("no-slot"), x.end(x.DROP)))
    return Chain(pick.name, tuple(rules))


def _affinity(family: Family, pick: Pick) -> Iterator[Rule]:
    """Twice the same: what a client remembers may be no member any more, then it is forgotten and chooses anew."""
    port_only = _port_only(pick.space)
    clients = clients_set(pick.seconds).name
    number = family.number_in_priority(f"{pick.space}-numbers", port_only=port_only)
    candidate = family.member_in_mark(pick.backends, f"{pick.space}-candidates", port_only=port_only)
    once = (
        rule(number, family.keep_mark(KEPT_MARKS), candidate, family.remember(clients)),
        rule(family.restore_mark(KEPT_MARKS)),
        rule(family.to_remembered(clients, MEMBERS[pick.route])),
    )
    yield from once
    yield rule(number, family.forget(clients))
    yield from once
    yield rule(x.clear_priority())


# Elements


def number_name(entry: Entry, backend: Backend | None = None) -> str:
    """What a number stands for: a service port, or one of its backends."""
    name = f"{entry.name}/{entry.protocol.name}/IPv{entry.family}"
    return f"{name} {backend.address} {backend.port}" if backend else name


def elements(entry: Entry, number: Number) -> list[Element]:
    """The elements that are one service port's alone, in order; `number` numbers what affinity has to remember."""
    found: list[Element] = []
    protocol = int(entry.protocol)
    remembered = entry.backend_sets if entry.affinity_seconds else ()
    for members, backend_set in zip(MEMBERS, remembered, strict=False):
        found += [
            Element(members, (number(number_name(entry, backend)),), (backend.address, backend.port))
            for backend in backend_set.backends
        ]
    for frontend in entry.frontends:
        key: Key = (protocol, frontend.port)
        if frontend.address is not None:
            key = (frontend.address, *key)
        ports = "" if frontend.address is not None else "-ports"
        if frontend.source_ranges is not None:
            found.append(Element(RESTRICTED, key))
            found += [Element(ALLOWED, (*key, cidr)) for cidr in disjoint(frontend.source_ranges)]
        inside, outside = f"inside{ports}", f"outside{ports}"
        _serve(found, entry, frontend, inside, frontend.internal, key, number)
        if frontend.external != frontend.internal:
            _serve(found, entry, frontend, outside, frontend.external, key, number)
    return found


def _serve(
    found: list[Element], entry: Entry, frontend: Frontend, space: str, position: int, key: Key, number: Number
) -> None:  # fmt: skip
    backends, when_empty = entry.backend_sets[position].backends, entry.backend_sets[position].when_empty
    if not backends:
        goto = f"goto {REFUSE if when_empty is WhenEmpty.REJECT else DISCARD}"
        found.append(Element(space, key, goto, entry.name[:COMMENT]))
        return
    pick = Pick(space, len(backends), frontend.masquerade, entry.affinity_seconds, position)
    found.append(Element(space, key, f"goto {pick.name}", entry.name[:COMMENT]))
    slots = f"{space}-slots"
    found += [Element(slots, (slot, *key), (backend.address, backend.port)) for slot, backend in enumerate(backends)]
    if entry.affinity_seconds:
        found.append(Element(f"{space}-numbers", key, number(number_name(entry))))
        found += [
            Element(f"{space}-candidates", (slot, *key), number(number_name(entry, backend)))
            for slot, backend in enumerate(backends)
        ]


def shared(entry: Entry) -> set[Element]:
    """Elements that other service ports may have too: ClusterIPs, and backends here that may be their own clients."""
    found = {
        Element(CLUSTER_IPS, (frontend.address,))
        for frontend in entry.frontends
        if frontend.kind is Kind.CLUSTER_IP and frontend.address is not None
    }
    for backend_set in entry.backend_sets:
        found.update(Element(ITSELF, (b.address, b.address)) for b in backend_set.backends if b.local)
    return found


def node_elements(family: Family, node: NodeNetwork) -> list[Element]:
    """Where node ports are served."""
    mine = (a for a in node.node_port_addresses if family_of(a) == family.version)
    return [Element(NODE_PORT_ADDRESSES, (address,)) for address in mine]


def chain_of(value: object) -> Pick | None:
    """The picking chain that a verdict leads to."""
    return parse_pick(value.removeprefix("goto ")) if isinstance(value, str) else None
