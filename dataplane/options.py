"""PURE. The settings of modes: defined here, embedded in the documents of a configuration, taken by `Mode.open`.

Each field of a section has its description, flag, check and default in one place, see `dataplane.settings`.
"""

# Annotations are values here, not text: msgspec would evaluate each of them again whenever a command starts.
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Final

import msgspec

from hybrid_proxy.dataplane.balancing import SCHEDULERS
from hybrid_proxy.dataplane.reports import UDP_SECONDS, UDP_STREAM_SECONDS
from hybrid_proxy.dataplane.settings import (
    BOOLEAN,
    CIDRS,
    EBPF_MODE,
    FAILING,
    FOLDER,
    IPVS_MODE,
    PATTERNS,
    PORTS,
    REOPENS,
    RESTART,
    ROOM,
    Section,
    choice,
    define,
    integer,
    seconds,
    whole_seconds,
)

# The schedulers of net/netfilter/ipvs; if a kernel lacks one, mode ipvs reports it when it is used.
FIRST_SIZES: Final = {"services": 1 << 10, "backends": 1 << 13, "slots": 1 << 13}  # entries that maps begin with
_NOT_IN_PODS: Final = (
    "pods' sockets are not served, because that is slower than translating their packets, and the pod would count as "
    "the node for session affinity and source ranges"
)


# The annotations of settings that one mode alone has.
of_ipvs: Final = partial(define, effect=REOPENS, group=IPVS_MODE, mode="ipvs")
of_nftables: Final = partial(define, effect=REOPENS, mode="nftables")
_ebpf: Final = partial(define, effect=REOPENS, group=EBPF_MODE, mode="ebpf")
_failing: Final = partial(_ebpf, group=FAILING)
_room: Final = partial(_ebpf, effect=RESTART, group=ROOM)


# Every setting has one shape: name and type, description, form, flag and effect, default.
# fmt: off
class FailoverOptions(Section, frozen=True):
    """Backends that fail (mode ebpf)."""

    failures: Annotated[int, _failing(
        "Eject a backend for a while after this many consecutive connections that it did not answer or refused; "
        "0: never", integer(0, 1_000_000), "failover-failures"
    )] = 3
    percentage: Annotated[int, _failing(
        "Eject a backend for a while when this percentage of its connections fails within ten seconds, and twice that "
        "of the other backends; 0: never", integer(0, 100), "failover-percentage"
    )] = 20
    connections: Annotated[int, _failing(
        "A backend with fewer connections in that time is not ejected for their percentage", integer(1, 1_000_000),
        "failover-connections"
    )] = 20


class ProbeOptions(Section, frozen=True):
    """Probes of backends of services with annotation hybrid-proxy.io/probe (mode ebpf)."""

    interval: Annotated[float, _failing(
        "Time between two health probes of a backend, of services with the annotation hybrid-proxy.io/probe; at "
        "least 100ms", seconds(0.1), "probe-interval"
    )] = 5.0
    timeout: Annotated[float, _failing(
        "How long a health probe waits for its answer; at least 10ms", seconds(0.01), "probe-timeout"
    )] = 1.0
    failures: Annotated[int, _failing(
        "Eject a backend after this many failed health probes in a row, until one succeeds", integer(1, 1000),
        "probe-failures"
    )] = 3


