"""Flows: both directions, the fast path, who ends them, who may take their place, and what a full table does."""

from __future__ import annotations

import itertools
import socket

import numpy as np
import pytest

from hybrid_proxy.dataplane.kernel.conntrack import FlowKey
from hybrid_proxy.dataplane.kernel.netlink import AF
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.flows import foreign as module
from hybrid_proxy.dataplane.modes.ebpf.flows.collector import idle_limits
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.views.listing import flow_state
from hybrid_proxy.dataplane.options import EbpfOptions, Limits
from hybrid_proxy.dataplane.table import EMPTY, Protocol

from .kit import (
    BACKEND_HOST_MAC,
    BACKEND_MAC,
    DROP,
    HOST_MAC,
    HZ,
    NETS,
    PASS,
    POD_MAC,
    REDIRECT,
    Bench,
    Net,
    Seen,
    bench_with,
    datagram,
    frame,
    read,
    segment,
    service,
    syn,
    wait_jiffies,
)

FLAGS = layout.abi_constants()


def web(net: Net, *targets: int, vip: str | None = None, name: str = "default/web:http", port: int = 80):
    return service(vip or net.vip, port, [(net.backends[t], 8080) for t in targets or (0,)], name=name)


def dns(net: Net, *targets: int, vip: str | None = None, name: str = "default/dns:dns", port: int = 53):
    backends = [(net.backends[t], 5353) for t in targets or (0,)]
    return service(vip or net.vip, port, backends, name=name, protocol=Protocol.UDP)


# --- the fast path


def test_established_packets_are_handed_over(bench: Bench, net: Net) -> None:
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    assert bench.flow_count(net.family) == (2, 0)
    verdict, out = bench.ingress(frame(net, net.client, net.vip, segment(40000, 80, "PA", payload=b"GET")))
    assert verdict == REDIRECT
    seen = read(out)
    assert seen.tuple == there.tuple
    assert (seen.mac_dst, seen.mac_src) == (BACKEND_MAC, BACKEND_HOST_MAC)
    answer = frame(net, there.dst, there.src, segment(8080, 40000, "PA", payload=b"200"), from_backend=True)
    verdict, out = bench.ingress(answer)
    assert verdict == REDIRECT
    seen = read(out)
    assert seen.tuple == (net.vip, 80, net.client, 40000)
    assert (seen.mac_dst, seen.mac_src) == (POD_MAC, HOST_MAC)
    assert bench.count("fast") == 3  # the client's ACK, its data, the answer


def test_without_the_fast_path_answers_are_translated_at_the_client(net: Net) -> None:
    with bench_with(fast_path=0) as slow:
        slow.serve(web(net))
        there = slow.open_tcp(net, net.vip)
        verdict, _ = slow.ingress(frame(net, net.client, net.vip, segment(40000, 80, "PA")))
        assert verdict == PASS
        answer = frame(net, there.dst, there.src, segment(8080, 40000, "PA", payload=b"200"), from_backend=True)
        assert slow.ingress(answer) == (PASS, answer)
        verdict, out = slow.egress(answer)
        assert verdict == PASS
        assert read(out).tuple == (net.vip, 80, net.client, 40000)


def test_a_datagram_flow_is_handed_over_once_answered(bench: Bench, net: Net) -> None:
    bench.serve(dns(net))
    there = bench.open_udp(net, net.vip, answer=False)
    assert bench.ingress(frame(net, net.client, net.vip, datagram()))[0] == PASS
    back = frame(net, there.dst, there.src, datagram(5353, 40000), from_backend=True)
    assert bench.ingress(back) == (PASS, back)
    bench.open_udp(net, net.vip, lasting=True)
    assert bench.flow_count(net.family) == (2, 0)
    assert bench.ingress(frame(net, net.client, net.vip, datagram()))[0] == REDIRECT
    verdict, out = bench.ingress(back)
    assert verdict == REDIRECT
    assert read(out).tuple == (net.vip, 53, net.client, 40000)


# --- hairpin


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["tcp", "udp"])
def test_a_pod_reaches_itself_through_its_service(bench: Bench, net: Net, protocol: Protocol) -> None:
    me = net.backends[0]
    bench.serve(service(net.vip, 80, [(me, 8080)], protocol=protocol))
    first = syn() if protocol is Protocol.TCP else datagram(dport=80)
    verdict, out = bench.ingress(frame(net, me, net.vip, first))
    assert verdict == REDIRECT
    seen = read(out)
    port = given_port(seen)
    assert seen.tuple == (net.primary, port, me, 8080)
    assert (seen.mac_dst, seen.mac_src) == (POD_MAC, HOST_MAC)
    assert bench.egress(out) == (PASS, out)
    answer = segment(8080, port, "SA", 0, 1001) if protocol is Protocol.TCP else datagram(8080, port)
    verdict, out = bench.ingress(frame(net, me, net.primary, answer))
    assert verdict == REDIRECT
    seen = read(out)
    assert seen.tuple == (net.vip, 80, me, 40000)
    assert (seen.mac_dst, seen.mac_src) == (POD_MAC, HOST_MAC)
    assert bench.egress(out) == (PASS, out)
    following = segment(40000, 80, "A") if protocol is Protocol.TCP else datagram(dport=80)
    verdict, out = bench.ingress(frame(net, me, net.vip, following))
    assert (verdict, read(out).tuple) == (REDIRECT, (net.primary, port, me, 8080))


