"""XDP in the drivers of emulated network cards, against tc: the same packets, whatever is done to the card meanwhile.

python -m tests.vm run 6.12 --cards --timeout 3600 -- .venv/bin/python -m pytest tests/conformance/test_cards.py
"""

from __future__ import annotations

import array
import fcntl
import random
import select
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import pytest
from vm import cards

from hybrid_proxy.dataplane.kernel.drivers import TRIED, driver_of
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.frames import SIOCETHTOOL, set_feature
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Reply, ask_tcp, download, meanwhile
from tests.waiting import bound, until

from .cases import own
from .conftest import bench_of
from .conversations import FAMILIES, Flow, failures_of, wait_for_answers
from .kit import V4, V6, Bench, Service, counted
from .packets import ACK, FIN, PUSH, SYN, Header, datagram, packet, read, segment
from .probes import Probe, observe
from .test_rows import target_of
from .topologies import KINDS, built, moved

pytestmark = pytest.mark.long
NATIVE, TC = "--xdp=native", "--xdp=off"
SINK, PORT = 7999, 40_001  # nothing listens there
LENGTHS = (0, 1, 2, 3, 17, 63, 64, 511, 1000, 1399, 1400, 1439, 1440)
SIZE = 2_000_000
RX_CHECKSUM, TX_CHECKSUM, SET_RINGS = 0x15, 0x17, 0x11  # linux/ethtool.h
SILENT = """table inet silent {{
    chain input {{ type filter hook input priority 0; meta l4proto {{ tcp, udp }} th dport {port} drop; }}
}}
"""


def of(*drivers: str) -> pytest.MarkDecorator:
    """Runs a test with cards of these drivers."""
    return pytest.mark.parametrize(
        "lab", [pytest.param(d, marks=pytest.mark.kernel(cards.PREFIX + d)) for d in drivers], indirect=True
    )


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with built(KINDS[f"card_{request.param}"]) as made:
        for place, port in (("client", PORT), ("remote1", SINK)):
            path = made.folder / "silent"
            path.write_text(SILENT.format(port=port))
            done = made.run(place, ["nft", "-f", str(path)])
            assert done.returncode == 0, done.stderr
        yield made


@contextmanager
def serving(lab: Lab, *flags: str, **ports: Any) -> Iterator[tuple[Bench, Service]]:
    """An agent that has programmed a service whose endpoint is on the other node."""
    bench = bench_of(lab, "ebpf", flags)
    service = bench.service("remote1", outside=True, settle=False, **ports)
    with bench.agent.serving():
        yield bench, service


def driver_here(request: pytest.FixtureRequest) -> str:
    """The driver whose card the lab has."""
    return str(request.node.callspec.params["lab"])


def set_rings(interface: str, length: int) -> None:
    """Has the driver make its rings anew (struct ethtool_ringparam), in the calling thread's namespace."""
    value = array.array("B", struct.pack("=9I", SET_RINGS, 0, 0, 0, 0, length, 0, 0, length))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        fcntl.ioctl(door, SIOCETHTOOL, struct.pack("16sQ16x", interface.encode(), value.buffer_info()[0]))


def served_by_xdp(bench: Bench) -> bool:
    ebpf = bench.agent.running_status().dataplane.ebpf
    return ebpf is not None and ebpf.xdp.interfaces == ["card"]


class Way(NamedTuple):
    """The addresses by family that the client and the node talk by, and the interface of the client that hears it."""

    client: dict[int, str]
    node: dict[int, str]
    interface: str = "eth0"


PLAIN = Way({V4: "192.168.77.1", V6: "fd77::1"}, {V4: "192.168.77.2", V6: "fd77::2"})
TAGGED = Way({V4: "192.168.78.1", V6: "fd78::1"}, {V4: "192.168.78.2", V6: "fd78::2"}, "eth0.5")
VLAN = """link add {device}.5 link {device} type vlan id 5
link set {device}.5 up
addr add 192.168.78.{last}/24 dev {device}.5
addr add fd78::{last}/64 dev {device}.5 nodad
"""


@contextmanager
def tagged(lab: Lab) -> Iterator[None]:
    """Another way from the client to the node: a VLAN on the card."""
    places = (("client", "eth0", 1), ("node", "card", 2))
    for place, device, last in places:
        path = lab.folder / "lines"
        path.write_text(VLAN.format(device=device, last=last))
        done = lab.run(place, ["ip", "-batch", str(path)])
        assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        for place, device, _ in places:
            lab.run(place, ["ip", "link", "del", f"{device}.5"])


