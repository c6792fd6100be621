"""One frozen `Config` from flags and files. Names and defaults are kube-proxy's where the meaning is.

The command line hands over texts as they were typed, by flag name, and `controller.settings.configfile` hands over
fields of documents in the same form; everything is checked here, so that each error names the flag, or file and
field, with its value, and nothing is touched before all of it is good. What has no effect is in `Config.warnings`,
with the reason.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import msgspec

import dataplane.modes
from controller.errors import ConfigError
from controller.kubernetes.parse import canonical_address, canonical_cidr
from controller.semantics.entries import NODE_PORT_KEYWORDS, DetectLocalMode, Settings
from dataplane.balancing import ALGORITHMS, ALIASES
from dataplane.mode import Options
from dataplane.table import family_of

__all__ = [
    "ADMIN_SOCKET", "CHOICES", "MODES", "REMOVED_FLAGS", "SCHEDULERS", "UNUSED", "USUAL_OOM_SCORE", "Config",
    "Conntrack", "Endpoint",
    "available_modes", "duration", "from_flags", "needs_reopening", "reopening_settings",
]  # fmt: skip

T = TypeVar("T")

ADMIN_SOCKET: Final = "/run/hybrid-proxy/admin.sock"
HEALTHZ_PORT: Final = 10256
METRICS_PORT: Final = 10249
AUTO: Final = "auto"  # the first mode that works here
MODES: Final = ("ebpf", "nftables", "iptables", "ipvs", "userspace")  # all that there will be, best first
KUBE_PROXYS_MODES: Final = ("iptables", "ipvs", "nftables")
USUAL_OOM_SCORE: Final = -999
USUAL_REST: Final = 1.0  # seconds, minSyncPeriod's default in kube-proxy
_INT32: Final = (1 << 31) - 1
_LONGEST_UDP: Final = _INT32 // 1000  # the programs count it in jiffies, of which a second has 1,000 at most

# Those of the kernel (net/netfilter/ipvs); what a kernel lacks is told when it is used.
SCHEDULERS: Final = ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "sed", "nq", "fo", "ovf", "mh", "twos")
CHOICES: Final = tuple(dict.fromkeys((*ALGORITHMS, *ALIASES, *SCHEDULERS)))  # what may be asked for; random is first


class Endpoint(msgspec.Struct, frozen=True):
    """Where a server listens."""

    address: str
    port: int


class Conntrack(msgspec.Struct, frozen=True):
    """The kernel's connection tracking as kube-proxy sets it; 0 leaves a value as it is. Times in seconds."""

    max_per_core: int = 32_768
    minimum: int = 131_072
    tcp_timeout_established: int = 86_400
    tcp_timeout_close_wait: int = 3_600
    tcp_be_liberal: bool = False
    udp_timeout: int = 0
    udp_timeout_stream: int = 0


class Config(msgspec.Struct, frozen=True):
    """Everything that `run` needs.

    `manifests` is a file or folder; None: objects come from the API server, found by `kubeconfig` and
    `master`, or by the pod's service account when both are None. `node_addresses` are the addresses on the
    node's interfaces; empty: they are read from the interfaces. `healthz_bind_address` and `metrics_bind_address`
    are where health and metrics are served, None: nowhere; with `bind_address_hard_fail` the agent ends when it
    cannot listen there. `enable_profiling` adds pages for debugging to those of the metrics. `min_sync_seconds` is
    the rest after a sync. `api_rate` requests a second go to the API server, `api_burst` of them at once.
    `oom_score_adj` is what proc_pid_oom_score_adj(5) says. `warnings` are sentences about settings that have no
    effect. `task` is serve, cleanup or prepare (--cleanup, --init-only).
    """

    settings: Settings
    options: Options = Options()
    mode: str = AUTO
    strict_mode: bool = False
    manifests: Path | None = None
    kubeconfig: str | None = None
    master: str | None = None
    node_addresses: tuple[str, ...] = ()
    healthz_bind_address: Endpoint | None = Endpoint("0.0.0.0", HEALTHZ_PORT)  # noqa: S104 (kube-proxy's default)
    metrics_bind_address: Endpoint | None = Endpoint("127.0.0.1", METRICS_PORT)
    bind_address_hard_fail: bool = False
    enable_profiling: bool = False
    metrics_per_backend: bool = False
    admin_socket: str = ADMIN_SOCKET
    log_format: str = "text"
    verbosity: int = 0
    min_sync_seconds: float = 0.0
    api_rate: float = 5.0
    api_burst: int = 10
    oom_score_adj: int = USUAL_OOM_SCORE
    conntrack: Conntrack = Conntrack()
    warnings: tuple[str, ...] = ()
    task: str = "serve"


