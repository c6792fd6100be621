"""PURE. Parses the output of `iptables-save` as chains, and compares them with what was written."""

from __future__ import annotations

from collections.abc import Iterable

Saved = dict[str, list[str]]  # chain -> its rules, without `-A NAME`


def parse(text: str) -> Saved:
    """Returns the chains of one table, built-in ones included."""
    chains: Saved = {}
    for line in text.splitlines():
        if line.startswith("-A "):
            _, name, rule = line.split(" ", 2)
            chains[name].append(rule)
        elif line.startswith(":"):
            chains[line[1:].partition(" ")[0]] = []
    return chains


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
