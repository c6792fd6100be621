"""A SYN that comes again finds another backend; what is counted of the one that was silent."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest

from hybrid_proxy.dataplane.modes.ebpf.ejection.failures import forget_former, histories
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.reports import FailureHistory
from hybrid_proxy.dataplane.table import Protocol

from .kit import (
    HZ,
    PASS,
    REDIRECT,
    Bench,
    Net,
    Seen,
    chunk,
    datagram,
    frame,
    moments,
    read,
    segment,
    service,
    syn,
)

FLAGS = layout.abi_constants()


def wait(bench: Bench, net: Net, jiffies: int = HZ) -> None:
    """Make all flows look as if they had begun so long ago."""
    bench.age(net.family, seen=jiffies, started=moments(jiffies))


def web(net: Net, count: int, **more: object):
    return service(net.vip, 80, [(address, 8080) for address in net.backends[:count]], **more)


def connect(bench: Bench, net: Net, sport: int = 40000, client: str = "") -> Seen:
    """A SYN through the client's interface, as its backend gets it."""
    verdict, out = bench.ingress(frame(net, client or net.client, net.vip, syn(sport)))
    assert verdict in (PASS, REDIRECT)
    return read(out)


def answer(bench: Bench, net: Net, there: Seen, flags: str) -> Seen:
    """What the backend says to that, as the client gets it."""
    back = frame(net, there.dst, there.src, segment(there.dport, there.sport, flags, 0, 1001), from_backend=True)
    verdict, out = bench.egress(back)
    assert verdict == PASS
    return read(out)


def failures(bench: Bench, net: Net) -> dict[str, int]:
    """Counted failures by address, of those that have any."""
    table = bench.maps.view("backends")
    rows = table[(table["failures"] != 0) & (table["service"] != 0)]
    return {layout.address_text(row["address"].tobytes(), net.family): int(row["failures"]) for row in rows}


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_repeated_syn_goes_to_another_backend(bench: Bench, net: Net, count: int) -> None:
    bench.serve(web(net, count))
    for sport in range(40000, 40040):
        first = connect(bench, net, sport)
        wait(bench, net)
        second = connect(bench, net, sport)
        assert second.dst != first.dst
        assert (second.src, second.sport, second.dport) == (first.src, first.sport, 8080)
        assert answer(bench, net, second, "SA").tuple == (net.vip, 80, net.client, sport)
        verdict, out = bench.ingress(frame(net, net.client, net.vip, segment(sport, 80, "A")))
        assert (verdict in (PASS, REDIRECT), read(out).dst) == (True, second.dst)
    assert bench.count("failover") == 40
    assert bench.flow_count(net.family) == (80, 0)


def test_a_late_answer_of_the_silent_one_is_not_translated(bench: Bench, net: Net) -> None:
    """The client's kernel knows no such connection and resets it."""
    bench.serve(web(net, 2))
    first = connect(bench, net)
    wait(bench, net)
    connect(bench, net)
    back = frame(net, first.dst, first.src, segment(8080, 40000, "SA", 0, 1001), from_backend=True)
    assert bench.egress(back) == (PASS, back)