def test_two_pods_hairpin_with_one_source_port(bench: Bench, net: Net) -> None:
    """Both have the node's address then, and a port that none of the node's sockets has."""
    bench.serve(web(net, 0), web(net, 1, vip=net.vip2, name="default/b:http"))
    for me, vip in ((net.backends[0], net.vip), (net.backends[1], net.vip2)):
        verdict, out = bench.ingress(frame(net, me, vip, syn()))
        assert (verdict, read(out).tuple) == (REDIRECT, (net.primary, given_port(read(out)), me, 8080))


def given_port(seen: Seen) -> int:
    """The source port, one of those that the programs give."""
    first, last = Options().ebpf.masquerade_ports
    assert first <= seen.sport <= last
    return seen.sport


def test_without_an_address_of_the_node_a_hairpin_is_dropped(bench: Bench, net: Net) -> None:
    bench.node(primary4=0, primary6=0)
    bench.serve(web(net))
    assert bench.ingress(frame(net, net.backends[0], net.vip, syn()))[0] == DROP
    assert bench.flow_count(net.family) == (0, 0)


# --- the end of connections


Step = tuple[bool, str, int, int]  # from the client, flags, sequence number, acknowledgement

ENDS = [
    pytest.param([(True, "FA", 1001, 1), (False, "A", 1, 1002), (False, "FA", 1, 1002), (True, "A", 1002, 2)],
                 True,  id="client-first"),
    pytest.param([(False, "FA", 1, 1001), (True, "A", 1001, 2), (True, "FA", 1001, 2), (False, "A", 2, 1002)],
                 True,  id="backend-first"),
    pytest.param([(True, "FA", 1001, 1), (False, "FA", 1, 1002), (True, "A", 1002, 2)],
                 True,  id="three-segments"),
    pytest.param([(True, "FA", 1001, 1), (False, "FA", 1, 1001), (True, "A", 1002, 2), (False, "A", 2, 1002)],
                 True,  id="crossing"),
    pytest.param([(True, "FA", 1001, 1), (True, "FA", 1001, 1), (False, "A", 1, 1002), (False, "FA", 1, 1002),
                  (False, "FA", 1, 1002), (True, "A", 1002, 2)],
                 True,  id="retransmitted"),
    pytest.param([(True, "FA", 1001, 1), (False, "A", 1, 1002)],
                 False, id="half-closed"),
    pytest.param([(True, "FA", 1001, 1), (False, "FA", 1, 1001)],
                 False, id="nothing-acknowledged"),
    pytest.param([(True, "FA", 1001, 1), (False, "A", 1, 1001), (False, "FA", 1, 1001), (True, "A", 1002, 2)],
                 False, id="old-acknowledgement"),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "ended"), ENDS)
def test_a_pair_ends_when_both_fins_are_acknowledged(bench: Bench, net: Net, steps: list[Step], ended: bool) -> None:
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    for position, (up, flags, seq, ack) in enumerate(steps):
        assert bench.flow_count(net.family) == (2, 0), f"gone before step {position}"
        _, seen = bench.talk(net, there, net.vip, 80, 40000, flags, up=up, seq=seq, ack=ack)
        assert seen.tuple == (there.tuple if up else (net.vip, 80, net.client, 40000)), position
    assert bench.flow_count(net.family) == ((0, 0) if ended else (2, 0))


@pytest.mark.parametrize("steps", [param.values[0] for param in ENDS], ids=[param.id for param in ENDS])
def test_either_end_closes_in_the_flags_of_the_other_half_alone(bench: Bench, net: Net, steps: list[Step]) -> None:
    """Two processors that note two FINs at once write to different words, and neither note is lost."""
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    for up, flags, seq, ack in steps:
        before = own_flags(bench, net, up)
        bench.talk(net, there, net.vip, 80, 40000, flags, up=up, seq=seq, ack=ack)
        assert own_flags(bench, net, up) in (before, None)


def own_flags(bench: Bench, net: Net, up: bool) -> int | None:
    """Those of the client's half (`up`) or of the backend's; None: there is none."""
    reply = 0 if up else FLAGS["FLOW_REPLY"]
    rows = bench.flows(net.family).values()
    return next((int(row["flags"]) for row in rows if row["flags"] & FLAGS["FLOW_REPLY"] == reply), None)


@pytest.mark.parametrize("base", [0xFFFFFFFF, 0x7FFFFFFF, 0xFFFFFFF0])
def test_the_end_is_seen_across_the_wrap_of_sequence_numbers(bench: Bench, net: Net, base: int) -> None:
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip, start=(base - 1) & 0xFFFFFFFF)
    data = b"x" * 100
    end = (base + 101) & 0xFFFFFFFF
    for up, flags, seq, ack, payload in (
        (True, "FA", base, 1, data), (False, "FA", 1, end, b""), (True, "A", end, 2, b""),
    ):  # fmt: skip
        bench.talk(net, there, net.vip, 80, 40000, flags, up=up, seq=seq, ack=ack, payload=payload)
    assert bench.flow_count(net.family) == (0, 0)


