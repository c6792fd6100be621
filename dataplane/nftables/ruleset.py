"""PURE. Creates a table without its elements, compares it with the kernel's, and repairs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables.expressions import Family
from hybrid_proxy.dataplane.nftables.schema import Chain, Element, Key, Set
from hybrid_proxy.dataplane.reports import several, some

_DESCRIBED: Final = 8  # operations that a message names


class Ruleset(NamedTuple):
    """The wanted counters, sets and chains of one family's table."""

    family: Family
    counters: tuple[str, ...]
    sets: tuple[Set, ...]
    chains: tuple[Chain, ...]

    def create(self, *, replace: bool) -> Iterator[op.Operation]:
        """Create a new table, or replace the existing one."""
        if replace:
            yield op.AddTable()  # a missing table cannot be deleted
            yield op.DeleteTable()
        yield op.AddTable()
        yield from (op.AddCounter(name) for name in self.counters)
        yield from add(self.sets, self.chains)

    def irreparable(self, skeleton: op.Skeleton) -> str:
        """Why the kernel's table must be replaced as a whole; empty: `repair` is enough.

        The kernel changes neither the hook of a chain nor the type of a set.
        """
        for chain in self.chains:
            if chain.name in skeleton.chains and skeleton.hooks.get(chain.name) != chain.hook:
                return f"chain {chain.name} has another hook"
        for wanted in self.sets:
            found = skeleton.sets.get(wanted.name)
            if found is not None and found != wanted.shape(self.family):
                return f"set {wanted.name} has another type"
        return ""

    def repair(self, skeleton: op.Skeleton) -> list[op.Operation]:
        """Add what is missing and rewrite chains whose rules differ. Elements are not compared."""
        absent = [chain for chain in self.chains if chain.name not in skeleton.chains]
        other = [chain for chain in self.chains if skeleton.chains.get(chain.name, chain.digests) != chain.digests]
        return [
            *(op.AddCounter(name) for name in self.counters if name not in skeleton.counters),
            *(op.AddSet(one) for one in self.sets if one.name not in skeleton.sets),
            *(op.AddChain(chain) for chain in absent),
            *(op.FlushChain(chain.name) for chain in other),
            *(op.AddRules(chain.name, chain.rules) for chain in (*other, *absent)),
        ]

    def remove_foreign(self, skeleton: op.Skeleton) -> list[op.Operation]:
        """Remove chains and sets that are not wanted; nothing wanted may lead to them any more.

        A chain can be deleted when neither a rule nor an element of a map leads there, a set when no rule names it.
        """
        chains = sorted(skeleton.chains.keys() - {chain.name for chain in self.chains})
        sets = sorted(skeleton.sets.keys() - {wanted.name for wanted in self.sets})
        return [
            *(op.FlushChain(name) for name in chains),
            *(op.FlushSet(name) for name in sets),
            *(op.DeleteChain(name) for name in chains),
            *(op.DeleteSet(name) for name in sets),
        ]


def add(sets: Iterable[Set], chains: Sequence[Chain]) -> Iterator[op.Operation]:
    """Add sets first, then chains, then rules: a rule may refer to all of them."""
    yield from (op.AddSet(wanted) for wanted in sets)
    yield from (op.AddChain(chain) for chain in chains)
    yield from (op.AddRules(chain.name, chain.rules) for chain in chains)


def additions(elements: Iterable[Element]) -> Iterator[op.Operation]:
    """Add elements, set by set."""
    by_set: dict[str, list[Element]] = {}
    for element in elements:
        by_set.setdefault(element.set, []).append(element)
    return (op.AddElements(name, made) for name, made in by_set.items())


def deletions(places: Iterable[tuple[str, Key]]) -> Iterator[op.Operation]:
    """Delete elements by set and key, set by set."""
    by_set: dict[str, list[Key]] = {}
    for name, key in places:
        by_set.setdefault(name, []).append(key)
    return (op.DeleteElements(name, keys) for name, keys in by_set.items())


_WORDS: Final[dict[type, Callable[[Any], str]]] = {
    op.AddSet: lambda each: f"set {each.set.name}",
    op.AddChain: lambda each: f"chain {each.chain.name}",
    op.FlushChain: lambda each: f"rules of {each.name}",
    op.AddElements: lambda each: f"{several(len(each.elements), 'element')} of {each.set}",
    op.DeleteElements: lambda each: f"{several(len(each.keys), 'foreign or wrong element')} of {each.set}",
    op.AddCounter: lambda each: f"counter {each.name}",
    op.DeleteSet: lambda each: f"foreign set {each.name}",
}


def describe(operations: Sequence[op.Operation]) -> str:
    """Describe for a log what a repair changes; of a whole table only that."""
    kinds = {type(each) for each in operations}
    if op.AddTable in kinds:
        return "it had to be made anew" if op.DeleteTable in kinds else "it was gone, and is back"
    found = [_WORDS[type(each)](each) for each in operations if type(each) in _WORDS]
    return some(found, shown=_DESCRIBED)
