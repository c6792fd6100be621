"""Finds and removes what a kube-proxy left in this network namespace.

Rules of iptables are removed by one restore for each table, which names each chain and each jump: foreign changes made
meanwhile stay. Chains of the kubelet stay, and chains of kube-proxy to which foreign rules lead.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterator
from ipaddress import ip_address
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel import xtables
from hybrid_proxy.dataplane.kernel.dummy import Dummy
from hybrid_proxy.dataplane.kernel.ipset import Ipsets
from hybrid_proxy.dataplane.kernel.ipvs import Ipvs, connections
from hybrid_proxy.dataplane.kernel.links import read_node
from hybrid_proxy.dataplane.kernel.other_proxies import IPVS_DEVICE, tables_named
from hybrid_proxy.dataplane.nftables.wire import remove_tables
from hybrid_proxy.dataplane.reports import several
from hybrid_proxy.dataplane.saved_rules import BUILT_IN, Removal, parse, removal, target
from hybrid_proxy.dataplane.table import Protocol
from hybrid_proxy.dataplane.virtual_servers import Change, Server, Verb

TABLE: Final = "kube-proxy"
TABLES: Final = ("filter", "mangle", "nat")
SETS: Final = "KUBE-"
OUR_SETS: Final = "HPV-"  # of mode ipvs, whose addresses are on the same device
# The kubelet's, which needs them or makes them again (pkg/kubelet/kubelet_network_linux.go).
KUBELETS: Final = frozenset({"KUBE-FIREWALL", "KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY", "KUBE-MARK-DROP"})
_TOOK: Final = re.compile(r"^\[(\d+):\d+\] -A KUBE-.* -j DNAT ", re.MULTILINE)  # of `iptables-save -c`
_FAMILY: Final = {4: "ip", 6: "ip6"}


class Leftovers(NamedTuple):
    """The leftovers: a line of text for each object, and for what stays although its name is kube-proxy's."""

    things: tuple[str, ...]
    stays: tuple[str, ...]
    servers: tuple[Server, ...] = ()  # of IPVS; their connections end with them


class Rules(NamedTuple):
    """The removal of kube-proxy's part of one iptables table. `kept` are its chains that foreign rules still need."""

    removal: Removal
    kept: tuple[str, ...]


def rules_of(table: str, text: str) -> Rules:
    """Finds kube-proxy's part of a table, as `iptables-save` prints it."""
    saved = parse(text)
    names = {name for name in saved if name.startswith("KUBE-")} - KUBELETS
    leads = [(name, rule, to) for name, rules in saved.items() for rule in rules if (to := target(rule)) in names]
    # What a built-in chain leads to is kube-proxy's own entrance, whoever wrote that rule.
    needed = {to for name, _, to in leads if name not in names and name not in BUILT_IN}
    kept: set[str] = set()
    while needed - kept:
        kept |= needed
        needed = {to for name, _, to in leads if name in kept}
    gone = names - kept
    return Rules(
        removal(table, gone, [(name, rule) for name, rule, to in leads if to in gone and name not in names]),
        tuple(sorted(kept)),
    )


def find() -> Leftovers:
    """Find what `remove` would remove.

    Raises:
        DataplaneError, OSError: it cannot be read.
    """
    things, stays = [], []
    for tables, family, table, rules in _rules():
        where = f"in {_FAMILY[family]} {table} ({tables.variant})"
        if rules.removal:
            chains, jumps = several(len(rules.removal.chains), "chain"), several(len(rules.removal.jumps), "jump")
            things.append(f"{chains} KUBE-* and {jumps} to them {where}")
        if rules.kept:
            stays.append(f"{', '.join(rules.kept)} {where}: rules of others lead there")
    things += [f"table {family} {TABLE}" for family in tables_named(TABLE)]
    servers, addresses, sets = _ipvs()
    if servers:
        things.append(f"{several(len(servers), 'IPVS virtual server')}")
    if addresses is not None:
        things.append(f"device {IPVS_DEVICE} with {several(len(addresses), 'address', 'addresses')}")
    if sets:
        things.append(f"{several(len(sets), 'ipset')} {SETS}*")
    return Leftovers(tuple(things), tuple(stays), tuple(servers))


def took() -> int:
    """Count the connections that rules of kube-proxy's mode iptables have sent to endpoints; others do not count."""
    found = 0
    for tables in xtables.present():
        for family in tables.families:
            with contextlib.suppress(xtables.XtablesError):
                found += sum(map(int, _TOOK.findall(tables.save(family, "nat", counters=True))))
    return found


def open_ipvs_connections(servers: Collection[Server]) -> Counter[str]:
    """Count the open connections of these virtual servers, by protocol."""
    ends = {
        (server.family, server.protocol, ip_address(server.address).packed, server.port.to_bytes(2, "big"))
        for server in servers
    }
    with contextlib.suppress(OSError):
        return Counter(
            Protocol(each.protocol).name
            for each in connections()
            if not each.is_over and (each.family, each.protocol, each.address, each.port) in ends
        )
    return Counter()


def remove() -> None:
    """Remove all leftovers.

    Raises:
        DataplaneError, OSError: an object stayed; those before it are removed, and another call can remove the rest.
    """
    for tables, family, _, rules in _rules():
        if rules.removal:
            tables.restore(family, rules.removal.text)
    remove_tables(TABLE)
    servers, addresses, sets = _ipvs()
    if servers:
        with contextlib.closing(Ipvs()) as ipvs:
            ipvs.change([Change(Verb.DELETE_SERVER, server) for server in servers])
    if addresses is not None:
        with contextlib.closing(Dummy(IPVS_DEVICE)) as device:
            device.find()
            device.change((), addresses)
            device.remove(of_others=True)
    if sets:
        with contextlib.closing(Ipsets()) as known:
            for name in sets:
                known.destroy(name)


def _rules() -> Iterator[tuple[xtables.Xtables, int, str, Rules]]:
    for tables in xtables.present():
        for family in tables.families:
            for table in TABLES:
                with contextlib.suppress(xtables.XtablesError):  # a variant that this kernel does not have
                    saved = tables.save(family, table)
                    if f"\n:{SETS}" in saved:
                        yield tables, family, table, rules_of(table, saved)


def _ipvs() -> tuple[list[Server], set[str] | None, list[str]]:
    """Returns virtual servers, the addresses of the device (None: no device), and sets; not those of our mode ipvs."""
    with contextlib.closing(Dummy(IPVS_DEVICE)) as device:
        addresses = device.addresses() if device.find() else None
    sets: list[str] = []
    ours: set[tuple[str, int, int]] = set()
    with contextlib.suppress(Unsupported), contextlib.closing(Ipsets()) as known:
        sets = known.names(SETS)
        mine = {name: known.elements(name) for name in known.names(OUR_SETS)}
        ours = {
            (each.address, each.port, each.protocol)
            for name, held in mine.items()
            if name.endswith("-SERVERS")
            for each in held
        }
        bound = {each.address for name, held in mine.items() if name.endswith("-ADDRESSES") for each in held}
        addresses = None if addresses is None else addresses - bound
    return _servers(addresses, ours), addresses, sets


def _servers(addresses: set[str] | None, ours: set[tuple[str, int, int]]) -> list[Server]:
    """Returns kube-proxy's virtual servers: those at addresses of its device and, for node ports, of the node."""
    if addresses is None:
        return []
    at = {*addresses, *read_node().addresses}
    with contextlib.suppress(Unsupported), contextlib.closing(Ipvs()) as ipvs:
        return [
            server
            for server in ipvs.servers()
            if server.address in at and (server.address, server.port, server.protocol) not in ours
        ]
    return []
