"""Whatever bytes a pod sends: the programs answer pass, drop or redirect, and rewrite only what is whole."""

from __future__ import annotations

import errno

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import ICMPv6EchoRequest, ICMPv6PacketTooBig, IPv6, IPv6ExtHdrDestOpt
from scapy.packet import Raw

from hybrid_proxy.dataplane.kernel.bpf import BpfError
from hybrid_proxy.dataplane.table import Protocol
from tests.properties import examples

from .kit import DROP, NETS, PASS, REDIRECT, Bench, chunk, datagram, frame, service, syn

VERDICTS = {PASS, DROP, REDIRECT}
MANY = settings(
    max_examples=examples(300),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
REST = [Protocol.TCP, Protocol.UDP, Protocol.SCTP]


def samples() -> dict[str, bytes]:
    made = {}
    for family, net in NETS.items():
        inner = (IP if family == 4 else IPv6)(src=net.client, dst=net.backends[0]) / UDP(sport=40000, dport=8080)
        inner_up = (IP if family == 4 else IPv6)(src=net.vip, dst=net.client) / UDP(sport=80, dport=40000)
        too_big = ICMP(type=3, code=4) if family == 4 else ICMPv6PacketTooBig()
        echo = ICMP() if family == 4 else ICMPv6EchoRequest()
        extended = IPv6ExtHdrDestOpt() / syn() if family == 6 else TCP(dport=80, flags="S", options=[("NOP", None)] * 8)
        parts = {
            "tcp": syn(), "udp": datagram(dport=80), "sctp": chunk(dport=80), "closed": syn(dport=81),
            "closed-udp": datagram(dport=81), "echo": echo / Raw(bytes(8)), "extended": extended,
            "error-up": too_big / inner_up,
        }  # fmt: skip
        made |= {f"v{family}-{name}": frame(net, net.client, net.vip, part) for name, part in parts.items()}
        down = {"answer": UDP(sport=8080, dport=40000) / Raw(b"answer"), "error-down": too_big / inner}
        made |= {f"v{family}-{name}": frame(net, net.backends[0], net.client, part) for name, part in down.items()}
    return made


SAMPLES = samples()


@pytest.fixture
def served(bench: Bench) -> Bench:
    """Services of all protocols, and one flow of each."""
    entries = [
        service(net.vip, 80, [(net.backends[0], 8080)], protocol=protocol, name=f"default/web:{protocol.name}")
        for net in NETS.values()
        for protocol in REST
    ]
    bench.serve(*entries)
    for name in ("tcp", "udp", "sctp"):
        for family in (4, 6):
            bench.ingress(SAMPLES[f"v{family}-{name}"])
    return bench


def run(bench: Bench, packet: bytes) -> list[tuple[int, bytes]]:
    try:
        results = [bench.ingress(packet), bench.egress(packet)]
    except BpfError as error:  # the kernel runs nothing on a frame without a whole Ethernet header
        if error.code != errno.EINVAL:
            raise
        return []
    assert {verdict for verdict, _ in results} <= VERDICTS
    return results


@MANY
@given(st.binary(min_size=0, max_size=300))
def test_random_bytes(served: Bench, noise: bytes) -> None:
    for ethertype in (b"\x08\x00", b"\x86\xdd"):
        run(served, bytes(12) + ethertype + noise)
    run(served, noise)


@MANY
@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_damaged_packets(served: Bench, name: str, data: st.DataObject) -> None:
    """Bytes of a good packet overwritten; the program must stay within its three answers and its length."""
    packet = bytearray(SAMPLES[name])
    for _ in range(data.draw(st.integers(1, 6))):
        packet[data.draw(st.integers(14, len(packet) - 1))] = data.draw(st.integers(0, 255))
    for verdict, out in run(served, bytes(packet)):
        assert verdict == REDIRECT or len(out) == len(packet)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_cut_packet_is_never_rewritten(served: Bench, name: str) -> None:
    """Cut anywhere before the end of what is translated."""
    whole = SAMPLES[name]
    head = 14 + (40 if "v6" in name else 20)
    needed = {"tcp": 20, "closed": 20, "udp": 8, "closed-udp": 8, "sctp": 12, "echo": 8, "answer": 8,
              "extended": 28 if "v6" in name else 20,
              "error-up": 8 + head - 14 + 4, "error-down": 8 + head - 14 + 4}[name.partition("-")[2]]  # fmt: skip
    flows = served.flow_count(4), served.flow_count(6)
    for length in range(14, head + needed):
        for _, out in run(served, whole[:length]):
            assert out == whole[:length], f"cut at {length}"
    assert flows == (served.flow_count(4), served.flow_count(6))


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_whole_packets_are_translated_or_answered(served: Bench, name: str) -> None:
    """What the other tests here damage does mean something when it is whole."""
    assert any(out != SAMPLES[name] for _, out in run(served, SAMPLES[name]))
