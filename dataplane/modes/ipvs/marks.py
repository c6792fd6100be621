"""PURE. Assigns firewall marks: one for each virtual server that external clients get instead of another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from hybrid_proxy.dataplane.modes.ipvs.lower import Member
from hybrid_proxy.dataplane.table import family_of
from hybrid_proxy.dataplane.virtual_servers import Server, Value

BASE: Final = 0x4850_0000  # "HP"
NUMBERS: Final = 1 << 16  # in the lower half


def is_ours_by_mark(mark: int, masquerade: int) -> bool:
    """True if a virtual server of that firewall mark is ours; the masquerade bit may be anywhere in it."""
    return bool(mark) and mark & ~0xFFFF & ~masquerade == BASE & ~masquerade


def is_nearly_ours(mark: int) -> bool:
    """Decides as `is_ours_by_mark` when the masquerade bit is not known."""
    return ((mark ^ BASE) & ~0xFFFF).bit_count() <= 1


class Marks:
    """Assigns marks to servers, without the masquerade bit, which is set separately.

    Args:
        masquerade: that bit.
        members: the content of a former agent's set of marks: the same servers keep them.
    """

    def __init__(self, masquerade: int, members: Mapping[Member, Value] | None = None) -> None:
        self._masquerade = masquerade
        self._of: dict[Server, int] = {}
        self._owner: dict[int, Server] = {}
        self._next = 1
        self.refused = 0
        for (name, element), value in (members or {}).items():
            if name.endswith("-MARKS") and isinstance(value, int):
                family = family_of(element.address)
                mark = value & ~masquerade
                if mark & ~0xFFFF == BASE & ~masquerade and mark not in self._owner:
                    self._keep(Server(family, element.protocol, element.address, element.port), mark)

    def _keep(self, server: Server, mark: int) -> None:
        self._of[server] = mark
        self._owner[mark] = server

    def take(self, server: Server) -> int:
        """Returns the mark for a server: its present one, or a free one; 0: there is none."""
        known = self._of.get(server)
        if known is not None:
            return known
        for _ in range(NUMBERS):
            mark = (BASE | self._next) & ~self._masquerade
            self._next = self._next % (NUMBERS - 1) + 1
            if mark & 0xFFFF and mark not in self._owner:
                self._keep(server, mark)
                return mark
        self.refused += 1
        return 0

    def give_back(self, servers: Iterable[Server]) -> None:
        """Release the marks of these servers."""
        for server in servers:
            mark = self._of.pop(server, None)
            if mark is not None:
                del self._owner[mark]
