"""The listings as people see them, at 80 and at 120 columns: tests/controller/screens has the screens."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hybrid_proxy.controller.commands import inspect, listings, views
from hybrid_proxy.controller.commands.columns import Column, Screen, table
from hybrid_proxy.controller.commands.listings import Change, ModeRow
from hybrid_proxy.controller.commands.views import Programmed, frontends, note_lacks
from hybrid_proxy.controller.semantics.lacks import Lack
from hybrid_proxy.dataplane.mode import View
from hybrid_proxy.dataplane.reports import BackendRow, Ejection, FlowRow, ServiceRow
from hybrid_proxy.dataplane.table import Protocol, frontend_text
from tests.workshop.top.samples import backend, service

SCREENS = Path(__file__).parent / "screens"

WEB4 = service("default/web:http", 1517, "10.96.0.10:80", backends=3, when_empty="reject", chosen_by="random")
WEB6 = service("default/web:http", 12, "[fd96::10]:80", backends=3, when_empty="reject", chosen_by="random")
SHOP = service("default/shop-frontend:https", 20_417, "10.96.14.201:443", backends=12, chosen_by="connection")
SHOP.frontends += ["198.51.100.7:443", "node port 30443"]
DNS = service("kube-system/kube-dns:dns", 88_012, "10.96.0.2:53", protocol="UDP", backends=2, chosen_by="round-robin")
LOST = service("default/lost:http", 0, "10.96.0.99:80", backends=0, when_empty="reject", chosen_by="random")
OUTER = service("shop/web:http", 41, "10.96.0.31:80", backends=1, local_backends=0, chosen_by="random")
OUTER.frontends += ["node port 30080"]
AWAY = "no endpoint on this node, there are some on others"
LOST.without_backend, LOST.reason = "all", "the service has no endpoints"
OUTER.without_backend, OUTER.reason = "outside", f"externalTrafficPolicy Local: {AWAY}"
SICK = service("shop/payments:grpc", 310, "10.96.77.3:9090", backends=2, affinity=True, chosen_by="client")
SERVICES = [WEB4, WEB6, SHOP, LOST, DNS, OUTER, SICK]
EJECTIONS = [
    Ejection("default/web:http", "10.77.1.12:8080", ejected=True, seconds=8.0, state="ejected for 8 s: 3 failed"),
    Ejection("shop/payments:grpc", "10.77.1.31:9090", ejected=True, seconds=20.0, state="ejected for 20 s: 3 failed"),
    Ejection("shop/payments:grpc", "10.77.2.31:9090", ejected=False, seconds=None, state="kept: too many fail"),
]

OUT = "ejected for 8 s: 3 connections one after the other failed, the last one was refused"
BACKENDS = [
    backend("10.77.1.11:8080", 517, service="default/web:http"),
    backend("10.77.1.12:8080", 483, service="default/web:http", failures=3, state=OUT),
    backend("10.77.2.13:8080", 517, service="default/web:http", failures=1),
    backend("[fd77:1::11]:8080", 12, service="default/web:http"),
    backend("10.77.2.40:5353", 88_012, service="kube-system/kube-dns:dns", protocol="UDP"),
    backend("10.77.9.9:80", 3, service="default/old:http", used=False, state="in no backend set"),
]


def flow(client: str, frontend: str, goal: str | None, state: str = "established", **more: Any) -> FlowRow:
    fields = {"service": "default/web:http", "protocol": "TCP", "source": client, "idle": 4, "fast_path": True}
    return FlowRow(client=client, frontend=frontend, backend=goal, state=state, **(fields | more))


FLOWS = [
    flow("192.168.77.10:60526", "198.51.100.7:80", "10.77.1.11:8080", idle=7210, source="10.77.1.1:60526"),
    flow("10.77.1.11:41234", "10.96.0.10:80", "10.77.1.12:8080", idle=0),
    flow("[fd77:1::11]:41234", "[fd96::10]:80", "[fd77:2::12]:8080", "closed", idle=61),
    flow("10.77.1.13:33441", "10.96.0.2:53", "10.77.2.40:5353", service="kube-system/kube-dns:dns", protocol="UDP"),
]

MODES = [
    ModeRow("ebpf", works=True, runs=True, missing="", state="serves"),
    ModeRow("nftables", works=True, runs=False, missing="", state="works"),
    ModeRow(
        "ipvs",
        works=False,
        runs=False,
        missing="the kernel has no IPVS (CONFIG_IP_VS): load ip_vs or choose another mode",
        state="cannot work",
    ),
]

LISTINGS = {
    "services": (listings.service_columns(SERVICES, EJECTIONS), SERVICES),
    "backends": (listings.backend_columns(BACKENDS), BACKENDS),
    "flows": (listings.flow_columns(FLOWS), FLOWS),
    "modes": (listings.mode_columns(), MODES),
}
for listed in (*SERVICES, *BACKENDS, *FLOWS):
    listed.mode = "ebpf"
SIZES = {"80": Screen(80), "120": Screen(120), "pipe": Screen(), "wide": Screen(120)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("listing", LISTINGS)
def test_a_listing_looks_as_its_screen(listing: str, size: str) -> None:
    columns, rows = LISTINGS[listing]
    shown = table(columns, rows, SIZES[size], wide=size == "wide")
    assert size == "wide" or max(map(len, shown)) <= (SIZES[size].width or 1000)
    assert "\n".join(shown) + "\n" == (SCREENS / f"{listing}-{size}.txt").read_text()


def test_a_mode_that_watches_no_backend_does_not_say_that_it_serves() -> None:
    watched = msgspec.structs.replace(BACKENDS[0], state=None, failures=0)
    rows = [watched, msgspec.structs.replace(watched, failures=None)]
    (state,) = [column for column in listings.backend_columns(rows) if column.header == "STATE"]
    assert [cell.text for cell in map(state.value, rows)] == ["serving", "used, not watched"]


def test_the_mode_is_a_column_where_there_are_several() -> None:
    rows = [
        ServiceRow(mode=mode, name="a/b", frontends=["1.2.3.4:1"], protocol="TCP", backends=1) for mode in ("x", "y")
    ]
    assert table(listings.service_columns(rows), rows, Screen())[0].split()[0] == "MODE"
    assert table(listings.service_columns(rows[:1]), rows[:1], Screen())[0].split()[0] == "NAME"


# fmt: off
CHANGES = (
    pytest.param(BACKENDS[:2], BACKENDS[:2], [],                             id="nothing"),
    pytest.param(BACKENDS[:1], BACKENDS[:2], [("added", BACKENDS[1])],       id="a-row-comes"),
    pytest.param(BACKENDS[:2], BACKENDS[:1], [("gone", BACKENDS[1])],        id="a-row-goes"),
    pytest.param([backend("1.1.1.1:1", 5)], [backend("1.1.1.1:1", 9)], [],   id="counters-grow"),
)
# fmt: on


@pytest.mark.parametrize(("before", "now", "seen"), CHANGES)
def test_watching_reports_rows_that_differ(
    before: list[BackendRow], now: list[BackendRow], seen: list[tuple[str, BackendRow]]
) -> None:
    found = listings.changes(before, now, listings.backend_columns(now), 0)
    assert [(change.event, change.row) for change in found] == seen


def test_watching_reports_a_state_that_changes_and_names_what_went() -> None:
    columns: tuple[Column[BackendRow], ...] = listings.backend_columns(BACKENDS)
    well, out = backend("1.1.1.1:1", 5), backend("1.1.1.1:1", 5, state="ejected for 8 s: it failed")
    assert [change.event for change in listings.changes([well], [out], columns, 0)] == ["changed"]
    (line,) = table(listings.change_columns(columns), [Change("gone", well, 61)], Screen(80))[1:]
    assert (line.split()[:2], line.split()[-1]) == (["00:01:01", "UTC"], "gone")


def test_watching_tells_from_what_to_what_a_frontend_changed() -> None:
    def rows(*ports: int) -> list[ServiceRow]:
        ends = [[f"10.96.0.10:{port}" for port in ports], ["[fd96::10]:80"]]
        return [ServiceRow(name="a/b:c", frontends=each, protocol="TCP", backends=1) for each in ends]

    columns: tuple[Column[ServiceRow], ...] = listings.service_columns(rows(80))
    (found,) = listings.changes(rows(80), rows(80, 81), columns, 61)
    assert (found.event, found.what) == ("changed", "FRONTEND 10.96.0.10:80 -> 10.96.0.10:80,10.96.0.10:81")
    added = Change("added", rows(80)[1], 60)
    shown = table(listings.change_columns(columns), [added, found], Screen(80))
    assert [line.split()[0] for line in shown] == ["TIME", "00:01:00", "00:01:01", "10.96.0.10:81", "changed:"]
    assert "changed: FRONTEND" in table(listings.change_columns(columns), [added, found], Screen())[2]


def test_of_two_rows_that_look_alike_none_comes_again_and_again() -> None:
    two = 2 * [ServiceRow(name="a/b:c", frontends=["node port 30080"], protocol="TCP", backends=1)]
    columns: tuple[Column[ServiceRow], ...] = listings.service_columns(two)
    assert [*listings.changes(two, two, columns, 0)] == []


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"backends": 2, "ejected": 1, "failing": 2}, "1 of 3 ejected"),
        ({"backends": 2, "ejected": 1, "failing": 3}, "all backends fail"),
        ({"backends": 3, "ejected": 0, "failing": 1}, "1 of 3 failing"),
        ({"backends": 1, "ejected": 0, "failing": 1}, "all backends fail"),
        ({"backends": 3, "ejected": 0, "failing": 0}, "serving"),
        ({"backends": 3, "without_backend": "outside"}, "outside: drops (Local)"),
        ({"backends": 0, "local_backends": 3, "without_backend": "inside"}, "inside: drops (Local)"),
        ({"backends": 1, "failing": 1, "without_backend": "outside"}, "all backends fail"),
        ({"backends": 0, "when_empty": "reject", "without_backend": "all"}, "no backends: rejects"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_service_whose_backends_fail_does_not_serve(fields: dict[str, Any], state: str) -> None:
    """Ejected backends are not among those that get connections, and count all the same."""
    row = ServiceRow(name="a/b:c", frontends=["1.2.3.4:1"], protocol="TCP", **fields)
    of = {column.header: column.value(row) for column in listings.service_columns([row])}
    assert getattr(of["STATE"], "text", of["STATE"]) == state
    assert of["REASON"] == (
        "their last connections failed: hybrid-proxy doctor a/b:c" if state == "all backends fail" else ""
    )


@pytest.mark.parametrize(
    ("lack", "state"),
    [
        (Lack("a/b:c", 4, "all", "no endpoint is ready"), "no backends: rejects"),
        (Lack("a/b:c", 4, "all", "internalTrafficPolicy Local: none here", drops=True), "no backends: drops"),
    ],
    ids=["rejects", "drops"],
)
def test_what_clients_get_is_told_in_modes_whose_objects_do_not_tell(lack: Lack, state: str) -> None:
    row = ServiceRow(name="a/b:c", frontends=["1.2.3.4:1"], protocol="TCP", backends=0)
    note_lacks([row], [lack])
    assert listings.service_state(row, ()).text == state


class _Two(View):
    """Two flows of a mode, of which one is over and the other one is busy."""

    place = "here"

    def services(self) -> list[ServiceRow]:
        return []

    def backends(self, of: str | None = None) -> list[BackendRow]:
        return []

    def flows(self, limit: int) -> tuple[list[FlowRow], int]:
        over = flow("10.77.1.11:1", "10.96.0.10:80", "10.77.1.12:8080", "closed")
        return [over, msgspec.structs.replace(over, client="10.77.1.11:2", state="established", idle=0)], 2


@pytest.mark.parametrize("place", [("fd96::10", 80), ("10.96.0.10", 80), (None, 30080)])
def test_a_frontend_is_known_by_its_text_and_a_node_port_comes_last(place: tuple[str | None, int]) -> None:
    row = ServiceRow(name="a/b:c", protocol="TCP", frontends=[frontend_text(*place)], backends=0)
    assert frontends([row]) == {(*place, Protocol.TCP): "a/b:c"}
    assert sorted(["node port 1", *row.frontends])[place[0] is not None] == "node port 1"


def test_flows_that_are_over_are_listed_after_those_that_are_not() -> None:
    rows, total = Programmed([("userspace", _Two())], None).flows(1)
    assert ([row.state for row in rows], total) == (["established"], 2)


@pytest.mark.parametrize(("busy", "least"), [(0.0, 1.0), (0.3, 2.7)], ids=["short", "long"])
def test_a_list_that_is_watched_takes_a_tenth_of_a_processor_at_most(
    busy: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def programmed(*_: object, **__: object) -> Programmed:
        until = time.process_time() + busy
        while time.process_time() < until:
            pass
        return Programmed([], None)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(views, "programmed", programmed)
    monkeypatch.setattr("time.sleep", sleep)
    words = {"admin_socket": "", "pin_root": None, "service": None, "namespace": None}
    inspect.SERVICES.run(argparse.Namespace(command="services", watch=True, output="json", **words))
    assert slept[0] == 1.0, "the start is not counted"
    assert all(least <= seconds < least + 1.0 for seconds in slept[1:])
