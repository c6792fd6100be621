"""PURE. What a mode reports: its status, rows of listings, packet events, answers about a probe packet.

`-o json` prints these values as msgspec encodes them. A key is always there; null means that the mode does not know
the value, or that the value does not exist in this mode. Times are seconds unless the name says otherwise, counts are
since the dataplane was set up. docs/json.md is generated from this module.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "BackendRow", "EbpfStatus", "Ejection", "ExplainAnswer", "ExplainStep", "Fill", "FlowRow", "HealthProbes",
    "InterfaceHooks", "IptablesStatus", "IpvsStatus", "MapUsage", "NftablesStatus", "PacketEvent", "RelayStatus",
    "ServiceRow", "SocketHooks", "Status", "TrafficCounts", "TrafficRow", "Unprogrammed", "UserspaceStatus", "XdpHooks",
]  # fmt: skip


class TrafficCounts(msgspec.Struct, frozen=True, gc=False):
    """What a service port, or one of its backends, carried from and to this node's clients.

    `answered` are TCP connections that a backend accepted, `connect_ns` how many nanoseconds these took for that,
    together. Bytes are those of IP packets.
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


class ServiceRow(msgspec.Struct, kw_only=True):
    """A service port of one address family, as it is programmed.

    Attributes:
        mode: the mode that programmed it.
        name: `namespace/service:port`; null while no agent runs that knows the name.
        frontends: addresses with their port; `node port 30080` for one at every address that serves node ports.
        protocol: TCP, UDP or SCTP.
        backends: in the first backend set, which pods use.
        local_backends: in the second set, of a Local traffic policy.
        affinity: whether a client stays with its backend (ClientIP).
        when_empty: what happens to new connections while there is no backend.
        id: the mode's number for the service port.
        chosen_by: what selects the backend: `connection` (its tuple), `client` (its address), `turn` or `chance`.
        scheduler: of IPVS.
        slots: of each backend set's ring.
        proxy_ports: of the relay.
        traffic: null where the mode does not count it.
    """

    mode: str = ""
    name: str | None
    frontends: list[str]
    protocol: str
    backends: int
    local_backends: int | None = None
    affinity: bool = False
    when_empty: Literal["reject", "drop"] | None = None
    id: int | None = None
    chosen_by: str | None = None
    scheduler: str | None = None
    slots: list[int] | None = None
    proxy_ports: int | None = None
    traffic: TrafficCounts | None = None


class BackendRow(msgspec.Struct, kw_only=True):
    """A backend of a service port, as it is programmed.

    Attributes:
        mode: the mode that programmed it.
        service: the service port; null while no agent runs that knows the name.
        address: with its port.
        protocol: TCP, UDP or SCTP.
        used: whether new connections may go there.
        state: in words, for instance until when it is ejected and why.
        failures: consecutive connections that it refused or did not answer.
        conversations: that the relay carries to it now.
        service_id: the mode's number for the service port.
        id: the mode's number for the backend.
        traffic: null where the mode does not count it.
    """

    mode: str = ""
    service: str | None
    address: str
    protocol: str
    used: bool
    state: str | None = None
    failures: int | None = None
    conversations: int | None = None
    service_id: int | None = None
    id: int | None = None
    traffic: TrafficCounts | None = None


