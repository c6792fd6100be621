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

from dataplane.kernel.nfnetlink import NftablesError
from dataplane.modes.nftables import lower
from dataplane.modes.nftables import operations as op
from dataplane.modes.nftables.codec import Codec
from dataplane.modes.nftables.expressions import Expression, Family, Rule
from dataplane.modes.nftables.lower import Chain, Key, Set

__all__ = ["FakeNftables", "Outcome", "Packet"]

NAME, DATA_VERDICT = 1, 2
HOST = sys.byteorder


@dataclass
class _Table:
    sets: dict[str, Set] = field(default_factory=dict)
    elements: dict[str, dict[Key, tuple[op.Value, str]]] = field(default_factory=dict)
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
    """A `dataplane.modes.nftables.operations.Door`."""

    def __init__(self, local: Iterable[str] = ()) -> None:
        self.tables: dict[int, _Table] = {}
        self.local = frozenset(local)
        self.transactions: list[list[op.Operation]] = []
        self.refuse: int | None = None  # errno of the next transaction
        self.number = 1

    # The door

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
            sets={name: lower.set_named(name) in {None, one} for name, one in table.sets.items()},
            chains={name: tuple(rule.mark for rule in table.rules[name]) for name in table.chains},
            hooks={name: True for name, chain in table.chains.items() if chain.hook},
            counters=frozenset(table.counters),
        )

    def contents(self, family: Family, wanted: Set) -> dict[Key, tuple[op.Value, str]]:
        return dict(self._table(family).elements[wanted.name])

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
                    _need(_sets_of(rule) <= table.sets.keys(), errno.ENOENT, rule.text)
                    _need(set(_jumps(rule)) <= table.chains.keys(), errno.ENOENT, rule.text)
                    _need(_counters_of(rule) <= table.counters.keys(), errno.ENOENT, rule.text)
                table.rules[name] += rules
            case op.AddElements(name, elements):
                self._add(table, name, elements)
            case op.DeleteElements(name, keys):
                _need(name in table.sets, errno.ENOENT, f"set {name}")
                for key in keys:
                    _need(key in table.elements[name], errno.ENOENT, f"element {key} of {name}")
                    del table.elements[name][key]

    def _add(self, table: _Table, name: str, elements: Iterable[lower.Element]) -> None:
        _need(name in table.sets, errno.ENOENT, f"set {name}")
        wanted, held = table.sets[name], table.elements[name]
        for element in elements:
            assert len(element.key) == len(wanted.key), f"{element.key} is no key of {name}"
            if wanted.data == (lower.VERDICT,):
                chain = str(element.value).removeprefix("goto ")
                _need(chain in table.chains, errno.ENOENT, f"element {element.key} of {name}, which leads to {chain}")
            assert (element.value is None) == (not wanted.data)
            value = (element.value, element.comment)
            _need(held.setdefault(element.key, value) == value, errno.EEXIST, f"element {element.key} of {name}")
            if lower.RANGE in wanted.key:
                _need(not _overlaps(element.key, held), errno.EEXIST, f"range {element.key}")

    # Packets

    def walk(self, packet: Packet, choose: Callable[[int], int] = lambda modulus: 0) -> Outcome:
        """Through the hooks of our table; `choose` is numgen."""
        family = lower.FAMILIES[ipaddress.ip_address(packet.dst).version]
        walker = _Walker(self._table(family), family, packet, self.local, choose)
        walker.run("nat-prerouting" if packet.interface else "nat-output")
        out = walker.outcome
        if out.verdict in {"untouched", "dnat"}:
            walker.run("nat-postrouting")
        out.mark, out.priority = walker.meta[3], walker.meta[2]
        return out


