"""Floods of forged packets: what they evict from tables is found again, and what is established stays.

Which element an LRU table evicts, and after how many others, is the kernel's affair. So the honest client's are deleted
here, between forged packets; tests/conformance/test_floods.py sends so many that they go by themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from hybrid_proxy.dataplane.kernel.bpf import Object
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, Kind, Masquerade, Protocol
from tests.tables import Front, entry_of

from .kit import DROP, HZ, PASS, REDIRECT, Bench, Net, Seen, datagram, frame, ones_complement, read, segment, syn
from .test_uplinks import CLIENTS, NODE_PORT, PORTS, uplink

__all__ = ["uplink"]  # a fixture

ALGORITHMS = ("random", "rr", "lc", "maglev")
SPORT, ISN = 40000, 5000  # the backend's number


def node_port(
    net: Net,
    protocol: Protocol,
    algorithm: str = "random",
    affinity: int = 0,
    *,
    local: bool = False,
    backends: int = 10,
) -> Entry:
    """A node port with so many backends; `local`: clients keep their address."""
    ends = BackendSet(tuple(Backend(a, 8080, local=local) for a in net.backends[:backends]))
    front = Front(Kind.NODE_PORT, None, NODE_PORT, ends, ends, Masquerade.NODE if local else Masquerade.ALWAYS)
    return entry_of("default/web:http", net.family, protocol, (front,), ends.backends, affinity, algorithm=algorithm)


class Flooded:
    """A node with a service for outsiders, one of whom is honest."""

    def __init__(self, bench: Bench, net: Net) -> None:
        self.bench, self.net, self.client = bench, net, CLIENTS[net.family][0]
        bench.store.serve_node_ports_at((net.primary,))
        words = layout.address_words([net.primary])[0]
        key = struct.pack("=4II", *(int(word) for word in words), net.family)
        bench.maps.maps["own_addresses"].update(key, (1).to_bytes(4, "little"))
        self._numbers = count()

    def ask(self, transport: object, sport: int = SPORT) -> tuple[int, Seen]:
        verdict, out = self.bench.enter("uplink", frame(self.net, self.client, self.net.primary, transport))
        return verdict, read(out)

    def answer(self, there: Seen, transport: object) -> tuple[int, Seen]:
        """What becomes of a backend's packet: masqueraded clients' where it comes in, others' where it goes out."""
        packet = frame(self.net, there.dst, there.src, transport, from_backend=True)
        if there.src == self.net.primary:
            verdict, out = self.bench.enter("uplink", packet)
        else:
            verdict, out = self.bench.egress(packet)
        return verdict, read(out)

    def flood(self, protocol: Protocol = Protocol.TCP) -> None:
        """A thousand packets, each of another client; then what began is evicted of the honest one."""
        first = syn(dport=NODE_PORT) if protocol is Protocol.TCP else datagram(dport=NODE_PORT)
        packet = bytearray(frame(self.net, self.client, self.net.primary, first))
        host, port = (28, 34) if self.net.family == 4 else (36, 54)
        for number in range(1000):
            packet[host : host + 2] = struct.pack("!H", 256 + number % 65000)
            packet[port : port + 2] = struct.pack("!H", 1024 + next(self._numbers) % 60000)
            if self.net.family == 4:
                packet[24:26] = bytes(2)
                packet[24:26] = struct.pack("!H", ones_complement(packet[14:34]) ^ 0xFFFF)
            self.bench.enter("uplink", bytes(packet))
        assert self.bench.count("new_flow") >= 1000
        self.evict()

    def evict(self, *, answers_alone: bool = False) -> None:
        """Delete what is half-open of the honest client, as the kernel does it; or the half alone that answers use."""
        known = self.bench.maps.maps[f"half_open{self.net.family}"]
        keys, values = known.items(layout.dtype_of(f"flow{self.net.family}_key"), layout.dtype_of("flow"))
        reply = values["flags"] & layout.abi_constants()["FLOW_REPLY"] != 0
        port = layout.swap16([SPORT])[0]
        ours = np.where(reply, values["dport"], keys["sport"]) == port
        for key in keys[ours & reply if answers_alone else ours]:
            known.delete(key.tobytes())


@pytest.fixture
def node(bench: Bench, uplink: Object, net: Net) -> Iterator[Flooded]:
    return Flooded(bench, net)


@pytest.mark.parametrize("local", [False, True], ids=["masqueraded", "local"])
@pytest.mark.parametrize(("algorithm", "affinity"), [*((one, 0) for one in ALGORITHMS), ("random", 600), ("rr", 600)])
def test_a_client_whose_syn_was_evicted_meets_its_backend_again(
    node: Flooded, algorithm: str, affinity: int, local: bool
) -> None:
    """Its ACK, and later segments, go to the backend that has the SYN, from the same port, and answers come back."""
    node.bench.serve(node_port(node.net, Protocol.TCP, algorithm, affinity, local=local))
    _, there = node.ask(syn(SPORT, NODE_PORT))
    back = (node.net.primary, NODE_PORT, node.client, SPORT)
    assert node.answer(there, segment(8080, there.sport, "SA", ISN, 1001))[1].tuple == back
    for flags, payload in (("A", b""), ("PA", b"request")):
        node.flood()
        verdict, again = node.ask(segment(SPORT, NODE_PORT, flags, 1001, ISN + 1, payload))
        assert verdict in (PASS, REDIRECT)
        assert again.tuple == there.tuple
    verdict, seen = node.answer(there, segment(8080, there.sport, "PA", ISN + 1, 1008, b"reply"))
    assert (verdict in (PASS, REDIRECT), seen.tuple) == (True, back)
    node.ask(segment(SPORT, NODE_PORT, "A", 1008, ISN + 6))
    node.flood()
    assert len(node.bench.flows(node.net.family)) == 2, "it is established, and nothing evicts it"
    assert node.answer(there, segment(8080, there.sport, "PA", ISN + 6, 1008, b"more"))[1].tuple == back


