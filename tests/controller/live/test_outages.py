"""An API server that is away, starts, refuses, forgets or hangs: what is said of it, and how often."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from hybrid_proxy.controller.kubernetes import apiserver, connection
from hybrid_proxy.controller.kubernetes.apiserver import Kubernetes, RetryPolicy
from hybrid_proxy.controller.kubernetes.model import SourceState
from hybrid_proxy.controller.kubernetes.rate_limit import RateLimit
from hybrid_proxy.workshop.lab.apiserver import ApiServer, service
from hybrid_proxy.workshop.lab.network import Lab
from tests.controller.watching import Watcher
from tests.fakes.gate import Gate
from tests.served import api_server

# Whoever waits for the end of a silence is late for every bound of tests.waiting.
POLICY = RetryPolicy(first=0.02, longest=20.0, silence=6000.0, rarely=0.2, quiet=6000.0)


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(bookmark_every=0.2) as made:
        yield made


@pytest.fixture
def api(server: ApiServer) -> ApiServer:  # type: ignore[override]  # not that of the lab
    server.reset()
    server.populate(3, 2)
    return server


@pytest.fixture
def gate(api: ApiServer) -> Iterator[Gate]:
    with Gate(api.port) as made:
        yield made


@pytest.fixture
def watch(api: ApiServer, gate: Gate) -> Iterator[Callable[..., Watcher]]:
    started: list[Watcher] = []

    def begin(streams: int = 4, **policy: float) -> Watcher:
        made = Watcher(
            Kubernetes(
                "node-0", kubeconfig=str(api.kubeconfig()), master=f"https://127.0.0.1:{gate.port}",
                policy=replace(POLICY, **policy), rate_limit=RateLimit(rate=0), streams=False,
            )
        )  # fmt: skip
        started.append(made)
        made.complete()
        made.until(lambda: made.of(SourceState) and api.streams() == streams, "all is read")
        made.news()
        return made

    yield begin
    for each in started:
        each.stop()


def said(watcher: Watcher) -> list[str]:
    return [state.message for state in watcher.of(SourceState)]


def everything(watcher: Watcher, state: str) -> bool:
    return {each.state for each in watcher.source.states()} == {state}


# fmt: off
FIRST_ANSWERS = [
    # answers of each kind when the server is back
    pytest.param([],                                   id="it is there at once"),
    pytest.param([403] * 3,                            id="it has not read its roles"),
    pytest.param([401] * 3,                            id="nor its keys"),
    pytest.param([500, 503, 403, 403],                 id="it is not ready, and has not read its roles"),
    pytest.param([429, 503, 504, 429],                 id="it has too much to do"),
    pytest.param([403, 429, 401, 410, 403],            id="everything in turn"),
]
# fmt: on


@pytest.mark.parametrize("answers", FIRST_ANSWERS)
@pytest.mark.parametrize("served", [True, False], ids=["", "without ServiceCIDRs"])
def test_an_outage_is_one_line_and_its_end_is_one(
    answers: list[int], served: bool, api: ApiServer, gate: Gate, watch: Callable[..., Watcher]
) -> None:
    api.serve("servicecidrs", served)
    watcher = watch(4 if served else 3)
    gate.shut()
    watcher.until(lambda: everything(watcher, "waiting"), "all kinds are lost")
    for faults in api.all_faults():
        faults.answers.extend((code, {}) for code in answers)
    if not served:  # asked for less often
        api.faults("servicecidrs").answers.clear()
        api.faults("servicecidrs").answers.append((403, {}))
    api.put(service(7))
    gate.open()
    watcher.until(lambda: said(watcher)[1:] and watcher.addresses.get("shop-00007"), "all is read again")

    lost, found = said(watcher)
    assert "cannot be read since" in lost
    assert "are read again, after" in found
    assert "grant" not in lost


@pytest.mark.parametrize("code", [403, 401])
def test_a_refusal_that_lasts_is_one_to_do_something_about(
    code: int, api: ApiServer, watch: Callable[..., Watcher]
) -> None:
    watcher = watch(longest=0.5)
    for faults in api.all_faults():
        faults.answers.extend([(code, {})] * 10_000)
    api.cut()
    watcher.until(lambda: len(said(watcher)) == 2, "the advice")
    words = "grant list and watch of services, endpointslices, nodes, servicecidrs" if code == 403 else "credentials"
    passing, lasting = said(watcher)
    assert (words in passing, words in lasting) == (False, True)
    for faults in api.all_faults():
        faults.answers.clear()
    watcher.until(lambda: everything(watcher, "read") and len(said(watcher)) > 2, "all is read again")
    assert [state.healthy for state in watcher.of(SourceState)] == [False, False, True]


def test_who_was_never_let_in_is_told_at_once(api: ApiServer, gate: Gate) -> None:
    for faults in api.all_faults():
        faults.answers.extend([(403, {})] * 10_000)
    watcher = Watcher(Kubernetes("node-0", kubeconfig=str(api.kubeconfig()), policy=POLICY, streams=False))
    watcher.until(lambda: said(watcher), "the advice")
    assert "grant list and watch" in said(watcher)[0]
    watcher.stop()


# ------------------------------------------------------------------------------------------- silence


def test_a_server_that_hangs_is_noticed_and_its_streams_go_on(
    api: ApiServer, gate: Gate, watch: Callable[..., Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel answers for it; no connection ends."""
    monkeypatch.setattr(apiserver, "_ASK_SECONDS", 0.3)
    monkeypatch.setattr(connection, "_CONNECT_SECONDS", 0.3)
    watcher = watch(quiet=0.5)
    asked = len(api.requests)
    gate.hold()
    watcher.until(lambda: said(watcher), "silence")
    assert everything(watcher, "waiting")
    assert all("does not answer" in state.why and state.heard for state in watcher.source.states())
    api.put(service(7))
    gate.release()
    watcher.until(lambda: said(watcher)[1:] and watcher.addresses.get("shop-00007"), "all is read again")
    assert everything(watcher, "read")
    assert [state.healthy for state in watcher.of(SourceState)] == [False, True]
    assert len(api.requests) == asked, "the streams are the same"


