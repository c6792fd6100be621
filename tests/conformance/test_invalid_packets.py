"""2.18: a segment outside the window, of a connection that is translated, must not cost the connection.

Conntrack calls it INVALID and translates nothing of it, so the backend's own address leaves the node. A client that
gets it knows no such connection and answers with a reset, which the backend believes (kubernetes #74839).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from hybrid_proxy.workshop.lab.traffic import ask_tcp

from .kit import HTTP, Bench
from .packets import ACK, PUSH, RST, Header, Read, packet, read, segment
from .test_rows import target_of
from .world import World

ETH_P_ALL = 0x0003  # linux/if_ether.h
FAR = 1 << 29  # beyond any window that was offered here, and still ahead in the circle of sequence numbers


@contextmanager
def wire(bench: Bench, place: str) -> Iterator[Callable[[], Iterator[Read]]]:
    """Listen at the interface of a place (packet(7)): what it yields returns the segments since its last call."""
    with bench.lab.inside(place):
        listener = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
        listener.bind(("eth0", ETH_P_ALL))
    listener.setblocking(False)

    def captured() -> Iterator[Read]:
        with suppress(BlockingIOError):
            while frame := listener.recv(65536):
                one = read(frame)
                if one is not None and one.protocol == socket.IPPROTO_TCP:
                    yield one

    with listener:
        yield captured


def send_far_ahead(bench: Bench, place: str, last: Read, family: int) -> int:
    """Say again what was said last, but far outside the window; its sequence number."""
    header, sequence = Header(last.source[0], last.target[0]), (last.sequence + FAR) % (1 << 32)
    ports = last.source[1], last.target[1]
    content = segment(header, ports, sequence, last.acknowledged, ACK | PUSH, b"late")
    with bench.lab.socket(place, family, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        raw.sendto(packet(header, socket.IPPROTO_TCP, content), (last.target[0], 0))
    return sequence


# Where both ends are beyond the node. What is masqueraded comes back to the node itself, whose own reset not every mode
# spares the backend: a proxy that drops what is sent to the node would be a firewall.
WAYS = [("pod1", "one", "cluster"), ("client", "local", "lb")]


@pytest.mark.core(cases=("v4 pod1", "v6 client"))
@pytest.mark.row("2.18", "a segment outside the window resets no connection")
@pytest.mark.parametrize(("place", "name", "way"), WAYS, ids=["-".join(way) for way in WAYS])
def test_a_segment_outside_the_window_resets_nothing(
    world: World, mode: str, place: str, name: str, way: str, family: int
) -> None:
    bench, pod = world.bench, world.bench.lab["pod2"]
    target = target_of(bench, world.services[name], way, family)
    with wire(bench, "pod2") as captured, bench.connect(place, target, family) as connection:
        reply = ask_tcp(connection)
        assert reply.pod == "pod2"
        served = (pod.address(family), HTTP)
        last = next(s for s in reversed(list(captured())) if s.source == served and s.size)
        sequence = send_far_ahead(bench, "pod2", last, family)
        assert ask_tcp(connection).pod == "pod2"
        seen = list(captured())
    assert any(one.sequence == sequence for one in seen), "nothing was sent"
    resets = [one for one in seen if one.flags & RST and reply.peer in {one.source, one.target}]
    assert not resets, f"the backend got a reset: {resets}"
