"""PURE. The static cases: one row of the behaviour tables, one client, one address, what must happen.

`row` is the number in the reference of kube-proxy's behaviour (sections 2 and 3). Where its modes differ and
docs/differences.md gives one answer for all of ours, that answer stands here; where the mechanism of a mode
cannot do otherwise, `by_mode` says so, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from .probes import REFUSED, SILENT, To, Want

__all__ = ["CASES", "CORE", "Case", "Kind"]

Kind = Literal["cluster", "external", "lb", "nodeport", "localhost"]
OUTER: Final[tuple[Kind, ...]] = ("external", "lb", "nodeport")
ALL: Final[tuple[Kind, ...]] = ("cluster", *OUTER)
INSIDE: Final = ("pod1", "node")
OUTSIDE: Final = ("client", "node2")


@dataclass(frozen=True)
class Case:
    """One static case; `port` replaces the service's own port, `address` its own address.

    The client's socket is bound to `bound`, another address of its place.
    """

    row: str
    text: str
    place: str
    service: str
    kind: Kind
    want: Want
    port: int | None = None
    address: tuple[str, str] | None = None  # IPv4, IPv6; and the next
    bound: tuple[str, str] | None = None
    by_mode: Mapping[str, tuple[Want, str]] = field(default_factory=dict)
    only4: bool = False
    only6: bool = False
    section: str = ""  # of the tables

    @property
    def name(self) -> str:
        """As in test ids."""
        where = f"{self.service}-{self.kind}" + (f"-{self.port}" if self.port else "")
        where += "-at-" + self.address[0] if self.address else ""
        where += "-bound-to-" + self.bound[0] if self.bound else ""
        family = "-v4" if self.only4 else "-v6" if self.only6 else ""
        return f"{self.row}-{self.place}-to-{where}{family}"

    def wanted(self, mode: str) -> Want:
        """What must happen in that mode."""
        return self.by_mode[mode][0] if mode in self.by_mode else self.want


def own(*pods: str) -> To:
    return To(frozenset(pods), "own")


def node(*pods: str) -> To:
    return To(frozenset(pods), "node")


def _each(row: str, text: str, places: tuple[str, ...], service: str, kinds: tuple[Kind, ...], want: Want,
          **more: object) -> Iterator[Case]:  # fmt: skip
    for place in places:
        for kind in kinds:
            yield Case(row, text, place, service, kind, want, **more)  # type: ignore[arg-type]


def _cases() -> Iterator[Case]:
    for section in (_balancing, _masquerade, _policies, _endpoints, _source_ranges, _addresses, _bound):
        name = section.__name__.strip("_").replace("_", "-")
        yield from (replace(case, section=name) for case in section())


def _balancing() -> Iterator[Case]:
    some = node("pod2", "pod3", "remote1")
    yield from _each("2.1", "a client outside reaches every backend", ("client",), "web", ALL, some)
    yield from _each("2.1", "datagrams reach every backend", ("client",), "dns", ALL, node("pod2", "remote1"))
    yield from _each("2.1", "local and remote backends mix", ("pod1",), "web", ("cluster",),
                     own("pod2", "pod3", "remote1"))  # fmt: skip
    yield from _each("2.1", "local and remote backends mix", ("node",), "web", ("cluster",), some)
    for service, kinds in (("empty", ALL), ("empty-dns", ("cluster", "nodeport", "lb"))):
        yield from _each("2.3", "no endpoints: refused", ("pod1", "node", "client"), service, kinds, REFUSED)
    yield from _each("2.3", "no endpoints: policies do not matter", ("client", "pod1"), "empty-local", ALL, REFUSED)


def _masquerade() -> Iterator[Case]:
    web = ("pod2", "pod3", "remote1")
    cluster: tuple[Kind, ...] = ("cluster",)
    yield from _each("2.5", "a pod keeps its address", ("pod1",), "web", cluster, own(*web))
    yield from _each("2.5", "datagrams of a pod keep its address", ("pod1",), "dns", cluster, own("pod2", "remote1"))
    yield from _each("2.5", "the node is seen as itself", ("node",), "web", cluster, node(*web))
    yield from _each("2.5", "a pod of another node keeps its address", ("remote2",), "one", cluster, own("pod2"))
    yield from _each("2.5", "local backends see the pod's own address", ("pod1",), "one", cluster, own("pod2"))
    yield from _each("2.5", "remote backends see the pod's own address", ("pod1",), "far", cluster, own("remote1"))
    yield from _each("2.5", "backends see the node's address for its own clients", ("node",), "one", cluster,
                     node("pod2"))  # fmt: skip
    yield from _each("2.20", "outsiders are masqueraded at a ClusterIP", OUTSIDE, "far", cluster, node("remote1"))
    yield from _each("2.20", "outsiders are masqueraded at a ClusterIP", OUTSIDE, "one", cluster, node("pod2"))
    yield from _each("2.6", "pods are masqueraded, as everybody", ("pod1", "remote2"), "web", OUTER, node(*web))
    yield from _each("2.6", "the node is masqueraded, as everybody", ("node", "node2"), "web", OUTER, node(*web))
    yield from _each("2.6", "datagrams are masqueraded", INSIDE, "dns", OUTER, node("pod2", "remote1"))
    yield from _each("2.7", "only what comes back to itself is masqueraded", ("pod1",), "self", cluster,
                     own("pod1", "pod2"))  # fmt: skip
    yield from _each("2.7", "a pod reaches itself, others still see its address", ("pod1",), "self-dns", cluster,
                     own("pod1", "pod2"))  # fmt: skip
    yield from _each("2.7", "a pod of another node reaches itself by this node", ("remote1",), "far", cluster,
                     own("remote1"))  # fmt: skip
    yield from _each("2.7", "hairpin by the node's and outer addresses", ("pod1",), "self-local", ALL, own("pod1"))


def _policies() -> Iterator[Case]:
    for service in ("local", "local-dns"):
        yield from _each("2.8", "Local: endpoints here, the client's address stays", OUTSIDE, service, OUTER,
                         own("pod2"))  # fmt: skip
    both = ("pod2", "remote1")
    yield from _each("2.9", "Local: pods get all endpoints, unmasqueraded", ("pod1",), "local", OUTER, own(*both))
    yield from _each("2.9", "Local: the node gets all endpoints, masqueraded", ("node",), "local", OUTER, node(*both))
    yield from _each("2.9", "Local: pods get the LB IP without endpoints here", ("pod1",), "away", OUTER,
                     own("remote1"))  # fmt: skip
    yield from _each("2.9", "Local: the node gets it without endpoints here", ("node",), "away", OUTER,
                     node("remote1"))  # fmt: skip
    yield from _each("2.10", "Local without endpoints here: silence", OUTSIDE, "away", OUTER, SILENT)
    yield from _each("2.10", "Local: the ClusterIP is not concerned", ("client",), "away", ("cluster",),
                     node("remote1"))  # fmt: skip
    yield from _each("2.11", "local endpoints alone", ("pod1",), "inner", ("cluster",), own("pod2"))
    yield from _each("2.11", "internal Local: endpoints here", ("node", "client"), "inner", ("cluster",),
                     node("pod2"))  # fmt: skip
    yield from _each("2.11", "internal Local: other addresses are not concerned", ("client",), "inner", OUTER,
                     node(*both))  # fmt: skip
    yield from _each("2.11", "silence where only others have endpoints", ("pod1",), "inner-away", ("cluster",), SILENT)
    yield from _each("2.11", "internal Local without endpoints here: silence", ("node", "client"), "inner-away",
                     ("cluster",), SILENT)  # fmt: skip


def _endpoints() -> Iterator[Case]:
    cluster: tuple[Kind, ...] = ("cluster",)
    yield from _each("2.12", "ready endpoints come first", ("pod1",), "draining", cluster, own("pod2"))
    yield from _each("2.12", "ready endpoints come first", ("client",), "draining", ("nodeport",), node("pod2"))
    yield from _each("2.12", "then those that serve while they end", ("pod1",), "drained", cluster,
                     own("pod3", "remote1"))  # fmt: skip
    yield from _each("2.12", "then those that serve while they end", ("client",), "drained", ("nodeport",),
                     node("pod3", "remote1"))  # fmt: skip
    yield from _each("2.12", "the local set falls back on its own", ("client",), "local-drained", OUTER, own("pod3"))
    yield from _each("2.12", "the cluster's set does not", ("pod1",), "local-drained", ("lb",), own("remote1"))
    yield from _each("2.12", "serving but not ready is no endpoint", ("pod1", "client"), "unready", cluster, REFUSED)
    yield from _each("2.13", "zone hints", ("pod1",), "zoned", cluster, own("pod2"))
    yield from _each("2.13", "zone hints narrow outer addresses too", ("client",), "zoned", OUTER, node("pod2"))
    yield from _each("2.13", "one endpoint without hints: no hints", ("pod1",), "half-zoned", cluster,
                     own("pod2", "remote1"))  # fmt: skip
    yield from _each("2.13", "no endpoint for this zone: no hints", ("pod1",), "other-zone", cluster,
                     own("pod2", "remote1"))  # fmt: skip
    yield from _each("2.13", "node hints", ("pod1",), "noded", cluster, own("remote1"))
    yield from _each("2.13", "hints do not touch the Local policy", ("client",), "local-zoned", ("lb",), own("pod2"))
    yield from _each("2.26", "port 65535", ("pod1",), "highest", cluster, own("pod2"))
    yield from _each("2.26", "port 65535", ("client",), "highest", ("lb", "nodeport"), node("pod2"))
    yield from _each("2.26", "an endpoint in the node's own network", ("pod1",), "hosted", cluster, own("node"))
    # Its answers come through this node anyway: netfilter replaces no source of what ends here.
    yield from _each("2.26", "an endpoint in the node's own network", ("client",), "hosted", ALL,
                     To(frozenset({"node"}), "any"))  # fmt: skip
    yield from _each("2.26", "an endpoint in another node's network", ("pod1",), "hosted-away", cluster, own("node2"))
    yield from _each("2.26", "an endpoint in another node's network", ("client",), "hosted-away", ("nodeport",),
                     node("node2"))  # fmt: skip


def _source_ranges() -> Iterator[Case]:
    lb: tuple[Kind, ...] = ("lb",)
    yield from _each("2.14", "a source in the ranges", ("client",), "guarded", lb, node("pod2"))
    yield from _each("2.14", "sources outside: silence, pods and nodes too", ("node2", "pod1", "node"), "guarded", lb,
                     SILENT)  # fmt: skip
    yield from _each("2.14", "only load-balancer IPs are guarded", ("node2",), "guarded",
                     ("cluster", "external", "nodeport"), node("pod2"))  # fmt: skip
    yield from _each("2.14", "a range with the node's address lets it in", ("node",), "guarded-node", lb, node("pod2"))
    yield from _each("2.14", "a range with the node's address", ("client", "pod1"), "guarded-node", lb, SILENT)
    yield from _each("2.14", "ranges of one family bind it", ("client",), "guarded-four", lb, SILENT, only4=True)
    yield from _each("2.14", "and not the other", ("client",), "guarded-four", lb, node("pod2"), only6=True)
    yield from _each("2.14", "a range of length 0 lets everybody in", ("client", "pod1"), "guarded-none", lb,
                     node("pod2"))  # fmt: skip
    yield from _each("2.14a", "no endpoints, a source outside the ranges: silence", ("node2", "pod1"), "guarded-empty",
                     lb, SILENT)  # fmt: skip
    yield from _each("2.24", "no endpoints, a source in the ranges: refused", ("client",), "guarded-empty", lb, REFUSED)
    yield from _each("2.24", "ranges come before the policy", ("pod1",), "guarded-away", lb, SILENT)
    yield from _each("2.24", "then the policy", ("client",), "guarded-away", lb, SILENT)


def _addresses() -> Iterator[Case]:
    web = ("pod2", "pod3", "remote1")
    cluster: tuple[Kind, ...] = ("cluster",)
    yield from _each("2.19", "a port that the service does not have: refused", ("pod1", "node", "client"), "web",
                     cluster, REFUSED, port=81)  # fmt: skip
    yield from _each("2.19", "an address of no service: silence", ("pod1", "node", "client"), "web", cluster, SILENT,
                     address=("10.96.200.200", "fd96::f:1"))  # fmt: skip
    yield from _each("2.19", "an address of no service in the eleventh ServiceCIDR: silence", ("pod1", "node"), "web",
                     cluster, SILENT, address=("172.30.19.200", "fdc0:19::f:1"))  # fmt: skip
    port = 30_001  # of web, which everything here listens at, too
    second = ("192.168.77.22", "fd77::22")
    yield from _each("3.3", "node ports are served at the primary address", ("client",), "one", ("nodeport",),
                     node("pod2"))  # fmt: skip
    yield from _each("3.1", "and at no other by default", ("client",), "web", ("nodeport",), own("second"),
                     address=second)  # fmt: skip
    yield from _each("3.8", "at another machine's address it is that machine's", INSIDE, "web", ("nodeport",),
                     own("node2"), address=("192.168.77.3", "fd77::3"))  # fmt: skip
    yield from _each("3.8", "at a ClusterIP it is an unknown port: refused", ("pod1", "node", "client"), "web",
                     cluster, REFUSED, port=port)  # fmt: skip
    yield from _each("3.11", "a process of the node at the same port is shadowed", ("client", "pod1", "node"), "web",
                     ("nodeport",), node(*web))  # fmt: skip
    yield from _localhost()


def _localhost() -> Iterator[Case]:
    """Node ports at 127.0.0.1 and ::1, which a socket of the node finds as it finds those at the node's addresses."""

    def at(words: str, service: str, want: Want, **more: object) -> Iterator[Case]:
        yield from _each("3.5", words, ("node",), service, ("localhost",), want, **more)

    yield from at("localhost: node ports, in place of what listens there", "web", node("pod2", "pod3", "remote1"))
    yield from at("localhost: datagrams", "dns", node("pod2", "remote1"))
    yield from at("localhost: no endpoints, refused", "empty", REFUSED)
    yield from at("localhost: no endpoints for datagrams, refused", "empty-dns", REFUSED)
    yield from at("localhost: policy Local does not bind the node", "away", node("remote1"))
    yield from at("localhost: a backend on the node itself", "hosted", To(frozenset({"node"}), "any"))
    yield from _each("3.5", "localhost: no node port, what listens there", ("node",), "web", ("nodeport",),
                     own("loopback"), port=9090, address=("127.0.0.1", "::1"))  # fmt: skip


