"""From flags as they are typed to one checked value."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from controller import cli
from controller.errors import ConfigError
from controller.semantics.entries import DetectLocalMode, Settings
from controller.settings import config
from controller.settings.config import Config, Endpoint, from_flags
from controller.settings.documents import CHOICES
from dataplane.mode import Options


def parsed(*arguments: str) -> Config:
    """Through the very parser that `run` has."""
    return from_flags(vars(cli.parser().parse_args(["run", *arguments])))


def dig(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_defaults_are_kube_proxys() -> None:
    name = socket.gethostname().lower()
    assert parsed() == Config(
        settings=Settings(
            node_name=name,
            detect=DetectLocalMode.CLUSTER_CIDR,
            node_port_addresses=(),
            masquerade_bit=14,
            algorithm="random",
            algorithms=frozenset(CHOICES),
        ),
        options=Options(),
        mode="auto",
        healthz_bind_address=Endpoint("0.0.0.0", 10256),
        metrics_bind_address=Endpoint("127.0.0.1", 10249),
        admin_socket="/run/hybrid-proxy/admin.sock",
        log_format="text",
        verbosity=0,
    )


# fmt: off
GOOD = [
    pytest.param("--proxy-mode=auto",      "mode",                   "auto",                 id="auto"),
    pytest.param("--strict-mode",          "strict_mode",            True,                   id="strict mode"),
    pytest.param("--iptables-sync-period=1m30s", "options.sync_seconds", 90.0,               id="duration"),
    pytest.param("--ipvs-scheduler=mh",    "options.ipvs_scheduler", "mh",                   id="scheduler"),
    pytest.param("--algorithm=maglev",     "settings.algorithm",     "maglev",               id="algorithm"),
    pytest.param("--algorithm=dh",         "settings.algorithm",     "dh",                   id="IPVS's algorithm"),
    pytest.param("--max-ring=65521",       "options.max_ring",       65521,                  id="ring"),
    pytest.param("--ipvs-strict-arp=true", "options.ipvs_strict_arp", True,                  id="strict ARP"),
    pytest.param("--ipvs-exclude-cidrs=10.9.0.0/16", "options.ipvs_exclude_cidrs", ("10.9.0.0/16",), id="excluded"),
    pytest.param("--conntrack-udp-timeout-stream=2m", "options.udp_timeout_stream", 120,     id="time-out"),
    pytest.param("--masquerade-ports=2000-2999", "options.port_first", 2000,                 id="first port"),
    pytest.param("--masquerade-ports=2000-2999", "options.port_count", 1000,                 id="ports"),
    pytest.param("--ipvs-tcp-timeout=15m", "options.ipvs_tcp_timeout", 900,                  id="IPVS timeout"),
    pytest.param("--hostname-override= Node-A ", "settings.node_name", "node-a", id="7.1 trimmed, lower case"),
    pytest.param("--cluster-cidr=10.0.0.1/8", "settings.cluster_cidrs", ("10.0.0.0/8",),        id="CIDR"),
    pytest.param("--cluster-cidr=10.0.0.0/8, fd00::/8", "settings.cluster_cidrs", ("10.0.0.0/8", "fd00::/8"),
                 id="dual-stack pair"),
    pytest.param("--cluster-cidr=10.0.0.0/8 --cluster-cidr=fd00::/8", "settings.cluster_cidrs",
                 ("10.0.0.0/8", "fd00::/8"), id="repeated"),
    pytest.param("--cluster-cidr=",        "settings.cluster_cidrs", (),                     id="empty CIDR"),
    pytest.param("--detect-local-mode=NodeCIDR", "settings.detect",        DetectLocalMode.NODE_CIDR, id="NodeCIDR"),
    pytest.param("--detect-local-mode=",   "settings.detect",        DetectLocalMode.CLUSTER_CIDR, id="empty mode"),
    pytest.param("--detect-local-mode=BridgeInterface --pod-bridge-interface=cni0", "settings.pod_interface", "cni0",
                 id="bridge"),
    pytest.param("--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=cali", "settings.pod_interface",
                 "cali", id="prefix"),
    pytest.param("--pod-bridge-interface=cni0", "settings.pod_interface", "", id="bridge without its mode"),
    pytest.param("--nodeport-addresses=primary", "settings.node_port_addresses", ("primary",), id="3.3 primary"),
    pytest.param("--nodeport-addresses=",  "settings.node_port_addresses", (),                     id="3.1 default"),
    pytest.param("--nodeport-addresses=all,10.0.0.0/8,localhost,primary", "settings.node_port_addresses",
                 ("all", "10.0.0.0/8", "localhost", "primary"), id="3.4 keywords and CIDRs"),
    pytest.param("--nodeport-addresses=10.0.0.0/8,fd00::/8", "settings.node_port_addresses", ("10.0.0.0/8", "fd00::/8"),
                 id="3.2 CIDRs"),
    pytest.param("--masquerade-all",       "settings.masquerade_all", True,                   id="switch"),
    pytest.param("--masquerade-all=true",  "settings.masquerade_all", True,                   id="switch, true"),
    pytest.param("--masquerade-all=false", "settings.masquerade_all", False,                  id="switch, false"),
    pytest.param("--masquerade-all=T", "settings.masquerade_all", True, id="switch, as Go has it"),
    pytest.param("--iptables-masquerade-bit=31", "settings.masquerade_bit", 31,                     id="bit"),
    pytest.param("--bind-address=10.0.0.7", "settings.primary",       ("10.0.0.7",),          id="7.5 bind address"),
    pytest.param("--bind-address=0.0.0.0", "settings.primary",       (),                     id="unspecified"),
    pytest.param("--bind-address=::",      "settings.primary",       (),                     id="unspecified IPv6"),
    pytest.param("--node-addresses=10.0.0.7,FD00::7,10.0.0.7", "node_addresses", ("10.0.0.7", "fd00::7"),
                 id="node addresses"),
    pytest.param("--node-addresses=10.0.0.7/24", "node_addresses", ("10.0.0.7",), id="as ip addr prints them"),
    pytest.param("--proxy-mode=",          "mode",                   "auto",                 id="default mode"),
    pytest.param("--manifests=/etc/x",     "manifests",              Path("/etc/x"),         id="manifests"),
    pytest.param("--kubeconfig=/etc/k --master=https://h:6443", "master", "https://h:6443", id="API server"),
    pytest.param("--metrics-bind-address=", "metrics_bind_address", None,                   id="no metrics"),
    pytest.param("--metrics-bind-address=0.0.0.0", "metrics_bind_address", Endpoint("0.0.0.0", 10249), id="metrics IP"),
    pytest.param("--metrics-bind-address=10.0.0.1:99", "metrics_bind_address", Endpoint("10.0.0.1", 99),
                 id="metrics IP and port"),
    pytest.param("--metrics-bind-address=[::1]:99", "metrics_bind_address", Endpoint("::1", 99),
                 id="metrics IPv6 and port"),
    pytest.param("--metrics-bind-address=[::1]", "metrics_bind_address", Endpoint("::1", 10249),
                 id="metrics IPv6 in brackets"),
    pytest.param("--metrics-bind-address=::1", "metrics_bind_address", Endpoint("::1", 10249), id="metrics IPv6"),
    pytest.param("--healthz-bind-address=", "healthz_bind_address", None, id="no health"),
    pytest.param("--healthz-bind-address=10.0.0.1", "healthz_bind_address", Endpoint("10.0.0.1", 10256),
                 id="health IP"),
    pytest.param("--healthz-bind-address=[::]:99", "healthz_bind_address", Endpoint("::", 99), id="health IPv6, port"),
    pytest.param("--bind-address-hard-fail", "bind_address_hard_fail", True, id="hard fail"),
    pytest.param("--profiling=true", "enable_profiling", True, id="profiling"),
    pytest.param("--pod-interfaces=veth*,cali*", "options.pod_interfaces", ("veth*", "cali*"),     id="pod interfaces"),
    pytest.param("--uplink-interfaces=eth0", "options.uplink_interfaces", ("eth0",),              id="uplinks"),
    pytest.param("--cgroup=/sys/fs/cgroup/x", "options.cgroup",         "/sys/fs/cgroup/x",     id="cgroup"),
    pytest.param("--pin-root=/sys/fs/bpf", "options.pin_root",       "/sys/fs/bpf",          id="pins"),
    pytest.param("--socket-scope=all",     "options.socket_scope",   "all",                  id="scope"),
    pytest.param("--failover-failures=0",  "options.failover_failures", 0,                   id="no failover"),
    pytest.param("--probe-interval=250ms", "options.probe_interval", 0.25,                   id="probe interval"),
    pytest.param("--probe-timeout=2s",     "options.probe_timeout",  2.0,                    id="probe timeout"),
    pytest.param("--probe-failures=2",     "options.probe_failures", 2,                      id="probe failures"),
    pytest.param("--no-fast-path",         "options.fast_path",      False,                  id="fast path off"),
    pytest.param("--no-traffic-counters",  "options.count_traffic",  False,                  id="traffic not counted"),
    pytest.param("--metrics-per-backend",  "metrics_per_backend",    True,                   id="metrics of backends"),
    pytest.param("--source-check=strict",  "options.source_check",   "strict",               id="sources strictly"),
    pytest.param("--answer-ping",          "options.answer_ping",    True,                   id="pings answered"),
    pytest.param("--xdp=native",           "options.xdp",            "native",               id="xdp"),
    pytest.param("--no-fast-path=false",   "options.fast_path",      True,                   id="fast path on"),
    pytest.param("--max-services=7",       "options.max_services",   7,                      id="services"),
    pytest.param("--max-backends=7",       "options.max_backends",   7,                      id="backends"),
    pytest.param("--max-slots=7",          "options.max_slots",      7,                      id="slots"),
    pytest.param("--max-flows=8",          "options.max_flows",      8,                      id="flows"),
    pytest.param("--admin-socket=/tmp/a",  "admin_socket",           "/tmp/a",               id="admin socket"),
    pytest.param("--log-format=json",      "log_format", "json",                 id="log format"),
    pytest.param("-v=4",                   "verbosity",              4,                      id="-v=4"),
    pytest.param("--v=4",                  "verbosity",              4,                      id="--v=4"),
]
BAD = [
    pytest.param("--hostname-override= ", "--hostname-override ' ': is not the name of a node", id="node name"),
    pytest.param("--cluster-cidr=10.0.0.0",           "--cluster-cidr '10.0.0.0': '10.0.0.0' is not a CIDR", id="CIDR"),
    pytest.param("--cluster-cidr=10.0.0.0/8,11.0.0.0/8",
                 "--cluster-cidr '10.0.0.0/8,11.0.0.0/8': has two CIDRs of one family", id="one family"),
    pytest.param("--detect-local-mode=nodecidr",
                 "--detect-local-mode 'nodecidr': is not one of ClusterCIDR, NodeCIDR, Br", id="mode"),
    pytest.param("--detect-local-mode=BridgeInterface",
                 "--pod-bridge-interface: is needed with --detect-local-mode Bridge", id="no bridge"),
    pytest.param("--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix: is needed with",
                 id="no prefix"),
    pytest.param("--detect-local-mode=BridgeInterface --pod-bridge-interface=sixteen-letters-",
                 "is not the name of an interface", id="long name"),
    pytest.param("--nodeport-addresses=primary,ten",
                 "'primary,ten': 'ten' is not a CIDR such as 10.0.0.0/8 or fd00::/8, nor one of primary,", id="3.4"),
    pytest.param("--nodeport-addresses=Primary",      "'Primary' is not a CIDR",            id="primary in upper case"),
    pytest.param("--masquerade-all=yes",              "--masquerade-all 'yes': is not true or false", id="switch"),
    pytest.param("--iptables-masquerade-bit=32", "--iptables-masquerade-bit '32': is not a whole number from 0 to 31",
                 id="bit"),
    pytest.param("--bind-address=eth0",               "--bind-address 'eth0': is not an IP address", id="bind address"),
    pytest.param("--node-addresses=10.0.0.7,x", "--node-addresses '10.0.0.7,x': 'x' is not an IP", id="node addresses"),
    pytest.param("--probe-interval=0", "--probe-interval '0': is less than 100ms", id="no rest"),
    pytest.param("--probe-timeout=1ms", "--probe-timeout '1ms': is less than 10ms", id="no policy"),
    pytest.param("--iptables-sync-period=30", "--iptables-sync-period '30': is not a duration", id="no unit"),
    pytest.param("--masquerade-ports=0-70000", "--masquerade-ports '0-70000': is not a range of ports", id="ports"),
    pytest.param("--proxy-mode=ipvs --ipvs-scheduler=best", "--ipvs-scheduler 'best': is not one of rr, wrr",
                 id="unknown scheduler"),
    pytest.param("--proxy-mode=windows", "--proxy-mode 'windows': is not a mode; this version has ebpf",
                 id="mode unknown"),
    pytest.param("--manifests=/x --kubeconfig=/y", "--manifests '/x': cannot be used together with --kubeconfig",
                 id="two sources"),
    pytest.param("--manifests=/x --master=http://y", "cannot be used together with --master", id="two sources, master"),
    pytest.param("--metrics-bind-address=localhost:1", "--metrics-bind-address 'localhost:1': is not an IP",
                 id="metrics name"),
    pytest.param("--metrics-bind-address=10.0.0.1:0", "0 is not a port",                    id="metrics port"),
    pytest.param("--metrics-bind-address=:10249",     "is not an IP address",               id="metrics without IP"),
    pytest.param("--healthz-bind-address=node:1", "--healthz-bind-address 'node:1': is not an IP", id="health name"),
    pytest.param("--cgroup=relative",                 "--cgroup 'relative': is not an absolute path", id="cgroup"),
    pytest.param("--xdp=generic", "--xdp 'generic': is not one of auto, native, off", id="xdp"),
    pytest.param("--socket-scope=pods", "--socket-scope 'pods': is not one of host, all, off", id="scope"),
    pytest.param("--max-services=0", "--max-services '0': is not a whole number from 1", id="services"),
    pytest.param("--max-flows=many",                  "--max-flows 'many': is not a whole number", id="flows"),
    pytest.param("--log-format=xml",                  "--logging-format 'xml': is not one of text, json",
                 id="log format"),
    pytest.param("--v=high",                          "-v 'high': is not a whole number",
                 id="verbosity"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "path", "expected"), GOOD)
def test_good(arguments: str, path: str, expected: object) -> None:
    assert dig(parsed(*arguments_of(arguments)), path) == expected


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(*arguments_of(arguments))
    assert message in str(error.value)


def arguments_of(text: str) -> list[str]:
    """Values may hold spaces."""
    return text.replace(" --", "\n--").split("\n")


def test_a_mode_of_a_later_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "available_modes", lambda: ("ebpf",))
    with pytest.raises(ConfigError, match="--proxy-mode 'ipvs': this version does not have that mode yet"):
        parsed("--proxy-mode=ipvs")


def test_modes_are_found_in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ipvs", "ebpf", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr("dataplane.modes.__path__", [str(tmp_path)])
    assert config.available_modes() == ("ebpf", "ipvs", "mine")


def test_flag_names_are_not_cut_short() -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["run", "--cluster", "10.0.0.0/8"])


def test_localhost_is_taken_with_a_warning():
    (warning,) = from_flags({"nodeport_addresses": "primary,localhost", "hostname_override": "a"}).warnings
    assert "nodeport-addresses" in warning
    assert "loopback" in warning
