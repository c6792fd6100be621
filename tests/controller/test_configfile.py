"""Settings, from flags and files to one checked `Config`: every field, errors, precedence, changes, hostile bytes."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hybrid_proxy.controller import cli
from hybrid_proxy.controller.agent.node_setup import conntrack_limit, conntrack_settings
from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.controller.semantics.entries import DetectLocalMode
from hybrid_proxy.controller.settings import config
from hybrid_proxy.controller.settings.config import Config, Endpoint, Loaded, needs_reopening, of_flags
from hybrid_proxy.controller.settings.configfile import change, follow, load, read, text, write
from hybrid_proxy.controller.settings.documents import (
    DOCUMENTS,
    HYBRID,
    KUBE_PROXY,
    KUBE_PROXYS_MODES,
    Conntrack,
    KubeProxyConfiguration,
    Row,
    rows,
)
from hybrid_proxy.controller.settings.forms import ANYTHING
from hybrid_proxy.controller.settings.given import REMOVED_FLAGS
from hybrid_proxy.dataplane.settings import REOPENS, RESTART, duration
from hybrid_proxy.workshop import configuration
from tests.waiting import until

FOLDER = Path(__file__).parent / "configurations"
ROOT = Path(__file__).parents[2]
HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
OURS = "---\napiVersion: hybrid-proxy.io/v1alpha1\nkind: HybridProxyConfiguration\n"

parser = cache(cli.parser)


def flags(*arguments: str) -> dict[str, Any]:
    """Flags through the very parser that `run` has."""
    return vars(parser("run").parse_args(["run", *arguments]))


def of_text(typed: str) -> Config:
    """The configuration of flags; their values may hold spaces."""
    return of_flags(flags(*typed.replace(" --", "\n--").split("\n"))).config


def loaded(content: str | bytes, *arguments: str) -> Loaded:
    return read(content if isinstance(content, bytes) else content.encode(), "f.conf", flags(*arguments))


def kube(fields: str, *arguments: str) -> Config:
    return loaded(HEAD + fields, *arguments).config


def dig(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name)
    return value


def problems(made: Callable[[], object]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        made()
    return error.value.problems


def each(table: Iterable[tuple[Any, ...]], check: Callable[..., None]) -> None:
    """Check every row of a table; the failure names all rows that are wrong. An id for each would cost more than it."""
    wrong = []
    for row in table:
        try:
            check(*row)
        except (AssertionError, ConfigError, pytest.fail.Exception) as error:
            wrong.append(f"{row}:\n{error}")
    assert not wrong, "\n\n".join(wrong)


# --------------------------------------------------------------------- kube-proxy's own configurations load


class TestTheirFiles:
    def test_what_kube_proxy_writes_by_default(self):
        config = load(FOLDER / "defaulted-1.36.yaml", flags()).config
        assert plain(config) == plain(of_flags({}).config)
        assert config.warnings == ()

    def test_kubeadms_zeros_are_defaults(self):
        config = load(FOLDER / "kubeadm.yaml", flags("--hostname-override=node-1")).config
        assert config.warnings == ()
        expected = flags("--hostname-override=node-1", "--kubeconfig=/var/lib/kube-proxy/kubeconfig.conf",
                         "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56")  # fmt: skip
        assert plain(config) == plain(of_flags(expected).config)

    def test_a_managed_clouds_config_map(self):
        config = load(FOLDER / "eks.yaml", flags("--v=2", "--hostname-override=ip-10-0-0-1")).config
        assert (config.mode, config.kube_proxy.oom_score_adj) == ("iptables", -998)
        assert config.kube_proxy.logging.verbosity == 2
        assert config.metrics_bind_address == Endpoint("0.0.0.0", 10249)
        (warning,) = config.warnings
        assert warning.split(": ")[1] == f"{K}.udpIdleTimeout '250ms'"

    def test_ipvs_with_strict_arp(self):
        config = load(FOLDER / "ipvs-with-metallb.yaml", flags()).config
        assert (config.mode, config.options.ipvs.strict_arp, config.warnings) == ("ipvs", True, ())
        assert config.settings.node_port_addresses == ("10.0.0.0/8",)

    def test_two_documents(self):
        config = load(FOLDER / "kind-nftables.yaml", flags()).config
        assert (config.mode, config.settings.algorithm) == ("auto", "maglev")
        assert (config.options.ebpf.failover.failures, config.options.ebpf.probes.interval) == (5, 2.0)
        conntrack = Conntrack(max_per_core=0, tcp_established_timeout=0, tcp_close_wait_timeout=0)
        assert config.kube_proxy.conntrack == conntrack
        assert config.options.timeouts.tcp_established == 86_400  # a flow of ours has to end some time
        assert config.warnings == ()

    def test_of_a_later_version_what_is_known_counts_and_the_rest_is_named(self, tmp_path: Path):
        path = tmp_path / "config"
        path.write_text(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha2\nkind: KubeProxyConfiguration\n"
            "mode: nftables\nsyncPeriod: 30s\nnodePortAddresses: {ipv4: [primary]}\noomScoreAdj: -998\n"
        )
        config = load(path, flags()).config
        assert (config.mode, config.kube_proxy.oom_score_adj) == ("nftables", -998)
        assert config.settings.node_port_addresses == ()
        named = {warning.removeprefix(f"{path}: ").split(" ")[0] for warning in config.warnings}
        assert named == {"line", f"{K}.syncPeriod", f"{K}.nodePortAddresses"}

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
        assert of_flags(flags(*arguments.split())).config.warnings == ()

    def test_flags_of_old_manifests_are_reported(self):
        config = of_flags(flags("--logtostderr=true", "--alsologtostderr", "--masquerade-all")).config
        assert [warning.split(":")[0] for warning in config.warnings] == ["--alsologtostderr", "--logtostderr"]
        assert config.settings.masquerade_all

    def test_every_flag_of_kube_proxy_is_one_of_run(self):
        known = set(flags())
        assert {row.dest for row in rows()} - {""} <= known
        assert {"config", "write_config_to", "cleanup", "init_only", "master", "healthz_port", "metrics_port"} <= known
        assert {name.replace("-", "_") for name in REMOVED_FLAGS} <= known


# ------------------------------------------------------- every field: it is used, or a warning says why it is not

K, H = KUBE_PROXY, HYBRID
# Document, field, another value than the default, where it is in the configuration, and what is there.
# fmt: off
USED = [
    (K, "featureGates", {"AllowServiceExternalIPs": False}, "settings.external_ips", False),
    (H, "externalIPs.allowedCIDRs", ["198.51.100.0/24"], "settings.external_ip_cidrs", ("198.51.100.0/24",)),
    (H, "resetGoneBackends", True, "settings.reset_gone_backends", True),
    (H, "externalIPs.allowedNamespaces", ["shop", "3d"], "settings.external_ip_namespaces", ("shop", "3d")),
    (K, "clientConnection.kubeconfig", "/k", "kube_proxy.client_connection.kubeconfig", "/k"),
    (K, "clientConnection.qps", 50, "api_rate", 50.0),
    (K, "clientConnection.burst", 100, "api_burst", 100),
    (K, "logging.format", "json", "kube_proxy.logging.format", "json"),
    (K, "logging.verbosity", 4, "kube_proxy.logging.verbosity", 4),
    (K, "hostnameOverride", " Node-1 ", "settings.node_name", "node-1"),
    (K, "bindAddress", "10.0.0.7", "settings.primary", ("10.0.0.7",)),
    (K, "healthzBindAddress", "10.0.0.7", "healthz_bind_address", Endpoint("10.0.0.7", 10256)),
    (K, "metricsBindAddress", "[::]:99", "metrics_bind_address", Endpoint("::", 99)),
    (K, "bindAddressHardFail", True, "kube_proxy.bind_address_hard_fail", True),
    (K, "enableProfiling", True, "kube_proxy.enable_profiling", True),
    (K, "mode", "nftables", "mode", "nftables"),
    (K, "iptables.masqueradeBit", 5, "settings.masquerade_bit", 5),
    (K, "iptables.masqueradeAll", True, "settings.masquerade_all", True),
    (K, "iptables.syncPeriod", "1m30s", "options.sync_seconds", 90.0),
    (K, "iptables.minSyncPeriod", "2s", "min_sync_seconds", 2.0),
    (K, "ipvs.syncPeriod", "1m", "options.sync_seconds", 60.0),
    (K, "ipvs.minSyncPeriod", "1s", "min_sync_seconds", 1.0),
    (K, "ipvs.scheduler", "mh", "options.ipvs.default_scheduler", "mh"),
    (K, "ipvs.excludeCIDRs", ["10.0.0.0/8"], "options.ipvs.exclude_cidrs", ("10.0.0.0/8",)),
    (K, "ipvs.strictARP", True, "options.ipvs.strict_arp", True),
    (K, "ipvs.tcpTimeout", "1m", "options.ipvs.tcp_timeout", 60),
    (K, "ipvs.tcpFinTimeout", "1m", "options.ipvs.tcp_fin_timeout", 60),
    (K, "ipvs.udpTimeout", "500ms", "options.ipvs.udp_timeout", 1),
    (K, "nftables.masqueradeBit", 5, "settings.masquerade_bit", 5),
    (K, "nftables.masqueradeAll", True, "settings.masquerade_all", True),
    (K, "nftables.syncPeriod", "1m", "options.sync_seconds", 60.0),
    (K, "nftables.minSyncPeriod", "2s", "min_sync_seconds", 2.0),
    (K, "detectLocalMode", "NodeCIDR", "settings.detect", DetectLocalMode.NODE_CIDR),
    (K, "detectLocal.bridgeInterface", "cni0", "settings.pod_interface", "cni0"),
    (K, "detectLocal.interfaceNamePrefix", "cali", "settings.pod_interface", "cali"),
    (K, "clusterCIDR", "10.0.0.0/8,fd00::/8", "settings.cluster_cidrs", ("10.0.0.0/8", "fd00::/8")),
    (K, "nodePortAddresses", ["primary"], "settings.node_port_addresses", ("primary",)),
    (K, "oomScoreAdj", 0, "kube_proxy.oom_score_adj", 0),
    (K, "conntrack.maxPerCore", 0, "kube_proxy.conntrack.max_per_core", 0),
    (K, "conntrack.min", 1, "kube_proxy.conntrack.min", 1),
    (K, "conntrack.tcpEstablishedTimeout", "1h", "kube_proxy.conntrack.tcp_established_timeout", 3600),
    (K, "conntrack.tcpEstablishedTimeout", "1h", "options.timeouts.tcp_established", 3600),
    (K, "conntrack.tcpCloseWaitTimeout", "1m", "kube_proxy.conntrack.tcp_close_wait_timeout", 60),
    (K, "conntrack.tcpCloseWaitTimeout", "1m", "options.timeouts.tcp_close_wait", 60),
    (K, "conntrack.tcpBeLiberal", True, "kube_proxy.conntrack.tcp_be_liberal", True),
    (K, "conntrack.udpTimeout", "20s", "kube_proxy.conntrack.udp_timeout", 20),
    (K, "conntrack.udpTimeout", "20s", "options.timeouts.udp", 20),
    (K, "iptables.localhostNodePorts", False, "settings.localhost_node_ports", False),
    (K, "conntrack.udpStreamTimeout", "1m", "kube_proxy.conntrack.udp_stream_timeout", 60),
    (K, "conntrack.udpStreamTimeout", "1m", "options.timeouts.udp_stream", 60),
    (H, "mode", "userspace", "mode", "userspace"),
    (H, "strictMode", True, "hybrid.strict_mode", True),
    (H, "algorithm", "maglev", "settings.algorithm", "maglev"),
    (H, "manifests", "/m", "hybrid.manifests", "/m"),
    (H, "nodeAddresses", ["10.0.0.7/24", "FD00::7"], "hybrid.node_addresses", ("10.0.0.7", "fd00::7")),
    (H, "drainTimeout", "1m", "hybrid.drain_timeout", 60.0),
    (H, "serviceProxyName", "hybrid", "settings.proxy_name", "hybrid"),
    (H, "adminSocket", "/s", "hybrid.admin_socket", "/s"),
    (H, "serveHealthz", False, "healthz_bind_address", None),
    (H, "serveMetrics", False, "metrics_bind_address", None),
    (H, "metricsPerBackend", True, "hybrid.metrics_per_backend", True),
]
# The same of sections that modes take as they are: the value is where the document has it.
TAKEN = {
    "ebpf.podInterfaces": ["veth*", "cali*"], "ebpf.uplinkInterfaces": ["eth0"],
    "ebpf.socketScope": "off", "ebpf.cgroup": "/c", "ebpf.pinRoot": "/p", "ebpf.fastPath": "always",
    "ebpf.trafficCounters": False, "ebpf.answerPing": True, "ebpf.sourceCheck": "strict", "ebpf.xdp": "native",
    "ebpf.dsr": "ipip", "ebpf.masqueradePorts": "2000-2999", "ebpf.eventRate": 7, "ebpf.rejectRate": 7,
    "ebpf.failover.failures": 0, "ebpf.failover.percentage": 0, "ebpf.failover.connections": 7,
    "ebpf.probes.interval": "250ms", "ebpf.probes.timeout": "2s", "ebpf.probes.failures": 2,
    "ebpf.limits.services": 2000, "ebpf.limits.backends": 9000, "ebpf.limits.slots": 9000, "ebpf.limits.ring": 65521,
    "ebpf.limits.flows": 8,
}
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
    ("winkernel.networkName", "net", "''"),
    ("winkernel.sourceVip", "10.0.0.1", "''"),
    ("winkernel.enableDSR", "true", "false"),
    ("winkernel.rootHnsEndpointName", "x", "''"),
    ("winkernel.forwardHealthCheckVip", "true", "false"),
    ("configSyncPeriod", "1m", "900s"),
    ("portRange", "'300-2000'", "''"),
    ("windowsRunAsService", "true", "false"),
]
# Flags in forms that the fields above do not show, where the value is, and what is there.
FORMS = [
    ("--hostname-override= Node-A ", "settings.node_name", "node-a"),
    ("--algorithm=dh", "settings.algorithm", "dh"),
    ("--cluster-cidr=10.0.0.1/8", "settings.cluster_cidrs", ("10.0.0.0/8",)),
    ("--cluster-cidr=10.0.0.0/8, fd00::/8", "settings.cluster_cidrs", ("10.0.0.0/8", "fd00::/8")),
    ("--cluster-cidr=10.0.0.0/8 --cluster-cidr=fd00::/8", "settings.cluster_cidrs", ("10.0.0.0/8", "fd00::/8")),
    ("--cluster-cidr=", "settings.cluster_cidrs", ()),
    ("--detect-local-mode=", "settings.detect", DetectLocalMode.CLUSTER_CIDR),
    ("--pod-bridge-interface=cni0", "settings.pod_interface", ""),
    ("--nodeport-addresses=", "settings.node_port_addresses", ()),
    ("--nodeport-addresses=all,10.0.0.0/8,localhost,primary", "settings.node_port_addresses",
     ("all", "10.0.0.0/8", "localhost", "primary")),
    ("--masquerade-all", "settings.masquerade_all", True),
    ("--masquerade-all=false", "settings.masquerade_all", False),
    ("--masquerade-all=T", "settings.masquerade_all", True),
    ("--bind-address=0.0.0.0", "settings.primary", ()),
    ("--bind-address=::", "settings.primary", ()),
    ("--node-addresses=10.0.0.7,FD00::7,10.0.0.7", "hybrid.node_addresses", ("10.0.0.7", "fd00::7")),
    ("--proxy-mode=", "mode", "auto"),
    ("--proxy-mode=auto", "mode", "auto"),
    ("--kubeconfig=/etc/k --master=https://h:6443", "master", "https://h:6443"),
    ("--kube-api-qps=0", "api_rate", 5.0),
    ("--metrics-bind-address=", "metrics_bind_address", None),
    ("--metrics-bind-address=0.0.0.0", "metrics_bind_address", Endpoint("0.0.0.0", 10249)),
    ("--metrics-bind-address=[::1]", "metrics_bind_address", Endpoint("::1", 10249)),
    ("--metrics-bind-address=::1", "metrics_bind_address", Endpoint("::1", 10249)),
    ("--healthz-bind-address=", "healthz_bind_address", None),
    ("--healthz-port=0", "healthz_bind_address", None),
    ("--metrics-port=99 --metrics-bind-address=10.0.0.1", "metrics_bind_address", Endpoint("10.0.0.1", 99)),
    ("--conntrack-udp-timeout=9000000s", "options.timeouts.udp", 2_147_483),  # in jiffies
    ("--log-format=json", "kube_proxy.logging.format", "json"),
    ("-v=4", "kube_proxy.logging.verbosity", 4),
    # A service proxy beside kube-proxy does not take its ports.
    ("--service-proxy-name=lab", "healthz_bind_address.port", 10356),
    ("--service-proxy-name=lab", "metrics_bind_address.port", 10349),
    ("--service-proxy-name=lab", "options.shares_node", True),
    ("--service-proxy-name=lab --healthz-bind-address=0.0.0.0:10256", "healthz_bind_address.port", 10356),
    ("--service-proxy-name=lab --metrics-bind-address=127.0.0.1:8081", "metrics_bind_address.port", 8081),
    ("--service-proxy-name=lab --healthz-port=10256", "healthz_bind_address.port", 10356),
    ("--service-proxy-name=lab --metrics-port=0", "metrics_bind_address", None),
]
# fmt: on
# What has to be there for a setting to count: fields of kube-proxy's document, and the same as flags.
NEEDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ipvs.": ({"mode": "ipvs"}, ["--proxy-mode=ipvs"]),
    "nftables.": ({"mode": "nftables"}, ["--proxy-mode=nftables"]),
    "detectLocal.bridge": (
        {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "first0"}},
        ["--detect-local-mode=BridgeInterface"],
    ),
    "detectLocal.interface": (
        {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "first"}},
        ["--detect-local-mode=InterfaceNamePrefix"],
    ),
}
ROWS = {row.key: row for row in rows()}


def taken() -> list[tuple[str, str, Any, str, object]]:
    """Rows as those of `USED`."""
    snake = {path: re.sub("([A-Z])", r"_\1", path).lower() for path in TAKEN}
    return [(H, path, value, f"options.{snake[path]}", ROWS[f"{H}.{path}"].setting.form.parse(value))
            for path, value in TAKEN.items()]  # fmt: skip


def beside(path: str) -> tuple[dict[str, Any], list[str]]:
    return next((needed for prefix, needed in NEEDS.items() if path.startswith(prefix)), ({}, []))


def of_fields(*fields: tuple[str, str, Any]) -> dict[str, dict[str, Any]]:
    """Documents with these fields, and with what they need."""
    documents = {kind: {"apiVersion": cls().api_version, "kind": kind} for kind, cls in DOCUMENTS.items()}
    for document, path, value in fields:
        for name, needed in beside(path)[0].items():
            documents[K][name] = {**documents[K].get(name, {}), **needed} if isinstance(needed, dict) else needed
        *parents, last = path.split(".")
        place: dict[str, Any] = documents[document]
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return documents


def of_documents(documents: dict[str, dict[str, Any]]) -> Loaded:
    """JSON is YAML, and read faster."""
    return loaded("\n---\n".join(map(json.dumps, documents.values())))


def of_field(document: str, path: str, value: Any) -> Loaded:
    return of_documents(of_fields((document, path, value)))


def as_flag(row: Row, value: Any) -> str:
    """`--flag=value`, which means the same as the field."""
    match value:
        case bool():
            text = str(value is not row.setting.inverted).lower()
        case dict():
            text = ",".join(f"{name}={str(on).lower()}" for name, on in value.items())
        case list():
            text = ",".join(value)
        case _:
            text = str(value)
    return f"--{row.setting.flag}={text}"


def plain(config: Config) -> dict[str, Any]:
    """All that has an influence. A flag may set several fields of which one counts, so documents may differ."""
    places = {"settings", "options", "master", "task", *(where for *_, where, _ in [*USED, *taken()])}
    return {where: dig(config, where) for where in places}


@cache
def of_json(fields: str) -> Config:
    return of_documents(
        {K: json.loads(fields) | {"apiVersion": KubeProxyConfiguration().api_version, "kind": K}}
    ).config


class TestFields:
    def test_all_of_them_are_here(self):
        used = {f"{document}.{path}" for document, path, *_ in [*USED, *taken()]}
        unused = {f"{K}.{path}" for path, *_ in TOLD}
        missing = {row.key for row in rows() if row.document in DOCUMENTS} ^ (used | unused)
        assert not missing, "a field has one row: in USED or TAKEN, where a test sets it, or in TOLD"
        assert unused == {row.key for row in rows() if row.setting.unused}

    def test_used(self):
        """From a file and by the flag; and what a change does."""

        def check(document: str, path: str, value: Any, where: str, expected: object) -> None:
            row, (_, needed) = ROWS[f"{document}.{path}"], beside(path)
            found, before = of_field(document, path, value).config, of_json(json.dumps(beside(path)[0]))
            assert dig(found, where) == expected != dig(before, where)
            assert found.warnings == ()
            if row.setting.flag:
                assert plain(of_flags(flags(*needed, as_flag(row, value))).config) == plain(found)
            if row.setting.effect != RESTART:
                assert needs_reopening(before, found) == (row.setting.effect == REOPENS)

        each([*USED, *taken()], check)

    @pytest.mark.parametrize("part", [*(prefix for prefix in NEEDS), ""])
    def test_what_is_written_of_them_reads_as_the_same(self, part: str):
        """All that can be set together at once."""
        alone = {"mode", "manifests", *(("clientConnection.kubeconfig",) if not part else ())}
        chosen = {
            (document, path): value for document, path, value, *_ in [*USED, *taken()]
            if path not in alone and (path.startswith(part) if part else not beside(path)[0])
        }  # fmt: skip
        made = of_fields(*((*key, value) for key, value in chosen.items()))
        first = of_documents(made)
        assert plain(loaded(text(first)).config) == plain(first.config)

    def test_a_warning_names_the_field(self):
        def check(path: str, asks: str, does_not: str) -> None:
            (warning,) = of_field(K, path, yaml.safe_load(asks)).config.warnings
            assert warning.startswith(f"f.conf: {K}.{path} ")
            assert of_field(K, path, yaml.safe_load(does_not)).config.warnings == ()

        each(TOLD, check)

    def test_forms_of_values(self):
        def check(typed: str, where: str, expected: object) -> None:
            assert dig(of_text(typed), where) == expected

        each(FORMS, check)

    def test_feature_gates(self):
        config = kube("featureGates: {NFTablesProxyMode: true, TopologyAwareHints: false, Dreams: true}")
        assert [warning.rpartition(": ")[2].split()[0] for warning in config.warnings] == [
            "TopologyAwareHints", "Dreams"
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

    @pytest.mark.parametrize(("mode", "warns"), [("auto", True), ("nftables", True), ("ipvs", False)])
    def test_an_ipvs_scheduler_without_mode_ipvs_is_warned_about(self, mode: str, warns: bool):
        config = loaded(f"{HEAD}ipvs: {{scheduler: wlc}}\n{OURS}mode: {mode}").config
        assert any("ipvs.scheduler" in warning for warning in config.warnings) == warns

    def test_what_mode_ipvs_alone_needs_is_no_error_in_another(self):
        config = kube("mode: iptables\nipvs: {scheduler: best, excludeCIDRs: [nowhere], tcpTimeout: -1s}")
        assert [warning.split(" ")[1] for warning in config.warnings] == [
            f"{K}.ipvs.scheduler", f"{K}.ipvs.excludeCIDRs", f"{K}.ipvs.tcpTimeout"
        ]  # fmt: skip
        assert (config.options.ipvs.default_scheduler, config.options.ipvs.exclude_cidrs) == ("rr", ())

    @pytest.mark.parametrize(("mode", "period", "rest"), [
        ("", "1s", 0), ("", "0s", 0), ("", "500ms", 0.5), ("nftables", "1s", 0), ("nftables", "3s", 3),
        ("ipvs", "0s", 0), ("ipvs", "1s", 1),
    ])  # fmt: skip
    def test_kube_proxys_usual_rest_is_none_here(self, mode: str, period: str, rest: float):
        section = mode or "iptables"
        assert kube(f"mode: '{mode}'\n{section}: {{minSyncPeriod: {period}}}").min_sync_seconds == rest

    def test_mode_ipvs_beside_a_kube_proxy_is_warned_of(self):
        for mode, warned in (("ipvs", True), ("nftables", False)):
            config = of_text(f"--service-proxy-name=lab --proxy-mode={mode}")
            assert any("excludeCIDRs" in warning for warning in config.warnings) is warned

    def test_modes_are_found_in_their_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        for name in ("ipvs", "ebpf", "mine"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").touch()
        (tmp_path / "notes").mkdir()
        monkeypatch.setattr("hybrid_proxy.dataplane.modes.__path__", [str(tmp_path)])
        assert config.available_modes() == ("ebpf", "ipvs", "mine")


# ------------------------------------------------------------------------------------------------ errors

# Content, the fields that errors name (or the line), and the value as it stands there.
# fmt: off
BAD = [
    ("", f"no {K} and no {H}", ""),
    ("hello", "line 1", "'hello'"),
    ("kind: Pod", "line 1: kind", "'Pod'"),
    ("a: [", "line ", ""),
    (b"\xff\xfe\x00", "not text", ""),
    ("kind: KubeProxyConfiguration\napiVersion: config.k8s.io/v1", f"line 1: {K}.apiVersion", "'config.k8s.io/v1'"),
    ("kind: KubeProxyConfiguration\napiVersion: kubeproxy.config.k8s.io/x", f"line 1: {K}.apiVersion", "s.io/x'"),
    ("kind: KubeProxyConfiguration\napiVersion: 1", f"line 1: {K}.apiVersion", "1"),
    (HEAD + "---\n" + HEAD, "line 4", K),
    (HEAD + "mode: userspace", f"{K}.mode", "'userspace'"),
    (HEAD + "iptables: {minSyncPeriod: 1m}", f"{K}.iptables.minSyncPeriod", "'1m'"),
    (HEAD + "mode: ipvs\nipvs: {udpTimeout: 999999h}", f"{K}.ipvs.udpTimeout", "'999999h'"),
    (HEAD + "clusterCIDR: 10.0.0.0", f"{K}.clusterCIDR", "'10.0.0.0'"),
    (HEAD + "clusterCIDR: 10.0.0.0/8,11.0.0.0/8", f"{K}.clusterCIDR", "'10.0.0.0/8,11.0.0.0/8'"),
    (HEAD + "nodePortAddresses: [primary, ten]", f"{K}.nodePortAddresses", "['primary', 'ten']"),
    (HEAD + "bindAddress: eth0", f"{K}.bindAddress", "'eth0'"),
    (HEAD + "healthzBindAddress: x:1", f"{K}.healthzBindAddress", "'x:1'"),
    (HEAD + "metricsBindAddress: 127.0.0.1:0", f"{K}.metricsBindAddress", "'127.0.0.1:0'"),
    (HEAD + "detectLocalMode: BridgeInterface", f"{K}.detectLocal.bridgeInterface", "BridgeInterface"),
    (HEAD + "featureGates: {A: maybe}", f"{K}.featureGates", "{'A': 'maybe'}"),
    (HEAD + "clientConnection: {qps: .nan}", f"{K}.clientConnection.qps", "nan"),
    (HEAD + "logging: {flushFrequency: often}", f"{K}.logging.flushFrequency", "'often'"),
    (OURS + "mod: ebpf", f"{H}.mod", "'ebpf'"),
    (OURS + "ebpf: {probes: {every: 1s}}", f"{H}.ebpf.probes.every", "'1s'"),
    (OURS + "ebpf: {probes: {interval: ''}}", f"{H}.ebpf.probes.interval", "''"),
    (OURS + "mode: auto\nmode: ebpf", f"{H}: line 5", "'mode'"),
    (OURS + "ebpf: {socketScope: all}", f"{H}.ebpf.socketScope", "slower than translating their packets"),
    (OURS + "ebpf: {cgroup: here}", f"{H}.ebpf.cgroup", "'here'"),
    (OURS + "ebpf: {masqueradePorts: 9-1}", f"{H}.ebpf.masqueradePorts", "'9-1'"),
    (HEAD + "clientConnection: {kubeconfig: /k}\n" + OURS + "manifests: /m", f"{H}.manifests", "'/m'"),
]
# The same of flags: what only they can hold, and rules between them.
BAD_FLAGS = [
    ("--external-ips-namespaces=shop,A_b", "--external-ips-namespaces", "'shop,A_b'"),
    ("--service-proxy-name=a/b", "--service-proxy-name", "'a/b'"),
    ("--hostname-override= ", "--hostname-override", "' '"),
    ("--detect-local-mode=BridgeInterface --pod-bridge-interface=sixteen-letters-", "--pod-bridge-interface",
     "'sixteen-letters-'"),
    ("--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix", ""),
    ("--nodeport-addresses=Primary", "--nodeport-addresses", "'Primary'"),
    ("--masquerade-all=yes", "--masquerade-all", "'yes'"),
    ("--node-addresses=10.0.0.7,x", "--node-addresses", "'10.0.0.7,x'"),
    ("--probe-interval=0", "--probe-interval", "'0'"),
    ("--probe-timeout=1ms", "--probe-timeout", "'1ms'"),
    ("--iptables-sync-period=30", "--iptables-sync-period", "'30'"),
    ("--proxy-mode=windows", "--proxy-mode", "'windows'"),
    ("--manifests=/x --kubeconfig=/y", "--manifests", "--kubeconfig"),
    ("--manifests=/x --master=http://y", "--manifests", "--master"),
    ("--metrics-bind-address=:10249", "--metrics-bind-address", "':10249'"),
    ("--max-flows=many", "--max-flows", "'many'"),
    ("--kube-api-qps=often", "--kube-api-qps", "'often'"),
    ("--feature-gates=A=true,B", "--feature-gates", "'A=true,B'"),
    ("--log-format=xml", "--logging-format", "'xml'"),
    ("--v=high", "-v", "'high'"),
]
# fmt: on


def wrong_values(row: Row) -> Iterator[Any]:
    yield from ({"of another": "kind"}, [["of another kind"]])
    schema = row.setting.form.schema
    if "minimum" in schema:
        yield from (schema["minimum"] - 1, schema.get("maximum", 10**20) + 1)
    if "pattern" in schema:
        yield from ("30x", "-1s")
    if "enum" in schema:
        yield "no such"


class TestErrors:
    def test_each_field_refuses_what_it_cannot_be(self):
        """Values of another type, and those just outside of what the JSON schema says."""

        def check(row: Row, value: object) -> None:
            (problem,) = problems(lambda: of_field(row.document, row.path, value))
            assert problem.startswith(f"f.conf: {row.key} {value!r}: ")

        checked = [row for row in rows() if row.document in DOCUMENTS and row.setting.form is not ANYTHING]
        each(((row, value) for row in checked for value in wrong_values(row)), check)

    def test_they_name_file_field_and_value(self):
        def check(content: str | bytes, field: str, value: str) -> None:
            (problem,) = problems(lambda: loaded(content))
            assert problem.startswith(f"f.conf: {field}")
            assert value in problem

        each(BAD, check)

    def test_they_name_flag_and_value(self):
        def check(typed: str, flag: str, value: str) -> None:
            (problem,) = problems(lambda: of_text(typed))
            assert re.match(rf"{re.escape(flag)}[ :]", problem)
            assert value in problem

        each(BAD_FLAGS, check)

    def test_a_mode_of_a_later_version_says_so(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(config, "available_modes", lambda: ("ebpf",))
        with pytest.raises(ConfigError, match="--proxy-mode 'ipvs': this version does not have that mode yet"):
            of_text("--proxy-mode=ipvs")

    def test_flag_names_are_not_cut_short(self):
        for arguments in (("--cluster", "10.0.0.0/8"), ("something",)):
            with pytest.raises(SystemExit):
                flags(*arguments)

    def test_all_are_reported_at_once(self):
        """Fields of both documents, of wrong types and wrong values, fields that do not exist, and a flag."""
        content = f"""{HEAD}iptables: {{masqueradeBit: x, syncPeriod: 30x, minSyncPeriod: 1m}}
