"""Algorithms in the maps: the rings that the store fills, and what it does when there is no room for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hybrid_proxy.dataplane.balancing import ALGORITHMS, ring_of
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.hooks.fast_path import decide
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.making import MOST_BYTES
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.modes.ebpf.views.reports import Reports
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, ServiceTable
from tests.tables import fronts_of

from ..readback import check_books, programmed, settle
from .test_store import HZ, V1, V2, V6, OpenMaps, Table, entry, many, one, restart, two, without_sharing

pytestmark = pytest.mark.root

LIMIT = 16_381
SPREADS = {
    "mh": "SERVICE_BY_TUPLE",
    "sh": "SERVICE_BY_CLIENT",
    "rr": "SERVICE_ROUND_ROBIN",
    "wrr": "SERVICE_ROUND_ROBIN",
    "lc": "SERVICE_FEWEST",
    "wlc": "SERVICE_FEWEST",
}


def port(
    algorithm: str, weights: list[int], vip: str = V1, name: str = one, local: int | None = None, affinity: int = 0
) -> Entry:
    """A service port with a backend for each weight."""
    made = entry(name, vip, len(weights), local=local, affinity=affinity)
    weighed = tuple(msgspec.structs.replace(b, weight=w) for b, w in zip(made.serving, weights, strict=True))

    def weigh(route: BackendSet) -> BackendSet:
        return msgspec.structs.replace(route, backends=weighed[: len(route.backends)])

    sets = tuple(map(weigh, made.backend_sets))
    return msgspec.structs.replace(made, backend_sets=sets, serving=weighed, algorithm=algorithm)


def slots_of(store: Store, vip: str = V1) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Backends in the order of slots, inside and outside, read back from the maps."""
    ports, _ = programmed(store.maps)
    family = 6 if ":" in vip else 4
    found = ports[family, vip, 80, 6]
    return found.inside, found.outside


def expected(algorithm: str, backends: tuple[Backend, ...], limit: int = LIMIT) -> list[tuple[str, int]]:
    return [(backends[i].address, backends[i].port) for i in ring_of(ALGORITHMS[algorithm], backends, limit)]


def flags_of(store: Store, key: str = one) -> int:
    (known,) = store.plan.installed[key]
    return int(store.services[known.service]["flags"])


def spread_of(store: Store) -> set[str]:
    names = layout.abi_constants()
    return {name for name in set(SPREADS.values()) if flags_of(store) & names[name]}


@pytest.fixture
def store(open_maps: OpenMaps) -> Store:
    return Store(open_maps(slots=16_384), HZ)


CHANGES = [
    pytest.param([port(name, [1, 1, 1]) for name in (*ALGORITHMS, *reversed(ALGORITHMS))], id="algorithms"),
    pytest.param([port("mh", [1] * n) for n in (0, 1, 2, 10, 11, 40, 3, 0)], id="maglev-scales"),
    pytest.param([port("mh", w) for w in ([1, 1], [3, 1], [3, 2, 1], [1, 1, 1])], id="maglev-weights"),
    pytest.param([port("random", w) for w in ([1, 1], [3, 1], [30, 7], [1, 1])], id="random-weights"),
    pytest.param([port("wrr", w) for w in ([1, 1], [3, 1], [1000, 999], [1])], id="weights-in-turn"),
    pytest.param([port("mh", [1, 2, 1], local=n) for n in (None, 0, 1, 3, 2)], id="two-routes"),
    pytest.param([port("mh", [1, 2, 1], vip=V6), port("sh", [1, 2, 1], vip=V6)], id="v6"),
]  # fmt: skip


@pytest.mark.parametrize("entries", CHANGES)
def test_slots_are_the_ring_of_the_algorithm(store: Store, entries: list[Entry]) -> None:
    for made in entries:
        store.apply({one: (made,)})
        assert not store.plan.unprogrammed
        assert not store.plan.cut
        front = fronts_of(made)[0]
        inside, outside = slots_of(store, front.address or "")
        assert inside == expected(made.algorithm, front.internal.backends)
        assert outside == expected(made.algorithm, front.external.backends)
        assert spread_of(store) == {SPREADS[name] for name in [made.algorithm] if name in SPREADS}
        check_books(store, 1, [made], settled=False)
        settle(store)
        assert store.plan.pools.slots.in_use == sum(
            size for known in store.plan.installed[one] for _, size in known.ranges
        )
    store.apply({one: ()})
    settle(store)
    assert store.plan.pools.slots.in_use == 0
    assert not frozenset(store.plan.counts_flows)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_restart_takes_the_ring_over(store: Store, open_maps: OpenMaps, algorithm: str) -> None:
    table = {one: (port(algorithm, [1, 2, 3]),), two: (entry(two, V2, 3),)}
    store.apply(table)
    before = {number: known.ranges for number, known in store.plan.by_id.items()}
    words = store.services["sets"].copy()
    again = restart(lambda: open_maps(slots=16_384))
    again.apply(without_sharing(table))
    assert {number: known.ranges for number, known in again.plan.by_id.items()} == before
    assert (again.services["sets"] == words).all(), "the same slots, not even another epoch"


