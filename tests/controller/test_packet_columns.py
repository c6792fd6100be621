"""`drops` and `trace` as people see them: tests/controller/screens has the screens."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hybrid_proxy.controller.commands import watch
from hybrid_proxy.controller.commands.columns import Screen, layout, table
from hybrid_proxy.controller.commands.command import started
from hybrid_proxy.controller.commands.packet_columns import advice, event_columns, grouped, kind
from hybrid_proxy.controller.commands.terminal import print_stream
from hybrid_proxy.controller.errors import ConfigError, ControllerError
from hybrid_proxy.controller.serving.protocol import NO_EVENT, EventsAnswer, GetStatus
from hybrid_proxy.dataplane.modes.ebpf.maps.reasons import WORDS, kind_of
from hybrid_proxy.dataplane.reports import PacketEvent, clock

SCREENS = Path(__file__).parent / "screens"
NOW = 1_800_000_000.0


def event(age: float, reason: str, source: str, destination: str, **more: Any) -> PacketEvent:
    fields = {
        "what": kind_of(reason), "message": WORDS[reason], "service": "default/web:http", "protocol": "TCP",
        "backend": None, "where": "from a pod", "interface": "veth1", "flags": "SYN", "mode": "ebpf",
    }  # fmt: skip
    return PacketEvent(
        time=NOW - age, reason=reason, source=source, destination=destination, **({"number": 1} | fields | more)
    )


EVENTS = [
    event(7300, "reject", "10.77.1.11:40228", "10.96.0.99:80", service="default/empty:http"),
    event(95, "reject_no_port", "10.77.1.11:40230", "10.96.0.10:81", service="default/web"),
    event(12, "drop_source_ranges", "192.168.77.1:60526", "198.51.100.7:80", service="default/lb:http",
          where="from outside", interface="eth0"),
    event(8, "backend_refused", "10.77.1.11:40232", "10.96.0.10:80", backend="10.77.1.12:8080", flags="RST ACK",
          where="reply, to a pod"),
    event(7, "backend_unanswered", "[fd77:1::11]:40232", "[fd96::10]:80", backend="[fd77:2::12]:8080"),
    event(0.4, "socket_refused", "10.77.1.1:0", "10.96.0.99:53", service="default/empty:dns", protocol="UDP",
          where="socket of this node", interface=None, flags=None),
]  # fmt: skip


CLIENT, FRONTEND, BACKEND = "10.77.1.11:40228", "10.96.0.10:80", "10.77.1.12:8080"
TRACED = [
    event(0.010, "new_flow", CLIENT, FRONTEND, what="trace", backend=BACKEND),
    event(0.009, "dnat", CLIENT, FRONTEND, what="trace", backend=BACKEND),
    event(0.008, "reply", FRONTEND, CLIENT, what="trace", backend=BACKEND, flags="SYN ACK", where="to a pod"),
    event(0.007, "fast", "192.168.177.210:60526", "198.51.100.7:8443", what="trace", backend="10.77.12.112:8080"),
    event(0.006, "drop_source_ranges", "192.168.77.1:60526", "198.51.100.7:80", what="trace", service="a/lb:http"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "packet"),
    [
        (TRACED[0], f"TCP {CLIENT} -> {FRONTEND} -> {BACKEND}"),
        (TRACED[2], f"TCP {BACKEND} -> {FRONTEND} -> {CLIENT}"),
        (event(0, "backend_refused", CLIENT, FRONTEND, backend=BACKEND), f"TCP {CLIENT} -> {FRONTEND} -> {BACKEND}"),
        (event(0, "backend_refused", CLIENT, BACKEND, backend=BACKEND), f"TCP {CLIENT} -> {BACKEND}"),
        (event(0, "backend_unanswered", CLIENT, FRONTEND, backend=BACKEND), f"TCP {CLIENT} -> {FRONTEND} -> {BACKEND}"),
        (event(0, "reject", CLIENT, FRONTEND), f"TCP {CLIENT} -> {FRONTEND}"),
        (event(0, "socket_refused", "10.0.0.1:0", FRONTEND), f"TCP 10.0.0.1 -> {FRONTEND}"),
    ],
    ids=[
        "to-a-backend", "a-reply", "refused", "refused-as-former-programs-report", "not-answered", "rejected",
        "no-port",
    ],
)  # fmt: skip
def test_the_packet_goes_from_the_client_to_the_backend(row: PacketEvent, packet: str) -> None:
    (column,) = (column for column in event_columns(Screen(None), [row], NOW) if column.header == "PACKET")
    assert column.value(row) == packet


@pytest.mark.parametrize(
    ("reason", "said"),
    [("backend_refused", "refused by the backend"), ("drop_martian", WORDS["drop_martian"])],
)
def test_what_doctor_caused_is_said_to_be_its_own(reason: str, said: str) -> None:
    rows = [event(0, reason, CLIENT, BACKEND, by_doctor=own) for own in (False, True)]
    (column,) = (column for column in event_columns(Screen(None), rows, NOW) if column.header == "REASON")
    assert [column.value(row) for row in rows] == [said, f"{said} (doctor's own)"]


@pytest.mark.parametrize("width", [80, 120, 160, None], ids=["80", "120", "160", "pipe"])
def test_the_screen(width: int | None) -> None:
    lines = table(event_columns(Screen(width), EVENTS, NOW), EVENTS, Screen(width))
    assert "\n".join(lines) + "\n" == (SCREENS / f"drops-{width or 'pipe'}.txt").read_text()
    assert width is None or all(len(line) <= width for line in lines)


@pytest.mark.parametrize("age", [8, 100_000], ids=["today", "before"])
@pytest.mark.parametrize("width", [50, 80, 100])
def test_rows_that_are_folded_fit_the_screen(width: int, age: float) -> None:
    """How often it was and the packet are in one line: no number stands alone."""
    reasons = ("backend_refused", CLIENT, FRONTEND), ("drop_source_ranges", CLIENT, FRONTEND)
    known = [event(age - part, *each, backend=BACKEND) for each in reasons for part in (0, 1)]
    groups = grouped(known)
    rows = [each.last for each in groups]
    lines = table(event_columns(Screen(width), rows, NOW, groups), rows, Screen(width))
    assert all("TCP" in line for line in lines if "2 x" in line), lines
    assert sum("2 x" in line for line in lines) == 2
    assert all(len(line) <= (width if age < 9 or width > 50 else 59) for line in lines)  # a date needs its room


@pytest.mark.parametrize("width", [80, 120], ids=["80", "120"])
def test_the_screen_of_a_trace(width: int) -> None:
    """Two lines a packet, on a screen that is laid out before any packet came."""
    screen = Screen(width)
    shown = layout(event_columns(screen, watch.LIKELY, NOW, stream=True), watch.LIKELY, screen)
    lines = [shown.header(), *(line for row in TRACED for line in shown.lines(row))]
    assert "\n".join(lines) + "\n" == (SCREENS / f"trace-{width}.txt").read_text()
    assert all(len(line) <= width for line in lines)
    assert all(len(list(shown.lines(row))) == 2 for row in TRACED[:-1])


@pytest.mark.parametrize("width", [80, 120, 400, None], ids=str)
def test_the_columns_of_a_stream_keep_their_places(
    width: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a long row all later ones have the columns, also in a pipe."""
    monkeypatch.setattr("hybrid_proxy.controller.commands.terminal.screen", lambda: Screen(width))
    long = event(0, "new_flow", "[fd77:1::ffff:11]:40228", "[fd96::10]:80", what="trace", service="a/" + "b" * 60)
    args = argparse.Namespace(output="text")
    rows = [TRACED[0], long, TRACED[0], TRACED[2]]
    print_stream(args, event_columns(Screen(width), watch.LIKELY, NOW, stream=True), rows, watch.LIKELY)
    lines = [line for line in capsys.readouterr().out.splitlines() if "SEEN" in line]
    assert len(lines) == len(rows)
    assert len({line.index(row.where) for line, row in zip(lines[1:], rows[1:], strict=True) if row.where in line}) <= 1


