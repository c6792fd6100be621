"""PURE. Every setting, once: its field, flag, type with its check, default, description, and what a change does.

`KubeProxyConfiguration` is kube-proxy's document (kubeproxy.config.k8s.io/v1alpha1, Kubernetes 1.36), field by field;
`HybridProxyConfiguration` holds the settings that kube-proxy does not have; `CommandLine` holds those that only a flag
can set. `rows` lists them all. Flags, `--help`, the reading and writing of files, docs/configuration.md and the JSON
schema are derived from it. A default that the dataplane or the semantics need as well stands there, and is read here.
"""

# Annotations are values here, not text: msgspec would evaluate each of a hundred again whenever a command starts.
import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Final, NamedTuple, get_args, get_origin

import msgspec

from hybrid_proxy.controller.semantics.entries import DetectLocalMode, Settings
from hybrid_proxy.controller.settings.forms import (
    ADDRESS,
    ADDRESSES,
    BOOLEAN,
    BUFFER_SIZE,
    CIDR_PAIR,
    CIDRS,
    FOLDER,
    GATES,
    INTERFACE,
    LABEL,
    LISTEN,
    NAMESPACES,
    NODE_NAME,
    NODE_PORT_ADDRESSES,
    NUMBER,
    PATTERNS,
    PORTS,
    TEXT,
    VERSION,
    VMODULE,
    Endpoint,
    Form,
    VModule,
    choice,
    integer,
    known,
    seconds,
    whole_seconds,
)
from hybrid_proxy.dataplane.balancing import ALGORITHMS, ALIASES
from hybrid_proxy.dataplane.mode import FIRST_SIZES, Options

KUBE_PROXY: Final = "KubeProxyConfiguration"
HYBRID: Final = "HybridProxyConfiguration"
MODES: Final = ("ebpf", "nftables", "iptables", "ipvs", "userspace")  # best first
KUBE_PROXYS_MODES: Final = ("iptables", "ipvs", "nftables")
# The schedulers of net/netfilter/ipvs; if a kernel lacks one, mode ipvs reports it when it is used.
SCHEDULERS: Final = ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "sed", "nq", "fo", "ovf", "mh", "twos")
CHOICES: Final = tuple(dict.fromkeys((*ALGORITHMS, *ALIASES, *SCHEDULERS)))  # algorithms; random is first

# What a change of a setting does.
AT_ONCE: Final = "at once"
REOPENS: Final = "reopens"
RESTART: Final = "restart"


class Group(NamedTuple):
    """A section of `--help`."""

    title: str


FILES: Final = Group("configuration files (docs/configuration.md)")
SOURCES: Final = Group("where Services, EndpointSlices and Nodes come from (default: the cluster's API server)")
SERVICES: Final = Group("what a Service means on this node (kube-proxy's names and defaults)")
NODE: Final = Group("how the node is programmed")
IPVS_MODE: Final = Group("mode ipvs (kube-proxy's names and defaults)")
SERVERS: Final = Group("where the agent listens")
LOG: Final = Group("log")
MORE: Final = Group("more of kube-proxy's flags, for its manifests")


class Setting(NamedTuple):
    """The definition of a setting, beside its type and its default.

    Attributes:
        text: the description.
        form: how it is written.
        flag: its flag; empty: it has none. A flag sets every field that names it.
        effect: what a change does: AT_ONCE, REOPENS the mode, or waits for a RESTART of the agent.
        group: the section of `--help`.
        help: the flag's description, where it is not `text`.
        unused: why a value has no effect; empty: it has one.
        harmless: values beside the default that need no warning although the setting is `unused`.
        zero: an empty value or 0 in a document stands for the default, as kube-proxy's defaulting has it.
        inverted: the flag turns off what the field turns on.
        mode: the mode that alone has this setting. In other modes an invalid value is only a warning.
        over_file: the flag counts although there is a file.
        shown: the default for readers, where the value is computed.
    """

    text: str
    form: Form
    flag: str = ""
    effect: str = AT_ONCE
    group: Group = MORE
    help: str = ""
    unused: str = ""
    harmless: tuple[Any, ...] = ()
    zero: bool = False
    inverted: bool = False
    mode: str = ""
    over_file: bool = True
    shown: str = ""


