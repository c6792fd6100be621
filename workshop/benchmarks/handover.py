"""10,000 open connections of mode ebpf handed over to nftables at once, and 100,000 flows there and back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hybrid_proxy.dataplane.flows import FLOW, FlowFlag, Flows, Half, HandOver, TcpState
from hybrid_proxy.dataplane.handover import from_conntrack, hand_over, to_conntrack
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf import programmer as ebpf
from hybrid_proxy.dataplane.modes.nftables import programmer as nftables
from hybrid_proxy.dataplane.table import (
    Backend,
    BackendSet,
    Entry,
    Frontend,
    Kind,
    Masquerade,
    NodeNetwork,
    PodMatch,
    Protocol,
    ServiceTable,
)
from hybrid_proxy.workshop.benchmarks.echo import NICE, READY
from hybrid_proxy.workshop.benchmarks.kit import Result, Target, lab, say
from hybrid_proxy.workshop.lab.agent import resident
from hybrid_proxy.workshop.lab.network import CLUSTER_CIDRS, Lab

CONNECTIONS = {"past the stack": 4000, "through the stack": 3000, "masqueraded": 3000}
BACKENDS = 8  # of a service: a flow that chooses again most likely has another one
STREAMS = 3  # of each kind are asked without a pause
MANY = 100_000
PORT, VIPS, NODE_PORT = 9000, {"pod2": "10.97.1.1", "remote1": "10.97.1.2"}, 30_999
ECHO = (sys.executable, "-m", "hybrid_proxy.workshop.benchmarks.echo")


def measure() -> Result:
    """The connections with a hand-over, and without one: then the former mode is removed just as soon.

    What else the machine does comes behind all of it (nice), because gaps of milliseconds are measured.
    """
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    moved, lost = _connections(hand=True), _connections(hand=False)
    scale = _scale()
    gap = max(kind["gap"] for kind in moved.kinds.values())
    return Result(
        "handover", moved.done.seconds, "s", "connections that are lost without a hand-over", lost.lost,
        [
            (Target("connections lost", 0), moved.lost), (Target("segments sent again", 0), moved.again),
            (Target("seconds", 1.0), moved.done.seconds),
            (Target("longest gap, beyond that of a plain connection, in ms", 25), 1000 * (gap - moved.plain_gap)),
        ],
        [f"handover: {sum(CONNECTIONS.values()):,} connections, {dict(moved.done.moved)} moved; {scale}"],
        {
            "lost": moved.lost, "sent_again": moved.again, "cpu_s": round(moved.cpu, 2),
            "gap_ms": round(1000 * gap, 1), "plain_gap_ms": round(1000 * moved.plain_gap, 1), **scale,
        },
    )  # fmt: skip


@dataclass
class Holder:
    """A client with its connections."""

    process: subprocess.Popen[str]

    def told(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def outcome(self) -> dict[str, float]:
        assert self.process.stdout is not None
        found: dict[str, float] = json.loads(self.process.stdout.readline())
        return found


class Outcome(NamedTuple):
    """What one run came to; times in seconds."""

    done: HandOver
    cpu: float
    kinds: dict[str, dict[str, float]]  # what became of each kind of connections
    plain_gap: float  # between two answers on a connection to no Service
    again: int  # segments that the ends sent again meanwhile: each that was lost is among them

    @property
    def lost(self) -> float:
        """Connections without an answer in the end."""
        return sum(kind["silent"] + kind["reset"] for kind in self.kinds.values())


def _connections(*, hand: bool) -> Outcome:
    """The former mode goes in the midst of traffic, and hands its flows over before that or does not."""
    with lab(pods=2, plain=2, remote=1) as made, ExitStack() as stack:
        for place in ("pod2", "plain2", "remote1"):
            _started(made, place, "serve", *map(str, range(PORT, PORT + BACKENDS)))
        stack.enter_context(made.inside("node"))
        options, table = Options(cgroup=str(made.cgroup), pod_interfaces=("veth*",)), _table(made)
        with _opened(ebpf, options, table) as (old, end):
            holders = _holders(made)
            plain = [
                _started(made, "plain1", "hold", made[place].address4, str(PORT), "1", "1")
                for place in ("plain2", "remote1")
            ]
            time.sleep(2.0)
            new, _ = stack.enter_context(_opened(nftables, options, table))
            old.drain(table)
            everybody = [*holders.values(), *plain]
            for one in everybody:
                one.told(signal.SIGUSR1)
            time.sleep(0.5)
            before = _sent_again(made)
            used = time.thread_time()
            done = hand_over(old, new, table, 0) if hand else HandOver({}, {})
            used = time.thread_time() - used
            end.close()
            time.sleep(0.5)
            again = _sent_again(made) - before
            for one in everybody:
                one.told(signal.SIGUSR2)
            found = {name: one.outcome() for name, one in holders.items()}
            gap = max(one.outcome()["gap"] for one in plain)
    what = f"handed over in {done.seconds:.2f} s ({used:.2f} s of a CPU)" if hand else "left"
    say(f"  {what}: {found}, a plain flow's gap {1000 * gap:.0f} ms")
    return Outcome(done, used, found, gap, again)


def _sent_again(made: Lab) -> int:
    """Segments that the connections' ends have sent again so far (RetransSegs)."""
    total = 0
    for place in ("pod1", "pod2", "remote1", "client"):
        with made.inside(place):
            lines = [line.split() for line in Path("/proc/thread-self/net/snmp").read_text().splitlines()]
        names, figures = (line for line in lines if line[0] == "Tcp:")
        total += int(figures[names.index("RetransSegs")])
    return total


