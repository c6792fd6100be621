"""PURE. What can be asked of nf_tables, as values: a list of these is one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from dataplane.modes.nftables.expressions import Rule
from dataplane.modes.nftables.lower import Chain, Element, Family, Key, Set

__all__ = [
    "AddChain", "AddCounter", "AddElements", "AddRules", "AddSet", "AddTable", "DeleteChain", "DeleteElements",
    "DeleteSet", "DeleteTable", "Door", "FlushChain", "Operation", "Skeleton", "Value", "Work",
]  # fmt: skip

Value = tuple[str, int] | int | str | None


class AddTable(NamedTuple):
    """The family's table; nothing if it is there."""


class DeleteTable(NamedTuple):
    """The family's table with everything in it."""


class AddCounter(NamedTuple):
    """A named counter; nothing if it is there."""

    name: str


class AddSet(NamedTuple):
    """A set or map; nothing if it is there and looks the same."""

    set: Set


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


class AddElements(NamedTuple):
    """New elements of one set, none of which is there."""

    set: str
    elements: Sequence[Element]


class DeleteElements(NamedTuple):
    """Elements of one set, all of which are there."""

    set: str
    keys: Sequence[Key]


Operation = (
    AddTable | DeleteTable | AddCounter | AddSet | DeleteSet | AddChain | FlushChain | DeleteChain | AddRules
    | AddElements | DeleteElements
)  # fmt: skip


Work = tuple[Family, Iterable[Operation]]


class Skeleton(NamedTuple):
    """What stands in the kernel but for the elements: sets by name, and for each chain the marks of its rules."""

    sets: Mapping[str, bool]  # False: one of ours that is of another kind
    chains: Mapping[str, tuple[str, ...]]
    hooks: Mapping[str, bool]  # of base chains: whether it hangs where ours of that name does
    counters: frozenset[str]


class Door(Protocol):
    """The way to the kernel; `wire.Kernel` is it, tests have a fake."""

    def commit(self, *work: Work) -> None:
        """One transaction, of one family or both."""

    def skeleton(self, family: Family) -> Skeleton | None:
        """What is there of our table, None: there is no such table."""

    def contents(self, family: Family, wanted: Set) -> dict[Key, tuple[Value, str]]:
        """Key -> value and comment of all elements of a set."""

    def counters(self, family: Family) -> dict[str, int]:
        """Packets by counter."""

    def generation(self) -> int:
        """A number that changes with every transaction of anybody."""

    def close(self) -> None:
        """Give it back."""