@pytest.mark.parametrize("padding", [0, 6])
def test_a_frame_padded_to_the_ethernet_minimum_ends_a_connection(bench: Bench, padding: int) -> None:
    net = NETS[4]
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    bench.ingress(frame(net, net.client, net.vip, segment(40000, 80, "FA", 1001, 1)) + bytes(padding))
    bench.talk(net, there, net.vip, 80, 40000, "FA", up=False, seq=1, ack=1002)
    bench.talk(net, there, net.vip, 80, 40000, "A", up=True, seq=1002, ack=2)
    assert bench.flow_count(4) == (0, 0)


def test_a_refused_connection_leaves_nothing_that_lasts(bench: Bench, net: Net) -> None:
    """A backend that answers every SYN by a reset must not fill the table that nothing evicts."""
    bench.serve(web(net))
    for sport in range(40000, 40020):
        verdict, out = bench.ingress(frame(net, net.client, net.vip, syn(sport)))
        there = read(out)
        reset = frame(net, there.dst, there.src, segment(there.dport, there.sport, "RA", 0, 1001), from_backend=True)
        assert bench.ingress(reset) == (PASS, reset)
        verdict, out = bench.egress(reset)
        assert verdict == PASS
        assert read(out).tuple == (net.vip, 80, net.client, sport)
    assert bench.flow_count(net.family)[0] == 0


def test_a_flood_of_answered_syns_leaves_nothing_that_lasts(bench: Bench, net: Net) -> None:
    """Every SYN gets its SYN/ACK, none is followed by anything."""
    bench.serve(web(net))
    for sport in range(40000, 40050):
        there = read(bench.ingress(frame(net, net.client, net.vip, syn(sport)))[1])
        back = frame(net, there.dst, there.src, segment(there.dport, there.sport, "SA", 0, 1001), from_backend=True)
        assert read(bench.egress(back)[1]).tuple == (net.vip, 80, net.client, sport)
    assert bench.flow_count(net.family) == (0, 100)


@pytest.mark.parametrize("up", [True, False], ids=["by-the-client", "by-the-backend"])
def test_a_syn_after_a_reset_chooses_anew(bench: Bench, net: Net, up: bool) -> None:
    bench.serve(web(net, 0))
    there = bench.open_tcp(net, net.vip)
    bench.talk(net, there, net.vip, 80, 40000, "R", up=up, seq=1001 if up else 1, ack=1)
    bench.serve(web(net, 1))
    verdict, out = bench.ingress(frame(net, net.client, net.vip, syn()))
    assert verdict == PASS
    assert read(out).tuple == (net.client, 40000, net.backends[1], 8080)
    assert bench.flow_count(net.family) == (0, 2)


IDLE = [
    # flags of one half                                  protocol       seconds
    pytest.param(["FLOW_ESTABLISHED"],                   Protocol.TCP,  86400, id="established"),
    pytest.param([],                                     Protocol.TCP,  60,    id="opening"),
    pytest.param(["FLOW_REPLIED"],                      Protocol.TCP,  60,    id="answered"),
    pytest.param(["FLOW_FIN"],                           Protocol.TCP,  3600,  id="one-fin"),
    pytest.param(["FLOW_FIN", "FLOW_FIN_ACKED"],         Protocol.TCP,  3600,  id="half-closed"),
    pytest.param(["FLOW_PEER_FIN"],                     Protocol.TCP,  3600,  id="other-fin"),
    pytest.param(["FLOW_DSR", "FLOW_ESTABLISHED"],       Protocol.TCP,  86400, id="dsr"),
    pytest.param(["FLOW_DSR", "FLOW_FIN"],               Protocol.TCP,  120,   id="dsr-fin"),
    pytest.param(["FLOW_FIN", "FLOW_PEER_FIN"],          Protocol.TCP,  30,    id="both-fins-one-acknowledged"),
    pytest.param(["FLOW_FIN", "FLOW_FIN_ACKED", "FLOW_PEER_FIN"], Protocol.TCP, 10, id="both-fins"),
    pytest.param(["FLOW_RESET"],                         Protocol.TCP,  10,    id="reset"),
    pytest.param([],                                     Protocol.UDP,  120,   id="udp"),
    pytest.param([],                                     Protocol.SCTP, 210,   id="sctp"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "protocol", "seconds"), IDLE)
def test_idle_limits(flags: list[str], protocol: Protocol, seconds: int) -> None:
    keys = np.zeros(1, dtype=layout.dtype_of("flow4_key"))
    values = np.zeros(1, dtype=layout.dtype_of("flow"))
    keys["protocol"] = protocol
    values["flags"] = sum(FLAGS[flag] for flag in flags)
    assert idle_limits(keys, values, Options()).tolist() == [seconds]


@pytest.mark.parametrize(("flags", "state"), [
    pytest.param([],                                                          "opening",     id="opening"),
    pytest.param(["FLOW_REPLIED"],                                            "opening",     id="answered"),
    pytest.param(["FLOW_ESTABLISHED"],                                        "established", id="established"),
    pytest.param(["FLOW_ESTABLISHED", "FLOW_FIN", "FLOW_FIN_ACKED"],          "half-closed", id="half-closed"),
    pytest.param(["FLOW_ESTABLISHED", "FLOW_FIN_ACKED", "FLOW_PEER_FIN"],     "closed",      id="both-fins"),
    pytest.param(["FLOW_ESTABLISHED", "FLOW_RESET"],                          "closed",      id="reset"),
])  # fmt: skip
def test_a_flow_is_called_what_its_flags_say(flags: list[str], state: str) -> None:
    assert flow_state(sum(FLAGS[flag] for flag in flags), Protocol.TCP) == state


