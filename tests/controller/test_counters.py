"""What the loop counts: histograms, changes, what a table lacks."""

from __future__ import annotations

import msgspec
import pytest

from hybrid_proxy.controller.kubernetes.model import (
    Endpoint,
    EndpointSlice,
    Node,
    Removed,
    Replaced,
    Service,
    Superseded,
    Upserted,
)
from hybrid_proxy.controller.serving.counters import NETWORK_BUCKETS, SYNC_BUCKETS, TRIGGERS, Counters, TableTotals
from hybrid_proxy.controller.serving.metrics import histogram
from hybrid_proxy.dataplane.table import (
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
    counters = Counters(started=100.0)
    one = EndpointSlice("d", "s", "d/web", 4, endpoints=(Endpoint("10.0.0.1"),))
    older = (Superseded(1.0, 4, 110.0), Superseded(2.0, 4, 50.0))
    counters.record_event(Upserted(one, 3.0, 112.0), changed=True, wall=113.0, superseded=older)
    counters.record_sync(EMPTY, 0.001, (), 120.0)
    assert counters.endpoint_changes == 3
    # A trigger from before the agent started does not count.
    assert samples(counters, f"{PROGRAMMING}_sum")["IPv4"] == (120 - 110) + (120 - 112)


PROGRAMMING = "kubeproxy_network_programming_duration_seconds"


def samples(counters: Counters, name: str) -> dict[str, float]:
    """The samples of this name by address family."""
    found = [sample for durations in counters.durations for sample in histogram(durations).samples]
    return {sample.labels.get("ip_family", ""): sample.value for sample in found if sample.name == name}


class TestHistograms:
    def test_a_clock_that_goes_back(self):
        counters = Counters()
        counters.record_event(Upserted(SLICE, 1, 100.0), changed=True, wall=100)
        programmed(counters, 95)
        assert samples(counters, f"{PROGRAMMING}_count") == {"IPv4": 1, "IPv6": 0}
        assert samples(counters, f"{PROGRAMMING}_sum") == {"IPv4": 0, "IPv6": 0}

    def test_row_8_10_buckets_are_kube_proxys(self):
        assert len(SYNC_BUCKETS) == 15
        assert SYNC_BUCKETS[0] == 0.001
        assert SYNC_BUCKETS[-1] == pytest.approx(16.384)
        listed = (0.25, 0.5, 1, 2, 58, 59, 60, 65, 110, 115, 120, 150, 270, 300)
        assert set(listed) <= set(NETWORK_BUCKETS)
        assert not {61, 117, 125} & set(NETWORK_BUCKETS)
        assert list(NETWORK_BUCKETS) == sorted(set(NETWORK_BUCKETS))


class TestTableTotals:
    """8.12, and how much is in a table."""

    def test_ports_and_backends_follow_changes(self):
        totals = TableTotals()
        first = table(a=(entry(), entry(family=6)), b=(entry(),))
        totals.follow(first)
        assert (totals.ports, totals.backends) == (3, 6)
        totals.follow(first)
        assert totals.ports == 3, "the same table counts once"
        second = table(first, a=(entry(),), c=(entry(),))
        totals.follow(second)
        assert (totals.ports, totals.backends) == (2, 4)

    def test_who_keeps_up_pays_nothing_before_somebody_asks(self):
        totals = TableTotals()
        first = table(a=(entry(),))
        totals.keep_up(first)
        assert totals.ports == 0
        totals.follow(first)
        totals.keep_up(table(first, a=(entry(),), b=(entry(),)))
        assert totals.ports == 2

    def test_a_table_whose_predecessor_was_not_seen(self):
        totals = TableTotals()
        first = table(a=(entry(),))
        totals.follow(first)
        second = table(first, a=(entry(),), b=(entry(),))
        third = table(second, b=(entry(),))
        totals.follow(third)
        assert totals.ports == 1

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
        totals = TableTotals()
        held = table(a=(entry(*frontends), entry(*frontends, name="d/web:https")))
        totals.follow(held)
        assert +totals.no_local == expected
        totals.follow(table(held))
        assert not +totals.no_local


SLICE = EndpointSlice("d", "web-1", "d/web", 4, endpoints=(Endpoint("10.1.0.1"),))


def programmed(counters: Counters, wall: float) -> None:
    counters.record_sync(EMPTY, 0.01, [0.002], wall)


class TestChanges:
    def test_changes_wait_until_they_are_programmed(self):
        counters = Counters()
        counters.record_event(Upserted(Service("d", "web", "ClusterIP")), changed=True, wall=100)
        counters.record_event(Upserted(SLICE), changed=True, wall=101)
        counters.record_event(Removed("EndpointSlice", "d/web-1"), changed=True, wall=102)
        counters.record_event(Upserted(SLICE), changed=False, wall=103)
        counters.record_event(Upserted(Node("me")), changed=False, wall=104)
        assert (counters.service_changes, counters.endpoint_changes) == (1, 3)
        assert (counters.services_waiting, counters.endpoints_waiting) == (1, 2)
        assert (counters.last_queued, counters.last_synced) == (102, 0)
        programmed(counters, 105)
        assert (counters.services_waiting, counters.endpoints_waiting) == (0, 0)
        assert (counters.service_changes, counters.endpoint_changes) == (1, 3)
        assert (counters.last_queued, counters.last_synced) == (102, 105)

    def test_a_list_is_as_many_changes_as_it_has_objects(self):
        counters = Counters()
        counters.record_event(Replaced("EndpointSlice", (SLICE, SLICE)), changed=True, wall=100)
        assert (counters.endpoint_changes, counters.endpoints_waiting) == (2, 2)


class TestNetworkProgramming:
    """6.6: from the trigger to the end of the sync, of changes that this agent has seen."""

    def observed(self, *events: tuple[Upserted, bool], started: float = 50.0) -> dict[str, float]:
        counters = Counters(started)
        for event, changed in events:
            counters.record_event(event, changed=changed, wall=101)
        programmed(counters, 102.5)
        programmed(counters, 110)  # of which nothing is counted again
        return samples(counters, f"{PROGRAMMING}_sum")

    def test_each_change_of_a_slice(self):
        six = msgspec.structs.replace(SLICE, family=6)
        assert self.observed((Upserted(SLICE, 1, 100.0), True), (Upserted(SLICE, 1, 101.0), True),
                         (Upserted(six, 1, 100.5), True)) == {"IPv4": 4.0, "IPv6": 2.0}  # fmt: skip

    def test_what_changed_nothing_or_has_no_trigger_or_is_older_than_we_are(self):
        assert self.observed((Upserted(SLICE, 1, 100.0), False), (Upserted(SLICE, 1), True),
                         (Upserted(SLICE, 1, 49.0), True)) == {"IPv4": 0, "IPv6": 0}  # fmt: skip

    def test_what_waits_is_bounded(self):
        counters = Counters()
        for _ in range(TRIGGERS + 10):
            counters.record_event(Upserted(SLICE, 1, 100.0), changed=True, wall=101)
        programmed(counters, 101)
        assert samples(counters, f"{PROGRAMMING}_count")["IPv4"] == TRIGGERS
