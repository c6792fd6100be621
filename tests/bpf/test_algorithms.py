"""Which backend the loaded programs choose: by chance, by a hash that every node computes alike, in turn, by load."""

from __future__ import annotations

import ipaddress
import itertools
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np
import pytest

from hybrid_proxy.dataplane.balancing import ALGORITHMS, ring_of
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.options import EbpfOptions, FlowTimeouts
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, Protocol

from .kit import (
    HZ,
    PASS,
    REDIRECT,
    SMALL,
    Bench,
    Net,
    Seen,
    bench_with,
    datagram,
    frame,
    moments,
    read,
    segment,
    service,
    syn,
)
from .test_failover import wait

RINGS = Options(ebpf=EbpfOptions(limits=msgspec.structs.replace(SMALL.ebpf.limits, slots=65_536)))
LIMIT = Options().ebpf.limits.ring


@pytest.fixture(scope="module")
def roomy() -> Iterator[Bench]:
    with bench_with(RINGS, max_half_open=1 << 20) as made:
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


# --- by open flows


def ids_of(bench: Bench, net: Net) -> dict[str, int]:
    (known,) = bench.store.plan.installed["default/web"]
    table = bench.maps.view("backends")
    return {layout.address_text(table[number]["address"].tobytes(), net.family): number for number in known.ids}


def counted(bench: Bench) -> dict[int, int]:
    """Open flows by backend, as the programs have counted them and the agent has corrected that."""
    loads = bench.maps.view("loads")
    found = (loads["opened"] - loads["closed"] + loads["correction"]).astype(np.int32)
    return {number: int(found[number]) for number in np.flatnonzero(found).tolist()}


def present(bench: Bench) -> dict[int, int]:
    """Flows by backend that are in the tables that nothing is evicted from."""
    names, found = layout.abi_constants(), Counter[int]()
    for family in (4, 6):
        values = flow_arrays(bench.maps.maps[f"flows{family}"], family)[1]
        found.update(values["backend"][values["flags"] & names["FLOW_REPLY"] != 0].tolist())
    return dict(found)


def close(bench: Bench, net: Net, there: Seen, sport: int, *, port: int = 80) -> None:
    """Both ends, in good order."""
    for flags, up, seq, ack in (("FA", True, 1001, 1), ("FA", False, 1, 1002), ("A", True, 1002, 2)):
        bench.talk(net, there, net.vip, port, sport, flags, up=up, seq=seq, ack=ack)


def reset(bench: Bench, net: Net, there: Seen, sport: int) -> None:
    """And a new connection from the same port, which takes the place of the flow."""
    bench.talk(net, there, net.vip, 80, sport, "R", up=True, seq=1001, ack=0)
    bench.open_tcp(net, net.vip, sport=sport, start=5000)


def fail_over(bench: Bench, net: Net, there: Seen, sport: int) -> None:
    """A SYN without an answer, and again after a second."""
    bench.ingress(frame(net, net.client, net.vip, syn(sport + 500)))
    bench.age(net.family, started=moments(HZ))
    bench.ingress(frame(net, net.client, net.vip, syn(sport + 500)))


def sweep(bench: Bench, net: Net, there: Seen, sport: int) -> None:
    bench.age_flows(net.family, 100_000 * HZ)
    bench.gc.scan()
    bench.gc.scan()


def flood(bench: Bench, net: Net, there: Seen, sport: int) -> None:
    """So many are half-open that a connection begins in the other table, and moves when it is open."""
    bench.node(half_open=1 << 30)
    bench.ingress(frame(net, net.client, net.vip, syn(sport + 600)))
    bench.open_tcp(net, net.vip, sport=sport + 601)
    bench.node(half_open=0)


ENDS = [
    pytest.param(lambda *_: None,     20,     id="none"),
    pytest.param(close,               19,     id="in good order"),
    pytest.param(reset,               20,     id="by a reset and a new connection"),
    pytest.param(fail_over,           21,     id="a backend that does not answer"),
    pytest.param(sweep,               0,      id="the collector"),
    pytest.param(flood,               21,     id="a flood of SYNs"),
]  # fmt: skip


