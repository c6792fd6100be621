"""The states of synchronization: what is due when, and what a failure or another mode means."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from hybrid_proxy.controller.agent.history import History
from hybrid_proxy.controller.agent.syncer import (
    CEDE_SECONDS,
    FIRST_RETRY,
    LONGEST_RETRY,
    MIN_REST,
    TRANSITIONS,
    Input,
    State,
    Syncer,
)
from hybrid_proxy.controller.kubernetes.model import (
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Node,
    Removed,
    Replaced,
    Service,
    ServicePort,
    Superseded,
    Upserted,
)
from hybrid_proxy.controller.semantics.cluster import Cluster
from hybrid_proxy.controller.semantics.entries import Settings
from hybrid_proxy.controller.serving.counters import Counters
from hybrid_proxy.controller.serving.health import Health
from hybrid_proxy.dataplane.errors import SyncError, Unsupported
from hybrid_proxy.dataplane.mode import SyncResult
from hybrid_proxy.dataplane.table import Protocol, Remembered, ServiceTable

NEVER = float("inf")
PORTS = (EndpointPort("http", Protocol.TCP, 80),)


class Mode:
    """Programs tables, or fails."""

    name = "fake"

    def __init__(self) -> None:
        self.tables: list[ServiceTable] = []
        self.error: Exception | None = None
        self.result = SyncResult(changed=1)

    def prewarm(self, ports: int, endpoints: int) -> None:
        pass

    def sync(self, table: ServiceTable) -> SyncResult:
        if self.error is not None:
            raise self.error
        self.tables.append(table)
        return self.result


class World:
    """A syncer, its mode, and a clock that stands still."""

    def __init__(self, *, listed: bool = True) -> None:
        self.now = 1000.0
        self.counters, self.health = Counters(), Health(60.0, needs_node=False)
        self.mode: Any = Mode()
        self.history = History(Path("/nowhere"))
        self.syncer = Syncer(
            Cluster("me", ("Service", "Node")), Settings("me"), self.counters, self.health,
            clock=lambda: self.now, wall=lambda: self.now,
        )  # fmt: skip
        if listed:
            self.syncer.observe(Replaced("Service", ()))
            self.syncer.observe(Replaced("Node", (Node("me"),)))

    def sync(self, *, first: bool = False) -> SyncResult | None:
        result = self.syncer.sync(self.mode, first=first)
        self.syncer.log.flush(self.history.programmed(self.syncer.builder.table))
        return result

    def change(self, number: int = 1, received: float = 0.0, *superseded: Superseded) -> None:
        port = ServicePort("http", Protocol.TCP, 80)
        service = Service("d", f"web-{number}", "ClusterIP", (f"10.96.0.{number}",), ports=(port,))
        self.syncer.observe(Upserted(service, received), superseded)


@pytest.fixture
def world() -> World:
    return World()


def test_every_state_is_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(State)
    assert set(itertools.chain(*(inputs for inputs in TRANSITIONS.values()))) == set(Input)
    assert {after for inputs in TRANSITIONS.values() for after in inputs.values()} == set(State)


def test_nothing_is_due_before_every_kind_was_listed() -> None:
    world = World(listed=False)
    world.syncer.observe(Replaced("Service", ()))
    world.change()
    assert (world.syncer.state, world.syncer.due, world.syncer.waits) == (State.LISTING, NEVER, False)
    assert world.health.awaited == ("Node",)
    world.syncer.observe(Replaced("Node", ()))
    assert (world.syncer.state, world.syncer.waits) == (State.PENDING, True)
    assert world.syncer.due <= world.now


def test_an_empty_cluster_is_programmed_too(world: World) -> None:
    assert world.sync(first=True) is not None
    assert (world.syncer.state, world.syncer.due) == (State.SYNCED, NEVER)
    assert len(world.mode.tables) == 1


def test_clients_that_cannot_be_remembered_keep_no_table_from_being_programmed(world: World) -> None:
    clients = (Remembered(("d/web-1:http", 4, 6), "192.0.2.1", "10.77.1.11", 80),)
    world.mode.error = SyncError("no room for clients")
    for error in (world.mode.error, None):
        world.mode.error = error
        world.syncer.sync(world.mode, first=True, clients=lambda _: clients)
    world.syncer.restart(Settings("me"))
    world.syncer.sync(world.mode, first=True, clients=lambda _: clients)
    assert [table.clients for table in world.mode.tables] == [(), clients]


def test_the_first_table_makes_it_ready(world: World) -> None:
    world.now += 2.5
    world.sync(first=True)
    world.now += 1
    world.change()
    world.sync()
    assert world.syncer.ready_seconds == 2.5


def test_changes_rest_after_a_sync(world: World) -> None:
    world.sync(first=True)
    world.change()
    assert world.syncer.due == pytest.approx(world.now + MIN_REST)
    world.syncer.rest = 10.0
    world.sync()
    world.change(2)
    assert world.syncer.due == world.now + 10.0


def test_what_changes_nothing_is_not_programmed(world: World) -> None:
    world.sync(first=True)
    world.syncer.observe(Upserted(Node("me")))
    assert world.syncer.state is State.SYNCED


@pytest.mark.parametrize("cause", ["addresses", "settings"])
def test_other_causes(world: World, cause: str) -> None:
    world.sync(first=True)
    if cause == "addresses":
        world.syncer.set_addresses(("192.0.2.1",))
    else:
        world.syncer.rest = 10.0
        world.syncer.set_settings(Settings("me", masquerade_all=True))
        assert world.syncer.due == 0.0, "the user waits for it"
    assert world.syncer.state is State.PENDING
    world.sync()
    world.syncer.set_addresses(("192.0.2.1",) if cause == "addresses" else ())
    assert world.syncer.state is State.SYNCED, "these are known"


def test_a_failure_is_retried_ever_more_rarely(world: World) -> None:
    world.sync(first=True)
    world.change()
    world.mode.error = SyncError("no")
    delays = []
    for _ in range(9):
        assert world.sync() is None
        delays.append(world.syncer.due - world.now)
        world.now = world.syncer.due
    assert delays == [FIRST_RETRY * 2**n for n in range(6)] + [LONGEST_RETRY] * 3
    assert (world.syncer.state, world.syncer.error, world.counters.sync_failures) == (State.RETRYING, "no", {"fake": 9})
    world.mode.error = None
    assert world.sync() is not None
    assert (world.syncer.state, world.syncer.error) == (State.SYNCED, "")
    world.mode.error = SyncError("no")
    world.change(2)
    world.sync()
    assert world.syncer.due == world.now + FIRST_RETRY, "it begins anew"


def test_changes_do_not_hasten_a_retry(world: World) -> None:
    world.mode.error = SyncError("no")
    world.sync(first=True)
    due = world.syncer.due
    world.change()
    assert (world.syncer.state, world.syncer.due) == (State.RETRYING, due)


@pytest.mark.parametrize("failed", [False, True])
def test_another_mode_gets_everything_at_once(world: World, failed: bool) -> None:
    world.change()
    world.sync(first=True)
    if failed:
        world.change(2)
        world.mode.error = SyncError("no")
        world.sync()
    world.syncer.restart(Settings("me"))
    assert (world.syncer.state, world.syncer.due) == (State.PENDING, 0.0)
    world.mode = Mode()
    world.sync(first=True)
    (table,) = world.mode.tables
    assert set(table.services) >= {"d/web-1"}
    assert table.base == 0, "it does not build on a table that the mode never had"


def test_a_mode_that_cannot_program_its_first_table(world: World) -> None:
    world.change(received=world.now)
    world.mode.error = Unsupported("a thing", "it is not there")
    with pytest.raises(Unsupported):
        world.sync(first=True)
    assert (world.syncer.state, world.syncer.error) == (State.PENDING, "")
    world.mode = Mode()
    world.sync(first=True)
    assert len(world.syncer.latencies) == 1, "what waited for it still counts"


def test_later_it_is_a_failure_like_others(world: World) -> None:
    world.sync(first=True)
    world.change()
    world.mode.error = Unsupported("a thing", "it is not there")
    assert world.sync() is None
    assert world.syncer.state is State.RETRYING


def test_latency_counts_from_arrival(world: World) -> None:
    world.sync(first=True)
    world.change(1, received=world.now)
    world.now += 0.25
    world.change(2, world.now, Superseded(world.now - 0.125))
    world.now += 0.5
    world.sync()
    assert sorted(world.syncer.latencies) == [0.5, 0.625, 0.75]
    assert world.counters.service_changes == 3


def test_the_log_has_one_line_a_second(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hybrid_proxy")
    world.sync(first=True)
    for number in range(1, 4):
        world.change(number)
        world.sync()
    assert [(line[0], line[-1]) for line in _logged(caplog)] == [("1 service port", "d/web-1 (Service created)")], (
        "the first at once"
    )
    for number in range(4, 9):
        world.change(number)
    world.sync()
    world.now += 1.0
    world.syncer.log.flush()
    world.syncer.log.flush()
    _, (ports, services, *_, names) = _logged(caplog)
    assert (ports, services) == ("3 service ports", "7 Services"), "as many as are named, and not named"
    assert names.startswith("d/web-2 (Service created), d/web-3 (Service created), d/web-")
    assert names.endswith(" and 4 more")


def test_the_log_says_what_changed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hybrid_proxy.controller.agent.syncer")
    world.change()
    world.sync(first=True)
    for ends in (("10.1.0.1", "10.1.0.2"), ("10.1.0.2", "10.1.0.3"), ("10.1.0.2",), ("10.1.0.2", "10.1.0.3")):
        slices = EndpointSlice("d", "web-1-a", "d/web-1", 4, PORTS, tuple(Endpoint(end) for end in ends))
        world.syncer.observe(Upserted(slices))
        world.sync()
    world.now += 1.0
    world.syncer.log.flush()
    assert [line[-1] for line in _logged(caplog) if len(line) > 1] == [
        "d/web-1 (ready: 10.1.0.1, 10.1.0.2)", "d/web-1 (removed: 10.1.0.3, 10.1.0.1; ready: 10.1.0.3 (2 x))"
    ]  # fmt: skip


def test_the_log_names_the_services_that_changed_and_no_others(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hybrid_proxy.controller.agent.syncer")
    for number in (1, 2):
        world.change(number)
    world.sync(first=True)
    world.mode.result = SyncResult()
    slices = EndpointSlice("d", "web-1-a", "d/web-1", 4, PORTS, (Endpoint("10.1.0.1", ready=False),))
    world.syncer.observe(Upserted(slices))
    world.sync()
    assert world.syncer.builder.table.changed == {"d/web-1"}, "nothing of it is programmed otherwise"
    world.mode.result = SyncResult(changed=1)
    world.change(3)
    world.sync()
    assert [(line[1], line[-1]) for line in _logged(caplog)] == [("1 Service", "d/web-3 (Service created)")]


def _logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, ...]]:
    return [record.args for record in caplog.records if record.args]  # type: ignore[misc]


def test_the_log_warns_of_a_service_that_lost_its_last_backend(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hybrid_proxy.controller.agent.syncer")
    world.change()
    world.sync(first=True)
    for ends in ((), ("10.1.0.1",), (), ("10.1.0.1",)):
        slices = EndpointSlice("d", "web-1-a", "d/web-1", 4, PORTS, tuple(Endpoint(end) for end in ends))
        world.syncer.observe(Upserted(slices))
        world.now += 1.0
        world.sync()
    assert [
        (record.levelname, record.getMessage()) for record in caplog.records if "without" in record.getMessage()
    ] == [
        ("WARNING", "without a backend: d/web-1:http"),
        ("INFO", "no longer without a backend: d/web-1:http"),
    ]  # fmt: skip


def test_the_log_does_not_warn_of_a_new_service_without_endpoints(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hybrid_proxy.controller.agent.syncer")
    world.change(1)
    world.sync(first=True)
    world.change(2)
    world.now += 1.0
    world.sync()
    assert [record.getMessage() for record in caplog.records if "without" in record.getMessage()] == []


def test_a_service_that_moved_is_ceded_when_a_kube_proxy_has_had_time_to_serve_it() -> None:
    world = World()
    world.syncer.cluster = Cluster("me", ("Service", "Node"), shares=True)
    world.change()
    port = EndpointPort("http", Protocol.TCP, 80)
    world.syncer.observe(Upserted(EndpointSlice("d", "web-1-a", "d/web-1", 4, (port,), (Endpoint("10.1.0.1"),))))
    world.sync(first=True)
    world.syncer.observe(Removed("Service", "d/web-1"))
    world.sync()
    world.syncer.cede_moved_services()
    world.now += CEDE_SECONDS - 0.1
    world.syncer.cede_moved_services()
    assert world.syncer.state is State.SYNCED
    world.now += 0.2
    world.syncer.cede_moved_services()
    assert world.syncer.state is State.PENDING
    world.sync()
    assert [len(entry.frontends) for entry in world.mode.tables[-1].entries()] == [0]
    world.syncer.cede_moved_services()
    assert world.syncer.state is State.SYNCED, "once"


def test_a_conflict_is_logged_when_it_begins_and_when_it_ends(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hybrid_proxy.controller.agent.syncer")

    def logged() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("conflict")]
        caplog.clear()
        return lines

    port = ServicePort("http", Protocol.TCP, 80)
    for name in ("first", "second"):
        world.syncer.observe(Upserted(Service("d", name, "ClusterIP", ("10.96.0.9",), ports=(port,)), 0.0))
    world.sync(first=True)
    (line,) = logged()
    assert line.startswith("conflict: d/second: ")
    assert "d/first" in line
    for number in range(3):  # other changes, and a mode that is opened again
        world.change(number)
        world.sync()
    world.syncer.restart(Settings("me"))
    world.sync()
    assert logged() == []
    world.syncer.observe(Removed("Service", "d/first"))
    world.sync()
    assert logged() == [line.replace("conflict:", "conflict is over:")]
