"""The cost of each kind of packet at each hook: nanoseconds, and what does not depend on the machine (calls, lookups).

The production programs are run on one frame again and again (shots.bpf.c). In addition, the same sources, compiled with
helpers that count themselves (counting.h), see one packet of the kind.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from hybrid_proxy.dataplane.kernel.bpf import Object, run_on_packet
from hybrid_proxy.dataplane.kernel.grace import jiffies_per_second
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import DATAPATHS, Loader, put_datapaths
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import pod_columns
from hybrid_proxy.dataplane.modes.ebpf.services.store import Store
from hybrid_proxy.dataplane.options import EbpfOptions
from hybrid_proxy.dataplane.table import Backend, Entry, Masquerade, NodeNetwork, PodMatch, Protocol
from hybrid_proxy.workshop.benchmarks.kit import built, say
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.pins import pin_folder
from hybrid_proxy.workshop.measuring.nodes import entry, lab
from hybrid_proxy.workshop.measuring.results import Result, Target
from hybrid_proxy.workshop.measuring.stats import beyond

REPEAT, ROUNDS = 200_000, 5  # of packets that change nothing
# Of packets that begin a flow: of so many clients, then the tables are emptied. More would be half-open elsewhere.
BATCH, BATCHES = 7_000, 100
PASS, REDIRECT = 0xFFFFFFFF, 7  # TC_ACT_UNSPEC, TC_ACT_REDIRECT
LOOPBACK = 1  # where BPF_PROG_TEST_RUN lets packets come in
TARGETS = ("nothing", "pod_ingress", "pod_egress", "uplink_ingress")
TALLIES = ("array reads", "lookups", "writes", "helpers", "functions", "tail calls")  # enum tally
PODS = {4: "10.64.0.0/10", 6: "fd77:1::/48"}
CHANGING = {4: 0x0A640000, 6: 1}  # the last four bytes of the first of the pods' addresses that differ
OUTSIDE = 0xC6120000  # the same of clients beyond the node: 198.18.0.0 (RFC 2544)
ADDRESS = {(4, "saddr"): 26, (4, "daddr"): 30, (6, "saddr"): 34, (6, "daddr"): 50}  # of those bytes, in the frame
IP_HEADER = slice(14, 34)
PORT, TARGET_PORT, SPORT = 80, 8080, 40_000
SHOT = np.dtype(
    [("length", "u4"), ("target", "u4"), ("changing", "u4"), ("first", "u4"), ("count", "u4"), ("sum", "u4"),
     ("frame", "u1", 128)]
)  # fmt: skip

Seen = Mapping[str, bytes]  # kind -> what became of its packet


@dataclass(frozen=True)
class Net:
    """The addresses of one family, and frames between them."""

    family: int
    pod: str
    backend: str  # of this node
    far: str  # of another
    node: str
    client: str  # beyond the node
    vips: Mapping[str, str]
    stranger: str

    def frame(self, source: str, target: str, transport: Packet) -> bytes:
        """Returns the frame as a pod or a router sends it."""
        head = IP(src=source, dst=target) if self.family == 4 else IPv6(src=source, dst=target)
        return _framed(head / transport)

    def fragment(self, first: bool) -> bytes:
        """One of a datagram to a service; the first has the ports."""
        data = UDP(sport=SPORT, dport=PORT, len=808) / Raw(bytes(32)) if first else Raw(bytes(40))
        offset, target = 0 if first else 5, self.vips["dns"]
        if self.family == 4:
            return _framed(IP(src=self.pod, dst=target, id=77, flags=1, frag=offset, proto=17) / data)
        return _framed(IPv6(src=self.pod, dst=target) / IPv6ExtHdrFragment(nh=17, id=77, m=1, offset=offset) / data)


def _framed(packet: Packet) -> bytes:
    return bytes(Ether(src="02:00:00:00:00:05", dst="02:00:00:00:00:01") / packet)


@dataclass(frozen=True)
class Kind:
    """A kind of packet, and the kinds that come before it.

    `changes`: it moves its flow on, so that each packet is another client's, whose address is in that field.
    `fast_path`: as on a node with rules the first answer goes through the stack ("SYN/ACK to the client").
    """

    name: str
    hook: str
    build: Callable[[Net, Seen], bytes]
    after: tuple[str, ...] = ()
    verdict: int = REDIRECT
    changes: str = ""
    fast_path: str = "ESTABLISHED"


def tcp(flags: str, payload: int = 0, *, back: bool = False, sport: int = SPORT) -> Packet:
    """A segment; `back`: of the backend."""
    ports = (TARGET_PORT, sport) if back else (sport, PORT)
    numbers = {"S": (1000, 0), "SA": (5000, 1001)}.get(flags, (5001, 1001) if back else (1001, 5001))
    head = TCP(sport=ports[0], dport=ports[1], flags=flags, seq=numbers[0], ack=numbers[1])
    return head / Raw(bytes(payload)) if payload else head


def to(vip: str, flags: str, source: str = "pod") -> Callable[[Net, Seen], bytes]:
    """Returns a frame from a client to a service."""
    return lambda net, _: net.frame(getattr(net, source), net.vips[vip], tcp(flags, 8 * (flags == "PA")))


def back(flags: str) -> Callable[[Net, Seen], bytes]:
    """Returns a frame from this node's backend to the pod."""
    return lambda net, _: net.frame(net.backend, net.pod, tcp(flags, 8 * (flags == "PA"), back=True))


