"""The waves of docs/migration.md: its own commands, typed by the real kubectl at a cluster of many nodes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.deploy import helm, manifests
from tests.deploy.promtool import answered
from tests.fakes.cluster import NOT_READY, READY, Cluster

from ..pages import ROOT, blocks, table

PAGE = "docs/migration.md"
GATES = {title: (row["query"].strip("`"), row["must be"]) for title, row in table(PAGE, "| gate |").items()}
WAVES = {1: 1, 2: 5, 3: 14, 4: 2}  # nodes: the third takes what there is, the last the control plane and Windows
KUBE_PROXY = """
{kind: DaemonSet, apiVersion: apps/v1, metadata: {name: kube-proxy, namespace: kube-system}, spec: {
  selector: {matchLabels: {k8s-app: kube-proxy}}, updateStrategy: {type: RollingUpdate}, template: {
    metadata: {labels: {k8s-app: kube-proxy}},
    spec: {nodeSelector: {kubernetes.io/os: linux}, tolerations: [{operator: Exists}], containers: []}}}}
"""
# What an agent exports, all well and all ill.
AGENT = {
    "hybrid_proxy_synced{": ("1", "0"),
    'hybrid_proxy_mode{degraded="true",': ("0", "1"),
    "hybrid_proxy_configuration_refused{": ("0", "1"),
    "hybrid_proxy_source_up{": ("1", "0"),
    "hybrid_proxy_unprogrammed{": ("0", "1"),
    "hybrid_proxy_sync_failures_total{": ("0", "0+1"),
    'hybrid_proxy_events_total{reason="drop_no_route",': ("0", "0+600"),
    'hybrid_proxy_health_check_node_ports{state="failed",': ("0", "1"),
}
CHANGES, FIRST = (
    "kubeproxy_network_programming_duration_seconds_bucket{",
    "hybrid_proxy_service_first_packet_seconds_bucket{",
)
for name in (f'{CHANGES}job="kube-proxy",', f'{CHANGES}job="hybrid-proxy",', FIRST):
    AGENT |= {f'{name}le="{le}",': ("0+60", "0+60") for le in ("0.002", "+Inf")}
    AGENT[f'{name}le="0.001",'] = ("0+60", "0+60" if '"kube-proxy"' in name else "0")
# What a gate says -> a query that is empty while it holds; `n` agents, whose p99 is 0.99 ms before.
FAILS = {
    "empty": "{query}",
    "the number of nodes with an agent": "absent(({query}) == {n})",
    "at most 1.5 times that before the wave": "({query}) > 1.5 * 0.00099",
}


class Walk:
    """A shell before a cluster; after each command every node has one proxy, and helpers only where they belong."""

    def __init__(self, folder: Path) -> None:
        self.cluster, self.folder = Cluster(), folder
        (folder / "deploy").symlink_to(ROOT / "deploy")
        for name in ("cp", *(f"worker{n}" for n in range(1, 21)), "windows"):
            labels = {"kubernetes.io/os": "windows" if name == "windows" else "linux"}
            node = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}, "spec": {}}
            node["status"] = {"conditions": [READY]}
            if name == "cp":
                labels["node-role.kubernetes.io/control-plane"] = ""
                node["spec"] = {"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]}
            self.cluster.put("nodes", node)
        self.nodes = self.cluster.objects["nodes"].keys() - {"windows"}
        self.cluster.put("daemonsets", yaml.safe_load(KUBE_PROXY))
        program = folder / "kubectl"  # there is no schema to check fields with: tests/deploy does that
        unchecked = '[ $1 = apply ] && set -- "$@" --validate=false'
        program.write_text(f'#!/bin/sh\n{unchecked}\nexec {manifests.kubectl()} --server={self.cluster.url} "$@"\n')
        program.chmod(0o755)

    def shell(self, line: str) -> None:
        environment = os.environ | {"PATH": f"{self.folder}:{os.environ['PATH']}"}
        done = subprocess.run(["sh", "-c", line], cwd=self.folder, env=environment, text=True, timeout=60,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stdout}"

    def pods(self, daemonset: str) -> set[str]:
        return set(self.cluster.pods(daemonset))

    def type(self, name: str, wave: int = 1, change: Callable[[str], str] = str) -> None:
        found = [line for block in blocks(PAGE, "sh", "cluster", name) for line in block.lines]
        assert found, name
        for line in found:
            self.shell(change(line) if wave == 1 else change(line).replace("wave=1", f"wave={wave}"))
            self.look(line)

    def look(self, line: str) -> None:
        wanted = {name: set(self.cluster.wanted(each)) for name, each in self.cluster.objects["daemonsets"].items()}
        ours, theirs = wanted.get("hybrid-proxy", set()), wanted["kube-proxy"]
        assert not ours & theirs, f"{line}: two proxies"
        assert ours | theirs == self.nodes, f"{line}: no proxy"
        for name, nodes in wanted.items():
            if re.search(rf" (wait|rollout status) daemonset/{name}\b(?!-)", line):
                assert self.pods(name) == nodes, f"{line}: it does not wait"
        assert self.pods("hybrid-proxy-takeover") <= self.pods("hybrid-proxy"), line
        assert self.pods("hybrid-proxy-cleanup") <= self.pods("kube-proxy"), line

    def failing(self, ill: set[str]) -> set[str]:
        """The gates of the page that fail while these agents are ill."""
        agents = self.pods("hybrid-proxy")
        series = [
            {"series": f'{name}instance="{agent}"}}', "values": f"{values[agent in ill]}x30"}
            for name, values in AGENT.items()
            for agent in agents
        ]
        failures = {title: FAILS[must].format(query=query, n=len(agents)) for title, (query, must) in GATES.items()}
        return answered(self.folder, failures, series)


def test_wave_after_wave_with_an_abort(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    walk.type("census")
    lines = (tmp_path / "census.txt").read_text().splitlines()
    assert {line.split("/")[1].removeprefix("hybrid-proxy-census-") for line in lines} == walk.nodes
    walk.type("labels")
    waves = [node["metadata"]["labels"]["hybrid-proxy.io/wave"] for node in walk.cluster.objects["nodes"].values()]
    assert {wave: waves.count(str(wave)) for wave in WAVES} == WAVES
    walk.type("start")
    for wave in WAVES:
        before = walk.pods("hybrid-proxy")
        walk.type("wave", wave)
        ill = min(walk.pods("hybrid-proxy") - before)
        if wave == 2:
            assert walk.failing({ill}) == GATES.keys()
            walk.type("rollback", wave)
            assert walk.pods("hybrid-proxy") == before
            walk.type("wave", wave)
        assert len(walk.pods("hybrid-proxy")) == sum(list(WAVES.values())[:wave]) - (wave == 4)  # Windows
        assert not walk.failing(set())
        walk.type("takeover")
    for wave in reversed(WAVES):
        walk.type("rollback", wave)
    walk.type("back")
    assert (walk.pods("kube-proxy"), walk.pods("hybrid-proxy")) == (walk.nodes, set())


@pytest.mark.parametrize("block", ["wave", "rollback"])
def test_rollout_status_would_return_before_a_wave_is_done(block: str, tmp_path: Path) -> None:
    """Why the page waits for a number: the walk sees a wait that ends too early."""
    walk = Walk(tmp_path)
    for name in ("labels", "start", "wave"):
        walk.type(name)
    with pytest.raises(AssertionError, match="it does not wait"):
        walk.type(block, 1 + (block == "wave"), lambda line: re.sub(r" wait (\S+) .*", r" rollout status \1", line))


def test_a_node_that_is_not_ready_holds_up_no_wave(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    for name in ("labels", "start", "wave"):
        walk.type(name)
    waves = ((name, node["metadata"]["labels"]) for name, node in sorted(walk.cluster.objects["nodes"].items()))
    ill = next(name for name, labels in waves if labels["hybrid-proxy.io/wave"] == "2")
    walk.cluster.objects["nodes"][ill]["status"] = {"conditions": [NOT_READY]}
    walk.type("wave", 2)
    walk.type("rollback", 2, lambda line: line if " wait " in line or " label " in line else "true")


def test_the_chart_gives_way_to_the_same_label(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    walk.type("labels")
    chart = next(line for block in blocks("deploy/README.md", "sh") for line in block.lines if "ConfigMap=" in line)
    walk.shell(chart.replace("helm upgrade --install", f"{helm.program()} template") + " | kubectl apply -f -")
    walk.type("wave")
    walk.type("wave", 2)
