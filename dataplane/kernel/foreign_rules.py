"""Finds what packets meet in the network namespace of the calling thread.

That is rules of firewalls, virtual servers of IPVS, IPsec policies, and routing rules that no route lookup repeats.

The agent watches `PassingRules` as long as it takes packets past them; `read_rules` reads what other programs' do.
"""

from __future__ import annotations

import contextlib
import re
import struct
import sys
import time
from collections.abc import Collection, Iterator
from typing import Final

import msgspec

from hybrid_proxy.dataplane.base_chains import BaseChain, is_foreign
from hybrid_proxy.dataplane.firewall_rules import JUMP, Rule, of_iptables, of_nft
from hybrid_proxy.dataplane.kernel import links
from hybrid_proxy.dataplane.kernel import netlink as nl
from hybrid_proxy.dataplane.kernel.links import GET_RULE, RTA_PRIORITY, read_routes
from hybrid_proxy.dataplane.kernel.nfnetlink import Nfnetlink, attributes, generation
from hybrid_proxy.dataplane.kernel.tools import output
from hybrid_proxy.dataplane.kernel.xtables import Xtables, XtablesError, legacy_tables_with_rules, legacy_translates

# linux/netfilter/nf_tables.h
_GET_CHAIN: Final = 4
_TABLE, _NAME, _HOOK, _POLICY, _USE, _TYPE, _COUNTERS = 1, 3, 4, 5, 6, 7, 8
_NUMBER, _PRIORITY, _PACKETS = 1, 2, 2

_IP_HOOKS: Final = ("prerouting", "input", "forward", "output", "postrouting", "ingress")  # linux/netfilter.h
_FAMILIES: Final = {1: "inet", 2: "ip", 10: "ip6", 7: "bridge", 5: "netdev"}
_PASSING: Final = frozenset({"prerouting", "forward", "postrouting", "ingress", "egress"})
_PATIENCE: Final = 20  # a long list of chains that changes all the time takes a twentieth of the time at most

MOST_TABLES: Final = 32
MOST_CHAINS: Final = 64
_ASKED: Final = re.compile(r"addr (?:!= )?@([\w.-]+) ")
_PROXIES: Final = ("HP-", "KUBE-")  # their rules that redirect name no address of a Service
TABLES: Final = ("filter", "mangle", "raw", "security", "nat")  # iptables' own
TOOL_SECONDS: Final = 3.0

_VIRTUAL_SERVERS: Final = "/proc/thread-self/net/ip_vs"
_HEADING: Final = 3  # lines
# linux/xfrm.h
_GET_POLICIES: Final = 0x25  # XFRM_MSG_GETSPDINFO
_COUNTS: Final = 1  # XFRMA_SPD_INFO
_POLICIES: Final = struct.Struct("=6I")  # in, out, forwarded; the same of sockets
# linux/rtnetlink.h, linux/fib_rules.h
_RULE_GROUPS: Final = 0x80 | 0x40000  # IPv4's and IPv6's
_BY_PACKET: Final = frozenset({22, 23, 24, 25, 26})  # protocol, source port, destination port, DSCP, flow label


def read_rules(*, nat: bool = False, client: str = "", ends: Collection[str] = ()) -> tuple[tuple[Rule, ...], str]:
    """Returns rules of other programs that drop or redirect packets, and why some could not be read.

    `nat`: those alone that redirect packets, without the chains of modes and of kube-proxy: an agent asks for them, and
    a node may have 100,000 of these. `client` is an address that stands behind the names of the sets that have it,
    and of those that a rule excludes and have it not. Rules that mark packets are among them if one to one of these
    `ends` goes another way for that.
    """
    rules: list[Rule] = []
    unknown = []
    chains = [
        chain
        for chain in _base_chains()
        if is_foreign(chain.table.partition(" ")[2]) and (chain.rules or chain.drops)
        if not nat or (chain.type == "nat" and chain.hook != "postrouting")
    ]
    for table in list(dict.fromkeys(chain.table for chain in chains))[:MOST_TABLES]:
        at, names = table.split(" ", 1), [chain.name for chain in chains if chain.table == table]
        try:  # one call for several tables fails where iptables-nft has made one of them (nft 1.0.6)
            rules += of_nft(_led_to(at, names) if nat else _marked(_listed("table", *at), at, client), chains)
        except OSError as error:
            unknown.append(f"table {table} cannot be read: {error}")
    legacy = Xtables("legacy")
    for family, number in (("ip", 4), ("ip6", 6)):
        for table in ("nat",) if nat else TABLES:
            try:
                rules += of_iptables(legacy.save(number, table, counters=True), family)
            except XtablesError as error:
                unknown.append(f"legacy rules cannot be read: {error}")
    detours = {
        mark: next(filter(None, (links.detour(end, mark) for end in ends if mark)), None)
        for mark in {rule.mark for rule in rules}
    }
    led = (msgspec.structs.replace(rule, detour=detours[rule.mark]) for rule in rules)
    return tuple(rule for rule in led if rule.mark is None or rule.detour), "; ".join(unknown)


def _listed(*what: str) -> str:
    return output("nft", "-ta", "list", *what, seconds=TOOL_SECONDS)


def _marked(text: str, at: list[str], client: str) -> str:
    """Returns a listed table with the address of a client behind the name of each set that has it: a set is large."""
    for name in {*_ASKED.findall(text)} if client else ():
        try:
            output("nft", "get", "element", *at, name, f"{{ {client} }}", seconds=TOOL_SECONDS)
            text = text.replace(f"addr @{name} ", f"addr @{name}({client}) ")
        except OSError as error:
            if "No such file" in str(error):  # it has not
                text = text.replace(f"addr != @{name} ", f"addr != @{name}(not-{client}) ")
    return text


