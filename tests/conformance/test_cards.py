"""XDP in the drivers of emulated network cards, against tc: the same packets, whatever is done to the card meanwhile.

python -m tests.vm run 6.12 --cards --timeout 3600 -- .venv/bin/python -m pytest tests/conformance/test_cards.py
"""

from __future__ import annotations

import random
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from vm import cards

from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.frames import set_feature
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
RX_CHECKSUM, TX_CHECKSUM = 0x15, 0x17  # linux/ethtool.h
SILENT = """table inet silent {{
    chain input {{ type filter hook input priority 0; meta l4proto {{ tcp, udp }} th dport {port} drop; }}
}}
"""


def of(*drivers: str) -> pytest.MarkDecorator:
    """Runs a test with cards of these drivers."""
    return pytest.mark.parametrize(
        "lab", [pytest.param(d, marks=pytest.mark.kernel(cards.PREFIX + d)) for d in drivers], indirect=True
    )


# With the emulated vmxnet3 an open connection stood still after another MTU, and another time where tc served it.
WHOLE = of("igb", "virtio_net")


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


def served_by_xdp(bench: Bench) -> bool:
    ebpf = bench.agent.running_status().dataplane.ebpf
    return ebpf is not None and ebpf.xdp.interfaces == ["card"]


class Exchange:
    """Packets by hand between the client and a pod of the other node, through a node port; what each of them got."""

    def __init__(self, bench: Bench, service: Service, family: int, stack: ExitStack) -> None:
        lab, protocol = bench.lab, service.protocol
        self.protocol = protocol
        self.ends = {"client": (lab["client"].address(family), PORT), "remote1": (lab["remote1"].address(family), SINK)}
        self.towards = {"client": target_of(bench, service, "nodeport", family)}  # whom each of them talks to
        self.got: list[tuple[str, bytes]] = []
        self._number = 0
        self._raw, self._ears = {}, {}
        for place in self.ends:
            with lab.inside(place):
                raw = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_RAW)
                ear = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003))
                ear.bind(("eth0", 0x0003))
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


def conversation(bench: Bench, service: Service, family: int) -> list[tuple[str, bytes]]:
    """What both ends get of the same packets, from the IP header on."""
    dice = random.Random(1)
    with ExitStack() as stack:
        talk = Exchange(bench, service, family, stack)
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


@of(*cards.CARDS)
@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
@pytest.mark.parametrize("checksums", [True, False], ids=["offloaded", "by-the-kernel"])
def test_the_same_bytes_as_by_tc(lab: Lab, protocol: str, checksums: bool) -> None:
    found = {}
    with lab.inside("node"):
        for feature in (RX_CHECKSUM, TX_CHECKSUM):
            with suppress(OSError):  # QEMU's virtio_net has none where nobody else would compute them
                set_feature("card", feature, on=checksums)
    for flags in (TC, NATIVE):
        with serving(lab, flags, protocol=protocol, port=53, target=SINK) as (bench, service):
            before = counted(bench.agent, "xdp_dnat") + counted(bench.agent, "xdp_reply")
            found[flags] = {family: conversation(bench, service, family) for family in (V4, V6)}
            by_xdp = counted(bench.agent, "xdp_dnat") + counted(bench.agent, "xdp_reply") - before
            # tc has answers of UDP, and the first packets of all.
            most = 0.8 * sum(map(len, found[flags].values())) / (1 if protocol == "TCP" else 2)
            assert by_xdp > most if flags == NATIVE else not by_xdp, (by_xdp, most)
    for family, packets in found[TC].items():
        differ = [n for n, pair in enumerate(zip(packets, found[NATIVE][family], strict=True)) if pair[0] != pair[1]]
        assert not differ, (family, [(found[TC][family][n], found[NATIVE][family][n]) for n in differ[:2]])


def asking(bench: Bench, target: tuple[str, int], family: int, stack: ExitStack) -> Flow:
    """One connection from outside that asks without a pause."""
    connection = stack.enter_context(bench.connect("client", target, family, timeout=bound(20)))

    def ask() -> Reply:
        reply = ask_tcp(connection, body=bytes(5000))
        if reply.received != 5000:
            raise ConnectionError(f"of 5000 bytes {reply.received} came")
        return reply

    return Flow(f"{FAMILIES[family]}, client", ask, each=0)


def go_on(flows: list[Flow]) -> None:
    wait_for_answers(flows, 3)
    assert not failures_of(flows)


@WHOLE
def test_connections_stay_while_agent_and_card_begin_again(lab: Lab) -> None:
    with serving(lab, NATIVE) as (bench, service), ExitStack() as stack:
        flows = [asking(bench, target_of(bench, service, "nodeport", family), family, stack) for family in (V4, V6)]
        with meanwhile([flow.go_on for flow in flows]):
            go_on(flows)
            for end in (bench.agent.terminate, bench.agent.kill):
                end()
                go_on(flows)
                bench.agent.start()
                until(lambda: served_by_xdp(bench))
            for change in ("mtu 1400", "mtu 1500", "down", "up"):  # each of them stops and starts the driver's rings
                done = lab.run("node", ["ip", "link", "set", "card", *change.split()])
                assert done.returncode == 0, done.stderr
                if change == "up":  # which takes addresses of IPv6 and routes away
                    path = lab.folder / "lines"
                    path.write_text(moved("node", "card"))
                    lab.run("node", ["ip", "-force", "-batch", str(path)])
                before = counted(bench.agent, "xdp_dnat")
                if change != "down":
                    go_on(flows)
                    assert counted(bench.agent, "xdp_dnat") > before
                    until(lambda: served_by_xdp(bench))
        assert not failures_of(flows)


def set_mtu(lab: Lab, mtu: int) -> str:
    """Returns what is wrong."""
    return lab.run("node", ["ip", "link", "set", "card", "mtu", str(mtu)]).stderr


@of("igb")
def test_a_card_that_cannot_is_left_to_tc(lab: Lab) -> None:
    """With an MTU beyond what XDP has room for."""
    with serving(lab, NATIVE) as (bench, service):
        until(lambda: served_by_xdp(bench))
        assert set_mtu(lab, 9000), "the driver takes an MTU that XDP has no room for"
        bench.agent.terminate()
        assert bench.agent.cleanup().returncode == 0
        assert not set_mtu(lab, 9000)
        try:
            bench.agent.start()
            ebpf = bench.agent.running_status().dataplane.ebpf
            assert ebpf is not None
            assert "the MTU is too large for XDP" in ebpf.xdp.left_to_tc["card"]
            for family in (V4, V6):
                with bench.connect("client", target_of(bench, service, "nodeport", family), family) as connection:
                    assert ask_tcp(connection).pod == "remote1"
        finally:
            set_mtu(lab, 1500)


@WHOLE
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
