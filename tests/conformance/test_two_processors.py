"""Packets of one new flow that two processors have at the same moment: there is one flow, and one backend."""

from __future__ import annotations

import itertools
import select
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from ipaddress import ip_interface

import pytest

from .at_once import inbox, send_at_once, two_processors
from .conftest import only_in
from .kit import V4, Bench, eventually
from .packets import Header, datagram, packet
from .test_rows import target_of

FLOWS, CLIENTS = 300, 200
PORT = 7011
BACKENDS = ("pod2", "pod3", "remote1")
FIRST_PORT = itertools.count(20_000, FLOWS)

pytestmark = [two_processors, only_in("ebpf")]


Address = tuple[str, int]


def small(source: Address, target: Address, text: str) -> bytes:
    header = Header(source[0], target[0])
    return packet(header, socket.IPPROTO_UDP, datagram(header, (source[1], target[1]), text.encode()))


Places = dict[int, list[tuple[str, Address]]]  # flow -> where its datagrams arrived: pod, and client seen there


def both_of(
    bench: Bench, place: str, way: str, family: int, spec: dict[str, object], sources: Sequence[Sequence[Address]]
) -> Places:
    """Where datagrams arrive that a place sends to a new service from these sources; those of a pair at once."""
    service = bench.service(*BACKENDS, protocol="UDP", port=53, target=PORT, outside=True, spec=spec, settle=False)
    target = target_of(bench, service, way, family)
    seen: Places = {number: [] for number in range(len(sources))}
    packets = [
        [small(source, target, str(number)) for number, source in enumerate(each)]
        for each in zip(*sources, strict=True)
    ]
    with ExitStack() as stack:
        servers = {pod: stack.enter_context(inbox(bench, pod, family, PORT)) for pod in BACKENDS}
        client = stack.enter_context(bench.socket(place, family, socket.SOCK_DGRAM))

        def arrives() -> bool:
            client.sendto(b"", target)
            return bool(select.select(servers.values(), (), (), 0.2)[0])

        eventually(arrives, 8, "nothing arrives at all")
        send_at_once(bench, place, (packets[0], packets[1]), target[0])
        for pod, each in servers.items():
            with suppress(TimeoutError):
                while True:
                    text, peer = each.recvfrom(100)
                    if text:
                        seen[int(text)].append((pod, peer[:2]))
    return seen


@pytest.mark.parametrize(("place", "way"), [("pod1", "cluster"), ("client", "nodeport")], ids=["pod1", "client"])
def test_the_first_two_datagrams_of_a_flow_reach_one_backend(bench: Bench, place: str, way: str, family: int) -> None:
    """In the modes that use conntrack, most of them do not: rules choose for each packet of a new connection."""
    address, first = bench.lab[place].address(family), next(FIRST_PORT)
    seen = both_of(bench, place, way, family, {}, [[(address, first + flow)] * 2 for flow in range(FLOWS)])
    lost = {flow: places for flow, places in seen.items() if len(places) < 2}
    moved = {flow: places for flow, places in seen.items() if len(set(places)) > 1}
    assert (lost, moved) == ({}, {}), f"of {FLOWS} flows {len(lost)} lost one, {len(moved)} have two places"


def test_the_first_two_flows_of_a_client_with_affinity_reach_one_backend(bench: Bench, family: int) -> None:
    network = ip_interface(f"{bench.lab['client'].address(family)}/{24 if family == V4 else 64}").network
    clients = [str(network[number]) for number in range(20, 20 + CLIENTS)]
    sources = [[(client, 7000), (client, 7001)] for client in clients]
    seen = both_of(bench, "client", "nodeport", family, {"sessionAffinity": "ClientIP"}, sources)
    moved = {flow: places for flow, places in seen.items() if len({pod for pod, _ in places}) > 1}
    arrived = sum(map(len, seen.values()))
    assert not moved, f"of {CLIENTS} clients {len(moved)} have two backends"
    assert arrived > CLIENTS, "some of these addresses may be other places', but not so many"
