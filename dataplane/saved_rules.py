"""PURE. Parses what `iptables-save` prints, and writes the restores that remove chains from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

Saved = dict[str, list[str]]  # chain -> its rules, without `-A NAME`

BUILT_IN: Final = frozenset({"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"})  # iptables' own chains
QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_TARGET: Final = re.compile(r"(?:^|\s)-[jg] (\S+)")


def parse(text: str) -> Saved:
    """Returns the chains of one table, built-in ones included."""
    chains: Saved = {}
    for line in text.splitlines():
        if line.startswith("-A "):
            name, _, rule = line[3:].partition(" ")  # a rule that only counts has nothing behind the name
            chains[name].append(rule)
        elif line.startswith(":"):
            chains[line[1:].partition(" ")[0]] = []
    return chains


def target(rule: str) -> str:
    """Returns the chain or target that a rule leads to; empty: none. Comments are ignored."""
    found = _TARGET.search(QUOTED.sub("", rule))
    return found[1] if found else ""


def jumps(saved: Saved, prefix: str) -> list[tuple[str, str]]:
    """Returns chain and rule of each jump from a chain without this prefix to a chain with it."""
    return [
        (name, rule)
        for name, rules in saved.items()
        if not name.startswith(prefix)
        for rule in rules
        if target(rule).startswith(prefix)
    ]


def table_text(table: str, lines: Iterable[str]) -> str:
    """Formats one table of a restore."""
    return "\n".join((f"*{table}", *lines, "COMMIT", ""))


class Removal(NamedTuple):
    """The text of a restore that removes chains and the rules that lead to them, and what it names."""

    text: str
    chains: tuple[str, ...]
    jumps: tuple[tuple[str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.chains or self.jumps)


def removal(table: str, chains: Collection[str], jumps: Iterable[tuple[str, str]]) -> Removal:
    """Removes chains, which only each other and these jumps lead to, in one transaction."""
    gone, lead = tuple(sorted(chains, reverse=True)), tuple(jumps)  # descending: see modes.iptables.restore
    lines = [f"-D {name} {rule}" for name, rule in lead]
    lines += [f":{name} - [0:0]" for name in gone]
    lines += [f"-X {name}" for name in gone]
    return Removal(table_text(table, lines), gone, lead)


def removal_of(prefix: str, table: str, text: str) -> Removal:
    """Removes the chains with this prefix from a saved table."""
    saved = parse(text)
    return removal(table, [name for name in saved if name.startswith(prefix)], jumps(saved, prefix))