def needs_reopening(old: Config, new: Config) -> bool:
    """Whether the mode must be opened anew for what is different. What only changes the table needs no more than that.

    How pods are told apart and the bit of the mark are wired into programs and rules when a mode begins.
    """

    def wired(config: Config) -> tuple[object, ...]:
        said = config.settings
        return (config.mode, config.strict_mode, config.options, said.detect, said.pod_interface, said.masquerade_bit)

    return wired(old) != wired(new)


@cache
def reopening_settings() -> frozenset[str]:
    """Names of the settings for which the mode is opened anew: those that are read to make what it is opened with.

    They are read in every mode and of flags and files, because some count in one of these alone.
    """
    read = _Noting(pod_bridge_interface="any0", pod_interface_name_prefix="any")
    for mode, detect, of_file in itertools.product((None, *available_modes()), DetectLocalMode, (False, True)):
        read |= {"mode": mode, "detect_local_mode": detect.value or None}
        _wired(_Flags(read, {} if of_file else None))
    return frozenset(read.names)


class _Noting(dict[str, Any]):
    """Values that note which of them are asked for."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.names = set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _wired(given: _Flags) -> tuple[object, ...]:
    """What `needs_reopening` compares, from the settings."""
    mode, detect = _mode(given), _detect(given)
    pods, bit = _pod_interface(given, detect), _masquerade_bit(given, mode)
    return mode, given.flag("strict_mode"), _options(given, mode), detect, pods, bit


def available_modes() -> tuple[str, ...]:
    """The modes of this installation: a folder in `dataplane.modes` is one."""
    import pkgutil

    found = {module.name for module in pkgutil.iter_modules(dataplane.modes.__path__) if module.ispkg}
    return (*(mode for mode in MODES if mode in found), *sorted(found.difference(MODES)))


def from_flags(flags: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Config:
    """A checked configuration.

    Args:
        flags: values by name, `cluster_cidr` for `--cluster-cidr`, as argparse's `vars()` gives them: texts,
            lists of texts for flags that may be repeated, None for what was not given. Others are ignored.
        origins: for values that come from a file, where they stand there; None: there is no file.

    Raises:
        ConfigError: names each flag, or file and field, that is wrong, its value and what is possible.
    """
    left, found = dict(flags), dict[str, str]()
    while True:
        try:
            config = _from_flags(left, origins)
        except ConfigError as error:
            follows = any(_Flags(flags, origins).called(name) in str(error) for name in found)
            if not follows:  # else it is because of what was put aside
                found[error.setting] = str(error)
            if left.get(error.setting) is None:
                raise ConfigError(*found.values()) from None
            left[error.setting] = None  # as if it were not there, to find what else is wrong
            continue
        if found:
            raise ConfigError(*found.values())
        return config


def _from_flags(flags: Mapping[str, Any], origins: Mapping[str, str] | None) -> Config:
    """The same, or the first error."""
    given = _Flags(flags, origins)
    default = Config(Settings())
    mode = _mode(given)
    settings = _settings(given, mode)
    config = Config(
        settings=settings,
        options=_options(given, mode),
        mode=mode,
        strict_mode=given.flag("strict_mode"),
        manifests=Path(text) if (text := given.text("manifests")) else None,
        kubeconfig=given.text("kubeconfig") or None,
        master=given.text("master") or None,
        node_addresses=given.addresses("node_addresses"),
        healthz_bind_address=_endpoint(given, "healthz", default.healthz_bind_address, settings),
        metrics_bind_address=_endpoint(given, "metrics", default.metrics_bind_address, settings),
        bind_address_hard_fail=given.flag("bind_address_hard_fail"),
        enable_profiling=given.flag("profiling"),
        metrics_per_backend=given.flag("metrics_per_backend"),
        admin_socket=given.text("admin_socket") or ADMIN_SOCKET,
        log_format=given.choice("logging_format", ("text", "json")),
        verbosity=given.number("v", 0, 0, _INT32),
        min_sync_seconds=_rest(given, mode),
        # 0 is what is not given, as in client-go.
        api_rate=(given.rate("kube_api_qps") if given.text("kube_api_qps") else 0) or default.api_rate,
        api_burst=given.number("kube_api_burst", 0, 0, _INT32) or default.api_burst,
        oom_score_adj=given.number("oom_score_adj", default.oom_score_adj, -1000, 1000),
        conntrack=_conntrack(given),
        task="cleanup" if given.flag("cleanup") else "prepare" if given.flag("init_only") else "serve",
    )
    if config.manifests and (config.kubeconfig or config.master):
        other = given.called("kubeconfig" if config.kubeconfig else "master")
        given.fail("manifests", f"cannot be used together with {other}: there is one source of objects")
    _look_at_unused(given)
    return msgspec.structs.replace(config, warnings=tuple(given.warnings))


def _settings(given: _Flags, mode: str) -> Settings:
    detect = _detect(given)
    return Settings(
        node_name=_node_name(given),
        detect=detect,
        cluster_cidrs=_cluster_cidrs(given),
        pod_interface=_pod_interface(given, detect),
        node_port_addresses=_node_port_addresses(given),
        masquerade_all=given.flag(_own(given, mode, "nftables_masquerade_all", "masquerade_all")),
        masquerade_bit=_masquerade_bit(given, mode),
        external_ips=_feature_gates(given),
        primary=_bind_address(given),
        algorithm=given.choice("algorithm", CHOICES),
        algorithms=frozenset(CHOICES),
    )


def _masquerade_bit(given: _Flags, mode: str) -> int:
    return given.number(_own(given, mode, "nftables_masquerade_bit", "iptables_masquerade_bit"), 14, 0, 31)


def _own(given: _Flags, mode: str, nftables: str, shared: str) -> str:
    """A setting of mode nftables has a field of its own and no flag: there the one of all modes counts."""
    return nftables if mode == "nftables" and given.of_file else shared


def _options(given: _Flags, mode: str) -> Options:
    default = Options()
    first, last = _masquerade_ports(given, default)
    established, close_wait, udp, stream = _conntrack_timeouts(given)
    return Options(
        pod_interfaces=given.items("pod_interfaces"),
        uplink_interfaces=given.items("uplink_interfaces"),
        cgroup=given.folder("cgroup"),
        pin_root=given.folder("pin_root"),
        socket_scope=given.choice("socket_scope", ("host", "all", "off")),
        failover_failures=given.number("failover_failures", default.failover_failures, 0, 1_000_000),
        probe_interval=given.seconds("probe_interval", default.probe_interval, at_least=0.1),
        probe_timeout=given.seconds("probe_timeout", default.probe_timeout, at_least=0.01),
        probe_failures=given.number("probe_failures", default.probe_failures, 1, 1000),
        fast_path=not given.flag("no_fast_path"),
        count_traffic=not given.flag("no_traffic_counters"),
        event_rate=given.number("event_rate", default.event_rate, 0, 1_000_000),
        reject_rate=given.number("reject_rate", default.reject_rate, 0, 100_000_000),
        answer_ping=given.flag("answer_ping"),
        source_check=given.choice("source_check", ("auto", "strict")),
        xdp=given.choice("xdp", ("auto", "native", "off")),
        max_services=given.number("max_services", default.max_services, 1, 1 << 24),
        max_backends=given.number("max_backends", default.max_backends, 1, 1 << 24),
        max_slots=given.number("max_slots", default.max_slots, 1, 1 << 28),
        max_ring=given.number("max_ring", default.max_ring, 1, 65_521),
        max_flows=given.number("max_flows", default.max_flows, 2, 1 << 26),
        port_first=first,
        dsr=given.choice("dsr", ("off", "ipip")) == "ipip",
        port_count=last - first + 1,
        # 0 leaves the kernel's value as it is; the programs have none of their own to leave.
        tcp_timeout_established=established or default.tcp_timeout_established,
        tcp_timeout_close_wait=close_wait or default.tcp_timeout_close_wait,
        udp_timeout=min(udp or default.udp_timeout, _LONGEST_UDP),
        udp_timeout_stream=min(stream or default.udp_timeout_stream, _LONGEST_UDP),
        sync_seconds=given.seconds(_period(given, mode, "sync_period"), default.sync_seconds, more_than=0),
        ipvs_scheduler=_of_ipvs(given, mode, lambda: given.choice("ipvs_scheduler", SCHEDULERS), SCHEDULERS[0]),
        ipvs_strict_arp=given.flag("ipvs_strict_arp"),
        ipvs_exclude_cidrs=_of_ipvs(given, mode, lambda: given.cidrs("ipvs_exclude_cidrs"), ()),
        ipvs_tcp_timeout=_of_ipvs(given, mode, lambda: given.whole_seconds("ipvs_tcp_timeout", 0), 0),
        ipvs_tcpfin_timeout=_of_ipvs(given, mode, lambda: given.whole_seconds("ipvs_tcpfin_timeout", 0), 0),
        ipvs_udp_timeout=_of_ipvs(given, mode, lambda: given.whole_seconds("ipvs_udp_timeout", 0), 0),
    )


def _of_ipvs(given: _Flags, mode: str, read: Callable[[], T], default: T) -> T:
    """As kube-proxy: what mode ipvs alone needs is no error in another mode."""
    try:
        return read()
    except ConfigError as error:
        if mode == "ipvs":
            raise
        given.warnings.append(f"{error}; the default is used, which matters in mode ipvs alone")
        return default


def _period(given: _Flags, mode: str, what: str) -> str:
    """The setting of this mode's section."""
    return f"ipvs_{what}" if mode == "ipvs" else _own(given, mode, f"nftables_{what}", f"iptables_{what}")


