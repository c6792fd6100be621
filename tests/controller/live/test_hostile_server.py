"""Whatever a server answers, the reader lives, keeps what it has, says what is wrong, and reads on afterwards.

Real TLS, real bytes: named cases first, then whatever hypothesis thinks of.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_proxy.controller.kubernetes import apiserver, known
from hybrid_proxy.controller.kubernetes.apiserver import Kubernetes, RetryPolicy
from hybrid_proxy.controller.kubernetes.model import KINDS, Removed, SourceState
from hybrid_proxy.controller.kubernetes.rate_limit import RateLimit
from hybrid_proxy.workshop.lab.apiserver import endpoint_slice, node, service
from tests.controller.watching import Watcher
from tests.fakes.hostile import HostileServer, Reply, Request, framed, listed
from tests.properties import examples
from tests.waiting import until

PATIENCE = RetryPolicy(first=0.01, longest=0.05, silence=5.0, rarely=0.1)
MANY = 10_000
BOMB = gzip.compress(b"\0" * (64 << 20))
OBJECTS = {
    "Service": [service(index) for index in range(4)],
    "EndpointSlice": [endpoint_slice(index, range(3), 3) for index in range(4)],
    "Node": [node("node-0")],
    "ServiceCIDR": [{"kind": "ServiceCIDR", "metadata": {"name": "a"}, "spec": {"cidrs": ["10.96.0.0/12"]}}],
}


def versioned(number: int, obj: dict[str, Any]) -> dict[str, Any]:
    obj["metadata"]["resourceVersion"] = str(number)
    return obj


for objects in OBJECTS.values():
    for number, obj in enumerate(objects, 10):
        versioned(number, obj)


@pytest.fixture(scope="module")
def server() -> Iterator[HostileServer]:
    with HostileServer(OBJECTS) as made:
        yield made


@pytest.fixture
def watcher(server: HostileServer) -> Iterator[Watcher]:
    """One that knows everything."""
    server.turn(None)
    source = Kubernetes("node-0", kubeconfig=str(server.kubeconfig()), rate_limit=RateLimit(rate=0), policy=PATIENCE)
    made = Watcher(source)
    made.complete()
    yield made
    server.turn(None)
    made.stop()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("watch-")] == []


def suffer(
    server: HostileServer, watcher: Watcher, reply: Callable[[Request], Reply | None], times: int = 3, words: str = ""
) -> None:
    """Every kind gets this answer so often; then the server is well again, and everything is as it was.

    Meanwhile a kind says these words; what it says first may be that its connection was cut.
    """
    known = {kind: dict(objects) for kind, objects in watcher.state.items()}
    seen = len(watcher.events)
    server.turn(reply)
    watcher.until(lambda: all(server.answered[kind] >= times for kind in KINDS), "they asked, and asked again")
    watcher.until(lambda: any(words in kind.why for kind in watcher.source.states()), f"they say {words!r}")
    assert [state for state in watcher.events[seen:] if isinstance(state, Removed)] == []
    assert watcher.state == known, "what was known stays"
    recover(server, watcher)
    assert watcher.state == known


def recover(server: HostileServer, watcher: Watcher) -> None:
    """The server answers as it should again, and is read."""
    server.turn(None)
    watcher.until(lambda: all(state.state == "read" for state in watcher.source.states()), "all is well again")


def test_the_receiver_of_an_event_may_wait_for_a_caller_of_states(server: HostileServer) -> None:
    """The receiver of events waits for a thread that asks for the states of the kinds: no deadlock."""
    asked: list[bool] = []

    def report(event: object) -> None:
        if isinstance(event, SourceState):
            asking = threading.Thread(target=source.states)
            asking.start()
            asking.join(10)
            asked.append(not asking.is_alive())

    server.turn(None)
    source = Kubernetes("node-0", kubeconfig=str(server.kubeconfig()), rate_limit=RateLimit(rate=0), policy=PATIENCE)
    stop = threading.Event()
    running = threading.Thread(target=source.run, args=(report, stop))
    running.start()
    try:
        until(lambda: asked, "a state is reported")
        server.turn(always(framed("500 Internal Server Error", b"{}")))
        until(lambda: len(asked) > 1, "the loss is reported")
    finally:
        server.turn(None)
        stop.set()
        running.join(30)
    assert all(asked)


def always(raw: bytes, *, rude: bool = False) -> Callable[[Request], Reply]:
    return lambda _: Reply(lambda: iter([raw]), rude)


def on_lists(answer: Callable[[Request], bytes]) -> Callable[[Request], Reply]:
    """Version unknown, so that they list; then this."""

    def reply(request: Request) -> Reply:
        raw = framed("410 Gone", b"{}") if request.watch else answer(request)
        return Reply(lambda: iter([raw]))

    return reply


def said(watcher: Watcher) -> str:
    return " ".join(state.message for state in watcher.of(SourceState) if not state.healthy)


def body(value: object) -> Callable[[Request], bytes]:
    return lambda _: framed("200 OK", json.dumps(value).encode())


# fmt: off
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param(body({"kind": "PodList", "metadata": {"resourceVersion": "9"}, "items": []}),
                     "'PodList'", id="another kind"),
        pytest.param(body({"kind": "PodList", "metadata": {"resourceVersion": "9"}}),
                     "", id="another kind without items"),
        pytest.param(body({"kind": "Status", "metadata": {}, "status": "Success", "items": None}),
                     "'Status'", id="a status"),
        pytest.param(body({"metadata": {"resourceVersion": "9"}, "items": []}), "`kind`", id="no kind"),
        pytest.param(lambda r: framed("200 OK", json.dumps(
                         {"kind": f"{r.kind}List", "metadata": {}, "items": []}).encode()),
                     "resourceVersion", id="no version"),
        pytest.param(lambda r: framed("200 OK", json.dumps(
                         {"kind": f"{r.kind}List", "metadata": {"resourceVersion": "9"}}).encode()),
                     "`items`", id="no items"),
        pytest.param(lambda r: framed("200 OK", json.dumps(listed(r.kind, OBJECTS[r.kind] * 2)).encode()),
                     "", id="objects that come twice"),
        pytest.param(lambda _: framed("200 OK", b'{"x":' + b"[" * 100_000), "", id="deep"),
        pytest.param(lambda _: framed("200 OK", b'{"items": [' + b'{"a":' * 100_000), "",
                     id="deep objects"),
        pytest.param(lambda _: framed("200 OK", b"<html>"), "", id="HTML"),
        pytest.param(lambda _: framed("200 OK", b""), "", id="nothing"),
        pytest.param(lambda _: framed("200 OK", b'{"kind": "\xff\xfe"}'), "", id="not UTF-8"),
        pytest.param(lambda _: framed("200 OK", b"{}" * 20, headers={"Content-Length": "100"}),
                     "", id="less than was said"),
        pytest.param(lambda _: framed("200 OK", BOMB, headers={"Content-Encoding": "gzip"}),
                     "", id="compressed"),
        pytest.param(lambda _: framed("302 Found", b"", headers={"Location": "https://127.0.0.1:1/"}),
                     "302 Found", id="a redirect"),
        pytest.param(lambda _: b"SSH-2.0-OpenSSH_9.6\r\n", "", id="no HTTP"),
        pytest.param(lambda _: framed("500 Oops", json.dumps({"message": "x\n" * 20_000}).encode()),
                     "…", id="a long message"),
        pytest.param(lambda _: framed("503 Busy", b"{}", headers={"Retry-After": "0" * 5000}),
                     "503", id="a long header"),
    ],
)
def test_answers_that_are_no_list(
    answer: Callable[[Request], bytes], words: str, server: HostileServer, watcher: Watcher,
    caplog: pytest.LogCaptureFixture,
) -> None:
    suffer(server, watcher, on_lists(answer), words=words)

    assert said(watcher)
    assert all(len(state.message) < 1500 and state.message.isprintable() for state in watcher.of(SourceState))
    assert "should not happen" not in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        pytest.param({"type": "DELETED", "object": {"kind": "Pod"}},                        id="a Pod"),
        pytest.param({"type": "ERROR", "object": {"code": 500, "message": "x" * 100_000}},  id="a long error"),
        pytest.param({"type": "ERROR", "object": [1, 2]},                                   id="an odd error"),
        pytest.param({"type": "BOOKMARK", "object": {"metadata": 5}},                       id="an odd bookmark"),
        pytest.param({"type": "SYNC", "object": {"kind": "Status"}},                        id="an unknown type"),
        pytest.param({"type": 5, "object": None},                                           id="a numeric type"),
        pytest.param([],                                                                    id="a list"),
    ],
)
def test_events_that_are_none(
    line: Any, server: HostileServer, watcher: Watcher, caplog: pytest.LogCaptureFixture
) -> None:
    def reply(request: Request) -> Reply | None:
        if not request.watch:
            return None
        event = line
        if isinstance(line, dict) and line["object"] == {"kind": "Pod"}:
            event = {"type": "DELETED", "object": OBJECTS[request.kind][0] | {"kind": "Pod"}}
        return Reply(lambda: iter([framed("200 OK", json.dumps(event).encode() + b"\n", "close")]))

    suffer(server, watcher, reply)
    assert "should not happen" not in caplog.text


# fmt: on


def test_objects_without_names_remove_nothing(server: HostileServer, watcher: Watcher) -> None:
    """Each may be any of those that are known."""
    nameless = [7, {"metadata": {}}, {"spec": {}}, "x"]
    suffer(server, watcher, on_lists(lambda r: framed("200 OK", json.dumps(listed(r.kind, nameless)).encode())))


# Without an end


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are reached within a second."""
    for name, bytes_ in (
        ("_MAX_KIND", 1 << 20),
        ("_MAX_PAGE", 1 << 20),
        ("_MAX_WHOLE", 1 << 20),
        ("_MAX_LINE", 1 << 20),
    ):
        monkeypatch.setattr(known if name == "_MAX_KIND" else apiserver, name, bytes_)


