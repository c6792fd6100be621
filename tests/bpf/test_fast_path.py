"""What is handed over past the stack before a flow is established: with `--fast-path=always` its first packets, too. By
default datagrams are, for a while after the stack has delivered an answer, or one that gets none.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from pyroute2 import IPRoute

from hybrid_proxy.dataplane.kernel.bpf import run_on_packet
from hybrid_proxy.dataplane.kernel.links import hardware_address
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import set_elements
from hybrid_proxy.dataplane.options import EbpfOptions, Limits
from hybrid_proxy.dataplane.table import Protocol
from tests.namespaces import fresh

from .kit import (
    BACKEND_MAC,
    DROP,
    HOST_MAC,
    HZ,
    NETS,
    PASS,
    POD_MAC,
    REDIRECT,
    SMALL,
    Bench,
    Seen,
    bench_with,
    datagram,
    forward_by,
    frame,
    mac_text,
    read,
    segment,
    syn,
)
from .test_flows import dns, web
from .test_origins import Node

FLAGS = layout.abi_constants()
STRICT = sum(FLAGS[f"INTERFACE_{name}"] for name in ("STRICT4", "STRICT6", "SHARED"))  # frames name no MAC here


class Pods(Node):
    """A node whose kernel knows the pods' hardware addresses."""

    def __init__(self, bench: Bench, family: int) -> None:
        super().__init__(bench, NETS[family])
        self.neighbour("replace")
        self.asked_for_neighbours(0)

    def neighbour(self, command: str) -> None:
        kind = socket.AF_INET6 if self.net.family == 6 else socket.AF_INET
        with IPRoute() as link:
            link.neigh(
                command, family=kind, dst=self.net.backends[0], lladdr=BACKEND_MAC, ifindex=self.backend,
                state="permanent",
            )  # fmt: skip

    def asked_for_neighbours(self, seconds: int) -> None:
        """The kernel's own output was so long ago."""
        self.bench.maps.maps["neighbour_times"].view(np.dtype(np.uint64))[:] = self.bench.clock() - seconds * HZ

    def first(self, protocol: Protocol) -> tuple[int, Seen]:
        """What becomes of a flow's first packet."""
        transport = syn() if protocol is Protocol.TCP else datagram(40000, 80)
        verdict, out = self.at(self.client, frame(self.net, self.net.client, self.net.vip, transport))
        return verdict, read(out)

    def answer(self, protocol: Protocol, flags: str = "SA") -> tuple[int, bytes, bytes]:
        """What becomes of the backend's answer at its interface, and the answer as it came."""
        net = self.net
        transport = segment(8080, 40000, flags, 0, 1001) if protocol is Protocol.TCP else datagram(5353, 40000)
        back = frame(net, net.backends[0], net.client, transport, from_backend=True)
        return *self.at(self.backend, back), back

    def request_goes_on(self, protocol: Protocol) -> tuple[int, Seen]:
        """What becomes of the client's next packet."""
        verdict, out = self.at(self.client, self.request(protocol))
        return verdict, read(out)

    def deliver(self, out: bytes) -> int:
        """The stack sends this packet of the client's to the backend."""
        program = self.bench.hooks.program("pod_egress")
        packet = bytes.fromhex((BACKEND_MAC + HOST_MAC).replace(":", "")) + out[12:]
        return run_on_packet(program, packet, ifindex=self.backend)[0]


def pods_with(bench: Bench, family: int) -> Iterator[Pods]:
    with fresh():
        forward_by("out0")
        bench.reset()
        made = Pods(bench, family)
        yield made
        made.close()


@pytest.fixture(scope="module")
def always_programs() -> Iterator[Bench]:
    options = Options(ebpf=EbpfOptions(limits=msgspec.structs.replace(SMALL.ebpf.limits, flows=Limits().flows)))
    with fresh(), bench_with(options, fast_path=FLAGS["FAST_PATH_ALWAYS"], max_half_open=1 << 10) as made:
        yield made


@pytest.fixture(params=[4, 6], ids=["v4", "v6"])
def always(request: pytest.FixtureRequest, always_programs: Bench) -> Iterator[Pods]:
    yield from pods_with(always_programs, request.param)


@pytest.fixture(params=[4, 6], ids=["v4", "v6"])
def pods(request: pytest.FixtureRequest, programs: Bench) -> Iterator[Pods]:
    yield from pods_with(programs, request.param)


