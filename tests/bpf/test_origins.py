"""Where a flow's packets come in: each direction lives at one interface, or at the uplinks; what comes in elsewhere is
dropped, unless the route to its sender leads there by now.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from pyroute2 import IPRoute
from scapy.layers.inet import ICMP, IP
from scapy.layers.inet6 import ICMPv6DestUnreach, IPv6
from scapy.packet import Packet, Raw

from hybrid_proxy.dataplane.kernel.bpf import run_on_packet
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import set_elements
from hybrid_proxy.dataplane.table import Backend, BackendSet, Kind, Masquerade, Protocol
from tests.namespaces import fresh
from tests.tables import Front, entry_of

from .kit import DROP, HZ, NETS, PASS, REDIRECT, Bench, Net, datagram, forward_by, frame, read, segment, syn, veth
from .test_flows import dns, web

FLAGS = layout.abi_constants()


class Node:
    """A node with interfaces, in the namespace of the calling thread; each pod has a route of its own."""

    def __init__(self, bench: Bench, net: Net) -> None:
        self.bench, self.net = bench, net
        self.links: dict[str, int] = {}
        self.uplink = self._index("out0")
        bench.link(self.uplink, "LINK_OUTER_BIT")
        self.client = self.add("client", net.client)
        self.backend = self.add("backend", net.backends[0])
        self.other = self.add("other", net.backends[7])

    def _index(self, name: str) -> int:
        with IPRoute() as link:
            return int(link.link_lookup(ifname=name)[0])

    def add(self, name: str, address: str, *, route: bool = True) -> int:
        """A pod's interface; its index."""
        index = self.links[name] = veth(name)
        self.bench.link(index, "LINK_POD_BIT")
        if route:
            self.lead(address, name)
        return index

    def lead(self, address: str, name: str) -> None:
        """Let the route to this address lead out of the interface."""
        family, length = (socket.AF_INET6, 128) if ":" in address else (socket.AF_INET, 32)
        with IPRoute() as link:
            link.route("replace", family=family, dst=f"{address}/{length}", oif=self._index(name))

    def remove(self, name: str) -> None:
        with IPRoute() as link:
            link.link("del", index=self.links.pop(name))

    def close(self) -> None:
        for name in list(self.links):
            self.remove(name)

    # packets

    def at(self, index: int, packet: bytes) -> tuple[int, bytes]:
        """A packet that comes in at a pod's interface, or at the uplink."""
        hook = "uplink_ingress" if index == self.uplink else "pod_ingress"
        return run_on_packet(self.bench.hooks.program(hook), packet, ifindex=index)[:2]

    def to_client(self, packet: bytes) -> tuple[int, bytes]:
        """What goes to the client through the stack, behind routing."""
        return run_on_packet(self.bench.hooks.program("pod_egress"), packet, ifindex=self.client)[:2]

    def request(self, protocol: Protocol, payload: bytes = b"?") -> bytes:
        transport = segment(40000, 80, "PA", payload=payload) if protocol is Protocol.TCP else datagram(40000, 80)
        return frame(self.net, self.net.client, self.net.vip, transport)

    def establish(self, protocol: Protocol) -> None:
        """A flow from `client` to `backend`, both pods of this node, whose packets are handed over."""
        net = self.net
        maker = web(net) if protocol is Protocol.TCP else dns(net, port=80)
        self.bench.serve(maker)
        if protocol is Protocol.TCP:
            assert self.at(self.client, frame(net, net.client, net.vip, syn()))[0] == PASS
            back = frame(net, net.backends[0], net.client, segment(8080, 40000, "SA", 0, 1001), from_backend=True)
            assert self.at(self.backend, back) == (PASS, back)
            self.to_client(back)
            assert self.at(self.client, frame(net, net.client, net.vip, segment(40000, 80, "A")))[0] == REDIRECT
            return
        back = frame(net, net.backends[0], net.client, datagram(5353, 40000), from_backend=True)
        for verdict in (PASS, REDIRECT):
            assert self.at(self.client, self.request(protocol))[0] == verdict
            assert self.at(self.backend, back)[0] == verdict
            if verdict == PASS:
                self.to_client(back)
            self.bench.age_flows(net.family, 3 * HZ, "half_open")


