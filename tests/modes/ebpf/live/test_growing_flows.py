"""Tables of flows grow while conversations go on, and the agent is killed at every step of it. In a lab."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.modes.ebpf.generations.growth import GROWING
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import abi_constants
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Stream, Tally, ask_udp

from .test_growing import DNS, FAMILIES, PATIENT, WEB, Child, entries, lab, traffic_of

__all__ = ["lab"]  # a fixture

pytestmark = pytest.mark.root

TABLES = ("flows4", "flows6", "half_open4", "half_open6", "affinity", "timewait")
FIRST = {"flows4": 256, "flows6": 256, "half_open4": 4096, "half_open6": 4096, "affinity": 4096, "timewait": 256}


class Conversations:
    """Connections and datagram sockets from a pod and the node, all of which keep the backend that they got."""

    def __init__(self, lab: Lab, held: ExitStack) -> None:
        self.lab, self._held = lab, held
        self.streams, self.senders = list[Stream](), list[tuple[socket.socket, Any, str]]()

    def begin(self, count: int) -> None:
        """So many of each kind, place and family more."""
        for place, family, _ in itertools.product(("pod1", "node"), FAMILIES, range(count)):
            client = self._held.enter_context(self.lab.socket(place, family))
            client.settimeout(PATIENT)
            client.connect(WEB[family])
            stream = Stream(client, Tally())
            stream.ask()
            self.streams.append(stream)
            sender = self._held.enter_context(self.lab.socket(place, family, socket.SOCK_DGRAM))
            sender.settimeout(PATIENT)
            self.senders.append((sender, DNS[family], ask_udp(sender, DNS[family])[0].pod))

    def ask(self) -> None:
        """Each is answered by the backend that it had."""
        for stream in self.streams:
            stream.ask()
            assert not stream.tally.moved
        for sender, target, pod in self.senders:
            reply, source = ask_udp(sender, target)
            assert (source, reply.pod) == (target, pod)


@contextmanager
def conversations(lab: Lab) -> Iterator[Conversations]:
    with ExitStack() as held:
        yield Conversations(lab, held)


def sizes_of(status: dict[str, Any]) -> dict[str, int]:
    return {name: entries(status, name) for name in TABLES}


def evictable(folder: str) -> int:
    """Established flows in a table that forgets."""
    found = 0
    for family in (4, 6):
        with closing(Map.pinned(Path(folder) / f"half_open{family}")) as known:
            _, values = flow_arrays(known, family)
            found += int(np.count_nonzero(values["flags"] & abi_constants()["FLOW_ESTABLISHED"]))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("many", [60, pytest.param(700, marks=pytest.mark.long)])
def test_tables_of_flows_grow_three_times_and_no_conversation_notices(lab: Lab, many: int) -> None:
    child = Child(lab, floor=FIRST)
    first = child.do("status")
    assert sizes_of(first) == FIRST
    with traffic_of(lab) as traffic, conversations(lab) as talks:
        for _ in range(3):
            before = sizes_of(child.do("status"))
            for _ in range(10):
                talks.begin(many // 30)
                child.do("maintain")
            talks.ask()
            assert child.do("crowd")
            assert evictable(first["ebpf"]["pins"]) == 0
            talks.ask()
            traffic.moves_on()
            after = sizes_of(child.do("status"))
            assert all(after[name] >= 4 * before[name] for name in ("flows4", "flows6")), (before, after)
        time.sleep(2.5)
        talks.ask()
        last = child.do("status")
    for name in ("drop_no_port", "slot_lost", "drop_flow_lost", "drop_flow_full"):
        assert last["counters"][name] == 0, name
    assert not [path for path in Path(last["ebpf"]["pins"]).iterdir() if path.name.startswith((GROWING, "next_"))]
    child.end()


# Where it dies. Each of these labs has room for some growths only.
SOME = ("growth meet 1", "growth enter 2", "growth copy 3", "growth enter 3", "growth run 1")
OTHERS = [
    ("growth copy 1", "growth enter 1", "growth copy 2", "growth merge 2", "growth move 1"),
    ("links 1", "links 3", "links 5", "links 8", "pins 1"),
    ("pins 5", "pins 2", "growth settle 1"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps", [SOME, *(pytest.param(steps, marks=pytest.mark.long) for steps in OTHERS)])
def test_an_agent_killed_in_a_growth_loses_no_flow(lab: Lab, steps: tuple[str, ...]) -> None:
    child = Child(lab, floor=FIRST)
    with traffic_of(lab) as traffic, conversations(lab) as talks:
        talks.begin(10)
        time.sleep(2.5)
        talks.ask()  # by now these are conversations, which nothing evicts
        for step in steps:
            child.do(f"die {step}")
            assert child.do("crowd") is None, step
            child.kill()
            talks.begin(1)
            talks.ask()
            traffic.moves_on(3)
            child = Child(lab, floor=FIRST)
            status = child.maintain_until(lambda _: True)
            talks.ask()
            traffic.moves_on(3)
            assert status["adopted"]
            left = [path.name for path in Path(status["ebpf"]["pins"]).iterdir()]
            assert not [name for name in left if name.startswith((GROWING, "next_"))], step
        assert child.do("crowd")
        talks.ask()
        traffic.moves_on()
    child.end()
