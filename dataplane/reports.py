"""PURE. The values that a mode reports: its status, rows of listings, packet events, answers about a probe packet.

`-o json` prints these values as msgspec encodes them. A key is always there; null means that the mode does not know the
value, or that the value does not exist in this mode. Times are seconds unless the name says otherwise, counts are since
the dataplane was set up. docs/output.md is generated from this module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Final, Literal

import msgspec

# The sysctl that has the kernel forward packets, by address family.
FORWARDING: Final = {4: "net.ipv4.ip_forward", 6: "net.ipv6.conf.all.forwarding"}
UDP_SECONDS, UDP_STREAM_SECONDS = 30, 120  # conntrack's own timeouts since Linux 5.0; kube-proxy leaves them


class TrafficCounts(msgspec.Struct, frozen=True, gc=False):
    """The traffic of a service port, or of one of its backends, from and to this node's clients.

    `flows` are all that were opened. `answered` are TCP connections that a backend accepted, `connect_ns` the sum of
    the nanoseconds that took. Bytes are those of IP packets.
    """

    flows: int
    packets: int
    bytes: int
    reply_packets: int
    reply_bytes: int
    answered: int
    connect_ns: int


class TrafficRow(msgspec.Struct, frozen=True, gc=False):
    """Traffic of a service port; with `address` (`10.0.0.1:80`) and `protocol` that of one of its backends."""

    service: str
    counts: TrafficCounts
    address: str | None = None
    protocol: str | None = None


LATELY_SECONDS: Final = 120.0


class FailureHistory(msgspec.Struct, frozen=True):
    """The connections to a backend that failed: it refused them (a reset answered the SYN), or did not answer.

    Each count begins again after ten minutes without such a failure. Times are seconds since 1970; null: never.
    """

    refused: int
    last_refused: float | None
    unanswered: int
    last_unanswered: float | None

    @property
    def last_kind(self) -> str:
        return "refused" if (self.last_refused or 0.0) >= (self.last_unanswered or 0.0) else "not answered"

    def is_over(self, now: float) -> bool:
        """True if the last failure was long ago: only a success ends a row, and perhaps no client comes any more."""
        return max(self.last_refused or 0.0, self.last_unanswered or 0.0) < now - LATELY_SECONDS

    def text(self, now: float) -> str:
        """The history for people: `3 x connection refused, last 2m5s ago`; the latest kind of failure first."""
        kinds = [
            (last, f"{count} x {name}, last {ago(now - last)}")
            for count, last, name in (
                (self.refused, self.last_refused, "connection refused"),
                (self.unanswered, self.last_unanswered, "no answer"),
            )
            if count and last is not None
        ]
        return "; ".join(text for _, text in sorted(kinds, reverse=True))


def several(count: int, noun: str, nouns: str = "") -> str:
    """Returns `1 backend`, `3 backends`; `nouns` is the plural of nouns that end otherwise."""
    return f"{count} {noun if count == 1 else nouns or f'{noun}s'}"


def verb(count: int, one: str, several: str) -> str:
    """Returns the form of a verb for so many subjects."""
    return one if count == 1 else several


def some(items: Collection[str], separator: str = ", ", shown: int = 3) -> str:
    """Returns the first ones, and how many more there are."""
    left = len(items) - shown
    return separator.join(islice(items, shown)) + (f" and {left} more" if left > 0 else "")


def shortened(text: str, width: int = 160) -> str:
    """Returns the text; of one that is longer than `width`, two lines of a terminal, its beginning and an ellipsis."""
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def clock(moment: float, now: float | None = None) -> str:
    """Formats a time, in seconds since 1970, as one of the day; with the date if it was not within a day of `now`."""
    form = "%H:%M:%S UTC" if now is None or abs(now - moment) < 86_400 else "%Y-%m-%d %H:%M:%S UTC"
    return f"{datetime.fromtimestamp(moment, UTC):{form}}"


def ago(seconds: float) -> str:
    """Formats the age of an event for people: `2m5s ago`."""
    return f"{age(seconds)} ago"


def age(seconds: float) -> str:
    """Formats a duration: `3d4h`, `2h5m`, `3m12s`, `8s`."""
    whole = max(0, int(seconds))
    for first, second, size, part in (("d", "h", 86_400, 3_600), ("h", "m", 3_600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size}{first}{whole % size // part}{second}"
    return f"{whole}s"


class ServiceRow(msgspec.Struct, kw_only=True):
    """A service port of one address family, as it is programmed.

    Attributes:
        mode: The mode that programmed it.
        name: `namespace/service:port`; null if no agent that knows the name runs.
        frontends: The addresses with their port, or `node port 30080` where every address of the node serves it.
        protocol: TCP, UDP or SCTP.
        backends: How many backends pods are sent to.
        local_backends: How many are on this node.
        affinity: Whether a client stays with its backend (session affinity ClientIP).
        ejected: How many further backends are ejected.
        failing: How many failed at their last connection, ejected ones included.
        when_empty: What happens to new connections while there is no backend.
        without_backend: The clients that find no backend on this node, as in Lack; null: none, or no agent knows.
        reason: Why; null as before.
        id: The number of the service port in the maps.
        chosen_by: What selects the backend: `connection` (its tuple), `client` (its address), `round-robin`, `random`,
            `fewest flows`.
        scheduler: The IPVS scheduler.
        slots: The size of each backend set's slot range.
        proxy_ports: How many ports the relay listens on for it.
        traffic: Its traffic.
        first_packets: First packets of backends, by the longest time of their step of the histogram, in nanoseconds.
    """

    mode: str = ""
    name: str | None
    frontends: list[str]
    protocol: str
    backends: int
    local_backends: int | None = None
    affinity: bool = False
    ejected: int | None = None
    failing: int | None = None
    when_empty: Literal["reject", "drop"] | None = None
    without_backend: Literal["all", "outside", "inside"] | None = None
    reason: str | None = None
    id: int | None = None
    chosen_by: str | None = None
    scheduler: str | None = None
    slots: list[int] | None = None
    proxy_ports: int | None = None
    traffic: TrafficCounts | None = None
    first_packets: dict[int, int] | None = None


class BackendRow(msgspec.Struct, kw_only=True):
    """A backend of a service port, as it is programmed.

    Attributes:
        mode: The mode that programmed it.
        service: The service port.
        address: The address with the port.
        node: Its node.
        protocol: TCP, UDP or SCTP.
        used: Whether new connections may go there.
        state: A message; for an ejected backend it says until when, and why.
        failures: Consecutive connections that the backend refused or did not answer.
        history: Failed connections; null: unknown, or none failed.
        conversations: Connections and datagram sessions of the relay to it.
        service_id: The number of the service port in the maps.
        id: The number of the backend in the maps.
        traffic: Its traffic.
    """

    mode: str = ""
    service: str | None
    address: str
    node: str | None = None
    protocol: str
    used: bool
    state: str | None = None
    failures: int | None = None
    history: FailureHistory | None = None
    conversations: int | None = None
    service_id: int | None = None
    id: int | None = None
    traffic: TrafficCounts | None = None


class FlowRow(msgspec.Struct, kw_only=True):
    """A connection, or a conversation of datagrams, to a service.

    Attributes:
        mode: The mode that programmed it.
        service: The service port.
        protocol: TCP, UDP or SCTP.
        client: The address and port of the client.
        frontend: The address and port that the client sent to.
        backend: The address and port of the backend; null while none is chosen.
        source: The client as the backend sees it.
        state: `opening`, of datagrams `short` (unanswered after two seconds); `established`, `half-closed`, `closed`;
            from the relay also `connecting`, `unanswered`.
        hairpin: Whether the backend is its own client.
        direct: Whether the backend's node answers the client directly (DSR).
        fast_path: Whether its packets bypass the host's network stack.
        idle: Seconds since its last packet, rounded; for conntrack from the remaining timeout.
        gone: Whether that is none of the service's backends now: removed, or not ready.
    """

    mode: str = ""
    service: str | None
    protocol: str
    client: str
    frontend: str
    backend: str | None
    source: str
    state: str
    hairpin: bool | None = None
    direct: bool | None = None
    fast_path: bool | None = None
    idle: int | None = None
    gone: bool | None = None


class PacketEvent(msgspec.Struct, kw_only=True):
    """One packet's fate, as the programs reported it.

    Attributes:
        mode: The mode whose programs reported it.
        number: Events are numbered from 1.
        time: Seconds since 1970.
        what: The kind of event. `fail`: a backend failed. `trace`: it was traced on request.
        reason: The name of its counter.
        message: The reason as text.
        service: The service port, or the service that owns the address.
        protocol: TCP, UDP, SCTP, or the number of another protocol.
        source: The source address and port; of a failure, the client's.
        destination: The destination address and port.
        backend: The backend that the packet was sent to.
        where: The hook; `reply, from a pod` if from a reply.
        interface: The incoming or outgoing interface.
        flags: TCP flags, such as `SYN` or `RST ACK`; null for other protocols and sockets.
        by_doctor: Whether doctor's connection caused it.
    """

    mode: str = ""
    number: int
    time: float
    what: Literal["drop", "refuse", "fail", "note", "trace"]
    reason: str
    message: str
    service: str | None
    protocol: str
    source: str
    destination: str
    backend: str | None
    where: str
    interface: str | None
    flags: str | None = None
    by_doctor: bool = False


SENT_ON = "sent on by the program"  # it bypasses the stack: words of an explanation


class ExplainStep(msgspec.Struct, frozen=True):
    """A decision of the programs about a probe packet; `internal` ones need knowledge of the programs."""

    step: str
    text: str
    internal: bool = False


class ExplainAnswer(msgspec.Struct, kw_only=True):
    """The decisions of the loaded programs about a probe packet, as `explain --live` prints them.

    `backends` is the chosen one, if any; `masquerade`: the source address becomes the node's. `mode` is the one that
    serves the packet: one that drains, if it knows the flow.
    """

    mode: str = ""

    name: str = ""
    verdict: Literal["dnat", "reject", "drop", "untouched"]
    backends: list[str]
    masquerade: bool
    service: str | None
    reason: str
    steps: list[ExplainStep]


class StartPart(msgspec.Struct, frozen=True):
    """A part of the agent's start. Several threads work at once, so parts overlap.

    Attributes:
        name: What was done.
        began: Seconds after the process began.
        seconds: Its duration.
        processor: Seconds of a processor that the thread used; null if not one thread did it.
    """

    name: str
    began: float
    seconds: float
    processor: float | None = None


def start_lines(parts: Iterable[StartPart]) -> Iterator[str]:
    """Formats the parts of a start for people, in the order in which they began."""
    yield f"{'PART':<28}{'BEGAN':>8}{'TOOK':>8}{'PROCESSOR':>11}   (seconds)"
    for part in sorted(parts, key=lambda part: part.began):
        processor = "-" if part.processor is None else f"{part.processor:.3f}"
        yield f"{part.name:<28}{part.began:>8.3f}{part.seconds:>8.3f}{processor:>11}"


class Fill(msgspec.Struct, frozen=True):
    """The use of a table."""

    used: int
    limit: int

    @property
    def full(self) -> bool:
        """True if it has no room: a full conntrack lets go of an entry at times."""
        return self.used >= self.limit - self.limit // 2000


class Unprogrammed(msgspec.Struct, frozen=True):
    """A service port that could not be programmed, and why."""

    entry: str
    reason: str


def unserved(rows: Iterable[Unprogrammed]) -> list[str]:
    """Returns a line for each reason: service ports, and why they are not programmed."""
    found: dict[str, list[str]] = {}
    for entry, reason in sorted({(row.entry, row.reason) for row in rows}):
        found.setdefault(reason, []).append(entry)
    return [f"{some(those)}: {reason}" for reason, those in found.items()]


class Ejection(msgspec.Struct, frozen=True):
    """A backend that keeps failing.

    `ejected` is false where too many backends of the service port fail for this one to be ejected. `seconds` are left
    until it is re-admitted; null: a health probe must succeed first. `state` describes it.
    """

    service: str
    address: str
    ejected: bool
    seconds: float | None
    state: str


class HealthProbes(msgspec.Struct, frozen=True):
    """Health probes: backends that are probed, how many of them fail, and the greatest delay of a probe."""

    targets: int
    down: int
    late_seconds: float


class MapUsage(msgspec.Struct, frozen=True):
    """A BPF map: entries, bytes of kernel memory; of those that grow, entries in use and up to how many it may grow."""

    entries: int
    bytes: int
    used: int | None = None
    bound: int | None = None


class InterfaceHooks(msgspec.Struct, frozen=True):
    """Programs at interfaces: the kind of hooks (tcx, clsact, or "tcx and clsact"), the interfaces, and failures."""

    kind: str
    interfaces: list[str]
    failed: dict[str, str]


class XdpHooks(msgspec.Struct, frozen=True):
    """XDP programs: the setting, the interfaces that have one, and why others are left to tc."""

    setting: str
    interfaces: list[str]
    left_to_tc: dict[str, str]


class SocketHooks(msgspec.Struct, frozen=True):
    """Programs for the node's own sockets: at which cgroup; null: not served, for `reason`."""

    cgroup: str | None
    reason: str


