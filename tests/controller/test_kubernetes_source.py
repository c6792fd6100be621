"""The Kubernetes source against a real server over TLS, in all weather. See `workshop.lab.apiserver` for the faults."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hybrid_proxy.controller.errors import SourceError
from hybrid_proxy.controller.kubernetes import apiserver
from hybrid_proxy.controller.kubernetes import kubeconfig as kubeconfigs
from hybrid_proxy.controller.kubernetes.apiserver import Kubernetes, RetryPolicy
from hybrid_proxy.controller.kubernetes.connection import StatusError, is_expired
from hybrid_proxy.controller.kubernetes.model import KINDS, Ignored, Removed, Replaced, SourceState, Upserted, key_of
from hybrid_proxy.controller.kubernetes.parse import PROXY_NAME, decode
from hybrid_proxy.controller.kubernetes.rate_limit import RateLimit, TokenBucket
from hybrid_proxy.controller.kubernetes.watch import Versions, decode_head, version_number
from hybrid_proxy.workshop.lab.apiserver import (
    ApiServer,
    endpoint_slice,
    namespace_of,
    node,
    pod_address,
    service,
    slice_name,
)
from tests.controller.credentials import exec_user, program, says
from tests.controller.credentials import kubeconfig as write_kubeconfig
from tests.controller.watching import Watcher
from tests.waiting import until

PLURALS = {"Service": "services", "EndpointSlice": "endpointslices", "Node": "nodes", "ServiceCIDR": "servicecidrs"}
QUICK = RetryPolicy(first=0.02, longest=0.1, silence=5.0, rarely=0.2)
# Whoever pauses is late for every bound of tests.waiting.
PATIENT = msgspec.structs.replace(QUICK, first=6000.0, longest=6000.0, rarely=6000.0)


Start = Callable[..., Watcher]


def quick(**changes: Any) -> RetryPolicy:
    return msgspec.structs.replace(QUICK, **changes)


def key(index: int) -> str:
    """Of a Service of the server."""
    return f"{namespace_of(index)}/shop-{index:05d}"


def slice_key(index: int) -> str:
    """Of its slice."""
    return f"{namespace_of(index)}/{slice_name(index)}"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ApiServer]:
    """Keys and certificates take longest: one server for all tests, emptied before each."""
    with ApiServer(bookmark_every=0.2) as api:
        yield api


@pytest.fixture
def api(shared_server: ApiServer) -> ApiServer:
    shared_server.reset()
    shared_server.populate(6, 2, nodes=["node-0", "node-1"])
    return shared_server


@pytest.fixture
def begin(api: ApiServer) -> Iterator[Start]:
    """Starts a source; all are stopped at the end and no thread may be left."""
    watchers = []

    def start(**options: Any) -> Watcher:
        options = {
            "kubeconfig": str(api.kubeconfig()), "page_size": 500, "policy": QUICK, "rate_limit": RateLimit(rate=0),
            "streams": False,
        } | options  # fmt: skip
        watcher = Watcher(Kubernetes("node-0", **options))
        watchers.append(watcher)
        return watcher

    yield start
    for watcher in watchers:
        watcher.stop()
    assert [t.name for t in threading.enumerate() if t.name.startswith("watch-")] == []


@pytest.fixture
def watch(begin: Start) -> Start:
    """Starts a source, and waits until it has reported all kinds."""

    def start(**options: Any) -> Watcher:
        watcher = begin(**options)
        watcher.complete()
        return watcher

    return start


@pytest.fixture
def watcher(api: ApiServer, watch: Start) -> Watcher:
    """One that has reported all kinds and follows all of them."""
    made = watch()
    connected(api, made)
    return made


# ------------------------------------------------------------------------------------------ what is not served


def test_services_that_the_selectors_keep_away_have_a_reason(api: ApiServer, watcher: Watcher) -> None:
    names, (space, _, served) = ("headless", "external", "foreign"), key(0).partition("/")
    labels = {"foreign": {PROXY_NAME: "another"}}
    specs = {"headless": {"clusterIP": "None", "clusterIPs": ["None"]}, "external": {"type": "ExternalName"}}
    for name in names:
        made = service(0, **specs.get(name, {}))
        made["metadata"] |= {"name": name, "namespace": space, "labels": labels.get(name, {})}
        api.put(made)
    found = {name: watcher.source.ignored(f"{space}/{name}") for name in names}
    assert {name: list(reasons) for name, reasons in found.items()} == {name: [f"{space}/{name}"] for name in names}
    assert "headless" in found["headless"][f"{space}/headless"]
    assert "ExternalName" in found["external"][f"{space}/external"]
    assert "another proxy" in found["foreign"][f"{space}/foreign"]
    assert watcher.source.ignored("foreign") == found["foreign"]
    for absent in (f"{space}/{served}", f"{space}/nothing", "a,b", "../nodes"):
        assert watcher.source.ignored(absent) == {}


def test_a_server_that_does_not_answer_knows_no_reason(api: ApiServer, watcher: Watcher) -> None:
    api.serve("services", False)
    with pytest.raises(SourceError, match="services"):
        watcher.source.ignored("default/web")


def expected(api: ApiServer) -> dict[str, dict[str, object]]:
    """What a perfect reader knows of the server."""
    state: dict[str, dict[str, object]] = {}
    for kind, plural in PLURALS.items():
        raws = [msgspec.json.encode(obj) for obj in api.objects(plural).values()]
        found = [obj for raw in raws if not isinstance(obj := decode(kind, raw), Ignored)]
        state[kind] = {key_of(obj): obj for obj in found if kind != "Node" or obj.name == "node-0"}
    return state


def lists_asked(api: ApiServer, plural: str) -> int:
    return sum(1 for request in api.requests if request.plural == plural and not request.watch)


def connected(api: ApiServer, watcher: Watcher) -> None:
    watcher.until(lambda: api.streams() == 4, "four streams are open")


# ------------------------------------------------------------------------------------------- fair weather


def test_first_lists_report_every_object(api: ApiServer, watch: Start) -> None:
    watcher = watch(kubeconfig=str(api.kubeconfig(url="https://127.0.0.1:1")), master=api.url + "/")

    assert watcher.state == expected(api)
    assert watcher.endpoints(3) == [pod_address(3, 0, 2), pod_address(3, 1, 2)]
    assert list(watcher.state["Node"]) == ["node-0"]
    healthy = watcher.until(lambda: watcher.of(SourceState))
    assert healthy[0].healthy
    assert api.url in healthy[0].message
    assert api.url in watcher.source.describe()


def test_only_what_kube_proxy_watches_is_asked_for(api: ApiServer, watch: Start) -> None:
    api.put(service(90, clusterIP="None", clusterIPs=["None"]))
    api.put(labelled(service(91), "service.kubernetes.io/service-proxy-name", ""))
    api.put(labelled(endpoint_slice(92, [0]), "service.kubernetes.io/headless", ""))
    api.put(labelled(endpoint_slice(93, [0]), "service.kubernetes.io/service-proxy-name", "other"))
    watcher = watch()

    kept = {key.rpartition("/")[2] for key in watcher.state["Service"]}
    assert kept == {f"shop-{i:05d}" for i in range(6)}
    slices = set(watcher.state["EndpointSlice"])
    assert slice_key(92) not in slices
    assert slice_key(93) in slices
    # The server did the work, not the reader.
    selectors = {(r.plural, r.query.get("labelSelector"), r.query.get("fieldSelector")) for r in api.requests}
    assert selectors == {
        ("services", "!service.kubernetes.io/service-proxy-name", "spec.clusterIP!=None"),
        ("endpointslices", "!service.kubernetes.io/headless", None),
        ("nodes", None, "metadata.name=node-0"),
        ("servicecidrs", None, None),
    }


def test_a_proxy_with_a_name_asks_for_its_own_services_alone(api: ApiServer, watch: Start) -> None:
    for number, name in ((90, "lab"), (91, "other"), (92, "")):
        api.put(labelled(service(number), "service.kubernetes.io/service-proxy-name", name))
    watcher = watch(proxy_name="lab")
    assert {key.rpartition("/")[2] for key in watcher.state["Service"]} == {"shop-00090"}
    assert len(watcher.state["EndpointSlice"]) == 6, "slices of all Services: one may come"
    (selector,) = {r.query.get("labelSelector") for r in api.requests if r.plural == "services"}
    assert selector == "service.kubernetes.io/service-proxy-name=lab"

    api.put(service(90))
    api.put(labelled(service(3), "service.kubernetes.io/service-proxy-name", "lab"))
    watcher.until(lambda: {key.rpartition("/")[2] for key in watcher.state["Service"]} == {"shop-00003"})


def test_changes_follow(api: ApiServer, watcher: Watcher) -> None:
    before = time.monotonic()
    api.put(service(20))
    api.set_endpoints(3, [0, 1, 2])
    api.delete("services", key(1))
    api.put(labelled(service(2), "service.kubernetes.io/service-proxy-name", "mesh"))
    api.put(service(0, type="ExternalName", clusterIP="", clusterIPs=[]))  # still matches the selectors
    api.put(node("node-1", 7))

    watcher.until(lambda: watcher.state == expected(api))
    assert len(watcher.endpoints(3)) == 3
    assert key(2) not in watcher.state["Service"]
    assert key(0) not in watcher.state["Service"]
    assert all(before < e.received < time.monotonic() for e in (*watcher.of(Upserted), *watcher.of(Removed)))
    assert len(watcher.of(Replaced)) == 4


def test_pages_that_are_too_large_are_asked_for_with_fewer_objects(
    api: ApiServer, watch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_proxy.controller.kubernetes.apiserver._MAX_PAGE", 20_000)
    api.populate(60, 2)
    watcher = watch(page_size=500)

    assert watcher.state == expected(api)
    limits = [r.query["limit"] for r in api.requests if r.plural == "services" and not r.watch]
    assert limits[:3] == ["500", "125", "31"]
    assert all(state.healthy for state in watcher.of(SourceState))


@pytest.mark.parametrize("streams", [False, True], ids=["by pages", "by a stream"])
def test_half_a_list_is_no_list(streams: bool, api: ApiServer, watch: Start) -> None:
    api.watch_list = streams
    api.faults("endpointslices").cut_lists = 1 if streams else 2
    watcher = watch(page_size=4, streams=streams)

    assert watcher.state == expected(api)
    assert len(watcher.lists("EndpointSlice")) == 1
    asked = initial_asked(api, "endpointslices"), lists_asked(api, "endpointslices")
    assert asked == ((1, 2) if streams else (0, 4)), "what failed as a stream is done by pages"
    assert streams or "connection was cut" in watcher.of(SourceState)[0].message


def test_a_stream_that_ended_in_order_goes_on(api: ApiServer, watch: Start) -> None:
    watcher = watch(policy=quick(lifetime=(1.0, 1.0)))
    watcher.until(lambda: sum(r.watch and r.plural == "services" for r in api.requests) >= 2, "a second stream")
    api.put(service(20))

    watcher.until(lambda: len(watcher.state["Service"]) == 7)
    assert lists_asked(api, "services") == 1
    assert [state.healthy for state in watcher.of(SourceState)] == [True]


def test_lifetimes_differ(api: ApiServer, watch: Start) -> None:
    """Nodes that were started together must not come back together, for years."""
    watcher = watch(policy=RetryPolicy())
    connected(api, watcher)

    lifetimes = [int(r.query["timeoutSeconds"]) for r in api.requests if r.watch]
    assert all(300 <= seconds <= 600 for seconds in lifetimes)
    assert len(set(lifetimes)) > 1
    assert all(r.query["allowWatchBookmarks"] == "true" for r in api.requests if r.watch)


# ------------------------------------------------------------------------------------------- cut streams


@pytest.mark.parametrize("mid_line", [False, True], ids=["between lines", "mid line"])
def test_a_cut_stream_is_taken_up_where_it_was(mid_line: bool, api: ApiServer, watcher: Watcher) -> None:
    if mid_line:
        api.faults("endpointslices").cut_mid_line = 1
    else:
        assert api.cut("endpointslices") == 1
    api.set_endpoints(3, [0, 1, 2, 3])

    watcher.until(lambda: len(watcher.endpoints(3)) == 4)
    assert lists_asked(api, "endpointslices") == 1
    assert [e.object.name for e in watcher.of(Upserted)] == [slice_name(3)]
    assert all(state.healthy for state in watcher.of(SourceState)), "one cut is no news"


def test_bookmarks_keep_a_quiet_stream_young(api: ApiServer, watcher: Watcher) -> None:
    """Without them, the version of a quiet kind falls out of the server's window and everything is listed again."""
    now = api.touch()
    watcher.until(lambda: api.bookmarked("services") >= now, "a bookmark of the new version")
    api.forget_before(now)
    api.cut("services")
    api.put(service(20))

    watcher.until(lambda: len(watcher.state["Service"]) == 7)
    assert lists_asked(api, "services") == 1


