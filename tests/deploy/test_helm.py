"""The chart renders what the kustomizations build: the same objects, whatever the mode."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_proxy.controller import __version__
from hybrid_proxy.controller.cli import parser
from hybrid_proxy.controller.settings import configfile

from .helm import program
from .manifests import DEPLOY, OVERLAYS, PROBES, build, one

CHART = DEPLOY / "helm/hybrid-proxy"
TAG = __version__.replace("+", "-")  # of the image
SERVER = "https://control-plane.invalid:6443"  # what deploy/base has
KUBE_PROXYS = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
MODES = ("ebpf", "nftables", "iptables", "ipvs", "userspace")
PHASES = ("census", "takeover", "rollback", "cleanup", "cleanup-drain")  # each in a release of its own

# fmt: off
SAME = {
    "base":                     (),
    **{f"overlays/{mode}":      ("--set", f"mode={mode}") for mode in MODES},
    "overlays/kubeadm":         ("--set", "kubeProxyConfigMap=kube-proxy", "--set", "apiServer="),
    "overlays/kubeadm+per-service": (
        "--set", "kubeProxyConfigMap=kube-proxy,apiServer=,extraArgs={--service-proxy-name=hybrid-proxy}",
    ),
    "base+on-delete":           ("--set", "updateStrategy.type=OnDelete,updateStrategy.rollingUpdate=null"),
    "base+servicemonitor":      ("--set", "serviceMonitor.enabled=true"),
    "base+priority":            ("--set", "apiPriority=true"),
    "base+debug":               ("--set", "debug=true"),
    **{f"overlays/{phase}":     ("--set", f"phase={phase}") for phase in PHASES},
}
# fmt: on


@functools.cache
def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program(), *arguments], capture_output=True, text=True, check=False)


def rendered(*values: str) -> list[dict[str, Any]]:
    phase = re.search(r"\bphase=([\w-]+)", " ".join(values))
    release = f"hybrid-proxy-{phase[1]}" if phase else "hybrid-proxy"
    done = helm(
        "template",
        release,
        str(CHART),
        "--skip-tests",
        "--namespace",
        "kube-system",
        "--set",
        f"apiServer={SERVER}",
        *values,
    )
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def substance(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects without labels and the policy of pulling; files in ConfigMaps as the documents that they hold."""
    found = {}
    for item in objects:
        metadata = {name: value for name, value in item["metadata"].items() if name != "labels"}
        kept = item | {"metadata": metadata}
        if item["kind"] == "ConfigMap":
            kept["data"] = {name: list(yaml.safe_load_all(text)) for name, text in item["data"].items()}
        if item["kind"] == "DaemonSet":
            pod = item["spec"]["template"]["spec"]
            for container in (*pod["initContainers"], *pod["containers"]):
                container.pop("imagePullPolicy", None)
            # Kustomize has the mode's capabilities, the chart the same ones in another order.
            for container in pod["containers"]:
                container["securityContext"].get("capabilities", {}).get("add", []).sort()
        found[item["kind"], metadata["name"]] = kept
    return found


@pytest.mark.parametrize("folder", SAME)
def test_the_chart_is_the_kustomization(folder: str) -> None:
    assert substance(rendered(*SAME[folder])) == substance(build(folder))


def test_every_overlay_has_its_values() -> None:
    assert {name.removeprefix("overlays/").partition("+")[0] for name in SAME} >= set(OVERLAYS)


@pytest.mark.parametrize("values", [(), *(("--set", f"phase={phase}") for phase in PHASES)], ids=str)
def test_labels_select_the_pods(values: tuple[str, ...]) -> None:
    (daemonset,) = (item for item in rendered(*values) if item["kind"] == "DaemonSet")
    labels = daemonset["spec"]["template"]["metadata"]["labels"]
    assert daemonset["spec"]["selector"]["matchLabels"] == labels
    assert labels.items() <= daemonset["metadata"]["labels"].items()
    common = {
        f"app.kubernetes.io/{name}": daemonset["metadata"]["labels"].get(f"app.kubernetes.io/{name}")
        for name in ("instance", "version")
    }
    phase = "".join(values[1:]).replace("phase=", "-")
    assert list(common.values()) == [f"hybrid-proxy{phase}", TAG]


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_has_nothing_of_the_agents_and_the_values_of_the_pods(phase: str) -> None:
    """As with the values that a cluster gave the agents."""
    given = "serviceMonitor.enabled=true,prometheusRule.enabled=true,dashboard.enabled=true,seccompFolder=/kubelet"
    (daemonset,) = rendered(
        "--set", f"phase={phase},mode=nftables,keepKubeProxy=false,priorityClassName=mine,{given}",
        "--set", "image.repository=r.example/hp,image.tag=seven,image.pullSecrets[0].name=secret,nodeSelector.pool=a",
    )  # fmt: skip
    pod = daemonset["spec"]["template"]["spec"]
    assert {each["image"] for each in (*pod["initContainers"], *pod["containers"])} == {"r.example/hp:seven"}
    assert pod["imagePullSecrets"] == [{"name": "secret"}]
    assert (pod["nodeSelector"], pod["priorityClassName"]) == ({"kubernetes.io/os": "linux", "pool": "a"}, "mine")
    folders = [volume["hostPath"]["path"] for volume in pod["volumes"] if volume["name"] == "seccomp"]
    assert folders == ["/kubelet"] * (phase != "takeover")


