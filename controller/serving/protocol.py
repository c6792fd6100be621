"""PURE. The messages of the admin socket: requests, answers, and the status of the agent.

Both sides are tagged unions in JSON: a request names its `command`, an answer its kind. `status -o json` prints
`AgentStatus`; the rules of `dataplane.reports` hold for it, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from hybrid_proxy.controller.kubernetes.model import Endpoint, KindState, Problem
from hybrid_proxy.controller.semantics.explain import Packet, Verdict
from hybrid_proxy.controller.semantics.history import ChangeRow
from hybrid_proxy.controller.semantics.lacks import Lack
from hybrid_proxy.dataplane import reports
from hybrid_proxy.dataplane.firewall_rules import Taken
from hybrid_proxy.dataplane.mode import ProbePacket
from hybrid_proxy.dataplane.table import BackendSet, Frontend

SHOWN: Final = 3  # names in a sentence
NO_EVENT: Final = 1 << 62  # no event has a larger number

# The status of an agent


class Switch(msgspec.Struct, frozen=True):
    """A `switch` in effect: the configured mode, the one instead, and since when."""

    configured: str
    mode: str
    time: float


class ModeStatus(msgspec.Struct, frozen=True):
    """The mode asked for and the one that serves; `reason` says why they differ."""

    requested: str
    effective: str
    reason: str = ""
    switched: Switch | None = None

    @property
    def degraded(self) -> bool:
        """True if another mode serves than the configured one; `auto` means the first mode that works."""
        return bool(self.reason) and self.requested != "auto"


OPEN: Final = "is open", "are open"


def described(flows: Mapping[str, int], one: str = "", more: str = "") -> str:
    """Formats counts of flows for people: `12 TCP and 3 UDP flows`; a verb follows, for one and for several."""
    counts = " and ".join(f"{count} {name}" for name, count in sorted(flows.items()) if count) or "no"
    return f"{counts} {f'flow {one}' if sum(flows.values()) == 1 else f'flows {more}'}".rstrip()


def still_open(rows: Sequence[reports.FlowRow], udp_seconds: int) -> str:
    """Describes open flows, and how long they may take: `2 TCP flows are open: 2 of default/web:http; ...`.

    UDP flows end by themselves, `udp_seconds` after their last datagram; others when their ends close them.
    """
    by_service = Counter(row.service or row.frontend for row in rows).most_common()
    named = [f"{count} of {name}" for name, count in by_service[:SHOWN]]
    if others := sum(count for _, count in by_service[SHOWN:]):
        named.append(f"{others} of others")
    text = f"{described(Counter(row.protocol for row in rows), *OPEN)}: {', '.join(named)}"
    known = [row for row in rows if row.idle is not None]
    if known:
        row = max(known, key=lambda row: row.idle or 0)
        text += f"; idle for longest, {row.idle} s: {row.protocol} {row.client} -> {row.frontend}"
    if datagrams := [row.idle or 0 for row in known if row.protocol == "UDP"]:
        last = max(0, udp_seconds - min(datagrams))
        text += f"; UDP flows end {udp_seconds} s after their last datagram, the last in {last} s if all are silent"
    return text


class DrainingMode(msgspec.Struct, frozen=True):
    """A former mode that serves its open flows.

    Attributes:
        mode: Its name.
        flows: Open flows by protocol.
        seconds: For how long it has drained; every flow is older.
        counted: Whether its flows were counted yet.
        counters: Events by reason, as of the mode that serves.
        quiet: The open flows that were idle for longest, at most three, unless there are many.
    """

    mode: str
    flows: dict[str, int]
    seconds: float
    counters: dict[str, int] = {}
    quiet: list[reports.FlowRow] = []
    counted: bool = True

    @property
    def text(self) -> str:
        """Describes the open flows in a sentence."""
        uncounted = "its flows are not counted yet (`status` has them in two seconds)"
        return described(self.flows, *OPEN) if self.counted else uncounted


class QueueStatus(msgspec.Struct, frozen=True):
    """The objects whose changes are not applied yet: now, and at most so far."""

    now: int
    most: int


class SourceStatus(msgspec.Struct, frozen=True):
    """The source of objects, and whether they can be read."""

    description: str
    healthy: bool
    message: str
    kinds: list[KindState]


class ConfigurationStatus(msgspec.Struct, frozen=True):
    """The configuration in effect.

    `file` is null where flags alone configure; `waiting` are fields that take effect at the next start, `refused` is
    why the newest content of the file is not used. With a `service_proxy_name` the agent serves only Services that name
    it, alongside another proxy.
    """

    file: str | None
    warnings: list[str]
    waiting: list[str]
    refused: str
    service_proxy_name: str = ""


class HealthChecks(msgspec.Struct, frozen=True):
    """Health-check node ports: how many are served, why others are not, and pages of the agent that are not served."""

    served: int
    failed: dict[str, str]
    listeners: dict[str, str]


class ChangeLatency(msgspec.Struct, frozen=True):
    """Seconds from a change's arrival to its effect in the kernel, of the last thousand changes."""

    count: int
    p50: float | None
    p99: float | None
    last: float | None


