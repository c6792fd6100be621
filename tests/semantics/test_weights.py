"""Weights of endpoints: carried to every backend; 0 is out of the routes and keeps what it has."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import pytest
from make import ME, away, decide, endpoint_slice, ep, frontend, here, only, service, shown, table

from hybrid_proxy.controller.semantics.entries import health_check
from hybrid_proxy.controller.semantics.explain import Explainer, Packet
from hybrid_proxy.dataplane.table import Kind, WhenEmpty

LB = {"type": "LoadBalancer", "load_balancer_ips": ("5.5.5.5",), "external_local": True}
A, B = here("10.1.0.1"), away("10.1.1.1")


def weights(**by_name: int) -> tuple[tuple[str, int], ...]:
    addresses = {"a": "10.1.0.1", "b": "10.1.1.1", "c": "fd02::5"}
    return tuple(sorted((addresses[name], weight) for name, weight in by_name.items()))


def test_every_backend_has_its_weight_and_others_have_one():
    entry = only(service(weights=weights(a=3)), endpoint_slice(A, B))
    carried = {backend.address: backend.weight for backend in frontend(entry).internal.backends}
    assert carried == {"10.1.0.1": 3, "10.1.1.1": 1}
    assert set(frontend(entry).internal.backends) <= set(entry.serving), "the same values in both places"


def test_both_families_and_all_ports():
    svc = service(cluster_ips=("10.96.0.10", "fd00::10"), weights=weights(a=2, c=5))
    entries = decide(svc, endpoint_slice(A), endpoint_slice(ep("fd02::5"), name="web-6", family=6))
    assert [entry.serving[0].weight for entry in entries] == [2, 5]


def test_a_weight_for_an_address_that_is_no_endpoint_means_nothing():
    entry = only(service(weights=(("10.9.9.9", 0),)), endpoint_slice(A, B))
    assert [backend.weight for backend in entry.serving] == [1, 1]


# fmt: off
CASES = [
    #            weights              endpoints  cluster               local
    pytest.param(weights(a=0),        (A, B),    "10.1.1.1",           "drop",     id="none left here, one elsewhere: silence, as with Local"),
    pytest.param(weights(b=0),        (A, B),    "10.1.0.1",           "10.1.0.1", id="the one elsewhere is out"),
    pytest.param(weights(a=0, b=0),   (A, B),    "reject",             "reject",   id="all out: refused"),
    pytest.param(weights(a=0),        (A,),      "reject",             "reject",   id="the only one out: refused"),
    pytest.param(weights(a=1, b=2),   (A, B),    "10.1.0.1 10.1.1.1",  "10.1.0.1", id="none out"),
    pytest.param(weights(a=0),        (B,),      "10.1.1.1",           "drop",     id="no endpoint here anyway"),
]
# fmt: on


@pytest.mark.parametrize(("given", "endpoints", "cluster", "local"), CASES)
def test_weight_zero_gets_no_new_connections(given, endpoints, cluster, local):
    entry = only(service(weights=given, **LB), endpoint_slice(*endpoints))
    outer = frontend(entry, Kind.LOAD_BALANCER)
    assert (shown(outer.internal), shown(outer.external)) == (cluster, local)
    assert {backend.address for backend in entry.serving} == {e.address for e in endpoints}, "they serve who is there"


def test_weight_zero_does_not_bring_terminating_endpoints_back():
    svc = service(weights=weights(a=0))
    entry = only(svc, endpoint_slice(A, away("10.1.1.9", "draining")))
    assert shown(frontend(entry).internal) == "reject"
    assert "weight 0" in frontend(entry).internal.why
    assert frontend(entry).internal.when_empty is WhenEmpty.REJECT


# fmt: off
SLICES = [
    #            by address     slice of A, and of B
    pytest.param((),            4,    1,    {"10.1.0.1": 4, "10.1.1.1": 1}, id="each slice its own"),
    pytest.param((),            4,    None, {"10.1.0.1": 4, "10.1.1.1": 1}, id="a slice without: 1"),
    pytest.param(weights(a=2),  4,    5,    {"10.1.0.1": 2, "10.1.1.1": 5}, id="what the Service says of an address precedes"),
    pytest.param(weights(a=2),  0,    5,    {"10.1.0.1": 2, "10.1.1.1": 5}, id="even over maintenance"),
    pytest.param(weights(b=0),  4,    5,    {"10.1.0.1": 4},                id="and into it"),
    pytest.param((),            0,    5,    {"10.1.1.1": 5},                id="maintenance of a slice"),
    pytest.param((),            0,    0,    {},                             id="of all"),
]
# fmt: on


@pytest.mark.parametrize(("of_service", "first", "second", "expected"), SLICES)
def test_slices_have_weights(of_service, first, second, expected):
    svc = service(weights=of_service)
    slices = endpoint_slice(A, name="web-1", weight=first), endpoint_slice(B, name="web-2", weight=second)
    entry = only(svc, *slices)
    assert {b.address: b.weight for b in frontend(entry).internal.backends} == expected
    assert {b.address for b in entry.serving} == {"10.1.0.1", "10.1.1.1"}, "they keep what they have"
    assert only(svc, *reversed(slices)) == entry


def test_of_an_endpoint_in_two_slices_the_better_copy_counts_and_of_equal_ones_the_lesser_weight():
    old, new = endpoint_slice(away("10.1.1.1", "draining"), weight=7), endpoint_slice(B, name="web-2", weight=3)
    assert [b.weight for b in only(service(), old, new).serving] == [3]
    same = endpoint_slice(B, weight=0), endpoint_slice(B, name="web-2", weight=3)
    assert only(service(), *same) == only(service(), *reversed(same))
    assert [b.weight for b in only(service(), *same).serving] == [0]


def test_a_slice_in_maintenance_does_not_count_for_load_balancers():
    svc = service(health_check_node_port=30_000, **LB)
    checks = [
        health_check(svc, (endpoint_slice(A, weight=w), endpoint_slice(B, name="web-2")), ME) for w in (None, 0, 5)
    ]
    assert [check.local_endpoints(4) for check in checks] == [1, 0, 1]


def test_explain_names_what_is_in_maintenance_and_the_slow_start():
    made = table(service(slow_start=30.0), endpoint_slice(A, weight=0), endpoint_slice(B, name="web-2"))
    said = Explainer(made).explain(Packet("", "10.1.7.7", "10.96.0.10", 80, "tcp")).reason
    assert "Weight 0, so no new connections: 10.1.0.1:8080." in said
    assert "A backend that is new has its whole share after 30 s." in said


def test_without_the_annotation_routes_are_not_touched():
    entry = only(service(**LB), endpoint_slice(A))
    assert frontend(entry).internal is frontend(entry, Kind.LOAD_BALANCER).internal


def test_explain_names_the_algorithm_and_the_weights():
    svc = service(algorithm="mh", weights=weights(a=3))
    made = table(svc, endpoint_slice(A, B))
    said = Explainer(made).explain(Packet("", "10.1.7.7", "10.96.0.10", 80, "tcp")).reason
    assert "Algorithm mh: a hash of the connection decides, alike on every node." in said
    assert "Weights: 10.1.0.1:8080 3, 10.1.1.1:8080 1." in said


def test_explain_says_nothing_of_equal_chances():
    made = table(service(), endpoint_slice(A, B))
    said = Explainer(made).explain(Packet("", "10.1.7.7", "10.96.0.10", 80, "tcp")).reason
    assert "Algorithm" not in said
    assert "Weights" not in said
