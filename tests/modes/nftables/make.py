"""Short builders for the nftables tests: of tables, and of the mode over a kernel in memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.nftables import programmer
from hybrid_proxy.dataplane.stale import Judge, Place
from hybrid_proxy.dataplane.table import (
    Backend,
    BackendSet,
    Entry,
    Kind,
    Masquerade,
    NodeNetwork,
    PodMatch,
    ServiceTable,
    WhenEmpty,
)
from tests.fakes.nftables import FakeNftables
from tests.tables import Front

NODE = NodeNetwork(
    name="n",
    primary=("192.168.0.1", "fd01::1"),
    addresses=("192.168.0.1", "192.168.0.2", "fd01::1"),
    node_port_addresses=("192.168.0.1", "fd01::1"),
    pods=PodMatch(("10.1.0.0/16", "fd02::/64")),
    service_cidrs=("10.96.0.0/16", "fd00::/112"),
)
CLUSTER = Masquerade.NODE | Masquerade.EXTERNAL


def route(*backends: str, empty: WhenEmpty = WhenEmpty.REJECT, why: str = "") -> BackendSet:
    """`10.1.0.5` is elsewhere, `*10.1.0.5` on this node."""
    made = (Backend(b.removeprefix("*"), 8080, b.startswith("*")) for b in backends)
    return BackendSet(tuple(made), empty, why)


def cluster_ip(address: str, internal: BackendSet, port: int = 80, masquerade: Masquerade = CLUSTER) -> Front:
    return Front(Kind.CLUSTER_IP, address, port, internal, internal, masquerade)


def table(*entries: Entry, node: NodeNetwork = NODE, generation: int = 1) -> ServiceTable:
    services: dict[str, tuple[Entry, ...]] = {}
    for one in entries:
        service = one.name.rpartition(":")[0]
        services[service] = (*services.get(service, ()), one)
    return ServiceTable(services, node, generation)


class _InMemory(programmer.Nftables):
    """The mode over a kernel that has no flows and no sockets, and reports nothing."""

    needs_sources = False

    def _watch_rules(self, tables: Collection[str]) -> None:
        pass

    def _delete_stale(self, judge: Judge, openings: Collection[Place]) -> None:
        pass


def nftables_in(fake: FakeNftables, **options: Any) -> programmer.Nftables:
    """The mode over a kernel in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programmer, "Kernel", lambda *_: fake)
        patch.setattr(programmer, "probe", lambda _: None)
        patch.setattr(programmer, "is_liberal", lambda: False)
        return _InMemory(Options(**options), lambda: None)