class Row(NamedTuple):
    """One setting: a field of a document, or a flag that no document has."""

    document: str
    path: str  # iptables.masqueradeBit
    default: Any
    setting: Setting

    @property
    def key(self) -> str:
        """The field with its document's kind, as kube-proxy names fields."""
        return f"{self.document}.{self.path}"

    @property
    def dest(self) -> str:
        """The flag's name in argparse's namespace; empty: there is no flag."""
        return self.setting.flag.replace("-", "_")

    @property
    def written_default(self) -> Any:
        """The default as a document holds it."""
        setting = self.setting
        return setting.shown or ("" if self.default is None else setting.form.write(self.default))


def _is(text: str, form: Form, flag: str = "", effect: str = AT_ONCE, group: Group = MORE, **more: Any) -> msgspec.Meta:
    return msgspec.Meta(extra={"setting": Setting(text, form, flag, effect, group, **more)})


def _ipvs(text: str, form: Form, flag: str, effect: str = REOPENS, **more: Any) -> msgspec.Meta:
    return _is(text, form, flag, effect, IPVS_MODE, mode="ipvs", **more)


def _nftables(text: str, form: Form, flag: str, effect: str, **more: Any) -> msgspec.Meta:
    return _is(text, form, flag, effect, mode="nftables", **more)


def _ebpf(text: str, form: Form, flag: str = "", effect: str = REOPENS, **more: Any) -> msgspec.Meta:
    return _is(text, form, flag, effect, NODE, mode="ebpf", **more)