def masked(flags: str, backend: str, first: str) -> Callable[[Net, Seen], bytes]:
    """Returns a frame from a backend to the node, where the kind `first` had its client masqueraded."""

    def build(net: Net, seen: Seen) -> bytes:
        port = Ether(seen[first])[TCP].sport
        return net.frame(getattr(net, backend), net.node, tcp(flags, 8 * (flags == "PA"), back=True, sport=port))

    return build


OPENED = ("SYN", "SYN/ACK from the backend", "SYN/ACK to the client", "first ACK")
MASKED = ("masquerade: SYN", "masquerade: SYN/ACK", "masquerade: first ACK")
HAIRPIN = ("hairpin: SYN", "hairpin: SYN/ACK", "hairpin: first ACK")
KINDS = (
    Kind("passing, from a pod", "pod_ingress", lambda net, _: net.frame(net.pod, net.stranger, tcp("PA", 8)),
         verdict=PASS),
    Kind("passing, from a pod, of no pair (`DIRECT`)", "pod_ingress",
         lambda net, _: net.frame(net.pod, net.stranger, tcp("PA", 8)), verdict=PASS, fast_path="DIRECT"),
    Kind("passing, to a pod", "pod_egress", lambda net, _: net.frame(net.stranger, net.pod, tcp("PA", 8)),
         verdict=PASS),
    Kind("passing, from outside", "uplink_ingress", lambda net, _: net.frame(net.stranger, net.pod, tcp("PA", 8)),
         verdict=PASS),
    Kind(OPENED[0], "pod_ingress", to("web", "S"), (), PASS, "saddr"),
    Kind(OPENED[1], "pod_ingress", back("SA"), OPENED[:1], PASS, "daddr"),
    Kind(OPENED[2], "pod_egress", back("SA"), OPENED[:2], PASS, "daddr"),
    Kind(OPENED[3], "pod_ingress", to("web", "A"), OPENED[:3], REDIRECT, "saddr"),
    Kind("established", "pod_ingress", to("web", "PA"), OPENED),
    Kind("established, many clients", "pod_ingress", to("web", "PA"), OPENED, REDIRECT, "saddr"),
    Kind("reply", "pod_ingress", back("PA"), (*OPENED, "established")),
    Kind("reply through the stack", "pod_egress", back("PA"), (*OPENED, "established"), PASS),
    Kind(MASKED[0], "uplink_ingress", to("far", "S", "client"), (), REDIRECT, "saddr"),
    Kind(MASKED[1], "uplink_ingress", masked("SA", "far", MASKED[0]), MASKED[:1]),
    Kind(MASKED[2], "uplink_ingress", to("far", "A", "client"), MASKED[:2]),
    Kind("masquerade", "uplink_ingress", to("far", "PA", "client"), MASKED),
    Kind("masquerade: reply", "uplink_ingress", masked("PA", "far", MASKED[0]), MASKED),
    Kind(HAIRPIN[0], "pod_ingress", to("own", "S")),
    Kind(HAIRPIN[1], "pod_ingress", masked("SA", "pod", HAIRPIN[0]), HAIRPIN[:1]),
    Kind(HAIRPIN[2], "pod_ingress", to("own", "A"), HAIRPIN[:2]),
    Kind("hairpin", "pod_ingress", to("own", "PA"), HAIRPIN),
    Kind("reject", "pod_ingress", to("none", "S")),
    Kind("first fragment", "pod_ingress", lambda net, _: net.fragment(first=True), (), PASS),
    Kind("fragment", "pod_ingress", lambda net, _: net.fragment(first=False), ("first fragment",), PASS),
)  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}
HIDDEN = {*MASKED[1:], *HAIRPIN, "first fragment"}  # only the way to others


