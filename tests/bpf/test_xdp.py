"""The program at the driver: known flows cross the node, all else is left to tc, unchanged. And both agree."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from pyroute2 import IPRoute
from scapy.layers.inet import ICMP, IP, UDP, IPOption_RR
from scapy.layers.inet6 import ICMPv6TimeExceeded, IPv6, IPv6ExtHdrFragment, IPv6ExtHdrHopByHop
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw

from hybrid_proxy.dataplane.kernel.bpf import Object, run_on_packet
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.traffic import FIELDS
from hybrid_proxy.dataplane.table import Backend, BackendSet, Kind, Masquerade, Protocol
from tests import namespaces
from tests.tables import Front, entry_of

from .kit import HZ, NETS, REDIRECT, Bench, Net, Seen, chunk, read, segment, veth

LEFT, SENT = 2, 4  # XDP_PASS, XDP_REDIRECT
CLIENT_MAC, NODE_MAC, NEXT_MAC = "02:00:00:00:00:0a", "02:00:00:00:00:0b", "02:00:00:00:00:0c"
VIP_PORT, TARGET, CLIENT_PORT = 80, 8080, 40000
CLIENT = {4: "203.0.113.9", 6: "2001:db8::9"}
GATEWAY = {4: "192.168.7.254", 6: "fd00:7::fe"}
PERMANENT = 0x80
PAYLOAD = bytes(range(40))


class World:
    """A namespace with one uplink, `up0`, behind which clients and backends are, and the programs on its maps."""

    def __init__(self, bench: Bench, loaded: tuple[Object, Object], net: Net, protocol: Protocol) -> None:
        self.bench, self.net, self.protocol = bench, net, protocol
        self.backend = net.backends[0]
        self.here, self.tc = loaded
        for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path("/proc/sys/net", name).write_text("1")
        namespaces.loopback()
        self.link = IPRoute()
        self.index = veth("up0", address=NODE_MAC)
        family = socket.AF_INET if net.family == 4 else socket.AF_INET6
        self.link.addr("add", index=self.index, address=net.primary, prefixlen=24 if net.family == 4 else 64)
        self.link.route("add", dst="default", gateway=GATEWAY[net.family], family=family)
        self.neighbour = {"dst": GATEWAY[net.family], "ifindex": self.index, "family": family}
        self.link.neigh("add", lladdr=NEXT_MAC, state=PERMANENT, **self.neighbour)
        self.serve(self.backend)
        self.accept_frames()
        self.neighbours_are_fresh()

    def serve(self, *backends: str, masquerade: Masquerade = Masquerade.ALWAYS) -> None:
        route = BackendSet(tuple(Backend(address, TARGET) for address in backends))
        front = Front(Kind.LOAD_BALANCER, self.net.vip, VIP_PORT, route, route, masquerade)
        self.bench.serve(entry_of("default/web:http", self.net.family, self.protocol, (front,), route.backends))

    def accept_frames(self) -> None:
        """Here, and at loopback, where packets of tests come in."""
        own = bytes.fromhex(NODE_MAC.replace(":", "")) + bytes(2)
        for index in (self.index, 1):
            self.bench.maps.maps["xdp_links"].update(index.to_bytes(4, "little"), own)

    def neighbours_are_fresh(self, age: int = 0) -> None:
        """As if a packet to every neighbour had gone through the stack so many jiffies ago."""
        times = self.bench.maps.maps["neighbour_times"].view(np.dtype(np.uint64))
        times[:] = (self.bench.clock() - age) & 0xFFFFFFFF

    # packets

    def wrap(self, src: str, dst: str, transport: Packet, **ip: object) -> bytes:
        ip = {("ttl" if self.net.family == 4 else "hlim"): 64} | ip
        head = IP(src=src, dst=dst, **ip) if self.net.family == 4 else IPv6(src=src, dst=dst, **ip)
        return bytes(Ether(src=CLIENT_MAC, dst=NODE_MAC) / head / transport)

    def request(self, flags: str = "A", payload: bytes = PAYLOAD, port: int = CLIENT_PORT, **ip: object) -> bytes:
        return self.wrap(CLIENT[self.net.family], self.net.vip, self.transport(port, VIP_PORT, flags, payload), **ip)

    def answer(self, there: Seen, flags: str = "A", payload: bytes = PAYLOAD, **ip: object) -> bytes:
        return self.wrap(there.dst, there.src, self.transport(there.dport, there.sport, flags, payload), **ip)

    def transport(self, sport: int, dport: int, flags: str, payload: bytes) -> Packet:
        if self.protocol is Protocol.UDP:
            return UDP(sport=sport, dport=dport) / Raw(payload)
        ack = 1001 if flags == "SA" else 0 if flags == "S" else 1
        seq = {"S": 1000, "SA": 0}.get(flags, 1001)
        return segment(sport, dport, flags, seq, ack, b"" if "S" in flags else payload)

    # the two programs

    def at_driver(self, packet: bytes) -> tuple[int, bytes]:
        return run_on_packet(self.here.program("xdp_uplink"), packet)[:2]

    def at_tc(self, packet: bytes) -> tuple[int, bytes]:
        return run_on_packet(self.tc.program("uplink_ingress"), packet)[:2]

    def open(self, *, established: bool = True) -> Seen:
        """A flow, as tc makes it; the first packet as the backend got it."""
        verdict, out = self.at_tc(self.request("S"))
        assert verdict == REDIRECT, verdict
        there = read(out)
        assert there.src == self.net.primary
        assert there.tuple[2:] == (self.backend, TARGET)
        if not established:
            return there
        if self.protocol is Protocol.UDP:
            self.bench.age_flows(self.net.family, 3 * HZ, "half_open")
        assert self.at_tc(self.answer(there, "SA"))[0] == REDIRECT
        if self.protocol is Protocol.TCP:
            assert self.at_tc(self.request("A", b""))[0] == REDIRECT
        assert self.bench.flow_count(self.net.family) == (2, 0)
        return there

    def left(self, packet: bytes) -> bool:
        """Whether the driver's program leaves the packet as it is to tc."""
        verdict, out = self.at_driver(packet)
        assert verdict in (LEFT, SENT), verdict
        assert verdict != LEFT or out == packet, "changed, and then passed on"
        return verdict == LEFT


