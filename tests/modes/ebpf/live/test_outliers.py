"""Which backends are ejected, and for how long: the detector by itself, then its ejections in the maps."""

from __future__ import annotations

import random
import time
from collections import Counter
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.ejection import failover
from hybrid_proxy.dataplane.modes.ebpf.ejection.outliers import (
    FIRST,
    INTERVAL,
    LONGEST,
    LONGEST_INTERVAL,
    FailureShares,
    OutlierDetector,
)
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.services.ejections import Counts, Ejection, ejected
from hybrid_proxy.dataplane.modes.ebpf.services.plan import Subject
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.modes.ebpf.views import listing
from hybrid_proxy.dataplane.reports import LATELY_SECONDS
from hybrid_proxy.dataplane.table import EMPTY, Entry, ServiceTable

from ..readback import check, programmed, settle
from .test_store import HZ, V1, V6, OpenMaps, entry, one, restart

A, B, C = "a", "b", "c"
ALL = {A, B, C}


def evaluate_at(
    detector: OutlierDetector[str], now: float, failures: dict[str, int], down: dict[str, str] | None = None
) -> set[str]:
    detector.evaluate(now, failures, down or {}, ALL)
    return set(detector.ejections)


def test_as_many_failures_as_the_limit() -> None:
    detector = OutlierDetector[str](3)
    assert evaluate_at(detector, 1.0, {A: 2, B: 3, C: 4}) == {B, C}
    assert detector.ejections[B] == Ejection(1.0 + FIRST, "3 consecutive connections failed", 1.0)


def test_times_double_up_to_the_longest_and_begin_anew_when_all_was_fine() -> None:
    detector = OutlierDetector[str](3)
    now, periods = 0.0, []
    for _ in range(8):
        assert evaluate_at(detector, now, {A: 3}) == {A}
        until = detector.ejections[A].until
        assert until is not None
        periods.append(until - now)
        assert evaluate_at(detector, until - 0.001, {A: 5}) == {A}
        assert detector.evaluate(until, {A: 5}, {}, ALL) == [A]
        now = until + 1
    assert periods == [10, 20, 40, 80, 160, 300, 300, 300]
    assert detector.readmission_failures == 2
    assert evaluate_at(detector, now, {}) == set()
    assert evaluate_at(detector, now + 400, {}) == set()
    detector.evaluate(now + 401, {A: 3}, {}, ALL)
    assert detector.ejections[A].until == now + 401 + FIRST


def test_a_readmitted_backend_is_remembered_until_it_has_answered() -> None:
    """Nobody asked it for an hour: that says nothing in its favour."""
    detector = OutlierDetector[str](3)
    evaluate_at(detector, 0.0, {A: 3})
    assert evaluate_at(detector, FIRST, {A: 3}) == set()
    evaluate_at(detector, 3600.0, {A: 2})
    assert evaluate_at(detector, 3601.0, {A: 3}) == {A}
    assert detector.ejections[A].until == 3601.0 + 2 * FIRST


def test_what_probes_say_holds_until_they_succeed() -> None:
    detector = OutlierDetector[str](3)
    assert evaluate_at(detector, 0.0, {A: 3}, {A: "no answer"}) == {A}
    assert detector.ejections[A] == Ejection(None, "no answer", 0.0)
    assert evaluate_at(detector, 10_000.0, {A: 9}, {A: "status 500"}) == {A}
    assert detector.ejections[A].reason == "status 500"
    assert detector.evaluate(10_001.0, {A: 9}, {}, ALL) == [A], "what was counted in that time is forgiven"
    assert not detector.records or evaluate_at(detector, 10_002.0, {}) == set()


def test_a_probe_that_succeeds_frees_at_once_whom_both_had_accused() -> None:
    detector = OutlierDetector[str](3)
    evaluate_at(detector, 0.0, {A: 3})
    assert evaluate_at(detector, 1.0, {A: 3}, {A: "no answer"}) == {A}
    assert evaluate_at(detector, 2.0, {A: 3}) == set()


# --- shares of failed connections

PORT = "web"


def counts(*pairs: tuple[int, int]) -> dict[str, dict[str, Counts]]:
    """Totals of A, B, C as begun, failed."""
    return {PORT: {name: Counts(*pair) for name, pair in zip((A, B, C), pairs, strict=False)}}


