"""What is documented, drawn and alerted on is what real agents export.

Real agents of three modes run in a lab, with an API server, traffic and objects of every kind; what they export is
collected. docs/metrics.md must list exactly that, and a dashboard or an alert may use nothing else.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from hybrid_proxy.workshop.lab.apiserver import ApiServer
from hybrid_proxy.workshop.lab.network import Lab
from tests.deploy.promtool import answered, promtool
from tests.docs.pages import anchors, blocks, documented
from tests.served import METRICS, Served, balanced, fetch, the_node
from tests.waiting import until

pytestmark = pytest.mark.root
ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "deploy" / "monitoring"
VIP = "10.96.0.77"
STARTED = "Agent started"  # the annotation whose value is its time

# Words of PromQL that these files use; everything else that looks like a name is a metric or a label.
WORDS = frozenset({
    "sum", "max", "min", "count", "topk", "rate", "increase", "histogram_quantile", "vector", "by", "on", "or",
    "group_left", "max_over_time", "and", "unless", "offset", "absent", "changes", "time",
})  # fmt: skip


class Metrics:
    """Everything that the agents export: types by family, labels and sample names."""

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        self.labels: dict[str, set[str]] = {}
        self.samples: set[str] = set()

    def add(self, text: str) -> None:
        for family in text_string_to_metric_families(text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            self.types[name] = family.type
            self.samples.add(name)
            labels = self.labels.setdefault(name, set())
            for one in family.samples:
                self.samples.add(one.name)
                labels |= one.labels.keys() - {"le"}


@pytest.fixture(scope="module")
def metrics(lab: Lab) -> Iterator[Metrics]:
    api = ApiServer()
    with lab.inside("node"):
        api.start()
    api.put(the_node(lab))
    ends, web = balanced("web", 1, 30501, True, False)
    web["spec"]["clusterIP"], web["spec"]["clusterIPs"] = VIP, [VIP]
    ends["endpoints"] = ends["endpoints"][:1]
    ends["endpoints"][0]["addresses"] = [lab["pod1"].address4]
    api.put(ends)
    api.put(web)
    found = Metrics()
    try:
        for mode, *flags in (("ebpf",), ("ebpf", "--metrics-per-backend"), ("iptables",), ("nftables",)):
            found.add(scraped(lab, api, mode, *flags))
        yield found
    finally:
        api.stop()


def scraped(lab: Lab, api: ApiServer, mode: str, *flags: str) -> str:
    agent = Served(lab, lab.folder, mode, ("--cluster-cidr", "10.77.0.0/16,fd77:1::/48", *flags))
    agent.folder, agent.kubeconfig = lab.folder, api.kubeconfig()
    agent.start(40)
    try:
        with lab.socket("pod1") as server, lab.socket("pod1") as client:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((lab["pod1"].address4, 8080))
            server.listen()
            client.settimeout(20)
            client.connect((VIP, 80))
        until(lambda: fetch(lab, "/livez").status == 200, "livez")
        return fetch(lab, "/metrics", METRICS).body.decode()
    finally:
        print(f"--- log of the agent\n{agent.tail(20)}")
        agent.terminate()
        cleaned = agent.cleanup()
        assert cleaned.returncode == 0, cleaned.stderr


def test_every_metric_is_documented_and_no_other(metrics: Metrics) -> None:
    assert sorted(documented()) == sorted(metrics.types), "docs/metrics.md has a row for each metric, and no other"


def test_types_and_labels_are_as_documented(metrics: Metrics) -> None:
    assert {name: kind for name, (kind, _) in documented().items()} == metrics.types
    for name, (_, labels) in documented().items():
        seen = metrics.labels[name]
        assert seen in (labels, set()), f"{name} has labels {seen}"


def test_row_8_6_names_and_labels_are_kube_proxys(metrics: Metrics) -> None:
    for name in (
        "sync_proxy_rules_duration_seconds", "sync_proxy_rules_last_timestamp_seconds",
        "sync_proxy_rules_last_queued_timestamp_seconds", "network_programming_duration_seconds",
        "sync_proxy_rules_iptables_restore_failures_total", "sync_proxy_rules_nftables_sync_failures_total",
        "conntrack_reconciler_deleted_entries_total",
    ):  # fmt: skip
        assert metrics.labels[f"kubeproxy_{name}"] == {"ip_family"}, name
    for thing in ("endpoint", "service"):
        assert metrics.types[f"kubeproxy_sync_proxy_rules_{thing}_changes_total"] == "counter"
        assert metrics.types[f"kubeproxy_sync_proxy_rules_{thing}_changes_pending"] == "gauge"
        assert not metrics.labels[f"kubeproxy_sync_proxy_rules_{thing}_changes_total"]
    assert metrics.types["kubeproxy_sync_proxy_rules_no_local_endpoints_total"] == "gauge"
    assert metrics.labels["kubeproxy_sync_proxy_rules_no_local_endpoints_total"] == {"ip_family", "traffic_policy"}
    assert metrics.labels["kubeproxy_proxy_healthz_total"] == metrics.labels["kubeproxy_proxy_livez_total"] == {"code"}


# What uses them


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def dashboard() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return made


def expressions() -> list[str]:
    drawn = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    asked = [v["query"]["query"] for v in dashboard()["templating"]["list"] if isinstance(v["query"], dict)]
    noted = [note["expr"] for note in dashboard()["annotations"]["list"]]
    asked = [re.sub(r"query_result\((\w+)\)", r"\1", query) for query in asked]
    (gates,) = blocks("docs/migration.md", "promql")
    return [rule["expr"] for rule in alerts()] + drawn + noted + asked + list(gates.lines)


def metrics_of(expression: str) -> set[str]:
    """The names of metrics in an expression: without its selectors, groupings, ranges and words."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", expression)
    bare = re.sub(r"\b(by|on|group_left)\s*\([^)]*\)", " ", bare)
    return {word for word in re.findall(r"(?<![\w.])[a-zA-Z_:][\w:]*", bare) if word not in WORDS}


