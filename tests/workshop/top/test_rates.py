"""Two looks make rates; what is not known is said to be so."""

from __future__ import annotations

import pytest

from hybrid_proxy.controller.serving.protocol import DrainingMode
from hybrid_proxy.dataplane.reports import BackendRow, Ejection, ServiceRow
from hybrid_proxy.workshop.top.rates import SHARE_SECONDS, SHORTEST, Window, snapshot
from tests.workshop.top.samples import agent_status, backend, dataplane, ebpf, sample, service, status


def test_rates_are_growth_over_time() -> None:
    before, now = sample(10, service("ns/a:http", 100)), sample(12, service("ns/a:http", 150))
    (row,) = snapshot(before, before, now).services
    assert (row.connections, row.packets, row.request_bytes, row.reply_bytes) == (25, 500, 25_000, 25_000)
    assert row.total == 150
    assert row.connect == pytest.approx(0.002)
    assert row.first_packet == pytest.approx(0.002, rel=0.1)  # two of 52 took about so long


def test_where_nothing_was_accepted_there_is_no_time() -> None:
    before, now = sample(10, service("ns/a:http", 100)), sample(12, service("ns/a:http", 100))
    assert snapshot(before, before, now).services[0].connect is None
    assert snapshot(before, before, now).services[0].first_packet is None


def test_the_first_look_has_no_rates() -> None:
    now = sample(10, service("ns/a:http", 100))
    shown = snapshot(now, now, now)
    assert shown.services[0].connections is None
    assert shown.all("connections") is None
    assert shown.counts


def test_a_service_is_shown_to_fail() -> None:
    bad = service("ns/a:http", 0, backends=2, failing=2)
    part = service("ns/d:http", 0, backends=3, failing=1)
    now = sample(10, bad, service("ns/b:http", 0), service("ns/c:http", 0, backends=0, when_empty="reject"), part)
    rows = snapshot(now, now, now).services
    assert [(row.state, row.down) for row in rows] == [
        ("all backends fail", True), ("serving", False), ("no backends: rejects", True),
        ("1 of 3 failing", False),
    ]  # fmt: skip


def test_families_of_one_name_are_two_rows() -> None:
    def both(at: float, four: int, six: int) -> object:
        return sample(at, service("ns/a:http", four), service("ns/a:http", six, "[fd96::10]:80", id=8))

    before, now = both(0, 10, 10), both(1, 11, 13)
    rates = {row.frontends[0]: row.connections for row in snapshot(before, before, now).services}
    assert rates == {"10.96.0.10:80": 1, "[fd96::10]:80": 3}
    assert len({row.key for row in snapshot(before, before, now).services}) == 2


@pytest.mark.parametrize(
    "former",
    [service("ns/a:http", 500), service("ns/other:http", 5)],
    ids=["counters began anew", "the service is new"],
)
def test_a_rate_that_cannot_be_known_is_none(former: ServiceRow) -> None:
    before, now = sample(0, former), sample(1, service("ns/a:http", 10))
    assert snapshot(before, before, now).services[0].connections is None


def test_a_mode_that_does_not_count() -> None:
    def look(at: float) -> object:
        return sample(at, service("ns/a:http", 0, traffic=None), chosen="ns/a:http")

    shown = snapshot(look(0), look(0), look(1))
    assert not shown.counts
    assert shown.services[0].connections is None
    assert shown.services[0].total is None
    plain = BackendRow(service="ns/a:http", address="10.0.0.1:80", protocol="TCP", used=False)
    now = sample(1, chosen="ns/a:http", backends=(plain,))
    (row,) = snapshot(now, now, now).backends
    assert (row.state, row.share, row.failures, row.total) == ("in no backend set", None, None, None)


def test_shares_are_of_the_connections_of_each_family() -> None:
    def look(at: float, first: int, second: int, six: int) -> object:
        rows = (backend("10.0.0.1:80", first), backend("10.0.0.2:80", second), backend("[fd00::1]:80", six))
        return sample(at, chosen="ns/a:http", backends=rows)

    base, now = look(0, 1000, 0, 0), look(20, 1030, 10, 7)
    assert [row.share for row in snapshot(base, base, now).backends] == [0.75, 0.25, 1.0]
    quiet = snapshot(base, base, base)
    assert [row.share for row in quiet.backends] == [None] * 3


