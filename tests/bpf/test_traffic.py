"""Flows, packets and bytes of backends and services: counted once, for their owner, and still there afterwards."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_proxy.dataplane.first_packets import BOUNDS
from hybrid_proxy.dataplane.kernel.bpf import Map, run_on_packet
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import making, mapset
from hybrid_proxy.dataplane.modes.ebpf.maps.first_packets import by_bound
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.maps.making import traffic_sizes
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.maps.traffic import FIELDS, Traffic
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.options import EbpfOptions, Limits
from hybrid_proxy.dataplane.table import Protocol
from tests.properties import examples

from .kit import (
    HZ,
    KTIME_SHIFT,
    NETS,
    PASS,
    SMALL,
    Bench,
    Net,
    bench_with,
    cpus,
    datagram,
    frame,
    moments,
    read,
    segment,
    service,
    syn,
)

COUNTED = FIELDS[:5]  # the others are about time


def of_service(bench: Bench, name: str) -> dict[str, int]:
    known = next(iter(bench.store.plan.installed[name]))
    figures = bench.store.traffic.of_services(bench.store.backends["service"])[known.service]
    return dict(zip(COUNTED, figures.tolist(), strict=False))


def of_backend(bench: Bench, name: str, position: int = 0) -> dict[str, int]:
    known = next(iter(bench.store.plan.installed[name]))
    figures = bench.store.traffic.of_backends(np.array([known.ids[position]], dtype=np.int64))[0]
    return dict(zip(COUNTED, figures.tolist(), strict=False))


def connects(bench: Bench) -> tuple[int, float]:
    """Connections that default/web's only backend accepted, and how many seconds they took for that, together."""
    known = next(iter(bench.store.plan.installed["default/web"]))
    figures = bench.store.traffic.of_backends(np.array([known.ids[0]], dtype=np.int64))[0].tolist()
    result = dict(zip(FIELDS, figures, strict=True))
    return result["answered"], result["connect_ns"] / 1e9


def figures(flows: int, packets: int, octets: int, reply_packets: int, reply_octets: int) -> dict[str, int]:
    return dict(zip(COUNTED, (flows, packets, octets, reply_packets, reply_octets), strict=True))


def head(net: Net) -> int:
    """Bytes of the IP header."""
    return 20 if net.family == 4 else 40


def test_a_connection_is_counted_in_both_directions(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    there = bench.open_tcp(net, net.vip)
    empty = head(net) + 20
    assert of_backend(bench, "default/web") == figures(1, 2, 2 * empty, 1, empty)
    bench.talk(net, there, net.vip, 80, 40000, "PA", up=True, seq=1001, ack=1, payload=b"q" * 100)
    bench.talk(net, there, net.vip, 80, 40000, "PA", up=False, seq=1, ack=1101, payload=b"a" * 1000)
    wanted = figures(1, 3, 3 * empty + 100, 2, 2 * empty + 1000)
    assert of_backend(bench, "default/web") == wanted
    assert of_service(bench, "default/web") == wanted


def test_a_datagram_is_counted_in_both_directions(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 53, [(net.backends[0], 5353)], name="kube-system/dns:dns", protocol=Protocol.UDP))
    bench.open_udp(net, net.vip)
    size = head(net) + 8
    assert of_service(bench, "kube-system/dns") == figures(1, 1, size + 5, 1, size + 4)


def test_answers_that_are_handed_over_are_counted_once(bench: Bench, net: Net) -> None:
    """Known pods: the answer leaves at the backend's interface and never meets the client's."""
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    there = bench.open_tcp(net, net.vip)
    before = of_backend(bench, "default/web")
    back = frame(net, there.dst, there.src, segment(there.dport, there.sport, "A"), from_backend=True)
    verdict, out = bench.ingress(back)
    assert verdict != PASS
    assert read(out).src == net.vip
    assert of_backend(bench, "default/web")["reply_packets"] == before["reply_packets"] + 1


