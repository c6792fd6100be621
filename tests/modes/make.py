"""Service tables for tests of modes, with defaults for what a test does not care about; and iptables of a variant."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_proxy.dataplane.kernel import xtables
from hybrid_proxy.dataplane.table import (
    Backend,
    BackendSet,
    Entry,
    Frontend,
    Kind,
    Masquerade,
    NodeNetwork,
    PodMatch,
    Protocol,
    ServiceTable,
    WhenEmpty,
)
from tests.tables import Front, entry_of

NETWORK = NodeNetwork(
    primary=("192.168.0.1", "fd01::1"),
    addresses=("192.168.0.1", "fd01::1"),
    node_port_addresses=("192.168.0.1", "fd01::1"),
    pods=PodMatch(("10.1.0.0/16", "fd02::/48")),
    service_cidrs=("10.96.0.0/16", "fd96::/112"),
)
NOT_PODS = Masquerade.NODE | Masquerade.EXTERNAL


def find_tables(variant: str, needs: xtables.Needs) -> xtables.Xtables:
    """Tries iptables of this variant, as on a node that uses it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xtables, "_choose", lambda: (variant, "as configured"))
        return xtables.find(needs)


def entry(*frontends: Frontend, **fields: Any) -> Entry:
    """The port `default/web:http`, of IPv4 and TCP, with these frontends; `fields` are those of `Entry`."""
    return entry_of(**{"name": "default/web:http", "family": 4, "protocol": Protocol.TCP, "fronts": frontends} | fields)


def service(number: int, family: int = 4, backends: int = 3) -> Entry:
    """One of everything: ClusterIP, node port, load balancer with ranges and a local policy."""
    pod, vip = ("10.1.0.", "10.96.0.") if family == 4 else ("fd02::", "fd96::")
    outside, range_ = ("203.0.113.", "198.51.100.0/24") if family == 4 else ("fd99::", "fd98::/64")
    whole = BackendSet(tuple(Backend(f"{pod}{10 + n}", 8080, n == 0) for n in range(backends)))
    local = BackendSet(whole.backends[:1]) if backends else BackendSet((), WhenEmpty.DROP)
    frontends = (
        Front(Kind.CLUSTER_IP, f"{vip}{number}", 80, whole, whole, NOT_PODS),
        Front(Kind.NODE_PORT, None, 30000 + number, whole, whole, Masquerade.ALWAYS),
        Front(Kind.LOAD_BALANCER, f"{outside}{number}", 80, whole, local, Masquerade.NODE, (range_,)),
    )
    protocol = (Protocol.SCTP, Protocol.TCP, Protocol.UDP)[number % 3]
    return entry_of(f"ns/s{number}:p", family, protocol, frontends, whole.backends, 60 * (number % 2))


def table(*numbers: int, backends: int = 3, generation: int = 1) -> ServiceTable:
    """These services, of both families."""
    services = {f"ns/s{n}": (service(n, 4, backends), service(n, 6, backends)) for n in numbers}
    return ServiceTable(services, NETWORK, generation)