@dataclass(frozen=True)
class Row:
    """The cost of a kind."""

    kind: Kind
    family: int
    nanoseconds: float
    counts: Mapping[str, int]

    def cells(self) -> list[str]:
        """Returns the cells of the table in docs/benchmarks.md."""
        figures = [f"{self.nanoseconds:.0f}", f"{1000 / max(self.nanoseconds, 0.1):.1f}"]
        counts = (str(self.counts[name]) for name in TALLIES)
        return [self.kind.name, f"`{self.kind.hook}`", f"IPv{self.family}", *figures, *counts]


class Range:
    """The programs on maps with five services, and what shoots packets at them."""

    def __init__(self, programs: Mapping[str, Object], maps: MapSet, nets: Mapping[int, Net]) -> None:
        self._hooks, self._counted, self._shots = programs["hooks"], programs["counted"], programs["shots"]
        self._maps, self._nets = maps, nets
        names = [(name, "hooks") for name in TARGETS[1:]] + [(name, "tc_datapath") for name in DATAPATHS.values()]
        self.verified = {name: _verified(programs[owner].program(name)) for name, owner in names}

    def row(self, kind: Kind, family: int) -> Row:
        self._maps.view("node")["fast_path"] = layout.abi_constants()[f"FAST_PATH_{kind.fast_path}"]
        counts = self._count(kind, family)
        seconds = self._time_changing if kind.changes else self._time
        return Row(kind, family, seconds(kind, family), counts)

    def _one(self, kind: Kind, net: Net, seen: Seen, program: Object) -> bytes:
        verdict, out, _ = run_on_packet(program.program(kind.hook), kind.build(net, seen))
        assert verdict == kind.verdict, f"IPv{net.family} {kind.name}: verdict {verdict:#x}"
        return out

    def _approach(self, kind: Kind, net: Net) -> dict[str, bytes]:
        """Everything that comes before, from one client."""
        self._forget(net.family)
        seen: dict[str, bytes] = {}
        for name in kind.after:
            seen[name] = self._one(BY_NAME[name], net, seen, self._hooks)
        return seen

    def _count(self, kind: Kind, family: int) -> dict[str, int]:
        net = self._nets[family]
        seen = self._approach(kind, net)
        tallies = self._counted.map("tallies")
        with contextlib.closing(tallies):
            view = tallies.view(np.dtype((np.uint64, len(TALLIES))))
            view[:] = 0
            self._one(kind, net, seen, self._counted)
            return dict(zip(TALLIES, view[0].tolist(), strict=True))

    def _time(self, kind: Kind, family: int) -> float:
        net = self._nets[family]
        seen = self._approach(kind, net)
        frame = kind.build(net, seen)
        mine, nothing = [], []
        for _ in range(ROUNDS):
            mine.append(self._shoot(kind.hook, kind, family, frame, REPEAT))
            nothing.append(self._shoot("nothing", kind, family, frame, REPEAT))
        return beyond(mine, nothing)

    def _time_changing(self, kind: Kind, family: int) -> float:
        """A batch of each kind before it, then one of it, then the tables are emptied."""
        net = self._nets[family]
        mine, nothing = [], []
        for _ in range(BATCHES):
            self._forget(family)
            for name in (*kind.after, kind.name):
                each = BY_NAME[name]
                took = self._shoot(each.hook, each, family, each.build(net, {}), BATCH)
            mine.append(took)
            nothing.append(self._shoot("nothing", kind, family, kind.build(net, {}), BATCH))
            assert len(flow_arrays(self._maps.maps[f"flows{family}"], family)[0]) == 2 * BATCH, kind.name
        self._forget(family)
        return beyond(mine, nothing)

    def _shoot(self, target: str, kind: Kind, family: int, frame: bytes, times: int) -> float:
        changing = ADDRESS[family, kind.changes] if kind.changes else 0
        header = sum(struct.unpack("=10H", frame[IP_HEADER])) if family == 4 and changing else 0
        if header:
            parts = struct.unpack("=5H", frame[24:26] + frame[changing : changing + 4] + bytes(4))
            header -= sum(parts)
        shots = self._shots.map("shots")
        with contextlib.closing(shots):
            padded = np.zeros(SHOT["frame"].shape, dtype=np.uint8)
            padded[: len(frame)] = np.frombuffer(frame, dtype=np.uint8)
            first = OUTSIDE if kind.hook == "uplink_ingress" else CHANGING[family]
            shots.view(SHOT)[0] = (len(frame), TARGETS.index(target), changing, first, 0, header, padded)
            verdict, _, nanoseconds = run_on_packet(self._shots.program("shoot"), frame, repeat=times)
        wanted = PASS if target == "nothing" else kind.verdict
        assert verdict == wanted, f"IPv{family} {kind.name}, shot at {target}: verdict {verdict:#x}"
        return nanoseconds

    def _forget(self, family: int) -> None:
        """No flows, and none that are counted as half open."""
        self._maps.view("node")["half_open"] = 0
        for table in ("flows", "half_open"):
            known = self._maps.maps[f"{table}{family}"]
            keys, _ = flow_arrays(known, family)
            if len(keys):
                known.delete_batch(keys)
        known = self._maps.maps["fragments"]
        for key in known.items(np.dtype("V40"), np.dtype(f"V{known.value_size}"))[0]:
            known.delete(key.tobytes())