def test_quiet_is_no_silence(api: ApiServer, watch: Callable[..., Watcher]) -> None:
    """Nothing happens, and there are no bookmarks: the server is asked, and an answer is an answer."""
    watcher = watch(quiet=0.2)
    for faults in api.all_faults():
        faults.silent = True

    def questions() -> int:
        return sum(row[3] for row in watcher.source.connection.answers() if row[2] == "404")

    watcher.until(lambda: questions() >= 3, "it is asked")
    assert said(watcher) == []
    assert everything(watcher, "read")


@pytest.mark.root
def test_a_peer_that_is_gone_without_a_word_is_noticed_by_tcp(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets are lost from a moment on: nothing ends, nothing is refused."""
    short = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 2, socket.TCP_USER_TIMEOUT: 3000}
    options = tuple((level, name, short.get(name, value)) for level, name, value in connection.SOCKET_OPTIONS)
    monkeypatch.setattr(connection, "SOCKET_OPTIONS", options)
    monkeypatch.setattr(connection, "_CONNECT_SECONDS", 1.0)
    with api_server(lab) as api, lab.inside("node"):
        watcher = Watcher(Kubernetes("node-0", kubeconfig=str(api.kubeconfig()), policy=POLICY, streams=False))
        watcher.until(lambda: api.streams() == 4 and watcher.of(SourceState), "all is read")
        table = f"lost{threading.get_native_id()}"
        rules = f"table ip {table} {{ chain c {{ type filter hook input priority 0; tcp dport {api.port} drop; }}; }}"
        subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
        watcher.until(lambda: everything(watcher, "waiting"), "all kinds are lost")
        subprocess.run(["nft", "delete", "table", "ip", table], check=True)
        watcher.until(lambda: len(said(watcher)) == 3, "all is read again")
        watcher.stop()
    assert [state.healthy for state in watcher.of(SourceState)] == [True, False, True]