class Exchange:
    """Packets by hand between the client and a pod of the other node, through a node port; what each of them got."""

    def __init__(self, bench: Bench, service: Service, family: int, stack: ExitStack, way: Way) -> None:
        lab, protocol = bench.lab, service.protocol
        self.protocol = protocol
        self.ends = {"client": (way.client[family], PORT), "remote1": (lab["remote1"].address(family), SINK)}
        self.towards = {"client": (way.node[family], service.node_port)}  # whom each of them talks to
        self.got: list[tuple[str, bytes]] = []
        self._number = 0
        self._raw, self._ears = {}, {}
        for place in self.ends:
            with lab.inside(place):
                raw = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_RAW)
                ear = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003))
                ear.bind((way.interface if place == "client" else "eth0", 0x0003))
            self._raw[place], self._ears[place] = stack.enter_context(raw), stack.enter_context(ear)

    def send(
        self, place: str, content: bytes, flags: int = 0, sequence: int = 0, acknowledged: int = 0, ttl: int = 64
    ) -> None:
        """Send it, and wait until the other one has it."""
        self._number += 1
        source, target = self.ends[place], self.towards[place]
        header = Header(source[0], target[0], ident=self._number, ttl=ttl)
        ports = (source[1], target[1])
        if self.protocol == "TCP":
            whole = packet(header, socket.IPPROTO_TCP, segment(header, ports, sequence, acknowledged, flags, content))
        else:
            whole = packet(header, socket.IPPROTO_UDP, datagram(header, ports, content))
        other = "remote1" if place == "client" else "client"
        self._raw[place].sendto(whole, (target[0], 0))
        self.got.append((other, self._heard(other, place)))

    def _heard(self, place: str, sender: str) -> bytes:
        """The next packet to the port of that place."""
        while select.select([self._ears[place]], [], [], bound(1))[0]:
            data, (_, _, kind, *_) = self._ears[place].recvfrom(65536)
            found = read(data)
            if found and kind == socket.PACKET_HOST and found.target[1] == self.ends[place][1]:
                if place == "remote1":
                    self.towards["remote1"] = found.source
                length = 40 + int.from_bytes(data[4:6]) if data[0] >> 4 == 6 else int.from_bytes(data[2:4])
                return data[:length]
        raise AssertionError(f"packet {self._number} of {sender} does not arrive at {place}")


def conversation(bench: Bench, service: Service, family: int, way: Way) -> list[tuple[str, bytes]]:
    """What both ends get of the same packets, from the IP header on."""
    dice = random.Random(1)
    with ExitStack() as stack:
        talk = Exchange(bench, service, family, stack, way)
        if service.protocol == "TCP":
            talk.send("client", b"", SYN, 1000)
            talk.send("remote1", b"", SYN | ACK, 5000, 1001)
            talk.send("client", b"", ACK, 1001, 5001)
        due = {"client": 1001, "remote1": 5001}
        for length in (*LENGTHS, *(dice.randrange(1440) for _ in range(12))):
            for place, other in (("client", "remote1"), ("remote1", "client")):
                talk.send(
                    place, dice.randbytes(length), ACK | PUSH, due[place], due[other], dice.choice((64, 63, 9, 255))
                )
                due[place] += length
        if service.protocol == "TCP":
            for place, other in (("client", "remote1"), ("remote1", "client")):
                talk.send(place, b"", FIN | ACK, due[place], due[other])
        return talk.got


def compare(lab: Lab, protocol: str, way: Way, *more: str) -> None:
    """Asks by tc, and by XDP; both ends must get the same bytes."""
    found = {}
    for flags in (TC, NATIVE):
        with serving(lab, flags, *more, protocol=protocol, port=53, target=SINK) as (bench, service):
            before = counted(bench.agent, "xdp_dnat") + counted(bench.agent, "xdp_reply")
            found[flags] = {family: conversation(bench, service, family, way) for family in (V4, V6)}
            by_xdp = counted(bench.agent, "xdp_dnat") + counted(bench.agent, "xdp_reply") - before
            assert served_by_xdp(bench) == (flags == NATIVE)
            # tc has answers of UDP, the first packets of all, and tagged frames where the card does not take tags off.
            most = 0.8 * sum(map(len, found[flags].values())) / (1 if protocol == "TCP" else 2)
            assert not by_xdp if flags == TC else by_xdp > most or way is TAGGED, (by_xdp, most)
    for family, packets in found[TC].items():
        differ = [n for n, pair in enumerate(zip(packets, found[NATIVE][family], strict=True)) if pair[0] != pair[1]]
        assert not differ, (family, [(found[TC][family][n], found[NATIVE][family][n]) for n in differ[:2]])


