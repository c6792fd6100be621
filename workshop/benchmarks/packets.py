"""One packet at a pod's interface, by the loops of packets.bpf.c on filled maps: of a connection, or no service's."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import numpy as np

from hybrid_proxy.dataplane.kernel.bpf import Object, run_on_packet
from hybrid_proxy.dataplane.kernel.grace import jiffies_per_second
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet, traffic_cpus
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.options import EbpfOptions, Limits
from hybrid_proxy.dataplane.table import Backend, Protocol
from hybrid_proxy.workshop.benchmarks.kit import built
from hybrid_proxy.workshop.lab.pins import pin_folder
from hybrid_proxy.workshop.measuring.nodes import entry
from hybrid_proxy.workshop.measuring.results import Result, Target
from hybrid_proxy.workshop.measuring.stats import beyond

FLOWS = 100_000  # connections, two entries each
PACKETS, REPEAT, ROUNDS = 64, 2_000, 15  # in one run of a loop, runs in a round
FIRST_CLIENT = 0x0A010000  # 10.1.0.0
VIP, BACKEND, STRANGER = "10.96.0.10", "10.200.0.9", "203.0.113.9"
LOOPBACK = 1  # where BPF_PROG_TEST_RUN lets packets come in
SPORT, PORT, BACKEND_PORT = 40_000, 80, 8080
FRAME = bytes(12) + b"\x08\x00" + bytes([0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6]) + bytes(10) + bytes(12) + b"\x50\x10" \
    + bytes(6)  # fmt: skip
HEADER = sum(struct.unpack("=10H", FRAME[14:34]))  # its sum, without addresses and checksum
WORK = np.dtype(
    [("flows", "u4"), ("first", "u4"), ("random", "u4"), ("target", "u4"), ("sport", "u2"), ("dport", "u2"),
     ("header", "u4"), ("found", "u8")]
)  # fmt: skip


def measure(packet: str) -> Result:
    """`established`: one of 100,000 connections; `passing`: one that no service is concerned with, both ways.

    The control is one lookup in the table of flows. The same loop without a program is subtracted from both.
    """
    mine = {"established": {"loop_established": VIP}, "passing": {"loop_passing_out": STRANGER}}[packet]
    with loops() as made:
        found = made.compare({**mine, "loop_passing": STRANGER, "loop_lookup": VIP})
    passing, floor = found["loop_passing"], found["loop_lookup"]
    if packet == "passing":
        out = found["loop_passing_out"]
        return Result(
            packet, passing, "ns", f"one lookup in the table of flows, of which there are {FLOWS:,}", floor,
            [(Target("ns more than no program, from a pod", 10.0), passing),
             (Target("ns more than no program, to a pod", 10.0), out)],
            extra={"to_pod_ns": round(out, 2)},
        )  # fmt: skip
    whole = found["loop_established"]
    return Result(
        packet, whole, "ns", "one lookup in the table of flows", floor,
        [(Target("the whole packet / one lookup", 2.0), whole / floor)],
        [f"{packet}: a random one of {FLOWS:,} connections each time; handed over to a pod, checksums and all"],
        {"passing_ns": round(passing, 1)},
    )  # fmt: skip


class Loops:
    """The loops, loaded on maps of one service and many flows of it."""

    def __init__(self, program: Object, maps: MapSet) -> None:
        self.program, self.maps = program, maps

    def time(self, name: str, target: str, seed: int) -> float:
        """Nanoseconds for one packet to `target`; every one must end as its loop wants."""
        work = self.program.map("work").view(WORK)
        where = struct.unpack("=I", socket.inet_aton(target))[0]
        work[0] = (FLOWS, FIRST_CLIENT, seed * 0x9E3779B1 & 0xFFFFFFFF, where, socket.htons(SPORT), socket.htons(PORT),
                   HEADER, 0)  # fmt: skip
        code, _, nanoseconds = run_on_packet(self.program.program(name), FRAME, repeat=REPEAT)
        assert code == 0, f"{name} returned {code}"
        found = int(work["found"][0])
        assert found == PACKETS * REPEAT, f"{name}: {found} of {PACKETS * REPEAT} packets ended as they should"
        return nanoseconds / PACKETS

    def compare(self, targets: dict[str, str]) -> dict[str, float]:
        """Medians of these loops in turn, each with packets to its target, minus `loop_nothing` of the same round."""
        runs: dict[str, list[float]] = {name: [] for name in ("loop_nothing", *targets)}
        for number in range(ROUNDS):
            for name, times in runs.items():
                times.append(self.time(name, targets.get(name, STRANGER), 1 + number))
        nothing = runs.pop("loop_nothing")
        return {name: beyond(times, nothing) for name, times in runs.items()}


@contextlib.contextmanager
def loops() -> Iterator[Loops]:
    """Makes one service, its flows, and the loops."""
    options = Options(ebpf=EbpfOptions(limits=Limits(services=32_768, backends=262_144, slots=262_144, flows=262_144)))
    with (
        pin_folder() as folder,
        contextlib.closing(MapSet(folder, options)) as maps,
        contextlib.closing(Object(built("build/workshop/benchmarks/packets.bpf.o"))) as program,
    ):
        hz = jiffies_per_second()
        store = Store(maps, hz)
        backend = Backend(BACKEND, BACKEND_PORT, local=True)
        store.apply({"bench/web": (entry("bench/web:http", VIP, PORT, (backend,)),)})
        first, last = options.ebpf.masquerade_ports
        settings = layout.pack(
            "settings", hz=hz, reject_burst=1, fast_path=1, max_half_open=1 << 30,
            udp_timeout=options.timeouts.udp * hz, port_first=first, port_count=last - first + 1,
            traffic_cpus=traffic_cpus(options), event_burst=options.ebpf.event_rate,
        )  # fmt: skip
        program.constants(settings)
        maps.share_with(program)
        program.load()
        maps.maps["links"].update(LOOPBACK.to_bytes(4, "little"), LOOPBACK.to_bytes(4, "little"))
        _fill(maps)
        yield Loops(program, maps)


def _fill(maps: MapSet) -> None:
    """Established connections of as many clients, as the programs would have left them, handed over to a pod."""
    names, flows = layout.abi_constants(), maps.maps["flows4"]
    clients = np.arange(FIRST_CLIENT, FIRST_CLIENT + FLOWS, dtype=np.uint32).byteswap()
    vip, backend = (struct.unpack("=I", socket.inet_aton(a))[0] for a in (VIP, BACKEND))
    sport, port, backend_port = map(socket.htons, (SPORT, PORT, BACKEND_PORT))
    now = _clock(maps)
    for ends, result, direction in (
        ((clients, vip, sport, port), (clients, backend, sport, backend_port), 0),
        ((backend, clients, backend_port, sport), (vip, clients, port, sport), names["FLOW_REPLY"]),
    ):
        keys = np.zeros(FLOWS, dtype=layout.dtype_of("flow4_key"))
        keys["saddr"], keys["daddr"], keys["sport"], keys["dport"] = ends
        keys["protocol"] = Protocol.TCP
        values = np.zeros(FLOWS, dtype=layout.dtype_of("flow"))
        values["saddr"][:, 0], values["daddr"][:, 0], values["sport"], values["dport"] = result
        values["flags"] = direction | names["FLOW_ESTABLISHED"] | names["FLOW_REPLIED"]
        values["service"] = values["backend"] = 1
        values["ifindex"] = values["origin"] = LOOPBACK
        values["seen"] = now
        values["tag"] = _tags(keys)
        assert flows.update_batch(keys, values) == FLOWS


def _tags(keys: np.ndarray) -> np.ndarray:
    """Computes `flow_tag` of bpf/hash.h."""

    def hashed(column: str) -> np.ndarray:
        return layout.hash_addresses(keys[column].reshape(-1, 1), 4)

    with np.errstate(over="ignore"):
        ports = keys["sport"].astype(np.uint32) << np.uint32(16) | keys["dport"].astype(np.uint32)
        mixed = (ports + keys["protocol"].astype(np.uint32)) * np.uint32(0x27D4EB2F)
        found: np.ndarray = (hashed("saddr") * np.uint32(31) + hashed("daddr")) ^ mixed
        return found


def _clock(maps: MapSet) -> int:
    with contextlib.closing(Object(layout.OBJECTS / "inspect.bpf.o")) as inspect:
        maps.share_with(inspect)
        inspect.load()
        return run_on_packet(inspect.program("read_clock"), bytes(64))[0]
