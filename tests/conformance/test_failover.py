"""Backends that are silent or refuse, with real sockets: clients are connected all the same, and then pass them by."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from hybrid_proxy.dataplane.kernel.bpf import programs_at
from hybrid_proxy.dataplane.modes.ebpf.hooks.cgroup import SOCK_OPS
from hybrid_proxy.dataplane.reports import BackendRow, PacketEvent, ServiceRow
from hybrid_proxy.workshop.lab.traffic import Stream, ask_tcp
from tests.waiting import bound

from .conftest import only_in
from .kit import HTTP, PATIENCE, V4, V6, Bench, Service, counted, eventually, said

# The others leave failing backends to their clients, or have their own way (userspace).
pytestmark = only_in("ebpf")
Row = TypeVar("Row")

CLIENTS = 12
RECOVERY = 25.0  # a backend that is well again is tried after ten seconds
IN_TIME = PATIENCE == 1  # an emulated machine takes longer for one command than that


@contextmanager
def failing(bench: Bench, *pods: str, how: str = "drop") -> Iterator[None]:
    """What opens a connection to these pods gets no answer, or a reset (`reject with tcp reset`)."""
    rules = (
        "add table inet deaf; add chain inet deaf input { type filter hook input priority 0; }; "
        f"add rule inet deaf input tcp dport {HTTP} tcp flags & (syn | ack) == syn {how}"
    )
    for pod in pods:
        done = bench.lab.run(pod, ["nft", rules])
        assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        listen(bench, *pods)


def listen(bench: Bench, *pods: str) -> None:
    for pod in pods:
        bench.lab.run(pod, ["nft", "delete table inet deaf"])


def dial(bench: Bench, place: str, service: Service, family: int) -> bool:
    """Whether a process of this place connects."""
    address, port = service.vip(family)
    return bench.lab.run(place, ["bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}"]).returncode == 0


def observe(bench: Bench, place: str, service: Service, family: int) -> None:
    """Connect until the agent observes how connections of the place's cgroup begin."""

    def is_observed() -> bool:
        return dial(bench, place, service, family) and observers(bench.lab[place].cgroup) == 1

    eventually(is_observed, 10, f"nobody observes connections of {place}")


def observers(cgroup: Path | None) -> int:
    """How many sock_ops programs are at the cgroup itself."""
    assert cgroup is not None
    folder = os.open(cgroup, os.O_RDONLY)
    try:
        return len(programs_at(folder, SOCK_OPS))
    finally:
        os.close(folder)


def ask_at_once(bench: Bench, place: str, target: tuple[str, int], family: int, count: int = CLIENTS) -> Counter[str]:
    """So many connections at the same moment; who answered, errors by name."""
    seen: Counter[str] = Counter()

    def one() -> None:
        try:
            with bench.connect(place, target, family, timeout=4) as connection:
                seen[ask_tcp(connection, close=True).pod] += 1
        except OSError as error:
            seen[type(error).__name__] += 1

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def listed(bench: Bench, command: str, service: Service, kind: type[Row]) -> list[Row]:
    """What a listing says of the service, in rows of this kind."""
    rows = said(bench, command, f"conformance/{service.name}")
    return msgspec.convert(rows, list[kind], str_keys=True)  # type: ignore[valid-type]


def backends(bench: Bench, service: Service) -> list[BackendRow]:
    return listed(bench, "backends", service, BackendRow)


def states(bench: Bench, service: Service) -> dict[str, str | None]:
    """What `backends` says of each, by address and port."""
    return {row.address: row.state for row in backends(bench, service)}


def ejected(bench: Bench, service: Service, *, really: bool = True) -> set[str]:
    """Addresses of the backends that the agent ejects, or would eject if fewer failed."""
    rows = bench.agent.running_status().dataplane.ebpf.ejections
    return {row.address for row in rows if row.ejected == really and f"/{service.name}:" in row.service}


def ends(bench: Bench, pods: Sequence[str], families: Sequence[int] = (V4, V6)) -> set[str]:
    places = [(bench.lab[pod].address(family), family) for pod in pods for family in families]
    return {f"{address}:{HTTP}" if family == V4 else f"[{address}]:{HTTP}" for address, family in places}


