"""What the loop counts: histograms, changes, what a table lacks."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Histogram

from controller.kubernetes.model import Endpoint, EndpointSlice, Node, Overtaken, Removed, Replaced, Service, Upserted
from controller.serving.figures import NETWORK_BUCKETS, SYNC_BUCKETS, TRIGGERS, Figures, Spread, Tally
from dataplane.table import (
    EMPTY,
    Backend,
    BackendSet,
    Entry,
    Kind,
    NodeNetwork,
    Protocol,
    ServiceTable,
    WhenEmpty,
)
from tests.tables import Front, entry_of

SOME = BackendSet((Backend("10.1.0.1", 80), Backend("10.1.0.2", 80)))
SILENT, REFUSED = BackendSet((), WhenEmpty.DROP), BackendSet((), WhenEmpty.REJECT)


def entry(*frontends: Front, family: int = 4, name: str = "d/web:http") -> Entry:
    return entry_of(name, family, Protocol.TCP, frontends, SOME.backends)


def cluster_ip(route: BackendSet) -> Front:
    return Front(Kind.CLUSTER_IP, "10.96.0.1", 80, route, route)


def node_port(outside: BackendSet) -> Front:
    return Front(Kind.NODE_PORT, None, 30080, SOME, outside)


def table(after: ServiceTable = EMPTY, **services: tuple[Entry, ...]) -> ServiceTable:
    held = {name: entries for name, entries in services.items() if entries}
    changed = {name for name in {*held, *after.services} if held.get(name) != after.services.get(name)}
    return ServiceTable(held, NodeNetwork(), after.generation + 1, after.generation, frozenset(changed))


def test_what_was_overtaken_counts_as_long_as_it_took() -> None:
    """A change that waited, and that another one of its object overtook, was programmed with that one."""
    figures = Figures(started=100.0)
    one = EndpointSlice("d", "s", "d/web", 4, endpoints=(Endpoint("10.0.0.1"),))
    older = (Overtaken("EndpointSlice", 1.0, 4, 110.0), Overtaken("EndpointSlice", 2.0, 4, 50.0))
    figures.saw(Upserted(one, 3.0, 112.0), changed=True, wall=113.0, overtaken=older)
    figures.synced(EMPTY, 0.001, (), 120.0)
    assert figures.endpoint_changes == 3
    assert figures.programming[4].sum == (120 - 110) + (120 - 112)  # what is older than the agent says nothing


class TestSpread:
    """A histogram says what one of prometheus-client says."""

    @pytest.mark.parametrize("bounds", [SYNC_BUCKETS, NETWORK_BUCKETS])
    def test_as_prometheus_client(self, bounds):
        registry = CollectorRegistry()
        theirs = Histogram("x", "x", buckets=bounds, registry=registry)
        ours = Spread(bounds)
        for value in (0.0, 0.0005, 0.001, 0.25, 0.3, 59, 59.5, 1000):
            theirs.observe(value)
            ours.observe(value)
        (family,) = registry.collect()
        told = [(one.labels["le"], one.value) for one in family.samples if one.name == "x_bucket"]
        assert [(float(le), value) for le, value in told] == [(float(le), value) for le, value in ours.cumulative()]
        assert [le for le, _ in ours.cumulative()][-1] == "+Inf"
        assert ours.sum == next(one.value for one in family.samples if one.name == "x_sum")

    def test_a_clock_that_goes_back(self):
        spread = Spread(SYNC_BUCKETS)
        spread.observe(-5)
        assert (spread.sum, spread.cumulative()[0][1]) == (0, 1)

    def test_row_8_10_buckets_are_kube_proxys(self):
        assert len(SYNC_BUCKETS) == 15
        assert SYNC_BUCKETS[0] == 0.001
        assert SYNC_BUCKETS[-1] == pytest.approx(16.384)
        listed = (0.25, 0.5, 1, 2, 58, 59, 60, 65, 110, 115, 120, 150, 270, 300)
        assert set(listed) <= set(NETWORK_BUCKETS)
        assert not {61, 117, 125} & set(NETWORK_BUCKETS)
        assert list(NETWORK_BUCKETS) == sorted(set(NETWORK_BUCKETS))


class TestTally:
    """8.12, and how much is in a table."""

    def test_ports_and_backends_follow_changes(self):
        tally = Tally()
        first = table(a=(entry(), entry(family=6)), b=(entry(),))
        tally.follow(first)
        assert (tally.ports, tally.backends) == (3, 6)
        tally.follow(first)
        assert tally.ports == 3, "the same table counts once"
        second = table(first, a=(entry(),), c=(entry(),))
        tally.follow(second)
        assert (tally.ports, tally.backends) == (2, 4)

    def test_a_table_whose_predecessor_was_not_seen(self):
        tally = Tally()
        first = table(a=(entry(),))
        tally.follow(first)
        second = table(first, a=(entry(),), b=(entry(),))
        third = table(second, b=(entry(),))
        tally.follow(third)
        assert tally.ports == 1

    @pytest.mark.parametrize(
        ("frontends", "expected"),
        [
            pytest.param([cluster_ip(SILENT)], {(4, "internal"): 1}, id="internal"),
            pytest.param([cluster_ip(SOME), node_port(SILENT)], {(4, "external"): 1}, id="external"),
            pytest.param([cluster_ip(SOME), node_port(SILENT), node_port(SILENT)], {(4, "external"): 1}, id="once"),
            pytest.param([cluster_ip(REFUSED), node_port(REFUSED)], {}, id="no endpoints anywhere do not count"),
            pytest.param([cluster_ip(SOME), node_port(SOME)], {}, id="endpoints here"),
        ],
    )
    def test_row_8_12_services_without_local_endpoints(self, frontends, expected):
        tally = Tally()
        held = table(a=(entry(*frontends), entry(*frontends, name="d/web:https")))
        tally.follow(held)
        assert +tally.no_local == expected
        tally.follow(table(held))
        assert not +tally.no_local


SLICE = EndpointSlice("d", "web-1", "d/web", 4, endpoints=(Endpoint("10.1.0.1"),))


def programmed(figures: Figures, wall: float) -> None:
    figures.synced(EMPTY, 0.01, [0.002], wall)


class TestChanges:
    def test_changes_wait_until_they_are_programmed(self):
        figures = Figures()
        figures.saw(Upserted(Service("d", "web", "ClusterIP")), changed=True, wall=100)
        figures.saw(Upserted(SLICE), changed=True, wall=101)
        figures.saw(Removed("EndpointSlice", "d/web-1"), changed=True, wall=102)
        figures.saw(Upserted(SLICE), changed=False, wall=103)
        figures.saw(Upserted(Node("me")), changed=False, wall=104)
        assert (figures.service_changes, figures.endpoint_changes) == (1, 3)
        assert (figures.services_waiting, figures.endpoints_waiting) == (1, 2)
        assert (figures.last_queued, figures.last_synced) == (102, 0)
        programmed(figures, 105)
        assert (figures.services_waiting, figures.endpoints_waiting) == (0, 0)
        assert (figures.service_changes, figures.endpoint_changes) == (1, 3)
        assert (figures.last_queued, figures.last_synced) == (102, 105)

    def test_a_list_is_as_many_changes_as_it_has_objects(self):
        figures = Figures()
        figures.saw(Replaced("EndpointSlice", (SLICE, SLICE)), changed=True, wall=100)
        assert (figures.endpoint_changes, figures.endpoints_waiting) == (2, 2)


class TestNetworkProgramming:
    """6.6: from the trigger to the end of the sync, of changes that this agent has seen."""

    def told(self, *events: tuple[Upserted, bool], started: float = 50.0) -> dict[int, float]:
        figures = Figures(started)
        for event, changed in events:
            figures.saw(event, changed=changed, wall=101)
        programmed(figures, 102.5)
        programmed(figures, 110)  # of which nothing is counted again
        return {family: spread.sum for family, spread in figures.programming.items()}

    def test_each_change_of_a_slice(self):
        six = msgspec.structs.replace(SLICE, family=6)
        assert self.told((Upserted(SLICE, 1, 100.0), True), (Upserted(SLICE, 1, 101.0), True),
                         (Upserted(six, 1, 100.5), True)) == {4: 4.0, 6: 2.0}  # fmt: skip

    def test_what_changed_nothing_or_has_no_trigger_or_is_older_than_we_are(self):
        assert self.told((Upserted(SLICE, 1, 100.0), False), (Upserted(SLICE, 1), True),
                         (Upserted(SLICE, 1, 49.0), True)) == {}  # fmt: skip

    def test_what_waits_is_bounded(self):
        figures = Figures()
        for _ in range(TRIGGERS + 10):
            figures.saw(Upserted(SLICE, 1, 100.0), changed=True, wall=101)
        programmed(figures, 101)
        assert sum(figures.programming[4].counts) == TRIGGERS