def _rest(given: _Flags, mode: str) -> float:
    """How long to wait after a sync.

    kube-proxy's second is there because its syncs are costly. Here a change costs what changed: the default is 0,
    and what was set to something else counts.
    """
    default = 0.0 if mode == "ipvs" else USUAL_REST
    name = _period(given, mode, "min_sync_period")
    rest = given.seconds(name, default)
    if rest > given.seconds(_period(given, mode, "sync_period"), Options().sync_seconds):
        given.fail(name, f"is longer than {given.called(_period(given, mode, 'sync_period'))}")
    return 0.0 if rest == default else rest


def _conntrack(given: _Flags) -> Conntrack:
    default = Conntrack()
    established, close_wait, udp, stream = _conntrack_timeouts(given)
    return Conntrack(
        max_per_core=given.number("conntrack_max_per_core", default.max_per_core, 0, _INT32),
        minimum=given.number("conntrack_min", default.minimum, 0, _INT32),
        tcp_timeout_established=established,
        tcp_timeout_close_wait=close_wait,
        tcp_be_liberal=given.flag("conntrack_tcp_be_liberal"),
        udp_timeout=udp,
        udp_timeout_stream=stream,
    )


def _conntrack_timeouts(given: _Flags) -> tuple[int, int, int, int]:
    """Seconds, 0: as the kernel has it: of TCP established and in CLOSE_WAIT, of UDP and its streams."""
    default = Conntrack()
    return (
        given.whole_seconds("conntrack_tcp_timeout_established", default.tcp_timeout_established),
        given.whole_seconds("conntrack_tcp_timeout_close_wait", default.tcp_timeout_close_wait),
        given.whole_seconds("conntrack_udp_timeout", default.udp_timeout),
        given.whole_seconds("conntrack_udp_timeout_stream", default.udp_timeout_stream),
    )


