"""The tree of chains: every key's rules are found, by few comparisons, and a change costs little."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_proxy.dataplane.modes.iptables.names import addresses, ports
from hybrid_proxy.dataplane.modes.iptables.tree import FULL, Changes, Tree
from hybrid_proxy.dataplane.table import Protocol
from tests.properties import examples


class Chains:
    """What the kernel would have, and the tree that says how to change it."""

    def __init__(self) -> None:
        self.tree = Tree(addresses(4, "C"))
        self.chains: dict[str, tuple[str, ...]] = {}
        self.keys: set[int] = set()

    def change(self, gone: set[int], come: set[int]) -> Changes:
        changes = self.tree.change(
            [(f"owner {key}", key) for key in gone], {f"owner {key}": {key: ((0, f"-d {key}"),)} for key in come}
        )
        self.keys = self.keys - gone | come
        self.chains |= changes.written
        for name in changes.gone:
            del self.chains[name]
        return changes

    def leaves(self, name: str) -> list[str]:
        found = []
        for rule in self.chains[name]:
            target = rule.partition(" -j ")[2]
            found += self.leaves(target) if target else [rule]
        return found

    def check(self) -> None:
        entrance = self.tree.entrance
        reached = self.leaves(entrance[1]) if entrance else []
        assert sorted(reached) == sorted(f"-d {key}" for key in self.keys)
        assert len(self.tree) == len(self.keys)


KEYS = st.sets(st.integers(0x0A600000, 0x0A600200) | st.integers(0, 2**32 - 1), max_size=60)


@given(st.lists(st.tuples(KEYS, KEYS), max_size=6))
@settings(max_examples=examples(150), deadline=None)
def test_each_key_is_reached_once_after_any_changes(steps: list[tuple[set[int], set[int]]]) -> None:
    chains, fresh = Chains(), Chains()
    for gone, come in steps:
        chains.change(gone & chains.keys, come)
        chains.check()
    fresh.change(set(), chains.keys)
    assert fresh.chains == chains.chains, "the tree depends on the way that led to it"


def test_ten_thousand_addresses_are_matched_by_few_rules() -> None:
    chains = Chains()
    chains.change(set(), {0x0A600000 + number for number in range(10_000)})
    assert max(len(rules) for rules in chains.chains.values()) <= FULL
    entrance = chains.tree.entrance
    assert entrance is not None
    depth = 0
    names = [entrance[1]]
    while names:
        depth += 1
        names = [target for name in names for rule in chains.chains[name] if (target := rule.partition(" -j ")[2])]
    assert depth <= 4


def test_a_new_key_among_thousands_writes_one_chain_and_rarely_splits_one() -> None:
    chains = Chains()
    chooser = random.Random(1)
    chains.change(set(), {chooser.randrange(0x0A600000, 0x0A700000) for _ in range(5000)})
    written = []
    for _ in range(200):
        key = chooser.randrange(0x0A600000, 0x0A700000)
        changes = chains.change(set(), {key})
        written.append(len(changes.written) + len(changes.gone))
        chains.change({key}, set())
    chains.check()
    assert max(written) <= 2 + FULL
    assert sum(written) / len(written) < 2


def test_ports_are_ranges_of_their_protocol() -> None:
    tree = Tree(ports(Protocol.UDP))
    tree.change([], {str(port): {port: ((0, f"rule {port}"),)} for port in range(30000, 30064)})
    assert tree.entrance == ("-p udp -m udp --dport 29952:30207", "HP-UDP-29952:30207")


def test_rules_of_one_key_stand_in_the_order_of_their_ranks() -> None:
    tree = Tree(addresses(6, "C"))
    changes = tree.change([], {"a": {1: ((1, "late"), (0, "early"))}, "b": {1: ((1, "late"), (0, "earliest"))}})
    assert list(changes.written.values()) == [("earliest", "early", "late")]
    assert all(len(name) <= 28 for name in changes.written)
