"""Reads the rules of other programs that drop or redirect packets, with the tools that know how to print them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Final

import msgspec

from hybrid_proxy.controller.commands.doctor.facts import Rule
from hybrid_proxy.controller.commands.doctor.rules import of_iptables, of_nft
from hybrid_proxy.dataplane.kernel.foreign_rules import foreign_chains
from hybrid_proxy.dataplane.kernel.namespaces import Pod, inside
from hybrid_proxy.dataplane.kernel.tools import output
from hybrid_proxy.dataplane.kernel.xtables import Xtables, XtablesError

MOST_TABLES: Final = 32
TABLES: Final = ("filter", "mangle", "raw", "security", "nat")  # iptables' own
FAMILIES: Final = {"ip": 4, "ip6": 6}
TOOL_SECONDS: Final = 3.0


def read_rules(pods: Iterable[Pod] = ()) -> tuple[tuple[Rule, ...], str]:
    """Rules of other programs that drop or redirect, here and in these pods, and why some of here could not be read."""
    rules: list[Rule] = []
    unknown = []
    filters = [chain for chain in foreign_chains() if chain.type != "route"]
    for table in list(dict.fromkeys(chain.table for chain in filters))[:MOST_TABLES]:
        try:  # one call for several tables fails where iptables-nft has made one of them (nft 1.0.6)
            rules += of_nft(output("nft", "-t", "list", "table", *table.split(" ", 1), seconds=TOOL_SECONDS), filters)
        except OSError as error:
            unknown.append(f"table {table} cannot be read: {error}")
    legacy = Xtables("legacy")
    for family, number in FAMILIES.items():
        for table in TABLES:
            try:
                rules += of_iptables(legacy.save(number, table, counters=True), family)
            except XtablesError as error:
                unknown.append(f"legacy rules cannot be read: {error}")
    for pod in pods:
        with contextlib.suppress(OSError), inside(pod.path):
            rules += (msgspec.structs.replace(rule, pod=pod.addresses) for rule in read_rules()[0])
    return tuple(rules), "; ".join(unknown)