class FlowRow(msgspec.Struct, kw_only=True):
    """A connection, or a conversation of datagrams, to a service.

    Attributes:
        mode: the mode that programmed it.
        service: the service port; null while no agent runs that knows the name.
        protocol: TCP, UDP or SCTP.
        client: address and port.
        frontend: the address and port that the client sent to.
        backend: null while none is chosen.
        source: what the backend sees as its client.
        state: `opening`, `established`, `closed`; of the relay `connecting`, `established`, `unanswered`.
        hairpin: whether the backend is its own client.
        direct: whether the backend's node answers the client directly (DSR).
        fast_path: whether its packets skip the host's network stack.
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


class PacketEvent(msgspec.Struct, kw_only=True):
    """What happened to one packet, as the programs reported it.

    Attributes:
        number: events are numbered from 1 on.
        time: seconds since 1970.
        what: the kind of event; `trace` is of a packet that somebody asked to trace.
        reason: the name of the counter that it counts in.
        message: the reason in words.
        service: the service port, or the service that owns the address; null: none is known.
        protocol: TCP, UDP, SCTP, or the number of another.
        source: address and port.
        destination: address and port.
        backend: that it was sent to.
        where: the hook.
        interface: at which it came in or went out.
    """

    number: int
    time: float
    what: Literal["drop", "refuse", "note", "trace"]
    reason: str
    message: str
    service: str | None
    protocol: str
    source: str
    destination: str
    backend: str | None
    where: str
    interface: str | None


class ExplainStep(msgspec.Struct, frozen=True):
    """One decision of the programs about a probe packet."""

    step: str
    text: str


class ExplainAnswer(msgspec.Struct, kw_only=True):
    """What the loaded programs do with a probe packet, as `explain --live` prints it.

    `backends` is the chosen one, if any; `masquerade` is whether the source address becomes the node's.
    """

    name: str = ""
    verdict: Literal["dnat", "reject", "drop", "untouched"]
    backends: list[str]
    masquerade: bool
    service: str | None
    reason: str
    steps: list[ExplainStep]


class Fill(msgspec.Struct, frozen=True):
    """How much of a table is in use."""

    used: int
    limit: int


class Unprogrammed(msgspec.Struct, frozen=True):
    """A service port that could not be programmed, and why. The others are."""

    entry: str
    reason: str


class Ejection(msgspec.Struct, frozen=True):
    """A backend that keeps failing.

    `ejected` is false where too many backends of the service port fail for this one to be ejected. `seconds` are left
    until it is re-admitted; null: it is re-admitted when a health probe succeeds. `state` describes it in words.
    """

    service: str
    address: str
    ejected: bool
    seconds: float | None
    state: str


class HealthProbes(msgspec.Struct, frozen=True):
    """Backends that are probed, how many of them fail, and by how many seconds probes are late."""

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
    """Programs at interfaces: by which hook (tcx or clsact), where, and where it failed and why."""

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
    """What mode ebpf has loaded and attached.

    `pins` is the folder of its pins, `traffic_bytes` the memory that counting traffic takes (0: off), `deferred_frees`
    are ids that wait until no program can use them any more.
    """

    pins: str
    pods: InterfaceHooks
    uplinks: InterfaceHooks
    xdp: XdpHooks
    sockets: SocketHooks
    fast_path: bool
    maps: dict[str, MapUsage]
    traffic_bytes: int
    deferred_frees: int
    ejections: list[Ejection]
    probes: HealthProbes


class NftablesStatus(msgspec.Struct, kw_only=True, frozen=True):
    """The tables of mode nftables."""

    tables: list[str]


class IptablesStatus(msgspec.Struct, kw_only=True, frozen=True):
    """What mode iptables has written.

    `variant` is `nft` or `legacy`, chosen for `variant_reason`; `missing` says why a family is not served; `rules` and
    `last_rules` count rules by family and table: all of ours, and those that the last change wrote.
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
    """What mode ipvs has in the kernel. `draining` are real servers that keep connections and get no new ones."""

    scheduler: str
    device: str
    addresses: int
    virtual_servers: int
    draining: int
    variant: str
    families: list[int]
    strict_arp: bool


class RelayStatus(msgspec.Struct, kw_only=True, frozen=True):
    """The relay of mode userspace; `trouble` is what it lacks, empty: nothing."""

    pid: int
    proxy_ports: int
    connections: int
    sessions: int
    dialling: int
    trouble: str


class UserspaceStatus(msgspec.Struct, kw_only=True, frozen=True):
    """Mode userspace: its relay (null: it does not answer), and in which families clients' addresses are kept."""

    relay: RelayStatus | None
    kept_addresses: list[str]


class Status(msgspec.Struct, kw_only=True, frozen=True):
    """A mode that serves: what every mode reports, and the part of the mode that it is.

    Attributes:
        mode: its name.
        adopted: whether it took over what a former agent had programmed; null: this mode always does.
        fill: tables with a limit.
        unprogrammed: service ports that are not served.
        warnings: what this mode does differently from what is asked of it.
        audit_repairs: how often something of ours was found changed by others and repaired.
        stale_deleted: conntrack entries of datagrams that were deleted because nobody served them, by family.
        counters: events by reason.
    """

    mode: str
    adopted: bool | None = None
    fill: dict[str, Fill] = {}
    unprogrammed: list[Unprogrammed] = []
    warnings: list[str] = []
    audit_repairs: int = 0
    stale_deleted: dict[str, int] | None = None
    counters: dict[str, int] = {}
    ebpf: EbpfStatus | None = None
    nftables: NftablesStatus | None = None
    iptables: IptablesStatus | None = None
    ipvs: IpvsStatus | None = None
    userspace: UserspaceStatus | None = None
