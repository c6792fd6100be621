"""Configuration files: kube-proxy's own, field by field, ours, errors, precedence, a changed file, hostile bytes."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from controller import cli
from controller.agent.node_setup import conntrack_limit, conntrack_settings
from controller.errors import ConfigError
from controller.semantics.entries import DetectLocalMode
from controller.settings import reference
from controller.settings.config import (
    REMOVED_FLAGS,
    UNUSED,
    Config,
    Conntrack,
    Endpoint,
    duration,
    from_flags,
    needs_reopening,
    reopening_settings,
)  # fmt: skip
from controller.settings.configfile import Loaded, change, follow, load, of_flags, read, text, write
from controller.settings.documents import DOCUMENTS, HYBRID, KUBE_PROXY, HybridProxyConfiguration, Row, rows

FOLDER = Path(__file__).parent / "configurations"
ROOT = Path(__file__).parents[2]
HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
OURS = "---\napiVersion: hybrid-proxy.io/v1alpha1\nkind: HybridProxyConfiguration\n"


def flags(*arguments: str) -> dict[str, Any]:
    return vars(cli.parser().parse_args(["run", *arguments]))


def loaded(content: str | bytes, *arguments: str) -> Loaded:
    return read(content if isinstance(content, bytes) else content.encode(), "f.conf", flags(*arguments))


def kube(fields: str, *arguments: str) -> Config:
    return loaded(HEAD + fields, *arguments).config


def ours(fields: str, *arguments: str) -> Config:
    return loaded(OURS + fields, *arguments).config


def dig(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name)
    return value


# --------------------------------------------------------------------- kube-proxy's own configurations load


class TestTheirFiles:
    def test_what_kube_proxy_writes_by_default(self):
        config = load(FOLDER / "defaulted-1.36.yaml", flags()).config
        assert config.warnings == (
            f"{FOLDER}/defaulted-1.36.yaml: KubeProxyConfiguration.iptables.localhostNodePorts 'true': has no effect: "
            + next(row for row in rows() if row.path == "iptables.localhostNodePorts").setting.unused,
        )
        assert msgspec.structs.replace(config, warnings=()) == from_flags({})

    def test_kubeadms_zeros_are_defaults(self):
        config = load(FOLDER / "kubeadm.yaml", flags("--hostname-override=node-1")).config
        assert config.warnings == ()
        expected = flags("--hostname-override=node-1", "--kubeconfig=/var/lib/kube-proxy/kubeconfig.conf",
                         "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56")  # fmt: skip
        assert config == from_flags(expected)

    def test_a_managed_clouds_config_map(self):
        config = load(FOLDER / "eks.yaml", flags("--v=2", "--hostname-override=ip-10-0-0-1")).config
        assert (config.mode, config.oom_score_adj, config.verbosity) == ("iptables", -998, 2)
        assert config.metrics_bind_address == Endpoint("0.0.0.0", 10249)
        assert [w.split(": ", 1)[1] for w in config.warnings] == [
            "KubeProxyConfiguration.udpIdleTimeout '250ms': there is no such field, it is left out"
        ]

    def test_ipvs_with_strict_arp(self):
        config = load(FOLDER / "ipvs-with-metallb.yaml", flags()).config
        options = config.options
        assert (config.mode, options.ipvs_scheduler, options.ipvs_strict_arp) == ("ipvs", "rr", True)
        assert options.ipvs_exclude_cidrs == ("10.9.0.0/16",)
        assert (options.ipvs_tcp_timeout, options.ipvs_tcpfin_timeout, options.ipvs_udp_timeout) == (900, 120, 300)
        assert config.settings.node_name == "node1"
        assert config.settings.node_port_addresses == ("10.0.0.0/8",)
        assert config.warnings == ()

    def test_two_documents(self):
        config = load(FOLDER / "kind-nftables.yaml", flags()).config
        assert (config.mode, config.settings.algorithm) == ("auto", "maglev")
        assert (config.options.failover_failures, config.options.probe_interval) == (5, 2.0)
        assert config.conntrack == Conntrack(max_per_core=0, tcp_timeout_established=0, tcp_timeout_close_wait=0)
        assert config.options.tcp_timeout_established == 86_400  # a flow of ours has to end some time
        assert config.warnings == ()

    @pytest.mark.parametrize(
        "arguments",
        [
            pytest.param(
                "--cluster-cidr=10.42.0.0/16 --conntrack-max-per-core=0 --conntrack-tcp-timeout-close-wait=0s "
                "--conntrack-tcp-timeout-established=0s --healthz-bind-address=127.0.0.1 --hostname-override=k3s-1 "
                "--kubeconfig=/var/lib/rancher/k3s/agent/kubeproxy.kubeconfig --proxy-mode=iptables",
                id="k3s",
            ),
            pytest.param(
                "--master=https://10.0.0.2 --kubeconfig=/var/lib/kube-proxy/kubeconfig --cluster-cidr=10.4.0.0/14 "
                "--oom-score-adj=-998 --v=2 --feature-gates=AllowServiceExternalIPs=true "
                "--iptables-sync-period=1m --iptables-min-sync-period=10s --ipvs-sync-period=1m "
                "--ipvs-min-sync-period=10s --detect-local-mode=NodeCIDR",
                id="GKE",
            ),
            pytest.param(
                "--conntrack-max-per-core=0 --metrics-bind-address=0.0.0.0:10249 --detect-local-mode=ClusterCIDR "
                "--kubeconfig=/var/lib/kubelet/kubeconfig --cluster-cidr=10.244.0.0/16 --v=3 "
                "--pod-interface-name-prefix=",
                id="AKS",
            ),
        ],
    )
    def test_flags_that_manifests_pass(self, arguments: str):
        assert from_flags(flags(*arguments.split())).warnings == ()

    def test_flags_of_old_manifests_are_told(self):
        config = from_flags(flags("--logtostderr=true", "--alsologtostderr", "--masquerade-all"))
        assert [warning.split(" ")[0] for warning in config.warnings] == ["--alsologtostderr", "--logtostderr"]
        assert config.settings.masquerade_all

    def test_every_flag_of_kube_proxy_is_one_of_run(self):
        known = set(flags())
        assert {row.name for row in rows() if row.setting.flag} <= known
        assert {"config", "write_config_to", "cleanup", "init_only", "master", "healthz_port", "metrics_port"} <= known
        assert set(REMOVED_FLAGS) <= known


# ------------------------------------------------------------------ every field: honoured, or told with a reason

# Field, value, where it is honoured, what it is there.
# fmt: off
HONOURED = [
    ("featureGates", "{AllowServiceExternalIPs: false}", "settings.external_ips", False),
    ("clientConnection.kubeconfig", "/k", "kubeconfig", "/k"),
    ("clientConnection.qps", "50", "api_rate", 50.0),
    ("clientConnection.burst", "100", "api_burst", 100),
    ("logging.format", "json", "log_format", "json"),
    ("logging.verbosity", "4", "verbosity", 4),
    ("hostnameOverride", "' Node-1 '", "settings.node_name", "node-1"),
    ("bindAddress", "10.0.0.7", "settings.primary", ("10.0.0.7",)),
    ("healthzBindAddress", "10.0.0.7", "healthz_bind_address", Endpoint("10.0.0.7", 10256)),
    ("metricsBindAddress", "'[::]:99'", "metrics_bind_address", Endpoint("::", 99)),
    ("bindAddressHardFail", "true", "bind_address_hard_fail", True),
    ("enableProfiling", "true", "enable_profiling", True),
    ("mode", "nftables", "mode", "nftables"),
    ("iptables.masqueradeBit", "5", "settings.masquerade_bit", 5),
    ("iptables.masqueradeAll", "true", "settings.masquerade_all", True),
    ("iptables.syncPeriod", "1m", "options.sync_seconds", 60.0),
    ("iptables.minSyncPeriod", "2s", "min_sync_seconds", 2.0),
    ("ipvs.syncPeriod", "1m", "options.sync_seconds", 60.0),
    ("ipvs.minSyncPeriod", "1s", "min_sync_seconds", 1.0),
    ("ipvs.scheduler", "mh", "options.ipvs_scheduler", "mh"),
    ("ipvs.excludeCIDRs", "[10.0.0.0/8]", "options.ipvs_exclude_cidrs", ("10.0.0.0/8",)),
    ("ipvs.strictARP", "true", "options.ipvs_strict_arp", True),
    ("ipvs.tcpTimeout", "1m", "options.ipvs_tcp_timeout", 60),
    ("ipvs.tcpFinTimeout", "1m", "options.ipvs_tcpfin_timeout", 60),
    ("ipvs.udpTimeout", "1m", "options.ipvs_udp_timeout", 60),
    ("nftables.masqueradeBit", "5", "settings.masquerade_bit", 5),
    ("nftables.masqueradeAll", "true", "settings.masquerade_all", True),
    ("nftables.syncPeriod", "1m", "options.sync_seconds", 60.0),
    ("nftables.minSyncPeriod", "2s", "min_sync_seconds", 2.0),
    ("detectLocalMode", "NodeCIDR", "settings.detect", DetectLocalMode.NODE_CIDR),
    ("detectLocal.bridgeInterface", "cni0", "settings.pod_interface", "cni0"),
    ("detectLocal.interfaceNamePrefix", "cali", "settings.pod_interface", "cali"),
    ("clusterCIDR", "'10.0.0.0/8,fd00::/8'", "settings.cluster_cidrs", ("10.0.0.0/8", "fd00::/8")),
    ("nodePortAddresses", "[primary]", "settings.node_port_addresses", ("primary",)),
    ("oomScoreAdj", "0", "oom_score_adj", 0),
    ("conntrack.maxPerCore", "0", "conntrack.max_per_core", 0),
    ("conntrack.min", "1", "conntrack.minimum", 1),
    ("conntrack.tcpEstablishedTimeout", "1h", "conntrack.tcp_timeout_established", 3600),
    ("conntrack.tcpEstablishedTimeout", "1h", "options.tcp_timeout_established", 3600),
    ("conntrack.tcpCloseWaitTimeout", "1m", "conntrack.tcp_timeout_close_wait", 60),
    ("conntrack.tcpCloseWaitTimeout", "1m", "options.tcp_timeout_close_wait", 60),
    ("conntrack.tcpBeLiberal", "true", "conntrack.tcp_be_liberal", True),
    ("conntrack.udpTimeout", "20s", "conntrack.udp_timeout", 20),
    ("conntrack.udpTimeout", "20s", "options.udp_timeout", 20),
    ("conntrack.udpStreamTimeout", "1m", "conntrack.udp_timeout_stream", 60),
    ("conntrack.udpStreamTimeout", "1m", "options.udp_timeout_stream", 60),
]
# Field, a value that asks for something, a value (beside the default) that does not.
TOLD = [
    ("clientConnection.acceptContentTypes", "text/html", "application/json"),
    ("clientConnection.contentType", "text/html", "application/json"),
    ("logging.flushFrequency", "1s", "5000000000"),
    ("logging.vmodule", "[{filePattern: proxier, verbosity: 5}]", "[]"),
    ("logging.options.json.splitStream", "true", "false"),
    ("logging.options.json.infoBufferSize", "64Ki", "'0'"),
    ("logging.options.text.splitStream", "true", "false"),
    ("logging.options.text.infoBufferSize", "64", "0"),
    ("showHiddenMetricsForVersion", "'1.35'", "''"),
    ("iptables.localhostNodePorts", "true", "false"),
    ("winkernel.networkName", "net", "''"),
    ("winkernel.sourceVip", "10.0.0.1", "''"),
    ("winkernel.enableDSR", "true", "false"),
    ("winkernel.rootHnsEndpointName", "x", "''"),
    ("winkernel.forwardHealthCheckVip", "true", "false"),
    ("configSyncPeriod", "1m", "900s"),
    ("portRange", "'300-2000'", "''"),
    ("windowsRunAsService", "true", "false"),
]
# fmt: on
NEEDS = {
    "ipvs.": "mode: ipvs\n",
    "nftables.": "mode: nftables\n",
    "detectLocal.bridge": "detectLocalMode: BridgeInterface\n",
    "detectLocal.interface": "detectLocalMode: InterfaceNamePrefix\n",
}


def field(path: str, value: str) -> str:
    """One field, and what has to be there for it to count."""
    folders = path.split(".")
    lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(folders)]
    needed = next((needs for prefix, needs in NEEDS.items() if path.startswith(prefix)), "")
    return needed + "\n".join(lines) + f" {value}\n"


class TestFields:
    def test_all_of_them_are_here(self):
        kube_proxys = {row.path for row in rows() if row.document == KUBE_PROXY}
        assert {path for path, *_ in HONOURED} | {path for path, *_ in TOLD} == kube_proxys
        assert {path for path, *_ in TOLD} == {row.path for row in rows() if row.setting.unused}
        assert set(UNUSED) == {row.name for row in rows() if row.setting.unused}

    @pytest.mark.parametrize(("path", "value", "where", "expected"), HONOURED, ids=lambda v: str(v)[:40])
    def test_honoured(self, path: str, value: str, where: str, expected: object):
        config = kube(field(path, value))
        assert dig(config, where) == expected
        assert dig(from_flags({}), where) != expected or path in ("nodePortAddresses", "mode")
        assert config.warnings == ()

    @pytest.mark.parametrize(("path", "asks", "does_not"), TOLD, ids=[path for path, *_ in TOLD])
    def test_told(self, path: str, asks: str, does_not: str):
        (warning,) = kube(field(path, asks)).warnings
        assert warning.startswith(f"f.conf: KubeProxyConfiguration.{path} '")
        assert ": has no effect: " in warning
        assert kube(field(path, does_not)).warnings == ()

    @pytest.mark.parametrize("row", [row for row in rows() if row.document == HYBRID], ids=lambda row: row.path)
    def test_ours_are_honoured(self, row: Row):
        """Another value makes another configuration."""
        other: dict[str, Any] = {
            "mode": "userspace", "algorithm": "maglev", "manifests": "/m", "nodeAddresses": ["10.0.0.1"],
            "adminSocket": "/s", "ebpf.podInterfaces": ["veth*"], "ebpf.uplinkInterfaces": ["eth0"],
            "ebpf.socketScope": "all", "ebpf.cgroup": "/c", "ebpf.pinRoot": "/p", "ebpf.xdp": "native",
            "ebpf.dsr": "ipip", "ebpf.sourceCheck": "strict", "ebpf.masqueradePorts": "2000-3000",
            "ebpf.probes.interval": "7s", "ebpf.probes.timeout": "7s",
        }  # fmt: skip
        value = other.get(row.path, (not row.default) if row.type is bool else 7)
        config = ours(field(row.path, json.dumps(value)))
        assert config != ours("")
        assert config.warnings == ()

    def test_feature_gates(self):
        config = kube("featureGates: {NFTablesProxyMode: true, TopologyAwareHints: false, Dreams: true}")
        assert [warning.rpartition(": ")[2] for warning in config.warnings] == [
            "TopologyAwareHints cannot be turned off", "Dreams has no meaning here"
        ]  # fmt: skip

    def test_an_ipv6_node_serves_health_and_metrics_on_ipv6(self):
        config = kube("bindAddress: fd00::7")
        assert (config.healthz_bind_address, config.metrics_bind_address) == (
            Endpoint("::", 10256), Endpoint("::1", 10249)
        )  # fmt: skip

    def test_each_mode_has_its_section(self):
        body = """iptables: {masqueradeBit: 1, syncPeriod: 10s}
