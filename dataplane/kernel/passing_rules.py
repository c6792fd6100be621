"""Which netfilter chains of the calling thread's network namespace look at packets that only pass the node."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from hybrid_proxy.dataplane.kernel.netlink import NetlinkFailed
from hybrid_proxy.dataplane.kernel.nfnetlink import Nfnetlink, attributes
from hybrid_proxy.dataplane.kernel.xtables import legacy_tables_with_rules

# linux/netfilter/nf_tables.h
_GET_CHAIN: Final = 4
_TABLE, _NAME, _HOOK, _POLICY, _USE = 1, 3, 4, 5, 6
_NUMBER: Final = 1
_FAMILIES: Final = {1: "inet", 2: "ip", 10: "ip6"}
_PASSING: Final = {0: "prerouting", 2: "forward", 4: "postrouting"}  # linux/netfilter.h
_DROP: Final = 0


def passing_rules(ours: str) -> list[str]:
    """Base chains that have rules, or drop by default, as `inet firewall forward`; then tables of iptables-legacy.

    Args:
        ours: how the names of tables begin that are left out.
    """
    found = []
    try:
        with Nfnetlink() as wire:
            for number, family in _FAMILIES.items():
                found += [f"{family} {name}" for name in _chains(wire.dump(_GET_CHAIN, number), ours)]
    except (NetlinkFailed, OSError):  # a kernel without nf_tables
        pass
    return found + legacy_tables_with_rules()


def _chains(bodies: list[bytes], ours: str) -> Iterator[str]:
    for body in bodies:
        chain = attributes(body)
        table, name = (chain[kind].rstrip(b"\0").decode(errors="replace") for kind in (_TABLE, _NAME))
        if _HOOK not in chain or table.startswith(ours):
            continue
        if _word(attributes(chain[_HOOK])[_NUMBER]) not in _PASSING:
            continue
        if _word(chain.get(_USE, b"\0\0\0\0")) or _word(chain.get(_POLICY, b"\0\0\0\1")) == _DROP:
            yield f"{table} {name}"


def _word(value: bytes) -> int:
    number: int = struct.unpack(">I", value)[0]
    return number