Maker = Callable[[Net, Protocol], World]


@pytest.fixture(scope="module")
def loaded(programs: Bench) -> Iterator[tuple[Object, Object]]:
    """The driver's program and those of tc."""
    here = programs.load(layout.OBJECTS / "xdp.bpf.o")
    programs.maps.pin_new(here)
    yield here, programs.hooks
    here.close()


@pytest.fixture
def make(bench: Bench, loaded: tuple[Object, Object]) -> Iterator[Maker]:
    made: list[World] = []

    def make_(net: Net, protocol: Protocol) -> World:
        made.append(World(bench, loaded, net, protocol))
        return made[-1]

    with namespaces.fresh():
        yield make_
        for world in made:
            world.link.close()


@pytest.fixture(params=[Protocol.TCP, Protocol.UDP], ids=["tcp", "udp"])
def world(request: pytest.FixtureRequest, make: Maker, net: Net) -> World:
    return make(net, request.param)


@pytest.fixture
def tcp(make: Maker, net: Net) -> World:
    return make(net, Protocol.TCP)


@pytest.fixture
def udp(make: Maker, net: Net) -> World:
    return make(net, Protocol.UDP)


def ttl_of(packet: bytes, net: Net) -> int:
    return packet[14 + (8 if net.family == 4 else 7)]


# --- what crosses


def test_requests_of_a_known_flow_leave_for_the_backend(world: World) -> None:
    there = world.open()
    verdict, out = world.at_driver(world.request())
    seen = read(out)  # every checksum is computed again there
    assert verdict == SENT
    assert seen.tuple == there.tuple
    assert (seen.mac_src, seen.mac_dst) == (NODE_MAC, NEXT_MAC)
    assert ttl_of(out, world.net) == 63
    assert seen.l4.endswith(PAYLOAD)
    assert world.bench.count("xdp_dnat") == 1


