"""The store on real maps: after every change all maps are read back and compared with the table."""

from __future__ import annotations

import errno
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps.making import make, traffic_sizes
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.maps.sizes import bounds, first_sizes, written
from hybrid_proxy.dataplane.modes.ebpf.services import audit as audit_module
from hybrid_proxy.dataplane.modes.ebpf.services.audit import MANY, Audit
from hybrid_proxy.dataplane.modes.ebpf.services.ejections import Ejection
from hybrid_proxy.dataplane.modes.ebpf.services.plan import Installed
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.options import flows_by_memory
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, Kind, Protocol, WhenEmpty
from tests.tables import Front, entry_of, fronts_of, with_fronts

from ..readback import check, programmed, settle

pytestmark = pytest.mark.root

HZ = 250
Table = dict[str, tuple[Entry, ...]]
OpenMaps = Callable[..., MapSet]


def entry(
    name: str, vip: str, backends: int | list[str], *, port: int = 80, protocol: Protocol = Protocol.TCP,
    local: int | None = None, empty: WhenEmpty = WhenEmpty.REJECT, affinity: int = 0, more: int = 0, outside: int = 0,
) -> Entry:  # fmt: skip
    """A service port with so many backends; `local`: the inside route has the first so many only."""
    family = 6 if ":" in vip else 4
    number = zlib.crc32(name.encode())
    base = f"fd00:{number % 9999}::" if family == 6 else f"10.{number % 250}.0."
    addresses = backends if isinstance(backends, list) else [f"{base}{i}" for i in range(1, backends + 1)]
    members = tuple(Backend(address, 8080) for address in addresses)
    everything = BackendSet(members, empty)
    inside = everything if local is None else BackendSet(members[:local], empty, "local")
    outer = everything if not outside else BackendSet(members[-outside:], empty, "outside")
    front = Front(Kind.CLUSTER_IP, vip, port, inside, outer)
    serving = (*members, *(Backend(f"{base}{200 + i}", 8080) for i in range(more)))
    return entry_of(f"{name}:p{port}", family, protocol, (front,), serving, affinity)


def apply(store: Store, before: Table, after: Table) -> None:
    changed = {name: after.get(name, ()) for name in {*before, *after} if before.get(name) is not after.get(name)}
    store.apply(changed)
    assert not store.plan.unprogrammed
    check(store, after, settled=False)
    settle(store)
    check(store, after, settled=True)


@pytest.fixture
def store(open_maps: OpenMaps) -> Store:
    return Store(open_maps(), HZ)


one, two = "default/a", "default/b"
V1, V2, V6 = "10.96.0.1", "10.96.0.2", "fd00:96::1"

CHANGES: list[object] = [
    pytest.param([{one: (entry(one, V1, 3),)}, {}], id="appears-and-vanishes"),
    pytest.param([{one: (entry(one, V1, n),)} for n in (0, 1, 4, 5, 40, 3, 0, 2)], id="scales"),
    pytest.param([{one: (entry(one, V1, 3, local=n),)} for n in (0, 1, 3, 2, 0)], id="local-backends"),
    pytest.param([{one: (entry(one, V1, 6, local=2, outside=n),)} for n in (1, 6, 3)], id="two-slices"),
    pytest.param([{one: (entry(one, V1, 3, more=n),)} for n in (0, 2, 0)], id="draining"),
    pytest.param([{one: (entry(one, V1, n, empty=e),)} for e in WhenEmpty for n in (0, 1, 0)], id="when-empty"),
    pytest.param([{one: (entry(one, V1, 2, affinity=n),)} for n in (0, 10800, 86400, 60, 0)], id="affinity"),
    pytest.param([{one: (entry(one, v, 2),)} for v in (V1, V2, V1)], id="address-changes"),
    pytest.param([{one: (entry(one, V1, 2, port=p),)} for p in (80, 81, 80)], id="port-changes"),
    pytest.param([{one: (entry(one, V1, 2, protocol=p),)} for p in Protocol], id="protocol-changes"),
    pytest.param([{one: (entry(one, V1, 2), entry(one, V1, 3, port=443))}, {one: (entry(one, V1, 2),)},
                  {one: (entry(one, V1, 3, port=443),)}], id="ports-of-one-address"),
    pytest.param([{one: (entry(one, V1, 2), entry(one, V6, 3))}, {one: (entry(one, V6, 3),)}, {}], id="dual-stack"),
    pytest.param([{one: (entry(one, V1, 2),)}, {two: (entry(two, V1, 3),)}, {one: (entry(one, V1, 1),)}],
                 id="deleted-and-made-with-the-same-address"),
    pytest.param([{one: (entry(one, V1, 2),), two: (entry(two, V2, 3),)},
                  {two: (entry(two, V1, 3),), one: (entry(one, V2, 2),)},
                  {one: (entry(one, V1, 2),), two: (entry(two, V2, 3),)}], id="addresses-swapped"),
    pytest.param([{one: (entry(one, V1, ["10.1.0.1"]),), two: (entry(two, V2, ["10.1.0.1"]),)},
                  {two: (entry(two, V2, ["10.1.0.1"]),)}], id="one-backend-of-two-services"),
    pytest.param([{one: (entry(one, V1, ["10.1.0.1", "10.1.0.2"]),)},
                  {one: (entry(one, V1, ["10.1.0.2", "10.1.0.1"]),)}], id="order-changes"),
    pytest.param([{one: (entry(one, V1, 3),)}, {one: (entry(one, V1, 3),)}], id="equal-again"),
]  # fmt: skip


