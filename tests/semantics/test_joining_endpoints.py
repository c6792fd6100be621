"""How slices and ports join, which copy of an endpoint counts, in which order, and what still serves."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import itertools

import pytest
from make import (
    HTTP,
    EndpointPort,
    ServicePort,
    away,
    decide,
    endpoint_slice,
    ep,
    frontend,
    here,
    only,
    service,
    shown,
    sockets,
)  # fmt: skip  # isort: skip

from hybrid_proxy.dataplane.table import Protocol
from tests.tables import fronts_of

TCP, UDP = Protocol.TCP, Protocol.UDP


def test_a_port_joins_by_name_and_protocol():
    ports = (HTTP, ServicePort("dns", UDP, 53), ServicePort("dns-tcp", TCP, 53), ServicePort("admin", UDP, 80))
    numbers = (EndpointPort("dns-tcp", TCP, 5354), EndpointPort("dns", UDP, 5353), EndpointPort("http", TCP, 8080),
               EndpointPort("admin", TCP, 9090))  # fmt: skip
    found = decide(service(ports=ports), endpoint_slice(here("10.1.0.1"), ports=numbers))
    assert {e.name: sockets(frontend(e).internal.backends) for e in found} == {
        "default/web:http": ["10.1.0.1:8080"],
        "default/web:dns": ["10.1.0.1:5353"],
        "default/web:dns-tcp": ["10.1.0.1:5354"],
        "default/web:admin": [],
    }


def test_an_unnamed_port_joins_an_unnamed_port():
    svc = service(ports=(ServicePort("", TCP, 80),))
    entry = only(svc, endpoint_slice(here("10.1.0.1"), ports=[EndpointPort("", TCP, 8080)]))
    assert sockets(frontend(entry).internal.backends) == ["10.1.0.1:8080"]
    entry = only(svc, endpoint_slice(here("10.1.0.1")))
    assert frontend(entry).internal.backends == ()


def test_slices_may_have_different_numbers_for_one_port():
    one = endpoint_slice(here("10.1.0.1"), name="one")
    two = endpoint_slice(away("10.1.1.1"), name="two", ports=[EndpointPort("http", TCP, 9090)])
    assert sockets(frontend(only(service(), one, two)).internal.backends) == ["10.1.0.1:8080", "10.1.1.1:9090"]


def test_one_address_on_two_ports_is_two_backends():
    one = endpoint_slice(here("10.1.0.1"), name="one")
    two = endpoint_slice(here("10.1.0.1"), name="two", ports=[EndpointPort("http", TCP, 9090)])
    assert sockets(frontend(only(service(), two, one)).internal.backends) == ["10.1.0.1:8080", "10.1.0.1:9090"]


# fmt: off
COPIES = [
    #            two copies of 10.1.0.1:8080                                            backends     serving
    pytest.param([here("10.1.0.1"), here("10.1.0.1")],                                  "10.1.0.1", 1, id="an equal copy counts once"),
    pytest.param([here("10.1.0.1", "draining"), here("10.1.0.1")],                      "10.1.0.1", 1, id="a ready copy wins over a terminating one"),
    pytest.param([here("10.1.0.1", "draining"), here("10.1.0.1", "unready")],           "reject",   0, id="a copy that does not terminate wins, even unready"),
    pytest.param([here("10.1.0.1", "gone"), here("10.1.0.1", "draining")],              "10.1.0.1", 1, id="of terminating copies the one that serves"),
    pytest.param([here("10.1.0.1", "unready"), here("10.1.0.1")],                       "10.1.0.1", 1, id="of running copies the ready one"),
    pytest.param([here("10.1.0.1", "draining-ready"), here("10.1.0.1", "unready")],     "reject",   0, id="a running copy wins over one that is ready and terminates"),
]
# fmt: on


@pytest.mark.parametrize(("copies", "backends", "serving"), COPIES)
@pytest.mark.parametrize("together", [True, False], ids=["in one slice", "in two slices"])
def test_copies_of_one_endpoint(copies, backends, serving, together):
    for first, second in itertools.permutations(copies):
        if together:
            slices = [endpoint_slice(first, second)]
        else:
            slices = [endpoint_slice(first, name="one"), endpoint_slice(second, name="two")]
        entry = only(service(), *slices)
        assert shown(frontend(entry).internal) == backends
        assert len(entry.serving) == serving


@pytest.mark.parametrize("together", [True, False], ids=["in one slice", "in two slices"])
def test_a_local_copy_wins_over_a_remote_one(together):
    for first, second in itertools.permutations([here("10.1.0.1"), away("10.1.0.1")]):
        slices = [endpoint_slice(first, second)] if together else [
            endpoint_slice(first, name="one"), endpoint_slice(second, name="two")]  # fmt: skip
        (backend,) = frontend(only(service(internal_local=True), *slices)).internal.backends
        assert backend.local


def test_order_is_local_first_then_text_whatever_the_slices_say():
    endpoints = [away("10.1.1.2"), here("10.1.0.2"), away("10.1.1.1"), here("10.1.0.1"), ep("10.0.0.9")]
    expected = "10.1.0.1 10.1.0.2 10.0.0.9 10.1.1.1 10.1.1.2"
    for order in itertools.permutations(endpoints):
        plain = endpoint_slice(*order)
        assert shown(frontend(only(service(), plain)).internal) == expected
        split = [endpoint_slice(*order[:2], name="one"), endpoint_slice(*order[2:], name="two")]
        entry = only(service(external_ips=("1.1.1.1",), external_local=True), *split)
        assert shown(frontend(entry).internal) == expected
        local = fronts_of(entry)[1].external.backends
        assert frontend(entry).internal.backends[: len(local)] == local


# fmt: off
SERVING = [
    pytest.param("ready",          True,  id="ready"),
    pytest.param("starting",       True,  id="not ready, serving unset: existing flows are left alone"),
    pytest.param("draining",       True,  id="serving while terminating"),
    pytest.param("unready",        False, id="neither ready nor serving"),
    pytest.param("gone",           False, id="terminating, not serving"),
    pytest.param("odd",            True,  id="ready but not serving: it gets traffic, so its flows stay"),
]
# fmt: on


@pytest.mark.parametrize(("state", "expected"), SERVING)
@pytest.mark.parametrize("zones", [(), ("zone-a",)], ids=["plain", "with hints"])
def test_what_still_serves(state, expected, zones):
    entry = only(service(), endpoint_slice(here("10.1.0.1", state), away("10.1.1.1", zones=zones)))
    assert sockets(entry.serving) == ["10.1.0.1:8080"] * expected + ["10.1.1.1:8080"]


def test_what_policies_and_hints_leave_out_still_serves():
    svc = service(internal_local=True)
    entry = only(svc, endpoint_slice(here("10.1.0.1", zones=["zone-a"]), away("10.1.1.1", zones=["zone-b"])))
    assert shown(frontend(entry).internal) == "10.1.0.1"
    assert sockets(entry.serving) == ["10.1.0.1:8080", "10.1.1.1:8080"]


def test_families_do_not_mix():
    svc = service(cluster_ips=("fd00::10", "10.96.0.10"), external_ips=("1.1.1.1", "fd09::1"))
    v6, v4 = decide(
        svc, endpoint_slice(here("10.1.0.1"), name="four"), endpoint_slice(here("fd02::1"), name="six", family=6)
    )
    assert (v6.family, v4.family) == (6, 4)
    assert [f.address for f in v6.frontends] == ["fd00::10", "fd09::1"]
    assert [f.address for f in v4.frontends] == ["10.96.0.10", "1.1.1.1"]
    assert sockets(v6.serving) == ["[fd02::1]:8080"]
    assert sockets(v4.serving) == ["10.1.0.1:8080"]


def test_a_family_without_a_cluster_ip_is_not_served():
    svc = service(external_ips=("fd09::1",), type="NodePort", ports=(ServicePort("http", TCP, 80, 30080),))
    entry = only(svc, endpoint_slice(here("fd02::1"), family=6))
    assert entry.family == 4
    assert [f.address for f in entry.frontends] == ["10.96.0.10", None]
    assert shown(frontend(entry).internal) == "reject"
