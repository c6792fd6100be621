"""Which backend the loaded programs choose: by chance, by a hash that every node computes alike, in turn, by load."""

from __future__ import annotations

import ipaddress
import itertools
import struct
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import pytest

from hybrid_proxy.dataplane.balancing import ALGORITHMS, ring_of
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf import layout
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, Protocol

from .kit import PASS, REDIRECT, SMALL, Bench, Net, bench_with, datagram, frame, read, service, syn
from .test_failover import wait

RINGS = msgspec.structs.replace(SMALL, max_slots=65_536)
LIMIT = Options().max_ring


@pytest.fixture(scope="module")
def roomy() -> Iterator[Bench]:
    with bench_with(RINGS) as made:
        yield made


@pytest.fixture
def bench(roomy: Bench) -> Bench:
    roomy.reset()
    return roomy


def balanced(
    net: Net, algorithm: str, count: int = 8, *, weights: Iterable[int] = (), name: str = "default/web:http",
    affinity: int = 0, first: int = 0, vip: str = "",
) -> Entry:  # fmt: skip
    """One TCP port with so many backends; `first`: without so many of them."""
    made = service(vip or net.vip, 80, [(b, 8080) for b in net.backends[first:count]], name=name, affinity=affinity)
    weighed = tuple(
        msgspec.structs.replace(backend, weight=weight)
        for backend, weight in itertools.zip_longest(made.serving, weights, fillvalue=1)
        if isinstance(backend, Backend)
    )
    return msgspec.structs.replace(made, backend_sets=(BackendSet(weighed),), serving=weighed, algorithm=algorithm)


class Asker:
    """Asks the loaded program where first packets would go; nothing is remembered."""

    def __init__(self, bench: Bench, net: Net, vip: str = "") -> None:
        self.bench, self.net, self.vip = bench, net, vip or net.vip
        self.packet = bytearray(frame(net, net.client, self.vip, syn()))
        self.l4 = 14 + (20 if net.family == 4 else 40)

    def __call__(self, sport: int, client: str = "") -> str:
        if client:
            self.packet = bytearray(frame(self.net, client, self.vip, syn()))
        struct.pack_into("!H", self.packet, self.l4, sport)
        answer = self.bench.explain(bytes(self.packet))
        assert answer.verdict == "dnat"
        return str(answer.backends[0].rpartition(":")[0].strip("[]"))


def open_once(bench: Bench, net: Net, sport: int, client: str = "") -> str:
    """A SYN that is remembered; the backend it goes to."""
    verdict, out = bench.ingress(frame(net, client or net.client, net.vip, syn(sport)))
    assert verdict in (PASS, REDIRECT)
    return read(out).dst


# --- the hash, computed here once more


def stir(h: int, word: int) -> int:
    h = (h ^ word) * 0x85EBCA6B & 0xFFFFFFFF
    return h ^ h >> 15


def words(address: str) -> list[int]:
    raw = ipaddress.ip_address(address).packed
    return list(struct.unpack(f"<{len(raw) // 4}I", raw))


def hash_of(values: Iterable[int], start: int = 0) -> int:
    h = start
    for value in (*values, 0x9E3779B1, 0xC2B2AE35):
        h = stir(h, value)
    return h


def swap(port: int) -> int:
    return port >> 8 | (port & 255) << 8


def tuple_hash(client: str, sport: int, vip: str, port: int, protocol: int = 6) -> int:
    return hash_of((*words(client), *words(vip), swap(port) << 16 | swap(sport)), protocol)


def place(entry: Entry, number: int) -> str:
    """The backend that a number leads to."""
    backends = entry.backend_sets[0].backends
    ring = ring_of(ALGORITHMS[entry.algorithm], backends, LIMIT)
    return backends[ring[number * len(ring) >> 32]].address


def excess(counts: Iterable[int], expected: Iterable[float]) -> float:
    """Pearson's statistic in standard deviations above its mean."""
    pairs = list(zip(counts, expected, strict=True))
    freedom = len(pairs) - 1
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs)
    return (statistic - freedom) / (2 * freedom) ** 0.5


# --- Maglev


def test_the_connection_and_nothing_else_decides(bench: Bench, net: Net) -> None:
    """It is the ring of `balancing` that is indexed: how even and how steady that is, is shown there."""
    entry = balanced(net, "mh", weights=[3])
    bench.serve(entry)
    ask = Asker(bench, net)
    for sport in range(1024, 65_536, 331):
        assert ask(sport) == place(entry, tuple_hash(net.client, sport, net.vip, 80)), sport