@pytest.fixture(params=[4, 6], ids=["v4", "v6"])
def node(request: pytest.FixtureRequest, programs: Bench) -> Iterator[Node]:
    with fresh():
        forward_by("out0")
        programs.reset()
        made = Node(programs, NETS[request.param])
        yield made
        made.close()


BOTH = pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["tcp", "udp"])


def answer_of(node: Node, protocol: Protocol) -> bytes:
    net = node.net
    transport = segment(8080, 40000, "PA", 1, 1001, b"!") if protocol is Protocol.TCP else datagram(5353, 40000)
    return frame(net, net.backends[0], net.client, transport, from_backend=True)


@BOTH
@pytest.mark.parametrize("place", ["other", "uplink", "backend"])
def test_nobody_else_sends_as_the_client(node: Node, protocol: Protocol, place: str) -> None:
    node.establish(protocol)
    forged = node.request(protocol)
    assert node.at(getattr(node, place), forged)[0] == DROP
    assert node.bench.count("drop_foreign") == 1
    assert node.at(node.client, forged)[0] == REDIRECT


@BOTH
@pytest.mark.parametrize("place", ["other", "uplink", "client"])
def test_nobody_else_answers_as_the_backend(node: Node, protocol: Protocol, place: str) -> None:
    node.establish(protocol)
    forged = answer_of(node, protocol)
    assert node.at(getattr(node, place), forged)[0] == DROP
    assert node.bench.count("drop_foreign") == 1
    verdict, out = node.at(node.backend, forged)
    assert (verdict, read(out).src) == (REDIRECT, node.net.vip)


@pytest.mark.parametrize("flags", ["S", "R", "FA"])
@pytest.mark.parametrize("place", ["other", "uplink"])
def test_nobody_else_ends_a_connection(node: Node, flags: str, place: str) -> None:
    """With the right numbers, even."""
    node.establish(Protocol.TCP)
    net, before = node.net, node.bench.flows(node.net.family)
    client = frame(net, net.client, net.vip, segment(40000, 80, flags, 1001, 1))
    backend = frame(net, net.backends[0], net.client, segment(8080, 40000, flags, 1, 1001), from_backend=True)
    for forged in (client, backend):
        assert node.at(getattr(node, place), forged)[0] == DROP
    after = node.bench.flows(net.family)
    assert {key: value["flags"] for key, value in after.items()} == {k: v["flags"] for k, v in before.items()}


@BOTH
@pytest.mark.parametrize("place", ["other", "uplink"])
def test_nobody_else_gives_the_first_answer(node: Node, protocol: Protocol, place: str) -> None:
    """A program learns from it where the backend is."""
    net, tcp = node.net, protocol is Protocol.TCP
    node.bench.serve(web(net) if tcp else dns(net, port=80))
    node.at(node.client, frame(net, net.client, net.vip, syn() if tcp else datagram(40000, 80)))
    port = 8080 if tcp else 5353
    first = segment(port, 40000, "SA", 0, 1001) if tcp else datagram(port, 40000)
    back = frame(net, net.backends[0], net.client, first, from_backend=True)
    assert node.at(getattr(node, place), back)[0] == DROP
    assert node.bench.count("drop_foreign") == 1
    assert node.at(node.backend, back) == (PASS, back)
    flows = node.bench.flows(net.family, "half_open").values()
    assert {int(flow["origin"]) for flow in flows} == {node.client, node.backend}
    assert {int(flow["ifindex"]) for flow in flows} == {node.client, node.backend}


def test_a_backend_behind_an_interface_without_programs_is_found_at_its_port(node: Node) -> None:
    """Behind a bridge: the route leads to the bridge, packets come in at its ports."""
    net = node.net
    node.lead(net.backends[0], "out0-peer")  # any interface that no program is at
    node.bench.serve(dns(net, port=80))
    node.at(node.client, node.request(Protocol.UDP))
    back = answer_of(node, Protocol.UDP)
    assert node.at(node.backend, back) == (PASS, back)
    assert node.at(node.other, back)[0] == DROP
    assert node.bench.count("drop_foreign") == 1
    flows = node.bench.flows(net.family, "half_open").values()
    assert {int(flow["origin"]) for flow in flows} == {node.client, node.backend}


