"""Rules in the shape of kube-proxy's modes iptables, nftables and ipvs: for comparison, and to stand in for kube-proxy.

The shapes are those of kube-proxy v1.36 as `iptables-save` and `nft list table` show them on a node: chains, maps,
which chain leads where, at which hook; names and texts of services are ours. iptables: one line for each service, in a
list. nftables: an element of a verdict map for each service, which leads to a chain of its own. ipvs: a virtual server,
an address of a dummy device, which is down, and an element of a set for each service, and a constant number of rules.
Of a benchmark's services only the measured one has an endpoint that packets reach. IPv4 alone.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from pyroute2 import IPSet

from hybrid_proxy.dataplane.kernel.ipset import Ipsets
from hybrid_proxy.dataplane.kernel.ipvs import Ipvs
from hybrid_proxy.dataplane.table import Protocol
from hybrid_proxy.dataplane.virtual_servers import Change, Config, Destination, Edit, Element, Server, Verb
from hybrid_proxy.workshop.lab.network import SERVICE_CIDRS, Lab

Socket = tuple[str, int]
MARK: Final = "0x4000"


class Row(NamedTuple):
    """One service: ClusterIP and port, its endpoints, its node port (of mode ipvs alone; 0: none)."""

    frontend: Socket
    backends: tuple[Socket, ...]
    protocol: str = "tcp"
    node_port: int = 0


class Rows(NamedTuple):
    """The services to program; clients outside `cidr` are masqueraded.

    `hooks`: the chains have no rules that lead there. `node`: the node's addresses, for node ports.
    """

    cidr: str
    services: list[Row]
    hooks: bool = True
    node: tuple[str, ...] = ()


def load(made: Lab, mode: str, services: int, cluster_cidr: str, measured: Sequence[Row]) -> None:
    """Put the rules of a mode (of `MODES`) into the node of a lab: `services` of them and the measured ones."""
    ends = [f"{n // 250}.{n % 250 + 1}" for n in range(services)]
    rows = [Row((f"10.112.{end}", 80), ((f"10.160.{end}", 8080),)) for end in ends]
    rows[services // 2 : services // 2] = measured
    with made.inside("node"):
        put(mode, Rows(cluster_cidr, rows))


def put(mode: str, rows: Rows) -> None:
    """Put these rules of a mode (of `MODES`) into the calling thread's namespace, in place of those that are there.

    As one sync of kube-proxy: mode ipvs leaves a real server that is gone, with weight 0, as long as TCP needs it.
    """
    lines, command = MODES[mode]
    if mode == "ipvs":
        _program(rows)
    _load(command, lines(rows))


def _load(command: tuple[str, ...], lines: Iterable[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


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
        name, (vip, port) = f"service-{number:08d}-default/other/{row.protocol}/main", row.frontend
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


def _service_rules(cidr: str, row: Row) -> tuple[str, str]:
    (vip, port), protocol = row.frontend, row.protocol
    outside = f"ip daddr {vip} {protocol} dport {port} ip saddr != {cidr} jump mark-for-masquerade"
    slots = ", ".join(f"{slot} : {address} . {target}" for slot, (address, target) in enumerate(row.backends))
    choice = f"dnat ip to numgen random mod {len(row.backends)} map {{ {slots} }}"
    return outside, f"meta l4proto {protocol} {choice}"


def _map(head: str, kind: str, elements: list[str]) -> Iterator[str]:
    yield f"{head} {{ type {kind};"
    if elements:
        yield f"elements = {{ {', '.join(elements)} }}"
    yield "}"


def _chain(name: str, *rules: str) -> Iterator[str]:
    yield from (f"chain {name} {{", *rules, "}")


_SETS = {
    "hash:ip,port,ip": ("LOOP-BACK", "LOAD-BALANCER-SOURCE-IP"),
    "hash:ip,port": ("CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL", "LOAD-BALANCER", "LOAD-BALANCER-FW",
                     "LOAD-BALANCER-LOCAL", "NODE-PORT-SCTP-HASH", "NODE-PORT-LOCAL-SCTP-HASH"),
    "hash:ip,port,net": ("LOAD-BALANCER-SOURCE-CIDR",),
    "bitmap:port": ("NODE-PORT-TCP", "NODE-PORT-LOCAL-TCP", "NODE-PORT-UDP", "NODE-PORT-LOCAL-UDP",
                    "HEALTH-CHECK-NODE-PORT"),
    "hash:ip": ("IPVS-IPS",),
}  # fmt: skip
_PORTS = (0, 65535)
_VS_SETTINGS = ("conntrack", "expire_nodest_conn", "expire_quiescent_template")
_DEVICE = "kube-ipvs0"


def virtual_servers(rows: Rows, row: Row) -> list[Server]:
    """Returns the virtual servers of one service."""
    places = [row.frontend, *((address, row.node_port) for address in rows.node if row.node_port)]
    return [Server(4, Protocol[row.protocol.upper()], *place) for place in places]


def _program(rows: Rows) -> None:
    """All but the rules: servers (round robin), sets, and the addresses of a dummy device."""
    _load(("ip", "-batch", "-"), _addresses(rows))
    with closing(Ipvs()) as ipvs, closing(Ipsets()) as known, IPSet() as sets:
        for setting in _VS_SETTINGS:
            Path("/proc/sys/net/ipv4/vs", setting).write_text("1")
        for kind, names in _SETS.items():
            ports = {"bitmap_ports_range": _PORTS} if kind == "bitmap:port" else {}
            for name in names:
                sets.create(f"KUBE-{name}", stype=kind, exclusive=False, **ports)
        known.change(Edit(f"KUBE-{name}", 4, True, members) for name, members in _members(rows).items())
        for row in rows.services:
            if row.node_port:
                sets.add(f"KUBE-NODE-PORT-{row.protocol.upper()}", row.node_port, etype="port", exclusive=False)
        ipvs.change(list(_changes(ipvs, rows)))


def _addresses(rows: Rows) -> Iterator[str]:
    if _DEVICE not in (name for _, name in socket.if_nameindex()):
        yield f"link add {_DEVICE} type dummy"
    yield from (f"addr replace {row.frontend[0]}/32 dev {_DEVICE}" for row in rows.services)


def _members(rows: Rows) -> dict[str, dict[Element, None]]:
    members: dict[str, dict[Element, None]] = {"CLUSTER-IP": {}, "IPVS-IPS": {}, "LOOP-BACK": {}}
    for row in rows.services:
        (vip, port), protocol = row.frontend, Protocol[row.protocol.upper()]
        members["CLUSTER-IP"][Element(vip, port, protocol)] = None
        members["IPVS-IPS"][Element(vip)] = None
        loops = (Element(address, target, protocol, address) for address, target in row.backends)
        members["LOOP-BACK"].update(dict.fromkeys(loops))
    return members


def _changes(ipvs: Ipvs, rows: Rows) -> Iterator[Change]:
    known = ipvs.servers()
    for row in rows.services:
        wanted = [Destination(*each) for each in row.backends]
        leave = Verb.SET_DESTINATION if row.protocol == "tcp" else Verb.DELETE_DESTINATION
        for server in virtual_servers(rows, row):
            ended = ipvs.destinations(server).keys() - set(wanted) if server in known else ()
            yield Change(Verb.NEW_SERVER, server, Config("rr"))
            yield from (Change(Verb.NEW_DESTINATION, server, destination=each) for each in wanted)
            yield from (Change(leave, server, destination=each, weight=0) for each in ended)


def _ipvs(rows: Rows) -> Iterator[str]:
    """Rules whose sets may be empty are left out where kube-proxy leaves them out: those of other kinds of address."""
    clusters = "-m set --match-set KUBE-CLUSTER-IP dst,dst"
    yield "*filter"
    names = ["FORWARD", "NODE-PORT", "PROXY-FIREWALL", "SOURCE-RANGES-FIREWALL", "IPVS-FILTER", "IPVS-OUT-FILTER"]
    yield from (f":KUBE-{name} - [0:0]" for name in names)
    if rows.hooks:
        yield from (f"-I INPUT -j KUBE-{name}" for name in ("NODE-PORT", "PROXY-FIREWALL", "IPVS-FILTER"))
        yield from (f"-I FORWARD -j KUBE-{name}" for name in ("FORWARD", "PROXY-FIREWALL"))
        yield "-I OUTPUT -j KUBE-IPVS-OUT-FILTER"
    yield f"-A KUBE-FORWARD -m mark --mark {MARK}/{MARK} -j ACCEPT"
    yield "-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
    yield "-A KUBE-SOURCE-RANGES-FIREWALL -j DROP"
    yield "-A KUBE-NODE-PORT -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT"
    passed = ("LOAD-BALANCER", "CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL")
    yield from (f"-A KUBE-IPVS-FILTER -m set --match-set KUBE-{name} dst,dst -j RETURN" for name in passed)
    yield "-A KUBE-IPVS-FILTER -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j RETURN"
    yield "-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT"
    yield from ("COMMIT", "*nat")
    yield from (
        f":KUBE-{name} - [0:0]" for name in ("SERVICES", "POSTROUTING", "NODE-PORT", "LOAD-BALANCER", "MARK-MASQ")
    )
    if rows.hooks:
        yield from (f"-I {hook} -j KUBE-SERVICES" for hook in ("PREROUTING", "OUTPUT"))
        yield "-I POSTROUTING -j KUBE-POSTROUTING"
    yield "-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN"
    yield f"-A KUBE-SERVICES {clusters} ! -s {rows.cidr} -j KUBE-MARK-MASQ"
    yield "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT"
    yield f"-A KUBE-SERVICES {clusters} -j ACCEPT"
    for protocol in sorted({row.protocol for row in rows.services if row.node_port}):
        ports = f"-p {protocol} -m set --match-set KUBE-NODE-PORT-{protocol.upper()} dst"
        yield f"-A KUBE-NODE-PORT {ports} -j KUBE-MARK-MASQ"
    yield "-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ"
    yield "-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE"
    yield f"-A KUBE-POSTROUTING -m mark ! --mark {MARK}/{MARK} -j RETURN"
    yield f"-A KUBE-POSTROUTING -j MARK --xor-mark {MARK}"
    yield "-A KUBE-POSTROUTING -j MASQUERADE --random-fully"
    yield f"-A KUBE-MARK-MASQ -j MARK --or-mark {MARK}"
    yield "COMMIT"


# Mode -> its rules, and the command that loads a file of them.
MODES: Final[dict[str, tuple[Callable[[Rows], Iterator[str]], tuple[str, ...]]]] = {
    "iptables": (lambda rows: chain(_filter(rows.hooks), _nat(rows)), ("iptables-restore", "--noflush")),
    "nftables": (_nftables, ("nft", "-f", "-")),
    "ipvs": (_ipvs, ("iptables-restore", "--noflush")),
}
