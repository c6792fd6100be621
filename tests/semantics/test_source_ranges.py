"""loadBalancerSourceRanges: which sources a load-balancer IP lets in."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import pytest
from make import NODE, Node, ServicePort, decide, endpoint_slice, frontend, here, only, service

from hybrid_proxy.dataplane.table import Kind, Protocol

# fmt: off
CASES = [
    pytest.param((),                                     None,                                        id="no ranges: everybody"),
    pytest.param(("203.0.113.0/24",),                    ("203.0.113.0/24",),                         id="one range"),
    pytest.param(("203.0.113.0/24", "198.51.100.7/32"),  ("203.0.113.0/24", "198.51.100.7/32"),       id="several ranges, in their order"),
    pytest.param(("203.0.113.0/24", "203.0.113.0/24"),   ("203.0.113.0/24",),                         id="a range twice is one"),
    pytest.param(("0.0.0.0/0",),                         None,                                        id="/0 is no restriction"),
    pytest.param(("203.0.113.0/24", "0.0.0.0/0"),        None,                                        id="/0 beside others is no restriction"),
    pytest.param(("2001:db8::/32",),                     None,                                        id="only ranges of the other family: no restriction"),
    pytest.param(("::/0",),                              None,                                        id="only /0 of the other family: no restriction"),
    pytest.param(("203.0.113.0/24", "2001:db8::/32"),    ("203.0.113.0/24",),                         id="the other family's ranges are omitted"),
    pytest.param(("203.0.113.0/24", "::/0"),             ("203.0.113.0/24",),                         id="/0 of the other family does not open this one"),
    pytest.param(("192.168.0.0/24",),                    ("192.168.0.0/24", "5.5.5.5/32", "6.6.6.6/32"), id="the node is inside: the load-balancer IPs themselves too"),
    pytest.param(("192.168.0.9/24",),                    ("192.168.0.9/24", "5.5.5.5/32", "6.6.6.6/32"), id="a range that is written by one of its addresses"),
    pytest.param(("192.168.0.1/32",),                    ("192.168.0.1/32", "5.5.5.5/32", "6.6.6.6/32"), id="the node's address alone"),
    pytest.param(("192.168.0.2/32",),                    ("192.168.0.2/32",),                         id="another node's address"),
]
# fmt: on


@pytest.mark.parametrize(("ranges", "expected"), CASES)
def test_sources_of_a_load_balancer_ip(ranges, expected):
    svc = service(type="LoadBalancer", load_balancer_ips=("5.5.5.5", "fd05::5", "6.6.6.6"), source_ranges=ranges)
    entry = only(svc, endpoint_slice(here("10.1.0.1")))
    assert {f.source_ranges for f in entry.frontends if f.kind is Kind.LOAD_BALANCER} == {expected}


def test_only_the_load_balancer_ip_is_guarded():
    svc = service(
        type="LoadBalancer",
        load_balancer_ips=("5.5.5.5",),
        external_ips=("1.1.1.1",),
        source_ranges=("203.0.113.0/24",),
        ports=(ServicePort("http", Protocol.TCP, 80, 30080),),
    )
    entry = only(svc, endpoint_slice(here("10.1.0.1")))
    guarded = {f.kind for f in entry.frontends if f.source_ranges is not None}
    assert guarded == {Kind.LOAD_BALANCER}


def test_an_address_that_is_also_an_external_ip_is_guarded():
    svc = service(
        type="LoadBalancer",
        load_balancer_ips=("5.5.5.5",),
        external_ips=("5.5.5.5",),
        source_ranges=("203.0.113.0/24",),
    )
    entry = only(svc, endpoint_slice(here("10.1.0.1")))
    assert frontend(entry, Kind.LOAD_BALANCER).source_ranges == ("203.0.113.0/24",)


def test_ranges_of_each_family():
    svc = service(
        type="LoadBalancer",
        cluster_ips=("10.96.0.10", "fd00::10"),
        load_balancer_ips=("5.5.5.5", "fd05::5"),
        source_ranges=("203.0.113.0/24", "fd01::/64"),
    )
    v4, v6 = decide(svc)
    assert frontend(v4, Kind.LOAD_BALANCER).source_ranges == ("203.0.113.0/24",)
    assert frontend(v6, Kind.LOAD_BALANCER).source_ranges == ("fd01::/64", "fd05::5/128")


def test_a_node_without_addresses_adds_nothing():
    svc = service(type="LoadBalancer", load_balancer_ips=("5.5.5.5",), source_ranges=("192.168.0.0/24",))
    entry = only(svc, node=Node(NODE.name))
    assert frontend(entry, Kind.LOAD_BALANCER).source_ranges == ("192.168.0.0/24",)
