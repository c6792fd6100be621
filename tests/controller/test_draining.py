"""Modes that were left: until when they are held open, and what they are given meanwhile."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import pytest

from hybrid_proxy.controller.agent import draining
from hybrid_proxy.controller.agent.draining import Draining
from hybrid_proxy.controller.serving.protocol import still_open
from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported
from hybrid_proxy.dataplane.mode import Programmer
from hybrid_proxy.dataplane.reports import FlowRow
from hybrid_proxy.dataplane.table import ServiceTable
from tests.waiting import until

TABLE, NEXT = ServiceTable({}, generation=1), ServiceTable({}, generation=2)

SERVING = cast("Programmer", None)  # is not asked: nothing is handed over here


class Mode:
    """A mode as far as draining needs one; its flows are what the test says."""

    name = "left"

    def __init__(self) -> None:
        self.flows: Mapping[str, int] = {"TCP": 2, "UDP": 0}
        self.tables: list[ServiceTable] = []
        self.calls: list[str] = []
        self.failing: DataplaneError | None = None
        self.reserved = 0  # how often

    def drain(self, table: ServiceTable) -> None:
        if self.failing:
            raise self.failing
        self.tables.append(table)

    def reserve_ports(self) -> None:
        self.reserved += 1

    def open_flows(self, table: ServiceTable) -> Mapping[str, int]:
        assert table is self.tables[-1]
        if self.failing:
            raise self.failing
        return self.flows

    def abandon(self, table: ServiceTable) -> None:
        assert table is self.tables[-1]
        self.calls.append("abandon")

    def maintain(self) -> None:
        self.calls.append("maintain")

    def counters(self) -> dict[str, int]:
        return {"drop_empty": len(self.calls)}

    def links_changed(self) -> None:
        self.calls.append("links")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def reports() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def modes(ended: list[str], reports: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Draining]:
    monkeypatch.setattr(draining, "COUNT_SECONDS", 0.01)
    made = Draining(ended.append, lambda *event: reports.append(event))
    yield made
    made.close()


@pytest.fixture
def left(modes: Draining) -> Mode:
    mode = Mode()
    modes.keep(mode)  # type: ignore[arg-type]
    return mode


def test_what_is_only_kept_goes_on_serving(modes: Draining, left: Mode) -> None:
    modes.maintain(TABLE)
    assert (modes.names, modes.rows(), left.tables, left.calls) == ({"left"}, [], [], [])


@pytest.mark.parametrize("cut", [False, True], ids=["over", "out of time"])
def test_it_ends_once_with_its_last_flow_or_its_time(
    modes: Draining, left: Mode, ended: list[str], reports: list[tuple[str, str]], cut: bool
) -> None:
    modes.start("left", TABLE)
    until(lambda: reports, "its begin is reported")
    assert ([row.flows for row in modes.rows()], ended) == ([{"TCP": 2, "UDP": 0}], [])
    left.flows = {"UDP": 1} if cut else {}
    modes.timeout = 0.01 if cut else 0.0
    until(lambda: ended, "its end is found")
    counted = threading.Event()
    left.open_flows = lambda table: counted.set() or {}  # type: ignore[assignment, return-value, func-returns-value, method-assign]
    assert not counted.wait(0.1)
    modes.end("left")
    assert (ended, left.calls, modes.names) == (["left"], ["abandon", "close"], frozenset())
    (begin, began), (end, note) = reports
    assert (begin, end) == ("Draining", "Drained")
    assert "2 TCP flows" in began
    assert "2 TCP flows" in note
    assert ("1 UDP flow ends" in note) == cut


def test_a_mode_without_flows_is_said_to_have_none(modes: Draining, left: Mode, reports: list[tuple[str, str]]) -> None:
    left.flows = {"TCP": 0}
    modes.start("left", TABLE)
    until(lambda: reports, "its begin is reported")
    assert reports[0] == ("Draining", "mode left drains: it has no flows")


@pytest.mark.parametrize(("flows", "lines"), [({"TCP": 0}, 0), ({"TCP": 2}, 2)])
def test_the_log_says_of_flows_alone_how_a_mode_drains(
    modes: Draining, left: Mode, ended: list[str], reports: list[tuple[str, str]], flows: dict[str, int], lines: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO")
    left.flows = flows
    modes.start("left", TABLE)
    until(lambda: reports, "its begin is reported")
    left.flows = {}
    until(lambda: ended, "its end is found")
    modes.end("left")
    assert [record.getMessage() for record in caplog.records] == [note for _, note in reports if lines]
    assert len(reports) == 2


def test_ports_are_reserved_before_flows_are_counted(
    modes: Draining, left: Mode, reports: list[tuple[str, str]]
) -> None:
    left.open_flows = lambda table: {"TCP": left.reserved}  # type: ignore[method-assign]
    modes.start("left", TABLE)
    until(lambda: reports, "its begin is reported")
    assert reports[0] == ("Draining", "mode left drains: 1 TCP flow goes on until it is over")


def test_the_end_of_a_mode_that_had_no_flow_says_so(
    modes: Draining, left: Mode, ended: list[str], reports: list[tuple[str, str]]
) -> None:
    left.flows = {"TCP": 0}
    modes.start("left", TABLE)
    until(lambda: ended, "its end is found")
    modes.end("left")
    assert reports[-1] == ("Drained", "mode left is gone: it had no flows")


def test_since_when_it_drains_does_not_change_with_the_next_switch(modes: Draining, left: Mode) -> None:
    modes.start("left", TABLE)
    until(lambda: modes.rows()[0].seconds >= 0.3, "time passes")
    modes.start("left", NEXT)
    assert modes.rows()[0].seconds >= 0.3


def test_it_follows_the_table_and_the_interfaces(modes: Draining, left: Mode) -> None:
    modes.start("left", TABLE)
    for table in (TABLE, NEXT, NEXT):
        modes.maintain(table)
    modes.links_changed()
    assert left.tables == [TABLE, NEXT]
    assert left.calls == ["maintain", "maintain", "maintain", "links"]
    assert modes.rows()[0].counters == {"drop_empty": 3}


def test_a_failure_is_tried_again(modes: Draining, left: Mode, ended: list[str]) -> None:
    modes.start("left", TABLE)
    left.failing = DataplaneError("not now")
    modes.maintain(NEXT)
    assert left.tables == [TABLE]
    left.failing, left.flows = None, {}
    modes.maintain(NEXT)
    assert left.tables == [TABLE, NEXT]
    until(lambda: ended == ["left"], "it is counted again")


def test_it_is_not_over_before_it_drains(modes: Draining, left: Mode, ended: list[str]) -> None:
    """It may still take new flows, so that it has none at the moment says nothing."""
    left.flows, left.failing = {}, DataplaneError("not now")
    counted = threading.Event()
    left.open_flows = lambda table: counted.set() or {}  # type: ignore[assignment, return-value, func-returns-value, method-assign]
    modes.start("left", TABLE)
    assert counted.wait(10)
    modes.maintain(TABLE)
    assert (ended, left.tables) == ([], [])
    left.failing = None
    modes.maintain(TABLE)
    assert left.tables == [TABLE]
    until(lambda: ended == ["left"], "it is over")


def test_a_mode_that_cannot_run_here_does_not_drain(modes: Draining, left: Mode) -> None:
    left.failing = Unsupported("a feature", "not here")
    with pytest.raises(Unsupported):
        modes.start("left", TABLE)


@pytest.mark.parametrize("end", [Draining.close, lambda modes: modes.release("left")], ids=["agent", "mode"])
def test_nothing_is_left_open(modes: Draining, left: Mode, end: Callable[[Draining], None]) -> None:
    modes.start("left", TABLE)
    end(modes)
    assert left.calls[-1] == "close"
    assert modes.names == frozenset()


def flow(service: str | None, protocol: str = "TCP", idle: int | None = 5, client: str = "10.0.0.1:4000") -> FlowRow:
    return FlowRow(
        service=service, protocol=protocol, client=client, frontend="10.96.0.1:80", backend="10.0.0.2:8080",
        source=client, state="established", idle=idle,
    )  # fmt: skip


# fmt: off
OPEN = [
    pytest.param([flow("a/b:c", idle=None)], "1 TCP flow is open: 1 of a/b:c", id="no idle time is known"),
    pytest.param([flow(None)], "1 TCP flow is open: 1 of 10.96.0.1:80; idle for longest, 5 s: TCP 10.0.0.1:4000 -> 10.96.0.1:80", id="no name is known"),
    pytest.param([*[flow(f"n/{name}:p") for name in "aaabbcdd"], flow("n/e:p", idle=9, client="10.0.0.9:9")],
        "9 TCP flows are open: 3 of n/a:p, 2 of n/b:p, 2 of n/d:p, 2 of others; idle for longest, 9 s: TCP 10.0.0.9:9 -> 10.96.0.1:80", id="many Services"),
    pytest.param([flow("n/s:d", "UDP", 170), flow("n/s:d", "UDP", 40), flow("n/w:h")],
        "1 TCP and 2 UDP flows are open: 2 of n/s:d, 1 of n/w:h; idle for longest, 170 s: UDP 10.0.0.1:4000 -> 10.96.0.1:80; UDP flows end 180 s after their last datagram, the last in 140 s if all are silent", id="datagrams end by themselves"),
    pytest.param([flow("n/s:d", "UDP", 200)],
        "1 UDP flow is open: 1 of n/s:d; idle for longest, 200 s: UDP 10.0.0.1:4000 -> 10.96.0.1:80; UDP flows end 180 s after their last datagram, the last in 0 s if all are silent", id="and are about to"),
]
# fmt: on


@pytest.mark.parametrize(("rows", "text"), OPEN)
def test_what_is_waited_for_is_named_with_its_end(rows: list[FlowRow], text: str) -> None:
    assert still_open(rows, 180) == text