class ApiRequests(msgspec.Struct, frozen=True):
    """The number of requests to the API server with this answer; `code` is `<error>` where none came.

    `within`: how many of them were answered within each range of the histogram; `seconds`: what all took together.
    """

    method: str
    host: str
    code: str
    count: int
    within: list[int] = []
    seconds: float = 0.0


class AgentStatus(msgspec.Struct, kw_only=True, frozen=True):
    """A running agent.

    Attributes:
        agent: true; false is in NoAgentStatus.
        version: The version of the agent.
        pid: Its process.
        node: The name of the node.
        mode: The mode that serves, and the configured one.
        draining: Former modes that still have flows.
        leaving: Whether load balancers should send nothing to this node (`hybrid-proxy drain`).
        synced: Whether everything known is programmed and in place.
        starting: What the agent waits for until its first table is programmed; empty after that.
        former: Until then, what the former agent left in place.
        drift: Foreign changes that the agent could not repair yet.
        generation: The number of the service table; each change makes another table.
        services: How many Services the table has.
        observed: How many events the source has delivered.
        waiting: The queue of changes that are not applied yet.
        source: The source of objects, and whether they can be read.
        problems: Refused objects, whose last good version stays; with `in_use`: used without a part.
        node_faults: What is missing or wrong in the Node object and the ServiceCIDRs, and what serves instead.
        lost_routes: Commands that restore default routes.
        lost_addresses: Commands that restore addresses.
        cut: Uplinks that are down.
        left_to_node: ClusterIPs that an interface of this node has (NodeLocal DNSCache), each with its Service.
        down: Interfaces of pods, down at either end.
        not_forwarding: Address families (4, 6) of Services, of which the kernel forwards no packets.
        unheard: Those at whose ports nothing listens.
        without_backend: Service ports that have no backend on this node.
        conflicts: By service, the frontends that it lost, and who has each.
        refused_external_ips: By service, which of its external IPs are not served, and why.
        configuration: The configuration in effect.
        former_modes: Modes that drain, go or come.
        other_proxies: Warnings about other proxies on this node.
        left_took: Connections that rules which a kube-proxy left took since this agent serves; null: unknown.
        foreign_nat: NAT of other programs for addresses of Services.
        health_checks: The health-check node ports of load balancers, and the agent's own pages.
        conntrack: The kernel's table of flows; null where it is not loaded.
        requests: Requests to the API server by their answer.
        certificate_expires: When the kubeconfig's certificate expires; null: there is none.
        repairs: What other programs changed in the last hour, and the agent repaired.
        error: Why the last sync failed; empty if it succeeded.
        ready_seconds: The age of the process at its first programmed table; null until then.
        last_sync_seconds: The duration of the last sync.
        change_seconds: The latency of the last changes.
        memory_bytes: The resident memory of the agent.
        uptime_seconds: The age of the process.
        start_parts: The parts of the start.
        start_processor_seconds: Processor time of the start, of all threads; null until it is over.
        dataplane: The mode's report.
    """

    agent: bool = True
    version: str
    pid: int
    node: str
    mode: ModeStatus
    draining: list[DrainingMode]
    leaving: bool
    synced: bool
    starting: str = ""
    former: NoAgentStatus | None = None
    drift: list[str]
    generation: int
    services: int
    observed: int
    waiting: QueueStatus
    source: SourceStatus
    problems: list[Problem]
    node_faults: list[str] = []
    lost_routes: list[str] = []
    lost_addresses: list[str] = []
    cut: list[str] = []
    left_to_node: dict[str, str] = {}
    unheard: list[str] = []
    down: list[str] = []
    not_forwarding: list[int] = []
    without_backend: list[Lack] = []
    conflicts: dict[str, dict[str, str]]
    refused_external_ips: dict[str, list[str]] = {}
    configuration: ConfigurationStatus
    former_modes: list[str] = []
    other_proxies: list[str]
    left_took: int | None = None
    foreign_nat: list[Taken] = []
    health_checks: HealthChecks
    conntrack: reports.Fill | None = None
    requests: list[ApiRequests]
    certificate_expires: float | None = None
    repairs: list[ChangeRow] = []
    error: str
    ready_seconds: float | None
    last_sync_seconds: float
    change_seconds: ChangeLatency
    memory_bytes: int
    uptime_seconds: float
    start_parts: list[reports.StartPart] = []
    start_processor_seconds: float | None = None
    dataplane: reports.Status


