"""XDP on a real path: client -> the node's uplink -> a backend of another node, and back, over one segment.

The uplink is a veth. Its other end runs a program that takes frames, and fills in checksums as a network card does.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from hybrid_proxy.dataplane.reports import Status, XdpHooks
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.frames import Receiver, fill_in_checksums
from hybrid_proxy.workshop.lab.traffic import ask_tcp, ask_udp, download
from tests.conformance.kit import HTTP, UDP, V4, V6, Bench, Service, attached, eventually, node_manifest, said
from tests.namespaces import new_lab

pytestmark = pytest.mark.root

WIRE, UPLINK = "to-node", "eth0"  # the segment's end of the node's uplink, and the uplink
SIZE = 2_000_000
FLAGS = ("--xdp=native", f"--uplink-interfaces={UPLINK},up1")


@dataclass
class Road(Bench):
    """The lab, its agent and what to ask of them."""

    def counters(self) -> dict[str, int]:
        return self.status().counters

    def status(self) -> Status:
        status = self.agent.status()
        assert status is not None, self.agent.tail()
        return status.dataplane

    def restart(self, *flags: str) -> None:
        if self.agent.running():
            self.agent.terminate()
        self.agent.flags = flags
        self.agent.start()

    def far(self, protocol: str = "TCP") -> Service:
        """A service outside the node: one backend, on the other node."""
        made = Service(self, next(self.numbers), (), protocol, *((80, HTTP) if protocol == "TCP" else (53, UDP)),
                       outside=True)  # fmt: skip
        made.write(self.lab["remote1"])
        return made

    def established(self, service: Service) -> list[dict[str, Any]]:
        rows = [row for row in said(self, "flows") if f"/{service.name}:" in str(row["service"])]
        return [row for row in rows if row["state"] == "established"]

    def node_port(self, service: Service, family: int) -> tuple[str, int]:
        return self.lab["node"].address(family), service.node_port

    def open(self, service: Service, family: int) -> socket.socket:
        """A connection from the client to the node port, as soon as that is served."""
        made: list[socket.socket] = []
        target = self.node_port(service, family)
        eventually(lambda: made.append(self.connect("client", target, family)) or True, 5.0, f"{target} refuses")
        return made[0]


@pytest.fixture(scope="module")
def road() -> Iterator[Road]:
    with new_lab("x", 1, remote=1) as lab:
        lab.serve("remote1", http=(HTTP,), udp=(UDP,))
        manifests = lab.folder / "manifests"
        manifests.mkdir()
        (manifests / "node.json").write_text(node_manifest(lab))
        agent = Agent(lab, manifests, flags=FLAGS)
        with lab.inside("client"):
            fill_in_checksums(WIRE)
            other_end = Receiver(WIRE)
        try:
            agent.start()
            yield Road(lab, agent, itertools.count(1))
        finally:
            other_end.close()
            if agent.running():
                agent.terminate()
            cleaned = agent.cleanup()
            assert cleaned.returncode == 0, cleaned.stderr
            assert attached(lab) == 0


@pytest.fixture(params=[V4, V6], ids=["v4", "v6"])
def family(request: pytest.FixtureRequest) -> int:
    return request.param


def test_a_connection_is_carried_in_the_driver(road: Road, family: int) -> None:
    service = road.far()
    with road.open(service, family) as connection:
        before = road.counters()
        assert ask_tcp(connection, body=bytes(SIZE)).received == SIZE
        assert download(connection, SIZE) == SIZE
        after = road.counters()
    segments = SIZE // 1448
    assert after["xdp_dnat"] - before["xdp_dnat"] >= segments
    assert after["xdp_reply"] - before["xdp_reply"] >= segments
    at_tc = sum(after[name] - before[name] for name in ("dnat", "reply"))
    assert at_tc <= 20, f"{at_tc} packets went through tc"


def test_datagrams_are_carried_in_the_driver(road: Road, family: int) -> None:
    """Requests from the second one on, answers as soon as the conversation has lasted."""
    service = road.far("UDP")
    target = road.node_port(service, family)
    with road.socket("client", family, socket.SOCK_DGRAM, timeout=0.5) as client:
        client.connect(target)
        eventually(lambda: ask_udp(client)[0].pod == "remote1", 5.0, "no answer")
        before = road.counters()
        for _ in range(5):
            assert ask_udp(client)[0].pod == "remote1"
        assert road.counters()["xdp_dnat"] - before["xdp_dnat"] >= 4
        eventually(
            lambda: ask_udp(client)[0].pod == "remote1" and road.counters()["xdp_reply"] > before["xdp_reply"],
            5.0,
            "answers never came by XDP",
        )


def test_many_short_connections_end_in_good_order(road: Road, family: int) -> None:
    """tc begins and ends them; no flow is left behind established."""
    service = road.far()
    with road.open(service, family) as connection:
        assert ask_tcp(connection).pod == "remote1"
        assert len(road.established(service)) == 1
    for _ in range(50):
        with road.connect("client", road.node_port(service, family), family) as connection:
            assert ask_tcp(connection, close=True).pod == "remote1"
    eventually(lambda: not road.established(service), 5.0, lambda: f"left behind: {road.established(service)}")


def test_connections_go_on_while_the_agent_is_killed_and_comes_back(road: Road) -> None:
    service = road.far()
    with road.open(service, V4) as first, road.open(service, V6) as second:
        for connection in (first, second):
            assert ask_tcp(connection).pod == "remote1"
        before = road.counters()["xdp_dnat"]
        road.agent.kill()
        for connection in (first, second) * 20:
            assert ask_tcp(connection).pod == "remote1"
        road.agent.start()
        for connection in (first, second) * 20:
            assert ask_tcp(connection).pod == "remote1"
        assert road.counters()["xdp_dnat"] - before >= 80
    assert road.status().ebpf.xdp.interfaces == [UPLINK]


def test_off_takes_the_program_away_and_traffic_goes_on(road: Road) -> None:
    with road.open(road.far(), V4) as connection:
        road.restart("--xdp=off")
        try:
            before = road.counters()
            assert download(connection, 100_000) == 100_000
            after = road.counters()
            assert road.status().ebpf.xdp == XdpHooks("off", [], {})
        finally:
            road.restart(*FLAGS)
        assert (after["xdp_dnat"], after["xdp_reply"]) == (before["xdp_dnat"], before["xdp_reply"])
        assert after["reply"] > before["reply"]
        assert download(connection, 100_000) == 100_000
        assert road.counters()["xdp_reply"] > after["xdp_reply"]


@contextmanager
def second_uplink(road: Road, *, takes_frames: bool = True) -> Iterator[str]:
    """Another veth to the segment's machine, with an address, whose other end takes frames if wanted."""
    node = road.lab.netlink("node")
    with road.lab["client"].namespace.open() as there:
        node.link("add", ifname="up1", kind="veth", peer={"ifname": "wire1", "net_ns_fd": there.fileno()})
    index = node.link_lookup(ifname="up1")[0]
    client = road.lab.netlink("client")
    client.link("set", index=client.link_lookup(ifname="wire1")[0], state="up")
    node.link("set", index=index, state="up")
    try:
        with ExitStack() as stack:
            if takes_frames:
                with road.lab.inside("client"):
                    stack.enter_context(Receiver("wire1"))
            node.addr("add", index=index, address="192.168.99.2", prefixlen=24)
            yield "up1"
    finally:
        for left in node.link_lookup(ifname="up1"):
            node.link("del", index=left)