def test_datagrams_have_no_handshake_that_could_be_opening() -> None:
    """A question and its answer, as most of DNS, last less than two seconds."""
    states = [flow_state(FLAGS[flag] if flag else 0, Protocol.UDP) for flag in ("", "FLOW_ESTABLISHED")]
    assert states == ["short", "established"]


def test_a_half_closed_connection_may_be_silent_for_long(bench: Bench, net: Net) -> None:
    """A client that has sent its request and shut its side down, and a backend that thinks."""
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    bench.talk(net, there, net.vip, 80, 40000, "FA", up=True, seq=1001, ack=1)
    bench.talk(net, there, net.vip, 80, 40000, "A", up=False, seq=1, ack=1002)
    bench.age_flows(net.family, 600 * HZ)
    bench.gc.scan()
    _, seen = bench.talk(net, there, net.vip, 80, 40000, "PA", up=False, seq=1, ack=1002, payload=b"result")
    assert seen.tuple == (net.vip, 80, net.client, 40000)


# --- the sweep


def test_the_sweep_takes_idle_flows_only_and_both_halves(bench: Bench, net: Net) -> None:
    bench.serve(web(net, *range(20)), dns(net, *range(20)))
    for sport in range(40000, 40040):
        bench.open_tcp(net, net.vip, 80, sport)
        bench.open_udp(net, net.vip, 53, sport, lasting=True)
    assert bench.flow_count(net.family) == (160, 0)
    bench.age_flows(net.family, 181 * HZ)
    for sport in range(40000, 40010):  # these are used again in time
        bench.open_udp(net, net.vip, 53, sport)
    bench.gc.scan()
    left = bench.flows(net.family)
    assert len(left) == 80 + 20
    assert {key[1] for key, value in left.items() if key[3] == 53} == set(range(40000, 40010))
    for (src, sport, dst, dport), value in left.items():  # every half has its other one
        row = value
        pair = (
            layout.address_text(row["daddr"].tobytes(), net.family), int(layout.swap16([int(row["dport"])])[0]),
            layout.address_text(row["saddr"].tobytes(), net.family), int(layout.swap16([int(row["sport"])])[0]),
        )  # fmt: skip
        assert pair in left, (src, sport, dst, dport)


def test_the_sweep_looks_again_before_it_deletes(bench: Bench, net: Net) -> None:
    """User space read the time stamps a while ago; a flow used since then stays."""
    bench.serve(dns(net))
    bench.open_udp(net, net.vip, lasting=True)
    bench.age_flows(net.family, 181 * HZ)
    keys, values = flow_arrays(bench.maps.maps[f"flows{net.family}"], net.family)
    bench.open_udp(net, net.vip)
    bench.gc.forget_idle(net.family, keys, values)
    assert bench.flow_count(net.family) == (2, 0)