def _bound() -> Iterator[Case]:
    """The node has a second address, and a socket of it may choose that one."""
    web, second = ("pod2", "pod3", "remote1"), ("192.168.77.22", "fd77::22")
    lb: tuple[Kind, ...] = ("lb",)
    yield from _each("2.31", "a socket bound to the node's second address is seen as the node", ("node",), "web", ALL,
                     node(*web), bound=second)  # fmt: skip
    yield from _each("2.31", "datagrams of such a socket", ("node",), "dns", ALL, node("pod2", "remote1"),
                     bound=second)  # fmt: skip
    yield from _each("2.31", "such a socket and a backend on the node itself", ("node",), "hosted", ("cluster", "lb"),
                     To(frozenset({"node"}), "any"), bound=second)  # fmt: skip
    yield from _each("2.31", "the ranges have its address: let in", ("node",), "guarded-second", lb, node("pod2"),
                     bound=second)  # fmt: skip
    yield from _each("2.31", "the ranges have the primary address alone: silence", ("node",), "guarded-node", lb,
                     SILENT, bound=second)  # fmt: skip
    yield from _each("2.31", "no endpoints: refused", ("node",), "empty", ALL, REFUSED, bound=second)
    yield from _each("2.31", "a socket that is bound to none has the primary address", ("node",), "guarded-second", lb,
                     SILENT)  # fmt: skip