def test_a_stream_that_begins_with_nothing_has_its_header_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    headers = []

    def coming() -> Iterator[PacketEvent]:
        headers.append(capsys.readouterr().out)
        yield TRACED[0]

    print_stream(argparse.Namespace(output="text"), event_columns(Screen(), [], NOW, stream=True), coming(), [])
    assert headers[0].startswith("TIME")
    assert "TIME" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (TRACED[:3], "3 packets, 1 from backends, none dropped: `hybrid-proxy trace a/b --latency` measures"),
        (TRACED[:2], "2 packets, 0 from backends: `hybrid-proxy doctor a/b` asks the backends"),
        ([TRACED[0]] * 12, "12 packets, 0 from backends; stopped at --limit 12"),
        (TRACED, "5 packets, 1 from backends, 1 DROPPED: `hybrid-proxy doctor a/b` says why"),
    ],
    ids=["well", "no answer", "limit", "dropped"],
)
def test_a_trace_ends_with_what_to_look_at(rows: list[PacketEvent], said: str) -> None:
    assert advice(Counter(map(kind, rows)), "a/b", 12).startswith(said)


def test_wide_folds_nothing() -> None:
    lines = table(event_columns(Screen(), EVENTS, NOW), EVENTS, Screen(80), wide=True)
    assert len(lines) == 1 + len(EVENTS)