# Gates of kube-proxy that were for things which are always done here (KEP-1880, 2433, 1669, 4444, 1860, 3866).
_ALWAYS: Final = frozenset({
    "MultiCIDRServiceAllocator", "TopologyAwareHints", "ProxyTerminatingEndpoints", "ServiceTrafficDistribution",
    "PreferSameTrafficDistribution", "LoadBalancerIPMode", "NFTablesProxyMode", "KubeProxyIPVS",
    "EndpointSliceProxying", "ServiceInternalTrafficPolicy", "IPv6DualStack", "SCTPSupport",
})  # fmt: skip


def _feature_gates(given: _Flags) -> bool:
    """Whether external IPs are served (gate AllowServiceExternalIPs, KEP-5707); no other gate has a meaning here."""
    external_ips = True
    for item in given.items("feature_gates"):
        gate, equals, text = item.partition("=")
        if not equals or text.strip() not in _TRUE | _FALSE:
            given.fail("feature_gates", f"{item!r} is not of the form GATE=true or GATE=false")
        on = text.strip() in _TRUE
        if gate.strip() == "AllowServiceExternalIPs":
            external_ips = on
        elif gate.strip() not in _ALWAYS:
            given.warn("feature_gates", f"{gate.strip()} has no meaning here")
        elif not on:
            given.warn("feature_gates", f"{gate.strip()} cannot be turned off")
    return external_ips


