"""Routes replies to clients' addresses, which backends see as their source, to this node."""

from __future__ import annotations

import contextlib
import logging

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel import policy
from hybrid_proxy.dataplane.modes.userspace.sockets import transparent_works

log = logging.getLogger(__name__)


class ClientAddresses:
    """The policy routing of replies. `kept` are the families in which it works; in others backends see the node."""

    def __init__(self) -> None:
        self._possible = tuple(family for family in (4, 6) if transparent_works(family))
        self.kept = self._possible
        self._changes = policy.watch()

    def route(self, mark: int) -> None:
        """Routes replies that have this mark."""
        kept = []
        for family in self._possible:
            try:
                policy.deliver_marked(family, mark)
                kept.append(family)
            except DataplaneError as error:
                log.warning("backends see the node's address instead of their clients': %s", error)
        self.kept = tuple(kept)

    def repair(self, mark: int) -> tuple[int, bool]:
        """Repairs removed rules. Returns how many, and whether a family works now that did not.

        Raises:
            DataplaneError: a rule cannot be repaired.
        """
        repaired, more = 0, False
        for family in self._possible:
            if family not in self.kept:
                with contextlib.suppress(DataplaneError):
                    policy.deliver_marked(family, mark)
                    more = True
            elif policy.deliver_marked(family, mark):
                repaired += 1
                log.warning("repaired: the routing rule of replies to clients' IPv%d addresses was gone", family)
        return repaired, more

    def changed(self) -> bool:
        """True if a routing rule or a route changed since the last call."""
        return self._changes.discard()

    def close(self) -> None:
        self._changes.close()