class _Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An object in a document."""


# ---------------------------------------------------------------------------------------------- kube-proxy's

_OPTIONS: Final = Options()
_SETTINGS: Final = Settings()
_JSON: Final = "the API is read as JSON, which is decoded faster here"
_WINDOWS: Final = "this proxy is for Linux"
_STDERR: Final = "each line is written to stderr at once"
_ACCEPTED: Final = ("", "application/json", "application/vnd.kubernetes.protobuf")
_SYNC: Final = "How often to compare with the kernel, where the kernel does not report changes by itself"
_REST: Final = (
    "Least time from one sync to the next; kube-proxy's default of 1s stands for what a sync costs there, and counts "
    "as 0 here"
)
_NOT_IN_PODS: Final = (
    "pods' sockets are not served, because that is slower than translating their packets, and the pod would count as "
    "the node for session affinity and source ranges"
)
_BIT: Final = "The bit of the packet mark that requests masquerade"
_ALL: Final = "Replace the source address of everything that is sent to a ClusterIP"


# Every setting has one shape: name and type, description, form, flag and effect, default.
# fmt: off
class ClientConnection(_Part, frozen=True):
    """How the API server is reached."""

    kubeconfig: Annotated[str, _is(
        "File with the API server's address and credentials; without it and `--master`: the pod's service account",
        TEXT._replace(metavar="FILE"), "kubeconfig", RESTART, SOURCES
    )] = ""
    accept_content_types: Annotated[str, _is(
        "Accept header", TEXT, effect=RESTART, unused=_JSON, harmless=_ACCEPTED
    )] = ""
    content_type: Annotated[str, _is(
        "Content type of requests", TEXT, "kube-api-content-type", RESTART, unused=_JSON, harmless=_ACCEPTED, zero=True
    )] = "application/vnd.kubernetes.protobuf"
    qps: Annotated[float, _is(
        "Requests to the API server per second; all pages of one list count as one request", NUMBER, "kube-api-qps",
        RESTART, zero=True
    )] = 5.0
    burst: Annotated[int, _is(
        "Requests that may be sent at once", integer(), "kube-api-burst", RESTART, zero=True
    )] = 10


class JsonOptions(_Part, frozen=True):
    split_stream: Annotated[bool, _is("Info to stdout", BOOLEAN, "log-json-split-stream", unused=_STDERR)] = False
    info_buffer_size: Annotated[str, _is(
        "Bytes", BUFFER_SIZE, "log-json-info-buffer-size", unused=_STDERR, zero=True
    )] = "0"


class TextOptions(_Part, frozen=True):
    split_stream: Annotated[bool, _is("Info to stdout", BOOLEAN, "log-text-split-stream", unused=_STDERR)] = False
    info_buffer_size: Annotated[str, _is(
        "Bytes", BUFFER_SIZE, "log-text-info-buffer-size", unused=_STDERR, zero=True
    )] = "0"


class LoggingOptions(_Part, frozen=True):
    json: JsonOptions = JsonOptions()
    text: TextOptions = TextOptions()


class Logging(_Part, frozen=True):
    """What is logged (component-base's LoggingConfiguration)."""

    format: Annotated[str, _is(
        "`text` for people, or `json`, one object per line", choice("text", "json"), "logging-format", group=LOG,
        zero=True
    )] = "text"
    flush_frequency: Annotated[float, _is(
        "How often buffered lines are written", seconds()._replace(raw=str | int), "log-flush-frequency",
        unused=_STDERR, zero=True
    )] = 5.0
    verbosity: Annotated[int, _is(
        "How much to log: 0 to 10, as kube-proxy's; from 4 on, every change", integer(), "v", group=LOG
    )] = 0
    vmodule: Annotated[tuple[VModule, ...], _is(
        "Other verbosities by source file", VMODULE, "vmodule", unused="there are no levels by source file"
    )] = ()
    options: LoggingOptions = LoggingOptions()


class IPTables(_Part, frozen=True):
    """Of the modes iptables, ebpf and userspace (and auto), and kube-proxy's for mode ipvs, too."""

    masquerade_bit: Annotated[int, _is(
        _BIT, integer(0, 31, "BIT"), "iptables-masquerade-bit", REOPENS, NODE
    )] = _SETTINGS.masquerade_bit
    masquerade_all: Annotated[bool, _is(_ALL, BOOLEAN, "masquerade-all", group=SERVICES)] = _SETTINGS.masquerade_all
    localhost_node_ports: Annotated[bool, _is(
        "Serve node ports at 127.0.0.1 and ::1, to this node's own clients, where `nodePortAddresses` is unset or "
        "covers them; of every mode", BOOLEAN, "iptables-localhost-nodeports", group=SERVICES
    )] = _SETTINGS.localhost_node_ports
    sync_period: Annotated[float, _is(
        _SYNC, seconds(positive=True), "iptables-sync-period", REOPENS, NODE, zero=True
    )] = _OPTIONS.sync_seconds
    min_sync_period: Annotated[float, _is(_REST, seconds(), "iptables-min-sync-period", zero=True)] = 1.0


class IPVS(_Part, frozen=True):
    """Of mode ipvs."""

    sync_period: Annotated[float, _ipvs(
        "As `iptables.syncPeriod`", seconds(positive=True), "ipvs-sync-period", zero=True,
        help="as --iptables-sync-period"
    )] = _OPTIONS.sync_seconds
    min_sync_period: Annotated[float, _ipvs(
        "As `iptables.minSyncPeriod`", seconds(), "ipvs-min-sync-period", AT_ONCE,
        help="as --iptables-min-sync-period, but every value counts"
    )] = 0.0
    scheduler: Annotated[str, _ipvs(
        f"The scheduler of services without an algorithm of their own: one of {', '.join(SCHEDULERS)}; empty: "
        f"{_OPTIONS.ipvs_scheduler}", choice(*SCHEDULERS, metavar="NAME"), "ipvs-scheduler"
    )] = ""
    exclude_cidrs: Annotated[tuple[str, ...], _ipvs(
        "Never touch virtual servers with addresses in these", CIDRS, "ipvs-exclude-cidrs"
    )] = msgspec.field(default=_OPTIONS.ipvs_exclude_cidrs, name="excludeCIDRs")
    strict_arp: Annotated[bool, _ipvs(
        "Answer ARP only for addresses of the interface that the request came in at", BOOLEAN, "ipvs-strict-arp"
    )] = msgspec.field(default=_OPTIONS.ipvs_strict_arp, name="strictARP")
    tcp_timeout: Annotated[int, _ipvs(
        "Forget idle TCP connections after this; 0: the kernel's value", whole_seconds(), "ipvs-tcp-timeout"
    )] = _OPTIONS.ipvs_tcp_timeout
    tcp_fin_timeout: Annotated[int, _ipvs(
        "Forget TCP connections after a FIN after this; 0: the kernel's value", whole_seconds(), "ipvs-tcpfin-timeout"
    )] = _OPTIONS.ipvs_tcpfin_timeout
    udp_timeout: Annotated[int, _ipvs(
        "Forget UDP flows after this; 0: the kernel's value", whole_seconds(), "ipvs-udp-timeout"
    )] = _OPTIONS.ipvs_udp_timeout


class NFTables(_Part, frozen=True):
    """Of mode nftables; without a file the flags of the iptables section count."""

    masquerade_bit: Annotated[int, _nftables(
        "As `iptables.masqueradeBit`", integer(0, 31), "iptables-masquerade-bit", REOPENS
    )] = _SETTINGS.masquerade_bit
    masquerade_all: Annotated[bool, _nftables(
        "As `iptables.masqueradeAll`", BOOLEAN, "masquerade-all", AT_ONCE
    )] = _SETTINGS.masquerade_all
    sync_period: Annotated[float, _nftables(
        "As `iptables.syncPeriod`", seconds(positive=True), "iptables-sync-period", REOPENS, zero=True
    )] = _OPTIONS.sync_seconds
    min_sync_period: Annotated[float, _nftables(
        "As `iptables.minSyncPeriod`", seconds(), "iptables-min-sync-period", AT_ONCE, zero=True
    )] = 1.0


class Winkernel(_Part, frozen=True):
    """Of kube-proxy for Windows."""

    network_name: Annotated[str, _is("Windows", TEXT, unused=_WINDOWS)] = ""
    source_vip: Annotated[str, _is("Windows", TEXT, unused=_WINDOWS)] = ""
    enable_dsr: Annotated[bool, _is(
        "Windows", BOOLEAN, unused=f"{_WINDOWS}; see `{HYBRID}.ebpf.dsr`"
    )] = msgspec.field( default=False, name="enableDSR" )
    root_hns_endpoint_name: Annotated[str, _is("Windows", TEXT, unused=_WINDOWS)] = ""
    forward_health_check_vip: Annotated[bool, _is("Windows", BOOLEAN, unused=_WINDOWS)] = False


class DetectLocal(_Part, frozen=True):
    """Names for detectLocalMode."""

    bridge_interface: Annotated[str, _is(
        "The pods' bridge, for BridgeInterface", INTERFACE, "pod-bridge-interface", REOPENS, SERVICES
    )] = ""
    interface_name_prefix: Annotated[str, _is(
        "The prefix of pod interfaces' names, for InterfaceNamePrefix", INTERFACE._replace(metavar="PREFIX"),
        "pod-interface-name-prefix", REOPENS, SERVICES
    )] = ""


class Conntrack(_Part, frozen=True):
    """The kernel's connection tracking, set at the start in every mode; 0 leaves a value as it is. Times in seconds."""

    max_per_core: Annotated[int, _is(
        "nf_conntrack_max for each CPU, at most 1,048,576 in all; 0: leave it, whatever `min` is", integer(),
        "conntrack-max-per-core"
    )] = 32_768
    min: Annotated[int, _is("Least value of nf_conntrack_max", integer(), "conntrack-min")] = 131_072
    tcp_established_timeout: Annotated[int, _is(
        "Forget an established connection after this time without a packet; also in mode ebpf", whole_seconds(),
        "conntrack-tcp-timeout-established", REOPENS
    )] = _OPTIONS.tcp_timeout_established
    tcp_close_wait_timeout: Annotated[int, _is(
        "Forget a connection that one side has closed after this time without a packet; also in mode ebpf",
        whole_seconds(), "conntrack-tcp-timeout-close-wait", REOPENS
    )] = _OPTIONS.tcp_timeout_close_wait
    tcp_be_liberal: Annotated[bool, _is(
        "Do not treat packets outside of the TCP window as invalid", BOOLEAN, "conntrack-tcp-be-liberal"
    )] = False
    udp_timeout: Annotated[int, _is(
        f"Forget a UDP flow after this time without a packet; also in mode ebpf (0: {_OPTIONS.udp_timeout}s there)",
        whole_seconds(), "conntrack-udp-timeout", REOPENS
    )] = 0
    udp_stream_timeout: Annotated[int, _is(
        "The same once both sides have sent for a while; also in mode ebpf "
        f"(0: {_OPTIONS.udp_timeout_stream}s there)", whole_seconds(), "conntrack-udp-timeout-stream", REOPENS
    )] = 0


class KubeProxyConfiguration(_Part, frozen=True):
    """What kube-proxy reads: kubeproxy.config.k8s.io/v1alpha1."""

    api_version: str = "kubeproxy.config.k8s.io/v1alpha1"
    kind: str = KUBE_PROXY
    feature_gates: Annotated[dict[str, bool], _is(
        "`AllowServiceExternalIPs=false`: do not serve external IPs, which will be kube-proxy's default from 1.40 on "
        "(KEP-5707). Other gates have no meaning here; a warning "
        "names them", GATES, "feature-gates"
    )] = msgspec.field(default_factory=dict)
    client_connection: ClientConnection = ClientConnection()
    logging: Logging = Logging()
    hostname_override: Annotated[str, _is(
        "This node's name, as in its Node object (default: the host name in lower case)", NODE_NAME,
        "hostname-override", RESTART, SERVICES
    )] = ""
    bind_address: Annotated[str, _is(
        "Use this as the node's IP instead of the Node object's; nothing is bound to it. With an IPv6 address, the "
        "defaults of the next two are `[::]:10256` and `[::1]:10249`", ADDRESS, "bind-address", group=SERVICES,
        help="use this as the node's IP instead of the Node object's; nothing is bound to it", zero=True
    )] = "0.0.0.0"  # noqa: S104 (kube-proxy's default)
    healthz_bind_address: Annotated[Endpoint | None, _is(
        "Where health is served", LISTEN, "healthz-bind-address", group=SERVERS, zero=True, shown="0.0.0.0:10256",
        help="where health is served; empty: nowhere"
    )] = None
    metrics_bind_address: Annotated[Endpoint | None, _is(
        "Where metrics are served", LISTEN, "metrics-bind-address", group=SERVERS, zero=True, shown="127.0.0.1:10249",
        help="where metrics are served; empty: nowhere"
    )] = None
    bind_address_hard_fail: Annotated[bool, _is(
        "Exit when health or metrics cannot be served there, instead of trying again", BOOLEAN,
        "bind-address-hard-fail", group=SERVERS
    )] = False
    enable_profiling: Annotated[bool, _is(
        "Serve pages for debugging beside the metrics", BOOLEAN, "profiling", group=SERVERS
    )] = False
    show_hidden_metrics_for_version: Annotated[str, _is(
        "Show metrics that the version after this one hid", VERSION, "show-hidden-metrics-for-version",
        unused="no metric is hidden"
    )] = ""
    mode: Annotated[str, _is(
        f"`iptables`, `ipvs` or `nftables`; empty: as `{HYBRID}.mode`, which takes precedence in any case",
        TEXT._replace(metavar="MODE"), "proxy-mode", REOPENS, NODE,
        help=f"one of {', '.join(MODES)}, or auto: the best that works here (default: auto). A mode that cannot "
        "work is replaced: ebpf by nftables, nftables and ipvs by iptables; `status` shows which mode serves"
    )] = ""
    iptables: IPTables = msgspec.field(default=IPTables(), name="iptables")
    ipvs: IPVS = IPVS()
    nftables: NFTables = NFTables()
    winkernel: Winkernel = Winkernel()
    detect_local_mode: Annotated[DetectLocalMode, _is(
        "How pods are recognized: by `ClusterCIDR`, `NodeCIDR`, `BridgeInterface` or `InterfaceNamePrefix`",
        known(DetectLocalMode, "MODE"), "detect-local-mode", REOPENS, SERVICES, zero=True
    )] = _SETTINGS.detect
    detect_local: DetectLocal = DetectLocal()
    cluster_cidr: Annotated[tuple[str, ...], _is(
        "The pods' range, or one of each family with a comma; without it nothing is recognized as a pod", CIDR_PAIR,
        "cluster-cidr", group=SERVICES
    )] = msgspec.field(default=(), name="clusterCIDR")
    node_port_addresses: Annotated[tuple[str, ...], _is(
        "The node's addresses that serve node ports: CIDRs, `primary`, `all` and `localhost` (127.0.0.1 and ::1, for "
        "the node's own clients), in any combination (default: primary and localhost, in every mode)",
        NODE_PORT_ADDRESSES, "nodeport-addresses",
        group=SERVICES
    )] = ()
    oom_score_adj: Annotated[int, _is(
        "How readily the kernel ends the agent when memory is short", integer(-1000, 1000), "oom-score-adj"
    )] = -999
    conntrack: Conntrack = Conntrack()
    config_sync_period: Annotated[float, _is(
        "How often everything is reported again", seconds(positive=True), "config-sync-period", zero=True,
        unused="a running watch has nothing to repeat, and after a broken one everything is listed again"
    )] = 900.0
    port_range: Annotated[str, _is("For a former mode userspace", TEXT, unused="kube-proxy ignores it, too")] = ""
    windows_run_as_service: Annotated[bool, _is("Windows", BOOLEAN, "windows-service", unused=_WINDOWS)] = False


# ------------------------------------------------------------------------------------------------------ ours


class Failover(_Part, frozen=True):
    """Backends that fail (mode ebpf)."""

    failures: Annotated[int, _ebpf(
        "Eject a backend for a while after this many consecutive connections that it did not answer or refused; "
        "0: never", integer(0, 1_000_000), "failover-failures"
    )] = _OPTIONS.failover_failures
    percentage: Annotated[int, _ebpf(
        "Eject a backend for a while when this percentage of its connections fails within ten seconds, and twice that "
        "of the other backends; 0: never", integer(0, 100), "failover-percentage"
    )] = _OPTIONS.failover_percentage
    connections: Annotated[int, _ebpf(
        "A backend with fewer connections in that time is not ejected for their percentage", integer(1, 1_000_000),
        "failover-connections"
    )] = _OPTIONS.failover_connections


class Probes(_Part, frozen=True):
    """Of backends of services with annotation hybrid-proxy.io/probe (mode ebpf)."""

    interval: Annotated[float, _ebpf(
        "Time between two health probes of a backend, of services with the annotation hybrid-proxy.io/probe; at "
        "least 100ms", seconds(0.1), "probe-interval"
    )] = _OPTIONS.probe_interval
    timeout: Annotated[float, _ebpf(
        "How long a health probe waits for its answer; at least 10ms", seconds(0.01), "probe-timeout"
    )] = _OPTIONS.probe_timeout
    failures: Annotated[int, _ebpf(
        "Eject a backend after this many failed health probes in a row, until one succeeds", integer(1, 1000),
        "probe-failures"
    )] = _OPTIONS.probe_failures


class Limits(_Part, frozen=True):
    """Room in the maps (mode ebpf)."""

    services: Annotated[int, _ebpf(
        f"Maps grow up to this many service ports; at least {FIRST_SIZES['services']:,}, with which they begin",
        integer(FIRST_SIZES["services"], 1 << 24), "max-services", RESTART
    )] = _OPTIONS.max_services
    backends: Annotated[int, _ebpf(
        f"Maps grow up to this many backends; at least {FIRST_SIZES['backends']:,}, with which they begin",
        integer(FIRST_SIZES["backends"], 1 << 24), "max-backends", RESTART
    )] = _OPTIONS.max_backends
    slots: Annotated[int, _ebpf(
        f"Maps grow up to this many slots, the places in backend sets; at least {FIRST_SIZES['slots']:,}, with which "
        "they begin",
        integer(FIRST_SIZES["slots"], 1 << 28), "max-slots", RESTART
    )] = _OPTIONS.max_slots
    ring: Annotated[int, _ebpf(
        "Slots that Maglev, source hash, weights and least connections may use for one service port; use the "
        "same value on all nodes", integer(1, 65_521), "max-ring", RESTART
    )] = _OPTIONS.max_ring
    flows: Annotated[int, _ebpf(
        "Entries of the tables of flows, two for each flow, in each address family; 0: by the node's memory, one for "
        "each 48 KiB, a power of two from 65,536 to 1,048,576", integer(0, 1 << 26), "max-flows", RESTART
    )] = 0


class Ebpf(_Part, frozen=True):
    """Of mode ebpf."""

    pod_interfaces: Annotated[tuple[str, ...], _ebpf(
        "Pod interfaces, such as `veth*,cali*` (default: found by their kind)", PATTERNS, "pod-interfaces"
    )] = _OPTIONS.pod_interfaces
    uplink_interfaces: Annotated[tuple[str, ...], _ebpf(
        "Interfaces to the outside, such as `eth0` (default: found)", PATTERNS, "uplink-interfaces"
    )] = _OPTIONS.uplink_interfaces
    socket_scope: Annotated[str, _ebpf(
        "Whose sockets choose a backend at connect(): those of the node itself (`host`), or none (`off`)",
        choice("host", "off", why=_NOT_IN_PODS), "socket-scope"
    )] = _OPTIONS.socket_scope
    cgroup: Annotated[str, _ebpf(
        "The cgroup v2 folder of the node's own sockets (default: found)", FOLDER, "cgroup", RESTART
    )] = ""
    pin_root: Annotated[str, _ebpf(
        "A folder on a BPF file system for pinned objects (default: found)", FOLDER, "pin-root", RESTART
    )] = ""
    fast_path: Annotated[str, _ebpf(
        "Which packets between pods of this node bypass the host's stack: those of flows that it has let open "
        "(`established`), those that open a flow, too (`always`: no netfilter rule, policy or conntrack of the host "
        "sees such a flow), or none (`off`)", choice("established", "always", "off"), "fast-path"
    )] = _OPTIONS.fast_path
    traffic_counters: Annotated[bool, _ebpf(
        "Count flows, packets and bytes of services and backends", BOOLEAN, "no-traffic-counters", inverted=True,
        help="do not count flows, packets and bytes of services and backends"
    )] = _OPTIONS.count_traffic
    answer_ping: Annotated[bool, _ebpf(
        "Answer pings of ClusterIPs instead of rejecting them", BOOLEAN, "answer-ping"
    )] = _OPTIONS.answer_ping
    source_check: Annotated[str, _ebpf(
        "Drop new flows whose source is not behind the interface that they come in at: as the kernel does there "
        "(`auto`: rp_filter), or at all interfaces and for IPv6, too (`strict`), for network plugins that would "
        "use netfilter's raw table", choice("auto", "strict"), "source-check"
    )] = _OPTIONS.source_check
    xdp: Annotated[str, _ebpf(
        "Forward known flows to backends of other nodes in the drivers of uplinks: where that is safe by itself "
        "(`auto`), wherever a driver can (`native`), or nowhere (`off`); `status` shows where",
        choice("auto", "native", "off"), "xdp"
    )] = _OPTIONS.xdp
    dsr: Annotated[str, _ebpf(
        "Use the same value on all nodes. `ipip`: encapsulate requests from outside for backends of other nodes "
        "(IP in IP), so that these answer the client directly and see its address; the network must let nodes "
        "send from each other's addresses", choice("off", "ipip"), "dsr"
    )] = "ipip" if _OPTIONS.dsr else "off"
    masquerade_ports: Annotated[tuple[int, int], _ebpf(
        "The source ports of masqueraded clients; they must not overlap with node ports or "
        "net.ipv4.ip_local_port_range", PORTS, "masquerade-ports"
    )] = (_OPTIONS.port_first, _OPTIONS.port_first + _OPTIONS.port_count - 1)
    event_rate: Annotated[int, _ebpf(
        "Dropped, rejected and traced packets that are reported to the agent, per second and CPU", integer(0, 1_000_000)
    )] = _OPTIONS.event_rate
    reject_rate: Annotated[int, _ebpf(
        "Rejected packets that are answered with ICMP, per second and CPU", integer(0, 100_000_000)
    )] = _OPTIONS.reject_rate
    failover: Failover = Failover()
    probes: Probes = Probes()
    limits: Limits = Limits()


class Nftables(_Part, frozen=True):
    """Of mode nftables."""

    offload_packets: Annotated[int, _nftables(
        "Let a flowtable forward TCP connections to services from this many packets on (20 is a good number): they "
        "bypass the host's stack, and with it all forwarding rules; 0: none does", integer(0, 1_000_000_000),
        "nftables-offload-packets", REOPENS
    )] = _OPTIONS.offload_packets


class ExternalIPs(_Part, frozen=True):
    """Which external IPs of Services are served, where the gate AllowServiceExternalIPs leaves them on."""

    allowed_cidrs: Annotated[tuple[str, ...], _is(
        "Serve external IPs in these ranges only; a family without a range has none. Empty: all", CIDRS,
        "external-ips-cidrs", group=SERVICES
    )] = msgspec.field(default=_SETTINGS.external_ip_cidrs, name="allowedCIDRs")
    allowed_namespaces: Annotated[tuple[str, ...], _is(
        "Serve external IPs of Services in these namespaces only. Empty: in all", NAMESPACES,
        "external-ips-namespaces", group=SERVICES
    )] = _SETTINGS.external_ip_namespaces


class HybridProxyConfiguration(_Part, frozen=True):
    """The settings that kube-proxy does not have: hybrid-proxy.io/v1alpha1."""

    api_version: str = "hybrid-proxy.io/v1alpha1"
    kind: str = HYBRID
    mode: Annotated[str, _is(
        f"How the node is programmed; takes precedence over `{KUBE_PROXY}.mode`. `auto`: the best mode that works "
        "here; empty: as that field, or `auto` if it is empty, too",
        TEXT._replace(schema={"enum": ["", "auto", *MODES]}), effect=REOPENS
    )] = ""
    strict_mode: Annotated[bool, _is(
        "Exit with an error instead of replacing a mode that cannot work", BOOLEAN, "strict-mode", REOPENS, NODE
    )] = False
    algorithm: Annotated[str, _is(
        "How a backend is chosen, in the modes ebpf and ipvs, for services without the annotation "
        f"hybrid-proxy.io/algorithm: one of {', '.join(CHOICES)} (in mode ipvs, `random` means the scheduler of "
        "`ipvs.scheduler`)", choice(*CHOICES, metavar="NAME")._replace(schema={}), "algorithm", group=SERVICES
    )] = _SETTINGS.algorithm
    service_proxy_name: Annotated[str, _is(
        "Serve only Services whose label `service.kubernetes.io/service-proxy-name` has this value, beside a "
        "kube-proxy, which serves those without the label. Empty: serve those without the label",
        LABEL, "service-proxy-name", RESTART, SERVICES
    )] = ""
    external_ips: ExternalIPs = msgspec.field(default=ExternalIPs(), name="externalIPs")
    reset_gone_backends: Annotated[bool, _is(
        "Reset open TCP connections to an endpoint that is gone, of services without the annotation "
        "hybrid-proxy.io/reset-gone-backends (not in mode ipvs)", BOOLEAN, "reset-gone-backends", group=SERVICES
    )] = _SETTINGS.reset_gone_backends
    manifests: Annotated[str, _is(
        "A file or folder of YAML and JSON that objects come from instead of an API server; it is watched for "
        "changes", TEXT._replace(metavar="PATH"), "manifests", RESTART, SOURCES
    )] = ""
    node_addresses: Annotated[tuple[str, ...], _is(
        "All addresses on the node's interfaces (default: `run` reads the interfaces, `explain` uses the Node "
        "object's)", ADDRESSES, "node-addresses", RESTART, SERVICES
    )] = ()
    admin_socket: Annotated[str, _is(
        "Where the agent listens for commands", TEXT._replace(metavar="PATH"), "admin-socket", RESTART, SERVERS
    )] = "/run/hybrid-proxy/admin.sock"
    serve_healthz: Annotated[bool, _is(f"Serve health, at `{KUBE_PROXY}.healthzBindAddress`", BOOLEAN)] = True
    serve_metrics: Annotated[bool, _is(f"Serve metrics, at `{KUBE_PROXY}.metricsBindAddress`", BOOLEAN)] = True
    drain_timeout: Annotated[float, _is(
        "How long a mode that was left may go on serving the flows that it has; 0: until the last of them is over",
        seconds(), "drain-timeout", group=NODE
    )] = 0.0
    metrics_per_backend: Annotated[bool, _is(
        "Count traffic for each backend instead of each service port", BOOLEAN, "metrics-per-backend", group=SERVERS
    )] = False
    ebpf: Ebpf = Ebpf()
    nftables: Nftables = Nftables()


class CommandLine(_Part, frozen=True):
    """Settings that only a flag can set."""

    master: Annotated[str, _is(
        "The API server's URL; takes precedence over the one in the kubeconfig", TEXT._replace(metavar="URL"), "master",
        RESTART, SOURCES
    )] = ""
    healthz_port: Annotated[int, _is(
        "0: as an empty `--healthz-bind-address`", integer(0, 65_535, "PORT"), "healthz-port", RESTART, over_file=False
    )] = 10256
    metrics_port: Annotated[int, _is(
        "0: as an empty `--metrics-bind-address`", integer(0, 65_535, "PORT"), "metrics-port", RESTART, over_file=False
    )] = 10249
    cleanup: Annotated[bool, _is("As the command `cleanup`", BOOLEAN, "cleanup", RESTART, FILES)] = False
    init_only: Annotated[bool, _is(
        "Set what the node needs as root (connection tracking), and exit", BOOLEAN, "init-only", RESTART, FILES
    )] = False


# kube-proxy's flags that count although there is a file (options.go: processHostnameOverrideFlag, the logging flags).
_KUBE_PROXYS_OVER_FILE: Final = re.compile(r"hostnameOverride|logging\..*")

DOCUMENTS: Final[dict[str, type[KubeProxyConfiguration | HybridProxyConfiguration]]] = {
    KUBE_PROXY: KubeProxyConfiguration,
    HYBRID: HybridProxyConfiguration,
}
# fmt: on


@cache
def rows() -> tuple[Row, ...]:
    """Every setting, in the order of the documents; those of objects by their path."""
    types: tuple[type[msgspec.Struct], ...] = (*DOCUMENTS.values(), CommandLine)
    return tuple(row for cls in types for row in _rows(cls, cls.__name__, ""))


def _rows(cls: type[msgspec.Struct], document: str, prefix: str) -> Iterator[Row]:
    for field in msgspec.structs.fields(cls):
        path = prefix + field.encode_name
        if get_origin(field.type) is Annotated:
            setting: Setting = get_args(field.type)[1].extra["setting"]
            if document == KUBE_PROXY and not _KUBE_PROXYS_OVER_FILE.fullmatch(path):
                setting = setting._replace(over_file=False)
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            yield Row(document, path, default, setting)
        elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _rows(field.type, document, path + ".")