def test_uplinks_are_one_place(node: Node) -> None:
    """A client outside may take another uplink at any time."""
    net = node.net
    second = node.add("second", net.stranger, route=False)
    node.bench.maps.maps["links"].delete((second | 1 << FLAGS["LINK_POD_BIT"]).to_bytes(4, "little"))
    node.bench.link(second, "LINK_OUTER_BIT")
    node.bench.serve(web(net))
    program = node.bench.hooks.program("uplink_ingress")
    opened = frame(net, net.stranger, net.vip, syn())
    assert run_on_packet(program, opened, ifindex=node.uplink)[0] == PASS
    again = run_on_packet(program, opened, ifindex=second)
    assert read(again[1]).dst == net.backends[0]
    assert node.bench.count("drop_foreign") == 0


def icmp_error(net: Net, source: str, about: bytes) -> bytes:
    """Port unreachable, from `source` to the sender of a packet."""
    inner: Packet = IP(about[14:]) if net.family == 4 else IPv6(about[14:])
    code = ICMP(type=3, code=3) if net.family == 4 else ICMPv6DestUnreach(code=4)
    return frame(net, source, inner.src, code / Raw(bytes(inner)[:60]))


@pytest.mark.parametrize("place", ["other", "uplink"])
def test_nobody_else_complains_about_a_flow(node: Node, place: str) -> None:
    """About a hairpin, and what is masqueraded: translated where it comes in."""
    net = node.net
    me = net.backends[0]
    node.bench.serve(web(net))
    verdict, out = node.at(node.backend, frame(net, me, net.vip, syn()))
    assert verdict == REDIRECT
    error = icmp_error(net, me, out)
    assert node.at(getattr(node, place), error)[0] == DROP
    assert node.bench.count("drop_foreign") == 1
    assert node.at(node.backend, error)[0] == REDIRECT
    assert node.bench.count("icmp_related") == 1


# --- who poses as a pod before that pod speaks, where no reverse path is asked for


@BOTH
def test_answers_go_to_who_was_named_and_not_to_who_asked(node: Node, protocol: Protocol) -> None:
    net, tcp = node.net, protocol is Protocol.TCP
    node.bench.serve(web(net) if tcp else dns(net, port=80))
    transport = segment(8080, 40000, "SA", 0, 1001) if tcp else datagram(5353, 40000)
    back = frame(net, net.backends[0], net.client, transport, from_backend=True)
    for question in ("S", "A", "PA"):
        asked = syn() if question == "S" else segment(40000, 80, question)
        node.at(node.other, frame(net, net.client, net.vip, asked if tcp else datagram(40000, 80)))
        assert node.at(node.backend, back) == (PASS, back)
        assert read(node.to_client(back)[1]).src == net.vip
        node.bench.age_flows(net.family, 3 * HZ, "half_open")


@BOTH
def test_masqueraded_answers_go_to_who_was_named(node: Node, protocol: Protocol) -> None:
    """They never go through the stack."""
    net, tcp = node.net, protocol is Protocol.TCP
    port = 8080 if tcp else 5353
    route = BackendSet((Backend(net.backends[0], port),))
    front = Front(Kind.EXTERNAL_IP, net.vip2, 80, route, route, Masquerade.ALWAYS)
    node.bench.serve(entry_of("default/web:http", net.family, protocol, (front,), route.backends))
    for place, handed in ((node.other, 0), (node.client, node.client)):
        node.bench.forget_flows()
        opened = frame(net, net.client, net.vip2, syn() if tcp else datagram(40000, 80))
        there = read(node.at(place, opened)[1])
        assert there.src == net.primary
        for flags in ("SA", "A"):
            answered = segment(port, there.sport, flags, 0, 1001) if tcp else datagram(port, there.sport)
            back = frame(net, net.backends[0], net.primary, answered, from_backend=True)
            assert read(node.at(node.backend, back)[1]).tuple == (net.vip2, 80, net.client, 40000)
            node.bench.age_flows(net.family, 3 * HZ, "half_open")
        flows = {**node.bench.flows(net.family), **node.bench.flows(net.family, "half_open")}
        (reply,) = (flow for flow in flows.values() if flow["flags"] & FLAGS["FLOW_REPLY"])
        assert int(reply["ifindex"]) == handed


