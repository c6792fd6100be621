"""One frozen `Config` from the command line. Names and defaults are kube-proxy's where the meaning is.

The command line hands over texts as they were typed, by flag name; everything is checked here, so that
each error names the flag and its value, and nothing is touched before all flags are good.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

import dataplane.modes
from controller.errors import ConfigError
from controller.parse import canonical_address, canonical_cidr, family_of
from controller.semantics import Settings
from dataplane.balancing import ALGORITHMS, ALIASES
from dataplane.mode import Options
from dataplane.table import Detect

__all__ = ["ADMIN_SOCKET", "CHOICES", "MODES", "SCHEDULERS", "Config", "Endpoint", "available_modes", "from_flags"]

ADMIN_SOCKET: Final = "/run/hybrid-proxy/admin.sock"
HEALTHZ_PORT: Final = 10256
METRICS_PORT: Final = 10249
AUTO: Final = "auto"  # the first mode that works here
MODES: Final = ("ebpf", "nftables", "iptables", "ipvs", "userspace")  # all that there will be, best first


# Those of the kernel (net/netfilter/ipvs); what a kernel lacks is told when it is used.
SCHEDULERS: Final = ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "sed", "nq", "fo", "ovf", "mh", "twos")
CHOICES: Final = tuple(dict.fromkeys((*ALGORITHMS, *ALIASES, *SCHEDULERS)))  # what may be asked for; random is first


class Endpoint(msgspec.Struct, frozen=True):
    """Where a server listens."""

    address: str
    port: int


class Config(msgspec.Struct, frozen=True):
    """Everything that `run` needs.

    `manifests` is a file or folder; None: objects come from the API server, found by `kubeconfig` and
    `master`, or by the pod's service account when both are None. `node_addresses` are the addresses on the
    node's interfaces; empty: they are read from the interfaces. `healthz_bind_address` and `metrics_bind_address`
    are where health and metrics are served, None: nowhere; with `bind_address_hard_fail` the agent ends when it
    cannot listen there. `enable_profiling` adds pages for debugging to those of the metrics.
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


def available_modes() -> tuple[str, ...]:
    """The modes of this installation: a folder in `dataplane.modes` is one."""
    import pkgutil

    found = {module.name for module in pkgutil.iter_modules(dataplane.modes.__path__) if module.ispkg}
    return (*(mode for mode in MODES if mode in found), *sorted(found.difference(MODES)))


def from_flags(flags: Mapping[str, Any]) -> Config:
    """A checked configuration.

    Args:
        flags: values by name, `cluster_cidr` for `--cluster-cidr`, as argparse's `vars()` gives them: texts,
            lists of texts for flags that may be repeated, None for what was not given. Others are ignored.

    Raises:
        ConfigError: names a flag, its value and what is possible.
    """
    given = _Flags(flags)
    default = Config(Settings())
    config = Config(
        settings=_settings(given),
        options=_options(given),
        mode=_mode(given),
        strict_mode=given.flag("strict_mode"),
        manifests=Path(text) if (text := given.text("manifests")) else None,
        kubeconfig=given.text("kubeconfig") or None,
        master=given.text("master") or None,
        node_addresses=given.addresses("node_addresses"),
        healthz_bind_address=_endpoint(given, "healthz_bind_address", default.healthz_bind_address, HEALTHZ_PORT),
        metrics_bind_address=_endpoint(given, "metrics_bind_address", default.metrics_bind_address, METRICS_PORT),
        bind_address_hard_fail=given.flag("bind_address_hard_fail"),
        enable_profiling=given.flag("profiling"),
        metrics_per_backend=given.flag("metrics_per_backend"),
        admin_socket=given.text("admin_socket") or ADMIN_SOCKET,
        log_format=given.choice("log_format", ("text", "json")),
        verbosity=given.number("v", 0, 0, 10),
    )
    if config.manifests and (config.kubeconfig or config.master):
        other = "kubeconfig" if config.kubeconfig else "master"
        given.fail("manifests", f"cannot be used together with --{other}: there is one source of objects")
    return config


def _settings(given: _Flags) -> Settings:
    detect = _detect(given)
    return Settings(
        node_name=_node_name(given),
        detect=detect,
        cluster_cidrs=_cluster_cidrs(given),
        pod_interface=_pod_interface(given, detect),
        node_port_addresses=_node_port_addresses(given),
        masquerade_all=given.flag("masquerade_all"),
        masquerade_bit=given.number("iptables_masquerade_bit", 14, 0, 31),
        primary=_bind_address(given),
        algorithm=given.choice("algorithm", CHOICES),
        algorithms=frozenset(CHOICES),
    )


