"""Every static row of the behaviour tables: one client, one address, what happens, and whom the backend sees."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable

import pytest

from hybrid_proxy.controller.semantics.explain import Explainer, Packet
from hybrid_proxy.dataplane.table import ServiceTable

from . import matrix
from .cases import CASES, CORE, Case
from .kit import PATIENCE, V4, Bench, Service
from .probes import QUIET, REFUSED, SILENT, Probe, Seen, To, observe, sight, volley
from .world import UNALLOCATED, World

ETH_P_ALL = 0x0003  # linux/if_ether.h
FAMILIES = {"v4": socket.AF_INET, "v6": socket.AF_INET6}


def _params() -> list[object]:
    """Cases whose rows are in one section of the tables, and by themselves those that a slow machine runs."""

    def about(case: Case) -> str:
        return "core" if case.name in CORE else case.section

    made: list[object] = []
    for name in sorted({about(case) for case in CASES}):
        marks = [pytest.mark.core] if name == "core" else []
        cases = tuple(case for case in CASES if about(case) == name)
        made += [pytest.param(cases, family, id=f"{name}-{words}", marks=marks) for words, family in FAMILIES.items()]
    return made


@pytest.fixture(scope="package")
def silences(world: World, mode: str) -> dict[tuple[str, int], Seen]:
    """Silence shows only after a time-out: all probes that should get no answer run at once and wait once."""
    asked = [(case, family) for case in CASES for family in FAMILIES.values() if case.wanted(mode) == SILENT]
    answers = volley(world.bench, [_probe(world, case, family) for case, family in asked for _ in range(2)], QUIET)
    replies = {
        (case.name, family): sight(world.bench, case.place, answers[2 * n : 2 * n + 2])
        for n, (case, family) in enumerate(asked)
    }
    return {key: seen for key, seen in replies.items() if seen.errors == {SILENT}}


@pytest.mark.parametrize(("cases", "family"), _params())
def test_rows(
    world: World,
    silences: dict[tuple[str, int], Seen],
    mode: str,
    cases: tuple[Case, ...],
    family: int,
    record_property: Callable[[str, object], None],
) -> None:
    wrong = []
    for case in cases:
        if (family == V4 and case.only6) or (family != V4 and case.only4):
            continue
        said = _wrong(world, silences.get((case.name, family)), mode, case, family)
        record_property(matrix.PROPERTY, (case.row, case.text, mode, "failed" if said else "passed"))
        wrong += [f"{case.name}, {case.text}: {said}"] * bool(said)
    assert not wrong, "\n".join(wrong)


def _wrong(world: World, silence: Seen | None, mode: str, case: Case, family: int) -> str:
    """What is not as it should be, in words; empty: nothing."""
    probe, want = _probe(world, case, family), case.wanted(mode)
    found = _explained(world.table, world.bench, case, probe)
    if _in_words(case, world.bench, family) not in (found, (*found[:2], None)):
        return f"explain says otherwise: {found}"
    seen = silence or observe(world.bench, probe, want)
    return "" if seen.is_(want, case.place) else f"want {want}, see {seen}"


def _probe(world: World, case: Case, family: int) -> Probe:
    service = world.services[case.service]
    kind = socket.SOCK_DGRAM if service.protocol == "UDP" else socket.SOCK_STREAM
    address, port = target_of(world.bench, service, case.kind, family)
    if case.address:
        address = case.address[family != V4]
    return Probe(case.place, (address, case.port or port), kind, case.bound[family != V4] if case.bound else "")


def target_of(bench: Bench, service: Service, kind: str, family: int) -> tuple[str, int]:
    """One of the addresses of a service."""
    match kind:
        case "cluster":
            return service.vip(family)
        case "external":
            return service.external_ip(family), service.port
        case "lb":
            return service.load_balancer_ip(family), service.port
        case "localhost":
            return "127.0.0.1" if family == V4 else "::1", service.node_port
    return bench.lab["node"].address(family), service.node_port


def _explained(table: ServiceTable, bench: Bench, case: Case, probe: Probe) -> tuple[str, frozenset[str], bool]:
    """What `explain` says about the case: verdict, addresses of the candidates, masquerade."""
    source = "::1" if probe.target[0] == "::1" else bench.lab[case.place].address(probe.family)
    source = "127.0.0.1" if probe.target[0] == "127.0.0.1" else probe.bound or source
    protocol = "udp" if probe.kind == socket.SOCK_DGRAM else "tcp"
    explained = Explainer(table).explain(Packet(case.name, source, *probe.target, protocol))
    candidates = frozenset(text.rpartition(":")[0].strip("[]") for text in explained.backends)
    return explained.verdict, candidates, explained.masquerade


def _in_words(case: Case, bench: Bench, family: int) -> tuple[str, frozenset[str], bool | None]:
    """The literal expectation in the words of `explain`; None: whose address is seen does not matter."""
    want = case.want
    if not isinstance(want, To):
        return {"refused": "reject", "silent": "drop"}[want], frozenset(), False
    if case.address:  # no backends: the host that has that address
        return "untouched", frozenset(), False
    candidates = frozenset(bench.lab[pod].address(family) for pod in want.pods)
    masquerade = want.peer == "node" or want.pods == {case.place}
    return "dnat", candidates, None if want.peer == "any" else masquerade


# What a probe cannot show: nothing leaves by the uplink, and what is no TCP or UDP


def uplink(bench: Bench) -> socket.socket:
    """Hears every frame at the node's side of the segment, in both directions (packet(7))."""
    with bench.lab.inside("node"):
        made = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
        made.bind(("eth0", ETH_P_ALL))
    made.setblocking(False)
    return made


