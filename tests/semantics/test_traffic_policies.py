"""internalTrafficPolicy and externalTrafficPolicy: which backends for whom, refuse or drop."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import pytest
from make import ServicePort, away, endpoint_slice, ep, frontend, here, only, service, shown

from hybrid_proxy.dataplane.table import Kind, Protocol

BOTH = (away("10.1.1.1"), here("10.1.0.1"))
ELSEWHERE = (away("10.1.1.1"),)
NONE = ()
UNREADY = (here("10.1.0.1", "unready"),)
ALL = "10.1.0.1 10.1.1.1"

# fmt: off
CASES = [
    #            internal  external  endpoints    ClusterIP in,out          external in,out
    pytest.param(False, False, BOTH,      (ALL, ALL),                (ALL, ALL),             id="Cluster, Cluster: all endpoints for all, local ones first"),
    pytest.param(True,  False, BOTH,      ("10.1.0.1", "10.1.0.1"),  (ALL, ALL),             id="internal Local binds the ClusterIP only"),
    pytest.param(False, True,  BOTH,      (ALL, ALL),                (ALL, "10.1.0.1"),      id="external Local binds outsiders only (short-circuit)"),
    pytest.param(True,  True,  BOTH,      ("10.1.0.1", "10.1.0.1"),  (ALL, "10.1.0.1"),      id="both Local: the short-circuit still reaches everything"),
    pytest.param(True,  False, ELSEWHERE, ("drop", "drop"),          ("10.1.1.1", "10.1.1.1"), id="internal Local with none here: drop"),
    pytest.param(False, True,  ELSEWHERE, ("10.1.1.1", "10.1.1.1"),  ("10.1.1.1", "drop"),   id="external Local with none here: drop, not refuse"),
    pytest.param(True,  True,  ELSEWHERE, ("drop", "drop"),          ("10.1.1.1", "drop"),   id="both Local with none here"),
    pytest.param(False, False, NONE,      ("reject", "reject"),      ("reject", "reject"),   id="no endpoints: refuse"),
    pytest.param(True,  True,  NONE,      ("reject", "reject"),      ("reject", "reject"),   id="no endpoints anywhere: refuse under Local too"),
    pytest.param(True,  True,  UNREADY,   ("reject", "reject"),      ("reject", "reject"),   id="only an unready endpoint here: refuse"),
]
# fmt: on


@pytest.mark.parametrize("kind", [Kind.EXTERNAL_IP, Kind.LOAD_BALANCER, Kind.NODE_PORT], ids=lambda k: k.value)
@pytest.mark.parametrize(("internal", "external", "endpoints", "expected", "expected_outer"), CASES)
def test_routes(kind, internal, external, endpoints, expected, expected_outer):
    svc = service(
        type="LoadBalancer",
        ports=(ServicePort("http", Protocol.TCP, 80, 30080),),
        load_balancer_ips=("5.5.5.5",),
        external_ips=("1.1.1.1",),
        internal_local=internal,
        external_local=external,
    )
    entry = only(svc, endpoint_slice(*endpoints))
    first, other = frontend(entry), frontend(entry, kind)
    assert (shown(first.internal), shown(first.external)) == expected
    assert (shown(other.internal), shown(other.external)) == expected_outer


# fmt: off
HONOURED = [
    pytest.param({"type": "NodePort", "ports": (ServicePort("http", Protocol.TCP, 80, 30080),)}, Kind.NODE_PORT, "drop", id="NodePort service"),
    pytest.param({"type": "LoadBalancer", "load_balancer_ips": ("5.5.5.5",)}, Kind.LOAD_BALANCER, "drop",  id="LoadBalancer service"),
    pytest.param({"type": "ClusterIP", "external_ips": ("1.1.1.1",)},         Kind.EXTERNAL_IP, "drop",    id="ClusterIP service with external IPs"),
    pytest.param({"type": "ClusterIP", "load_balancer_ips": ("5.5.5.5",)},    Kind.LOAD_BALANCER, "10.1.1.1", id="a stale load-balancer status on a ClusterIP service: policy not honoured"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "kind", "expected"), HONOURED)
def test_external_policy_needs_a_service_that_is_reachable_from_outside(fields, kind, expected):
    entry = only(service(external_local=True, **fields), endpoint_slice(*ELSEWHERE))
    assert shown(frontend(entry, kind).external) == expected


# fmt: off
LOCALITY = [
    pytest.param("node-a", "10.1.0.1", id="the endpoint's node is this one"),
    pytest.param("node-b", "drop",     id="another node"),
    pytest.param("Node-A", "drop",     id="names compare exactly"),
    pytest.param(None,     "drop",     id="an endpoint without a node is remote"),
    pytest.param("",       "drop",     id="an empty node name is no node"),
]
# fmt: on


@pytest.mark.parametrize(("node", "expected"), LOCALITY)
def test_what_is_local(node, expected):
    entry = only(service(internal_local=True), endpoint_slice(ep("10.1.0.1", node)))
    assert shown(frontend(entry).internal) == expected


# fmt: off
REASONS = [
    pytest.param({"internal_local": True}, BOTH, "internalTrafficPolicy Local: endpoints on this node", id="internal"),
    pytest.param({"internal_local": True}, ELSEWHERE, "internalTrafficPolicy Local: no endpoint on this node, there are some on others", id="none here"),
    pytest.param({}, BOTH, "ready endpoints", id="cluster"),
    pytest.param({}, NONE, "the service has no endpoints", id="no endpoints"),
    pytest.param({}, UNREADY, "no endpoint is ready, and none serves while it terminates", id="none usable"),
    pytest.param({"ports": (ServicePort("web", Protocol.TCP, 80),)}, BOTH, "no EndpointSlice of the service has a TCP port named 'web'; they have 'http' (TCP)", id="port name mismatch"),
    pytest.param({"ports": (ServicePort("", Protocol.UDP, 80),)}, BOTH, "no EndpointSlice of the service has a UDP port without a name; they have 'http' (TCP)", id="port protocol mismatch"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "endpoints", "why"), REASONS)
def test_a_route_says_why(fields, endpoints, why):
    assert frontend(only(service(**fields), endpoint_slice(*endpoints))).internal.why == why


def test_external_local_says_why():
    svc = service(external_ips=("1.1.1.1",), external_local=True)
    entry = only(svc, endpoint_slice(*BOTH))
    why = frontend(entry, Kind.EXTERNAL_IP).external.why
    assert why == "externalTrafficPolicy Local: endpoints on this node"
