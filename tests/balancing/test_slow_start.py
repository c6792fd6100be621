"""Slow start: which backends begin with a part of their weight, and how that grows."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import msgspec
import pytest

from hybrid_proxy.dataplane.slow_start import STEPS, SlowStart, part_at, slowed
from hybrid_proxy.dataplane.table import EMPTY, Backend, BackendSet, Entry, Kind, Protocol, ServiceTable
from tests.tables import Front, entry_of

A, B, C = (Backend(f"10.1.0.{n}", 80) for n in (1, 2, 3))
NAME = "default/web"


def out(backend: Backend) -> Backend:
    return msgspec.structs.replace(backend, weight=0)


def web(*backends: Backend, seconds: float = 30.0, serving: tuple[Backend, ...] | None = None) -> Entry:
    route = BackendSet(tuple(b for b in backends if b.weight))
    front = Front(Kind.CLUSTER_IP, "10.96.0.1", 80, route, route)
    return entry_of(f"{NAME}:x", 4, Protocol.TCP, [front], serving or backends, slow_start=seconds)


def table(*entries: Entry) -> ServiceTable:
    return ServiceTable({NAME: entries} if entries else {})


def starting(*steps: ServiceTable) -> dict[str, int]:
    """Parts by address after these tables, a second apart; the first one follows an empty one."""
    slow, before = SlowStart(), EMPTY
    for now, after in enumerate(steps):
        slow.follow(float(now), before, after, [NAME])
        slow.follow(float(now) + 0.5, before, after, [NAME])  # a sync that is tried again
        before = after
    return {address: part for parts in slow.parts(len(steps) - 1.0).values() for (address, _), part in parts.items()}


# fmt: off
CASES = [
    pytest.param([table(web(A, B))],                                   {},                 id="the first table"),
    pytest.param([table(), table(web(A, B))],                          {},                 id="a new service port"),
    pytest.param([table(web(A)), table(web(A, B))],                    {B.address: 1},     id="a new backend"),
    pytest.param([table(web(A)), table(web(A, B, seconds=0))],         {},                 id="without the annotation"),
    pytest.param([table(web(A, B, seconds=0)), table(web(A, B))],      {},                 id="the annotation comes"),
    pytest.param([table(web(A)), table(web(A, B)), table(web(A, B, seconds=0))], {},       id="the annotation goes"),
    pytest.param([table(web(A, out(B))), table(web(A, B))],            {B.address: 1},     id="the end of maintenance"),
    pytest.param([table(web(A, B)), table(web(A, out(B)))],            {},                 id="the beginning of it"),
    pytest.param([table(web(A, serving=(A, B))), table(web(A, B))],    {},                 id="it served all the time, beyond a hint"),
    pytest.param([table(web(A, B)), table(web(A)), table(web(A, B))],  {B.address: 1},     id="it was gone"),
    pytest.param([table(web(A)), table(web(A, B)), table(web(A))],     {},                 id="it goes"),
    pytest.param([table(web(A)), table(web(A, B)), table(web(A, B, C))], {B.address: 1, C.address: 1}, id="one after the other"),
    pytest.param([table(web(A)), table(web(A, B)), table()],           {},                 id="the service goes"),
    pytest.param([table(web(A)), table(web()), table(web(A, B))],      {A.address: 1, B.address: 1}, id="from none"),
]
# fmt: on


@pytest.mark.parametrize(("tables", "expected"), CASES)
def test_who_starts_slowly(tables: list[ServiceTable], expected: dict[str, int]) -> None:
    assert starting(*tables) == expected


def test_parts_grow_by_tenths_and_are_over_in_time() -> None:
    assert [part_at(passed, 30.0) for passed in range(0, 31, 3)] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]
    assert part_at(-1.0, 30.0) == 1, "a clock that stands"
    slow = SlowStart()
    slow.follow(0.0, table(web(A)), table(web(A, B)), [NAME])
    key = web().key
    assert slow.parts(26.9) == {key: {(B.address, 80): 9}}
    assert len(slow) == 1
    assert slow.parts(27.0) == {}
    assert len(slow) == 0


def test_a_readmitted_backend_begins_again_where_the_service_asks_for_it() -> None:
    slow, key = SlowStart(), web().key
    slow.begin(1.0, key, (A.address, 80))
    assert slow.parts(1.0) == {}
    slow.follow(1.0, EMPTY, table(web(A, B)), [NAME])
    slow.begin(2.0, key, (A.address, 80))
    assert slow.parts(5.0) == {key: {(A.address, 80): 2}}
    slow.follow(6.0, table(web(A, B)), table(web(A, B, C)), [NAME])
    assert slow.parts(6.0) == {key: {(A.address, 80): 2, (C.address, 80): 1}}


def test_weights_are_divided_and_the_order_stays() -> None:
    heavy = msgspec.structs.replace(A, weight=3)
    entry = web(heavy, B, out(C))
    assert slowed(entry, {}) is entry
    found = slowed(entry, {(A.address, 80): 1})
    assert [b.weight for b in found.serving] == [3, STEPS, 0]
    assert found.backend_sets[0].backends == found.serving[:2]
