"""What is remembered of changes: rows, their folding, and the file that outlives an agent."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
from msgspec.structs import replace

from hybrid_proxy.controller import cli
from hybrid_proxy.controller.agent.history import KEPT, LARGEST, MOST_ROWS, History
from hybrid_proxy.controller.commands.changes import columns
from hybrid_proxy.controller.commands.columns import Screen
from hybrid_proxy.controller.commands.columns import table as table_of
from hybrid_proxy.controller.commands.names import UnknownName
from hybrid_proxy.controller.commands.views import why_unknown
from hybrid_proxy.controller.kubernetes.model import EndpointPort, Problem, Service, ServicePort, Upserted
from hybrid_proxy.controller.semantics.cluster import Cluster
from hybrid_proxy.controller.semantics.history import (
    ADDRESSES,
    DELETED,
    FLAPS,
    LEFT_OUT,
    NAMED,
    NOT_SERVED,
    ChangeRow,
    change_of,
    folded,
    last_known,
)
from hybrid_proxy.controller.serving.memory import changes_path, read_changes
from hybrid_proxy.controller.serving.protocol import Gone
from hybrid_proxy.dataplane.firewall_rules import Rule, Taken
from hybrid_proxy.dataplane.reports import clock
from hybrid_proxy.dataplane.shards import Shards
from hybrid_proxy.dataplane.table import (
    Backend,
    BackendSet,
    Entry,
    Frontend,
    Kind,
    NodeNetwork,
    Protocol,
    ServiceTable,
)
from tests.semantics import make

ETH0 = {"eth0": True}
NAME, NOW = "shop/web", 1_800_000_000.0
A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"
FLUSHES = 3 * LARGEST // 20_000
HERE, THERE = (f"on {node} node" for node in ("this", "another"))
NODE_PORT = Frontend(Kind.NODE_PORT, None, 30080, 0, 0)


def entries(
    *ends: str, name: str = NAME, port: int = 8080, fronts: tuple[Frontend, ...] = (), **fields: object
) -> tuple[Entry, ...]:
    those = tuple(Backend(end, port) for end in ends)
    front = Frontend(Kind.CLUSTER_IP, "10.96.0.1", 80, 0, 0)
    return (
        Entry(f"{name}:http", 4, Protocol.TCP, (front, *fronts), (BackendSet(those),), those, **fields),  # type: ignore[arg-type]
    )


def moved(*, local: bool) -> tuple[Entry, ...]:
    """An endpoint of a Service whose policy is Local, on this node or another one."""
    return (replace(entries(*[A] * local)[0], serving=(Backend(A, 8080, local=local),)),)


# fmt: off
DIFFERENCES = [
    pytest.param(entries(A), entries(A, B), [("endpoints", 1, f"ready: {B}")], id="one more"),
    pytest.param(entries(A, B), entries(A), [("endpoints", 1, "removed: 10.0.0.2")], id="one less"),
    pytest.param(entries(A, B), entries(C),
                 [("endpoints", 2, f"removed: {A}, {B}"), ("endpoints", 1, f"ready: {C}")], id="others"),
    pytest.param((), entries(A), [("service", 1, "Service created"), ("endpoints", 1, "ready: 10.0.0.1")], id="new"),
    pytest.param(entries(A), (), [("endpoints", 1, f"removed: {A}"), ("service", 1, "not served now")], id="less"),
    pytest.param(entries(A), entries(A, fronts=(NODE_PORT,)),
                 [("service", 1, "nodePort node port 30080/TCP added")], id="a node port"),
    pytest.param(entries(A), entries(A, algorithm="maglev"),
                 [("service", 1, "algorithm: random → maglev")], id="the default algorithm"),
    pytest.param(entries(A), entries(A, present=((A, 8080),)),
                 [("endpoints", 1, "conditions of its endpoints changed")], id="rest"),
    pytest.param(moved(local=True), moved(local=False),
                 [("endpoints", 1, f"{LEFT_OUT}: {A}")], id="left out by a policy, on another node"),
    pytest.param((), moved(local=False),
                 [("service", 1, "Service created"), ("endpoints", 1, f"{LEFT_OUT}: {A}")], id="new there"),
    pytest.param(moved(local=False), entries(), [("endpoints", 1, f"removed: {A}")], id="gone there"),
    pytest.param(entries(A), (replace(entries(A)[0], serving=(Backend(A, 8080, local=True),)),),
                 [("endpoints", 1, f"{A} of {NAME}:http: {THERE} → {HERE}")], id="moved"),
    pytest.param(entries(A), (replace(entries(A, algorithm="maglev")[0], serving=(Backend(A, 8080, local=True),)),),
                 [("service", 1, "algorithm: random → maglev"),
                  ("endpoints", 1, f"{A} of {NAME}:http: {THERE} → {HERE}")], id="moved, and the Service changed"),
    pytest.param(entries(A, B), entries(A, B, port=8081),
                 [("endpoints", 1, "targetPort 8080 → 8081")], id="another port"),
    pytest.param(entries(A), entries(B, port=8081),
                 [("endpoints", 1, "targetPort 8080 → 8081"), ("endpoints", 1, f"removed: {A}"),
                  ("endpoints", 1, f"ready: {B}")], id="others, another port"),
]
# fmt: on


@pytest.mark.parametrize(("before", "after", "told"), DIFFERENCES)
def test_rows_tell_what_distinguishes_two_tables(
    before: tuple[Entry, ...], after: tuple[Entry, ...], told: list[tuple[str, int, str]]
) -> None:
    rows = change_of(NAME, before, after, NOW, "")
    assert [(row.kind, row.count, row.text) for row in rows] == told
    assert {row.by for row in rows} <= {"Service", "EndpointSlice"}


def test_an_endpoint_that_its_slice_still_names_is_not_ready() -> None:
    rows = change_of(NAME, entries(A, B, C), entries(A), NOW, "", there=lambda: {A, B})
    assert [row.text for row in rows] == [f"not ready: {B}", f"removed: {C}"]


@pytest.mark.parametrize("twin", [False, True], ids=["its only port", "another port has these endpoints"])
def test_a_port_whose_slice_names_another_protocol_is_told_with_both(twin: bool) -> None:
    """The endpoint is still there: it is neither gone nor unready."""
    web = make.service(ports=(make.HTTP, *[ServicePort("udp", Protocol.UDP, 81)] * twin))
    before, after = (
        make.decide(
            web,
            make.endpoint_slice(
                make.ep(A), ports=[EndpointPort("http", kind, 8080), EndpointPort("udp", Protocol.UDP, 8081)]
            ),
        )
        for kind in (Protocol.TCP, Protocol.UDP)
    )
    rows = change_of("default/web", before, after, NOW, "", there=lambda: {A})
    lost = "no EndpointSlice of the service has a TCP port named 'http'; they have 'http' (UDP), 'udp' (UDP)"
    assert [row.text for row in rows] == [f"default/web:http: {lost}" + f": {A}" * (not twin)]


def test_a_service_that_is_created_again_and_again_flaps_also_without_endpoints() -> None:
    rows = []
    for number in range(FLAPS):
        rows += change_of(NAME, (), entries(), NOW + 2 * number, "", (None, service()))
        assert any(row.flapping for row in folded(rows)) is (number + 1 == FLAPS)
        rows += change_of(NAME, entries(), (), NOW + 2 * number + 1, "", (service(), None))
    assert [row.text.partition(" ")[0] for row in folded(rows)] == ["FLAPPING:", "Service"]


def service(**fields: object) -> Service:
    return Service("shop", "web", "NodePort", ("10.96.0.1",), ports=(ServicePort("http", Protocol.TCP, 80),), **fields)  # type: ignore[arg-type]


def applied(cluster: Cluster, *objects: Service) -> dict[str, tuple[Service, Service | None]]:
    for each in objects:
        cluster.apply(Upserted(each))
    return cluster.take_former()


def test_each_field_of_a_service_that_changed_is_a_row_with_both_values(tmp_path: Path) -> None:
    """Also one that changes no table; and of several writes in between, the first and the last value count."""
    path, cluster, other = tmp_path / "changes", Cluster("here"), service(external_ips=("192.0.2.9",))
    history, first = History(path), Shards[tuple[Entry, ...]]().replaced({NAME: entries(A)})
    history.programmed(table(1, first, frozenset({NAME})), "", applied(cluster, service()))
    changed = service(
        external_local=True, internal_local=True, affinity_seconds=60, traffic_distribution="PreferSameNode",
        external_ips=("192.0.2.1",),
    )  # fmt: skip
    changed = replace(changed, ports=(ServicePort("http", Protocol.TCP, 8080, 30080),))
    history.programmed(table(1, first, frozenset()), "", applied(cluster, other, changed))
    history.flush()
    assert [(row.service, row.kind, row.text, row.by) for row in folded(read_changes(path))] == [
        (NAME, "service", text, "Service")
        for text in (
            "port http: 80/TCP → 8080/TCP", "externalTrafficPolicy: Cluster → Local",
            "internalTrafficPolicy: Cluster → Local", "trafficDistribution: none → PreferSameNode",
            "sessionAffinity: None → ClientIP for 60 s", "externalIP 192.0.2.1 added", "nodePort http 30080 added",
        )
    ]  # fmt: skip


def test_rows_of_one_moment_stay_in_their_order_whatever_came_before(tmp_path: Path) -> None:
    path = tmp_path / "changes"
    history, made = History(path), Shards[tuple[Entry, ...]]()
    for number, ends in enumerate(((A, B), (A,), (A, B), (A,))):
        made = made.replaced({NAME: entries(*ends)})
        history.programmed(table(number + 1, made, frozenset({NAME})))
    history.flush()
    assert [row.text for row in folded(read_changes(path))] == [f"ready: {B}", f"removed: {B} (2 x)"]
    rows = [ChangeRow(first=at, last=at, kind="node", what=what) for at, what in ((0, "x"), (200, "y"), (200, "x"))]
    assert [row.what for row in folded(rows)] == ["x", "y", "x"]


def test_a_service_that_is_deleted_twice_in_a_second_is_deleted_in_the_end(tmp_path: Path) -> None:
    """The row of the first deletion began before what else the second one changed."""
    path, made, gone = tmp_path / "changes", service(), Shards[tuple[Entry, ...]]()
    history, there = History(path), gone.replaced({NAME: entries(A)})
    history.programmed(table(1, gone, frozenset()))
    for number, named in enumerate(((), (A,))):  # the slice goes first, and then the Service
        before = number * 2 + 2
        history.programmed(table(before, there, frozenset({NAME})))
        ended = table(before + 1, gone, frozenset({NAME}))
        history.programmed(ended, "", {NAME: (made, None)}, lambda _, named=named: named)
    history.flush()
    assert folded(read_changes(path))[-1].what == DELETED


def test_of_endpoints_in_one_row_the_newest_comes_first():
    """Who is there in the end: one is replaced by another, and put back."""
    ways = [("gone", B), ("ready", C), ("gone", C), ("ready", B)]
    rows = [ChangeRow(first=at, last=at, kind="endpoints", **{way: {pod: 1}}) for at, (way, pod) in enumerate(ways)]
    assert [row.text for row in folded(rows)] == [f"removed: {C}, {B}", f"ready: {B}; before that {C}, gone by now"]


def test_what_goes_on_for_hours_is_no_single_row() -> None:
    rows = [ChangeRow(first=at, last=at, kind="endpoints", service=NAME, gone={A: 1}) for at in range(0, 7200, 100)]
    found = folded(rows)
    assert [(row.count, row.last - row.first) for row in found] == 12 * [(6, 500)]
    assert folded(found) == found


def test_what_came_back_after_something_else_is_a_row_of_its_own() -> None:
    whats = ("up → down", "down → up", "up → down", "up → down")
    rows = [
        ChangeRow(first=at, last=at, kind="node", what=what) for at, what in zip((0, 9, 20, 30), whats, strict=True)
    ]
    assert [(row.what, row.count) for row in folded(rows)] == [("up → down", 1), ("down → up", 1), ("up → down", 2)]
    assert folded(folded(rows)) == folded(rows)


def test_an_unknown_name_is_answered_with_the_last_change_of_its_service(tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")
    history = History(changes_path(path))
    for service, what, by in (
        ("shop/web", DELETED, "Service"), ("shop/other", DELETED, "Service"), ("shop/own", NOT_SERVED, ADDRESSES),
    ):  # fmt: skip
        history.record("service", what, by, service)
    history.flush()
    for name in ("shop/web", "shop/web:http"):
        told = str(why_unknown(path, UnknownName("service", name, [])))
        assert re.fullmatch(rf'no service "{name}"; it was deleted \ds ago', told)
    told = str(why_unknown(path, UnknownName("service", "shop/own", [])))
    assert re.fullmatch(r'no service "shop/own"; its last change was \ds ago: not served now', told)
    assert str(why_unknown(path, UnknownName("service", "shop/wbe", [NAME]))).endswith(f"did you mean {NAME}?")


def replaced_one(path: Path, *, at_once: bool) -> list[ChangeRow]:
    """Endpoint B goes and comes back, and then A goes: all in one second of the agent, or apart."""
    if not at_once:
        ways = [("gone", B), ("ready", B), ("gone", A)]
        return [ChangeRow(first=at, last=at, kind="endpoints", **{way: {pod: 1}}) for at, (way, pod) in enumerate(ways)]  # type: ignore[arg-type]
    history, made = History(path), Shards[tuple[Entry, ...]]()
    for number, ends in enumerate(((A, B), (A,), (A, B), (B,))):
        made = made.replaced({NAME: entries(*ends)})
        history.programmed(table(number + 1, made, frozenset({NAME})))
    history.flush()
    return read_changes(path)


@pytest.mark.parametrize("at_once", [True, False])
def test_the_last_row_of_an_endpoint_says_what_came_last(tmp_path: Path, at_once: bool) -> None:
    rows = folded(replaced_one(tmp_path / "changes", at_once=at_once))
    assert [row.text for row in rows] == [f"ready: {B}", f"removed: {A}; before that {B}, back by now"]
    assert rows[-1].outdated == (B,)
    assert folded(rows) == rows
    at = rows[-1].last + 1
    back = ChangeRow(first=at, last=at, kind="endpoints", service=rows[0].service, by=rows[0].by, ready={A: 1})
    assert [row.text for row in folded([*rows, back])] == [f"removed: {A}, {B}", f"ready: {A}, {B}"]


def test_the_addresses_of_a_deleted_service_are_remembered_with_it() -> None:
    rows = change_of(NAME, entries(A, fronts=(NODE_PORT,)), (), NOW, "", (service(), None))
    assert rows[-1].text == "Service deleted: ClusterIP 10.96.0.1, nodePort 30080"
    assert rows[-1].count == 1
    assert last_known("10.96.0.1", rows, NOW + 6) == f"; it was the ClusterIP of {NAME}, deleted 6s ago"
    assert last_known("0.96.0.1", rows, NOW + 6) == ""
    assert last_known(NAME, rows, NOW + 6) == "; it was deleted 6s ago"


def toggles(times: int, seconds: float) -> Iterator[ChangeRow]:
    """An endpoint that is gone and ready again, so often, at this interval."""
    for number in range(times):
        pair = (entries(A, B), entries(A)) if number % 2 == 0 else (entries(A), entries(A, B))
        yield from change_of(NAME, *pair, NOW + number * seconds, "")


def rollout() -> Iterator[ChangeRow]:
    """Each of 20 endpoints is replaced by another one."""
    ends = [f"10.0.1.{number}" for number in range(40)]
    for number in range(20):
        pair = entries(*ends[number : number + 20]), entries(*ends[number + 1 : number + 21])
        yield from change_of(NAME, *pair, NOW + number, "")


def test_an_endpoint_that_comes_again_and_again_flaps_and_a_rollout_does_not() -> None:
    _, flaps = folded(toggles(24, 0.5))
    assert (flaps.flapping, flaps.often, flaps.ready) == (True, "12 in 11s", {B: 12})
    rolled = folded(rollout())
    assert [(row.flapping, row.count, len(row.ready or row.gone)) for row in rolled] == 2 * [(False, 20, NAMED)]


def test_a_service_that_is_made_and_deleted_in_turns_has_a_row_for_each() -> None:
    rows = []
    for number in range(4):
        rows += change_of(NAME, (), entries(A), NOW + 2 * number, "", (None, service()))
        rows += change_of(NAME, entries(A), (), NOW + 2 * number + 1, "", (service(), None))
    found = [(row.text, row.count) for row in folded(rows)]
    assert found == [
        ("FLAPPING: Service created", 4),
        (f"FLAPPING: ready: {A} (4 x)", 4),
        (f"removed: {A} (4 x)", 4),
        ("Service deleted: ClusterIP 10.96.0.1 (4 x)", 4),
    ]
    assert last_known(NAME, folded(rows), NOW + 8) == "; it was deleted 1s ago"


@pytest.mark.parametrize(("times", "seconds", "rows"), [(2 * FLAPS, 50.0, 2), (2 * FLAPS, 70.0, 2 * FLAPS)])
def test_only_what_happens_close_together_is_folded(times: int, seconds: float, rows: int) -> None:
    found = folded(toggles(times, seconds))
    assert len(found) == rows
    assert any(row.flapping for row in found) is (rows == 2)
    assert folded(found) == found


def test_a_cluster_ip_that_the_node_takes_is_its_own_doing_and_no_endpoint_goes(tmp_path: Path) -> None:
    path = tmp_path / "admin.changes"
    history, services = History(path), Shards[tuple[Entry, ...]]().replaced({NAME: entries(A)})
    history.programmed(table(1, services, frozenset({NAME})))
    left = replace(table(2, services.replaced({NAME: ()}), frozenset({NAME})), left_to_node={"10.96.0.1": NAME})
    history.programmed(left)
    history.programmed(table(3, services, frozenset({NAME})))
    history.flush()
    found = [(row.kind, row.text, row.by) for row in read_changes(path)]
    assert found == [("service", "not served now", ADDRESSES), ("service", "served now", ADDRESSES)]


def test_facts_of_the_node_that_changed_are_told_and_those_that_come_or_go_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    history = History(tmp_path / "admin.changes")
    for full, mtu in (("has room", "1500"), ("full", "1500"), ("full", "1400"), ("has room", "1400")):
        history.facts("node", {"table of conntrack": full})
        history.facts("links", {"MTU of eth0": mtu, f"link of {mtu}": "up"})
    history.flush()
    assert [(row.kind, row.text, row.by) for row in read_changes(tmp_path / "admin.changes")] == [
        ("node", "table of conntrack: has room → full", "the kernel"),
        ("node", "MTU of eth0: 1500 → 1400", "the kernel"),
        ("node", "table of conntrack: full → has room", "the kernel"),
    ]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "table of conntrack: has room → full"),
        ("INFO", "MTU of eth0: 1500 → 1400"),
        ("INFO", "table of conntrack: full → has room"),
    ]


def test_routes_of_pods_are_compared_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    history = History(tmp_path / "changes")
    for hosts in ("10.0.0.1 fd00::1", "fd00::1", "10.0.0.1 fd00::1"):
        history.facts("node", {"routes by veth2": hosts})
    history.flush()
    lines = ["route to 10.0.0.1 by veth2 removed", "route to 10.0.0.1 by veth2 added"]
    assert [row.text for row in read_changes(tmp_path / "changes")] == lines
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == list(
        zip(("WARNING", "INFO"), lines, strict=True)
    )


def test_addresses_that_went_and_came_are_told_each_and_the_log_has_a_line_for_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    history, path = History(tmp_path / "admin.changes"), tmp_path / "admin.changes"
    added = [f"ip address add 10.0.0.{number}/24 dev eth0" for number in range(5)]
    for held in (added, added[:1], added):
        history.held(frozenset(held), ETH0)
    history.flush()
    texts = [row.text for row in read_changes(path)]
    assert texts[0] == "address 10.0.0.1/24 dev eth0 is gone: `ip address add 10.0.0.1/24 dev eth0` puts it back"
    assert texts[4:] == [f"address 10.0.0.{number}/24 dev eth0 came" for number in range(1, 5)]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert caplog.records[1].getMessage().endswith("; address 10.0.0.3/24 dev eth0 came and 1 more")


def test_nat_of_others_comes_and_goes_and_what_it_counts_is_no_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history, path = History(tmp_path / "admin.changes"), tmp_path / "admin.changes"
    old, new = (Taken(NAME, "10.96.0.1", Rule("inet x", "c", (), f"dnat to {n}", 1, away=True)) for n in (1, 2))
    counted = replace(old, rule=replace(old.rule, packets=9))
    caplog.set_level(logging.INFO)
    for now in ([old], [counted], [counted, new], [new]):
        history.lasting("NAT", {str(each): each.service for each in now}, "came: ", "gone: ")
    history.flush()
    rows = read_changes(path)
    assert [(row.service, row.text) for row in rows] == [(NAME, f"came: {new}"), (NAME, f"gone: {old}")]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_default_route_is_lost_until_there_is_one_again(tmp_path: Path) -> None:
    history = History(tmp_path / "admin.changes")
    old, new = (f"ip route add ::/0 via fe80::{host} dev eth0" for host in (1, 2))
    other = "ip route add 10.0.0.0/8 via 10.1.0.1 dev eth0"
    steps = [([old, other], set()), ([new, other], set()), ([], {new}), ([other], {new}), ([old], set())]
    for held, lost in steps:
        history.held(frozenset(held), ETH0)
        assert history.lost == lost


def test_what_goes_with_a_link_that_is_down_has_one_cause_until_the_link_is_up(tmp_path: Path) -> None:
    history, path = History(tmp_path / "admin.changes"), tmp_path / "admin.changes"
    address, route = "ip address add 10.0.0.2/24 dev eth0", "ip route add 0.0.0.0/0 via 10.0.0.1 dev eth0"
    down = "eth0 is down, and what led by it is gone: `ip link set eth0 up`"
    steps = [
        ([address, route], True, [], []), ([address], False, [down], ["eth0"]), ([address], False, [], ["eth0"]),
        ([address], True, [f"route 0.0.0.0/0 via 10.0.0.1 dev eth0 is gone: `{route}` puts it back"], []),
    ]  # fmt: skip
    said = 0
    for held, up, texts, cut in steps:
        history.held(frozenset(held), {"eth0": up})
        history.flush()
        rows = read_changes(path) if path.exists() else []
        assert ([row.text for row in rows[said:]], history.cut) == (texts, cut)
        assert history.lost == (set() if up is False or route in held else {route})
        said = len(rows)


def test_an_address_is_lost_until_it_is_back(tmp_path: Path) -> None:
    history = History(tmp_path / "admin.changes")
    address, route = "ip address add 192.0.2.2/24 dev eth0", "ip route add 10.0.0.0/8 via 192.0.2.1 dev eth0"
    for held, lost in (([address, route], set()), ([], {address}), ([route], {address}), ([address, route], set())):
        history.held(frozenset(held), ETH0)
        assert history.lost_addresses == lost


@pytest.mark.parametrize("mistake", ["a Service's", "left to the node", "it came just now", "its link went with it"])
def test_nobody_is_told_to_put_a_mistake_back(tmp_path: Path, mistake: str) -> None:
    history, path = History(tmp_path / "admin.changes"), tmp_path / "admin.changes"
    served = Shards[tuple[Entry, ...]]().replaced({NAME: entries(A)} if mistake == "a Service's" else {})
    left = {"10.96.0.1": NAME} if mistake == "left to the node" else {}
    history.programmed(ServiceTable(served, NodeNetwork(), 1, 0, frozenset({NAME}), left_to_node=left))
    command = "ip address add 10.96.0.1/32 dev eth0"
    for held in [()] * (mistake == "it came just now") + [(command,), ()]:
        history.held(frozenset(held), {} if "link" in mistake else ETH0)
    history.flush()
    assert history.lost_addresses == set()
    assert [row.text for row in read_changes(path)][-1] == "address 10.96.0.1/32 dev eth0 is gone"


def test_a_file_that_can_be_read_again_is_not_one_that_is_deleted(tmp_path: Path) -> None:
    files = [tmp_path / "good.yaml", tmp_path / "gone.yaml"]
    files[0].touch()
    history = History(tmp_path / "admin.changes")
    history.problems(
        {("File", str(each)): Problem("File", str(each), f"{each}: no YAML") for each in files}, lambda *_: False
    )
    history.problems({}, lambda *_: False)
    history.flush()
    told = [row.text for row in read_changes(tmp_path / "admin.changes")][2:]
    assert sorted(told) == [f"File {files[1]} is deleted", f"File {files[0]} can be read again"]


def test_an_agent_that_was_killed_or_stopped_leaves_a_gap_that_the_next_one_knows(tmp_path: Path) -> None:
    path = tmp_path / "admin.changes"
    history = History(path)
    history.away(Gone(7, NOW - 60, NOW, exact=False, why="it was killed"))
    history.stood_still(7.0)
    history.flush()
    killed, stopped = (row.text for row in read_changes(path))
    assert clock(NOW) in killed
    assert "it was killed" in killed
    assert "stood still for 7 s" in stopped


@pytest.mark.parametrize(
    ("there", "end"), [(True, "is used whole again"), (False, "was refused, and is deleted or not served here")]
)
def test_objects_that_are_refused_are_remembered_until_they_are_not(
    tmp_path: Path, there: bool, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "admin.changes"
    history = History(path)
    slices = Problem("EndpointSlice", "shop/web-x2z4k", "EndpointSlice shop/web-x2z4k: 99999 is no port")
    file = Problem("File", "a.yaml", "a.yaml: line 4 is no YAML")
    for problems in ([slices, file], [slices, file], [file]):
        history.problems({(one.kind, one.key): one for one in problems}, lambda _, key: there)
    history.flush()
    assert [(row.kind, row.service, row.text, row.by) for row in read_changes(path)] == [
        ("service", NAME, f"refused: {slices.message}", "EndpointSlice"),
        ("source", "", f"refused: {file.message}", "File"),
        ("service", NAME, f"EndpointSlice shop/web-x2z4k {end}", "EndpointSlice"),
    ]
    assert [each.getMessage() for each in caplog.records] == [f"EndpointSlice shop/web-x2z4k {end}"]


def table(
    generation: int, services: Shards[tuple[Entry, ...]], changed: frozenset[str], **node: object
) -> ServiceTable:
    return ServiceTable(services, NodeNetwork(**node), generation, generation - 1, changed)  # type: ignore[arg-type]


def test_endpoints_that_did_not_serve_and_left_are_removed_and_a_deleted_service_is_called_so() -> None:
    idle = (replace(entries()[0], present=((A, 8080), (B, 8080))),)
    (row,) = change_of(NAME, idle, (replace(idle[0], present=()),), NOW, "")
    assert row.text == f"removed: {A}, {B}"
    old = Service("shop", "web", "ClusterIP", ("10.96.0.1",))
    for new, what in ((None, "Service deleted: ClusterIP 10.96.0.1"), (old, "not served now")):
        assert [each.text for each in change_of(NAME, entries(), (), NOW, "", (old, new))] == [what]


def test_rows_of_one_moment_stay_in_their_order() -> None:
    came = change_of(NAME, (), entries(A), NOW, "")
    later = change_of(NAME, entries(A), entries(A, B), NOW + 500, "")
    assert [row.text for row in folded([*came, *later])] == ["Service created", f"ready: {A}", f"ready: {B}"]


def test_a_backend_that_is_ejected_again_and_again_is_one_row() -> None:
    end, rows = f"{NAME}:http: backend {A}:80 gets", list[ChangeRow]()
    why = "3 consecutive connections failed"
    again = "new connections from this node again"
    bad = {seconds: f"no new connections from this node for {seconds} s: {why}" for seconds in (10, 160, 300)}
    for at, what in ((0, bad[10]), (10, again), (11, bad[160]), (171, again), (172, bad[300])):
        gone = {why: 1} if why in what else {}
        row = ChangeRow(first=NOW + at, last=NOW + at, kind="ejection", service=NAME, what=f"{end} {what}", gone=gone)
        rows += [row, replace(row, what=row.what.replace(A, B))]
    one, other = folded(rows)
    told = end.removesuffix(" gets")
    assert (one.count, one.text) == (5, f"{told} ejected 3 x ({why}); gets no new connections from this node for 300 s")
    assert (other.count, B in other.what) == (5, True)
    assert folded([one, other]) == [one, other]
    (over,) = folded([row for row in rows[:8] if A in row.what])
    assert over.text == f"{told} ejected 2 x ({why}); gets new connections from this node again"


def test_an_ejection_is_remembered_with_its_reason(tmp_path: Path) -> None:
    history, path, note = History(tmp_path / "changes"), tmp_path / "changes", f"{NAME}:http: backend {A}:80 gets"
    history.event("BackendEjected", NAME, f"{note} no new connections from this node for 10 s: it failed", "")
    history.flush()
    history.event("BackendReadmitted", NAME, f"{note} new connections from this node again", "")
    history.flush()
    (row,) = folded(read_changes(path))
    assert row.text == f"{NAME}:http: backend {A}:80 ejected (it failed); gets new connections from this node again"


def test_of_one_service_its_column_goes_first() -> None:
    rows = [ChangeRow(first=NOW, last=NOW, kind="service", service=NAME, what="x" * 60, by="Service")]
    for one, gone in ((True, "SERVICE"), (False, "AGE")):
        heads = (table_of(columns(NOW, one=one), rows, Screen(width))[0].split() for width in range(160, 60, -1))
        assert next(filter(None, ({"SERVICE", "AGE", "KIND", "CHANGES"} - {*head} for head in heads))) == {gone}


def test_an_agent_remembers_what_its_tables_and_others_say(tmp_path: Path) -> None:
    path = tmp_path / "run" / "admin.changes"
    first = Shards[tuple[Entry, ...]]().replaced({NAME: entries(A)})
    history = History(path)
    history.programmed(table(1, first, frozenset({NAME})))
    history.flush()
    assert not path.exists()  # what an agent finds when it starts is no change
    history.serves("", "x", 1)
    moved = {"addresses": ("192.0.2.1",), "service_cidrs": ("10.96.0.0/12",)}
    history.programmed(table(2, first.replaced({NAME: entries(A, B)}), frozenset({NAME}), **moved))
    programs = ("unknown program", "nft; x changed or removed y")
    for program in programs:
        history.event("Repaired", "", "2 things were repaired in mode x; token=abcdefghijkl", program)
    history.event("ExternalIPsServed", NAME, "as at every start", "")
    history.flush()
    rows = read_changes(path)
    found = {(row.kind, row.service, row.text, row.by) for row in rows if row.kind not in ("repair", "mode")}
    assert found == {
        ("endpoints", NAME, "ready: 10.0.0.2", "EndpointSlice"),
        ("node", "", "ServiceCIDR 10.96.0.0/12 added", "ServiceCIDR"),  # the kernel tells of the address
    }
    assert [(row.by, row.mode) for row in rows if row.kind == "repair"] == [(by, "x") for by in programs]
    assert all(row.what.startswith("2 things were repaired in mode x; token=") for row in rows if row.kind == "repair")
    assert "abcdefghijkl" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_zone_of_the_node_changes_is_not_said_to_come_from_slices(tmp_path: Path) -> None:
    history, made = History(tmp_path / "changes"), Shards[tuple[Entry, ...]]()
    for number, (zone, ends) in enumerate((("a", (A,)), ("b", (B,)), ("b", (A,)))):
        made = made.replaced({NAME: entries(*ends)})
        history.programmed(table(number + 1, made, frozenset({NAME})), zone)
        history.flush()
    assert [row.by for row in read_changes(tmp_path / "changes")] == 2 * ["zone b of this node"] + 2 * ["EndpointSlice"]


def test_a_mode_that_is_opened_anew_changes_no_service(tmp_path: Path) -> None:
    history = History(tmp_path / "changes")
    for _ in range(2):  # the second has other objects, with numbers from the beginning
        history.programmed(table(1, Shards[tuple[Entry, ...]]().replaced({NAME: entries(A)}), frozenset({NAME})))
    history.flush()
    assert not (tmp_path / "changes").exists()


def test_a_herd_of_changes_costs_a_bounded_amount(tmp_path: Path) -> None:
    """10,000 Services with 10 endpoints each are changed by one sync, and compared up to a number."""
    path = tmp_path / "changes"
    names = [f"ns/s{number}" for number in range(10_000)]
    ends = [f"10.1.0.{number}" for number in range(10)]
    services = Shards[tuple[Entry, ...]]().replaced({name: entries(*ends, name=name) for name in names})
    history = History(path)
    history.programmed(table(1, services, frozenset(names)))
    with patch("hybrid_proxy.controller.semantics.history.change_of", side_effect=change_of) as compared:
        history.programmed(table(2, services.replaced({name: entries(name=name) for name in names}), frozenset(names)))
    assert compared.call_count == MOST_ROWS
    history.flush()
    rows = read_changes(path)
    assert len(rows) == MOST_ROWS + 1
    assert sum(row.count for row in rows if not row.service) == len(names) - MOST_ROWS
    assert path.stat().st_size < 100_000


def test_the_file_is_bounded_and_what_is_rare_stays(tmp_path: Path) -> None:
    path = tmp_path / "changes"
    history = History(path)
    history.record("mode", "mode nftables serves 3 Services, in place of ebpf", "`hybrid-proxy switch`")
    sizes = [0]
    for number in range(FLUSHES):
        for service in range(MOST_ROWS):
            history.record("service", f"change {number}", "Service", f"ns/{service}")
        history.flush()
        sizes.append(path.stat().st_size)
    assert LARGEST // 2 < max(sizes) <= LARGEST
    assert sizes != sorted(sizes)
    rows = read_changes(path)
    assert [row.kind for row in rows].count("mode") == 1
    assert len(rows) > KEPT
    assert rows[-1].what == f"change {FLUSHES - 1}"


SPOILED = {
    "a line that a killed agent left": b'{"first":1.0,"la',
    "no JSON": b"\xff\x00\n{}\n[]\nnull",
    "another type": b'{"first":"x","last":2,"kind":"service"}\n{"first":1,"last":2,"kind":"invented"}',
}


@pytest.mark.parametrize("content", SPOILED.values(), ids=SPOILED)
def test_spoiled_lines_are_passed_over_and_the_next_stay_whole(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "changes"
    path.write_bytes(content)
    history = History(path)
    history.record("agent", "agent 1 started")
    history.flush()
    assert [row.what for row in read_changes(path)] == ["agent 1 started"]


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_file_of_ours_stops_no_agent(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    path, other = tmp_path / "changes", tmp_path / "other"
    other.write_text("as it was")
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(other)
        case "folder":
            path.mkdir()
    history = History(path)
    for _ in range(2):
        history.record("agent", "agent 1 started")
        history.flush()
    assert len(caplog.records) == 1
    assert other.read_text() == "as it was"


@pytest.mark.parametrize(
    ("service", "text", "shown"),
    [
        (NAME, f"{NAME}:http: backend {A}:80 gets no new connections", f"http: backend {A}:80 gets no new connections"),
        (NAME, f"Service {NAME} is used whole again", "is used whole again"),
        (NAME, f"{NAME}: spec.externalIPs: refused", "spec.externalIPs: refused"),
        (NAME, f"EndpointSlice {NAME}-1: it is broken", f"EndpointSlice {NAME}-1: it is broken"),
        ("", f"Service {NAME} is refused", f"Service {NAME} is refused"),
    ],
)
def test_what_happened_does_not_repeat_the_column_of_the_service(service: str, text: str, shown: str) -> None:
    row = ChangeRow(first=NOW, last=NOW, kind="service", service=service, what=text)
    (column,) = (each for each in columns(NOW) if each.header == "WHAT")
    assert str(getattr(column.value(row), "text", "")) == shown


def test_a_terminal_of_80_columns_shows_on_whose_word() -> None:
    what = "address 192.168.77.22/24 dev eth0 is gone: `ip address add 192.168.77.22/24 dev eth0` puts it back"
    rows = [
        ChangeRow(first=NOW, last=NOW, kind="node", what=what, by="the kernel"),
        ChangeRow(first=NOW, last=NOW, kind="service", service="kube-system/kube-dns", what=NOT_SERVED, by=ADDRESSES),
    ]
    shown = table_of(columns(NOW), rows, Screen(80))
    assert shown[0].endswith("WHAT")
    assert max(map(len, shown)) <= 80
    assert shown[-1].split() == ["and", "routes"]


def test_a_mode_that_drains_has_a_row_when_it_is_over_alone(tmp_path: Path) -> None:
    history, path = History(tmp_path / "admin.changes"), tmp_path / "admin.changes"
    for reason, note in (("Draining", "mode x drains: it has no flows"), ("Drained", "mode x drained for 0 s")):
        history.event(reason, "", note, "")
    history.flush()
    assert [row.text for row in read_changes(path)] == ["mode x drained for 0 s"]


def test_a_deletion_is_what_became_of_a_service_whatever_is_said_of_it_later() -> None:
    gone = ChangeRow(first=100, last=100, kind="service", what=DELETED, by="Service", service="shop/a")
    full = ChangeRow(first=101, last=101, kind="service", what="the map is full", by="hybrid-proxy", service="shop/a")
    assert "it was deleted" in last_known("shop/a", [gone, full], 110.0)
    assert "the map is full" in last_known("shop/a", [full], 110.0)


def test_in_a_pipe_no_change_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = f"refused: {'x' * 300} and its end"
    row = ChangeRow(first=NOW, last=NOW, kind="service", service=NAME, what=long, by="Service")
    (tmp_path / "admin.changes").write_bytes(b"\n" + msgspec.json.encode(row))
    assert cli.main(["changes", "--admin-socket", str(tmp_path / "admin.sock")]) == 0
    assert long in capsys.readouterr().out
