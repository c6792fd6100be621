"""Who may end a connection's flow: resets, FINs and SYNs with trusted sequence numbers (RFC 9293, RFC 5961)."""

from __future__ import annotations

import pytest

from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays

from .kit import HZ, PASS, Bench, Net, Seen, frame, read, segment, syn
from .test_flows import web

FLAGS = layout.abi_constants()
MAX = 1 << 32
CLIENT, BACKEND = 1001, 1  # the next number of each side, after the handshake


def state(bench: Bench, net: Net) -> int:
    """Flags of all halves together."""
    flags = 0
    for value in bench.flows(net.family).values():
        flags |= int(value["flags"])
    return flags


def say(bench: Bench, net: Net, there: Seen, flags: str, *, up: bool, seq: int, ack: int = 0) -> None:
    """A segment from either side; the ends judge it, whatever it is: it is passed on."""
    _, seen = bench.talk(net, there, net.vip, 80, 40000, flags, up=up, seq=seq % MAX, ack=ack % MAX)
    assert seen.tuple == (there.tuple if up else (net.vip, 80, net.client, 40000))


RESETS = [
    pytest.param(0, "FLOW_RESET", id="what-was-acknowledged"),
    pytest.param(1460, "FLOW_DOUBTED", id="after-data-under-way"),
    pytest.param(65536, "FLOW_DOUBTED", id="the-window's-end"),
    pytest.param(65537, "", id="beyond-the-window"),
    pytest.param(-1, "", id="before"),
    pytest.param(1 << 31, "", id="anywhere"),
]
SECONDS = {"FLOW_RESET": 11, "FLOW_DOUBTED": 61}  # after which such a flow is forgotten


@pytest.mark.parametrize("up", [True, False], ids=["from-the-client", "from-the-backend"])
@pytest.mark.parametrize(("distance", "judged"), RESETS)
def test_a_reset_counts_where_it_can_be_the_senders(
    bench: Bench, net: Net, up: bool, distance: int, judged: str
) -> None:
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    say(bench, net, there, "PA", up=False, seq=BACKEND, ack=CLIENT)
    say(bench, net, there, "R", up=up, seq=(CLIENT if up else BACKEND) + distance)
    assert state(bench, net) & (FLAGS["FLOW_RESET"] | FLAGS["FLOW_DOUBTED"]) == FLAGS.get(judged, 0)
    assert bench.count("out_of_window") == (0 if judged else 1)
    bench.age_flows(net.family, (SECONDS.get(judged, 61) - 2) * HZ)
    bench.gc.scan()
    assert bench.flow_count(net.family) == (2, 0)
    bench.age_flows(net.family, 3 * HZ)
    bench.gc.scan()
    assert (bench.flow_count(net.family) == (0, 0)) is bool(judged)


@pytest.mark.parametrize("up", [True, False], ids=["from-the-client", "from-the-backend"])
@pytest.mark.parametrize(("distance", "received", "judged"), [
    pytest.param(1 << 20, 0, "FLOW_DOUBTED", id="after-much-data"),
    pytest.param(1 << 20, 1000, "FLOW_DOUBTED", id="with-the-first-acknowledgement-of-some"),
    pytest.param(1 << 20, -1, "", id="with-an-old-acknowledgement"),
    pytest.param(1 << 20, 1 << 20, "", id="with-another-acknowledgement"),
    pytest.param((1 << 26) + 1, 0, "", id="beyond-all-windows"),
])  # fmt: skip
def test_a_reset_that_acknowledges_what_its_sender_received_may_follow_all_data_under_way(
    bench: Bench, net: Net, up: bool, distance: int, received: int, judged: str
) -> None:
    """A process that is killed while it streams resets its connection far ahead of what was acknowledged."""
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    say(bench, net, there, "PA", up=True, seq=CLIENT, ack=BACKEND)
    say(bench, net, there, "PA", up=False, seq=BACKEND, ack=CLIENT)
    own, others = (CLIENT, BACKEND) if up else (BACKEND, CLIENT)
    say(bench, net, there, "RA", up=up, seq=own + distance, ack=others + received)
    assert state(bench, net) & (FLAGS["FLOW_RESET"] | FLAGS["FLOW_DOUBTED"]) == FLAGS.get(judged, 0)


def arrive(bench: Bench, net: Net) -> None:
    """What either end has acknowledged is not known, as of flows that another mode had so far."""
    known = bench.maps.maps[f"flows{net.family}"]
    for key, value in zip(*flow_arrays(known, net.family), strict=True):
        value["ack"] = 0
        known.update(key.tobytes(), value.tobytes())


