"""PURE. The two documents of a configuration file, as types: every field with its default, flag and meaning.

`KubeProxyConfiguration` is kube-proxy's (kubeproxy.config.k8s.io/v1alpha1, Kubernetes 1.36), field by field;
`HybridProxyConfiguration` holds what kube-proxy has no word for. Everything else is derived from these types: which
setting a field is (`rows`), the JSON schema, docs/configuration.md. Whether a value is good is decided in one place
for files and flags, `controller.settings.config`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Final, NamedTuple, get_args, get_origin

import msgspec

__all__ = [
    "DOCUMENTS", "HYBRID", "KUBE_PROXY", "HybridProxyConfiguration", "KubeProxyConfiguration", "Row", "Setting",
    "rows",
]  # fmt: skip

KUBE_PROXY: Final = "KubeProxyConfiguration"
HYBRID: Final = "HybridProxyConfiguration"


class Setting(NamedTuple):
    """What a field is to us.

    `name` is the setting in `controller.settings.config` (empty: made of the path), `flag` the flag that means the same
    (None: there is none). `unused` says why a value other than the default has no effect. Fields of
    `zero_is_default` take their default when they are empty or 0, as kube-proxy's defaulting has it. `restart`: a
    change waits for the next start. `inverted`: the flag says the contrary.
    """

    name: str = ""
    flag: str | None = None
    unused: str = ""
    zero_is_default: bool = False
    restart: bool = False
    inverted: bool = False
    is_duration: bool = False


class Row(NamedTuple):
    """One field of a document."""

    document: str
    path: str  # iptables.masqueradeBit
    type: Any
    default: Any
    text: str
    setting: Setting

    @property
    def name(self) -> str:
        """Of the setting, as flags are named: iptables_masquerade_bit."""
        return self.setting.name or re.sub(r"[.\-]", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.path)).lower()

    @property
    def full_path(self) -> str:
        """With the document's kind, as kube-proxy names fields."""
        return f"{self.document}.{self.path}"


def _is(
    text: str,
    name: str = "",
    flag: str | None = None,
    *,
    unused: str = "",
    zero: bool = False,
    restart: bool = False,
    inverted: bool = False,
    choices: tuple[str, ...] = (),
    low: int | None = None,
    high: int | None = None,
) -> msgspec.Meta:
    schema: dict[str, Any] = {}
    if choices:
        schema["enum"] = list(choices)
    if low is not None:
        schema["minimum"] = low
    if high is not None:
        schema["maximum"] = high
    setting = Setting(name or (flag or "").replace("-", "_"), flag, unused, zero, restart, inverted)
    return msgspec.Meta(description=text, extra={"setting": setting}, extra_json_schema=schema)


def _time(
    text: str, name: str = "", flag: str | None = None, *, unused: str = "", zero: bool = False, restart: bool = False
) -> msgspec.Meta:
    """A duration: a text, as in Go."""
    setting = Setting(name or (flag or "").replace("-", "_"), flag, unused, zero, restart, is_duration=True)
    pattern = r"^([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+$|^0$"
    return msgspec.Meta(description=text, extra={"setting": setting}, extra_json_schema={"pattern": pattern})


def _must_be(text: str) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema={"const": text})


class _Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """An object in a document."""


