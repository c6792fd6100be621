"""The admin socket by itself."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hybrid_proxy.controller import cli
from hybrid_proxy.controller.agent import answers
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.kubernetes.model import Endpoint, Service, ServicePort
from hybrid_proxy.controller.serving.admin import REST_SECONDS, BusyError, Server, ask
from hybrid_proxy.controller.serving.protocol import (
    BusyAnswer,
    EventsAnswer,
    FailedAnswer,
    GetStatus,
    NamesAnswer,
    StatusAnswer,
    SwitchAnswer,
    SwitchMode,
)
from hybrid_proxy.dataplane.kernel.host_paths import stat_of
from hybrid_proxy.dataplane.table import BackendSet, Entry, Frontend, Kind, NodeNetwork, Protocol, ServiceTable
from tests.waiting import until


class _Counting(Server):
    """Notes when it tried to accept."""

    def __init__(self, path: Path) -> None:
        self.tries: list[float] = []
        self.tried_thrice = threading.Event()
        super().__init__(path, lambda request: EventsAnswer([], 7, "ebpf", []))

    def get_request(self) -> Any:
        self.tries.append(time.monotonic())
        if len(self.tries) == 3:
            self.tried_thrice.set()
        return super().get_request()


def test_accepting_rests_while_descriptors_lack(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = _Counting(tmp_path / "socket")
    taken: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX) as asker:
            asker.settimeout(10)
            # What earlier tests left to the garbage collector would free descriptors below the limit in between.
            gc.collect()
            last = os.dup(asker.fileno())
            taken.append(last)
            resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(asker.fileno()))
            asker.connect(str(tmp_path / "socket"))
            assert server.tried_thrice.wait(60)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert server.tries[2] - server.tries[0] >= 2 * REST_SECONDS, "it does not spin"
            asker.sendall(b'{"command": "events", "after": 0}\n')
            answer = b'{"answer":"events","events":[],"last":7,"mode":"ebpf","silent":[]}\n'
            assert asker.recv(100) == answer
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
        server.close()


class _Stopped(Server):
    """Accepts nothing until it goes on, as a process that was stopped."""

    def __init__(self, path: Path) -> None:
        self.goes_on, self.handled = threading.Event(), threading.Event()
        self.asked: list[object] = []
        super().__init__(path, self._answer)

    def _answer(self, request: object) -> EventsAnswer:
        self.asked.append(request)
        return EventsAnswer([], 0, "ebpf", [])

    def get_request(self) -> Any:
        self.goes_on.wait()
        return super().get_request()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.handled.set()


@pytest.mark.parametrize("gives_up", [True, False])
def test_what_a_command_gave_up_does_not_happen_when_the_agent_goes_on(tmp_path: Path, gives_up: bool) -> None:
    server = _Stopped(tmp_path / "socket")
    try:
        with socket.socket(socket.AF_UNIX) as asker:
            asker.connect(str(server.path))
            asker.sendall(msgspec.json.encode(SwitchMode("nftables")) + b"\n")
            if gives_up:
                asker.close()
            else:
                asker.shutdown(socket.SHUT_WR)
            server.goes_on.set()
            assert server.handled.wait(20)
        assert server.asked == ([] if gives_up else [SwitchMode("nftables")])
    finally:
        server.goes_on.set()
        server.close()


@pytest.mark.parametrize("begun", [True, False])
def test_a_request_that_waited_too_long_is_given_up_unless_it_has_begun(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers.p, "answer_seconds", lambda request: answers.REPORT_EARLIER + 0.01)
    queries: list[answers.Query] = []

    def put(query: answers.Query) -> None:
        queries.append(query)
        if begun:
            query.claim.acquire()

    answer = answers.ask(put, SwitchMode("nftables"))
    assert isinstance(answer, BusyAnswer)
    assert (answer.begun, "and won't" in answer.text) == (begun, not begun)
    assert queries[0].claim.locked(), "the loop would do it all the same"


def test_switch_waits_while_the_agent_programs_the_other_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its loop answers nothing meanwhile, which says nothing about the switch."""
    busy = [BusyAnswer(begun=False, seconds=0.1)] * 2
    names = NamesAnswer("ebpf", [], None, {}, [])
    said = iter([names, SwitchAnswer("ebpf", "nftables"), *busy, FailedAnswer("now it has time")])
    path = tmp_path / "socket"
    server = Server(path, lambda request: next(said))
    try:
        assert cli.main(["switch", "nftables", "--admin-socket", str(path)]) == 1
    finally:
        server.close()
    assert "now it has time" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [b'{"node": "n1", "mode": {"effective": "ebpf"}}\n', b"[]\n", b'{"answer": "status", "status": {"node": "n1"}}\n'],
    ids=["without the kind of answer", "no object", "fields are missing"],
)
def test_an_agent_of_another_version_is_an_error_that_says_so(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, str(path), GetStatus(), StatusAnswer)
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(line)
            with pytest.raises(ControllerError, match="another version"):
                asked.result(10)


