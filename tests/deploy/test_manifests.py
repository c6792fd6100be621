"""The manifests under deploy/: they build, they are valid, and they grant what the code needs and no more."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from hybrid_proxy.controller.cli import parser
from hybrid_proxy.controller.errors import SourceError
from hybrid_proxy.controller.kubernetes.apiserver import _resources
from hybrid_proxy.controller.kubernetes.connection import refuse_placeholder
from hybrid_proxy.controller.settings import configfile
from hybrid_proxy.controller.settings.config import Config, Endpoint
from hybrid_proxy.controller.settings.documents import MODES

from . import manifests
from .manifests import DEPLOY, OVERLAYS, PROBES, ROOT, agent_of, build, capabilities, kustomized, one, text
from .promtool import answered, promtool

COMPONENTS = tuple(sorted(path.name for path in DEPLOY.glob("components/*")))
FOLDERS = ("base", *(f"overlays/{name}" for name in OVERLAYS), *(f"base+{name}" for name in COMPONENTS))
CLEANUPS = ("overlays/cleanup", "overlays/cleanup-drain")
MIGRATION = ("overlays/census", "overlays/takeover", "overlays/rollback")
AGENTS = tuple(folder for folder in FOLDERS if folder not in (*CLEANUPS, *MIGRATION))
DROP_INS = tuple(DEPLOY.glob("systemd/hybrid-proxy.service.d/*.conf"))
KUBEADM = ROOT / "tests/controller/configurations/kubeadm.yaml"  # what kubeadm makes for kube-proxy
UNKNOWN = {"ServiceMonitor"}  # the Prometheus operator's, no schema of Kubernetes
VERSIONS = ("1.33", "1.36")


def test_every_mode_has_an_overlay() -> None:
    assert set(MODES) <= set(OVERLAYS)


def test_an_agent_asks_for_the_memory_that_was_measured_and_has_no_limit() -> None:
    """The figures are MB (10^6 bytes), those of `scale`; the last one of each cell is the latest."""
    rows = (line.split("|") for line in (ROOT / "docs/benchmarks.md").read_text().splitlines())
    memory, kernel = next(row[4:6] for row in rows if row[1:2] == [" 10,000 x 10 "])
    measured = 1e6 * sum(int(re.findall(r"(\d+) MB", cell)[-1]) for cell in (memory, kernel)) / 2**20
    for folder in AGENTS:
        resources = agent_of(folder)["resources"]
        asked = int(resources["requests"]["memory"].removesuffix("Mi"))
        assert measured <= asked <= 1.2 * measured, folder
        assert "limits" not in resources, folder


@pytest.mark.parametrize(("more", "fires"), [(0, False), (600e6, True)])
def test_memory_alerts_above_what_was_measured_for_any_number_of_services(
    more: float, fires: bool, tmp_path: Path
) -> None:
    (group,) = yaml.safe_load((DEPLOY / "monitoring/alerts.yaml").read_text())["groups"]
    (rule,) = (rule for rule in group["rules"] if rule["alert"] == "HybridProxyMemory")
    rows = re.findall(r"^\| ([\d,]+) x \d+ \|.*?\| (\d+) MB", (ROOT / "docs/benchmarks.md").read_text(), re.MULTILINE)
    assert len(rows) >= 10
    for services, memory in rows:
        values = {
            "hybrid_proxy_build_info": 1,
            "hybrid_proxy_services": services.replace(",", ""),
            "process_resident_memory_bytes": 1e6 * int(memory) + more,
        }
        series = [
            {"series": f'{name}{{instance="a", job="j"}}', "values": f"{value}x30"} for name, value in values.items()
        ]
        assert bool(answered(tmp_path, {"": rule["expr"]}, series)) == fires, (services, memory)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str, tmp_path: Path) -> None:
    files, known = [], 0
    for folder in FOLDERS:
        objects = [item for item in build(folder) if item["kind"] not in UNKNOWN]
        known += len(objects)
        files.append(tmp_path / f"{Path(folder).name}.yaml")
        files[-1].write_text(yaml.safe_dump_all(objects))
    done = validate(version, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(" passed ") == known


def test_the_check_of_objects_sees_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text("base").replace("hostNetwork: true", "hostNetwrok: true"))
    assert validate(VERSIONS[-1], file).returncode != 0


def validate(version: str, *files: Path) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name("kubernetes-validate")
    if not tool.exists():
        pytest.skip("kubernetes-validate is missing: `make setup` installs it")
    argv = [str(tool), "--strict", "-k", version, *map(str, files)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_the_role_has_what_the_agent_asks_for_and_nothing_else() -> None:
    asked: dict[tuple[str, str], set[str]] = {("events.k8s.io", "events"): {"create"}}
    for resource in _resources("node-1"):
        group = match[1] if (match := re.match(r"/apis/([^/]+)/", resource.path)) else ""
        asked[group, resource.path.rpartition("/")[2]] = {"list", "watch"}
    granted = {
        (group, name): set(rule["verbs"])
        for rule in one("base", "ClusterRole")["rules"]
        for group in rule["apiGroups"]
        for name in rule["resources"]
    }
    assert granted == asked
    binding = one("base", "ClusterRoleBinding")
    (subject,) = binding["subjects"]
    account = one("base", "ServiceAccount")["metadata"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert binding["roleRef"]["name"] == one("base", "ClusterRole")["metadata"]["name"]


def test_a_priority_level_is_that_of_all_agents() -> None:
    (schema, level) = (one("base+priority", kind) for kind in ("FlowSchema", "PriorityLevelConfiguration"))
    assert schema["spec"]["priorityLevelConfiguration"]["name"] == level["metadata"]["name"]
    (account, group) = (
        each[each["kind"][0].lower() + each["kind"][1:]] for each in schema["spec"]["rules"][0]["subjects"]
    )
    assert account == {name: one("base", "ServiceAccount")["metadata"][name] for name in ("name", "namespace")}
    assert f" --group {group['name']}\n" in (ROOT / "docs/operations.md").read_text()


def test_overlays_of_ones_own_are_outside_of_the_tree(tmp_path: Path) -> None:
    """The page's own block and example, next to a tree that has other files than before."""
    page = (DEPLOY / "README.md").read_text()
    (block,) = re.findall(r"^```sh site\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    example, moved, bounded, probed = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shutil.copytree(DEPLOY, tmp_path / "hybrid-proxy/deploy")
    script = ("sh", "deploy/site.sh")
    nothing = subprocess.run(script, cwd=tmp_path / "hybrid-proxy", capture_output=True, text=True, check=False)
    assert (nothing.returncode, nothing.stdout, (tmp_path / "site").exists()) == (2, "", False)
    assert "sh deploy/site.sh IMAGE [TAG [API_SERVER]]\n" in nothing.stderr
    subprocess.run(["sh", "-euc", block], cwd=tmp_path / "hybrid-proxy", check=True)
    tag = one("base", "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["image"]
    for folder in (tmp_path / "site").iterdir():
        if folder.name != "image":
            assert kustomized(folder) == text(f"overlays/{folder.name}").replace(
                f" {tag}\n", f" registry.example/{tag}\n"
            )
    rolled = tmp_path / "site/rollback/kustomization.yaml"
    (before,) = yaml.safe_load_all(kustomized(rolled.parent))
    with rolled.open("a") as file:
        file.write(moved + bounded.removeprefix("patches:\n"))
    (rollback,) = yaml.safe_load_all(kustomized(tmp_path / "site/rollback"))
    first = rollback["spec"]["template"]["spec"]["initContainers"][0]
    assert (first["name"], first["env"][0]["value"]) == ("kube-proxy-serves", "127.0.0.1:9249")
    (cleanup, usual) = (each["spec"]["template"]["spec"]["initContainers"][1] for each in (rollback, before))
    assert cleanup == usual | {"args": ["cleanup", "--log-format=json", "--drain", "600"]}
    overlay = tmp_path / "site/kubeadm/kustomization.yaml"
    usual = overlay.read_text()
    overlay.write_text(f"{usual}{probed}")
    (agent,) = next(item for item in yaml.safe_load_all(kustomized(overlay.parent)) if item["kind"] == "DaemonSet")[
        "spec"
    ]["template"]["spec"]["containers"]
    there = {"port": 9256, "host": "127.0.0.1"}
    assert [agent[name].pop("httpGet") for name in PROBES] == [
        agent_of("overlays/kubeadm")[name]["httpGet"] | there for name in PROBES
    ]
    overlay.write_text(example)
    kept = "patches:\n  - {target: {kind: DaemonSet}, path: secrets.yaml}\n"
    (tmp_path / "site/image/secrets.yaml").write_text(
        "- {op: add, path: /spec/template/spec/imagePullSecrets, value: [{name: registry}]}\n"
    )
    with (tmp_path / "site/image/kustomization.yaml").open("a") as file:
        file.write(kept)
    names = tmp_path / "site/image/kustomization.yaml"
    own = {"name": "tools", "newName": "mine.example/tools", "newTag": "1"}
    names.write_text(names.read_text().replace("images:\n", f"images:\n  - {json.dumps(own)}\n"))
    subprocess.run([*script, "other.example:5000/proxy", "0012"], cwd=tmp_path / "hybrid-proxy", check=True)
    (tmp_path / "hybrid-proxy").rename(
        tmp_path / "hybrid_proxy-0.2.0"
    )  # as a release unpacks, in the place of the former
    said = subprocess.run(
        script, cwd=tmp_path / "hybrid_proxy-0.2.0", capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"\.\./([^/]*)/deploy", said)) == {"hybrid_proxy-0.2.0"}
    assert not list((tmp_path / "site").glob("*/*.old"))
    assert kept in names.read_text()
    assert yaml.safe_load(names.read_text())["images"][0] == own
    assert overlay.read_text() == example.replace("/hybrid-proxy/deploy/", "/hybrid_proxy-0.2.0/deploy/")
    images = re.findall(r"\bimage: (.*)", kustomized(tmp_path / "site/rollback"))
    assert set(images) == {"other.example:5000/proxy:0012"}  # where a number would lose its zeros
    (monitor,) = (
        item for item in yaml.safe_load_all(kustomized(tmp_path / "site/kubeadm")) if item["kind"] == "ServiceMonitor"
    )
    assert monitor["metadata"]["labels"]["release"] == "monitoring"


HELM = "helm upgrade --install {} deploy/helm/hybrid-proxy -n kube-system -f ../site/values.yaml"


@pytest.mark.parametrize(
    ("typed", "kustomized", "charted"),
    [
        ("apply kubeadm", "kubectl apply -k ../site/kubeadm", HELM.format("hybrid-proxy")),
        ("apply agents", "kubectl apply -k ../site/agents", HELM.format("hybrid-proxy")),
        ("delete kubeadm", "kubectl delete -k ../site/kubeadm", "helm uninstall hybrid-proxy -n kube-system"),
        ("apply census", "kubectl apply -k ../site/census", f"{HELM.format('hybrid-proxy-census')} --set phase=census"),
        ("delete census", "kubectl delete -k ../site/census", "helm uninstall hybrid-proxy-census -n kube-system"),
        ("remove census", "", ""),
        ("apply", "", ""),
    ],
)
def test_one_line_is_for_overlays_and_for_the_chart(typed: str, kustomized: str, charted: str, tmp_path: Path) -> None:
    """In the tree's folder, from wherever it is typed."""
    shutil.copytree(DEPLOY, tmp_path / "hybrid-proxy/deploy")
    (tmp_path / "site").mkdir()
    for name in ("kubectl", "helm"):
        (tmp_path / name).write_text('#!/bin/sh\n[ -d deploy ] && echo "${0##*/} $*"\n')
        (tmp_path / name).chmod(0o755)
    for command in (kustomized, charted):
        argv = ["sh", str(tmp_path / "hybrid-proxy/deploy/objects.sh"), *typed.split()]
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(argv, cwd="/", env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.strip()) == (0 if command else 2, command)
        assert done.stderr.startswith(f"+ {command}\n" if command else "The objects of a step")
        (tmp_path / "site/values.yaml").touch()


PATCHES = [
    (path.parent.relative_to(DEPLOY).as_posix(), yaml.safe_load(patch["patch"]))
    for path in sorted(DEPLOY.rglob("kustomization.yaml"))
    for patch in yaml.safe_load(path.read_text()).get("patches", [])
]


@pytest.mark.parametrize(("folder", "operations"), [pytest.param(*each, id=each[0]) for each in PATCHES])
def test_a_patch_that_counts_elements_tests_which_one_it_has(folder: str, operations: list[dict[str, Any]]) -> None:
    """RFC 6902: where a list has another order, the build fails, and changes nothing else in silence."""
    known: set[str] = set()
    for each in operations if isinstance(operations, list) else ():  # a strategic merge goes by names
        counted = {
            path[: found.end()]
            for path in (each["path"], each.get("from", ""))
            for found in re.finditer(r"/\d+(?=/|$)", path)
        }
        known |= counted if each["op"] == "test" else {each["path"]} if each["op"] == "add" else set()
        assert counted <= known, each


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_full_node_has_room_for_every_pod(folder: str) -> None:
    """Also for those that abort a wave: a pod without priority stays Pending there."""
    assert one(folder, "DaemonSet")["spec"]["template"]["spec"]["priorityClassName"] == "system-node-critical"


@pytest.mark.parametrize("folder", AGENTS)
def test_the_pod_is_one_of_the_node_on_every_node(folder: str) -> None:
    pod = one(folder, "DaemonSet")["spec"]["template"]["spec"]
    assert pod["hostNetwork"] is True
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod.get("hostPID", False) == (folder == "base+debug")
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    first = {container["name"]: container for container in pod["initContainers"]}
    assert first["seccomp-profile"]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "--init-only" in first["node-settings"]["args"]  # which ends
    (agent,) = pod["containers"]
    rights = agent["securityContext"]
    if folder == "overlays/ipvs":
        assert rights["privileged"] is True
        return
    debug = folder == "base+debug"
    assert rights["allowPrivilegeEscalation"] is debug
    assert rights["capabilities"]["drop"] == ["ALL"]
    of_modes = {right for mode in MODES if mode != "ipvs" for right in capabilities(mode)}
    if debug:  # whatever the mode
        assert set(rights["capabilities"]["add"]) == of_modes | {"SYS_ADMIN", "SYS_PTRACE"}
    else:
        assert set(rights["capabilities"]["add"]) <= of_modes


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_default_profile_of_a_node_confines_a_pod(folder: str) -> None:
    """These are fields of Kubernetes 1.30: no supported version needs the annotation that came before."""
    pod = one(folder, "DaemonSet")["spec"]["template"]["spec"]
    assert pod["securityContext"]["appArmorProfile"] == {"type": "Unconfined"}
    assert pod["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert not container["securityContext"].keys() & {"appArmorProfile", "seLinuxOptions"}


@pytest.mark.parametrize("folder", AGENTS)
def test_what_is_mounted_is_there_and_what_need_not_be_written_is_read_only(folder: str) -> None:
    pod = one(folder, "DaemonSet")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in agent_of(folder)["volumeMounts"]}
    used = {m["name"] for c in (*pod["initContainers"], *pod["containers"]) for m in c["volumeMounts"]}
    assert used == set(volumes)
    writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    assert writable == {"/run/hybrid-proxy", "/sys/fs/bpf", "/run/xtables.lock", "/tmp"}
    for path in ("/lib/modules", "/host/sys/fs/cgroup"):
        assert mounts[path]["readOnly"]
    assert mounts["/host/sys/fs/cgroup"]["recursiveReadOnly"] == "IfPossible", "hierarchies of version 1 are below it"
    first = {container["name"]: container for container in pod["initContainers"]}
    remembered = {mount["mountPath"]: mount["name"] for mount in first["node-settings"]["volumeMounts"]}
    assert remembered["/run/hybrid-proxy"] == mounts["/run/hybrid-proxy"]["name"], "what `cleanup` puts back"
    for path in ("/sys/fs/bpf", "/run/hybrid-proxy", "/lib/modules", "/run/xtables.lock"):
        assert volumes[mounts[path]["name"]]["hostPath"]["path"] == path


def loaded(folder: str, tmp_path: Path) -> Config:
    """The configuration as the agent of an overlay reads it."""
    file = tmp_path / f"{Path(folder).name}.conf"
    file.write_text(one(folder, "ConfigMap")["data"]["config.conf"])
    args = parser().parse_args([word.replace("$(NODE_NAME)", "node-1") for word in agent_of(folder)["args"]])
    return configfile.load(file, vars(args)).config


def test_the_overlay_of_a_mode_selects_it(tmp_path: Path) -> None:
    base = loaded("base", tmp_path)
    assert (base.mode, base.hybrid.strict_mode, base.settings.node_name) == ("auto", False, "node-1")
    assert base.kube_proxy.logging.format == "json"
    assert not base.warnings
    probes = agent_of("base")
    assert base.healthz_bind_address is not None
    for name in PROBES:
        assert probes[name]["timeoutSeconds"] >= 5, "a starved node must not kill its agent"
        assert probes[name]["httpGet"]["port"] == base.healthz_bind_address.port
    for mode in MODES:
        config = loaded(f"overlays/{mode}", tmp_path)
        hybrid = replace(base.hybrid, mode=config.hybrid.mode, strict_mode=True)
        kube_proxy = replace(base.kube_proxy, mode=config.kube_proxy.mode)
        assert config == replace(base, mode=mode, hybrid=hybrid, kube_proxy=kube_proxy)
        if mode != "ipvs":  # which is privileged
            assert set(capabilities(mode)) <= {*capabilities("ebpf"), "NET_RAW"}


def test_overlays_change_what_they_say_and_no_other_setting(tmp_path: Path) -> None:
    base, debug = loaded("base", tmp_path), loaded("base+debug", tmp_path)
    logging = replace(base.kube_proxy.logging, verbosity=6)
    assert debug == replace(base, kube_proxy=replace(base.kube_proxy, logging=logging))
    monitored = loaded("base+servicemonitor", tmp_path)
    everywhere = Endpoint("0.0.0.0", 10249)
    kube_proxy = replace(base.kube_proxy, metrics_bind_address=everywhere)
    assert monitored == replace(base, metrics_bind_address=everywhere, kube_proxy=kube_proxy)
    assert loaded("base+per-service", tmp_path) == replace(
        base,
        hybrid=replace(base.hybrid, service_proxy_name="hybrid-proxy"),
        settings=replace(base.settings, proxy_name="hybrid-proxy"),
        options=replace(base.options, shares_node=True),
        healthz_bind_address=Endpoint("0.0.0.0", 10356),
        metrics_bind_address=Endpoint("127.0.0.1", 10349),
    )


def kubeadms(tmp_path: Path, components: str) -> str:
    """The overlay of your own over the one for kubeadm, with components that docs/migration.md adds."""
    (tmp_path / "hybrid-proxy").symlink_to(ROOT)
    (tmp_path / "site").mkdir()
    taken = [f"../hybrid-proxy/deploy/components/{name}" for name in components.split()]
    kustomization = {"resources": ["../hybrid-proxy/deploy/overlays/kubeadm"], "components": taken}
    (tmp_path / "site/kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return manifests.kustomized(tmp_path / "site")


def mine(tmp_path: Path, components: str) -> str:
    """The overlay of your own that deploy/README.md describes, with other components."""
    (tmp_path / "hybrid-proxy").mkdir()
    (tmp_path / "hybrid-proxy/deploy").symlink_to(DEPLOY)
    (block,) = re.findall(r"^```sh site\n(.*?)^```", (DEPLOY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    subprocess.run(["sh", "-euc", f"tag=\n{block}"], cwd=tmp_path / "hybrid-proxy", check=True)
    for server in ("https://10.0.0.9:6443", "https://10.0.0.1:6443"):
        subprocess.run(["sh", "deploy/site.sh", "", "", server], cwd=tmp_path / "hybrid-proxy", check=True)
    file = tmp_path / "site/agents/kustomization.yaml"
    images = re.findall(r"\bimage: (.*):", manifests.kustomized(file.parent))
    assert set(images) == {"registry.example/hybrid-proxy"}
    kustomization = yaml.safe_load(file.read_text())
    kustomization["components"] = [f"../../hybrid-proxy/deploy/components/{name}" for name in components.split()]
    file.write_text(yaml.safe_dump(kustomization))
    return manifests.kustomized(file.parent)


@pytest.mark.parametrize("components", [
    "", *COMPONENTS, "auto metrics", "auto servicemonitor", "debug per-service",
    "per-service metrics", "metrics per-service", "per-service servicemonitor", "servicemonitor auto per-service",
])  # fmt: skip
@pytest.mark.parametrize("overlay", [kubeadms, mine])
def test_components_work_in_an_overlay_that_knows_the_api_server(
    overlay: Callable[[Path, str], str], components: str, tmp_path: Path
) -> None:
    """kube-proxy's ConfigMap, which has another mode and says 127.0.0.1, may not be changed while it runs."""
    objects = {item["kind"]: item for item in yaml.safe_load_all(overlay(tmp_path, components))}
    if overlay is mine:
        assert "https://10.0.0.1:6443" in objects["ConfigMap"]["data"]["kubeconfig.conf"]
        config = objects["ConfigMap"]["data"]["config.conf"]
    else:
        assert "ConfigMap" not in objects
        config = KUBEADM.read_text().replace('mode: ""', "mode: ipvs")
    (tmp_path / "config.conf").write_text(config)
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    first, (agent,) = pod["initContainers"][0], pod["containers"]
    inits, runs = (
        configfile.load(tmp_path / "config.conf", vars(parser().parse_args(container["args"]))).config
        for container in (first, agent)
    )
    taken = set(components.split())
    assert runs.mode == ("auto" if "auto" in taken or overlay is mine else "ipvs")
    assert not runs.hybrid.strict_mode
    assert runs.hybrid.service_proxy_name == inits.hybrid.service_proxy_name, "who sets connection tracking"
    assert bool(runs.hybrid.service_proxy_name) == ("per-service" in taken)
    assert runs.healthz_bind_address is not None
    assert {agent[name]["httpGet"]["port"] for name in PROBES} == {runs.healthz_bind_address.port}
    monitored = taken & {"metrics", "servicemonitor"}
    port = 10349 if "per-service" in taken else 10249  # beside kube-proxy's
    assert runs.metrics_bind_address == Endpoint("0.0.0.0" if monitored else "127.0.0.1", port)
    assert agent.get("ports", []) == [{"name": "metrics", "containerPort": port, "protocol": "TCP"}] * bool(monitored)
    assert ({"Service", "ServiceMonitor"} <= objects.keys()) == ("servicemonitor" in taken)
    assert pod.get("hostPID", False) == ("debug" in taken)


def test_the_overlay_for_kubeadm_takes_kube_proxys_own_configuration() -> None:
    assert not [item for item in build("overlays/kubeadm") if item["kind"] == "ConfigMap"]
    pod = one("overlays/kubeadm", "DaemonSet")["spec"]["template"]["spec"]
    config = next(volume for volume in pod["volumes"] if volume["name"] == "config")
    assert config["configMap"]["name"] == "kube-proxy"
    for container in (agent_of("overlays/kubeadm"), pod["initContainers"][0]):
        assert "--config=/var/lib/kube-proxy/config.conf" in container["args"]
        assert "/var/lib/kube-proxy" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_one_file_names_the_image_of_every_overlay(tmp_path: Path) -> None:
    """A release writes its tag there."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    file = tmp_path / "deploy/components/image/kustomization.yaml"
    file.write_text(file.read_text().replace("newTag: 0.1.0", "newTag: 0.1.0-g1"))
    for folder in FOLDERS:
        found = set(re.findall(r"\bimage: (.*)", text(folder, tmp_path / "deploy")))
        assert found == {"hybrid-proxy:0.1.0-g1"}, folder


def test_the_placeholder_of_the_base_is_one_that_the_agent_refuses() -> None:
    kubeconfig = yaml.safe_load(one("base", "ConfigMap")["data"]["kubeconfig.conf"])
    (cluster,) = kubeconfig["clusters"]
    with pytest.raises(SourceError, match="placeholder"):
        refuse_placeholder("", cluster["cluster"]["server"])


def test_the_cleanup_reaches_what_the_agent_and_its_first_containers_wrote() -> None:
    agents, cleanup = (one(folder, "DaemonSet")["spec"]["template"]["spec"] for folder in ("base", "overlays/cleanup"))
    ours = {container["name"]: container for container in cleanup["initContainers"]}
    assert set(volumes_of(agents, agent_of("base"))) - {"config"} == set(volumes_of(cleanup, ours["cleanup"]))
    for name, where in volumes_of(cleanup, ours["cleanup"]).items():
        assert where == volumes_of(agents, agent_of("base"))[name]
    assert ours["cleanup"]["securityContext"]["privileged"], "settings of the node are put back"
    args = parser().parse_args(ours["cleanup"]["args"])
    assert args.command == "cleanup"

    (wrote,) = (each for each in agents["initContainers"] if each["name"] == "seccomp-profile")
    assert volumes_of(agents, wrote) == volumes_of(cleanup, ours["seccomp-profile"])
    assert ours["seccomp-profile"]["command"] == ["rm", "-f", wrote["command"][-1]]

    assert cleanup["automountServiceAccountToken"] is False
    assert (cleanup["hostNetwork"], cleanup["tolerations"]) == (True, [{"operator": "Exists"}])
    labels = {f: one(f, "DaemonSet")["spec"]["selector"]["matchLabels"] for f in ("base", "overlays/cleanup")}
    assert labels["base"] != labels["overlays/cleanup"]


def test_open_flows_may_go_on_until_they_are_over() -> None:
    """One word more, in the container that cleans up: the other overlay takes it away, and ends the waiting."""
    now, drains = (one(folder, "DaemonSet") for folder in CLEANUPS)
    (cleanup,) = (each for each in drains["spec"]["template"]["spec"]["initContainers"] if each["name"] == "cleanup")
    assert parser().parse_args(cleanup["args"]).drain == math.inf
    cleanup["args"].remove("--drain")
    assert parser().parse_args(cleanup["args"]).drain is None
    assert drains == now
    assert now["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == "100%", "also of pods that wait"


@pytest.mark.parametrize(
    ("folder", "labels"),
    [
        *((folder, {"kube-proxy": "NotIn"}) for folder in AGENTS if folder != "base+per-service"),
        ("base+per-service", {}),  # beside kube-proxy
        *((folder, {}) for folder in (*CLEANUPS, "overlays/census")),
        ("overlays/takeover", {"kube-proxy": "NotIn"}),
        ("overlays/rollback", {"kube-proxy": "In", "rollback": "In"}),
    ],
)
def test_labels_of_a_node_decide_who_serves_there(folder: str, labels: dict[str, str]) -> None:
    pod = one(folder, "DaemonSet")["spec"]["template"]["spec"]
    terms = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    wanted = [{"key": f"hybrid-proxy.io/{name}", "operator": each, "values": ["yes"]} for name, each in labels.items()]
    assert terms.get("nodeSelectorTerms", []) == ([{"matchExpressions": wanted}] if wanted else [])


@pytest.mark.parametrize("folder", ["base", *(f"overlays/{name}" for name in OVERLAYS)])
def test_kubectl_shows_the_container_that_does_the_work(folder: str) -> None:
    """`kubectl logs POD` and `exec` without -c, where a pod has several containers."""
    template = one(folder, "DaemonSet")["spec"]["template"]
    works = {"census": "modes", "takeover": "takeover"} | dict.fromkeys(
        ("cleanup", "cleanup-drain", "rollback"), "cleanup"
    )
    shown = template["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"]
    assert shown == works.get(Path(folder).name, "hybrid-proxy")
    assert shown in {each["name"] for each in (*template["spec"]["initContainers"], *template["spec"]["containers"])}


def test_the_census_tries_modes_with_the_agents_rights() -> None:
    pod, agents = (one(folder, "DaemonSet")["spec"]["template"]["spec"] for folder in ("overlays/census", "base"))
    profile, modes = pod["initContainers"]
    (copied,) = (each for each in agents["initContainers"] if each["name"] == "seccomp-profile")
    assert profile == copied
    assert modes["securityContext"] == agent_of("base")["securityContext"]
    assert set(volumes_of(pod, modes)) == set(volumes_of(agents, agent_of("base"))) - {"config"}
    args = parser().parse_args(modes["args"])
    assert (args.command, args.output) == ("modes", "json")


def test_the_takeover_finds_the_agent_and_kube_proxys_process() -> None:
    pod = one("overlays/takeover", "DaemonSet")["spec"]["template"]["spec"]
    (takeover,) = pod["initContainers"]
    assert parser().parse_args(takeover["args"]).command == "takeover"
    assert pod["hostPID"], "a kube-proxy that works is seen"
    assert {mount["name"] for mount in takeover["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_a_rollback_waits_for_kube_proxys_first_sync() -> None:
    """Its own script, asking what answers in turn: nobody, our agent, and a kube-proxy that comes to serve."""
    first = one("overlays/rollback", "DaemonSet")["spec"]["template"]["spec"]["initContainers"][0]
    synced, queued = (f"kubeproxy_sync_proxy_rules_last{kind}_timestamp_seconds" for kind in ("", "_queued"))
    both = "".join(f'{queued}{{ip_family="{family}"}} 1.7e+09\n' for family in ("IPv4", "IPv6"))
    four, six = (f'{synced}{{ip_family="{family}"}} 1.7e+09\n' for family in ("IPv4", "IPv6"))
    answers = [f"{four}{six}hybrid_proxy_synced 1\n", f"{queued} 1.7e+09\n{synced} 0\n", both, both + four]
    with answering([*answers, both + four + six]) as (port, left):
        program, flags, script = first["command"]
        assert first["env"] == [{"name": "METRICS", "value": "127.0.0.1:10249"}]
        argv, environment = [program, flags, script.replace("sleep(1)", "sleep(0)")], {"METRICS": f"127.0.0.1:{port}"}
        done = subprocess.run(
            argv, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=True
        )
    assert not left
    assert done.stdout.startswith("waiting for kube-proxy's first sync")


@contextlib.contextmanager
def answering(texts: list[str]) -> Iterator[tuple[int, list[str]]]:
    """An HTTP server that gives these answers, one after the other; its port, and those that are left."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(texts.pop(0).encode())

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, texts
        server.shutdown()


def volumes_of(pod: dict[str, Any], container: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Volume -> where it is in the container, and what it is."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    return {mount["name"]: (mount["mountPath"], volumes[mount["name"]]) for mount in container["volumeMounts"]}


@pytest.mark.parametrize(
    ("of_kube_proxy", "ours"),
    [("", "auto"), ("iptables", "iptables"), ("nftables", "nftables"), ("ipvs", "ipvs")],
    ids=lambda mode: mode or "none",
)
def test_the_overlay_for_kubeadm_keeps_kube_proxys_mode(of_kube_proxy: str, ours: str, tmp_path: Path) -> None:
    """As docs/migration.md says; mode ipvs is then replaced, because its pod is not privileged."""
    text = KUBEADM.read_text()
    file = tmp_path / "config.conf"
    file.write_text(re.sub(r"^mode: .*$", f'mode: "{of_kube_proxy}"', text, flags=re.MULTILINE))
    agent = agent_of("overlays/kubeadm")
    args = parser().parse_args([word.replace("$(NODE_NAME)", "node-1") for word in agent["args"]])
    config = configfile.load(file, vars(args)).config
    assert (config.mode, config.hybrid.strict_mode) == (ours, False)
    assert not agent["securityContext"].get("privileged")


def test_the_service_monitor_finds_the_pods() -> None:
    folder = "base+servicemonitor"
    labels = one(folder, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    service, monitor = one(folder, "Service"), one(folder, "ServiceMonitor")
    assert service["spec"]["selector"].items() <= labels.items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    files = (ROOT / "docs/migration.md", *(DEPLOY / "monitoring").iterdir())
    asked = {name for file in files for name in re.findall(r'\bjob=\\?"([^"\\]*)', file.read_text())}
    assert asked - {"kube-proxy", "something-else"} == {job}
    (port,) = agent_of(folder)["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"] == monitor["spec"]["endpoints"][0]["port"]


def understood(text: str, folder: Path) -> None:
    """Prometheus reads it, beside the alerts; Debian's is built without Kubernetes' discovery."""
    shutil.copy(DEPLOY / "monitoring/alerts.yaml", folder)
    (folder / "config.yaml").write_text(re.sub(r"kubernetes_sd_configs:\n( {6}.*\n)+", "static_configs: []\n", text))
    checked = promtool(folder, "check", "config", "config.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_agents_of_systemd_are_scraped_as_the_same_job_and_kube_proxies_are_not(tmp_path: Path) -> None:
    text = (DEPLOY / "monitoring/prometheus-systemd.yaml").read_text()
    (job,), (pods,) = (
        yaml.safe_load(each)["scrape_configs"] for each in (text, (DEPLOY / "monitoring/prometheus.yaml").read_text())
    )
    rules = job["relabel_configs"]
    assert rules[-1] == {"target_label": "job", "replacement": pods["job_name"]}
    assert pods["relabel_configs"][-1]["target_label"] == rules[-2]["target_label"] == "node"
    term = one("overlays/kubeadm", "DaemonSet")["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    ((kept,),) = (
        each["matchExpressions"] for each in term["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    )
    label = "__meta_kubernetes_node_label_" + re.sub(r"\W", "_", kept["key"])
    assert {"source_labels": [label], "regex": kept["values"][0], "action": "drop"} in rules
    understood(text, tmp_path)


def test_the_scrape_configuration_finds_the_same_pods(tmp_path: Path) -> None:
    text = (DEPLOY / "monitoring/prometheus.yaml").read_text()
    (job,) = yaml.safe_load(text)["scrape_configs"]
    (source,), keep = job["kubernetes_sd_configs"], job["relabel_configs"][0]
    daemonset = one("base+metrics", "DaemonSet")
    assert job["job_name"] == one("base+servicemonitor", "Service")["metadata"]["labels"]["app.kubernetes.io/name"]
    assert source["namespaces"]["names"] == [daemonset["metadata"]["namespace"]]
    name, _, value = source["selectors"][0]["label"].partition("=")
    assert daemonset["spec"]["template"]["metadata"]["labels"][name] == value
    assert keep["regex"] == agent_of("base+metrics")["ports"][0]["name"]
    understood(text, tmp_path)


def test_the_profile_allows_no_call_that_leads_out() -> None:
    profile = json.loads(manifests.SECCOMP.read_text())
    allowed = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("args")
        for name in rule["names"]
    }
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert not allowed & {
        "mount", "umount2", "setns", "unshare", "clone", "clone3", "ptrace", "process_vm_readv", "process_vm_writev",
        "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "keyctl",
        "add_key", "request_key", "perf_event_open", "userfaultfd", "io_uring_setup", "open_by_handle_at", "chroot",
        "pivot_root", "setuid", "setgid", "setreuid", "settimeofday", "clock_settime", "iopl", "ioperm", "mknod",
        "mknodat", "personality", "fsopen", "move_mount", "capset", "syslog", "acct", "quotactl", "bdflush",
    }  # fmt: skip
    for name in sorted(allowed):
        number = _number(name)
        assert number is None or number >= 0, f"libseccomp does not know {name}"


def _number(name: str) -> int | None:
    import ctypes

    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    return int(library.seccomp_syscall_resolve_name(name.encode()))


def test_the_image_has_what_the_manifests_start() -> None:
    recipe = (DEPLOY / "image/Dockerfile").read_text()
    pod = one("base", "DaemonSet")["spec"]["template"]["spec"]
    source = next(word for word in pod["initContainers"][1]["command"] if word.endswith("seccomp.json"))
    assert f"COPY deploy/seccomp/hybrid-proxy.json {source}" in recipe
    assert pod["containers"][0]["args"][0] == "run"
    assert 'ENTRYPOINT ["hybrid-proxy"]' in recipe
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in recipe.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for path in line.split()[1:-1]:
                assert (ROOT / path).exists(), line
                assert any(Path(path).is_relative_to(allowed) for allowed in kept), f".dockerignore hides {path}"


def test_what_the_image_installs_is_pinned_with_hashes() -> None:
    """Every dependency of the project has one exact version, inside its bounds."""
    import tomllib

    from packaging.markers import default_environment
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    text = "".join((DEPLOY / f"image/{name}.txt").read_text() for name in ("requirements", "workshop", "build"))
    entries = [
        re.split(r"\s+\\\n    --hash=sha256:", entry) for entry in re.findall(r"^\w.+\n(?: .+\n)+", text, re.MULTILINE)
    ]
    debian = default_environment() | {"python_version": "3.11", "python_full_version": "3.11.2"}
    pins = [Requirement(entry[0]) for entry in entries]
    exact = {pin.name: str(pin.specifier)[2:] for pin in pins if pin.marker is None or pin.marker.evaluate(debian)}
    assert all(len(hashes) > 1 for hashes in entries)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, build = project["project"]["optional-dependencies"], project["build-system"]["requires"]
    for wanted in map(Requirement, (*project["project"]["dependencies"], *extras["workshop"], *build)):
        found = exact.get(canonicalize_name(wanted.name))
        assert found, f"{wanted.name} has no exact version in deploy/image: `make lock` writes it"
        assert wanted.specifier.contains(found), f"{wanted.name}=={found} is outside {wanted.specifier}: `make lock`"


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd/hybrid-proxy.service").read_text().splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_grants_what_the_daemonset_grants() -> None:
    granted = {name.removeprefix("CAP_") for name in unit()["CapabilityBoundingSet"][0].split()}
    assert granted == set(capabilities("ebpf"))


def test_the_unit_comes_before_the_kubelet_and_waits_for_no_answer() -> None:
    """On a control plane the kubelet starts the API server, so the agent must count as started without it."""
    assert unit()["Before"] == ["kubelet.service"]
    assert unit()["Type"] == ["exec"]


def installed(folder: Path, *drop_ins: Path) -> str:
    """The unit with drop-ins, as systemd would find them, and with a program that is there."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is missing (apt-get install systemd)")
    program, file = folder / "hybrid-proxy", folder / "hybrid-proxy.service"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    source = (DEPLOY / "systemd/hybrid-proxy.service").read_text()
    file.write_text(source.replace("/opt/hybrid-proxy/bin/hybrid-proxy", str(program)))
    (folder / "hybrid-proxy.service.d").mkdir()
    for drop_in in drop_ins:
        shutil.copy(drop_in, folder / "hybrid-proxy.service.d")
    return str(file)


@pytest.mark.parametrize("drop_ins", [(), DROP_INS], ids=["alone", "with its drop-ins"])
def test_systemd_understands_the_unit(drop_ins: tuple[Path, ...], tmp_path: Path) -> None:
    file = installed(tmp_path, *drop_ins)
    verified = _analyze("verify", "--man=no", file)
    assert verified.returncode == 0, verified.stderr
    assert not verified.stderr, verified.stderr
    graded = _analyze("security", "--offline=yes", "--threshold=30", "--no-pager", file)
    assert graded.returncode == 0, graded.stdout[-300:]


def test_systemd_understands_the_renewal_of_credentials(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is missing (apt-get install systemd)")
    program = DEPLOY / "systemd/hybrid-proxy-kubeconfig"
    for name in ("service", "timer"):
        source = program.with_suffix(f".{name}").read_text()
        (tmp_path / f"{program.name}.{name}").write_text(
            source.replace(f"/usr/local/sbin/{program.name}", str(program))
        )
    verified = _analyze("verify", "--man=no", *(str(path) for path in sorted(tmp_path.iterdir())))
    assert (verified.returncode, verified.stderr) == (0, "")
    (when,) = re.findall(r"^OnCalendar=(.*)$", program.with_suffix(".timer").read_text(), re.MULTILINE)
    assert _analyze("calendar", when).returncode == 0


def test_the_drop_in_for_mode_ipvs_lets_it_load_modules_and_set_sysctls(tmp_path: Path) -> None:
    forbidden = []
    for name, drop_ins in (("alone", ()), ("ipvs", DROP_INS)):
        (tmp_path / name).mkdir()
        said = _analyze("security", "--offline=yes", "--json=short", installed(tmp_path / name, *drop_ins))
        forbidden.append({row["name"] for row in json.loads(said.stdout) if row["set"]})
    alone, ipvs = forbidden
    assert alone - ipvs == {
        "ProtectKernelModules=", "ProtectKernelTunables=", "CapabilityBoundingSet=~CAP_SYS_MODULE",
        "CapabilityBoundingSet=~CAP_NET_(BIND_SERVICE|BROADCAST|RAW)", "SystemCallFilter=~@module",
    }  # fmt: skip


def _analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


def test_every_file_below_deploy_is_used() -> None:
    """No manifest that no kustomization names."""
    for file in DEPLOY.glob("[boc]*/**/kustomization.yaml"):
        kustomization: dict[str, Any] = yaml.safe_load(file.read_text())
        named = {"kustomization.yaml", *kustomization.get("resources", ())}
        named |= {file for maker in kustomization.get("configMapGenerator", ()) for file in maker["files"]}
        assert {path.name for path in file.parent.iterdir() if path.is_file()} <= named
