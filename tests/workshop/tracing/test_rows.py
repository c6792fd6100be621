"""The pure parts: histograms, names, one flow out of many events."""

from __future__ import annotations

import itertools

import pytest

from hybrid_proxy.dataplane.reports import BackendRow, ServiceRow
from hybrid_proxy.workshop.tracing import rows
from hybrid_proxy.workshop.tracing.rows import Event
from hybrid_proxy.workshop.tracing.targets import Place, mapped, of_services, place_text
from hybrid_proxy.workshop.tracing.text import (
    DROP,
    FIELDS,
    RECEIVE,
    SOCKET,
    TRACEPOINTS,
    TRANSMIT,
    View,
    entries,
    program,
)

HOME, AWAY, OTHER = 1, 2, 3


def slot_of(ns: int) -> int:
    """As packets.c does it."""
    if ns < 4:
        return ns
    octave = ns.bit_length() - 1
    return octave * 4 + (ns >> (octave - 2) & 3)


def test_slots_have_no_gaps_and_hold_what_they_say() -> None:
    for ns in (*range(5000), 10**6, 10**9, 2**40 + 1):
        low, high = rows.bounds(slot_of(ns))
        assert low <= ns < high
        assert high - low <= max(1, ns // 4)
    edges = [rows.bounds(slot) for slot in sorted({slot_of(ns) for ns in range(4096)})]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))


def test_quantiles_are_the_upper_bounds_of_slots() -> None:
    histogram = {slot_of(100): 98, slot_of(1000): 1, slot_of(100_000): 1}
    assert rows.quantile(histogram, 0.5) == rows.bounds(slot_of(100))[1]
    assert rows.quantile(histogram, 0.99) == rows.bounds(slot_of(1000))[1]
    assert rows.quantile(histogram, 1.0) == rows.bounds(slot_of(100_000))[1]
    assert rows.quantile({}, 0.5) == 0


def event(ns: int, packet: int, point: int, netns: int, ends: tuple[str, str], sequence: int = 1, **more: int) -> Event:
    fields = {"began": 0, "way": 0, "service": 0, "protocol": 6, "flags": 2, "length": 60, "more": 0} | more
    return Event(
        ns, packet, point, netns, fields["began"], "eth0", fields["way"], fields["service"], *ends,
        fields["protocol"], sequence, fields["flags"], fields["length"], fields["more"],
    )  # fmt: skip


NODE = rows.Places(HOME, {AWAY: ("10.77.1.11", "fd77:1::11")})
SERVICE, BACKEND = ("c:1", "vip:80"), ("c:1", "pod:8080")
ANSWER = ("pod:8080", "c:1")


def test_packets_of_another_node_with_the_same_addresses_are_not_ours() -> None:
    events = [
        event(10, 7, TRANSMIT, AWAY, SERVICE),
        event(11, 8, TRANSMIT, AWAY, SERVICE),
        event(20, 7, RECEIVE, HOME, SERVICE),
        event(21, 8, RECEIVE, OTHER, SERVICE),
        event(30, 7, TRANSMIT, HOME, BACKEND),
    ]
    (way,) = rows.ours(events, HOME)
    assert [each.ns for each in way] == [10, 20, 30]


def test_an_address_of_a_packet_that_is_used_again_is_another_packet() -> None:
    """Even if both have the same numbers, as all resets of SYNs have."""
    resets = [("pod:8080", "c:1"), ("pod:8080", "c:2")]
    events = [event(10 * at, 7, RECEIVE, HOME, ends, 0, began=10 * at, flags=20) for at, ends in enumerate(resets, 1)]
    assert rows.ours([*events, event(30, 7, SOCKET, AWAY, resets[1], 0, began=20)], HOME) == [
        events[:1], [events[1], event(30, 7, SOCKET, AWAY, resets[1], 0, began=20)],
    ]  # fmt: skip


def test_one_flow_is_both_directions_and_nobody_elses() -> None:
    ways = [
        [event(10, 1, RECEIVE, HOME, SERVICE), event(11, 1, TRANSMIT, HOME, BACKEND)],
        [event(12, 2, RECEIVE, HOME, ("c:2", "vip:80"))],
        [event(13, 3, RECEIVE, HOME, ANSWER, way=1, flags=17)],
    ]
    flow = rows.one_flow(ways)
    assert [way[0].packet for way in flow] == [1, 3]
    assert not rows.is_closed(flow)
    assert rows.is_closed([*flow, [event(14, 4, RECEIVE, HOME, SERVICE, flags=17)]])
    assert rows.is_closed([[event(14, 4, RECEIVE, HOME, SERVICE, flags=20)]])


