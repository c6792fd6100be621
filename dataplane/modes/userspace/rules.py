"""PURE. The tables of this mode as text for nft(8): a constant number of rules, everything else is elements.

Order of a packet: the marks of replies to a kept address (-150), sources that may not pass (-110), redirection
(-100), what was not redirected although it is a service's (-90), and at the proxy ports themselves what no router would
have forwarded, and what did not come by a redirection (0).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from dataplane.modes.userspace.lower import Lowered, listen_addresses
from dataplane.table import NodeNetwork, WhenEmpty, family_of

__all__ = [
    "FAMILIES", "TABLE", "Elements", "answer_mark", "delete_table", "differences", "elements_of", "lead_nobody",
    "skeleton", "update",
]  # fmt: skip

TABLE: Final = "hybrid-proxy-userspace"
FAMILIES: Final = {4: "ip", 6: "ip6"}
_ADDRESS: Final = {4: "ipv4_addr", 6: "ipv6_addr"}
_VERDICT: Final = {WhenEmpty.REJECT: "goto refuse", WhenEmpty.DROP: "drop"}

_MAPS: Final = frozenset(
    f"{side}{what}" for side in ("inside", "outside") for what in ("", "-ports", "-empty", "-ports-empty")
)
_PROTOCOLS: Final = {"tcp": "6", "udp": "17", "sctp": "132"}
# One set for each protocol: nft before 1.1 converts the protocol in a key with ranges as if it had two bytes, which
# recent kernels refuse.
_ALLOWED: Final = {number: f"allowed-{name}" for name, number in _PROTOCOLS.items()}
_INTERVALS: Final = frozenset({*_ALLOWED.values(), "service-cidrs"})  # the kernel tells them merged and split

# (name of the set or map, key) -> value, None for the elements of a set
Elements = dict[tuple[str, str], str | None]


class _Words(NamedTuple):
    ip: str
    kind: str
    key: str
    port: str


def _words(family: int) -> _Words:
    ip = FAMILIES[family]
    return _Words(ip, _ADDRESS[family], f"{ip} daddr . meta l4proto . th dport", "meta l4proto . th dport")


def answer_mark(node: NodeNetwork) -> int:
    """The mark of answers that this node receives for a kept address: the masquerade bit and one more.

    With the masquerade bit alone, whatever another proxy is about to masquerade would be delivered here: a mode of
    ours that still serves while this one starts, a kube-proxy with the same bit.
    """
    return 1 << node.masquerade_bit | 1 << (12 if node.masquerade_bit != 12 else 13)


def delete_table(family: int) -> str:
    """Remove the table whether it is there or not."""
    name = f"{FAMILIES[family]} {TABLE}"
    return f"add table {name}\ndelete table {name}\n"


def skeleton(family: int, node: NodeNetwork) -> str:
    """Table, sets, chains and rules, without the elements of services; in place of what was there."""
    w = _words(family)
    bits = answer_mark(node)
    icmp = "icmp" if family == 4 else "icmpv6"
    own = [a for a in node.node_port_addresses if family_of(a) == family]
    cidrs = [c for c in node.service_cidrs if family_of(c) == family]
    pods = _pods(family, node)
    mark, unmark = f"meta mark set meta mark | {bits:#x}", f"meta mark set meta mark & {~bits & 0xFFFFFFFF:#x}"
    kept = f"ct mark & {bits:#x} == {bits:#x}"
    listen = listen_addresses(node).get(family)
    relayed = f"{w.ip} daddr {listen} {w.port} @listeners"
    guard = f"{relayed} goto refuse" if listen else ""
    # What the stack would not forward to a backend: frames for all, and sources of a scope that ends here.
    unsound = f"{relayed} meta pkttype != unicast drop" if listen else ""
    narrow = f"{relayed} ip6 saddr {{ ::, fe80::/10 }} drop" if listen and family == 6 else ""
    ranges = f"type {w.kind} . inet_service . {w.kind}; flags interval;"
    ranges = "\n    ".join(f"set {name} {{ {ranges} }}" for name in _ALLOWED.values())
    allowed = "\n".join(
        f"        meta l4proto {number} {w.ip} daddr . th dport . {w.ip} saddr != @{name} drop"
        for number, name in _ALLOWED.items()
    )
    text = f"""
    map inside {{ type {w.kind} . inet_proto . inet_service : {w.kind} . inet_service; }}
    map outside {{ type {w.kind} . inet_proto . inet_service : {w.kind} . inet_service; }}
    map inside-ports {{ type inet_proto . inet_service : {w.kind} . inet_service; }}
    map outside-ports {{ type inet_proto . inet_service : {w.kind} . inet_service; }}
    map inside-empty {{ type {w.kind} . inet_proto . inet_service : verdict; }}
    map outside-empty {{ type {w.kind} . inet_proto . inet_service : verdict; }}
    map inside-ports-empty {{ type inet_proto . inet_service : verdict; }}
    map outside-ports-empty {{ type inet_proto . inet_service : verdict; }}
    set firewalled {{ type {w.kind} . inet_proto . inet_service; }}
    {ranges}
    set cluster-ips {{ type {w.kind}; }}
    set service-cidrs {{ type {w.kind}; flags interval; auto-merge; {_initial(cidrs)} }}
    set node-addresses {{ type {w.kind}; {_initial(own)} }}
    set listeners {{ type inet_proto . inet_service; }}

    chain refuse {{
        ct state invalid drop
        meta l4proto tcp reject with tcp reset
        reject with {icmp} port-unreachable
    }}
    chain strangers {{
        {w.ip} daddr @cluster-ips goto refuse
        {w.ip} daddr @service-cidrs drop
    }}
    chain inside-rest {{
        {w.key} vmap @inside-empty
        {w.ip} daddr @node-addresses {w.port} vmap @inside-ports-empty
        goto strangers
    }}
    chain outside-rest {{
        {w.key} vmap @outside-empty
        {w.ip} daddr @node-addresses {w.port} vmap @outside-ports-empty
        goto strangers
    }}
    chain inside-nat {{
        dnat {w.ip} to {w.key} map @inside
        {w.ip} daddr @node-addresses dnat {w.ip} to {w.port} map @inside-ports
    }}
    chain outside-nat {{
        dnat {w.ip} to {w.key} map @outside
        {w.ip} daddr @node-addresses dnat {w.ip} to {w.port} map @outside-ports
    }}
    chain guarded {{
{allowed}
    }}
    chain firewall {{
        {w.key} @firewalled goto guarded
    }}

    chain marks-prerouting {{
        type filter hook prerouting priority -150;
        ct direction reply {kept} {mark}
    }}
    chain marks-output {{
        type route hook output priority -150;
        meta priority 4850:10 ct state new ct mark set ct mark | {bits:#x}
        ct direction reply {kept} {mark}
    }}
    chain marks-input {{
        type filter hook input priority -150;
        ct direction reply {kept} {unmark}
    }}
    chain firewall-prerouting {{
        type filter hook prerouting priority -110;
        jump firewall
    }}
    chain firewall-output {{
        type filter hook output priority -110;
        jump firewall
    }}
    chain nat-prerouting {{
        type nat hook prerouting priority -100;
        {f"{pods} goto inside-nat" if pods else ""}
        goto outside-nat
    }}
    chain nat-output {{
        type nat hook output priority -100;
        meta priority {{ 4850:0, 4850:10 }} return
        goto inside-nat
    }}
    chain rest-prerouting {{
        type filter hook prerouting priority -90;
        ct status dnat return
        {f"{pods} goto inside-rest" if pods else ""}
        goto outside-rest
    }}
    chain rest-output {{
        type filter hook output priority -90;
        ct status dnat return
        meta priority {{ 4850:0, 4850:10 }} return
        goto inside-rest
    }}
    chain guard {{
        type filter hook input priority 0;
        {unsound}
        {narrow}
        ct status dnat return
        {guard}
    }}
"""
    body = "\n".join(line for line in text.split("\n") if line.strip())
    return f"{delete_table(family)}table {w.ip} {TABLE} {{\n{body}\n}}\n"


_LEADING: Final = (
    "firewall",
    "nat",
    "rest",
)  # chains of new flows, at both hooks; the others are for those that are known


def lead_nobody(family: int) -> str:
    """Empty the chains that decide about new flows; the next whole update writes them again."""
    chains = [f"{name}-{hook}" for name in _LEADING for hook in ("prerouting", "output")]
    return "".join(f"flush chain {FAMILIES[family]} {TABLE} {chain}\n" for chain in chains)


def _pods(family: int, node: NodeNetwork) -> str:
    """The match for packets of pods, empty: they are not told apart."""
    if node.pods.interface:
        return f'iifname "{node.pods.interface}{"*" * node.pods.by_name_prefix}"'
    prefix = node.pods.prefix(family)
    return f"{FAMILIES[family]} saddr {prefix}" if prefix else ""


def _initial(items: Iterable[str]) -> str:
    joined = ", ".join(items)
    return f"elements = {{ {joined} }};" if joined else ""


def elements_of(lowered: Lowered, protocol: int, listen: str, numbers: tuple[int, ...]) -> Elements:
    """The elements of one service port.

    Args:
        lowered: as `lower` says.
        protocol: of IANA.
        listen: the address that clients are led to.
        numbers: the proxy ports, in the order of `Row.ports`; empty: the relay has none, clients are refused.
    """
    found: Elements = {}
    for element in lowered.elements:
        at = f"{protocol} . {element.port}"
        name = element.side
        if element.address is None:
            name += "-ports"
        else:
            at = f"{element.address} . {at}"
        if isinstance(element.target, WhenEmpty):
            found[f"{name}-empty", at] = _VERDICT[element.target]
        elif numbers:
            found[name, at] = f"{listen} . {numbers[element.target]}"
        else:
            found[f"{name}-empty", at] = _VERDICT[WhenEmpty.REJECT]
    for number in numbers:
        found["listeners", f"{protocol} . {number}"] = None
    for address, port, sources in lowered.firewalled:
        found["firewalled", f"{address} . {protocol} . {port}"] = None
        for source in sources:
            found[_ALLOWED[str(protocol)], f"{address} . {port} . {source}"] = None
    for address in lowered.cluster_ips:
        found["cluster-ips", address] = None
    return found


def update(family: int, old: Elements, new: Elements) -> str:
    """The commands that make the one of the other; removals first, so that values can change."""
    gone: dict[str, list[str]] = {}
    come: dict[str, list[str]] = {}
    for (name, key), value in old.items():
        if (name, key) not in new or new[name, key] != value:
            gone.setdefault(name, []).append(key if value is None else f"{key} : {value}")
    for (name, key), value in new.items():
        if (name, key) not in old or old[name, key] != value:
            come.setdefault(name, []).append(key if value is None else f"{key} : {value}")
    return "".join((*_commands("delete", family, gone), *_commands("add", family, come)))


def _commands(verb: str, family: int, changes: dict[str, list[str]]) -> Iterator[str]:
    for name, items in changes.items():
        yield f"{verb} element {FAMILIES[family]} {TABLE} {name} {{ {', '.join(items)} }}\n"


def differences(family: int, node: NodeNetwork, elements: Elements, items: Iterable[dict[str, Any]]) -> list[str]:
    """Chains, sets and maps that are not as they were written, by name.

    Args:
        family: of the table.
        node: that the skeleton was made for.
        elements: all that were added.
        items: what `list table` tells, as libnftables-json(5) has it.
    """
    rules: Counter[str] = Counter()
    found: Elements = {}
    for item in items:
        if rule := item.get("rule"):
            rules[rule["chain"]] += 1
        elif stored := item.get("map") or item.get("set"):
            name = stored["name"]
            for element in stored.get("elem", ()):
                pair = element if name in _MAPS else (element, None)
                key, value = pair
                found[name, _text(key)] = None if value is None else _text(value)
    wrong = {chain for chain, count in _rule_counts(skeleton(family, node)).items() if rules[chain] != count}
    wanted = {key: value for key, value in elements.items() if key[0] not in _INTERVALS}
    present = {key: value for key, value in found.items() if key[0] not in _INTERVALS and key[0] != "node-addresses"}
    wrong |= {key[0] for key in wanted.keys() ^ present.keys()}
    wrong |= {key[0] for key in wanted.keys() & present.keys() if wanted[key] != present[key]}
    return sorted(wrong)


def _rule_counts(text: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    chain = ""
    for line in map(str.strip, text.split("\n")):
        if line.startswith("chain "):
            chain = line.split()[1]
            counts[chain] = 0
        elif line == "}":
            chain = ""
        elif chain and not line.startswith("type "):
            counts[chain] += 1
    return counts


def _text(value: Any) -> str:
    """One key or value of libnftables' JSON, as this module writes it."""
    if isinstance(value, dict):
        if "elem" in value:
            return _text(value["elem"]["val"])
        if "concat" in value:
            return " . ".join(_text(part) for part in value["concat"])
        if "goto" in value:
            return f"goto {value['goto']['target']}"
        return str(next(iter(value)))
    return _PROTOCOLS.get(value, str(value))
