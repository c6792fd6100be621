"""Properties of the whole core: order does not matter, and the next table equals one made from nothing."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make import ME, SETTINGS, STATES, EndpointPort, ServicePort, endpoint_slice, ep, listing, service

from hybrid_proxy.controller.kubernetes.model import (
    KINDS,
    EndpointSlice,
    Event,
    Node,
    Object,
    Removed,
    Replaced,
    Service,
    ServiceCIDR,
    Upserted,
    key_of,
    kind_of,
)
from hybrid_proxy.controller.semantics.cluster import Cluster
from hybrid_proxy.controller.semantics.tables import Builder
from hybrid_proxy.dataplane.table import Protocol, ServiceTable, WhenEmpty
from tests.properties import examples

NAMES = ("a", "b", "c")
PROTOCOLS = (Protocol.TCP, Protocol.UDP)

# Few values, so that services collide in names, addresses and ports all the time.
ports = st.lists(
    st.builds(
        ServicePort,
        st.sampled_from(["", "http"]),
        st.sampled_from(PROTOCOLS),
        st.sampled_from([80, 81]),
        st.sampled_from([0, 30080]),
    ),
    max_size=2,
    unique_by=(lambda p: (p.protocol, p.port), lambda p: (p.protocol, p.node_port or p)),  # as parse.py leaves them
).map(tuple)
services = st.builds(
    service,
    st.sampled_from(NAMES),
    type=st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]),
    cluster_ips=st.sampled_from([("10.96.0.1",), ("10.96.0.2", "fd00::2"), ("fd00::3",)]),
    external_ips=st.sampled_from([(), ("5.5.5.5",), ("10.96.0.1", "fd00::2")]),
    load_balancer_ips=st.sampled_from([(), ("5.5.5.5",)]),
    source_ranges=st.sampled_from([(), ("192.168.0.0/24", "fd00::/8")]),
    ports=ports,
    external_local=st.booleans(),
    internal_local=st.booleans(),
    created=st.sampled_from(["", "2024", "2025"]),
)
endpoints = st.builds(
    ep,
    st.sampled_from(["10.1.0.1", "10.1.0.2", "10.1.0.3"]),
    st.sampled_from([None, ME, "node-b"]),
    st.sampled_from(list(STATES)),
    st.sampled_from([(), ("zone-a",), ("zone-b",)]),
    st.sampled_from([(), (ME,), ("node-b",)]),
)
slices = st.builds(
    lambda found, **rest: endpoint_slice(*found, **rest),
    st.lists(endpoints, max_size=4),
    name=st.sampled_from(["s1", "s2", "s3"]),
    of=st.sampled_from(NAMES),
    ports=st.lists(
        st.builds(
            EndpointPort, st.sampled_from(["", "http"]), st.sampled_from(PROTOCOLS), st.sampled_from([8080, 9090])
        ),
        max_size=2,
    ),
    family=st.sampled_from([4, 6]),
)  # fmt: skip
nodes = st.builds(
    Node,
    st.sampled_from([ME, "node-b"]),
    st.sampled_from([(), ("192.168.0.1",), ("192.168.0.1", "fd01::1")]),
    zone=st.sampled_from(["", "zone-a", "zone-b"]),
    eligible=st.booleans(),
)
ranges = st.builds(ServiceCIDR, st.just("range"), st.sampled_from([("10.96.0.0/16",), ("fd00::/112",)]))
objects = st.one_of(services, services, slices, slices, slices, nodes, ranges)


def same_kind_lists(found: list[Object]) -> list[Event]:
    """A new list of the first object's kind, of the objects of that kind."""
    kind = kind_of(found[0])
    unique = {key_of(o): o for o in found if kind_of(o) == kind}
    return [Replaced(kind, tuple(unique.values()))]


events = st.one_of(
    objects.map(lambda o: [Upserted(o)]),
    objects.map(lambda o: [Upserted(o)]),
    objects.map(lambda o: [Removed(kind_of(o), key_of(o))]),
    st.lists(objects, min_size=1, max_size=5).map(same_kind_lists),
).flatmap(lambda batch: st.tuples(st.just(batch), st.booleans()))