@pytest.mark.parametrize("tables", CHANGES)
@pytest.mark.parametrize("order", [False, True], ids=["forward", "backward"])
def test_changes_in_either_order_of_names(store: Store, tables: list[Table], order: bool) -> None:
    """A service that takes an address may be planned before or after the one that gives it up."""
    before: Table = {}
    for after in [*tables, {}]:
        names = sorted({*before, *after}, reverse=order)
        store.apply({name: after.get(name, ()) for name in names})
        check(store, after, settled=False)
        settle(store)
        check(store, after, settled=True)
        before = after


VIPS = [*(f"10.96.0.{n}" for n in range(1, 13)), *(f"fd00:96::{n}" for n in range(1, 13))]


def random_table(rng: random.Random, before: Table) -> Table:
    """Some services more, less or other than before; no frontend belongs to two."""
    table: Table = {name: entries for name, entries in before.items() if rng.random() > 0.25}
    free = [(vip, port) for vip in VIPS for port in (80, 81)]
    held = {(f.address, f.port) for entries in table.values() for e in entries for f in e.frontends}
    free = [place for place in free if place not in held]
    rng.shuffle(free)
    for name in rng.sample([f"default/s{n}" for n in range(14)], rng.randint(0, 5)):
        ports = []
        for vip, port in (free.pop() for _ in range(rng.randint(0, 2))):
            size = rng.choice((0, 1, 2, 3, 4, 5, 7, 9))
            local = rng.choice((None, None, 0, 1, size))
            ports.append(
                entry(f"{name}", vip, size, port=port, local=local, affinity=rng.choice((0, 0, 60)),
                      empty=rng.choice(list(WhenEmpty)), more=rng.randint(0, 2), protocol=rng.choice(list(Protocol)),
                      outside=rng.choice((0, 0, 2)))
            )  # fmt: skip
        if ports:
            table[name] = tuple({(e.name, e.family, e.protocol): e for e in ports}.values())
        else:
            table.pop(name, None)
    return table


@pytest.mark.parametrize("few", [0, 6, 64], ids="up-to-{}-rows-without-numpy".format)
@pytest.mark.parametrize("seed", range(4))
def test_random_sequences(store: Store, seed: int, few: int) -> None:
    store.writer.rows.vectorize_from = few
    rng = random.Random(seed)
    before: Table = {}
    for step in range(60):
        after = random_table(rng, before)
        names = [name for name in {*before, *after} if before.get(name) is not after.get(name)]
        rng.shuffle(names)
        store.apply({name: after.get(name, ()) for name in names})
        assert not store.plan.unprogrammed
        check(store, after, settled=False)
        if rng.random() < 0.5:
            settle(store)
            check(store, after, settled=True)
        assert Audit(store).damage({}) == [], step
        before = after