class Limits(Section, frozen=True):
    """Room in the maps (mode ebpf)."""

    services: Annotated[int, _room(
        f"Maps grow up to this many service ports; at least {FIRST_SIZES['services']:,}, with which they begin",
        integer(FIRST_SIZES["services"], 1 << 24), "max-services"
    )] = 65_536
    backends: Annotated[int, _room(
        f"Maps grow up to this many backends; at least {FIRST_SIZES['backends']:,}, with which they begin",
        integer(FIRST_SIZES["backends"], 1 << 24), "max-backends"
    )] = 1 << 20
    slots: Annotated[int, _room(
        f"Maps grow up to this many slots, the places in backend sets; at least {FIRST_SIZES['slots']:,}, with which "
        "they begin",
        integer(FIRST_SIZES["slots"], 1 << 28), "max-slots"
    )] = 1 << 22
    ring: Annotated[int, _room(
        "Slots that Maglev, source hash, weights and least connections may use for one service port; use the "
        "same value on all nodes", integer(1, 65_521), "max-ring"
    )] = 16_381
    flows: Annotated[int, _room(
        "Entries of the tables of flows, two for each flow, in each address family; any number is taken. 0: by the "
        "node's memory, one for each 48 KiB, a power of two from 65,536 to 1,048,576", integer(0, 1 << 26), "max-flows"
    )] = 0


class EbpfOptions(Section, frozen=True):
    """Settings of mode ebpf."""

    pod_interfaces: Annotated[tuple[str, ...], _ebpf(
        "Pod interfaces, such as `veth*,cali*` (default: found by their kind)", PATTERNS, "pod-interfaces"
    )] = ()
    uplink_interfaces: Annotated[tuple[str, ...], _ebpf(
        "Interfaces to the outside, such as `eth0` (default: found)", PATTERNS, "uplink-interfaces"
    )] = ()
    socket_scope: Annotated[str, _ebpf(
        "Whose sockets choose a backend at connect(): those of the node itself (`host`), or none (`off`)",
        choice("host", "off", why=_NOT_IN_PODS), "socket-scope"
    )] = "host"
    cgroup: Annotated[str, _ebpf(
        "The cgroup v2 folder of the node's own sockets (default: found)", FOLDER, "cgroup", effect=RESTART
    )] = ""
    pin_root: Annotated[str, _ebpf(
        "A folder on a BPF file system for pinned objects (default: found)", FOLDER, "pin-root", effect=RESTART
    )] = ""
    fast_path: Annotated[str, _ebpf(
        "Which packets between pods of this node bypass the host's stack: none (`off`), those of flows that it has let "
        "open (`established`), or those that open a flow, too (`always`: no rule, policy or conntrack of the host sees "
        "it); `auto` is `always` where nothing would see them, `established` where rules would, `off` where a qdisc or "
        "filter limits a pod's interface; `status` says why. With `always`, packets of no Service bypass "
        "it, too, where no chain translates",
        choice("auto", "established", "always", "off"), "fast-path"
    )] = "auto"
    traffic_counters: Annotated[bool, _ebpf(
        "Count flows, packets and bytes of services and backends", BOOLEAN, "no-traffic-counters", inverted=True,
        help="do not count flows, packets and bytes of services and backends"
    )] = True
    answer_ping: Annotated[bool, _ebpf(
        "Answer pings of ClusterIPs instead of rejecting them", BOOLEAN, "answer-ping"
    )] = False
    source_check: Annotated[str, _ebpf(
        "Drop new flows whose source is not behind the interface that they come in at: as the kernel does there "
        "(`auto`: rp_filter), or at all interfaces and for IPv6, too (`strict`), for network plugins that would "
        "use netfilter's raw table", choice("auto", "strict"), "source-check"
    )] = "auto"
    xdp: Annotated[str, _ebpf(
        "Forward known flows to backends of other nodes in the drivers of uplinks: where that is safe by itself "
        "(`auto`), wherever a driver can (`native`), or nowhere (`off`); `status` shows where",
        choice("auto", "native", "off"), "xdp"
    )] = "auto"
    dsr: Annotated[str, _ebpf(
        "Use the same value on all nodes. `ipip`: encapsulate requests from outside for backends of other nodes "
        "(IP in IP), so that these answer the client directly and see its address; the network must let nodes "
        "send from each other's addresses", choice("off", "ipip"), "dsr"
    )] = "off"
    masquerade_ports: Annotated[tuple[int, int], _ebpf(
        "The source ports of masqueraded clients; they must not overlap with node ports or "
        "net.ipv4.ip_local_port_range", PORTS, "masquerade-ports"
    )] = (1024, 29_695)
    event_rate: Annotated[int, _ebpf(
        "Dropped, rejected and traced packets that are reported to the agent, per second and CPU", integer(0, 1_000_000)
    )] = 100
    reject_rate: Annotated[int, _ebpf(
        "Rejected packets that are answered with ICMP, per second and CPU", integer(0, 100_000_000)
    )] = 10_000
    failover: FailoverOptions = FailoverOptions()
    probes: ProbeOptions = ProbeOptions()
    limits: Limits = Limits()