ipvs: {syncPeriod: 20s, scheduler: lc}
nftables: {masqueradeBit: 3, masqueradeAll: true, syncPeriod: 40s}
"""
        for mode, bit, everything, seconds in (
            ("", 1, False, 10), ("iptables", 1, False, 10), ("ipvs", 1, False, 20), ("nftables", 3, True, 40)
        ):  # fmt: skip
            config = kube(f"mode: '{mode}'\n{body}")
            assert (config.settings.masquerade_bit, config.settings.masquerade_all) == (bit, everything)
            assert config.options.sync_seconds == seconds

    def test_what_mode_ipvs_alone_needs_is_no_error_in_another(self):
        config = kube("mode: iptables\nipvs: {scheduler: best, excludeCIDRs: [nowhere], tcpTimeout: -1s}")
        assert len(config.warnings) == 3
        assert all("matters in mode ipvs alone" in warning for warning in config.warnings)
        assert (config.options.ipvs_scheduler, config.options.ipvs_exclude_cidrs) == ("rr", ())

    @pytest.mark.parametrize(("mode", "period", "rest"), [
        ("", "1s", 0), ("", "0s", 0), ("", "500ms", 0.5), ("nftables", "1s", 0), ("nftables", "3s", 3),
        ("ipvs", "0s", 0), ("ipvs", "1s", 1),
    ])  # fmt: skip
    def test_kube_proxys_usual_rest_is_none_here(self, mode: str, period: str, rest: float):
        section = mode or "iptables"
        assert kube(f"mode: '{mode}'\n{section}: {{minSyncPeriod: {period}}}").min_sync_seconds == rest


# ------------------------------------------------------------------------------------------------ errors

# fmt: off
K, H = "f.conf: KubeProxyConfiguration.", "f.conf: HybridProxyConfiguration."
BAD = [
    ("", "f.conf: no KubeProxyConfiguration and no HybridProxyConfiguration is in it"),
    ("hello", "f.conf: line 1: 'hello': is not an object with apiVersion and kind"),
    ("kind: Pod", "f.conf: line 1: kind 'Pod': is not one of KubeProxyConfiguration, HybridProxyConfiguration"),
    ("a: [", "f.conf: line "),
    (b"\xff\xfe\x00", "f.conf: not text: "),
    ("kind: KubeProxyConfiguration\napiVersion: kubeproxy.config.k8s.io/v1",
     "f.conf: line 1: KubeProxyConfiguration.apiVersion 'kubeproxy.config.k8s.io/v1': is not kubeproxy.con"),
    (HEAD + "---\n" + HEAD, "f.conf: line 4: a second KubeProxyConfiguration: one is possible"),
    (HEAD + "mode: userspace", K + "mode 'userspace': is not one of iptables, ipvs, nftables"),
    (HEAD + "iptables: {masqueradeBit: 32}",
     K + "iptables.masqueradeBit '32': is not a whole number from 0 to 31"),
    (HEAD + "iptables: {masqueradeBit: '14'}",
     K + "iptables.masqueradeBit '14': is not a whole number"),
    (HEAD + "iptables: {syncPeriod: 30}", K + "iptables.syncPeriod 30: is not a text (a dur"),
    (HEAD + "iptables: {syncPeriod: 30x}", K + "iptables.syncPeriod '30x': is not a duration"),
    (HEAD + "iptables: {syncPeriod: -1s}", K + "iptables.syncPeriod '-1s': must be greater"),
    (HEAD + "iptables: {minSyncPeriod: 1m}",
     K + "iptables.minSyncPeriod '1m': is longer than " + K + "iptables.syncPeriod"),
    (HEAD + "iptables: [1]", K + "iptables [1]: is not an object"),
    (HEAD + "mode: ipvs\nipvs: {scheduler: best}", K + "ipvs.scheduler 'best': is not one of"),
    (HEAD + "mode: ipvs\nipvs: {udpTimeout: -1s}", K + "ipvs.udpTimeout '-1s': is less than"),
    (HEAD + "conntrack: {maxPerCore: -1}", K + "conntrack.maxPerCore '-1': is not a whole"),
    (HEAD + "conntrack: {udpTimeout: -1s}", K + "conntrack.udpTimeout '-1s': is less than 0"),
    (HEAD + "oomScoreAdj: 1001", K + "oomScoreAdj '1001': is not a whole number from -1000"),
    (HEAD + "oomScoreAdj: 99999999999999999999", K + "oomScoreAdj "),
    (HEAD + "clusterCIDR: 10.0.0.0", K + "clusterCIDR '10.0.0.0': '10.0.0.0' is not a CIDR"),
    (HEAD + "clusterCIDR: 10.0.0.0/8,11.0.0.0/8", K + "clusterCIDR '10.0.0.0/8,11.0.0.0/8': has"),
    (HEAD + "nodePortAddresses: [primary, ten]", K + "nodePortAddresses 'primary,ten': 'ten' is not a CIDR"),
    (HEAD + "nodePortAddresses: [1]", K + "nodePortAddresses[0] 1: is not a text"),
    (HEAD + "bindAddress: eth0", K + "bindAddress 'eth0': is not an IP address"),
    (HEAD + "healthzBindAddress: x:1", K + "healthzBindAddress 'x:1': is not an IP address"),
    (HEAD + "metricsBindAddress: 127.0.0.1:0", K + "metricsBindAddress '127.0.0.1:0': 0 is not"),
    (HEAD + "detectLocalMode: nodecidr", K + "detectLocalMode 'nodecidr': is not one of Clus"),
    (HEAD + "detectLocalMode: BridgeInterface",
     K + "detectLocal.bridgeInterface: is needed with " + K + "detectLocalMode BridgeInterface"),
    (HEAD + "configSyncPeriod: -1s", K + "configSyncPeriod '-1s': must be greater than 0"),
    (HEAD + "showHiddenMetricsForVersion: new", K + "showHiddenMetricsForVersion 'new': is"),
    (HEAD + "featureGates: {A: maybe}", K + "featureGates"),
    (HEAD + "featureGates: [A]", K + "featureGates ['A']: is not an object"),
    (HEAD + "clientConnection: {burst: -1}", K + "clientConnection.burst '-1': is not a whole"),
    (HEAD + "clientConnection: {qps: .nan}", K + "clientConnection.qps 'nan': is not a number"),
    (HEAD + "logging: {format: xml}", K + "logging.format 'xml': is not one of text, json"),
    (HEAD + "logging: {verbosity: -1}", K + "logging.verbosity '-1': is not a whole number"),
    (HEAD + "logging: {options: {json: {infoBufferSize: 64Kb}}}",
     K + "logging.options.json.infoBufferSize '64Kb': is not"),
    (HEAD + "logging: {vmodule: [{filePattern: a=b, verbosity: 1}]}",
     K + "logging.vmodule 'a=b=1': is not of the form"),
    (HEAD + "logging: {vmodule: [{filePattern: a, verbosity: -1}]}", K + "logging.vmodule 'a=-1': is not of the form"),
    (HEAD + "logging: {vmodule: [{verbosity: 1}]}", K + "logging.vmodule '=1': is not of the form"),
    (HEAD + "logging: {flushFrequency: often}", K + "logging.flushFrequency 'often': is not a duration"),
    (HEAD + "enableProfiling: 'yes'", K + "enableProfiling 'yes': is not true or false"),
    (OURS + "mod: ebpf", H + "mod 'ebpf': there is no such field"),
    (OURS + "ebpf: {probes: {every: 1s}}", H + "ebpf.probes.every '1s': there is no such"),
    (OURS + "mode: auto\nmode: ebpf", "f.conf: HybridProxyConfiguration: line 5: 'mode' stands there twice"),
    (OURS + "mode: fast", H + "mode 'fast': is not a mode; this version has ebpf"),
    (OURS + "ebpf: {xdp: generic}", H + "ebpf.xdp 'generic': is not one of auto, native, off"),
    (OURS + "ebpf: {limits: {flows: 1}}", H + "ebpf.limits.flows '1': is not a whole number"),
    (OURS + "ebpf: {cgroup: here}", H + "ebpf.cgroup 'here': is not an absolute path"),
    (HEAD + "clientConnection: {kubeconfig: /k}\n" + OURS + "manifests: /m",
     H + "manifests '/m': cannot be used together with " + K + "clientConnection.kubeconfig"),
]
# fmt: on


class TestErrors:
    @pytest.mark.parametrize(("content", "message"), BAD, ids=[message[8:70] for _, message in BAD])
    def test_they_name_file_field_and_value(self, content: str | bytes, message: str):
        with pytest.raises(ConfigError) as error:
            loaded(content)
        assert str(error.value).startswith(message)

    def test_all_are_told_at_once(self):
        """Fields of both documents, of wrong types and wrong values, fields that do not exist, and a flag."""
        content = f"""{HEAD}iptables: {{masqueradeBit: x, syncPeriod: 30x, minSyncPeriod: 1m}}
