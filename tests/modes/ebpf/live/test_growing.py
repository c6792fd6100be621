"""Maps grow while real connections go through them, and the agent is killed at every step of it. In a lab."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.generations.generation import BRIDGED, LARGER, RESTART
from hybrid_proxy.dataplane.modes.ebpf.maps.traffic import FIELDS
from hybrid_proxy.dataplane.modes.ebpf.programmer import clean
from hybrid_proxy.dataplane.options import EbpfOptions
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Stream, Tally, load, meanwhile
from tests.namespaces import new_lab

pytestmark = pytest.mark.root

FAMILIES = (socket.AF_INET, socket.AF_INET6)
WEB = {socket.AF_INET: ("10.96.0.10", 80), socket.AF_INET6: ("fd96::10", 80)}
DNS = {socket.AF_INET: ("10.96.0.11", 53), socket.AF_INET6: ("fd96::11", 53)}
PATIENT = 20.0  # seconds that a client waits for an answer on a busy machine
CHILDREN: list[Child] = []


class Child:
    """See the module of this name."""

    def __init__(self, lab: Lab, *, old_kernel: bool = False, count: int = 0, version: int = 0,
                 dies: int = 0, **limits: int) -> None:  # fmt: skip
        self.lab = lab
        pods = {f: [lab[name].address(f) for name in ("pod2", "pod3")] for f in FAMILIES}
        setup = {
            "cgroup": str(lab.cgroup), "old_kernel": old_kernel, "limits": limits,
            "count": count, "version": version, "dies": dies,
            "primary": [lab["node"].address(f) for f in FAMILIES],
            "web": [(WEB[f][0], pods[f]) for f in FAMILIES], "dns": [(DNS[f][0], pods[f]) for f in FAMILIES],
        }  # fmt: skip
        argv = [sys.executable, "-m", "tests.modes.ebpf.child", json.dumps(setup)]
        self.process = lab.spawn("node", argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        CHILDREN.append(self)
        assert self._read() == (None if dies else "ready")

    def do(self, command: str) -> Any:
        """None: it died of that."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def maintain_until(self, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """As the agent's loop does it, until no growth is under way and the status is as wanted."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            busy = self.do("maintain")
            status: dict[str, Any] = self.do("status")
            if not busy and reached(status):
                return status
            time.sleep(0.1)
        raise AssertionError(f"not reached: {status['ebpf']['maps']}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            assert self.process.wait(timeout=60) == 0


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab("w", 3) as made:
        made.serve("pod2", "pod3")
        yield made
        while CHILDREN:
            CHILDREN.pop().kill()
        with made.inside("node"):
            clean(Options(ebpf=EbpfOptions(cgroup=str(made.cgroup))))


class Traffic:
    """New connections, datagrams and open streams, from a pod and from the node, all the while."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.streams, self.tallies = lab, list[Stream](), dict[str, Tally]()

    def open_streams(self, count: int) -> None:
        """So many more of each family, all of which stay open."""
        for family in FAMILIES:
            for _ in range(count):
                client = self.lab.socket("pod1", family)
                client.settimeout(PATIENT)
                client.connect(WEB[family])
                self.streams.append(Stream(client, Tally()))
        self.ask()

    def ask(self) -> None:
        """Every stream is answered, by the backend that it had."""
        for stream in self.streams:
            stream.ask()
            assert not stream.tally.moved

    def moves_on(self, answers: int = 5) -> None:
        """Wait until every client has had so many answers more."""
        goal = {name: tally.answered + answers for name, tally in self.tallies.items()}
        deadline = time.monotonic() + 60
        while any(tally.answered < goal[name] for name, tally in self.tallies.items()):
            assert time.monotonic() < deadline, {n: t.report() for n, t in self.tallies.items()}
            assert not any(tally.failures for tally in self.tallies.values()), self.failures()
            time.sleep(0.02)
        self.ask()

    def close(self) -> None:
        """Asks all streams once more, and closes them."""
        self.ask()
        for stream in self.streams:
            stream.connection.close()

    def failures(self) -> dict[str, Any]:
        return {name: tally.report() for name, tally in self.tallies.items() if tally.failures or tally.moved}


@contextmanager
def traffic_of(lab: Lab) -> Iterator[Traffic]:
    made, clients = Traffic(lab), []
    for place, family in itertools.product(("pod1", "node"), FAMILIES):
        for kind in ("connections", "streams", "udp"):
            tally = made.tallies[f"{place} {kind} {family.name}"] = Tally()
            target = DNS[family] if kind == "udp" else WEB[family]
            clients.append(
                partial(load, kind, (family, target), tally=tally, rate=10, concurrency=1, timeout=PATIENT,
                        open_socket=partial(lab.socket, place))
            )  # fmt: skip
    with meanwhile(clients):
        yield made
        made.moves_on()
    made.close()
    assert not made.failures()


def entries(status: dict[str, Any], name: str) -> int:
    return int(status["ebpf"]["maps"][name]["entries"])


def roomy(status: dict[str, Any]) -> bool:
    return all(
        row["used"] <= 0.75 * row["entries"] for row in status["ebpf"]["maps"].values() if row["used"] is not None
    )


def test_maps_grow_under_load(lab: Lab) -> None:
    """From a handful of entries, because something did not fit, or was about not to; figures never go back."""
    child = Child(lab)
    first = child.do("status")
    with traffic_of(lab) as traffic:
        traffic.open_streams(5)
        traffic.moves_on()
        counted, before = child.do("status")["counters"]["new_flow"], figures(child)
        for _ in range(2):
            assert child.do("more 60") == []
            traffic.moves_on()
            traffic.open_streams(5)
            child.maintain_until(roomy)
        traffic.moves_on()
        last = child.do("status")
    for name in ("services", "backends", "slots"):
        assert entries(last, name) > entries(first, name), name
        assert last["ebpf"]["maps"][name]["bytes"] > first["ebpf"]["maps"][name]["bytes"], name
    assert last["unprogrammed"] == last["warnings"] == []
    assert last["counters"]["new_flow"] > counted
    assert last["counters"]["drop_no_port"] == last["counters"]["slot_lost"] == 0
    after = figures(child)
    assert all(after[name] > before[name] > 0 for name in before), (before, after)
    assert child.do("grow")
    assert figures(child)["flows"] == after["flows"], "while nothing begins, none is lost"
    child.end()


def figures(child: Child) -> dict[str, int]:
    rows = [row for row in child.do("traffic") if row["service"] == "default/web:http"]
    return {name: sum(row["counts"][name] for row in rows) for name in FIELDS}


def test_bounds_are_reported(lab: Lab) -> None:
    """Before they are met, once, and when they are; what does not fit waits, the rest is served."""
    child = Child(lab, services=32)
    assert child.do("more 10") == []
    status = child.maintain_until(roomy)
    assert not status["warnings"]
    assert child.do("more 15") == []
    status = child.maintain_until(lambda status: status["ebpf"]["maps"]["services"]["used"] == 29)
    assert not status["warnings"], "the rows of the maps say it"
    child.do("maintain")
    assert child.do("notices") == ["MapNearlyFull"] * 2
    assert child.do("more 5") == ["map services (--max-services) is full (32)"] * 3
    assert child.do("status")["ebpf"]["maps"]["services"]["bound"] == 32
    child.end()


def test_a_resize_that_fails_is_reported_and_tried_again(lab: Lab) -> None:
    child = Child(lab)
    traffic = Traffic(lab)
    traffic.open_streams(2)
    assert child.do("refuse 1")
    refused = child.do("more 40")
    assert refused
    assert "is full" in refused[0]
    assert any("maps cannot grow" in message for message in child.do("status")["warnings"])
    traffic.ask()
    assert child.do("retry")
    last = child.maintain_until(lambda status: not status["unprogrammed"])
    assert last["warnings"] == []
    traffic.close()
    child.end()


def died(child: Child, *commands: str) -> bool:
    """Whether it did not outlive the last of these commands."""
    answers = [child.do(command) for command in commands]
    child.kill()
    return answers[-1] is None


STEPS_OF_LARGER = [(f"die steps {n}", "grow") for n in range(1, len(LARGER) + 1)]
PINS = [(f"die pins {n}", "grow") for n in range(1, 6)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kills",
    [[STEPS_OF_LARGER[3], PINS[1]], pytest.param([("begin",), *STEPS_OF_LARGER, *PINS], marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_the_agent_is_killed_while_maps_grow(lab: Lab, kills: list[tuple[str, ...]]) -> None:
    """The next one finds every flow and the same services, and grows on."""
    child = Child(lab)
    with traffic_of(lab) as traffic:
        for commands in kills:
            traffic.open_streams(2)
            assert died(child, *commands) == commands[0].startswith("die"), commands
            traffic.open_streams(1)
            traffic.moves_on(3)
            child = Child(lab)
            status = child.maintain_until(lambda _: True)
            assert status["adopted"]
            assert status["unprogrammed"] == []
            assert not list(Path(status["ebpf"]["pins"]).glob("next_*")), commands
            traffic.moves_on(3)
        assert child.do("more 40") == []
        status = child.maintain_until(roomy)
        traffic.moves_on()
    assert status["counters"]["drop_no_port"] == status["counters"]["slot_lost"] == 0
    child.end()


# What differs between the agents that follow each other, and how many steps a start has then. Two of them load the
# programs and make them ready; the others are those of the plan. Other layouts are in conformance/test_other_layouts.
SAME, SIZES = ({},), ({"flows": 1 << 13}, {"flows": 1 << 14})
STARTS = {"restart": (SAME, len(RESTART) + 2), "tables-of-flows": (SIZES, len(BRIDGED) + 2)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("row", "steps"),
    [
        ("restart", (2,)),  # of other sizes: conformance/test_other_layouts
        *(
            pytest.param(row, tuple(range(1, count + 1)), marks=pytest.mark.long, id=f"{row}-all")
            for row, (_, count) in STARTS.items()
        ),
    ],
)
def test_an_agent_is_killed_after_a_step_of_its_start(lab: Lab, row: str, steps: tuple[int, ...]) -> None:
    """The next one goes on from there, and no client notices."""
    limits = itertools.cycle(STARTS[row][0])
    child = Child(lab, **next(limits))
    with traffic_of(lab) as traffic:
        traffic.open_streams(3)
        traffic.moves_on(3)
        for step in steps:
            child.kill()
            wanted = next(limits)
            Child(lab, dies=step, **wanted)
            traffic.open_streams(1)
            traffic.moves_on(3)
            child = Child(lab, **wanted)
            status = child.do("status")
            assert status["adopted"]
            pins = Path(status["ebpf"]["pins"])
            assert [path.name for path in pins.parent.iterdir()] == [pins.name], f"after step {step}"
            assert not (pins / "carrying").exists()
            assert entries(status, "flows4") == wanted.get("flows", entries(status, "flows4"))
            traffic.moves_on(3)
    assert status["counters"]["drop_flow_lost"] == status["counters"]["drop_no_port"] == 0
    child.end()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [6, *(pytest.param(step, marks=pytest.mark.long) for step in (2, 4, 8, 10, 12))])
def test_the_next_agent_wants_tables_of_the_former_size_again(lab: Lab, step: int) -> None:
    """One with other sizes was killed; what it had begun is finished as it began it, and no flow ends."""
    former, other = SIZES
    child = Child(lab, **former)
    with traffic_of(lab) as traffic:
        traffic.open_streams(3)
        traffic.moves_on(3)
        child.kill()
        Child(lab, dies=step, **other)
        traffic.moves_on(3)
        child = Child(lab, **former)
        status = child.do("status")
        assert not (Path(status["ebpf"]["pins"]) / "carrying").exists()
        traffic.moves_on(3)
    assert status["counters"]["drop_unallocated"] == 0
    child.end()


def test_a_smaller_table_of_flows_keeps_all_that_are_open(lab: Lab) -> None:
    """It has room for twice as many as there are, whatever the setting says."""
    child = Child(lab, flows=1 << 13)
    traffic = Traffic(lab)
    traffic.open_streams(20)
    child.end()
    child = Child(lab, flows=16)
    assert 80 <= entries(child.do("status"), "flows4") < 1 << 13
    traffic.close()
    child.end()


def test_the_nodes_sockets_are_known_where_a_namespace_has_no_readable_number(lab: Lab) -> None:
    """Linux 5.13 and before. Pods' processes are in the same cgroup here, and are no sockets of the node."""
    child = Child(lab, old_kernel=True)
    for (place, translated), family in itertools.product((("node", 1), ("pod1", 0)), FAMILIES):
        before = child.do("status")["counters"]["socket_connect"]
        with lab.socket(place, family) as client:
            client.settimeout(PATIENT)
            client.connect(WEB[family])
            assert client.getpeername()[:2] == WEB[family]
        assert child.do("status")["counters"]["socket_connect"] - before == translated, (place, family)
    child.end()