def test_a_stream_that_is_cut_again_and_again_is_reported(api: ApiServer, watcher: Watcher) -> None:
    api.faults("services").cut_mid_line = 3
    api.put(service(20))

    watcher.until(lambda: len(watcher.state["Service"]) == 7)
    watcher.until(lambda: [s.healthy for s in watcher.of(SourceState)][-2:] == [False, True])
    lost = [s.message for s in watcher.of(SourceState) if not s.healthy]
    assert "(Services: " in lost[0]


def test_silence_is_noticed(api: ApiServer, watch: Start) -> None:
    watcher = watch(policy=quick(silence=0.5))
    connected(api, watcher)
    api.faults("endpointslices").silent = True
    api.set_endpoints(3, [0])
    watcher.until(lambda: sum(r.watch and r.plural == "endpointslices" for r in api.requests) >= 2, "a new stream")
    api.faults("endpointslices").silent = False

    watcher.until(lambda: len(watcher.endpoints(3)) == 1)
    assert lists_asked(api, "endpointslices") == 1


@pytest.mark.parametrize(
    ("error", "hopeless"),
    [
        pytest.param(StatusError(410, "Expired", ""), True, id="410"),
        pytest.param(StatusError(0, "Expired", ""), True, id="reason alone"),
        pytest.param(StatusError(504, "Timeout", "Too large resource version: 9, current: 5"), True, id="restored"),
        pytest.param(StatusError(504, "Timeout", "request did not complete"), False, id="timeout"),
        pytest.param(StatusError(500, "InternalError", ""), False, id="500"),
    ],
)
def test_when_going_on_is_hopeless(error: StatusError, hopeless: bool) -> None:
    assert is_expired(error) is hopeless