class IpvsOptions(Section, frozen=True):
    """Settings of mode ipvs."""

    scheduler: Annotated[str, of_ipvs(
        f"The scheduler of services without an algorithm of their own: one of {', '.join(SCHEDULERS)}; empty: rr",
        choice(*SCHEDULERS, metavar="NAME"), "ipvs-scheduler"
    )] = ""
    exclude_cidrs: Annotated[tuple[str, ...], of_ipvs(
        "Never touch virtual servers with addresses in these", CIDRS, "ipvs-exclude-cidrs"
    )] = msgspec.field(default=(), name="excludeCIDRs")
    strict_arp: Annotated[bool, of_ipvs(
        "Answer ARP only for addresses of the interface that the request came in at", BOOLEAN, "ipvs-strict-arp"
    )] = msgspec.field(default=False, name="strictARP")
    tcp_timeout: Annotated[int, of_ipvs(
        "Forget idle TCP connections after this; 0: the kernel's value", whole_seconds(), "ipvs-tcp-timeout"
    )] = 0
    tcp_fin_timeout: Annotated[int, of_ipvs(
        "Forget TCP connections after a FIN after this; 0: the kernel's value", whole_seconds(), "ipvs-tcpfin-timeout"
    )] = 0
    udp_timeout: Annotated[int, of_ipvs(
        "Forget UDP flows after this; 0: the kernel's value", whole_seconds(), "ipvs-udp-timeout"
    )] = 0

    @property
    def default_scheduler(self) -> str:
        """The scheduler of services that name none."""
        return self.scheduler or "rr"


# fmt: on
class FlowTimeouts(msgspec.Struct, frozen=True):
    """Seconds without a packet after which a mode with flows of its own forgets one."""

    tcp_established: int = 86_400
    tcp_close_wait: int = 3_600  # one side has ended
    udp: int = UDP_SECONDS
    udp_stream: int = UDP_STREAM_SECONDS  # both sides have sent for a while


class Options(msgspec.Struct, frozen=True):
    """A mode's settings, and what the agent knows that is no part of the table.

    Attributes:
        default_flows: entries of the tables of flows, where the setting leaves that to the node's memory.
        sync_seconds: how often to compare with the kernel, where it does not report changes by itself.
        names: as `Programmer.names`, of the agent before: to read what is adopted.
        all_or_nothing: refuse a first table that does not fit as a whole, because another mode serves it meanwhile.
        shares_node: another proxy serves Services too, and one may move from there to here at any time.
    """

    ebpf: EbpfOptions = EbpfOptions()
    ipvs: IpvsOptions = IpvsOptions()
    timeouts: FlowTimeouts = FlowTimeouts()
    default_flows: int = 1 << 16
    sync_seconds: float = 30.0
    names: Callable[[], Mapping[int, str]] = dict
    all_or_nothing: bool = False
    shares_node: bool = False

    @property
    def max_flows(self) -> int:
        """Entries of the tables of flows, of each address family."""
        return self.ebpf.limits.flows or self.default_flows


def flows_by_memory(memory: int) -> int:
    """Entries of the tables of flows for a node with this many bytes of memory: about one for each 48 KiB."""
    return min(1 << 20, max(1 << 16, 1 << (memory // (48 << 10)).bit_length() - 1))
