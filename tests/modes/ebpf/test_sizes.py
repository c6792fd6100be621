"""How large maps are: what they begin with, when they grow, where that ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import abi_constants
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import SETTINGS, size_class
from hybrid_proxy.dataplane.modes.ebpf.maps.sizes import (
    FIRST,
    FLOWS,
    LRU,
    WRITTEN,
    bounds,
    crowded,
    first_sizes,
    fitting,
    foreseen,
    grown,
    needs,
    written,
)
from hybrid_proxy.dataplane.modes.ebpf.programmer import refuse_unfit
from hybrid_proxy.dataplane.modes.ebpf.services.lower import lower
from hybrid_proxy.dataplane.options import EbpfOptions, Limits, flows_by_memory
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, Kind, Protocol
from tests.tables import Front, entry_of

UPPER = bounds(Options())
NAMES = st.sampled_from(sorted(UPPER))


def test_every_map_that_grows_has_a_bound_a_first_size_and_a_setting() -> None:
    assert UPPER.keys() == FIRST.keys() == SETTINGS.keys() - {*FLOWS}


def test_a_start_is_small() -> None:
    assert first_sizes(UPPER) == {
        "services": 1024, "backends": 8192, "slots": 8192, "frontends4": 16_384, "frontends6": 16_384,
    }  # fmt: skip


def test_bounds_below_the_first_size_are_kept() -> None:
    small = bounds(Options(ebpf=EbpfOptions(limits=Limits(services=8, backends=16, slots=32))))
    assert first_sizes(small) == small
    assert fitting("services", 100, small) == 8


SIZES = [
    # map        need     size
    ("services", 0,       1024),
    ("services", 682,     1024),
    ("services", 683,     2048),
    ("services", 10_001,  15360),
    ("backends", 100_001, 155_648),
    ("slots",    4_000_000, 1 << 22),  # the bound
    ("frontends4", 20_000, 32_768),
    ("frontends4", 1_000_000, 131_072),  # the bound
]  # fmt: skip


@pytest.mark.parametrize(("name", "need", "size"), SIZES)
def test_a_size_is_half_as_much_again_as_is_needed(name: str, need: int, size: int) -> None:
    assert fitting(name, need, UPPER) == size


@given(NAMES, st.integers(0, 1 << 20))
def test_what_fits_below_the_bound_is_not_crowded(name: str, need: int) -> None:
    size = fitting(name, need, UPPER)
    assert min(FIRST[name], UPPER[name]) <= size <= UPPER[name]
    assert size == UPPER[name] or (size % FIRST[name] == 0 and 3 * need <= 2 * size)
    assert size == UPPER[name] or not crowded({name: size}, {name: need})


@given(NAMES, st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_growing_doubles_at_least_and_ends_at_the_bound(name: str, entries: int, used: int) -> None:
    before = first_sizes(UPPER) | {name: entries}
    sizes = grown([name], before, {name: used}, UPPER)
    if entries >= UPPER[name]:
        assert not sizes
    else:
        assert sizes[name] == UPPER[name] or sizes[name] >= max(2 * entries, 1.5 * used)
        assert entries < sizes[name] <= UPPER[name]


ROOM = [
    # flows    cpus  entries
    (1 << 20,  2,    1 << 14),
    (1 << 20,  8,    1 << 16),
    (1 << 20,  256,  1 << 18),
    (1 << 18,  256,  1 << 17),  # what the processors may keep to themselves
    (64,       2,    1 << 14),
]  # fmt: skip


@pytest.mark.parametrize(("flows", "cpus", "entries"), ROOM)
def test_lru_tables_follow_the_processors_up_to_a_quarter_of_the_flows(flows: int, cpus: int, entries: int) -> None:
    sizes = written(Options(ebpf=EbpfOptions(limits=Limits(flows=flows))), cpus)
    assert sizes.keys() == WRITTEN
    assert sizes == {
        **dict.fromkeys(FLOWS, flows), **dict.fromkeys(LRU, entries), "timewait": 1 << abi_constants()["TIMEWAIT_BITS"],
    }  # fmt: skip


def test_three_quarters_are_enough() -> None:
    assert crowded({"services": 1024}, {"services": 768}) == []
    assert crowded({"services": 1024}, {"services": 769}) == ["services"]


MEMORY = [
    # GiB  entries
    (1,    1 << 16),
    (3.9,  1 << 16),
    (7.8,  1 << 17),
    (15.6, 1 << 18),
    (31,   1 << 19),
    (62,   1 << 20),
    (500,  1 << 20),
]  # fmt: skip


@pytest.mark.parametrize(("gigabytes", "entries"), MEMORY)
def test_tables_of_flows_follow_the_nodes_memory(gigabytes: float, entries: int) -> None:
    assert flows_by_memory(int(gigabytes * (1 << 30))) == entries


@given(st.integers(0, 50), st.integers(0, 50))
def test_what_is_foreseen_is_enough_for_equal_services(services: int, size: int) -> None:
    entries = [entry(n, size, 0) for n in range(1, services + 1)]
    estimate, need = foreseen(services, services * size), needs(entries)
    for name, count in estimate.items():
        assert fitting(name, count, UPPER) >= need[name], name


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 17, 33])
def test_what_is_foreseen_is_enough_for_many_small_services(size: int) -> None:
    one = needs([entry(1, size, 0)])
    assert foreseen(40_000, 40_000 * size)["slots"] >= 40_000 * one["slots"]


def entry(number: int, size: int, local: int, family: int = 4) -> Entry:
    prefix = "fd00::" if family == 6 else "10.0.0."
    members = tuple(Backend(f"{prefix}{i}", 80) for i in range(1, size + 1))
    outside, inside = BackendSet(members), BackendSet(members[:local])
    address = f"fd96::{number}" if family == 6 else f"10.96.0.{number}"
    return entry_of(
        f"d/s{number}:p", family, Protocol.TCP, (Front(Kind.CLUSTER_IP, address, 80, inside, outside),), members
    )


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([4, 6])), max_size=20))
def test_the_guess_is_never_less_than_what_rows_take(shapes: list[tuple[int, int, int]]) -> None:
    entries = [entry(n, size, min(local, size), family) for n, (size, local, family) in enumerate(shapes, 1)]
    rows = [lower(e) for e in entries]
    need = needs(entries)
    assert need["services"] == len(entries) + 1
    assert need["backends"] == sum(len(r.members) for r in rows) + 1
    assert need["slots"] >= sum(size_class(len(ring)) for r in rows for ring in r.sets)
    for family in (4, 6):
        assert need[f"frontends{family}"] == 2 * sum(e.family == family for e in entries)


@pytest.mark.parametrize(("room", "missing"), [
    pytest.param({"services": 11, "backends": 21}, None, id="enough"),
    pytest.param({"services": 10, "backends": 21}, "--max-services", id="services"),
    pytest.param({"services": 11, "backends": 20}, "--max-backends", id="backends"),
])  # fmt: skip
def test_a_table_without_room_is_refused_before_there_are_maps(room: dict[str, int], missing: str | None) -> None:
    ports = [entry(number, 2, 0) for number in range(10)]
    if missing is None:
        refuse_unfit(ports, UPPER | room)
    else:
        with pytest.raises(Unsupported, match=missing):
            refuse_unfit(ports, UPPER | room)