mode: userspace
oomScoreAdj: 5000
nodePortAddresses: [1, 2]
{OURS}mod: ebpf
ebpf: {{xdp: generic, limits: {{flows: -1}}, probes: [1]}}
"""
        with pytest.raises(ConfigError) as error:
            loaded(content, "--algorithm", "best")
        # minSyncPeriod is longer than the default of a syncPeriod that is wrong: that is not its fault.
        fields = [problem.removeprefix("f.conf: ").partition(" ")[0] for problem in error.value.problems]
        assert sorted(fields) == sorted([
            "--algorithm", f"{K}.iptables.masqueradeBit", f"{K}.iptables.syncPeriod", f"{K}.mode", f"{K}.oomScoreAdj",
            f"{K}.nodePortAddresses", f"{H}.mod", f"{H}.ebpf.xdp", f"{H}.ebpf.limits.flows", f"{H}.ebpf.probes",
        ])  # fmt: skip

    def test_those_of_documents_and_of_missing_settings_are_reported_with_the_rest(self):
        found = problems(lambda: loaded(f"kind: Pod\n---\n{HEAD}oomScoreAdj: 5000"))
        assert [problem.partition(":")[2][:12] for problem in found] == [" line 1: kin", " KubeProxyCo"]
        assert len(problems(lambda: loaded(HEAD + "detectLocalMode: BridgeInterface\noomScoreAdj: 5000"))) == 2

    def test_very_many_are_cut_short(self):
        with pytest.raises(ConfigError) as error:
            loaded(OURS + "\n".join(f"field{n}: 1" for n in range(100)))
        assert len(error.value.problems) == 100
        assert len(str(error.value).splitlines()) < 30

    def test_errors_of_flags_alone_are_reported_at_once_too(self, capsys):
        assert cli.main(["run", "--proxy-mode", "fast", "--xdp", "maybe", "--max-flows=-1"]) == 2
        said = capsys.readouterr().err
        assert [flag in said for flag in ("--proxy-mode 'fast'", "--xdp 'maybe'", "--max-flows '-1'")] == [True] * 3

    def test_fields_that_kube_proxy_does_not_know_are_ignored(self):
        config = kube("iptables: {masqueradeBits: 3, masqueradeBit: 4}\nipVS: {}\nmode: ipvs\nmode: nftables\n")
        assert config.mode == "nftables"
        assert [warning.split(": ")[1] for warning in config.warnings] == [
            K, f"{K}.iptables.masqueradeBits 3", f"{K}.ipVS {{}}"
        ]  # fmt: skip
        assert "line 6: " in config.warnings[0]

    @pytest.mark.parametrize(
        ("typed", "meant"), [("clusterCidr: 10.0.0.0/8", "clusterCIDR"), ("porrange: ''", "portRange")]
    )
    def test_a_field_with_a_typo_is_named_with_the_one_that_was_meant(self, typed: str, meant: str):
        (warning,) = kube(f"{typed}\n").warnings
        assert warning.endswith(f"did you mean {meant}?")

    def test_explain_reads_files_too(self, tmp_path: Path, capsys):
        (tmp_path / "f").write_text(HEAD + "nodePortAddresses: [primary, x]\n")
        packet = ["--manifests", str(ROOT / "examples"), "--from", "10.77.1.11", "--to", "10.96.0.10:80"]
        assert cli.main(["explain", "--config", str(tmp_path / "f"), *packet]) == 2
        assert f"{K}.nodePortAddresses ['primary', 'x']: " in capsys.readouterr().err
        (tmp_path / "f").write_text(HEAD + "hostnameOverride: lab-node\nclusterCIDR: 10.77.0.0/16\n")
        assert cli.main(["explain", "--config", str(tmp_path / "f"), *packet]) == 0
        assert "goes to a backend" in capsys.readouterr().out

    def test_no_file(self, tmp_path: Path, capsys):
        assert cli.main(["run", "--config", str(tmp_path / "none")]) == 2
        assert capsys.readouterr().err == f"hybrid-proxy run: --config {tmp_path}/none: No such file or directory\n"
        assert cli.main(["run", "--config", str(tmp_path)]) == 2

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
        problems = [line.strip() for line in rest if not re.fullmatch(r"  and \d+ more", line)] if rest else [first]
        assert len(problems) <= 20
        assert not refused or all(
            line.startswith("f.conf: ") and line.isprintable() and len(line) < 1500 for line in problems
        )

    @given(st.binary(max_size=200))
    def test_bytes(self, content: bytes):
        self.survives(content)

    @given(st.sampled_from(sorted(DOCUMENTS)), st.dictionaries(NAMES, VALUES, max_size=6))
    def test_values(self, kind: str, fields: dict[str, Any]):
        head = {"apiVersion": DOCUMENTS[kind]().api_version, "kind": kind}  # type: ignore[attr-defined]
        self.survives(yaml.safe_dump({**fields, **head}, allow_unicode=True).encode("utf-8", "surrogatepass"))

    @given(st.sampled_from([row for row in rows() if row.document in DOCUMENTS]), VALUES)
    def test_one_field(self, row: Row, value: Any):
        document: dict[str, Any] = {"apiVersion": DOCUMENTS[row.document]().api_version, "kind": row.document}
        *folders, last = row.path.split(".")
        place = document
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
        self.survives(yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass"))

    @given(st.text(max_size=30))
    def test_durations(self, typed: str):
        seconds = duration(typed)
        assert seconds is None or abs(seconds) < 1 << 34


# -------------------------------------------------------------------------------------------- precedence


class TestFlagsBesideAFile:
    def test_kube_proxys_are_ignored_and_reported(self):
        config = kube("mode: nftables", "--proxy-mode=ipvs", "--masquerade-all", "--healthz-port=0")
        assert (config.mode, config.settings.masquerade_all) == ("nftables", False)
        assert config.healthz_bind_address == Endpoint("0.0.0.0", 10256)
        assert sorted(warning.partition(":")[0] for warning in config.warnings) == [
            "--healthz-port", "--masquerade-all", "--proxy-mode"
        ]  # fmt: skip

    @pytest.mark.parametrize("mode", ["auto", "ebpf", "userspace"])
    def test_a_mode_that_kube_proxy_does_not_have_counts(self, mode: str):
        config = kube("mode: ipvs", f"--proxy-mode={mode}")
        assert (config.mode, config.warnings) == (mode, ())

    @pytest.mark.parametrize(("typed", "hint"), [("ebfp", "; did you mean ebpf?"), ("windows", ""), ("", "")])
    def test_an_unknown_mode_is_ignored_as_kube_proxy_does(self, typed: str, hint: str):
        config = kube("mode: ipvs", f"--proxy-mode={typed}")
        assert config.mode == "ipvs"
        (warning,) = config.warnings
        assert re.fullmatch(rf"--proxy-mode: is ignored: the file takes precedence \(.*\){re.escape(hint)}", warning)

    def test_the_name_master_and_the_log_count(self):
        config = kube(
            "hostnameOverride: a\nlogging: {verbosity: 1, format: json}\n",
            "--hostname-override=B", "--v=5", "--logging-format=text", "--master=https://m",
        )  # fmt: skip
        logging = config.kube_proxy.logging
        assert (config.settings.node_name, logging.verbosity, logging.format) == ("b", 5, "text")
        assert config.master == "https://m"
        assert config.warnings == ()

    def test_an_error_in_such_a_flag_names_the_flag(self):
        with pytest.raises(ConfigError, match=r"^-v 'loud': "):
            kube("logging: {verbosity: 1}", "--v=loud")

    def test_flags_that_kube_proxy_does_not_have_count(self):
        config = loaded(
            OURS + "ebpf: {xdp: native}\nadminSocket: /a", "--xdp=off", "--manifests=/m", "--fast-path=off"
        ).config
        assert (config.options.ebpf.xdp, config.hybrid.manifests, config.options.ebpf.fast_path) == ("off", "/m", "off")
        assert config.hybrid.admin_socket == "/a"
        assert config.warnings == ()

    def test_our_mode_wins(self):
        assert loaded(HEAD + "mode: iptables\n" + OURS + "mode: ebpf\n").config.mode == "ebpf"
        assert loaded(HEAD + "mode: iptables\n" + OURS).config.mode == "iptables"
        assert loaded(HEAD + OURS).config.mode == "auto"

    def test_periods_without_a_file_are_of_the_mode(self):
        common = ("--iptables-sync-period=1m", "--ipvs-sync-period=2m", "--iptables-min-sync-period=5s")
        for mode, seconds, rest in (("auto", 60, 5), ("nftables", 60, 5), ("ipvs", 120, 0)):
            config = of_flags(flags(*common, f"--proxy-mode={mode}")).config
            assert (config.options.sync_seconds, config.min_sync_seconds) == (seconds, rest)


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
        "", "--proxy-mode=ebpf", "--proxy-mode=nftables --iptables-masquerade-bit=3 --masquerade-all=T",
        "--healthz-bind-address= --metrics-bind-address=::1", "--metrics-port=0 --vmodule=a=1,b=2",
        "--no-traffic-counters=false --nodeport-addresses=10.0.0.0/8 --nodeport-addresses=fd00::/8",
        "--hostname-override=NODE --conntrack-tcp-timeout-established=0 --bind-address=fd00::1",
    ])  # fmt: skip
    def test_flags_become_a_file_that_means_the_same(self, arguments: str, tmp_path: Path):
        typed = flags(*arguments.split())
        write(tmp_path / "out.yaml", of_flags(typed))
        assert plain(load(tmp_path / "out.yaml", flags()).config) == plain(of_flags(typed).config)

    def test_the_command(self, tmp_path: Path, capsys):
        out = tmp_path / "out.yaml"
        arguments = ["run", "--config", str(FOLDER / "eks.yaml"), "--write-config-to", str(out), "--proxy-mode=ipvs"]
        assert cli.main(arguments) == 0
        theirs, mine = yaml.safe_load_all(out.read_text())
        assert (theirs["mode"], theirs["kind"], mine["kind"]) == ("iptables", KUBE_PROXY, HYBRID)
        assert "warning: --proxy-mode: " in capsys.readouterr().err
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
        assert (config.mode, config.options.ebpf.probes.interval) == ("nftables", 1.0)
        assert (config.settings.node_name, config.metrics_bind_address) == ("a", Endpoint("127.0.0.1", 2))
        assert config.options.ebpf.limits.flows == old.config.options.ebpf.limits.flows

    def test_going_back_leaves_nothing_waiting(self):
        old = loaded(HEAD + "hostnameOverride: a\n")
        first = change(old, loaded(HEAD + "hostnameOverride: b\nmode: ipvs\n"))
        second = change(first.now, loaded(HEAD + "hostnameOverride: a\nmode: ipvs\n"))
        assert second == (second.now, (), ())
        assert plain(second.now.config) == plain(first.now.config)

    def test_what_a_flag_takes_precedence_over_is_not_applied(self):
        old = loaded(HEAD + "mode: ipvs\n", "--proxy-mode=auto")
        assert change(old, loaded(HEAD + "mode: nftables\n", "--proxy-mode=auto")).applied == ()

    def test_flags_beside_the_file_stay(self):
        old = loaded(HEAD + "mode: ipvs\n", "--v=4", "--xdp=off")
        changed = change(old, loaded(HEAD + OURS + "ebpf: {xdp: native}\n", "--v=4", "--xdp=off"))
        assert (changed.now.config.kube_proxy.logging.verbosity, changed.now.config.options.ebpf.xdp) == (4, "off")

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
        loaded: list[Loaded | ConfigError] = []
        stop = threading.Event()
        thread = threading.Thread(target=follow, args=(place, {}, place.read_bytes(), loaded.append, stop), daemon=True)
        thread.start()
        try:
            time.sleep(0.3)
            assert loaded == []
            if volume:
                (tmp_path / "..tmp").symlink_to("..2")
                (tmp_path / "..tmp").rename(tmp_path / "..data")
            elif how == "written":
                place.write_text(HEAD + "mode: nftables\n")
            else:
                os.mkfifo(tmp_path / "new")  # by mistake, and for a while: it is waited for
                (tmp_path / "new").rename(place)
                time.sleep(0.3)
                assert loaded == []
                (tmp_path / "new").write_text(HEAD + "mode: nftables\n")
                (tmp_path / "new").rename(place)
            until(lambda: loaded)
            assert [one.config.mode for one in loaded if isinstance(one, Loaded)] == ["nftables"]
            place.unlink()
            place.write_text(HEAD + "mode: 1\n")
            until(lambda: len(loaded) == 2)
            assert str(loaded[1]).startswith(f"{place}: {K}.mode 1: ")
        finally:
            stop.set()
            thread.join(5)


# --------------------------------------------------------------------------------- what is made of the types


class TestReference:
    def test_the_schema_takes_what_we_take_and_refuses_what_we_refuse(self):
        made = configuration.schema()
        jsonschema.Draft202012Validator.check_schema(made)
        judge = jsonschema.Draft202012Validator(made)
        head = {"apiVersion": "hybrid-proxy.io/v1alpha1", "kind": HYBRID}
        written = list(yaml.safe_load_all(text(of_flags({}))))[1]
        example = list(yaml.safe_load_all((FOLDER / "kind-nftables.yaml").read_text()))[1]
        good = [written, example, head, head | {"ebpf": {"probes": {"interval": "1m30s", "timeout": "0.5s"}}}]
        bad = [{}, {"kind": HYBRID}, head | {"kind": "Other"}, head | {"apiVersion": "v1"}, head | {"mod": "ebpf"},
               head | {"mode": "fast"}, head | {"strictMode": "yes"}, head | {"nodeAddresses": "10.0.0.1"},
               head | {"ebpf": {"xdp": "generic"}}, head | {"ebpf": {"limits": {"flows": -1}}},
               head | {"ebpf": {"failover": {"failures": "3"}}}, head | {"ebpf": {"probes": {"interval": "5"}}},
               head | {"ebpf": {"probes": {"every": "5s"}}}]  # fmt: skip
        for document in good:
            assert not list(judge.iter_errors(document)), document
            loaded(yaml.safe_dump(document))
        for document in bad:
            assert list(judge.iter_errors(document)), document
            with pytest.raises(ConfigError):
                loaded(yaml.safe_dump(document))

    def test_the_schema_of_kube_proxys_fields_refuses_what_we_refuse(self):
        """Each field: its default, null, an empty text, another type, and what is just outside of its bounds."""
        made = configuration.fields(KUBE_PROXY)
        jsonschema.Draft202012Validator.check_schema(made)
        judge = jsonschema.Draft202012Validator(made)

        def check(row: Row, value: object) -> None:
            document: Any = value
            for name in reversed(row.path.split(".")):
                document = {name: document}
            refused = ""
            try:
                of_field(K, row.path, value)
            except ConfigError as error:
                refused = str(error)
            # No JSON schema knows what fields need of each other, nor that the kernel counts in 32 bits.
            said = any(judge.iter_errors(document))
            assert said <= bool(refused), "we take it"
            plain = row.setting.form is not ANYTHING and value not in (None, "", row.written_default, 10**20 + 1)
            ours = row.setting.mode in KUBE_PROXYS_MODES and not isinstance(value, (dict, list))
            assert said or not plain or ours, refused

        checked = [row for row in rows() if row.document == KUBE_PROXY]
        each(((row, value) for row in checked for value in (row.written_default, None, "", *wrong_values(row))), check)
        assert not list(judge.iter_errors({"conntrack": None, "ofALaterVersion": 1, "iptables": {"another": 1}}))
        for file in FOLDER.glob("*.yaml"):
            for document in yaml.safe_load_all(file.read_text()):
                if document["kind"] == KUBE_PROXY:
                    assert not list(judge.iter_errors(document)), file


# ------------------------------------------------------------------------------------- the node's settings


@pytest.mark.parametrize(("per_core", "least", "cpus", "limit"), [
    (32768, 131072, 2, 131072), (32768, 131072, 8, 262144), (0, 131072, 8, 0), (32768, 131072, 64, 1 << 20),
    (1, 2_000_000, 64, 2_000_000),
])  # fmt: skip
def test_conntrack_limit_is_kube_proxys(per_core: int, least: int, cpus: int, limit: int):
    assert conntrack_limit(Conntrack(max_per_core=per_core, min=least), cpus) == limit


def test_conntrack_settings_leave_alone_what_is_0():
    assert conntrack_settings(Conntrack()) == {
        "net/netfilter/nf_conntrack_tcp_timeout_established": "86400",
        "net/netfilter/nf_conntrack_tcp_timeout_close_wait": "3600",
    }
    assert conntrack_settings(Conntrack(
        max_per_core=0, min=0, tcp_established_timeout=0, tcp_close_wait_timeout=0, tcp_be_liberal=True, udp_timeout=5
    )) == {
        "net/netfilter/nf_conntrack_tcp_be_liberal": "1", "net/netfilter/nf_conntrack_udp_timeout": "5"
    }  # fmt: skip