def captured(listener: socket.socket, address: str, family: int) -> int:
    """How many frames with that destination passed so far."""
    packed, start = socket.inet_pton(family, address), 16 if family == V4 else 24
    found = 0
    with contextlib.suppress(BlockingIOError):
        while frame := listener.recv(2048):
            found += frame[start : start + len(packed)] == packed
    return found


@pytest.mark.row("2.21", "pods and the node reach outer addresses without leaving the node")
@pytest.mark.parametrize("place", ["pod1", "node"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_outer_addresses_are_reached_inside(world: World, mode: str, place: str, family: int) -> None:
    with uplink(world.bench) as listener:
        for kind in ("external", "lb"):
            target = target_of(world.bench, world.services["one"], kind, family)
            want = To(frozenset({"pod2"}), "node")
            assert observe(world.bench, Probe(place, target, socket.SOCK_STREAM), want).is_(want, place)
            assert captured(listener, target[0], family) == 0, f"packets for {target[0]} left the node"


@pytest.mark.core(cases=("v4 pod1", "v6 node"))
@pytest.mark.row("2.19", "what is sent to an address of no service does not leave the node")
@pytest.mark.parametrize("place", ["pod1", "node"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_unallocated_addresses_do_not_leave_the_node(world: World, mode: str, place: str, family: int) -> None:
    address = UNALLOCATED[family != V4]
    with uplink(world.bench) as listener:
        answers = volley(world.bench, [Probe(place, (address, 80), socket.SOCK_STREAM)], 0.2)
        assert answers == [SILENT]
        assert captured(listener, address, family) == 0


# Row 2.22: in ipvs the address is one of the node's own; elsewhere a ClusterIP has its ports alone.
PING = {"ipvs": "answered", "nftables": REFUSED, "iptables": REFUSED, "ebpf": REFUSED, "userspace": REFUSED}


@pytest.mark.row("2.22", "ping of a ClusterIP (per mode)")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_ping_of_a_cluster_ip(world: World, mode: str, family: int) -> None:
    address = world.services["web"].address(family)
    protocol, asked, answer = (1, 8, 0) if family == V4 else (58, 128, 129)  # RFC 792, RFC 4443
    with world.bench.lab.socket("pod1", family, socket.SOCK_RAW, protocol) as client:
        client.settimeout(QUIET * PATIENCE)
        client.connect((address, 0))
        client.send(struct.pack("!BBHHH", asked, 0, 0xFFFF - (asked << 8) - 77, 77, 0))  # the kernel sums ICMPv6
        try:
            data = client.recv(2048)
            outcome = "answered" if data[20 if family == V4 else 0] == answer else f"answered {data!r}"
        except ConnectionRefusedError:
            outcome = REFUSED
        except TimeoutError:
            outcome = SILENT
    assert outcome == PING[mode]


@pytest.mark.row("1.5", "SCTP associations begin at a backend, and its answer comes from the ClusterIP")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_sctp_is_translated_both_ways(world: World, mode: str, family: int) -> None:
    """Raw packets: conntrack follows INIT and INIT ACK (RFC 9260) whether or not this kernel has SCTP sockets."""
    service, lab = world.services["sctp"], world.bench.lab
    if mode == "userspace" and not relays_sctp():
        assert "SCTP" in limits(world.bench), "`status` does not say that the relay lacks SCTP sockets"
        return
    raw = (family, socket.SOCK_RAW, socket.IPPROTO_SCTP)
    with lab.socket("pod4", *raw) as backend, lab.socket("pod1", *raw) as client:
        backend.settimeout(1 * PATIENCE)
        client.settimeout(1 * PATIENCE)
        client.sendto(sctp_packet(34567, service.port, 0, kind=1), (service.address(family), 0))
        data, source = backend.recvfrom(2048)
        data = data[20:] if family == V4 else data
        assert struct.unpack_from("!HH", data) == (34567, service.target)
        assert source[0] == lab["pod1"].address(family)
        backend.sendto(sctp_packet(service.target, 34567, 7, kind=2), (source[0], 0))
        data, source = client.recvfrom(2048)
        data = data[20:] if family == V4 else data
        assert (source[0], *struct.unpack_from("!HH", data)) == (*service.vip(family), 34567)


def relays_sctp() -> bool:
    """Whether this kernel has SCTP sockets."""
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_SCTP).close()
    except OSError:
        return False
    return True


def limits(bench: Bench) -> str:
    """What the mode says that it cannot do."""
    status = bench.agent.running_status().dataplane
    return f"{status.warnings} {status.unprogrammed}"


def sctp_packet(source: int, target: int, tag: int, kind: int) -> bytes:
    """One INIT (1) or INIT ACK (2) chunk with initiate tag 7."""
    chunk = struct.pack("!BBHIIHHI", kind, 0, 20, 7, 65535, 1, 1, 1)
    head = struct.pack("!HHI", source, target, tag)
    return head + struct.pack("<I", crc32c(head + bytes(4) + chunk)) + chunk


def crc32c(data: bytes) -> int:
    """Castagnoli's CRC (RFC 9260, appendix A), bit by bit: a few packets are summed."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