def _led_to(at: list[str], names: list[str]) -> str:
    """Returns these chains of a table, and those that they lead to."""
    texts: dict[str, str] = {}
    todo = list(names)
    while todo and len(texts) < MOST_CHAINS:
        name = todo.pop(0)
        with contextlib.nullcontext() if name in names else contextlib.suppress(OSError):  # a comment names anything
            texts[name] = _listed("chain", *at, name)
            todo += [to for to in JUMP.findall(texts[name]) if to not in texts and not to.startswith(_PROXIES)]
    return "\n".join(texts.values())


def _base_chains() -> list[BaseChain]:
    try:
        with Nfnetlink() as wire:
            return [
                chain
                for number, family in _FAMILIES.items()
                for chain in _chains(wire.dump(_GET_CHAIN, number), family)
            ]
    except (nl.NetlinkFailed, OSError):
        return []


class PassingRules:
    """Finds what packets that pass the node meet in its stack, also what our own other modes made.

    A look is cheap as long as nothing changes: chains are listed only for another generation of nftables' ruleset.
    """

    def __init__(self) -> None:
        self._wires: dict[int, nl.Netlink | None] = {}  # None: this kernel has no such protocol
        self._generation: int | None = None
        self._chains: list[str] = []
        self._translates = False
        self._listed_until = 0.0
        self._routing_events = nl.Events(nl.ROUTE, _RULE_GROUPS)
        self._routing: list[str] | None = None

    def found(self) -> list[str]:
        """Chains that have rules, or drop by default; tables of iptables-legacy; IPVS; IPsec policies; routing rules.

        Of routing rules, those that two packets from one address to another may meet differently.
        """
        if self._routing_events.discard() or self._routing is None:
            self._routing = list(_routing_rules())
        rules = self._rules()
        return [*rules, *legacy_tables_with_rules(), *_virtual_servers(), *self._policies(), *self._routing]

    def translate(self) -> bool:
        """True if the kernel may translate, as of the last `found`.

        It translates what met a former rule for as long as the chain is there.
        """
        return self._translates or legacy_translates()

    def _rules(self) -> list[str]:
        wire = self._wire(nl.NETFILTER)
        if wire is None or (self._chains and time.monotonic() < self._listed_until):
            return self._chains
        try:
            now = generation(wire)
        except (nl.NetlinkFailed, OSError):  # no nf_tables
            return []
        if now != self._generation:
            began = time.monotonic()
            passing = [chain for chain in _base_chains() if chain.hook in _PASSING]
            self._chains = [str(chain) for chain in passing if chain.rules or chain.drops]
            self._translates = any(chain.type == "nat" for chain in passing)
            self._generation, ended = now, time.monotonic()
            self._listed_until = ended + _PATIENCE * (ended - began)
        return self._chains

    def _policies(self) -> Iterator[str]:
        wire = self._wire(nl.XFRM)
        if wire is None:
            return
        with contextlib.suppress(nl.NetlinkFailed, OSError):
            answer = wire.get(nl.Message(_GET_POLICIES, bytes(4), what="counting IPsec policies")) or b""
            counts = attributes(answer[4:]).get(_COUNTS, b"")
            if len(counts) >= _POLICIES.size and any(_POLICIES.unpack_from(counts)[:3]):
                yield "IPsec policies"

    def _wire(self, protocol: int) -> nl.Netlink | None:
        if protocol not in self._wires:
            try:
                self._wires[protocol] = nl.Netlink(protocol)
            except OSError:
                self._wires[protocol] = None
        return self._wires[protocol]

    def close(self) -> None:
        """Closes the sockets."""
        self._routing_events.close()
        for wire in filter(None, self._wires.values()):
            wire.close()


def _routing_rules() -> Iterator[str]:
    with nl.Netlink(nl.ROUTE) as wire:
        for number, family in nl.AF.items():
            with contextlib.suppress(nl.NetlinkFailed):  # the kernel has no such rules
                for rule in read_routes(wire, family, GET_RULE):
                    if rule.tos or rule.known.keys() & _BY_PACKET:
                        priority = int.from_bytes(rule.known.get(RTA_PRIORITY, b""), sys.byteorder)
                        yield f"IPv{number} routing rule {priority} by ports or DSCP"


def _virtual_servers() -> list[str]:
    try:
        with open(_VIRTUAL_SERVERS, "rb", 0) as listing:  # noqa: PTH123 (every second)
            return ["virtual servers of IPVS"] if listing.read(4096).count(b"\n") > _HEADING else []
    except OSError:  # the module is not loaded
        return []


def _chains(bodies: list[bytes], family: str) -> Iterator[BaseChain]:
    hooks = ("ingress", "egress") if family == "netdev" else _IP_HOOKS
    for body in bodies:
        chain = attributes(body)
        if _HOOK not in chain:
            continue
        table, name, kind = (nl.text(chain[each]) for each in (_TABLE, _NAME, _TYPE))
        counters = attributes(chain[_COUNTERS]) if _COUNTERS in chain else {}
        at = attributes(chain[_HOOK])
        number = int.from_bytes(at[_NUMBER], "big")
        yield BaseChain(
            table=f"{family} {table}",
            name=name,
            type=kind,
            hook=hooks[number] if number < len(hooks) else str(number),
            rules=int.from_bytes(chain.get(_USE, b""), "big"),
            drops=not int.from_bytes(chain.get(_POLICY, b"\1"), "big"),  # NF_DROP is 0
            packets=int.from_bytes(counters[_PACKETS], "big") if _PACKETS in counters else None,
            priority=int.from_bytes(at[_PRIORITY], "big", signed=True),
        )