@pytest.mark.parametrize("call", ["update", "update_batch", "delete_batch"])
def test_a_write_that_fails_is_finished_by_the_next_change(
    store: Store, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number is lost or given away, and what the service was to be is not forgotten."""
    ranges = ("192.0.2.0/24",)
    before, after = entry(one, V1, 3), entry(one, V2, 2)
    after = with_fronts(after, replace(fronts_of(after)[0], source_ranges=ranges))
    apply(store, {}, {one: (before,)})

    def fail(*_: object) -> None:
        raise BpfError(call, errno.ENOMEM)

    with monkeypatch.context() as patched:
        patched.setattr(Map, call, fail)
        with pytest.raises(BpfError):
            store.apply({one: (after,)})
        with pytest.raises(BpfError):
            store.apply({one: (after,), two: (entry(two, V6, 1),)})
    table = {one: (after,), two: (entry(two, V1, 4),)}
    store.apply(table)
    settle(store)
    check(store, table, settled=True)


def bits(store: Store) -> list[bytes]:
    return [store.maps.bitmap(name).tobytes() for name in store.writer.bitmaps]


def flip(store: Store, name: str, field: str, row: int) -> None:
    """Changes the lowest bit that is set in a field of a row."""
    values = store.maps.view(name)[field][row : row + 1].reshape(-1)
    values[values.argmax()] ^= 1 if field != "sets" else 1 << 30


DAMAGE: dict[str, Callable[[Store, Installed], None]] = {
    **{f"backend-{field}": lambda store, port, field=field: flip(store, "backends", field, port.ids[-1])
       for field in ("address", "port", "flags", "service", "kind")},
    **{f"slot-{field}": lambda store, port, field=field: flip(store, "slots", field, port.ranges[0][0])
       for field in ("backend", "endpoint")},
    **{f"service-{field}": lambda store, port, field=field: flip(store, "services", field, port.service)
       for field in ("sets", "flags", "affinity")},
    "a-row-of-zeros": lambda store, port: store.backends[port.ids[0]:port.ids[0] + 1].fill(0),
}  # fmt: skip


@pytest.mark.parametrize("few", [0, 64], ids="up-to-{}-rows-without-numpy".format)
@pytest.mark.parametrize("name", [one, two])
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_another_program_changes_is_found_and_written_again(
    store: Store, damage: str, name: str, few: int
) -> None:
    store.writer.rows.vectorize_from = few
    table = {one: (entry(one, V1, 3, local=1, affinity=60),), two: (entry(two, V6, 5, protocol=Protocol.UDP),)}
    store.apply(table)
    counts = [bitmap.counts.copy() for bitmap in store.writer.bitmaps.values()]
    before, audit = (bits(store), store.maps.view("services").copy()), Audit(store)
    assert audit.damage({}) == []
    DAMAGE[damage](store, store.plan.installed[name][0])
    (found,) = audit.damage({})
    assert (found == "map services has other slot ranges") if "sets" in damage else found.endswith(f"of {name}:p80")
    audit.advance()  # stays
    audit.repair({})
    assert audit.damage({}) == []
    check(store, table, settled=False)
    assert (bits(store), store.maps.view("services").tobytes()) == (before[0], before[1].tobytes())
    for bitmap, count in zip(store.writer.bitmaps.values(), counts, strict=True):
        assert (bitmap.counts == count).all(), "the prefilter counts no backend twice"


def test_cleared_bits_of_the_prefilter_are_set_again(store: Store) -> None:
    store.apply({one: (entry(one, V1, 3),)})
    before, audit = bits(store), Audit(store)
    for name in ("service_addresses", "backend_sockets"):
        store.maps.bitmap(name)[:] = 0
    assert audit.damage({}) == [
        f"map bitmaps lacks bits of {name}" for name in ("service_addresses", "backend_sockets")
    ]
    audit.repair({})
    assert (audit.damage({}), bits(store)) == ([], before)


def test_a_round_compares_every_service_port_and_much_damage_all_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "LEAST", 4)
    table = {f"default/s{n}": (entry(f"default/s{n}", f"10.96.1.{n}", 2),) for n in range(1, 19)}
    store.apply(table)
    store.serve_node_ports_at(("10.9.0.1",))
    audit, frontends = Audit(store), store.maps.maps["frontends4"]
    rows = frontends.elements()

    def slices() -> list[list[str]]:
        found = []
        for _ in range(5):
            found.append(audit.damage({}))
            audit.repair({})
            assert audit.damage({}) == []
            audit.advance()
        return found

    for number in (1, 9, 18):
        (port,) = store.plan.installed[f"default/s{number}"]
        store.backends["port"][port.ids[1]] ^= 1
    said = [[f"map backends lacks rows of default/s{number}:p80"] for number in (1, 9, 18)]
    assert slices() == [said[0], [], said[1], [], said[2]]
    assert slices() == [[]] * 5
    for key in rows:
        frontends.delete(key)
    assert len(audit.damage({})) == len(rows) > MANY
    audit.repair({})
    assert (audit.damage({}), frontends.elements()) == ([], rows)
    table.pop("default/s1")  # the last slice ends before
    store.apply({"default/s1": ()})
    assert slices() == [[]] * 5


def test_nothing_is_compared_while_a_change_is_not_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.apply({one: (entry(one, V1, 3),)})

    def fail(*_: object) -> None:
        raise BpfError("update", errno.ENOMEM)

    audit = Audit(store)
    with monkeypatch.context() as patched:
        patched.setattr(Map, "update_batch", fail)
        with pytest.raises(BpfError):
            store.apply({two: (entry(two, V2, 2),)})
        assert audit.damage({}) == []
    store.apply({two: (entry(two, V2, 2),)})
    assert audit.damage({}) == []


@pytest.mark.parametrize("vip", [V1, V6])
def test_a_table_without_backends_is_compared(store: Store, vip: str) -> None:
    store.apply({one: (entry(one, vip, 0),)})
    assert Audit(store).damage({}) == []


def test_ejections_and_restarts_are_no_damage(open_maps: OpenMaps) -> None:
    store = Store(open_maps(), HZ)
    table = {one: (entry(one, V1, 4, more=1, affinity=60),), two: (entry(two, V6, 3),)}
    store.apply(table)
    port, audit = table[one][0], Audit(store)
    backend = port.serving[0]
    store.adjust({(port.key, (backend.address, backend.port)): Ejection(None, "a probe failed")}, {})
    assert store.plan.adjusted
    assert audit.damage({}) == []
    store.adjust({}, {})
    assert audit.damage({}) == []
    again = restart(open_maps)
    assert Audit(again).damage({}) == [], "nothing is known yet"
    again.apply({two: table[two]})
    assert Audit(again).damage({}) == []
    settle(again)
    assert Audit(again).damage({}) == []


# --- restarts


def numbers(store: Store) -> dict[object, tuple[int, list[int], object]]:
    return {known.entry.key: (known.service, known.ids.tolist(), known.ranges) for known in store.plan.by_id.values()}


def restart(open_maps: OpenMaps) -> Store:
    maps = open_maps()
    assert maps.adopted
    return Store(maps, HZ)


def without_sharing(table: Table) -> Table:
    """Equal, but made of other objects, as a new process has it."""
    import msgspec

    return {name: tuple(msgspec.msgpack.decode(msgspec.msgpack.encode(e), type=Entry) for e in entries)
            for name, entries in table.items()}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_a_restart_with_the_same_table_changes_nothing(store: Store, open_maps: OpenMaps, seed: int) -> None:
    rng = random.Random(seed)
    table: Table = {}
    for _ in range(6):
        after = random_table(rng, table)
        apply(store, table, after)
        table = after
    before, seen = numbers(store), programmed(store.maps)
    again = restart(open_maps)
    again.maps.bitmap("backend_sockets")[7] |= 1  # of a backend that went just before the agent
    again.apply(without_sharing(table))
    settle(again)
    assert programmed(again.maps) == seen
    assert not again.maps.bitmap("backend_sockets")[7] & 1
    assert {key: (service, ids) for key, (service, ids, _) in numbers(again).items()} == {
        key: (service, ids) for key, (service, ids, _) in before.items()
    }
    check(again, table, settled=True)


@pytest.mark.parametrize("seed", range(8))
def test_a_restart_with_another_table(store: Store, open_maps: OpenMaps, seed: int) -> None:
    """Meanwhile services went, came and changed; killed before or after its grace period."""
    rng = random.Random(seed)
    table: Table = {}
    for _ in range(8):
        after = random_table(rng, table)
        store.apply({name: after.get(name, ()) for name in {*table, *after} if table.get(name) is not after.get(name)})
        if rng.random() < 0.5:
            store.graced(store.plan.pools.stamp)
        table = after
    for _ in range(3):
        table = random_table(rng, table)
        store = restart(open_maps)
        store.apply(without_sharing(table))
        check(store, table, settled=False)
        settle(store)
        check(store, table, settled=True)


def test_a_restart_finds_a_slice_at_the_very_beginning(store: Store, open_maps: OpenMaps) -> None:
    """The first route is empty and the second has the first slots of all: an empty slice word is no offset."""
    table = {one: (entry(one, V1, 3, local=0),)}
    apply(store, {}, table)
    assert next(iter(store.plan.installed[one])).ranges[1] == (0, 4)
    again = restart(open_maps)
    again.apply(without_sharing(table))
    more = {**table, two: (entry(two, V2, 4),)}
    again.apply({two: more[two]})
    check(again, more, settled=False)


def test_a_restart_keeps_an_address_of_which_the_kernel_has_another_text(store: Store, open_maps: OpenMaps) -> None:
    table = {one: (entry(one, "::102:304", 3),)}  # inet_ntop: ::1.2.3.4
    store.apply(table)
    seen = programmed(store.maps)
    again = restart(open_maps)
    again.apply(without_sharing(table))
    settle(again)
    assert programmed(again.maps) == seen


def test_numbers_that_flows_may_name_stay_reserved_over_a_restart(store: Store, open_maps: OpenMaps) -> None:
    """Killed after the grace period, before any scan: the rows still say that their numbers are not free."""
    apply(store, {}, {one: (entry(one, V1, 3),)})
    known = next(iter(store.plan.installed[one]))
    store.apply({one: ()})
    store.graced(store.plan.pools.stamp)
    again = restart(open_maps)
    again.apply({two: (entry(two, V2, 3),)})
    fresh = next(iter(again.plan.installed[two]))
    assert fresh.service != known.service
    assert not set(fresh.ids) & set(known.ids)
    settle(again)
    check(again, {two: (entry(two, V2, 3),)}, settled=True)


def test_pinned_maps_are_adopted_whatever_their_sizes(store: Store, open_maps: OpenMaps) -> None:
    apply(store, {}, {one: (entry(one, V1, 3),)})
    again = open_maps(backends=512, services=32)
    assert again.maps["backends"].entries == 256
    assert again.maps["services"].entries == 64
    assert again.other_sizes == {"services": 32, "frontends4": 64, "frontends6": 64}
    after = Store(again, HZ)
    after.apply({one: (entry(one, V1, 3),)})
    check(after, {one: (entry(one, V1, 3),)}, settled=False)


def test_pins_of_a_start_that_was_cut_short_are_made_anew(pins: Path, open_maps: OpenMaps) -> None:
    maps = open_maps()
    maps.close()
    (pins / "slots").unlink()
    (pins / "flows6").unlink()
    again = open_maps()
    assert not again.adopted
    apply(Store(again, HZ), {}, {one: (entry(one, V1, 3),)})


# --- full maps


def many(count: int, backends: int, first: int = 0) -> Table:
    return {
        f"default/s{n}": (entry(f"default/s{n}", f"10.96.{n // 250}.{1 + n % 250}", backends),)
        for n in range(first, first + count)
    }


FULL = [
    # sizes                                                       services backends  what is full
    pytest.param({"services": 8},                                      12, 1, "map services",  id="services"),
    pytest.param({"backends": 16},                                      6, 4, "map backends",  id="backends"),
    pytest.param({"slots": 32, "backends": 1024},                       6, 7, "map slots",     id="slots"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "services", "backends", "what"), FULL)
def test_what_does_not_fit_is_named_and_the_rest_works(
    open_maps: OpenMaps, sizes: dict[str, int], services: int, backends: int, what: str
) -> None:
    store = Store(open_maps(**sizes), HZ)
    table = many(services, backends)
    store.apply(table)
    unfit = {left.entry: left.reason for left in store.plan.unprogrammed.values()}
    assert 0 < len(unfit) < services
    assert all(reason.startswith(what) for reason in unfit.values())
    assert store.plan.unfit.keys() == {name.rpartition(":")[0] for name in unfit}
    fits = {name: entries for name, entries in table.items() if entries[0].name not in unfit}
    check(store, fits, settled=True)
    gone = list(fits)[: len(unfit)]
    store.apply(dict.fromkeys(gone, ()))
    settle(store)
    left = {name: entries for name, entries in table.items() if name not in gone}
    store.apply({name: left[name] for name in store.plan.unfit})  # as the agent does about once a second
    assert not store.plan.unprogrammed
    assert not store.plan.unfit
    check(store, left, settled=True)


def test_a_full_map_of_frontends_takes_a_change_of_all(open_maps: OpenMaps) -> None:
    """New frontends are written before old ones are deleted: those that find no room come after."""
    store = Store(open_maps(services=9, backends=64), HZ)  # frontends: 18, two for each service
    old, new = many(4, 1), many(4, 1, 20)
    apply(store, {}, old)
    apply(store, old, new)
    again = restart(lambda: open_maps(services=9, backends=64))
    again.apply(old)
    check(again, old, settled=False)
    settle(again)
    check(again, old, settled=True)


def test_a_full_map_of_frontends_counts_the_addresses_of_node_ports(open_maps: OpenMaps) -> None:
    store = Store(open_maps(services=9, backends=64), HZ)  # frontends: 18, two for each service
    store.serve_node_ports_at(("10.9.0.1", "10.9.0.2"), ("127.0.0.1",))
    assert store.apply(many(8, 1)) == (7, 0)
    assert {left.reason for left in store.plan.unprogrammed.values()} == {
        "map frontends4 (--max-services) is full (18)"
    }
    store.serve_node_ports_at(())
    assert store.apply({name: many(8, 1)[name] for name in store.plan.unfit}) == (1, 0)


def grow(maps: MapSet, store: Store, **sizes: int) -> None:
    """As the agent does it for these maps, but for the programs."""
    larger = maps.make_larger(sizes)
    maps.copy_into(larger)
    maps.replace(larger)
    store.grown()


@pytest.mark.parametrize(("sizes", "services", "backends", "what"), FULL)
def test_what_did_not_fit_fits_when_its_map_has_grown(
    pins: Path, open_maps: OpenMaps, sizes: dict[str, int], services: int, backends: int, what: str
) -> None:
    maps = open_maps(**sizes)
    store = Store(maps, HZ)
    table = many(services, backends)
    store.apply(table)
    assert {f"map {name}" for name in store.plan.full} == {what}
    before = sorted(path.name for path in pins.iterdir())
    while store.plan.full:
        grow(maps, store, **{name: 4 * maps.maps[name].entries for name in store.plan.full})
        store.plan.retry()
        store.apply({name: table[name] for name in store.plan.unfit})
    assert sorted(path.name for path in pins.iterdir()) == before
    assert not store.plan.unprogrammed
    check(store, table, settled=False)
    settle(store)
    apply(store, table, many(services, backends + 1, 2))
    again = Store(open_maps(**sizes), HZ)
    again.apply(many(services, backends + 1, 2))
    settle(again)
    check(again, many(services, backends + 1, 2), settled=True)


def test_all_maps_grow_at_any_time(open_maps: OpenMaps) -> None:
    """Between random changes, some frees still deferred."""
    rng = random.Random(5)
    maps = open_maps(services=64, backends=128, slots=128)
    store, table = Store(maps, HZ), {}
    for step in range(60):
        name = f"default/r{rng.randrange(12)}"
        after = {**table, name: (entry(name, f"10.96.1.{1 + int(name[9:])}", rng.randrange(5)),)}
        if rng.random() < 0.3:
            del after[name]
        store.apply({name: after.get(name, ())})
        assert not store.plan.unprogrammed
        table = after
        if step % 20 == 10:
            grow(maps, store, **{n: 2 * maps.maps[n].entries for n in ("services", "backends", "slots", "frontends4")})
        if rng.random() < 0.3:
            settle(store)
        check(store, table, settled=False)


def test_what_a_small_node_has_maps_for_is_small() -> None:
    """With 8 GB and two processors; 0.4 MB are first packets, and the programs of sockets have 1.3 MB more."""
    options = Options(default_flows=flows_by_memory(8 << 30))
    first = first_sizes(bounds(options)) | written(options, 2)
    made = make(first | traffic_sizes(first["services"], first["backends"], 2), {})
    assert sum(known.memory for known in made.values()) < 18.9e6
    for known in made.values():
        known.close()


def test_the_pinned_maps_are_those_of_the_objects(pins: Path, open_maps: OpenMaps) -> None:
    maps = open_maps()
    assert {path.name for path in pins.iterdir()} == set(maps.maps)
    with pytest.raises(BpfError):
        maps.maps["slots"].pin(pins / "slots")