@pytest.mark.parametrize("phase", ["", *PHASES])
def test_init_containers_have_the_resources_that_they_are_given(phase: str) -> None:
    objects = rendered("--set", f"phase={phase},initResources.limits.memory=1Gi")
    (pod,) = (item["spec"]["template"]["spec"] for item in objects if item["kind"] == "DaemonSet")
    wanted = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}}
    assert [each["resources"] for each in pod["initContainers"]] == [wanted] * len(pod["initContainers"])
    assert all(each["resources"] != wanted for each in pod["containers"])


def test_a_scrape_may_take_as_long_as_it_is_given() -> None:
    for value, wanted in (("", None), (",serviceMonitor.scrapeTimeout=20s", "20s")):
        monitor = substance(rendered("--set", f"serviceMonitor.enabled=true{value}"))["ServiceMonitor", "hybrid-proxy"]
        assert monitor["spec"]["endpoints"][0].get("scrapeTimeout") == wanted


def test_a_monitor_takes_rules_behind_its_own() -> None:
    rules = {"relabelings": [{"targetLabel": "zone", "replacement": "a"}],
             "metricRelabelings": [{"sourceLabels": ["__name__"], "regex": "go_.*", "action": "drop"}]}  # fmt: skip
    usual, given = (
        substance(rendered("--set-json", f"serviceMonitor={json.dumps(more | {'enabled': True})}"))[
            "ServiceMonitor", "hybrid-proxy"
        ]["spec"]["endpoints"][0]
        for more in ({}, rules)
    )
    assert given == usual | rules | {"relabelings": usual["relabelings"] + rules["relabelings"]}


def test_a_verbosity_of_ones_own_counts_when_a_fault_is_looked_for() -> None:
    (daemonset,) = (item for item in rendered("--set", "debug=true,extraArgs={-v=4}") if item["kind"] == "DaemonSet")
    assert daemonset["spec"]["template"]["spec"]["containers"][0]["args"][-2:] == ["-v=6", "-v=4"]


def test_a_rollback_reads_metrics_where_kube_proxy_has_them() -> None:
    asked = [
        rendered("--set", f"phase=rollback{more}")[0]["spec"]["template"]["spec"]["initContainers"][0]["env"]
        for more in ("", ",kubeProxyMetrics=10.0.0.1:1234")
    ]
    assert asked == [[{"name": "METRICS", "value": value}] for value in ("127.0.0.1:10249", "10.0.0.1:1234")]


@pytest.mark.parametrize("phase", ["rollback", "cleanup-drain"])
@pytest.mark.parametrize(("value", "waits"), [("null", "--drain"), ("600", "--drain=600"), ("0", "--drain=0")])
def test_how_long_a_phase_waits_for_open_flows(phase: str, value: str, waits: str) -> None:
    containers = rendered("--set", f"phase={phase},drain={value}")[0]["spec"]["template"]["spec"]["initContainers"]
    (cleanup,) = (each for each in containers if each["name"] == "cleanup")
    assert cleanup["args"] == ["cleanup", "--log-format=json", waits]


@pytest.mark.parametrize("phase", PHASES)
def test_the_notes_of_a_phase_name_its_objects(phase: str) -> None:
    release = f"hybrid-proxy-{phase}"
    done = helm("install", "--dry-run=client", release, str(CHART), "-n", "kube-system", "--set", f"phase={phase}")
    assert done.returncode == 0, done.stderr
    objects, _, notes = done.stdout.partition("NOTES:")
    daemonset = yaml.safe_load(objects.partition("MANIFEST:")[2])
    assert f" rollout status daemonset/{daemonset['metadata']['name']} " in notes
    ((label, container),) = re.findall(r" logs -l (\S+) -c (\S+) ", notes)
    template = daemonset["spec"]["template"]
    assert dict([label.split("=")]) == template["metadata"]["labels"]
    assert container in {each["name"] for each in template["spec"]["initContainers"]}
    assert f"helm uninstall {release} -n kube-system\n" in notes


