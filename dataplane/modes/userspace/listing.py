"""Listings of what the relay serves."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Final

from hybrid_proxy.dataplane.kernel import conntrack
from hybrid_proxy.dataplane.mode import View, belongs
from hybrid_proxy.dataplane.modes.userspace import messages as m
from hybrid_proxy.dataplane.modes.userspace.relay_client import RelayClient
from hybrid_proxy.dataplane.reports import BackendRow, FlowRow, ServiceRow
from hybrid_proxy.dataplane.table import Protocol, frontend_of, socket_text

MOST: Final = 1 << 20  # conntrack entries that are read


class Relayed(View):
    """A `dataplane.mode.View` of the relay, read once."""

    def __init__(self, client: RelayClient) -> None:
        self._client = client
        self.listing = client.ask(m.List(), m.Listing)
        self.rows, self._now = self.listing.rows, time.time()
        self.place = f"relay, process {self.listing.pid}"
        self._frontends: dict[conntrack.Key, str | None] = {
            (*frontend_of(text), row.protocol): row.name for row in self.rows for text in row.frontends
        }

    def services(self) -> list[ServiceRow]:
        failing = Counter(row[0] for row in self.listing.failures if row[3] and not row[4].is_over(self._now))
        return [
            ServiceRow(
                name=row.name,
                frontends=sorted(row.frontends),
                protocol=Protocol(row.protocol).name,
                backends=len(row.routes[0]) if row.routes else 0,
                local_backends=len(row.routes[1]) if len(row.routes) > 1 else None,
                affinity=bool(row.affinity),
                failing=failing[row.key],
                proxy_ports=len(row.ports),
            )
            for row in self.rows
        ]

    def backends(self, of: str | None = None) -> list[BackendRow]:
        used = {(key, address, port): count for key, address, port, count in self.listing.used}
        failed = {row[:3]: row[3:] for row in self.listing.failures}
        rows, now = [], self._now
        for row in filter(lambda each: belongs(each.name, of), self.rows):
            members = Counter(pair for route in row.routes for pair in route)
            for address, port in {**dict.fromkeys(members), **dict.fromkeys(row.serving)}:
                count, last = failed.get((row.key, address, port), (0, None))
                rows.append(
                    BackendRow(
                        service=row.name,
                        address=socket_text(address, port),
                        protocol=Protocol(row.protocol).name,
                        used=(address, port) in members,
                        failures=count,
                        history=last,
                        state=f"failing: {last.text(now)}" if count and last and not last.is_over(now) else None,
                        conversations=used.get((row.key, address, port), 0),
                    )
                )
        return rows

    def flows(self, limit: int) -> tuple[list[FlowRow], int]:
        listing = self._client.ask(m.List(min(limit, MOST)), m.Listing)
        translated = self._translated()
        rows = []
        for flow in listing.flows:
            ends = socket_text(*flow.client), socket_text(*flow.frontend)
            client, frontend = translated.get(ends, ends)
            rows.append(
                FlowRow(
                    service=flow.service,
                    protocol=Protocol(flow.protocol).name,
                    client=client,
                    frontend=frontend,
                    backend=socket_text(*flow.backend) if flow.backend else None,
                    source=flow.source,
                    state=flow.state,
                )
            )
        return rows, listing.flow_count

    def close(self) -> None:
        self._client.close()

    def forget_datagrams(self) -> None:
        """Deletes the redirections of datagrams to the relay. OSError: conntrack cannot be read."""
        flows = self._client.ask(m.List(MOST), m.Listing).flows
        places = {(*flow.frontend, flow.protocol) for flow in flows if flow.protocol == Protocol.UDP}
        conntrack.delete_translated(self._frontends, places)

    def _translated(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Maps client and proxy port, as the relay sees them, to client and frontend, which conntrack has."""
        with contextlib.suppress(OSError):  # then the proxy port is shown
            flows, _ = conntrack.flows(self._frontends, MOST)
            return {(flow.source, flow.backend or ""): (flow.client, flow.frontend) for flow in flows}
        return {}