@pytest.mark.parametrize(("end", "left"), ENDS)
@pytest.mark.parametrize("algorithm", ["lc", "wlc"])
def test_open_flows_are_counted_whoever_ends_them(
    bench: Bench, net: Net, algorithm: str, end: Callable[..., None], left: int
) -> None:
    bench.serve(balanced(net, algorithm, 3), balanced(net, "random", 4, vip=net.vip2, name="default/other:http"))
    opened = {sport: bench.open_tcp(net, net.vip, sport=sport) for sport in range(30_000, 30_020)}
    bench.open_tcp(net, net.vip2, sport=31_000)
    end(bench, net, opened[30_000], 30_000)
    ours = {*ids_of(bench, net).values()}
    assert counted(bench) == {number: count for number, count in present(bench).items() if number in ours}
    assert sum(counted(bench).values()) == left


def test_datagrams_count_once_they_are_a_conversation(bench: Bench, net: Net) -> None:
    made = service(net.vip, 53, [(b, 5353) for b in net.backends[:3]], protocol=Protocol.UDP)
    bench.serve(msgspec.structs.replace(made, algorithm="lc"))
    bench.open_udp(net, net.vip, sport=30_000)
    assert counted(bench) == {}
    bench.open_udp(net, net.vip, sport=30_001, lasting=True)
    assert counted(bench) == present(bench)
    assert sum(counted(bench).values()) == 1


def test_nothing_is_counted_when_nobody_asks(bench: Bench, net: Net) -> None:
    bench.serve(balanced(net, "random", 2))
    close(bench, net, bench.open_tcp(net, net.vip), 40_000)
    bench.open_tcp(net, net.vip)
    loads = bench.maps.view("loads")
    assert not loads["opened"].any()
    assert not loads["closed"].any()


@pytest.mark.parametrize(("weights", "expected"), [((1, 1, 1), [40, 40, 40]), ((3, 2, 1), [60, 40, 20])])
def test_new_connections_go_where_the_fewest_are(
    bench: Bench, net: Net, weights: tuple[int, ...], expected: list[int]
) -> None:
    """At once, one after the other: no count is waited for."""
    bench.serve(balanced(net, "wlc", 3, weights=weights))
    seen = Counter(bench.open_tcp(net, net.vip, sport=sport).dst for sport in range(30_000, 30_120))
    assert all(abs(seen[b] - wanted) <= 2 for b, wanted in zip(net.backends, expected, strict=False)), seen
    ask = Asker(bench, net)
    bench.maps.view("loads")["closed"][ids_of(bench, net)[net.backends[1]]] += 30
    idle = Counter(ask(sport) for sport in range(4000, 4040))[net.backends[1]]
    assert idle >= 30, "of three, four slots miss one now and then"


def test_of_many_the_best_of_four_are_nearly_even(bench: Bench, net: Net) -> None:
    made = service(net.vip, 80, [(net.backends[0], 8000 + n) for n in range(100)])
    bench.serve(msgspec.structs.replace(made, algorithm="lc"))
    for sport in range(20_000, 21_000):
        verdict, _ = bench.ingress(frame(net, net.client, net.vip, syn(sport)))
        assert verdict in (PASS, REDIRECT)
    counts = [*counted(bench).values()]
    assert sum(counts) == 1000
    assert len(counts) == 100
    assert max(counts) <= 13, "10 on average; by chance alone 19"


def test_a_backend_that_did_not_answer_is_avoided(bench: Bench, net: Net) -> None:
    """Although it has the fewest flows."""
    bench.serve(balanced(net, "lc", 2))
    for sport in range(30_000, 30_010):
        bench.open_tcp(net, net.vip, sport=sport)
    bench.maps.view("loads")["closed"][ids_of(bench, net)[net.backends[0]]] += 5
    assert open_once(bench, net, 40_000) == net.backends[0]
    bench.age(net.family, started=moments(HZ))
    assert open_once(bench, net, 40_000) == net.backends[1]


def test_explain_compares_open_flows(bench: Bench, net: Net) -> None:
    bench.serve(balanced(net, "lc", 2))
    bench.open_tcp(net, net.vip)
    answer = bench.explain(frame(net, net.client, net.vip, syn(50_000)))
    said = {step.text for step in answer.steps if step.step == "load"}
    assert len(said) == 2
    assert {text.rpartition(" has ")[2].split()[0] for text in said} == {"0", "1"}


@pytest.mark.parametrize("drift", [0, 7, -7])
def test_a_recount_corrects_what_programs_could_not_see(bench: Bench, net: Net, drift: int) -> None:
    bench.serve(balanced(net, "random", 2))
    for sport in range(30_000, 30_010):
        bench.open_tcp(net, net.vip, sport=sport)
    bench.serve(balanced(net, "lc", 2))
    assert counted(bench) == {}, "they began before anybody asked"
    bench.maps.view("loads")["opened"][ids_of(bench, net)[net.backends[0]]] += drift % (1 << 32)
    bench.gc.recounts = bool(bench.store.plan.counts_flows)
    bench.gc.scan()
    assert counted(bench) == present(bench)
    assert sum(counted(bench).values()) == 10