def test_a_connection_that_begins_is_followed_rather_than_one_that_was_open() -> None:
    opened = [event(10, 1, RECEIVE, HOME, SERVICE, flags=16)]
    new = [event(12, 2, RECEIVE, HOME, ("c:2", "vip:80"))]
    accepted = [event(13, 3, RECEIVE, HOME, ("vip:80", "c:3"), flags=18)]  # of one that began before
    assert rows.one_flow([opened, accepted, new]) == [new]
    assert rows.one_flow([opened, accepted]) == [opened]


def test_a_flow_begins_with_what_its_client_sent() -> None:
    """Not with a datagram to another client, whose request came before the measurement, nor before its own SYN."""
    late = [event(5, 1, RECEIVE, HOME, ("pod:53", "c:9"), way=1, protocol=17)]
    asked = [event(10, 2, RECEIVE, HOME, ("c:1", "vip:53"), protocol=17)]
    assert rows.one_flow([late, asked]) == [asked]
    before = [event(20, 3, RECEIVE, HOME, SERVICE, flags=17)]  # of a connection that had the same port
    syn = [event(30, 4, RECEIVE, HOME, SERVICE)]
    assert rows.one_flow([before, syn]) == [syn]
    assert rows.one_flow([]) == []


def test_an_answer_to_the_client_is_of_its_flow_if_nothing_shows_its_backend_before() -> None:
    asked = [event(10, 1, RECEIVE, HOME, ("c:1", "vip:53"), protocol=17)]
    answered, other = (
        [event(20, 2, RECEIVE, HOME, ("pod:53", client), way=1, protocol=17)] for client in ("c:1", "c:2")
    )
    assert rows.one_flow([asked, answered, other]) == [asked, answered]


def test_a_drop_has_its_reason_and_function() -> None:
    way = [
        event(1000, 1, RECEIVE, HOME, SERVICE),
        event(3500, 1, DROP, HOME, BACKEND, more=8 << 48 | 0xABC),
    ]
    points = rows.flow_rows([way], NODE, ["default/web:http"], [], {8: "NETFILTER_DROP"}, {0xABC: "nf_hook_slow"})
    assert (points[1]["us"], points[1]["reason"], points[1]["function"]) == (2.5, "NETFILTER_DROP", "nf_hook_slow")
    assert points[0]["flags"] == "SYN"


def test_a_socket_without_a_namespace_is_that_of_the_pod_with_the_destination() -> None:
    ends = {"10.77.1.11:8080": "pod 10.77.1.11", "192.0.2.7:80": "another namespace"}
    ways = [[event(1000, 1, SOCKET, 0, ("192.0.2.1:1", end))] for end in ends]
    assert [row["where"] for row in rows.flow_rows(ways, NODE, ["a/b"], [], {}, {})] == list(ends.values())
    home = [event(1000, 1, RECEIVE, HOME, ("c:1", "192.0.2.7:80")), event(1001, 1, SOCKET, 0, ("c:1", "192.0.2.7:80"))]
    assert [row["where"] for row in rows.flow_rows([home], NODE, ["a/b"], [], {}, {})] == ["node", "node"]


@pytest.mark.parametrize(("backends", "chosen"), [(["pod:8080"], "pod:8080"), ([], None)])
def test_a_backend_is_chosen_where_the_destination_becomes_one(backends: list[str], chosen: str | None) -> None:
    """Another program's translation leads elsewhere."""
    way = [event(10, 1, RECEIVE, HOME, SERVICE), *(event(at, 1, TRANSMIT, HOME, BACKEND) for at in (11, 12))]
    found = rows.flow_rows([way], NODE, ["default/web:http"], backends, {}, {})
    assert [row["backend"] for row in found] == [None, chosen, None]


@pytest.mark.parametrize(
    ("netns", "seen", "name"),
    [
        (HOME, "10.77.1.11", "node"), (AWAY, "10.77.1.11", "pod 10.77.1.11"), (AWAY, "fd77:1::11", "pod fd77:1::11"),
        (AWAY, "127.0.0.1", "pod 10.77.1.11"), (OTHER, "10.77.1.11", None),
    ],
)  # fmt: skip
def test_a_namespace_has_the_name_of_its_pod(netns: int, seen: str, name: str | None) -> None:
    assert NODE.named(netns, "192.0.2.1", seen) == name


def test_drops_of_other_hosts_and_what_is_no_loss_have_no_row() -> None:
    to = 1, mapped("10.77.1.11"), 8080, 6  # function, address, port and protocol
    counts = {(0, 0, reason, netns, *to): 10 * reason + netns for reason in (2, 5) for netns in (HOME, AWAY, OTHER)}
    found = rows.drop_rows(counts, ["a/b"], NODE, {2: "NETFILTER_DROP", 5: "QUEUE_PURGE"}, hex)
    assert [(row["where"], row["count"]) for row in found] == [("pod 10.77.1.11", 22), ("node", 21)]