def test_answers_of_a_known_flow_leave_for_the_client(world: World) -> None:
    there = world.open()
    verdict, out = world.at_driver(world.answer(there))
    seen = read(out)
    assert verdict == SENT
    assert seen.tuple == (world.net.vip, VIP_PORT, CLIENT[world.net.family], CLIENT_PORT)
    assert (seen.mac_src, seen.mac_dst) == (NODE_MAC, NEXT_MAC)
    assert ttl_of(out, world.net) == 63
    assert world.bench.count("xdp_reply") == 1


def test_driver_and_tc_make_the_same_packet(world: World) -> None:
    there = world.open()
    number = random.Random(4)
    for length in (*range(18), *(number.randrange(18, 1400) for _ in range(60))):
        payload = number.randbytes(length)
        for packet in (
            world.request("PA", payload, **({"id": number.randrange(1 << 16)} if world.net.family == 4 else {})),
            world.answer(there, "PA", payload, **{("tos" if world.net.family == 4 else "tc"): number.randrange(256)}),
        ):
            sent, here = world.at_driver(packet)
            redirected, at_tc = world.at_tc(packet)
            assert (sent, redirected) == (SENT, REDIRECT)
            assert here[14:] == at_tc[14:]


def test_a_datagram_without_a_checksum_keeps_none(make: Maker) -> None:
    world = make(NETS[4], Protocol.UDP)
    there = world.open()
    bare = UDP(sport=CLIENT_PORT, dport=VIP_PORT, chksum=0) / Raw(PAYLOAD)
    packet = world.wrap(CLIENT[4], world.net.vip, bare)
    verdict, out = world.at_driver(packet)
    assert verdict == SENT
    assert read(out).l4[6:8] == b"\0\0"
    assert read(out).tuple == there.tuple
    assert out[14:] == world.at_tc(packet)[1][14:]


def test_a_checksum_that_becomes_zero_is_written_as_ones(udp: World) -> None:
    """A payload for which the translated datagram's sum is 0: RFC 768 says ffff then."""
    there = udp.open()
    _, out = udp.at_driver(udp.request(payload=b"\0\0"))
    missing = int.from_bytes(read(out).l4[6:8], "big")  # adding the checksum itself to the sum makes it ffff
    packet = udp.request(payload=missing.to_bytes(2, "big"))
    verdict, out = udp.at_driver(packet)
    assert verdict == SENT
    assert read(out).l4[6:8] == b"\xff\xff"
    assert out[14:] == udp.at_tc(packet)[1][14:]
    assert read(out).tuple == there.tuple


def test_a_frame_that_is_padded_crosses_with_its_padding(tcp: World) -> None:
    there = tcp.open()
    padded = tcp.request(payload=b"") + b"\xee" * 6
    verdict, out = tcp.at_driver(padded)
    assert verdict == SENT
    assert out.endswith(b"\xee" * 6)
    assert read(out[:-6]).tuple == there.tuple


def test_datagrams_of_a_client_that_gets_no_answers_cross(udp: World) -> None:
    """Logs, say, and floods: the flow is never established, and tc would learn nothing from them either."""
    there = udp.open(established=False)
    verdict, out = udp.at_driver(udp.request())
    assert verdict == SENT
    assert read(out).tuple == there.tuple
    assert udp.bench.flow_count(udp.net.family) == (0, 2)


def test_the_time_stamps_of_both_directions_follow(world: World) -> None:
    there = world.open()
    for packet in (world.request(), world.answer(there)):
        world.bench.age_flows(world.net.family, 5 * HZ)
        assert world.at_driver(packet)[0] == SENT
        now = world.bench.clock()
        ages = {(now - int(flow["seen"])) & 0xFFFFFFFF for flow in world.bench.flows(world.net.family).values()}
        assert max(ages) < 2 * HZ


