"""A real agent's pages over real sockets: rows 8.1 to 8.6 of kube-proxy's behaviour.

The mode is one that programs nothing, and fails when the test says so: what is asked here is the agent around it.
"""

from __future__ import annotations

import os
import re
import socket
import time
from datetime import UTC, datetime, timedelta

import pytest

from hybrid_proxy.workshop.lab.apiserver import endpoint_slice, service
from hybrid_proxy.workshop.lab.namespace import DEADLINES, PATIENCE
from tests.served import (
    HEALTH,
    ME,
    METRICS,
    balanced,
    fetch,
    occupied,
    refused,
    samples,
    status_is,
    the_node,
)
from tests.waiting import until  # fmt: skip

pytestmark = pytest.mark.root


class TestHealth:
    """8.1 to 8.3. What is healthy when is decided in tests/controller/test_health.py."""

    def test_row_8_1_healthz_and_8_2_livez(self, start, lab):
        start()
        reply = fetch(lab, "/healthz")
        assert (reply.status, reply.json["healthy"], set(reply.json["status"])) == (200, True, {"IPv4", "IPv6"})
        assert reply.headers["Content-Type"] == "application/json"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        now = datetime.fromisoformat(reply.json["currentTime"])
        assert abs(datetime.now(UTC) - now) < timedelta(seconds=30)
        assert fetch(lab, "/livez").status == 200
        for family in (socket.AF_INET, socket.AF_INET6):
            assert fetch(lab, "/healthz", address=lab["node"].address(family), place="client").status == 200
        assert fetch(lab, "/healthz", address="::1").status == 200
        assert fetch(lab, "/").status == fetch(lab, "/metrics").status == fetch(lab, "/healthz/x").status == 404
        head = fetch(lab, "/healthz?verbose", method="HEAD")
        assert (head.status, head.body) == (200, b"")

    def test_8_2_a_node_that_is_tainted_gone_or_must_not_be_read(self, start, lab, api):
        """Where the Node must not be read, nothing is known of a deletion: the proxy serves."""
        api.faults("nodes").answers.extend([(403, {})] * 1000)
        agent = start()
        assert fetch(lab, "/healthz").json["nodeEligible"] is True
        assert "403" in agent.running_status().node_faults[0]
        api.faults("nodes").answers.clear()
        agent.wait(lambda status: not status.node_faults, what="allowed to read the Node")
        api.put(the_node(lab, taint="ToBeDeletedByClusterAutoscaler"))
        reply = until(status_is(lab, "/healthz", 503), "healthz 503 with the taint")
        assert (reply.json["nodeEligible"], reply.json["healthy"], fetch(lab, "/livez").status) == (False, True, 200)
        api.put(the_node(lab))
        until(status_is(lab, "/healthz", 200), "healthz 200 again")
        api.delete("nodes", ME)
        until(status_is(lab, "/healthz", 503), "healthz 503 without a Node")
        assert len(agent.running_status().node_faults) == 1

    def test_8_1_and_8_4_a_change_that_is_not_programmed_in_time(self, start, lab, api, fragile):
        """Load balancers go elsewhere, as livez says: a deleted node alone does not send them away."""
        start()
        for one in balanced("web", 1, 30501, True):
            api.put(one)
        until(status_is(lab, "/", 200, 30501), "the port")
        api.put(the_node(lab, taint="ToBeDeletedByClusterAutoscaler"))
        until(status_is(lab, "/healthz", 503), "the taint is seen")
        assert fetch(lab, "/", 30501).status == 200
        (fragile / "broken").touch()
        api.put(service(7))
        api.put(endpoint_slice(7, range(1), 1))
        until(status_is(lab, "/livez", 503), "livez 503")
        reply = until(status_is(lab, "/", 503, 30501), "503")
        assert (reply.json["localEndpoints"], reply.json["serviceProxyHealthy"]) == (1, False)
        (fragile / "broken").unlink()
        until(status_is(lab, "/livez", 200), "livez 200 again", 40)
        counted = samples(lab)
        assert counted["kubeproxy_proxy_healthz_total"]["503",] >= 1
        assert counted["kubeproxy_proxy_livez_total"]["503",] >= 1
        assert counted["hybrid_proxy_sync_failures_total"]["fragile",] >= 1

    def test_8_3_before_the_first_table(self, start, lab, api):
        start(wait=False, kubeconfig=api.kubeconfig(url="https://127.0.0.1:9"))
        assert until(lambda: fetch(lab, "/livez"), "livez").status == 200, "a restart would not help"
        assert fetch(lab, "/healthz").status == 503
        assert fetch(lab, "/healthz", METRICS).body == b"ok"
        assert fetch(lab, "/metrics", METRICS).status == 200, "why it waits can be seen"