@pytest.mark.parametrize("what", ["ports", "clients", "services", "ports by eight", "clients alone"])
def test_hashes_are_even(net: Net, what: str) -> None:
    """Chi-squared over 1,021 places; real clients differ in few bits, so these do too."""
    base = ipaddress.ip_address(net.client)
    many = {
        "ports": (tuple_hash(net.client, sport, net.vip, 80) for sport in range(20_000, 60_000)),
        "ports by eight": (tuple_hash(net.client, 8 * n + 5, net.vip, 80) for n in range(8000)),
        "clients": (tuple_hash(str(base + n), 40_000, net.vip, 80) for n in range(20_000)),
        "clients alone": (hash_of(words(str(base + n))) for n in range(20_000)),
        "services": (tuple_hash(net.client, 40_000, str(ipaddress.ip_address(net.vip) + n), 80) for n in range(20_000)),
    }[what]
    places = np.fromiter(many, dtype=np.uint64) * np.uint64(1021) >> np.uint64(32)
    counts = np.bincount(places.astype(np.int64), minlength=1021)
    assert abs(excess(counts.tolist(), [len(places) / 1021] * 1021)) < 5


def test_maglev_survives_the_loss_of_the_flow_table(bench: Bench, net: Net) -> None:
    """A connection that this node forgot, or that another node had, goes where it went."""
    bench.serve(balanced(net, "mh"))
    before = {sport: open_once(bench, net, sport) for sport in range(30_000, 30_200)}
    assert len(set(before.values())) == 8
    bench.forget()
    assert bench.flow_count(net.family) == (0, 0)
    assert {sport: open_once(bench, net, sport) for sport in before} == before


def test_two_nodes_choose_alike(bench: Bench, net: Net) -> None:
    """Another node: other numbers, another order of endpoints, other ones local, another address of its own."""
    entry = balanced(net, "mh", weights=[2])
    bench.serve(entry)
    with bench_with(RINGS) as second:
        second.node(primary4=0x01010101)
        (whole,) = entry.backend_sets
        turned = tuple(msgspec.structs.replace(b, local=not b.local) for b in reversed(whole.backends))
        other = BackendSet(turned, whole.when_empty, whole.why)
        second.serve(
            balanced(net, "random", vip=net.vip2, name="default/earlier:http"),
            msgspec.structs.replace(entry, backend_sets=(other,), serving=turned),
        )
        here, there = Asker(bench, net), Asker(second, net)
        sports = range(1024, 65_536, 521)
        assert [here(sport) for sport in sports] == [there(sport) for sport in sports]


# --- source hash


def test_a_client_has_one_backend_whatever_its_port(bench: Bench, net: Net) -> None:
    entry = balanced(net, "sh")
    bench.serve(entry)
    ask = Asker(bench, net)
    base = ipaddress.ip_address(net.client)
    chosen = {}
    for number in range(150):
        client = str(base + number)
        (chosen[client],) = {ask(sport, client) for sport in (1024, 4000, 50_000)}
        assert chosen[client] == place(entry, hash_of(words(client)))
    assert set(chosen.values()) == {backend.address for backend in entry.serving}


# --- in turn


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_round_robin_is_one_after_the_other(bench: Bench, net: Net, count: int) -> None:
    bench.serve(balanced(net, "rr", count))
    chosen = [open_once(bench, net, sport) for sport in range(30_000, 30_000 + 3 * count)]
    assert len(set(chosen[:count])) == count
    assert chosen == chosen[:count] * 3


def test_a_repeated_syn_takes_no_turn(bench: Bench, net: Net) -> None:
    bench.serve(balanced(net, "rr", 3))
    chosen = [open_once(bench, net, sport) for sport in (30_000, 30_000, 30_000, 30_001, 30_001, 30_002)]
    assert chosen[0] == chosen[1] == chosen[2]
    assert len({chosen[0], chosen[3], chosen[5]}) == 3


def test_weights_in_turn_are_exact(bench: Bench, net: Net) -> None:
    entry = balanced(net, "wrr", 3, weights=[5, 2, 1])
    bench.serve(entry)
    seen = Counter(open_once(bench, net, sport) for sport in range(30_000, 30_000 + 8 * 5))
    assert [seen[backend.address] for backend in entry.serving] == [25, 10, 5]


def test_turns_go_on_when_backends_change(bench: Bench, net: Net) -> None:
    bench.serve(balanced(net, "rr", 4))
    open_once(bench, net, 30_000)
    bench.serve(balanced(net, "rr", 4, first=1))
    seen = Counter(open_once(bench, net, sport) for sport in range(30_001, 30_010))
    assert sorted(seen.values()) == [3, 3, 3]


# --- by chance, by weight, by load


def test_weights_at_random(bench: Bench, net: Net) -> None:
    entry = balanced(net, "random", 3, weights=[5, 2, 1])
    bench.serve(entry)
    ask = Asker(bench, net)
    seen = Counter(ask(4000) for _ in range(1500))
    assert excess([seen[b.address] for b in entry.serving], [1500 * b.weight / 8 for b in entry.serving]) < 12