# ------------------------------------------------------------------------------------------- 410 Gone


@pytest.mark.parametrize("how", ["in the stream", "as the answer", "for real"])
def test_gone_means_a_new_list_and_nothing_vanishes_before(how: str, api: ApiServer, watch: Start) -> None:
    watcher = watch(page_size=2)
    connected(api, watcher)
    faults = api.faults("services")
    if how == "in the stream":
        faults.gone_watches = 1
    elif how == "as the answer":
        faults.gone_watch_status = 1
    faults.answers.append((500, {}))  # keeps the source away while the server changes
    api.cut("services")
    api.delete("services", key(1))
    api.put(service(20))
    if how == "for real":
        api.expire("services")
    asked = lists_asked(api, "services")
    faults.delay = 0.05
    watcher.until(lambda: lists_asked(api, "services") > asked, "a new list")

    assert key(1) in watcher.state["Service"]
    assert len(watcher.lists("Service")) == 1
    watcher.until(lambda: len(watcher.lists("Service")) == 2)
    assert watcher.state == expected(api)
    assert watcher.of(Removed) == []


@pytest.mark.parametrize("times", [1, 3])
def test_gone_between_pages_begins_the_list_anew(times: int, api: ApiServer, watch: Start) -> None:
    api.faults("services").gone_continues = times
    watcher = watch(page_size=2)

    assert watcher.state == expected(api)
    assert len(watcher.lists("Service")) == 1
    limits = [r.query.get("limit") for r in api.requests if r.plural == "services" and not r.watch]
    assert limits[:2] == ["2", "2"]
    assert limits[-1] is None, "pages that expire: the list is read in one piece"


def test_a_new_list_shares_what_did_not_change(api: ApiServer, watcher: Watcher) -> None:
    """Old and new objects are in memory together until the list is complete."""
    before: dict[str, Any] = dict(watcher.state["EndpointSlice"])
    api.faults("endpointslices").answers.append((500, {}))  # keeps the source away while the server changes
    api.cut("endpointslices")
    api.set_endpoints(3, [1])
    api.expire("endpointslices")
    watcher.until(lambda: len(watcher.lists("EndpointSlice")) == 2, "the new list")

    after: dict[str, Any] = watcher.state["EndpointSlice"]
    assert all(after[other] is before[other] for other in after if other != slice_key(3))
    assert after[slice_key(3)].endpoints == before[slice_key(3)].endpoints[1:]
    assert after[slice_key(3)].endpoints[0] is before[slice_key(3)].endpoints[1]


