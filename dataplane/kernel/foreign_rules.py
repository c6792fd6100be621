"""Finds the rules of other programs in the calling thread's network namespace, where netfilter calls them.

The agent asks for `passing_rules` before it takes packets past them; `doctor` reads the rules of `foreign_chains`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from hybrid_proxy.dataplane.base_chains import BaseChain, is_foreign
from hybrid_proxy.dataplane.kernel.netlink import NetlinkFailed
from hybrid_proxy.dataplane.kernel.nfnetlink import Nfnetlink, attributes
from hybrid_proxy.dataplane.kernel.xtables import legacy_tables_with_rules

# linux/netfilter/nf_tables.h
_GET_CHAIN: Final = 4
_TABLE, _NAME, _HOOK, _POLICY, _USE, _TYPE, _COUNTERS = 1, 3, 4, 5, 6, 7, 8
_NUMBER, _PACKETS = 1, 2
_DROP: Final = 0

_IP_HOOKS: Final = ("prerouting", "input", "forward", "output", "postrouting", "ingress")  # linux/netfilter.h
_FAMILIES: Final = {1: "inet", 2: "ip", 10: "ip6", 7: "bridge", 5: "netdev"}
_PASSING: Final = frozenset({"prerouting", "forward", "postrouting"})


def foreign_chains() -> list[BaseChain]:
    """Returns the base chains of foreign tables; none where the kernel has no nf_tables."""
    try:
        with Nfnetlink() as wire:
            return [
                chain
                for number, family in _FAMILIES.items()
                for chain in _chains(wire.dump(_GET_CHAIN, number), family)
                if is_foreign(chain.table.partition(" ")[2])
            ]
    except (NetlinkFailed, OSError):
        return []


def passing_rules() -> list[str]:
    """Chains that have rules, or drop by default, for packets that pass the node; then tables of iptables-legacy."""
    found = [
        str(chain)
        for chain in foreign_chains()
        if chain.hook in _PASSING
        and not chain.table.startswith(("bridge ", "netdev "))
        and (chain.rules or chain.drops)
    ]
    return found + legacy_tables_with_rules()


def _chains(bodies: list[bytes], family: str) -> Iterator[BaseChain]:
    hooks = ("ingress", "egress") if family == "netdev" else _IP_HOOKS
    for body in bodies:
        chain = attributes(body)
        if _HOOK not in chain:
            continue
        table, name, kind = (chain[each].rstrip(b"\0").decode(errors="replace") for each in (_TABLE, _NAME, _TYPE))
        counters = attributes(chain[_COUNTERS]) if _COUNTERS in chain else {}
        number = _word(attributes(chain[_HOOK])[_NUMBER])
        yield BaseChain(
            table=f"{family} {table}",
            name=name,
            type=kind,
            hook=hooks[number] if number < len(hooks) else str(number),
            rules=_word(chain.get(_USE, b"\0\0\0\0")),
            drops=_word(chain.get(_POLICY, b"\0\0\0\1")) == _DROP,
            packets=int.from_bytes(counters[_PACKETS], "big") if _PACKETS in counters else None,
        )


def _word(value: bytes) -> int:
    number: int = struct.unpack(">I", value)[0]
    return number
