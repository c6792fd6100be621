"""What the relay serves, and for which clients."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, Final

import msgspec

from dataplane.kernel import conntrack
from dataplane.mode import belongs
from dataplane.modes.userspace import messages as m
from dataplane.modes.userspace.relay_client import RelayClient
from dataplane.table import Protocol, socket_text

__all__ = ["Relayed"]

MOST: Final = 1 << 20  # flows that are looked at


class Relayed:
    """A `dataplane.mode.View`, read once."""

    def __init__(self, client: RelayClient) -> None:
        self._client = client
        self._listing = client.ask(m.Look(), m.Listing).values
        self.rows = [msgspec.convert(row, m.Row) for row in self._listing["rows"]]
        self.place = f"relay, process {self._listing['pid']}"

    def services(self) -> list[dict[str, Any]]:
        """See `dataplane.mode.View.services`."""
        return [
            {
                "name": row.name,
                "frontends": list(row.frontends),
                "protocol": Protocol(row.protocol).name,
                "backends": len(row.routes[0]) if row.routes else 0,
                "local_backends": len(row.routes[1]) if len(row.routes) > 1 else None,
                "affinity": row.affinity or None,
                "proxy_ports": len(row.ports),
            }
            for row in self.rows
        ]

    def backends(self, of: str | None = None) -> list[dict[str, Any]]:
        """See `dataplane.mode.View.backends`."""
        used = {(key, address, port): count for key, address, port, count in self._listing["used"]}
        rows = []
        for row in filter(lambda each: belongs(each.name, of), self.rows):
            members = Counter(pair for route in row.routes for pair in route)
            for address, port in {**dict.fromkeys(members), **dict.fromkeys(row.serving)}:
                rows.append(
                    {
                        "service": row.name,
                        "address": socket_text(address, port),
                        "protocol": Protocol(row.protocol).name,
                        "used": (address, port) in members,
                        "conversations": used.get((row.key, address, port), 0),
                    }
                )
        return rows

    def flows(self, limit: int) -> tuple[list[dict[str, Any]], int]:
        """See `dataplane.mode.View.flows`."""
        listing = self._client.ask(m.Look(min(limit, MOST)), m.Listing).values
        known = self._frontends_of_conntrack()
        rows = []
        for flow in listing["flows"]:
            row = dict(flow) | {"protocol": Protocol(flow["protocol"]).name}
            for column in ("client", "frontend", "backend"):
                row[column] = socket_text(*flow[column]) if flow[column] else None
            row |= known.get((row["client"], row["frontend"]), {})
            rows.append(row)
        return rows, listing["flow_count"]

    def close(self) -> None:
        """See `dataplane.mode.View.close`."""
        self._client.close()

    def _frontends_of_conntrack(self) -> dict[tuple[str, str], dict[str, str]]:
        """What the relay sees of a client and its own proxy port -> the client and the frontend, from conntrack."""
        frontends: dict[conntrack.Key, str | None] = {}
        for row in self.rows:
            for text in row.frontends:
                address, _, port = text.rpartition(":")
                frontends[None if address == "*" else address.strip("[]"), int(port), row.protocol] = row.name
        with contextlib.suppress(OSError):  # then the proxy port has to do
            flows, _ = conntrack.flows(frontends, MOST)
            return {
                (flow["source"], flow["backend"]): {"client": flow["client"], "frontend": flow["frontend"]}
                for flow in flows
            }
        return {}
