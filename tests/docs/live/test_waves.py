"""The waves of docs/migration.md: its own commands, typed by the real kubectl at a cluster of many nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from hybrid_proxy.controller.settings import configfile
from hybrid_proxy.workshop.lab.apiserver import parse_selector
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import ask_tcp
from tests.deploy import helm, manifests
from tests.deploy.promtool import answered
from tests.fakes.cluster import NOT_READY, READY, Cluster, Execute
from tests.waiting import bound, until

from ..kit import start_agent
from ..pages import ROOT, blocks, tree

PAGE = "docs/migration.md"
(QUERIES,) = re.findall(r"^```promql\n(.*?)^```", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL)
GATES = {
    title: (query, must) for title, must, query in re.findall(r"^# (.*): ([^;\n]*).*\n(.*)$", QUERIES, re.MULTILINE)
}
# Nodes: the third takes what there is, then Windows, then the control plane.
WAVES = {"1": 1, "2": 5, "3": 14, "4": 1, "5-1": 1}
KUBE_PROXY = """
{kind: DaemonSet, apiVersion: apps/v1, metadata: {name: kube-proxy, namespace: kube-system}, spec: {
  selector: {matchLabels: {k8s-app: kube-proxy}}, updateStrategy: {type: RollingUpdate}, template: {
    metadata: {labels: {k8s-app: kube-proxy}},
    spec: {nodeSelector: {kubernetes.io/os: linux}, tolerations: [{operator: Exists}], containers: []}}}}
"""
CONFIG_MAP = """
{kind: ConfigMap, apiVersion: v1, metadata: {name: kube-proxy, namespace: kube-system},
  data: {config.conf: "mode: iptables", kubeconfig.conf: "server: https://10.0.0.1:6443"}}
"""
WAITS = r"sh deploy/monitoring/wait.sh \S+={} '?([^' ]+)"
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
    AGENT[f'{name}le="0.001",'] = ("0+60", "0+60" if '"kube-proxy"' in name else "0")
    AGENT |= {f'{name}le="{le}",': ("0+60", "0+60") for le in ("0.002", "+Inf")}
# What a gate says -> a query that is empty while it holds; `n` agents, whose p99 is 0.99 ms before.
FAILS = {
    "empty": "{query}",
    "the number of nodes with an agent": "absent(({query}) == {n})",
    "at most 1.5 times that before the wave": "({query}) > 1.5 * 0.00099",
}


def typed(name: str) -> list[str]:
    """The commands of a block of the page."""
    found = [line for block in blocks(PAGE, "sh", "cluster", *name.split()) for line in block.lines]
    assert found, name
    return found


@contextmanager
def answers(text: str) -> Iterator[str]:
    """An address that answers one request: 200 and what an agent exports, or 500."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if text.endswith("\n") else 500, text if len(text) < 20 else None)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request).start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"