def serve(pods: Pods, protocol: Protocol) -> None:
    pods.bench.serve(web(pods.net) if protocol is Protocol.TCP else dns(pods.net, port=80))


# --- always


def test_a_connection_is_handed_over_from_its_syn_on(always: Pods) -> None:
    net = always.net
    serve(always, Protocol.TCP)
    verdict, seen = always.first(Protocol.TCP)
    assert (verdict, seen.dst, seen.dport) == (REDIRECT, net.backends[0], 8080)
    assert (seen.mac_dst, seen.mac_src) == (BACKEND_MAC, mac_text(hardware_address(always.backend)))
    verdict, out, _ = always.answer(Protocol.TCP)
    seen = read(out)
    assert (verdict, seen.tuple) == (REDIRECT, (net.vip, 80, net.client, 40000))
    assert (seen.mac_dst, seen.mac_src) == (POD_MAC, HOST_MAC)
    acknowledgement = frame(net, net.client, net.vip, segment(40000, 80, "A"))
    assert always.at(always.client, acknowledgement)[0] == REDIRECT
    assert always.bench.flow_count(net.family) == (2, 0)
    assert all(row["flags"] & FLAGS["FLOW_ESTABLISHED"] for row in always.bench.flows(net.family).values())
    assert always.bench.counts() == {"new_flow": 1, "fast": 3}


def test_a_repeated_syn_and_a_refusal_are_handed_over(always: Pods) -> None:
    serve(always, Protocol.TCP)
    assert [always.first(Protocol.TCP)[0] for _ in range(2)] == [REDIRECT, REDIRECT]
    verdict, out, _ = always.answer(Protocol.TCP, "RA")
    assert (verdict, read(out).src) == (REDIRECT, always.net.vip)
    assert always.bench.count("backend_refused") == 1


def test_datagrams_are_handed_over_both_ways_from_the_first(always: Pods) -> None:
    serve(always, Protocol.UDP)
    for _ in range(2):
        assert always.first(Protocol.UDP)[0] == REDIRECT
        verdict, out, _ = always.answer(Protocol.UDP)
        assert (verdict, read(out).src) == (REDIRECT, always.net.vip)
    always.bench.age_flows(always.net.family, 3 * HZ, "half_open")
    assert always.answer(Protocol.UDP)[0] == REDIRECT
    assert always.bench.flow_count(always.net.family) == (2, 0), "it is established"


def no_neighbour(node: Pods) -> None:
    node.neighbour("del")


def by_the_uplink(node: Pods) -> None:
    node.lead(node.net.backends[0], "out0")


def client_elsewhere(node: Pods) -> None:
    node.lead(node.net.client, "other")


def no_programs_there(node: Pods) -> None:
    key = node.backend | 1 << FLAGS["LINK_POD_BIT"]
    node.bench.maps.maps["links"].delete(key.to_bytes(4, "little"))


def no_forwarding(_: Pods) -> None:
    for path in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        Path("/proc/sys/net", path).write_text("0")


@pytest.mark.parametrize(
    "change",
    [no_neighbour, by_the_uplink, client_elsewhere, no_programs_there, no_forwarding],
    ids=["no neighbour", "a backend elsewhere", "a client that is answered elsewhere", "no programs", "no forwarding"],
)
@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["tcp", "udp"])
def test_a_flow_that_has_no_way_begins_through_the_stack_both_ways(
    always: Pods, protocol: Protocol, change: Callable[[Pods], None]
) -> None:
    serve(always, protocol)
    change(always)
    verdict, seen = always.first(protocol)
    assert (verdict, seen.dst) == (PASS, always.net.backends[0])
    verdict, out, back = always.answer(protocol)
    assert verdict == DROP or (verdict, out) == (PASS, back)


def test_a_packet_that_does_not_fit_is_left_to_the_stack(always: Pods) -> None:
    """It sends the ICMP error; a flow that was handed over goes on."""
    net = always.net
    serve(always, Protocol.UDP)
    with IPRoute() as link:
        link.link("set", index=always.backend, mtu=1400)
    large = frame(net, net.client, net.vip, datagram(40000, 80, b"x" * 1450))
    assert always.at(always.client, large)[0] == PASS
    always.bench.forget_flows()
    assert always.first(Protocol.UDP)[0] == REDIRECT
    assert always.at(always.client, large)[0] == PASS