def stream_to(bench: Bench, service: Service, pod: str) -> Stream:
    """An open connection to that backend."""
    while True:
        stream = bench.stream("pod1", service.vip(V4), V4)
        if stream.ask().pod == pod:
            return stream
        stream.connection.close()


def test_a_silent_backend_costs_a_second_and_is_then_passed_by(bench: Bench) -> None:
    """All clients are connected by their first repeated SYN; later ones at once; in the end it is back."""
    web = bench.service("pod2", "pod3", "pod4")
    before = counted(bench.agent, "failover")
    stream = stream_to(bench, web, "pod2")
    with stream.connection, failing(bench, "pod2"):
        for _ in range(6):  # a dozen connections in each round: one or two failures of pod2 would be rare
            if ends(bench, ["pod2"]) <= ejected(bench, web):  # of both families at a time: an ejection ends
                break
            for family in (V4, V6):
                seen = ask_at_once(bench, "pod1", web.vip(family), family)
                assert seen.keys() <= {"pod3", "pod4"}, seen
        eventually(lambda: ejected(bench, web) == ends(bench, ["pod2"]), 3, "pod2 is not ejected")
        assert counted(bench.agent, "failover") - before >= 2 * 3
        if IN_TIME:
            said = [address for address, state in states(bench, web).items() if state.startswith("ejected for")]
            assert set(said) == ends(bench, ["pod2"])
        for family in (V4, V6):
            assert bench.seen("pod1", web, family, 24, timeout=0.5) == {"pod3", "pod4"}
            assert bench.seen("node", web, family, 24, timeout=0.5) == {"pod3", "pod4"}
        assert stream.ask().pod == "pod2", "an established connection is not touched"
    for family in (V4, V6):
        bench.settle(web, {"pod2", "pod3", "pod4"}, family, timeout=RECOVERY)
    eventually(
        lambda: set(states(bench, web).values()) == {"serving"}, RECOVERY, lambda: f"in the end: {states(bench, web)}"
    )


def test_every_client_is_connected_while_one_of_three_is_silent(bench: Bench, family: int) -> None:
    web = bench.service("pod2", "pod3", "remote1")
    with failing(bench, "pod2"):
        seen = ask_at_once(bench, "pod1", web.vip(family), family, 24)
        assert seen.keys() <= {"pod3", "remote1"}, seen


def test_what_the_nodes_own_sockets_meet_is_counted(bench: Bench, family: int) -> None:
    """Their SYNs go where the first one went; but three of them in vain are enough for all that come later."""
    web = bench.service("pod2", "pod3")
    observe(bench, "node", web, family)
    with failing(bench, "pod2"):
        patient = []
        while len(patient) < 3:
            client = bench.socket("node", family, socket.SOCK_STREAM)
            client.setblocking(False)
            client.connect_ex(web.vip(family))
            if select.select([], [client], [], 0.3 * PATIENCE)[1]:
                client.close()
            else:
                patient.append(client)
        eventually(lambda: ejected(bench, web) == ends(bench, ["pod2"], [family]), 5, "pod2 is not ejected")
        assert bench.seen("node", web, family, 8, timeout=0.5) == {"pod3"}
    for client in patient:
        client.settimeout(20)
        assert select.select([], [client], [], 20)[1], "it listens again, and the next repetition connects"
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        client.close()
    bench.settle(web, {"pod2", "pod3"}, family, timeout=RECOVERY)


