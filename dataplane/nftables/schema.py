"""PURE. Sets, chains and elements as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.nftables import uapi as nf
from hybrid_proxy.dataplane.nftables.expressions import Family, Rule, Verdict

# Fields of keys and data. An address and a RANGE (a CIDR) are text, the others are integers.
ADDRESS, PROTOCOL, PORT, SLOT, NUMBER, RANGE = "address", "protocol", "port", "slot", "number", "range"
VERDICT: Final = "verdict"

Key = tuple[str | int, ...]
Value = tuple[str, int] | int | Verdict | None

# The numbers that nft has for types (include/datatype.h of its sources): they only say how it lists a set.
_TYPE: Final = {PROTOCOL: 12, PORT: 13, SLOT: 19, NUMBER: 23}
_TYPE_ADDRESS: Final = {4: 7, 6: 8}
_TYPE_BITS: Final = 6


class Element(NamedTuple):
    """One element: `value` is a backend's address and port, a number, a verdict, or None in a set."""

    set: str
    key: Key
    value: Value = None
    comment: str = ""


class Set(NamedTuple):
    """A set or, with `data`, a map. `seconds`: packets write its elements, which expire so long after the last one."""

    name: str
    key: tuple[str, ...]
    data: tuple[str, ...] = ()
    seconds: int = 0
    size: int = 0  # the most elements of a set that packets write

    @property
    def flags(self) -> int:
        """The set's flags (NFT_SET_...)."""
        flags = nf.NFT_SET_MAP if self.data else 0
        if self.seconds:
            flags |= nf.NFT_SET_TIMEOUT | nf.NFT_SET_EVAL
        return flags | (nf.NFT_SET_INTERVAL | nf.NFT_SET_CONCAT if RANGE in self.key else 0)

    def shape(self, family: Family) -> Shape:
        """The set as the kernel describes it."""
        key, data = type_number(family, self.key), type_number(family, self.data)
        return Shape(self.flags, key, length(family, self.key), data, self.seconds)


class Shape(NamedTuple):
    """The properties that two sets must share to be the same."""

    flags: int
    key_type: int
    key_length: int
    data_type: int
    seconds: int


class Hook(NamedTuple):
    """The place of a base chain: its hook (NF_INET_...) and priority, the chain's type and policy."""

    number: int
    priority: int
    type: str = "nat"
    policy: int = nf.NF_ACCEPT


class Chain(NamedTuple):
    """A chain with its rules in order."""

    name: str
    rules: tuple[Rule, ...]
    hook: Hook | None = None

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of the rules, which are compared with the kernel's."""
        return tuple(rule.digest for rule in self.rules)


def width(family: Family, field: str) -> int:
    """Returns the bytes of a field; a concatenation pads each to four."""
    if field in {ADDRESS, RANGE}:
        return family.length
    return {PROTOCOL: 1, PORT: 2, SLOT: 4, NUMBER: 4, VERDICT: 0}[field]


def length(family: Family, fields: Sequence[str]) -> int:
    """Returns the bytes of a key or of data."""
    if len(fields) == 1:
        return width(family, fields[0])
    return sum(-(-width(family, field) // 4) * 4 for field in fields)


def type_number(family: Family, fields: Sequence[str]) -> int:
    """Returns the type of a key or of data: six bits for each field of a concatenation, as nft numbers it."""
    if fields == (VERDICT,):
        return nf.NFT_DATA_VERDICT
    number = 0
    for field in fields:
        number = number << _TYPE_BITS | (_TYPE.get(field) or _TYPE_ADDRESS[family.version])
    return number