# Settings of kube-proxy without an effect here, by name; `controller.settings.documents` has the reasons.
UNUSED: Final = (
    "config_sync_period", "enable_dsr", "forward_healthcheck_vip", "iptables_localhost_nodeports",
    "kube_api_accept", "kube_api_content_type", "log_flush_frequency",
    "log_json_info_buffer_size", "log_json_split_stream", "log_text_info_buffer_size", "log_text_split_stream",
    "network_name", "proxy_port_range", "root_hns_endpoint_name", "show_hidden_metrics_for_version", "source_vip",
    "vmodule", "windows_service",
)  # fmt: skip
# Flags that kube-proxy had until 1.26 and that old manifests still pass (KEP-2845).
REMOVED_FLAGS: Final = (
    "add_dir_header", "alsologtostderr", "log_backtrace_at", "log_dir", "log_file", "log_file_max_size",
    "logtostderr", "one_output", "skip_headers", "skip_log_headers", "stderrthreshold",
    "cleanup_ipvs", "proxy_port_range", "udp_timeout",
)  # fmt: skip
_LIKE_JSON: Final = ("", "application/json", "application/vnd.kubernetes.protobuf")


_QUANTITY: Final = (
    r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,3})?",
    "a quantity, such as 64Ki",
)
_FORMS: Final = {  # of texts, as kube-proxy's readers have them
    "show_hidden_metrics_for_version": (r"(?:[0-9]{1,3}\.[0-9]{1,3})?", "of the form MAJOR.MINOR, such as 1.35"),
    "vmodule": (r"(?:[^=,]+=[0-9]{1,9}(?:,|$))*", "of the form PATTERN=LEVEL,..."),
    "log_json_info_buffer_size": _QUANTITY,
    "log_text_info_buffer_size": _QUANTITY,
}