def _options(given: _Flags) -> Options:
    default = Options()
    first, last = _masquerade_ports(given, default)
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
        answer_ping=given.flag("answer_ping"),
        xdp=given.choice("xdp", ("auto", "native", "off")),
        max_services=given.number("max_services", default.max_services, 1, 1 << 24),
        max_backends=given.number("max_backends", default.max_backends, 1, 1 << 24),
        max_slots=given.number("max_slots", default.max_slots, 1, 1 << 28),
        max_ring=given.number("max_ring", default.max_ring, 1, 65_521),
        max_flows=given.number("max_flows", default.max_flows, 2, 1 << 26),
        port_first=first,
        dsr=given.choice("dsr", ("off", "ipip")) == "ipip",
        port_count=last - first + 1,
        tcp_timeout_established=int(
            given.seconds("conntrack_tcp_timeout_established", default.tcp_timeout_established)
        ),
        tcp_timeout_close_wait=int(given.seconds("conntrack_tcp_timeout_close_wait", default.tcp_timeout_close_wait)),
        udp_timeout=int(given.seconds("conntrack_udp_timeout", default.udp_timeout)),
        udp_timeout_stream=int(given.seconds("conntrack_udp_timeout_stream", default.udp_timeout_stream)),
        sync_seconds=given.seconds("iptables_sync_period", default.sync_seconds),
        ipvs_scheduler=given.choice("ipvs_scheduler", SCHEDULERS),
        ipvs_strict_arp=given.flag("ipvs_strict_arp"),
        ipvs_exclude_cidrs=given.cidrs("ipvs_exclude_cidrs"),
        ipvs_tcp_timeout=int(given.seconds("ipvs_tcp_timeout", 0)),
        ipvs_tcpfin_timeout=int(given.seconds("ipvs_tcpfin_timeout", 0)),
        ipvs_udp_timeout=int(given.seconds("ipvs_udp_timeout", 0)),
    )


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


def _detect(given: _Flags) -> Detect:
    text = given.text("detect_local_mode") or Detect.CLUSTER_CIDR.value
    names = [detect.value for detect in Detect if detect.value]
    if text not in names:
        given.fail("detect_local_mode", f"is not one of {', '.join(names)}")
    return Detect(text)


def _pod_interface(given: _Flags, detect: Detect) -> str:
    name = {Detect.BRIDGE_INTERFACE: "pod_bridge_interface", Detect.INTERFACE_PREFIX: "pod_interface_name_prefix"}.get(
        detect
    )
    if name is None:
        return ""
    text = given.text(name)
    if not text:
        given.fail(name, f"is needed with --detect-local-mode {detect.value}")
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
    """Nothing given means primary for node ports, and every address for health checks."""
    items = given.items("nodeport_addresses")
    if not items or set(items) == {"primary"}:
        return items
    if "primary" in items:
        given.fail("nodeport_addresses", "can't use both 'primary' and CIDRs")
    return given.cidrs("nodeport_addresses")


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
    mode = given.text("proxy_mode")
    if not mode or mode == AUTO:
        return AUTO
    available = available_modes()
    if mode not in available:
        if mode in MODES:
            given.fail("proxy_mode", f"this version does not have that mode yet; it has {', '.join(available)}")
        given.fail("proxy_mode", f"is not a mode; this version has {', '.join(available)}, and auto")
    return mode


def _endpoint(given: _Flags, name: str, default: Endpoint | None, usual_port: int) -> Endpoint | None:
    """IP or IP:port; an empty value turns the server off."""
    text = given.text(name)
    if text is None:
        return default
    if not text:
        return None
    match = re.fullmatch(_SOCKET, text)
    try:
        address = canonical_address(match["six"] or match["four"] if match else text)
    except ValueError:
        given.fail(name, "is not an IP address, alone or as IP:port or [IP]:port")
    port = int(match["port"] or usual_port) if match else usual_port
    if not 1 <= port <= 65535:
        given.fail(name, f"{port} is not a port (1 to 65535)")
    return Endpoint(address, port)


_SOCKET: Final = r"(?:\[(?P<six>[^\]]+)\]|(?P<four>[^:]+))(?::(?P<port>[0-9]{1,5}))?"
_TRUE: Final = frozenset({"1", "t", "T", "true", "True", "TRUE"})  # what Go's flags accept
_FALSE: Final = frozenset({"0", "f", "F", "false", "False", "FALSE"})


class _Flags:
    """Typed access to what was typed."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise `ConfigError` for a flag."""
        value = self._values.get(name)
        shown = ",".join(value) if isinstance(value, list) else value
        flag = "-v" if name == "v" else "--" + name.replace("_", "-")
        raise ConfigError(f"{flag}: {problem}" if shown is None else f"{flag} {shown!r}: {problem}")

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
        if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
            self.fail(name, f"is not a whole number from {low} to {high}")
        return int(text)

    def seconds(self, name: str, default: float, at_least: float = 0.0) -> float:
        """A Go duration, such as 30s, 1m30s or 500ms."""
        text = self.text(name)
        if text is None:
            return default
        parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", text)
        if text != "0" and (not parts or "".join(number + unit for number, unit in parts) != text):
            self.fail(name, "is not a duration, such as 30s, 1m30s or 500ms")
        found = sum(float(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[unit] for number, unit in parts)
        if found < at_least:
            self.fail(name, f"is less than {1000 * at_least:.0f}ms")
        return float(found)

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