def endless(kind: str) -> Iterator[dict[str, Any]]:
    make = {"Service": service, "EndpointSlice": lambda number: endpoint_slice(number, range(3), 3)}.get(kind)
    for number in range(MANY * MANY):
        one = make(number % MANY) if make else {"kind": kind, "metadata": {}, "spec": {"cidrs": ["10.0.0.0/8"]}}
        one["metadata"]["name"] = f"endless-{number}"
        yield versioned(number + 1, one)


def test_a_list_without_an_end(small: None, server: HostileServer, watcher: Watcher) -> None:
    """Each page is as it should be, and says that there are more."""
    objects = {kind: endless(kind) for kind in KINDS}

    def answer(request: Request) -> bytes:
        items = [next(objects[request.kind]) for _ in range(100)]
        return framed("200 OK", json.dumps(listed(request.kind, items, **{"continue": "more"})).encode())

    suffer(server, watcher, on_lists(answer), times=25)
    assert "would take more than 1 MiB of memory" in said(watcher)


def test_pages_with_nothing_in_them_without_an_end(
    server: HostileServer, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apiserver, "_MAX_EMPTY", 5)
    suffer(
        server, watcher,
        on_lists(lambda r: framed("200 OK", json.dumps(listed(r.kind, [], **{"continue": "more"})).encode())), times=20,
    )  # fmt: skip
    assert "pages with nothing in them" in said(watcher)


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_a_body_without_an_end(framing: str, small: None, server: HostileServer, watcher: Watcher) -> None:
    def pieces() -> Iterator[bytes]:
        head = framed("200 OK", b"", "close", {"Transfer-Encoding": "chunked"} if framing == "chunked" else {})
        yield head
        piece = b" " * 65_536
        while True:
            yield b"10000\r\n%s\r\n" % piece if framing == "chunked" else piece

    def reply(request: Request) -> Reply:
        return Reply(lambda: iter([framed("410 Gone", b"{}")])) if request.watch else Reply(pieces)

    server.turn(reply)
    words = "the answer has more than 1 MiB"
    watcher.until(lambda: all(words in state.why for state in watcher.source.states()), "each kind says so")
    assert said(watcher).count(words) == 1
    recover(server, watcher)


