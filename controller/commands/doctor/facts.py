"""PURE. The facts that doctor collects, without any judgement, and the findings that it reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, get_args

import msgspec

from hybrid_proxy.controller.semantics.explain import Packet, Verdict
from hybrid_proxy.controller.semantics.history import ChangeRow
from hybrid_proxy.controller.serving.protocol import AgentStatus, TableAnswer, TablePort
from hybrid_proxy.dataplane.firewall_rules import Rule, Taken
from hybrid_proxy.dataplane.reports import BackendRow, Ejection, ExplainAnswer, Fill, FlowRow, PacketEvent, ServiceRow
from hybrid_proxy.dataplane.table import Backend, Kind, family_of, host_of, socket_text

Mark = Literal["ok", "warning", "problem", "unknown"]
WORST_FIRST: tuple[Mark, ...] = ("problem", "warning", "ok")
Place = Literal["node", "pod"]
Outcome = Literal[
    "answered", "accepted", "mute", "stalled", "closed", "reset", "refused", "unreachable", "silent", "sent", "failed"
]

ANSWERED: tuple[Outcome, ...] = ("answered", "accepted")
# A connection was accepted.
REACHED: tuple[Outcome, ...] = ("answered", "accepted", "mute", "stalled", "closed", "reset")
UNANSWERED: tuple[Outcome, ...] = ("mute", "stalled")  # what was lost came after the handshake
LOST: tuple[Outcome, ...] = ("silent", "unreachable", "failed")
NO_FREE_PORT = "no free port"  # begins the detail of what failed because the client's are used up
WITHOUT_FORWARD: Final = frozenset({"userspace", "ipvs"})  # modes whose packets do not pass FORWARD
REFUSES_SENT = "this node's routing refuses what it sends"  # begins what is wrong with the way from an endpoint


class Tried(msgspec.Struct, frozen=True):
    """One real connection (or datagram), and what came of it.

    Attributes:
        place: Where the client was: the node itself, or a pod of it.
        source: The client's address.
        via: Whether a backend was asked directly, or an address of the Service.
        target: The address and port that were asked.
        protocol: TCP, UDP or SCTP.
        port: The service port (namespace/name:port) that it was tried for.
        client_port: The client's port.
        resent: How many segments of TCP were lost, and sent again.
        outcome: What came of it.
        seconds: How long that took.
        detail: The kernel's words, where it failed, or a GET's bad answer.
        sent: What was asked: `GET /`.
    """

    place: Place
    source: str
    via: Literal["backend", "service"]
    target: str
    protocol: str
    outcome: Outcome
    seconds: float = 0.0
    detail: str = ""
    port: str = ""
    resent: int = 0
    client_port: int = 0
    sent: str = ""

    @property
    def end(self) -> tuple[str, str]:
        """The address and the protocol: at the same port of another protocol another program may listen."""
        return self.target, self.protocol

    @property
    def to(self) -> str:
        """The address, with the protocol if it is not TCP, as `--to` takes it."""
        return self.target if self.protocol == "TCP" else f"{self.target}/{self.protocol}"

    @property
    def host(self) -> str:
        """The address without the port."""
        return host_of(self.target)

    @property
    def good(self) -> bool:
        """True if nothing is wrong with what came of it."""
        return self.outcome in ("answered", "accepted", "sent")


def failures(tried: Iterable[Tried]) -> list[Tried]:
    """Return those with which something is wrong."""
    return [each for each in tried if not each.good]


class PodLink(msgspec.Struct, frozen=True):
    """The link of a pod of this node, as the node's interface; 0 where an MTU is not known."""

    interface: str
    addresses: tuple[str, ...]
    mtu: int = 0  # of the node's end
    sends: int = 0  # the pod's largest packet: the MTU of its route
    drops: int = 0  # packets that both ends dropped during the connections
    full: dict[int, int] = {}  # port of a listener whose queue is full -> how many connections that takes
    unread: dict[int, tuple[int, int]] = {}  # UDP port -> bytes that wait there, datagrams dropped in the connections
    down: str = ""  # the command that sets the end up that is down
    path: str = ""  # of the pod's network namespace


