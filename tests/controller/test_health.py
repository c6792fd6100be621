"""Rows 8.1 to 8.4 decided: what is healthy, and what the answers hold. No socket is opened here."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import json
from typing import Any

import pytest

from hybrid_proxy.controller.kubernetes.model import Endpoint, EndpointPort, EndpointSlice, Service, ServicePort
from hybrid_proxy.controller.semantics.entries import (
    HealthCheck,
    Settings,
    health_addresses,
    health_check,
)
from hybrid_proxy.controller.semantics.node import node_network
from hybrid_proxy.controller.serving.health import NEVER, Answer, Health, service_answer
from hybrid_proxy.dataplane.table import Protocol

TIMEOUT = 60.0
WALL = 1_700_000_000.0  # 2023-11-14T22:13:20Z


def decoded(answer: Answer) -> tuple[int, dict[str, Any]]:
    return answer.code, json.loads(answer.body)


def programmed(at: float = 100.0) -> Health:
    health = Health(TIMEOUT)
    health.node(True)
    health.turned(at)
    health.updated(at)
    return health


def after(*steps: tuple[str, Any], health: Health | None = None) -> Health:
    """A programmed health, or this one, after calls of its methods."""
    health = health or programmed()
    for name, argument in steps:
        getattr(health, name)(*argument if isinstance(argument, tuple) else (argument,))
    return health


# fmt: off
HEALTHY = [  # the state, the time of the question, and the codes of livez and healthz
    pytest.param(lambda: Health(TIMEOUT), 5, 200, 503, id="before the first table"),
    pytest.param(lambda: after(("queued", 0), health=Health(TIMEOUT)), 10 * TIMEOUT, 200, 503, id="a family that was never programmed is never unwell"),
    pytest.param(lambda: after(("turned", 170)), 170, 200, 200, id="nothing has changed for long"),
    pytest.param(lambda: after(("queued", 110), ("turned", 169.9)), 169.9, 200, 200, id="a change waits"),
    pytest.param(lambda: after(("queued", 110), ("turned", 170)), 170, 503, 503, id="a change waits too long"),
    pytest.param(lambda: after(("queued", 110), ("queued", 165), ("turned", 170)), 170, 503, 503, id="another change does not begin the wait anew"),
    pytest.param(lambda: after(("queued", (110, 6)), ("turned", 180)), 180, 503, 503, id="one family alone"),
    pytest.param(lambda: after(("queued", (110, 6)), ("turned", 180), ("updated", 181)), 182, 200, 200, id="it is programmed after all"),
    pytest.param(programmed, 159, 200, 200, id="the loop turned a moment ago"),
    pytest.param(programmed, 160, 503, 503, id="the loop does not turn any more"),
    pytest.param(lambda: after(("node", False)), 101, 200, 503, id="the node is deleted"),
    pytest.param(lambda: after(("node", None)), 101, 200, 503, id="the node is gone"),
    pytest.param(lambda: after(("updated", 100), health=Health(TIMEOUT, needs_node=False)), 101, 200, 200, id="without an API server a node need not be there"),
    pytest.param(lambda: after(("updated", 100), ("node", False), health=Health(TIMEOUT, needs_node=False)), 101, 200, 503, id="and may be deleted all the same"),
]
# fmt: on


class TestProxy:
    """8.1 to 8.3."""

    @pytest.mark.parametrize(("state", "at", "live", "healthy"), HEALTHY)
    def test_what_is_healthy(self, state, at, live, healthy):
        health = state()
        assert (health.livez(at, WALL).code, health.healthz(at, WALL).code) == (live, healthy)

    def test_bodies_before_the_first_table(self):
        health = Health(TIMEOUT)
        health.awaited = ("EndpointSlice", "Service")
        now = "2023-11-14T22:13:20.000000Z"
        assert decoded(health.livez(5, WALL))[1] == {
            "lastUpdated": now, "currentTime": now, "healthy": True, "waitingFor": ["EndpointSlice", "Service"],
        }  # fmt: skip
        health.awaited = ()
        assert decoded(health.healthz(5, WALL))[1] == {
            "lastUpdated": NEVER, "currentTime": now, "nodeEligible": False, "healthy": False,
        }  # fmt: skip

    def test_well_is_updated_now(self):
        assert decoded(after(("turned", 170)).healthz(170, WALL))[1] == {
            "lastUpdated": "2023-11-14T22:13:20.000000Z",
            "currentTime": "2023-11-14T22:13:20.000000Z",
            "nodeEligible": True,
            "healthy": True,
            "status": {
                family: {"lastUpdated": "2023-11-14T22:12:10.000000Z", "healthy": True} for family in ("IPv4", "IPv6")
            },
        }

    def test_each_family_is_healthy_or_not(self):
        body = decoded(after(("queued", (110, 6)), ("turned", 180)).livez(180, WALL))[1]
        assert {family: one["healthy"] for family, one in body["status"].items()} == {"IPv4": True, "IPv6": False}
        assert body["lastUpdated"] == "2023-11-14T22:12:00.000000Z", "when it was, as it is not well"
        alone = after(("queued", (90, 6)), ("updated", 100), health=Health(TIMEOUT, (4,)))  # no rule is made for it
        assert list(decoded(alone.livez(101, WALL))[1]["status"]) == ["IPv4"]

    @pytest.mark.parametrize("eligible", [False, None])
    def test_a_node_that_is_deleted_is_said_to_be_in_healthz_alone(self, eligible):
        health = after(("node", eligible))
        body = decoded(health.healthz(101, WALL))[1]
        assert (body["nodeEligible"], body["healthy"]) == (False, True)
        body = decoded(health.livez(101, WALL))[1]
        assert ("nodeEligible" in body, body["healthy"]) == (False, True)

    def test_a_setting_that_serves_nowhere_is_told_and_changes_no_answer(self):
        health = programmed(100)
        health.warnings = ("nodePortAddresses match nothing",)
        answer = health.healthz(101, WALL)
        assert (answer.code, decoded(answer)[1]["warnings"]) == (200, ["nodePortAddresses match nothing"])

    def test_answers_are_counted(self):
        health = programmed(100)
        health.healthz(101, WALL)
        health.livez(101, WALL)
        health.livez(400, WALL)
        assert dict(health.asked) == {("healthz", 200): 1, ("livez", 200): 1, ("livez", 503): 1}


class TestServiceAnswer:
    """8.4."""

    @pytest.mark.parametrize(("count", "well", "code"), [(2, True, 200), (0, True, 503), (2, False, 503)])
    def test_status_and_body(self, count, well, code):
        answer = service_answer("shop/web", HealthCheck(30100, ((4, count),)), 4, well=well)
        assert decoded(answer) == (
            code,
            {"service": {"namespace": "shop", "name": "web"}, "localEndpoints": count, "serviceProxyHealthy": well},
        )
        assert dict(answer.headers) == {
            "X-Content-Type-Options": "nosniff",
            "X-Load-Balancing-Endpoint-Weight": str(count),
        }
        assert answer.content_type == "application/json"

    def test_each_family_has_its_own_count(self):
        check = HealthCheck(30100, ((4, 2), (6, 1)))
        assert [check.local_endpoints(family) for family in (4, 6)] == [2, 1]
        assert HealthCheck(30100, ((4, 2),)).local_endpoints(6) == 2, "a load balancer may ask at the other family"


ME, OTHER = "me", "other"
WEB = Service(
    "shop", "web", "LoadBalancer", ("10.96.0.10", "fd96::10"), ports=(ServicePort("http", Protocol.TCP, 80),),
    external_local=True, health_check_node_port=30100,
)  # fmt: skip
HTTP, METRICS = EndpointPort("http", Protocol.TCP, 8080), EndpointPort("metrics", Protocol.TCP, 9090)


def a_slice(*endpoints: Endpoint, name: str = "a", family: int = 4, ports: tuple[EndpointPort, ...] = (HTTP,)):
    return EndpointSlice("shop", name, "shop/web", family, ports, endpoints)


def count(*slices: EndpointSlice, service: Service = WEB, family: int = 4) -> int:
    check = health_check(service, slices, ME)
    assert check is not None
    return check.local_endpoints(family)


class TestWhoCounts:
    """8.4: distinct local ready addresses."""

    @pytest.mark.parametrize(
        ("expected", "endpoint"),
        [
            pytest.param(1, Endpoint("10.1.0.1", ME), id="ready here"),
            pytest.param(0, Endpoint("10.1.0.1", OTHER), id="ready elsewhere"),
            pytest.param(0, Endpoint("10.1.0.1"), id="without a node"),
            pytest.param(0, Endpoint("10.1.0.1", ME, ready=False), id="serving, not ready"),
            pytest.param(0, Endpoint("10.1.0.1", ME, ready=False, terminating=True), id="terminating"),
            pytest.param(1, Endpoint("10.1.0.1", ME, ready=True, terminating=True), id="publishNotReadyAddresses"),
        ],
    )
    def test_one_endpoint(self, endpoint, expected):
        assert count(a_slice(endpoint)) == expected

    def test_an_address_counts_once(self):
        here = Endpoint("10.1.0.1", ME)
        assert count(a_slice(here, ports=(HTTP, METRICS)), a_slice(here, name="b")) == 1

    def test_of_copies_the_better_one(self):
        old, new = Endpoint("10.1.0.1", ME, ready=False, terminating=True), Endpoint("10.1.0.1", ME)
        assert count(a_slice(old), a_slice(new, name="b")) == count(a_slice(new), a_slice(old, name="b")) == 1

    def test_families_are_counted_apart(self):
        slices = a_slice(Endpoint("10.1.0.1", ME)), a_slice(Endpoint("fd01::1", ME), Endpoint("fd01::2", ME), family=6)
        assert [count(*slices, family=family) for family in (4, 6)] == [1, 2]

    def test_weight_0_gets_no_new_connections(self):
        service = Service(**{f: getattr(WEB, f) for f in WEB.__struct_fields__} | {"weights": (("10.1.0.1", 0),)})
        assert count(a_slice(Endpoint("10.1.0.1", ME)), service=service) == 0

    def test_no_endpoints_at_all(self):
        assert count() == 0

    @pytest.mark.parametrize(
        "changes", [{"type": "NodePort"}, {"external_local": False}, {"health_check_node_port": 0}], ids=str
    )
    def test_only_load_balancers_with_local_policy(self, changes):
        fields = {f: getattr(WEB, f) for f in WEB.__struct_fields__} | changes
        assert health_check(Service(**fields), [a_slice(Endpoint("10.1.0.1", ME))], ME) is None


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        pytest.param((), ("0.0.0.0",), id="unset: as kube-proxy's iptables mode"),
        pytest.param(("primary",), ("192.168.0.1",), id="primary: as its nftables mode"),
        pytest.param(("10.0.0.0/8",), ("10.0.0.5",), id="some"),
        pytest.param(("0.0.0.0/0", "::/0"), ("0.0.0.0",), id="all"),
        pytest.param(("all", "primary"), ("0.0.0.0",), id="all, by its name"),
        pytest.param(("primary", "localhost"), ("192.168.0.1", "127.0.0.1"), id="primary and loopback"),
        pytest.param(("localhost",), ("127.0.0.1",), id="loopback alone"),
        pytest.param(("172.16.0.0/12",), ("0.0.0.0",), id="none of this node's: everywhere, as kube-proxy"),
    ],
)
def test_where_the_ports_are(wanted, expected):
    settings = Settings(node_name=ME, node_port_addresses=wanted, primary=("192.168.0.1",))
    assert health_addresses(settings, node_network(settings, None, ("192.168.0.1", "10.0.0.5"), ())) == expected