@pytest.mark.parametrize("streams", [False, True])
def test_a_new_list_reports_changes_at_once_and_new_objects_in_the_end(
    streams: bool, api: ApiServer, watch: Start
) -> None:
    """So that not all that changed is in memory twice."""
    api.watch_list = streams
    watcher = watch(page_size=2, streams=streams)
    connected(api, watcher)
    changed, new = (slice_key(i) for i in (3, 20))
    with api.quiet():
        api.set_endpoints(3, [1])
        api.put(endpoint_slice(20, [0]))
        api.expire("endpointslices")
    api.cut("endpointslices")
    watcher.until(lambda: len(watcher.lists("EndpointSlice")) == 2, "the new list")

    assert [key_of(event.object) for event in watcher.of(Upserted)] == [changed]
    upserted, listed = (
        watcher.events.index(one) for one in (watcher.of(Upserted)[0], watcher.lists("EndpointSlice")[1])
    )
    assert upserted < listed
    assert bool(lists_asked(api, "endpointslices")) is not streams
    assert new in watcher.state["EndpointSlice"]
    assert watcher.state == expected(api)


# ------------------------------------------------------------------------------------------- a server in trouble


def test_a_deletion_before_the_creation_is_told_to_nobody(api: ApiServer, watcher: Watcher) -> None:
    faults = api.faults("services")
    faults.reorder = faults.silent = True
    api.put(service(20))
    api.delete("services", key(20))
    faults.silent = False
    api.put(service(21))

    watcher.until(lambda: key(21) in watcher.state["Service"], "the next object")
    assert watcher.of(Removed) == []
    assert key(20) not in watcher.state["Service"]


def test_retry_after_is_honoured(api: ApiServer, watch: Start) -> None:
    api.faults("services").answers.append((429, {"Retry-After": "1"}))
    started = time.monotonic()
    watch()

    assert time.monotonic() - started >= 1.0
    assert lists_asked(api, "services") == 2
    assert lists_asked(api, "endpointslices") == 1


def test_of_a_start_one_kind_is_refused_and_not_each(api: ApiServer, begin: Start) -> None:
    api.faults("services").answers.extend([(429, {"Retry-After": "1"})] * 2)
    watcher = begin(policy=quick(longest=60.0))
    watcher.complete()

    assert [request.plural for request in api.requests][:3] == ["services"] * 3
    assert {plural: lists_asked(api, plural) for plural in PLURALS.values()} == {
        plural: 3 if plural == "services" else 1 for plural in PLURALS.values()
    }


def test_the_others_do_not_wait_for_ever_for_the_kind_that_asks_first(api: ApiServer, begin: Start) -> None:
    api.faults("services").delay = 6000.0  # longer than any bound of tests.waiting
    watcher = begin(policy=quick(longest=1.0))
    watcher.until(lambda: len(watcher.of(Replaced)) == 3, "all kinds but one")


@pytest.mark.parametrize("when", ["streams are open", "the answer is awaited", "a pause is made", "a turn is awaited"])
def test_stop_waits_for_nobody(when: str, api: ApiServer, begin: Start) -> None:
    if when == "the answer is awaited":
        for faults in api.all_faults():
            faults.delay = 60.0
    elif when == "a pause is made":
        for faults in api.all_faults():
            faults.answers.append((503, {"Retry-After": "60"}))
    limit = RateLimit(rate=0.01, burst=4) if when == "a turn is awaited" else RateLimit(rate=0)
    watcher = begin(policy=RetryPolicy(), rate_limit=limit)
    # One kind asks first, and no more requests than four come where a turn is awaited.
    watcher.until(lambda: len(api.requests) >= (4 if when in ("streams are open", "a turn is awaited") else 1))
    if when == "streams are open":
        connected(api, watcher)
    started = time.monotonic()
    watcher.stop()

    assert time.monotonic() - started < 20
    assert [t.name for t in threading.enumerate() if t.name.startswith("watch-")] == []
    before = len(watcher.events)
    api.put(service(50))
    assert len(watcher.events) == before


# fmt: off
@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"master": "https://127.0.0.1:1"}, "Connection refused", id="nobody listens"),
        pytest.param({"authority": False}, "certificate", id="wrong authority"),
        pytest.param({"token": "stolen"}, "credentials", id="wrong token"),
    ],
)
def test_what_is_wrong_is_said(
    options: dict[str, Any], words: str, api: ApiServer, begin: Start
) -> None:
    kubeconfig = api.kubeconfig(token=options.get("token"))
    if options.get("authority") is False:
        config = msgspec.json.decode(kubeconfig.read_bytes())
        del config["clusters"][0]["cluster"]["certificate-authority-data"]
        kubeconfig.write_bytes(msgspec.json.encode(config))
    watcher = begin(kubeconfig=str(kubeconfig), master=options.get("master"))
    lost = watcher.until(lambda: [s for s in watcher.of(SourceState) if not s.healthy])

    assert words in lost[0].message
    assert watcher.of(Replaced) == []


# fmt: on


# ------------------------------------------------------------------------------------------- order of events


# fmt: off
@pytest.mark.parametrize(
    ("text", "number"),
    [
        pytest.param("1", 1, id="one"),
        pytest.param("184467440737095516160", 184467440737095516160, id="more than 64 bits"),
        pytest.param("", None, id="empty"),
        pytest.param(None, None, id="absent"),
        pytest.param("007", None, id="leading zero"),
        pytest.param("0", None, id="zero is no version of an object"),
        pytest.param("12a", None, id="opaque"),
        pytest.param("-5", None, id="negative"),
        pytest.param("٣", None, id="other digits"),
        pytest.param("9" * 5000, None, id="absurd"),
    ],
)
def test_versions_are_compared_only_as_plain_decimals(text: str | None, number: int | None) -> None:
    assert version_number(text) == number


# fmt: on


