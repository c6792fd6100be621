"""A node with two uplinks, or several addresses: every reply comes from the address that the client asked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import ask_tcp, ask_udp, download

from .cases import node
from .conftest import routed_lab
from .kit import UDP, V4, V6, Bench, Service
from .probes import Probe, observe
from .test_node_settings import agent_with
from .test_rows import target_of
from .world import SECOND

STREAM = 1  # SOCK_STREAM
NODE_SIDE, CLIENT_SIDE = ("172.20.7.2", "fd20:7::2"), ("172.20.7.1", "fd20:7::1")
SIZE = 300_000


@pytest.fixture(scope="module")
def crossroads() -> Iterator[Lab]:
    """A lab whose node and client have a second link between them. The node sends by it what is for the client."""
    with routed_lab(2, 1, SECOND) as made:
        _second_link(made)
        yield made


def _second_link(lab: Lab) -> None:
    here, there = lab.netlink("node"), lab.netlink("client")
    with lab.inside("client"), Path("/proc/thread-self/ns/net").open() as namespace:
        here.link("add", ifname="eth1", kind="veth", peer={"ifname": "eth1", "net_ns_fd": namespace.fileno()})
    for link, addresses in ((here, NODE_SIDE), (there, CLIENT_SIDE)):
        index = link.link_lookup(ifname="eth1")[0]
        link.link("set", index=index, state="up")
        for address, length in zip(addresses, (24, 64), strict=True):
            link.addr("add", index=index, address=address, prefixlen=length, flags=0x02)
    for name in ("node", "client"):
        with lab.inside(name):
            for interface in ("all", "eth0", "eth1"):
                Path(f"/proc/sys/net/ipv4/conf/{interface}/rp_filter").write_text("0")
    index = here.link_lookup(ifname="eth1")[0]
    for family, via in ((V4, CLIENT_SIDE[0]), (V6, CLIENT_SIDE[1])):
        length = 32 if family == V4 else 128
        here.route("add", family=family, dst=f"{lab['client'].address(family)}/{length}", gateway=via, oif=index)


FLAGS = ("--uplink-interfaces=eth*", "--nodeport-addresses=0.0.0.0/0,::/0")
Serving = tuple[Bench, dict[str, Service]]


@pytest.fixture(scope="module")
def serving(crossroads: Lab, mode: str) -> Iterator[Serving]:
    """One agent for all."""
    with agent_with(crossroads, mode, *FLAGS) as (bench, services):
        bench.node_addresses = (*bench.node_addresses, *NODE_SIDE)
        yield bench, services


def _is_masqueraded(bench: Bench, target: tuple[str, int], backend: str) -> None:
    want = node(backend)
    seen = observe(bench, Probe("client", target, STREAM), want)
    assert seen.is_(want, "client"), seen


@pytest.mark.row("3.1", "answers leave by another uplink than requests came in at")
def test_answers_leave_by_another_uplink(serving: Serving) -> None:
    bench, services = serving
    for family, (name, backend) in itertools.product((V4, V6), (("far", "remote1"), ("near", "pod2"))):
        target = target_of(bench, services[name], "nodeport", family)
        _is_masqueraded(bench, target, backend)
        with bench.connect("client", target, family, timeout=30.0) as connection:
            assert ask_tcp(connection, body=bytes(SIZE)).received == SIZE
            assert download(connection, SIZE) == SIZE


@pytest.mark.row("3.1", "every chosen address of the node serves, at whichever uplink it is")
def test_each_address_answers_for_itself(serving: Serving) -> None:
    bench, services = serving
    for family in (V4, V6):
        for address in (SECOND[family != V4], NODE_SIDE[family != V4]):
            _is_masqueraded(bench, (address, services["far"].node_port), "remote1")


@pytest.mark.row("2.6", "datagrams through another uplink, and from a second address")
def test_datagrams_are_answered_from_the_address_that_was_asked(serving: Serving) -> None:
    bench, _ = serving
    plan = {"protocol": "UDP", "port": 53, "target": UDP, "outside": True, "settle": False}
    service = bench.service("remote1", title="datagrams", **plan)  # type: ignore[arg-type]
    for family in (V4, V6):  # a mode may program one before the other
        bench.settle(service, {"remote1"}, family)
        for address in (SECOND[family != V4], NODE_SIDE[family != V4]):
            with bench.socket("client", family, 2) as sender:  # SOCK_DGRAM
                reply, source = ask_udp(sender, (address, service.node_port))
            assert reply.pod == "remote1"
            assert source == (address, service.node_port)