@pytest.mark.parametrize("up", [True, False], ids=["from-the-client", "from-the-backend"])
@pytest.mark.parametrize("flags", ["FA", "R"])
def test_the_end_of_a_flow_that_came_from_another_mode_is_seen_at_once(
    bench: Bench, net: Net, up: bool, flags: str
) -> None:
    """Its first packet here is its last one."""
    far = 3 << 30
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    arrive(bench, net)
    say(bench, net, there, flags, up=up, seq=far, ack=77)
    assert (
        state(bench, net) & (FLAGS["FLOW_RESET"] | FLAGS["FLOW_DOUBTED"] | FLAGS["FLOW_PEER_FIN"])
        == (FLAGS["FLOW_PEER_FIN" if flags == "FA" else "FLOW_DOUBTED"])
    )
    if flags == "FA":
        say(bench, net, there, "FA", up=not up, seq=77, ack=far + 1)
        say(bench, net, there, "A", up=up, seq=far + 1, ack=78)
        assert bench.flow_count(net.family) == (0, 0)


@pytest.mark.parametrize("by_client", [True, False], ids=["the-client", "the-backend"])
@pytest.mark.parametrize("up", [True, False], ids=["from-the-client", "from-the-backend"])
def test_who_goes_on_was_not_reset(bench: Bench, net: Net, up: bool, by_client: bool) -> None:
    """Ahead of what was acknowledged it may be a guess: its receiver asks back (RFC 5961, 3.2)."""
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    say(bench, net, there, "R", up=up, seq=(CLIENT if up else BACKEND) + 1000)
    say(
        bench, net, there, "A", up=by_client, seq=CLIENT if by_client else BACKEND, ack=BACKEND if by_client else CLIENT
    )
    assert not state(bench, net) & FLAGS["FLOW_DOUBTED"]


def test_a_reset_is_judged_by_what_was_acknowledged_last(bench: Bench, net: Net) -> None:
    """The connection went on for a while: the numbers of its beginning are old."""
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    for step in range(1, 6):
        say(bench, net, there, "A", up=True, seq=CLIENT, ack=BACKEND + step * 100_000)
    say(bench, net, there, "R", up=False, seq=BACKEND)
    assert not state(bench, net) & FLAGS["FLOW_RESET"]
    say(bench, net, there, "R", up=False, seq=BACKEND + 500_000)
    assert state(bench, net) & FLAGS["FLOW_RESET"]


def test_a_reset_that_is_not_believed_lets_no_syn_begin_anew(bench: Bench, net: Net) -> None:
    bench.serve(web(net, 0))
    there = bench.open_tcp(net, net.vip)
    say(bench, net, there, "R", up=True, seq=CLIENT + (1 << 30))
    bench.serve(web(net, 0, 1))
    _, out = bench.ingress(frame(net, net.client, net.vip, syn(seq=77)))
    assert read(out).tuple == there.tuple
    say(bench, net, there, "PA", up=True, seq=CLIENT, ack=BACKEND)
    assert bench.flow_count(net.family) == (2, 0)


@pytest.mark.parametrize("ack", [1001, 1000, 1002, 0], ids=["right", "one-less", "one-more", "none"])
@pytest.mark.parametrize("flags", ["RA", "SA"])
def test_the_answer_to_a_syn_acknowledges_it(bench: Bench, net: Net, flags: str, ack: int) -> None:
    """A blind attacker does not know the number, and cannot blame the backend for a failure either."""
    bench.serve(web(net))
    there = read(bench.ingress(frame(net, net.client, net.vip, syn()))[1])
    back = frame(net, there.dst, there.src, segment(8080, 40000, flags, 5, ack), from_backend=True)
    assert bench.ingress(back) == (PASS, back)
    assert read(bench.egress(back)[1]).tuple == (net.vip, 80, net.client, 40000)
    flow = next(iter(bench.flows(net.family, "half_open").values()), None)
    flow = next(iter(bench.flows(net.family).values())) if flow is None else flow
    right = ack == 1001
    assert bool(int(flow["flags"]) & FLAGS["FLOW_REPLIED" if flags == "SA" else "FLOW_RESET"]) is right
    assert int(bench.store.backends["failures"].sum()) == (1 if right and flags == "RA" else 0)


def test_only_the_right_acknowledgement_establishes(bench: Bench, net: Net) -> None:
    """Who cannot see the backend's answer fills no table that nothing evicts."""
    bench.serve(web(net))
    there = read(bench.ingress(frame(net, net.client, net.vip, syn()))[1])
    back = frame(net, there.dst, there.src, segment(8080, 40000, "SA", 7000, 1001), from_backend=True)
    bench.egress(back)
    established = FLAGS["FLOW_ESTABLISHED"]
    bench.ingress(frame(net, net.client, net.vip, segment(40000, 80, "A", 1001, 123)))
    assert not state(bench, net) & established
    bench.ingress(frame(net, net.client, net.vip, segment(40000, 80, "A", 1001, 7001)))
    assert state(bench, net) & established


