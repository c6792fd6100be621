"""One frozen `Config`: what the settings come to for the agent, its modes and its servers.

`controller.settings.documents` defines each setting and `controller.settings.given` reads and checks it; here stand
the rules that involve more than one: which section counts in which mode, which settings need or exclude each other,
and which have no effect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

import msgspec

import hybrid_proxy.dataplane.modes
from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.controller.semantics.entries import DetectLocalMode, Settings
from hybrid_proxy.controller.settings import documents
from hybrid_proxy.controller.settings.forms import Endpoint
from hybrid_proxy.controller.settings.given import Given
from hybrid_proxy.dataplane.options import IpvsOptions, Options, flows_by_memory
from hybrid_proxy.dataplane.table import family_of

AUTO: Final = "auto"  # the first mode that works here
_KUBE: Final = documents.KubeProxyConfiguration()
_OURS: Final = documents.HybridProxyConfiguration()
ADMIN_SOCKET: Final = _OURS.admin_socket
HEALTHZ: Final = Endpoint("0.0.0.0", documents.CommandLine().healthz_port)  # noqa: S104 (kube-proxy's default)
METRICS: Final = Endpoint("127.0.0.1", documents.CommandLine().metrics_port)
# Instead of kube-proxy's ports, where a kube-proxy serves the other Services.
BESIDE_KUBE_PROXY: Final = {HEALTHZ.port: 10356, METRICS.port: 10349}


class Config(msgspec.Struct, frozen=True):
    """Everything that `run` needs: the documents as they were given, and what several settings come to together.

    Attributes:
        settings: What the semantics need.
        options: What the modes need.
        kube_proxy: The document of kube-proxy, with the defaults of what is not given.
        hybrid: Our document, likewise.
        mode: A mode, or `auto`.
        master: The address of the API server, in place of the kubeconfig's; None: there is none.
        healthz_bind_address: Where health is served, None: nowhere.
        metrics_bind_address: Where metrics are served, None: nowhere.
        min_sync_seconds: The rest after a sync.
        api_rate: Requests per second to the API server.
        api_burst: Requests to it at once.
        warnings: Messages about settings that have no effect.
        task: `serve`, `cleanup` or `prepare` (--cleanup, --init-only).
    """

    settings: Settings
    options: Options = Options()
    kube_proxy: documents.KubeProxyConfiguration = _KUBE
    hybrid: documents.HybridProxyConfiguration = _OURS
    mode: str = AUTO
    master: str | None = None
    healthz_bind_address: Endpoint | None = HEALTHZ
    metrics_bind_address: Endpoint | None = METRICS
    min_sync_seconds: float = 0.0
    api_rate: float = _KUBE.client_connection.qps
    api_burst: int = _KUBE.client_connection.burst
    warnings: tuple[str, ...] = ()
    task: str = "serve"


def needs_reopening(old: Config, new: Config) -> bool:
    """True if the mode must be reopened. Other differences only change the table.

    How pods are recognized and the masquerade bit are built into programs and rules when a mode is opened. The
    settings that have an influence on these have the effect REOPENS in `controller.settings.documents`.
    """

    def built_in(config: Config) -> tuple[object, ...]:
        settings = config.settings
        pods = settings.detect, settings.pod_interface
        return config.mode, config.hybrid.strict_mode, config.options, pods, settings.masquerade_bit

    return built_in(old) != built_in(new)


def available_modes() -> tuple[str, ...]:
    """The modes of this installation: a folder in `dataplane.modes` is one."""
    import pkgutil

    found = {module.name for module in pkgutil.iter_modules(hybrid_proxy.dataplane.modes.__path__) if module.ispkg}
    return (*(mode for mode in documents.MODES if mode in found), *sorted(found.difference(documents.MODES)))


class Loaded(NamedTuple):
    """A configuration, and what it was made of; `content` is that of the file."""

    config: Config
    given: Given
    content: bytes = b""


def of_flags(flags: Mapping[str, Any]) -> Loaded:
    """The configuration of flags alone, as `vars()` of argparse's namespace has them.

    Raises:
        ConfigError: names every flag that is wrong, its value and what is possible.
    """
    given = Given()
    given.take_flags(flags)
    return Loaded(resolve(given), given)


def resolve(given: Given) -> Config:
    """Combine all settings into one configuration.

    Raises:
        ConfigError: names everything that is wrong: flag, or file and field, its value and what is possible.
    """
    kube, ours = given.document(documents.KubeProxyConfiguration), given.document(documents.HybridProxyConfiguration)
    command = given.document(documents.CommandLine)
    mode = _mode(given, kube, ours)
    masquerade = kube.nftables if mode == "nftables" else kube.iptables
    bind = kube.bind_address
    primary = () if bind in ("0.0.0.0", "::") else (bind,)  # noqa: S104
    six = any(family_of(address) == 6 for address in primary)
    healthz = Endpoint("::", HEALTHZ.port) if six else HEALTHZ
    metrics = Endpoint("::1", METRICS.port) if six else METRICS
    moved = BESIDE_KUBE_PROXY if ours.service_proxy_name else {}
    config = Config(
        settings=Settings(
            node_name=kube.hostname_override or os.uname().nodename.strip().lower(),
            detect=kube.detect_local_mode,
            cluster_cidrs=kube.cluster_cidr,
            pod_interface=_pod_interface(given, kube),
            node_port_addresses=kube.node_port_addresses,
            localhost_node_ports=kube.iptables.localhost_node_ports,
            masquerade_all=masquerade.masquerade_all,
            masquerade_bit=masquerade.masquerade_bit,
            external_ips=kube.feature_gates.get("AllowServiceExternalIPs", True),
            external_ip_cidrs=ours.external_ips.allowed_cidrs,
            external_ip_namespaces=ours.external_ips.allowed_namespaces,
            reset_gone_backends=ours.reset_gone_backends,
            primary=primary,
            algorithm=ours.algorithm,
            proxy_name=ours.service_proxy_name,
        ),
        options=Options(
            ebpf=ours.ebpf,
            ipvs=IpvsOptions(**{name: getattr(kube.ipvs, name) for name in IpvsOptions.__struct_fields__}),
            timeouts=kube.conntrack.flow_timeouts,
            default_flows=flows_by_memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            sync_seconds=_section(kube, mode).sync_period,
            shares_node=bool(ours.service_proxy_name),
        ),
        kube_proxy=kube,
        hybrid=ours,
        mode=mode,
        master=command.master or None,
        healthz_bind_address=_listen(
            ours.serve_healthz, kube.healthz_bind_address, command.healthz_port, healthz, moved
        ),
        metrics_bind_address=_listen(
            ours.serve_metrics, kube.metrics_bind_address, command.metrics_port, metrics, moved
        ),
        min_sync_seconds=_rest(given, kube, mode),
        # 0 is what is not given, as in client-go.
        api_rate=kube.client_connection.qps or _KUBE.client_connection.qps,
        api_burst=kube.client_connection.burst or _KUBE.client_connection.burst,
        task="cleanup" if command.cleanup else "prepare" if command.init_only else "serve",
    )  # fmt: skip
    if ours.manifests:
        for key in (f"{documents.KUBE_PROXY}.clientConnection.kubeconfig", "CommandLine.master"):
            if given.values.get(key):
                given.fail(f"cannot be used together with {given.called(key)}: there is one source of objects",
                           f"{documents.HYBRID}.manifests")  # fmt: skip
    if problems := given.problems(mode):
        raise ConfigError(*problems)
    _warn_of_what_has_no_effect(given, kube, mode)
    return msgspec.structs.replace(config, warnings=tuple(dict.fromkeys(given.warnings)))


# ------------------------------------------------------------------------------------- rules between settings


def _mode(given: Given, kube: documents.KubeProxyConfiguration, ours: documents.HybridProxyConfiguration) -> str:
    key, mode = (f"{documents.HYBRID}.mode", ours.mode) if ours.mode else (f"{documents.KUBE_PROXY}.mode", kube.mode)
    if not mode or mode == AUTO:
        return AUTO
    available = available_modes()
    if not ours.mode and mode not in documents.KUBE_PROXYS_MODES:
        possible = ", ".join(documents.KUBE_PROXYS_MODES)
        given.fail(f"is not one of {possible}, or empty; {documents.HYBRID}.mode can be another mode", key)
    elif mode not in available:
        problem = "this version does not have that mode yet" if mode in documents.MODES else "is not a mode"
        close = get_close_matches(mode, available, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        given.fail(f"{problem}; this version has {', '.join(available)}, and auto{meant}", key)
    return mode


def _section(kube: documents.KubeProxyConfiguration, mode: str) -> Any:
    """The section of kube-proxy's document that has the periods of a mode."""
    return kube.ipvs if mode == "ipvs" else kube.nftables if mode == "nftables" else kube.iptables


