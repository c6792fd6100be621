"""Packets of no flow between pods are handed over where the stack delivered one of their pair within a second.

`tests/conformance/test_direct_traffic.py` has the stack that delivers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest
from pyroute2 import IPRoute
from scapy.packet import Packet

from hybrid_proxy.dataplane.kernel.links import hardware_address
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.table import Protocol
from tests.namespaces import fresh

from .kit import (
    BACKEND_MAC,
    HOST_MAC,
    HZ,
    NETS,
    PASS,
    REDIRECT,
    Bench,
    cpus,
    datagram,
    forward_by,
    frame,
    read,
    segment,
    syn,
)
from .test_flows import dns, web
from .test_origins import Node

FLAGS = layout.abi_constants()
PAIR_BITS = 9
BOTH = pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["tcp", "udp"])
EACH_WAY = pytest.mark.parametrize("served", [True, False], ids=["a backend", "no backend"])


class Pair(Node):
    """A client and a pod that it talks to directly, on a node without rules."""

    def __init__(self, bench: Bench, family: int) -> None:
        super().__init__(bench, NETS[family])
        bench.node(fast_path=FLAGS["FAST_PATH_DIRECT"])
        self.delivered()

    def delivered(self, ago: float = 0, path: str = "DIRECT") -> None:
        """The stack delivered a packet of the pair so many seconds ago, both ways, on every processor."""
        words = layout.address_words([self.net.client, self.net.backends[0]])
        hashes = layout.hash_addresses(words, self.net.family)
        now = (self.bench.clock() - int(ago * HZ)) & 0xFFFFFFFF
        for source, come, go in ((0, self.client, self.backend), (1, self.backend, self.client)):
            with np.errstate(over="ignore"):
                mixed = (hashes[source] * np.uint32(31) + hashes[1 - source]) * np.uint32(0x9E3779B1)
            macs = bytes.fromhex((BACKEND_MAC + HOST_MAC).replace(":", ""))
            row = words[source].tobytes() + words[1 - source].tobytes() + struct.pack(
                "=8x4I", come, go, now, FLAGS[f"FAST_PATH_{path}"]
            ) + macs + bytes(4)  # fmt: skip
            key = int(mixed) >> 32 - PAIR_BITS
            self.bench.hooks.map("pairs").update(key.to_bytes(4, "little"), row * cpus())

    def direct(self, transport: Packet, *, back: bool = False, index: int = 0, **fields: int) -> tuple[int, bytes]:
        """What becomes of a packet from the client to the pod, or `back`, that comes in at its interface or another."""
        index = index or (self.backend if back else self.client)
        ends = (self.net.backends[0], self.net.client) if back else (self.net.client, self.net.backends[0])
        packet = frame(self.net, *ends, transport, from_backend=back, **fields)
        return self.at(index, bytes.fromhex(hardware_address(index).hex()) + packet[6:])

    def question(self, protocol: Protocol, flags: str = "S", size: int = 4) -> Packet:
        if protocol is Protocol.UDP:
            return datagram(40000, 5353, b"x" * size)
        return syn(40000, 8080) if flags == "S" else segment(40000, 8080, flags, payload=b"x" * size)

    def answer(self, protocol: Protocol) -> Packet:
        return datagram(5353, 40000) if protocol is Protocol.UDP else segment(8080, 40000, "SA", 0, 1001)

    def serve(self, protocol: Protocol) -> None:
        self.bench.serve(web(self.net) if protocol is Protocol.TCP else dns(self.net))


@pytest.fixture(params=[4, 6], ids=["v4", "v6"])
def pair(request: pytest.FixtureRequest, programs: Bench) -> Iterator[Pair]:
    with fresh():
        forward_by("out0")
        programs.reset()
        made = Pair(programs, request.param)
        yield made
        made.close()


@BOTH
@EACH_WAY
def test_a_pair_is_handed_over_both_ways_without_a_flow(pair: Pair, protocol: Protocol, served: bool) -> None:
    if served:
        pair.serve(protocol)
    packets = [(pair.question(protocol), False), (pair.answer(protocol), True), (pair.question(protocol, "PA"), False)]
    for transport, back in packets:
        verdict, out = pair.direct(transport, back=back)
        seen = read(out)
        assert (verdict, seen.mac_dst, seen.mac_src) == (REDIRECT, BACKEND_MAC, HOST_MAC)
        assert seen.src == (pair.net.backends[0] if back else pair.net.client), "it is not translated"
    assert pair.bench.flow_count(pair.net.family) == (0, 0)
    assert pair.bench.counts() == {"fast": 3}


@BOTH
@EACH_WAY
@pytest.mark.parametrize(
    "why", ["long ago", "beside a rule", "before the rules went", "elsewhere", "gone", "TTL 1", "MTU", "frame"]
)
def test_what_the_stack_must_see_is_left_to_it(pair: Pair, protocol: Protocol, served: bool, why: str) -> None:
    if served:
        pair.serve(protocol)
    index, fields, size = 0, {}, 4
    if why == "long ago":
        pair.delivered(1.1)
    elif why == "beside a rule":
        pair.bench.node(fast_path=FLAGS["FAST_PATH_ALWAYS"])
    elif why == "before the rules went":
        pair.delivered(path="ESTABLISHED")
    elif why == "elsewhere":
        index = pair.other  # another pod, in the client's name
    elif why == "gone":
        pair.remove("backend")
    elif why == "TTL 1":
        fields = {"ttl" if pair.net.family == 4 else "hlim": 1}
    elif why == "MTU":
        size = 1450
        with IPRoute() as link:
            link.link("set", index=pair.backend, mtu=1400)
    if why == "frame":
        packet = frame(pair.net, pair.net.client, pair.net.backends[0], pair.question(protocol, "PA"))
        verdict, out = pair.at(pair.client, b"\x02\x00\x00\x00\x77\x77" + packet[6:])  # another host's
    else:
        verdict, out = pair.direct(pair.question(protocol, "PA", size), index=index, **fields)
    assert verdict == PASS
    assert read(out).tuple[0] == pair.net.client
    assert pair.bench.count("fast") == 0
    assert pair.bench.flow_count(pair.net.family) == (0, 0)


@BOTH
def test_a_direct_conversation_gets_another_port_where_a_flow_has_its_answers(pair: Pair, protocol: Protocol) -> None:
    """Both from one port of the client's, to a service first."""
    pair.serve(protocol)
    net, port = pair.net, 80 if protocol is Protocol.TCP else 53
    first = syn() if protocol is Protocol.TCP else datagram(40000, port)
    verdict, out = pair.at(pair.client, frame(net, net.client, net.vip, first))
    assert (verdict, read(out).sport) == (PASS, 40000)
    verdict, out = pair.direct(pair.question(protocol))
    seen = read(out)
    assert (verdict, seen.dst) == (PASS, net.backends[0])
    assert seen.sport != 40000
    for back, expected in ((40000, PASS), (seen.sport, PASS)):
        transport = segment(8080, back, "SA", 0, 1001) if protocol is Protocol.TCP else datagram(5353, back)
        assert pair.direct(transport, back=True)[0] == expected, "one is translated at the client, as before"
    verdict, out = pair.direct(pair.question(protocol, "A"))
    assert read(out).sport == seen.sport, "it stays with its port, in the midst of it"


def test_a_flow_leaves_the_tuple_of_datagrams_that_went_directly(pair: Pair) -> None:
    net = pair.net
    pair.serve(Protocol.UDP)
    assert pair.direct(pair.question(Protocol.UDP))[0] == REDIRECT
    asks = frame(net, net.client, net.vip, datagram(40000, 53))
    assert read(pair.at(pair.client, asks)[1]).sport != 40000, "an answer may be on its way"
    assert pair.direct(pair.answer(Protocol.UDP), back=True)[0] == REDIRECT
    pair.bench.forget_flows()
    marks = pair.bench.maps.maps["direct_tuples"].view(np.dtype(np.uint64))
    marks[marks != 0] -= np.uint64(5 * HZ)
    assert read(pair.at(pair.client, asks)[1]).sport == 40000


def test_a_connection_leaves_the_tuple_of_one_that_went_directly(pair: Pair) -> None:
    net = pair.net
    pair.bench.calm()
    pair.serve(Protocol.TCP)
    assert pair.direct(pair.question(Protocol.TCP))[0] == REDIRECT
    assert read(pair.at(pair.client, frame(net, net.client, net.vip, syn()))[1]).sport != 40000
