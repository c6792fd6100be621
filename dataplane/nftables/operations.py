"""PURE. What a transaction can do, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hybrid_proxy.dataplane.nftables.expressions import Family, Rule
from hybrid_proxy.dataplane.nftables.schema import Chain, Element, Hook, Key, Set, Shape


class AddTable(NamedTuple):
    """The family's table; nothing if it is there."""


class DeleteTable(NamedTuple):
    """The family's table with everything in it."""


class DeleteRules(NamedTuple):
    """All rules of the table, whatever chain they are in."""


class AddCounter(NamedTuple):
    """A named counter; nothing if it is there."""

    name: str


class AddSet(NamedTuple):
    """A set or map; nothing if it is there and looks the same."""

    set: Set


class FlushSet(NamedTuple):
    """All elements of a set."""

    name: str


class DeleteSet(NamedTuple):
    """A set that no rule names."""

    name: str


class AddChain(NamedTuple):
    """A chain without its rules; nothing if it is there."""

    chain: Chain


class FlushChain(NamedTuple):
    """All rules of a chain."""

    name: str


class DeleteChain(NamedTuple):
    """An empty chain that nothing leads to."""

    name: str


class AddRules(NamedTuple):
    """Rules at the end of a chain."""

    chain: str
    rules: tuple[Rule, ...]


class AddFlowtable(NamedTuple):
    """A flowtable, which counts packets, at these interfaces too. Nothing is made that is there."""

    name: str
    interfaces: tuple[str, ...] = ()


class DeleteInterfaces(NamedTuple):
    """Interfaces of a flowtable, all of which it has."""

    name: str
    interfaces: tuple[str, ...]


class DeleteFlowtable(NamedTuple):
    """A flowtable that no rule names. Its flows pass the rules again."""

    name: str


class AddElements(NamedTuple):
    """New elements of one set, none of which is there."""

    set: str
    elements: Sequence[Element]


class DeleteElements(NamedTuple):
    """Elements of one set, all of which are there."""

    set: str
    keys: Sequence[Key]


Operation = (
    AddTable | DeleteTable | DeleteRules | AddCounter | AddSet | FlushSet | DeleteSet | AddChain
    | FlushChain | DeleteChain | AddRules | AddFlowtable | DeleteInterfaces | DeleteFlowtable | AddElements
    | DeleteElements
)  # fmt: skip


Work = tuple[Family, Iterable[Operation]]


class Skeleton(NamedTuple):
    """What the kernel has of a table except elements. `chains` holds the digests of each chain's rules.

    `hooks` has the base chains only, `flowtables` the names of each one's interfaces.
    """

    sets: Mapping[str, Shape]
    chains: Mapping[str, tuple[str, ...]]
    hooks: Mapping[str, Hook]
    counters: frozenset[str]
    flowtables: Mapping[str, frozenset[str]]
