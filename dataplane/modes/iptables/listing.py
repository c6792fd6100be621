"""Lists what is programmed, read from the text of `iptables-save`: names come from the comments of rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.kernel.conntrack import Key, flows
from hybrid_proxy.dataplane.mode import View, belongs
from hybrid_proxy.dataplane.modes.iptables import affinity
from hybrid_proxy.dataplane.modes.iptables.names import MINE
from hybrid_proxy.dataplane.reports import BackendRow, FlowRow, ServiceRow
from hybrid_proxy.dataplane.saved_rules import Saved, parse
from hybrid_proxy.dataplane.table import Protocol, Remembered, ServiceTable, frontend_text

_FRONTEND: Final = re.compile(
    r"^(?:-d (?P<address>[^/ ]+)(?:/\d+)? )?-p (?P<protocol>\w+) .*--dport (?P<port>\d+) "
    r'.*--comment "?(?P<name>[^" ]+) (?P<kind>[^"]+)"? -j (?P<target>\S+)'
)
_TARGET: Final = re.compile(r" (?:-j|-g) (\S+)")
_GOAL: Final = re.compile(r"--to-destination (\S+)")
_PROTOCOLS: Final = {text: each for each in Protocol for text in (each.name.lower(), str(int(each)))}


class _Found(NamedTuple):
    family: int
    name: str
    kind: str
    address: str | None
    port: int
    protocol: Protocol
    target: str


def datagram_frontends(chains: Saved) -> Iterator[Key]:
    for name, rules in chains.items():
        for rule in rules:
            if "-p udp " in rule and name.startswith(MINE) and (found := _frontend(0, rule)):
                yield found.address, found.port, int(found.protocol)


class Programmed(View):
    """A `dataplane.mode.View` of table nat.

    Args:
        variant: where it was read, `nft` or `legacy`.
        texts: family -> what iptables-save printed.
    """

    def __init__(self, variant: str, texts: Mapping[int, str]) -> None:
        self.place = f"chains {MINE}* of iptables-{variant}"
        self._chains = {family: parse(text) for family, text in texts.items()}

    def _frontends(self) -> Iterator[_Found]:
        for family, chains in self._chains.items():
            for name, rules in chains.items():
                if name.startswith(MINE):
                    yield from (found for rule in rules if (found := _frontend(family, rule)))

    def services(self) -> list[ServiceRow]:
        rows: dict[tuple[str, Protocol, int], ServiceRow] = {}
        for found in self._frontends():
            chains = self._chains[found.family]
            row = rows.setdefault(
                (found.name, found.protocol, found.family),
                ServiceRow(name=found.name, frontends=[], protocol=found.protocol.name, backends=0),
            )
            row.frontends.append(frontend_text(found.address, found.port))
            for chain in _set_chains(chains, found.target):
                if chain.startswith(f"{MINE}SVL-"):
                    row.local_backends = len(_goals(chains, chain))
                else:
                    row.backends = len(_goals(chains, chain))
                row.affinity = row.affinity or any("-m recent " in rule for rule in chains[chain])
        for row in rows.values():
            row.frontends.sort()
        return [rows[key] for key in sorted(rows, key=lambda key: (key[0], rows[key].protocol, rows[key].frontends))]

    def backends(self, of: str | None = None) -> list[BackendRow]:
        found: set[tuple[str, str, str]] = set()
        for frontend in filter(lambda each: belongs(each.name, of), self._frontends()):
            chains = self._chains[frontend.family]
            for chain in _set_chains(chains, frontend.target):
                found |= {(frontend.name, goal, frontend.protocol.name) for goal in _goals(chains, chain)}
        return [
            BackendRow(service=name, address=address, protocol=protocol, used=True)
            for name, address, protocol in sorted(found)
        ]

    def flows(self, limit: int) -> tuple[list[FlowRow], int]:
        known = {(found.address, found.port, int(found.protocol)): found.name for found in self._frontends()}
        return flows(known, limit)

    def remembered(self, table: ServiceTable) -> list[Remembered]:
        return affinity.remembered(table)


def _frontend(family: int, rule: str) -> _Found | None:
    match = _FRONTEND.match(rule)
    protocol = _PROTOCOLS.get(match["protocol"]) if match else None
    if match is None or protocol is None:
        return None
    return _Found(family, match["name"], match["kind"], match["address"], int(match["port"]), protocol, match["target"])


def _set_chains(chains: Saved, target: str) -> set[str]:
    """Returns the chains of backend sets that a target leads to, directly or through others."""
    if target.startswith(f"{MINE}SV"):
        return {target} & chains.keys()
    found: set[str] = set()
    if target.startswith((f"{MINE}EXT-", f"{MINE}FW-")):
        for rule in chains.get(target, ()):
            for further in _TARGET.findall(f" {rule}"):
                found |= _set_chains(chains, further)
    return found


def _goals(chains: Saved, chain: str) -> set[str]:
    goals: set[str] = set()
    for rule in chains.get(chain, ()):
        goals.update(_GOAL.findall(rule))
        for endpoint in _TARGET.findall(f" {rule}"):
            if endpoint.startswith(f"{MINE}SEP-"):
                goals.update(goal for inner in chains.get(endpoint, ()) for goal in _GOAL.findall(inner))
    return goals