class EbpfStatus(msgspec.Struct, kw_only=True, frozen=True):
    """The loaded and attached objects of mode ebpf.

    `pins` is the folder of its pins, `fast_path` is `established`, `always` or `off` at the moment, for
    `fast_path_reason`, `traffic_bytes` the memory for counting traffic (0: off), `deferred_frees` are ids that wait
    until no program can use them any more.
    """

    pins: str
    pods: InterfaceHooks
    uplinks: InterfaceHooks
    xdp: XdpHooks
    sockets: SocketHooks
    fast_path: str
    fast_path_reason: str
    maps: dict[str, MapUsage]
    traffic_bytes: int
    deferred_frees: int
    ejections: list[Ejection]
    probes: HealthProbes


class NftablesStatus(msgspec.Struct, kw_only=True, frozen=True):
    """The tables of mode nftables."""

    tables: list[str]


class IptablesStatus(msgspec.Struct, kw_only=True, frozen=True):
    """The chains and rules of mode iptables.

    `variant` is `nft` or `legacy`, chosen for `variant_reason`; `missing` says why a family is not served; `rules` and
    `last_rules` count rules by family and table: all own ones, and those that the last change wrote.
    """

    variant: str
    variant_reason: str
    families: list[int]
    missing: dict[str, str]
    chains: int
    rules: dict[str, dict[str, int]]
    last_rules: dict[str, dict[str, int]]
    kernel_reports_drift: bool


