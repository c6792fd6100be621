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
from hybrid_proxy.controller.settings import forms
from hybrid_proxy.dataplane.balancing import CHOICES
from hybrid_proxy.dataplane.options import EbpfOptions, FlowTimeouts, IpvsOptions, Options, of_ipvs, of_nftables
from hybrid_proxy.dataplane.settings import (
    AT_ONCE,
    BOOLEAN,
    CIDRS,
    INT32,
    NODE,
    REOPENS,
    RESTART,
    TEXT,
    Section,
    Setting,
    choice,
    define,
    integer,
    seconds,
    whole_seconds,
)

KUBE_PROXY: Final = "KubeProxyConfiguration"
HYBRID: Final = "HybridProxyConfiguration"
MODES: Final = ("ebpf", "nftables", "iptables", "ipvs", "userspace")  # best first
KUBE_PROXYS_MODES: Final = ("iptables", "ipvs", "nftables")

FILES: Final = "configuration files (docs/configuration.md)"
SOURCES: Final = "where the objects come from (default: the cluster's API server)"
THIS_NODE: Final = "this node and its pods (kube-proxy's names and defaults)"
SERVICES: Final = "what a Service means on this node (kube-proxy's names and defaults)"
SERVERS: Final = "where the agent listens"
LOG: Final = "log"


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


# ---------------------------------------------------------------------------------------------- kube-proxy's

_OPTIONS: Final = Options()
_TIMEOUTS: Final = FlowTimeouts()
_LONGEST_UDP: Final = INT32 // 1000  # the programs count in jiffies, of which a second has at most 1,000
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
_BIT: Final = "The bit of the packet mark that requests masquerade"
_ALL: Final = "Replace the source address of everything that is sent to a ClusterIP"


# Every setting has one shape: name and type, description, form, flag and effect, default.
# fmt: off
class ClientConnection(Section, frozen=True):
    """The connection to the API server."""

    kubeconfig: Annotated[str, define(
        "File with the API server's address and credentials; without it and `--master`: the pod's service account",
        TEXT._replace(metavar="FILE"), "kubeconfig", RESTART, SOURCES
    )] = ""
    accept_content_types: Annotated[str, define(
        "Accept header", TEXT, effect=RESTART, unused=_JSON, harmless=_ACCEPTED
    )] = ""
    content_type: Annotated[str, define(
        "Content type of requests", TEXT, "kube-api-content-type", RESTART, unused=_JSON, harmless=_ACCEPTED, zero=True
    )] = "application/vnd.kubernetes.protobuf"
    qps: Annotated[float, define(
        "Requests to the API server per second; all pages of one list count as one request", forms.NUMBER,
        "kube-api-qps", RESTART, zero=True
    )] = 5.0
    burst: Annotated[int, define(
        "Requests that may be sent at once", integer(), "kube-api-burst", RESTART, zero=True
    )] = 10


class JsonOptions(Section, frozen=True):
    split_stream: Annotated[bool, define("Info to stdout", BOOLEAN, "log-json-split-stream", unused=_STDERR)] = False
    info_buffer_size: Annotated[Any, define(
        "Bytes", forms.ANYTHING, "log-json-info-buffer-size", unused=_STDERR, zero=True
    )] = "0"


class TextOptions(Section, frozen=True):
    split_stream: Annotated[bool, define("Info to stdout", BOOLEAN, "log-text-split-stream", unused=_STDERR)] = False
    info_buffer_size: Annotated[Any, define(
        "Bytes", forms.ANYTHING, "log-text-info-buffer-size", unused=_STDERR, zero=True
    )] = "0"


class LoggingOptions(Section, frozen=True):
    json: JsonOptions = JsonOptions()
    text: TextOptions = TextOptions()


class Logging(Section, frozen=True):
    """The log (component-base's LoggingConfiguration)."""

    format: Annotated[str, define(
        "`text` for people, or `json`, one object per line", choice("text", "json"), "logging-format", group=LOG,
        zero=True
    )] = "text"
    flush_frequency: Annotated[float, define(
        "How often buffered lines are written", seconds()._replace(raw=str | int), "log-flush-frequency",
        unused=_STDERR, zero=True
    )] = 5.0
    verbosity: Annotated[int, define(
        "How much to log: 0 to 10, as kube-proxy's; from 4 on, every change", integer(), "v", group=LOG
    )] = 0
    vmodule: Annotated[Any, define(
        "Other verbosities by source file", forms.ANYTHING, "vmodule", unused="there are no levels by source file",
        zero=True
    )] = msgspec.field(default_factory=list)
    options: LoggingOptions = LoggingOptions()