class NodeFacts(msgspec.Struct, kw_only=True, frozen=True):
    """The facts of the node. `now` is in seconds since 1970."""

    now: float
    agent: AgentStatus | None = None
    no_agent: str = ""  # why none answers, and since when
    again: str = ""  # how to start it again
    refused: str = ""  # why the last start was
    unasked: bool = False  # it may run: the question failed in another way
    denied: bool = False  # it was asked without the rights of root, which it takes
    hung: tuple[str, str] | None = None  # that an agent does not answer, with its process's state, and what to do
    unread: str = ""  # why it is not known what is programmed
    starting: str = ""  # at which part of its start it is
    programmed: dict[str, int] = {}  # mode -> service ports, as its view tells
    other_proxies: tuple[str, ...] = ()
    forwarding: dict[int, bool] = {}  # family -> whether the kernel forwards
    stopped: tuple[str, ...] = ()  # interfaces of pods, and those of default routes, from which it forwards nothing
    closed: tuple[Rule, ...] = ()  # rules and policies of FORWARD that drop or reject
    counted: dict[Rule, int] = {}  # what these counted while doctor looked
    uplinks: dict[str, int] = {}  # MTUs
    links: tuple[PodLink, ...] = ()  # of pods, where the node alone is asked
    taken: tuple[Taken, ...] = ()  # by NAT of other programs
    reverse_path: dict[str, int] = {}  # interface -> rp_filter
    lost: dict[str, tuple[int, int]] = {}  # counter of the kernel -> since the boot, and while doctor looked
    conntrack: Fill | None = None
    conntrack_user: str = ""  # whose flows have most entries, where it is nearly full
    empty: tuple[str, ...] = ()  # service ports that have no backend
    ejections: tuple[Ejection, ...] = ()
    misplaced: dict[str, str] = {}  # address of an endpoint that no pod can have -> what it is
    tried: tuple[Tried, ...] = ()  # connections to backends that fail by what the agent knows, or that are `astray`
    astray: dict[str, tuple[str, str]] = {}  # as in `ServiceFacts`, of endpoints of this node
    beside: tuple[str, ...] = ()  # hooks where foreign programs run before or after ours
    events: tuple[PacketEvent, ...] = ()  # drops, rejects and failures of backends, of the last minutes
    own_failures: frozenset[str | None] = frozenset()  # backends where connections of doctor failed, and no client's
    changes: tuple[ChangeRow, ...] = ()  # of the last hour, the oldest first
    held: frozenset[str] = frozenset()  # the commands that add what addresses and routes there are
    missing: tuple[str, ...] = ()  # commands for addresses and routes that it had in that hour, or has otherwise now
    lost_routes: tuple[str, ...] = ()  # commands for those to pods whose links are up
    cut: tuple[str, ...] = ()  # interfaces that are down, by which these were
    events_unknown: str = ""  # why they could not be read

    @property
    def unprogrammed(self) -> frozenset[str]:
        """Service ports that the mode cannot program; none without an agent."""
        return frozenset(one.entry for one in self.agent.dataplane.unprogrammed) if self.agent else frozenset()

    @property
    def serving(self) -> set[str]:
        """The modes that serve: one alone, but for those that only drain."""
        return self.programmed.keys() - {left.mode for left in (self.agent.draining if self.agent else ())}

    @property
    def relays(self) -> bool:
        """True if what comes to a service is not forwarded: the node itself is the client of its backends."""
        return bool(self.programmed) and WITHOUT_FORWARD.issuperset(self.programmed)


