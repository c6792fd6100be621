"""Generations, what is marked as changed, and what stays the same object."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import msgspec
import pytest
from make import ME, NODE, SERVICE_RANGE, SETTINGS, away, cluster, endpoint_slice, here, listing, service
from msgspec.structs import replace

from hybrid_proxy.controller.kubernetes.model import Removed, Upserted
from hybrid_proxy.controller.semantics.cluster import Cluster
from hybrid_proxy.controller.semantics.entries import DetectLocalMode, Settings
from hybrid_proxy.controller.semantics.tables import Builder
from hybrid_proxy.dataplane.table import EMPTY, Masquerade

WEB, API = service(), service("api", cluster_ips=("10.96.0.11",))
SLICE = endpoint_slice(here("10.1.0.1"))
ADDRESSES = ("192.168.0.1", "fd01::1")


@pytest.fixture
def world():
    state, builder = cluster(NODE, SERVICE_RANGE, WEB, API, SLICE), Builder(SETTINGS)
    return state, builder, builder.build(state, ADDRESSES)


def test_the_first_table(world):
    _, _, table = world
    assert (table.generation, table.base) == (1, 0)
    assert table.changed == {"default/web", "default/api"} == set(table.services)
    assert table.node.service_cidrs == ("10.96.0.0/16", "fd00::/112")
    assert table.node.primary == ("192.168.0.1", "fd01::1")


def test_nothing_at_all_is_the_empty_table():
    assert Builder(Settings()).build(cluster(), ()) is EMPTY


def test_nothing_changed_is_the_same_table(world):
    state, builder, table = world
    assert builder.build(state, ADDRESSES) is table
    state.apply(Upserted(msgspec.structs.replace(NODE, eligible=False)))
    assert builder.build(state, ADDRESSES) is table


def test_backends_that_stay_are_the_same_objects():
    """Old and new entries of all services may be in memory together."""
    state, builder = cluster(NODE, WEB, endpoint_slice(away("10.1.1.1"), here("10.1.0.1"))), Builder(SETTINGS)
    (before,) = builder.build(state, ADDRESSES).services["default/web"]
    state.apply(Upserted(endpoint_slice(away("10.1.1.1"), here("10.1.0.1"), away("10.1.1.2"))))
    (after,) = builder.build(state, ADDRESSES).services["default/web"]
    assert len(after.serving) == 3
    assert [backend for backend in after.serving if any(backend is one for one in before.serving)] == [*before.serving]


# fmt: off
UNCHANGED = [
    pytest.param([Removed("Service", "default/web"), Upserted(WEB)],                        id="deleted and made again"),
    pytest.param([Upserted(endpoint_slice(away("10.1.1.1"))), Upserted(SLICE)],             id="there and back"),
    pytest.param([Upserted(endpoint_slice(name="web-2"))],                                  id="another slice, empty"),
    pytest.param([Upserted(msgspec.structs.replace(WEB, health_check_node_port=32000))],    id="a field that is not for the table"),
]
# fmt: on


@pytest.mark.parametrize("events", UNCHANGED)
def test_a_dirty_service_with_the_same_meaning_changes_nothing(world, events):
    state, builder, table = world
    for event in events:
        state.apply(event)
    assert builder.build(state, ADDRESSES) is table


def test_one_change(world):
    state, builder, table = world
    state.apply(Upserted(endpoint_slice(here("10.1.0.1"), away("10.1.1.1"))))
    after = builder.build(state, ADDRESSES)
    assert (after.generation, after.base, after.changed) == (2, 1, {"default/web"})
    assert after.services["default/api"] is table.services["default/api"]
    assert len(after.services["default/web"][0].serving) == 2
    assert len(table.services["default/web"][0].serving) == 1, "the last table is not touched"


def test_health_check_node_ports_change_without_a_service_of_the_table(world):
    state, builder, _ = world
    fields = {"type": "LoadBalancer", "external_local": True, "health_check_node_port": 32000}
    state.apply(Upserted(msgspec.structs.replace(WEB, **fields)))
    first = builder.build(state, ADDRESSES)
    assert first.health_ports == (32000,)
    assert {name: check.port for name, check in builder.health_checks.items()} == {"default/web": 32000}
    state.apply(Upserted(msgspec.structs.replace(WEB, **fields | {"health_check_node_port": 32001})))
    second = builder.build(state, ADDRESSES)
    assert (second.generation, second.base, second.changed) == (first.generation + 1, first.generation, frozenset())
    assert second.health_ports == (32001,)
    checks = builder.health_checks
    state.apply(Upserted(endpoint_slice(here("10.1.0.1"), here("10.1.0.2"))))
    third = builder.build(state, ADDRESSES)
    assert third.health_ports == (32001,)
    assert builder.health_checks is not checks, "another count"
    state.apply(Removed("Service", "default/web"))
    assert builder.build(state, ADDRESSES).health_ports == ()


def test_a_removed_service(world):
    state, builder, _ = world
    state.apply(Removed("Service", "default/api"))
    after = builder.build(state, ADDRESSES)
    assert after.changed == {"default/api"}
    assert set(after.services) == {"default/web"}


# fmt: off
NODE_CHANGES = [
    pytest.param({"zone": "zone-b"},               True,  id="a zone that no hint names"),
    pytest.param({"pod_cidrs": ("10.9.0.0/24",)},  True,  id="another pod CIDR that detection does not ask for"),
    pytest.param({"addresses": ("192.168.7.7",)},  False, id="another primary address"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "same_table"), NODE_CHANGES)
def test_a_change_of_the_node_keeps_services_that_mean_the_same(world, fields, same_table):
    state, builder, table = world
    assert state.apply(Upserted(msgspec.structs.replace(NODE, **fields)))
    after = builder.build(state, ADDRESSES)
    assert (after is table) is same_table
    if not same_table:
        assert (after.generation, after.changed) == (2, frozenset())
    for name in table.services:
        assert after.services[name] is table.services[name]


def test_a_change_of_zone_moves_hinted_services(world):
    state, builder, _ = world
    hinted = endpoint_slice(away("10.1.1.1", zones=["zone-a"]), away("10.1.1.2", zones=["zone-b"]))
    state.apply(Upserted(hinted))
    builder.build(state, ADDRESSES)
    state.apply(Upserted(msgspec.structs.replace(NODE, zone="zone-b")))
    after = builder.build(state, ADDRESSES)
    assert after.changed == {"default/web"}
    assert after.services["default/web"][0].backend_sets[0].why == "zone hints: zone-b"


def test_an_address_added_to_an_interface_is_served_at_once():
    settings = msgspec.structs.replace(SETTINGS, node_port_addresses=("0.0.0.0/0",))
    state, builder = cluster(NODE, WEB), Builder(settings)
    assert "10.0.0.5" not in builder.build(state, ("192.168.0.1",)).node.node_port_addresses
    after = builder.build(state, ("192.168.0.1", "10.0.0.5"))
    assert "10.0.0.5" in after.node.node_port_addresses
    assert (after.changed, after.generation) == (frozenset(), 2)


def test_node_cidrs_that_come_late_turn_masquerade_on():
    settings = msgspec.structs.replace(SETTINGS, detect=DetectLocalMode.NODE_CIDR)
    state, builder = cluster(WEB), Builder(settings)
    before = builder.build(state, ())
    assert before.services["default/web"][0].frontends[0].masquerade is Masquerade.NEVER
    state.apply(Upserted(NODE))
    after = builder.build(state, ())
    assert after.services["default/web"][0].frontends[0].masquerade == Masquerade.NODE | Masquerade.EXTERNAL
    assert after.changed == {"default/web"}


def test_a_service_that_moves_is_served_until_it_is_ceded_and_its_flows_after_that():
    state, builder = Cluster(ME, shares=True), Builder(replace(SETTINGS, proxy_name="lab"))
    for event in listing((NODE, SERVICE_RANGE, WEB, SLICE)):
        state.apply(event)
    before = builder.build(state, ADDRESSES).services["default/web"]
    state.apply(Removed("Service", "default/web"))
    assert builder.build(state, ADDRESSES).services["default/web"] is before
    state.cede(["default/web"])
    (after,) = builder.build(state, ADDRESSES).services["default/web"]
    assert (after.frontends, after.backend_sets) == ((), ())
    assert [backend.address for backend in after.serving] == ["10.1.0.1"]
    state.apply(Removed("EndpointSlice", "default/web-1"))
    assert builder.build(state, ADDRESSES).services == {}


def test_beside_another_proxy_addresses_that_we_do_not_know_are_its_own():
    table = Builder(replace(SETTINGS, proxy_name="lab")).build(cluster(NODE, SERVICE_RANGE), ADDRESSES)
    assert table.node.service_cidrs == ()