def test_a_packet_of_several_segments_counts_as_so_many(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    there = bench.open_tcp(net, net.vip)
    before = of_backend(bench, "default/web")
    big = frame(net, net.client, net.vip, segment(40000, 80, "PA", 1001, 1, bytes(3000)))
    bench.ingress(big, gso_segs=5, gso_size=600)
    back = frame(net, there.dst, there.src, segment(there.dport, there.sport, "PA", 1, 4001, bytes(2800)))
    bench.egress(back, gso_segs=2, gso_size=1400)
    after = of_backend(bench, "default/web")
    assert after["packets"] - before["packets"] == 5
    assert after["bytes"] - before["bytes"] == len(big) - 14
    assert after["reply_packets"] - before["reply_packets"] == 2
    assert after["reply_bytes"] - before["reply_bytes"] == len(back) - 14


def test_what_is_refused_or_no_services_counts_for_nobody(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    bench.ingress(frame(net, net.client, net.vip, syn(dport=81)))
    bench.ingress(frame(net, net.client, net.backends[0], syn(dport=8080)))
    bench.ingress(frame(net, net.client, net.backends[0], datagram(dport=8080)))
    assert not any(of_service(bench, "default/web").values())
    assert not bench.maps.view("traffic").view(np.uint64).any()


def test_a_service_keeps_what_its_former_backends_did(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    bench.open_tcp(net, net.vip)
    bench.open_tcp(net, net.vip, sport=40001)
    wanted = of_service(bench, "default/web")
    assert wanted["flows"] == 2
    bench.serve(service(net.vip, 80, [(net.backends[1], 8080)]))
    assert of_service(bench, "default/web") == wanted  # its flows go on: the number is not free
    bench.forget_flows()
    bench.settle()
    assert of_service(bench, "default/web") == wanted
    assert not any(of_backend(bench, "default/web").values())


def answer(bench: Bench, net: Net, sport: int, flags: str = "SA") -> None:
    """What the backend says to the SYN of this port."""
    bench.egress(frame(net, net.backends[0], net.client, segment(8080, sport, flags, 1, 1001), from_backend=True))


def test_the_time_to_accept_is_that_of_the_first_answer(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    began = time.monotonic()
    bench.ingress(frame(net, net.client, net.vip, syn(40000)))
    time.sleep(0.05)
    answer(bench, net, 40000)
    longest = time.monotonic() - began
    answered, seconds = connects(bench)
    assert answered == 1
    assert 0.049 <= seconds <= longest
    answer(bench, net, 40000)  # repeated
    assert connects(bench) == (answered, seconds)
    began = time.monotonic()
    bench.ingress(frame(net, net.client, net.vip, syn(40001)))
    answer(bench, net, 40001)
    longest = time.monotonic() - began
    answered, both = connects(bench)
    assert answered == 2
    assert 0 <= both - seconds <= longest


def test_who_refuses_has_accepted_nothing(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    bench.ingress(frame(net, net.client, net.vip, syn(40000)))
    answer(bench, net, 40000, "RA")
    assert connects(bench) == (0, 0)


@pytest.mark.parametrize("seconds", [120, 3000])
def test_a_start_that_cannot_be_is_no_time(bench: Bench, net: Net, seconds: int) -> None:
    """Programs of another version, with another clock, may have begun the connection."""
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    bench.ingress(frame(net, net.client, net.vip, syn(40000)))
    bench.age(net.family, started=moments(seconds * HZ))
    answer(bench, net, 40000)
    assert connects(bench) == (0, 0)


def test_numbers_that_are_given_out_again_begin_at_nothing(net: Net) -> None:
    first = service(net.vip, 80, [(net.backends[0], 8080)])
    few = 16
    with bench_with(Options(ebpf=EbpfOptions(limits=Limits(services=few, backends=8, slots=64, flows=64)))) as small:
        small.serve(first)
        used = set()
        small.open_tcp(net, net.vip)
        for _ in range(few + 1):  # numbers are given out in a circle: go once round
            known = next(iter(small.store.plan.installed["default/web"]))
            used.add(known.service)
            small.forget_flows()
            small.serve()
            small.settle()
            small.serve(first)
            assert not any(of_service(small, "default/web").values())
            assert not any(of_backend(small, "default/web").values())
            small.open_tcp(net, net.vip)
            assert of_service(small, "default/web")["flows"] == 1
        assert len(used) < few + 1, "no number came back"


def test_figures_outlive_the_agent_and_leftovers_do_not(bench: Bench, net: Net) -> None:
    entry = service(net.vip, 80, [(net.backends[0], 8080)])
    bench.serve(entry)
    bench.open_tcp(net, net.vip)
    wanted = of_service(bench, "default/web")
    unused = SMALL.ebpf.limits.backends - 1
    bench.store.traffic.rows[unused // 8, 0, unused % 8] = 7
    bench.store.traffic.gone[SMALL.ebpf.limits.services - 1] = 7
    bench.maps.adopted = True
    bench.store = Store(bench.maps, HZ)
    bench.store.apply({"default/web": (entry,)})
    assert of_service(bench, "default/web") == wanted
    assert not bench.store.traffic.of_backends(np.array([unused])).any()
    assert not bench.store.traffic.of_services(bench.store.backends["service"])[-1].any()


def test_maps_of_another_size_are_made_anew(net: Net) -> None:
    with bench_with() as made:
        assert made.maps.maps["traffic"].entries == SMALL.ebpf.limits.backends * cpus()
        again = MapSet(made.folder, Options(ebpf=msgspec.structs.replace(SMALL.ebpf, traffic_counters=False)))
        assert again.adopted
        assert again.maps["traffic"].entries == 8
        assert not again.traffic().counting
        again.first_packets().only([1, 2])
        assert not again.first_packets().series({1: "default/web:http"})
        again.close()


def test_maps_of_another_layout_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row holds has changed since the maps were made; flows stay."""
    with bench_with() as made:
        narrow = np.dtype([(name, "u8") for name in COUNTED])
        kind = mapset.dtype_of
        with monkeypatch.context() as patched:
            patched.setattr(mapset, "dtype_of", lambda name: narrow if name == "traffic" else kind(name))
            again = MapSet(made.folder, made.options)
        assert again.maps["traffic"].fd != made.maps.maps["traffic"].fd
        assert number(again.maps["traffic"]) != number(made.maps.maps["traffic"])
        assert number(again.maps["flows4"]) == number(made.maps.maps["flows4"])
        again.close()


def test_maps_of_a_version_without_histograms_get_them(net: Net) -> None:
    """The layout is the same, so nothing else is made anew, and the next restart finds what it wants."""
    larger = msgspec.structs.replace(SMALL.ebpf.limits, services=4 * SMALL.ebpf.limits.services)
    with bench_with() as made:
        (made.folder / "first_packets").unlink()
        options = Options(ebpf=msgspec.structs.replace(SMALL.ebpf, limits=larger))
        first, second = MapSet(made.folder, options), MapSet(made.folder, options)
        assert first.maps["first_packets"].entries == made.maps.maps["services"].entries
        assert number(second.maps["first_packets"]) == number(first.maps["first_packets"])
        assert number(second.maps["traffic"]) == number(made.maps.maps["traffic"])
        first.close()
        second.close()


def number(known: Map) -> int:
    """The kernel's id of a map."""
    fdinfo = Path(f"/proc/self/fdinfo/{known.fd}").read_text()
    return next(int(line.split()[1]) for line in fdinfo.splitlines() if line.startswith("map_id:"))


def test_without_counting_nothing_is_counted(net: Net) -> None:
    with bench_with(traffic_cpus=0) as off:
        off.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
        off.open_tcp(net, net.vip)
        assert not off.maps.view("traffic").view(np.uint64).any()


def test_backends_without_a_row_are_served_and_not_counted(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts traffic has a bound; figures of other backends are whole, and numbers are given back as ever."""
    monkeypatch.setattr(making, "MOST_BYTES", 16 * cpus() * 56)
    with bench_with(Options(ebpf=EbpfOptions(limits=Limits(services=64, backends=64, slots=512, flows=256)))) as made:
        assert made.store.traffic.backends == 16
        made.serve(*(
            service(net.vip, 80 + n, [(net.backends[0], 8080 + n)], name=f"default/s{n}:http") for n in range(24)
        ))  # fmt: skip
        for n in range(24):
            made.open_tcp(net, net.vip, 80 + n, 40000 + n)
        ids = np.arange(1, 25)
        flows = made.store.traffic.of_backends(ids)[:, 0]
        assert flows.tolist() == [1] * 15 + [0] * 9
        figures = made.store.traffic.of_services(made.store.backends["service"])
        assert figures[:, 0].sum() == 15
        made.store.traffic.give_back([], ids, made.store.backends["service"][ids])
        assert not made.store.traffic.of_backends(ids).any()
        assert made.store.traffic.of_services(made.store.backends["service"])[:, 0].sum() == 15
        made.maps.adopted = True
        again = Store(made.maps, HZ)
        assert again.traffic.backends == 16


MEMORY = [
    # backends  cpus  megabytes
    (8192,      2,    0.9),
    (1 << 20,   2,    117.4),
    (1 << 20,   64,   268.4),
    (1 << 20,   0,    0.0),
]  # fmt: skip


@pytest.mark.parametrize(("backends", "processors", "megabytes"), MEMORY)
def test_what_counts_traffic_takes_memory_up_to_a_bound(backends: int, processors: int, megabytes: float) -> None:
    entries = traffic_sizes(1024, backends, processors)["traffic"]
    assert entries % (8 * max(processors, 1)) == 0
    assert entries * 56 / 1e6 == pytest.approx(megabytes, abs=0.1)


def test_each_backend_and_cpu_has_a_row_of_its_own(bench: Bench) -> None:
    """The program's arithmetic and numpy's are the same, to the last row."""
    net = NETS[4]
    backends = [(f"10.2.{n >> 8}.{n & 255}", 8080) for n in range(1, 1201)]
    bench.serve(service(net.vip, 80, backends))
    known = next(iter(bench.store.plan.installed["default/web"]))
    program = bench.hooks.program("pod_ingress")
    seen: dict[str, int] = {}
    for sport in range(20000, 22000):
        _, out, _ = run_on_packet(program, frame(net, net.client, net.vip, syn(sport)))
        target = read(out).dst
        seen[target] = seen.get(target, 0) + 1
    for (address, _), number in zip(backends, known.ids, strict=True):
        row = bench.store.traffic.of_backends(np.array([number], dtype=np.int64))[0]
        assert row[0] == row[1] == seen.get(address, 0)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_figure_is_lost_or_given_to_another(data: st.DataObject) -> None:
    """Numbers used, given back and used again in any order; every count ends with the service that it was made for."""
    cpus_, services, backends = 3, 6, 24
    sizes = traffic_sizes(services, backends, cpus_)
    kind = np.dtype([(name, "u8") for name in FIELDS])
    counted = np.zeros(sizes["traffic"], kind)
    traffic = Traffic(lambda: counted, np.zeros(sizes["traffic_gone"], kind), cpus_)
    owners = np.zeros(backends, dtype=np.uint32)
    wanted = np.zeros((services, len(FIELDS)), dtype=np.uint64)
    for _ in range(data.draw(st.integers(1, 30))):
        backend = data.draw(st.integers(1, backends - 1))
        what = data.draw(st.sampled_from(["count", "give back", "end service"]))
        if what == "count":
            owners[backend] = owners[backend] or data.draw(st.integers(1, services - 1))
            amount = data.draw(st.integers(1, 1 << 60))
            place = (backend // 8, data.draw(st.integers(0, cpus_ - 1)), backend % 8, data.draw(st.integers(0, 4)))
            with np.errstate(over="ignore"):
                traffic.rows[place] += np.uint64(amount)
                wanted[owners[backend], place[3]] += np.uint64(amount)
        elif what == "give back" and owners[backend]:
            gone = np.array([backend])
            traffic.give_back([], gone, owners[gone])
            owners[backend] = 0
        elif owners[backend]:
            service_id = int(owners[backend])
            gone = np.flatnonzero(owners == service_id)
            traffic.give_back([service_id], gone, owners[gone])
            owners[gone], wanted[service_id] = 0, 0
        assert (traffic.of_services(owners)[1:] == wanted[1:]).all()


def waited(bench: Bench, name: str = "default/web") -> dict[int, int]:
    """The histogram of the time to first packet, by upper bounds in nanoseconds."""
    return by_bound(bench.store.first_packets.counts[next(iter(bench.store.plan.installed[name])).service])


@pytest.mark.parametrize("seconds", [0.00005, 0.001, 0.9, 1.1, 17])
def test_the_time_to_first_packet_is_in_its_step(bench: Bench, net: Net, seconds: float) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    began = time.monotonic()
    bench.ingress(frame(net, net.client, net.vip, syn(40000)))
    bench.age(net.family, started=round(seconds * 1e9) >> KTIME_SHIFT)
    answer(bench, net, 40000)
    longest = seconds + time.monotonic() - began
    answer(bench, net, 40000)  # repeated
    ((bound, count),) = waited(bench).items()
    assert count == 1
    step = BOUNDS.index(bound)
    assert BOUNDS[step] / 1e9 > seconds - 2e-6
    assert BOUNDS[step - 1] / 1e9 <= longest


def test_a_client_that_is_sent_to_another_backend_has_waited_since_its_first_syn(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(backend, 8080) for backend in net.backends[:2]]))
    _, out = bench.ingress(frame(net, net.client, net.vip, syn(40000)))
    silent = read(out).dst
    bench.age(net.family, started=moments(HZ))
    _, out = bench.ingress(frame(net, net.client, net.vip, syn(40000)))
    assert read(out).dst != silent
    bench.egress(frame(net, read(out).dst, net.client, segment(8080, 40000, "SA", 1, 1001), from_backend=True))
    ((bound, count),) = waited(bench).items()
    assert count == 1
    assert bound > 1e9
    assert bench.maps.view("traffic")["connect_ns"].sum() < 1e9  # that is no time of the backend's


def test_another_connection_from_a_port_waits_from_its_own_syn(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(backend, 8080) for backend in net.backends[:2]]))
    bench.ingress(frame(net, net.client, net.vip, syn(40000)))
    bench.age(net.family, started=moments(20 * HZ))
    _, out = bench.ingress(frame(net, net.client, net.vip, syn(40000, seq=77_000)))
    bench.egress(frame(net, read(out).dst, net.client, segment(8080, 40000, "SA", 1, 77_001), from_backend=True))
    ((bound, count),) = waited(bench).items()
    assert (count, bound < 1e9) == (1, True)


def test_of_some_conversations_the_first_answer_is_timed_once_and_counts_for_all(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 53, [(net.backends[0], 5353)], name="kube-system/dns:dns", protocol=Protocol.UDP))
    ports = range(40000, 40128)
    for port in ports:
        bench.open_udp(net, net.vip, sport=port, answer=False)
    _, flows = flow_arrays(bench.maps.maps[f"half_open{net.family}"], net.family)
    timed = np.count_nonzero(flows["ack"])
    assert len(ports) / 8 < timed < len(ports) / 2
    bench.age(net.family, ack=moments(HZ))
    for _ in range(2):
        for port in ports:
            bench.open_udp(net, net.vip, sport=port)
    counts = waited(bench, "kube-system/dns")
    assert (sum(counts.values()), min(counts) > 1e9) == (4 * timed, True)


def test_former_services_leave_their_first_packets_to_all_others(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    bench.open_tcp(net, net.vip)
    number = next(iter(bench.store.plan.installed["default/web"])).service
    assert bench.store.first_packets.counts[number].sum() == 1
    bench.serve()
    bench.forget_flows()
    bench.settle()
    counts = bench.store.first_packets.counts
    assert not counts[number].any()
    assert counts[0].sum() == 1