def test_what_the_agent_says_of_a_backend_counts() -> None:
    ejection = Ejection("ns/a:http", "10.0.0.1:80", True, 9.0, "ejected for 9 s: no answer")
    status = agent_status(dataplane=dataplane(ebpf=ebpf(ejection)))
    now = sample(1, service("ns/a:http", 0), status=status, chosen="ns/a:http", backends=(backend("10.0.0.1:80", 0),))
    shown = snapshot(now, now, now)
    assert shown.backends[0].state == "ejected for 9 s: no answer"
    assert shown.services[0].ejected == 1


def test_drops_come_first_and_are_summed() -> None:
    before = sample(0, status=status(new_flow=5, drop_empty=1, reject=0, drop_source_ranges=0, backend_refused=0))
    now = sample(2, status=status(new_flow=9, drop_empty=3, reject=6, drop_source_ranges=4, backend_refused=2))
    shown = snapshot(before, before, now)
    assert [(row.kind, row.key, row.rate) for row in shown.reasons] == [
        ("drop", "drop_empty", 1), ("drop", "drop_source_ranges", 2), ("refuse", "reject", 3),
        ("fail", "backend_refused", 1), ("note", "new_flow", 2),
    ]  # fmt: skip
    assert (shown.rate("drop"), shown.rate("refuse")) == (3, 3)


def test_names_of_other_modes_are_drops_too() -> None:
    now = sample(0, status=status(discarded=1, refused=1, masqueraded=1))
    kinds = {row.key: row.kind for row in snapshot(now, now, now).reasons}
    assert kinds == {"discarded": "drop", "refused": "refuse", "masqueraded": "note"}


def test_what_a_mode_that_drains_counts_has_its_name() -> None:
    looks = [
        sample(at, status=agent_status(
            dataplane=dataplane(counters={"discarded": at}),
            draining=[DrainingMode("ebpf", {}, 1.0, {"drop_empty": 3 * at, "discarded": 0})],
        ))
        for at in (1, 2)
    ]  # fmt: skip
    shown = snapshot(looks[0], *looks)
    assert [(row.kind, row.key, row.rate) for row in shown.reasons] == [
        ("drop", "discarded", 1), ("drop", "discarded (ebpf)", 0), ("drop", "drop_empty (ebpf)", 3),
    ]  # fmt: skip
    assert shown.rate("drop") == 4


def test_maps_that_have_a_bound_are_shown() -> None:
    now = sample(0)
    (row,) = snapshot(now, now, now).maps
    assert (row.key, row.used, row.entries, row.bound, row.fill) == ("flows4", 12, 100, 200, 0.06)


def test_without_an_agent_traffic_is_still_counted() -> None:
    before, now = sample(0, service("ns/a:http", 1), status=None), sample(1, service("ns/a:http", 4), status=None)
    shown = snapshot(before, before, now)
    assert shown.services[0].connections == 3
    assert (shown.reasons, shown.maps, shown.rate("drop")) == ((), (), None)


def test_shares_of_late_forget_what_was_long_ago() -> None:
    window = Window()
    flows = [0, 0]
    for tick in range(int(3 * SHARE_SECONDS)):
        flows[0 if tick < SHARE_SECONDS else 1] += 1
        rows = (backend("10.0.0.1:80", flows[0]), backend("10.0.0.2:80", flows[1]))
        shown = window.add(sample(tick, chosen="ns/a:http", backends=rows))
    assert [row.share for row in shown.backends] == [0, 1]


def test_another_service_has_shares_of_its_own() -> None:
    window = Window()
    window.add(sample(0, chosen="ns/a:http", backends=(backend("10.0.0.1:80", 5),)))
    shown = window.add(sample(1, chosen="ns/b:http", backends=(backend("10.0.0.1:80", 9, service="ns/b:http"),)))
    assert [(row.share, row.connections) for row in shown.backends] == [(None, None)]


def test_two_looks_in_a_moment_do_not_make_a_rate() -> None:
    window = Window()
    window.add(sample(0, service("ns/a:http", 0)))
    window.add(sample(10, service("ns/a:http", 100)))
    shown = window.add(sample(10 + SHORTEST / 10, service("ns/a:http", 101)))
    assert shown.services[0].connections == pytest.approx(10, rel=0.02)
