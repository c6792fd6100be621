"""PURE. Base chains of nf_tables, and which names of tables and chains belong to other programs."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_KNOWN: Final = re.compile(r"hybrid-proxy|HPV?-|kube-proxy$")


class BaseChain(NamedTuple):
    """A base chain.

    Attributes:
        table: Its family and its table, as nft writes them: `inet firewall`.
        name: Its own.
        type: `filter`, `nat` or `route`.
        hook: Where netfilter calls it.
        rules: How many it has.
        drops: Whether its policy drops.
        packets: How many the policy decided about, where that is counted.
        priority: Where among the chains of its hook.
    """

    table: str
    name: str
    type: str
    hook: str
    rules: int
    drops: bool
    packets: int | None
    priority: int = 0

    def __str__(self) -> str:
        return f"{self.table} {self.name}"


def is_foreign(name: str) -> bool:
    """True if a table or chain of that name is neither ours nor kube-proxy's, which is another finding."""
    return not _KNOWN.match(name)