def test_who_talks_to_whom_is_never_cut() -> None:
    text = "\n".join(table(event_columns(Screen(40), EVENTS, NOW), EVENTS, Screen(40)))
    for row in EVENTS:
        assert all(
            part in text for part in (row.service, row.source.removesuffix(":0"), row.destination, row.backend or "")
        )


@pytest.mark.parametrize(
    ("reason", "what", "verdict"),
    [
        ("drop_empty", "drop", "DROPPED"), ("reject", "refuse", "REJECTED"), ("backend_refused", "fail", "FAILED"),
        ("flow_full", "note", "NOTED"), ("dnat", "trace", "SEEN"), ("drop_martian", "trace", "DROPPED"),
    ],
)  # fmt: skip
def test_the_verdict_is_one_word(reason: str, what: str, verdict: str) -> None:
    row = event(0, reason, "10.0.0.1:1", "10.0.0.2:2", what=what)
    (column,) = (column for column in event_columns(Screen(None), [row], NOW) if column.header == "VERDICT")
    cell = column.value(row)
    assert getattr(cell, "text", cell) == verdict


@pytest.mark.parametrize(
    ("reason", "ends", "shown"),
    [
        ("reject", ("10.77.1.11:{}", FRONTEND), f"TCP 10.77.1.11 -> {FRONTEND}"),
        ("backend_refused", ("[fd77:1::11]:{}", BACKEND), f"TCP [fd77:1::11] -> {BACKEND}"),
        ("backend_unanswered", ("10.77.1.11:{}", FRONTEND), f"TCP 10.77.1.11 -> {FRONTEND} -> {BACKEND}"),
    ],
)
def test_events_that_differ_by_the_clients_port_are_one_row(reason: str, ends: tuple[str, str], shown: str) -> None:
    backend = None if reason == "reject" else BACKEND
    one, two, last = (
        event(age, reason, ends[0].format(50 - age), ends[1].format(50 - age), backend=backend) for age in (9, 5, 3)
    )
    other = event(4, reason, *(end.format(7).replace("::11", "::12").replace("1.11", "1.12") for end in ends))
    groups = grouped([one, two, other, last])
    assert [(each.times, NOW - each.since, NOW - each.last.time) for each in groups] == [(1, 4, 4), (3, 9, 3)]
    rows = [each.last for each in groups]
    text = table(event_columns(Screen(None), rows, NOW, groups), rows, Screen(None))
    assert shown in text[2]
    assert f"  3 x  {clock(one.time)}" in text[2]