class IPTables(Section, frozen=True):
    """Settings of the modes iptables, ebpf and userspace (and auto), and kube-proxy's for mode ipvs, too."""

    masquerade_bit: Annotated[int, define(
        _BIT, integer(0, 31, "BIT"), "iptables-masquerade-bit", REOPENS, NODE
    )] = _SETTINGS.masquerade_bit
    masquerade_all: Annotated[bool, define(_ALL, BOOLEAN, "masquerade-all", group=SERVICES)] = _SETTINGS.masquerade_all
    localhost_node_ports: Annotated[bool, define(
        "Serve node ports at 127.0.0.1 and ::1, to this node's own clients, where `nodePortAddresses` is unset or "
        "covers them; of every mode", BOOLEAN, "iptables-localhost-nodeports", group=SERVICES
    )] = _SETTINGS.localhost_node_ports
    sync_period: Annotated[float, define(
        _SYNC, seconds(positive=True), "iptables-sync-period", REOPENS, NODE, zero=True
    )] = _OPTIONS.sync_seconds
    min_sync_period: Annotated[float, define(_REST, seconds(), "iptables-min-sync-period", zero=True)] = 1.0


class IPVS(IpvsOptions, frozen=True):
    """Settings of mode ipvs."""

    sync_period: Annotated[float, of_ipvs(
        "As `iptables.syncPeriod`", seconds(positive=True), "ipvs-sync-period", zero=True,
        help="as --iptables-sync-period"
    )] = _OPTIONS.sync_seconds
    min_sync_period: Annotated[float, of_ipvs(
        "As `iptables.minSyncPeriod`", seconds(), "ipvs-min-sync-period", effect=AT_ONCE,
        help="as --iptables-min-sync-period, but every value counts"
    )] = 0.0


class NFTables(Section, frozen=True):
    """Settings of mode nftables; without a file the flags of the iptables section count."""

    masquerade_bit: Annotated[int, of_nftables(
        "As `iptables.masqueradeBit`", integer(0, 31), "iptables-masquerade-bit", effect=REOPENS
    )] = _SETTINGS.masquerade_bit
    masquerade_all: Annotated[bool, of_nftables(
        "As `iptables.masqueradeAll`", BOOLEAN, "masquerade-all", effect=AT_ONCE
    )] = _SETTINGS.masquerade_all
    sync_period: Annotated[float, of_nftables(
        "As `iptables.syncPeriod`", seconds(positive=True), "iptables-sync-period", effect=REOPENS, zero=True
    )] = _OPTIONS.sync_seconds
    min_sync_period: Annotated[float, of_nftables(
        "As `iptables.minSyncPeriod`", seconds(), "iptables-min-sync-period", effect=AT_ONCE, zero=True
    )] = 1.0


class Winkernel(Section, frozen=True):
    """Settings of kube-proxy for Windows."""

    network_name: Annotated[str, define("Windows", TEXT, unused=_WINDOWS)] = ""
    source_vip: Annotated[str, define("Windows", TEXT, unused=_WINDOWS)] = ""
    enable_dsr: Annotated[bool, define(
        "Windows", BOOLEAN, unused=f"{_WINDOWS}; see `{HYBRID}.ebpf.dsr`"
    )] = msgspec.field( default=False, name="enableDSR" )
    root_hns_endpoint_name: Annotated[str, define("Windows", TEXT, unused=_WINDOWS)] = ""
    forward_health_check_vip: Annotated[bool, define("Windows", BOOLEAN, unused=_WINDOWS)] = False


class DetectLocal(Section, frozen=True):
    """Names for detectLocalMode."""

    bridge_interface: Annotated[str, define(
        "The pods' bridge, for BridgeInterface", forms.INTERFACE, "pod-bridge-interface", REOPENS, THIS_NODE
    )] = ""
    interface_name_prefix: Annotated[str, define(
        "The prefix of pod interfaces' names, for InterfaceNamePrefix", forms.INTERFACE._replace(metavar="PREFIX"),
        "pod-interface-name-prefix", REOPENS, THIS_NODE
    )] = ""


