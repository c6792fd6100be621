"""Choice of a backend in the kernel, at 16,384 services x 60 backends; the control is the layout of a peer."""

from __future__ import annotations

import contextlib
import gc
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np

from hybrid_proxy.dataplane.kernel.bpf import Object, run_on_packet
from hybrid_proxy.dataplane.kernel.grace import jiffies_per_second
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.options import EbpfOptions, Limits
from hybrid_proxy.dataplane.table import Backend, Entry, Protocol
from hybrid_proxy.workshop.benchmarks.kit import built, median, say
from hybrid_proxy.workshop.lab.pins import pin_folder
from hybrid_proxy.workshop.measuring.nodes import entry
from hybrid_proxy.workshop.measuring.results import Result, Target

SERVICES, BACKENDS = 16_384, 60
TOTAL = SERVICES * BACKENDS
FIRST_SERVICE, FIRST_BACKEND = 0x0A600000, 0x0A800000  # 10.96.0.0, 10.128.0.0
PORT, BACKEND_PORT = 80, 8080
CHOICES = 1 << 20  # in one run
ROUNDS = 15
LOOPS = ("loop_empty", "loop_ours", "loop_peer")
FRAME = bytes(12) + b"\x08\x00" + bytes(50)

# The peer's layout, as in selection.bpf.c.
PEER_KEY = np.dtype([("address", ">u4"), ("port", ">u2"), ("slot", "u2"), ("protocol", "u1"), ("rest", "u1", 3)])
PEER_SLOT = np.dtype([("backend", "u4"), ("count", "u2"), ("reverse", "u2"), ("flags", "u4")])
PEER_BACKEND = np.dtype([("address", ">u4"), ("port", ">u2"), ("rest", "u1", 6)])
WORK = np.dtype(
    [("rounds", "u4"), ("services", "u4"), ("first", "u4"), ("random", "u4"), ("ns", "u8"), ("chosen", "u8"),
     ("sum", "u8")]
)  # fmt: skip


def measure() -> Result:
    """Fills both layouts, then runs the three loops in turn."""
    with _maps() as maps, contextlib.closing(Object(built("build/workshop/benchmarks/selection.bpf.o"))) as program:
        start = time.monotonic()
        _fill_ours(maps)
        say(f"  {TOTAL:,} backends through the agent's own filler: {time.monotonic() - start:.1f} s")
        program.constants(layout.pack("settings", hz=jiffies_per_second()))
        maps.share_with(program)
        program.load()
        start = time.monotonic()
        _fill_peer(program)
        say(f"  the same in the peer's layout: {time.monotonic() - start:.1f} s")
        runs: dict[str, list[float]] = {name: [] for name in LOOPS}
        for number in range(ROUNDS):
            for name in LOOPS:
                runs[name].append(_run(program, name, 1 + number))
    empty, ours, peer = (median(runs[name]) for name in LOOPS)
    ours -= empty
    peer -= empty
    note = (
        f"selection: medians of {ROUNDS} x {CHOICES:,} choices; ours {ours:.1f} ns, the peer's layout {peer:.1f} ns, "
        f"the empty loop of {empty:.1f} ns is subtracted from both"
    )
    least = {name: min(times) for name, times in runs.items()}
    return Result(
        "selection", ours, "ns", "peer's layout: hash of service slots (12/12 bytes), hash of backends (4/12)", peer,
        [(Target("ours / the peer's layout", 0.2), ours / peer)],
        [note],
        {
            "loop_ns": round(empty, 2),
            "min": round(least["loop_ours"] - least["loop_empty"], 1),
            "control_min": round(least["loop_peer"] - least["loop_empty"], 1),
        },
    )  # fmt: skip


@contextlib.contextmanager
def _maps() -> Iterator[MapSet]:
    options = Options(ebpf=EbpfOptions(limits=Limits(services=2 * SERVICES, backends=1 << 20, slots=SERVICES * 64)))
    with pin_folder() as folder, contextlib.closing(MapSet(folder, options)) as maps:
        yield maps


def _text(number: int) -> str:
    return socket.inet_ntoa(struct.pack(">I", number))


def _entry(number: int) -> Entry:
    first = FIRST_BACKEND + number * BACKENDS
    backends = tuple(Backend(_text(first + n), BACKEND_PORT) for n in range(BACKENDS))
    return entry(f"bench/service-{number}:http", _text(FIRST_SERVICE + number), PORT, backends)


def _fill_ours(maps: MapSet) -> None:
    gc.disable()
    try:
        store = Store(maps, jiffies_per_second())
        store.apply({f"bench/service-{number}": (_entry(number),) for number in range(SERVICES)})
        assert not store.plan.unprogrammed, f"{len(store.plan.unprogrammed)} services do not fit"
    finally:
        gc.enable()


def _fill_peer(program: Object) -> None:
    numbers = np.arange(TOTAL, dtype=np.uint32)
    backends = np.zeros(TOTAL, dtype=PEER_BACKEND)
    backends["address"] = FIRST_BACKEND + numbers
    backends["port"] = BACKEND_PORT
    assert program.map("peer_backends").update_batch(numbers + np.uint32(1), backends) == TOTAL
    for slot in range(BACKENDS + 1):
        keys = np.zeros(SERVICES, dtype=PEER_KEY)
        keys["address"] = FIRST_SERVICE + np.arange(SERVICES)
        keys["port"], keys["slot"], keys["protocol"] = PORT, slot, Protocol.TCP
        values = np.zeros(SERVICES, dtype=PEER_SLOT)
        if slot:
            values["backend"] = np.arange(SERVICES) * BACKENDS + slot
        else:
            values["count"] = BACKENDS
        assert program.map("peer_services").update_batch(keys, values) == SERVICES


def _run(program: Object, name: str, seed: int) -> float:
    """Nanoseconds for one round of this loop; every round must end with a backend."""
    work = program.map("work").view(WORK)
    work[0] = (CHOICES, SERVICES, FIRST_SERVICE, seed * 0x9E3779B1 & 0xFFFFFFFF, 0, 0, 0)
    code, _, _ = run_on_packet(program.program(name), FRAME)
    assert code == 0, f"{name} returned {code}"
    chosen = int(work["chosen"][0])
    assert chosen == CHOICES, f"{name}: {chosen} of {CHOICES} rounds chose a backend"
    return float(work["ns"][0]) / CHOICES
