"""Rules in the shape that kube-proxy's modes iptables, nftables and ipvs give them, for comparison.

The shapes are those of kube-proxy v1.36 as `iptables-save` and `nft list table` show them on a node: chains, maps,
which chain leads where, at which hook; names and texts of services are ours. iptables: one line for each service, in a
list. nftables: an element of a verdict map for each service, which leads to a chain of its own. ipvs: a virtual server,
an address of a dummy device and an element of a set for each service, and a constant number of rules. Of a
benchmark's services only the measured one has an endpoint that packets reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.kernel.ipset import Ipsets
from hybrid_proxy.dataplane.kernel.ipvs import Ipvs
from hybrid_proxy.dataplane.table import Protocol
from hybrid_proxy.dataplane.virtual_servers import Change, Config, Destination, Edit, Element, Kind, Server, Verb
from hybrid_proxy.workshop.lab.network import SERVICE_CIDRS, Lab

__all__ = ["PEERS", "Row", "Rows", "load", "nftables_change", "put"]

Socket = tuple[str, int]
MARK: Final = "0x4000"


class Row(NamedTuple):
    """One service: ClusterIP and port, its endpoints."""

    frontend: Socket
    backends: tuple[Socket, ...]
    protocol: str = "tcp"


class Rows(NamedTuple):
    """What is programmed; clients outside `cidr` are masqueraded. `hooks`: the chains have no rules that lead there."""

    cidr: str
    services: list[Row]
    hooks: bool = True


def load(made: Lab, mode: str, services: int, cluster_cidr: str, frontend: Socket, backend: Socket) -> None:
    """Put the rules of a mode (of `PEERS`) into the node of a lab: `services` of them and the measured one."""
    ends = [f"{n // 250}.{n % 250 + 1}" for n in range(services)]
    rows = [Row((f"10.112.{end}", 80), ((f"10.160.{end}", 8080),)) for end in ends]
    rows.insert(services // 2, Row(frontend, (backend,)))
    put(made, mode, Rows(cluster_cidr, rows))


def put(made: Lab, mode: str, rows: Rows) -> None:
    """Put these rules of a mode (of `PEERS`) into the node of a lab, in place of those that are there."""
    lines, command = PEERS[mode]
    if mode == "ipvs":
        _virtual_servers(made, rows)
    _load(made, command, lines(rows))


def _load(made: Lab, command: Iterable[str], lines: Iterable[str]) -> None:
    path = made.folder / "peer-rules"
    path.write_text("".join(f"{line}\n" for line in lines))
    done = made.run("node", [*command, str(path)], timeout=300)
    assert done.returncode == 0, done.stderr


def _iptables(rows: Rows) -> Iterator[str]:
    yield from _filter(rows.hooks)
    yield from _nat(rows)


def _filter(hooks: bool) -> Iterator[str]:
    yield "*filter"
    names = ["PROXY-FIREWALL", "EXTERNAL-SERVICES", "NODEPORTS", "SERVICES", "FORWARD", "FIREWALL"]
    yield from (f":KUBE-{name} - [0:0]" for name in names)
    yield from _filter_hooks() if hooks else ()
    yield "-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP"
    yield f"-A KUBE-FORWARD -m mark --mark {MARK}/{MARK} -j ACCEPT"
    yield "-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
    yield "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
    yield "COMMIT"


def _filter_hooks() -> Iterator[str]:
    new = "-m conntrack --ctstate NEW -j"
    for hook in ("INPUT", "FORWARD", "OUTPUT"):
        yield f"-A {hook} {new} KUBE-PROXY-FIREWALL"
    yield from ("-A INPUT -j KUBE-NODEPORTS", f"-A INPUT {new} KUBE-EXTERNAL-SERVICES", "-A INPUT -j KUBE-FIREWALL")
    yield "-A FORWARD -j KUBE-FORWARD"
    yield from (f"-A FORWARD {new} KUBE-{name}" for name in ("SERVICES", "EXTERNAL-SERVICES"))
    yield from (f"-A OUTPUT {new} KUBE-SERVICES", "-A OUTPUT -j KUBE-FIREWALL")


def _nat(rows: Rows) -> Iterator[str]:
    yield "*nat"
    yield from (f":KUBE-{name} - [0:0]" for name in ("SERVICES", "NODEPORTS", "POSTROUTING", "MARK-MASQ"))
    for number, row in enumerate(rows.services):
        yield f":KUBE-SVC-{number:016d} - [0:0]"
        yield from (f":KUBE-SEP-{sep} - [0:0]" for sep in _endpoints(number, row))
    if rows.hooks:
        yield from (f"-A {hook} -j KUBE-SERVICES" for hook in ("PREROUTING", "OUTPUT"))
        yield "-A POSTROUTING -j KUBE-POSTROUTING"
    yield f"-A KUBE-MARK-MASQ -j MARK --or-mark {MARK}"
    yield f"-A KUBE-POSTROUTING -m mark ! --mark {MARK}/{MARK} -j RETURN"
    yield f"-A KUBE-POSTROUTING -j MARK --xor-mark {MARK}"
    yield "-A KUBE-POSTROUTING -j MASQUERADE --random-fully"
    for number, row in enumerate(rows.services):
        (vip, port), svc, way = row.frontend, f"KUBE-SVC-{number:016d}", f"-p {row.protocol} -m {row.protocol}"
        yield f"-A KUBE-SERVICES -d {vip}/32 {way} --dport {port} -j {svc}"
        yield f"-A {svc} ! -s {rows.cidr} -d {vip}/32 {way} --dport {port} -j KUBE-MARK-MASQ"
        for left, (sep, (address, target)) in zip(
            range(len(row.backends), 0, -1), _endpoints(number, row).items(), strict=True
        ):
            chance = f"-m statistic --mode random --probability {1 / left:.11f} " if left > 1 else ""
            yield f"-A {svc} {chance}-j KUBE-SEP-{sep}"
            yield f"-A KUBE-SEP-{sep} -s {address}/32 -j KUBE-MARK-MASQ"
            yield f"-A KUBE-SEP-{sep} {way} -j DNAT --to-destination {address}:{target}"
    yield "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"
    yield "COMMIT"


def _endpoints(number: int, row: Row) -> dict[str, Socket]:
    """The endpoints of a service by the names of their chains."""
    return {f"{number:012d}{place:04d}": backend for place, backend in enumerate(row.backends)}


_FRONTENDS = "ipv4_addr . inet_proto . inet_service"
_CHECKS = {
    "firewall-check": ("ip daddr . meta l4proto . th dport vmap @firewall-ips",),
    "service-endpoints-check": ("ip daddr . meta l4proto . th dport vmap @no-endpoint-services",),
    "nodeport-endpoints-check": ("ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports",),
    "cluster-ips-check": ("ip daddr @cluster-ips reject", f"ip daddr {SERVICE_CIDRS[0]} drop"),
}
_HOOKS = {  # name -> type, hook, priority, rules
    "filter-prerouting-pre-dnat": ("filter", "prerouting", -110, ("ct state new jump firewall-check",)),
    "filter-output-pre-dnat": ("filter", "output", -110, ("ct state new jump firewall-check",)),
    "filter-input": ("filter", "input", 0, ("ct state new jump nodeport-endpoints-check",
                                            "ct state new jump service-endpoints-check")),
    "filter-forward": ("filter", "forward", 0, ("ct state new jump service-endpoints-check",
                                                "ct state new jump cluster-ips-check")),
    "filter-output": ("filter", "output", 0, ("ct state new jump service-endpoints-check",
                                              "ct state new jump cluster-ips-check")),
    "nat-prerouting": ("nat", "prerouting", -100, ("jump services",)),
    "nat-output": ("nat", "output", -100, ("jump services",)),
    "nat-postrouting": ("nat", "postrouting", 100, ("jump masquerading",)),
}  # fmt: skip


def _nftables(rows: Rows) -> Iterator[str]:
    """Endpoints have chains of their own with affinity alone; without, one rule of the service translates to them."""
    yield from ("table ip kube-proxy", "delete table ip kube-proxy")  # in one transaction with the new one
    yield "table ip kube-proxy {"
    for name in ("cluster-ips", "nodeport-ips"):
        yield from _map(
            f"set {name}",
            "ipv4_addr",
            list(dict.fromkeys(row.frontend[0] for row in rows.services)) * (name == "cluster-ips"),
        )
    yield from _map("set hairpin-connections", "ipv4_addr . ipv4_addr", [])
    yield from _map("map no-endpoint-nodeports", "inet_proto . inet_service : verdict", [])
    yield from _map("map service-nodeports", "inet_proto . inet_service : verdict", [])
    yield from _map("map no-endpoint-services", f"{_FRONTENDS} : verdict", [])
    yield from _map("map firewall-ips", f"{_FRONTENDS} : verdict", [])
    for name, rules in _CHECKS.items():
        yield from _chain(name, *rules)
    yield from _chain("mark-for-masquerade", f"meta mark set meta mark or {MARK}")
    yield from _chain(
        "masquerading",
        f"meta mark and {MARK} != 0 meta mark set meta mark xor {MARK} masquerade fully-random",
        "ct status dnat ip saddr . ip daddr @hairpin-connections masquerade",
    )
    found = []
    for number, row in enumerate(rows.services):
        name, (vip, port) = _chain_name(number, row), row.frontend
        yield from _chain(name, *_service_rules(rows.cidr, row))
        found.append(f"{vip} . {row.protocol} . {port} : goto {name}")
    yield from _map("map service-ips", f"{_FRONTENDS} : verdict", found)
    yield from _chain(
        "services",
        "ip daddr . meta l4proto . th dport vmap @service-ips",
        "ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports",
    )
    for name, (kind, hook, priority, rules) in _HOOKS.items():
        yield from _chain(name, f"type {kind} hook {hook} priority {priority};", *rules)
    yield "}"


def _chain_name(number: int, row: Row) -> str:
    return f"service-{number:08d}-default/other/{row.protocol}/main"


def _service_rules(cidr: str, row: Row) -> tuple[str, str]:
    (vip, port), protocol = row.frontend, row.protocol
    outside = f"ip daddr {vip} {protocol} dport {port} ip saddr != {cidr} jump mark-for-masquerade"
    slots = ", ".join(f"{slot} : {address} . {target}" for slot, (address, target) in enumerate(row.backends))
    choice = f"dnat ip to numgen random mod {len(row.backends)} map {{ {slots} }}"
    return outside, f"meta l4proto {protocol} {choice}"


def nftables_change(number: int, rows: Rows) -> Iterator[str]:
    """What gives the service of that number other endpoints: its chain is emptied and filled again."""
    row = rows.services[number]
    chain = f"ip kube-proxy {_chain_name(number, row)}"
    yield f"flush chain {chain}"
    yield from (f"add rule {chain} {rule}" for rule in _service_rules(rows.cidr, row))


def _map(head: str, kind: str, elements: list[str]) -> Iterator[str]:
    yield f"{head} {{ type {kind};"
    if elements:
        yield f"elements = {{ {', '.join(elements)} }}"
    yield "}"


def _chain(name: str, *rules: str) -> Iterator[str]:
    yield from (f"chain {name} {{", *rules, "}")


_SETS = {  # those that rules name
    "KUBE-LOOP-BACK": "hash:ip,port,ip",
    "KUBE-CLUSTER-IP": "hash:ip,port",
    "KUBE-EXTERNAL-IP": "hash:ip,port",
    "KUBE-EXTERNAL-IP-LOCAL": "hash:ip,port",
    "KUBE-LOAD-BALANCER": "hash:ip,port",
    "KUBE-HEALTH-CHECK-NODE-PORT": "hash:ip,port",  # a bitmap of ports there: that is empty as well
    "KUBE-IPVS-IPS": "hash:ip",
}
_VS_SETTINGS = ("conntrack", "expire_nodest_conn", "expire_quiescent_template")
_DEVICE = "kube-ipvs0"


def _virtual_servers(made: Lab, rows: Rows) -> None:
    """All but the rules: servers (round robin), sets, and the addresses of a dummy device."""
    changes = []
    members: dict[str, dict[Element, None]] = {name: {} for name in _SETS}
    for row in rows.services:
        (vip, port), protocol = row.frontend, Protocol[row.protocol.upper()]
        server = Server(4, protocol, vip, port)
        changes.append(Change(Verb.NEW_SERVER, server, Config("rr")))
        changes += [Change(Verb.NEW_DESTINATION, server, None, Destination(*each)) for each in row.backends]
        members["KUBE-CLUSTER-IP"][Element(vip, port, protocol)] = None
        members["KUBE-IPVS-IPS"][Element(vip)] = None
        loops = (Element(address, target, protocol, address) for address, target in row.backends)
        members["KUBE-LOOP-BACK"].update(dict.fromkeys(loops))
    _load(made, ("ip", "-batch"), _addresses(members["KUBE-IPVS-IPS"]))
    with made.inside("node"), closing(Ipvs()) as ipvs, closing(Ipsets()) as sets:
        for name, kind in _SETS.items():
            sets.create(name, Kind(kind), 4)
            sets.change([Edit(name, 4, True, members[name])])
        ipvs.change(changes)
    for setting in _VS_SETTINGS:
        made.run("node", ["sysctl", "-qw", f"net.ipv4.vs.{setting}=1"])


def _addresses(members: Iterable[Element]) -> Iterator[str]:
    yield f"link add {_DEVICE} type dummy"
    yield from (f"addr add {member.address}/32 dev {_DEVICE}" for member in members)


def _ipvs(rows: Rows) -> Iterator[str]:
    """Rules whose sets may be empty are left out where kube-proxy leaves them out: those of other kinds of address."""
    clusters = "-m set --match-set KUBE-CLUSTER-IP dst,dst"
    yield "*filter"
    names = ["FORWARD", "NODE-PORT", "PROXY-FIREWALL", "SOURCE-RANGES-FIREWALL", "IPVS-FILTER", "IPVS-OUT-FILTER"]
    yield from (f":KUBE-{name} - [0:0]" for name in names)
    yield from (f"-A INPUT -j KUBE-{name}" for name in ("IPVS-FILTER", "PROXY-FIREWALL", "NODE-PORT"))
    yield from (f"-A FORWARD -j KUBE-{name}" for name in ("PROXY-FIREWALL", "FORWARD"))
    yield "-A OUTPUT -j KUBE-IPVS-OUT-FILTER"
    yield f"-A KUBE-FORWARD -m mark --mark {MARK}/{MARK} -j ACCEPT"
    yield "-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
    yield "-A KUBE-SOURCE-RANGES-FIREWALL -j DROP"
    yield "-A KUBE-NODE-PORT -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst,dst -j ACCEPT"
    passed = ("LOAD-BALANCER", "CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL", "HEALTH-CHECK-NODE-PORT")
    yield from (f"-A KUBE-IPVS-FILTER -m set --match-set KUBE-{name} dst,dst -j RETURN" for name in passed)
    yield "-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT"
    yield from ("COMMIT", "*nat")
    yield from (
        f":KUBE-{name} - [0:0]" for name in ("SERVICES", "POSTROUTING", "NODE-PORT", "LOAD-BALANCER", "MARK-MASQ")
    )
    yield from (f"-A {hook} -j KUBE-SERVICES" for hook in ("PREROUTING", "OUTPUT"))
    yield "-A POSTROUTING -j KUBE-POSTROUTING"
    yield "-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN"
    yield f"-A KUBE-SERVICES {clusters} ! -s {rows.cidr} -j KUBE-MARK-MASQ"
    yield "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT"
    yield f"-A KUBE-SERVICES {clusters} -j ACCEPT"
    yield "-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ"
    yield "-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE"
    yield f"-A KUBE-POSTROUTING -m mark ! --mark {MARK}/{MARK} -j RETURN"
    yield f"-A KUBE-POSTROUTING -j MARK --xor-mark {MARK}"
    yield "-A KUBE-POSTROUTING -j MASQUERADE --random-fully"
    yield f"-A KUBE-MARK-MASQ -j MARK --or-mark {MARK}"
    yield "COMMIT"


# Mode -> its rules, and the command that loads a file of them.
PEERS: Final[dict[str, tuple[Callable[[Rows], Iterator[str]], tuple[str, ...]]]] = {
    "iptables": (_iptables, ("iptables-restore", "--noflush")),
    "nftables": (_nftables, ("nft", "-f")),
    "ipvs": (_ipvs, ("iptables-restore", "--noflush")),
}