class TestHealthCheckNodePorts:
    """8.4, 3.12. In each mode, and behind a host's firewall: tests/conformance/test_health_ports.py."""

    def test_the_life_of_a_port(self, start, lab, api):
        start()
        ends, made = balanced("web", 1, 30501, True, True, False)
        api.put(ends)
        api.put(made)
        for family in (socket.AF_INET, socket.AF_INET6):
            where = {"address": lab["node"].address(family), "place": "client"}
            reply = until(status_is(lab, "/any/path", 200, 30501, **where), "the port answers")
            assert (reply.json["localEndpoints"], reply.headers["X-Load-Balancing-Endpoint-Weight"]) == (2, "2")
        for end in ends["endpoints"]:
            end["conditions"] = {"ready": False, "serving": True, "terminating": True}
        api.put(ends)
        until(status_is(lab, "/", 503, 30501), "503: terminating does not count")
        made["spec"]["healthCheckNodePort"] = 30502
        api.put(made)
        until(status_is(lab, "/", 503, 30502), "the new port")
        with pytest.raises(ConnectionRefusedError):
            fetch(lab, "/", 30501)
        made["spec"]["externalTrafficPolicy"] = "Cluster"
        api.put(made)
        until(lambda: refused(lab, 30502), "closed with policy Cluster")
        made["spec"]["externalTrafficPolicy"] = "Local"
        api.put(made)
        until(status_is(lab, "/", 503, 30502), "open again")
        api.delete("services", "shop/web")
        until(lambda: refused(lab, 30502), "closed with its Service")

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
            assert re.search(r"0\.0\.0\.0:30501: process \d+ \(.+?\) has this port", event["note"])
            assert "shop/blocked" in agent.tail()
            checks = agent.status().health_checks
            assert (checks.served, list(checks.failed)) == (1, ["shop/blocked"])
            assert samples(lab)["hybrid_proxy_health_check_node_ports"] == {("served",): 1, ("failed",): 1}
        until(status_is(lab, "/", 200, 30501), "tried again when the port is free")
        assert agent.status().health_checks.failed == {}


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
        theirs = configuration.json["kubeproxy.config.k8s.io"]
        assert (theirs["apiVersion"], theirs["kind"]) == ("kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration")
        assert (theirs["hostnameOverride"], theirs["metricsBindAddress"]) == (ME, "127.0.0.1:10249")
        assert theirs["iptables"]["syncPeriod"] == "1s"
        (ours,) = (one for group, one in configuration.json.items() if group != "kubeproxy.config.k8s.io")
        assert ours["kind"] == "HybridProxyConfiguration"
        assert fetch(lab, "/debug/pprof/", METRICS).status == 404
        assert fetch(lab, "/debug/threads", METRICS).status == 404
        assert fetch(lab, "/metrics", METRICS).headers["Content-Type"].startswith("text/plain; version=")
        modern = fetch(lab, "/metrics", METRICS, Accept="application/openmetrics-text; version=1.0.0")
        assert modern.headers["Content-Type"].startswith("application/openmetrics-text")
        assert modern.body.endswith(b"# EOF\n")
        of_version = "application/json;g=config.k8s.io;v=v1beta1;as={}"
        about = fetch(lab, "/statusz", METRICS, Accept=of_version.format("Statusz")).json
        assert {"/metrics", "/metrics/slis", "/flagz", "/statusz"} < set(about["paths"])
        assert 0 <= about["uptimeSeconds"] < 600 * PATIENCE
        flags = fetch(lab, "/flagz", METRICS, Accept=of_version.format("Flagz")).json["flags"]
        assert (flags["hostname-override"], flags["iptables-sync-period"]) == (ME, "1s")
        assert flags["profiling"] == "false"
        slis = fetch(lab, "/metrics/slis", METRICS).body.decode()
        assert 'kubernetes_healthcheck{name="livez",type="livez"} 1.0' in slis.splitlines()
        with pytest.raises(ConnectionRefusedError):  # only on loopback
            fetch(lab, "/metrics", METRICS, lab["node"].address4, "client")

    def test_row_6_6_network_programming_and_8_6_changes(self, start, lab, api, fragile):
        start()
        before = samples(lab)
        ends, made = balanced("web", 1, 30501, True)
        time.sleep(0.5)  # what happened before the agent's start does not count
        at = datetime.now(UTC) - timedelta(seconds=0.4)
        text = f"{at:%Y-%m-%dT%H:%M:%S.%f}000Z"  # RFC 3339 with nanoseconds, as the controller writes it
        ends["metadata"]["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": text}
        api.put(made)
        until(lambda: samples(lab)["hybrid_proxy_services"][()] == 1, "the service")
        api.put(ends)
        until(status_is(lab, "/", 200, 30501), "its endpoint")
        name = "kubeproxy_network_programming_duration_seconds"
        until(lambda: sum(samples(lab)[f"{name}_count"].values()) == 1, "the counters of that sync")
        after = samples(lab)
        assert before[f"{name}_count"] == {("IPv4",): 0, ("IPv6",): 0}
        assert after[f"{name}_count"] == {("IPv4",): 1, ("IPv6",): 0}
        assert 0.35 <= after[f"{name}_sum"]["IPv4",] <= 0.4 + 60 * PATIENCE
        for thing in ("endpoint", "service"):
            total = f"kubeproxy_sync_proxy_rules_{thing}_changes_total"
            assert after[total][()] == before[total][()] + 1
        (fragile / "broken").touch()
        api.put(endpoint_slice(9, range(1), 1))
        api.put(service(9))
        until(lambda: samples(lab)["kubeproxy_sync_proxy_rules_service_changes_pending"][()] == 1, "a change waits")

    def test_7_14_a_taken_port_is_retried(self, start, lab, api):
        with occupied(lab, "127.0.0.1", METRICS):
            agent = start()
            who = rf"process {os.getpid()} \(.+?\) has this port"
            said = rf"metrics cannot be served at 127\.0\.0\.1:10249: {who}"
            until(lambda: re.search(said, agent.tail()), "the log names the process")
            assert re.search(said, agent.status().health_checks.listeners["--metrics-bind-address"])
            assert fetch(lab, "/healthz").status == 200
        until(status_is(lab, "/healthz", 200, METRICS), "served after all")
        assert agent.status().health_checks.listeners == {}

    def test_7_13_health_that_cannot_be_served_is_an_event(self, start, lab, api):
        with occupied(lab, "0.0.0.0", HEALTH):
            start()
            (event,) = until(lambda: api.events("FailedToStartProxierHealthcheck"), "the event")
            assert event["regarding"]["name"] == ME

    @pytest.mark.parametrize(
        ("port", "flag"), [(HEALTH, "--healthz-bind-address"), (METRICS, "--metrics-bind-address")]
    )
    def test_7_14_hard_fail(self, start, lab, port, flag):
        with occupied(lab, "0.0.0.0", port):
            agent = start("--bind-address-hard-fail", wait=False)
            assert agent.process is not None
            assert agent.process.wait(20 * DEADLINES) == 1
            assert f"{flag}: " in agent.tail()
            assert re.search(r"process \d+ \(.+?\) has this port", agent.tail())
