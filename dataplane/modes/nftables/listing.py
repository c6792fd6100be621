"""Lists what is programmed, read from the kernel's tables: names are the comments of elements."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid_proxy.dataplane.kernel import conntrack
from hybrid_proxy.dataplane.mode import View, belongs
from hybrid_proxy.dataplane.modes.nftables import affinity
from hybrid_proxy.dataplane.modes.nftables.picks import Pick
from hybrid_proxy.dataplane.modes.nftables.tables import DISCARD, SPACES, TABLE
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES, Family, Verdict
from hybrid_proxy.dataplane.nftables.schema import Key, Value
from hybrid_proxy.dataplane.nftables.wire import Kernel
from hybrid_proxy.dataplane.reports import BackendRow, FlowRow, ServiceRow
from hybrid_proxy.dataplane.table import Protocol, Remembered, ServiceTable, frontend_text, socket_text


class _Frontend:
    """One element of a verdict map: a frontend as one class of clients sees it."""

    def __init__(self, family: Family, key: Key, verdict: Value, name: str) -> None:
        self.family, self.key = family, key
        self.chain = verdict.chain if isinstance(verdict, Verdict) else ""
        self.name = name or None
        self.backends: dict[int, str] = {}

    @property
    def affinity(self) -> bool:
        return isinstance(self.chain, Pick) and self.chain.seconds > 0

    @property
    def protocol(self) -> str:
        return Protocol(int(self.key[-2])).name

    @property
    def address(self) -> str | None:
        """None: a node port."""
        return str(self.key[0]) if len(self.key) == 3 else None

    @property
    def text(self) -> str:
        return frontend_text(self.address, int(self.key[-1]))


class Tables(View):
    """A `dataplane.mode.View` of the tables of this network namespace."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._families = [family for family in FAMILIES.values() if kernel.skeleton(family) is not None]
        self.place = ", ".join(f"table {family.name} {TABLE}" for family in self._families)

    def _frontends(self) -> Iterator[_Frontend]:
        for family in self._families:
            for space in SPACES:
                found = {
                    key: _Frontend(family, key, value, comment)
                    for key, (value, comment) in self._kernel.contents(family, space).items()
                }
                for key, (value, _) in self._kernel.contents(family, f"{space}-slots").items():
                    frontend = found.get(key[1:])
                    if frontend is not None and isinstance(value, tuple):
                        frontend.backends[int(key[0])] = socket_text(*value)
                yield from found.values()

    def services(self) -> list[ServiceRow]:
        """List the service ports; the tables do not show which backends are on this node."""
        rows: dict[tuple[str | None, int, str], ServiceRow] = {}
        for frontend in self._frontends():
            name = (frontend.name, frontend.family.version, frontend.protocol)
            row = rows.setdefault(
                name,
                ServiceRow(
                    name=frontend.name, frontends=[], protocol=frontend.protocol, backends=0, when_empty="reject"
                ),
            )
            if frontend.text not in row.frontends:
                row.frontends.append(frontend.text)
            row.backends = max(row.backends, len(frontend.backends))
            row.affinity = row.affinity or frontend.affinity
            if frontend.chain == DISCARD:
                row.when_empty = "drop"
        for row in rows.values():
            row.frontends.sort()
        return sorted(rows.values(), key=lambda row: (row.name or "", row.frontends))

    def backends(self, of: str | None = None) -> list[BackendRow]:
        """List the backends of service ports, internal and external ones."""
        found = {
            (frontend.name or "", address, frontend.protocol)
            for frontend in self._frontends()
            if belongs(frontend.name, of)
            for address in frontend.backends.values()
        }
        return [
            BackendRow(service=service or None, address=address, protocol=protocol, used=True)
            for service, address, protocol in sorted(found)
        ]

    def flows(self, limit: int) -> tuple[list[FlowRow], int]:
        """List flows from conntrack."""
        keys = {(f.address, int(f.key[-1]), int(f.key[-2])): f.name for f in self._frontends()}
        return conntrack.flows(keys, limit)

    def remembered(self, table: ServiceTable) -> list[Remembered]:
        found = []
        for family in self._families:
            entries = [e for e in table.entries() if e.family == family.version and e.affinity_seconds]
            skeleton = self._kernel.skeleton(family)
            known = affinity.sets_of(entries) & skeleton.sets.keys() if skeleton is not None else ()
            found += affinity.remembered(entries, {name: self._kernel.contents(family, name) for name in known})
        return found

    def close(self) -> None:
        self._kernel.close()