def test_who_forged_a_first_datagram_does_not_shut_the_client_out(node: Node) -> None:
    """Behind a bridge, where the route does not show which address is behind which interface."""
    net = node.net
    node.lead(net.client, "out0-peer")
    node.bench.serve(dns(net, port=80))
    back = answer_of(node, Protocol.UDP)
    for _ in range(3):
        assert node.at(node.other, node.request(Protocol.UDP))[0] == PASS
        assert node.at(node.backend, back) == (PASS, back)
        assert read(node.to_client(back)[1]).src == net.vip
        node.bench.age_flows(net.family, 3 * HZ, "half_open")
    assert node.at(node.client, node.request(Protocol.UDP))[0] == PASS
    assert node.bench.count("drop_foreign") == 0


@pytest.mark.parametrize("strict", [False, True], ids=["unasked", "strict"])
def test_a_direct_datagram_claims_nothing_where_the_stack_refuses_it(node: Node, strict: bool) -> None:
    net = node.net
    if strict:
        flags = sum(FLAGS[f"INTERFACE_{name}"] for name in ("STRICT4", "STRICT6", "SHARED"))  # frames name no MAC here
        rows = {index.to_bytes(4, "little"): flags.to_bytes(4, "little") for index in node.links.values()}
        set_elements(node.bench.maps.maps["interfaces"], rows)
    node.bench.serve(dns(net, port=80))
    forged = frame(net, net.client, net.backends[0], datagram(40000, 5353))
    assert node.at(node.other, forged) == (PASS, forged)
    verdict, out = node.at(node.client, node.request(Protocol.UDP))
    asked = read(out)
    assert (verdict, asked.dst) == (PASS, net.backends[0])
    assert (asked.sport == 40000) is strict, "only a trusted source keeps its port"


# --- interfaces made anew


@BOTH
def test_a_backend_made_anew_is_found_again(node: Node, protocol: Protocol) -> None:
    """The pod's sandbox was restarted, and has its address again."""
    net = node.net
    node.establish(protocol)
    node.remove("backend")
    verdict, out = node.at(node.client, node.request(protocol))
    assert (verdict, read(out).dst) == (PASS, net.backends[0])
    assert node.bench.count("link_gone") == 1
    anew = node.add("anew", net.backends[0])
    verdict, out = node.at(anew, answer_of(node, protocol))
    assert (verdict, read(out).src) == (REDIRECT, net.vip)
    assert node.bench.count("moved") == 1
    assert node.at(node.client, node.request(protocol))[0] == REDIRECT
    assert node.bench.count("drop_foreign") == 0


@BOTH
def test_a_client_made_anew_is_found_again(node: Node, protocol: Protocol) -> None:
    net = node.net
    node.establish(protocol)
    node.remove("client")
    back = answer_of(node, protocol)
    assert node.at(node.backend, back) == (PASS, back)  # translated at the client's interface
    assert node.bench.count("link_gone") == 1
    anew = node.add("anew", net.client)
    assert node.at(anew, node.request(protocol))[0] == REDIRECT
    assert node.at(node.backend, back)[0] == REDIRECT


@BOTH
def test_an_address_that_moves_takes_its_flows_along(node: Node, protocol: Protocol) -> None:
    """The former interface is still there: the route alone says who is who."""
    net = node.net
    node.establish(protocol)
    second = node.add("second", net.backends[0])
    verdict, out = node.at(second, answer_of(node, protocol))
    assert (verdict, read(out).src) == (REDIRECT, net.vip)
    assert node.at(node.backend, answer_of(node, protocol))[0] == DROP
    assert node.bench.count("drop_foreign") == 1


@BOTH
def test_nobody_inherits_the_flows_of_a_pod_that_is_gone(node: Node, protocol: Protocol) -> None:
    node.establish(protocol)
    node.remove("backend")
    forged = answer_of(node, protocol)
    node.lead(node.net.backends[0], "client")
    assert node.at(node.other, forged)[0] == DROP
    assert node.bench.count("drop_foreign") == 1