def test_every_metric_that_is_used_is_exported(metrics: Metrics) -> None:
    used = {expression: metrics_of(expression) for expression in expressions()}
    assert all(used.values()), [expression for expression, names in used.items() if not names]
    assert {name for names in used.values() for name in names} <= metrics.samples | {"up"}, (
        "the last is Prometheus' own"
    )


def test_labels_that_are_used_are_exported(metrics: Metrics) -> None:
    known = {label for labels in metrics.labels.values() for label in labels} | {"instance", "node", "job", "le"}
    known |= {label for _, labels in documented().values() for label in labels}  # of what is exported at times
    for expression in expressions():
        for name, selector in re.findall(r"(\w+)\{([^}]*)\}", expression):
            family = re.sub(r"_(bucket|count|sum)$", "", name)
            matched = set(re.findall(r"(\w+)=~?\"", selector)) - {"instance", "job"}
            assert not matched or matched <= metrics.labels[family if family in metrics.labels else name], expression
        for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
            assert {label.strip() for label in grouped.split(",")} <= known, expression


def test_alerts_have_what_people_need() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert anchor in anchors(ROOT / page), rule["annotations"]["runbook_url"]
        assert "$labels.instance" in rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))


def test_alerts_and_panels_read_no_kube_proxy_beside() -> None:
    """Until all of its nodes have changed over, a cluster has both, and these names are of both."""
    drawn = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    for expression in drawn + [rule["expr"] for rule in alerts()]:
        if "* on (instance, job) group_left () hybrid_proxy_build_info" in expression:
            continue  # of our agents alone
        shared = re.findall(r"\b(?:(?:kubeproxy|rest_client)_\w+|up\b)(\S*)", expression)
        assert all(selector.startswith('{job="hybrid-proxy"') for selector in shared), expression


def test_the_dashboard_is_whole() -> None:
    made = dashboard()
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, f"panel {panel['title']} covers another"
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert [target["refId"] for target in panel["targets"]] == [*"ABCDEF"[: len(panel["targets"])]]
    assert {variable["name"] for variable in made["templating"]["list"]} == {"datasource", "instance"}


@pytest.mark.parametrize("space", ["", " "])
def test_the_dashboard_lists_nodes_by_their_names_where_prometheus_has_them(space: str) -> None:
    """Grafana takes `value` and `text` out of each series, and one of them for both where the other is missing."""
    (regex,) = (each["regex"] for each in dashboard()["templating"]["list"] if each["name"] == "instance")
    pattern = re.compile(regex.strip("/").replace("(?<", "(?P<"))
    for more, node in (
        (f',{space}node="worker-1",{space}pod="hybrid-proxy-x"', "worker-1"),
        (f',{space}other_node="a"', None),
    ):
        series = f'hybrid_proxy_build_info{{a="x",{space}instance="10.0.0.1:10249",{space}job="b"{more}}} 1 17'
        (found,) = pattern.finditer(series)
        assert found.groupdict() == {"value": "10.0.0.1:10249", "text": node}


@pytest.mark.parametrize(("series", "noted"), [
    ({'hybrid_proxy_mode{effective="ebpf"': "1x30", "hybrid_proxy_other_proxies{": "0x30"}, set()),
    ({'hybrid_proxy_mode{effective="ebpf"': "1x28 _x2", 'hybrid_proxy_mode{effective="nftables"': "_x29 1x2"},
     {"Mode switched"}),
    ({"hybrid_proxy_other_proxies{": "2x28 0x2"}, {"Taken over"}),
    ({"process_start_time_seconds{": "1.7e9x30", "hybrid_proxy_build_info{": "1x30"}, {STARTED}),
    ({"process_start_time_seconds{": "1.7e9x30"}, set()),
])  # fmt: skip
def test_the_dashboard_notes_what_happened(series: dict[str, str], noted: set[str], tmp_path: Path) -> None:
    """Each annotation of its time; one of starts has the time as its value, of our agents alone."""
    notes = {note["name"]: note["expr"].replace("$instance", ".*") for note in dashboard()["annotations"]["list"]}
    rows = [{"series": f'{name}{"" if name[-1] == "{" else ","}instance="a", job="j"}}', "values": values}
            for name, values in series.items()]  # fmt: skip
    assert answered(tmp_path, notes, rows) == noted
    assert [note["name"] for note in dashboard()["annotations"]["list"] if "useValueForTime" in note] == [STARTED]


def test_promtool_accepts_them(metrics: Metrics, tmp_path: Path) -> None:
    for arguments in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts.test.yaml"]):
        ran = promtool(MONITORING, *arguments)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    rules = [{"record": f"x:{n}", "expr": re.sub(r"\$__rate_interval", "5m", e)} for n, e in enumerate(expressions())]
    (tmp_path / "drawn.yaml").write_text(yaml.safe_dump({"groups": [{"name": "drawn", "rules": rules}]}))
    ran = promtool(tmp_path, "check", "rules", "drawn.yaml")
    assert ran.returncode == 0, ran.stdout + ran.stderr
