"""iptables in memory: tables, chains and rules of both families, with the checks that the real one makes.

Stands in for `dataplane.kernel.xtables.Xtables`. It knows the form of a restore, not what matches mean.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from hybrid_proxy.dataplane.kernel.xtables import XtablesError

__all__ = ["FakeXtables"]

BUILTIN = {
    "raw": ("PREROUTING", "OUTPUT"),
    "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
}
TARGETS = frozenset(
    ("ACCEPT", "DROP", "RETURN", "DNAT", "SNAT", "MASQUERADE", "MARK", "REJECT", "REDIRECT", "CONNMARK", "SET", "LOG")
)
ONLY_IN = {"REJECT": ("filter",), "DNAT": ("nat",), "SNAT": ("nat",), "MASQUERADE": ("nat",), "REDIRECT": ("nat",)}
LONGEST_NAME = 28  # XT_EXTENSION_MAXNAMELEN without its end


@dataclass
class FakeTable:
    """One table: its chains in the order they were made, each with its rules as written."""

    name: str
    policies: dict[str, str] = field(default_factory=dict)
    chains: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for chain in BUILTIN[self.name]:
            self.policies.setdefault(chain, "ACCEPT")
            self.chains.setdefault(chain, [])

    def references(self, chain: str) -> list[str]:
        """Rules that lead to a chain."""
        return [rule for rules in self.chains.values() for rule in rules if target(rule) == chain]


def target(rule: str) -> str | None:
    """Where a rule leads: what follows -j or -g."""
    words = shlex.split(rule)
    for option in ("-j", "-g", "--jump", "--goto"):
        if option in words:
            return words[words.index(option) + 1]
    return None


class FakeXtables:
    """As `dataplane.kernel.xtables.Xtables`; `texts` are all restores so far, `fail_next` makes one fail."""

    def __init__(self, variant: str = "nft", families: tuple[int, ...] = (4, 6), refuses: tuple[str, ...] = ()) -> None:
        self.variant = variant
        self.families = families
        self.missing = {family: "not in this fake" for family in (4, 6) if family not in families}
        self.chosen = "as configured"
        self.refuses = refuses  # words in a rule that this kernel does not know
        self.tables: dict[tuple[int, str], FakeTable] = {}
        self.texts: list[tuple[int, str]] = []
        self.transactions = 0
        self.fail_next = ""

    def restore(self, family: int, text: str) -> None:
        """Apply a restore without flush, table by table, each completely or not at all."""
        if family not in self.families:
            raise XtablesError(f"family {family} is missing")
        if self.fail_next:
            said, self.fail_next = self.fail_next, ""
            raise XtablesError(said)
        self.texts.append((family, text))
        table: FakeTable | None = None
        for number, line in enumerate(text.splitlines(), 1):
            try:
                table = self._line(family, table, line.strip())
            except (ValueError, KeyError, IndexError) as error:
                raise XtablesError(f"line {number} failed: {error!r}; line {number} is: {line}") from error
        if table is not None:
            raise XtablesError("COMMIT expected at the end")

    def _line(self, family: int, table: FakeTable | None, line: str) -> FakeTable | None:
        if not line or line.startswith("#"):
            return table
        if line.startswith("*"):
            if table is not None:
                raise ValueError("the table before is not committed")
            known = self.tables.get((family, line[1:]))
            return copy.deepcopy(known) if known else FakeTable(line[1:])
        if table is None:
            raise ValueError("no table")
        if line == "COMMIT":
            self.tables[family, table.name] = table
            self.transactions += 1
            return None
        self._change(table, line)
        return table

    def _change(self, table: FakeTable, line: str) -> None:
        command, _, rest = line.partition(" ")
        name, _, rule = rest.partition(" ")
        if command.startswith(":"):
            self._declare(table, command[1:], rest.split()[0])
        elif command == "-N":
            if name in table.chains:
                raise ValueError(f"chain {name} exists")
            self._declare(table, name, "-")
        elif command == "-A":
            self._check(table, name, rule)
            table.chains[name].append(rule)
        elif command == "-I":
            first, _, after = rule.partition(" ")
            position, rule = (int(first) - 1, after) if first.isdigit() else (0, rule)
            self._check(table, name, rule)
            table.chains[name].insert(position, rule)
        elif command == "-D":
            table.chains[name].remove(rule)
        elif command == "-F":
            table.chains[name].clear()
        elif command == "-X":
            if table.chains[name]:
                raise ValueError(f"chain {name} is not empty")
            if found := table.references(name):
                raise ValueError(f"chain {name} is used by {found[0]!r}")
            if name in table.policies:
                raise ValueError(f"chain {name} is built in")
            del table.chains[name]
        else:
            raise ValueError(f"unknown command {command}")

    def _declare(self, table: FakeTable, name: str, policy: str) -> None:
        if len(name) > LONGEST_NAME:
            raise ValueError(f"chain name {name} is too long")
        if name in table.policies:
            table.policies[name] = policy
            return
        if policy != "-":
            raise ValueError(f"chain {name} is not built in and cannot have a policy")
        table.chains[name] = []

    def _check(self, table: FakeTable, chain: str, rule: str) -> None:
        """Where a rule leads must be there when the rule comes: both variants refuse it otherwise."""
        if any(word in rule for word in self.refuses):
            raise ValueError(f"the kernel refused {rule!r} in {chain}")
        where = target(rule)
        if where is None:
            return
        if where not in table.chains and where not in TARGETS:
            raise ValueError(f"{chain} leads to {where}, which does not exist")
        if where in table.policies:
            raise ValueError(f"{chain} leads to the built-in chain {where}")
        if table.name not in ONLY_IN.get(where, (table.name,)):
            raise ValueError(f"{where} does not work in table {table.name}")

    def save(self, family: int, table: str) -> str:
        """As iptables-save prints it."""
        known = self.tables.get((family, table))
        if known is None:
            return ""
        lines = ["# Generated by fake-save", f"*{table}"]
        lines += [f":{chain} {known.policies.get(chain, '-')} [0:0]" for chain in known.chains]
        lines += [f"-A {chain} {rule}" for chain, rules in known.chains.items() for rule in rules]
        return "\n".join([*lines, "COMMIT", "# Completed", ""])

    def generation(self) -> int | None:
        """How many transactions there were; None for legacy."""
        return self.transactions if self.variant == "nft" else None

    def revision(self, tables: Iterable[str]) -> object:
        """The same; what legacy has in place of it is not modelled."""
        del tables
        return self.generation()

    def accepts(self, family: int, table: str, rules: Iterable[str]) -> str | None:
        """None, or which rule has a word that this kernel does not know."""
        del family, table
        refused = [rule for rule in rules if any(word in rule for word in self.refuses)]
        return f"refused: {refused[0]}" if refused else None

    # For tests

    def chain(self, family: int, table: str, name: str) -> list[str]:
        """The rules of a chain."""
        return self.tables[family, table].chains[name]

    def chains(self, family: int, table: str, prefix: str = "") -> list[str]:
        """Names of chains."""
        known = self.tables.get((family, table))
        return [chain for chain in known.chains if chain.startswith(prefix)] if known else []