def test_the_next_backend_with_a_number_begins_with_none(bench: Bench, net: Net) -> None:
    bench.serve(balanced(net, "lc", 2))
    bench.open_tcp(net, net.vip)
    numbers = ids_of(bench, net).values()
    bench.maps.view("loads")["opened"][[*numbers]] += 5
    bench.serve()
    bench.forget_flows()
    bench.maps.view("loads")["opened"][[*numbers]] += 5
    bench.settle()
    bench.settle()
    assert counted(bench) == {}
    assert not bench.maps.view("loads")["weight"][[*numbers]].any()


@pytest.mark.parametrize("rounds", [300, pytest.param(125_000, marks=pytest.mark.long)])
def test_counts_are_exact_after_many_connections_of_several_processors(bench: Bench, net: Net, rounds: int) -> None:
    """Both ends close at the same moment, ports are used again and again, and the collector sweeps what is open."""
    bench.serve(balanced(net, "lc", 3))
    over, errors = threading.Event(), list[BaseException]()

    def collect() -> None:
        while not over.wait(0.01):
            hasty.forget_idle(net.family, *flow_arrays(bench.maps.maps[f"flows{net.family}"], net.family))

    def live(first: int) -> None:
        try:
            for number in range(rounds):
                converse(bench, net, first + number % 50, end=number % 5)
        except BaseException as error:
            errors.append(error)

    hasty = bench.new_gc(FlowTimeouts(tcp_established=0, tcp_close_wait=0))
    threads = [threading.Thread(target=live, args=(first,)) for first in (30_000, 30_000, 30_100, 30_200)]
    collector = threading.Thread(target=collect)
    for thread in (*threads, collector):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    collector.join()
    assert not errors
    assert counted(bench) == present(bench)
    loads = bench.maps.view("loads")
    assert int(loads["opened"].sum()) >= rounds * 2
    bench.age_flows(net.family, 100_000 * HZ)
    bench.gc.scan()
    assert counted(bench) == present(bench) == {}


_PACKETS: dict[tuple[int, str, str], bytearray] = {}


def converse(bench: Bench, net: Net, sport: int, end: int) -> None:
    """One connection from this port, with prepared packets; `end` is how it ends, 0: not at all."""

    def send(flags: str, seq: int, ack: int) -> None:
        key = (net.family, flags, "up")
        packet = _PACKETS.get(key)
        if packet is None:
            packet = _PACKETS[key] = bytearray(frame(net, net.client, net.vip, segment(1, 80, flags, 0, 0)))
        run = bytearray(packet)
        struct.pack_into("!H", run, l4, sport)
        struct.pack_into("!II", run, l4 + 4, seq, ack)
        out = bench.ingress(bytes(run))[1]
        there.append(out)

    def answer(flags: str, seq: int, ack: int) -> None:
        address = 26 if net.family == 4 else 22
        size = 4 if net.family == 4 else 16
        back = bytearray(there[0])
        back[0:6], back[6:12] = there[0][6:12], there[0][0:6]
        back[address : address + size], back[address + size : address + 2 * size] = (
            there[0][address + size : address + 2 * size], there[0][address : address + size],
        )  # fmt: skip
        back[l4 : l4 + 2], back[l4 + 2 : l4 + 4] = there[0][l4 + 2 : l4 + 4], there[0][l4 : l4 + 2]
        struct.pack_into("!II", back, l4 + 4, seq, ack)
        back[l4 + 13] = {"SA": 0x12, "FA": 0x11, "A": 0x10}[flags]
        bench.egress(bytes(back))

    there: list[bytes] = []
    l4 = 14 + (20 if net.family == 4 else 40)
    send("S", 1000, 0)
    if end == 1:
        return
    answer("SA", 0, 1001)
    send("A", 1001, 1)
    if end == 2:
        send("R", 1001, 0)
    elif end > 2:
        ends = [lambda: send("FA", 1001, 1), lambda: answer("FA", 1, 1001)]
        closing = [threading.Thread(target=each) for each in ends] if end == 4 and sport % 10 == 0 else []
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        for each in () if closing else ends:
            each()
        send("A", 1002, 2)
        answer("A", 2, 1002)


# --- with affinity


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


# --- with failover


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