def _verified(program: int) -> int:
    """Instructions that the verifier followed, on all ways through the program (Linux 5.16)."""
    lines = Path(f"/proc/self/fdinfo/{program}").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("verified_insns")), 0)


@contextlib.contextmanager
def shooting_range(made: Lab) -> Iterator[Range]:
    """Programs and maps, inside the node of a lab, whose routes they ask; nothing is attached."""
    options = Options(ebpf=EbpfOptions(reject_rate=1 << 30))
    nets = {family: _net(made, family) for family in (4, 6)}
    with contextlib.ExitStack() as stack:
        maps = stack.enter_context(contextlib.closing(MapSet(stack.enter_context(pin_folder()), options)))
        loader = Loader(maps.maps, options, jiffies_per_second())
        programs = {
            name: stack.enter_context(contextlib.closing(loader.one(name))) for name in ("hooks", "tc_datapath")
        }
        put_datapaths(maps.maps["datapaths"], dict.fromkeys(DATAPATHS, programs["tc_datapath"]))
        for name in ("counted", "shots"):
            path = built(f"build/workshop/benchmarks/{name}.bpf.o")  # absolute: the objects' folder is left out
            programs[name] = stack.enter_context(contextlib.closing(loader.one(str(path).removesuffix(".bpf.o"))))
        with contextlib.closing(programs["shots"].map("targets")) as targets:
            for number, name in enumerate(TARGETS):
                owner = programs["shots"] if name == "nothing" else programs["hooks"]
                targets.update(number.to_bytes(4, sys.byteorder), owner.program(name).to_bytes(4, sys.byteorder))
        store = Store(maps, jiffies_per_second())
        store.apply({f"bench/{name}{net.family}": (row,) for net in nets.values() for name, row in _entries(net)})
        node = maps.view("node")
        node["primary4"] = layout.address_words([nets[4].node])[0, 0]
        node["primary6"] = layout.address_words([nets[6].node])[0]
        for column, value in pod_columns(NodeNetwork(pods=PodMatch(tuple(PODS.values())))).items():
            node[column] = value
        for key in (LOOPBACK, LOOPBACK | 1 << layout.abi_constants()["LINK_POD_BIT"]):
            maps.maps["links"].update(key.to_bytes(4, sys.byteorder), LOOPBACK.to_bytes(4, sys.byteorder))
        yield Range(programs, maps, nets)