class LeftBehind(msgspec.Struct, frozen=True):
    """The objects of a mode while no agent runs."""

    place: str
    service_ports: int


class Gone(msgspec.Struct, frozen=True):
    """An agent that does not answer: since when, and why, as far as that can be known.

    Attributes:
        pid: Its process.
        started: When it started, in seconds since 1970.
        since: When it ended, or, unless `exact`, its last sign of life, to a second.
        exact: Whether it wrote down when it ended.
        why: A message.
        again: How to start it again.
    """

    pid: int
    started: float
    since: float
    exact: bool
    why: str
    again: str = ""

    def text(self, now: float) -> str:
        """Formats it for people: `agent 4711 is gone since 10:33:44 UTC, 2 min ago: SIGTERM`."""
        when = f"{'' if self.exact else 'about '}{reports.clock(self.since, now)}, {reports.ago(now - self.since)}"
        return f"agent {self.pid} is gone since {when}: {self.why}"


class NoAgentStatus(msgspec.Struct, kw_only=True, frozen=True):
    """No agent answers, for `reason`; `programmed` is by mode what serves as last programmed.

    `gone` is the former agent, null if nothing is known of one. `starting` is the present work of an agent that starts,
    empty: there is none. `error`, `unprogrammed` and `problems` are the former agent's: why its last sync failed,
    service ports that are not served, objects that were refused.
    """

    agent: bool = False
    reason: str
    programmed: dict[str, LeftBehind]
    starting: str = ""
    gone: Gone | None = None
    error: str = ""
    unprogrammed: list[reports.Unprogrammed] = []
    problems: list[Problem] = []


# The service table, as far as commands need it


class TablePort(msgspec.Struct, frozen=True):
    """A `dataplane.table.Entry`, without what only a mode needs; with the path of its health probes."""

    name: str
    family: int
    protocol: str
    frontends: tuple[Frontend, ...]
    backend_sets: tuple[BackendSet, ...]
    probe_path: str | None = None
    affinity_seconds: int = 0


# Requests


class GetStatus(msgspec.Struct, frozen=True, tag_field="command", tag="status"):
    """Requests the whole status."""


class GetNames(msgspec.Struct, frozen=True, tag_field="command", tag="names"):
    """Requests what is needed to read and name what is programmed, and with `endpoints` what slices say of these."""

    endpoints: bool = False


class GetTraffic(msgspec.Struct, frozen=True, tag_field="command", tag="traffic"):
    """Requests traffic of services, or of backends where the agent exports these."""


class GetTable(msgspec.Struct, frozen=True, tag_field="command", tag="table"):
    """Requests the service table's data on a service (namespace/name) or one of its ports, and on packets."""

    service: str | None
    packets: list[Packet]


class RunExplain(msgspec.Struct, frozen=True, tag_field="command", tag="explain"):
    """Requests the loaded programs' decisions on each packet."""

    packets: list[ProbePacket]


class FindService(msgspec.Struct, frozen=True, tag_field="command", tag="find"):
    """Requests the destination of packets to a service; the fields are those of `destination_of`."""

    service: str
    port: str
    protocol: str
    family: int


class FindIgnored(msgspec.Struct, frozen=True, tag_field="command", tag="ignored"):
    """Requests the reason why a known Service (namespace/name, or a name in any namespace) is not served."""

    service: str


class GetEvents(msgspec.Struct, frozen=True, tag_field="command", tag="events"):
    """Requests packet events with larger numbers; those of its `own` ends are doctor's. Former agents' go up to 0.

    For `spares` seconds from now no failure counts towards ejection; with 0 they count again.
    """

    after: int
    own: frozenset[str] = frozenset()
    spares: float | None = None


class SetTrace(msgspec.Struct, frozen=True, tag_field="command", tag="trace"):
    """Requests tracing of packets of a service, from or to a client, for so many seconds."""

    service: str | None
    client: str | None
    seconds: float


class SwitchMode(msgspec.Struct, frozen=True, tag_field="command", tag="switch"):
    """Requests another mode until the next start of the agent; null: the one before the last switch.

    With `dry_run` nothing changes: the answer says whether the mode could serve.
    """

    mode: str | None
    dry_run: bool = False


class DrainNode(msgspec.Struct, frozen=True, tag_field="command", tag="drain"):
    """Requests that load balancers send nothing more to this node, or, with `on` false, send again."""

    on: bool


