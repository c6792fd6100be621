"""Upgrade to a version with another layout of the maps, with 100,000 flows: time, memory, and the longest gap."""

from __future__ import annotations

import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path

import numpy as np

from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.dataplane.kernel.grace import jiffies_per_second
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.workshop.benchmarks.kit import ROOT, median, say
from hybrid_proxy.workshop.benchmarks.versions import FIELD_MORE, WIDER_KEYS, agent_of, tree
from hybrid_proxy.workshop.lab.agent import Agent, resident
from hybrid_proxy.workshop.lab.examples import folder
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab
from hybrid_proxy.workshop.lab.objects import endpoint_slice, service
from hybrid_proxy.workshop.lab.traffic import Tally, load, meanwhile
from hybrid_proxy.workshop.measuring.nodes import Kernel, lab
from hybrid_proxy.workshop.measuring.results import Result, Target

FLOWS = 100_000
SERVICE, VIP, PORT = "bench/web", "10.96.0.10", 8080
ROUNDS = 2  # up and down again
STREAMS = ("pod1", "client", "node")
NODE_PORT = 30_080
TARGET_SECONDS = 2.0
CARRIED = re.compile(r"(\d+) flows were carried over .* in (\d+) ms")


def measure() -> Result:
    """Up to the other layout and down again; the control is the same agent replaced by itself."""
    with lab(pods=3, kind="upgrade") as made, tempfile.TemporaryDirectory(prefix="hybrid-proxy-") as place:
        other = tree(Path(place) / "other", *FIELD_MORE, *WIDER_KEYS)
        manifests = _manifests(made)
        made.serve("pod2", "pod3", http=(PORT,))
        agents = {"ours": agent_of(ROOT, made, manifests), "other": agent_of(other, made, manifests)}
        for agent in agents.values():
            agent.flags = ("--nodeport-addresses", "0.0.0.0/0", "--max-flows", str(4 * FLOWS))
        with agents["ours"].serving():
            known = _fill(made)
            streams = [Tally() for _ in STREAMS]
            with _streams(made, streams):
                restarts = [_replace(agents["ours"], agents["ours"], streams) for _ in range(ROUNDS)]
                runs = []
                for _ in range(ROUNDS):
                    for former, following in (("ours", "other"), ("other", "ours")):
                        run = _replace(agents[former], agents[following], streams)
                        say(f"  to {following}: {run}")
                        runs.append(run)
                lost = _lost(made, known)
                failed = sum(stream.failed for stream in streams)
    seconds = median([run["carrying"] for run in runs])
    gap, plain = max(run["gap_ms"] for run in runs), max(run["gap_ms"] for run in restarts)
    note = (
        f"upgrade: {FLOWS:,} flows {ROUNDS} times up and down; {lost} lost; streams broke {failed} times, "
        f"longest gap of a stream {gap:.0f} ms, {plain:.0f} ms where an agent gives way to the same version"
    )
    return Result(
        "upgrade", seconds, "s", "seconds from process start to serving of the same version, which carries nothing",
        median([run["start"] for run in restarts]),
        [
            (Target("seconds in which 100,000 flows are carried over", TARGET_SECONDS), seconds),
            (Target("flows lost", 0), lost), (Target("streams broken", 0), failed),
        ],
        [note],
        {
            "lost": lost, "gap_ms": round(gap, 1), "gap_restart_ms": round(plain, 1),
            "start": round(median([run["start"] for run in runs]), 2),
            "processor": round(median([run["processor"] for run in runs]), 2),
            "processor_restart": round(median([run["processor"] for run in restarts]), 2),
            "memory_mb": round(max(run["memory_mb"] for run in runs), 1),
            "memory_restart_mb": round(max(run["memory_mb"] for run in restarts), 1),
        },
    )  # fmt: skip


def _manifests(made: Lab) -> Path:
    backends, ports = [made[name].address4 for name in ("pod2", "pod3")], [("TCP", PORT)]
    return folder(
        made, [service(SERVICE, VIP, ports, NODE_PORT), endpoint_slice(SERVICE, backends, ports, NODE_NAMES["node"])]
    )