def _holders(made: Lab) -> dict[str, Holder]:
    places = {
        "past the stack": ("pod1", VIPS["pod2"], PORT), "through the stack": ("pod1", VIPS["remote1"], PORT),
        "masqueraded": ("client", made["node"].address4, NODE_PORT),
    }  # fmt: skip
    return {
        kind: _started(made, place, "hold", address, str(port), str(CONNECTIONS[kind]), str(STREAMS))
        for kind, (place, address, port) in places.items()
    }


def _started(made: Lab, place: str, *argv: str) -> Holder:
    process = made.start(place, [*ECHO, *argv], output=subprocess.PIPE)
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    assert said == READY, f"{argv} in {place}: {said!r}"
    return Holder(process)


def _table(made: Lab) -> ServiceTable:
    services = {}
    for name, vip in VIPS.items():
        ports = range(PORT, PORT + BACKENDS)
        backends = tuple(Backend(made[name].address4, port, local=name == "pod2") for port in ports)
        frontends = [Frontend(Kind.CLUSTER_IP, vip, PORT, 0, 0)]
        if name == "remote1":
            frontends.append(Frontend(Kind.NODE_PORT, None, NODE_PORT, 0, 0, Masquerade.EXTERNAL))
        sets = (BackendSet(backends, why="every endpoint"),)
        services[f"bench/{name}"] = (Entry(f"bench/{name}:", 4, Protocol.TCP, tuple(frontends), sets, backends),)
    address = made["node"].address4
    node = NodeNetwork(
        "node", (address,), (address,), (address,), PodMatch((CLUSTER_CIDRS[0],)), service_cidrs=("10.97.0.0/16",)
    )
    return ServiceTable(services, node)


@contextlib.contextmanager
def _opened(mode: Any, options: Options, table: ServiceTable) -> Iterator[tuple[Any, ExitStack]]:
    """A mode that serves, and what ends and removes it before the block is over."""
    programmer = mode.MODE.open(options, lambda: None)
    with ExitStack() as stack:
        stack.callback(mode.MODE.clean, options)
        stack.callback(programmer.close)
        programmer.sync(table)
        yield programmer, stack


def _scale() -> dict[str, float]:
    """Entries alone, without sockets, into the maps, to conntrack and back: seconds of a CPU, and MB of memory."""
    with lab(pods=2, remote=1) as made, made.inside("node"), ExitStack() as stack:
        options = Options(cgroup=str(made.cgroup), max_flows=4 * MANY)
        table = _table(made)
        maps, _ = stack.enter_context(_opened(ebpf, options, table))
        rules, _ = stack.enter_context(_opened(nftables, options, table))
        flows = _made_up(made, MANY)
        before, used = _resident(), {}
        start = time.thread_time()
        reception = maps.receive_flows(flows)
        for half in (Half.BEHIND, Half.BEFORE):
            reception.take(half)
        used["import"] = time.thread_time() - start
        assert len(reception.flows) == MANY, reception.left
        start = time.thread_time()
        assert len(maps.export_flows()) == MANY
        used["export"] = time.thread_time() - start
        start = time.thread_time()
        there = to_conntrack(maps, 0)
        used["to_conntrack"] = time.thread_time() - start
        start = time.thread_time()
        known = rules.conntrack_flows(table)
        used["read_conntrack"] = time.thread_time() - start
        start = time.thread_time()
        back = from_conntrack(known, maps, 0)
        used["from_conntrack"] = time.thread_time() - start
        assert there.moved == back.moved == {"TCP": MANY}, (there, back)
        memory = _resident() - before
    rounded = {f"{name}_100k_cpu_s": round(figure, 2) for name, figure in used.items()}
    say(f"  {MANY:,} flows: {rounded}, {memory:.0f} MB")
    return rounded | {"memory_100k_mb": round(memory, 1)}


def _resident() -> float:
    return resident(os.getpid())["VmRSS"]


def _made_up(made: Lab, count: int) -> Flows:
    """Connections of pods of other addresses and ports to the remote backend."""
    rows = np.zeros(count, dtype=FLOW)
    numbers = np.arange(count, dtype=np.uint32)
    rows["family"], rows["protocol"], rows["state"] = 4, Protocol.TCP, TcpState.ESTABLISHED
    rows["flags"], rows["seconds"] = FlowFlag.ANSWERED, 86_400
    clients = (np.uint32(0x0A4D0100) + numbers % np.uint32(200)).byteswap()
    ports = (np.uint32(1024) + numbers // np.uint32(200)).astype(np.uint16).byteswap()
    rows["client"][:, 0] = rows["source"][:, 0] = clients
    rows["client_port"] = rows["source_port"] = ports
    ends = {"frontend": VIPS["remote1"], "backend": made["remote1"].address4}
    for end, address in ends.items():
        rows[end][:, 0] = np.frombuffer(bytes(map(int, address.split("."))), dtype=np.uint32)[0]
        rows[f"{end}_port"] = np.uint16(PORT).byteswap()
    return Flows(rows)