class Conntrack(Section, frozen=True):
    """The kernel's connection tracking, set at the start in every mode; 0 leaves a value as it is. Times in seconds."""

    max_per_core: Annotated[int, define(
        "nf_conntrack_max for each CPU, at most 1,048,576 in all; 0: leave it, whatever `min` is", integer(),
        "conntrack-max-per-core"
    )] = 32_768
    min: Annotated[int, define("Least value of nf_conntrack_max", integer(), "conntrack-min")] = 131_072
    tcp_established_timeout: Annotated[int, define(
        "Forget an established connection after this time without a packet; also in mode ebpf", whole_seconds(),
        "conntrack-tcp-timeout-established", REOPENS
    )] = _TIMEOUTS.tcp_established
    tcp_close_wait_timeout: Annotated[int, define(
        "Forget a connection that one side has closed after this time without a packet; also in mode ebpf",
        whole_seconds(), "conntrack-tcp-timeout-close-wait", REOPENS
    )] = _TIMEOUTS.tcp_close_wait
    tcp_be_liberal: Annotated[bool, define(
        "Do not treat packets outside of the TCP window as invalid", BOOLEAN, "conntrack-tcp-be-liberal"
    )] = False
    udp_timeout: Annotated[int, define(
        f"Forget a UDP flow after this time without a packet; also in mode ebpf (0: {_TIMEOUTS.udp}s there)",
        whole_seconds(), "conntrack-udp-timeout", REOPENS
    )] = 0
    udp_stream_timeout: Annotated[int, define(
        "The same once both sides have sent for a while; also in mode ebpf "
        f"(0: {_TIMEOUTS.udp_stream}s there)", whole_seconds(), "conntrack-udp-timeout-stream", REOPENS
    )] = 0

    @property
    def flow_timeouts(self) -> FlowTimeouts:
        """The timeouts of flows that a mode tracks itself: there 0 stands for the default."""
        return FlowTimeouts(
            self.tcp_established_timeout or _TIMEOUTS.tcp_established,
            self.tcp_close_wait_timeout or _TIMEOUTS.tcp_close_wait,
            min(self.udp_timeout or _TIMEOUTS.udp, _LONGEST_UDP),
            min(self.udp_stream_timeout or _TIMEOUTS.udp_stream, _LONGEST_UDP),
        )


