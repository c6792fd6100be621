"""PURE. Chains to the text of a restore, arranged so that iptables-nft-restore is quick.

iptables-nft-restore keeps the names of chains that a restore is about in one sorted list, and walks it from its
head for each rule (measured: 10,000 chains and 100,000 rules take 10 s in any order, 2 s as here). So chains are
written in descending order, each with its rules right behind it: every name is found at the head. And they are
written in parts, in an order in which nothing leads to a chain that is not there yet.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from dataplane.modes.iptables.names import MINE

__all__ = ["ENTRANCES", "PART", "jumps", "leads_to_us", "parts", "table_text"]

PART: Final = 2000  # chains in one restore
_LEVELS: Final = tuple(
    f"{MINE}{kind}" for kind in ("MARK-", "SEP-", "SV", "EXT-", "FW-")
)  # each leads to those before it alone

_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_LEADS: Final = re.compile(rf"(?:^|\s)-[jg] {MINE}")

# Table and built-in chain -> our chain that it leads to, in the order of the rules there.
ENTRANCES: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "nat": (
        ("PREROUTING", "-j HP-SERVICES"),
        ("OUTPUT", "-j HP-SERVICES"),
        ("POSTROUTING", "-j HP-POSTROUTING"),
    ),
    "filter": (
        ("INPUT", "-m conntrack --ctstate NEW -j HP-SERVICES"),
        ("FORWARD", "-j HP-FORWARD"),
        ("OUTPUT", "-m conntrack --ctstate NEW -j HP-SERVICES"),
    ),
}


def jumps(table: str, there: Collection[tuple[str, str]]) -> list[str]:
    """Lines that lead from built-in chains to ours, in front of everything else, where that is not so yet.

    Args:
        table: nat or filter.
        there: pairs of built-in chain and rule that exist.
    """
    missing = [pair for pair in ENTRANCES[table] if pair not in there]
    return [f"-I {chain} {rule}" for chain, rule in reversed(missing)]


def leads_to_us(rule: str) -> bool:
    """Whether a rule, as save prints it, leads to a chain of ours; what a comment says does not count."""
    return _LEADS.search(_QUOTED.sub("", rule)) is not None


def table_text(table: str, lines: Iterable[str]) -> str:
    """One table of a restore."""
    return "\n".join((f"*{table}", *lines, "COMMIT", ""))


def parts(
    chains: Mapping[str, Collection[str]], gone: Collection[str] = (), more: Iterable[str] = ()
) -> Iterator[list[str]]:
    """The lines of successive restores of one table that write these chains, then `more`, then remove `gone`.

    Small changes are one restore. Where there are several, a packet sees each service as it was or as it will be.
    """
    levels: list[list[str]] = [[] for _ in range(len(_LEVELS) + 1)]
    for name in chains:
        levels[next((n for n, prefix in enumerate(_LEVELS) if name.startswith(prefix)), len(_LEVELS))].append(name)
    top = sorted(levels.pop(), reverse=True)
    last: list[str] = []
    for level in levels:
        level.sort(reverse=True)
        whole = len(level) // PART * PART if len(chains) > PART else 0
        for start in range(0, whole, PART):
            yield [line for name in level[start : start + PART] for line in _chain(name, chains[name])]
        if len(chains) > PART and level[whole:]:
            yield [line for name in level[whole:] for line in _chain(name, chains[name])]
        else:
            last += (line for name in level[whole:] for line in _chain(name, chains[name]))
    last += (f":{name} - [0:0]" for name in top)
    last += (f"-A {name} {rule}" for name in top for rule in chains[name])
    last += more
    last += (f":{name} - [0:0]" for name in gone)
    last += (f"-X {name}" for name in gone)
    if last:
        yield last


def _chain(name: str, rules: Collection[str]) -> Iterator[str]:
    yield f":{name} - [0:0]"
    for rule in rules:
        yield f"-A {name} {rule}"
