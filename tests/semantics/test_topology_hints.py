"""Topology hints (KEP-2433, KEP-4444): node hints, then zone hints, all or nothing."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import pytest
from make import ME, NODE, Node, away, endpoint_slice, frontend, here, only, service, shown

from hybrid_proxy.dataplane.table import Kind

A, B = ["zone-a"], ["zone-b"]
NO_ZONE = Node(ME, NODE.addresses)
IGNORED = "ready endpoints; topology hints ignored: "

# fmt: off
CASES = [
    #            endpoints                                                                node     backends              why
    pytest.param([away("1.0.0.1", zones=A), away("1.0.0.2", zones=B)],                    NODE,    "1.0.0.1",            "zone hints: zone-a", id="endpoints hinted for this zone"),
    pytest.param([away("1.0.0.1", zones=A), away("1.0.0.2", zones=["zone-b", "zone-a"])], NODE,    "1.0.0.1 1.0.0.2",    "zone hints: zone-a", id="an endpoint hinted for several zones"),
    pytest.param([away("1.0.0.1", zones=A), away("1.0.0.2")],                             NODE,    "1.0.0.1 1.0.0.2",    IGNORED + "1 of 2 ready endpoints have no zone hint", id="one endpoint without a hint turns hints off"),
    pytest.param([away("1.0.0.1", zones=A), away("1.0.0.2", "unready")],                  NODE,    "1.0.0.1",            "zone hints: zone-a", id="an unready endpoint without a hint does not"),
    pytest.param([away("1.0.0.1", zones=B), away("1.0.0.2", zones=B)],                    NODE,    "1.0.0.1 1.0.0.2",    IGNORED + "no endpoint has a zone hint for zone-a", id="no endpoint for this zone: all"),
    pytest.param([away("1.0.0.1", zones=B), away("1.0.0.2", "unready", zones=A)],         NODE,    "1.0.0.1",            IGNORED + "no endpoint has a zone hint for zone-a", id="the endpoint for this zone is not ready: all ready ones"),
    pytest.param([away("1.0.0.1", zones=A), away("1.0.0.2", zones=B)],                    NO_ZONE, "1.0.0.1 1.0.0.2",    IGNORED + "this node has no zone label", id="a node without a zone label"),
    pytest.param([away("1.0.0.1", zones=A), away("1.0.0.2", zones=B)],                    None,    "1.0.0.1 1.0.0.2",    IGNORED + "this node has no zone label", id="a node that is not known yet"),
    pytest.param([away("1.0.0.1", nodes=[ME]), away("1.0.0.2", nodes=["node-b"])],        NODE,    "1.0.0.1",            "node hints: node-a", id="endpoints hinted for this node"),
    pytest.param([away("1.0.0.1", nodes=["node-b"], zones=B), away("1.0.0.2", nodes=["node-c"], zones=A)], NODE, "1.0.0.2", "zone hints: zone-a", id="no node hint for this node: zone hints decide"),
    pytest.param([away("1.0.0.1", nodes=[ME], zones=B), away("1.0.0.2", nodes=["node-c"], zones=A)], NODE, "1.0.0.1",   "node hints: node-a", id="node hints win over zone hints"),
    pytest.param([away("1.0.0.1", nodes=[ME], zones=A), away("1.0.0.2", zones=A), away("1.0.0.3", zones=B)], NODE, "1.0.0.1 1.0.0.2", "zone hints: zone-a", id="one endpoint without a node hint turns node hints off"),
    pytest.param([away("1.0.0.1", nodes=["node-b"])],                                     NODE,    "1.0.0.1",            IGNORED + "no endpoint has a node hint for node-a", id="node hints for others only"),
    pytest.param([away("1.0.0.1", nodes=[ME]), away("1.0.0.2")],                          NODE,    "1.0.0.1 1.0.0.2",    IGNORED + "1 of 2 ready endpoints have no node hint", id="node hints incomplete, no zone hints"),
    pytest.param([away("1.0.0.1", nodes=[ME])],                                           None,    "1.0.0.1",            "node hints: node-a", id="node hints need no Node object"),
    pytest.param([away("1.0.0.1", "draining", zones=A), away("1.0.0.2", "draining", zones=B)], NODE, "1.0.0.1 1.0.0.2",  "terminating fallback: no endpoint is ready, these still serve", id="the terminating fallback ignores hints"),
]
# fmt: on


@pytest.mark.parametrize(("endpoints", "node", "backends", "why"), CASES)
def test_cluster_route(endpoints, node, backends, why):
    entry = only(service(external_ips=("1.1.1.1",)), endpoint_slice(*endpoints), node=node)
    route = frontend(entry).internal
    assert (shown(route), route.why) == (backends, why)
    assert frontend(entry, Kind.EXTERNAL_IP).external is route


def test_hints_do_not_narrow_the_local_route():
    svc = service(external_ips=("1.1.1.1",), external_local=True, internal_local=True)
    entry = only(svc, endpoint_slice(here("1.0.0.1", zones=B), here("1.0.0.2", zones=A), away("1.0.0.3", zones=A)))
    assert shown(frontend(entry).internal) == "1.0.0.1 1.0.0.2"
    assert shown(frontend(entry, Kind.EXTERNAL_IP).external) == "1.0.0.1 1.0.0.2"
    assert shown(frontend(entry, Kind.EXTERNAL_IP).internal) == "1.0.0.2 1.0.0.3"


def test_hints_look_at_all_slices_together():
    one = endpoint_slice(away("1.0.0.1", zones=A), name="one")
    two = endpoint_slice(away("1.0.0.2"), name="two")
    assert shown(frontend(only(service(), one, two)).internal) == "1.0.0.1 1.0.0.2"
