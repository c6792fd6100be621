"""Events of packets that are dropped, rejected or traced, and the names of their reasons."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_proxy.dataplane.kernel.bpf import Ring
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.reasons import WORDS, kind_of
from hybrid_proxy.dataplane.modes.ebpf.views.events import Journal
from hybrid_proxy.dataplane.table import WhenEmpty

from .kit import DROP, HZ, NETS, REDIRECT, Bench, Net, cpus, datagram, frame, moments, read, segment, service, syn

ROOT = Path(__file__).parents[2]
COUNTERS = {n.removeprefix("COUNT_").lower() for n in layout.abi_constants() if n.startswith("COUNT_")}
BURST = 10


@pytest.fixture(scope="module")
def loud() -> Iterator[Bench]:
    """Programs that emit events."""
    made = Bench(event_burst=BURST)
    yield made
    made.close()


@pytest.fixture
def events(loud: Bench) -> Iterator[EventReader]:
    loud.reset()
    loud.maps.maps["event_budget"].update(bytes(4), bytes(8 * cpus()))
    reader = EventReader(loud)
    reader.rows()  # of former tests
    yield reader
    reader.ring.close()


class EventReader:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.raw: list[bytes] = []
        self.ring = Ring(bench.maps.maps["events"], self.raw.append)
        self.journal = Journal()

    def rows(self) -> list[dict[str, Any]]:
        self.ring.poll(0)
        installed = [known for entries in self.bench.store.plan.installed.values() for known in entries]
        names = {known.service: known.entry.name for known in installed}
        last = self.journal.last
        self.journal.add(self.raw, names, self.bench.store.addresses, self.bench.store.backends)
        self.raw.clear()
        return self.journal.rows(last)


def socket(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def test_a_drop_event_has_its_tuple_reason_and_service(events: EventReader, net: Net) -> None:
    events.bench.serve(service(net.vip, 80, [], when_empty=WhenEmpty.DROP))
    assert events.bench.ingress(frame(net, net.client, net.vip, syn(41234)), ifindex=1)[0] == DROP
    (row,) = events.rows()
    wanted = {
        "what": "drop", "reason": "drop_empty", "service": "default/web:http", "protocol": "TCP",
        "source": socket(net.client, 41234), "destination": socket(net.vip, 80), "backend": None,
        "where": "from a pod", "interface": "lo", "flags": "SYN",
    }  # fmt: skip
    assert {key: getattr(row, key) for key in wanted} == wanted


def test_an_event_of_a_rejected_port_names_the_service_of_the_address(events: EventReader, net: Net) -> None:
    events.bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    assert events.bench.ingress(frame(net, net.client, net.vip, syn(dport=81)))[0] == REDIRECT
    (row,) = events.rows()
    assert (row.what, row.reason, row.service) == ("refuse", "reject_no_port", "default/web")
    assert row.destination == socket(net.vip, 81)


def test_a_backend_that_refuses_causes_an_event(events: EventReader, net: Net) -> None:
    events.bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    there = read(events.bench.ingress(frame(net, net.client, net.vip, syn(41234)))[1])
    back = frame(net, there.dst, there.src, segment(8080, 41234, "RA", 0, 1001), from_backend=True)
    events.bench.egress(back)
    events.bench.egress(back)  # a copy says nothing new
    (row,) = events.rows()
    assert (row.what, row.reason, row.service) == ("fail", "backend_refused", "default/web:http")
    assert (row.backend, row.destination) == (socket(net.backends[0], 8080), socket(net.vip, 80))
    assert row.flags == "RST ACK"
    # The client's way, and where the reply was.
    assert (row.source, row.where) == (socket(net.client, 41234), "reply, to a pod")


def test_a_backend_that_does_not_answer_causes_an_event(events: EventReader, net: Net) -> None:
    events.bench.serve(service(net.vip, 80, [(address, 8080) for address in net.backends[:2]]))
    first = read(events.bench.ingress(frame(net, net.client, net.vip, syn()))[1])
    events.bench.age(net.family, seen=HZ, started=moments(HZ))
    events.bench.ingress(frame(net, net.client, net.vip, syn()))
    (row,) = events.rows()
    assert (row.what, row.reason, row.service) == ("fail", "backend_unanswered", "default/web:http")
    assert (row.backend, row.destination) == (socket(first.dst, 8080), socket(net.vip, 80))


def test_a_full_table_causes_an_event(net: Net) -> None:
    from hybrid_proxy.dataplane.mode import Options
    from hybrid_proxy.dataplane.options import EbpfOptions, Limits

    options = Options(ebpf=EbpfOptions(limits=Limits(services=64, backends=256, slots=512, flows=64)))
    small = Bench(options, event_burst=1000, max_half_open=1 << 20)
    try:
        small.reset()
        small.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
        reader = EventReader(small)
        for sport in range(40000, 40200):
            small.ingress(frame(net, net.client, net.vip, syn(sport)))
        assert small.count("flow_full") > 0
        full = [row for row in reader.rows() if row.reason == "flow_full"]
        assert full
        assert {(row.what, row.service) for row in full} == {("note", "default/web:http")}
        reader.ring.close()
    finally:
        small.close()


def test_events_are_limited_to_the_burst_of_each_cpu(events: EventReader, net: Net) -> None:
    events.bench.serve(service(net.vip, 80, [], when_empty=WhenEmpty.DROP))
    start = time.monotonic()
    for sport in range(40000, 40200):
        events.bench.ingress(frame(net, net.client, net.vip, syn(sport)))
    seconds = 2 + int(time.monotonic() - start)  # that began meanwhile, or were under way
    assert events.bench.count("drop_empty") == 200
    assert 1 <= len(events.rows()) <= seconds * BURST * cpus()


def test_without_a_burst_there_are_no_events(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [], when_empty=WhenEmpty.DROP))
    reader = EventReader(bench)
    bench.ingress(frame(net, net.client, net.vip, syn()))
    assert reader.rows() == []
    reader.ring.close()


def trace(bench: Bench, service_id: int = 0, client: str = "") -> None:
    words = layout.address_words([client])[0] if client else 0
    bench.node(trace_services=[service_id, 0, 0, 0], trace_client=words, trace=1)


def test_a_trace_has_an_event_for_each_decision(events: EventReader, net: Net) -> None:
    bench = events.bench
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    known = next(iter(bench.store.plan.installed["default/web"]))
    trace(bench, known.service)
    bench.open_tcp(net, net.vip)
    rows = events.rows()
    assert [row.reason for row in rows] == ["new_flow", "reply", "dnat"]
    assert {row.what for row in rows} == {"trace"}
    assert {row.backend for row in rows} == {socket(net.backends[0], 8080)}
    assert {row.service for row in rows} == {"default/web:http"}
    assert rows[1].where == "to a pod"


def test_a_trace_is_of_one_service_or_client(events: EventReader, net: Net) -> None:
    bench = events.bench
    other = net.backends[9]
    bench.serve(
        service(net.vip, 80, [(net.backends[0], 8080)]),
        service(net.vip2, 80, [(net.backends[1], 8080)], name="default/other:http"),
    )
    known = next(iter(bench.store.plan.installed["default/other"]))
    trace(bench, known.service)
    bench.open_tcp(net, net.vip)
    assert events.rows() == []
    trace(bench, 0, other)
    bench.open_tcp(net, net.vip, sport=40001)
    assert events.rows() == []
    bench.open_tcp(net, net.vip, sport=40002, client=other)
    assert {row.reason for row in events.rows()} == {"new_flow", "reply", "dnat"}


def test_packets_of_known_flows_leave_room_for_others(events: EventReader, net: Net) -> None:
    bench = events.bench
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    bench.open_tcp(net, net.vip)
    trace(bench)
    for _ in range(10 * BURST):
        bench.ingress(frame(net, net.client, net.vip, segment(40000, 80, "A")))
    routine = events.rows()
    assert {row.reason for row in routine} <= {"dnat", "fast"}
    assert len(routine) <= 2 * (BURST // 2) * cpus()
    bench.ingress(frame(net, net.client, net.vip, datagram(dport=81)))
    assert [row.reason for row in events.rows()] == ["reject_no_port"]


def test_the_journal_keeps_a_thousand_and_numbers_them(events: EventReader) -> None:
    net = NETS[4]
    events.bench.serve(service(net.vip, 80, [], when_empty=WhenEmpty.DROP))
    events.bench.ingress(frame(net, net.client, net.vip, syn()))
    events.ring.poll(0)
    raw = list(events.raw) * 1500
    events.journal.add(raw, {}, dict, events.bench.store.backends)
    rows = events.journal.rows(0)
    assert [row.number for row in rows] == list(range(501, 1501))
    assert events.journal.rows(1499) == rows[-1:]


def test_the_log_has_one_line_for_many_drops(events: EventReader, caplog: pytest.LogCaptureFixture) -> None:
    net = NETS[4]
    events.bench.serve(service(net.vip, 80, [], when_empty=WhenEmpty.DROP))
    for sport in range(40000, 40005):
        events.bench.ingress(frame(net, net.client, net.vip, syn(sport)))
    seen = len(events.rows())
    events.journal.log_drops()
    events.journal.log_drops()
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{seen} x {WORDS['drop_empty']} (default/web:http)" in line


def test_drops_that_go_on_are_logged_ever_less_often_with_their_number(
    events: EventReader, caplog: pytest.LogCaptureFixture
) -> None:
    net, said = NETS[4], []
    clock = iter(times := [*range(0, 32, 2), 4000])
    events.journal = Journal(lambda: 1000.0 + next(clock))
    events.bench.serve(service(net.vip, 80, [], when_empty=WhenEmpty.DROP))
    for second in times:
        events.bench.maps.maps["event_budget"].update(bytes(4), bytes(8 * cpus()))
        events.bench.ingress(frame(net, net.client, net.vip, syn()))
        assert len(events.rows()) == 1
        events.journal.log_drops()
        said += [(second, record.getMessage().partition(f" {WORDS['drop_empty']}")[0]) for record in caplog.records]
        caplog.clear()
    assert dict(said) == {
        0: "dropped: 1 x", 2: "dropped in 2 s: 1 x", 6: "dropped in 4 s: 2 x", 14: "dropped in 8 s: 4 x",
        30: "dropped in 16 s: 8 x", 4000: "dropped: 1 x",
    }  # fmt: skip


# --- words


def test_every_counter_has_words_and_a_line_in_the_docs() -> None:
    assert set(WORDS) == COUNTERS
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/counters.md").read_text(), re.MULTILINE)
    wanted = COUNTERS | {"connections_reset"}  # which the agent counts itself
    assert sorted(rows) == sorted(wanted), f"docs/counters.md has a row for each: {wanted.symmetric_difference(rows)}"


def test_every_drop_in_the_programs_has_a_reason_of_its_own() -> None:
    """Each name stands at one place, but for those of one reason that several hooks or families share."""
    text = "".join(path.read_text() for path in sorted((ROOT / "bpf").glob("*.h")))
    drops = re.findall(r"drop\(space, (COUNT_\w+)\)", text)
    assert drops
    assert all(kind_of(name.removeprefix("COUNT_").lower()) == "drop" for name in drops)
    named = (
        set(drops) | set(re.findall(r"why = .*?(COUNT_DROP_\w+)", text)) | set(re.findall(r": (COUNT_DROP_\w+);", text))
    )
    assert named == {f"COUNT_{name.upper()}" for name in COUNTERS if name.startswith("drop_")}