class ServiceFacts(msgspec.Struct, kw_only=True, frozen=True):
    """The facts of the service or the packet that was asked about.

    `asked` is as it was typed, `name` the service (namespace/name) or one of its ports. `ports` are those of the
    agent's table; without an agent `rows` and `backends`, read from the kernel, must do.
    """

    asked: str
    name: str | None = None
    packet: Packet | None = None
    services: tuple[str, ...] = ()  # all that are known here, and the ports of the one that has no such port
    ignored: dict[str, str] = {}  # Services of this name that are not served, and why
    ports: tuple[TablePort, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    live: ExplainAnswer | None = None
    rows: tuple[ServiceRow, ...] = ()
    backends: tuple[BackendRow, ...] = ()
    tried: tuple[Tried, ...] = ()
    repeated: tuple[Tried, ...] = ()  # SYNs alone, most to ends to which packets looked lost
    own: tuple[str, ...] = ()  # addresses of this node
    links: tuple[PodLink, ...] = ()  # of the pods that take part
    astray: dict[str, tuple[str, str]] = {}  # address of an endpoint -> what is wrong with the way there, what to do
    listening: dict[tuple[str, str], tuple[str, ...]] = {}  # an end that refused -> ports where its pod listens
    table: TableAnswer = TableAnswer([], [], [])  # of the agent
    gone: tuple[FlowRow, ...] = ()  # flows with what is none of its backends now
    client: str = ""  # that was named
    stranger: str = ""  # this, if it is neither this node nor a pod of it
    stranger_at: str = ""  # the interface by which packets go to it
    no_pod: str = ""  # why no connection was tried from a pod
    rules: tuple[Rule, ...] = ()  # before the connections
    counted: dict[Rule, int] = {}  # of these rules, what was counted during the connections
    rules_unknown: str = ""
    events: tuple[PacketEvent, ...] = ()  # drops and rejects during the connections

    def reached(self, port: TablePort) -> list[Backend]:
        """Return the backends of a port that the packet can get to, which has a policy; of a service all."""
        chosen = self.verdicts[0].backends if self.packet and self.verdicts else ()
        return [end for end in ends_of(port) if not chosen or socket_text(end.address, end.port) in chosen]


def ends_of(port: TablePort) -> list[Backend]:
    """Return each backend of a service port once."""
    return sorted({end for each in port.backend_sets for end in each.backends}, key=lambda end: (end.address, end.port))


def places(port: TablePort, node_ports_at: Sequence[str]) -> list[tuple[str, int]]:
    """Return the addresses and ports of a service port; the ClusterIP, which nobody outside uses, comes last."""
    fronts = sorted(port.frontends, key=lambda each: each.kind is Kind.CLUSTER_IP)
    pairs = ((at, each.port) for each in fronts for at in ([each.address] if each.address else node_ports_at))
    return [pair for pair in pairs if family_of(pair[0]) == port.family]


# What explains most comes first: a missing Service makes every other question idle, and a backend that refuses does so
# whether or not the agent runs. What hits the whole node comes before what hits one pod.
Cause = Literal[
    "",
    "no-such-service", "no-such-port", "not-a-service", "object-refused", "source-not-allowed", "not-programmed",
    "left-to-node", "no-endpoint", "no-local-endpoint", "endpoint-address", "forwarding-off", "address-lost",
    "foreign-nat", "firewall", "forwarding-loses", "link-down", "mtu", "endpoint-route", "client-pod", "lossy",
    "backend-refuses", "backend-silent", "backend-unreachable", "backend-never-answers", "backend-stalls",
    "backend-closes", "kernel-differs", "other-proxy", "no-agent", "not-in-sync", "api-unreachable", "map-full",
    "conntrack-full", "service-path", "not-served", "backend-slow", "backend-gone", "backends-fail", "node-faults",
    "refused-objects", "flapping", "ejected", "configuration", "degraded", "draining", "empty-services",
    "reverse-path", "drops", "untold", "untried", "restricted",
]  # fmt: skip
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Finding(msgspec.Struct, frozen=True):
    """The result of one check.

    Attributes:
        mark: `ok`, `warning`, `problem`, or `unknown` where the check was not possible.
        subject: What was checked.
        text: What was found.
        todo: What to do about it.
        cause: The kind of problem, for programs; empty where all is well.
        certain: Whether this is known, and not only the likeliest explanation.
        hits: How many backends or clients; 0: all.
        family: The address family whose packets it concerns; null: both.
    """

    mark: Mark
    subject: str
    text: str
    todo: str = ""
    cause: Cause = ""
    certain: bool = True
    hits: int = 0
    family: int | None = None


class Diagnosis(msgspec.Struct, kw_only=True, frozen=True):
    """The report of doctor.

    Attributes:
        target: What was asked about: `node`, a Service, or a packet.
        well: Whether there is no problem; the exit code is 0 then, else 1.
        verdict: One sentence.
        cause: The kind of the problem that explains the others best; empty if there is none.
        certain: Whether the verdict is known, and not only the likeliest explanation.
        seconds: How long it took.
        findings: The result of each check.
        connections: The connections that were tried.
    """

    target: str
    well: bool
    verdict: str
    cause: Cause
    certain: bool
    seconds: float
    findings: list[Finding]
    connections: list[Tried] = []
