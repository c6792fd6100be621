"""Reads the rules of other programs that drop packets, with the tools that know how to print them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hybrid_proxy.controller.commands.doctor.facts import Rule
from hybrid_proxy.controller.commands.doctor.rules import Base, of_iptables, of_nft
from hybrid_proxy.controller.commands.tools import run_tool
from hybrid_proxy.dataplane.kernel.base_chains import base_chains

MOST_TABLES: Final = 32
TABLES: Final = frozenset({"raw", "mangle", "filter", "security"})  # iptables' own, without nat
TOOL_SECONDS: Final = 3.0


def read_rules() -> tuple[tuple[Rule, ...], str]:
    """Rules of other programs that drop, and why some could not be read (empty: all were)."""
    rules: list[Rule] = []
    unknown = []
    filters = [chain for chain in base_chains() if chain.type == "filter" and not chain.is_of("hybrid-proxy")]
    bases = {(chain.table, chain.name): Base(chain.hook, chain.drops, chain.packets) for chain in filters}
    for table in list(dict.fromkeys(chain.table for chain in filters))[:MOST_TABLES]:
        try:  # one call for several tables fails where iptables-nft has made one of them (nft 1.0.6)
            rules += of_nft(_run("nft", "-t", "list", "table", *table.split(" ", 1)), bases)
        except OSError as error:
            unknown.append(f"table {table} cannot be read: {error}")
    for family, names, tool in (
        ("ip", "ip_tables_names", "iptables-legacy-save"),
        ("ip6", "ip6_tables_names", "ip6tables-legacy-save"),
    ):
        try:
            tables_of_legacy = Path(f"/proc/thread-self/net/{names}").read_text().split()
        except OSError:
            continue
        for table in sorted(TABLES & set(tables_of_legacy)):
            try:
                rules += of_iptables(_run(tool, "-c", "-t", table), family)
            except OSError as error:
                unknown.append(f"legacy rules cannot be read: {error}")
    return tuple(rules), "; ".join(unknown)


def _run(*argv: str) -> str:
    """What a tool prints.

    Raises:
        OSError: it is not installed, failed, or took too long.
    """
    done = run_tool(argv, TOOL_SECONDS)
    if done.returncode:
        raise OSError(f"{argv[0]}: {done.stderr.strip().partition(chr(10))[0]}")
    return done.stdout