class _Loose(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An object in kube-proxy's document: fields that it does not know are told and left out."""


# ---------------------------------------------------------------------------------------------- kube-proxy's

_JSON: Final = "the API is read as JSON, which is decoded faster here"
_WINDOWS: Final = "this proxy is for Linux"
_STDERR: Final = "each line is written to stderr at once"


class ClientConnection(_Loose, frozen=True):
    """How the API server is reached."""

    kubeconfig: Annotated[
        str,
        _is("File that says how to reach the API server; without it and --master: the pod's service account",
            "kubeconfig", "kubeconfig", restart=True),
    ] = ""  # fmt: skip
    accept_content_types: Annotated[str, _is("Accept header", "kube_api_accept", unused=_JSON, restart=True)] = ""
    content_type: Annotated[
        str,
        _is("Content type of requests", "kube_api_content_type", "kube-api-content-type", unused=_JSON, zero=True,
            restart=True),
    ] = "application/vnd.kubernetes.protobuf"  # fmt: skip
    qps: Annotated[
        float,
        _is("Requests a second, of those that read and of those that write; the pages of a list are one request",
            "kube_api_qps", "kube-api-qps", zero=True, restart=True),
    ] = 5  # fmt: skip
    burst: Annotated[
        int,
        _is("How many of them may come at once", "kube_api_burst", "kube-api-burst", zero=True, restart=True, low=0),
    ] = 10


class VModule(_Loose, frozen=True):
    """Another verbosity for some source files."""

    file_pattern: str = ""
    verbosity: int = 0


class JsonOptions(_Loose, frozen=True):
    """Options of one log format."""

    split_stream: Annotated[
        bool, _is("Info to stdout", "log_json_split_stream", "log-json-split-stream", unused=_STDERR)
    ] = False
    info_buffer_size: Annotated[
        str | int, _is("Bytes", "log_json_info_buffer_size", "log-json-info-buffer-size", unused=_STDERR, zero=True)
    ] = "0"


class TextOptions(_Loose, frozen=True):
    """Options of one log format."""

    split_stream: Annotated[
        bool, _is("Info to stdout", "log_text_split_stream", "log-text-split-stream", unused=_STDERR)
    ] = False
    info_buffer_size: Annotated[
        str | int, _is("Bytes", "log_text_info_buffer_size", "log-text-info-buffer-size", unused=_STDERR, zero=True)
    ] = "0"


class LoggingOptions(_Loose, frozen=True):
    """Options of the log formats."""

    json: JsonOptions = JsonOptions()
    text: TextOptions = TextOptions()


class Logging(_Loose, frozen=True):
    """What is logged (component-base's LoggingConfiguration)."""

    format: Annotated[
        str,
        _is("`text` for people, or `json`, one object a line", "logging_format", "logging-format", zero=True,
            choices=("text", "json")),
    ] = "text"  # fmt: skip
    flush_frequency: Annotated[
        str | int, _time("How often buffered lines are written", "log_flush_frequency", "log-flush-frequency",
                         unused=_STDERR, zero=True),
    ] = "5s"  # fmt: skip
    verbosity: Annotated[int, _is("How much; details of what is done from 4 on", "v", "v", low=0)] = 0
    vmodule: Annotated[
        tuple[VModule, ...],
        _is("Other verbosities by source file", "vmodule", "vmodule", unused="there are no levels by source file"),
    ] = ()
    options: LoggingOptions = LoggingOptions()


class IPTables(_Loose, frozen=True):
    """Of the modes iptables, ebpf and userspace (and auto), and kube-proxy's for mode ipvs, too."""

    masquerade_bit: Annotated[
        int, _is("The bit of the packet mark for masquerade", "iptables_masquerade_bit", "iptables-masquerade-bit",
                 low=0, high=31),
    ] = 14  # fmt: skip
    masquerade_all: Annotated[
        bool, _is("Replace the source address of everything sent to a ClusterIP", "masquerade_all", "masquerade-all")
    ] = False
    localhost_node_ports: Annotated[
        bool,
        _is("Serve node ports at 127.0.0.1", "iptables_localhost_nodeports", "iptables-localhost-nodeports",
            unused="node ports are not served at 127.0.0.1 in any mode, as in kube-proxy's modes ipvs and nftables; "
            "false says so"),
    ] = True  # fmt: skip
    sync_period: Annotated[
        str,
        _time("Compare with the kernel so often, where it does not tell of changes itself", "iptables_sync_period",
              "iptables-sync-period", zero=True),
    ] = "30s"  # fmt: skip
    min_sync_period: Annotated[
        str,
        _time("Rest after a sync before the next begins; kube-proxy's default of 1s stands for what a sync costs "
              "there, and counts as 0 here", "iptables_min_sync_period", "iptables-min-sync-period", zero=True),
    ] = "1s"  # fmt: skip


class IPVS(_Loose, frozen=True):
    """Of mode ipvs."""

    sync_period: Annotated[
        str, _time("As iptables.syncPeriod, in mode ipvs", "ipvs_sync_period", "ipvs-sync-period", zero=True)
    ] = "30s"
    min_sync_period: Annotated[
        str, _time("As iptables.minSyncPeriod, in mode ipvs", "ipvs_min_sync_period", "ipvs-min-sync-period")
    ] = "0s"
    scheduler: Annotated[
        str, _is("What services without another algorithm get; empty: rr", "ipvs_scheduler", "ipvs-scheduler")
    ] = ""
    exclude_cidrs: Annotated[
        tuple[str, ...],
        _is("Virtual servers in these are never touched", "ipvs_exclude_cidrs", "ipvs-exclude-cidrs"),
    ] = msgspec.field(default=(), name="excludeCIDRs")
    strict_arp: Annotated[
        bool, _is("Answer ARP for addresses of the asked interface alone", "ipvs_strict_arp", "ipvs-strict-arp")
    ] = msgspec.field(default=False, name="strictARP")
    tcp_timeout: Annotated[
        str, _time("Forget idle TCP connections after this; 0: as the kernel has it", "ipvs_tcp_timeout",
                   "ipvs-tcp-timeout"),
    ] = "0s"  # fmt: skip
    tcp_fin_timeout: Annotated[str, _time("The same after a FIN", "ipvs_tcpfin_timeout", "ipvs-tcpfin-timeout")] = "0s"
    udp_timeout: Annotated[str, _time("The same for datagrams", "ipvs_udp_timeout", "ipvs-udp-timeout")] = "0s"


class NFTables(_Loose, frozen=True):
    """Of mode nftables."""

    masquerade_bit: Annotated[int, _is("As iptables.masqueradeBit", "nftables_masquerade_bit", low=0, high=31)] = 14
    masquerade_all: Annotated[bool, _is("As iptables.masqueradeAll", "nftables_masquerade_all")] = False
    sync_period: Annotated[str, _time("As iptables.syncPeriod", "nftables_sync_period", zero=True)] = "30s"
    min_sync_period: Annotated[str, _time("As iptables.minSyncPeriod", "nftables_min_sync_period", zero=True)] = "1s"


class Winkernel(_Loose, frozen=True):
    """Of kube-proxy for Windows."""

    network_name: Annotated[str, _is("Windows", "network_name", unused=_WINDOWS)] = ""
    source_vip: Annotated[str, _is("Windows", "source_vip", unused=_WINDOWS)] = ""
    enable_dsr: Annotated[bool, _is("Windows", "enable_dsr", unused=f"{_WINDOWS}; see {HYBRID}.ebpf.dsr")] = (
        msgspec.field(default=False, name="enableDSR")
    )
    root_hns_endpoint_name: Annotated[str, _is("Windows", "root_hns_endpoint_name", unused=_WINDOWS)] = ""
    forward_health_check_vip: Annotated[bool, _is("Windows", "forward_healthcheck_vip", unused=_WINDOWS)] = False


class DetectLocal(_Loose, frozen=True):
    """Names for detectLocalMode."""

    bridge_interface: Annotated[
        str, _is("The bridge of pods, for BridgeInterface", "pod_bridge_interface", "pod-bridge-interface")
    ] = ""
    interface_name_prefix: Annotated[
        str,
        _is("How interfaces of pods begin, for InterfaceNamePrefix", "pod_interface_name_prefix",
            "pod-interface-name-prefix"),
    ] = ""  # fmt: skip


class Conntrack(_Loose, frozen=True):
    """The kernel's connection tracking, set at the start in every mode; 0 leaves a value as it is."""

    max_per_core: Annotated[
        int,
        _is("nf_conntrack_max for each CPU, at most 1,048,576 in all; 0: leave it, whatever `min` says",
            "conntrack_max_per_core", "conntrack-max-per-core", low=0),
    ] = 32768  # fmt: skip
    min: Annotated[int, _is("nf_conntrack_max at least", "conntrack_min", "conntrack-min", low=0)] = 131072
    tcp_established_timeout: Annotated[
        str,
        _time("Forget an established connection after so long without a packet; mode ebpf too",
              "conntrack_tcp_timeout_established", "conntrack-tcp-timeout-established"),
    ] = "24h0m0s"  # fmt: skip
    tcp_close_wait_timeout: Annotated[
        str,
        _time("The same when one side has ended it; mode ebpf too", "conntrack_tcp_timeout_close_wait",
              "conntrack-tcp-timeout-close-wait"),
    ] = "1h0m0s"  # fmt: skip
    tcp_be_liberal: Annotated[
        bool,
        _is("Let packets out of the window pass as known ones", "conntrack_tcp_be_liberal",
            "conntrack-tcp-be-liberal"),
    ] = False  # fmt: skip
    udp_timeout: Annotated[
        str,
        _time("Forget datagrams after so long; mode ebpf too (0: 30s)", "conntrack_udp_timeout",
              "conntrack-udp-timeout"),
    ] = "0s"  # fmt: skip
    udp_stream_timeout: Annotated[
        str,
        _time("The same when both sides have sent for a while; mode ebpf too (0: 3m)", "conntrack_udp_timeout_stream",
              "conntrack-udp-timeout-stream"),
    ] = "0s"  # fmt: skip


class KubeProxyConfiguration(_Loose, frozen=True):
    """What kube-proxy reads: kubeproxy.config.k8s.io/v1alpha1."""

    api_version: Annotated[str, _must_be("kubeproxy.config.k8s.io/v1alpha1")] = "kubeproxy.config.k8s.io/v1alpha1"
    kind: Annotated[str, _must_be(KUBE_PROXY)] = KUBE_PROXY
    feature_gates: Annotated[
        dict[str, bool],
        _is("`AllowServiceExternalIPs` false: external IPs of Services are not served. Others have no meaning here "
            "and are named in a warning", "feature_gates", "feature-gates"),
    ] = msgspec.field(default_factory=dict)  # fmt: skip
    client_connection: ClientConnection = ClientConnection()
    logging: Logging = Logging()
    hostname_override: Annotated[
        str,
        _is("This node's name, as in its Node object (default: the host name in lower case)", "hostname_override",
            "hostname-override", restart=True),
    ] = ""  # fmt: skip
    bind_address: Annotated[
        str,
        _is("Use this as the node's IP instead of the Node object's; binds nothing. An IPv6 address makes "
            "`[::]:10256` and `[::1]:10249` the next two defaults", "bind_address", "bind-address", zero=True),
    ] = "0.0.0.0"  # fmt: skip  # noqa: S104 (kube-proxy's default)
    healthz_bind_address: Annotated[
        str,
        _is("Where health is served", "healthz_bind_address", "healthz-bind-address", zero=True),
    ] = "0.0.0.0:10256"
    metrics_bind_address: Annotated[
        str,
        _is("Where metrics are served", "metrics_bind_address", "metrics-bind-address", zero=True),
    ] = "127.0.0.1:10249"
    bind_address_hard_fail: Annotated[
        bool,
        _is("End when health or metrics cannot be served, instead of trying again", "bind_address_hard_fail",
            "bind-address-hard-fail"),
    ] = False  # fmt: skip
    enable_profiling: Annotated[bool, _is("Serve pages for debugging beside the metrics", "profiling", "profiling")] = (
        False
    )
    show_hidden_metrics_for_version: Annotated[
        str,
        _is("Show metrics that the version after this one hid", "show_hidden_metrics_for_version",
            "show-hidden-metrics-for-version", unused="no metric is hidden"),
    ] = ""  # fmt: skip
    mode: Annotated[
        str,
        _is(f"`iptables`, `ipvs`, `nftables`; empty: as {HYBRID}.mode says, which wins in any case", "proxy_mode",
            "proxy-mode"),
    ] = ""  # fmt: skip
    iptables: IPTables = msgspec.field(default=IPTables(), name="iptables")
    ipvs: IPVS = IPVS()
    nftables: NFTables = NFTables()
    winkernel: Winkernel = Winkernel()
    detect_local_mode: Annotated[
        str,
        _is("How pods are told apart: `ClusterCIDR`, `NodeCIDR`, `BridgeInterface` or `InterfaceNamePrefix`",
            "detect_local_mode", "detect-local-mode", zero=True),
    ] = "ClusterCIDR"  # fmt: skip
    detect_local: DetectLocal = DetectLocal()
    cluster_cidr: Annotated[
        str, _is("The pods' range, or one of each family with a comma; without it pods are outsiders", "cluster_cidr",
                 "cluster-cidr"),
    ] = msgspec.field(default="", name="clusterCIDR")  # fmt: skip
    node_port_addresses: Annotated[
        tuple[str, ...],
        _is("The node's addresses that serve node ports: CIDRs, `primary`, `localhost` (nothing is served there yet) "
            "and `all`, in any mix (default: primary, in every mode)", "nodeport_addresses", "nodeport-addresses"),
    ] = ()  # fmt: skip
    oom_score_adj: Annotated[
        int,
        _is("How readily the kernel ends the agent when memory is short", "oom_score_adj", "oom-score-adj", low=-1000,
            high=1000),
    ] = -999  # fmt: skip
    conntrack: Conntrack = Conntrack()
    config_sync_period: Annotated[
        str,
        _time("How often everything is told again", "config_sync_period", "config-sync-period", zero=True,
              unused="a watch that goes on has nothing to tell again; after a broken one all is listed anew"),
    ] = "15m0s"  # fmt: skip
    port_range: Annotated[
        str, _is("Was for mode userspace", "proxy_port_range", unused="kube-proxy ignores it too")
    ] = ""
    windows_run_as_service: Annotated[bool, _is("Windows", "windows_service", "windows-service", unused=_WINDOWS)] = (
        False
    )


# ------------------------------------------------------------------------------------------------------ ours


class Failover(_Part, frozen=True):
    """Backends that fail (mode ebpf)."""

    failures: Annotated[
        int,
        _is("Leave a backend out for a while after so many connections, one after the other, that it did not answer or "
            "refused; 0: never", "failover_failures", "failover-failures", low=0, high=1_000_000),
    ] = 3  # fmt: skip


class Probes(_Part, frozen=True):
    """Of backends of services with annotation hybrid-proxy.io/probe (mode ebpf)."""

    interval: Annotated[str, _time("Ask so often, 100ms at least", "probe_interval", "probe-interval")] = "5s"
    timeout: Annotated[str, _time("Wait so long for an answer, 10ms at least", "probe_timeout", "probe-timeout")] = "1s"
    failures: Annotated[
        int,
        _is("Leave a backend out after so many probes without an answer", "probe_failures", "probe-failures", low=1,
            high=1000),
    ] = 3  # fmt: skip


class Limits(_Part, frozen=True):
    """Room in the maps (mode ebpf)."""

    services: Annotated[
        int, _is("Service ports", "max_services", "max-services", restart=True, low=1, high=1 << 24)
    ] = 32_768
    backends: Annotated[int, _is("Backends", "max_backends", "max-backends", restart=True, low=1, high=1 << 24)] = (
        262_144
    )
    slots: Annotated[
        int, _is("Places of backends in routes", "max_slots", "max-slots", restart=True, low=1, high=1 << 28)
    ] = 262_144
    ring: Annotated[
        int,
        _is("Places that Maglev, source hash, weights and least connections may take for one service port; give all "
            "nodes the same", "max_ring", "max-ring", restart=True, low=1, high=65_521),
    ] = 16_381  # fmt: skip
    flows: Annotated[
        int,
        _is("Entries, two for each flow, in each address family", "max_flows", "max-flows", restart=True, low=2,
            high=1 << 26),
    ] = 262_144  # fmt: skip


class Ebpf(_Part, frozen=True):
    """Of mode ebpf."""

    pod_interfaces: Annotated[
        tuple[str, ...],
        _is("Interfaces of pods, such as `veth*` (default: found by kind)", "pod_interfaces", "pod-interfaces"),
    ] = ()
    uplink_interfaces: Annotated[
        tuple[str, ...],
        _is("Interfaces to the outside, such as `eth0` (default: found)", "uplink_interfaces", "uplink-interfaces"),
    ] = ()
    socket_scope: Annotated[
        str,
        _is("Whose sockets choose a backend at connect(): the `host`'s own, `all` (pods' too) or `off`",
            "socket_scope", "socket-scope", choices=("host", "all", "off")),
    ] = "host"  # fmt: skip
    cgroup: Annotated[
        str, _is("cgroup v2 folder of the node's own sockets (default: found)", "cgroup", "cgroup", restart=True)
    ] = ""
    pin_root: Annotated[
        str, _is("Folder on a BPF file system for the pins (default: found)", "pin_root", "pin-root", restart=True)
    ] = ""
    fast_path: Annotated[
        bool,
        _is("Established flows between local pods skip the host's stack", "no_fast_path", "no-fast-path",
            inverted=True),
    ] = True  # fmt: skip
    traffic_counters: Annotated[
        bool,
        _is("Count flows, packets and bytes of services and backends", "no_traffic_counters", "no-traffic-counters",
            inverted=True),
    ] = True  # fmt: skip
    answer_ping: Annotated[
        bool, _is("Answer pings of ClusterIPs instead of refusing them", "answer_ping", "answer-ping")
    ] = False
    source_check: Annotated[
        str,
        _is("Refuse new flows whose source is not behind the interface that they come in at: as the kernel does there "
            "(rp_filter), or at all interfaces and of IPv6 too", "source_check", "source-check",
            choices=("auto", "strict")),
    ] = "auto"  # fmt: skip
    xdp: Annotated[
        str,
        _is("Forward known flows to other nodes' backends in the drivers of uplinks: where that is safe by itself, "
            "wherever a driver can, or nowhere", "xdp", "xdp", choices=("auto", "native", "off")),
    ] = "auto"  # fmt: skip
    dsr: Annotated[
        str,
        _is("On all nodes alike: wrap requests from outside for backends of other nodes (IP in IP), so that these "
            "answer the client directly", "dsr", "dsr", choices=("off", "ipip")),
    ] = "off"  # fmt: skip
    masquerade_ports: Annotated[
        str,
        _is("Source ports that masqueraded clients get, FIRST-LAST; keep them apart from node ports and from "
            "net.ipv4.ip_local_port_range", "masquerade_ports", "masquerade-ports"),
    ] = "1024-29695"  # fmt: skip
    event_rate: Annotated[
        int,
        _is("Drops, refusals and traced packets that are told to the agent, per second and CPU", "event_rate",
            low=0, high=1_000_000),
    ] = 100  # fmt: skip
    reject_rate: Annotated[
        int, _is("Refusals that are answered with ICMP, per second and CPU", "reject_rate", low=0, high=100_000_000)
    ] = 10_000
    failover: Failover = Failover()
    probes: Probes = Probes()
    limits: Limits = Limits()


class HybridProxyConfiguration(_Part, frozen=True):
    """What kube-proxy has no word for: hybrid-proxy.io/v1alpha1."""

    api_version: Annotated[str, _must_be("hybrid-proxy.io/v1alpha1")] = "hybrid-proxy.io/v1alpha1"
    kind: Annotated[str, _must_be(HYBRID)] = HYBRID
    mode: Annotated[
        str,
        _is(f"How the node is programmed, over {KUBE_PROXY}.mode; `auto`: the best that works here; empty: as "
            "that one says, `auto` where it is empty too", "mode",
            choices=("", "auto", "ebpf", "nftables", "iptables", "ipvs", "userspace")),
    ] = ""  # fmt: skip
    strict_mode: Annotated[
        bool, _is("End with an error instead of replacing a mode that cannot work", "strict_mode", "strict-mode")
    ] = False
    algorithm: Annotated[
        str,
        _is("How a backend is chosen for services without annotation hybrid-proxy.io/algorithm (modes ebpf, ipvs)",
            "algorithm", "algorithm"),
    ] = "random"  # fmt: skip
    manifests: Annotated[
        str,
        _is("A file or folder of YAML and JSON that objects come from, instead of an API server", "manifests",
            "manifests", restart=True),
    ] = ""  # fmt: skip
    node_addresses: Annotated[
        tuple[str, ...],
        _is("All addresses on the node's interfaces (default: read from the interfaces)", "node_addresses",
            "node-addresses", restart=True),
    ] = ()  # fmt: skip
    admin_socket: Annotated[
        str, _is("Where the agent listens for commands", "admin_socket", "admin-socket", restart=True)
    ] = "/run/hybrid-proxy/admin.sock"
    serve_healthz: Annotated[
        bool, _is(f"Serve health at all, at {KUBE_PROXY}.healthzBindAddress", "no_healthz", inverted=True)
    ] = True
    serve_metrics: Annotated[
        bool,
        _is(f"Serve metrics at all, at {KUBE_PROXY}.metricsBindAddress", "no_metrics", inverted=True),
    ] = True
    metrics_per_backend: Annotated[
        bool,
        _is("Count traffic for each backend instead of each service port", "metrics_per_backend",
            "metrics-per-backend"),
    ] = False  # fmt: skip
    ebpf: Ebpf = Ebpf()


DOCUMENTS: Final[dict[str, type[msgspec.Struct]]] = {
    KUBE_PROXY: KubeProxyConfiguration,
    HYBRID: HybridProxyConfiguration,
}


@cache
def rows() -> tuple[Row, ...]:
    """Every field of both documents, those of objects by their path."""
    return tuple(row for document, cls in DOCUMENTS.items() for row in _rows(cls, document, ""))


def _rows(cls: type[msgspec.Struct], document: str, prefix: str) -> Iterator[Row]:
    for field in msgspec.structs.fields(cls):
        path = prefix + field.encode_name
        if get_origin(field.type) is Annotated:
            kind, meta = get_args(field.type)
            if not meta.extra:
                continue  # apiVersion, kind
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            yield Row(document, path, kind, default, meta.description, meta.extra["setting"])
        elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _rows(field.type, document, path + ".")
