"""Operations to netlink messages, and what the kernel tells back."""

from __future__ import annotations

import errno
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from dataplane.kernel.netlink import NLM_F_APPEND, NLM_F_CREATE, attribute, nested, string
from dataplane.kernel.netlink import attributes as each_attribute
from dataplane.kernel.nfnetlink import NFPROTO, Message, Nfnetlink, NftablesError, attributes, number, number64
from dataplane.modes.nftables import operations as op
from dataplane.modes.nftables.codec import Codec, cidr_between, length, type_of, width
from dataplane.modes.nftables.expressions import Attributes, Family, Rule, verdict
from dataplane.modes.nftables.lower import (
    ALLOWED,
    MAX_CLIENTS,
    RANGE,
    TABLE,
    VERDICT,
    Chain,
    Element,
    Key,
    Set,
    set_named,
)

__all__ = ["Kernel"]

# linux/netfilter/nf_tables.h
NEWTABLE, GETTABLE, DELTABLE, NEWCHAIN, GETCHAIN, DELCHAIN, NEWRULE, GETRULE, DELRULE = range(9)
NEWSET, GETSET, DELSET, NEWSETELEM, GETSETELEM, DELSETELEM = range(9, 15)
NEWOBJ, GETOBJ = 18, 19
INTERVAL, MAP, TIMEOUT, EVAL, CONCAT = 0x4, 0x8, 0x10, 0x20, 0x80
VERDICT_TYPE: Final = 0xFFFFFF00
COUNTER: Final = 1
ELEMENTS_ROOM: Final = 60_000  # an attribute's length has 16 bits

_COMMENT: Final = 0  # nft's user data: a comment
_MARK: Final = 0xF0  # ours, which nft skips


def _attribute(kind: int, value: int | bytes | Attributes) -> bytes:
    if isinstance(value, int):
        return number(kind, value)
    if isinstance(value, bytes):
        return attribute(kind, value)
    return nested(kind, *(_attribute(*inner) for inner in value))


def _expressions(rule: Rule) -> bytes:
    encoded = (
        nested(1, string(1, e.name), nested(2, *(_attribute(*inner) for inner in e.attributes)))
        for e in rule.expressions
    )
    return nested(4, *encoded)


def _flags(wanted: Set) -> int:
    flags = (MAP if wanted.data else 0) | (TIMEOUT | EVAL if wanted.seconds else 0)
    return flags | (INTERVAL | CONCAT if RANGE in wanted.key else 0)


