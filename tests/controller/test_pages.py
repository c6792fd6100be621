"""A real agent's pages over real sockets: rows 8.1 to 8.6 of kube-proxy's behaviour, field by field.

The mode is one that programs nothing, and fails when the test says so: what is asked here is the agent around it. One
test asks through a real dataplane.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller.lab.agent import Agent
from controller.lab.network import NODE_NAMES, Lab
from tests.fakes.apiserver import ApiServer, endpoint_slice, node, service

pytestmark = pytest.mark.root
ME = NODE_NAMES["node"]
PATIENCE = float(os.environ.get("HYBRID_PROXY_PATIENCE", "1"))
HEALTH, METRICS = 10256, 10249
SYNC_PERIOD = 1.0  # so that a change may wait two seconds

FRAGILE = """
    from pathlib import Path
    from dataplane.errors import SyncError
    from dataplane.mode import Mode, SyncResult

    class Fragile:
        name = "fragile"
        audit_repairs = 0
        def __init__(self, options, wake): pass
        def sync(self, table):
            if (Path(__file__).parent / "broken").exists():
                raise SyncError("broken by the test")
            return SyncResult()
        def links_changed(self): pass
        def maintain(self): pass
        def names(self): return {}
        def counters(self): return {"drop_empty": 7}
        def traffic(self, *, by_backend):
            return [dict(service="shop/a:http", flows=3, packets=5, bytes=500, reply_packets=4, reply_bytes=400)]
        def close(self): pass
        def status(self):
            return dict(mode=self.name, misfits=[], limitations=[], fill={"flows": [1, 4]},
                        counters=self.counters(), audit_repairs=0)

    MODE = Mode("fragile", Fragile, lambda options: 0, lambda options: None, lambda options, names: None)