def test_time_stamps_follow_in_the_table_that_forgets_too(udp: World) -> None:
    udp.open(established=False)
    udp.bench.age_flows(udp.net.family, 5 * HZ, "half_open")
    assert udp.at_driver(udp.request())[0] == SENT
    now = udp.bench.clock()
    flows = udp.bench.flows(udp.net.family, "half_open").values()
    assert max((now - int(flow["seen"])) & 0xFFFFFFFF for flow in flows) < 2 * HZ


def test_what_crosses_is_counted_for_its_backend(world: World) -> None:
    there = world.open()
    known = next(iter(world.bench.store.plan.installed["default/web"]))
    of_backend = np.array([known.ids[0]], dtype=np.int64)
    before = world.bench.store.traffic.of_backends(of_backend)[0]
    request, answer = world.request(), world.answer(there)
    for packet in (request, request, answer):
        assert world.at_driver(packet)[0] == SENT
    counted = world.bench.store.traffic.of_backends(of_backend)[0] - before
    assert dict(zip(FIELDS, counted.tolist(), strict=True)) == {
        "flows": 0, "packets": 2, "bytes": 2 * (len(request) - 14), "reply_packets": 1, "reply_bytes": len(answer) - 14,
        "answered": 0, "connect_ns": 0,
    }  # fmt: skip


# --- what is left to tc


def test_packets_of_no_flow_are_left(world: World) -> None:
    there = world.open()
    assert world.left(world.request(port=CLIENT_PORT + 1))
    assert world.left(world.wrap(CLIENT[world.net.family], "192.0.2.1" if world.net.family == 4 else "2001:db8:1::1",
                                 world.transport(1, 2, "A", PAYLOAD)))  # fmt: skip
    stranger = world.transport(there.dport, there.sport + 1, "A", PAYLOAD)
    assert world.left(world.wrap(there.dst, there.src, stranger))
    assert world.bench.count("xdp_pass") == 0


@pytest.mark.parametrize("flags", ["S", "SA", "FA", "F", "R", "RA"])
def test_what_begins_and_ends_connections_is_left(tcp: World, flags: str) -> None:
    there = tcp.open()
    assert tcp.left(tcp.request(flags))
    assert tcp.left(tcp.answer(there, flags))


def test_after_a_fin_the_rest_is_left(tcp: World) -> None:
    """Acknowledgements of a FIN end the flow: tc looks at them."""
    there = tcp.open()
    assert tcp.at_tc(tcp.answer(there, "FA"))[0] == REDIRECT
    assert tcp.left(tcp.request())
    assert not tcp.left(tcp.answer(there))  # its own direction goes on


def test_after_a_reset_all_is_left(tcp: World) -> None:
    there = tcp.open()
    assert tcp.at_tc(tcp.answer(there, "R"))[0] == REDIRECT
    assert tcp.left(tcp.request())
    assert tcp.left(tcp.answer(there))


def test_an_unfinished_handshake_is_left(tcp: World) -> None:
    there = tcp.open(established=False)
    assert tcp.left(tcp.request())
    assert tcp.left(tcp.answer(there))


def test_answers_of_a_flow_that_is_not_established_are_left(udp: World) -> None:
    """tc establishes it, when it has lasted."""
    there = udp.open(established=False)
    assert udp.left(udp.answer(there))


def test_datagrams_to_a_backend_that_is_gone_are_left(udp: World) -> None:
    there = udp.open()
    udp.serve(udp.net.backends[1])
    assert udp.left(udp.request())
    assert not udp.left(udp.answer(there))


def test_connections_to_a_backend_that_is_gone_go_on(tcp: World) -> None:
    tcp.open()
    tcp.serve(tcp.net.backends[1])
    assert not tcp.left(tcp.request())


def fragment(world: World, offset: int) -> bytes:
    transport = world.transport(CLIENT_PORT, VIP_PORT, "A", PAYLOAD)
    if world.net.family == 4:
        return world.wrap(CLIENT[4], world.net.vip, transport, flags="MF" if not offset else 0, frag=offset)
    proto = 17 if world.protocol is Protocol.UDP else 6
    return world.wrap(
        CLIENT[6], world.net.vip, IPv6ExtHdrFragment(nh=proto, m=int(not offset), offset=offset) / transport
    )


