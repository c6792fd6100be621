"""Services and a node in memory, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ipvs.programmer import Ipvs
from hybrid_proxy.dataplane.modes.ipvs.writer import Kernel
from hybrid_proxy.dataplane.options import IpvsOptions
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
)  # fmt: skip
from hybrid_proxy.dataplane.virtual_servers import Change, Config, Connection, Destination, Element, Server, Verb
from tests.fakes.ipvs import FakeDevice, FakeIpvs, FakeRoutes, FakeSets, Journal
from tests.fakes.xtables import FakeXtables
from tests.modes.make import entry
from tests.tables import Front

NETWORK = NodeNetwork(
    primary=("192.168.77.2", "fd77::2"),
    addresses=("192.168.77.2", "192.168.77.22", "fd77::2"),
    node_port_addresses=("192.168.77.2", "fd77::2"),
    pods=PodMatch(("10.77.0.0/16", "fd77:1::/48")),
    service_cidrs=("10.96.0.0/12", "fd96::/108"),
)
A, B, C = Backend("10.77.1.2", 8080, local=True), Backend("10.77.2.2", 8080), Backend("10.77.2.3", 8080)
TCP, UDP = 6, 17
TO_ALL = Masquerade.NODE | Masquerade.EXTERNAL


def route(*backends: Backend, drop: bool = False, why: str = "all") -> BackendSet:
    return BackendSet(backends, WhenEmpty.DROP if drop else WhenEmpty.REJECT, why)


def cluster_ip(inside: BackendSet, address: str = "10.96.0.1", port: int = 80) -> Front:
    return Front(Kind.CLUSTER_IP, address, port, inside, inside, TO_ALL)


def web(*backends: Backend, **more: object) -> Entry:
    """One ClusterIP."""
    return entry(cluster_ip(route(*backends)), serving=backends, **more)


@dataclass
class Node:
    """A node whose kernel is in memory; `start` is a new agent on it."""

    journal: Journal = field(default_factory=Journal)
    tables: FakeXtables = field(default_factory=FakeXtables)
    woken: int = 0
    generation: int = 0
    time: float = 1000.0  # what the agent's clock shows
    worked: float = 0.0  # seconds of a processor
    sync_seconds: float = 30.0

    def __post_init__(self) -> None:
        self.ipvs = FakeIpvs(self.journal)
        self.sets = FakeSets(self.journal, self._in_use)
        self.device = FakeDevice(self.journal)
        self.routes = FakeRoutes(self.journal)
        self.flows: list[Connection] = []  # that IPVS knows
        self.forgotten: list[Connection] = []  # that conntrack knows no more
        self.sysctls: dict[str, str] = {}
        self.translates_at_sockets = False  # the mode that serves

    def _in_use(self, name: str) -> bool:
        rules = (
            rule for table in self.tables.tables.values() for chain in table.chains.values() for rule in chain
        )  # fmt: skip
        return any(name in rule.split() for rule in rules)

    def start(self, clock: Callable[[], float] | None = None, **options: object) -> Ipvs:
        kernel = Kernel(
            self.ipvs, self.sets, self.device, self.routes, self.tables,  # type: ignore[arg-type]
            lambda wanted: self.sysctls.update(wanted) or {}, self.sysctls.get,
            lambda: list(self.flows), self._entries_of, self._delete_entries, lambda _: self.translates_at_sockets,
        )  # fmt: skip
        given = Options(ipvs=IpvsOptions(**options), sync_seconds=self.sync_seconds)  # type: ignore[arg-type]
        return Ipvs(given, self._wake, kernel, clock or (lambda: self.time), lambda: self.worked)

    def _entries_of(self, flows: Iterable[Connection]) -> dict[Connection, bytes]:
        return {flow: str(self.flows.index(flow)).encode() for flow in flows if flow not in self.forgotten}

    def _delete_entries(self, entries: Sequence[bytes]) -> int:
        gone = [self.flows[int(entry)] for entry in entries]
        self.forgotten += gone
        return len(gone)

    def _wake(self) -> None:
        self.woken += 1

    def table(self, *entries: Entry, network: NodeNetwork = NETWORK, **services: tuple[Entry, ...]) -> ServiceTable:
        """A table with one service, or several by their names."""
        self.generation += 1
        held = {"default/web": entries} if entries else {}
        held |= {f"default/{name}": given for name, given in services.items()}
        return ServiceTable(held, network, self.generation)

    def weights(self, address: str = "10.96.0.1", port: int = 80, protocol: int = TCP) -> dict[str, int] | None:
        """The real servers of a virtual server and their weights; None: there is no such virtual server."""
        found = self.ipvs.real.get(Server(6 if ":" in address else 4, protocol, address, port))
        return None if found is None else {each.address: weight for each, weight in found.items()}

    def held(self) -> dict[str, str]:
        """The addresses that are local by a route, and its source."""
        return dict(self.routes.routes)

    def members(self, name: str, family: int = 4) -> set[Element]:
        return set(self.sets.held[f"HPV-{family}-{name}"])

    def rules(self) -> int:
        """How many rules there are in chains of ours."""
        return sum(
            len(rules)
            for table in self.tables.tables.values()
            for chain, rules in table.chains.items()
            if chain.startswith("HPV-")
        )


def destination(backend: Backend) -> Destination:
    return Destination(backend.address, backend.port)


SERVER = Server(4, TCP, "10.96.0.1", 80)  # of `web`


def _first(node: Node) -> Destination:
    return next(iter(node.ipvs.real[SERVER]))


# What others change of a service at `SERVER`.
DAMAGE: dict[str, Callable[[Node], object]] = {
    "virtual server": lambda node: node.ipvs.change([Change(Verb.DELETE_SERVER, SERVER)]),
    "its scheduler": lambda node: node.ipvs.change([Change(Verb.SET_SERVER, SERVER, Config("lc"))]),
    "real server": lambda node: node.ipvs.change([Change(Verb.DELETE_DESTINATION, SERVER, None, _first(node))]),
    "its weight": lambda node: node.ipvs.change([Change(Verb.SET_DESTINATION, SERVER, None, _first(node), 0)]),
    "foreign real server": lambda node: node.ipvs.change([Change(Verb.NEW_DESTINATION, SERVER, None, destination(C))]),
    "element": lambda node: node.sets.held["HPV-4-PORTS"].clear(),
    "foreign element": lambda node: node.sets.held["HPV-4-REJECT-IN"].update({Element("10.96.0.1", 80, TCP): None}),
    "setting": lambda node: node.sysctls.update({"net/ipv4/vs/conntrack": "0"}),
}
# The kernel has another revision of rules then, and reports what becomes of a device.
REPORTED: dict[str, Callable[[Node], object]] = {
    "chain": lambda node: node.tables.restore(4, "*nat\n-F HPV-OUTPUT\nCOMMIT\n"),
    "jump": lambda node: node.tables.restore(4, "*filter\n-F INPUT\nCOMMIT\n"),
    "address": lambda node: node.device.lose("10.96.0.1"),
    "device": lambda node: node.device.lose_device(),
}