def test_flows_of_others_stay_as_long_as_conntrack_knows_them(
    bench: Bench, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their age: nothing passes here until the programs are attached. A flow of ours is never theirs."""
    bench.serve(dns(net))
    bench.open_udp(net, net.vip, lasting=True)
    ours, theirs = (client_side(net, port) for port in (40000, 40001))
    known = {ours, theirs}
    monkeypatch.setattr(module, "translated_keys", lambda _, __: frozenset(known))
    monkeypatch.setattr(module, "half_open_keys", lambda _: frozenset())
    foreign = foreign_flows(bench)
    foreign.read()
    assert bench.flow_count(net.family) == (3, 0)
    bench.age_flows(net.family, 1000 * HZ)
    bench.open_udp(net, net.vip)
    bench.gc.scan()
    assert bench.flow_count(net.family) == (3, 0)
    assert bench.ingress(frame(net, net.client, net.vip, datagram(40001)))[0] == PASS
    known.clear()
    foreign.read()
    assert bench.flow_count(net.family) == (2, 0)
    assert not any(value["flags"] & FLAGS["FLOW_OTHERS"] for value in bench.flows(net.family).values())


def test_a_look_that_began_before_a_service_came_does_not_forget_its_flows(
    bench: Bench, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conntrack is read while a sync runs; what a poll finds may be older than what it is compared with."""
    theirs = client_side(net, 40001)
    foreign = foreign_flows(bench)

    def come(*_: object) -> frozenset[FlowKey]:
        """While a look reads; what it has read is without the service."""
        monkeypatch.setattr(module, "translated_keys", lambda *_: frozenset({theirs}))
        foreign.begin_move(EMPTY, EMPTY)
        foreign.enter_datagrams(["kube-system/dns"])
        return frozenset()

    for name in ("half_open_keys", "answer_keys"):
        monkeypatch.setattr(module, name, lambda _: frozenset())
    monkeypatch.setattr(module, "translated_keys", come)
    foreign.read()
    assert foreign.known == {theirs}
    assert bench.flow_count(net.family) == (1, 0)
    monkeypatch.setattr(module, "translated_keys", lambda *_: frozenset())
    foreign.read()
    assert bench.flow_count(net.family) == (0, 0)


def test_a_port_that_conntrack_gave_away_for_a_backend_is_not_given_away_again(
    bench: Bench, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.serve(web(net))
    kind = AF[net.family]
    ends = [socket.inet_pton(kind, net.backends[0]), (8080).to_bytes(2, "big"),
            socket.inet_pton(kind, net.client), (40000).to_bytes(2, "big")]  # fmt: skip
    answers = frozenset({FlowKey(net.family, Protocol.TCP, *ends)})
    for name in ("translated_keys", "half_open_keys"):
        monkeypatch.setattr(module, name, lambda *_: frozenset())
    monkeypatch.setattr(module, "answer_keys", lambda _: answers)
    foreign = foreign_flows(bench)
    foreign.read()
    there = bench.open_tcp(net, net.vip)
    assert there.sport != 40000
    answer = frame(net, net.backends[0], net.client, segment(8080, 40000, "PA", payload=b"theirs"), from_backend=True)
    assert bench.ingress(answer)[0] == PASS
    answers = frozenset()
    foreign.read()
    assert bench.flow_count(net.family) == (2, 0)


def test_half_open_connections_of_others_do_not_fill_the_table(
    bench: Bench, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    flows = bench.maps.flows()
    keys = [FlowKey(net.family, Protocol.TCP, number.to_bytes(4, "big") * (1 if net.family == 4 else 4), b"12",
                    *client_side(net, 1)[4:]) for number in range(flows[4].entries // 8 + 1)]  # fmt: skip
    monkeypatch.setattr(module, "translated_keys", lambda _, __: frozenset())
    foreign = foreign_flows(bench)
    for count in (len(keys), len(keys) - 1):
        monkeypatch.setattr(module, "half_open_keys", lambda _, count=count: frozenset(keys[:count]))
        foreign.read()
        assert bench.flow_count(net.family) == (0 if count == len(keys) else count, 0)
        foreign.check_room()


def foreign_flows(bench: Bench) -> module.ForeignFlows:
    return module.ForeignFlows(bench.maps.flows(), bench.inspect.program("leave"), lambda: None)


def client_side(net: Net, port: int) -> FlowKey:
    kind = AF[net.family]
    ends = [socket.inet_pton(kind, net.client), port.to_bytes(2, "big"), socket.inet_pton(kind, net.vip), b"\0\x35"]
    return FlowKey(net.family, Protocol.UDP, *ends)


def test_a_packet_refreshes_both_halves(bench: Bench, net: Net) -> None:
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    for up in (True, False):
        bench.age_flows(net.family, 100 * HZ)
        bench.talk(net, there, net.vip, 80, 40000, "A", up=up, seq=1001, ack=1)
        now = bench.clock()
        ages = [(now - int(value["seen"])) & 0xFFFFFFFF for value in bench.flows(net.family).values()]
        assert len(ages) == 2
        assert max(ages) < HZ


# --- backends that go


@pytest.mark.parametrize("deleted", [False, True], ids=["its backend", "the whole service"])
def test_tcp_stays_with_a_backend_that_is_gone(bench: Bench, net: Net, deleted: bool) -> None:
    bench.serve(web(net, 0))
    there = bench.open_tcp(net, net.vip)
    bench.serve(*[] if deleted else [web(net, 1)])
    for _ in range(3):
        bench.settle()
    _, seen = bench.talk(net, there, net.vip, 80, 40000, "PA", up=True, seq=1001, ack=1, payload=b"more")
    assert seen.tuple == there.tuple
    _, seen = bench.talk(net, there, net.vip, 80, 40000, "PA", up=False, seq=1, ack=1005, payload=b"answer")
    assert seen.tuple == (net.vip, 80, net.client, 40000)


def test_what_waited_for_flows_returns_when_they_end(bench: Bench, net: Net) -> None:
    bench.settle()
    ids = (
        bench.store.plan.pools.backends.left,
        bench.store.plan.pools.services.left,
        bench.store.plan.pools.slots.in_use,
    )
    bench.serve(web(net, 0))
    there = bench.open_tcp(net, net.vip)
    bench.serve()
    for _ in range(3):
        bench.settle()
    assert len(bench.store.plan.pools) == 2
    bench.talk(net, there, net.vip, 80, 40000, "R", up=True, seq=1001, ack=1)
    bench.age_flows(net.family, 11 * HZ)
    for _ in range(3):
        bench.settle()
    assert len(bench.store.plan.pools) == 0
    assert ids == (
        bench.store.plan.pools.backends.left,
        bench.store.plan.pools.services.left,
        bench.store.plan.pools.slots.in_use,
    )
    assert not bench.maps.bitmap("service_addresses").any()
    assert not bench.maps.bitmap("backend_sockets").any()


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "never-answered"])
def test_datagrams_leave_a_backend_that_is_gone(bench: Bench, net: Net, answered: bool) -> None:
    bench.serve(dns(net, 0))
    bench.open_udp(net, net.vip, lasting=answered)
    bench.serve(dns(net, 1))
    assert bench.open_udp(net, net.vip).dst == net.backends[1]
    assert bench.count("stale_backend") == 1


def test_datagrams_stay_with_a_backend_that_still_serves(bench: Bench, net: Net) -> None:
    """Endpoints that end but still answer leave the route, not the flows."""
    bench.serve(dns(net, 0))
    bench.open_udp(net, net.vip)
    draining = service(net.vip, 53, [(net.backends[1], 5353)], name="default/dns:dns", protocol=Protocol.UDP,
                       serving=[(net.backends[0], 5353)])  # fmt: skip
    bench.serve(draining)
    bench.settle()
    assert bench.open_udp(net, net.vip).dst == net.backends[0]
    assert bench.open_udp(net, net.vip, sport=40001).dst == net.backends[1]


def test_a_silent_client_is_not_pinned_to_a_reused_backend_number(net: Net) -> None:
    """The client says nothing while its backend goes and the number is given to a new one of the same service."""
    with bench_with(Options(ebpf=EbpfOptions(limits=Limits(services=16, backends=8, slots=64, flows=64)))) as small:
        small.serve(dns(net, 0))
        small.open_udp(net, net.vip)
        old = small.store.plan.installed["default/dns"][0].ids[0]
        for target in range(1, 20):
            small.serve(dns(net, target))
            small.settle()
            if small.store.plan.installed["default/dns"][0].ids[0] == old:
                break
        else:
            pytest.fail("the number never came back")
        assert small.open_udp(net, net.vip).dst == net.backends[target]


# --- two flows, one reply tuple


def both(net: Net) -> list[object]:
    return [web(net, 0), web(net, 0, vip=net.vip2, name="default/other:http")]


def test_two_services_of_one_backend_and_one_source_port(bench: Bench, net: Net) -> None:
    bench.serve(*both(net))
    first = bench.open_tcp(net, net.vip)
    second = bench.open_tcp(net, net.vip2)
    assert first.sport == 40000
    assert 1024 <= second.sport < 29696
    assert second.sport != 40000
    assert bench.count("tuple_collision") == 1
    for there, vip in ((first, net.vip), (second, net.vip2)):
        _, seen = bench.talk(net, there, vip, 80, 40000, "PA", up=True, seq=1001, ack=1)
        assert seen.tuple == there.tuple
        _, seen = bench.talk(net, there, vip, 80, 40000, "PA", up=False, seq=1, ack=1001)
        assert seen.tuple == (vip, 80, net.client, 40000)


def test_two_datagram_services_of_one_backend_and_one_source_port(bench: Bench, net: Net) -> None:
    bench.serve(dns(net), dns(net, vip=net.vip2, name="default/other:dns"))
    first, second = bench.open_udp(net, net.vip), bench.open_udp(net, net.vip2)
    assert first.sport == 40000
    assert second.sport != 40000
    assert bench.open_udp(net, net.vip).tuple == first.tuple
    assert bench.open_udp(net, net.vip2).tuple == second.tuple


def test_a_service_flow_first_then_directly(bench: Bench, net: Net) -> None:
    bench.serve(web(net))
    through = bench.open_tcp(net, net.vip)
    verdict, out = bench.ingress(frame(net, net.client, net.backends[0], syn(dport=8080)))
    assert verdict == PASS
    direct = read(out)
    assert direct.sport != 40000
    assert (direct.src, direct.dst, direct.dport) == (net.client, net.backends[0], 8080)
    back = frame(net, direct.dst, direct.src, segment(8080, direct.sport, "SA", 0, 1001), from_backend=True)
    verdict, out = bench.egress(back)
    assert read(out).tuple == (net.backends[0], 8080, net.client, 40000)
    verdict, out = bench.ingress(frame(net, net.client, net.backends[0], segment(40000, 8080, "PA")))
    assert read(out).tuple == direct.tuple
    _, seen = bench.talk(net, through, net.vip, 80, 40000, "PA", up=False, seq=1, ack=1001)
    assert seen.tuple == (net.vip, 80, net.client, 40000)


def test_directly_first_then_through_a_service(bench: Bench, net: Net) -> None:
    """Nobody saw the direct connection begin: the backend's answer, which is none to a SYN, shows that it is there."""
    bench.serve(web(net))
    first = read(bench.ingress(frame(net, net.client, net.vip, syn()))[1])
    assert first.sport == 40000
    challenge = frame(net, net.backends[0], net.client, segment(8080, 40000, "A", 77, 88), from_backend=True)
    assert bench.egress(challenge) == (PASS, challenge)
    second = read(bench.ingress(frame(net, net.client, net.vip, syn()))[1])
    assert second.sport != 40000
    assert second.dst == net.backends[0]
    back = frame(net, second.dst, second.src, segment(8080, second.sport, "SA", 0, 1001), from_backend=True)
    assert read(bench.egress(back)[1]).tuple == (net.vip, 80, net.client, 40000)
    data = frame(net, net.backends[0], net.client, segment(8080, 40000, "PA", 77, 88), from_backend=True)
    assert bench.egress(data) == (PASS, data)
    assert bench.ingress(data) == (PASS, data)


@pytest.mark.parametrize("first", ["direct", "service"])
def test_a_tuple_is_remembered_after_its_connection(bench: Bench, net: Net, first: str) -> None:
    """The backend keeps it in TIME_WAIT, and would refuse or ignore another conversation's SYN there."""
    bench.calm()
    bench.serve(web(net))
    direct, through = frame(net, net.client, net.backends[0], syn(dport=8080)), frame(net, net.client, net.vip, syn())
    there, then = (direct, through) if first == "direct" else (through, direct)
    assert read(bench.ingress(there)[1]).sport == 40000
    bench.forget_flows()
    assert read(bench.ingress(there)[1]).sport == 40000, "its own tuple may be used again"
    bench.forget_flows()
    moved = read(bench.ingress(then)[1])
    assert moved.sport != 40000
    assert moved.dst == net.backends[0]
    answer = segment(8080, moved.sport, "SA", 0, 1001)
    back = bench.egress(frame(net, net.backends[0], net.client, answer, from_backend=True))
    expected = (net.backends[0], 8080) if first == "service" else (net.vip, 80)
    assert read(back[1]).tuple == (*expected, net.client, 40000)


@pytest.mark.parametrize(("seconds", "moves"), [(64, True), (72, False)])
def test_a_tuple_is_remembered_until_the_backend_has_forgotten_it(
    bench: Bench, net: Net, seconds: int, moves: bool
) -> None:
    """TIME_WAIT lasts 60 seconds and what the kernel's timers are late: 62.1 were seen, an eighth is the most."""
    bench.serve(web(net))
    direct = frame(net, net.client, net.backends[0], syn(dport=8080))
    assert bench.ingress(direct) == (PASS, direct)
    bench.age_marks(seconds * HZ)
    assert (read(bench.ingress(frame(net, net.client, net.vip, syn()))[1]).sport != 40000) is moves


def test_the_tuples_of_all_ports_of_a_client_are_remembered(bench: Bench, net: Net) -> None:
    """A tuple that a full bucket forgot would cost another conversation's SYN a second."""
    bench.serve(web(net))
    direct = frame(net, net.client, net.backends[0], syn(dport=8080))
    sport, ports = 34 if net.family == 4 else 54, range(1024, 61024)
    for port in ports:
        bench.ingress(direct[:sport] + port.to_bytes(2, "big") + direct[sport + 2 :])
    marks = bench.maps.maps["timewait"].view(layout.dtype_of("timewait_bucket"))["entries"]
    assert np.count_nonzero(marks) == len(ports)


def test_a_long_connection_is_remembered_when_its_tuple_is_wanted_before_its_last_segment(
    bench: Bench, net: Net
) -> None:
    bench.serve(*both(net))
    there = bench.open_tcp(net, net.vip)
    bench.age_marks(3600 * HZ)
    bench.talk(net, there, net.vip, 80, 40000, "FA", up=False, seq=1, ack=1001)
    bench.talk(net, there, net.vip, 80, 40000, "FA", up=True, seq=1001, ack=2)
    assert bench.open_tcp(net, net.vip2).sport != 40000


def test_datagrams_directly_first_then_through_a_service(bench: Bench, net: Net) -> None:
    bench.serve(dns(net))
    direct = frame(net, net.client, net.backends[0], datagram(dport=5353))
    assert bench.ingress(direct) == (PASS, direct)
    through = bench.open_udp(net, net.vip)
    assert through.sport != 40000
    back = frame(net, net.backends[0], net.client, datagram(5353, 40000), from_backend=True)
    assert bench.egress(back) == (PASS, back)


def test_a_direct_conversation_keeps_its_claim_as_long_as_it_lasts(bench: Bench, net: Net) -> None:
    bench.serve(dns(net))
    direct = frame(net, net.client, net.backends[0], datagram(dport=5353))
    back = frame(net, net.backends[0], net.client, datagram(5353, 40000), from_backend=True)
    for _ in range(3):
        assert bench.ingress(direct) == (PASS, direct)
        assert bench.egress(back) == (PASS, back)
        for table in ("flows", "half_open"):
            bench.age_flows(net.family, 100 * HZ, table)
    assert bench.ingress(direct) == (PASS, direct)
    assert bench.open_udp(net, net.vip).sport != 40000
    assert bench.egress(back) == (PASS, back)


def test_a_claim_that_nobody_used_for_long_makes_way(bench: Bench, net: Net) -> None:
    bench.serve(dns(net), dns(net, vip=net.vip2, name="default/other:dns"))
    bench.open_udp(net, net.vip)
    bench.age_flows(net.family, 181 * HZ, "half_open")
    assert bench.open_udp(net, net.vip2).sport == 40000
    assert bench.count("tuple_collision") == 0


def test_a_half_closed_connection_keeps_its_tuple(bench: Bench, net: Net) -> None:
    bench.serve(*both(net))
    there = bench.open_tcp(net, net.vip)
    bench.talk(net, there, net.vip, 80, 40000, "FA", up=False, seq=1, ack=1001)
    bench.talk(net, there, net.vip, 80, 40000, "A", up=True, seq=1001, ack=2)
    assert bench.open_tcp(net, net.vip2).sport != 40000
    _, seen = bench.talk(net, there, net.vip, 80, 40000, "A", up=False, seq=2, ack=1001)
    assert seen.tuple == (net.vip, 80, net.client, 40000)


def test_when_no_port_is_left_the_packet_is_dropped_not_mixed_up(net: Net) -> None:
    vips = [f"10.96.0.{n}" if net.family == 4 else f"fd00:96::{n:x}" for n in range(10, 16)]
    with bench_with(Options(ebpf=EbpfOptions(masquerade_ports=(2000, 2003)))) as narrow:
        backend = [(net.backends[0], 8080)]
        narrow.serve(*(service(vip, 80, backend, name=f"default/web-{vip}:http") for vip in vips))
        ports = {narrow.open_tcp(net, vip).sport for vip in vips[:5]}
        assert ports == {40000, 2000, 2001, 2002, 2003}
        verdict, _ = narrow.ingress(frame(net, net.client, vips[5], syn()))
        assert verdict == DROP
        assert narrow.count("drop_no_port") == 1


# --- floods and full tables


def raw_syns(net: Net, vip: str, number: int) -> list[bytes]:
    """Many SYNs of many clients, made from one by writing into its bytes; checksums are left wrong."""
    packet = bytearray(frame(net, net.client, vip, syn()))
    source, port = (26, 34) if net.family == 4 else (22, 54)
    made = []
    for i in range(number):
        packet[source + (2 if net.family == 4 else 14) : source + (4 if net.family == 4 else 16)] = bytes(
            [1 + i // 60000 % 200, 100 + i // 30000 % 100]
        )
        packet[port : port + 2] = (1024 + i % 30000).to_bytes(2, "big")
        made.append(bytes(packet))
    return made


def test_a_flood_of_syns_does_not_evict_established_connections(net: Net) -> None:
    options = Options(ebpf=EbpfOptions(limits=Limits(services=64, backends=256, slots=512, flows=1024)))
    with bench_with(options) as small:
        small.serve(web(net, *range(10)))
        there = {sport: small.open_tcp(net, net.vip, 80, sport) for sport in range(40000, 40200)}
        limit = small.maps.maps[f"half_open{net.family}"].entries
        for packet in raw_syns(net, net.vip, 2 * limit):
            small.ingress(packet)
        assert small.flow_count(net.family)[0] == 400
        for sport, seen in there.items():
            _, up = small.talk(net, seen, net.vip, 80, sport, "PA", up=True, seq=1001, ack=1)
            assert up.tuple == seen.tuple
            _, down = small.talk(net, seen, net.vip, 80, sport, "PA", up=False, seq=1, ack=1001)
            assert down.tuple == (net.vip, 80, net.client, sport)
        late = small.open_tcp(net, net.vip, 80, 50000)
        assert late.sport == 50000


def test_a_full_table_of_flows_keeps_serving(net: Net) -> None:
    with bench_with(Options(ebpf=EbpfOptions(limits=Limits(services=64, backends=256, slots=512, flows=64)))) as small:
        small.serve(web(net, *range(10)), dns(net, *range(10)))
        there = {sport: small.open_tcp(net, net.vip, 80, sport) for sport in range(40000, 40100)}
        assert small.count("flow_full") > 0
        for sport, seen in there.items():
            for flags, payload in (("PA", b"request"), ("A", b"")):
                _, up = small.talk(net, seen, net.vip, 80, sport, flags, up=True, seq=1001, ack=1, payload=payload)
                assert up.tuple == seen.tuple
                _, down = small.talk(net, seen, net.vip, 80, sport, flags, up=False, seq=1, ack=1001, payload=payload)
                assert down.tuple == (net.vip, 80, net.client, sport), f"port {sport}"
        for sport in range(40000, 40050):
            first = small.open_udp(net, net.vip, 53, sport)
            assert small.open_udp(net, net.vip, 53, sport).tuple == first.tuple
        assert small.count("tuple_collision") == 0


# --- choosing


# --- affinity


def destinations(bench: Bench, net: Net, number: int, client: str | None = None) -> set[str]:
    ports = itertools.islice(bench.client_ports, number)
    return {read(bench.ingress(frame(net, client or net.client, net.vip, syn(p)))[1]).dst for p in ports}


def test_a_client_with_affinity_stays(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(b, 8080) for b in net.backends], affinity=10800))
    assert len(destinations(bench, net, 50)) == 1
    others = {frozenset(destinations(bench, net, 5, f"{net.client}{n}")) for n in range(9)}
    assert all(len(chosen) == 1 for chosen in others)
    assert len(others) > 1


def test_affinity_ends_when_unused_for_its_time(net: Net) -> None:
    with bench_with() as quick:
        quick.calm()
        quick.store.writer.hz = 4  # seconds of 4 jiffies
        quick.serve(service(net.vip, 80, [(b, 8080) for b in net.backends], affinity=5))
        seen = set()
        for _ in range(12):
            seen |= destinations(quick, net, 3)
            wait_jiffies(21)
        assert len(seen) > 1
        seen = set()
        quick.store.writer.hz = HZ
        quick.serve(service(net.vip, 80, [(b, 8080) for b in net.backends], affinity=60))
        for _ in range(5):
            seen |= destinations(quick, net, 3)
            wait_jiffies(21)
        assert len(seen) == 1


def test_affinity_does_not_hold_on_to_a_backend_that_left(bench: Bench, net: Net) -> None:
    bench.calm()
    everybody = [(b, 8080) for b in net.backends]
    bench.serve(service(net.vip, 80, everybody, affinity=10800))
    (first,) = destinations(bench, net, 5)
    rest = [(b, p) for b, p in everybody if b != first]
    bench.serve(service(net.vip, 80, rest, affinity=10800, serving=[(first, 8080)]))
    (second,) = destinations(bench, net, 20)
    assert second != first
    bench.serve(service(net.vip, 80, everybody, affinity=10800))
    assert destinations(bench, net, 20) == {second}


def test_affinity_is_each_services_own(bench: Bench, net: Net) -> None:
    bench.calm()
    everybody = [(b, 8080) for b in net.backends]
    chosen = set()
    for number in range(12):
        bench.serve(service(net.vip, 80, everybody, affinity=10800, name=f"default/s{number}:http"))
        chosen |= destinations(bench, net, 3)
    assert len(chosen) > 1