@pytest.mark.parametrize(("value", "said"), [
    ("apiServer=",                                  "apiServer: set the address of your control plane"),
    ("apiServer=10.0.0.1",                          "at '/apiServer': '10.0.0.1' does not match"),
    ("apiServer=https://kubernetes.default.svc",    "apiServer: Service kubernetes works only when this proxy does"),
    *((f"kubeProxyConfiguration.detectLocalMode=NodeCIDR,{value}=10.0.0.0/8", "set the value clusterCIDR alone, or ne")
      for value in ("clusterCIDR", "kubeProxyConfiguration.clusterCIDR")),
    ("extraEnv[0].value=a",                         "at '/extraEnv/0': missing property 'name'"),
    ("extraVolumeMounts[0].name=a",                 "at '/extraVolumeMounts/0': missing property 'mountPath'"),
    ("enabled=no",                                  "at '/enabled': got string, want boolean"),
    ("dashboard.namespace=A",                       "at '/dashboard/namespace': 'A' does not match"),
    ("serviceAccount.annotations.a=1",              "at '/serviceAccount/annotations/a': got number, want string"),
    ("mode=bpf",                                    "at '/mode': value must be one of 'auto'"),
    ("Mode=nftables",                               "additional properties 'Mode' not allowed"),
    ("strictMode=maybe",                            "at '/strictMode': got string, want null or boolean"),
    ("clusterCIDR=10.244.0.0",                      "at '/clusterCIDR': '10.244.0.0' does not match"),
    *((f"clusterCIDR={value}",                      f"at '/clusterCIDR': '{value}' does not match")
      for value in ("10.244.0.0/33", "fd00::/129", "10.244.0.0/64")),
    ("hybridProxyConfiguration.ebpf.maxServices=7", "at '/hybridProxyConfiguration/ebpf': additional properties"),
    ("kubeProxyConfiguration.conntrack.min=many",   "at '/kubeProxyConfiguration/conntrack/min': got string, want"),
    ("kubeProxyConfiguration.iptables.masqueradeBit=32", "/masqueradeBit': maximum: got 32, want 31"),
    ("kubeProxyConfiguration.detectLocalMode=Bridge", "/detectLocalMode': value must be one of 'ClusterCIDR'"),
    ("kubeProxyConfiguration.iptables.syncPeriod=soon", "/syncPeriod': 'soon' does not match pattern"),
    ("hybridProxyConfiguration.mode=bpf",           "at '/hybridProxyConfiguration/mode': value must be one of"),
    ("hybridProxyConfiguration.mode=ipvs",           "set the value mode, from which the pod has its rights"),
    ("kubeProxyConfiguration.mode=ipvs",             "set the value mode, from which the pod has its rights"),
    ("hybridProxyConfiguration.serveHealthz=false",  "serveHealthz: the kubelet asks there"),
    ("apiServer=,kubeProxyConfigMap=kube-proxy,mode=userspace", "or extraArgs: [--proxy-mode=userspace]"),
    ("apiServer=,kubeProxyConfigMap=kube-proxy,mode=nftables", "set it in ConfigMap kube-proxy\n"),
    ("apiServer=,kubeProxyConfigMap=kube-proxy,mode=ipvs", "set apiServer in its place"),
    ("mode=nftables,extraArgs={--proxy-mode=ebpf}", "extraArgs: --proxy-mode=ebpf: set the value mode, from which"),
    ("kubeProxyConfigMap=Kube_Proxy",               "at '/kubeProxyConfigMap': 'Kube_Proxy' does not match"),
    ("kubeProxyConfigMap=kube-proxy",               "apiServer: would be ignored, because kubeProxyConfigMap is set"),
    *((f"apiServer=,kubeProxyConfigMap=kube-proxy,{value}", f"{value.partition('=')[0].partition('.')[0]}: would be")
      for value in ("mode=nftables", "strictMode=false", "clusterCIDR=10.0.0.0/8",
                    "kubeProxyConfiguration.metricsBindAddress=0.0.0.0:1", "hybridProxyConfiguration.strictMode=true")),
    ("image.repository=",                           "at '/image/repository': minLength: got 0, want 1"),
    *((f"image.repository={value}",                 f"at '/image/repository': '{value}' does not match")
      for value in ("reg/x:1.0", "x:1.0", "reg:5000/x@sha256:7")),
    ("image.tag=12345678",                          "--set-string image.tag="),
    ("apiServer=,kubeProxyConfigMap=kube-proxy",    "is not in namespace default: add --namespace kube-system"),
    ("image.tag=a:1",                               "at '/image/tag': 'a:1' does not match"),
    ("image.digest=sha256:7",                       "at '/image/digest': 'sha256:7' does not match"),
    ("podLabels.a=1",                               "at '/podLabels/a': got number, want string"),
    ("podAnnotations.a=1",                          "at '/podAnnotations/a': got number, want string"),
    ("priorityClassName=A",                         "at '/priorityClassName': 'A' does not match"),
    ("serviceMonitor.labels.a=1",                   "at '/serviceMonitor/labels/a': got number, want string"),
    ("commonLabels.a=1",                            "at '/commonLabels/a': got number, want string"),
    ("minReadySeconds=soon",                        "at '/minReadySeconds': got string, want integer"),
    ("livenessProbe.periodSeconds=0",               "at '/livenessProbe/periodSeconds': minimum: got 0, want 1"),
    ("startupProbe.httpGet.port=1",                 "at '/startupProbe': additional properties 'httpGet' not allowed"),
    ("image.pullPolicy=Sometimes",                  "at '/image/pullPolicy': value must be one of"),
    ("image.pullSecrets={a}",                       "at '/image/pullSecrets/0': got string, want object"),
    ("extraArgs=-v6",                               "at '/extraArgs': got string, want array"),
    ("extraArgs={v6}",                              "at '/extraArgs/0': 'v6' does not match"),
    ("serviceMonitor.enabled=yes",                  "at '/serviceMonitor/enabled': got string, want boolean"),
    *((f"serviceMonitor.enabled=true,{value}", f"serviceMonitor: Prometheus reaches no metrics {where}")
      for value, where in (
          ("kubeProxyConfiguration.metricsBindAddress=127.0.0.1:4321", "at 127.0.0.1:4321"),
          ("kubeProxyConfiguration.metricsBindAddress=[::1]:10249", "at [::1]:10249"),
          ("extraArgs={--metrics-bind-address=localhost:10249}", "at localhost:10249"),
          ("extraArgs={--metrics-bind-address=}", "at no address"),
          ("hybridProxyConfiguration.serveMetrics=false", "with serveMetrics: false"),
      )),
    ("serviceMonitor.relabelings={a}",              "at '/serviceMonitor/relabelings/0': got string, want object"),
    ("serviceMonitor.interval=30",                  "at '/serviceMonitor/interval': got number, want string"),
    ("serviceMonitor.scrapeTimeout=soon",           "at '/serviceMonitor/scrapeTimeout': 'soon' does not match"),
    ("apiPriority=1",                               "at '/apiPriority': got number, want boolean"),
    ("debug=1",                                     "at '/debug': got number, want boolean"),
    ("prometheusRule.runbookBase=git.example",      "at '/prometheusRule/runbookBase': 'git.example' does not match"),
    ("extraArgs={--proxy-mode=ipvs}",               "extraArgs: --proxy-mode=ipvs: set the value mode, from which"),
    ("extraArgs={-v=6,--proxy-mode=ipvs}",          "extraArgs: --proxy-mode=ipvs: set the value mode, from which"),
    ("extraArgs={--proxy-mode,ipvs}",               "at '/extraArgs/1': 'ipvs' does not match"),
    ("apiServer=,kubeProxyConfigMap=kube-proxy,extraArgs={--proxy-mode=ipvs}", "extraArgs: --proxy-mode=ipvs: "),
    ("phase=rollback", "phase: in release hybrid-proxy it would remove the agents: give it one of its own"),
    ("kubeProxyMetrics=127.0.0.1",                  "at '/kubeProxyMetrics': '127.0.0.1' does not match"),
    ("drain=10m",                                   "at '/drain': got string, want null or integer"),
    ("kubeProxyHealthz=127.0.0.1",                  "at '/kubeProxyHealthz': '127.0.0.1' does not match"),
    ("phase=takover",                               "at '/phase': value must be one of"),
    ("prometheusRule.enabled=true,prometheusRule.disabled.Drops=true", "prometheusRule: no alert Drops: choose of"),
    ("prometheusRule.enabled=true,prometheusRule.customRules.A.for=1h", "prometheusRule: no alert A: choose of Hybrid"),
    ("prometheusRule.customRules.HybridProxyDrops.severity=info", "additional properties 'severity' not allowed"),
    ("prometheusRule.customRules.HybridProxyDrops.for=soon", "for': 'soon' does not match"),
    ("prometheusRule.disabled.HybridProxyDrops=1",  "at '/prometheusRule/disabled/HybridProxyDrops': got number, want"),
    ("prometheusRule.label.a=b",                    "at '/prometheusRule': additional properties 'label' not allowed"),
    ("dashboard.labels.a=1",                        "at '/dashboard/labels/a': got number, want string"),
    ("updateStrategy.type=Recreate",                "at '/updateStrategy/type': value must be one of"),
    ("updateStrategy.rollingUpdate.maxSurge=all",   "at '/updateStrategy/rollingUpdate/maxSurge': 'all' does not"),
    ("tolerations.operator=Exists",                 "at '/tolerations': got object, want array"),
    ("nodeSelector=linux",                          "at '/nodeSelector': got string, want object"),
    ("keepKubeProxy=1",                             "at '/keepKubeProxy': got number, want boolean"),
    ("affinity.nodeAfinity.a=b",                    "at '/affinity': additional properties 'nodeAfinity' not allowed"),
    ("resources.limit.memory=1Gi",                  "at '/resources': additional properties 'limit' not allowed"),
    ("initResources.request.cpu=1",                 "at '/initResources': additional properties 'request' not"),
    ("tolerations[0].efect=NoSchedule",             "at '/tolerations/0': additional properties 'efect' not allowed"),
    ("extraVolumeMounts[0].name=a,extraVolumeMounts[0].mountPath=/a,extraVolumeMounts[0].readonly=true",
                                                    "at '/extraVolumeMounts/0': additional properties 'readonly' not"),
    ("serviceMonitor.relabelings[0].sourcelabels={a}", "/relabelings/0': additional properties 'sourcelabels' not"),
    ("affinity=none",                               "at '/affinity': got string, want null or object"),
    ("seccompFolder=seccomp",                       "at '/seccompFolder': 'seccomp' does not match"),
])  # fmt: skip
def test_what_cannot_work_is_refused_with_a_sentence(value: str, said: str) -> None:
    done = helm("template", "hybrid-proxy", str(CHART), "--set", f"apiServer={SERVER}", "--set", value)
    assert done.returncode != 0
    assert said in done.stderr


