"""Packets per second that a node forwards from a node port to another node's backend, on one core: XDP, tc, nftables.

Two nodes of the same kind, one in mode ebpf and one in mode nftables. Both are given the same 64-byte datagrams of 64
clients' flows, which real sockets have opened and used before, as a driver gives them: BPF_PROG_TEST_RUN with live
frames, at the node's uplink. They leave by the same uplink, and a program at the other end of the wire counts and
drops them, on the same core.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cffi import FFI
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from hybrid_proxy.dataplane.kernel._libbpf import ffi
from hybrid_proxy.dataplane.kernel.bpf import Object, check, library, update_link
from hybrid_proxy.workshop.benchmarks.kit import built, median, say, take_turns
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.examples import folder
from hybrid_proxy.workshop.lab.frames import Receiver, fill_in_checksums
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab
from hybrid_proxy.workshop.lab.objects import endpoint_slice, service
from hybrid_proxy.workshop.lab.traffic import ask_udp
from hybrid_proxy.workshop.measuring.nodes import lab
from hybrid_proxy.workshop.measuring.results import Result, Target

UDP_PORT = 9053  # of the backend
CLIENTS, FIRST_PORT, NODE_PORT = 64, 40_000, 30_053
PACKETS, BATCH, ROUNDS = 64_000, 64, 9
LIVE_FRAMES = 1 << 1  # BPF_F_TEST_XDP_LIVE_FRAMES, since Linux 5.18
WIRE, UPLINK = "to-node", "eth0"
ONE_CPU = {max(os.sched_getaffinity(0))}
FRAME = 60

by_number = FFI()  # what nothing but this benchmark asks libbpf for
by_number.cdef("int bpf_prog_get_fd_by_id(uint32_t id);")


@dataclass
class Node:
    """One node under test: its lab, and the programs that send to it and drop what it forwards."""

    lab: Lab
    programs: Object
    forwarder: int | None  # the program at the driver
    times: dict[str, list[float]] = field(default_factory=dict)  # nanoseconds for a packet, by way

    def send(self, way: str) -> None:
        """One round; `way` is "driver", "stack" or "nowhere"."""
        after = self.programs.map("next")
        if way == "driver":
            assert self.forwarder is not None
            after.update(bytes(4), self.forwarder.to_bytes(4, "little"))
        else:
            after.delete(bytes(4))
        after.close()
        before = self.arrived()
        start = time.thread_time()  # of this thread alone, interrupts' work on its CPU with it: others may be busy
        _run_live(self.programs.program("send_nowhere" if way == "nowhere" else "send"), self.lab)
        seconds = time.thread_time() - start
        came = self.arrived() - before
        assert way == "nowhere" or came >= 0.98 * PACKETS, f"{way}: {came} of {PACKETS} packets arrived"
        self.times.setdefault(way, []).append(1e9 * seconds / PACKETS)

    def arrived(self) -> int:
        """Packets that the other end of the wire has counted so far."""
        with contextlib.closing(self.programs.map("arrived")) as counts:
            return int(counts.lookup_per_cpu(bytes(4), os.cpu_count() or 1).sum())

    def time(self, way: str) -> float:
        """Nanoseconds for a packet, the median of the rounds; the first warms up."""
        return median(self.times[way][1:])


def measure() -> Result:
    """Measures all ways in turn."""
    program = str(built("build/workshop/benchmarks/nodeport.bpf.o"))
    before = os.sched_getaffinity(0)
    with _node("ebpf", program, "--xdp=native") as ours, _node("nftables", program) as theirs:
        os.sched_setaffinity(0, ONE_CPU)
        try:
            ways = [(ours, "driver"), (ours, "stack"), (theirs, "stack"), (ours, "nowhere"), (theirs, "nowhere")]
            take_turns(ROUNDS, *(partial(node.send, way) for node, way in ways))
        finally:
            os.sched_setaffinity(0, before)
    sender = median([ours.time("nowhere"), theirs.time("nowhere")])
    xdp, tc, nftables = (
        node.time(way) - sender for node, way in ((ours, "driver"), (ours, "stack"), (theirs, "stack"))
    )
    say(f"  XDP {xdp:.0f} ns, tc {tc:.0f}, nftables {nftables:.0f} for a packet, without the sender's {sender:.0f}")
    return Result(
        "nodeport", 1e9 / xdp, "packets/s", "mode nftables on a node of the same kind", 1e9 / nftables,
        [
            (Target("XDP / nftables", 5.0, at_least=True), nftables / xdp),
            (Target("tc / nftables", 1.5, at_least=True), nftables / tc),
        ],
        ["nodeport: CPU time of one core, less the sender's own; the receiver's is in it"],
        {"tc": float(f"{1e9 / tc:.4g}"), "ratio_tc": round(nftables / tc, 3), "sender_ns": round(sender, 1)},
    )  # fmt: skip


@contextlib.contextmanager
def _node(mode: str, program: str, *flags: str) -> Iterator[Node]:
    """A node in that mode, with flows of all clients, and the programs on it."""
    with lab(kind=f"np{mode[0]}", remote=1) as made, contextlib.closing(Object(Path(program))) as programs:
        programs.load()
        made.serve("remote1", http=(), udp=(UDP_PORT,))
        name, backends = "bench/measured", [made["remote1"].address4]
        items = [service(name, "10.96.1.1", [("UDP", 53)], NODE_PORT)]
        manifests = folder(made, [*items, endpoint_slice(name, backends, [("UDP", UDP_PORT)], NODE_NAMES["node2"])])
        with made.inside("client"):
            fill_in_checksums(WIRE)
            wire = Receiver(WIRE)
        with contextlib.ExitStack() as stack:
            stack.enter_context(wire)
            agent = stack.enter_context(Agent(made, manifests, mode, flags).serving())
            forwarder = None
            with made.inside("node"):
                if mode == "ebpf":
                    served = agent.running_status().dataplane.ebpf
                    assert served is not None
                    assert served.xdp.interfaces == [UPLINK]
                    forwarder = _program_at(made)
                else:
                    stack.enter_context(Receiver(UPLINK))  # frames need a receive queue for XDP here, too
            _talk(made, agent)
            _fill(programs, made)
            update_link(wire.link, programs.program("receive"), WIRE)
            yield Node(made, programs, forwarder)


def _talk(made: Lab, agent: Agent) -> None:
    """Exchanges datagrams with every client until its flow is established, where the mode reports that."""
    sockets = []
    for number in range(CLIENTS):
        client = made.socket("client", socket.AF_INET, socket.SOCK_DGRAM)
        client.settimeout(2)
        client.bind((made["client"].address4, FIRST_PORT + number))
        client.connect((made["node"].address4, NODE_PORT))
        sockets.append(client)
    deadline = time.monotonic() + 20
    while True:
        for client in sockets:
            assert ask_udp(client)[0].pod == "remote1"
        shown = agent.command("flows", "-o", "json", "--admin-socket", str(agent.socket)).stdout
        if agent.mode != "ebpf" or shown.count('"established"') >= CLIENTS:
            break
        assert time.monotonic() < deadline, shown
        time.sleep(0.5)
    for client in sockets:
        client.close()


def _fill(programs: Object, made: Lab) -> None:
    """The smallest datagrams of all clients, as they come by the wire."""
    frames = programs.map("frames")
    macs = []
    for place in ("node", "client"):
        link = made.netlink(place)
        mac = link.get_links(link.link_lookup(ifname="eth0")[0])[0].get_attr("IFLA_ADDRESS")
        macs.append(mac)
    head = Ether(dst=macs[0], src=macs[1]) / IP(
        src=made["client"].address4, dst=made["node"].address4, id=0, flags="DF"
    )
    for number in range(CLIENTS):
        frame = bytes(head / UDP(sport=FIRST_PORT + number, dport=NODE_PORT) / Raw(bytes(FRAME - 14 - 20 - 8)))
        frames.update(number.to_bytes(4, "little"), frame + bytes(4))
    frames.close()


def _program_at(made: Lab) -> int:
    """The agent's own program at the node's uplink, by its number."""
    link = made.netlink("node")
    xdp = link.get_links(link.link_lookup(ifname=UPLINK)[0])[0].get_attr("IFLA_XDP")
    opened = by_number.dlopen("libbpf.so.1").bpf_prog_get_fd_by_id(xdp.get_attr("IFLA_XDP_PROG_ID"))
    check(opened, "the program at the uplink")
    return int(opened)


def _run_live(program: int, made: Lab) -> None:
    """Runs the program on live frames of the node's uplink; the kernel carries out its verdicts."""
    packet = bytes(FRAME)
    with made.inside("node"):
        context = struct.pack("=IIIIII", 0, FRAME, 0, socket.if_nametoindex(UPLINK), 0, 0)
        options = ffi.new("struct bpf_test_run_opts *")
        data, place = ffi.from_buffer(packet), ffi.from_buffer(context)
        options.sz = ffi.sizeof("struct bpf_test_run_opts")
        options.data_in, options.data_size_in = data, FRAME
        options.ctx_in, options.ctx_size_in = place, len(context)
        options.repeat, options.flags, options.batch_size = PACKETS, LIVE_FRAMES, BATCH
        check(library().bpf_prog_test_run_opts(program, options), "running a program on live frames")
