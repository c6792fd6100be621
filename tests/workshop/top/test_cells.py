"""Texts of cells, orders of rows, messages about the node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path

import msgspec
import pytest

from hybrid_proxy.controller.serving.protocol import DrainingMode, ModeStatus
from hybrid_proxy.workshop.top import cells
from hybrid_proxy.workshop.top.rates import ServiceRates, snapshot
from tests.workshop.top.samples import agent_status, backend, dataplane, sample, service, status


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (0.25, "0.2"), (7.0, "7"), (99.96, "100"), (999.4, "999"), (999.6, "1.0k"),
     (12_345, "12.3k"), (123_456, "123k"), (1.5e9, "1.5G"), (2.5e16, "25000T")],
)  # fmt: skip
def test_rates_have_few_digits(value: float | None, text: str) -> None:
    assert cells.rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0µs"), (85.4e-6, "85µs"), (999.6e-6, "1.0ms"), (1.24e-3, "1.2ms"), (9.96e-3, "10ms"),
     (0.9996, "1.0s"), (12.4, "12s")],
)  # fmt: skip
def test_latencies(value: float | None, text: str) -> None:
    assert cells.latency(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.9, "5s"), (192, "3m12s"), (7_500, "2h5m"), (273_600, "3d4h"), (60, "1m0s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert cells.age(seconds) == text


def row(key: str, connections: float | None, **more: object) -> ServiceRates:
    fields = {
        "name": key, "protocol": "TCP", "frontends": ("10.96.0.10:80",), "backends": 2, "ejected": 0,
        "packets": None, "request_bytes": None, "reply_bytes": None, "connect": None,
        "total": None,
    }  # fmt: skip
    return ServiceRates(key=key, connections=connections, **{**fields, **more})  # type: ignore[arg-type]


def column(title: str) -> cells.Column:
    return next(each for each in cells.SERVICES if each.title == title)


def test_what_is_not_known_is_last_either_way() -> None:
    rows = [row("a", None), row("b", 1), row("c", 5), row("d", 1)]
    assert [r.key for r in cells.arranged(rows, column("conn/s"), falling=True)] == ["c", "b", "d", "a"]
    assert [r.key for r in cells.arranged(rows, column("conn/s"), falling=False)] == ["b", "d", "c", "a"]


def test_services_that_do_not_serve_come_first() -> None:
    rows = [
        row("a", 9, state="serving"),
        row("b", 0, state="1 of 2 ejected"),
        row("c", 0, state="no backends", down=True),
    ]
    assert [r.key for r in cells.arranged(rows, column("state"), falling=True)] == ["c", "b", "a"]


BUSY = row(
    "kube-system/kube-dns:dns-tcp", 123.4, frontends=("10.96.14.201:443", "198.51.100.7:443", "node port 30443"),
    packets=1.0, request_bytes=1.0, reply_bytes=1.0, connect=0.001, total=1_234_567, state="all backends fail",
    down=True,
)  # fmt: skip


# fmt: off
WIDTHS = (
    pytest.param(80,  ["service", "conn/s", "state", "frontends"],                                        id="80"),
    pytest.param(100, ["service", "conn/s", "in/s", "out/s", "state", "frontends"],                       id="100"),
    pytest.param(120, ["service", "conn/s", "in/s", "out/s", "first p99", "backends", "state", "frontends"], id="120"),
    pytest.param(180, [each.title for each in cells.SERVICES],                                            id="180"),
)
# fmt: on


@pytest.mark.parametrize(("width", "titles"), WIDTHS)
def test_columns_that_do_not_fit_are_left_out_and_no_other_is_cut(width: int, titles: list[str]) -> None:
    assert [each.title for each in cells.fitting(cells.SERVICES, [BUSY], width)] == titles
    assert column("frontends").text(BUSY) == "10.96.14.201:443 +2"


def test_a_mode_that_does_not_count_has_no_empty_columns() -> None:
    uncounted = row("a/b:c", None, frontends=("10.0.0.1:80",), total=None, state="serving", backends=2)
    shown = [each.title for each in cells.fitting(cells.SERVICES, [uncounted, uncounted], 180)]
    assert shown == ["service", "backends", "state", "protocol", "frontends"]
    first = row("a/b:c", None, total=7)
    assert "conn/s" in [each.title for each in cells.fitting(cells.SERVICES, [uncounted, first], 180)]


def test_what_names_and_judges_stays_however_narrow_the_screen_is() -> None:
    assert [each.title for each in cells.fitting(cells.SERVICES, [BUSY], 10)] == ["service", "conn/s", "state"]


@pytest.mark.parametrize(
    ("text", "found"),
    [("", True), ("WEB", True), ("web udp", False), ("tcp web", True), ("0.10:80", True), ("mail", False)],
)
def test_a_filter_is_words_that_all_match(text: str, found: bool) -> None:
    assert cells.matches(row("default/web:http", 1), text) is found


def test_every_column_has_a_text_of_every_row() -> None:
    for each in cells.SERVICES:
        assert each.text(row("ns/a", None))


def test_the_head_shows_mode_and_totals() -> None:
    counters = status(drop_empty=0, reject=0)
    before = sample(0, service("ns/a:http", 0), status=counters)
    now = sample(1, service("ns/a:http", 5), status=counters)
    first, second = cells.head(snapshot(before, before, now), 240)
    assert first == "node n1   mode ebpf (auto was asked for)   in sync   agent up 3m12s, 45.0MB"
    assert second.startswith("conn/s 5   packets/s 100   in 5.0kB/s   out 5.0kB/s   dropped/s 0   rejected/s 0   ")
    assert second.endswith("  flow entries 12/524,288")
    assert cells.trouble(snapshot(before, before, now), 240) == []


def test_packets_that_the_serving_mode_does_not_count_have_no_rate() -> None:
    counters = agent_status(dataplane=dataplane(mode="iptables", counters={"restores": 3}))
    counters = msgspec.structs.replace(
        counters, draining=[DrainingMode("ebpf", {}, 1.0, {"drop_empty": 5, "reject": 6})]
    )
    before, now = (sample(at, service("ns/a:http", 0, traffic=None), status=counters) for at in (0, 1))
    assert cells.head(snapshot(before, before, now), 240)[1].startswith("dropped/s -   rejected/s -")


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_head_breaks_between_two_parts_only(width: int) -> None:
    before = sample(0, service("ns/a:http", 0), status=status(drop_empty=0, reject=0, backend_refused=0))
    busy = status(drop_empty=1_234, reject=44_100, backend_refused=1_234)
    now = sample(1, service("ns/a:http", 12_345), status=busy)
    lines = cells.head(snapshot(before, before, now), width)
    assert len(lines) <= 3
    assert all(len(line) <= width for line in lines)
    assert "   ".join(lines) == "   ".join(cells.head(snapshot(before, before, now), 240))


def test_the_head_has_the_verdict_of_status() -> None:
    now = sample(0, status=agent_status(other_proxies=["kube-proxy is here"]))
    assert "   DEGRADED   agent up" in cells.head(snapshot(now, now, now), 240)[0]


def test_of_services_that_carry_as_much_those_that_fail_come_first() -> None:
    rows = [row("a", 0), row("b", 0, down=True), row("c", 9), row("d", None, down=True), row("e", None)]
    assert [r.key for r in cells.arranged(rows, column("conn/s"), falling=True)] == ["c", "b", "a", "d", "e"]


def test_a_mode_that_drains_is_shown_beside_the_one_that_serves() -> None:
    now = sample(0, status=agent_status(draining=[DrainingMode("nftables", {"TCP": 12}, 192.0)]))
    assert (
        "mode ebpf (auto was asked for)   nftables drains for 3m12s: 12 TCP flows   in sync"
        in cells.head(snapshot(now, now, now), 240)[0]
    )


def test_trouble_is_shown_and_without_an_agent_only_that() -> None:
    status = agent_status(mode=ModeStatus("ebpf", "nftables", "no BTF"), error="boom")
    plain = service("ns/a", 0, traffic=None)
    now = sample(0, plain, status=status, mode="nftables")
    said = cells.trouble(snapshot(now, now, now), 240)
    assert said[0].startswith("the last sync failed: boom → read the agent's log")
    assert said[1] == "mode nftables serves instead of ebpf: no BTF → `hybrid-proxy modes` says what lacks"
    assert "mode nftables does not count" in said[2]
    gone = sample(0, service("ns/a", 1), status=None, trouble="agent 7 is gone since 10:33:44 UTC, 2m5s ago: SIGTERM")
    (message,) = cells.trouble(snapshot(gone, gone, gone), 240)
    assert message.startswith("agent 7 is gone since 10:33:44 UTC, 2m5s ago: SIGTERM; what is programmed serves on")
    empty = sample(0, status=None, mode="", trouble="no agent listens at /x")
    assert cells.head(snapshot(empty, empty, empty), 240)[0] == "nothing is programmed here   NOT IN SYNC"
    assert cells.head(snapshot(gone, gone, gone), 240)[0] == "mode ebpf, as last programmed   NOT IN SYNC"


def test_until_the_agent_answers_it_shows_what_the_kernel_has() -> None:
    first = sample(0, service("ns/a", 1), status=None)
    shown = snapshot(first, first, first)
    assert cells.head(shown, 240)[0] == "mode ebpf, as last programmed   asking the agent ..."
    assert cells.head(shown, 240)[1] == "measuring: rates come with the next sample"
    assert cells.trouble(shown, 240) == []
    assert [row.connections for row in shown.services] == [None]


def test_a_trouble_is_a_line_and_a_mode_that_watches_no_backends_says_so() -> None:
    mode = ModeStatus("nftables", "nftables", "")
    now = sample(0, status=agent_status(error="no room " * 20, mode=mode, dataplane=dataplane(failing=["shop/a:http"])))
    said = cells.trouble(snapshot(now, now, now), 78)
    assert said[0].startswith("the last sync failed → read the agent's log")
    assert said[1] == "all backends of shop/a:http fail → hybrid-proxy doctor shop/a"
    assert max(map(len, said)) <= 78
    assert "NOT IN SYNC   backends not watched   agent up" in cells.head(snapshot(now, now, now), 240)[0]


def test_services_whose_backends_all_fail_are_named() -> None:
    now = sample(0, status=agent_status(dataplane=dataplane(failing=["a/a:x", "a/b:x", "a/c:x", "a/d:x"])))
    said = "all backends of a/a:x, a/b:x, a/c:x and 1 more fail → hybrid-proxy doctor a/a"
    assert said in cells.trouble(snapshot(now, now, now), 240)


def test_reasons_have_the_words_of_drops_and_what_fails_comes_first() -> None:
    counts = {"new_flow": 9, "reject": 1, "backend_refused": 2, "drop_empty": 3, "refused": 4}
    now = sample(0, status=agent_status(dataplane=dataplane(counters=counts)))
    verdict, _, _, reason, counter = cells.REASONS
    shown = cells.arranged(snapshot(now, now, now).reasons, verdict, falling=verdict.falling)
    assert [(verdict.text(row), reason.text(row), counter.text(row)) for row in shown] == [
        ("DROPPED", "no backend on this node, and the Service's traffic policy is Local", "drop_empty"),
        ("REJECTED", "refused", "refused"),
        ("REJECTED", "rejected: no ready endpoints", "reject"),
        ("FAILED", "a backend refused a connection: it answered a SYN with a reset", "backend_refused"),
        ("NOTED", "a flow to a backend was created", "new_flow"),
    ]


@pytest.mark.parametrize("width", [70, 80, 120, 200])
def test_a_long_reason_has_the_room_that_the_other_columns_leave(width: int) -> None:
    rows = snapshot(*[sample(0, status=status(drop_reverse_path=9, drop_fragment=1))] * 3).reasons
    shown = cells.fitting(cells.REASONS, rows, width)
    (reason,) = (each for each in shown if each.wrap)
    room = cells.room(shown, rows, width)
    others = [max(len(each.title) + 1, *(len(each.text(row)) for row in rows)) for each in shown if each is not reason]
    assert room == width - 2 * len(shown) - sum(others)
    assert room >= reason.wrap
    assert ("counter" in [each.title for each in shown]) == (width > 80)


def test_a_backend_that_is_ejected_says_why_on_a_usual_screen() -> None:
    out = backend("10.77.1.11:8080", 7, failures=3, state=f"ejected for 8 s: {'refused ' * 8}")
    rows = snapshot(*[sample(0, service("a/b:c", 1), chosen="a/b:c", backends=(out,))] * 3).backends
    assert "reason" in [each.title for each in cells.fitting(cells.BACKENDS, rows, 120)]


@pytest.mark.parametrize("columns", [cells.SERVICES, cells.BACKENDS], ids=["services", "backends"])
def test_the_picture_has_the_columns_of_the_code(columns: Sequence[cells.Column]) -> None:
    picture = (Path(__file__).parents[3] / "docs" / "top.svg").read_text()
    lines: dict[str, list[str]] = {}
    for place, text in re.findall(r'<text [^>]*\by="([^"]+)"[^>]*>([^<]*)</text>', picture):
        lines.setdefault(place, []).append(unescape(text).replace("\xa0", " ").strip().rstrip("▼▲"))
    drawn = next((list(filter(None, line)) for line in lines.values() if line[0] == columns[0].title), [])
    stay = [column.title for column in columns if not column.leave or column.title in drawn]
    assert drawn == stay, f"docs/top.svg has other columns than `top`: make it anew with `make pictures`: {drawn}"