class KubeProxyConfiguration(Section, frozen=True):
    """The settings that kube-proxy reads: kubeproxy.config.k8s.io/v1alpha1."""

    api_version: str = "kubeproxy.config.k8s.io/v1alpha1"
    kind: str = KUBE_PROXY
    feature_gates: Annotated[dict[str, bool], define(
        "`AllowServiceExternalIPs=false`: do not serve external IPs, which will be kube-proxy's default from 1.40 on "
        "(KEP-5707). Other gates have no meaning here; a warning "
        "names them", forms.GATES, "feature-gates"
    )] = msgspec.field(default_factory=dict)
    client_connection: ClientConnection = ClientConnection()
    logging: Logging = Logging()
    hostname_override: Annotated[str, define(
        "This node's name, as in its Node object (default: the host name in lower case)", forms.NODE_NAME,
        "hostname-override", RESTART, THIS_NODE
    )] = ""
    bind_address: Annotated[str, define(
        "Use this as the node's IP instead of the Node object's; nothing is bound to it. With an IPv6 address, the "
        "defaults of the next two are `[::]:10256` and `[::1]:10249`", forms.ADDRESS, "bind-address", group=THIS_NODE,
        help="use this as the node's IP instead of the Node object's; nothing is bound to it", zero=True
    )] = "0.0.0.0"  # noqa: S104 (kube-proxy's default)
    healthz_bind_address: Annotated[forms.Endpoint | None, define(
        "Where health is served", forms.LISTEN, "healthz-bind-address", group=SERVERS, zero=True, shown="0.0.0.0:10256",
        help="where health is served; empty: nowhere"
    )] = None
    metrics_bind_address: Annotated[forms.Endpoint | None, define(
        "Where metrics are served", forms.LISTEN, "metrics-bind-address", group=SERVERS, zero=True,
        shown="127.0.0.1:10249", help="where metrics are served; empty: nowhere"
    )] = None
    bind_address_hard_fail: Annotated[bool, define(
        "Exit when health or metrics cannot be served there, instead of trying again", BOOLEAN,
        "bind-address-hard-fail", group=SERVERS
    )] = False
    enable_profiling: Annotated[bool, define(
        "Serve pages for debugging beside the metrics", BOOLEAN, "profiling", group=SERVERS
    )] = False
    show_hidden_metrics_for_version: Annotated[str, define(
        "Show metrics that the version after this one hid", TEXT, "show-hidden-metrics-for-version",
        unused="no metric is hidden"
    )] = ""
    mode: Annotated[str, define(
        f"`iptables`, `ipvs` or `nftables`; empty: as `{HYBRID}.mode`, which takes precedence in any case",
        TEXT._replace(metavar="MODE"), "proxy-mode", REOPENS, NODE,
        help=f"one of {', '.join(MODES)}, or auto: the best that works here (default: auto). A mode that cannot "
        "work is replaced: ebpf by nftables, nftables and ipvs by iptables; `status` shows which mode serves"
    )] = ""
    iptables: IPTables = msgspec.field(default=IPTables(), name="iptables")
    ipvs: IPVS = IPVS()
    nftables: NFTables = NFTables()
    winkernel: Winkernel = Winkernel()
    detect_local_mode: Annotated[DetectLocalMode, define(
        "How pods are recognized: by `ClusterCIDR`, `NodeCIDR`, `BridgeInterface` or `InterfaceNamePrefix`",
        forms.known(DetectLocalMode, "MODE"), "detect-local-mode", REOPENS, THIS_NODE, zero=True
    )] = _SETTINGS.detect
    detect_local: DetectLocal = DetectLocal()
    cluster_cidr: Annotated[tuple[str, ...], define(
        "The pods' range, or one of each family with a comma; without it nothing is recognized as a pod",
        forms.CIDR_PAIR, "cluster-cidr", group=THIS_NODE
    )] = msgspec.field(default=(), name="clusterCIDR")
    node_port_addresses: Annotated[tuple[str, ...], define(
        "The node's addresses that serve node ports: CIDRs, `primary`, `all` and `localhost` (127.0.0.1 and ::1, for "
        "the node's own clients), in any combination (default: primary and localhost, in every mode)",
        forms.NODE_PORT_ADDRESSES, "nodeport-addresses",
        group=SERVICES
    )] = ()
    oom_score_adj: Annotated[int, define(
        "How readily the kernel ends the agent when memory is short", integer(-1000, 1000), "oom-score-adj"
    )] = -999
    conntrack: Conntrack = Conntrack()
    config_sync_period: Annotated[float, define(
        "How often everything is reported again", seconds(positive=True), "config-sync-period", zero=True,
        unused="a running watch has nothing to repeat, and after a broken one everything is listed again"
    )] = 900.0
    port_range: Annotated[str, define("For a former mode userspace", TEXT, unused="kube-proxy ignores it, too")] = ""
    windows_run_as_service: Annotated[bool, define("Windows", BOOLEAN, "windows-service", unused=_WINDOWS)] = False


# ------------------------------------------------------------------------------------------------------ ours


class ExternalIPs(Section, frozen=True):
    """The external IPs of Services that are served, where the gate AllowServiceExternalIPs leaves them on."""

    allowed_cidrs: Annotated[tuple[str, ...], define(
        "Serve external IPs in these ranges only; a family without a range has none. Empty: all", CIDRS,
        "external-ips-cidrs", group=SERVICES
    )] = msgspec.field(default=_SETTINGS.external_ip_cidrs, name="allowedCIDRs")
    allowed_namespaces: Annotated[tuple[str, ...], define(
        "Serve external IPs of Services in these namespaces only. Empty: in all", forms.NAMESPACES,
        "external-ips-namespaces", group=SERVICES
    )] = _SETTINGS.external_ip_namespaces