# fmt: off
@pytest.mark.parametrize(
    ("listed", "events", "news"),
    [
        pytest.param("100", [("a", "101", False), ("a", "102", False)], [True, True],   id="newer"),
        pytest.param("100", [("a", "101", False), ("a", "101", False)], [True, False],  id="twice"),
        pytest.param("100", [("a", "99",  False), ("b", "100", False)], [False, False], id="the list knew it"),
        pytest.param("100", [("a", "103", False), ("b", "102", False)], [True, True],   id="objects are apart"),
        pytest.param("100", [("a", "103", True),  ("a", "102", False)], [True, False],  id="the dead stay dead"),
        pytest.param("100", [("a", "103", False), ("a", "102", True)],  [True, False],  id="made anew, then deleted"),
        pytest.param("100", [("a", "101", False), ("a", "101", True)],  [True, True],   id="deleted at the same"),
        pytest.param("100", [("a", "9",   False), ("a", "x",   False)], [False, True],  id="opaque counts as new"),
        pytest.param("x",   [("a", "9",   False), ("a", "8",   False)], [True, True],   id="opaque list"),
        pytest.param("9",   [("a", "10",  False), ("a", "9",   False)], [True, False],  id="numbers, not texts"),
    ],
)
def test_old_news(listed: str, events: list[tuple[str, str, bool]], news: list[bool]) -> None:
    versions = Versions()
    versions.listed(listed)

    assert [versions.is_news(*event) for event in events] == news


# fmt: on


def test_tombstones_are_not_kept_for_ever() -> None:
    versions = Versions()
    versions.listed("1")
    for number in range(2, 10_000):
        versions.is_news(f"pod-{number}", str(number), gone=True)

    assert len(versions.seen) == 4096
    assert not versions.is_news("pod-9999", "9998", gone=False)


# ------------------------------------------------------------------------------------------- credentials