class Kernel:
    """A `operations.Door` to the nf_tables of the calling thread's network namespace.

    Raises:
        OSError: no nf_tables in this kernel.
    """

    def __init__(self, table: str = TABLE) -> None:
        self._table = table
        self._netlink = Nfnetlink()
        self._codecs: dict[int, Codec] = {}
        self._ids = 0

    def close(self) -> None:
        """See `operations.Door.close`."""
        self._netlink.close()

    def generation(self) -> int:
        """See `operations.Door.generation`."""
        return self._netlink.generation()

    def _codec(self, family: Family) -> Codec:
        found = self._codecs.get(family.version)
        if found is None:
            found = self._codecs[family.version] = Codec(family)
        return found

    # Writing

    def commit(self, *work: op.Work) -> None:
        """See `operations.Door.commit`.

        Raises:
            NftablesError: nothing of it is in effect.
        """
        self._netlink.commit(
            [message for family, operations in work for one in operations for message in self._messages(family, one)]
        )

    def _messages(self, family: Family, operation: op.Operation) -> Iterator[Message]:
        protocol = NFPROTO[family.version]
        table = string(1, self._table)
        match operation:
            case op.AddTable():
                yield Message(NEWTABLE, NLM_F_CREATE, protocol, table, f"table {family.name} {self._table}")
            case op.DeleteTable():
                yield Message(DELTABLE, 0, protocol, table, f"to delete table {family.name} {self._table}")
            case op.AddCounter(name):
                body = table + string(2, name) + number(3, COUNTER) + nested(4)
                yield Message(NEWOBJ, NLM_F_CREATE, protocol, body, f"counter {name}")
            case op.AddSet(wanted):
                yield Message(NEWSET, NLM_F_CREATE, protocol, table + self._set(family, wanted), f"set {wanted.name}")
            case op.DeleteSet(name):
                yield Message(DELSET, 0, protocol, table + string(2, name), f"to delete set {name}")
            case op.AddChain(chain):
                yield Message(NEWCHAIN, NLM_F_CREATE, protocol, table + _chain(chain), f"chain {chain.name}")
            case op.FlushChain(name):
                yield Message(DELRULE, 0, protocol, table + string(2, name), f"to flush chain {name}")
            case op.DeleteChain(name):
                yield Message(DELCHAIN, 0, protocol, table + string(3, name), f"to delete chain {name}")
            case op.AddRules(chain, rules):
                for rule in rules:
                    body = table + string(2, chain) + _expressions(rule) + _rule_data(rule)
                    what = f"rule `{rule.text}` in chain {chain}"
                    yield Message(NEWRULE, NLM_F_CREATE | NLM_F_APPEND, protocol, body, what)
            case op.AddElements(name, elements):
                octets = self._new_elements(family, name, elements)
                yield from self._element_messages(NEWSETELEM, NLM_F_CREATE, protocol, name, octets)
            case op.DeleteElements(name, keys):
                octets = self._old_elements(family, name, keys)
                yield from self._element_messages(DELSETELEM, 0, protocol, name, octets)

    def _set(self, family: Family, wanted: Set) -> bytes:
        self._ids += 1
        parts = [
            string(2, wanted.name), number(3, _flags(wanted)), number(4, type_of(family, wanted.key)),
            number(5, length(family, wanted.key)), number(10, self._ids),
        ]  # fmt: skip
        if wanted.data == (VERDICT,):
            parts += [number(6, VERDICT_TYPE), number(7, 0)]
        elif wanted.data:
            parts += [number(6, type_of(family, wanted.data)), number(7, length(family, wanted.data))]
        if wanted.seconds:
            parts += [nested(9, number(1, MAX_CLIENTS)), number64(11, 1000 * wanted.seconds)]
        elif RANGE in wanted.key:
            widths = (nested(1, number(1, width(family, field))) for field in wanted.key)
            parts.append(nested(9, nested(2, *widths)))
        return b"".join(parts)

    def _new_elements(self, family: Family, name: str, elements: Sequence[Element]) -> Iterator[bytes]:
        wanted, codec = _set_named(name), self._codec(family)
        encode = codec.encoder(wanted.key)
        values: dict[object, bytes] = {}
        for element in elements:
            if name == ALLOWED:
                first, last = codec.range_ends(wanted.key, element.key)
                parts = nested(1, attribute(1, first)) + nested(10, attribute(1, last))
            else:
                parts = nested(1, attribute(1, encode(element.key)))
            value = element.value
            if value is not None:
                data = values.get(value)
                if data is None:
                    if len(values) > 1024:
                        values.clear()
                    data = values[value] = nested(2, self._value(codec, value))
                parts += data
            if element.comment:
                text = element.comment.encode() + b"\0"
                parts += attribute(6, bytes([_COMMENT, len(text)]) + text)
            yield nested(1, parts)

    def _value(self, codec: Codec, value: tuple[str, int] | int | str) -> bytes:
        if isinstance(value, str):
            return b"".join(_attribute(*inner) for inner in verdict(value))
        if isinstance(value, int):
            return attribute(1, value.to_bytes(4, sys.byteorder))
        address, port = value
        return attribute(1, codec.address(address) + port.to_bytes(2, "big") + bytes(2))

    def _old_elements(self, family: Family, name: str, keys: Sequence[Key]) -> Iterator[bytes]:
        wanted, codec = _set_named(name), self._codec(family)
        encode = codec.encoder(wanted.key)
        for key in keys:
            if name == ALLOWED:
                first, last = codec.range_ends(wanted.key, key)
                yield nested(1, nested(1, attribute(1, first)), nested(10, attribute(1, last)))
            else:
                yield nested(1, nested(1, attribute(1, encode(key))))

    def _element_messages(
        self, kind: int, flags: int, protocol: int, name: str, octets: Iterable[bytes]
    ) -> Iterator[Message]:
        head = string(1, self._table) + string(2, name)
        what = f"{'elements' if kind == NEWSETELEM else 'to delete elements'} of {name}"
        kept: list[bytes] = []
        size = 0
        for element in octets:
            if size + len(element) > ELEMENTS_ROOM:
                yield Message(kind, flags, protocol, head + nested(3, *kept), what)
                kept, size = [], 0
            kept.append(element)
            size += len(element)
        if kept:
            yield Message(kind, flags, protocol, head + nested(3, *kept), what)

    # Reading

    def skeleton(self, family: Family) -> op.Skeleton | None:
        """See `operations.Door.skeleton`."""
        protocol, table = NFPROTO[family.version], string(1, self._table)
        if self._netlink.get(GETTABLE, protocol, table) is None:
            return None
        try:
            return op.Skeleton(
                sets=dict(self._read_sets(family)),
                chains=self._read_rules(protocol, hooks := dict(self._read_chains(protocol))),
                hooks={name: right for name, right in hooks.items() if right is not None},
                counters=frozenset(self.counters(family)),
            )
        except NftablesError as error:
            if error.code == errno.ENOENT:
                return None
            raise

    def _read_sets(self, family: Family) -> Iterator[tuple[str, bool]]:
        for body in self._netlink.dump(GETSET, NFPROTO[family.version], string(1, self._table)):
            told = attributes(body)
            wanted = set_named(_text(told[2]))
            yield _text(told[2]), wanted is None or _looks(family, wanted, told)

    def _read_chains(self, protocol: int) -> Iterator[tuple[str, bool | None]]:
        """Chains of our table; None: no base chain."""
        for body in self._netlink.dump(GETCHAIN, protocol):
            told = attributes(body)
            if _text(told[1]) != self._table:
                continue
            if 4 not in told:
                yield _text(told[3]), None
                continue
            hook = attributes(told[4])
            place = (_u32(hook[1]), struct.unpack(">i", hook[2])[0], _text(told[7]), _u32(told.get(5, b"")))
            yield _text(told[3]), place in _HOOKS.get(_text(told[3]), set())

    def _read_rules(self, protocol: int, chains: Iterable[str]) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {name: [] for name in chains}
        for body in self._netlink.dump(GETRULE, protocol, string(1, self._table)):
            told = attributes(body)
            if _text(told[1]) == self._table:
                found.setdefault(_text(told[2]), []).append(_user_data(told.get(7, b"")).get(_MARK, b"").decode())
        return {name: tuple(marks) for name, marks in found.items()}

    def contents(self, family: Family, wanted: Set) -> dict[Key, tuple[op.Value, str]]:
        """See `operations.Door.contents`."""
        codec = self._codec(family)
        decode, value_of = codec.decoder(wanted.key), self._value_reader(codec, wanted)
        found = {}
        body = string(1, self._table) + string(2, wanted.name)
        for message in self._netlink.dump(GETSETELEM, NFPROTO[family.version], body):
            for _, element in each_attribute(attributes(message).get(3, b"")):
                told = attributes(element)
                key = decode(told[1][4:])  # behind the header of its only attribute
                if 10 in told:
                    key = (*key[:-1], cidr_between(str(key[-1]), str(decode(told[10][4:])[-1])))
                comment = (
                    _user_data(told[6]).get(_COMMENT, b"").rstrip(b"\0").decode(errors="replace") if 6 in told else ""
                )
                found[key] = (value_of(told[2]) if 2 in told else None, comment)
        return found

    def _value_reader(self, codec: Codec, wanted: Set) -> Callable[[bytes], op.Value]:
        known: dict[bytes, op.Value] = {}
        decode = codec.decoder(wanted.data)

        def read(data: bytes) -> op.Value:
            found = known.get(data)
            if found is None:
                if wanted.data == (VERDICT,):
                    found = _verdict_text(attributes(attributes(data)[2]))
                else:
                    value = decode(data[4:])
                    found = value[0] if len(value) == 1 else (str(value[0]), int(value[1]))
                known[data] = found
            return found

        return read

    def counters(self, family: Family) -> dict[str, int]:
        """See `operations.Door.counters`."""
        found = {}
        for body in self._netlink.dump(GETOBJ, NFPROTO[family.version], string(1, self._table) + number(3, COUNTER)):
            told = attributes(body)
            if _text(told[1]) == self._table and _u32(told[3]) == COUNTER:
                found[_text(told[2])] = int.from_bytes(attributes(told[4]).get(2, b""), "big")
        return found


