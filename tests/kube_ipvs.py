"""What kube-proxy's mode ipvs programs, in the shape that v1.36 gives it on a node: for the calling thread's namespace.

Its chains do not know Services: sets name them, and virtual servers at the addresses of a dummy device, which is down,
and at those of the node translate. A real server that goes gets weight 0 as long as TCP needs it. IPv4 alone.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pyroute2 import IPRoute, IPSet

from hybrid_proxy.dataplane.kernel.ipset import Ipsets
from hybrid_proxy.dataplane.kernel.ipvs import Ipvs
from hybrid_proxy.dataplane.virtual_servers import Change, Config, Destination, Edit, Element, Server, Verb

__all__ = ["DEVICE", "Row", "put", "traces"]

DEVICE: Final = "kube-ipvs0"
MARK: Final = "0x4000/0x4000"
SETTINGS: Final = ("conntrack", "expire_nodest_conn", "expire_quiescent_template")
PORTS: Final = (0, 65535)
SETS: Final = {
    "hash:ip,port,ip": ("LOOP-BACK", "LOAD-BALANCER-SOURCE-IP"),
    "hash:ip,port": ("CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL", "LOAD-BALANCER", "LOAD-BALANCER-FW",
                     "LOAD-BALANCER-LOCAL", "NODE-PORT-SCTP-HASH", "NODE-PORT-LOCAL-SCTP-HASH"),
    "hash:ip,port,net": ("LOAD-BALANCER-SOURCE-CIDR",),
    "bitmap:port": ("NODE-PORT-TCP", "NODE-PORT-LOCAL-TCP", "NODE-PORT-UDP", "NODE-PORT-LOCAL-UDP",
                    "HEALTH-CHECK-NODE-PORT"),
    "hash:ip": ("IPVS-IPS",),
}  # fmt: skip
HOOKS: Final = {
    "nat": ("PREROUTING KUBE-SERVICES", "OUTPUT KUBE-SERVICES", "POSTROUTING KUBE-POSTROUTING"),
    "filter": ("FORWARD KUBE-FORWARD", "INPUT KUBE-NODE-PORT", "INPUT KUBE-PROXY-FIREWALL",
               "FORWARD KUBE-PROXY-FIREWALL", "INPUT KUBE-IPVS-FILTER", "OUTPUT KUBE-IPVS-OUT-FILTER"),
}  # fmt: skip
# {} is the cluster CIDR: clients outside of it are masqueraded.
NAT: Final = f"""
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN
-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
-A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
-A KUBE-NODE-PORT -p udp -m set --match-set KUBE-NODE-PORT-UDP dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES ! -s {{}} -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j ACCEPT
-A KUBE-POSTROUTING -m mark ! --mark {MARK} -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
"""
FILTER: Final = f"""
:KUBE-FORWARD - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
-A KUBE-FORWARD -m mark --mark {MARK} -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-NODE-PORT -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT
-A KUBE-IPVS-FILTER -m set --match-set KUBE-LOAD-BALANCER dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT
"""


class Row(NamedTuple):
    """One service port: its ClusterIP, its node port at the node's addresses (0: none), its endpoints, all local."""

    address: str
    port: int
    backends: tuple[Destination, ...]
    protocol: str = "tcp"
    node_port: int = 0
    node: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        return {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP}[self.protocol]

    def servers(self) -> Iterator[Server]:
        yield Server(4, self.number, self.address, self.port)
        if self.node_port:
            yield from (Server(4, self.number, address, self.node_port) for address in self.node)


def put(rows: Sequence[Row], cluster_cidr: str, *, hooks: bool = True) -> None:
    """Program these services, as one sync of kube-proxy; `hooks`: nothing leads to its chains yet."""
    with contextlib.closing(Ipvs()) as ipvs, IPRoute() as link, IPSet() as sets:
        for name in SETTINGS:
            Path("/proc/sys/net/ipv4/vs", name).write_text("1")
        _make_sets(sets)
        index = _device(link)
        for row in rows:
            link.addr("replace", index=index, address=row.address, prefixlen=32)
            _fill_sets(sets, row)
            for server in row.servers():
                _serve(ipvs, server, row.backends)
    text = ""
    for table, rules in (("filter", FILTER), ("nat", NAT.format(cluster_cidr))):
        jumps = (f"-I {hook} -j {chain}" for hook, chain in map(str.split, HOOKS[table] if hooks else ()))
        text += "\n".join((f"*{table}{rules}".rstrip(), *jumps, "COMMIT\n"))
    done = subprocess.run(["iptables-restore", "--noflush"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _make_sets(sets: IPSet) -> None:
    for kind, names in SETS.items():
        ports = {"bitmap_ports_range": PORTS} if kind == "bitmap:port" else {}
        for name in names:
            sets.create(f"KUBE-{name}", stype=kind, exclusive=False, **ports)


def _fill_sets(sets: IPSet, row: Row) -> None:
    elements = {"IPVS-IPS": [Element(row.address)], "CLUSTER-IP": [Element(row.address, row.port, row.number)]}
    elements["LOOP-BACK"] = [Element(address, port, row.number, address) for address, port in row.backends]
    with contextlib.closing(Ipsets()) as known:
        known.change(Edit(f"KUBE-{name}", 4, True, dict.fromkeys(held)) for name, held in elements.items())
    if row.node_port:
        sets.add(f"KUBE-NODE-PORT-{row.protocol.upper()}", row.node_port, etype="port", exclusive=False)


def _device(link: IPRoute) -> int:
    if not link.link_lookup(ifname=DEVICE):
        link.link("add", ifname=DEVICE, kind="dummy")
    return int(link.link_lookup(ifname=DEVICE)[0])


def _serve(ipvs: Ipvs, server: Server, wanted: Sequence[Destination]) -> None:
    ipvs.change([Change(Verb.NEW_SERVER, server, Config("rr"))])
    ended = set(ipvs.destinations(server)) - set(wanted)
    leave = Verb.SET_DESTINATION if server.protocol == socket.IPPROTO_TCP else Verb.DELETE_DESTINATION
    ipvs.change(
        [
            *(Change(Verb.NEW_DESTINATION, server, destination=each) for each in wanted),
            *(Change(leave, server, destination=each, weight=0) for each in ended),
        ]
    )


def traces() -> list[str]:
    """What of kube-proxy is here; a chain is the kubelet's."""
    saved = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    found = [line for line in saved.splitlines() if "KUBE-" in line.replace("KUBE-FIREWALL", "")]
    with contextlib.closing(Ipsets()) as sets:
        found += sets.names("KUBE-")
    with contextlib.closing(Ipvs()) as ipvs:
        found += [f"{server.address}:{server.port}" for server in ipvs.servers()]
    with IPRoute() as link:
        found += [DEVICE] * len(link.link_lookup(ifname=DEVICE))
    return found