class _Walker:
    def __init__(
        self, table: _Table, family: Family, packet: Packet, local: frozenset[str], choose: Callable[[int], int]
    ) -> None:
        self.table, self.family, self.packet, self.local, self.choose = table, family, packet, local, choose
        self.codec = Codec(family)
        self.registers = bytearray(64)
        self.dst, self.port = packet.dst, packet.port
        self.meta = {2: packet.priority, 3: packet.mark}
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
            word, _, chain = target.partition(" ")
            if word == "return":
                return False
            if word == "goto":
                self._chain(chain)
                return False
            self._chain(chain)
        return True

    def _step(self, expression: Expression) -> str | None:
        """A verdict that leads elsewhere, or None."""
        a: dict[int, Any] = dict(expression.attributes)
        match expression.name:
            case "payload":
                self._put(a[1], self._octets(a[2], a[3], a[4]))
            case "meta":
                if 3 in a:
                    self.meta[a[2]] = int.from_bytes(self._get(a[3], 4), HOST)
                else:
                    self._put(a[1], self._meta(a[2]))
            case "ct":
                self._put(a[1], (0x20 if self.outcome.to else 0).to_bytes(4, HOST))
            case "fib":
                self._put(a[1], (2 if self.dst in self.local else 1).to_bytes(4, HOST))
            case "numgen":
                self._put(a[1], self.choose(a[2]).to_bytes(4, HOST))
            case "bitwise":
                masked = zip(self._get(a[1], a[3]), dict(a[4])[1], dict(a[5])[1], strict=True)
                self._put(a[2], bytes(value & mask ^ xor for value, mask, xor in masked))
            case "cmp":
                wanted = dict(a[3])[1]
                if (self._get(a[1], len(wanted)) == wanted) != (a[2] == 0):
                    raise _Break
            case "lookup":
                return self._lookup(a)
            case "dynset":
                self._dynamic(a)
            case "objref":
                self.table.counters[_name(a[2])] += 1
            case "immediate":
                return self._immediate(a)
            case "nat":
                self.dst = str(self.codec.decode((lower.ADDRESS,), self._get(a[3], self.family.length))[0])
                self.port = int.from_bytes(self._get(a[5], 2), "big")
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

    def _octets(self, base: int, offset: int, length: int) -> bytes:
        family = self.family
        if base == 2:
            return {0: self.packet.source_port, 2: self.port}[offset].to_bytes(length, "big")
        assert length == family.length
        text = {family.source: self.packet.src, family.destination: self.dst}[offset]
        return socket.inet_pton(socket.AF_INET if family.version == 4 else socket.AF_INET6, text)

    def _meta(self, key: int) -> bytes:
        if key == 16:
            return bytes([self.packet.protocol])
        if key == 4:
            return (3 if self.packet.interface else 0).to_bytes(4, HOST)
        if key == 6:
            if not self.packet.interface:
                raise _Break
            return self.packet.interface.encode().ljust(16, b"\0")
        return self.meta[key].to_bytes(4, HOST)

    def _place(self, register: int) -> int:
        return (register - 8) * 4

    def _put(self, register: int, value: bytes) -> None:
        place = self._place(register)
        value = value.ljust(-(-len(value) // 4) * 4, b"\0")
        self.registers[place : place + len(value)] = value

    def _get(self, register: int, length: int) -> bytes:
        place = self._place(register)
        return bytes(self.registers[place : place + length])

    def _key(self, name: str, register: int) -> Key:
        fields = self.table.sets[name].key
        fields = tuple(lower.ADDRESS if f == lower.RANGE else f for f in fields)
        return self.codec.decode(fields, self._get(register, 64 - self._place(register)))

    def _lookup(self, a: dict[int, Any]) -> str | None:
        name = _name(a[1])
        key, elements = self._key(name, a[2]), self.table.elements[name]
        if lower.RANGE in self.table.sets[name].key:
            source = ipaddress.ip_address(str(key[-1]))
            found = any(k[:-1] == key[:-1] and source in ipaddress.ip_network(str(k[-1])) for k in elements)
        else:
            found = key in elements
        if found == bool(a.get(5)):
            raise _Break
        if 3 not in a:
            return None
        value = elements[key][0]
        if isinstance(value, str):
            return value
        if isinstance(value, int):
            self._put(a[3], value.to_bytes(4, HOST))
        else:
            assert value is not None
            self._put(a[3], self.codec.address(value[0]) + value[1].to_bytes(2, "big"))
        return None

    def _dynamic(self, a: dict[int, Any]) -> None:
        name = _name(a[1])
        key, elements = self._key(name, a[4]), self.table.elements[name]
        if a[3] == 2:
            elements.pop(key, None)
        else:
            elements.setdefault(key, (int.from_bytes(self._get(a[5], 4), HOST), ""))

    def _immediate(self, a: dict[int, Any]) -> str | None:
        data = dict(a[2])
        if NAME in data:
            self._put(a[1], data[NAME])
            return None
        told = dict(data[DATA_VERDICT])
        code = told[1]
        if code in {0, 1}:
            if code == 0:
                self.outcome.verdict = "drop"
            raise _Verdict
        word = {0xFFFFFFFD: "jump", 0xFFFFFFFC: "goto", 0xFFFFFFFB: "return"}[code]
        return f"{word} {_name(told[2])}" if 2 in told else word


def _need(fulfilled: bool, code: int, what: str) -> None:
    if not fulfilled:
        raise NftablesError(code, what)


def _name(octets: bytes) -> str:
    return octets.rstrip(b"\0").decode()


def _sets_of(rule: Rule) -> set[str]:
    return {_name(dict(e.attributes)[NAME]) for e in rule.expressions if e.name in {"lookup", "dynset"}}


def _counters_of(rule: Rule) -> set[str]:
    return {_name(dict(e.attributes)[2]) for e in rule.expressions if e.name == "objref"}


def _jumps(rule: Rule) -> list[str]:
    found = []
    for expression in rule.expressions:
        data = dict(dict(expression.attributes).get(2, ())) if expression.name == "immediate" else {}
        told = dict(data.get(DATA_VERDICT, ()))
        if 2 in told:
            found.append(_name(told[2]))
    return found


def _rules(table: _Table) -> list[Rule]:
    return [rule for rules in table.rules.values() for rule in rules]


def _targets(table: _Table) -> set[str]:
    verdicts = {
        str(value).removeprefix("goto ")
        for name, one in table.sets.items()
        if one.data == (lower.VERDICT,)
        for value, _ in table.elements[name].values()
    }
    return verdicts | {chain for rule in _rules(table) for chain in _jumps(rule)}


def _overlaps(key: Key, held: Iterable[Key]) -> bool:
    mine = ipaddress.ip_network(str(key[-1]))
    return any(
        other != key and other[:-1] == key[:-1] and mine.overlaps(ipaddress.ip_network(str(other[-1])))
        for other in held
    )