def with_options(world: World) -> bytes:
    transport = world.transport(CLIENT_PORT, VIP_PORT, "A", PAYLOAD)
    if world.net.family == 4:
        return world.wrap(CLIENT[4], world.net.vip, transport, options=[IPOption_RR(length=7, routers=["0.0.0.0"])])
    return world.wrap(CLIENT[6], world.net.vip, IPv6ExtHdrHopByHop() / transport)


def icmp_error(world: World) -> bytes:
    quoted = Raw(world.request()[14:90])
    error = ICMP(type=11) if world.net.family == 4 else ICMPv6TimeExceeded()
    return world.wrap(world.backend, world.net.primary, error / quoted)


def tagged(world: World) -> bytes:
    plain = Ether(world.request())
    return bytes(Ether(src=plain.src, dst=plain.dst) / Dot1Q(vlan=7) / plain.payload)


ODD: dict[str, Callable[[World], bytes]] = {
    "first fragment": lambda world: fragment(world, 0),
    "later fragment": lambda world: fragment(world, 8),
    "IP options or extension headers": with_options,
    "last hop": lambda world: world.request(**{("ttl" if world.net.family == 4 else "hlim"): 1}),
    "no hop": lambda world: world.request(**{("ttl" if world.net.family == 4 else "hlim"): 0}),
    "ICMP error": icmp_error,
    "VLAN": tagged,
    "SCTP": lambda world: world.wrap(CLIENT[world.net.family], world.net.vip, chunk(CLIENT_PORT, VIP_PORT)),
    "to many": lambda world: b"\x01\x00\x5e\x00\x00\x01" + world.request()[6:],
    "cut off": lambda world: world.request()[:-5],
    "no transport header": lambda world: world.request()[: 14 + (20 if world.net.family == 4 else 40) + 3],
    "no IP header": lambda world: world.request()[:30],
    "another protocol": lambda world: world.request()[:12] + b"\x08\x06" + world.request()[14:],
    "larger than the next hop takes": lambda world: world.request(payload=bytes(1480)),
}


@pytest.mark.parametrize("odd", ODD, ids=[name.replace(" ", "-") for name in ODD])
def test_what_is_odd_is_left_as_it_is(world: World, odd: str) -> None:
    world.open()
    assert not world.left(world.request())
    assert world.left(ODD[odd](world))


def test_without_a_neighbour_the_kernel_asks_for_it(world: World) -> None:
    there = world.open()
    with suppress(OSError):
        world.link.neigh("del", **world.neighbour)
    assert world.left(world.request())
    assert world.left(world.answer(there))
    assert world.bench.count("xdp_pass") == 2


def test_an_interface_that_takes_no_frames_is_left_to_tc(world: World) -> None:
    world.open()
    world.bench.maps.maps["xdp_links"].delete(world.index.to_bytes(4, "little"))
    assert world.left(world.request())


def test_a_pod_of_this_node_is_served_by_tc(world: World) -> None:
    """Its interface is no uplink: a frame redirected there would be lost."""
    world.open()
    pod = veth("veth1")
    family = socket.AF_INET if world.net.family == 4 else socket.AF_INET6
    world.link.route("add", dst=f"{world.backend}/{32 if world.net.family == 4 else 128}", oif=pod, family=family)
    world.link.neigh("add", dst=world.backend, ifindex=pod, lladdr=NEXT_MAC, state=PERMANENT, family=family)
    assert world.left(world.request())


def test_a_backend_on_the_node_itself_is_left(world: World) -> None:
    world.open()
    world.link.addr("add", index=world.index, address=world.backend, prefixlen=32 if world.net.family == 4 else 128)
    assert world.left(world.request())


def test_a_node_that_does_not_forward_leaves_all(world: World) -> None:
    world.open()
    for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        Path("/proc/sys/net", name).write_text("0")
    assert world.left(world.request())


