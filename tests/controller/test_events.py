"""Events reach the API server over TLS, repeats are not written, and nothing of it ever holds up the loop."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator

import pytest

from hybrid_proxy.controller.kubernetes.connection import Connection
from hybrid_proxy.controller.kubernetes.events import MOST_NOTES, QUEUE, Recorder
from hybrid_proxy.workshop.lab.apiserver import ApiServer
from tests.waiting import until

ME = "node-0"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as api:
        yield api


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    server.reset()
    return server


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextlib.contextmanager
def recording(
    api: ApiServer, clock: Callable[[], float] = time.monotonic, *, unopened: Connection | None = None
) -> Iterator[Recorder]:
    connection = unopened or Connection(str(api.kubeconfig()), None)
    if unopened is None:
        connection.open()
    recorder = Recorder(connection, ME, clock=clock, retry_seconds=0.02)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()
        connection.close()


def degraded(recorder: Recorder, note: str = "mode iptables serves instead of ipvs") -> None:
    recorder.event("Warning", "ModeDegraded", "SelectMode", note)


def test_an_event_about_the_node(api):
    with recording(api) as recorder:
        degraded(recorder)
        until(api.events, "the event")
    (event,) = api.events()
    assert event["regarding"] == {"kind": "Node", "name": ME, "uid": ME, "apiVersion": "v1"}
    assert event["metadata"]["namespace"] == "default"
    assert event["metadata"]["name"].startswith(f"{ME}.")
    assert (event["type"], event["reason"], event["action"]) == ("Warning", "ModeDegraded", "SelectMode")
    assert (event["reportingController"], event["reportingInstance"]) == ("hybrid-proxy", ME)
    assert event["note"] == "mode iptables serves instead of ipvs"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", event["eventTime"])


def test_an_event_about_a_service_is_in_its_namespace(api):
    with recording(api) as recorder:
        recorder.event("Warning", "NotProgrammed", "ProgramService", "the maps are full", of="shop/web:http")
        until(api.events, "the event")
    (event,) = api.events()
    assert event["regarding"] == {"kind": "Service", "name": "web", "namespace": "shop", "apiVersion": "v1"}
    assert event["metadata"]["namespace"] == "shop"


@pytest.mark.parametrize("step", [pytest.param(400, id="after a silence"), pytest.param(300, id="after half an hour")])
def test_repeats_are_written_again_some_time(api, step):
    clock = Clock()
    with recording(api, clock) as recorder:
        for number in range(7):
            degraded(recorder)
            recorder.event("Normal", "Starting", "StartProxy", f"after it {number}")
            until(lambda number=number: len(api.events("Starting")) == number + 1, "the event after it")
            assert len(api.events("ModeDegraded")) == (number + 1 if step == 400 else 1 + number // 6)
            clock.now += step


def test_what_differs_is_no_repeat(api):
    with recording(api) as recorder:
        for entry in ("a/web:http", "b/web:http", "b/api:http"):
            recorder.event("Warning", "NotProgrammed", "ProgramService", "the maps are full", of=entry)
        until(lambda: len(api.events()) == 3, "three events")


def test_other_words_are_another_event_up_to_a_number(api):
    with recording(api) as recorder:
        for note in (*(f"mode {number}" for number in range(MOST_NOTES)), "mode 0", "one too many"):
            degraded(recorder, note)
        recorder.event("Normal", "Starting", "StartProxy", "after it")
        until(lambda: api.events("Starting"), "the event after it")
    assert [event["note"] for event in api.events("ModeDegraded")] == [f"mode {n}" for n in range(MOST_NOTES)]


def test_what_every_node_finds_is_one_event(api, caplog):
    def tell(recorder: Recorder, note: str) -> None:
        recorder.event("Warning", "ExternalIPsRefused", "ProgramService", note, of="shop/web", once=True)

    with recording(api) as first, recording(api) as second:
        for recorder in (first, second, first):
            tell(recorder, "192.0.2.1 is refused")
            recorder.event("Normal", "Starting", "StartProxy", "after it")
        until(lambda: len(api.events("Starting")) == 2, "the event after it")
        assert len(api.events("ExternalIPsRefused")) == 1, "two nodes say the same"
        tell(second, "192.0.2.2 is refused")
        until(lambda: len(api.events("ExternalIPsRefused")) == 2, "another fact")
    assert "refused an event" not in caplog.text


def test_a_server_that_is_away_gets_them_later(api):
    connection = Connection(str(api.kubeconfig()), None)
    with recording(api, unopened=connection) as recorder:
        degraded(recorder)
        time.sleep(0.1)
        assert api.events() == []
        connection.open()
        until(api.events, "the event")


def test_the_first_event_goes_out_when_the_connection_is_open(api, caplog):
    """It is reported before the configuration of the connection was read; nothing is wrong, and no retry is awaited."""
    caplog.set_level("INFO")
    connection = Connection(str(api.kubeconfig()), None)
    recorder = Recorder(connection, ME, retry_seconds=600)
    recorder.start()
    degraded(recorder)
    until(lambda: not recorder.queued.qsize(), "the event is taken")
    connection.open()
    until(api.events, "the event")
    assert "waits for the API server" not in caplog.text
    recorder.stop()
    connection.close()


def test_errors_of_the_server_are_tried_again(api):
    api.event_faults.answers.extend([(500, {}), (503, {}), (429, {})])
    with recording(api) as recorder:
        degraded(recorder)
        until(api.events, "the event, at the fourth try")


def test_a_refusal_is_logged_and_the_next_event_is_written(api, caplog):
    api.event_faults.answers.append((403, {}))
    with recording(api) as recorder:
        degraded(recorder)
        recorder.event("Normal", "Starting", "StartProxy", "the next one")
        until(lambda: api.events("Starting"), "the next event")
    assert api.events("ModeDegraded") == []
    assert "403" in caplog.text


def test_a_new_token_is_read(api, tmp_path):
    token = tmp_path / "token"
    token.write_text(api.token)
    connection = Connection(str(api.kubeconfig(token_file=token)), None)
    connection.open()
    api.token = "another-token"
    token.write_text("another-token")
    recorder = Recorder(connection, ME, retry_seconds=0.02)
    recorder.start()
    degraded(recorder)
    until(api.events, "the event")
    recorder.stop()
    connection.close()


def test_a_flood_without_a_server_neither_blocks_nor_grows(api, caplog):
    with recording(api, unopened=Connection(str(api.kubeconfig()), None)) as recorder:
        start = time.monotonic()
        for number in range(20 * QUEUE):
            degraded(recorder, f"number {number}")
        assert time.monotonic() - start < 30
        assert recorder.queued.qsize() <= QUEUE
    assert caplog.text.count("are dropped") == 1


def test_a_long_note_is_cut_to_what_the_server_takes(api):
    with recording(api) as recorder:
        degraded(recorder, "é" * 2000)
        until(api.events, "the event")
    note = api.events()[0]["note"]
    assert note.endswith("é…")
    assert 1000 < len(note.encode()) <= 1024


def test_without_an_api_server_nothing_is_kept(caplog):
    recorder = Recorder(None, ME)
    recorder.start()
    for _ in range(2 * QUEUE):
        degraded(recorder)
    assert recorder.queued.qsize() == 0
    assert caplog.text == ""
