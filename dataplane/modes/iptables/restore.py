"""PURE. Formats chains as the text of a restore, ordered so that iptables-nft-restore is quick.

iptables-nft-restore keeps the names of chains that a restore is about, or that its rules lead to, in one sorted list,
and walks it from its head for each rule (measured: 10,000 chains and 100,000 rules take 10 s in any order, 2 s in this
one). So chains are written in descending order, each followed by its rules: every name is found at the head. They are
written in parts, in an order in which nothing leads to a chain that does not exist yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from hybrid_proxy.dataplane.modes.iptables.names import MINE
from hybrid_proxy.dataplane.table import Protocol

PART: Final = 1000  # chains that one restore is about
WHOLE: Final = 1 << 30
_LEVELS: Final = tuple(
    f"{MINE}{kind}" for kind in ("REJECT", "IN-", "MARK-", "SEP-", "SV", "EXT-", "FW-")
)  # each leads to those before it alone

_TREES: Final = tuple(f"{MINE}{kind}-" for kind in ("C", "E", *(protocol.name for protocol in Protocol)))

# Table and built-in chain -> our chain that it leads to, in the order of the rules there.
ENTRANCES: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "nat": (("PREROUTING", "-j HP-SERVICES"), ("OUTPUT", "-j HP-SERVICES"), ("POSTROUTING", "-j HP-POSTROUTING")),
    "filter": (
        ("INPUT", "-p tcp -m conntrack --ctstate NEW -j HP-HEALTH"),
        ("INPUT", "-m conntrack --ctstate NEW -j HP-SERVICES"),
        ("FORWARD", "-j HP-FORWARD"),
        ("OUTPUT", "-m conntrack --ctstate NEW -j HP-SERVICES"),
    ),
}


def jumps(table: str, there: Collection[tuple[str, str]]) -> list[str]:
    """Returns missing lines that lead from built-in chains to ours, before all other rules.

    `there` has pairs of built-in chain and rule that exist.
    """
    missing = [pair for pair in ENTRANCES[table] if pair not in there]
    return [f"-I {chain} {rule}" for chain, rule in reversed(missing)]


def parts(
    chains: Mapping[str, Collection[str]], gone: Collection[str] = (), more: Iterable[str] = (), size: int = PART
) -> Iterator[list[str]]:
    """Returns the lines of successive restores of one table that write these chains, then `more`, then remove `gone`.

    Small changes are one restore. Where there are several, a packet sees each service as it was or as it will be.
    `size` is how many chains one restore may be about; iptables-legacy, which copies the whole table each time, is
    quickest with `WHOLE`.
    """
    *levels, top = _levels(chains)
    last: list[str] = []
    for level in levels:
        for group in _groups(level, chains, size):
            lines = [line for name in group for line in _chain(name, chains[name])]
            if len(chains) > size:
                yield lines
            else:
                last += lines
    last += (f":{name} - [0:0]" for name in top)
    last += (f"-A {name} {rule}" for name in top for rule in chains[name])
    last += more
    last += (f":{name} - [0:0]" for name in gone)
    last += (f"-X {name}" for name in gone)
    if last:
        yield last


def _levels(chains: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Sorts names of chains into levels that lead only to earlier ones; the last level may lead to itself."""
    levels: list[list[str]] = [[] for _ in range(len(_LEVELS) + 2)]
    for name, rules in chains.items():
        number = next((n for n, prefix in enumerate(_LEVELS) if name.startswith(prefix)), len(_LEVELS))
        is_leaf = not any(rule.rpartition("-j ")[2].startswith(_TREES) for rule in rules)
        if number == len(_LEVELS) and not (name.startswith(_TREES) and is_leaf):
            number += 1
        levels[number].append(name)
    for level in levels:
        level.sort(reverse=True)
    return levels


def _groups(names: list[str], chains: Mapping[str, Collection[str]], size: int) -> Iterator[list[str]]:
    """Cuts names into groups so that no restore is about too many chains, written or led to."""
    group: list[str] = []
    count = 0
    for name in names:
        group.append(name)
        count += 1 + sum(" -j HP-S" in rule for rule in chains[name])
        if count >= size:
            yield group
            group, count = [], 0
    if group:
        yield group


def _chain(name: str, rules: Collection[str]) -> Iterator[str]:
    yield f":{name} - [0:0]"
    for rule in rules:
        yield f"-A {name} {rule}"