def _look_at_unused(given: _Flags) -> None:
    """Settings without an effect are checked as kube-proxy does, and told when they are not the default."""
    for name in REMOVED_FLAGS:
        if name not in UNUSED and given.text(name) is not None:
            given.warn(name, "kube-proxy has no such flag any more, and it has no effect")
    named = [name for name in UNUSED if given.text(name) is not None]
    if not named:
        return
    from controller.settings.documents import rows

    known = {row.name: row for row in rows()}
    for name in named:
        row = known[name]
        told, usual = _unused(given, name, row.type, row.default, is_duration=row.setting.is_duration)
        if name == "iptables_localhost_nodeports":  # that it is on in kube-proxy's mode iptables is what has no effect
            usual = False if _mode(given) in (AUTO, "iptables") else told
        if told != usual and not (name in ("kube_api_content_type", "kube_api_accept") and told in _LIKE_JSON):
            given.warn(name, f"has no effect: {row.setting.unused}")


def _unused(given: _Flags, name: str, kind: Any, default: Any, *, is_duration: bool) -> tuple[object, object]:
    """The value and the default, once the value is found to be possible."""
    if is_duration:
        return given.seconds(name, 0, more_than=0 if name == "config_sync_period" else None), duration(default)
    if kind is bool:
        return given.flag(name), default
    if kind is int:
        return given.number(name, 0, 0, _INT32), default
    form, words = _FORMS.get(name, (".*", ""))
    text = given.text(name) or ""
    if not re.fullmatch(form, text, re.ASCII | re.DOTALL):
        given.fail(name, f"is not {words}")
    return text, default or ""


_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"[-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:ns|us|µs|μs|ms|s|m|h))+|[-+]?0")
_PART: Final = re.compile(r"([0-9]*\.?[0-9]*)(ns|us|µs|μs|ms|s|m|h)")
_LONGEST: Final = (1 << 63) / 1e9  # seconds in Go's time.Duration, which counts nanoseconds in 64 bits


def duration(text: str) -> float | None:
    """Seconds of a duration as Go reads it (`time.ParseDuration`), such as 1m30s, -5ms or 0; None: it is none."""
    if len(text) > 100 or not _DURATION.fullmatch(text):
        return None
    seconds = sum((float(number) * _UNITS[unit] for number, unit in _PART.findall(text)), 0.0)
    return None if seconds >= _LONGEST else -seconds if text.startswith("-") else seconds


def _masquerade_ports(given: _Flags, default: Options) -> tuple[int, int]:
    """First and last; kube-proxy has no such flag, netfilter takes any port."""
    text = given.text("masquerade_ports")
    if not text:
        return default.port_first, default.port_first + default.port_count - 1
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last <= 65_535:
        given.fail("masquerade_ports", "is not a range of ports such as 1024-29695")
    return first, last


def _node_name(given: _Flags) -> str:
    """As kube-proxy: the override wins, trimmed and in lower case; it must equal the Node's metadata.name."""
    override = given.text("hostname_override")
    if override:
        name = override.strip().lower()
        if not name or len(name) > 253 or "/" in name:
            given.fail("hostname_override", "is not the name of a node")
        return name
    from socket import gethostname

    return gethostname().strip().lower()


def _detect(given: _Flags) -> DetectLocalMode:
    text = given.text("detect_local_mode") or DetectLocalMode.CLUSTER_CIDR.value
    names = [detect.value for detect in DetectLocalMode]
    if text not in names:
        given.fail("detect_local_mode", f"is not one of {', '.join(names)}")
    return DetectLocalMode(text)


def _pod_interface(given: _Flags, detect: DetectLocalMode) -> str:
    name = {
        DetectLocalMode.BRIDGE_INTERFACE: "pod_bridge_interface",
        DetectLocalMode.INTERFACE_PREFIX: "pod_interface_name_prefix",
    }.get(detect)
    if name is None:
        return ""
    text = given.text(name)
    if not text:
        needed = f"is needed with {given.called('detect_local_mode')} {detect.value}"
        given.fail(name, needed, because_of="detect_local_mode")
    if len(text) > 15 or re.search(r"[\s/]", text):
        given.fail(name, "is not the name of an interface (15 characters at most)")
    return text