"""
PROGRAM = """
import sys, dataplane.modes
dataplane.modes.__path__.append(sys.argv.pop(1))
from controller.__main__ import main
sys.exit(main())
"""


class Served(Agent):
    """An agent that knows the mode `fragile`, with an API server as its source."""

    folder: Path
    kubeconfig: Path

    @property
    def argv(self) -> list[str]:
        argv = [sys.executable, "-c", PROGRAM, str(self.folder), *super().argv[3:]]
        argv[argv.index("--manifests") : argv.index("--manifests") + 2] = ["--kubeconfig", str(self.kubeconfig)]
        for flag in ("--metrics-bind-address", "--healthz-bind-address"):
            if flag in argv and argv[argv.index(flag) + 1] == "":  # labs have none unless they are asked for
                del argv[argv.index(flag) : argv.index(flag) + 2]
        return argv


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.body)
        return told


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes network namespaces and a cgroup of its own")
    with Lab(f"p{os.getpid()}x", 1) as made:
        yield made


@pytest.fixture
def api(lab: Lab) -> Iterator[ApiServer]:
    server = ApiServer()
    with lab.inside("node"):
        server.start()
    server.put(the_node(lab))
    yield server
    server.stop()


@pytest.fixture
def fragile(tmp_path: Path) -> Path:
    home = tmp_path / "fragile"
    home.mkdir()
    (home / "__init__.py").touch()
    (home / "programmer.py").write_text(dedent(FRAGILE))
    return home


@pytest.fixture
def start(lab: Lab, api: ApiServer, fragile: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def begin(*flags: str, mode: str = "fragile", wait: bool = True, kubeconfig: Path | None = None) -> Served:
        agent = Served(lab, lab.folder, mode, ("--iptables-sync-period", f"{SYNC_PERIOD:g}s", *flags))
        agent.folder, agent.kubeconfig = fragile.parent, kubeconfig or api.kubeconfig()
        started.append(agent)
        if wait:
            agent.start(20 * PATIENCE)
        else:
            with agent.log.open("a") as log:
                agent.process = lab.start("node", agent.argv, output=log, errors=log)
        return agent

    yield begin
    for agent in started:
        print(f"--- log of the agent\n{agent.tail(40)}")
        if agent.running():
            agent.terminate()
        agent.log.unlink(missing_ok=True)
        if agent.mode != "fragile":
            agent.cleanup()


def the_node(lab: Lab, *, taint: str = "", deleted: bool = False) -> dict[str, Any]:
    made = node(ME, 0)
    made["status"]["addresses"] = [
        {"type": "InternalIP", "address": lab["node"].address(family)} for family in (socket.AF_INET, socket.AF_INET6)
    ]
    if taint:
        made["spec"]["taints"] = [{"key": taint, "effect": "NoSchedule", "value": "1"}]
    if deleted:
        made["metadata"]["deletionTimestamp"] = "2026-03-01T08:00:00Z"
    return made


def fetch(
    lab: Lab, path: str, port: int = HEALTH, address: str = "127.0.0.1", place: str = "node", method: str = "GET",
    **headers: str,
) -> Reply:  # fmt: skip
    with lab.inside(place):
        connection = http.client.HTTPConnection(address, port, timeout=5 * PATIENCE)
        connection.connect()
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    reply = Reply(answer.status, dict(answer.getheaders()), answer.read())
    connection.close()
    return reply


def until(condition: Callable[[], Any], what: str, seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds * PATIENCE
    while not (found := _tried(condition)):
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.05)
    return found


def _tried(condition: Callable[[], Any]) -> Any:
    try:
        return condition()
    except OSError:
        return None


@contextmanager
def occupied(lab: Lab, address: str, port: int) -> Iterator[None]:
    with lab.socket("node") as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((address, port))
        taken.listen()
        yield


def status_is(lab: Lab, path: str, code: int, port: int = HEALTH, **where: str) -> Callable[[], Reply | None]:
    def look() -> Reply | None:
        reply = fetch(lab, path, port, **where)
        return reply if reply.status == code else None

    return look


def samples(lab: Lab) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values, sorted by label -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(fetch(lab, "/metrics", METRICS).body.decode()):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(value for _, value in sorted(one.labels.items()))] = one.value
    return found


def balanced(name: str, number: int, port: int, *local: bool, nodes: str = ME) -> list[dict[str, Any]]:
    """A Service with a health-check node port, and its slice: an endpoint on this node or not, for each flag."""
    made = service(number)
    made["metadata"] |= {"name": name, "namespace": "shop"}
    made["spec"] |= {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": port,
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "nodePort": 31000 + number}],
    }
    ends = endpoint_slice(number, range(len(local)), max(1, len(local)))
    ends["metadata"] |= {"name": f"{name}-x", "namespace": "shop", "labels": {"kubernetes.io/service-name": name}}
    ends["ports"] = [{"name": "http", "protocol": "TCP", "port": 8080}]
    for end, here in zip(ends["endpoints"], local, strict=True):
        end["nodeName"] = nodes if here else "another"
        end["conditions"] = {"ready": True, "serving": True, "terminating": False}
        end.pop("hints", None)
    return [ends, made]


RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")


class TestHealth:
    """8.1 to 8.3."""

    def test_row_8_1_healthz_and_8_2_livez(self, start, lab):
        start()
        reply = fetch(lab, "/healthz")
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "application/json"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        told = reply.json
        assert list(told) == ["lastUpdated", "currentTime", "nodeEligible", "healthy", "status"]
        assert (told["nodeEligible"], told["healthy"]) == (True, True)
        assert {family: set(one) for family, one in told["status"].items()} == {
            family: {"lastUpdated", "healthy"} for family in ("IPv4", "IPv6")
        }
        assert all(one["healthy"] is True for one in told["status"].values())
        assert told["lastUpdated"] == told["currentTime"], "now, when all is well"
        times = [told["lastUpdated"], told["currentTime"], *(one["lastUpdated"] for one in told["status"].values())]
        assert all(RFC3339.fullmatch(text) for text in times)
        now = datetime.fromisoformat(told["currentTime"])
        assert abs(datetime.now(UTC) - now) < timedelta(seconds=30)
        live = fetch(lab, "/livez")
        assert live.status == 200
        assert list(live.json) == ["lastUpdated", "currentTime", "healthy", "status"]
        assert live.headers["Content-Type"] == "application/json"

    def test_at_every_address_of_both_families(self, start, lab):
        start()
        for family in (socket.AF_INET, socket.AF_INET6):
            assert fetch(lab, "/healthz", address=lab["node"].address(family), place="client").status == 200
        assert fetch(lab, "/healthz", address="::1").status == 200

    def test_other_paths_and_methods(self, start, lab):
        start()
        assert fetch(lab, "/").status == fetch(lab, "/metrics").status == fetch(lab, "/healthz/x").status == 404
        head = fetch(lab, "/healthz?verbose", method="HEAD")
        assert (head.status, head.body) == (200, b"")

    def test_8_2_a_tainted_or_deleted_node(self, start, lab, api):
        start()
        for changes in ({"taint": "ToBeDeletedByClusterAutoscaler"}, {"deleted": True}):
            api.put(the_node(lab, **changes))
            told = until(status_is(lab, "/healthz", 503), f"healthz 503 after {changes}")
            assert (told.json["nodeEligible"], told.json["healthy"]) == (False, True)
            assert fetch(lab, "/livez").status == 200
            api.put(the_node(lab, taint="node.kubernetes.io/unschedulable"))
            assert until(status_is(lab, "/healthz", 200), "healthz 200 again").json["nodeEligible"] is True
        api.delete("nodes", ME)
        until(status_is(lab, "/healthz", 503), "healthz 503 without a Node")
        assert fetch(lab, "/livez").status == 200

    def test_8_1_a_change_that_is_not_programmed_in_time(self, start, lab, api, fragile):
        start()
        (fragile / "broken").touch()
        began = time.monotonic()
        for one in balanced("web", 1, 30501, True):
            api.put(one)
        told = until(status_is(lab, "/healthz", 503), "healthz 503")
        assert time.monotonic() - began >= 2 * SYNC_PERIOD - 0.1, "not before the time-out"
        assert told.json["healthy"] is False
        assert {one["healthy"] for one in told.json["status"].values()} == {False}
        assert told.json["lastUpdated"] < told.json["currentTime"]
        assert fetch(lab, "/livez").status == 503
        (fragile / "broken").unlink()
        until(status_is(lab, "/healthz", 200), "healthz 200 again", 40)
        assert fetch(lab, "/livez").status == 200
        counted = samples(lab)
        assert counted["kubeproxy_proxy_healthz_total"]["503",] >= 1
        assert counted["kubeproxy_proxy_livez_total"]["503",] == 1
        assert counted["hybrid_proxy_sync_failures_total"]["fragile",] >= 1

    def test_8_3_before_the_first_table(self, start, lab, api):
        nowhere = api.kubeconfig(url="https://127.0.0.1:9")
        start(wait=False, kubeconfig=nowhere)
        told = until(lambda: fetch(lab, "/livez"), "livez")
        assert told.status == 200, "a restart would not help"
        assert "status" not in told.json
        told = fetch(lab, "/healthz")
        assert (told.status, told.json["nodeEligible"], told.json["healthy"]) == (503, False, False)
        assert told.json["lastUpdated"] == "0001-01-01T00:00:00Z"
        assert "status" not in told.json
        assert fetch(lab, "/healthz", METRICS).body == b"ok"
        assert fetch(lab, "/metrics", METRICS).status == 200, "why it waits can be seen"


class TestHealthCheckNodePorts:
    """8.4, 3.12."""

    def test_status_headers_and_body(self, start, lab, api):
        start()
        for one in balanced("web", 1, 30501, True, True, False):
            api.put(one)
        for family in (socket.AF_INET, socket.AF_INET6):
            where = {"address": lab["node"].address(family), "place": "client"}
            reply = until(status_is(lab, "/any/path", 200, 30501, **where), "the port answers")
            assert reply.json == {
                "service": {"namespace": "shop", "name": "web"},
                "localEndpoints": 2,
                "serviceProxyHealthy": True,
            }
            assert reply.headers["X-Load-Balancing-Endpoint-Weight"] == "2"
            assert reply.headers["Content-Type"] == "application/json"
            assert reply.headers["X-Content-Type-Options"] == "nosniff"

    def test_endpoints_come_and_go(self, start, lab, api):
        start()
        ends, made = balanced("web", 1, 30501, True)
        api.put(ends)
        api.put(made)
        until(status_is(lab, "/", 200, 30501), "200")
        ends["endpoints"][0]["conditions"] = {"ready": False, "serving": True, "terminating": True}
        api.put(ends)
        reply = until(status_is(lab, "/", 503, 30501), "503: terminating does not count")
        assert (reply.json["localEndpoints"], reply.json["serviceProxyHealthy"]) == (0, True)
        assert reply.headers["X-Load-Balancing-Endpoint-Weight"] == "0"

    def test_an_unwell_proxy_sends_clients_elsewhere_and_a_deleted_node_does_not(self, start, lab, api, fragile):
        start()
        for one in balanced("web", 1, 30501, True):
            api.put(one)
        until(status_is(lab, "/", 200, 30501), "200")
        api.put(the_node(lab, taint="ToBeDeletedByClusterAutoscaler"))
        until(status_is(lab, "/healthz", 503), "the taint is seen")
        assert fetch(lab, "/", 30501).status == 200, "8.4: in the sense of livez"
        (fragile / "broken").touch()
        api.put(service(7))
        api.put(endpoint_slice(7, range(1), 1))
        reply = until(status_is(lab, "/", 503, 30501), "503")
        assert (reply.json["localEndpoints"], reply.json["serviceProxyHealthy"]) == (1, False)
        assert reply.headers["X-Load-Balancing-Endpoint-Weight"] == "1"

    def test_another_port_another_policy_and_a_deletion(self, start, lab, api):
        start()
        ends, made = balanced("web", 1, 30501, True)
        api.put(ends)
        api.put(made)
        until(status_is(lab, "/", 200, 30501), "the port")
        made["spec"]["healthCheckNodePort"] = 30502
        api.put(made)
        until(status_is(lab, "/", 200, 30502), "the new port")
        with pytest.raises(ConnectionRefusedError):
            fetch(lab, "/", 30501)
        made["spec"]["externalTrafficPolicy"] = "Cluster"
        api.put(made)
        until(lambda: refused(lab, 30502), "closed with policy Cluster")
        made["spec"]["externalTrafficPolicy"] = "Local"
        api.put(made)
        until(status_is(lab, "/", 200, 30502), "open again")
        api.delete("services", "shop/web")
        until(lambda: refused(lab, 30502), "closed with its Service")

    def test_a_port_moves_from_one_service_to_another(self, start, lab, api):
        start()
        _, first = balanced("first", 1, 30501, True)
        _, second = balanced("second", 2, 30501)
        api.put(first)
        until(status_is(lab, "/", 503, 30501), "the port of the first")
        with api.quiet():
            api.delete("services", "shop/first")
            api.put(second)
        until(lambda: fetch(lab, "/", 30501).json["service"]["name"] == "second", "the port of the second")

    def test_a_port_in_use_is_that_services_trouble_alone(self, start, lab, api):
        agent = start()
        with occupied(lab, "0.0.0.0", 30501):
            for name, number, port in (("blocked", 1, 30501), ("fine", 2, 30502)):
                for one in balanced(name, number, port, True):
                    api.put(one)
            until(status_is(lab, "/", 200, 30502), "the other service")
            (event,) = until(lambda: api.events("FailedToStartServiceHealthcheck"), "an event")
            assert (event["regarding"]["kind"], event["regarding"]["namespace"], event["regarding"]["name"]) == (
                "Service", "shop", "blocked",
            )  # fmt: skip
            assert (event["type"], event["action"]) == ("Warning", "Listen")
            assert ME in event["note"]
            assert "0.0.0.0:30501: another socket has this port" in event["note"]
            assert "shop/blocked" in agent.tail()
            checks = agent.status()["health_checks"]
            assert (checks["served"], list(checks["failed"])) == (1, ["shop/blocked"])
            assert samples(lab)["hybrid_proxy_health_check_node_ports"] == {("served",): 1, ("failed",): 1}
        until(status_is(lab, "/", 200, 30501), "tried again when the port is free")
        assert agent.status()["health_checks"]["failed"] == {}

    def test_bound_to_the_addresses_of_node_ports(self, start, lab, api):
        agent = start("--nodeport-addresses", "primary")
        for one in balanced("web", 1, 30501, True):
            api.put(one)
        for family in (socket.AF_INET, socket.AF_INET6):
            where = {"address": lab["node"].address(family), "place": "client"}
            until(status_is(lab, "/", 200, 30501, **where), "at the node's primary addresses")
        assert refused(lab, 30501), "not at 127.0.0.1"
        assert agent.status()["health_checks"] == {"served": 1, "failed": {}, "listeners": {}}

    def test_through_the_ebpf_mode(self, start, lab, api):
        start(mode="ebpf")
        for one in balanced("web", 1, 30501, True):
            api.put(one)
        for family in (socket.AF_INET, socket.AF_INET6):
            where = {"address": lab["node"].address(family), "place": "client"}
            until(status_is(lab, "/", 200, 30501, **where), "the port answers a client outside")
            assert fetch(lab, "/", 30501, lab["node"].address(family), "pod1").status == 200


def refused(lab: Lab, port: int) -> bool:
    try:
        fetch(lab, "/", port)
    except ConnectionRefusedError:
        return True
    return False


class TestMetricsServer:
    """8.5."""

    def test_pages(self, start, lab):
        start()
        mode = fetch(lab, "/proxyMode", METRICS)
        assert (mode.status, mode.body) == (200, b"fragile")
        assert mode.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert fetch(lab, "/healthz", METRICS).body == b"ok"
        configuration = fetch(lab, "/configz", METRICS)
        assert configuration.headers["Content-Type"] == "application/json"
        assert configuration.json["hybrid-proxy"]["settings"]["node_name"] == ME
        assert fetch(lab, "/debug/pprof/", METRICS).status == 404
        assert fetch(lab, "/debug/threads", METRICS).status == 404

    def test_profiling(self, start, lab):
        start("--profiling")
        assert b"_loop" in fetch(lab, "/debug/threads", METRICS).body

    def test_formats(self, start, lab):
        start()
        plain = fetch(lab, "/metrics", METRICS)
        assert plain.headers["Content-Type"].startswith("text/plain; version=")
        modern = fetch(lab, "/metrics", METRICS, Accept="application/openmetrics-text; version=1.0.0")
        assert modern.headers["Content-Type"].startswith("application/openmetrics-text")
        assert modern.body.endswith(b"# EOF\n")

    def test_only_on_loopback(self, start, lab):
        start()
        with pytest.raises(ConnectionRefusedError):
            fetch(lab, "/metrics", METRICS, lab["node"].address4, "client")

    def test_7_14_a_taken_port_is_retried(self, start, lab, api):
        with occupied(lab, "127.0.0.1", METRICS):
            agent = start()
            assert "metrics cannot be served at 127.0.0.1:10249: another socket has this port" in agent.tail()
            assert "--metrics-bind-address" in agent.status()["health_checks"]["listeners"]
            assert fetch(lab, "/healthz").status == 200
        until(status_is(lab, "/healthz", 200, METRICS), "served after all")
        assert agent.status()["health_checks"]["listeners"] == {}

    def test_7_13_health_that_cannot_be_served_is_an_event(self, start, lab, api):
        with occupied(lab, "0.0.0.0", HEALTH):
            start()
            (event,) = until(lambda: api.events("FailedToStartProxierHealthcheck"), "the event")
            assert event["regarding"]["name"] == ME

    @pytest.mark.parametrize(
        ("port", "flag", "reason"),
        [
            (HEALTH, "--healthz-bind-address", "FailedToStartProxierHealthcheck"),
            (METRICS, "--metrics-bind-address", "FailedToStartMetricServer"),
        ],
    )
    def test_7_14_hard_fail(self, start, lab, port, flag, reason):
        with occupied(lab, "0.0.0.0", port):
            agent = start("--bind-address-hard-fail", wait=False)
            assert agent.process is not None
            assert agent.process.wait(20 * PATIENCE) == 1
            assert f"{flag}: " in agent.tail()
            assert "another socket has this port" in agent.tail()