def test_a_stream_in_a_pipe_has_one_line_for_each_event(capsys: pytest.CaptureFixture[str]) -> None:
    """Three ends of IPv4 have room from the start."""
    long = event(0, "drop_martian", "[fd77:1::ffff:11]:40228", "[fd96::10]:80")
    full = event(0, "backend_unanswered", "255.255.255.255:65535", "255.255.255.254:65535", backend="10.77.11.11:65535")
    columns = event_columns(Screen(), watch.LIKELY, NOW, stream=True)
    print_stream(argparse.Namespace(output="text"), columns, [TRACED[0], full, long], watch.LIKELY)
    header, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert [line.index("from a pod") for line in lines[:2]] == [header.index("WHERE")] * 2


def test_rows_that_a_stream_begins_with_are_aligned_with_those_that_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is known already has room from the start: also what a former agent kept."""
    known = event(9, "backend_unanswered", CLIENT, FRONTEND, backend=BACKEND, number=-4)
    ends = "[fd77:1:ffff:ffff::ffff:11]:40232", "[fd96::ffff:ffff]:8080"
    wide = event(8, "backend_unanswered", *ends, backend="[fd77:2:ffff:ffff::12]:8080")
    comes = event(1, "backend_unanswered", "255.255.255.255:65535", FRONTEND, backend="10.77.1.12:65535")
    answers = {watch.ALL: [known, wide], NO_EVENT: [], 0: [wide], 7: [comes]}

    def ask(_: str, request: Any, *__: Any) -> EventsAnswer:
        if request.after not in answers:
            raise KeyboardInterrupt
        return EventsAnswer(answers[request.after], 8 if request.after == 7 else 7, "ebpf", [])

    monkeypatch.setattr("hybrid_proxy.controller.commands.watch.ask", ask)
    monkeypatch.setattr("hybrid_proxy.controller.commands.watch.POLL_SECONDS", 0)
    args = dict.fromkeys(("service", "namespace", "since")) | {"admin_socket": "", "limit": 9, "output": "text"}
    assert watch.DROPS.run(argparse.Namespace(**args, command="drops", follow=True)) == 0
    said = capsys.readouterr()
    assert "the last 2 of 2 events, since 2027-01-15 07:59:51 UTC, then" in said.err
    header, *lines = said.out.splitlines()
    assert [line.index("from a pod") for line in lines] == [header.index("WHERE")] * 3


@pytest.mark.parametrize(
    ("output", "limit", "rows", "note"),
    [
        ("text", 100, 2, ""),
        ("json", 100, 14, ""),
        ("text", 13, 2, "2 lines for 13 of 14 events; --limit shows more\n"),
        ("text", 1, 1, "1 of 14 events; --limit shows more\n"),
    ],
)
def test_equal_drops_are_one_row_for_people(
    output: str, limit: int, rows: int, note: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once = event(60, "drop_source_ranges", CLIENT, FRONTEND)
    often = [msgspec.structs.replace(once, number=number, time=NOW - 60 + number) for number in range(12)]
    events = [*often, event(2, "reject", CLIENT, FRONTEND), often[0]]
    monkeypatch.setattr("hybrid_proxy.controller.commands.watch.ask", lambda *_: EventsAnswer(events, 1, "ebpf", []))
    asked = {"service": None, "namespace": None, "since": None, "follow": False, "limit": limit, "admin_socket": ""}
    assert watch.DROPS.run(argparse.Namespace(**asked, command="drops", output=output)) == 0
    out, said = capsys.readouterr()
    shown = json.loads(out) if output == "json" else out.splitlines()[1:]
    assert (len(shown), said) == (rows, note)
    assert (
        output == "json"
        or limit < 100
        or ["  13 x  2027-01-15 07:59:00 UTC" in line for line in shown] == [False, True]
    ), out


@pytest.mark.parametrize(
    ("output", "shown"),
    [("text", ["3 x TCP 10.77.1.11 -> ", "41 x TCP 10.77.1.11 -> ", "TCP 10.77.1.12:7 -> "]), ("json", [""] * 45)],
)
def test_equal_drops_of_a_second_are_one_row_of_a_stream(
    output: str, shown: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [event(1, "backend_refused", f"10.77.1.11:{port}", FRONTEND, backend=BACKEND) for port in range(41)]
    answers = {watch.ALL: many[:3], NO_EVENT: [], 0: [*many, event(1, "reject", "10.77.1.12:7", FRONTEND)]}

    def ask(_: str, request: Any, *__: Any) -> EventsAnswer:
        if request.after not in answers:
            raise KeyboardInterrupt
        return EventsAnswer(answers[request.after], 0 if request.after == watch.ALL else 7, "ebpf", [])

    monkeypatch.setattr("hybrid_proxy.controller.commands.watch.ask", ask)
    monkeypatch.setattr("hybrid_proxy.controller.commands.watch.POLL_SECONDS", 0)
    args = dict.fromkeys(("service", "namespace", "since")) | {"admin_socket": "", "limit": 99, "output": output}
    assert watch.DROPS.run(argparse.Namespace(**args, command="drops", follow=True)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if FRONTEND in line]
    assert len(lines) == len(shown)
    assert all(text in line for text, line in zip(shown, lines, strict=True)), lines


@pytest.mark.parametrize("silent", [[], ["nftables"]])
def test_only_a_mode_that_reports_packets_can_say_that_there_was_none(
    silent: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybrid_proxy.controller.commands.watch.ask", lambda *_: EventsAnswer([], 1, "ebpf", silent))
    args = dict.fromkeys(("service", "namespace", "since")) | {"admin_socket": "", "limit": 9, "output": "text"}
    assert watch.DROPS.run(argparse.Namespace(**args, command="drops", follow=False)) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        "mode nftables reports no packets" if silent else "hybrid-proxy dropped or rejected no packet"
    )
    assert silent or "(firewalls, routes, sockets), `hybrid-proxy trace --drops` shows" in said


@pytest.mark.parametrize(
    ("mode", "counters", "shown", "said"),
    [("nftables", {"refused": 3, "masqueraded": 9, "invalid": 1, "discarded": 0},
      ["REJECTED      3  no ready endpoints",
       "DROPPED       1  a segment of a known connection that conntrack takes for invalid"], ""),
     ("nftables", {"refused": 0}, [], "mode nftables has counted no packet that it dropped or rejected"),
     ("userspace", {"silent_backends": 2, "retries": 2}, ["FAILED       2  a backend did not answer a SYN"], "")],
)  # fmt: skip
def test_a_mode_that_reports_no_packets_has_its_counts_in_the_words_of_mode_ebpf(
    mode: str, counters: dict[str, int], shown: list[str], said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def ask(_: str, request: Any, *__: Any) -> Any:
        if not isinstance(request, GetStatus):
            raise ControllerError("these commands measure the kernel")
        return SimpleNamespace(status=SimpleNamespace(dataplane=SimpleNamespace(mode=mode, counters=counters)))

    monkeypatch.setattr("hybrid_proxy.controller.commands.watch.ask", ask)
    args = dict.fromkeys(("service", "namespace", "since")) | {"admin_socket": "", "limit": 9, "output": "text"}
    assert watch.DROPS.run(argparse.Namespace(**args, command="drops", follow=False)) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()[1:]] == [line.split() for line in shown]
    assert err.splitlines() == [*[said] * bool(said), "these commands measure the kernel"]
    for other in ({"service": "a/b"}, {"since": "5m"}, {"output": "json"}):
        with pytest.raises(ControllerError, match="these commands"):
            watch.DROPS.run(argparse.Namespace(**(args | other), command="drops", follow=False))


@pytest.mark.parametrize("text", ["5", "yesterday", "-5m", "0", ""])
def test_since_is_a_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="--since"):
        watch.DROPS.run(argparse.Namespace(since=text))


@pytest.mark.parametrize(("text", "hours"), [("1d", 24), ("2h", 2), ("1d12h", 36)])
def test_since_knows_days_beside_the_units_of_go(text: str, hours: int) -> None:
    assert started(text) == pytest.approx(time.time() - 3600 * hours, abs=60)