relaxed = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def started() -> Cluster:
    state = Cluster(ME)
    for kind in KINDS:
        state.apply(Replaced(kind, ()))
    return state


def from_nothing(state: Cluster) -> tuple[ServiceTable, dict[str, tuple[str, ...]]]:
    """The table and conflicts of a fresh cluster with the same objects."""
    found: list[Object] = [one for kind in KINDS for one in state.held(kind).values()]
    fresh, builder = Cluster(ME), Builder(SETTINGS)
    if state.node is not None:  # a node remembers
        fresh.apply(Upserted(state.node))
    for event in listing(found):
        fresh.apply(event)
    table = builder.build(fresh, ())
    return table, dict(builder.conflicts)


@relaxed
@given(st.lists(events, max_size=25))
def test_incremental_equals_full(history):
    state, builder = started(), Builder(SETTINGS)
    table = builder.build(state, ())
    announced = False
    for batch, look in history:
        announced |= any([state.apply(event) for event in batch])  # noqa: C419 (all must be applied)
        if not look:
            continue
        last, table = table, builder.build(state, ())
        if table is last:
            continue
        assert announced, "apply reports every change"
        announced = False
        assert (table.base, table.generation) == (last.generation, last.generation + 1)
        differ = {n for n in {*last.services, *table.services} if last.services.get(n) != table.services.get(n)}
        assert table.changed == differ
        for name in set(table.services) - differ:
            assert table.services[name] is last.services[name]
    table = builder.build(state, ())
    full, conflicts = from_nothing(state)
    assert table.services == full.services
    assert table.node == full.node
    assert dict(builder.conflicts) == conflicts


@relaxed
@given(st.lists(objects, max_size=12, unique_by=lambda o: (kind_of(o), key_of(o))), st.data())
def test_order_of_events_does_not_matter(found, data):
    order = data.draw(st.permutations(found))
    results = []
    for objects_in_order in (found, order):
        state, builder = started(), Builder(SETTINGS)
        for obj in objects_in_order:
            state.apply(Upserted(obj))
            if len(objects_in_order) % 2:
                builder.build(state, ())
        table = builder.build(state, ())
        results.append((table.services, table.node, dict(builder.conflicts)))
    assert results[0] == results[1]


@relaxed
@given(services, st.lists(slices, max_size=4, unique_by=lambda s: s.name), st.sampled_from(["", "zone-a"]))
def test_every_entry_keeps_the_promises_of_the_table(svc, found, zone):
    state = started()
    for obj in (svc, Node(ME, ("192.168.0.1",), zone=zone), *found):
        state.apply(Upserted(obj))
    table = Builder(SETTINGS).build(state, ())
    taken = set()
    for entry in (e for es in table.services.values() for e in es):
        assert len(entry.backend_sets) <= 2
        assert {n for f in entry.frontends for n in (f.internal, f.external)} == set(range(len(entry.backend_sets)))
        assert entry.frontends
        for frontend in entry.frontends:
            key = (frontend.address or entry.family, frontend.port, entry.protocol)
            assert key not in taken
            taken.add(key)
            assert frontend.address is None or (":" in frontend.address) == (entry.family == 6)
        assert len({s.when_empty for s in entry.backend_sets if not s.backends}) <= 1, "a client's side does not matter"
        for route in entry.backend_sets:
            assert route.why
            assert set(route.backends) <= set(entry.serving), "what gets traffic still serves"
            order = [(not b.local, b.address, b.port) for b in route.backends]
            assert order == sorted(set(order))
            if route.when_empty is WhenEmpty.DROP and not route.backends:
                assert any(not b.local for b in entry.serving), "drop means: there are endpoints elsewhere"


def test_the_strategies_reach_services_with_slices():
    """The properties above would hold for nothing at all; this one would not."""
    rows: list[tuple[Service, EndpointSlice]] = []

    @settings(max_examples=examples(200), deadline=None, database=None, derandomize=True)
    @given(services, slices)
    def collect(svc, one):
        if one.service == key_of(svc):
            rows.append((svc, one))

    collect()
    assert len(rows) > 5
