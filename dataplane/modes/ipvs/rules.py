"""PURE. The rules of mode ipvs: as many for one service as for ten thousand.

Packets to services are this node's own, because their addresses are on its device: from elsewhere they pass
PREROUTING and INPUT, and IPVS takes them at the end of INPUT; those of this node pass OUTPUT, and IPVS takes them
there right after nat. So all that must come first is at these places:

mangle   drops: sources that are not allowed or whose scope ends at this node, unallocated service addresses, routes
         that want silence; in INPUT, behind routing, the mark that chooses a virtual server for external clients
nat      the masquerade mark for the class of the client, and the masquerade
filter   refusals. Where IPVS would come before them (a connection of this node itself), nat turns the packet to
         the loopback address first: IPVS answers TCP by ICMP, which a socket in connect() notes but waits on
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import ip_network
from typing import Final

from hybrid_proxy.dataplane.bytecode import same_addresses
from hybrid_proxy.dataplane.modes.ipvs.lower import PREFIX, set_name
from hybrid_proxy.dataplane.saved_rules import jumps, parse, table_text
from hybrid_proxy.dataplane.table import LOOPBACK, NodeNetwork, family_of

COMMENT: Final = '-m comment --comment "hybrid-proxy ipvs"'
JUMPS: Final = {
    "mangle": ("PREROUTING", "INPUT", "OUTPUT"),
    "nat": ("PREROUTING", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
}
_NEW: Final = "-m conntrack --ctstate NEW"
_REFUSED: Final = {4: "127.0.0.1", 6: "::1"}
_REFUSED_PORT: Final = 1  # tcpmux: the packet does not get there, the rule comes first


def pod_match(node: NodeNetwork, family: int) -> str:
    """Returns the match of packets from pods; empty: pods are not recognized."""
    if node.pods.interface:
        return f"-i {node.pods.interface}{'+' * node.pods.by_name_prefix}"
    prefix = node.pods.prefix(family)
    return f"-s {prefix}" if prefix else ""


def restore_text(
    family: int,
    node: NodeNetwork,
    saved: dict[str, str],
    health_ports: Iterable[int] = (),
    *,
    draining: bool = False,
    compares: bool = True,
) -> str:
    """Returns a restore that rewrites our chains and jumps in one transaction for each table.

    `saved` is by table what iptables-save prints now: existing jumps are removed. While the mode drains, another one
    decides: open flows need that conntrack translates, for which a chain in nat is enough, and that answers are
    forwarded; and nothing of this node may answer at the addresses. `compares`: the kernel has the match bpf.
    """
    if draining:
        unknown = [(f"{PREFIX}{hook}", f"-g {PREFIX}UNKNOWN") for hook in ("INPUT", "OUTPUT")]
        rules: dict[str, list[tuple[str, str]]] = {"filter": [*_filter_for_any(family, health_ports), *unknown]}
    else:
        rules = {
            "mangle": list(_mangle(family, node)),
            "nat": list(_nat(family, node, compares=compares)),
            "filter": [*_filter(family, node, health_ports)],
        }
    return "".join(_table(table, rules.get(table, []), saved.get(table, "")) for table in JUMPS)


def _table(table: str, rules: list[tuple[str, str]], saved: str) -> str:
    chains = list(dict.fromkeys([*(f"{PREFIX}{hook}" for hook in JUMPS[table]), *(chain for chain, _ in rules)]))
    there = parse(saved)
    lines = [f":{chain} - [0:0]" for chain in chains]
    lines += [f"-D {chain} {rule}" for chain, rule in jumps(there, PREFIX)]
    lines += [f"-I {hook} 1 {COMMENT} -j {PREFIX}{hook}" for hook in JUMPS[table]]
    lines += [f"-A {chain} {rule}" for chain, rule in rules]
    gone = [chain for chain in there if chain.startswith(PREFIX) and chain not in chains]
    lines += [*(f":{chain} - [0:0]" for chain in gone), *(f"-X {chain}" for chain in gone)]
    return table_text(table, lines)


def ours(saved: str) -> tuple[str, ...]:
    """Returns our chains and rules of a saved table, and the jumps to them, to find foreign changes."""
    there = parse(saved)
    mine = {chain: rules for chain, rules in there.items() if chain.startswith(PREFIX)}
    rules = [(chain, rule) for chain, held in mine.items() for rule in held]
    return (*(f":{chain}" for chain in mine), *(f"-A {chain} {rule}" for chain, rule in rules + jumps(there, PREFIX)))


def samples(family: int, probe_set: str, mark_set: str) -> dict[str, list[str]]:
    """Returns the rules that the mode needs, with two existing sets, to be tried."""
    return {
        "mangle": [f"-j SET --map-set {mark_set} dst,dst --map-mark"],
        "nat": [
            f"-m set --match-set {probe_set} dst,dst -j MARK --set-xmark 0x4000/0x4000",
            "-j MASQUERADE --random-fully",
            f"-p tcp -j DNAT --to-destination {_refusal_target(family)}",
        ],
        "filter": [
            f"{_NEW} -m set ! --match-set {probe_set} dst,dst -j RETURN",
            "-p tcp -j REJECT --reject-with tcp-reset",
        ],
    }


def _set(family: int, name: str, fields: str = "dst,dst", *, negated: bool = False) -> str:
    return f"-m set {'! ' if negated else ''}--match-set {set_name(family, name)} {fields}"


def _mangle(family: int, node: NodeNetwork) -> Iterator[tuple[str, str]]:
    pods = pod_match(node, family)
    before, output, internal = f"{PREFIX}PREROUTING", f"{PREFIX}OUTPUT", f"{PREFIX}INSIDE"
    always = f"{PREFIX}ALWAYS"
    allowed = _set(family, "ALLOWED", "dst,dst,src", negated=True)
    yield always, f"{_set(family, 'SOURCES')} {allowed} -j DROP"
    for cidr in node.service_cidrs:
        if ip_network(cidr).version == family:
            nobody = f"{_set(family, 'ADDRESSES', 'dst', negated=True)} -m addrtype ! --dst-type LOCAL"
            yield always, f"-d {cidr} {nobody} -j DROP"
    yield internal, f"{_set(family, 'DROP-IN')} -j DROP"
    for chain in (before, output):
        yield chain, "-m conntrack ! --ctstate NEW -j RETURN"
        yield chain, f"-j {always}"
    for address in node.loopback:  # only this node itself may connect there, whatever route_localnet says
        if ip_network(address).version == family:
            yield before, f"-d {address}{'/32' if family == 4 else '/128'} ! -i lo -j DROP"
    if family == 6:  # a router would not forward these, whose scope ends here; IPVS does not check
        for source in ("::/128", "fe80::/10"):
            yield before, f"-s {source} {_set(family, 'PORTS')} -j DROP"
    if pods:
        yield before, f"{pods} -g {internal}"
    yield before, f"{_set(family, 'DROP-OUT')} -j DROP"
    yield output, f"-j {internal}"
    if pods:
        yield f"{PREFIX}INPUT", f"{pods} -j RETURN"
    yield f"{PREFIX}INPUT", f"{_NEW} -j SET --map-set {set_name(family, 'MARKS')} dst,dst --map-mark"


def itself(family: int) -> str:
    """Matches a packet that leaves the node for the address that it came from: its sender is its own backend."""
    return f'! -o lo -m bpf --bytecode "{same_addresses(family)}"'


def _nat(family: int, node: NodeNetwork, *, compares: bool) -> Iterator[tuple[str, str]]:
    pods = pod_match(node, family)
    bit = 1 << node.masquerade_bit
    before, output, after = (f"{PREFIX}{hook}" for hook in JUMPS["nat"])
    mark = f"-j MARK --set-xmark {bit:#x}/{bit:#x}"
    if pods:
        yield f"{PREFIX}POD", f"{_set(family, 'MASQ-POD')} {mark}"
        yield before, f"{pods} -g {PREFIX}POD"
    yield before, f"{_set(family, 'MASQ-EXT')} {mark}"
    target = _refusal_target(family)
    yield output, f"-p tcp {_set(family, 'REJECT-IN')} -j DNAT --to-destination {target}"
    for protocol in ("tcp", "udp") if any(family_of(address) == family for address in node.loopback) else ():
        # IPVS drops what would leave the node with such a source (`dataplane.localhost`): it is refused instead.
        bound = f"-s {LOOPBACK[family]} -d {LOOPBACK[family]} -p {protocol}"
        yield output, f"{bound} {_set(family, 'PORTS')} -j DNAT --to-destination {target}"
    yield output, f"{_set(family, 'MASQ-NODE')} {mark}"
    # This node's route to an address of its own has that very address as its source, so that no pod could answer.
    yield output, f"{_set(family, 'ADDRESSES', 'src')} {_set(family, 'PORTS')} {mark}"
    # Without the match bpf: only backends that are known to be on this node.
    found = itself(family) if compares else _set(family, "HAIRPIN", "dst,dst,src")
    yield after, f"{found} -j MASQUERADE --random-fully"
    yield after, f"-m mark ! --mark {bit:#x}/{bit:#x} -j RETURN"
    yield after, f"-j MARK --set-xmark {bit:#x}/0x0"
    yield after, "-j MASQUERADE --random-fully"


def _refusal_target(family: int) -> str:
    address = _REFUSED[family]
    return f"[{address}]:{_REFUSED_PORT}" if family == 6 else f"{address}:{_REFUSED_PORT}"


def _filter(family: int, node: NodeNetwork, health_ports: Iterable[int]) -> Iterator[tuple[str, str]]:
    pods = pod_match(node, family)
    enter, _, output = (f"{PREFIX}{hook}" for hook in JUMPS["filter"])
    reject, internal, unknown = f"{PREFIX}REJECT", f"{PREFIX}INSIDE", f"{PREFIX}UNKNOWN"
    yield from _filter_for_any(family, health_ports)
    yield internal, f"{_set(family, 'REJECT-IN')} -j {reject}"
    yield internal, f"-g {unknown}"
    if pods:
        yield enter, f"{pods} -g {internal}"
    yield enter, f"{_set(family, 'REJECT-OUT')} -j {reject}"
    yield enter, f"-g {unknown}"
    refused = f"-d {_REFUSED[family]}/{32 if family == 4 else 128} -p tcp -m tcp --dport {_REFUSED_PORT}"
    yield output, f"{refused} -m conntrack --ctstate DNAT -j {reject}"
    yield output, f"-g {internal}"


def _filter_for_any(family: int, health_ports: Iterable[int]) -> Iterator[tuple[str, str]]:
    """Returns the common beginning: the chains that reject, and what is accepted before them."""
    enter, forward, output = (f"{PREFIX}{hook}" for hook in JUMPS["filter"])
    reject, unknown = f"{PREFIX}REJECT", f"{PREFIX}UNKNOWN"
    yield reject, "-p tcp -j REJECT --reject-with tcp-reset"
    unreachable = "icmp-port-unreachable" if family == 4 else "icmp6-port-unreachable"
    yield reject, f"-j REJECT --reject-with {unreachable}"
    yield unknown, f"-p {'icmp' if family == 4 else 'ipv6-icmp'} -j RETURN"
    not_served = f"{_set(family, 'ADDRESSES', 'dst')} {_set(family, 'PORTS', negated=True)}"
    yield unknown, f"{not_served} -j {reject}"
    for chain in (enter, output):
        yield chain, "-m conntrack ! --ctstate NEW -j RETURN"
    for port in health_ports:
        yield enter, f"-p tcp -m tcp --dport {port} -j ACCEPT"  # at service addresses too: load balancers ask there
    # Requests do not pass here, IPVS sends them from INPUT; answers of real servers do.
    yield forward, "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