def _rest(given: Given, kube: documents.KubeProxyConfiguration, mode: str) -> float:
    """How long to wait after a sync.

    kube-proxy's second is there because its syncs are costly. Here a change costs what changed: the default is 0,
    and what was set to something else counts.
    """
    section, default = _section(kube, mode), _section(_KUBE, mode)
    if section.min_sync_period > section.sync_period:
        prefix = f"{documents.KUBE_PROXY}.{type(section).__name__.lower()}"
        period = f"{prefix}.syncPeriod"
        given.fail(f"is longer than {given.called(period)}", f"{prefix}.minSyncPeriod", period)
    return 0.0 if section.min_sync_period == default.min_sync_period else float(section.min_sync_period)


def _pod_interface(given: Given, kube: documents.KubeProxyConfiguration) -> str:
    path, name = {
        DetectLocalMode.BRIDGE_INTERFACE: ("bridgeInterface", kube.detect_local.bridge_interface),
        DetectLocalMode.INTERFACE_PREFIX: ("interfaceNamePrefix", kube.detect_local.interface_name_prefix),
    }.get(kube.detect_local_mode, ("", ""))
    if path and not name:
        mode = f"{given.called(f'{documents.KUBE_PROXY}.detectLocalMode')} {kube.detect_local_mode.value}"
        given.fail(f"is needed with {mode}", f"{documents.KUBE_PROXY}.detectLocal.{path}")
    return name


