"""Lists what is programmed, read from the kernel: virtual servers, and the sets that have their names."""

from __future__ import annotations

from typing import Final

from hybrid_proxy.dataplane.kernel.conntrack import flows, unpacked
from hybrid_proxy.dataplane.kernel.ipset import Ipsets
from hybrid_proxy.dataplane.kernel.ipvs import Ipvs, connections
from hybrid_proxy.dataplane.kernel.netlink import NetlinkFailed
from hybrid_proxy.dataplane.mode import View, belongs
from hybrid_proxy.dataplane.modes.ipvs.lower import PREFIX, set_name
from hybrid_proxy.dataplane.reports import BackendRow, FlowRow, ServiceRow
from hybrid_proxy.dataplane.table import Protocol, socket_text
from hybrid_proxy.dataplane.virtual_servers import Config, Destination, Element, Load, Server, Value

ALL: Final = 1 << 30


class Programmed(View):
    """A `dataplane.mode.View`; everything is read at creation, so that the kernel interfaces may be closed then."""

    def __init__(self, sets: Ipsets, ipvs: Ipvs) -> None:
        self.place = f"virtual servers of IPVS and sets {PREFIX}*"
        self._sets = {name: _elements(sets, name) for name in sets.names(PREFIX)}
        configs = ipvs.servers()
        self._ports: dict[tuple[str, int, int], list[Server]] = {}
        self._configs: dict[Server, Config] = {}
        self._loads: dict[Server, dict[Destination, Load]] = {}
        for family in (4, 6):
            marks = self._of(family, "MARKS")
            for element, name in self._of(family, "SERVERS").items():
                server = Server(family, element.protocol, element.address, element.port)
                self._ports.setdefault((str(name or ""), family, element.protocol), []).append(server)
                mark = marks.get(element)
                external = Server(family, mark=mark) if isinstance(mark, int) else None
                for each in filter(None, (server, external)):
                    if each in configs:
                        self._configs[each] = configs[each]
                        self._loads[each] = ipvs.destinations(each)
                if external in configs:
                    self._ports[str(name or ""), family, element.protocol].append(external)

    def _of(self, family: int, name: str) -> dict[Element, Value]:
        return self._sets.get(set_name(family, name), {})

    def services(self) -> list[ServiceRow]:
        """Returns one row for each service port of one family."""
        rows = []
        for (name, family, protocol), servers in sorted(self._ports.items()):
            backends = self._backends(servers)
            local = {Destination(e.address, e.port) for e in self._of(family, "HAIRPIN") if e.protocol == protocol}
            config = next((self._configs[each] for each in servers if each in self._configs), None)
            elements = [Element(each.address, each.port, each.protocol) for each in servers if not each.mark]
            drops = any(e in self._of(family, f"DROP-{side}") for e in elements for side in ("IN", "OUT"))
            rows.append(
                ServiceRow(
                    name=name or None,
                    frontends=sorted(socket_text(each.address, each.port) for each in servers if not each.mark),
                    protocol=Protocol.name_of(protocol),
                    backends=sum(1 for load in backends.values() if load),
                    local_backends=sum(1 for each, load in backends.items() if load and each in local),
                    when_empty="drop" if drops else "reject",
                    affinity=bool(config and config.persistent),
                    scheduler=config.scheduler if config else None,
                )
            )
        return rows

    def backends(self, of: str | None = None) -> list[BackendRow]:
        """Returns one row for each real server; `used`: new connections may go to it."""
        return [
            BackendRow(
                service=name or None,
                address=socket_text(each.address, each.port),
                protocol=Protocol.name_of(protocol),
                used=used,
            )
            for (name, _, protocol), servers in sorted(self._ports.items())
            if belongs(name or None, of)
            for each, used in sorted(self._backends(servers).items())
        ]

    def flows(self, limit: int) -> tuple[list[FlowRow], int]:
        """Lists flows from conntrack, which IPVS updates and which also knows those of other modes."""
        names: dict[tuple[str | None, int, int], str | None] = {
            (server.address, server.port, protocol): name or None
            for (name, _, protocol), servers in self._ports.items()
            for server in servers
            if not server.mark
        }
        known = {
            (each.protocol, *(
                socket_text(*unpacked(address, port))
                for address, port in ((each.client, each.client_port), (each.address, each.port))
            ))
            for each in connections()
        }  # fmt: skip
        rows = [row for row in flows(names, ALL)[0] if (Protocol[row.protocol], row.client, row.frontend) in known]
        return rows[:limit], len(rows)

    def _backends(self, servers: list[Server]) -> dict[Destination, bool]:
        """Returns the real servers of all these, and whether one of them still sends new connections there."""
        found: dict[Destination, bool] = {}
        for server in servers:
            for destination, load in self._loads.get(server, {}).items():
                found[destination] = found.get(destination, False) or load.weight > 0
        return found


def _elements(sets: Ipsets, name: str) -> dict[Element, Value]:
    try:
        return sets.elements(name)
    except NetlinkFailed:
        return {}  # removed while we read