@pytest.mark.parametrize(("jiffies", "moves"), [(0, False), (HZ // 8, False), (HZ // 2, True), (60 * HZ, True)])
def test_a_copy_of_a_syn_is_no_repeat(bench: Bench, net: Net, jiffies: int, moves: bool) -> None:
    bench.serve(web(net, 2))
    first = connect(bench, net)
    wait(bench, net, jiffies)
    assert (connect(bench, net).dst != first.dst) == moves
    assert failures(bench, net) == ({first.dst: 1} if moves else {})
    assert bench.count("failover") == moves


def test_each_repeat_goes_elsewhere(bench: Bench, net: Net) -> None:
    bench.serve(web(net, 2))
    seen = [connect(bench, net).dst]
    for _ in range(6):
        wait(bench, net)
        seen.append(connect(bench, net).dst)
    a, b = seen[:2]
    assert seen == [a, b, a, b, a, b, a]
    assert failures(bench, net) == {a: 3, b: 3}


@pytest.mark.parametrize("affinity", [0, 60])
def test_the_only_backend_is_asked_again(bench: Bench, net: Net, affinity: int) -> None:
    bench.serve(web(net, 1, affinity=affinity))
    first = connect(bench, net)
    wait(bench, net)
    assert connect(bench, net).tuple == first.tuple
    assert failures(bench, net) == {first.dst: 1}
    assert bench.count("failover") == 0
    assert answer(bench, net, first, "SA").tuple == (net.vip, 80, net.client, 40000)


def test_the_memory_of_affinity_moves_along(bench: Bench, net: Net) -> None:
    bench.calm()
    bench.serve(web(net, 5, affinity=60))
    first = connect(bench, net)
    assert connect(bench, net, 40001).dst == first.dst
    wait(bench, net)
    second = connect(bench, net)
    assert second.dst != first.dst
    assert {connect(bench, net, sport).dst for sport in range(40002, 40020)} == {second.dst}


@pytest.mark.parametrize("flags", ["SA", "A"])
def test_a_flow_with_an_answer_stays(bench: Bench, net: Net, flags: str) -> None:
    """The SYN/ACK may be lost between us and the client, or the connection be established and the SYN a stray."""
    bench.serve(web(net, 5))
    first = connect(bench, net)
    answer(bench, net, first, "SA")
    if flags == "A":
        bench.ingress(frame(net, net.client, net.vip, segment(40000, 80, "A")))
    wait(bench, net)
    assert connect(bench, net).tuple == first.tuple
    assert failures(bench, net) == {}
    assert bench.count("failover") == 0


def test_a_refusal_is_a_failure_and_an_answer_ends_the_row(bench: Bench, net: Net) -> None:
    bench.serve(web(net, 1))
    address = net.backends[0]
    for number in range(1, 4):
        there = connect(bench, net, 40000 + number)
        assert answer(bench, net, there, "RA").tuple == (net.vip, 80, net.client, 40000 + number)
        answer(bench, net, there, "RA")  # a copy
        assert failures(bench, net) == {address: number}
    answer(bench, net, connect(bench, net, 40100), "SA")
    assert failures(bench, net) == {}


def test_a_reset_of_an_accepted_connection_is_no_failure(bench: Bench, net: Net) -> None:
    bench.serve(web(net, 1))
    answer(bench, net, connect(bench, net), "SA")
    there = connect(bench, net)
    answer(bench, net, there, "RA")
    there = bench.open_tcp(net, net.vip, sport=40001)
    bench.talk(net, there, net.vip, 80, 40001, "RA", up=False, seq=1, ack=1001)
    assert failures(bench, net) == {}


def test_a_port_used_again_after_a_refusal_is_no_repeat(bench: Bench, net: Net) -> None:
    """The SYN begins another connection: any backend will do, and nobody failed once more."""
    bench.serve(web(net, 1))
    answer(bench, net, connect(bench, net), "RA")
    wait(bench, net)
    connect(bench, net)
    assert failures(bench, net) == {net.backends[0]: 1}


def test_a_pod_that_does_not_answer_itself(bench: Bench, net: Net) -> None:
    """Hairpin: the first choice is the client itself, the second another pod, and the way back from there."""
    me, other = net.backends[0], net.backends[1]
    bench.serve(web(net, 2))
    for sport in range(40000, 40030):
        first = connect(bench, net, sport, me)
        assert first.src == (net.primary if first.dst == me else me)
        wait(bench, net)
        second = connect(bench, net, sport, me)
        assert {first.dst, second.dst} == {me, other}
        assert second.src == (net.primary if second.dst == me else me)
    assert bench.count("failover") == 30


def test_datagrams_and_sctp_are_left_alone(bench: Bench, net: Net) -> None:
    backends = [(address, 5353) for address in net.backends[:5]]
    bench.serve(
        service(net.vip, 53, backends, name="default/dns:dns", protocol=Protocol.UDP),
        service(net.vip, 38412, backends, name="default/sctp:main", protocol=Protocol.SCTP),
    )
    for packet in (datagram(), chunk()):
        first = read(bench.ingress(frame(net, net.client, net.vip, packet))[1], check=False)
        wait(bench, net)
        assert read(bench.ingress(frame(net, net.client, net.vip, packet))[1], check=False).dst == first.dst
    assert failures(bench, net) == {}


def test_a_number_that_is_given_again_begins_without_failures(bench: Bench, net: Net) -> None:
    bench.serve(web(net, 1))
    answer(bench, net, connect(bench, net), "RA")
    assert failures(bench, net) == {net.backends[0]: 1}
    bench.serve()
    bench.forget_flows()
    bench.settle()
    assert not bench.maps.view("backends")["failures"].any()


def test_no_route_left_for_a_repeat(bench: Bench, net: Net) -> None:
    """All backends are gone when the SYN comes again: refused, as every new connection."""
    bench.serve(web(net, 2))
    connect(bench, net)
    bench.serve(web(net, 0, serving=[(address, 8080) for address in net.backends[:2]]))
    wait(bench, net)
    verdict, out = bench.ingress(frame(net, net.client, net.vip, syn()))
    assert (verdict, read(out).tuple) == (REDIRECT, (net.vip, 80, net.client, 40000))
    assert bench.count("failover") == 0


# --- what is remembered of failures


def history(bench: Bench) -> FailureHistory | None:
    """Of the one backend of the one service that is served."""
    found = histories(bench.maps.maps)
    return next(iter(found.values()), None)


def test_refusals_and_silence_are_remembered_apart_and_with_their_times(bench: Bench, net: Net) -> None:
    bench.serve(web(net, 1))
    assert history(bench) is None
    began = time.time()
    for sport in (40001, 40002, 40003):
        answer(bench, net, connect(bench, net, sport), "RA")
    refused = history(bench)
    assert refused is not None
    assert (refused.refused, refused.unanswered, refused.last_unanswered) == (3, 0, None)
    assert began - 1 <= (refused.last_refused or 0) <= time.time() + 1
    connect(bench, net, 40004)
    wait(bench, net)
    connect(bench, net, 40004)
    silent = history(bench)
    assert silent is not None
    assert (silent.refused, silent.last_refused, silent.unanswered) == (3, pytest.approx(refused.last_refused), 1)
    assert (silent.last_unanswered or 0) >= (refused.last_refused or 0)
    assert (bench.count("backend_refused"), bench.count("backend_unanswered")) == (3, 1)


def test_a_syn_that_its_client_gives_up_is_counted_when_its_flow_goes(bench: Bench, net: Net) -> None:
    """It is no sign against the backend, which may be well after a minute."""
    bench.serve(web(net, 1))
    bench.calm()
    connect(bench, net, 40001)
    answer(bench, net, connect(bench, net, 40002), "SA")
    answer(bench, net, connect(bench, net, 40003), "RA")
    bench.age_flows(net.family, 61 * HZ)
    bench.gc.scan()
    assert bench.flow_count(net.family)[0] == 0
    assert (bench.count("backend_unanswered"), bench.count("backend_refused")) == (1, 1)
    kept = history(bench)
    assert kept
    assert (kept.refused, kept.unanswered) == (1, 0)
    bench.gc.scan()
    assert bench.count("backend_unanswered") == 1


def test_an_answer_ends_the_row_of_failures_and_not_the_memory_of_them(bench: Bench, net: Net) -> None:
    bench.serve(web(net, 1))
    answer(bench, net, connect(bench, net, 40001), "RA")
    answer(bench, net, connect(bench, net, 40002), "SA")
    kept = history(bench)
    assert (failures(bench, net), kept and kept.refused) == ({}, 1)


def test_a_series_ends_after_ten_minutes(bench: Bench, net: Net) -> None:
    bench.serve(web(net, 1))
    answer(bench, net, connect(bench, net, 40001), "RA")
    known = bench.maps.maps["failures"]
    (number,), rows = known.items(np.dtype(np.uint32), layout.dtype_of("failures"))
    rows["refused_at"] -= np.uint64(601 * 10**9)
    known.update(int(number).to_bytes(4, sys.byteorder), rows.tobytes())
    answer(bench, net, connect(bench, net, 40002), "RA")
    kept = history(bench)
    assert kept is not None
    assert kept.refused == 1


def test_a_number_that_is_given_again_has_no_history(bench: Bench, net: Net) -> None:
    bench.serve(web(net, 1))
    answer(bench, net, connect(bench, net), "RA")
    assert history(bench) is not None
    bench.serve()
    bench.forget_flows()
    bench.settle()
    bench.serve(service(net.vip, 80, [(net.backends[3], 8080)]))
    assert history(bench) is None
    forget_former(bench.maps.maps)
    ids, _ = bench.maps.maps["failures"].items(np.dtype(np.uint32), layout.dtype_of("failures"))
    assert not len(ids)