def _listen(
    serves: bool, endpoint: Endpoint | None, port: int, default: Endpoint, instead: Mapping[int, int]
) -> Endpoint | None:
    """Where a server listens. The flag for the port, which kube-proxy deprecates, is for an address without one.

    `instead` are ports in place of those that another proxy has, also where a file asks for them: it is often the
    other proxy's own.
    """
    if not serves:
        return None
    endpoint = msgspec.structs.replace(endpoint, port=endpoint.port or port) if endpoint else default
    return msgspec.structs.replace(endpoint, port=instead.get(endpoint.port, endpoint.port))


# ------------------------------------------------------------------------------------------------- warnings

# Gates of kube-proxy for what is always done here (KEP-1880, 2433, 1669, 4444, 1860, 3866).
_ALWAYS: Final = frozenset({
    "MultiCIDRServiceAllocator", "TopologyAwareHints", "ProxyTerminatingEndpoints", "ServiceTrafficDistribution",
    "PreferSameTrafficDistribution", "LoadBalancerIPMode", "NFTablesProxyMode", "KubeProxyIPVS",
    "EndpointSliceProxying", "ServiceInternalTrafficPolicy", "IPv6DualStack", "SCTPSupport",
})  # fmt: skip


def _warn_of_what_has_no_effect(given: Given, kube: documents.KubeProxyConfiguration, mode: str) -> None:
    for row in documents.rows():
        value, setting = given[row], row.setting
        if row.key not in given.values or not setting.unused:
            continue
        if value not in (row.default, *setting.harmless):
            given.warn(f"has no effect: {setting.unused}", row.key)
    if kube.ipvs.scheduler and mode != "ipvs":
        text = f"counts only in mode ipvs: {documents.HYBRID}.algorithm is for all modes, with the same names"
        given.warn(text, f"{documents.KUBE_PROXY}.ipvs.scheduler")
    if given.document(documents.HybridProxyConfiguration).service_proxy_name and mode == "ipvs":
        given.warn(
            "a kube-proxy in mode ipvs removes the virtual servers of mode ipvs here, unless its excludeCIDRs contain "
            "their addresses", f"{documents.HYBRID}.serviceProxyName",
        )  # fmt: skip
    for gate, on in kube.feature_gates.items():
        if gate not in (*_ALWAYS, "AllowServiceExternalIPs"):
            given.warn(f"{gate} has no meaning here", f"{documents.KUBE_PROXY}.featureGates")
        elif not on and gate in _ALWAYS:
            given.warn(f"{gate} cannot be turned off", f"{documents.KUBE_PROXY}.featureGates")
