"""Our chains of one family in the kernel: writes them, keeps what should be there, and finds foreign changes.

A table that cannot be read or written is an `XtablesError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hybrid_proxy.dataplane import saved_rules
from hybrid_proxy.dataplane.kernel.xtables import PROBE_CHAIN
from hybrid_proxy.dataplane.modes.iptables.names import MINE
from hybrid_proxy.dataplane.modes.iptables.plan import Delta
from hybrid_proxy.dataplane.modes.iptables.restore import ENTRANCES, PART, WHOLE, jumps, parts
from hybrid_proxy.dataplane.saved_rules import Saved, parse, removal_of, table_text

if TYPE_CHECKING:
    from hybrid_proxy.dataplane.kernel.xtables import Xtables

TABLES: Final = ("filter", "nat")  # the order of changes: reject first, then stop translating


class Ruleset:
    """Detects whether another process changed a rule of this namespace, by the ruleset's generation (nf_tables)."""

    def __init__(self, xtables: Xtables) -> None:
        self.xtables = xtables
        self._known: int | None = None  # None: another program may have changed something

    def restore(self, family: int, text: str) -> None:
        """Run one of our restores. A table of the text in which nothing differs makes no transaction."""
        before, known = self.xtables.generation(), self._known
        self._known = None
        self.xtables.restore(family, text)
        after = self.xtables.generation()
        if before is not None and after is not None and known == before and after - before <= text.count("\nCOMMIT\n"):
            self._known = after

    def seen(self, generation: int | None) -> None:
        """Note that at this generation everything was as wanted."""
        self._known = generation

    def untouched(self) -> bool:
        """True if the kernel reports that no other process changed a rule since `seen`."""
        return self._known is not None and self.xtables.generation() == self._known


@dataclass(slots=True)
class _Chain:
    """A chain as we wrote it: its effect, how many rules it has, and the hash of what save prints, once it is known."""

    shape: int
    rules: int
    printed: int | None = None


class Installed:
    """The chains that we wrote into the tables of one family."""

    def __init__(self, ruleset: Ruleset, family: int) -> None:
        self.ruleset, self.xtables, self.family = ruleset, ruleset.xtables, family
        self.restores = 0
        self.last_rules = dict.fromkeys(TABLES, 0)  # table -> rules of the last change
        self._size = WHOLE if self.xtables.variant == "legacy" else PART  # chains in one restore
        self._chains: dict[str, dict[str, _Chain]] = {table: {} for table in TABLES}

    def read(self, table: str) -> Saved:
        """Read a table, foreign chains included."""
        return parse(self.xtables.save(self.family, table))

    def replace(self, deltas: Mapping[str, Delta], there: Mapping[str, Saved]) -> None:
        """Write these chains and remove our other ones; what was there serves until it is replaced.

        A chain whose rules are there as they would be written stays: writing takes four times as long as reading.
        """
        for table in reversed(TABLES):  # at a start nothing is refused before it could be translated
            saved = there[table]
            wanted = deltas[table].written
            written = {name: rules for name, rules in wanted.items() if saved.get(name) != [*rules]}
            stale = [name for name in saved if name.startswith(MINE) and name not in wanted]
            entrances = [*_odd_entrances(table, saved), *jumps(table, _entrances(saved))]
            self._chains[table] = {}
            for lines in parts(written, stale, entrances, self._size):
                self._restore([(table, lines)])
            self._note(table, Delta(wanted, ()))
            self.last_rules[table] = sum(map(len, written.values()))

    def change(self, deltas: Mapping[str, Delta]) -> None:
        """Write what differs."""
        pieces = [
            (table, lines)
            for table in TABLES
            for lines in parts(deltas[table].written, deltas[table].gone, size=self._size)
        ]
        if not pieces:
            return
        if sum(len(deltas[table].written) for table in TABLES) > self._size:
            for piece in pieces:
                self._restore([piece])
        else:
            self._restore(pieces)
        for table in TABLES:
            self._note(table, deltas[table])

    def _restore(self, pieces: list[tuple[str, list[str]]]) -> None:
        self.ruleset.restore(self.family, "".join(table_text(table, lines) for table, lines in pieces))
        self.restores += 1

    def _note(self, table: str, delta: Delta) -> None:
        for name in delta.gone:
            self._chains[table].pop(name, None)
        self._chains[table] |= {name: _Chain(shape(rules), len(rules)) for name, rules in delta.written.items()}
        self.last_rules[table] = sum(map(len, delta.written.values()))

    # Drift

    def damage(self) -> list[str]:
        """Describe each thing that is not as we wrote it."""
        found = []
        for table in TABLES:
            found += [f"{table}: {what}" for what in self._damage_of(table, self.read(table))]
        return found

    def _damage_of(self, table: str, saved: Saved) -> list[str]:
        found, chains = [], self._chains[table]
        for name, known in chains.items():
            rules = saved.get(name)
            if rules is None:
                found.append(f"chain {name} is gone")
                continue
            digest = hash(tuple(rules))
            if known.printed is None and shape(rules) == known.shape:
                known.printed = digest
            elif known.printed != digest:
                found.append(f"chain {name} was changed" if rules or not known.shape else f"chain {name} was emptied")
        found += [f"{chain} does not lead to us any more" for chain, _ in set(ENTRANCES[table]) - _entrances(saved)]
        strange = [name for name in saved if name.startswith(MINE) and name not in chains]
        return found + [f"{name} is there again" for name in strange if name != PROBE_CHAIN]

    def chains(self) -> int:
        return sum(map(len, self._chains.values()))

    def rules(self) -> dict[str, int]:
        """Count our rules: table -> number."""
        return {table: sum(chain.rules for chain in chains.values()) for table, chains in self._chains.items()}


def _entrances(saved: Saved) -> set[tuple[str, str]]:
    return {(name, rule) for name, rules in saved.items() if not name.startswith(MINE) for rule in rules}


def _odd_entrances(table: str, saved: Saved) -> list[str]:
    """Returns lines that delete wrong or repeated rules that lead from built-in and foreign chains to ours."""
    lines, kept = [], set()
    for jump in saved_rules.jumps(saved, MINE):
        if jump in ENTRANCES[table] and jump not in kept:
            kept.add(jump)
        else:
            lines.append("-D {} {}".format(*jump))
    return lines


def shape(rules: Iterable[str]) -> int:
    """Summarizes the effect of rules as a number: how many they are, where they lead, what they translate to.

    Versions of iptables print matches differently from how they were written, so that texts cannot be compared; these
    parts they all print alike.
    """
    return hash(tuple(_end(rule) for rule in rules))


def _end(rule: str) -> str:
    place = rule.rfind("-j ")
    if place < 0:
        place = rule.rfind("-g ")
    target = rule[place:].split(" ", 3)
    if target[1] == "DNAT":
        return " ".join(target[:4]).partition(" --random")[0]
    return " ".join(target[:2])


def remove(xtables: Xtables, family: int) -> int:
    """Remove our chains and the rules that lead to them, in one transaction for each table. Returns how many."""
    removed = 0
    for table in TABLES:
        if found := removal_of(MINE, table, xtables.save(family, table)):
            xtables.restore(family, found.text)
            removed += len(found.chains)
    return removed