def _net(made: Lab, family: int) -> Net:
    places = {"pod": "pod1", "backend": "pod2", "far": "remote1", "node": "node", "client": "client"}
    found = {name: getattr(made[place], f"address{family}") for name, place in places.items()}
    prefix = "10.96.0." if family == 4 else "fd96::"
    vips = {name: f"{prefix}{number}" for number, name in enumerate(("web", "far", "own", "none", "dns"), 10)}
    return Net(family, **found, vips=vips, stranger="203.0.113.9" if family == 4 else "2001:db8::9")


def _entries(net: Net) -> Iterator[tuple[str, Entry]]:
    backends = {"web": net.backend, "far": net.far, "own": net.pod, "none": None, "dns": net.backend}
    for name, address in backends.items():
        members = (Backend(address, TARGET_PORT, local=name != "far"),) if address else ()
        protocol = Protocol.UDP if name == "dns" else Protocol.TCP
        masquerade = Masquerade.NODE | Masquerade.EXTERNAL
        yield name, entry(f"bench/{name}{net.family}:p", net.vips[name], PORT, members, masquerade, protocol)


def measure() -> Result:
    """Measures every kind in both families."""
    with lab(pods=2, remote=1) as made, made.inside("node"), shooting_range(made) as shooting:
        rows = [shooting.row(kind, family) for kind in KINDS if kind.name not in HIDDEN for family in (4, 6)]
        verified = shooting.verified
    for line in table(rows):
        print(line)
    by_name = {(row.kind.name, row.family): row for row in rows}
    whole, least = by_name["established", 4].nanoseconds, by_name["passing, from a pod", 4].nanoseconds
    say(f"  {len(rows)} rows of {REPEAT * ROUNDS:,} packets each")
    return Result(
        "packet-kinds", whole, "ns", "a packet of no service, from a pod", max(least, 0.1),
        [(Target("ns, a packet of no service, from a pod", 9.0), least),
         (Target("ns, a packet of no service, to a pod", 6.0), by_name["passing, to a pod", 4].nanoseconds)],
        ["packet-kinds: an established flow's packet, IPv4; the same maps and one client: everything is in the caches"],
        {"verified_instructions": verified,
         "rows": {f"{row.kind.name}, IPv{row.family}": {"ns": round(row.nanoseconds), **row.counts} for row in rows}},
    )  # fmt: skip


def table(rows: list[Row]) -> Iterator[str]:
    """Returns the table as lines of Markdown."""
    heads = ["packet", "hook", "family", "ns", "Mpps", *TALLIES]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    yield from (f"| {' | '.join(row.cells())} |" for row in rows)