def count_loads(bench: Bench) -> dict[int, int]:
    """As the agent does it: one scan, its result once."""
    bench.gc.count_for = frozenset(bench.store.plan.follows_load)
    bench.gc.scan()
    loads, bench.gc.loads = bench.gc.loads, None
    assert loads is not None
    return loads


def test_connections_are_counted_by_backend(bench: Bench, net: Net) -> None:
    """Open ones of services that follow the load; not ended ones, not each direction, not those of others."""
    bench.serve(balanced(net, "lc", 2), balanced(net, "random", 4, first=2, vip=net.vip2, name="default/other:http"))
    opened = Counter(bench.open_tcp(net, net.vip, sport=sport).dst for sport in range(30_000, 30_020))
    bench.open_tcp(net, net.vip2, sport=31_000)
    ended = bench.open_tcp(net, net.vip, sport=32_000)
    bench.talk(net, ended, net.vip, 80, 32_000, "FA", up=True, seq=1001, ack=1)
    bench.talk(net, ended, net.vip, 80, 32_000, "A", up=False, seq=1, ack=1002)
    assert ended.dst in opened
    numbers = {address: number for number, address in backends_of(bench, net)}
    assert count_loads(bench) == {numbers[address]: count for address, count in opened.items()}


def backends_of(bench: Bench, net: Net) -> list[tuple[int, str]]:
    (known,) = bench.store.plan.installed["default/web"]
    table = bench.maps.view("backends")
    return [(number, layout.address_text(table[number]["address"].tobytes(), net.family)) for number in known.ids]


def test_nothing_is_counted_when_nobody_asks(bench: Bench, net: Net) -> None:
    bench.serve(balanced(net, "random", 2))
    bench.open_tcp(net, net.vip)
    bench.gc.count_for = frozenset(bench.store.plan.follows_load)
    bench.gc.scan()
    assert bench.gc.loads is None


def test_new_connections_go_where_fewer_are(bench: Bench, net: Net) -> None:
    bench.serve(balanced(net, "lc", 1))
    for sport in range(30_000, 30_100):
        bench.open_tcp(net, net.vip, sport=sport)
    bench.serve(balanced(net, "lc", 2))
    ask = Asker(bench, net)
    even = Counter(ask(4000) for _ in range(400))
    assert excess([even[b] for b in net.backends[:2]], [200, 200]) < 12, "not counted yet"
    bench.store.balance(count_loads(bench))
    later = Counter(ask(4000) for _ in range(400))
    assert later[net.backends[1]] > 340
    assert later[net.backends[0]] > 0


# --- beside affinity


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_affinity_comes_first(bench: Bench, net: Net, algorithm: str) -> None:
    bench.serve(balanced(net, algorithm, affinity=10_800))
    assert len({open_once(bench, net, sport) for sport in range(30_000, 30_030)}) == 1


def test_another_algorithm_counts_at_once_and_leaves_connections_alone(bench: Bench, net: Net) -> None:
    bench.serve(balanced(net, "random"))
    there = bench.open_tcp(net, net.vip, sport=30_000)
    for algorithm in ALGORITHMS:
        bench.serve(balanced(net, algorithm))
        verdict, seen = bench.talk(net, there, net.vip, 80, 30_000, "PA", up=True, seq=1001, ack=2, payload=b"x")
        assert verdict in (PASS, REDIRECT)
        assert seen.dst == there.dst
    bench.serve(balanced(net, "mh"))
    assert len({Asker(bench, net)(4000) for _ in range(20)}) == 1


def test_datagrams_are_hashed_too(bench: Bench, net: Net) -> None:
    entry = msgspec.structs.replace(balanced(net, "mh"), protocol=Protocol.UDP)
    bench.serve(entry)
    for sport in range(30_000, 30_040):
        _, out = bench.ingress(frame(net, net.client, net.vip, datagram(sport, 80)))
        assert read(out).dst == place(entry, tuple_hash(net.client, sport, net.vip, 80, 17))


# --- beside failover


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_repeated_syn_goes_to_another_backend(bench: Bench, net: Net, algorithm: str) -> None:
    bench.serve(balanced(net, algorithm))
    for sport in range(30_000, 30_020):
        first = open_once(bench, net, sport)
        wait(bench, net)
        assert open_once(bench, net, sport) != first


def test_the_other_backend_is_the_same_one_on_every_node(bench: Bench, net: Net) -> None:
    bench.serve(balanced(net, "mh"))
    chosen = []
    for _ in range(2):
        bench.forget()
        for sport in range(30_000, 30_020):
            open_once(bench, net, sport)
            wait(bench, net)
            chosen.append(open_once(bench, net, sport))
    assert chosen[:20] == chosen[20:]