class Walk:
    """A shell before a cluster; after each command every node has one proxy, and helpers only where they belong."""

    def __init__(self, folder: Path, execute: Execute | None = None, workers: int = 20) -> None:
        self.cluster, self.folder, self.agents = Cluster(execute), tree(folder), folder / "agents"
        self.agents.mkdir()
        for name in ("cp", *(f"worker{n}" for n in range(1, workers + 1)), "windows"):
            labels = {"kubernetes.io/os": "windows" if name == "windows" else "linux"}
            node = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}, "spec": {}}
            node["status"] = {"conditions": [READY]}
            if name == "cp":
                labels["node-role.kubernetes.io/control-plane"] = ""
                node["spec"] = {"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]}
            self.cluster.put("nodes", node)
        self.nodes = self.cluster.objects["nodes"].keys() - {"windows"}
        self.cluster.put("daemonsets", yaml.safe_load(KUBE_PROXY))
        # There is no schema to check fields with: tests/deploy does that.
        unchecked = '[ $1 = apply ] && set -- "$@" --validate=false'
        self.program("kubectl", f'{unchecked}\nexec {manifests.kubectl()} --server={self.cluster.url} "$@"')

    def has_the_chart(self) -> None:
        """From here on. A release is what its objects are."""
        (values,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL)
        (self.folder.parent / "site/values.yaml").write_text(values)
        install = f'shift 2; {helm.program()} template "$@" | tee "{self.folder.parent}/$1.made" | kubectl apply -f -'
        remove = f'kubectl delete -f "{self.folder.parent}/$2.made"'
        self.program("helm", f'case "$1 $2" in "upgrade --install") {install} ;; "uninstall "*) {remove} ;; esac')

    def program(self, name: str, text: str) -> None:
        program = self.folder.parent / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    def shell(self, line: str, code: int = 0, **variables: str) -> str:
        environment = os.environ | {"PATH": f"{self.folder.parent}:{os.environ['PATH']}"} | variables
        done = subprocess.run(["sh", "-c", line], cwd=self.folder, env=environment, text=True, timeout=bound(60),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)  # fmt: skip
        assert done.returncode == code, f"{line}: {done.stdout}"
        return done.stdout

    def pods(self, daemonset: str) -> set[str]:
        return set(self.cluster.pods(daemonset))

    def type(self, name: str, wave: int | str = 1, change: Callable[[str], str] = str) -> str:
        said = ""
        for line in typed(name):
            made = change(line)
            for_nobody = re.search("wait.sh .*=[$]wave", made) and not self.nodes & self.labelled("wave", str(wave))
            said = self.shell(made, 1 if for_nobody else 0, wave=str(wave))
            self.look(made.replace("$wave", str(wave)))
            if "=hybrid-proxy-cleanup " in made:
                assert self.pods("hybrid-proxy-cleanup") == self.nodes & self.labelled("wave", str(wave)), line
        return said

    def reaches_nodes(self) -> None:
        """From here on ssh leads to shells of nodes: as root, or as LOGIN, who has sudo."""
        tools = self.folder.parent / "node"
        tools.mkdir()
        for name, text in NODE.items():
            self.program(f"node/{name}", text)
        (self.folder.parent / "exported").write_text(exported("-", 10))
        shell = f'export N="${{3#*@}}" A={self.agents} PATH="{tools}:$PATH"; shift 3; exec sh -c "$*"'
        self.program("ssh", f'[ "$1 $2 ${{3%@*}}" = "-o BatchMode=yes ${{LOGIN:-root}}" ] || exit 255\n{shell}')

    def services(self) -> set[str]:
        """The nodes where an agent of systemd runs."""
        return {path.name for path in self.agents.iterdir()}

    def labelled(self, name: str, value: str) -> set[str]:
        nodes = self.cluster.objects["nodes"].items()
        return {node for node, each in nodes if each["metadata"]["labels"].get(f"hybrid-proxy.io/{name}") == value}

    def look(self, line: str) -> None:
        wanted = {name: set(self.cluster.wanted(each)) for name, each in self.cluster.objects["daemonsets"].items()}
        ours, theirs = wanted.get("hybrid-proxy", set()) | self.services(), wanted["kube-proxy"]
        assert not ours & theirs, f"{line}: two proxies"
        assert ours | theirs == self.nodes, f"{line}: no proxy"
        for name, nodes in wanted.items():
            if re.search(rf" rollout status daemonset/{name}\b(?!-)", line):
                assert self.pods(name) == nodes, f"{line}: it does not wait"
            if found := re.match(WAITS.format(name), line):
                selects, each = parse_selector(found[1]), self.cluster.objects["nodes"]
                selected = {node for node in nodes if selects(each[node]["metadata"]["labels"])}
                assert self.pods(name) >= selected, f"{line}: it does not wait"
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


def test_the_census_counts_nodes_beside_one_without_a_log(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    modes = ["unshare", "--net", sys.executable, "-m", "hybrid_proxy.controller", "modes", "-o", "json"]
    walk.cluster.log = subprocess.run(modes, capture_output=True, text=True, check=True).stdout
    walk.cluster.waiting = {"hybrid-proxy-census-worker3"}
    counted = walk.type("census").splitlines()
    logs, pods = ((walk.folder / f"{name}.txt").read_text() for name in ("census", "census-pods"))
    names = re.findall(r"^\[pod/hybrid-proxy-census-(\w+)/modes\] \[$", logs, re.MULTILINE)
    assert set(names) == walk.nodes - {"worker3"}
    assert ["hybrid-proxy-census-worker3", "worker3"] in [line.split() for line in pods.splitlines()]
    rows = [["20", f"{each['mode']}: {each['missing'] or 'works'}"] for each in json.loads(walk.cluster.log)]
    assert sorted(line.split(maxsplit=1) for line in counted) == sorted(rows)


def test_the_way_back_is_kept_outside_of_the_tree(tmp_path: Path) -> None:
    """An upgrade replaces the tree (docs/operations.md); what kube-proxy was must outlive that."""
    walk = Walk(tmp_path)
    walk.cluster.put("configmaps", yaml.safe_load(CONFIG_MAP))
    before = set(walk.folder.rglob("*"))
    walk.shell("rm -r ../site")  # where the agents are services of systemd, nothing has made it
    walk.type("save")
    assert set(walk.folder.rglob("*")) == before
    saved = [
        yaml.safe_load((tmp_path / f"site/kube-proxy-{kind}.yaml").read_text()) for kind in ("daemonset", "configmap")
    ]
    assert [each["kind"] for each in saved] == ["DaemonSet", "ConfigMap"]
    assert saved[0]["spec"] == walk.cluster.objects["daemonsets"]["kube-proxy"]["spec"]


def test_services_of_systemd_have_kube_proxys_settings(tmp_path: Path) -> None:
    """As kubeadm writes them, and as the page's own command turns them."""
    walk = Walk(tmp_path)
    config = """apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
conntrack: {maxPerCore: 1000}
kind: KubeProxyConfiguration
mode: nftables
nodePortAddresses: [10.0.0.0/8]
"""
    walk.cluster.put("configmaps", yaml.safe_load(CONFIG_MAP) | {"data": {"config.conf": config}})
    for line in typed("services config"):
        walk.shell(line)
    unit = (ROOT / "deploy/systemd/hybrid-proxy.service").read_text()
    assert re.findall(r"^ExecStart=.* --config (.*)/config\.conf$", unit, re.MULTILINE) == ["/etc/hybrid-proxy"]
    file = tmp_path / "site/config.conf"
    expected = yaml.safe_load(config)
    expected["clientConnection"]["kubeconfig"] = "/etc/hybrid-proxy/kubeconfig.conf"
    assert yaml.safe_load(file.read_text()) == expected
    loaded = configfile.load(file, {}).config.kube_proxy
    assert (loaded.cluster_cidr, loaded.node_port_addresses) == (("10.244.0.0/16",), ("10.0.0.0/8",))
    assert configfile.load(file, {}).config.mode == "nftables"
    (block,) = blocks(PAGE, "sh", "config", "auto")
    walk.shell("\n".join(block.lines))
    auto = configfile.load(file, {}).config
    assert (auto.mode, auto.kube_proxy.cluster_cidr) == ("auto", ("10.244.0.0/16",))


def exported(ill: str, minute: int) -> str:
    """What an agent exports at this minute; the gate of one of these series fails."""
    series = {name: values for name, values in AGENT.items() if not name.startswith(CHANGES)}
    series |= {f'{CHANGES}le="{le}",': ("0+60", "0" if le == "30.0" else "0+60") for le in ("30.0", "+Inf")}
    lines = []
    for name, values in series.items():
        start, _, step = values[name.startswith(ill)].partition("+")
        lines.append(f"{name.rstrip(',{')}{'}' * ('=' in name)} {int(start) + minute * int(step or 0)}\n")
    return "".join(lines)


def test_gates_without_prometheus(tmp_path: Path) -> None:
    """A node for each gate, one for an agent that restarted, one without an agent, one whose agent does not answer."""
    looks: Counter[str] = Counter()
    gates = dict(zip((*[name for name in AGENT if "_bucket" not in name], CHANGES, FIRST), GATES, strict=True))
    nodes = {f"worker{n}": name for n, name in enumerate(gates, 1)}
    minutes = defaultdict(lambda: (10, 15), worker11=(10, 5))

    def execute(node: str, argv: list[str]) -> subprocess.CompletedProcess[bytes]:
        looks[node] += 1
        text = exported(nodes.get(node, "-"), minutes[node][looks[node] - 1])
        with answers("no answer" if node == "worker13" else text) as address:
            assert argv[-1] == "http://127.0.0.1:10249/metrics"
            return subprocess.run([sys.executable, *argv[1:-1], address], capture_output=True, check=False)

    walk = Walk(tmp_path, execute)
    walk.type("labels")
    walk.type("start")
    walk.shell("kubectl label nodes --all --overwrite hybrid-proxy.io/wave=1")
    walk.type("wave")
    del walk.cluster.objects["pods"]["hybrid-proxy-worker12"]
    (line,) = typed("gates")
    first, *said = walk.shell(f"{line} 1 0.0015", 1, wave="1").splitlines()
    assert first.startswith(f"gates: {len(walk.nodes)} nodes")
    found = {row.split()[1].rstrip(":,"): row for row in said}
    assert found.keys() == walk.nodes
    for node, row in found.items():
        failed = row.partition(": ")[2].rpartition(", first packets p99")[0] if row.startswith("FAIL") else ""
        if node in nodes:
            assert failed, row
            assert gates[nodes[node]].startswith(failed), row
        elif node in ("worker12", "worker13"):
            why = "no pod of an agent" if node == "worker12" else "no answer"
            assert failed.startswith("they serve: "), row
            assert why in failed
        else:
            assert row == f"PASS {node}, first packets p99 0.001"
    walk.shell("kubectl label node worker14 --overwrite hybrid-proxy.io/wave=2")
    looks.clear()
    assert walk.shell(f"{line} 1", wave="2").endswith("s\nPASS worker14, first packets p99 0.001\n")


def test_the_gates_of_an_agent_that_serves(lab: Lab, tmp_path: Path) -> None:
    def execute(_: str, argv: list[str]) -> subprocess.CompletedProcess[bytes]:
        done = lab.run("node", [sys.executable, *argv[1:]])
        return subprocess.CompletedProcess(argv, done.returncode, done.stdout.encode(), done.stderr.encode())

    walk = Walk(tmp_path, execute)
    for name in ("labels", "start", "wave"):
        walk.type(name)
    gates = "sh deploy/monitoring/gates.sh hybrid-proxy.io/wave=1"
    agent = start_agent(lab, "ebpf")
    try:
        with ThreadPoolExecutor() as pool:
            said = pool.submit(walk.shell, f"{gates} 10")
            while not said.done():
                with lab.socket("pod4") as connection:
                    connection.connect(("10.96.0.10", 80))
                    ask_tcp(connection)
        assert re.search(r"^PASS worker1, first packets p99 [\de.-]+$", said.result(), re.MULTILINE)
    finally:
        agent.terminate()
        agent.wait(60)
    assert "Connection refused" in walk.shell(f"{gates} 1", 1)


@pytest.mark.parametrize("way", ["kustomizations", "chart"])
def test_wave_after_wave_with_an_abort(way: str, tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    if way == "chart":
        walk.has_the_chart()
    walk.type("labels")
    shown = walk.shell(next(line for line in typed("labels") if " -L " in line)).splitlines()
    assert {line.split()[-1] for line in shown[1:]} == WAVES.keys()
    waves = [node["metadata"]["labels"]["hybrid-proxy.io/wave"] for node in walk.cluster.objects["nodes"].values()]
    assert Counter(waves) == WAVES
    walk.type("start")
    for n, wave in enumerate(WAVES, 1):
        before = walk.pods("hybrid-proxy")
        assert not walk.type("wave", wave), "a kube-proxy still runs"
        if wave == "2":
            ill = min(walk.pods("hybrid-proxy") - before)
            assert walk.failing({ill}) == GATES.keys()
            for _ in range(2):  # the second time after a timeout
                walk.type("rollback", wave)
            assert walk.pods("hybrid-proxy") == before
            walk.type("wave", wave)
        assert len(walk.pods("hybrid-proxy")) == sum(list(WAVES.values())[:n]) - (n >= 4)  # Windows
        assert not walk.failing(set())
        walk.type("takeover")
    walk.shell("kubectl label node worker3 hybrid-proxy.io/wave-")  # as one that joined later
    walk.type("late")
    for wave in (*reversed(WAVES), "0"):
        walk.type("rollback", wave)
    assert not walk.labelled("rollback", "yes")
    walk.type("back")
    assert (walk.pods("kube-proxy"), walk.pods("hybrid-proxy")) == (walk.nodes, set())


# What a node's shell finds: an agent of systemd runs where there is a file; kube-proxy has synced when it was
# asked before. Flows are open on each node until the command has begun on all nodes of its wave.
NODE = {
    "systemctl": """case "$*" in
            "enable -q --now hybrid-proxy") : >"$A/$N" ;;
            "disable -q --now hybrid-proxy") rm -f "$A/$N" ;;
        esac""",
    "sudo": '[ "$1 ${LOGIN:-root}" = "-n admin" ] || exit 1\nshift; exec "$@"',
    "beside": "kubectl get pods -n kube-system -l k8s-app=kube-proxy -o wide | grep -qw $N",
    "hybrid-proxy": """case "$*" in
            status*) [ "$N" != "$ILL" ] && [ -e "$A/$N" ] && echo "OK: serves" ;;
            takeover) [ -e "$A/$N" ] && ! beside && waits takeover ;;
            "cleanup --drain") [ ! -e "$A/$N" ] && beside && [ -e "$A/../$N.asked" ] && waits cleanup ;;
            *) false ;;
        esac""",
    "waits": """: >"$A/../$N.$wave.$1"
        for _ in $(seq 300); do
            set -- "$1" "$A"/../*."$wave.$1"
            [ $# -le "${BESIDE:-0}" ] || exit 0
            sleep 0.1
        done
        echo "it did not begin on all nodes"
        exit 1""",
    "python3": """if [ "$1" = - ]; then [ -e "$A/$N" ] && cat "$A/../exported"; exit; fi
        beside || exit 1
        name=kubeproxy_sync_proxy_rules_last
        echo "${name}_queued_timestamp_seconds{ip_family=\\"IPv4\\"} 1e9"
        [ ! -e "$A/../$N.asked" ] || echo "${name}_timestamp_seconds{ip_family=\\"IPv4\\"} 1e9"
        : >"$A/../$N.asked" """,
}


def test_wave_after_wave_with_services_of_systemd(tmp_path: Path) -> None:
    """In the place of pods, by ssh: the page's blocks, an agent that does not start, and an abort."""
    walk = Walk(tmp_path)
    walk.reaches_nodes()

    def type_service(name: str, wave: str, ill: str = "") -> str:
        said = ""
        for line in typed(f"services {name}"):
            failed = (ill or wave == "4") and ".sh " in line  # the fourth has no node of Linux
            said += walk.shell(
                line + " 1" * (name == "gates"),
                int(bool(failed)),
                wave=wave,
                ILL=ill,
                LONGEST="1" if ill else "60",
                BESIDE=str(len(walk.nodes & walk.labelled("wave", wave))),
                **login,
            )
        walk.look(name)
        return said

    walk.type("labels")
    login: dict[str, str] = {}
    for wave, nodes in WAVES.items():
        linux = nodes * (wave != "4")
        if wave == "2":
            assert "worker11: FAILED (1)" in type_service("wave", wave, "worker11")
            type_service("rollback", wave)
            assert walk.services() == walk.labelled("wave", "1")
            for path in tmp_path.glob("*.asked"):
                path.unlink()
        said = type_service("wave", wave)
        assert len(re.findall(r"^\w+: OK: serves$", said, re.MULTILINE)) == linux
        until(lambda: not walk.shell(typed("wave")[-1], wave=wave), "no kube-proxy of the wave still runs")  # noqa: B023
        assert type_service("gates", wave).count("PASS ") == linux
        type_service("takeover", wave)
        login = {"LOGIN": "admin"}
    assert (walk.services(), walk.pods("kube-proxy")) == (walk.nodes, set())
    for wave in reversed(WAVES):
        type_service("rollback", wave)
    _, *lines = typed("back")
    for line in lines:
        walk.shell(line)
    assert (walk.services(), walk.pods("kube-proxy")) == (set(), walk.nodes)


@pytest.mark.parametrize("kind", ["", "services"])
def test_the_machines_of_vagrant_rehearse_the_page(kind: str, tmp_path: Path) -> None:
    """Its own demo.sh, on three nodes: it types what the page has, and the second worker goes back in between."""
    looks: Counter[str] = Counter()

    def execute(node: str, argv: list[str]) -> subprocess.CompletedProcess[bytes]:
        looks[node] += 1
        return subprocess.CompletedProcess(argv, 0, exported("-", 10 + 5 * looks[node]).encode(), b"")

    walk = Walk(tmp_path, execute)
    for name in (walk.nodes - {"cp", "worker1", "worker2"}) | {"windows"}:
        del walk.cluster.objects["nodes"][name]
    walk.nodes = {"cp", "worker1", "worker2"}
    walk.cluster.put("configmaps", yaml.safe_load(CONFIG_MAP))
    demo = f'set -e; . {ROOT}/vagrant/demo.sh; on() {{ cat >"{tmp_path}/$1 $2 $(basename $3)"; }}; in_folder'
    settings = {
        "DEMO_SOURCED": "yes",
        "NODES": " ".join(sorted(walk.nodes)),
        "SOURCE": str(ROOT),
        "GATES": "1",
        "LOGIN": "admin",
        "ILL": "",
    }
    walk.reaches_nodes()

    def rehearsed(way: str, *steps: str) -> str:
        said = walk.shell(f"{demo} {way} {kind}", **settings)
        found = [(name, [name] if "=" in name else typed(name)[bool(kind) * (name == "back") :]) for name in steps]
        expected = [line + " 1" * name.endswith("gates") for name, lines in found for line in lines]
        assert re.findall(r"^\$ (.*)$", said, re.MULTILINE) == expected
        return said

    wave, gates, takeover, rollback = (f"{kind} {name}".strip() for name in ("wave", "gates", "takeover", "rollback"))
    pods = (["census"], ["start"]) if not kind else ([], ["services config"])
    said = rehearsed(
        "waves", *pods[0], "labels", *pods[1], "wave=1", wave, gates, takeover,
        "wave=2", wave, gates, rollback, wave, gates, takeover, "wave=5-1", wave, gates, takeover,
    )  # fmt: skip
    assert re.findall(r"^PASS (\w+),", said, re.MULTILINE) == ["worker1", "worker2", "worker2", "cp"]
    assert (walk.pods("hybrid-proxy") | walk.services(), walk.pods("kube-proxy")) == (walk.nodes, set())
    configured = [(tmp_path / f"{node} tee config.conf") for node in walk.nodes]
    assert [path.exists() for path in configured] == [bool(kind)] * len(configured)
    for path in configured * bool(kind):
        assert path.read_text() == "mode: iptables", "kube-proxy's settings"
    rehearsed("unwind", "wave=5-1", rollback, "wave=2", rollback, "wave=1", rollback, "back")
    assert (walk.pods("hybrid-proxy") | walk.services(), walk.pods("kube-proxy")) == (set(), walk.nodes)


def test_the_operator_gets_the_alerts(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    walk.type("alerts")
    (rule,) = walk.cluster.objects["prometheusrules"].values()
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/monitoring/alerts.yaml").read_text())
    monitor = yaml.safe_load_all((ROOT / "deploy/components/servicemonitor/servicemonitor.yaml").read_text())
    assert rule["metadata"]["labels"].items() <= list(monitor)[-1]["metadata"]["labels"].items()
    walk.type("silence")
    assert not walk.cluster.objects["prometheusrules"]


def test_an_alert_that_no_agent_answers_is_loaded_between_agents() -> None:
    page = (ROOT / PAGE).read_text()
    steps = [
        page.index(f"```sh cluster {name}\n") for name in ("start", "wave", "alerts", "rollback", "silence", "back")
    ]
    assert steps == sorted(steps)


def test_no_wave_has_more_than_fifty_workers_or_two_control_planes(tmp_path: Path) -> None:
    walk = Walk(tmp_path, workers=170)
    walk.cluster.objects["nodes"]["worker170"]["metadata"]["labels"]["node-role.kubernetes.io/control-plane"] = ""
    for name in ("list", "waves", "rest"):
        for line in typed(f"labels {name}"):
            walk.shell(line)
    counted = Counter(
        node["metadata"]["labels"]["hybrid-proxy.io/wave"] for node in walk.cluster.objects["nodes"].values()
    )
    expected = {"1": 1, "2": 5, "3": 50, "4-1": 50, "4-2": 50, "4-3": 13, "4": 1, "5-1": 1, "5-2": 1}  # 4: Windows
    assert counted == expected


def test_the_first_gate_sees_that_nothing_is_scraped(tmp_path: Path) -> None:
    queries = {title: FAILS[must].format(query=query, n=3) for title, (query, must) in GATES.items()}
    assert answered(tmp_path, queries, []) == {next(iter(GATES))}


def test_nodes_that_join_later_get_a_wave(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    walk.type("labels")
    for name in ("worker3", "cp"):
        walk.shell(f"kubectl label node {name} hybrid-proxy.io/wave-")
    listed, *labels = typed("labels rest")
    assert re.findall(r"^(cp|worker\d+)", walk.shell(listed), re.MULTILINE) == ["cp", "worker3"]
    for line in labels:
        walk.shell(line)
    assert "worker3" in walk.labelled("wave", "4")
    assert walk.labelled("wave", "5") == {"cp"}


def test_back_undoes_the_strategy(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    walk.type("pace")

    def strategy() -> object:
        return walk.cluster.objects["daemonsets"]["kube-proxy"]["spec"]["updateStrategy"]["rollingUpdate"]

    assert strategy() == {"maxUnavailable": "10%"}
    walk.type("strategy")
    assert strategy() == {"maxUnavailable": 1}


def test_no_agent_begins_before_its_wave(tmp_path: Path) -> None:
    """A node without the label: nothing is applied. One that joins in that second gets an agent, and goes back."""
    walk = Walk(tmp_path)
    walk.type("labels")
    walk.shell("kubectl label node worker7 hybrid-proxy.io/kube-proxy- hybrid-proxy.io/wave-")
    start, counted, shown = typed("start")
    assert walk.shell(start, 1).split()[-1] == "node/worker7"
    assert "hybrid-proxy" not in walk.cluster.objects["daemonsets"]
    walk.shell("kubectl apply -k ../site/kubeadm")
    walk.shell(counted)
    assert walk.shell(shown).split() == ["DESIRED", "1"], "not what it is before the controller has counted"
    walk.shell("kubectl -n kube-system rollout status daemonset/hybrid-proxy")
    assert walk.pods("hybrid-proxy") == {"worker7"}
    walk.type("joined", 0)
    walk.type("rollback", 0)
    assert (walk.pods("kube-proxy"), walk.pods("hybrid-proxy")) == (walk.nodes, set())


def test_a_small_cluster_has_waves_without_nodes(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    for name in walk.nodes - {"worker1", "worker2"}:
        del walk.cluster.objects["nodes"][name]
    lines = [line for line in typed("labels") if re.search(r">workers.txt|wave=[123]", line)]
    for line in lines[:-1]:
        walk.shell(line)
    said = walk.shell(lines[-1], 1)
    (sign,) = re.findall(r"^- ✗ `(.*?)`: no lines are left", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert sign in said
    assert [len(walk.labelled("wave", wave)) for wave in "123"] == [1, 1, 0]


def test_no_kube_proxy_ends_while_a_node_has_no_label(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    *labels, patch = typed("labels")
    for line in labels:
        walk.shell(line)
    walk.shell("kubectl label node worker7 hybrid-proxy.io/kube-proxy-")
    assert walk.shell(patch, 1).split()[-1] == "node/worker7"
    assert walk.pods("kube-proxy") <= walk.nodes
    assert "hybrid-proxy.io/kube-proxy" not in str(walk.cluster.objects["daemonsets"]["kube-proxy"])
    walk.shell("kubectl label node worker7 hybrid-proxy.io/kube-proxy=yes")
    for verb in ("get", "patch"):  # the API does not answer; it refuses the patch
        said = walk.shell(
            f"""kubectl() {{ case "$*" in *{verb}*) false ;; *) command kubectl "$@" ;; esac; }}; {patch}""", 1
        )
        assert not said, "neither STOP nor a rollout"
    assert "successfully rolled out" in walk.shell(patch)


def test_a_wave_names_the_nodes_whose_kube_proxy_still_runs(tmp_path: Path) -> None:
    """Somebody removed the selector, as `kubeadm upgrade` does."""
    walk = Walk(tmp_path)
    walk.type("labels")
    walk.type("start")
    walk.shell(next(line for line in typed("back") if " patch " in line))
    walk.shell(next(line for line in typed("back") if " rollout status " in line))
    label, wait, check = typed("wave")
    walk.shell(label, wave="1")
    walk.shell(wait, wave="1")
    assert walk.shell(check, wave="1") == "worker1\n"


def test_metrics_come_before_the_agents() -> None:
    before, _, _ = (ROOT / PAGE).read_text().partition("```sh cluster start\n")
    assert "add `components/servicemonitor` to" in before


def test_a_bundle_comes_out_of_a_pod(tmp_path: Path) -> None:
    def execute(node: str, argv: list[str]) -> subprocess.CompletedProcess[bytes]:
        assert node == "worker1"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(["unshare", "--net", "env", f"PATH={path}", *argv], capture_output=True, check=False)

    walk = Walk(tmp_path, execute)
    for name in ("labels", "start", "wave"):
        walk.type(name)
    walk.type(
        "bundle",
        change=lambda line: line.replace("POD", "hybrid-proxy-worker1").replace("/tmp/", f"{tmp_path}/in-the-pod-"),
    )
    with tarfile.open(walk.folder / "bundle.tar.gz") as archive:
        assert any(name.endswith("index.html") for name in archive.getnames())


@pytest.mark.parametrize("block", ["wave", "rollback"])
def test_rollout_status_would_return_before_a_wave_is_done(block: str, tmp_path: Path) -> None:
    """Why the page waits for pods: the walk sees a wait that ends too early."""
    walk = Walk(tmp_path)
    for name in ("labels", "start", "wave"):
        walk.type(name)
    wait, early = r"^sh deploy/monitoring/wait.sh \S+?=(\S+) .*", r"kubectl -n kube-system rollout status daemonset/\1"
    with pytest.raises(AssertionError, match="it does not wait"):
        walk.type(block, 1 + (block == "wave"), lambda line: re.sub(wait, early, line))


def test_a_node_that_is_not_ready_holds_up_no_wave(tmp_path: Path) -> None:
    """One of another wave, one that is not Ready, one that loses its kubelet meanwhile, and one that is removed."""
    walk = Walk(tmp_path)
    for name in ("labels", "start", "wave"):
        walk.type(name)
    nodes = walk.cluster.objects["nodes"]
    other, (absent, lost, removed, *well) = min(walk.labelled("wave", "1")), sorted(walk.labelled("wave", "2"))
    nodes[other]["status"] = nodes[absent]["status"] = {"conditions": [NOT_READY]}
    walk.cluster.waiting = {f"hybrid-proxy-{each}" for each in (lost, removed)}
    label, wait, check = (line.replace("$wave", "2") for line in typed("wave"))
    walk.shell(label)
    said = walk.shell(f"{wait} 3", 1).splitlines()
    assert [line.split(" on: ")[1].split() for line in said[:-1]] == [sorted([lost, removed, *well]), [lost, removed]]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(walk.shell, wait)
        time.sleep(1.5)
        assert not waiting.done()
        nodes[lost]["status"] = {"conditions": [NOT_READY]}
        walk.nodes.remove(removed)
        with walk.cluster.lock:
            del nodes[removed], walk.cluster.objects["pods"][f"hybrid-proxy-{removed}"]
    assert removed in waiting.result()
    walk.shell(check)
    walk.type("takeover")
    walk.type("rollback", 2)