def test_flows_that_keep_the_clients_address_are_left(world: World) -> None:
    """They go through the stack and are translated back behind it."""
    world.serve(world.backend, masquerade=Masquerade.NEVER)
    _, out = world.at_tc(world.request("S"))
    there = read(out)
    assert there.src == CLIENT[world.net.family]
    assert world.left(world.request())
    assert world.left(world.answer(there))


def test_flows_of_which_something_else_is_known_are_left(world: World) -> None:
    """Any flag that the program does not know: whatever it will mean one day, tc knows."""
    there = world.open()
    assert not world.left(world.request())
    names = layout.abi_constants()
    fine = ("MASQUERADE", "REPLY", "REPLIED", "ESTABLISHED", "FIN", "FIN_ACKED")
    known = world.bench.maps.maps[f"flows{world.net.family}"]
    for bit in range(16):
        if 1 << bit not in {names[f"FLOW_{name}"] for name in fine}:
            keys, values = known.items(layout.dtype_of(f"flow{world.net.family}_key"), layout.dtype_of("flow"))
            for key, value in zip(keys, values, strict=True):
                odd = value.copy()
                odd["flags"] |= 1 << bit
                known.update(key.tobytes(), odd.tobytes())
            assert world.left(world.request()), bit
            assert world.left(world.answer(there)), bit
            for key, value in zip(keys, values, strict=True):
                known.update(key.tobytes(), value.tobytes())
    assert not world.left(world.request())


def test_while_something_is_traced_all_is_left(world: World) -> None:
    """tc emits events for the packets that it sees."""
    there = world.open()
    world.bench.node(trace=1)
    assert world.left(world.request())
    assert world.left(world.answer(there))
    world.bench.node(trace=0)
    assert not world.left(world.request())


def test_now_and_then_a_packet_through_the_kernel_keeps_a_neighbour_reachable(world: World) -> None:
    there = world.open()
    world.neighbours_are_fresh(age=20 * HZ)
    assert world.left(world.request())
    assert not world.left(world.request())
    assert not world.left(world.answer(there))  # the same neighbour
    assert world.bench.count("xdp_pass") == 1


def test_each_neighbour_has_its_turn(world: World) -> None:
    """Those of one subnet too, whose addresses differ in a few bits."""
    there = world.open()
    other = GATEWAY[world.net.family].replace("254", "253").replace("::fe", "::fd")
    family = world.neighbour["family"]
    prefix = 32 if world.net.family == 4 else 128
    world.link.neigh("add", dst=other, lladdr=CLIENT_MAC, state=PERMANENT, ifindex=world.index, family=family)
    world.link.route("add", dst=f"{world.backend}/{prefix}", gateway=other, family=family)
    world.neighbours_are_fresh(age=20 * HZ)
    assert world.left(world.request())
    assert world.left(world.answer(there))
    assert not world.left(world.request())
    assert not world.left(world.answer(there))


def test_tc_asks_the_kernel_for_a_neighbour_in_turn_too(world: World) -> None:
    """Known ones it takes from the lookup, which writes the frame; else the kernel's output does."""
    world.open()
    _, out = world.at_tc(world.request())
    assert (read(out).mac_src, read(out).mac_dst) == (NODE_MAC, NEXT_MAC)
    world.neighbours_are_fresh(age=20 * HZ)
    verdict, out = world.at_tc(world.request())
    assert verdict == REDIRECT
    assert (read(out).mac_src, read(out).mac_dst) == (CLIENT_MAC, NODE_MAC)


def test_a_recycled_element_is_not_followed(world: World) -> None:
    """An entry whose tag is another key's: what a program sees of an element that was given to another flow."""
    world.open()
    known = world.bench.maps.maps[f"flows{world.net.family}"]
    keys, values = known.items(layout.dtype_of(f"flow{world.net.family}_key"), layout.dtype_of("flow"))
    for key, value in zip(keys, values, strict=True):
        foreign = value.copy()
        foreign["tag"] = np.uint32(int(value["tag"]) ^ 1)
        known.update(key.tobytes(), foreign.tobytes())
    assert world.left(world.request())
