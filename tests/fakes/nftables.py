"""nf_tables in memory, for one namespace: checks references as the kernel does, reads back, and walks packets.

A transaction is done on a copy: refused, it leaves nothing. A packet is walked through the very expressions that the
kernel would get, so a wrong register or a wrong key shows as a wrong verdict.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import ipaddress
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hybrid_proxy.dataplane.kernel.nfnetlink import NftablesError
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables import uapi as nf
from hybrid_proxy.dataplane.nftables.codec import Codec
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES, Expression, Family, Rule, Verdict
from hybrid_proxy.dataplane.nftables.schema import ADDRESS, RANGE, VERDICT, Chain, Element, Key, Set, Value

__all__ = ["FakeNftables", "Outcome", "Packet"]

HOST = sys.byteorder


@dataclass
class _Table:
    sets: dict[str, Set] = field(default_factory=dict)
    elements: dict[str, dict[Key, tuple[Value, str]]] = field(default_factory=dict)
    chains: dict[str, Chain] = field(default_factory=dict)
    rules: dict[str, list[Rule]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Packet:
    """The first packet of a connection. `interface` is empty when the node itself sends it."""

    src: str
    dst: str
    port: int
    protocol: int = 6
    interface: str = "eth0"
    source_port: int = 40000
    mark: int = 0
    priority: int = 0


@dataclass
class Outcome:
    """What became of it."""

    verdict: str = "untouched"  # dnat, reject, drop, untouched
    to: tuple[str, int] | None = None
    masquerade: bool = False
    mark: int = 0
    priority: int = 0


class _Break(Exception):
    """The rule ends here, the next one is tried."""


class _Verdict(Exception):
    pass


class FakeNftables:
    """A `dataplane.nftables.operations.Nftables`."""

    def __init__(self, local: Iterable[str] = ()) -> None:
        self.tables: dict[int, _Table] = {}
        self.local = frozenset(local)
        self.transactions: list[list[op.Operation]] = []
        self.refuse: int | None = None  # errno of the next transaction
        self.number = 1

    # The kernel interface

    def commit(self, *work: op.Work) -> None:
        operations = [(family, one) for family, some in work for one in some]
        if not operations:
            return
        if self.refuse is not None:
            code, self.refuse = self.refuse, None
            raise NftablesError(code, "what the test wanted refused")
        before = copy.deepcopy(self.tables)
        try:
            for family, one in operations:
                self._do(family, one)
        except NftablesError:
            self.tables = before
            raise
        self.transactions.append([one for _, one in operations])
        self.number += 1

    def generation(self) -> int:
        return self.number

    def close(self) -> None:
        pass

    def skeleton(self, family: Family) -> op.Skeleton | None:
        table = self.tables.get(family.version)
        if table is None:
            return None
        return op.Skeleton(
            sets={name: one.shape(family) for name, one in table.sets.items()},
            chains={name: tuple(rule.digest for rule in table.rules[name]) for name in table.chains},
            hooks={name: chain.hook for name, chain in table.chains.items() if chain.hook},
            counters=frozenset(table.counters),
        )

    def contents(self, family: Family, name: str) -> dict[Key, tuple[Value, str]]:
        return dict(self._table(family).elements[name])

    def counters(self, family: Family) -> dict[str, int]:
        return dict(self._table(family).counters)

    # Operations

    def _table(self, family: Family) -> _Table:
        if family.version not in self.tables:
            raise NftablesError(errno.ENOENT, "what is in no table")
        return self.tables[family.version]

    def _do(self, family: Family, operation: op.Operation) -> None:
        if isinstance(operation, op.AddTable):
            self.tables.setdefault(family.version, _Table())
            return
        table = self._table(family)
        match operation:
            case op.DeleteTable():
                del self.tables[family.version]
            case op.AddCounter(name):
                table.counters.setdefault(name, 0)
            case op.AddSet(wanted):
                _need(table.sets.setdefault(wanted.name, wanted) == wanted, errno.EEXIST, f"set {wanted.name}")
                table.elements.setdefault(wanted.name, {})
            case op.FlushSet(name):
                _need(name in table.sets, errno.ENOENT, f"set {name}")
                table.elements[name].clear()
            case op.DeleteSet(name):
                _need(name in table.sets, errno.ENOENT, f"set {name}")
                _need(not any(name in _sets_of(r) for r in _rules(table)), errno.EBUSY, f"set {name}")
                del table.sets[name], table.elements[name]
            case op.AddChain(chain):
                table.chains.setdefault(chain.name, chain)
                table.rules.setdefault(chain.name, [])
            case op.FlushChain(name):
                _need(name in table.chains, errno.ENOENT, f"chain {name}")
                table.rules[name].clear()
            case op.DeleteChain(name):
                _need(name in table.chains, errno.ENOENT, f"chain {name}")
                _need(not table.rules[name] and name not in _targets(table), errno.EBUSY, f"chain {name}")
                del table.chains[name], table.rules[name]
            case op.AddRules(name, rules):
                _need(name in table.chains, errno.ENOENT, f"chain {name}")
                for rule in rules:
                    named = _sets_of(rule) <= table.sets.keys() and set(_jumps(rule)) <= table.chains.keys()
                    _need(named and _counters_of(rule) <= table.counters.keys(), errno.ENOENT, f"rule of {name}")
                table.rules[name] += rules
            case op.AddElements(name, elements):
                self._add(table, name, elements)
            case op.DeleteElements(name, keys):
                _need(name in table.sets, errno.ENOENT, f"set {name}")
                for key in keys:
                    _need(key in table.elements[name], errno.ENOENT, f"element {key} of {name}")
                    del table.elements[name][key]

    def _add(self, table: _Table, name: str, elements: Iterable[Element]) -> None:
        _need(name in table.sets, errno.ENOENT, f"set {name}")
        wanted, held = table.sets[name], table.elements[name]
        for element in elements:
            assert len(element.key) == len(wanted.key), f"{element.key} is no key of {name}"
            if wanted.data == (VERDICT,):
                assert isinstance(element.value, Verdict)
                chain = element.value.chain_name
                _need(chain in table.chains, errno.ENOENT, f"element {element.key} of {name}, which leads to {chain}")
            assert (element.value is None) == (not wanted.data)
            value = (element.value, element.comment)
            _need(held.setdefault(element.key, value) == value, errno.EEXIST, f"element {element.key} of {name}")
            if RANGE in wanted.key:
                _need(not _overlaps(element.key, held), errno.EEXIST, f"range {element.key}")

    # Packets

    def walk(self, packet: Packet, choose: Callable[[int], int] = lambda modulus: 0) -> Outcome:
        """Through the hooks of our table; `choose` is numgen."""
        family = FAMILIES[ipaddress.ip_address(packet.dst).version]
        walker = _Walker(self._table(family), family, packet, self.local, choose)
        walker.run("nat-prerouting" if packet.interface else "nat-output")
        out = walker.outcome
        if out.verdict in {"untouched", "dnat"}:
            walker.run("nat-postrouting")
        out.mark, out.priority = walker.meta[nf.NFT_META_MARK], walker.meta[nf.NFT_META_PRIORITY]
        return out


class _Walker:
    def __init__(
        self, table: _Table, family: Family, packet: Packet, local: frozenset[str], choose: Callable[[int], int]
    ) -> None:
        self.table, self.family, self.packet, self.local, self.choose = table, family, packet, local, choose
        self.codec = Codec(family)
        self.registers = bytearray(64)
        self.dst, self.port = packet.dst, packet.port
        self.meta = {nf.NFT_META_PRIORITY: packet.priority, nf.NFT_META_MARK: packet.mark}
        self.outcome = Outcome()

    def run(self, chain: str) -> None:
        with contextlib.suppress(_Verdict):
            self._chain(chain)

    def _chain(self, name: str) -> bool:
        """False: return."""
        for rule in self.table.rules[name]:
            target = None
            try:
                for expression in rule.expressions:
                    target = self._step(expression)
                    if target is not None:
                        break
            except _Break:
                continue
            if target is None:
                continue
            if target.code == nf.NFT_RETURN:
                return False
            self._chain(target.chain_name)
            if target.code == nf.NFT_GOTO:
                return False
        return True

    def _step(self, expression: Expression) -> Verdict | None:
        """A verdict that leads elsewhere, or None."""
        a: dict[int, Any] = dict(expression.attributes)
        match expression.name:
            case "payload":
                offset, length = a[nf.NFTA_PAYLOAD_OFFSET], a[nf.NFTA_PAYLOAD_LEN]
                self._put(a[nf.NFTA_PAYLOAD_DREG], self._bytes(a[nf.NFTA_PAYLOAD_BASE], offset, length))
            case "meta":
                key = a[nf.NFTA_META_KEY]
                if nf.NFTA_META_SREG in a:
                    self.meta[key] = int.from_bytes(self._get(a[nf.NFTA_META_SREG], 4), HOST)
                else:
                    self._put(a[nf.NFTA_META_DREG], self._meta(key))
            case "ct":
                self._put(a[nf.NFTA_CT_DREG], (0x20 if self.outcome.to else 0).to_bytes(4, HOST))
            case "fib":
                self._put(a[nf.NFTA_FIB_DREG], (2 if self.dst in self.local else 1).to_bytes(4, HOST))
            case "numgen":
                self._put(a[nf.NFTA_NG_DREG], self.choose(a[nf.NFTA_NG_MODULUS]).to_bytes(4, HOST))
            case "bitwise":
                old = self._get(a[nf.NFTA_BITWISE_SREG], a[nf.NFTA_BITWISE_LEN])
                masked = zip(old, _data(a[nf.NFTA_BITWISE_MASK]), _data(a[nf.NFTA_BITWISE_XOR]), strict=True)
                self._put(a[nf.NFTA_BITWISE_DREG], bytes(value & mask ^ xor for value, mask, xor in masked))
            case "cmp":
                wanted = _data(a[nf.NFTA_CMP_DATA])
                equal = self._get(a[nf.NFTA_CMP_SREG], len(wanted)) == wanted
                if equal != (a[nf.NFTA_CMP_OP] == nf.NFT_CMP_EQ):
                    raise _Break
            case "lookup":
                return self._lookup(a)
            case "dynset":
                self._dynamic(a)
            case "objref":
                self.table.counters[a[nf.NFTA_OBJREF_IMM_NAME]] += 1
            case "immediate":
                return self._immediate(a)
            case "nat":
                address = self._get(a[nf.NFTA_NAT_REG_ADDR_MIN], self.family.length)
                self.dst = str(self.codec.decoder((ADDRESS,))(address)[0])
                self.port = int.from_bytes(self._get(a[nf.NFTA_NAT_REG_PROTO_MIN], 2), "big")
                self.outcome.verdict, self.outcome.to = "dnat", (self.dst, self.port)
                raise _Verdict
            case "masq":
                self.outcome.masquerade = True
                raise _Verdict
            case "reject":
                self.outcome.verdict = "reject"
                raise _Verdict
            case _:
                raise AssertionError(expression.name)
        return None

    def _bytes(self, base: int, offset: int, length: int) -> bytes:
        family = self.family
        if base == nf.NFT_PAYLOAD_TRANSPORT_HEADER:
            return {0: self.packet.source_port, 2: self.port}[offset].to_bytes(length, "big")
        assert length == family.length
        text = {family.source: self.packet.src, family.destination: self.dst}[offset]
        return socket.inet_pton(socket.AF_INET if family.version == 4 else socket.AF_INET6, text)

    def _meta(self, key: int) -> bytes:
        if key == nf.NFT_META_L4PROTO:
            return bytes([self.packet.protocol])
        if key == nf.NFT_META_IIF:
            return (3 if self.packet.interface else 0).to_bytes(4, HOST)
        if key == nf.NFT_META_IIFNAME:
            if not self.packet.interface:
                raise _Break
            return self.packet.interface.encode().ljust(16, b"\0")
        return self.meta[key].to_bytes(4, HOST)

    def _place(self, register: int) -> int:
        return (register - nf.NFT_REG32_00) * 4

    def _put(self, register: int, value: bytes) -> None:
        place = self._place(register)
        value = value.ljust(-(-len(value) // 4) * 4, b"\0")
        self.registers[place : place + len(value)] = value

    def _get(self, register: int, length: int) -> bytes:
        place = self._place(register)
        return bytes(self.registers[place : place + length])

    def _key(self, name: str, register: int) -> Key:
        fields = self.table.sets[name].key
        fields = tuple(ADDRESS if f == RANGE else f for f in fields)
        return self.codec.decoder(fields)(self._get(register, 64 - self._place(register)))

    def _lookup(self, a: dict[int, Any]) -> Verdict | None:
        name = a[nf.NFTA_LOOKUP_SET]
        key, elements = self._key(name, a[nf.NFTA_LOOKUP_SREG]), self.table.elements[name]
        if RANGE in self.table.sets[name].key:
            source = ipaddress.ip_address(str(key[-1]))
            found = any(k[:-1] == key[:-1] and source in ipaddress.ip_network(str(k[-1])) for k in elements)
        else:
            found = key in elements
        if found == bool(a.get(nf.NFTA_LOOKUP_FLAGS)):
            raise _Break
        if nf.NFTA_LOOKUP_DREG not in a:
            return None
        value = elements[key][0]
        if isinstance(value, Verdict):
            return value
        if isinstance(value, int):
            self._put(a[nf.NFTA_LOOKUP_DREG], value.to_bytes(4, HOST))
        else:
            assert value is not None
            self._put(a[nf.NFTA_LOOKUP_DREG], self.codec.address(value[0]) + value[1].to_bytes(2, "big"))
        return None

    def _dynamic(self, a: dict[int, Any]) -> None:
        name = a[nf.NFTA_DYNSET_SET_NAME]
        key, elements = self._key(name, a[nf.NFTA_DYNSET_SREG_KEY]), self.table.elements[name]
        if a[nf.NFTA_DYNSET_OP] == nf.NFT_DYNSET_OP_DELETE:
            elements.pop(key, None)
        elif nf.NFTA_DYNSET_SREG_DATA in a:
            elements.setdefault(key, (int.from_bytes(self._get(a[nf.NFTA_DYNSET_SREG_DATA], 4), HOST), ""))
        else:
            elements.setdefault(key, (None, ""))

    def _immediate(self, a: dict[int, Any]) -> Verdict | None:
        data = dict(a[nf.NFTA_IMMEDIATE_DATA])
        if nf.NFTA_DATA_VALUE in data:
            self._put(a[nf.NFTA_IMMEDIATE_DREG], data[nf.NFTA_DATA_VALUE])
            return None
        verdict = _verdict(data[nf.NFTA_DATA_VERDICT])
        if verdict.code == nf.NF_DROP:
            self.outcome.verdict = "drop"
        if verdict.code in {nf.NF_DROP, nf.NF_ACCEPT}:
            raise _Verdict
        return verdict


def _need(fulfilled: bool, code: int, what: str) -> None:
    if not fulfilled:
        raise NftablesError(code, what)


def _data(attributes: Any) -> bytes:
    return bytes(dict(attributes)[nf.NFTA_DATA_VALUE])


def _verdict(attributes: Any) -> Verdict:
    found = dict(attributes)
    code = found[nf.NFTA_VERDICT_CODE]
    return Verdict(code - (1 << 32) if code >> 31 else code, found.get(nf.NFTA_VERDICT_CHAIN, ""))


def _sets_of(rule: Rule) -> set[str]:
    names = {"lookup": nf.NFTA_LOOKUP_SET, "dynset": nf.NFTA_DYNSET_SET_NAME}
    return {str(dict(e.attributes)[names[e.name]]) for e in rule.expressions if e.name in names}


def _counters_of(rule: Rule) -> set[str]:
    return {str(dict(e.attributes)[nf.NFTA_OBJREF_IMM_NAME]) for e in rule.expressions if e.name == "objref"}


def _jumps(rule: Rule) -> list[str]:
    found = []
    for expression in rule.expressions:
        attributes: dict[int, Any] = dict(expression.attributes)
        data = dict(attributes[nf.NFTA_IMMEDIATE_DATA]) if expression.name == "immediate" else {}
        if nf.NFTA_DATA_VERDICT in data:
            found.append(_verdict(data[nf.NFTA_DATA_VERDICT]).chain_name)
    return [name for name in found if name]


def _rules(table: _Table) -> list[Rule]:
    return [rule for rules in table.rules.values() for rule in rules]


def _targets(table: _Table) -> set[str]:
    verdicts = {
        value.chain_name
        for name in table.sets
        for value, _ in table.elements[name].values()
        if isinstance(value, Verdict)
    }
    return verdicts | {chain for rule in _rules(table) for chain in _jumps(rule)}


def _overlaps(key: Key, held: Iterable[Key]) -> bool:
    mine = ipaddress.ip_network(str(key[-1]))
    return any(
        other != key and other[:-1] == key[:-1] and mine.overlaps(ipaddress.ip_network(str(other[-1])))
        for other in held
    )