def _cluster_cidrs(given: _Flags) -> tuple[str, ...]:
    """One CIDR or a dual-stack pair. None is possible: pods are not told apart then."""
    cidrs = given.cidrs("cluster_cidr")
    if len({family_of(cidr) for cidr in cidrs}) < len(cidrs):
        given.fail("cluster_cidr", "has two CIDRs of one family; one is possible, or one IPv4 and one IPv6")
    return cidrs


def _node_port_addresses(given: _Flags) -> tuple[str, ...]:
    """CIDRs and keywords in any mix. Nothing given means primary for node ports, every address for health checks."""
    items = given.items("nodeport_addresses")
    try:
        chosen = tuple(dict.fromkeys(i if i in NODE_PORT_KEYWORDS else canonical_cidr(i) for i in items))
    except ValueError as error:
        given.fail("nodeport_addresses", f"{error}, nor one of {', '.join(NODE_PORT_KEYWORDS)}")
    if "localhost" in chosen:
        given.warn("nodeport_addresses", "node ports are not served at loopback addresses yet, in any mode")
    return chosen


def _bind_address(given: _Flags) -> tuple[str, ...]:
    """An override of the node's IP, as in kube-proxy; no socket is bound to it."""
    text = given.text("bind_address")
    if not text:
        return ()
    try:
        address = canonical_address(text)
    except ValueError:
        given.fail("bind_address", "is not an IP address")
    return () if address in ("0.0.0.0", "::") else (address,)  # noqa: S104


def _mode(given: _Flags) -> str:
    name = "mode" if given.text("mode") else "proxy_mode"  # our document's field wins
    mode = given.text(name)
    if not mode or mode == AUTO:
        return AUTO
    available = available_modes()
    if name == "proxy_mode" and given.of_file and mode not in KUBE_PROXYS_MODES:
        given.fail(
            name, f"is not one of {', '.join(KUBE_PROXYS_MODES)} or blank; others: HybridProxyConfiguration.mode"
        )
    if mode not in available:
        if mode in MODES:
            given.fail(name, f"this version does not have that mode yet; it has {', '.join(available)}")
        given.fail(name, f"is not a mode; this version has {', '.join(available)}, and auto")
    return mode


def _endpoint(given: _Flags, what: str, default: Endpoint | None, settings: Settings) -> Endpoint | None:
    """IP or IP:port; an empty value turns the server off, and so does port 0 of the flag that kube-proxy deprecates."""
    name, usual_port = f"{what}_bind_address", METRICS_PORT if what == "metrics" else HEALTHZ_PORT
    port_of_flag = given.number(f"{what}_port", usual_port, 0, 65_535)
    text = given.text(name)
    if not port_of_flag or text == "" or given.flag(f"no_{what}"):
        return None
    if text is None:
        if default and any(family_of(address) == 6 for address in settings.primary):
            return Endpoint("::1" if what == "metrics" else "::", default.port)
        return default
    match = re.fullmatch(_SOCKET, text)
    try:
        address = canonical_address(match["six"] or match["four"] if match else text)
    except ValueError:
        given.fail(name, "is not an IP address, alone or as IP:port or [IP]:port")
    port = int(match["port"] or port_of_flag) if match else port_of_flag
    if not 1 <= port <= 65535:
        given.fail(name, f"{port} is not a port (1 to 65535)")
    return Endpoint(address, port)


_SOCKET: Final = r"(?:\[(?P<six>[^\]]+)\]|(?P<four>[^:]+))(?::(?P<port>[0-9]{1,5}))?"
_TRUE: Final = frozenset({"1", "t", "T", "true", "True", "TRUE"})  # what Go's flags accept
_FALSE: Final = frozenset({"0", "f", "F", "false", "False", "FALSE"})