def test_an_event_without_an_end(small: None, server: HostileServer, watcher: Watcher) -> None:
    def pieces() -> Iterator[bytes]:
        yield framed("200 OK", b'{"type":"ADDED","object":{"a":"', "close")
        while True:
            yield b"x" * 65_536

    server.turn(lambda request: Reply(pieces) if request.watch else None)
    watcher.until(lambda: said(watcher).count("an event is longer than 1 MiB") == 4, "each kind says so")
    recover(server, watcher)


def test_objects_without_an_end(small: None, server: HostileServer, watcher: Watcher) -> None:
    """A stream that never stops sending objects; what came before is kept."""

    def pieces(kind: str) -> Iterator[bytes]:
        yield framed("200 OK", b"", "close")
        for obj in endless(kind):
            newer = versioned(1000 + int(obj["metadata"]["resourceVersion"]), obj)
            yield json.dumps({"type": "ADDED", "object": newer}).encode() + b"\n"

    server.turn(lambda request: Reply(lambda: pieces(request.kind)) if request.watch else None)
    watcher.until(lambda: "Services, which would take more than 1 MiB of memory" in said(watcher), "it says so")
    assert len(watcher.state["Service"]) <= (1 << 20) // 1000
    server.turn(None)


# Whatever else


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just("9" * 400))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
metadata = st.fixed_dictionaries(
    {},
    optional={
        "resourceVersion": scalars, "continue": scalars, "name": scalars, "namespace": scalars,
        "annotations": values, "labels": values,
    },
)  # fmt: skip
documents = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["PodList", "Pod", "List", "Status", "Table", "", None, 5]),
        "metadata": metadata | values,
        "items": values, "type": st.sampled_from(["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "", 1]),
        "object": metadata | values, "code": scalars, "reason": scalars, "message": scalars,
    },
)  # fmt: skip
texts = st.one_of(
    st.binary(max_size=200),
    values.map(lambda value: json.dumps(value).encode()),
    documents.map(lambda value: json.dumps(value).encode() + b"\n"),
    st.builds(
        lambda letter, count: letter * count,
        st.sampled_from([b"[", b'{"a":', b"\n", b"\0", b"1"]),
        st.integers(1, 50_000),
    ),
)
statuses = st.sampled_from(
    ["200 OK"] * 4 + ["201 Created", "204 No Content", "206 Partial Content", "301 Moved", "400 Bad Request",
    "401 Unauthorized", "403 Forbidden", "404 Not Found", "410 Gone", "429 Too Many", "500 ", "503", "504 Timeout",
    "999 \x7f"]
)  # fmt: skip
headers = st.dictionaries(
    st.sampled_from(
        ["Retry-After", "Content-Length", "Content-Encoding", "Transfer-Encoding", "Location", "Content-Type"]
    ),
    st.sampled_from(["0", "-1", "1", "999999999999999999999", "gzip", "chunked", "deflate, br", "x", ""]),
    max_size=2,
).filter(lambda head: head.get("Retry-After", "0") in ("0", "-1", "x", ""))
answers = st.builds(framed, statuses, texts, st.sampled_from(["length", "chunked", "close"]), headers) | st.binary(
    max_size=60
)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=answers, share=st.floats(0, 1), rude=st.booleans())
def test_whatever_it_answers(server: HostileServer, watcher: Watcher, raw: bytes, share: float, rude: bool) -> None:
    """All of it or a part, and then the connection ends, or is reset."""
    suffer(server, watcher, always(raw[: max(1, round(share * len(raw)))], rude=rude), times=2)