def test_connections_are_observed_where_sockets_connect_to_services(bench: Bench, family: int) -> None:
    """Of a pod in the node's own network, in a cgroup below the pods'; the others' connections pay nothing."""
    lab, web = bench.lab, bench.service("pod2")
    pods = lab["pod1"].cgroup
    assert pods is not None

    @contextmanager
    def hosted(name: str) -> Iterator[None]:
        lab.places[name] = replace(lab["node"], name=name, cgroup=pods / name)
        (pods / name).mkdir()
        try:
            yield
        finally:
            del lab.places[name]
            (pods / name).rmdir()

    with hosted("first"):
        observe(bench, "first", web, family)
    with hosted("second"):
        observe(bench, "second", web, family)
        with restarted(bench):
            eventually(lambda: observers(lab["second"].cgroup) == 1, 10, "a new agent does not know its cgroup")
            with failing(bench, "pod2", how="reject with tcp reset"):
                assert not dial(bench, "second", web, family)
            (row,) = (row for row in backends(bench, web) if row.address in ends(bench, ["pod2"], [family]))
            assert row.history
            assert row.history.refused == 1
    assert bench.seen("pod1", web, family, 2) == {"pod2"}
    assert observers(pods) == observers(lab.cgroup) == 0


def test_clients_outside_whose_address_is_replaced(bench: Bench, family: int) -> None:
    """Masqueraded flows, to a pod of this node and to one of another."""
    web = bench.service("pod2", "remote1", outside=True)
    target = (bench.lab["node"].address(family), web.node_port)
    before = counted(bench.agent, "failover")
    for silent, answering in (("remote1", "pod2"), ("pod2", "remote1")):
        with failing(bench, silent):
            eventually(
                lambda answering=answering: ask_at_once(bench, "client", target, family, 8).keys() == {answering},
                PATIENCE,
                "clients outside are not connected",
            )
        eventually(lambda: not ejected(bench, web), RECOVERY, "nobody comes back")
    assert counted(bench.agent, "failover") > before


def test_a_pod_that_is_deaf_to_itself(bench: Bench, family: int) -> None:
    web = bench.service("pod1", "pod2")
    with failing(bench, "pod1"):
        assert ask_at_once(bench, "pod1", web.vip(family), family, 8) == {"pod2": 8}


def test_what_refuses_the_nodes_own_sockets_is_told_from_sockets_that_give_up(bench: Bench, family: int) -> None:
    """Whoever closes a socket before anybody could answer has met no failure."""
    web = bench.service("pod2")
    observe(bench, "node", web, family)

    def history() -> tuple[int, int]:
        (row,) = (row for row in backends(bench, web) if row.address in ends(bench, ["pod2"], [family]))
        return (row.history.refused, row.history.unanswered) if row.history else (0, 0)

    with failing(bench, "pod2"):
        for _ in range(4):
            with bench.socket("node", family, socket.SOCK_STREAM) as client:
                client.setblocking(False)
                client.connect_ex(web.vip(family))
        assert history() == (0, 0)
    with failing(bench, "pod2", how="reject with tcp reset"):
        for _ in range(3):
            assert bench.seen("node", web, family, 1) == {"[Errno 111] Connection refused"}
        assert history() == (3, 0)
    assert bench.seen("node", web, family, 4) == {"pod2"}


def test_a_backend_that_refuses_is_passed_by(bench: Bench, family: int) -> None:
    """The first clients see the refusal, as a reset must be believed."""
    web = bench.service("pod2", "pod3", "pod4")
    with failing(bench, "pod3", how="reject with tcp reset"):
        eventually(lambda: bench.spread("pod1", web, family, 24).keys() == {"pod2", "pod4"}, 8, "pod3 is never ejected")
        eventually(lambda: ejected(bench, web) == ends(bench, ["pod3"], [family]), 3, "the ejection is not reported")


def test_the_last_backend_is_never_ejected(bench: Bench, family: int) -> None:
    web = bench.service("pod2")
    with failing(bench, "pod2", how="reject with tcp reset"):
        for _ in range(6):
            assert bench.seen("pod1", web, family, 1) == {"[Errno 111] Connection refused"}
        eventually(
            lambda: ejected(bench, web, really=False) == ends(bench, ["pod2"], [family]),
            5,
            "six refusals were not counted",
        )
        assert ejected(bench, web) == set()
        if IN_TIME:
            assert any(state.startswith("kept because too many fail") for state in states(bench, web).values())
        (backend,) = (row for row in backends(bench, web) if row.address in ends(bench, ["pod2"], [family]))
        assert backend.history is not None
        assert (backend.history.refused, backend.history.unanswered) == (6, 0)
        rows = listed(bench, "services", web, ServiceRow)
        assert [row.failing for row in rows if web.vip(family)[0] in row.frontends[0]] == [1]
        assert f"conformance/{web.name}:main" in bench.agent.running_status().dataplane.failing

        def refusals() -> set[tuple[str, str | None, str | None]]:
            rows = listed(bench, "drops", web, PacketEvent)
            return {(row.what, row.backend, row.flags) for row in rows if row.reason == "backend_refused"}

        eventually(  # once more for each try: so many events are reported in a second, and no more
            lambda: bench.seen("pod1", web, family, 1) and refusals() == {("fail", backend.address, "RST ACK")},
            5,
            lambda: f"the refusals are listed as {refusals()}",
        )
    assert bench.seen("pod1", web, family, 4) == {"pod2"}