def test_every_value_is_described_where_an_editor_shows_it() -> None:
    """A value without one is a text in a list, or of kube-proxy's two documents, which have the pages' own."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    open_ends = [("", schema)]
    while open_ends:
        path, node = open_ends.pop()
        for name, field in node.get("properties", {}).items():
            if not name.endswith("Configuration"):
                assert field.get("description"), f"{path}{name}"
                open_ends.append((f"{path}{name}.", field))


@pytest.mark.parametrize(("more", "added"), [
    (("--set", "kubeProxyConfigMap=kube-proxy", "--set", "apiServer="), ["--metrics-bind-address=0.0.0.0:10249"]),
    (("--set", "kubeProxyConfiguration.metricsBindAddress=[::]:10249"), []),
])  # fmt: skip
def test_a_monitor_has_what_it_reads(more: tuple[str, ...], added: list[str]) -> None:
    """kube-proxy's ConfigMap stays; an address of one's own counts."""
    without, with_it = (
        substance(rendered(*more, "--set", f"serviceMonitor.enabled={enabled}")) for enabled in ("false", "true")
    )
    assert {kind for kind, _ in with_it.keys() - without.keys()} == {"Service", "ServiceMonitor"}
    args = [each["DaemonSet", "hybrid-proxy"]["spec"]["template"]["spec"]["containers"][0]["args"]
            for each in (without, with_it)]  # fmt: skip
    assert args[1] == [*args[0], *added]


@pytest.mark.parametrize(("value", "port"), [
    ("extraArgs={--metrics-bind-address=0.0.0.0:10249}", 10249),
    ("kubeProxyConfiguration.metricsBindAddress=[::]:4321", 4321),
    ("kubeProxyConfiguration.metricsBindAddress=127.0.0.1:4321", None),
    ("kubeProxyConfiguration.metricsBindAddress=[::1]:4321", None), ("extraArgs={-v=6}", None),
])  # fmt: skip
def test_prometheus_finds_metrics_at_the_nodes_address_without_its_operator(value: str, port: int | None) -> None:
    (agent,) = substance(rendered("--set", value))["DaemonSet", "hybrid-proxy"]["spec"]["template"]["spec"][
        "containers"
    ]
    (job,) = yaml.safe_load((DEPLOY / "monitoring/prometheus.yaml").read_text())["scrape_configs"]
    (name,) = (rule["regex"] for rule in job["relabel_configs"] if rule.get("action") == "keep")
    assert agent.get("ports") == (port and [{"name": name, "containerPort": port, "protocol": "TCP"}])


@pytest.mark.parametrize("values", [
    "kubeProxyConfiguration.healthzBindAddress=127.0.0.1:1234",
    "kubeProxyConfiguration.healthzBindAddress=[::]:1234,kubeProxyConfiguration.metricsBindAddress=[::]:4321",
    "kubeProxyConfiguration.healthzBindAddress=10.0.0.1,kubeProxyConfiguration.metricsBindAddress=fd00::1",
    "hybridProxyConfiguration.serviceProxyName=mine",
    "hybridProxyConfiguration.serviceProxyName=mine,kubeProxyConfiguration.healthzBindAddress=10.0.0.1:10256",
    "extraArgs={--metrics-bind-address=10.0.0.1:4321}",
    "kubeProxyConfiguration.healthzBindAddress=[::1]:1234",
    "kubeProxyConfigMap=kube-proxy,apiServer=,extraArgs={--service-proxy-name=mine}",
    "kubeProxyConfigMap=kube-proxy,apiServer=,kubeProxyHealthz=127.0.0.1:1234",
    "kubeProxyConfigMap=kube-proxy,apiServer=,kubeProxyHealthz=10.0.0.1:10256,extraArgs={--service-proxy-name=mine}",
])  # fmt: skip
def test_ports_are_those_where_the_agent_serves(values: str, tmp_path: Path) -> None:
    objects = substance(rendered("--set", values, "--set", "serviceMonitor.enabled=true"))
    (agent,) = objects["DaemonSet", "hybrid-proxy"]["spec"]["template"]["spec"]["containers"]
    config = tmp_path / "config.conf"
    named = re.search("kubeProxyHealthz=([^,]*)", values)
    kube_proxys = KUBE_PROXYS | {"healthzBindAddress": named[1] if named else ""}
    documents = objects.get(("ConfigMap", "hybrid-proxy"), {"data": {"config.conf": [kube_proxys]}})
    config.write_text(yaml.safe_dump_all(documents["data"]["config.conf"]))
    served = configfile.load(config, vars(parser().parse_args(agent["args"]))).config
    assert served.healthz_bind_address
    assert served.metrics_bind_address
    host, port = served.healthz_bind_address.address, served.healthz_bind_address.port
    asked = {(agent[probe]["httpGet"].get("host"), agent[probe]["httpGet"]["port"]) for probe in PROBES}
    assert asked == {(host if ip_address(host).is_loopback else None, port)}
    (port,) = objects["Service", "hybrid-proxy-metrics"]["spec"]["ports"]
    assert agent["ports"][0]["containerPort"] == port["port"] == served.metrics_bind_address.port


@pytest.mark.parametrize("probe", PROBES)
def test_the_kubelet_asks_as_often_as_it_is_told(probe: str) -> None:
    def asked(values: str) -> dict[str, Any]:
        (daemonset,) = (item for item in rendered("--set", values) if item["kind"] == "DaemonSet")
        found: dict[str, Any] = daemonset["spec"]["template"]["spec"]["containers"][0]
        return {each: found[each] for each in PROBES}

    usual, other = asked("debug=false"), asked(f"{probe}.periodSeconds=30,{probe}.initialDelaySeconds=7")
    assert other == usual | {probe: usual[probe] | {"periodSeconds": 30, "initialDelaySeconds": 7}}
    assert asked(f"{probe}=null")[probe] == {"httpGet": usual[probe]["httpGet"]}, "Kubernetes' own times"


def test_an_update_goes_on_when_agents_have_been_ready_for_so_long() -> None:
    for values, wanted in (("debug=false", None), ("minReadySeconds=60", 60)):
        objects = substance(rendered("--set", values))
        assert objects["DaemonSet", "hybrid-proxy"]["spec"].get("minReadySeconds") == wanted


@pytest.mark.parametrize("phase", ["", *PHASES])
def test_labels_of_a_cluster_are_on_all_objects_and_pods_and_replace_none(phase: str) -> None:
    more = "apiPriority=true,serviceMonitor.enabled=true,prometheusRule.enabled=true,dashboard.enabled=true"
    labels = r"commonLabels.team=net,commonLabels.app\.kubernetes\.io/name=other"
    usual, labelled = (rendered("--set", f"phase={phase},{more}{values}") for values in ("", f",{labels}"))
    assert len(labelled) > (1 if not phase else 0)
    for item in labelled:
        assert item["metadata"]["labels"].pop("team") == "net"
        if item["kind"] == "DaemonSet":
            assert item["spec"]["template"]["metadata"]["labels"].pop("team") == "net"
    assert labelled == usual


def test_what_a_cluster_adds_reaches_the_pod() -> None:
    digest = f"sha256:{'7' * 64}"
    objects = substance(
        rendered(
            "--set", "podLabels.team=net,podLabels.app\\.kubernetes\\.io/name=other,podAnnotations.note=mine",
            "--set", f"priorityClassName=mine,image.pullSecrets[0].name=secret,image.digest={digest}",
            "--set", "extraEnv[0].name=A,extraEnv[0].value=b,serviceAccount.annotations.c=d,dashboard.enabled=true",
            "--set", "dashboard.namespace=grafana,dashboard.annotations.grafana_folder=Network",
            "--set", "extraVolumes[0].name=ca,extraVolumes[0].configMap.name=ca,extraVolumeMounts[0].name=ca",
            "--set", "extraVolumeMounts[0].mountPath=/etc/ca,extraVolumeMounts[0].readOnly=true",
        )
    )  # fmt: skip
    assert objects["ServiceAccount", "hybrid-proxy"]["metadata"]["annotations"] == {"c": "d"}
    metadata = objects["ConfigMap", "hybrid-proxy-dashboard"]["metadata"]
    assert (metadata["namespace"], metadata["annotations"]) == ("grafana", {"grafana_folder": "Network"})
    template = objects["DaemonSet", "hybrid-proxy"]["spec"]["template"]
    labels = {"app.kubernetes.io/name": "hybrid-proxy", "team": "net"}  # the first one selects the pods
    annotations = {"kubectl.kubernetes.io/default-container": "hybrid-proxy", "note": "mine"}
    assert template["metadata"] == {"labels": labels, "annotations": annotations}
    pod = template["spec"]
    assert (pod["priorityClassName"], pod["imagePullSecrets"]) == ("mine", [{"name": "secret"}])
    assert pod["containers"][0]["env"][1:] == [{"name": "A", "value": "b"}]
    assert pod["volumes"][-1] == {"name": "ca", "configMap": {"name": "ca"}}
    assert pod["containers"][0]["volumeMounts"][-1] == {"name": "ca", "mountPath": "/etc/ca", "readOnly": True}
    images = {each["image"] for each in (*pod["initContainers"], *pod["containers"])}
    assert images == {f"hybrid-proxy:{TAG}@{digest}"}


def test_values_reach_the_documents_and_the_pod() -> None:
    objects = substance(
        rendered(
            "--set", "clusterCIDR=10.244.0.0/16", "--set", "strictMode=true", "--set", "image.repository=r.example/hp",
            "--set", "image.tag=seven", "--set", "kubeProxyConfiguration.conntrack.min=5",
            "--set", "hybridProxyConfiguration.metricsPerBackend=true", "--set", "extraArgs={-v=6}",
        )
    )  # fmt: skip
    kube, ours = objects["ConfigMap", "hybrid-proxy"]["data"]["config.conf"]
    assert (kube["detectLocalMode"], kube["clusterCIDR"], kube["conntrack"]) == (
        "ClusterCIDR", "10.244.0.0/16", {"min": 5},
    )  # fmt: skip
    assert (ours["mode"], ours["strictMode"], ours["metricsPerBackend"]) == ("auto", True, True)
    pod = objects["DaemonSet", "hybrid-proxy"]["spec"]["template"]["spec"]
    assert {each["image"] for each in (*pod["initContainers"], *pod["containers"])} == {"r.example/hp:seven"}
    assert pod["containers"][0]["args"][-1] == "-v=6"


def test_kube_proxys_own_document_is_a_value(tmp_path: Path) -> None:
    """The one that kubeadm writes, whole, with nulls and large numbers, and fields of a later version.

    Like kube-proxy, the agent goes on without a field that it does not know, and names it.
    """
    document = yaml.safe_load((DEPLOY.parent / "tests/controller/configurations/kubeadm.yaml").read_text())
    document |= {"ofALaterVersion": {"a": 1}, "conntrack": document["conntrack"] | {"min": 3_000_000}}
    document["iptables"] |= {"masqueradeAl": True}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"kubeProxyConfiguration": document}))
    (config,) = (item for item in rendered("-f", str(tmp_path / "values.yaml")) if item["kind"] == "ConfigMap")
    (tmp_path / "config.conf").write_text(config["data"]["config.conf"])
    loaded = configfile.load(tmp_path / "config.conf", {}).config
    assert loaded.kube_proxy.conntrack.min == 3_000_000
    assert loaded.kube_proxy.detect_local_mode.value == "ClusterCIDR"
    assert ",".join(loaded.kube_proxy.cluster_cidr) == document["clusterCIDR"]
    later, typed = sorted(loaded.warnings, key=lambda warning: "masqueradeAl" in warning)
    assert "KubeProxyConfiguration.ofALaterVersion" in later
    assert typed.partition("KubeProxyConfiguration.")[2].split()[0] == "iptables.masqueradeAl"
    assert "masqueradeAll" in typed.split()[-1]


def test_alerts_and_dashboard_are_those_of_the_folder() -> None:
    """The Prometheus operator takes monitors and rules with the labels that it is told."""
    values = [f"{part}.enabled=true" for part in ("serviceMonitor", "prometheusRule", "dashboard")]
    values += [f"{part}.labels.release=prometheus" for part in ("serviceMonitor", "prometheusRule")]
    objects = rendered("--set", ",".join(values))
    found = {(item["kind"], item["metadata"]["name"]): item for item in objects}
    rule = found["PrometheusRule", "hybrid-proxy"]
    assert rule["spec"] == yaml.safe_load((DEPLOY / "monitoring/alerts.yaml").read_text())
    job = found["Service", "hybrid-proxy-metrics"]["metadata"]["labels"][
        found["ServiceMonitor", "hybrid-proxy"]["spec"]["jobLabel"]
    ]
    assert set(re.findall(r'job="([^"]*)', str(rule["spec"]))) == {job}
    for name in ("PrometheusRule", "ServiceMonitor"):
        labels = found[name, "hybrid-proxy"]["metadata"]["labels"]
        assert (labels["release"], labels["app.kubernetes.io/name"]) == ("prometheus", "hybrid-proxy")
    dashboard = found["ConfigMap", "hybrid-proxy-dashboard"]
    assert dashboard["data"]["hybrid-proxy.json"] == (DEPLOY / "monitoring/dashboard.json").read_text()
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert (dashboard["metadata"]["namespace"], "annotations" in dashboard["metadata"]) == ("kube-system", False)


def test_the_chart_has_no_link_out_of_its_folder() -> None:
    """Helm warns of each, and an archive that `helm package` makes elsewhere would lack the file."""
    assert [path for path in CHART.rglob("*") if path.is_symlink()] == []


def test_alerts_link_to_the_pages_where_they_are_read() -> None:
    base = "https://git.example/hybrid-proxy/blob/main"
    urls = []
    for given in ("", base, f"{base}/"):
        objects = rendered("--set", f"prometheusRule.enabled=true,prometheusRule.runbookBase={given}")
        (rules,) = (item["spec"]["groups"] for item in objects if item["kind"] == "PrometheusRule")
        urls.append([rule["annotations"]["runbook_url"] for group in rules for rule in group["rules"]])
    assert len(urls[0]) > 10
    assert urls[1:] == [[f"{base}/{url}" for url in urls[0]]] * 2


def rules(*values: str) -> dict[str, dict[str, Any]]:
    """The alerts of the chart by name."""
    objects = rendered("--set", ",".join(("prometheusRule.enabled=true", *values)))
    (groups,) = (item["spec"]["groups"] for item in objects if item["kind"] == "PrometheusRule")
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_single_alerts_are_left_out_changed_and_labelled() -> None:
    usual = rules()
    tuned = rules(
        "prometheusRule.disabled.HybridProxyDrops=true", "prometheusRule.disabled.HybridProxyDown=false",
        "prometheusRule.additionalRuleLabels.team=net", "prometheusRule.customRules.HybridProxyMemory.for=1h",
        "prometheusRule.customRules.HybridProxyMemory.expr=process_resident_memory_bytes > 1",
        "prometheusRule.customRules.HybridProxyMemory.labels.severity=info",
    )  # fmt: skip
    expected = {
        name: rule | {"labels": rule["labels"] | {"team": "net"}}
        for name, rule in usual.items()
        if name != "HybridProxyDrops"
    }
    expected["HybridProxyMemory"] |= {
        "for": "1h", "expr": "process_resident_memory_bytes > 1", "labels": {"severity": "info", "team": "net"},
    }  # fmt: skip
    assert tuned == expected


def test_the_test_is_a_pod_where_agents_are_and_none_of_theirs() -> None:
    """The Service of the metrics and the DaemonSet select by the label that it must not have."""
    values = f"apiServer={SERVER},image.repository=r.example/hp,image.pullSecrets[0].name=secret,nodeSelector.pool=a"
    done = helm("template", "hybrid-proxy", str(CHART), "--set", values)
    objects = [item for item in yaml.safe_load_all(done.stdout) if item]
    (pod,) = (item for item in objects if item["kind"] == "Pod")
    (daemonset,) = (item for item in objects if item["kind"] == "DaemonSet")
    agents = daemonset["spec"]["template"]["spec"]
    policy = "before-hook-creation,hook-succeeded"
    assert pod["metadata"]["annotations"] == {"helm.sh/hook": "test", "helm.sh/hook-delete-policy": policy}
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "hybrid-proxy-test"
    for field in ("hostNetwork", "nodeSelector", "affinity", "tolerations", "imagePullSecrets", "priorityClassName"):
        assert pod["spec"][field] == agents[field], field
    assert pod["spec"]["containers"][0]["image"] == f"r.example/hp:{TAG}"


def test_a_node_that_keeps_kube_proxy_is_a_choice() -> None:
    for value in ("keepKubeProxy=false", "hybridProxyConfiguration.serviceProxyName=mine"):
        pod = substance(rendered("--set", value))["DaemonSet", "hybrid-proxy"]["spec"]["template"]["spec"]
        assert "affinity" not in pod


@pytest.mark.parametrize(("value", "kept"), [
    ("mode=auto", True), ("affinity.podAffinity.a=b", True), ("keepKubeProxy=false,affinity.podAffinity.a=b", False),
    ("extraArgs={--service-proxy-name=mine}", False),
])  # fmt: skip
def test_the_notes_say_which_nodes_keep_kube_proxy(value: str, kept: bool) -> None:
    values = ("--set", f"apiServer={SERVER},{value}")
    notes = helm("install", "--dry-run=client", "hybrid-proxy", str(CHART), *values).stdout.partition("NOTES:")[2]
    assert "Agents run on every Linux node" in notes
    assert ("except those that keep kube-proxy" in notes) == kept


def test_an_affinity_of_ones_own_leaves_kube_proxy_where_it_is() -> None:
    """The scheduler takes a node that matches any of the terms."""
    terms = [
        {"matchExpressions": [{"key": "pool", "operator": "Exists"}]},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]},
    ]
    preferred = [{"weight": 1, "preference": terms[0]}]
    required, other = "requiredDuringSchedulingIgnoredDuringExecution", {"podAntiAffinity": {"note": []}}
    own = {"nodeAffinity": {required: {"nodeSelectorTerms": terms}, "preferredDuringX": preferred}} | other
    kept = {"key": "hybrid-proxy.io/kube-proxy", "operator": "NotIn", "values": ["yes"]}
    for value, wanted in (
        (own, [{"matchExpressions": [*terms[0]["matchExpressions"], kept]}, terms[1] | {"matchExpressions": [kept]}]),
        (None, [{"matchExpressions": [kept]}]),
    ):
        objects = substance(rendered("--set-json", f"affinity={json.dumps(value)}"))
        found = objects["DaemonSet", "hybrid-proxy"]["spec"]["template"]["spec"]["affinity"]
        assert found["nodeAffinity"].pop(required) == {"nodeSelectorTerms": wanted}
        assert found == ({"nodeAffinity": {"preferredDuringX": preferred}} | other if value else {"nodeAffinity": {}})


def test_its_page_is_shown_and_names_the_values_that_exist_and_no_others() -> None:
    shown = helm("show", "readme", str(CHART)).stdout
    named = re.findall(r"`([\w.]+)`", " ".join(re.findall(r"^\| (`.*?) \|", shown, re.MULTILINE)))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    grouped = ("image", "serviceMonitor", "prometheusRule", "dashboard", "serviceAccount")
    exist = {f"{name}.{part}" for name in grouped for part in values[name]} | values.keys() - grouped
    assert (len(named), set(named)) == (len(exist), exist)


def test_the_page_of_a_migration_gives_the_chart_one_file_of_values(tmp_path: Path) -> None:
    """Each row of its table in that file; tests/docs/live/test_waves.py goes the way with it."""
    page = (DEPLOY.parent / "docs/migration.md").read_text()
    (values,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `components/.* \| `(\w+: [^`]*)`", page, re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        (tmp_path / "values.yaml").write_text(f"{values}{row}\n")
        objects = rendered("-f", str(tmp_path / "values.yaml"), "--set", "apiServer=")
        image = f"{yaml.safe_load(values)['image']['repository']}:{TAG}"
        pod = next(item for item in objects if item["kind"] == "DaemonSet")["spec"]["template"]["spec"]
        assert {container["image"] for container in (*pod["initContainers"], *pod["containers"])} == {image}


def test_the_page_puts_the_image_that_it_builds_into_a_cluster_of_kind(tmp_path: Path) -> None:
    """Its own block, with stand-ins for docker, kind and kubectl; helm renders what it would apply."""
    (block,) = re.findall(r"^```sh kind\n(.*?)^```", (DEPLOY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    told = f'echo "${{0##*/}} $*" >>{tmp_path}/told'
    tools = {
        "docker": told,
        "kind": f'{told}\ncase "$*" in *--config=-) cat >{tmp_path}/kind.yaml ;; "get nodes") echo a b ;; esac',
        "kubectl": "",
        "helm": f'[ "$1" = test ] || {program()} template "$3" "$4" --skip-tests "${{@:5}}" >{tmp_path}/applied',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-euc", block], cwd=DEPLOY.parent, env=environment, check=True)
    cluster = yaml.safe_load((tmp_path / "kind.yaml").read_text())
    assert (cluster["apiVersion"], cluster["networking"]) == ("kind.x-k8s.io/v1alpha4", {"kubeProxyMode": "none"})
    objects = substance([item for item in yaml.safe_load_all((tmp_path / "applied").read_text()) if item])
    pod = objects["DaemonSet", "hybrid-proxy"]["spec"]["template"]["spec"]
    (image,) = {container["image"] for container in (*pod["initContainers"], *pod["containers"])}
    said = (tmp_path / "told").read_text().splitlines()
    assert f"docker build -f deploy/image/Dockerfile -t {image} ." in said
    assert f"kind load docker-image {image}" in said
    mounted = [line.split()[2] for line in said if "mount -t bpf bpf /sys/fs/bpf" in line]
    assert mounted == ["a", "b"]
    (kubeconfig,) = objects["ConfigMap", "hybrid-proxy"]["data"]["kubeconfig.conf"]
    control_plane = f"{cluster.get('name', 'kind')}-{cluster['nodes'][0]['role']}"  # as kind names nodes
    assert kubeconfig["clusters"][0]["cluster"]["server"] == f"https://{control_plane}:6443"


@pytest.mark.parametrize("enabled", [True, False])
def test_a_chart_that_depends_on_it_turns_it_on_and_off(enabled: bool, tmp_path: Path) -> None:
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts/hybrid-proxy").symlink_to(CHART)
    dependency = {"name": "hybrid-proxy", "version": "*", "condition": "hybrid-proxy.enabled"}
    chart = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
    values = {"hybrid-proxy": {"enabled": enabled, "apiServer": SERVER}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    done = helm("template", "hybrid-proxy", str(tmp_path), "--namespace", "kube-system")
    assert done.returncode == 0, done.stderr
    assert ("kind: DaemonSet" in done.stdout) == enabled


def test_it_is_a_chart_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    image = one("base", "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["image"]
    assert chart["appVersion"] == TAG == image.partition(":")[2]
    linted = helm("lint", "--strict", str(CHART), "--set", f"apiServer={SERVER}")
    assert linted.returncode == 0, linted.stdout + linted.stderr