def _fill(made: Lab) -> bytes:
    """Write pairs of entries for connections of clients that do not exist; the entries, sorted."""
    kernel = Kernel(made)
    row = kernel.backends
    backend = int(np.flatnonzero(row["service"])[0])
    number = np.arange(FLOWS, dtype=np.uint32)
    client = (np.uint32(0x0A64_0000) + number // np.uint32(50_000)).byteswap()  # 10.100.0.0 and on
    port, vip = layout.swap16((1024 + number % 50_000).astype(np.uint16)), layout.address_words([VIP])[0, 0]
    served, own = layout.swap16([PORT])[0], row["address"][backend, 0]
    keys, values = np.zeros(2 * FLOWS, layout.dtype_of("flow4_key")), np.zeros(2 * FLOWS, layout.dtype_of("flow"))
    there, back = slice(0, FLOWS), slice(FLOWS, None)
    keys["protocol"] = socket.IPPROTO_TCP
    for part, source, sport, target, dport in ((there, client, port, vip, served), (back, own, served, client, port)):
        keys["saddr"][part], keys["sport"][part] = source, sport
        keys["daddr"][part], keys["dport"][part] = target, dport
    for part, source, sport, target, dport in ((there, client, port, own, served), (back, vip, served, client, port)):
        values["saddr"][part, 0], values["sport"][part] = source, sport
        values["daddr"][part, 0], values["dport"][part] = target, dport
    flags = layout.abi_constants()
    values["flags"] = flags["FLOW_ESTABLISHED"]
    values["flags"][back] |= flags["FLOW_REPLY"]
    values["backend"], values["service"] = backend, row["service"][backend]
    values["tag"] = layout.flow_tags(keys, 4)
    values["seen"] = int((time.clock_gettime(time.CLOCK_MONOTONIC) - 300) * jiffies_per_second()) & 0xFFFFFFFF
    values["ack"] = np.arange(2 * FLOWS)
    if kernel.maps["flows4"].update_batch(keys, values) < len(keys):
        raise ControllerError(f"map flows4 has no room for {len(keys)} entries")
    kernel.close()
    return _sorted(keys, values)


def _sorted(keys: np.ndarray, values: np.ndarray) -> bytes:
    rows = np.concatenate([keys.view(np.uint8).reshape(len(keys), -1), values.view(np.uint8).reshape(len(keys), -1)], 1)
    rows = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1]))).ravel()
    return np.sort(rows).tobytes()


def _lost(made: Lab, known: bytes) -> int:
    """How many of the rows are not exactly there any more, two for each flow."""
    with closing(Kernel(made)) as kernel:
        found = _sorted(*flow_arrays(kernel.maps["flows4"], 4))
    size = layout.dtype_of("flow4_key").itemsize + layout.dtype_of("flow").itemsize
    wanted, rows = ({text[i : i + size] for i in range(0, len(text), size)} for text in (known, found))
    return -(-len(wanted - rows) // 2)


def _streams(made: Lab, tallies: Sequence[Tally]) -> AbstractContextManager[None]:
    """Asks again and again on a connection from each place."""

    def stream(place: str, tally: Tally) -> Callable[..., object]:
        target = (made["node"].address4, NODE_PORT) if place == "client" else (VIP, PORT)
        return partial(
            load, "streams", (socket.AF_INET, target), tally=tally, rate=500, concurrency=1, timeout=10,
            open_socket=partial(made.socket, place),
        )  # fmt: skip

    return meanwhile([stream(*each) for each in zip(STREAMS, tallies, strict=True)])


def _replace(former: Agent, following: Agent, streams: Sequence[Tally]) -> dict[str, float]:
    """Stop one agent and start the other; what that took."""
    time.sleep(1)
    for stream in streams:
        stream.slowest_answer = 0.0
    former.terminate()
    started = following.timed_start()
    time.sleep(1)
    found = CARRIED.search(following.log.read_text())
    assert following.process is not None
    if found is not None and int(found[1]) < FLOWS:
        print(f"only {found[1]} flows were carried over", file=sys.stderr)
    return {
        "start": started,
        "carrying": int(found[2]) / 1000 if found else 0.0,
        "gap_ms": 1000 * max(stream.slowest_answer for stream in streams),
        "processor": following.processor_seconds(),
        "memory_mb": resident(following.process.pid)["VmHWM"],
    }
