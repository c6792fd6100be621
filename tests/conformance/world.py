"""The services of the static cases: one set of manifests, which each mode's agent loads once.

Every one has a ClusterIP, a node port, an external IP and a load-balancer IP of both families. Backends are
pods of this node (`pod2`), of the other one (`remote1`), or the nodes themselves (`node`, `node2`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hybrid_proxy.controller.cli import parser
from hybrid_proxy.controller.kubernetes.manifests import load
from hybrid_proxy.controller.kubernetes.model import KINDS
from hybrid_proxy.controller.semantics.cluster import Cluster
from hybrid_proxy.controller.semantics.tables import Builder
from hybrid_proxy.controller.settings.config import of_flags
from hybrid_proxy.dataplane.table import ServiceTable
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Place

from .kit import HTTP, UDP, Bench, End, Service

__all__ = ["HOST_PORT", "PLANS", "SECOND", "UNALLOCATED", "World", "make_world", "node_port_of", "table_of"]

HOST_PORT = 9090  # where the nodes' own servers listen
SECOND = ("192.168.77.22", "fd77::22")  # the node's second addresses, not primary ones
UNALLOCATED = ("10.96.200.200", "fd96::f:1")  # in the range of ClusterIPs, and nobody's

# Ten ranges more of each family, behind the first one in any order.
_MORE_CIDRS = [*(f"172.30.{n}.0/24" for n in range(10, 20)), *(f"fdc0:{n}::/64" for n in range(10, 20))]
MORE_CIDRS = json.dumps({
    "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": "more"},
    "spec": {"cidrs": _MORE_CIDRS},
})  # fmt: skip

LOCAL = {"externalTrafficPolicy": "Local"}
INNER = {"internalTrafficPolicy": "Local"}
STICKY = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}


def _ranges(*cidrs: str) -> dict[str, Any]:
    return {"loadBalancerSourceRanges": list(cidrs)}


CLIENT_ONLY = _ranges("192.168.77.1/32", "fd77::1/128")
NODE_TOO = _ranges("192.168.77.2/32", "fd77::2/128")


@dataclass(frozen=True)
class Plan:
    """One service: its backends as words, `pod2`, `pod3 terminating`, `remote1 zone-b`."""

    name: str
    ends: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    protocol: str = "TCP"
    port: int = 80
    target: int = HTTP


PLANS = (
    Plan("web", "pod2, pod3, remote1"),
    Plan("dns", "pod2, remote1", protocol="UDP", port=53, target=UDP),
    Plan("one", "pod2"),
    Plan("far", "remote1"),
    Plan("empty"),
    Plan("empty-dns", protocol="UDP", port=53, target=UDP),
    Plan("empty-local", spec=LOCAL | INNER),
    Plan("unready", "pod2 unready, remote1 unready"),
    Plan("local", "pod2, remote1", LOCAL),
    Plan("local-dns", "pod2, remote1", LOCAL, protocol="UDP", port=53, target=UDP),
    Plan("away", "remote1", LOCAL),
    Plan("inner", "pod2, remote1", INNER),
    Plan("inner-away", "remote1", INNER),
    Plan("draining", "pod2, pod3 terminating, remote1 terminating"),
    Plan("drained", "pod3 terminating, remote1 terminating, pod2 gone"),
    Plan("local-drained", "pod3 terminating, remote1", LOCAL),
    Plan("zoned", "pod2 zone-a, remote1 zone-b"),
    Plan("half-zoned", "pod2 zone-a, remote1"),
    Plan("other-zone", "pod2 zone-b, remote1 zone-c"),
    Plan("noded", "pod2 lab-node2, remote1 lab-node"),
    Plan("local-zoned", "pod2 zone-b, remote1 zone-a", LOCAL),
    Plan("guarded", "pod2", CLIENT_ONLY),
    Plan("guarded-node", "pod2", NODE_TOO),
    Plan("guarded-four", "pod2", _ranges("203.0.113.0/24")),
    Plan("guarded-none", "pod2", _ranges("203.0.113.0/24", "0.0.0.0/0", "2001:db8::/32", "::/0")),
    Plan("guarded-empty", "", CLIENT_ONLY),
    Plan("guarded-away", "remote1", CLIENT_ONLY | LOCAL),
    Plan("self", "pod1, pod2"),
    Plan("self-local", "pod1", LOCAL),
    Plan("highest", "pod2", port=65535),
    Plan("hosted", "node", target=HOST_PORT),
    Plan("hosted-away", "node2", target=HOST_PORT),
    Plan("sticky", "pod2, pod3, remote1, remote2", STICKY),
    Plan("sctp", "pod4", protocol="SCTP", port=7000, target=7777),
    Plan("self-dns", "pod1, pod2", protocol="UDP", port=53, target=UDP),
    Plan("guarded-second", "pod2", _ranges("192.168.77.22/32", "fd77::22/128")),
)
_NUMBERS = {plan.name: number for number, plan in enumerate(PLANS, 1)}


def node_port_of(name: str) -> int:
    """The node port of a static service, known before it is made."""
    return 30_000 + _NUMBERS[name]


@dataclass(frozen=True)
class World:
    """The static services by name, and the table that they make on this node."""

    bench: Bench
    services: dict[str, Service]
    table: ServiceTable


def make_world(bench: Bench) -> dict[str, Service]:
    """Write all manifests; numbers are taken from the front of the bench's."""
    services = {}
    for plan in PLANS:
        number = next(bench.numbers)
        assert number == _NUMBERS[plan.name], "the static services come first"
        ends = tuple(_end(bench, words) for words in plan.ends.split(", ") if words)
        made = Service(
            bench, number, ends, plan.protocol, plan.port, plan.target, plan.spec, outside=True, title=plan.name
        )
        made.write()
        services[plan.name] = made
    return services


def _end(bench: Bench, words: str) -> End:
    name, _, state = words.partition(" ")
    place: Place = bench.lab[name]
    match state:
        case "":
            return End(place)
        case "unready":
            return End(place, ready=False)
        case "terminating":
            return End(place, ready=False, terminating=True)
        case "gone":
            return End(place, ready=False, serving=False, terminating=True)
    return End(place, hints=(("forNodes" if state.startswith("lab-") else "forZones", state),))


def table_of(bench: Bench, agent: Agent) -> ServiceTable:
    """What the agent must have made of its manifests, made here by the same pure code from the same flags."""
    settings = of_flags(vars(parser().parse_args(agent.argv[3:]))).config.settings
    cluster = Cluster(settings.node_name, KINDS)
    for event in load(agent.manifests):
        cluster.apply(event)
    return Builder(settings).build(cluster, bench.node_addresses)