@of(*cards.CARDS)
@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
@pytest.mark.parametrize("checksums", [True, False], ids=["offloaded", "by-the-kernel"])
def test_the_same_bytes_as_by_tc(lab: Lab, protocol: str, checksums: bool) -> None:
    with lab.inside("node"):
        for feature in (RX_CHECKSUM, TX_CHECKSUM):
            with suppress(OSError):  # QEMU's virtio_net has none where nobody else would compute them
                set_feature("card", feature, on=checksums)
    compare(lab, protocol, PLAIN)


@of(*cards.CARDS)
@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_the_same_bytes_on_a_vlan(lab: Lab, protocol: str) -> None:
    with tagged(lab):
        compare(lab, protocol, TAGGED, "--nodeport-addresses=all", "--uplink-interfaces=card,card.5")


def asking(bench: Bench, target: tuple[str, int], family: int, stack: ExitStack, one: Lock) -> Flow:
    """One connection from outside that asks again and again, while it has the lock."""
    connection = stack.enter_context(bench.connect("client", target, family, timeout=5))

    def ask() -> Reply:
        with one:
            reply = ask_tcp(connection, body=bytes(5000))
        if reply.received != 5000:
            raise ConnectionError(f"of 5000 bytes {reply.received} came")
        return reply

    return Flow(f"{FAMILIES[family]}, client", ask, each=0.02)


def go_on(flows: list[Flow]) -> None:
    wait_for_answers(flows, 3)
    assert not failures_of(flows)


def set_link(lab: Lab, *words: str) -> None:
    done = lab.run("node", ["ip", "link", "set", "card", *words])
    assert done.returncode == 0, done.stderr


def addressed(lab: Lab) -> None:
    """Gives the card the addresses and routes that a link takes along when it goes down."""
    path = lab.folder / "lines"
    path.write_text(moved("node", "card"))
    lab.run("node", ["ip", "-force", "-batch", str(path)])


@dataclass(frozen=True)
class Turmoil:
    """What a change may use: the agent of `bench`, the card of `driver`, and flows that may be asked in the middle."""

    bench: Bench
    driver: str
    flows: list[Flow]
    one: Lock  # held by the flow that asks

    def without_an_agent(self, end: Callable[[], object]) -> None:
        end()
        go_on(self.flows)
        self.bench.agent.start()

    def without_the_program(self) -> None:
        agent = self.bench.agent
        for flags in (TC, NATIVE):
            agent.terminate()
            agent.flags = (flags,)
            agent.start()
            until(lambda: served_by_xdp(self.bench) == (flags == NATIVE))  # noqa: B023 (at once)
            go_on(self.flows)

    def mtus(self) -> None:
        """Larger ones, which igb takes with XDP. With XDP vmxnet3 drops what is larger than the MTU."""
        for mtu in ("1505", "1500"):
            set_link(self.bench.lab, "mtu", mtu)
            go_on(self.flows)

    def down_and_up(self) -> None:
        set_link(self.bench.lab, "down")
        set_link(self.bench.lab, "up")
        addressed(self.bench.lab)

    def without_a_carrier(self) -> None:
        lab = self.bench.lab
        for on in (False, True):
            cards.set_carrier(self.driver, on=on)
            until(lambda: ("NO-CARRIER" in lab.run("node", ["ip", "link", "show", "card"]).stdout) != on)  # noqa: B023

    def other_rings(self) -> None:
        for length in (128, 256):
            with self.bench.lab.inside("node"):
                set_rings("card", length)
            go_on(self.flows)

    def bound_anew(self) -> None:
        """Nobody asks until the agent serves the new device: before that the node answers with resets."""
        with self.one:
            self._bind()
            until(lambda: served_by_xdp(self.bench))

    def _bind(self) -> None:
        lab = self.bench.lab
        with lab.inside("node"):
            bus = driver_of("card").bus
        for name in (f"devices/{bus}/driver/unbind", "drivers_probe"):
            Path("/sys/bus/pci", name).write_text(bus)
        found = until(lambda: cards.find(self.driver, cards.NODE_END), "the card is there again")
        move = ["ip", "link", "set", found, "netns", lab["node"].namespace.name, "name", "card"]
        subprocess.run(move, check=True)
        addressed(lab)


