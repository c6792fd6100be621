"""Who is left out, for how long, and who never is: the judge by itself, then its sentences in the maps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.modes.ebpf import layout, lower
from dataplane.modes.ebpf.outliers import FIRST, LONGEST, Outliers, Sentence, leave_out
from dataplane.modes.ebpf.store import Store, Subject, key_of
from dataplane.table import Entry

from .readback import check, programmed, settle
from .test_store import HZ, V1, V6, OpenMaps, entry, one, restart

A, B, C = "a", "b", "c"
ALL = {A, B, C}


def judge_at(
    judge: Outliers[str], now: float, failures: dict[str, int], down: dict[str, str] | None = None
) -> set[str]:
    judge.judge(now, failures, down or {}, ALL)
    return set(judge.sentences)


def test_as_many_failures_as_the_limit() -> None:
    judge = Outliers[str](3)
    assert judge_at(judge, 1.0, {A: 2, B: 3, C: 4}) == {B, C}
    assert judge.sentences[B] == Sentence(1.0 + FIRST, "3 connections one after the other failed", 1.0)


def test_without_a_limit_nobody_is_out() -> None:
    assert judge_at(Outliers[str](0), 1.0, {A: 1000}) == set()


def test_times_double_up_to_the_longest_and_begin_anew_when_all_was_fine() -> None:
    judge = Outliers[str](3)
    now, periods = 0.0, []
    for _ in range(8):
        changes = judge.judge(now, {A: 3}, {}, ALL)
        assert changes.out == [A]
        until = judge.sentences[A].until
        assert until is not None
        periods.append(until - now)
        assert judge_at(judge, until - 0.001, {A: 5}) == {A}
        assert judge.judge(until, {A: 5}, {}, ALL).back == [A]
        now = until + 1
    assert periods == [10, 20, 40, 80, 160, 300, 300, 300]
    assert judge.on_probation == 2
    assert judge_at(judge, now, {}) == set()
    assert judge_at(judge, now + 400, {}) == set()
    judge.judge(now + 401, {A: 3}, {}, ALL)
    assert judge.sentences[A].until == now + 401 + FIRST


def test_whoever_came_back_is_remembered_until_it_has_answered() -> None:
    """Nobody asked it for an hour: that says nothing in its favour."""
    judge = Outliers[str](3)
    judge_at(judge, 0.0, {A: 3})
    assert judge_at(judge, FIRST, {A: 3}) == set()
    judge_at(judge, 3600.0, {A: 2})
    assert judge_at(judge, 3601.0, {A: 3}) == {A}
    assert judge.sentences[A].until == 3601.0 + 2 * FIRST


def test_what_probes_say_holds_until_they_succeed() -> None:
    judge = Outliers[str](3)
    assert judge_at(judge, 0.0, {A: 3}, {A: "no answer"}) == {A}
    assert judge.sentences[A] == Sentence(None, "no answer", 0.0)
    assert judge_at(judge, 10_000.0, {A: 9}, {A: "status 500"}) == {A}
    assert judge.sentences[A].why == "status 500"
    assert judge.judge(10_001.0, {A: 9}, {}, ALL).back == [A], "what was counted in that time is forgiven"
    assert not judge.busy or judge_at(judge, 10_002.0, {}) == set()


def test_a_probe_that_succeeds_frees_at_once_whom_both_had_accused() -> None:
    judge = Outliers[str](3)
    judge_at(judge, 0.0, {A: 3})
    assert judge_at(judge, 1.0, {A: 3}, {A: "no answer"}) == {A}
    assert judge_at(judge, 2.0, {A: 3}) == set()


def test_who_is_gone_is_forgotten() -> None:
    judge = Outliers[str](3)
    judge_at(judge, 0.0, {A: 3, B: 3})
    changes = judge.judge(1.0, {A: 3, B: 3}, {C: "down"}, {B})
    assert (changes.out, changes.back, set(judge.sentences)) == ([], [], {B})


names = st.sampled_from("abcdefgh")


@given(st.lists(names, unique=True, max_size=8), st.dictionaries(names, st.floats(0, 100)))
def test_half_of_a_route_stays_and_the_first_go(route: list[str], since: dict[str, float]) -> None:
    sentences = {name: Sentence(None, "", at) for name, at in since.items()}
    out = leave_out(route, sentences)
    accused = [name for name in route if name in since]
    assert len(out) == min(len(accused), len(route) // 2)
    assert out <= set(accused)
    if route:
        assert set(route) - out
    assert all(since[gone] <= since[kept] for gone in out for kept in set(accused) - out)


looks = st.lists(
    st.tuples(
        st.floats(0.1, 40),
        st.dictionaries(names, st.integers(1, 6), max_size=5),
        st.dictionaries(names, st.just("down"), max_size=2),
        st.sets(names, min_size=4),
    ),
    max_size=25,
)


@given(looks, st.integers(0, 4))
def test_any_history(history: list[tuple[float, dict[str, int], dict[str, str], set[str]]], limit: int) -> None:
    """What holds after every look, whatever came before."""
    judge = Outliers[str](limit)
    now, out, since = 0.0, set[str](), dict[str, float]()
    for step, failures, down, known in history:
        now += step
        before = dict(judge.sentences)
        changes = judge.judge(now, failures, down, known)
        current = set(judge.sentences)
        assert current <= known
        assert set(changes.out) == current - out
        assert set(changes.back) == (out - current) & known
        for name in current:
            told = judge.sentences[name]
            assert (told.until is None) == (name in down)
            if name not in out:
                since[name] = now
                assert name in down or (limit and failures.get(name, 0) >= limit)
            assert told.since == since[name]
            if told.until is not None:
                assert now < told.until <= now + LONGEST
        for name in set(changes.back):
            assert before[name].until is None or before[name].until <= now
        for name in down.keys() & known:
            assert name in current
        out = current


# --- in the maps


def subject(of: Entry, number: int) -> Subject:
    return key_of(of), (of.serving[number].address, of.serving[number].port)


def number(store: Store, of: Entry, place: int) -> int:
    key, socket = subject(of, place)
    return store.numbers(key)[socket]


def sentence(*subjects: Subject) -> dict[Subject, Sentence]:
    return {s: Sentence(10.0, "", float(position)) for position, s in enumerate(subjects)}


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
    store.leave_out(sentence(subject(web, 1)))
    assert inside(store, vip) == [names[0], *names[2:]]
    assert state(store, web) == [3, 1 | 8, 3, 3], "it serves, and is no member: affinity does not hold on to it"
    settle(store)
    store.leave_out({subject(web, 2): Sentence(None, "", 0.0)})
    assert inside(store, vip) == [*names[:2], names[3]]
    assert state(store, web) == [3, 3, 1 | 8 | 16, 3]
    store.leave_out({})
    settle(store)
    check(store, {one: (web,)}, settled=True)


@pytest.mark.root
def test_each_route_keeps_half(store: Store) -> None:
    """Two of four are local: of these one stays, of all of them two."""
    web = entry(one, V1, 4, local=2)
    names = [b.address for b in web.serving]
    store.apply({one: (web,)})
    store.leave_out(sentence(*(subject(web, i) for i in range(3))))
    port = programmed_without_members(store)
    assert port == ([names[1]], [names[2], names[3]])
    assert [store.is_left_out(number(store, web, i)) for i in range(4)] == [True, True, False, False]


def programmed_without_members(store: Store) -> tuple[list[str], list[str]]:
    (known,) = store.installed[one].values()
    return tuple(  # type: ignore[return-value]
        [layout.address_text(store.backends["address"][number].tobytes(), 4) for number in ring]
        for ring in store._rings_of(known.service)
    )


@pytest.mark.root
@pytest.mark.parametrize("count", [1, 2])
def test_the_last_one_stays(store: Store, count: int) -> None:
    web = entry(one, V1, count)
    store.apply({one: (web,)})
    store.leave_out(sentence(*(subject(web, i) for i in range(count))))
    assert len(inside(store)) == 1


@pytest.mark.root
def test_a_change_of_the_service_keeps_sentences(store: Store) -> None:
    before, after = entry(one, V1, 3), entry(one, V1, 5)
    names = [b.address for b in after.serving]
    store.apply({one: (before,)})
    store.leave_out(sentence(subject(before, 0)))
    store.apply({one: (after,)})
    settle(store)
    assert inside(store) == names[1:]
    store.apply({one: (entry(one, V1, 1),)})
    settle(store)
    assert inside(store) == names[:1]
    store.apply({one: ()})
    store.leave_out(sentence(subject(before, 0)))
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
    store.put_on_probation(number(store, web, 2), 2)
    store.put_on_probation(number(store, six, 0), 7)
    assert store.failures() == {subject(web, 2): 2, subject(six, 0): 4}


@pytest.mark.root
def test_a_restart_begins_with_all_and_with_the_counts(open_maps: OpenMaps) -> None:
    web = entry(one, V1, 3)
    store = Store(open_maps(), HZ)
    store.apply({one: (web,)})
    store.backends["failures"][number(store, web, 1)] = 5
    store.leave_out(sentence(subject(web, 1)))
    settle(store)
    again = restart(open_maps)
    again.apply({one: (web,)})
    settle(again)
    assert len(inside(again)) == 3
    assert again.failures() == {subject(web, 1): 5}
    check(again, {one: (web,)}, settled=True)


def test_flags_are_those_of_the_header() -> None:
    names = layout.abi_constants()
    assert names["BACKEND_LEFT_OUT"] == lower.BACKEND_LEFT_OUT
    assert names["BACKEND_PROBE_FAILED"] == lower.BACKEND_PROBE_FAILED