def test_affinity_moves_to_the_backend_that_answered(bench: Bench, family: int) -> None:
    sticky = {"sessionAffinity": "ClientIP"}
    web = bench.service("pod2", "pod3", settle=False, spec=sticky)
    eventually(lambda: bench.ask("pod1", web, family, timeout=1.0), 8, "the service is not served")
    (first,) = bench.seen("pod1", web, family, 4)
    (other,) = {"pod2", "pod3"} - {first}
    with failing(bench, first):
        assert bench.ask("pod1", web, family, timeout=4).pod == other
    assert bench.seen("pod1", web, family, 8) == {other}


@contextmanager
def restarted(bench: Bench, *more: str) -> Iterator[None]:
    """With more flags."""
    flags, bench.agent.flags = bench.agent.flags, (*bench.agent.flags, *more)
    bench.agent.terminate()
    bench.agent.start()
    yield
    bench.agent.flags = flags
    bench.agent.terminate()
    bench.agent.start()


# --- backends that fail now and then


@pytest.fixture(scope="module")
def patient(bench: Bench) -> Iterator[Bench]:
    """An agent for which no number of failures in a row is too large."""
    with restarted(bench, "--failover-failures=1000000"):
        yield bench


def load(bench: Bench, service: Service, family: int, over: Callable[[], bool], rate: int = 100) -> None:
    """New connections at this rate, whatever becomes of the former ones, until it is over."""
    began, opened = time.monotonic(), deque[tuple[float, socket.socket]]()
    try:
        while not over():
            waited = time.monotonic() - began
            assert waited < bound(15), f"after {waited:.0f} s: {states(bench, service)}"
            for _ in range(rate // 2):
                client = bench.socket("pod1", family, socket.SOCK_STREAM)
                client.setblocking(False)
                client.connect_ex(service.vip(family))
                opened.append((time.monotonic(), client))
                while opened[0][0] < time.monotonic() - 3:
                    opened.popleft()[1].close()
                time.sleep(1 / rate)
    finally:
        for _, client in opened:
            client.close()


@contextmanager
def accepting(bench: Bench, pod: str, family: int, port: int, every: float) -> Iterator[None]:
    """A server in this pod with room for one connection that it has not accepted yet."""
    with bench.socket(pod, family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((bench.lab[pod].address(family), port))
        server.listen(0 if every else 256)
        over = threading.Event()

        def accept() -> None:
            while not over.wait(every):
                with suppress(OSError):
                    server.accept()[0].close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield
        finally:
            over.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


HALF_BROKEN = [
    pytest.param("numgen random mod 10 < 3 drop", V4, id="loses 30 percent of SYNs"),
    pytest.param("numgen inc mod 2 0 drop", V6, marks=pytest.mark.long, id="answers every second SYN"),
    pytest.param("numgen inc mod 3 0 reject with tcp reset", V4, marks=pytest.mark.long, id="refuses every third"),
]


@pytest.mark.parametrize(("how", "family"), HALF_BROKEN)
def test_who_fails_too_often_is_ejected_though_never_many_times_in_a_row(patient: Bench, how: str, family: int) -> None:
    web = patient.service("pod2", "pod3")
    with failing(patient, "pod2", how=how):
        load(patient, web, family, lambda: bool(ejected(patient, web)))
        assert ejected(patient, web) == ends(patient, ["pod2"], [family])
        (state,) = (state for state in states(patient, web).values() if state.startswith("ejected"))
        assert "connections failed within" in state
        assert patient.seen("pod1", web, family, 12, timeout=0.5) == {"pod3"}


def test_who_accepts_slowly_is_ejected(patient: Bench) -> None:
    """Its queue of connections is full, so the kernel drops SYNs."""
    port, family = 9555, V4
    with accepting(patient, "pod2", family, port, every=0.3), accepting(patient, "pod3", family, port, every=0):
        web = patient.service("pod2", "pod3", settle=False, target=port)
        load(patient, web, family, lambda: bool(ejected(patient, web)))
        assert {address.partition(":")[0] for address in ejected(patient, web)} == {patient.lab["pod2"].address(family)}


@pytest.mark.long
def test_a_failing_backend_is_reported_before_it_is_ejected(patient: Bench, family: int) -> None:
    web = patient.service("pod2", "pod3", "pod4")
    name = f"conformance/{web.name}:main"

    def reported() -> set[str]:
        rows = patient.agent.running_status().dataplane.failing_backends
        return {row.address for row in rows if row.service == name}

    with failing(patient, "pod2", how="reject with tcp reset"):
        eventually(
            lambda: patient.seen("pod1", web, family, 1) and reported() == ends(patient, ["pod2"], [family]),
            8,
            "a backend fails, and status is well",
        )
    eventually(lambda: patient.seen("pod1", web, family, 1) and not reported(), 8, "it answers")


def test_nobody_is_ejected_where_all_lose_as_many(patient: Bench) -> None:
    """The fault is not theirs."""
    web, began = patient.service("pod2", "pod3", "pod4"), time.monotonic()
    with failing(patient, "pod2", "pod3", "pod4", how="numgen inc mod 3 0 drop"):
        load(patient, web, V4, lambda: time.monotonic() - began > 12)
        assert not ejected(patient, web)
        assert not ejected(patient, web, really=False)


# --- probes


@pytest.fixture(scope="module")
def probing(bench: Bench) -> Iterator[Bench]:
    """An agent that asks often, and goes by nothing else."""
    with restarted(bench, "--probe-interval=200ms", "--probe-failures=2", "--failover-failures=0"):
        yield bench


@pytest.mark.parametrize("probe", ["tcp", "http:/healthz"])
def test_who_fails_its_probes_gets_no_connections_until_it_succeeds(probing: Bench, probe: str) -> None:
    """A pod of this node and one of another; nobody has connected to them meanwhile."""
    bench = probing
    web = bench.service("pod2", "pod3", "remote1", "remote2", annotations={"probe": probe})
    with failing(bench, "pod2", "remote1"):
        silent = ends(bench, ["pod2", "remote1"])
        eventually(lambda: ejected(bench, web) == silent, 10, "two of four are not ejected")
        assert all(("its probe" in state) == (where in silent) for where, state in states(bench, web).items())
        for family in (V4, V6):
            assert bench.seen("pod1", web, family, 16, timeout=0.5) == {"pod3", "remote2"}
            assert bench.seen("node", web, family, 16, timeout=0.5) == {"pod3", "remote2"}
    for family in (V4, V6):
        bench.settle(web, {"pod2", "pod3", "remote1", "remote2"}, family)
    assert ejected(bench, web) == set()


def test_a_malformed_probe_refuses_that_service_alone(probing: Bench) -> None:
    bench = probing
    web = bench.service("pod2", "pod3", annotations={"probe": "http:/"})
    assert bench.agent.running_status().dataplane.ebpf.probes.targets >= 4
    assert bench.seen("pod1", web, V4, 24) == {"pod2", "pod3"}
    web.write(annotations={"probe": "udp"})
    status = bench.agent.wait(lambda status: any(web.name in p.key for p in status.problems), what="refusing it")
    assert any("is not tcp or http:/PATH" in problem.message for problem in status.problems)
    assert bench.seen("pod1", bench.service("pod4"), V4, 2) == {"pod4"}, "others are served"