@pytest.mark.parametrize("flags", ["A", "PA", "FA"])
def test_segments_that_were_forged_establish_nothing(node: Flooded, flags: str) -> None:
    """However many come of one tuple: a backend that knows no such connection resets it."""
    node.bench.serve(node_port(node.net, Protocol.TCP))
    node.ask(syn(1, NODE_PORT))
    for number in range(3):
        verdict, there = node.ask(segment(SPORT, NODE_PORT, flags, 7000 + number, 9000 + number))
        assert verdict == REDIRECT
    verdict, seen = node.answer(there, segment(8080, there.sport, "R", 9002, 0))
    assert (verdict, seen.tuple) == (REDIRECT, (node.net.primary, NODE_PORT, node.client, SPORT))
    assert not node.bench.flows(node.net.family)
    assert node.bench.count("backend_refused") == 0, "no failure of the backend's"


def test_a_segment_begins_no_flow_where_none_was_evicted(node: Flooded) -> None:
    node.bench.calm()
    node.bench.serve(node_port(node.net, Protocol.TCP))
    assert node.ask(syn(1, NODE_PORT))[0] == REDIRECT
    verdict, seen = node.ask(segment(SPORT, NODE_PORT, "A", 1001, ISN + 1))
    assert (verdict, seen.dst) == (PASS, node.net.primary)


@pytest.mark.parametrize("affinity", [0, 600])
def test_datagrams_of_one_port_keep_their_backend(node: Flooded, affinity: int) -> None:
    """The flood may begin at any moment: the first datagram comes before it."""
    node.bench.calm()
    node.bench.serve(node_port(node.net, Protocol.UDP, affinity=affinity))
    tuples = set()
    for _ in range(3):
        _, there = node.ask(datagram(SPORT, NODE_PORT))
        tuples.add(there.tuple)
        assert node.answer(there, datagram(8080, there.sport))[1].dst == node.client
        node.flood(Protocol.UDP)
    assert {one[2] for one in tuples} == {there.dst}


def test_an_evicted_half_is_noticed_though_the_other_one_is_used(node: Flooded) -> None:
    """Each datagram keeps the client's half alive; without the other one no answer would reach the client."""
    node.bench.serve(node_port(node.net, Protocol.UDP))
    _, there = node.ask(datagram(SPORT, NODE_PORT))
    node.evict(answers_alone=True)
    node.bench.age_flows(node.net.family, HZ // 4, "half_open")
    assert node.ask(datagram(SPORT, NODE_PORT))[1].tuple == there.tuple
    assert node.answer(there, datagram(8080, there.sport))[1].dst == node.client


def test_a_forged_syn_takes_no_port_from_a_connection(node: Flooded) -> None:
    node.bench.serve(node_port(node.net, Protocol.TCP))
    _, there = node.ask(syn(SPORT, NODE_PORT))
    node.answer(there, segment(8080, there.sport, "SA", ISN, 1001))
    node.ask(segment(SPORT, NODE_PORT, "A", 1001, ISN + 1))
    node.flood()
    seen = node.answer(there, segment(8080, there.sport, "PA", ISN + 1, 1001, b"hello"))[1]
    assert seen.tuple == (node.net.primary, NODE_PORT, node.client, SPORT)
    assert node.bench.count("drop_no_port") == 0


def test_ports_of_masqueraded_clients_are_spread(node: Flooded) -> None:
    """Of clients whose addresses and ports are neighbours: two with one port would take it from each other."""
    node.bench.serve(node_port(node.net, Protocol.TCP, backends=1))
    used = set()
    for sport in range(40000, 40400):
        used.add(node.ask(syn(sport, NODE_PORT))[1].sport)
        node.bench.forget_flows()
    assert used <= set(PORTS)
    assert len(used) > 390


@pytest.mark.parametrize("flags", ["SA", "PA", "A"])
def test_the_node_does_not_reset_what_a_flood_evicted(node: Flooded, flags: str) -> None:
    """A backend's segment of a flow that is gone is dropped, and its client goes on with the connection."""
    node.bench.serve(node_port(node.net, Protocol.TCP))
    _, there = node.ask(syn(SPORT, NODE_PORT))
    node.bench.forget_flows()
    assert node.answer(there, segment(8080, there.sport, flags, ISN, 1001))[0] == DROP
    assert node.bench.count("drop_flow_lost") == 1
    assert node.answer(there, segment(8080, there.sport, "R", ISN, 1001))[0] == PASS


def test_a_flood_is_not_remembered_in_place_of_clients_and_connections(node: Flooded) -> None:
    """Neither by affinity nor as tuples of connections that ended."""
    node.bench.serve(node_port(node.net, Protocol.TCP, affinity=600))
    node.bench.calm()
    _, there = node.ask(syn(SPORT, NODE_PORT))
    marks = node.bench.maps.maps["timewait"].view(layout.dtype_of("timewait_bucket"))["entries"]
    before = int(np.count_nonzero(marks))
    node.bench.node(half_open=0)
    node.flood()
    assert int(np.count_nonzero(marks)) == before
    assert node.ask(syn(SPORT + 1, NODE_PORT))[1].dst == there.dst
    memory = node.bench.maps.maps["affinity"].items(layout.dtype_of("affinity_key"), np.dtype(np.uint64))[0]
    assert len(memory) == 1