_HOOKS: Final[dict[str, set[tuple[int, int, str, int]]]] = {
    "nat-prerouting": {(0, -100, "nat", 1)},
    "nat-output": {(3, -100, "nat", 1)},
    "nat-postrouting": {(4, 100, "nat", 1)},
    "filter-forward": {(2, 0, "filter", 1)},
}


def _set_named(name: str) -> Set:
    found = set_named(name)
    assert found is not None, f"no set of ours is named {name}"
    return found


def _chain(chain: Chain) -> bytes:
    body = string(3, chain.name)
    if chain.hook is None:
        return body
    hook = nested(4, number(1, chain.hook.number), attribute(2, struct.pack(">i", chain.hook.priority)))
    return body + hook + number(5, 1) + string(7, chain.hook.type)


def _rule_data(rule: Rule) -> bytes:
    mark = rule.mark.encode()
    return attribute(7, bytes([_MARK, len(mark)]) + mark)


def _looks(family: Family, wanted: Set, told: dict[int, bytes]) -> bool:
    """Whether the kernel's set has our types, lengths and flags."""
    data = (
        (VERDICT_TYPE, 0) if wanted.data == (VERDICT,) else (type_of(family, wanted.data), length(family, wanted.data))
    )
    if not wanted.data:
        data = (0, 0)
    expected = (_flags(wanted), type_of(family, wanted.key), length(family, wanted.key), data[0])
    found = tuple(_u32(told.get(kind, b"")) for kind in (3, 4, 5, 6))
    seconds = int.from_bytes(told.get(11, b""), "big") // 1000
    return expected == found and seconds == wanted.seconds


def _verdict_text(told: dict[int, bytes]) -> str:
    code = struct.unpack(">i", told[1])[0]
    names = {-3: "jump", -4: "goto", -5: "return", 0: "drop", 1: "accept"}
    chain = _text(told[2]) if 2 in told else ""
    return f"{names.get(code, code)} {chain}".strip()


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


def _u32(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _user_data(data: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    offset = 0
    while offset + 2 <= len(data):
        kind, length = data[offset], data[offset + 1]
        found[kind] = data[offset + 2 : offset + 2 + length]
        offset += 2 + length
    return found