def test_a_command_of_another_version_is_refused(tmp_path: Path) -> None:
    server = Server(tmp_path / "socket", lambda request: EventsAnswer([], 0, "ebpf", []))
    try:
        with socket.socket(socket.AF_UNIX) as asker:
            asker.settimeout(10)
            asker.connect(str(server.path))
            asker.sendall(b'{"command": "of tomorrow"}\n')
            assert "another version" in msgspec.json.decode(asker.recv(1000))["failed"]
    finally:
        server.close()


def test_an_agent_that_is_stopped_is_not_waited_for(tmp_path: Path) -> None:
    listens = "import os, signal, socket, sys; made = socket.socket(socket.AF_UNIX); made.bind(sys.argv[1]); "
    path = tmp_path / "stopped.sock"
    stops = f"{listens}made.listen(); os.kill(os.getpid(), signal.SIGSTOP)"
    with subprocess.Popen([sys.executable, "-c", stops, str(path)]) as agent:
        try:
            until(lambda: stat_of(agent.pid)[:1] == ["T"], "it is stopped")
            begun = time.monotonic()
            with pytest.raises(BusyError, match=r"is stopped \(state T\) \(/") as found:
                ask(str(path), GetStatus(), StatusAnswer, seconds=60)
            assert time.monotonic() - begun < 30
            assert found.value.todo.startswith(f"`kill -CONT {agent.pid}`")
        finally:
            agent.kill()


def test_an_agent_that_listens_and_does_not_answer_is_named_by_its_process(tmp_path: Path) -> None:
    path = tmp_path / "hung.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(BusyError, match="does not answer") as found:
            ask(str(path), GetStatus(), StatusAnswer, seconds=0.2)
    assert found.value.who == f"the agent does not answer; its process {os.getpid()} is busy (state R)"
    assert str(found.value).endswith(f"{path})")


@pytest.mark.parametrize(
    ("listeners", "heard"),
    [
        ({Protocol.SCTP: [("10.96.0.9", 38412)]}, True),
        ({Protocol.SCTP: [("::", 38412)]}, True),
        ({Protocol.SCTP: [("10.96.0.8", 38412), ("10.96.0.9", 38413)], Protocol.TCP: [("10.96.0.9", 38412)]}, False),
        ({Protocol.SCTP: [], Protocol.TCP: [("0.0.0.0", 80)]}, True),
        ({Protocol.TCP: []}, False),  # the kernel has no SCTP, nor its list of listeners
    ],
)
def test_a_cluster_ip_of_sctp_is_heard_where_somebody_listens_by_it(
    monkeypatch: pytest.MonkeyPatch, listeners: dict[Protocol, list[tuple[str, int]]], heard: bool
) -> None:
    def listening(protocol: Protocol) -> list[tuple[str, int]]:
        if protocol not in listeners:
            raise FileNotFoundError
        return listeners[protocol]

    monkeypatch.setattr(answers.namespaces, "listening", listening)
    ports = ServicePort("n2", Protocol.SCTP, 38412), ServicePort("http", Protocol.TCP, 80)
    assert answers._is_heard("10.96.0.9", Service("shop", "amf", "ClusterIP", ports=ports)) is heard  # noqa: SLF001


def test_endpoints_at_addresses_of_services_are_none_of_pods() -> None:
    fronts = (Frontend(Kind.CLUSTER_IP, "10.96.0.1", 80, 0, 0), Frontend(Kind.EXTERNAL_IP, "192.0.2.1", 80, 0, 0))
    entry = Entry("shop/web:http", 4, Protocol.TCP, fronts, (BackendSet(()),))
    network = NodeNetwork(addresses=("10.96.9.9",), service_cidrs=("10.96.0.0/16", "fd96::/108"))
    ends = [Endpoint(each) for each in ("10.96.0.1", "10.96.7.7", "10.96.9.9", "192.0.2.1", "10.0.0.1", "fd96::7")]
    found = answers.misplaced(
        ServiceTable({"shop/web": (entry,)}, network, 1, 0, frozenset()),
        {"shop/a": [*ends, Endpoint("10.96.7.8", ready=False)]},
    )
    assert found == {
        "10.96.0.1": "an endpoint of shop/a and the ClusterIP of shop/web",
        "10.96.7.7": "an endpoint of shop/a and in the service range 10.96.0.0/16",
        "fd96::7": "an endpoint of shop/a and in the service range fd96::/108",
    }