class IpvsStatus(msgspec.Struct, kw_only=True, frozen=True):
    """The kernel objects of mode ipvs. `draining` are real servers that keep connections and get no new ones."""

    scheduler: str
    device: str
    addresses: int
    virtual_servers: int
    draining: int
    variant: str
    families: list[int]
    strict_arp: bool


class RelayStatus(msgspec.Struct, kw_only=True, frozen=True):
    """The relay of mode userspace; `trouble` says what it lacks (empty: nothing)."""

    pid: int
    proxy_ports: int
    connections: int
    sessions: int
    dialling: int
    trouble: str


class UserspaceStatus(msgspec.Struct, kw_only=True, frozen=True):
    """Mode userspace: its relay (null: it does not answer), and the families that keep clients' addresses."""

    relay: RelayStatus | None
    kept_addresses: list[str]


class Status(msgspec.Struct, kw_only=True, frozen=True):
    """A mode that serves: what every mode reports, and the part of that mode.

    Attributes:
        mode: The name of the mode.
        adopted: Whether it adopted what an earlier agent had programmed; null in a mode that always does.
        fill: Tables that have a limit.
        unprogrammed: Service ports that are not served.
        failing: Service ports of which every backend of a family is failing or ejected.
        failing_in: Of those with a family whose backends do not all fail, the other one: 4 or 6.
        failing_backends: Backends of other service ports that failed twice in a row, lately.
        slow_starts: Backends in slow start.
        warnings: What this mode does differently from the configuration.
        audit_repairs: Repairs of foreign changes.
        stale_deleted: Conntrack entries that were deleted because their backend does not serve, by family.
        counters: Events by reason.
    """

    mode: str
    adopted: bool | None = None
    fill: dict[str, Fill] = {}
    unprogrammed: list[Unprogrammed] = []
    failing: list[str] = []
    failing_in: dict[str, int] = {}
    failing_backends: list[Ejection] = []
    slow_starts: int = 0
    warnings: list[str] = []
    audit_repairs: int = 0
    stale_deleted: dict[str, int] | None = None
    counters: dict[str, int] = {}
    ebpf: EbpfStatus | None = None
    nftables: NftablesStatus | None = None
    iptables: IptablesStatus | None = None
    ipvs: IpvsStatus | None = None
    userspace: UserspaceStatus | None = None
