"""What the cluster remembers, and what each event makes worth redoing."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import msgspec
import pytest
from make import ME, NODE, SERVICE_RANGE, Node, ServiceCIDR, away, cluster, endpoint_slice, here, listing, service

from hybrid_proxy.controller.kubernetes.model import (
    KINDS,
    Event,
    Problem,
    Removed,
    Replaced,
    Service,
    SourceState,
    Upserted,
    key_of,
    kind_of,
)
from hybrid_proxy.controller.semantics.cluster import Cluster

WEB, API = service(), service("api", cluster_ips=("10.96.0.11",))
SLICE = endpoint_slice(here("10.1.0.1"))
OF_API = endpoint_slice(here("10.1.0.1"), of="api")
ORPHAN = endpoint_slice(here("10.1.0.1"), of="nobody", name="orphan")


def replace(obj, **fields):
    return msgspec.structs.replace(obj, **fields)


def dirty(*names: str) -> set[str]:
    return {f"default/{name}" for name in names}


# fmt: off
CASES = [
    #            event                                                               may differ, dirty
    pytest.param(Upserted(WEB),                                                      False, dirty(),             id="the same service again"),
    pytest.param(Upserted(service()),                                                False, dirty(),             id="an equal service"),
    pytest.param(Upserted(replace(WEB, internal_local=True)),                        True,  dirty("web"),        id="a service changed"),
    pytest.param(Upserted(service("new", cluster_ips=("10.96.0.12",))),              True,  dirty("new"),        id="a new service"),
    pytest.param(Upserted(endpoint_slice(here("10.1.0.1"))),                         False, dirty(),             id="an equal slice (written again without a change)"),
    pytest.param(Upserted(endpoint_slice(away("10.1.0.1"))),                         True,  dirty("web"),        id="a slice changed"),
    pytest.param(Upserted(endpoint_slice(here("10.1.0.2"), name="web-2")),           True,  dirty("web"),        id="a second slice"),
    pytest.param(Upserted(OF_API),                                                   True,  dirty("web", "api"), id="a slice moves to another service: both"),
    pytest.param(Upserted(replace(SLICE, service="default/nobody")),                 True,  dirty("web"),        id="a slice moves to a service that does not exist"),
    pytest.param(Upserted(replace(ORPHAN, service="default/api")),                   True,  dirty("api"),        id="a slice finds its service"),
    pytest.param(Upserted(replace(ORPHAN, family=6)),                                False, dirty(),             id="a slice of a service that does not exist"),
    pytest.param(Removed("EndpointSlice", "default/web-1"),                          True,  dirty("web"),        id="a slice removed"),
    pytest.param(Removed("EndpointSlice", "default/orphan"),                         False, dirty(),             id="a slice without a service removed"),
    pytest.param(Removed("Service", "default/web"),                                  True,  dirty("web"),        id="a service removed"),
    pytest.param(Removed("Service", "default/nobody"),                               False, dirty(),             id="an unknown service removed"),
    pytest.param(Upserted(replace(NODE, zone="zone-b")),                             True,  dirty(),             id="this node's zone"),
    pytest.param(Upserted(replace(NODE, eligible=False)),                            False, dirty(),             id="this node for load balancers: health alone"),
    pytest.param(Upserted(Node(ME, NODE.addresses, NODE.pod_cidrs, NODE.zone)),      False, dirty(),             id="this node's heartbeat"),
    pytest.param(Upserted(Node("node-b", ("192.168.0.2",))),                         False, dirty(),             id="another node"),
    pytest.param(Removed("Node", "node-b"),                                          False, dirty(),             id="another node removed"),
    pytest.param(Removed("Node", ME),                                                False, dirty(),             id="this node removed: what it said stays"),
    pytest.param(Upserted(ServiceCIDR("more", ("10.200.0.0/16",))),                  True,  dirty(),             id="a service range"),
    pytest.param(Upserted(SERVICE_RANGE),                                            False, dirty(),             id="the same service range again"),
    pytest.param(Removed("ServiceCIDR", "kubernetes"),                               True,  dirty(),             id="a service range removed"),
    pytest.param(Replaced("Service", (WEB, API)),                                    False, dirty(),             id="the same list again (410, listed anew)"),
    pytest.param(Replaced("Service", (WEB,)),                                        True,  dirty("api"),        id="a list without a service: it is gone"),
    pytest.param(Replaced("Service", (WEB,), frozenset({"default/api"})),            False, dirty(),             id="a list that refused a service: its last good version stays"),
    pytest.param(Replaced("Service", (), frozenset({"default/unseen"})),             True,  dirty("web", "api"), id="a refused service that never had a good version"),
    pytest.param(Replaced("EndpointSlice", (OF_API,)),                               True,  dirty("web", "api"), id="a list where a slice moved"),
    pytest.param(Replaced("Node", ()),                                               False, dirty(),             id="a list without this node"),
    pytest.param(Replaced("Node", (NODE, Node("node-b"))),                           False, dirty(),             id="a list of all nodes"),
    pytest.param(Problem("Service", "default/web", "spec.ports[0].port: 0"),         False, dirty(),             id="a refused object"),
    pytest.param(SourceState(False, "away"),                                         False, dirty(),             id="the source is away"),
]
# fmt: on


@pytest.mark.parametrize(("event", "may_differ", "expected"), CASES)
def test_an_event_and_what_it_makes_dirty(event, may_differ, expected):
    state = cluster(NODE, SERVICE_RANGE, WEB, API, SLICE, ORPHAN)
    state.take_dirty()
    assert state.apply(event) is may_differ
    assert state.take_dirty() == expected
    assert state.take_dirty() == dirty()
    assert state.apply(event) is False or isinstance(event, Removed), "an event twice changes nothing"


def test_everything_is_dirty_at_first():
    state = cluster(WEB)
    assert state.take_dirty() is None
    assert state.take_dirty() == dirty()


def test_a_kind_is_awaited_until_it_was_listed():
    state = Cluster(ME, ("Service", "EndpointSlice"))
    for event, awaited in (
        (Upserted(WEB), ("EndpointSlice", "Service")),
        (Replaced("EndpointSlice", ()), ("Service",)),
        (Replaced("Service", ()), ()),
    ):
        state.apply(event)
        assert state.awaited == awaited
    assert Cluster(ME).awaited == tuple(sorted(KINDS))


def test_a_service_deleted_and_made_again_between_two_looks():
    state = cluster(WEB, SLICE)
    state.take_dirty()
    state.apply(Removed("Service", "default/web"))
    state.apply(Upserted(WEB))
    assert state.take_dirty() == dirty("web")
    assert list(state.slices_of("default/web")) == [SLICE]


def test_what_can_be_read():
    state = cluster(NODE, Node("node-b"), SERVICE_RANGE, ServiceCIDR("a", ("10.0.0.0/24", "10.96.0.0/16")), WEB, SLICE)
    assert dict(state.services) == {"default/web": WEB}
    assert list(state.slices_of("default/web")) == [SLICE]
    assert list(state.slices_of("default/nobody")) == []
    assert state.node == NODE
    assert state.service_cidrs == ("10.0.0.0/24", "10.96.0.0/16", "fd00::/112")
    assert state.source_state is None
    state.apply(SourceState(True, "up"))
    assert state.source_state == SourceState(True, "up")


def test_health_of_the_node_is_remembered_though_the_table_does_not_care():
    state = cluster(NODE)
    state.apply(Upserted(replace(NODE, eligible=False)))
    assert state.reported is not None
    assert not state.reported.eligible


# fmt: off
SAID = [
    #            what the Node object says next                                          what is known of the node then
    pytest.param([Removed("Node", ME)],                                                  NODE,                                        id="deleted"),
    pytest.param([Replaced("Node", ())],                                                 NODE,                                        id="not in a new list"),
    pytest.param([Removed("Node", ME), Upserted(Node(ME))],                              NODE,                                        id="registered anew, without anything"),
    pytest.param([Upserted(replace(NODE, addresses=()))],                                NODE,                                        id="no addresses"),
    pytest.param([Upserted(replace(NODE, pod_cidrs=()))],                                NODE,                                        id="no podCIDRs"),
    pytest.param([Upserted(replace(NODE, zone=""))],                                     NODE,                                        id="no zone"),
    pytest.param([Upserted(replace(NODE, zone="zone-b"))],                               replace(NODE, zone="zone-b"),                id="another zone"),
    pytest.param([Upserted(replace(NODE, addresses=("192.168.0.7",)))],                  replace(NODE, addresses=("192.168.0.7", *NODE.addresses[1:])), id="another address, and one family less"),
]
# fmt: on


@pytest.mark.parametrize(("events", "known"), SAID)
def test_what_a_node_object_does_not_say_any_more_is_known_all_the_same(events, known):
    state = cluster(NODE)
    for event in events:
        state.apply(event)
    assert state.node == known


def test_a_new_agent_takes_over_what_is_known_but_for_the_zone():
    state = Cluster(ME, last=NODE)
    assert state.node == replace(NODE, zone="")
    state.apply(Upserted(Node(ME)))
    assert state.node == replace(NODE, zone="")
    assert Cluster("another", last=NODE).node is None


# fmt: off
BAD = Problem("Service", "default/web", "spec.ports[0].port: 0 is no port")
CLEARING = [
    pytest.param([Problem("Service", "default/web", "")],                            False, id="an empty message clears it"),
    pytest.param([Removed("Service", "default/web")],                                False, id="its object is gone"),
    pytest.param([Replaced("Service", ())],                                          False, id="its object is not in a new list"),
    pytest.param([Replaced("Service", (), frozenset({"default/web"}))],              True,  id="refused again in a new list"),
    pytest.param([Replaced("EndpointSlice", ())],                                    True,  id="a list of another kind"),
    pytest.param([Problem("EndpointSlice", "default/web", "")],                      True,  id="another kind of that name is well"),
    pytest.param([Upserted(WEB)],                                                    True,  id="one good copy of two with one name does not clear it"),
]
# fmt: on


@pytest.mark.parametrize(("events", "stays"), CLEARING)
def test_a_problem_stays_until(events, stays):
    state = cluster(WEB)
    state.apply(BAD)
    for event in events:
        state.apply(event)
    assert dict(state.problems) == ({("Service", "default/web"): BAD} if stays else {})


@pytest.mark.parametrize("good", [WEB, SLICE, NODE, SERVICE_RANGE], ids=kind_of)
def test_an_object_with_a_complaint_is_in_use_and_a_problem_until_it_is_corrected(good):
    kind, key = kind_of(good), key_of(good)
    bad = replace(good, complaints=("spec: 'x' is bad",))
    state = cluster(bad)
    assert state.held(kind)[key] == bad, "it is in use"
    (problem,) = state.problems.values()
    assert (problem.kind, problem.key, problem.in_use) == (kind, key, True)
    assert "spec: 'x' is bad" in problem.text
    state.apply(Upserted(good))
    assert not state.problems
    state.apply(Upserted(bad))
    assert state.problems
    state.apply(Removed(kind, key))
    assert not state.problems
    state.apply(Replaced(kind, (bad,)))
    assert state.problems
    state.apply(Replaced(kind, ()))
    assert not state.problems


def test_a_service_without_a_port_that_is_right_is_not_in_use():
    state = cluster(replace(WEB, ports=(), complaints=("spec.ports[0].port: 0 is not a port",)))
    (problem,) = state.problems.values()
    assert problem.report.startswith("refused: Service default/web: ")
    assert problem.report.endswith("; nothing of it is served")


def test_a_refused_object_keeps_its_last_good_version():
    state = cluster(WEB)
    state.apply(BAD)
    assert state.services["default/web"] == WEB


def test_listing_covers_all_kinds():
    assert [event.kind for event in listing([WEB, NODE])] == list(KINDS)


def test_the_extent_counts_ports_of_both_families_and_endpoints_of_all_slices():
    both = service("both", cluster_ips=("10.96.0.20", "fd96::20"))
    more = endpoint_slice(here("10.1.0.1"), away("10.1.0.2"), of="both", name="both-1")
    assert cluster().extent == (0, 0)
    assert cluster(WEB, both, SLICE, more).extent == (
        len(WEB.ports) + 2 * len(both.ports),
        len(SLICE.ports) + 2 * len(more.ports),
    )


class TestAServiceThatMovesToAnotherProxy:
    """Its label names another proxy now: it is removed, and its slices stay."""

    @pytest.fixture
    def state(self) -> Cluster:
        """Serves alongside another proxy, to which one of its Services has moved."""
        state = Cluster(ME, shares=True)
        for event in listing((NODE, WEB, API, SLICE)):
            state.apply(event)
        state.take_dirty()
        assert state.apply(Removed("Service", "default/web"))
        assert state.take_dirty() == dirty("web")
        return state

    def test_it_is_ceded_once(self, state: Cluster):
        assert dict(state.moved) == {"default/web": WEB}
        assert "default/web" not in state.ceded
        assert state.cede(["default/web", "default/api", "default/nobody"])
        assert "default/web" in state.ceded
        assert state.take_dirty() == dirty("web")
        assert not state.cede(["default/web"])
        assert "default/api" not in state.ceded, "it has not moved"

    @pytest.mark.parametrize(("event", "moved"), [
        pytest.param(Upserted(endpoint_slice(here("10.1.0.2"))), {"default/web": WEB}, id="its endpoints change"),
        pytest.param(Removed("EndpointSlice", "default/web-1"),  {},                   id="it is deleted: its slices, too"),
        pytest.param(Upserted(WEB),                              {},                   id="it comes back"),
    ])  # fmt: skip
    def test_what_happens_to_it_makes_it_dirty(self, state: Cluster, event: Event, moved: dict[str, Service]):
        state.cede(["default/web"])
        state.take_dirty()
        assert state.apply(event)
        assert (dict(state.moved), "default/web" in state.ceded) == (moved, bool(moved))
        assert state.take_dirty() == dirty("web")

    def test_one_without_slices_is_deleted_and_so_is_each_where_no_other_proxy_is(self, state: Cluster):
        alone = cluster(NODE, WEB, SLICE)
        for known, name in ((state, "api"), (alone, "web")):
            assert known.apply(Removed("Service", f"default/{name}"))
            assert f"default/{name}" not in known.moved
