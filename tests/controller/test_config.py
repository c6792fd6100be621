"""From flags as they are typed to one checked value."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from hybrid_proxy.controller import cli
from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.controller.semantics.entries import DetectLocalMode, Settings
from hybrid_proxy.controller.settings import config
from hybrid_proxy.controller.settings.config import Config, Endpoint, from_flags
from hybrid_proxy.controller.settings.documents import CHOICES
from hybrid_proxy.dataplane.mode import Options


def parsed(*arguments: str) -> Config:
    """Through the very parser that `run` has."""
    return from_flags(vars(cli.parser().parse_args(["run", *arguments])))


def dig(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_defaults_are_kube_proxys() -> None:
    name, found = socket.gethostname().lower(), parsed()
    assert found == Config(
        settings=Settings(
            node_name=name,
            detect=DetectLocalMode.CLUSTER_CIDR,
            node_port_addresses=(),
            masquerade_bit=14,
            algorithm="random",
            algorithms=frozenset(CHOICES),
        ),
        options=Options(default_flows=found.options.default_flows),
        mode="auto",
        healthz_bind_address=Endpoint("0.0.0.0", 10256),
        metrics_bind_address=Endpoint("127.0.0.1", 10249),
        admin_socket="/run/hybrid-proxy/admin.sock",
        log_format="text",
        verbosity=0,
    )


# fmt: off
GOOD = [
    pytest.param("--hostname-override= Node-A ", "settings.node_name", "node-a", id="7.1 trimmed, lower case"),
    pytest.param("--algorithm=dh",         "settings.algorithm",     "dh",                   id="IPVS's algorithm"),
    pytest.param("--cluster-cidr=10.0.0.1/8", "settings.cluster_cidrs", ("10.0.0.0/8",),        id="CIDR"),
    pytest.param("--cluster-cidr=10.0.0.0/8, fd00::/8", "settings.cluster_cidrs", ("10.0.0.0/8", "fd00::/8"),
                 id="dual-stack pair"),
    pytest.param("--cluster-cidr=10.0.0.0/8 --cluster-cidr=fd00::/8", "settings.cluster_cidrs",
                 ("10.0.0.0/8", "fd00::/8"), id="repeated"),
    pytest.param("--cluster-cidr=",        "settings.cluster_cidrs", (),                     id="empty CIDR"),
    pytest.param("--detect-local-mode=",   "settings.detect",        DetectLocalMode.CLUSTER_CIDR, id="empty mode"),
    pytest.param("--pod-bridge-interface=cni0", "settings.pod_interface", "", id="bridge without its mode"),
    pytest.param("--nodeport-addresses=",  "settings.node_port_addresses", (),                     id="3.1 default"),
    pytest.param("--nodeport-addresses=all,10.0.0.0/8,localhost,primary", "settings.node_port_addresses",
                 ("all", "10.0.0.0/8", "localhost", "primary"), id="3.4 keywords and CIDRs"),
    pytest.param("--masquerade-all",       "settings.masquerade_all", True,                   id="switch"),
    pytest.param("--masquerade-all=false", "settings.masquerade_all", False,                  id="switch, false"),
    pytest.param("--masquerade-all=T", "settings.masquerade_all", True, id="switch, as Go has it"),
    pytest.param("--bind-address=0.0.0.0", "settings.primary",       (),                     id="unspecified"),
    pytest.param("--bind-address=::",      "settings.primary",       (),                     id="unspecified IPv6"),
    pytest.param("--node-addresses=10.0.0.7,FD00::7,10.0.0.7", "node_addresses", ("10.0.0.7", "fd00::7"),
                 id="node addresses"),
    pytest.param("--proxy-mode=",          "mode",                   "auto",                 id="default mode"),
    pytest.param("--proxy-mode=auto",      "mode",                   "auto",                 id="auto"),
    pytest.param("--kubeconfig=/etc/k --master=https://h:6443", "master", "https://h:6443", id="API server"),
    pytest.param("--kube-api-qps=0",       "api_rate",               5.0,                    id="as in client-go"),
    pytest.param("--metrics-bind-address=", "metrics_bind_address", None,                   id="no metrics"),
    pytest.param("--metrics-bind-address=0.0.0.0", "metrics_bind_address", Endpoint("0.0.0.0", 10249), id="metrics IP"),
    pytest.param("--metrics-bind-address=10.0.0.1:99", "metrics_bind_address", Endpoint("10.0.0.1", 99),
                 id="metrics IP and port"),
    pytest.param("--metrics-bind-address=[::1]", "metrics_bind_address", Endpoint("::1", 10249),
                 id="metrics IPv6 in brackets"),
    pytest.param("--metrics-bind-address=::1", "metrics_bind_address", Endpoint("::1", 10249), id="metrics IPv6"),
    pytest.param("--healthz-bind-address=", "healthz_bind_address", None, id="no health"),
    pytest.param("--fast-path=always",     "options.ebpf.fast_path",      "always",               id="fast path"),
    pytest.param("--conntrack-udp-timeout=9000000s", "options.timeouts.udp", 2_147_483,       id="in jiffies"),
    pytest.param("--log-format=json",      "log_format", "json",                 id="log format"),
    pytest.param("-v=4",                   "verbosity",              4,                      id="-v=4"),
]
BAD = [  # arguments, the flag and the value that the error names; forms that a file has, too, are in test_configfile
    pytest.param("--external-ips-namespaces=shop,A_b", "--external-ips-namespaces", "'shop,A_b'", id="no namespace"),
    pytest.param("--service-proxy-name=a/b", "--service-proxy-name", "'a/b'", id="no value of a label"),
    pytest.param("--hostname-override= ", "--hostname-override", "' '", id="node name"),
    pytest.param("--detect-local-mode=BridgeInterface --pod-bridge-interface=sixteen-letters-",
                 "--pod-bridge-interface", "'sixteen-letters-'", id="long name"),
    pytest.param("--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix", "", id="no prefix"),
    pytest.param("--nodeport-addresses=Primary", "--nodeport-addresses", "'Primary'", id="primary in upper case"),
    pytest.param("--masquerade-all=yes", "--masquerade-all", "'yes'", id="switch"),
    pytest.param("--iptables-masquerade-bit=32", "--iptables-masquerade-bit", "'32'", id="bit"),
    pytest.param("--node-addresses=10.0.0.7,x", "--node-addresses", "'10.0.0.7,x'", id="node addresses"),
    pytest.param("--probe-interval=0", "--probe-interval", "'0'", id="no rest"),
    pytest.param("--probe-timeout=1ms", "--probe-timeout", "'1ms'", id="no policy"),
    pytest.param("--iptables-sync-period=30", "--iptables-sync-period", "'30'", id="no unit"),
    pytest.param("--proxy-mode=windows", "--proxy-mode", "'windows'", id="mode unknown"),
    pytest.param("--manifests=/x --kubeconfig=/y", "--manifests", "--kubeconfig", id="two sources"),
    pytest.param("--manifests=/x --master=http://y", "--manifests", "--master", id="two sources, master"),
    pytest.param("--metrics-bind-address=:10249", "--metrics-bind-address", "':10249'", id="metrics without IP"),
    pytest.param("--max-flows=many", "--max-flows", "'many'", id="flows"),
    pytest.param("--max-services=4", "--max-services", "from 1024 to", id="fewer services than the maps begin with"),
    pytest.param("--kube-api-qps=often", "--kube-api-qps", "'often'", id="rate"),
    pytest.param("--feature-gates=A=true,B", "--feature-gates", "'A=true,B'", id="gate"),
    pytest.param("--vmodule=a=1,b", "--vmodule", "'a=1,b'", id="levels"),
    pytest.param("--log-format=xml", "--logging-format", "'xml'", id="log format"),
    pytest.param("--v=high", "-v", "'high'", id="verbosity"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "path", "expected"), GOOD)
def test_good(arguments: str, path: str, expected: object) -> None:
    assert dig(parsed(*arguments_of(arguments)), path) == expected


@pytest.mark.parametrize(("arguments", "flag", "value"), BAD)
def test_bad(arguments: str, flag: str, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(*arguments_of(arguments))
    (problem,) = error.value.problems
    assert re.match(rf"{re.escape(flag)}[ :]", problem)
    assert value in problem


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
    monkeypatch.setattr("hybrid_proxy.dataplane.modes.__path__", [str(tmp_path)])
    assert config.available_modes() == ("ebpf", "ipvs", "mine")


def test_flag_names_are_not_cut_short() -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["run", "--cluster", "10.0.0.0/8"])


@pytest.mark.parametrize(
    ("arguments", "healthz", "metrics"),
    [
        ("--v=2", 10356, 10349),
        ("--healthz-bind-address=0.0.0.0:10256 --metrics-bind-address=127.0.0.1:10249", 10356, 10349),
        ("--healthz-bind-address=0.0.0.0:8080 --metrics-bind-address=127.0.0.1:8081", 8080, 8081),
        ("--healthz-port=10256 --metrics-port=0", 10356, None),
    ],
)
def test_ports_beside_a_kube_proxy(arguments: str, healthz: int | None, metrics: int | None) -> None:
    config = parsed("--service-proxy-name=lab", *arguments_of(arguments))
    ports = [end and end.port for end in (config.healthz_bind_address, config.metrics_bind_address)]
    assert ports == [healthz, metrics]
    assert config.options.shares_node


@pytest.mark.parametrize(("mode", "warned"), [("ipvs", True), ("nftables", False)])
def test_mode_ipvs_beside_a_kube_proxy(mode: str, warned: bool) -> None:
    config = parsed("--service-proxy-name=lab", f"--proxy-mode={mode}")
    assert any("excludeCIDRs" in warning for warning in config.warnings) is warned