def test_a_source_that_rp_filter_refuses_is_dropped(always: Pods) -> None:
    serve(always, Protocol.TCP)
    client_elsewhere(always)
    rows = {index.to_bytes(4, "little"): STRICT.to_bytes(4, "little") for index in always.links.values()}
    set_elements(always.bench.maps.maps["interfaces"], rows)
    assert always.first(Protocol.TCP)[0] == DROP
    assert always.bench.count("drop_reverse_path") == 1


def test_now_and_then_a_flow_begins_through_the_stack_which_asks_for_the_neighbour(always: Pods) -> None:
    serve(always, Protocol.TCP)
    assert always.first(Protocol.TCP)[0] == REDIRECT
    always.bench.forget_flows()
    always.asked_for_neighbours(20)
    assert always.first(Protocol.TCP)[0] == PASS
    verdict, out, back = always.answer(Protocol.TCP)
    assert (verdict, out) == (PASS, back)
    always.bench.forget_flows()
    assert always.first(Protocol.TCP)[0] == REDIRECT


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["tcp", "udp"])
@pytest.mark.parametrize("established", [False, True], ids=["half-open", "established"])
def test_a_flow_that_began_past_the_stack_returns_to_it_when_a_rule_appears(
    always: Pods, protocol: Protocol, established: bool
) -> None:
    net = always.net
    serve(always, protocol)
    assert always.first(protocol)[0] == REDIRECT
    if established:
        assert always.answer(protocol)[0] == REDIRECT
        always.bench.age_flows(net.family, 3 * HZ, "half_open")
        assert always.answer(protocol)[0] == REDIRECT
        assert always.request_goes_on(protocol)[0] == REDIRECT
    always.bench.node(fast_path=FLAGS["FAST_PATH_ESTABLISHED"])
    for _ in range(2):
        verdict, seen = always.request_goes_on(protocol) if established else always.first(protocol)
        assert (verdict, seen.dst) == (PASS, net.backends[0]), "translated, and judged by the stack"
        verdict, out, back = always.answer(protocol)
        assert (verdict, out) == (PASS, back)
        assert read(always.to_client(back)[1]).src == net.vip
    always.bench.node(fast_path=FLAGS["FAST_PATH_ALWAYS"])
    assert always.request_goes_on(protocol)[0] == REDIRECT
    assert always.answer(protocol, "A")[0] == REDIRECT


# --- by default


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["tcp", "udp"])
def test_by_default_a_flow_begins_through_the_stack_both_ways(pods: Pods, protocol: Protocol) -> None:
    serve(pods, protocol)
    assert pods.first(protocol)[0] == PASS
    verdict, out, back = pods.answer(protocol)
    assert (verdict, out) == (PASS, back)


def one_way(node: Pods, *, last: bool = True) -> bytes:
    """Datagrams that have no answer, and have lasted for a while; the last one as the backend gets it."""
    serve(node, Protocol.UDP)
    assert node.first(Protocol.UDP)[0] == PASS
    if last:
        node.bench.age_flows(node.net.family, 3 * HZ, "half_open")
    verdict, seen = node.first(Protocol.UDP)
    assert verdict == PASS
    return seen.raw


def test_datagrams_without_an_answer_are_handed_over_after_the_stack_has_delivered_one(pods: Pods) -> None:
    net = pods.net
    out = one_way(pods)
    assert pods.first(Protocol.UDP)[0] == PASS, "a rule may drop them: nothing was delivered"
    assert pods.deliver(out) == PASS
    verdict, seen = pods.first(Protocol.UDP)
    assert (verdict, seen.dst, seen.dport) == (REDIRECT, net.backends[0], 5353)
    assert (seen.mac_dst, seen.mac_src) == (BACKEND_MAC, HOST_MAC)
    assert pods.bench.flow_count(net.family) == (0, 2), "it can be forgotten, as before"


def test_the_stack_is_asked_again_before_conntrack_forgets_the_flow(pods: Pods) -> None:
    pods.deliver(one_way(pods))
    seconds = SMALL.timeouts.udp // 6
    pods.bench.age(pods.net.family, bypassed_at=(seconds - 1) * HZ)
    assert pods.first(Protocol.UDP)[0] == REDIRECT
    pods.bench.age(pods.net.family, bypassed_at=2 * HZ)
    verdict, seen = pods.first(Protocol.UDP)
    assert verdict == PASS
    assert pods.first(Protocol.UDP)[0] == PASS, "until one is delivered again"
    pods.deliver(seen.raw)
    assert pods.first(Protocol.UDP)[0] == REDIRECT