@pytest.mark.parametrize("kind", ["kubeconfig", "tokenFile", "exec", "service account"])
def test_a_token_that_changes(
    kind: str, api: ApiServer, watch: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text(api.token + "\n")
    kubeconfig: Path | None = api.kubeconfig(token_file=token if kind == "tokenFile" else None)
    if kind == "exec":
        assert kubeconfig is not None
        config = msgspec.json.decode(kubeconfig.read_bytes())
        config["users"][0]["user"] = exec_user(program(tmp_path, says(token=f"$(cat {token})").replace("'END'", "END")))
        kubeconfig.write_bytes(msgspec.json.encode(config))
    elif kind == "service account":
        (tmp_path / "ca.crt").write_bytes(api.authority)
        monkeypatch.setattr(kubeconfigs, "SERVICE_ACCOUNT", tmp_path)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        kubeconfig = None
    watcher = watch(kubeconfig=str(kubeconfig) if kubeconfig else None)
    connected(api, watcher)

    api.token = "second-token"
    token.write_text("second-token\n")
    if kind == "kubeconfig":
        assert kubeconfig is not None
        kubeconfig.write_bytes(kubeconfig.read_bytes().replace(b"first-token", b"second-token"))
    assert api.cut() == 4
    api.put(service(20))

    watcher.until(lambda: len(watcher.state["Service"]) == 7)
    connected(api, watcher)
    assert all(state.healthy for state in watcher.of(SourceState))
    assert len(watcher.of(Replaced)) == 4
    assert (api.refused_tokens > 0) == (kind == "exec"), "a changed file is seen before the server has to refuse"


def test_a_half_written_kubeconfig_changes_nothing(api: ApiServer, watch: Start) -> None:
    kubeconfig = api.kubeconfig()
    watcher = watch(kubeconfig=str(kubeconfig))
    connected(api, watcher)
    kubeconfig.write_bytes(kubeconfig.read_bytes()[:100])
    api.cut()
    api.put(service(20))

    watcher.until(lambda: len(watcher.state["Service"]) == 7)


# fmt: off
@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(None,                                      "there is no such file",    id="missing"),
        pytest.param("",                                        "is empty",                 id="empty"),
        pytest.param("a: [",                                    "kubeconfig",               id="no YAML"),
        pytest.param("- 1",                                     "kubeconfig",               id="a list"),
        pytest.param({"current-context": "b"},                  'context is named "b"',     id="unknown context"),
        pytest.param({"clusters": []},                          'cluster is named "a"',     id="no cluster"),
        pytest.param({"clusters": [{"name": "a", "cluster": {"certificate-authority": "/no/ca"}}]},
                     "/no/ca",                                                              id="no authority"),
        pytest.param({"user": {"tokenFile": "/no/t"}},          "/no/t",                    id="no token"),
        pytest.param({"clusters": [{"name": "a", "cluster": {"server": "https://p.invalid:6443"}}]},
                     "https://p.invalid:6443 is a placeholder",                             id="placeholder"),
    ],
)  # fmt: skip
def test_an_unusable_configuration_ends_the_run(content: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        write_kubeconfig(path, **content)
    with pytest.raises(SourceError) as caught:
        Kubernetes("node-0", kubeconfig=str(path)).run(lambda _: None, threading.Event())

    assert words in str(caught.value)
    assert str(path) in str(caught.value)


# fmt: on


def test_outside_of_a_cluster_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(SourceError, match="no --kubeconfig and no --master"):
        Kubernetes("node-0").run(lambda _: None, threading.Event())


# ------------------------------------------------------------------------------------------- odd clusters


@pytest.mark.parametrize(
    ("plural", "kind", "name"), [("servicecidrs", "ServiceCIDR", "kubernetes"), ("nodes", "Node", "node-0")]
)
@pytest.mark.parametrize(("code", "times"), [(404, 0), (403, 3), (500, 10)])
def test_kinds_that_an_agent_can_do_without(
    code: int, times: int, plural: str, kind: str, name: str, api: ApiServer, watch: Start
) -> None:
    api.serve(plural, served=code != 404)
    api.faults(plural).answers.extend([(code, {})] * times)
    watcher = watch()

    absent = watcher.lists(kind)[0]
    assert absent.objects == ()
    assert str(code) in absent.absent
    assert watcher.until(lambda: [state for state in watcher.of(SourceState) if state.healthy])
    api.serve(plural, served=True)
    watcher.until(lambda: watcher.state == expected(api), "they are asked for again")
    assert list(watcher.state[kind]) == [name]
    assert [event.absent != "" for event in watcher.lists(kind)] == [True, False]


def test_a_kind_that_was_read_is_read_on_after_a_refusal(api: ApiServer, watch: Start) -> None:
    """A server that starts up refuses for a moment what it grants later."""
    watcher = watch(policy=quick(rarely=600.0))
    connected(api, watcher)
    api.faults("servicecidrs").answers.append((403, {}))
    api.cut("servicecidrs")
    api.put({"kind": "ServiceCIDR", "metadata": {"name": "more"}, "spec": {"cidrs": ["10.97.0.0/16"]}})

    watcher.until(lambda: "more" in watcher.state["ServiceCIDR"], "the change after the refusal")
    assert lists_asked(api, "servicecidrs") == 1
    lost = [state.message for state in watcher.of(SourceState) if not state.healthy]
    assert "403" in lost[0]
    assert "grant" not in lost[0]


def test_refusals_of_a_server_that_starts_are_no_absence(api: ApiServer, begin: Start) -> None:
    """Until it has read its roles, it refuses everything."""
    for faults in api.all_faults():
        faults.answers.extend([(403, {})] * 1000)
    watcher = begin(policy=quick(rarely=600.0))
    watcher.until(lambda: all(watcher.kind(kind).why for kind in ("Service", "ServiceCIDR")), "refusals")
    api.faults("servicecidrs").answers.clear()  # first: refused when others are read, it would be absent
    watcher.until(lambda: watcher.lists("ServiceCIDR"), "a refusal may have been on its way")
    for faults in api.all_faults():
        faults.answers.clear()

    watcher.until(lambda: watcher.state == expected(api), "all of it")
    assert [len(event.objects) for event in watcher.lists("ServiceCIDR")] == [1]
    assert watcher.kind("ServiceCIDR").state == "read"


def test_each_kind_says_how_it_is_read(api: ApiServer, begin: Start) -> None:
    api.serve("servicecidrs", served=False)
    api.faults("endpointslices").answers.append((503, {"Retry-After": "600"}))
    watcher = begin(policy=quick(longest=60.0))
    assert {state.state for state in watcher.source.states()} <= {"waiting", "read", "not served"}
    wanted = {
        "Service": ("read", True), "EndpointSlice": ("waiting", False), "Node": ("read", True),
        "ServiceCIDR": ("not served", True),
    }  # fmt: skip
    watcher.until(lambda: watcher.kind("EndpointSlice").why, "a reason")
    watcher.until(
        lambda: {state.kind: (state.state, state.listed) for state in watcher.source.states()} == wanted, "their states"
    )
    assert len(watcher.of(Replaced)) == 3, "all kinds but one"
    assert "503" in watcher.kind("EndpointSlice").why
    assert "/apis/networking.k8s.io/v1/servicecidrs" in watcher.kind("ServiceCIDR").why


# ------------------------------------------------------------------------------------------- pauses


def test_a_server_that_forgets_for_ever_is_not_hammered(api: ApiServer, begin: Start) -> None:
    api.faults("services").gone_watches = 1_000_000
    watcher = begin(policy=PATIENT)
    watcher.until(lambda: watcher.kind("EndpointSlice").state == "read", "the others are read")
    watcher.until(lambda: sum(r.plural == "services" and r.watch for r in api.requests) == 2, "the second refusal")
    for count in range(5):  # time enough for another list
        api.set_endpoints(3, range(count))
        watcher.until(lambda count=count: len(watcher.endpoints(3)) == count, "a change of another kind")

    assert lists_asked(api, "services") == 2


def test_what_can_be_read_again_wakes_the_others(api: ApiServer, watch: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is back: nobody waits for the end of a pause that was made while it was away."""

    def when_all_have_asked(*_: float) -> float:
        until(lambda: {request.plural for request in api.requests} == set(PLURALS.values()), "all kinds have asked")
        return 0.0

    monkeypatch.setattr(apiserver, "honoured", when_all_have_asked)
    for plural in PLURALS.values():
        api.faults(plural).answers.append((500, {"Retry-After": "1"} if plural == "nodes" else {}))
    watcher = watch(policy=PATIENT)

    assert watcher.state == expected(api)


@pytest.mark.parametrize("kind", ["kubeconfig", "tokenFile"])
def test_new_credentials_end_all_pauses(kind: str, api: ApiServer, begin: Start, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("stolen")
    kubeconfig = api.kubeconfig(token="stolen", token_file=token if kind == "tokenFile" else None)
    watcher = begin(kubeconfig=str(kubeconfig), policy=PATIENT)
    watcher.until(lambda: watcher.kind("Service").why, "the first is refused, and the others wait for it")
    if kind == "tokenFile":
        token.write_text(api.token)
    else:
        kubeconfig.write_bytes(kubeconfig.read_bytes().replace(b"stolen", api.token.encode()))
    watcher.complete()

    assert watcher.state == expected(api)


def test_credentials_that_are_refused_are_tried_by_one_for_all(
    api: ApiServer, begin: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hybrid_proxy")
    watcher = begin(kubeconfig=str(api.kubeconfig(token="second")), policy=quick(longest=60.0))
    watcher.until(lambda: api.refused_tokens >= 8, "some refusals")
    assert {request.plural for request in api.requests} == {"services"}
    assert "read the API server's configuration" not in caplog.text, "they are the same"
    assert len([s for s in watcher.of(SourceState) if not s.healthy]) == 1, "reported once"
    api.token = "second"
    watcher.complete()

    assert watcher.state == expected(api)


def test_a_node_that_is_not_there_yet(api: ApiServer, watch: Start) -> None:
    api.delete("nodes", "node-0")
    watcher = watch()
    assert watcher.lists("Node") == [Replaced("Node", ())]

    api.put(node("node-0"))
    watcher.until(lambda: "node-0" in watcher.state["Node"])


# ------------------------------------------------------------------------------------------- malformed objects


@pytest.mark.parametrize("streams", [False, True], ids=["by pages", "by a stream"])
def test_one_malformed_object_among_good_ones(streams: bool, api: ApiServer, watch: Start) -> None:
    api.watch_list = streams
    api.put(service(3, ports=[{"name": "http", "port": "web"}]))
    watcher = watch(page_size=2, streams=streams)

    assert len(watcher.state["Service"]) == 5
    assert watcher.lists("Service")[0].kept == {key(3)}
    assert list(watcher.problems) == [("Service", key(3))]
    assert "spec.ports[0].port" in watcher.problems["Service", key(3)].message
    connected(api, watcher)
    api.put(service(3))
    watcher.until(lambda: key(3) in watcher.state["Service"])
    assert watcher.problems == {}


def test_the_last_good_version_stays(api: ApiServer, watcher: Watcher) -> None:
    good = watcher.state["Service"][key(3)]
    bad = service(3, clusterIP="10.96.0.999", clusterIPs=["10.96.0.999"])
    api.put(bad)
    api.put(service(4, sessionAffinity="ClientIP"))
    watcher.until(lambda: watcher.problems, "a problem")
    watcher.until(lambda: watcher.of(Upserted), "the next object")
    assert watcher.state["Service"][key(3)] == good

    api.expire("services")  # also through a new list
    api.cut("services")
    watcher.until(lambda: len(watcher.lists("Service")) == 2)
    assert watcher.state["Service"][key(3)] == good
    assert watcher.problems

    api.delete("services", key(3))
    watcher.until(lambda: len(watcher.state["Service"]) == 5)
    assert watcher.problems == {}


@pytest.mark.parametrize("how", ["mended", "deleted"])
def test_a_new_list_ends_problems(how: str, api: ApiServer, watcher: Watcher) -> None:
    api.put(service(3, ports=[{"name": "http", "port": "web"}]))
    watcher.until(lambda: watcher.problems)
    api.faults("services").answers.append((500, {}))
    api.cut("services")
    if how == "mended":
        api.put(service(3))
    else:
        api.delete("services", key(3))
    api.expire("services")

    watcher.until(lambda: len(watcher.lists("Service")) == 2)
    assert watcher.problems == {}
    assert watcher.state == expected(api)


def test_odd_metadata(api: ApiServer, watcher: Watcher) -> None:
    for metadata in ({"name": 7}, {"name": "odd", "labels": "none"}, {"name": "a/b"}):
        api.put(service(40) | {"metadata": {"namespace": "team-00"} | metadata})
    api.put(service(20))

    watcher.until(lambda: len(watcher.state["Service"]) == 7)
    assert len(watcher.problems) == 3
    assert lists_asked(api, "services") == 1


def test_a_defect_of_ours_costs_one_object(api: ApiServer, watch: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def defective(kind: str, raw: msgspec.Raw, proxy_name: str | None) -> Any:
        obj = decode(kind, raw, proxy_name)
        if getattr(obj, "name", "") in {"shop-00003", "shop-00020"}:
            raise ZeroDivisionError("division by zero")
        return obj

    monkeypatch.setattr("hybrid_proxy.controller.kubernetes.apiserver.decode", defective)
    watcher = watch()
    connected(api, watcher)
    api.put(service(20))
    api.put(service(21))

    watcher.until(lambda: key(21) in watcher.state["Service"])
    assert set(watcher.problems) == {
        ("Service", key(3)),
        ("Service", key(20)),
    }
    assert lists_asked(api, "services") == 1


# ------------------------------------------------------------------------------------------- everything at once


@pytest.mark.parametrize(
    ("seed", "streams", "served"),
    [(0, False, False), (1, False, False), (2, False, False), (3, True, True), (4, True, True), (5, True, False)],
)
def test_nothing_is_lost_in_a_storm(seed: int, streams: bool, served: bool, api: ApiServer, begin: Start) -> None:
    """300 random changes, faults between them; in the end the reader knows what the server knows."""
    dice = random.Random(seed)
    api.watch_list = served
    api.faults("endpointslices").duplicate = True
    api.faults("services").reorder = True
    watcher = begin(page_size=3, streams=streams, policy=quick(silence=0.6))
    for step in range(300):
        index = dice.randrange(12)
        match dice.randrange(4):
            case 0:
                api.put(service(index, sessionAffinity=dice.choice(["None", "ClientIP"])))
            case 1 if len(api.objects("services")) > 3:
                api.delete("services", dice.choice(sorted(api.objects("services"))))
            case 2 if len(api.objects("endpointslices")) > 3:
                api.delete("endpointslices", dice.choice(sorted(api.objects("endpointslices"))))
            case _:
                api.set_endpoints(index, dice.sample(range(10), dice.randrange(10)))
        if step % 8 == 0:
            trouble(api, dice)
        if step % 50 == 0:
            watcher.until(lambda: api.streams("services") and api.streams("endpointslices"), "streams again")
    for faults in api.all_faults():
        faults.clear()

    watcher.until(lambda: watcher.state == expected(api), "the same state")
    watcher.until(lambda: watcher.of(SourceState)[-1].healthy, "health")


def trouble(api: ApiServer, dice: random.Random) -> None:
    """One random fault."""
    faults = api.faults(dice.choice(["services", "endpointslices"]))
    match dice.randrange(8):
        case 0:
            api.cut()
        case 1:
            faults.cut_mid_line += 1
        case 2:
            faults.answers.append((500, {}))
            api.cut()
        case 3:
            api.expire()
            api.cut()
        case 4:
            faults.gone_watches += 1
            api.cut()
        case 5:
            faults.gone_continues += 1
        case 6:
            faults.bad_line += 1
        case 7:
            faults.silent = not faults.silent


def labelled(obj: dict[str, Any], key: str, value: str) -> dict[str, Any]:
    obj["metadata"]["labels"][key] = value
    return obj


# fmt: off
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param(b'"2026-03-01T08:00:00Z"',           1772352000.0,      id="whole seconds"),
        pytest.param(b'"2026-03-01T08:00:00.25Z"',        1772352000.25,     id="part of a second"),
        pytest.param(b'"2026-03-01T08:00:00.123456789Z"', 1772352000.123456, id="nanoseconds"),
        pytest.param(b'"2026-03-01T10:00:00+02:00"',      1772352000.0,      id="another zone"),
        pytest.param(b'"2026-03-01T08:00:00"',            0.0,               id="no zone: not RFC 3339"),
        pytest.param(b'"yesterday"',                      0.0,               id="no time"),
        pytest.param(b"17",                               0.0,               id="no text"),
        pytest.param(b"null",                             0.0,               id="null"),
    ],
)
def test_when_a_slice_says_that_it_was_changed(said: bytes, expected: float) -> None:
    raw = b'{"metadata": {"annotations": {"endpoints.kubernetes.io/last-change-trigger-time": %s, "other": "x"}}}'
    assert decode_head(msgspec.Raw(raw % said)).triggered == expected


# fmt: on


@pytest.mark.parametrize("raw", [b"{}", b'{"metadata": null}', b'{"metadata": {"annotations": []}}', b"[]", b"x"])
def test_a_slice_that_does_not_say_it(raw: bytes) -> None:
    assert decode_head(msgspec.Raw(raw)).triggered == 0.0


# ------------------------------------------------------------------------------------------- lists as streams


def initial_asked(api: ApiServer, plural: str) -> int:
    return sum(1 for request in api.requests if request.plural == plural and "sendInitialEvents" in request.query)


@pytest.fixture
def streaming(api: ApiServer) -> ApiServer:
    api.watch_list = True
    return api


def test_one_stream_lists_every_object_and_goes_on(streaming: ApiServer, watch: Start) -> None:
    api = streaming
    watcher = watch(streams=True)
    assert watcher.state == expected(api)
    api.set_endpoints(3, [0])
    watcher.until(lambda: watcher.endpoints(3) == [pod_address(3, 0, 2)], "the change")
    assert [(request.plural, request.watch) for request in sorted(api.requests)] == [
        (plural, True) for plural in sorted(PLURALS.values())
    ]


def test_nothing_at_all_is_a_list_too(streaming: ApiServer, watch: Start) -> None:
    streaming.reset()
    streaming.watch_list = True
    streaming.serve("servicecidrs", False)
    assert watch(streams=True).state == {kind: {} for kind in KINDS}


def test_a_server_that_refuses_is_asked_by_pages(api: ApiServer, watch: Start) -> None:
    watcher = watch(streams=True, policy=quick(rarely=600.0))
    connected(api, watcher)
    assert (initial_asked(api, "services"), lists_asked(api, "services")) == (1, 1)
    api.expire()
    api.cut()
    watcher.until(lambda: lists_asked(api, "services") == 2, "a new list")
    assert initial_asked(api, "services") == 1  # not asked again so soon
    assert watcher.of(SourceState)[0].healthy  # no failure of any kind


def test_a_server_that_does_not_say_where_all_ends_is_asked_by_pages(streaming: ApiServer, watch: Start) -> None:
    """As one that does not know the option and takes the request for a plain watch."""
    api = streaming
    for faults in api.all_faults():
        faults.endless = True
    watcher = watch(streams=True)
    assert watcher.state == expected(api)
    assert lists_asked(api, "endpointslices") == 1


# ------------------------------------------------------------------------------------------- rate_limit


@pytest.mark.parametrize(
    ("rate_limit", "moments", "waits"),
    [
        (RateLimit(5, 3), [0.0] * 6, [0, 0, 0, 0.2, 0.4, 0.6]),  # some at once, then so many a second
        (
            RateLimit(5, 3),
            [0, 0, 0, 0.2, 0.4, 10, 10, 10, 10],
            [0, 0, 0, 0, 0, 0, 0, 0, 0.2],
        ),  # a pause fills it
        (RateLimit(5, 0), [0, 0], [0, 0.2]),
        (RateLimit(0, 1), [0.0] * 9, [0] * 9),
    ],
)
def test_a_token_bucket(rate_limit: RateLimit, moments: list[float], waits: list[float]) -> None:
    bucket = TokenBucket(rate_limit, threading.Event())
    assert [bucket.reserve(100 + moment) for moment in moments] == pytest.approx(waits)


def test_a_source_keeps_to_its_limit(api: ApiServer, begin: Start) -> None:
    """Eight requests begin, the burst; every stream that is cut from then on waits for its turn."""
    watcher = begin(rate_limit=RateLimit(rate=10, burst=8), page_size=1)
    connected(api, watcher)
    asked = len(api.requests)
    start = time.monotonic()
    while time.monotonic() - start < 1.5:
        api.cut()
        time.sleep(0.02)
    assert 5 <= len(api.requests) - asked <= 10 * (time.monotonic() - start) + 9
    api.put(service(5, ports=[{"port": 81, "protocol": "TCP"}]))
    watcher.until(lambda: watcher.state["Service"] == expected(api)["Service"], "it still follows")


def test_pages_of_a_list_are_one_request(api: ApiServer, begin: Start) -> None:
    api.populate(60, 1)
    start = time.monotonic()
    begin(rate_limit=RateLimit(rate=0.5, burst=8), page_size=2).complete()
    assert lists_asked(api, "services") >= 30
    assert time.monotonic() - start < 40  # at half a request a second these pages alone would take a minute