def test_a_client_that_begins_anew_before_it_was_answered_is_connected(bench: Bench, net: Net) -> None:
    """Its first attempt timed out at once, say; the second SYN has another number."""
    bench.serve(web(net))
    for number in (1000, 99_000):
        there = read(bench.ingress(frame(net, net.client, net.vip, syn(seq=number)))[1])
    back = frame(net, there.dst, there.src, segment(8080, 40000, "SA", 0, 99_001), from_backend=True)
    bench.egress(back)
    bench.ingress(frame(net, net.client, net.vip, segment(40000, 80, "A", 99_001, 1)))
    assert state(bench, net) & FLAGS["FLOW_ESTABLISHED"]


@pytest.mark.parametrize("up", [True, False], ids=["from-the-client", "from-the-backend"])
@pytest.mark.parametrize(("distance", "believed"), [(0, True), (1 << 20, True), (-2, False), (1 << 30, False)])
def test_a_fin_counts_where_it_can_be_the_senders(
    bench: Bench, net: Net, up: bool, distance: int, believed: bool
) -> None:
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    say(bench, net, there, "PA", up=False, seq=BACKEND, ack=CLIENT)
    say(bench, net, there, "FA", up=up, seq=(CLIENT if up else BACKEND) + distance, ack=BACKEND if up else CLIENT)
    assert bool(state(bench, net) & FLAGS["FLOW_PEER_FIN"]) is believed


@pytest.mark.parametrize("up", [True, False], ids=["of-the-client", "of-the-backend"])
def test_a_syn_on_a_half_closed_connection_is_its_backends(bench: Bench, net: Net, up: bool) -> None:
    """The other half may still be open: a forged SYN must not lead its packets elsewhere."""
    bench.serve(web(net, 0))
    there = bench.open_tcp(net, net.vip)
    say(bench, net, there, "FA", up=up, seq=CLIENT if up else BACKEND, ack=BACKEND if up else CLIENT)
    bench.serve(web(net, 0, 1))
    _, out = bench.ingress(frame(net, net.client, net.vip, syn(seq=77)))
    assert read(out).tuple == there.tuple
    say(bench, net, there, "PA", up=False, seq=BACKEND, ack=CLIENT + 1)
    assert bench.flow_count(net.family) == (2, 0)


def test_a_backend_that_accepts_a_syn_on_a_closing_flow_gets_a_whole_connection(bench: Bench, net: Net) -> None:
    """Its last segments were lost, it is in TIME_WAIT and takes the next connection of the same ports (RFC 6191)."""
    bench.serve(web(net))
    there = bench.open_tcp(net, net.vip)
    say(bench, net, there, "FA", up=False, seq=BACKEND, ack=CLIENT)
    say(bench, net, there, "FA", up=True, seq=CLIENT, ack=BACKEND)
    bench.ingress(frame(net, net.client, net.vip, syn(seq=500_000)))
    say(bench, net, there, "SA", up=False, seq=900_000, ack=500_001)
    ends = FLAGS["FLOW_FIN"] | FLAGS["FLOW_PEER_FIN"] | FLAGS["FLOW_FIN_ACKED"]
    assert not state(bench, net) & ends
    say(bench, net, there, "A", up=True, seq=500_001, ack=900_001)
    say(bench, net, there, "FA", up=True, seq=500_001, ack=900_001)
    say(bench, net, there, "FA", up=False, seq=900_001, ack=500_002)
    say(bench, net, there, "A", up=True, seq=500_002, ack=900_002)
    assert bench.flow_count(net.family) == (0, 0)


# --- a SYN on a connection whose backend serves no more


def ask_again(bench: Bench, net: Net, seconds: float) -> str:
    """Where a SYN goes, so long after the last one."""
    bench.age(net.family, bypassed_at=int(seconds * HZ))  # in an established flow this is `challenged_at`
    return read(bench.ingress(frame(net, net.client, net.vip, syn(seq=77)))[1]).dst


def test_a_backend_that_serves_no_more_is_asked_before_its_connection_is_given_up(bench: Bench, net: Net) -> None:
    bench.serve(web(net, 0))
    bench.open_tcp(net, net.vip)
    bench.serve(web(net, 1))
    assert [ask_again(bench, net, 1) for _ in range(3)] == [net.backends[0], net.backends[0], net.backends[1]]


@pytest.mark.parametrize("up", [True, False], ids=["the-client-goes-on", "the-backend-answers"])
def test_a_connection_that_lives_is_never_given_up(bench: Bench, net: Net, up: bool) -> None:
    bench.serve(web(net, 0))
    there = bench.open_tcp(net, net.vip)
    bench.serve(web(net, 1))
    for _ in range(5):
        assert ask_again(bench, net, 1) == net.backends[0]
        assert ask_again(bench, net, 1) == net.backends[0]
        say(bench, net, there, "A", up=up, seq=CLIENT if up else BACKEND, ack=BACKEND if up else CLIENT)


def test_copies_of_a_syn_are_one_question(bench: Bench, net: Net) -> None:
    bench.serve(web(net, 0))
    bench.open_tcp(net, net.vip)
    bench.serve(web(net, 1))
    assert {ask_again(bench, net, 0) for _ in range(20)} == {net.backends[0]}