def test_a_question_is_not_looked_at_when_it_is_delivered(pods: Pods) -> None:
    """Most of DNS: it does not last."""
    pods.deliver(one_way(pods, last=False))
    assert pods.first(Protocol.UDP)[0] == PASS


def test_a_conversation_is_handed_over_once_the_stack_has_let_an_answer_pass(pods: Pods) -> None:
    net = pods.net
    serve(pods, Protocol.UDP)
    for _ in range(2):
        assert pods.first(Protocol.UDP)[0] == PASS
        verdict, out, back = pods.answer(Protocol.UDP)
        assert (verdict, out) == (PASS, back), "a rule may drop it: nothing came to the client"
    assert read(pods.to_client(back)[1]).src == net.vip
    for _ in range(2):
        verdict, seen = pods.first(Protocol.UDP)
        assert (verdict, seen.dst, seen.mac_dst) == (REDIRECT, net.backends[0], BACKEND_MAC)
        verdict, out, _ = pods.answer(Protocol.UDP)
        seen = read(out)
        assert (verdict, seen.tuple) == (REDIRECT, (net.vip, 80, net.client, 40000))
        assert (seen.mac_dst, seen.mac_src) == (POD_MAC, HOST_MAC)
    assert pods.bench.flow_count(net.family) == (0, 2), "it can be forgotten, as before"


def test_a_conversation_that_rests_begins_again_through_the_stack(pods: Pods) -> None:
    serve(pods, Protocol.UDP)
    for _ in range(2):
        assert pods.first(Protocol.UDP)[0] == PASS
        verdict, out, back = pods.answer(Protocol.UDP)
        assert (verdict, out) == (PASS, back)
        pods.to_client(back)
        assert pods.first(Protocol.UDP)[0] == REDIRECT
        rest = (SMALL.timeouts.udp // 6 + 1) * HZ
        pods.bench.age(pods.net.family, bypassed_at=rest, started=rest)
    assert pods.first(Protocol.UDP)[0] == REDIRECT, "it is established"


def test_a_conversation_with_who_is_not_at_the_clients_interface_is_not_handed_over(pods: Pods) -> None:
    """Who asked in another's name gets no answer by it: the stack sends it to who has the address."""
    net = pods.net
    serve(pods, Protocol.UDP)
    for _ in range(2):
        assert pods.at(pods.other, frame(net, net.client, net.vip, datagram(40000, 80)))[0] == PASS
        verdict, out, back = pods.answer(Protocol.UDP)
        assert (verdict, out) == (PASS, back)
        assert read(pods.to_client(back)[1]).src == net.vip


def test_an_answer_goes_through_the_stack_until_the_flow_is_established(pods: Pods) -> None:
    pods.deliver(one_way(pods))
    verdict, out, back = pods.answer(Protocol.UDP)
    assert (verdict, out) == (PASS, back)
    assert read(pods.to_client(back)[1]).src == pods.net.vip
    verdict, out, _ = pods.answer(Protocol.UDP)
    assert (verdict, read(out).src) == (REDIRECT, pods.net.vip)
    assert pods.first(Protocol.UDP)[0] == REDIRECT


def test_a_pods_interface_that_is_gone_gets_nothing(pods: Pods) -> None:
    pods.deliver(one_way(pods))
    pods.remove("backend")
    assert pods.first(Protocol.UDP)[0] == PASS
    assert pods.bench.count("link_gone") == 1


def test_a_datagram_that_does_not_fit_is_left_to_the_stack_by_default_too(pods: Pods) -> None:
    pods.deliver(one_way(pods))
    with IPRoute() as link:
        link.link("set", index=pods.backend, mtu=1400)
    net = pods.net
    assert pods.at(pods.client, frame(net, net.client, net.vip, datagram(40000, 80, b"x" * 1450)))[0] == PASS
    assert pods.first(Protocol.UDP)[0] == REDIRECT


def test_what_another_sends_in_the_clients_name_is_not_handed_over(pods: Pods) -> None:
    pods.deliver(one_way(pods))
    forged = frame(pods.net, pods.net.client, pods.net.vip, datagram(40000, 80))
    assert pods.at(pods.other, forged)[0] == DROP