def test_devices_come_and_go(road: Road) -> None:
    with second_uplink(road) as name:
        road.agent.wait(lambda s: s.dataplane.ebpf.xdp.interfaces == [UPLINK, name], 5.0, "at both")
        node = road.lab.netlink("node")
        node.link("del", index=node.link_lookup(ifname=name)[0])
        road.agent.wait(lambda s: s.dataplane.ebpf.xdp.interfaces == [UPLINK], 5.0, "at one")
    with road.open(road.far(), V4) as connection:
        assert ask_tcp(connection).pod == "remote1"


def test_a_device_with_another_mtu_is_judged_anew(road: Road) -> None:
    with second_uplink(road, takes_frames=False) as name:
        node = road.lab.netlink("node")
        for mtu, too_large in ((9000, True), (1500, False)):
            node.link("set", index=node.link_lookup(ifname=name)[0], mtu=mtu)
            why = "the MTU is too large"
            road.agent.wait(lambda s: (why in s.dataplane.ebpf.xdp.left_to_tc.get(name, "")) == too_large, 5.0, why)  # noqa: B023


def test_status_names_the_interfaces(road: Road) -> None:
    shown = road.agent.command("status", "--admin-socket", str(road.agent.socket))
    assert f"XDP (native): {UPLINK}" in shown.stdout