class HybridProxyConfiguration(Section, frozen=True):
    """The settings that kube-proxy does not have: hybrid-proxy.io/v1alpha1."""

    api_version: str = "hybrid-proxy.io/v1alpha1"
    kind: str = HYBRID
    mode: Annotated[str, define(
        f"How the node is programmed; takes precedence over `{KUBE_PROXY}.mode`. `auto`: the best mode that works "
        "here; empty: as that field, or `auto` if it is empty, too",
        TEXT._replace(schema={"enum": ["", "auto", *MODES]}), effect=REOPENS
    )] = ""
    strict_mode: Annotated[bool, define(
        "Exit with an error instead of replacing a mode that cannot work", BOOLEAN, "strict-mode", REOPENS, NODE
    )] = False
    algorithm: Annotated[str, define(
        "How a backend is chosen, in the modes ebpf and ipvs, for services without the annotation "
        f"hybrid-proxy.io/algorithm: one of {', '.join(CHOICES)} (in mode ipvs, `random` means the scheduler of "
        "`ipvs.scheduler`)", choice(*CHOICES, metavar="NAME")._replace(schema={}), "algorithm", group=SERVICES
    )] = _SETTINGS.algorithm
    service_proxy_name: Annotated[str, define(
        "Serve only Services whose label `service.kubernetes.io/service-proxy-name` has this value, beside a "
        "kube-proxy, which serves those without the label. Empty: serve those without the label",
        forms.LABEL, "service-proxy-name", RESTART, SERVICES
    )] = ""
    external_ips: ExternalIPs = msgspec.field(default=ExternalIPs(), name="externalIPs")
    reset_gone_backends: Annotated[bool, define(
        "Reset open TCP connections to an endpoint that is gone, of services without the annotation "
        "hybrid-proxy.io/reset-gone-backends (not in mode ipvs)", BOOLEAN, "reset-gone-backends", group=SERVICES
    )] = _SETTINGS.reset_gone_backends
    manifests: Annotated[str, define(
        "A file or folder of YAML and JSON that objects come from instead of an API server; it is watched for "
        "changes", TEXT._replace(metavar="PATH"), "manifests", RESTART, SOURCES
    )] = ""
    node_addresses: Annotated[tuple[str, ...], define(
        "All addresses on the node's interfaces (default: `run` reads the interfaces, `explain` uses the Node "
        "object's)", forms.ADDRESSES, "node-addresses", RESTART, THIS_NODE
    )] = ()
    admin_socket: Annotated[str, define(
        "Where the agent listens for commands", TEXT._replace(metavar="PATH"), "admin-socket", RESTART, SERVERS
    )] = "/run/hybrid-proxy/admin.sock"
    serve_healthz: Annotated[bool, define(f"Serve health, at `{KUBE_PROXY}.healthzBindAddress`", BOOLEAN)] = True
    serve_metrics: Annotated[bool, define(f"Serve metrics, at `{KUBE_PROXY}.metricsBindAddress`", BOOLEAN)] = True
    drain_timeout: Annotated[float, define(
        "How long a mode that was left may go on serving the flows that it has; 0: until the last of them is over",
        seconds(), "drain-timeout", group=NODE
    )] = 0.0
    metrics_per_backend: Annotated[bool, define(
        "Count traffic for each backend instead of each service port", BOOLEAN, "metrics-per-backend", group=SERVERS
    )] = False
    ebpf: EbpfOptions = EbpfOptions()


class CommandLine(Section, frozen=True):
    """Settings that only a flag can set."""

    master: Annotated[str, define(
        "The API server's URL; takes precedence over the one in the kubeconfig", TEXT._replace(metavar="URL"), "master",
        RESTART, SOURCES
    )] = ""
    healthz_port: Annotated[int, define(
        "0: as an empty `--healthz-bind-address`", integer(0, 65_535, "PORT"), "healthz-port", RESTART, over_file=False
    )] = 10256
    metrics_port: Annotated[int, define(
        "0: as an empty `--metrics-bind-address`", integer(0, 65_535, "PORT"), "metrics-port", RESTART, over_file=False
    )] = 10249
    cleanup: Annotated[bool, define("As the command `cleanup`", BOOLEAN, "cleanup", RESTART, FILES)] = False
    init_only: Annotated[bool, define(
        "Set what the node needs as root (connection tracking), and exit", BOOLEAN, "init-only", RESTART, FILES
    )] = False


# kube-proxy's flags that count although there is a file (options.go: processHostnameOverrideFlag, the logging flags),
# and one that there does not: while a cluster migrates, both proxies have one file, and its change ends kube-proxies.
_KUBE_PROXYS_OVER_FILE: Final = re.compile(r"hostnameOverride|metricsBindAddress|logging\..*")

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