mode: userspace
oomScoreAdj: 5000
nodePortAddresses: [1, 2]
{OURS}mod: ebpf
ebpf: {{xdp: generic, limits: {{flows: 1}}, probes: [1]}}
"""
        with pytest.raises(ConfigError) as error:
            loaded(content, "--algorithm", "best")
        expected = (
            K + "iptables.masqueradeBit 'x': is not a whole number", K + "nodePortAddresses[0] 1: is not a text",
            H + "mod 'ebpf': there is no such field", H + "ebpf.probes [1]: is not an object",
            K + "mode 'userspace': is not one of iptables", K + "oomScoreAdj '5000': is not a whole number from",
            K + "iptables.syncPeriod '30x': is not a duration", H + "ebpf.xdp 'generic': is not one of",
            H + "ebpf.limits.flows '1': is not a whole number", "--algorithm 'best': is not one of",
        )  # fmt: skip
        told = list(error.value.problems)
        for start in expected:
            (found,) = [problem for problem in told if problem.startswith(start)]
            told.remove(found)
        assert told == [], "minSyncPeriod is longer than the default of a syncPeriod that is wrong: not its fault"
        assert str(error.value).startswith("10 settings cannot be used:\n  f.conf: ")

    def test_another_document_is_looked_at_too(self):
        with pytest.raises(ConfigError) as error:
            loaded(f"kind: Pod\n---\n{HEAD}oomScoreAdj: 5000")
        assert [problem.partition(":")[2][:12] for problem in error.value.problems] == [" line 1: kin", " KubeProxyCo"]

    def test_what_is_missing_is_told_with_the_rest(self):
        with pytest.raises(ConfigError) as error:
            loaded(HEAD + "detectLocalMode: BridgeInterface\noomScoreAdj: 5000")
        assert len(error.value.problems) == 2

    def test_very_many_are_cut_short(self):
        with pytest.raises(ConfigError) as error:
            loaded(OURS + "\n".join(f"field{n}: 1" for n in range(100)))
        assert len(error.value.problems) == 100
        assert str(error.value).endswith("\n  and 80 more")

    def test_flags_alone_are_told_at_once_too(self, capsys):
        assert cli.main(["run", "--proxy-mode", "fast", "--xdp", "maybe", "--max-flows", "1"]) == 2
        said = capsys.readouterr().err
        assert [flag in said for flag in ("--proxy-mode 'fast'", "--xdp 'maybe'", "--max-flows '1'")] == [True] * 3

    def test_what_kube_proxy_does_not_know_is_told_and_left_out(self):
        config = kube("iptables: {masqueradeBits: 3, masqueradeBit: 4}\nipVS: {}\nmode: ipvs\nmode: nftables\n")
        assert config.mode == "nftables"
        assert config.warnings == (
            "f.conf: KubeProxyConfiguration: line 6: 'mode' stands there twice, the last one counts",
            "f.conf: KubeProxyConfiguration.iptables.masqueradeBits 3: there is no such field, it is left out",
            "f.conf: KubeProxyConfiguration.ipVS {}: there is no such field, it is left out",
        )

    def test_explain_reads_files_too(self, tmp_path: Path, capsys):
        (tmp_path / "f").write_text(HEAD + "nodePortAddresses: [primary, x]\n")
        packet = ["--manifests", str(ROOT / "examples"), "--from", "10.77.1.11", "--to", "10.96.0.10:80"]
        assert cli.main(["explain", "--config", str(tmp_path / "f"), *packet]) == 2
        assert "KubeProxyConfiguration.nodePortAddresses 'primary,x': 'x' is not a CIDR" in capsys.readouterr().err
        (tmp_path / "f").write_text(HEAD + "hostnameOverride: lab-node\nclusterCIDR: 10.77.0.0/16\n")
        assert cli.main(["explain", "--config", str(tmp_path / "f"), *packet]) == 0
        assert "goes to a backend" in capsys.readouterr().out

    def test_no_file(self, tmp_path: Path, capsys):
        assert cli.main(["run", "--config", str(tmp_path / "none")]) == 2
        assert capsys.readouterr().err == f"hybrid-proxy run: --config {tmp_path}/none: No such file or directory\n"
        assert cli.main(["run", "--config", str(tmp_path)]) == 2

    def test_positional_arguments(self):
        with pytest.raises(SystemExit):
            flags("something")

    def test_too_large(self, tmp_path: Path):
        (tmp_path / "f").write_bytes(b"#" * (1 << 21))
        with pytest.raises(ConfigError, match="is larger than 1 MiB"):
            load(tmp_path / "f", {})


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["30s", "-1s", "10.0.0.0/8", "primary", "::", "9" * 200 + "h", "1e9", "auto", "ipvs", "nftables"])
)  # fmt: skip
NAMES = st.sampled_from(sorted({part for row in rows() for part in row.path.split(".")})) | st.text(max_size=5)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4))


class TestHostile:
    """Nothing but a `Config` or a clear error comes of any bytes."""

    def survives(self, content: bytes) -> None:
        refused = ""
        try:
            found = loaded(content)
        except ConfigError as error:
            refused = str(error)
        else:
            assert len(list(yaml.safe_load_all(text(found)))) == 2
        first, *rest = refused.splitlines() or [""]
        told = [line.strip() for line in rest if not re.fullmatch(r"  and \d+ more", line)] if rest else [first]
        assert len(told) <= 20
        assert not refused or all(
            line.startswith("f.conf: ") and line.isprintable() and len(line) < 1500 for line in told
        )

    @given(st.binary(max_size=200))
    def test_bytes(self, content: bytes):
        self.survives(content)

    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from(sorted(DOCUMENTS)), st.dictionaries(NAMES, VALUES, max_size=6))
    def test_values(self, kind: str, fields: dict[str, Any]):
        head = {"apiVersion": DOCUMENTS[kind]().api_version, "kind": kind}  # type: ignore[attr-defined]
        self.survives(yaml.safe_dump({**fields, **head}, allow_unicode=True).encode("utf-8", "surrogatepass"))

    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from(rows()), VALUES)
    def test_one_field(self, row: Row, value: Any):
        document: dict[str, Any] = {"apiVersion": DOCUMENTS[row.document]().api_version, "kind": row.document}  # type: ignore[attr-defined]
        *folders, last = row.path.split(".")
        place = document
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
        self.survives(yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass"))

    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=30))
    def test_durations(self, typed: str):
        seconds = duration(typed)
        assert seconds is None or abs(seconds) < 1 << 34

    @pytest.mark.parametrize("content", [
        "a: &a [x, x]\nb: &b [*a, *a]\n" + "\n".join(
            f"{chr(98 + n)}{n}: &c{n} [{', '.join(['*b' if n == 0 else f'*c{n - 1}'] * 9)}]" for n in range(9)
        ) + "\nnodePortAddresses: *c8\nconntrack: {min: *c8}\n",
        "x: &x [*x]\n", "nodePortAddresses: &x [*x]\n", "iptables: &x {iptables: *x, masqueradeBit: *x}\n",
        "mode: " + "[" * 5000, "oomScoreAdj: 0x" + "f" * 40_000 + "\n", "? {a: b}\n: c\n",
        "mode: !!python/name:os.system\n",
        "<<: {mode: ipvs}\n", "mode: |\n  ipvs\n", "iptables: {<<: [1]}\n", "'\\u0000': 1\n", '"mo\\ude00de": 1\n',
    ])  # fmt: skip
    def test_yaml_s_own_traps(self, content: str):
        started = time.monotonic()
        self.survives((HEAD + content).encode())
        assert time.monotonic() - started < 30


# -------------------------------------------------------------------------------------------- precedence


class TestFlagsBesideAFile:
    def test_kube_proxys_are_ignored_and_told(self):
        config = kube("mode: nftables", "--proxy-mode=ipvs", "--masquerade-all", "--healthz-port=0")
        assert (config.mode, config.settings.masquerade_all) == ("nftables", False)
        assert config.healthz_bind_address == Endpoint("0.0.0.0", 10256)
        assert sorted(warning.partition(":")[0] for warning in config.warnings) == [
            "--healthz-port", "--masquerade-all", "--proxy-mode"
        ]  # fmt: skip

    def test_the_name_master_and_the_log_count(self):
        config = kube(
            "hostnameOverride: a\nlogging: {verbosity: 1, format: json}\n",
            "--hostname-override=B", "--v=5", "--logging-format=text", "--master=https://m",
        )  # fmt: skip
        assert (config.settings.node_name, config.verbosity, config.log_format) == ("b", 5, "text")
        assert config.master == "https://m"
        assert config.warnings == ()

    def test_an_error_in_such_a_flag_names_the_flag(self):
        with pytest.raises(ConfigError, match=r"^-v 'loud': is not"):
            kube("logging: {verbosity: 1}", "--v=loud")

    def test_flags_that_kube_proxy_does_not_have_count(self):
        config = ours("ebpf: {xdp: native}\nadminSocket: /a", "--xdp=off", "--manifests=/m", "--no-fast-path")
        assert (config.options.xdp, str(config.manifests), config.options.fast_path) == ("off", "/m", False)
        assert config.admin_socket == "/a"
        assert config.warnings == ()

    def test_our_mode_wins(self):
        assert loaded(HEAD + "mode: iptables\n" + OURS + "mode: ebpf\n").config.mode == "ebpf"
        assert loaded(HEAD + "mode: iptables\n" + OURS).config.mode == "iptables"
        assert loaded(HEAD + OURS).config.mode == "auto"

    def test_deprecated_ports_without_a_file(self):
        config = from_flags(flags("--healthz-port=0", "--metrics-port=99", "--metrics-bind-address=10.0.0.1"))
        assert config.healthz_bind_address is None
        assert config.metrics_bind_address == Endpoint("10.0.0.1", 99)

    def test_periods_without_a_file_are_of_the_mode(self):
        common = ("--iptables-sync-period=1m", "--ipvs-sync-period=2m", "--iptables-min-sync-period=5s")
        for mode, seconds, rest in (("auto", 60, 5), ("nftables", 60, 5), ("ipvs", 120, 0)):
            config = from_flags(flags(*common, f"--proxy-mode={mode}"))
            assert (config.options.sync_seconds, config.min_sync_seconds) == (seconds, rest)


OTHER: dict[str, Any] = {  # another value than the default, where `other` cannot guess one
    "feature_gates": ["AllowServiceExternalIPs=false"], "bind_address": "192.0.2.1", "healthz_bind_address": "[::1]:1",
    "metrics_bind_address": "[::1]:1", "logging_format": "json", "proxy_mode": "iptables", "mode": "iptables",
    "masquerade_ports": "1024-2048", "cluster_cidr": "10.0.0.0/8", "nodeport_addresses": ["10.0.0.0/8"],
    "pod_interfaces": ["v*"], "uplink_interfaces": ["e*"], "socket_scope": "all", "xdp": "off", "dsr": "ipip",
    "source_check": "strict",
    "algorithm": "maglev", "ipvs_scheduler": "wrr", "ipvs_exclude_cidrs": ["10.0.0.0/8"],
    "pod_bridge_interface": "cni0", "pod_interface_name_prefix": "veth", "detect_local_mode": "NodeCIDR",
    "nftables_min_sync_period": "7s", "conntrack_udp_timeout": "7s", "conntrack_udp_timeout_stream": "7s",
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {  # where a setting counts only with others
    "pod_bridge_interface": {"detect_local_mode": "BridgeInterface"},
    "pod_interface_name_prefix": {"detect_local_mode": "InterfaceNamePrefix"},
}


def other(row: Row) -> Any:
    if row.name in OTHER:
        return OTHER[row.name]
    if row.type is bool:
        return str(row.setting.inverted or not row.default).lower()  # inverted ones are named for what they turn off
    return str(row.default + 1) if row.type is int else "7s"


@pytest.mark.parametrize(
    "row", [row for row in rows() if not (row.setting.unused or row.setting.restart)], ids=lambda row: row.name
)
def test_what_reopens_the_mode_is_marked_so(row: Row):
    """By what comes of the setting, in the mode that has it."""
    mode = row.name.partition("_")[0]
    base = {"mode": mode if mode in ("ipvs", "nftables", "iptables") and row.name != "mode" else "ebpf"}
    if row.name == "proxy_mode":
        base = {}
    base |= BESIDE.get(row.name, {})
    first = {row.name: "first0"} if row.name in BESIDE else {}
    before = from_flags(base | first, {})
    after = from_flags(base | {row.name: other(row)}, {})
    assert after != before, "the test needs another value"
    assert needs_reopening(before, after) == (row.name in reopening_settings())


# ------------------------------------------------------------------------------------ what is written out


class TestWritten:
    @pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
    def test_reads_as_the_same(self, name: str, tmp_path: Path):
        first = load(FOLDER / name, flags("--hostname-override=n"))
        write(tmp_path / "out.yaml", first)
        again = load(tmp_path / "out.yaml", flags("--hostname-override=n"))
        assert plain(again.config) == plain(first.config)
        assert text(again) == text(first)

    @pytest.mark.parametrize("arguments", [
        "", "--proxy-mode=ebpf", "--proxy-mode=ipvs --ipvs-exclude-cidrs=10.0.0.0/8,fd00::/8 --masquerade-all",
        "--proxy-mode=nftables --iptables-masquerade-bit=3 --iptables-sync-period=1m --masquerade-all=T",
        "--healthz-bind-address= --metrics-bind-address=::1", "--feature-gates=AllowServiceExternalIPs=false",
        "--no-fast-path --no-traffic-counters=false --max-flows=8 --probe-interval=250ms --manifests=/m",
        "--nodeport-addresses=10.0.0.0/8 --nodeport-addresses=fd00::/8 --cluster-cidr=10.0.0.0/8",
        "--hostname-override=NODE --v=3 --log-format=json --oom-score-adj=0 --conntrack-tcp-timeout-established=0",
        "--detect-local-mode=BridgeInterface --pod-bridge-interface=cni0 --bind-address=fd00::1",
        "--metrics-port=0 --vmodule=a=1,b=2",
    ])  # fmt: skip
    def test_flags_become_a_file_that_means_the_same(self, arguments: str, tmp_path: Path):
        typed = flags(*arguments.split())
        write(tmp_path / "out.yaml", of_flags(typed))
        assert plain(load(tmp_path / "out.yaml", flags()).config) == plain(from_flags(typed))

    def test_the_command(self, tmp_path: Path, capsys):
        out = tmp_path / "out.yaml"
        arguments = ["run", "--config", str(FOLDER / "eks.yaml"), "--write-config-to", str(out), "--proxy-mode=ipvs"]
        assert cli.main(arguments) == 0
        theirs, mine = yaml.safe_load_all(out.read_text())
        assert (theirs["mode"], theirs["kind"], mine["kind"]) == ("iptables", KUBE_PROXY, HYBRID)
        assert "warning: --proxy-mode: is ignored" in capsys.readouterr().err
        assert cli.main(["run", "--write-config-to", str(tmp_path / "no" / "out")]) == 2

    def test_defaults_are_kube_proxys(self):
        theirs = yaml.safe_load(text(of_flags({})).split("---")[0])
        expected = yaml.safe_load((FOLDER / "defaulted-1.36.yaml").read_text())
        for known in (theirs, expected):
            for form in ("json", "text"):
                known["logging"]["options"][form].pop("splitStream", None)
            known["logging"].pop("vmodule", None)
        expected["nodePortAddresses"], expected["ipvs"]["excludeCIDRs"] = [], []
        assert theirs == expected


def plain(config: Config) -> Config:
    return msgspec.structs.replace(config, warnings=())


# ---------------------------------------------------------------------------------------- a changed file


class TestChange:
    def test_what_can_be_applied_and_what_waits(self):
        old = loaded(HEAD + "mode: iptables\nhostnameOverride: a\nmetricsBindAddress: 127.0.0.1:1\n")
        new = loaded(HEAD + "mode: nftables\nhostnameOverride: b\nmetricsBindAddress: 127.0.0.1:2\n" + OURS
                     + "ebpf: {limits: {flows: 8}, probes: {interval: 1s}}\n")  # fmt: skip
        changed = change(old, new)
        assert sorted(changed.applied) == [
            "HybridProxyConfiguration.ebpf.probes.interval",
            "KubeProxyConfiguration.metricsBindAddress",
            "KubeProxyConfiguration.mode",
        ]
        assert sorted(changed.waiting) == [
            "HybridProxyConfiguration.ebpf.limits.flows",
            "KubeProxyConfiguration.hostnameOverride",
        ]
        config = changed.now.config
        assert (config.mode, config.options.probe_interval) == ("nftables", 1.0)
        assert (config.settings.node_name, config.metrics_bind_address) == ("a", Endpoint("127.0.0.1", 2))
        assert config.options.max_flows == old.config.options.max_flows

    def test_going_back_leaves_nothing_waiting(self):
        old = loaded(HEAD + "hostnameOverride: a\n")
        first = change(old, loaded(HEAD + "hostnameOverride: b\nmode: ipvs\n"))
        second = change(first.now, loaded(HEAD + "hostnameOverride: a\nmode: ipvs\n"))
        assert second == (second.now, (), ())
        assert plain(second.now.config) == plain(first.now.config)

    def test_flags_beside_the_file_stay(self):
        old = loaded(HEAD + "mode: ipvs\n", "--v=4", "--xdp=off")
        changed = change(old, loaded(HEAD + OURS + "ebpf: {xdp: native}\n", "--v=4", "--xdp=off"))
        assert (changed.now.config.verbosity, changed.now.config.options.xdp) == (4, "off")

    @pytest.mark.parametrize("how", ["written", "renamed over", "swapped as a ConfigMap's volume"])
    def test_it_is_noticed(self, how: str, tmp_path: Path):
        volume = how.startswith("swapped")
        place = tmp_path / "config.conf"
        if volume:
            for name, mode in (("..1", "iptables"), ("..2", "nftables")):
                (tmp_path / name).mkdir()
                (tmp_path / name / "config.conf").write_text(f"{HEAD}mode: {mode}\n")
            (tmp_path / "..data").symlink_to("..1")
            place.symlink_to("..data/config.conf")
        else:
            place.write_text(HEAD + "mode: iptables\n")
        told: list[Loaded | ConfigError] = []
        stop = threading.Event()
        thread = threading.Thread(target=follow, args=(place, {}, place.read_bytes(), told.append, stop), daemon=True)
        thread.start()
        try:
            time.sleep(0.3)
            assert told == []
            if volume:
                (tmp_path / "..tmp").symlink_to("..2")
                (tmp_path / "..tmp").rename(tmp_path / "..data")
            elif how == "written":
                place.write_text(HEAD + "mode: nftables\n")
            else:
                (tmp_path / "new").write_text(HEAD + "mode: nftables\n")
                (tmp_path / "new").rename(place)
            wait_for(lambda: told)
            assert [one.config.mode for one in told if isinstance(one, Loaded)] == ["nftables"]
            place.unlink()
            place.write_text(HEAD + "mode: 1\n")
            wait_for(lambda: len(told) == 2)
            assert str(told[1]).startswith(f"{place}: KubeProxyConfiguration.mode 1: is not a text")
        finally:
            stop.set()
            thread.join(5)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)


# --------------------------------------------------------------------------------- what is made of the types


class TestReference:
    @pytest.mark.parametrize("name", reference.FILES)
    def test_pages_are_current(self, name: str):
        assert (ROOT / name).read_text() == reference.FILES[name](), "run `make docs`"

    def test_the_schema_knows_every_field_and_its_default(self):
        definitions = reference.schema()["$defs"]

        def paths(name: str, prefix: str) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for key, value in definitions[name]["properties"].items():
                target = value.get("$ref") or (value.get("allOf") or value.get("anyOf") or [{}])[0].get("$ref")
                if target:
                    found |= paths(target.rpartition("/")[2], f"{prefix}{key}.")
                else:
                    found[prefix + key] = value
            return found

        known = paths(HYBRID, "")
        mine = {row.path: row for row in rows() if row.document == HYBRID}
        assert known.keys() - {"apiVersion", "kind"} == mine.keys()
        for path, row in mine.items():
            assert known[path]["description"] == row.text
            assert known[path]["default"] == row.default
        assert not definitions[HYBRID]["additionalProperties"]
        assert msgspec.convert({}, HybridProxyConfiguration) == HybridProxyConfiguration()

    def test_the_schema_takes_what_we_take_and_refuses_what_we_refuse(self):
        made = reference.schema()
        jsonschema.Draft202012Validator.check_schema(made)
        judge = jsonschema.Draft202012Validator(made)
        head = {"apiVersion": "hybrid-proxy.io/v1alpha1", "kind": HYBRID}
        written = list(yaml.safe_load_all(text(of_flags({}))))[1]
        example = list(yaml.safe_load_all((FOLDER / "kind-nftables.yaml").read_text()))[1]
        good = [written, example, head, head | {"ebpf": {"probes": {"interval": "1m30s", "timeout": "0.5s"}}}]
        bad = [{}, {"kind": HYBRID}, head | {"kind": "Other"}, head | {"apiVersion": "v1"}, head | {"mod": "ebpf"},
               head | {"mode": "fast"}, head | {"strictMode": "yes"}, head | {"nodeAddresses": "10.0.0.1"},
               head | {"ebpf": {"xdp": "generic"}}, head | {"ebpf": {"limits": {"flows": 1}}},
               head | {"ebpf": {"failover": {"failures": "3"}}}, head | {"ebpf": {"probes": {"interval": "5"}}},
               head | {"ebpf": {"probes": {"every": "5s"}}}]  # fmt: skip
        for document in good:
            assert not list(judge.iter_errors(document)), document
            loaded(yaml.safe_dump(document))
        for document in bad:
            assert list(judge.iter_errors(document)), document
            with pytest.raises(ConfigError):
                loaded(yaml.safe_dump(document))

    def test_every_default_passes_the_check(self):
        both = loaded(text(of_flags({})))
        assert plain(both.config) == from_flags({})


# ------------------------------------------------------------------------------------- the node's settings


@pytest.mark.parametrize(("per_core", "least", "cpus", "limit"), [
    (32768, 131072, 2, 131072), (32768, 131072, 8, 262144), (0, 131072, 8, 0), (32768, 131072, 64, 1 << 20),
    (1, 2_000_000, 64, 2_000_000),
])  # fmt: skip
def test_conntrack_limit_is_kube_proxys(per_core: int, least: int, cpus: int, limit: int):
    assert conntrack_limit(Conntrack(max_per_core=per_core, minimum=least), cpus) == limit


def test_conntrack_settings_leave_alone_what_is_0():
    assert conntrack_settings(Conntrack()) == {
        "net/netfilter/nf_conntrack_tcp_timeout_established": "86400",
        "net/netfilter/nf_conntrack_tcp_timeout_close_wait": "3600",
    }
    assert conntrack_settings(Conntrack(0, 0, 0, 0, True, 5, 0)) == {
        "net/netfilter/nf_conntrack_tcp_be_liberal": "1", "net/netfilter/nf_conntrack_udp_timeout": "5"
    }  # fmt: skip