SHARES = [
    #            begun and failed in the interval    who is an outlier
    pytest.param([(100, 30), (100, 0)],              {A},    id="30 percent"),
    pytest.param([(100, 20), (100, 0)],              {A},    id="just as many as the limit"),
    pytest.param([(100, 19), (100, 0)],              set(),  id="fewer"),
    pytest.param([(20, 10), (100, 0)],              {A},    id="just enough connections"),
    pytest.param([(20, 12), (40, 10)],               set(),  id="twice as often, which may be chance"),
    pytest.param([(200, 120), (400, 100)],           {A},    id="twice as often, of more connections"),
    pytest.param([(20, 20), (1, 0)],                 set(),  id="the others have hardly any"),
    pytest.param([(19, 19), (100, 0)],               set(),  id="too few connections"),
    pytest.param([(100, 30), (100, 30)],             set(),  id="all fail as often"),
    pytest.param([(200, 120), (200, 60), (200, 60)], {A},    id="twice as often as the others"),
    pytest.param([(200, 119), (200, 60), (200, 60)], set(),  id="less than twice"),
    pytest.param([(200, 100), (200, 0), (200, 100)], {A, C}, id="two of three"),
    pytest.param([(100, 90)],                        {A},    id="it is alone, which the map knows"),
    pytest.param([(10, 60), (100, 0)],               set(),  id="more failures than connections, too few of these"),
    pytest.param([(0, 0), (0, 0)],                   set(),  id="nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("pairs", "expected"), SHARES)
def test_who_fails_too_large_a_share(pairs: list[tuple[int, int]], expected: set[str]) -> None:
    shares = FailureShares[str, str](20, 20)
    before = [(1000 + begun, 500 + failed) for begun, failed in [(7, 7)] * len(pairs)]
    assert shares.evaluate(50.0, counts(*before)) == {}, (
        "an interval begins with the first failure, and counts from there"
    )
    after = [(a + begun, b + failed) for (a, b), (begun, failed) in zip(before, pairs, strict=True)]
    found = shares.evaluate(53.0, counts(*after))
    assert found.keys() == expected
    if A in expected:
        begun, failed = pairs[0]
        assert found[A] == f"{failed} of {begun} connections failed within 3 s"


def by_chance(seed: int) -> bool:
    """All lose a third of 100 connections a second for a minute, and a second passes until that is counted."""
    chosen, shares = random.Random(seed), FailureShares[str, str](20, 20)
    begun, failed, lost = dict.fromkeys(ALL, 0), dict.fromkeys(ALL, 0), list[str]()
    for second in range(60):
        failed = {name: count + lost.count(name) for name, count in failed.items()}
        served = chosen.choices(sorted(ALL), k=100)
        lost = [name for name in served if chosen.random() < 1 / 3]
        begun = {name: count + served.count(name) for name, count in begun.items()}
        if shares.evaluate(second, {PORT: {name: Counts(begun[name], failed[name]) for name in ALL}}):
            return True
    return False


def test_chance_hardly_ever_makes_an_outlier() -> None:
    assert sum(by_chance(seed) for seed in range(100)) <= 1


def test_an_interval_ends_and_the_next_begins_with_a_failure() -> None:
    shares = FailureShares[str, str](20, 20)
    shares.evaluate(0.0, counts((0, 0), (0, 0)))
    assert shares.evaluate(INTERVAL, counts((100, 10), (100, 0))) == {}
    assert not shares.intervals
    assert shares.evaluate(11.0, counts((101, 11), (100, 0))) == {}
    assert shares.evaluate(12.0, counts((130, 20), (100, 0))).keys() == {A}, "9 of 29, not 20 of 130"


def test_who_has_few_connections_gets_more_time() -> None:
    shares = FailureShares[str, str](20, 20)
    shares.evaluate(0.0, counts((0, 0), (0, 0)))
    assert shares.evaluate(INTERVAL, counts((10, 5), (10, 0))) == {}
    assert shares.intervals
    assert shares.evaluate(25.0, counts((22, 18), (50, 0))).keys() == {A}
    shares = FailureShares[str, str](20, 20)
    shares.evaluate(0.0, counts((0, 0), (0, 0)))
    assert shares.evaluate(LONGEST_INTERVAL, counts((19, 9), (19, 0))) == {}
    assert not shares.intervals


def test_counts_that_begin_anew_and_ports_that_go() -> None:
    shares = FailureShares[str, str](20, 20)
    shares.evaluate(0.0, counts((1000, 500), (0, 0)))
    assert shares.evaluate(1.0, counts((5, 5), (0, 0))) == {}, "another backend by this number"
    assert shares.evaluate(2.0, counts((105, 55), (0, 0))).keys() == {A}
    assert shares.evaluate(3.0, counts((105, 55), (0, 0))) == {}, "said once"
    assert shares.evaluate(3.0, {}) == {}
    assert not shares.intervals


def test_a_share_ejects_as_consecutive_failures_do() -> None:
    detector = OutlierDetector[str](3)
    detector.evaluate(0.0, {A: 1}, {}, ALL, {A: "6 of 20"})
    assert detector.ejections[A] == Ejection(FIRST, "6 of 20", 0.0)
    assert detector.evaluate(FIRST, {}, {}, ALL) == [A]
    detector.evaluate(FIRST + 1, {}, {}, ALL, {A: "7 of 20"})
    assert detector.ejections[A].until == FIRST + 1 + 2 * FIRST, "for longer"


names = st.sampled_from("abcdefgh")


@given(st.lists(names, unique=True, max_size=8), st.dictionaries(names, st.floats(0, 100)))
def test_half_of_a_route_stays_and_the_first_go(route: list[str], since: dict[str, float]) -> None:
    ejections = {name: Ejection(None, "", at) for name, at in since.items()}
    out = ejected(route, ejections)
    accused = [name for name in route if name in since]
    assert len(out) == min(len(accused), len(route) // 2)
    assert out <= set(accused)
    if route:
        assert set(route) - out
    assert all(since[gone] <= since[kept] for gone in out for kept in set(accused) - out)


failing = st.lists(
    st.tuples(
        st.floats(0.1, 40),
        st.dictionaries(names, st.integers(1, 6), max_size=5),
        st.dictionaries(names, st.just("down"), max_size=2),
        st.sets(names, min_size=4),
    ),
    max_size=25,
)


@given(failing, st.integers(0, 4))
def test_any_history(history: list[tuple[float, dict[str, int], dict[str, str], set[str]]], limit: int) -> None:
    """What holds after every look, whatever came before."""
    detector = OutlierDetector[str](limit)
    now, out, since = 0.0, set[str](), dict[str, float]()
    for step, failures, down, known in history:
        now += step
        before = dict(detector.ejections)
        readmitted = detector.evaluate(now, failures, down, known)
        current = set(detector.ejections)
        assert current <= known
        assert set(readmitted) == (out - current) & known
        for name in current:
            ejection = detector.ejections[name]
            assert (ejection.until is None) == (name in down)
            if name not in out:
                since[name] = now
                assert name in down or (limit and failures.get(name, 0) >= limit)
            assert ejection.since == since[name]
            if ejection.until is not None:
                assert now < ejection.until <= now + LONGEST
        for name in readmitted:
            assert before[name].until is None or before[name].until <= now
        for name in down.keys() & known:
            assert name in current
        out = current


# --- in the maps


def subject(of: Entry, number: int) -> Subject:
    return of.key, (of.serving[number].address, of.serving[number].port)


def number(store: Store, of: Entry, place: int) -> int:
    key, socket = subject(of, place)
    return store.numbers(key)[socket]


def ejections_of(*subjects: Subject) -> dict[Subject, Ejection]:
    return {s: Ejection(10.0, "", float(position)) for position, s in enumerate(subjects)}


def inside(store: Store, vip: str = V1) -> list[str]:
    port = programmed(store.maps)[0][6 if ":" in vip else 4, vip, 80, 6]
    return [address for address, _ in port.inside]


def state(store: Store, of: Entry) -> list[int]:
    return [int(store.backends["flags"][number(store, of, i)]) for i in range(len(of.serving))]


@pytest.fixture
def store(open_maps: OpenMaps) -> Store:
    return Store(open_maps(), HZ)


@pytest.mark.root
@pytest.mark.parametrize("vip", [V1, V6], ids=["v4", "v6"])
@pytest.mark.parametrize("affinity", [0, 60])
def test_new_connections_pass_by_who_is_out(store: Store, vip: str, affinity: int) -> None:
    web = entry(one, vip, 4, affinity=affinity)
    names = [b.address for b in web.serving]
    store.apply({one: (web,)})
    store.adjust(ejections_of(subject(web, 1)), {})
    assert inside(store, vip) == [names[0], *names[2:]]
    assert state(store, web) == [3, 1 | 8, 3, 3], "it serves, and is no member: affinity does not hold on to it"
    settle(store)
    store.adjust({subject(web, 2): Ejection(None, "", 0.0)}, {})
    assert inside(store, vip) == [*names[:2], names[3]]
    assert state(store, web) == [3, 3, 1 | 8 | 16, 3]
    store.adjust({}, {})
    settle(store)
    check(store, {one: (web,)}, settled=True)


@pytest.mark.root
def test_each_route_keeps_half(store: Store) -> None:
    """Two of four are local: of these one stays, of all of them two."""
    web = entry(one, V1, 4, local=2)
    names = [b.address for b in web.serving]
    store.apply({one: (web,)})
    store.adjust(ejections_of(*(subject(web, i) for i in range(3))), {})
    port = programmed_without_members(store)
    assert port == ([names[1]], [names[2], names[3]])
    assert [store.is_ejected(number(store, web, i)) for i in range(4)] == [True, True, False, False]


def programmed_without_members(store: Store) -> tuple[list[str], list[str]]:
    (known,) = store.plan.installed[one]
    return tuple(  # type: ignore[return-value]
        [layout.address_text(store.backends["address"][number].tobytes(), 4) for number in ring] for ring in known.rings
    )


@pytest.mark.root
def test_a_change_of_the_service_keeps_ejections(store: Store) -> None:
    before, after = entry(one, V1, 3), entry(one, V1, 5)
    names = [b.address for b in after.serving]
    store.apply({one: (before,)})
    store.adjust(ejections_of(subject(before, 0)), {})
    store.apply({one: (after,)})
    settle(store)
    assert inside(store) == names[1:]
    store.apply({one: (entry(one, V1, 1),)})
    settle(store)
    assert inside(store) == names[:1]
    store.apply({one: ()})
    store.adjust(ejections_of(subject(before, 0)), {})
    settle(store)
    check(store, {}, settled=True)


@pytest.mark.root
def test_counts_are_read_by_name(store: Store) -> None:
    web, six = entry(one, V1, 3), entry(one, V6, 2)
    store.apply({one: (web, six)})
    assert store.failures() == {}
    for failures, (of, place) in enumerate(((web, 2), (six, 0)), 3):
        store.backends["failures"][number(store, of, place)] = failures
    assert store.failures() == {subject(web, 2): 3, subject(six, 0): 4}
    store.readmit(number(store, web, 2), 2)
    store.readmit(number(store, six, 0), 7)
    assert store.failures() == {subject(web, 2): 2, subject(six, 0): 4}


@pytest.mark.root
def test_a_backend_that_comes_back_begins_without_failures(store: Store) -> None:
    """Its former row keeps what it counted until another backend gets it."""
    web = entry(one, V1, 3)
    store.apply({one: (web,)})
    store.backends["failures"][number(store, web, 2)] = 3
    store.apply({one: (entry(one, V1, 2),)})
    assert store.failures() == {}
    store.apply({one: (web,)})
    assert store.failures() == {}
    store.readmit(number(store, web, 2), 2)
    assert store.failures() == {}


@pytest.mark.root
@pytest.mark.parametrize(("ago", "lately"), [(5.0, True), (LATELY_SECONDS + 5, False)], ids=["now", "before"])
def test_backends_that_failed_lately_are_listed(store: Store, ago: float, lately: bool) -> None:
    """A success ends a row of failures, and perhaps no client comes any more after the mend."""
    web, lone, maps = entry(one, V1, 3), entry(one, V6, 1), store.maps.maps
    store.apply({one: (web, lone)})
    failed = [number(store, web, 1), number(store, lone, 0)]
    store.backends["failures"][failed] = 2
    rows = np.zeros(2, dtype=layout.dtype_of("failures"))
    for field in ("address", "port", "service"):
        rows[field] = store.backends[field][failed]
    rows["refused"], rows["refused_at"] = 2, int((time.monotonic() - ago) * 1e9)
    for key, row in zip(failed, rows, strict=True):
        maps["failures"].update(np.uint32(key).tobytes(), row.tobytes())
    names = dict(zip(store.backends["service"][failed].tolist(), ("web", "lone"), strict=True))
    every, few = listing.failing_ports(maps, lambda: names)
    assert every == ({"lone": 0} if lately else {})
    twins = dict.fromkeys(names, "web")  # one Service in two families
    assert listing.failing_ports(maps, lambda: twins)[0] == ({"web": 6} if lately else {})
    address, port = subject(web, 1)[1]
    wanted = ("web", f"{address}:{port}", False)
    assert [(row.service, row.address, row.ejected) for row in few] == [wanted] * lately
    states = [row.state or "" for row in listing._backends(maps, names) if row.failures]  # noqa: SLF001
    assert [state.partition(":")[0] for state in states] == ["failing" if lately else "serving"] * 2
    assert int((listing._chosen(maps)[3] > 0).sum()) == 2 * lately  # noqa: SLF001 - what `services` counts


@pytest.mark.root
def test_a_restart_begins_with_all_and_with_the_counts(open_maps: OpenMaps) -> None:
    web = entry(one, V1, 3)
    store = Store(open_maps(), HZ)
    store.apply({one: (web,)})
    store.backends["failures"][number(store, web, 1)] = 5
    store.adjust(ejections_of(subject(web, 1)), {})
    settle(store)
    again = restart(open_maps)
    again.apply({one: (web,)})
    settle(again)
    assert len(inside(again)) == 3
    assert again.failures() == {subject(web, 1): 5}
    check(again, {one: (web,)}, settled=True)


@pytest.mark.root
def test_what_doctor_meets_during_an_evaluation_is_taken_back_too(
    open_maps: OpenMaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs count at any time: what was counted before the sparing stays, and what a client ended in it does not."""
    store, watched, web = Store(open_maps(), HZ), failover.Failover(Options()), entry(one, V1, 3)
    store.apply({one: (web,)})
    counts = store.backends["failures"]
    ours, clients, ended = (number(store, web, place) for place in range(3))
    counts[[clients, ended]] = 2
    watched.spare(store, 60)

    def meanwhile(_: Store) -> bool:
        counts[[ours, clients]] += 5
        counts[ended] = 0
        return True

    with monkeypatch.context() as patched:
        patched.setattr(watched, "_has_failed", meanwhile)
        watched.evaluate(store)
        evaluate_once_more = watched.evaluate(store)
    watched.spare(store, 0)
    assert (evaluate_once_more, watched.rows()) == ([], [])
    assert store.failures() == {subject(web, 1): 2}
    counts[ours] = 3
    watched.evaluate(store)
    assert [row.ejected for row in watched.rows()] == [True], "what fails after it counts"
    watched.close()


@pytest.mark.root
@pytest.mark.parametrize("killed", [False, True], ids=["both end", "one is killed"])
def test_the_end_of_one_doctor_ends_nothing_of_the_other(
    open_maps: OpenMaps, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    store, now = Store(open_maps(), HZ), [1000.0]
    monkeypatch.setattr(failover, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watched, web = failover.Failover(Options()), entry(one, V1, 3)
    monkeypatch.setattr(watched, "_has_failed", lambda _: True)
    store.apply({one: (web,)})
    counts, ours = store.backends["failures"], number(store, web, 0)
    watched.spare(store, 20)
    now[0] += 30 * killed
    watched.spare(store, 20)
    if not killed:
        watched.spare(store, 0)
    counts[ours] = 5
    watched.evaluate(store)
    assert (store.failures(), watched.rows()) == ({}, [])
    watched.spare(store, 0)
    counts[ours] = 5
    watched.evaluate(store)
    assert [row.ejected for row in watched.rows()] == [True]
    watched.close()


def test_a_readmitted_backend_starts_slowly_where_its_service_asks_for_that(
    open_maps: OpenMaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = Store(open_maps(), HZ), [1000.0]
    monkeypatch.setattr(failover, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watched = failover.Failover(Options())
    web = msgspec.structs.replace(entry(one, V1, 3), slow_start=10.0)
    watched.slow_start.follow(now[0], EMPTY, ServiceTable({one: (web,)}), [one])
    store.apply({one: (web,)})
    store.backends["failures"][store.numbers(web.key)[subject(web, 1)[1]]] = 3
    seen = []
    for now[0] in (1000.0, 1009.0, 1010.5, 1013.5, 1020.0):
        watched.evaluate(store)
        counts = Counter(store.plan.by_id[store.plan.installed[one][0].service].rings[0])
        seen.append([counts[number] for number in store.plan.installed[one][0].ids])
    assert seen == [[1, 0, 1], [1, 0, 1], [10, 1, 10], [5, 2, 5], [1, 1, 1]]
    watched.close()
