"""A ClusterIP that an interface of the node has is left to what listens there, and to no other Service."""

from __future__ import annotations

import pytest
from make import NODE, SETTINGS, ServicePort, cluster, endpoint_slice, here, service

from hybrid_proxy.controller.kubernetes.model import Removed, Upserted
from hybrid_proxy.controller.semantics.explain import Explainer, Packet, destination_of
from hybrid_proxy.controller.semantics.tables import Builder
from hybrid_proxy.dataplane.table import Kind, Protocol, ServiceTable

DNS, VIP, ALWAYS = "10.96.0.10", "192.0.2.10", NODE.addresses
SERVICE = service(
    "dns", type="LoadBalancer", load_balancer_ips=(VIP,), external_ips=(NODE.addresses[0],),
    ports=(ServicePort("http", Protocol.TCP, 80, 30080),),
)  # fmt: skip
CLAIMS = service("claims", cluster_ips=("10.96.0.11",), external_ips=(DNS,))  # the address, by CVE-2020-8554
SLICES = [endpoint_slice(here("10.1.0.1"), of=name, name=f"{name}-1") for name in ("dns", "claims")]
ALL = {Kind.CLUSTER_IP, Kind.LOAD_BALANCER, Kind.EXTERNAL_IP, Kind.NODE_PORT}


def kinds(table: ServiceTable, name: str = "default/dns") -> set[Kind]:
    return {frontend.kind for entry in table.services.get(name, ()) for frontend in entry.frontends}


def test_it_comes_and_goes_with_the_address():
    state, builder = cluster(NODE, SERVICE, CLAIMS, *SLICES), Builder(SETTINGS)
    assert kinds(builder.build(state, ALWAYS)) == ALL
    left = builder.build(state, (*ALWAYS, DNS, VIP, "169.254.20.10"))
    assert kinds(left) == ALL - {Kind.CLUSTER_IP}, "addresses that are announced are served"
    assert (left.left_to_node, left.changed) == ({DNS: "default/dns"}, {"default/dns"})
    assert kinds(left, "default/claims") == {Kind.CLUSTER_IP}, "nobody else gets the address"
    verdict = Explainer(left).explain(Packet("", "10.1.0.9", DNS, 80, "tcp"))
    assert verdict.verdict == "untouched"
    assert "default/dns" in verdict.reason
    again = builder.build(state, ALWAYS)
    assert (kinds(again), again.left_to_node) == (ALL, {})


@pytest.mark.parametrize("order", [pytest.param(1, id="service-first"), pytest.param(-1, id="address-first")])
def test_the_order_does_not_matter(order: int):
    state, builder = cluster(NODE), Builder(SETTINGS)
    for step in (1, 2)[::order]:
        if step == 1:
            state.apply(Upserted(SERVICE))
        table = builder.build(state, (*ALWAYS, DNS) if step == 2 or order == -1 else ALWAYS)
    assert (kinds(table), table.left_to_node) == (ALL - {Kind.CLUSTER_IP}, {DNS: "default/dns"})
    state.apply(Removed("Service", "default/dns"))
    assert builder.build(state, (*ALWAYS, DNS)).left_to_node == {}


def test_a_service_of_nothing_else_says_why_it_is_not_served():
    table = Builder(SETTINGS).build(cluster(NODE, service("dns"), SLICES[0]), (*ALWAYS, DNS))
    assert kinds(table) == set()
    with pytest.raises(LookupError, match=DNS):
        destination_of(table, "default/dns", "80", "tcp", 4)