CASES: Final = tuple(_cases())
# What a slow machine runs: one case of each kind of rule.
CORE: Final = frozenset({
    "2.1-client-to-web-nodeport", "2.1-client-to-dns-lb", "2.3-pod1-to-empty-cluster", "2.3-client-to-empty-nodeport",
    "2.3-node-to-empty-dns-cluster", "2.5-pod1-to-web-cluster", "2.5-node-to-web-cluster", "2.6-pod1-to-web-external",
    "2.7-pod1-to-self-cluster", "2.7-pod1-to-self-dns-cluster",
    "2.7-pod1-to-self-local-lb", "2.8-client-to-local-lb", "2.8-client-to-local-nodeport",
    "2.9-pod1-to-away-lb", "2.9-node-to-local-nodeport", "2.10-client-to-away-lb", "2.10-client-to-away-nodeport",
    "2.11-pod1-to-inner-away-cluster", "2.13-pod1-to-zoned-cluster", "2.14-client-to-guarded-lb",
    "2.14-node2-to-guarded-lb", "2.14a-node2-to-guarded-empty-lb", "2.19-pod1-to-web-cluster-81",
    "2.20-client-to-far-cluster", "2.31-node-to-web-cluster-bound-to-192.168.77.22",
    "2.31-node-to-guarded-second-lb-bound-to-192.168.77.22", "2.31-node-to-guarded-node-lb-bound-to-192.168.77.22",
    "2.26-client-to-hosted-cluster", "3.11-client-to-web-nodeport",
})  # fmt: skip
