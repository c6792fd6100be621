"""Packets in, packets out: the real programs, loaded and attached nowhere, on maps that the real store has filled.

BPF_PROG_TEST_RUN hands a packet to a loaded program in the calling process. No interface is involved, so this is
safe in any network namespace, the machine's own too. Pins are in a folder named for this process.
"""

from __future__ import annotations

import ipaddress
import random
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from pyroute2 import IPRoute
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.layers.sctp import SCTP
from scapy.packet import Packet, Raw

from hybrid_proxy.dataplane.kernel.bpf import Object, has_helper, run_on_packet
from hybrid_proxy.dataplane.kernel.grace import jiffies_per_second, wait_for_programs
from hybrid_proxy.dataplane.kernel.links import interface_name
from hybrid_proxy.dataplane.mode import Options, ProbePacket
from hybrid_proxy.dataplane.modes.ebpf.flows.collector import FlowGC
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import CHECK_MTU, put_datapaths
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.maps.making import share, traffic_cpus
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import NO_SERVICE, cidr_columns, set_elements
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.modes.ebpf.views import explanation
from hybrid_proxy.dataplane.options import EbpfOptions, FlowTimeouts, Limits
from hybrid_proxy.dataplane.reports import ExplainAnswer
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, Kind, Protocol, WhenEmpty
from tests.pins import pin_folder
from tests.tables import Front, entry_of

PASS, DROP, REDIRECT = 0xFFFFFFFF, 2, 7  # TC_ACT_UNSPEC, TC_ACT_SHOT, TC_ACT_REDIRECT
HZ = jiffies_per_second()
KTIME_SHIFT = 10  # config.h: nanoseconds in a moment
LOOPBACK = 1  # where BPF_PROG_TEST_RUN lets packets come in, if nothing else is said
TIMEWAIT_TICK = 8  # flow.h: jiffies >> 8 are the time of a mark

POD_MAC, HOST_MAC = "02:00:00:00:00:05", "02:00:00:00:00:01"
BACKEND_MAC, BACKEND_HOST_MAC = "02:00:00:00:00:21", "02:00:00:00:00:02"


@dataclass(frozen=True)
class Net:
    """The addresses of one family that the cases use."""

    family: int
    client: str
    vip: str
    vip2: str
    backends: tuple[str, ...]
    primary: str
    service_cidr: str
    stranger: str


NETS = {
    4: Net(4, "10.1.0.5", "10.96.0.10", "10.96.0.11", tuple(f"10.1.0.{n}" for n in range(21, 41)), "192.168.7.1",
           "10.96.0.0/16", "203.0.113.9"),
    6: Net(6, "fd00:1::5", "fd00:96::10", "fd00:96::11", tuple(f"fd00:1::{n:x}" for n in range(0x21, 0x35)),
           "fd00:7::1", "fd00:96::/108", "2001:db8::9"),
}  # fmt: skip


# --- tables


def service(
    address: str, port: int, backends: Iterable[tuple[str, int]], *, name: str = "default/web:http",
    protocol: Protocol = Protocol.TCP, when_empty: WhenEmpty = WhenEmpty.REJECT, affinity: int = 0,
    serving: Iterable[tuple[str, int]] = (),
) -> Entry:  # fmt: skip
    """One ClusterIP port; `serving` are endpoints that still serve, in addition to those of the route."""
    members = tuple(Backend(a, p) for a, p in backends)
    route = BackendSet(members, when_empty)
    front = Front(Kind.CLUSTER_IP, address, port, route, route)
    more = tuple(Backend(a, p) for a, p in serving)
    return entry_of(name, 6 if ":" in address else 4, protocol, (front,), (*members, *more), affinity)