def test_answers_by_service_and_backend() -> None:
    pod, none = mapped("10.77.1.11"), bytes(16)
    counts = {
        (0, rows.ASKED, none, 0, 0, 0): 10,
        (0, rows.ANSWERED, pod, 8080, 6, slot_of(2000)): 7,
        (0, rows.REFUSED, pod, 8080, 6, 0): 1,
        (0, rows.REPEATED, none, 0, 0, 0): 2,
    }
    silent = mapped("10.77.1.12")
    waits = {(0, silent, 8080, 6): 2}
    sums = {(0, rows.ANSWERED, pod, 8080, 6): (7 * 2000, 2000)}
    (row,) = rows.answer_rows(counts, sums, ["default/web:http"], waits)
    assert [row[name] for name in ("connections", "answered", "refused", "unanswered", "syn_repeated")] == [
        10,
        7,
        1,
        2,
        2,
    ]
    names = ("backend", "count", "refused", "unanswered", "mean_ns")
    assert [tuple(one[name] for name in names) for one in row["backends"]] == [
        ("10.77.1.11:8080", 7, 1, 0, 2000), ("10.77.1.12:8080", 0, 0, 2, 0),
    ]  # fmt: skip


ROWS = [
    ServiceRow(
        name="default/web:http",
        protocol="TCP",
        frontends=["10.96.0.10:80", "[fd96::10]:80", "node port 30080"],
        backends=1,
    ),
    ServiceRow(name="default/dns:dns", protocol="UDP", frontends=["10.96.0.53:53"], backends=0),
]
BACKENDS = [BackendRow(service="default/web:http", address="[fd77:1::11]:8080", protocol="TCP", used=True)]


def test_targets_are_all_frontends_and_node_ports_at_the_nodes_addresses() -> None:
    targets = of_services(ROWS, BACKENDS, ["192.168.77.2", "fd77::2"])
    assert targets.names == ("default/web:http", "default/dns:dns")
    assert {place_text(place.address, place.port): number for place, number in targets.places.items()} == {
        "10.96.0.10:80": 0, "[fd96::10]:80": 0, "192.168.77.2:30080": 0, "[fd77::2]:30080": 0, "10.96.0.53:53": 1,
    }  # fmt: skip
    assert targets.backends == {Place(mapped("fd77:1::11"), 8080, 6): 0}


def test_a_node_port_is_at_the_addresses_of_the_node() -> None:
    row = ServiceRow(name="default/web:http", protocol="TCP", frontends=["node port 30080"], backends=0)
    (place,) = of_services([row], [], ["192.168.77.2"]).places
    assert place == Place(mapped("192.168.77.2"), 30080, 6)


def test_one_destination() -> None:
    named = of_services(ROWS, BACKENDS, [], to=Place(mapped("10.96.0.10"), 80, 6))
    assert (named.names, list(named.places.values())) == (("default/web:http",), [0])
    assert of_services(ROWS, BACKENDS, [], to=Place(mapped("10.0.0.1"), 80, 6)).names == ("10.0.0.1:80",)
    twin = ServiceRow(name="default/twin:http", protocol="TCP", frontends=["10.96.0.11:80"], backends=1)
    shared = [
        *BACKENDS,
        BackendRow(service="default/twin:http", address="[fd77:1::11]:8080", protocol="TCP", used=True),
    ]
    for address, name in (("10.96.0.10", "default/web:http"), ("10.96.0.11", "default/twin:http")):
        found = of_services([*ROWS, twin], shared, [], to=Place(mapped(address), 80, 6))
        assert (found.names, list(found.backends.values())) == ((name,), [0]), "a backend of two services"
    to = Place(mapped("fd77:1::11"), 8080, 6)
    backend = of_services(ROWS, BACKENDS, [], to=to)
    assert backend.names == ("[fd77:1::11]:8080",)
    assert (backend.places, backend.backends) == ({to: 0}, {to: 0})  # its connections are shown as its own


def test_the_text_has_an_entry_for_each_tracepoint() -> None:
    text = program(View.FOLLOW, dict.fromkeys(FIELDS, 8), "/* programs */")
    names = [entry.function for entry in entries(View.FOLLOW)]
    assert len(set(names)) == len(names) == len(TRACEPOINTS) + 3
    assert all(text.count(f"int {name}(void *ctx)") == 1 for name in names)
    assert "#define FOLLOW 1" in text
