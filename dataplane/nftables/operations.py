"""PURE. The operations of a transaction, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hybrid_proxy.dataplane.nftables.expressions import Family, Rule
from hybrid_proxy.dataplane.nftables.schema import Chain, Element, Hook, Key, Set, Shape


class AddTable(NamedTuple):
    """Adds the family's table, unless it exists."""


class DeleteTable(NamedTuple):
    """Deletes the family's table with everything in it."""


class DeleteRules(NamedTuple):
    """Deletes all rules of the table, in every chain."""


class AddCounter(NamedTuple):
    """Adds a named counter, unless it exists."""

    name: str


class AddSet(NamedTuple):
    """Adds a set or map, unless an equal one exists."""

    set: Set


class FlushSet(NamedTuple):
    """Deletes all elements of a set."""

    name: str


class DeleteSet(NamedTuple):
    """Deletes a set that no rule names."""

    name: str


class AddChain(NamedTuple):
    """Adds a chain without rules, unless it exists."""

    chain: Chain


class FlushChain(NamedTuple):
    """Deletes all rules of a chain."""

    name: str


class DeleteChain(NamedTuple):
    """Deletes an empty chain that nothing leads to."""

    name: str


class AddRules(NamedTuple):
    """Appends rules to a chain."""

    chain: str
    rules: tuple[Rule, ...]


class AddElements(NamedTuple):
    """Adds elements to one set, which has none of them."""

    set: str
    elements: Sequence[Element]


class DeleteElements(NamedTuple):
    """Deletes elements of one set, which has all of them."""

    set: str
    keys: Sequence[Key]


Operation = (
    AddTable | DeleteTable | DeleteRules | AddCounter | AddSet | FlushSet | DeleteSet | AddChain
    | FlushChain | DeleteChain | AddRules | AddElements | DeleteElements
)  # fmt: skip


Work = tuple[Family, Iterable[Operation]]


class Skeleton(NamedTuple):
    """The kernel's table except its elements: `chains` has digests of each one's rules, `hooks` only base chains."""

    sets: Mapping[str, Shape]
    chains: Mapping[str, tuple[str, ...]]
    hooks: Mapping[str, Hook]
    counters: frozenset[str]