LoopRequest = (  # answered by the agent's loop
    GetStatus | GetNames | GetTraffic | GetTable | RunExplain | FindService | GetEvents | SetTrace | SwitchMode
    | DrainNode
)  # fmt: skip
Request = LoopRequest | FindIgnored


def answer_seconds(request: Request) -> float:
    """Returns how long a command waits for the answer: longer where programs are loaded for it."""
    return 60.0 if isinstance(request, SwitchMode) else 10.0


# Answers


class StatusAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="status"):
    """Answers `GetStatus`."""

    status: AgentStatus


class NamesAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="names"):
    """Answers `GetNames`: modes, the folder of pins, names by number, failing backends.

    `draining` are the modes that drain, `without_backend` the service ports that have none on this node. `left_to_node`
    is as in `AgentStatus`, `node_ports_at` as in `TableAnswer`; `endpoints` has those of each Service, `misplaced` says
    whose addresses no pod can have, `problems` has refused objects, `unprogrammed` lines about service ports.
    """

    mode: str
    draining: list[str]
    pin_root: str | None
    names: dict[int, str]
    ejections: list[reports.Ejection]
    without_backend: list[Lack] = []
    left_to_node: dict[str, str] = {}
    node_ports_at: list[str] = []
    endpoints: dict[str, list[Endpoint]] = {}
    misplaced: dict[str, str] = {}
    problems: list[Problem] = []
    unprogrammed: list[str] = []


class TrafficAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="traffic"):
    """Answers `GetTraffic`. `first_packets` are as `dataplane.mode.Programmer.first_packets` has them."""

    rows: list[reports.TrafficRow]
    first_packets: dict[str, list[int]] = {}


class TableAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="table"):
    """Answers `GetTable`.

    `ports` are those of the requested service and of services that packets belong to; `services` is every service of
    the table, where the requested one has no such port or is not there. `unready` are addresses of its endpoints that
    are not ready, `elsewhere` of those that are ready on other nodes, with the node; `selector` is null if it is not
    known. `node_ports_at` are the addresses of this node that serve node ports. `hint` says what the number is that
    is no port of it.
    """

    ports: list[TablePort]
    verdicts: list[Verdict]
    services: list[str]
    unready: list[str] = []
    elsewhere: dict[str, str] = {}
    selector: str | None = None
    node_ports_at: list[str] = []
    hint: str = ""


class ExplainAnswers(msgspec.Struct, frozen=True, tag_field="answer", tag="explain"):
    """Answers `RunExplain`, in the order of the packets."""

    answers: list[reports.ExplainAnswer]


class FoundAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="found"):
    """Answers `FindService`; the protocol's number is IANA's, `left` as in `Destination`."""

    address: str
    port: int
    protocol: int
    left: str = ""


class IgnoredAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="ignored"):
    """Answers `FindIgnored`: Services of this name, and why each is not served."""

    services: dict[str, str]


class EventsAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="events"):
    """Answers `GetEvents`: the events, the oldest first, and the number of the latest.

    `mode` reports them; `silent` are the other present modes, which report nothing.
    """

    events: list[reports.PacketEvent]
    last: int
    mode: str
    silent: list[str]


class TraceAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="trace"):
    """Answers `SetTrace`: it is on."""


class StartingAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="starting"):
    """Answers any request: the agent cannot answer it yet, because it is at `part` of its start."""

    pid: int
    part: str
    seconds: float


class SwitchAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="switch"):
    """Answers `SwitchMode`: the former mode, and the one that is open now and programs its first table.

    `missing` answers a `dry_run`: why the mode could not serve; empty: it could.
    """

    before: str
    mode: str
    missing: str = ""


class DrainAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="drain"):
    """Answers `DrainNode`: the addresses at which clients beyond the cluster find Services on this node."""

    addresses: list[str]


class BusyAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="busy"):
    """Answers a request of the loop: there is no answer in time. What has not `begun` by then does not happen."""

    begun: bool
    seconds: float

    @property
    def text(self) -> str:
        if self.begun:
            return f"it has worked on this for more than {self.seconds:g} s, and goes on"
        return f"it did not begin with this within {self.seconds:g} s, and won't"


class FailedAnswer(msgspec.Struct, frozen=True, tag_field="answer", tag="failed"):
    """Answers any request: it failed, and why."""

    failed: str


Answer = (
    StatusAnswer | NamesAnswer | TrafficAnswer | TableAnswer | ExplainAnswers | FoundAnswer | IgnoredAnswer
    | EventsAnswer | TraceAnswer | StartingAnswer | SwitchAnswer | DrainAnswer | BusyAnswer | FailedAnswer
)  # fmt: skip

REQUESTS: Final = msgspec.json.Decoder(Request)
ANSWERS: Final = msgspec.json.Decoder(Answer)