# --- no room


def test_rings_get_smaller_before_a_service_port_is_refused(open_maps: OpenMaps) -> None:
    """Four slots are enough for three backends: Maglev gets what others do not need."""
    store = Store(open_maps(slots=2048, backends=1024, services=256), HZ)
    table: Table = {f"default/s{n}": (port("mh", [1, 1, 1], f"10.96.0.{n}", f"default/s{n}"),) for n in range(1, 40)}
    store.apply(table)
    store.apply(many(80, 3, 60))
    assert not store.plan.unprogrammed
    sizes = [len(slots_of(store, f"10.96.0.{n}")[0]) for n in range(1, 40)]
    assert sizes[0] == 1021
    assert sorted(set(sizes), reverse=True) == [1021, 509, 3], "251 would leave less than a quarter"
    assert sizes == sorted(sizes, reverse=True), "the first come had the most"
    assert all(cut == (size, 1021) for cut, size in zip(store.plan.cut.values(), sizes[1:], strict=True))


def test_warnings_name_what_is_not_as_configured() -> None:
    table = ServiceTable({one: (port("dh", [1, 1]), port("mh", [3, 1]), port("twos", [1, 1]))})
    plan = SimpleNamespace(cut={(f"{one}:p80", 4, 6): (251, 1021)}, pools=SimpleNamespace(used=dict))
    counted = SimpleNamespace(counting=True, backends=8192)
    full = {"slots": "slots are nearly full"}
    datapath: Any = SimpleNamespace(failure="no memory", nearly_full=lambda _: full)
    store: Any = SimpleNamespace(plan=plan, traffic=counted)
    maps: Any = SimpleNamespace(maps={"backends": SimpleNamespace(entries=16_384)})
    unused: Any = SimpleNamespace(used={})
    fast_path: Any = SimpleNamespace(decision=decide("auto", ()))
    reports = Reports(Options(), maps, store, datapath, unused, unused, unused, fast_path)
    assert [event.note for event in reports.nearly_full()] == ["slots are nearly full"]
    assert reports.warnings(table) == [
        "1 service port asking for another algorithm than random, which is used instead",
        (
            f"1 service port with rings smaller than the algorithm fills ({one}:p80: 251 of 1021 slots): "
            "--max-slots is used up, and other nodes may choose other backends"
        ),
        (
            "the traffic of backends with numbers from 8192 on is not counted: rows for 16384 would take more than "
            f"{MOST_BYTES >> 20} MiB"
        ),
        "no memory",
    ]


# --- least connections


def ids(store: Store, key: str = one) -> list[int]:
    (known,) = store.plan.installed[key]
    return known.ids.tolist()


def test_whose_open_flows_are_counted_has_a_flag_and_a_weight(store: Store) -> None:
    def counted() -> list[tuple[bool, int]]:
        flags, weights = store.backends["flags"], store.maps.view("loads")["weight"]
        return [
            (bool(flags[number] & layout.abi_constants()["BACKEND_COUNTED"]), weights[number]) for number in ids(store)
        ]

    store.apply({one: (port("random", [3, 1]),), two: (port("lc", [2, 2], V2, two),)})
    assert counted() == [(False, 0), (False, 0)]
    assert store.plan.needs_recount()
    store.apply({one: (port("wlc", [3, 1]),)})
    assert counted() == [(True, 3), (True, 1)]
    assert len(frozenset(store.plan.counts_flows)) == 2
    assert store.plan.needs_recount(), "what is open already is to be counted"
    store.apply({one: (port("lc", [5, 1, 2]),)})
    assert counted() == [(True, 5), (True, 1), (True, 2)]
    assert not store.plan.needs_recount()
    store.apply({one: (port("rr", [5, 1, 2]),), two: ()})
    assert [flag for flag, _ in counted()] == [False] * 3
    assert not frozenset(store.plan.counts_flows)