class _Flags:
    """Typed access to what was typed."""

    def __init__(self, values: Mapping[str, Any], origins: Mapping[str, str] | None) -> None:
        self._values = values
        self._origins = origins or {}
        self.of_file = origins is not None
        self.warnings: list[str] = []

    def called(self, name: str) -> str:
        """The flag, or the file and field where the value stands."""
        return self._origins.get(name) or ("-v" if name == "v" else "--" + name.replace("_", "-"))

    def _about(self, name: str, problem: str) -> str:
        value = self._values.get(name)
        shown = ",".join(value) if isinstance(value, list | tuple) else value
        called = self.called(name)
        return f"{called}: {problem}" if shown is None else f"{called} {_short(str(shown))}: {problem}"

    def fail(self, name: str, problem: str, because_of: str = "") -> NoReturn:
        """Raise `ConfigError` for a flag or field, which may be missing because of another one."""
        raise ConfigError(self._about(name, problem), setting=because_of or name)

    def warn(self, name: str, problem: str) -> None:
        """Have the problem told, once."""
        sentence = self._about(name, problem)
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        return None if value is None else str(value)

    def items(self, name: str) -> tuple[str, ...]:
        """Of a flag that takes a comma-separated list and may be repeated."""
        value = self._values.get(name) or ()
        texts: Iterable[str] = (value,) if isinstance(value, str) else value
        return tuple(dict.fromkeys(item.strip() for text in texts for item in text.split(",") if item.strip()))

    def addresses(self, name: str) -> tuple[str, ...]:
        try:
            return tuple(dict.fromkeys(canonical_address(item.partition("/")[0]) for item in self.items(name)))
        except ValueError as error:
            self.fail(name, str(error))

    def cidrs(self, name: str) -> tuple[str, ...]:
        try:
            return tuple(dict.fromkeys(canonical_cidr(item) for item in self.items(name)))
        except ValueError as error:
            self.fail(name, str(error))

    def number(self, name: str, default: int, low: int, high: int) -> int:
        text = self.text(name)
        if text is None:
            return default
        if not re.fullmatch(r"-?[0-9]{1,10}", text, re.ASCII) or not low <= int(text) <= high:
            self.fail(name, f"is not a whole number from {low} to {high}")
        return int(text)

    def rate(self, name: str) -> float:
        """A number that is not negative."""
        try:
            found = float(self.text(name) or "")
        except ValueError:
            found = -1.0
        if not 0 <= found < math.inf:
            self.fail(name, "is not a number from 0 on")
        return found

    def seconds(self, name: str, default: float, at_least: float = 0.0, more_than: float | None = None) -> float:
        """A Go duration, such as 30s, 1m30s or 500ms."""
        text = self.text(name)
        if text is None:
            return default
        found = duration(text)
        if found is None:
            self.fail(name, "is not a duration, such as 30s, 1m30s or 500ms")
        if more_than is not None and found <= more_than:
            self.fail(name, "must be greater than 0")
        if found < at_least:
            self.fail(name, f"is less than {1000 * at_least:.0f}ms")
        return found

    def whole_seconds(self, name: str, default: int) -> int:
        """The same for the kernel, which counts in seconds; what is not 0 is 1 at least."""
        found = self.seconds(name, default)
        if found > _INT32:
            self.fail(name, "is longer than the kernel can count")
        return max(int(found), 1) if found else 0

    def flag(self, name: str) -> bool:
        text = self.text(name)
        if text is None or text in _FALSE:
            return False
        if text not in _TRUE:
            self.fail(name, "is not true or false")
        return True

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of some words; the first is the default."""
        text = self.text(name) or choices[0]
        if text not in choices:
            self.fail(name, f"is not one of {', '.join(choices)}")
        return text

    def folder(self, name: str) -> str | None:
        text = self.text(name)
        if text and not text.startswith("/"):
            self.fail(name, "is not an absolute path")
        return text or None


def _short(text: str) -> str:
    """Quoted, and not longer than a line."""
    return repr(text if len(text) <= 200 else text[:197] + "...")
