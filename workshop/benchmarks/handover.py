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
from typing import Any

import numpy as np

from dataplane.flows import FLOW, FlowFlag, Flows, Half, HandOver, TcpState
from dataplane.handover import from_conntrack, hand_over, to_conntrack
from dataplane.kernel.conntrack import delete_translated
from dataplane.mode import Options
from dataplane.modes.ebpf import programmer as ebpf
from dataplane.modes.nftables import programmer as nftables
from dataplane.table import (
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
from workshop.benchmarks.echo import NICE, READY
from workshop.benchmarks.kit import Result, Target, lab, say
from workshop.lab.agent import resident
from workshop.lab.network import CLUSTER_CIDRS, Lab

CONNECTIONS = {"past the stack": 4000, "through the stack": 3000, "masqueraded": 3000}
BACKENDS = 8  # of a service: a flow that chooses again most likely has another one
STREAMS = 3  # of each kind are asked without a pause
MANY = 100_000
PORT, VIPS, NODE_PORT = 9000, {"pod2": "10.97.1.1", "remote1": "10.97.1.2"}, 30_999
ECHO = (sys.executable, "-m", "workshop.benchmarks.echo")


def measure() -> Result:
    """The connections with a hand-over, and without one: then the former mode is removed just as soon.

    What else the machine does comes behind all of it (nice), because gaps of milliseconds are measured.
    """
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    moved, lost, control_gap, again = _connections(hand=True)
    _, all_lost, _, _ = _connections(hand=False)
    scale = _scale()
    total = sum(CONNECTIONS.values())
    gap = max(one["gap"] for one in lost.values())
    return Result(
        "handover", moved.seconds, "s", "connections lost when the former mode goes without a hand-over",
        sum(one["silent"] + one["reset"] for one in all_lost.values()),
        [
            (Target("connections lost", 0), sum(one["silent"] + one["reset"] for one in lost.values())),
            (Target("seconds", 1.0), moved.seconds),
            (Target("segments sent again", 0), again),
            (Target("longest gap of a flow, beyond the plain one's, in ms", 25), 1000 * max(0.0, gap - control_gap)),
        ],
        [f"handover: {total:,} connections, {dict(moved.moved)} moved, {dict(moved.left)} left; {scale}"],
        {
            "sent_again": again, "gap_ms": round(1000 * gap, 1), "plain_gap_ms": round(1000 * control_gap, 1),
            "moved": dict(moved.moved), **scale,
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


def _connections(*, hand: bool) -> tuple[HandOver, dict[str, dict[str, float]], float, int]:
    """What was moved, what became of each kind of connections, and the longest gap of a plain one in seconds.

    The last figure is how many segments the ends sent again in that time: none that was lost is not among them.
    """
    with lab(pods=2, plain=2, remote=1) as made, ExitStack() as stack:
        for place in ("pod2", "plain2", "remote1"):
            _started(made, place, "serve", *map(str, range(PORT, PORT + BACKENDS)))
        stack.enter_context(made.inside("node"))
        options, table = Options(cgroup=str(made.cgroup), pod_interfaces=("veth*",)), _table(made)
        with _opened(ebpf, options, table) as (old, end):
            holders = _holders(made)
            plain = _started(made, "plain1", "hold", made["plain2"].address4, str(PORT), "1", "1")
            time.sleep(2.0)
            new, _ = stack.enter_context(_opened(nftables, options, table))
            old.drain(table)
            everybody = [*holders.values(), plain]
            for one in everybody:
                one.told(signal.SIGUSR1)
            time.sleep(0.5)
            before = _sent_again(made)
            done = hand_over(old, new, table, 0) if hand else HandOver({}, {})
            end.close()
            time.sleep(0.5)
            again = _sent_again(made) - before
            for one in everybody:
                one.told(signal.SIGUSR2)
            found = {name: one.outcome() for name, one in holders.items()}
            gap = plain.outcome()["gap"]
    say(f"  {'handed over' if hand else 'left'}: {done.seconds:.2f} s, {found}, a plain flow's gap {1000 * gap:.0f} ms")
    return done, found, gap, again


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
    """Entries alone, without sockets: from conntrack to the maps and back. Seconds, and MB that it took here."""
    with lab(pods=2, remote=1) as made, made.inside("node"), ExitStack() as stack:
        options = Options(cgroup=str(made.cgroup), max_flows=4 * MANY)
        table = _table(made)
        maps, _ = stack.enter_context(_opened(ebpf, options, table))
        rules, _ = stack.enter_context(_opened(nftables, options, table))
        flows = _made_up(made, MANY)
        before, start = _resident(), time.monotonic()
        reception = maps.receive_flows(flows)
        for half in (Half.BEHIND, Half.BEFORE):
            reception.take(half)
        imported = time.monotonic() - start
        assert len(reception.flows) == MANY, reception.left
        start = time.monotonic()
        exported = maps.export_flows()
        seconds = {"import_100k_s": imported, "export_100k_s": time.monotonic() - start}
        assert len(exported) == MANY
        done = to_conntrack(maps, 0)
        start = time.monotonic()
        known = rules.conntrack_flows(table)
        seconds |= {"to_conntrack_100k_s": done.seconds, "read_conntrack_100k_s": time.monotonic() - start}
        back = from_conntrack(known, maps, 0)
        assert done.moved == back.moved == {"TCP": MANY}, (done, back)
        seconds |= {"from_conntrack_100k_s": back.seconds, "memory_100k_mb": _resident() - before}
        delete_translated({})
    rounded = {name: round(figure, 2) for name, figure in seconds.items()}
    say(f"  {MANY:,} flows: {rounded}")
    return rounded


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
