"""From one table to the next: what is written, what is freed, what keeps its number; no kernel, no maps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import pytest

from hybrid_proxy.dataplane.modes.ebpf.services.ejections import Ejection
from hybrid_proxy.dataplane.modes.ebpf.services.plan import Adopted, Batch, Plan, Rings
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, Kind, Probe, Protocol
from tests.tables import Front, entry_of

SIZES = {
    "services": 8, "backends": 32, "slots": 64, "frontends4": 16, "frontends6": 16, "source_ranges4": 4,
    "source_ranges6": 4,
}  # fmt: skip
WEB, DNS = "default/web", "default/dns"
V1, V2 = "10.96.0.1", "10.96.0.2"


def port(
    backends: Sequence[int], vip: str = V1, name: str = WEB, *, local: int | None = None, kind: Kind = Kind.CLUSTER_IP,
    ranges: tuple[str, ...] | None = None, protocol: Protocol = Protocol.TCP, affinity: int = 0,
    algorithm: str = "random",
) -> Entry:  # fmt: skip
    """A service port whose backends are 10.1.0.N; `local`: pods get the first so many only."""
    members = tuple(Backend(f"10.1.0.{number}", 8080) for number in backends)
    external = BackendSet(members)
    internal = external if local is None else BackendSet(members[:local])
    front = Front(kind, vip, 80, internal, external, source_ranges=ranges)
    return entry_of(f"{name}:http", 4, protocol, [front], members, affinity, algorithm=algorithm)


def change(plan: Plan, *entries: Entry, name: str = WEB) -> Batch:
    """The batch that makes these the ports of a service."""
    batch = Batch()
    plan.change(batch, name, entries)
    plan.pools.defer(batch.gone)
    return batch


def entry_at(number: int) -> Entry:
    """A service port at another port of the same address."""
    backends = BackendSet((Backend("10.1.0.9", 8080),))
    return entry_of(f"{DNS}:http", 4, Protocol.TCP, [Front(Kind.CLUSTER_IP, V1, number, backends, backends)])


def free(plan: Plan) -> None:
    """No program and no flow uses what is gone."""
    plan.pools.graced(plan.pools.stamp)
    plan.pools.scanned(*plan.pools.candidates)


def key(vip: str = V1, number: int = 80) -> tuple[int, str, int, int]:
    return 4, vip, number, 6 if number else 0


def rings(batch: Batch) -> list[tuple[int, int, list[int]]]:
    return [(offset, service, list(ring)) for offset, service, ring in batch.rings]


def written(batch: Batch) -> dict[int, tuple[str, int]]:
    """Address and flags of each whole row of a backend, by id."""
    return {
        number: (backend.address, flags)
        for group in batch.members
        for number, backend, flags in zip(group.ids, group.backends, group.flags, strict=True)
    }


def test_a_new_service_port() -> None:
    batch = change(Plan(SIZES), port([1, 2], affinity=60))
    assert written(batch) == {1: ("10.1.0.1", 3), 2: ("10.1.0.2", 3)}
    assert batch.members[0].kind == 4 | 6 << 8
    assert rings(batch) == [(0, 1, [1, 2])]
    assert batch.words == [(1, 0, 0, 2, 1), (1, 1, 0, 0, 0)], "service, set, offset, count, epoch"
    assert batch.services == [(1, 0, 60)]
    assert batch.frontends == {key(): (1, 0), key(number=0): (0, 4)}
    assert set(batch.new_frontends) == {key(), key(number=0)}


# What changes -> rows, flags, rings and words that are written, and ids that go.
CHANGES = [
    pytest.param(port([1, 2, 3]), {}, [], [], [], [], id="nothing"),
    pytest.param(port([1, 3]), {}, [], [[1, 3]], [(1, 0, 4, 2, 2)], [2], id="a-backend-goes"),
    pytest.param(port([1, 2, 3, 4]), {4: ("10.1.0.4", 3)}, [], [[1, 2, 3, 4]], [(1, 0, 4, 4, 2)], [], id="one-comes"),
    pytest.param(port([3, 2, 1]), {}, [], [[3, 2, 1]], [(1, 0, 4, 3, 2)], [], id="another-order"),
    pytest.param(port([]), {}, [], [], [(1, 0, 0, 0, 2)], [1, 2, 3], id="none-is-left"),
    pytest.param(
        port([1, 2, 3], local=1), {}, [(1, 7), (2, 5), (3, 5)], [[1], [1, 2, 3]],
        [(1, 0, 4, 1, 2), (1, 1, 8, 3, 2)], [], id="pods-get-local-ones",
    ),
    pytest.param(port([1, 2, 3], affinity=60), {}, [], [], [], [], id="affinity"),
]  # fmt: skip


@pytest.mark.parametrize(("after", "rows", "flags", "slots", "words", "gone"), CHANGES)
def test_a_change_writes_what_differs(
    after: Entry, rows: dict[int, tuple[str, int]], flags: list[tuple[int, int]], slots: list[list[int]],
    words: list[tuple[int, ...]], gone: list[int],
) -> None:  # fmt: skip
    plan = Plan(SIZES)
    change(plan, port([1, 2, 3]))
    batch = change(plan, after)
    assert written(batch) == rows
    assert batch.flags == flags
    assert [ring for _, _, ring in rings(batch)] == slots
    assert [word for word in batch.words if any(word[2:])] == words
    assert batch.gone.backends == gone
    assert batch.gone.ranges == ([(0, 4)] if words else [])
    assert not batch.new_frontends
    assert batch.services == ([(1, 0, 60)] if after.affinity_seconds else [])


def test_nothing_is_used_again_before_it_is_free() -> None:
    plan = Plan(SIZES)
    change(plan, port([1, 2, 3]))
    change(plan, port([1, 2]))
    other = change(plan, port([5], V2, DNS), name=DNS)
    assert [*written(other)] == [4]
    assert other.rings[0][0] == 8
    free(plan)
    change(plan, name=DNS)
    plan.pools.graced(plan.pools.stamp)
    third = change(plan, port([6], V2, DNS), name=DNS)
    assert third.rings[0][0] == 8, "slots are free after a grace period"
    assert written(third).keys().isdisjoint({4}), "ids only when no flow names them"


def test_a_name_at_another_address_is_another_service() -> None:
    """Flows to the former one may go on."""
    plan = Plan(SIZES)
    change(plan, port([1]))
    batch = change(plan, port([1], V2))
    assert batch.gone.services == [1]
    assert {*batch.gone.frontends} == {(key(), 1), (key(number=0), 1)}
    assert batch.frontends[key(V2)] == (2, 0)


@pytest.mark.parametrize("names", [(WEB, DNS), (DNS, WEB)], ids=["giver-first", "taker-first"])
def test_a_frontend_goes_from_one_service_to_another(names: tuple[str, str]) -> None:
    plan = Plan(SIZES)
    change(plan, port([1]))
    batch, after = Batch(), {WEB: (), DNS: (port([2], V1, DNS),)}
    for name in names:
        plan.change(batch, name, after[name])
    assert batch.frontends[key()] == (2, 0)
    assert plan.owners == {key(): 2}
    assert {gone for gone, _ in batch.gone.frontends} <= batch.frontends.keys(), "nothing that is written is deleted"


FULL = [
    pytest.param({"services": 2}, "services", id="services"),
    pytest.param({"backends": 4}, "backends", id="backends"),
    pytest.param({"slots": 4}, "slots", id="slots"),
    pytest.param({"frontends4": 2}, "frontends4", id="frontends"),
    pytest.param({"source_ranges4": 1}, "source_ranges4", id="source-ranges"),
]


@pytest.mark.parametrize(("sizes", "what"), FULL)
def test_what_does_not_fit_leaves_nothing_half_planned(sizes: dict[str, int], what: str) -> None:
    plan = Plan(SIZES | sizes)
    first = port([1, 2], ranges=("192.0.2.0/24",))
    second = port([3, 4], V2, DNS, ranges=("198.51.100.0/24",))
    change(plan, first)
    before = plan.pools.used()
    batch = change(plan, second, name=DNS)
    assert batch == Batch()
    assert plan.pools.used() == before
    assert plan.unprogrammed[second.key].reason.startswith(f"map {what} ")
    assert plan.full == ({what} if what != "source_ranges4" else set()), "that one does not grow"
    change(plan)
    free(plan)
    change(plan, second, name=DNS)
    assert not plan.unprogrammed


def test_a_service_that_cannot_grow_stays_as_it_was_until_it_fits_or_goes() -> None:
    plan = Plan(SIZES | {"backends": 8})
    change(plan, port([1, 2, 3]))
    for _ in range(2):
        assert change(plan, port(range(1, 10))) == Batch()
        assert plan.unfit == {WEB: {port([]).key}}
    assert plan.installed[WEB][0].entry == port([1, 2, 3])
    change(plan, port([1, 2]))
    assert not plan.unprogrammed
    change(plan, port(range(1, 10)))
    change(plan)
    assert not plan.unprogrammed
    assert not plan.unfit


def test_an_algorithm_of_others_is_random_and_a_ring_has_no_more_slots_than_it_may() -> None:
    plan = Plan(SIZES | {"slots": 2048}, rings=Rings(each=251))
    other = change(plan, port([1, 2, 3], algorithm="dh"))
    assert (rings(other)[0][2], other.services) == ([1, 2, 3], [(1, 0, 0)])
    assert len(change(plan, port([1, 2, 3], algorithm="mh")).rings[0][2]) == 251
    assert not plan.cut, "what was asked for"


def test_an_entry_that_cannot_be_lowered_changes_nothing() -> None:
    plan = Plan(SIZES)
    change(plan, port([1]))
    sets = tuple(BackendSet((Backend(f"10.1.0.{number}", 80),)) for number in range(3))
    bad = entry_of("default/web:more", 4, Protocol.TCP, [Front(Kind.CLUSTER_IP, V2, 80, s, s) for s in sets])
    batch, before = Batch(), plan.pools.used()
    with pytest.raises(ValueError, match="default/web:more"):
        plan.change(batch, WEB, (port([1, 2]), bad))
    assert batch == Batch()
    assert plan.pools.used() == before


def test_rings_are_cut_only_when_maps_cannot_grow() -> None:
    plan = Plan(SIZES | {"slots": 2048}, rings=Rings(all=4096))
    wanted = [port([1, 2, 3], f"10.96.0.{n}", f"default/s{n}", algorithm="mh") for n in (1, 2)]
    for entry in wanted:
        change(plan, entry, name=entry.name.partition(":")[0])
    assert plan.full == {"slots"}
    assert not plan.cut
    plan.retry(cut_rings=True)
    change(plan, wanted[1], name="default/s2")
    assert plan.cut == {wanted[1].key: (509, 1021)}
    change(plan, name="default/s1")
    free(plan)
    change(plan, port([1, 2, 3, 4], "10.96.0.2", "default/s2", algorithm="mh"), name="default/s2")
    assert not plan.cut, "there is room again"


def test_what_is_in_use_is_counted_by_map_and_again_when_it_goes() -> None:
    plan, batch = Plan(SIZES), Batch()
    before = plan.pools.used()
    for step in range(5):
        ranges = (f"192.0.2.{step}/32", f"192.0.2.{16 + step}/32")
        assert plan.change(batch, WEB, (port([1, 2], ranges=ranges),)) == (1, 0)
        plan.pools.defer(batch.gone)
        batch = Batch()
        assert not plan.unprogrammed, "the ranges of the former step make room"
    assert plan.pools.used() == {"services": 1, "backends": 2, "slots": 4, "frontends4": 2, "frontends6": 0}
    assert plan.change(batch, WEB, ()) == (0, 1)
    plan.pools.defer(batch.gone)
    free(plan)
    assert plan.pools.used() == before


def test_an_address_rejects_other_ports_until_its_last_port_goes() -> None:
    plan = Plan(SIZES)
    change(plan, port([1]))
    other = change(plan, entry_at(81), name=DNS)
    assert key(number=0) not in other.frontends
    assert [gone for gone, _ in change(plan).gone.frontends] == [key()]
    assert {gone for gone, _ in change(plan, name=DNS).gone.frontends} == {(4, V1, 81, 6), key(number=0)}


@pytest.mark.parametrize("after", [(), (port([1]),)], ids=["goes", "is-asked-no-more"])
def test_the_prober_hears_of_services_whose_probe_comes_or_goes(after: tuple[Entry, ...]) -> None:
    plan = Plan(SIZES)
    change(plan, port([1], V2, DNS), name=DNS)
    change(plan, msgspec.structs.replace(port([1]), probe=Probe()))
    assert plan.probes_changed == {WEB}
    plan.probes_changed.clear()
    change(plan, *after)
    assert plan.probes_changed == {WEB}


def test_an_ejected_backend_keeps_its_row() -> None:
    plan = Plan(SIZES)
    entry = port([1, 2, 3])
    change(plan, entry)
    batch = Batch()
    plan.adjust(batch, {(entry.key, ("10.1.0.2", 8080)): Ejection(None, "no answer")}, {})
    assert batch.flags == [(2, 1 | 8 | 16)]
    assert rings(batch) == [(4, 1, [1, 3])]
    assert batch.gone.backends == []
    back = Batch()
    plan.adjust(back, {}, {})
    assert back.flags == [(2, 3)]


def test_what_a_former_process_installed_keeps_its_numbers_and_is_written_anew() -> None:
    entry = port([1, 2])
    numbers = {("10.1.0.1", 8080): 7, ("10.1.0.2", 8080): 8}
    former = Adopted(3, numbers, (array("I", [7, 8]),), ((16, 4),), 5)
    plan = Plan(SIZES, adopt=lambda rows: former)
    batch = change(plan, entry)
    assert written(batch).keys() == {7, 8}
    assert (batch.rings, batch.words, batch.gone.ranges) == ([], [], []), "the slots are right as they are"
    assert batch.frontends[key()] == (3, 0)


def test_a_port_that_loses_its_frontends_keeps_its_rows_and_its_bits_as_long_as_a_flow_is_there() -> None:
    plan = Plan(SIZES)
    full = port([1, 2])
    change(plan, full)
    bare = msgspec.structs.replace(full, frontends=(), backend_sets=())
    batch = change(plan, bare)
    assert (batch.gone.services, batch.gone.backends) == ([], [])
    assert {key for key, _ in batch.gone.frontends} == {key(), key(number=0)}
    assert plan.pools.graced(plan.pools.stamp).frontends == []
    assert set(change(plan, full).new_frontends) == {key(), key(number=0)}
    change(plan, bare)
    change(plan)
    plan.pools.graced(plan.pools.stamp)
    freed = plan.pools.scanned(*plan.pools.candidates)
    assert sorted(freed.frontends) == sorted([key(), key(number=0)] * 2)