CHANGES: dict[str, Callable[[Turmoil], None]] = {
    "the agent ends and starts": lambda made: made.without_an_agent(made.bench.agent.terminate),
    "the agent is killed": lambda made: made.without_an_agent(made.bench.agent.kill),
    "XDP goes and comes": Turmoil.without_the_program,
    "another MTU": Turmoil.mtus,
    "the link goes down and up": Turmoil.down_and_up,
    "the carrier is lost": Turmoil.without_a_carrier,
    "other lengths of rings": Turmoil.other_rings,
    "the driver is bound anew": Turmoil.bound_anew,
}


def wrong_after(change: Callable[[Turmoil], None], bench: Bench, service: Service, driver: str) -> str:
    """What happens to connections that are open meanwhile; "": they go on, and XDP carries them again at the end."""
    try:
        with ExitStack() as stack:
            one = Lock()
            targets = {family: target_of(bench, service, "nodeport", family) for family in (V4, V6)}
            flows = [asking(bench, target, family, stack, one) for family, target in targets.items()]
            with meanwhile([flow.go_on for flow in flows]):
                go_on(flows)
                change(Turmoil(bench, driver, flows, one))
                until(lambda: served_by_xdp(bench))
                before = counted(bench.agent, "xdp_dnat")
                go_on(flows)
                assert counted(bench.agent, "xdp_dnat") > before, "tc serves them"
            return "\n".join(failures_of(flows))
    except (AssertionError, OSError) as error:
        return repr(error)


@of("igb", "virtio_net")  # vmxnet3 no longer runs the program after another MTU; tc serves then
def test_connections_stay(lab: Lab, request: pytest.FixtureRequest) -> None:
    """Whatever happens to agent, driver and wire."""
    with serving(lab, NATIVE) as (bench, service):
        found = {words: wrong_after(change, bench, service, driver_here(request)) for words, change in CHANGES.items()}
    assert not any(found.values()), "\n".join(f"{words}: {why}" for words, why in found.items() if why)


def set_mtu(lab: Lab, mtu: int) -> str:
    """Returns what is wrong."""
    return lab.run("node", ["ip", "link", "set", "card", "mtu", str(mtu)]).stderr


def left_to_tc(bench: Bench) -> str:
    ebpf = bench.agent.running_status().dataplane.ebpf
    return "" if ebpf is None else ebpf.xdp.left_to_tc.get("card", "")


def answers(bench: Bench, service: Service) -> bool:
    """Whether the pod answers through the node port, in both families."""
    for family in (V4, V6):
        with bench.connect("client", target_of(bench, service, "nodeport", family), family) as connection:
            assert ask_tcp(connection, body=bytes(5000)).received == 5000
    return True


@of(*cards.CARDS)
def test_an_mtu_that_xdp_has_no_room_for(lab: Lab, request: pytest.FixtureRequest) -> None:
    """The card is left to tc meanwhile. The driver igb refuses such an MTU while the program is there."""
    with serving(lab, NATIVE) as (bench, service):
        until(lambda: served_by_xdp(bench))
        refused = set_mtu(lab, 9000)
        assert bool(refused) == (driver_here(request) == "igb"), refused
        if refused:
            bench.agent.terminate()
            assert bench.agent.cleanup().returncode == 0
            assert not set_mtu(lab, 9000)
            bench.agent.start()
        try:
            until(lambda: "the MTU is too large for XDP" in left_to_tc(bench))
            assert answers(bench, service)
        finally:
            set_mtu(lab, 1500)
        until(lambda: served_by_xdp(bench))
        assert answers(bench, service)


@of(*cards.CARDS)
def test_auto_takes_the_drivers_of_the_table(lab: Lab, request: pytest.FixtureRequest) -> None:
    driver = driver_here(request)
    with serving(lab, "--xdp=auto") as (bench, _):
        if driver in TRIED:
            assert served_by_xdp(bench)
        else:
            assert left_to_tc(bench) == f"a virtual device ({driver}); --xdp native takes it"


@of(*cards.CARDS)
def test_direct_server_return(lab: Lab) -> None:
    with serving(lab, NATIVE, "--dsr=ipip") as (bench, service):
        other = Agent(lab, bench.agent.manifests, "ebpf", ("--dsr=ipip",), "node2")
        with other.serving():
            for family in (V4, V6):
                target = target_of(bench, service, "nodeport", family)
                seen = observe(bench, Probe("client", target, socket.SOCK_STREAM), own("remote1"))
                assert seen.is_(own("remote1"), "client"), seen
                with bench.connect("client", target, family, timeout=bound(10)) as connection:
                    assert ask_tcp(connection, body=bytes(SIZE)).received == SIZE
                    assert download(connection, SIZE) == SIZE
