"""PURE. A radix tree of chains: a packet finds its rule among 10,000 addresses after some twenty comparisons.

The keys are numbers (addresses, or ports), the edges four bits wide. A node is a chain; it holds the rules of its keys
if these are few, otherwise it leads to one chain for each part of its range. A change of one key rewrites one chain,
rarely two.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

FULL: Final = 16  # the most keys in one chain
STEP: Final = 4  # bits

Rank = tuple[int, str]  # rules of one key: lower ranks first, then by text; equal ones occur once


class Space(NamedTuple):
    """The space of keys. `name` and `match` take the first key of a range and how many leading bits its keys share."""

    width: int  # bits of a key
    name: Callable[[int, int], str]  # the chain of a range
    match: Callable[[int, int], str]  # the match that sends packets of the range there


class Changes(NamedTuple):
    """Chains to write, with their rules, and chains that nothing leads to any more."""

    written: dict[str, tuple[str, ...]]
    gone: tuple[str, ...]


class _Node(NamedTuple):
    rules: tuple[str, ...]
    below: tuple[str, ...]


class Tree:
    """Keys with their rules; `change` says which chains have to be written."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._keys: list[int] = []
        self._rules: dict[int, dict[str, tuple[Rank, ...]]] = {}  # key -> owner -> rules
        self._nodes: dict[str, _Node] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def entrance(self) -> tuple[str, str] | None:
        """The match of packets for the tree, and its topmost chain; None while it is empty."""
        if not self._keys:
            return None
        first, bits = self._common(0, len(self._keys))
        return self.space.match(first, bits), self.space.name(first, bits)

    def change(self, before: Iterable[tuple[str, int]], after: Mapping[str, Mapping[int, tuple[Rank, ...]]]) -> Changes:
        """Remove the rules of owners, and give owners rules.

        Args:
            before: owner and key, for all that is there of the owners that change.
            after: owner -> key -> rules.
        """
        dirty = set()
        for owner, key in before:
            dirty.add(key)
            held = self._rules.get(key)
            if held is not None and held.pop(owner, None) is not None and not held:
                del self._rules[key]
                del self._keys[bisect_left(self._keys, key)]
        fresh = []
        for owner, rules in after.items():
            for key, ranks in rules.items():
                dirty.add(key)
                held = self._rules.get(key)
                if held is None:
                    held = self._rules[key] = {}
                    fresh.append(key)
                held[owner] = ranks
        if len(fresh) > len(self._keys) // 8:
            self._keys = sorted((*self._keys, *fresh))
        else:
            for key in fresh:
                insort(self._keys, key)
        was, alive = self._nodes, set[str]()
        written: dict[str, tuple[str, ...]] = {}
        if self._keys:
            self._walk(0, len(self._keys), sorted(dirty), alive, written)
        gone = tuple(name for name in was if name not in alive)
        for name in gone:
            del was[name]
        return Changes(written, gone)

    def _walk(self, low: int, high: int, dirty: list[int], alive: set[str], written: dict[str, tuple[str, ...]]) -> str:
        """Rewrite the node of the keys from `low` to `high`. Returns its name."""
        first, bits = self._common(low, high)
        name = self.space.name(first, bits)
        alive.add(name)
        rules: list[str] = []
        below: list[str] = []
        for start, end in self._parts(low, high, first, bits):
            if end - start == 1 or (start, end) == (low, high):
                rules += (rule for key in self._keys[start:end] for rule in self._of(key))
                continue
            child, child_bits = self._common(start, end)
            child_name = self.space.name(child, child_bits)
            span = 1 << (self.space.width - child_bits)
            hit = bisect_left(dirty, child) < bisect_left(dirty, child + span)
            if hit or child_name not in self._nodes:
                self._walk(start, end, dirty, alive, written)
            else:
                self._keep(child_name, alive)
            below.append(child_name)
            rules.append(f"{self.space.match(child, child_bits)} -j {child_name}")
        node = _Node(tuple(rules), tuple(below))
        known = self._nodes.get(name)
        if known is None or known.rules != node.rules:
            written[name] = node.rules
        self._nodes[name] = node
        return name

    def _keep(self, name: str, alive: set[str]) -> None:
        alive.add(name)
        for child in self._nodes[name].below:
            self._keep(child, alive)

    def _common(self, low: int, high: int) -> tuple[int, int]:
        """Returns first key and leading bits (a multiple of `STEP`) of the smallest range of several keys."""
        width = self.space.width
        differs = (self._keys[low] ^ self._keys[high - 1]).bit_length()
        bits = max(0, min((width - differs) // STEP * STEP, width - STEP))
        rest = width - bits
        return self._keys[low] >> rest << rest, bits

    def _parts(self, low: int, high: int, first: int, bits: int) -> Iterable[tuple[int, int]]:
        """Cuts the keys of a range at its next four bits; returns them together if they are few."""
        if high - low <= FULL:
            yield low, high
            return
        span = 1 << (self.space.width - bits - STEP)
        start = low
        for number in range(1, (1 << STEP) + 1):
            end = bisect_left(self._keys, first + number * span, start, high)
            if end > start:
                yield start, end
            start = end

    def _of(self, key: int) -> Iterable[str]:
        ranks = sorted({rank for held in self._rules[key].values() for rank in held})
        return (rule for _, rule in ranks)