def moments(jiffies: int) -> int:
    """As the programs count the age of a TCP flow that begins."""
    return (jiffies * 1_000_000_000 // HZ) >> KTIME_SHIFT


# --- packets


def frame(net: Net, src: str, dst: str, transport: Packet, *, from_backend: bool = False, **ip: Any) -> bytes:
    """A frame as a pod sends it."""
    source, target = (BACKEND_MAC, BACKEND_HOST_MAC) if from_backend else (POD_MAC, HOST_MAC)
    head = IP(src=src, dst=dst, **ip) if net.family == 4 else IPv6(src=src, dst=dst, **ip)
    return bytes(Ether(src=source, dst=target) / head / transport)


def syn(sport: int = 40000, dport: int = 80, seq: int = 1000, **fields: Any) -> TCP:
    return TCP(sport=sport, dport=dport, flags="S", seq=seq, **fields)


def segment(sport: int, dport: int, flags: str, seq: int = 1001, ack: int = 1, payload: bytes = b"") -> Packet:
    head = TCP(sport=sport, dport=dport, flags=flags, seq=seq, ack=ack)
    return head / Raw(payload) if payload else head


def datagram(sport: int = 40000, dport: int = 53, payload: bytes = b"hello", **fields: Any) -> Packet:
    return UDP(sport=sport, dport=dport, **fields) / Raw(payload)


def chunk(sport: int = 40000, dport: int = 38412) -> Packet:
    """An SCTP INIT chunk, its CRC computed by scapy."""
    return SCTP(sport=sport, dport=dport, tag=0) / Raw(b"\x01\x00\x00\x14" + bytes(16))


# --- reading packets, with checksums computed here again


def ones_complement(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@dataclass
class Seen:
    """What a frame says."""

    src: str
    dst: str
    sport: int
    dport: int
    protocol: int
    raw: bytes
    l4: bytes  # transport header and payload
    mac_dst: str
    mac_src: str

    @property
    def tuple(self) -> tuple[str, int, str, int]:
        return self.src, self.sport, self.dst, self.dport


def mac_text(raw: bytes) -> str:
    return ":".join(f"{b:02x}" for b in raw)


def read(raw: bytes, *, check: bool = True) -> Seen:
    """Take a frame apart; every checksum in it is computed again and must match."""
    if raw[12:14] == b"\x08\x00":
        ip = raw[14:]
        ihl = (ip[0] & 15) * 4
        total = int.from_bytes(ip[2:4], "big")
        src, dst, protocol, l4 = ip[12:16], ip[16:20], ip[9], ip[ihl:total]
        if check:
            assert ones_complement(ip[:ihl]) == 0xFFFF, "IPv4 header checksum"
            assert total == len(ip), "IPv4 total length"
        fragment = int.from_bytes(ip[6:8], "big") & 0x3FFF
        pseudo = src + dst + struct.pack("!BBH", 0, protocol, len(l4))
    else:
        assert raw[12:14] == b"\x86\xdd"
        ip = raw[14:]
        src, dst, protocol, offset = ip[8:24], ip[24:40], ip[6], 40
        while protocol in (0, 43, 60):
            protocol, offset = ip[offset], offset + (ip[offset + 1] + 1) * 8
        fragment = protocol == 44
        l4 = ip[offset:]
        if check:
            assert int.from_bytes(ip[4:6], "big") == len(ip) - 40, "IPv6 payload length"
        pseudo = src + dst + struct.pack("!IHBB", len(l4), 0, 0, protocol)
    if check and not fragment:
        check_transport(protocol, l4, pseudo)
    sport = dport = 0
    if protocol in (6, 17, 132) and not fragment:
        sport, dport = struct.unpack("!HH", l4[:4])
    return Seen(
        str(ipaddress.ip_address(src)), str(ipaddress.ip_address(dst)), sport, dport, protocol, raw, l4,
        mac_text(raw[:6]), mac_text(raw[6:12]),
    )  # fmt: skip


def check_transport(protocol: int, l4: bytes, pseudo: bytes) -> None:
    if protocol == 17 and l4[6:8] == b"\0\0":
        assert len(pseudo) == 12, "UDP over IPv6 has a checksum"
        return
    if protocol in (6, 17, 58):
        assert ones_complement(pseudo + l4) == 0xFFFF, f"checksum of protocol {protocol}"
    elif protocol == 1:
        assert ones_complement(l4) == 0xFFFF, "ICMP checksum"
    elif protocol == 132:
        plain = l4[:8] + bytes(4) + l4[12:]
        assert int.from_bytes(l4[8:12], "little") == crc32c(plain), "SCTP CRC"


def quoted(raw: bytes) -> Seen:
    """The packet that an ICMP error quotes; its IPv4 header checksum must be right, the rest may be cut."""
    outer = read(raw)
    inner = outer.l4[8:]
    assert outer.protocol in (1, 58)
    if outer.protocol == 1:
        ihl = (inner[0] & 15) * 4
        assert ones_complement(inner[:ihl]) == 0xFFFF, "checksum of the quoted IPv4 header"
    return read(raw[:12] + (b"\x08\x00" if outer.protocol == 1 else b"\x86\xdd") + inner, check=False)


# --- the programs on the maps

SMALL = Options(ebpf=EbpfOptions(limits=Limits(services=256, backends=4096, slots=8192, flows=8192)))


class Bench:
    """Programs, maps, store and gc; nothing attached, no thread started."""

    def __init__(self, options: Options = SMALL, **settings: Any) -> None:
        self._exit = ExitStack()
        self.folder = self._exit.enter_context(pin_folder())
        self.options = options
        self._explain: Object | None = None
        # Each port once: a SYN from a port that a flow has is a packet of that flow, and follows it.
        self.client_ports = iter(random.sample(range(1024, 60000), 50_000))
        try:
            self.maps = MapSet(self.folder, options)
            first, last = options.ebpf.masquerade_ports
            self.fast_path = settings.pop("fast_path", layout.abi_constants()["FAST_PATH_ESTABLISHED"])
            values = {"hz": HZ, "reject_burst": 1_000_000, "can_set_errno": 1,
                      "can_check_mtu": int(has_helper(CHECK_MTU)),
                      "udp_timeout": options.timeouts.udp * HZ, "udp_timeout_stream": options.timeouts.udp_stream * HZ,
                      "port_first": first, "port_count": last - first + 1,
                      "traffic_cpus": traffic_cpus(options)} | settings  # fmt: skip
            self.settings = layout.pack("settings", **values)
            self.hooks, self.datapath = (
                self.load(layout.OBJECTS / f"{name}.bpf.o") for name in ("hooks", "tc_datapath")
            )
            put_datapaths(self.maps.maps["datapaths"], {4: self.datapath, 6: self.datapath})
            self.inspect = self.load(layout.OBJECTS / "inspect.bpf.o")
            self.store = Store(self.maps, HZ)
        except BaseException:
            self._exit.close()
            raise
        self.gc = self.new_gc()

    def link(self, index: int, *kinds: str) -> None:
        """Let programs be at this interface."""
        for key in (index, *(index | 1 << layout.abi_constants()[kind] for kind in kinds)):
            self.maps.maps["links"].update(key.to_bytes(4, "little"), index.to_bytes(4, "little"))

    def load(self, path: Path, constants: bytes = b"") -> Object:
        loaded = Object(path)
        loaded.constants(constants or self.settings)
        share(loaded, self.maps.maps)
        loaded.load()
        return loaded

    def new_gc(self, timeouts: FlowTimeouts = FlowTimeouts()) -> FlowGC:  # noqa: B008 (it is frozen)
        """One by these timeouts."""
        return FlowGC(
            self.maps.maps,
            self.inspect.program("sweep"),
            self.inspect.program("read_clock"),
            HZ,
            msgspec.structs.replace(self.options, timeouts=timeouts),
            lambda: None,
        )

    def close(self) -> None:
        for loaded in (self.hooks, self.datapath, self.inspect, self._explain):
            if loaded is not None:
                loaded.close()
        self.maps.close()
        self._exit.close()

    # the table

    def serve(self, *entries: Entry) -> None:
        """Exactly these services."""
        wanted: dict[str, tuple[Entry, ...]] = dict.fromkeys(self.store.plan.installed, ())
        for entry in entries:
            name = entry.name.partition(":")[0]
            wanted[name] = (*wanted.get(name, ()), entry)
        self.store.apply(wanted)

    def settle(self) -> None:
        """Grace period and scan, as the agent does them in the background."""
        wait_for_programs()
        self.store.graced(self.store.plan.pools.stamp)
        self.gc.search_for(*self.store.plan.pools.candidates)
        self.gc.scan()
        _, result = self.gc.collect()
        if result is not None:
            self.store.scanned(*result)

    def node(self, **fields: Any) -> None:
        row = self.maps.view("node")
        for name, value in fields.items():
            row[name] = value

    def allocate(self, net: Net, *others: str) -> None:
        """Let the node know the range of ClusterIPs, after other ones."""
        columns, beyond = cidr_columns((*others, net.service_cidr), net.family)
        self.store.writer.source_ranges.allow(NO_SERVICE, net.family, beyond)
        self.node(**columns)

    def calm(self) -> None:
        """Let connections begin in `flows`: where nothing else is said, so many are half-open as in a flood."""
        self.node(half_open=1 << 31)  # read as less than none

    def age(self, family: int, **columns: int) -> None:
        """Move these moments of every flow back: to what is kept of them, in either table; 0 is never."""
        for table in ("flows", "half_open"):
            known = self.maps.maps[f"{table}{family}"]
            for key, value in zip(*flow_arrays(known, family), strict=True):
                aged = value.copy()
                for column, amount in columns.items():
                    aged[column] = (int(value[column]) - amount) & 0xFFFFFFFF if value[column] else 0
                known.update(key.tobytes(), aged.tobytes())

    def reset(self) -> None:
        """As after a first start: no services, no flows, no counts."""
        self.serve()
        self.forget()
        self.settle()
        for key in self.maps.maps["links"].items(np.dtype(np.uint32), np.dtype(np.uint32))[0].tolist():
            self.maps.maps["links"].delete(key.to_bytes(4, "little"))
        self.link(LOOPBACK, "LINK_POD_BIT")
        row = self.maps.view("node")
        row[:] = np.zeros(1, dtype=row.dtype)
        row["primary4"] = layout.address_words([NETS[4].primary])[0, 0]
        row["primary6"] = layout.address_words([NETS[6].primary])[0]
        row["fast_path"] = self.fast_path
        self.maps.maps["reject_budget"].update(bytes(4), bytes(8 * cpus()))
        self.maps.maps["awaited"].view(np.dtype(np.uint64))[:] = 0
        for name in ("own_addresses", "interfaces", "equal_routes", "equal_paths", "failures"):
            set_elements(self.maps.maps[name], {})

    def forget(self) -> None:
        """Empty every table of flows, what is remembered of clients and tuples, and the counters."""
        self.forget_flows()
        self.maps.maps["timewait"].view(layout.dtype_of("timewait_bucket"))["entries"] = 0
        self.maps.maps["direct_tuples"].view(np.dtype(np.uint64))[:] = 0
        memory = self.maps.maps["affinity"]
        for key in memory.items(layout.dtype_of("affinity_key"), np.dtype(np.uint64))[0]:
            memory.delete(key.tobytes())
        self.maps.view("traffic")[:] = self.maps.view("traffic_gone")[:] = 0
        self.maps.view("first_packets")["counts"] = 0
        for number in range(layout.abi_constants()["COUNTERS"]):
            self.maps.maps["counters"].update(number.to_bytes(4, "little"), bytes(8 * cpus()))

    def forget_flows(self) -> None:
        """Empty every table of flows."""
        for family in (4, 6):
            for table in ("flows", "half_open"):
                known = self.maps.maps[f"{table}{family}"]
                for key in flow_arrays(known, family)[0]:
                    known.delete(key.tobytes())
        loads = self.maps.view("loads")
        loads["opened"] = loads["closed"] = loads["correction"] = 0

    # packets

    def ingress(self, packet: bytes, **options: Any) -> tuple[int, bytes]:
        """What leaves the program at the host's side of a pod's interface for a packet from the pod."""
        return run_on_packet(self.hooks.program("pod_ingress"), packet, **options)[:2]

    def egress(self, packet: bytes, **options: Any) -> tuple[int, bytes]:
        """The same for a packet to the pod."""
        return run_on_packet(self.hooks.program("pod_egress"), packet, **options)[:2]

    def enter(self, place: str, packet: bytes, **options: Any) -> tuple[int, bytes]:
        """The same for a packet that comes in at a `pod`'s interface, or at an `uplink`."""
        return run_on_packet(self.hooks.program(f"{place}_ingress"), packet, **options)[:2]

    def clock(self) -> int:
        return run_on_packet(self.inspect.program("read_clock"), bytes(64))[0]

    def explain(self, packet: bytes, place: str = "pod", ifindex: int = 0) -> ExplainAnswer:
        """What the explaining programs say of a packet; they are loaded for the occasion."""
        seen = read(packet, check=False)
        question = ProbePacket(seen.src, seen.dst, seen.dport, seen.protocol, place, seen.sport)
        names = {known.service: known.entry.name for entries in self.store.plan.installed.values() for known in entries}
        around = explanation.ExplainContext(names, self.store.backends, self.store.services, HZ, interface_name)
        return explanation.explain(self.explaining(), question, place, ifindex, around, packet)

    def explaining(self) -> Object:
        if self._explain is None:
            quiet = np.frombuffer(self.settings, dtype=layout.dtype_of("settings")).copy()
            quiet["traffic_cpus"] = quiet["event_burst"] = 0
            self._explain = self.load(layout.OBJECTS / "explain.bpf.o", quiet.tobytes())
        return self._explain

    # conversations: each step checked

    def open_tcp(
        self, net: Net, vip: str, port: int = 80, sport: int = 40000, client: str | None = None, start: int = 1000
    ) -> Seen:
        """SYN, SYN/ACK and ACK through both interfaces; the SYN as the backend got it. `start`: the SYN's number."""
        client, first = client or net.client, (start + 1) & 0xFFFFFFFF
        verdict, out = self.ingress(frame(net, client, vip, syn(sport, port, start)))
        assert verdict == PASS, verdict
        there = read(out)
        back = frame(net, there.dst, there.src, segment(there.dport, there.sport, "SA", 0, first), from_backend=True)
        assert self.ingress(back) == (PASS, back)  # the first answer takes the way through the stack
        verdict, out = self.egress(back)
        assert verdict == PASS
        assert read(out).tuple == (vip, port, client, sport)
        verdict, out = self.ingress(frame(net, client, vip, segment(sport, port, "A", first)))
        assert verdict in (PASS, REDIRECT)
        assert read(out).tuple == there.tuple
        return there

    def open_udp(
        self, net: Net, vip: str, port: int = 53, sport: int = 40000, *, answer: bool = True, lasting: bool = False
    ) -> Seen:
        """A datagram and its answer; `lasting`: and another pair some seconds later, which establishes the flow."""
        verdict, out = self.ingress(frame(net, net.client, vip, datagram(sport, port)))
        assert verdict in (PASS, REDIRECT), verdict
        there = read(out)
        if answer:
            back = frame(net, there.dst, there.src, datagram(there.dport, there.sport, b"back"), from_backend=True)
            verdict, out = self.egress(back)
            assert verdict == PASS
            assert read(out).tuple == (vip, port, net.client, sport)
        if lasting:
            self.age_flows(net.family, 3 * HZ, "half_open")
            return self.open_udp(net, vip, port, sport)
        return there

    def talk(self, net: Net, there: Seen, vip: str, port: int, sport: int, flags: str, *, up: bool, seq: int,
             ack: int, payload: bytes = b"") -> tuple[int, Seen]:  # fmt: skip
        """One segment of a connection, from the client (`up`) or to it."""
        if up:
            packet = frame(net, net.client, vip, segment(sport, port, flags, seq, ack, payload))
            verdict, out = self.ingress(packet)
        else:
            packet = frame(net, there.dst, there.src, segment(there.dport, there.sport, flags, seq, ack, payload))
            verdict, out = self.egress(packet)
        return verdict, read(out)

    # what is in the maps

    def flows(self, family: int, table: str = "flows") -> dict[tuple[str, int, str, int], Any]:
        keys, values = flow_arrays(self.maps.maps[f"{table}{family}"], family)
        return {
            (
                layout.address_text(key["saddr"].tobytes(), family), swapped(key["sport"]),
                layout.address_text(key["daddr"].tobytes(), family), swapped(key["dport"]),
            ): value
            for key, value in zip(keys, values, strict=True)
        }  # fmt: skip

    def flow_count(self, family: int) -> tuple[int, int]:
        """Established and opening entries."""
        return len(self.flows(family)), len(self.flows(family, "half_open"))

    def count(self, name: str) -> int:
        return self.maps.counters()[name]

    def counts(self) -> dict[str, int]:
        """All that was counted."""
        return {name: value for name, value in self.maps.counters().items() if value}

    def age_flows(self, family: int, jiffies: int, table: str = "flows") -> None:
        """Make every flow look as if it was last seen so long ago."""
        known = self.maps.maps[f"{table}{family}"]
        keys, values = flow_arrays(known, family)
        for key, value in zip(keys, values, strict=True):
            aged = value.copy()
            aged["seen"] = (int(value["seen"]) - jiffies) & 0xFFFFFFFF
            if key["protocol"] != Protocol.TCP:  # there the mark is a sequence number
                aged["started"] = (int(value["started"]) - jiffies) & 0xFFFFFFFF
            known.update(key.tobytes(), aged.tobytes())

    def age_marks(self, jiffies: int) -> None:
        """Make every tuple that is remembered look as if it was used so long ago."""
        marks = self.maps.maps["timewait"].view(layout.dtype_of("timewait_bucket"))["entries"]
        used = marks != 0
        ticks = ((marks[used] & 0xFFFF) - np.uint64(jiffies >> TIMEWAIT_TICK)) & np.uint64(0xFFFF)
        marks[used] = marks[used] & ~np.uint64(0xFFFF) | ticks


def veth(name: str, **fields: Any) -> int:
    """A new interface that is up, and its peer, NAME-peer; the index of the former."""
    with IPRoute() as link:
        link.link("add", ifname=name, kind="veth", peer={"ifname": f"{name}-peer"}, **fields)
        for end in (f"{name}-peer", name):
            index = link.link_lookup(ifname=end)[0]
            link.link("set", index=index, state="up")
    return index


def forward_by(interface: str) -> None:
    """Let the namespace that the calling thread is in forward everything by this new interface."""
    for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        Path("/proc/sys/net", name).write_text("1")
    index = veth(interface)
    with IPRoute() as link:
        link.link("set", index=LOOPBACK, state="up")
        for family, everything in ((socket.AF_INET, "0.0.0.0/0"), (socket.AF_INET6, "::/0")):
            link.route("add", family=family, dst=everything, oif=index)


def swapped(port: Any) -> int:
    return int(layout.swap16([int(port)])[0])


def cpus() -> int:
    last = Path("/sys/devices/system/cpu/possible").read_text().strip().split(",")[-1]
    return int(last.split("-")[-1]) + 1


@contextmanager
def bench_with(options: Options = SMALL, **settings: Any) -> Iterator[Bench]:
    """A bench of its own, for settings that others do not share."""
    made = Bench(options, **settings)
    try:
        made.reset()
        yield made
    finally:
        made.close()


def wait_jiffies(count: int) -> None:
    time.sleep((count + 1) / HZ)
